"""Keys and usage of a service, kept beside its engines: records counted, the gateway's key file kept whole."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from potluck.control.state_store import StateStore, written
from potluck.core.errors import InputError, UnknownNameError

USAGE_FILE = "usage.jsonl"
PATTERN = "usage*.jsonl"
HOUR_S = 3600
AT_ONCE_BYTES = 4_000_000
"""Rows per transaction and per turn, which bounds the time that the controller is blocked."""
LONGEST_LINE = 100_000
IDS_H = 2  # How long ids are remembered, in hours of the records themselves.
NAMES = ("key", "tenant", "model", "class", "outcome")
FIGURES = ("prompt_tokens", "cached_tokens", "output_tokens")
ANSWERED = ("stop", "length")
SERVED = (*ANSWERED, "cancelled")
"""Outcomes of requests that something was computed for: only their tokens count, unless outcomes are asked for."""
PERIODS = {"hour": "hour", "day": "hour / 24"}
BEGIN = b'{"time":'
_NO_RECORD = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
_SUMS = ("requests", *FIGURES, "estimated")


@dataclass(frozen=True, slots=True)
class UsageRead:
    records: int = 0
    garbled: int = 0  # Lines that are no records; they count nowhere.
    more: bool = False


class UsageReader:
    """Over the files of one folder. Used from one thread; any number of processes may have one."""

    def __init__(self, store: StateStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._done: dict[str, tuple[int, int, int]] = {}

    def turn(self, most_bytes: int = AT_ONCE_BYTES) -> UsageRead:
        records = garbled = 0
        left = most_bytes
        for path in sorted(self._folder.glob(PATTERN)):
            try:
                stat = path.stat()
                stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if self._done.get(path.name) == stamp:
                    continue
                with path.open("rb") as file:
                    while left > 0:
                        usage_read, taken = self._take(file, path.name, min(left, AT_ONCE_BYTES))
                        if not taken:
                            self._done[path.name] = stamp
                            break
                        left -= taken
                        records, garbled = records + usage_read.records, garbled + usage_read.garbled
            except OSError:
                continue  # renamed or removed meanwhile; the next poll may find it
            if left <= 0:
                return UsageRead(records, garbled, True)
        return UsageRead(records, garbled)

    def _take(self, file: IO[bytes], name: str, most_bytes: int) -> tuple[UsageRead, int]:
        file.seek(0)
        first = file.readline(LONGEST_LINE)
        if not first.endswith(b"\n") and len(first) < LONGEST_LINE:
            return UsageRead(), 0
        mark = hashlib.sha256(first).hexdigest()[:32]
        with self._store.change() as db:
            row = db.execute("SELECT read_bytes, garbled FROM usage_files WHERE mark = ?", (mark,)).fetchone()
            begin, before = row or (0, 0)
            file.seek(begin)
            data = file.read(max(most_bytes, LONGEST_LINE))
            end = data.rfind(b"\n") + 1
            if not end and len(data) >= LONGEST_LINE:
                end = len(data)  # no line of ours is as long
            if not end:
                return UsageRead(), 0
            hours: list[int] = []

            def unseen(name: str, hour: int) -> bool:
                hours.append(hour)
                new = db.execute("INSERT OR IGNORE INTO usage_ids VALUES (?, ?)", (name, hour))
                return bool(new.rowcount)

            counts, records, garbled = counted(data[:end].splitlines(), unseen)
            if hours:
                db.execute("DELETE FROM usage_ids WHERE hour < ?", (max(hours) - IDS_H,))
            db.executemany(
                f"INSERT INTO usage (hour, {', '.join(NAMES)}, {', '.join(_SUMS)}) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                + ", ".join(f"{item} = {item} + excluded.{item}" for item in _SUMS),
                [(*of, *sums) for of, sums in counts],
            )
            db.execute(
                "INSERT OR REPLACE INTO usage_files (mark, name, read_bytes, garbled) VALUES (?, ?, ?, ?)",
                (mark, name, begin + end, before + garbled),
            )
        return UsageRead(records, garbled), end


def counted(
    lines: Iterable[bytes], first: Callable[[str, int], bool] = lambda name, hour: True
) -> tuple[list[tuple[tuple[Any, ...], tuple[int, ...]]], int, int]:
    """Usage summed by hour and names, the number of records, and the number of garbled pieces.

    `first` returns whether no record of this id and hour was counted before.
    """
    sums: dict[tuple[Any, ...], Counter[str]] = {}
    records = garbled = 0
    for piece in (piece for line in lines for piece in _pieces(line)):
        try:
            name, of, figures = _record(piece)
        except _NO_RECORD:
            garbled += 1
            continue
        if name and not first(name, of[0]):
            continue
        records += 1
        sums.setdefault(of, Counter()).update(figures)
    return [(of, tuple(counter[item] for item in _SUMS)) for of, counter in sums.items()], records, garbled


def _pieces(line: bytes) -> list[bytes]:
    """The records of a line: more than one if a record was torn and the next one was appended to it.

    BEGIN is never within a record: its strings have their quotation marks escaped.
    """
    before, *records = line.split(BEGIN)
    return [piece for piece in (before.strip(), *(BEGIN + record for record in records)) if piece]


def _record(line: bytes) -> tuple[str, tuple[Any, ...], dict[str, int]]:
    document = json.loads(line)
    hour = int(datetime.fromisoformat(document["time"]).timestamp() // HOUR_S)
    names = [document[name] for name in NAMES]
    figures = {name: document[name] for name in FIGURES}
    id = document.get("id", "")
    if not all(type(item) is str for item in (id, *names)):
        raise TypeError
    if not all(type(figure) is int and 0 <= figure < 1 << 40 for figure in figures.values()):
        raise ValueError
    return id, (hour, *names), {"requests": 1, **figures, "estimated": int(document["estimated"] is True)}


def used(
    store: StateStore, by: Sequence[str], since_s: float = 0.0, until_s: float | None = None
) -> list[dict[str, Any]]:
    """Sums over whole hours, one row for each combination of what is asked for, in its order. `by` has names and
    periods; tokens of requests that were refused count only where `outcome` is among them."""
    for item in by:
        if item not in (*NAMES, *PERIODS):
            raise InputError("--by", f"{item!r} is none of {', '.join((*PERIODS, *NAMES))}")
    listed = ", ".join(f"'{entry}'" for entry in SERVED)
    counts = "" if "outcome" in by else f" * (outcome IN ({listed}))"
    answered = ", ".join(f"'{entry}'" for entry in ANSWERED)
    columns = [
        *(f"{PERIODS.get(entry, entry)} AS {entry}_" for entry in by),
        "SUM(requests)",
        f"SUM(requests * (outcome IN ({answered})))",
        *(f"SUM({figure}{counts})" for figure in (*FIGURES, "estimated")),
    ]
    groups = ", ".join(f"{entry}_" for entry in by)
    rows = store.rows(
        f"SELECT {', '.join(columns)} FROM usage WHERE hour >= ? AND hour < ?"
        + (f" GROUP BY {groups} ORDER BY {groups}" if by else " HAVING COUNT(*) > 0"),
        int(since_s // HOUR_S),
        1 << 40 if until_s is None else -int(-until_s // HOUR_S),
    )
    names = (*by, "requests", "answered", *FIGURES, "estimated")
    return [{name: _shown(name, value) for name, value in zip(names, row, strict=True)} for row in rows]


def _shown(name: str, value: Any) -> Any:
    if name not in PERIODS:
        return value
    begin_s = value * HOUR_S * (24 if name == "day" else 1)
    return datetime.fromtimestamp(begin_s, UTC).strftime("%Y-%m-%d" if name == "day" else "%Y-%m-%dT%H:00Z")


USAGE_POLL_INTERVAL_S = 5.0
Note = Callable[[str, str, str], None]


class Accounts:
    """Made by the controller, which asks for a turn after each of its own. `clock` is the time of day."""

    def __init__(self, store: StateStore, folder: Path, note: Note, clock: Callable[[], float]) -> None:
        self._store, self._folder, self._note, self._clock = store, folder, note, clock
        self._reader = UsageReader(store, folder)
        self._next_s = 0.0

    def turn(self) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            return
        if not count(self._reader, self._note):
            self._next_s = now_s + USAGE_POLL_INTERVAL_S
        if publish_keys(self._store, self._folder, now_s):
            self._note("keys", f"{KEY_FILE} is as the state has it again", "it was changed by hand")


def count(reader: UsageReader, note: Note) -> bool:
    read = reader.turn()
    if read.garbled:
        note("usage", f"{read.garbled} lines are no records", "they count nowhere")
    return read.more


def count_all(store: StateStore, folder: Path, now_s: float) -> None:
    reader = UsageReader(store, folder)
    while count(reader, lambda *what: store.note(now_s, *what)):
        pass


KEY_FILE = "keys.jsonl"
HEADER = "# Made from state.db by `potluck keys`; what is written here by hand is lost.\n"
OPEN = json.dumps({"open": True}) + "\n"
OPEN_BESIDE = json.dumps({"open": "beside keys"}) + "\n"
OPENED = "keys open"  # The setting that lets clients without a key in although there are keys.
SHA256_BYTES = 32
_COLUMNS = "sha256, name, line, made_s, expires_s, revoked_s"


@dataclass(frozen=True, slots=True)
class KeptKey:
    """A key, without the key itself. Several may have one name: those that are being rotated out, and the new one."""

    sha256: str
    name: str
    line: Mapping[str, object]  # Tenant and limits, as a line of the gateway's file has them.
    made_s: float
    expires_s: float | None = None
    revoked_s: float | None = None

    @property
    def ends_s(self) -> float | None:
        values = [value for value in (self.expires_s, self.revoked_s) if value is not None]
        return min(values) if values else None

    def holds(self, now_s: float) -> bool:
        return self.ends_s is None or self.ends_s > now_s


def kept_keys(store: StateStore) -> tuple[KeptKey, ...]:
    return tuple(map(_key, store.rows(f"SELECT {_COLUMNS} FROM keys ORDER BY made_s, sha256")))


def is_open(store: StateStore) -> bool:
    return bool(store.get(OPENED)) or not kept_keys(store)


def set_open(store: StateStore, folder: Path, opened: bool, now_s: float) -> bool:
    """Let clients without a key in, or only those with one; whether that is a change."""
    if is_open(store) == opened:
        return False

    def change(db: sqlite3.Connection, known: tuple[KeptKey, ...]) -> None:
        if not opened and not any(kept_key.holds(now_s) for kept_key in known):
            raise InputError(
                "keys", "no key is valid, so all requests would be refused; run `potluck keys add NAME` first"
            )
        _open(db, opened)

    what = "clients without a key are let in" if opened else "every client needs a key"
    _changed(store, folder, now_s, change, what)
    return True


def add_key(store: StateStore, folder: Path, key: KeptKey) -> None:
    def change(db: sqlite3.Connection, known: tuple[KeptKey, ...]) -> None:
        if any(kept_key.name == key.name and kept_key.holds(key.made_s) for kept_key in known):
            raise InputError(key.name, "has a key already; `potluck keys rotate` or `revoke` it")
        _insert(db, key)
        _open(db, False)

    _changed(store, folder, key.made_s, change, f"{key.name} was added")


def rotate_key(
    store: StateStore, folder: Path, name: str, sha256: str, now_s: float, grace_s: float
) -> KeptKey:
    """Another key of the same name, tenant and limits; the ones before hold for a while longer."""
    made: list[KeptKey] = []

    def change(db: sqlite3.Connection, known: tuple[KeptKey, ...]) -> None:
        mine = [key for key in _named(name, known) if key.holds(now_s)]
        if not mine:
            raise InputError(name, "has no key that holds; `potluck keys add` makes one")
        last = mine[-1]
        for kept_key in mine:
            ends_s = min(now_s + grace_s, kept_key.ends_s or now_s + grace_s)
            db.execute("UPDATE keys SET expires_s = ? WHERE sha256 = ?", (ends_s, kept_key.sha256))
        made.append(replace(last, sha256=sha256, made_s=now_s))
        _insert(db, made[0])

    what = f"{name} was rotated; the key before holds for {grace_s / 3600:g} h"
    _changed(store, folder, now_s, change, what)
    return made[0]


def revoke_key(store: StateStore, folder: Path, name: str, now_s: float) -> int:
    """None of this name is let in any more; how many there were."""
    ended: list[str] = []

    def change(db: sqlite3.Connection, known: tuple[KeptKey, ...]) -> None:
        ended.extend(kept_key.sha256 for kept_key in _named(name, known) if kept_key.holds(now_s))
        if not ended:
            raise InputError(name, "has no key that holds")
        db.execute("UPDATE keys SET revoked_s = ? WHERE name = ? AND revoked_s IS NULL", (now_s, name))

    _changed(store, folder, now_s, change, f"{name} was revoked")
    return len(ended)


def publish_keys(store: StateStore, folder: Path, now_s: float) -> bool:
    """Make the gateway's file what the state says; whether it was another. A state that has no keys takes those of
    the file: one that was lost must not open what was closed."""
    path = folder / KEY_FILE
    before = path.read_text("utf-8", "replace") if path.is_file() else ""
    known = kept_keys(store)
    if before == _text(known, is_open(store)):
        return False
    with store.change() as db:
        for key in () if known else _listed(before, path, now_s):
            _insert(db, key)
            _open(db, OPEN_BESIDE.strip() in before.splitlines())
        written(path, _all_text(db))
    return True


Change = Callable[[sqlite3.Connection, tuple[KeptKey, ...]], None]


def _changed(store: StateStore, folder: Path, now_s: float, change: Change, what: str) -> None:
    with store.change() as db:
        change(db, _all(db))
        written(folder / KEY_FILE, _all_text(db))
    store.note(now_s, "keys", what, "by hand")


def _all(db: sqlite3.Connection) -> tuple[KeptKey, ...]:
    return tuple(map(_key, db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY made_s, sha256").fetchall()))


def _all_text(db: sqlite3.Connection) -> str:
    known = _all(db)
    opened = db.execute("SELECT 1 FROM settings WHERE name = ?", (OPENED,)).fetchone()
    return _text(known, not known or opened is not None)


def _open(db: sqlite3.Connection, opened: bool) -> None:
    db.execute("DELETE FROM settings WHERE name = ?", (OPENED,))
    if opened:
        db.execute("INSERT INTO settings (name, value) VALUES (?, 'true')", (OPENED,))


def _insert(db: sqlite3.Connection, key: KeptKey) -> None:
    row = (key.sha256, key.name, json.dumps(key.line), key.made_s, key.expires_s, key.revoked_s)
    db.execute(f"INSERT INTO keys ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", row)


def _named(name: str, known: tuple[KeptKey, ...]) -> list[KeptKey]:
    named = [kept_key for kept_key in known if kept_key.name == name]
    if not named:
        raise UnknownNameError("keys", name, [kept_key.name for kept_key in known])
    return named


def _text(keys: tuple[KeptKey, ...], opened: bool) -> str:
    """Of the gateway's file, in which keys of one name must have the same tenant and limits. Where all were revoked
    the last one stays, ended: an empty file would say nothing."""
    if not keys:
        return HEADER + OPEN
    newest = {key.name: key.line for key in keys}
    listed = [key for key in keys if key.revoked_s is None and key.line == newest[key.name]]
    return HEADER + (OPEN_BESIDE if opened else "") + "".join(map(_line, listed or keys[-1:]))


def _listed(text: str, path: Path, now_s: float) -> list[KeptKey]:
    listed = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line in (OPEN.strip(), OPEN_BESIDE.strip()):
            continue
        try:
            message = dict(json.loads(line))
            name, sha256, expires = message.pop("name"), message.pop("sha256"), message.pop("expires", None)
            ends_s = None if expires is None else datetime.fromisoformat(expires)
            if not isinstance(name, str) or len(bytes.fromhex(sha256)) != SHA256_BYTES:
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise InputError(
                f"{path}:{number}", "is no key, and the state has none; mend it, or move the file away"
            ) from None
        if ends_s is not None and ends_s.tzinfo is None:
            ends_s = ends_s.replace(tzinfo=UTC)
        listed.append(KeptKey(sha256, name, message, now_s, None if ends_s is None else ends_s.timestamp()))
    return listed


def _line(key: KeptKey) -> str:
    line = {"name": key.name, "sha256": key.sha256, **key.line}
    if key.ends_s is not None:
        line["expires"] = datetime.fromtimestamp(key.ends_s, UTC).isoformat(timespec="milliseconds")
    return json.dumps(line) + "\n"


def _key(row: tuple[str, str, str, float, float | None, float | None]) -> KeptKey:
    sha256, name, line, made_s, expires_s, revoked_s = row
    return KeptKey(sha256, name, json.loads(line), made_s, expires_s, revoked_s)

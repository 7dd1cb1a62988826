"""Who used what, by the hour: counted from the records that the gateway writes, each exactly once.

A file of records is known by its first line, whatever it is called: it is renamed when a day is over, and a copy is
the same file. How far it was read is kept in the transaction that counts what was read, so that it does not matter
who reads, how often, and who is killed meanwhile. A lost state is counted anew from the files that are there.

A record may be written twice, by a gateway that was killed and by the one that took its place: of one `id` the first
counts. Both are written within minutes, so that ids are remembered for the last hours alone.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from potluck.control.store.state_store import StateStore
from potluck.core.errors import InputError

USAGE_FILE = "usage.jsonl"
PATTERN = "usage*.jsonl"
HOUR_S = 3600
AT_ONCE_BYTES = 4_000_000
"""Of one transaction, and of one turn: whoever acts on the fleet must not be kept for long."""
LONGEST_LINE = 100_000
IDS_H = 2
"""How long ids are remembered, in hours of the records themselves."""
NAMES = ("key", "tenant", "model", "class", "outcome")
FIGURES = ("prompt_tokens", "cached_tokens", "output_tokens")
ANSWERED = ("stop", "length")
SERVED = (*ANSWERED, "cancelled")
"""Outcomes of requests that something was computed for: only their tokens count, unless outcomes are asked for."""
PERIODS = {"hour": "hour", "day": "hour / 24"}
BEGIN = b'{"time":'
"""Of every record."""
_NO_RECORD = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
_SUMS = ("requests", *FIGURES, "estimated")


@dataclass(frozen=True, slots=True)
class UsageRead:
    """What one look at the files found."""

    records: int = 0
    garbled: int = 0
    """Lines that are no records; they count nowhere."""
    more: bool = False
    """There is more to read than was read at once."""


class UsageReader:
    """Over the files of one folder. Used from one thread; any number of processes may have one."""

    def __init__(self, store: StateStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._done: dict[str, tuple[int, int, int]] = {}
        """Files that had nothing more, as they were then."""

    def turn(self, most_bytes: int = AT_ONCE_BYTES) -> UsageRead:
        """Count what is new, up to so many bytes of it."""
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
                        found, taken = self._take(file, path.name, min(left, AT_ONCE_BYTES))
                        if not taken:
                            self._done[path.name] = stamp
                            break
                        left -= taken
                        records, garbled = records + found.records, garbled + found.garbled
            except OSError:
                continue  # renamed or removed meanwhile; the next look finds it, or nobody does
            if left <= 0:
                return UsageRead(records, garbled, True)
        return UsageRead(records, garbled)

    def _take(self, file: IO[bytes], name: str, most_bytes: int) -> tuple[UsageRead, int]:
        """Count one piece of a file; how many bytes that was."""
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
                return bool(
                    db.execute("INSERT OR IGNORE INTO usage_ids VALUES (?, ?)", (name, hour)).rowcount
                )

            counts, records, garbled = counted(data[:end].splitlines(), unseen)
            if hours:
                db.execute("DELETE FROM usage_ids WHERE hour < ?", (max(hours) - IDS_H,))
            db.executemany(
                f"INSERT INTO usage (hour, {', '.join(NAMES)}, {', '.join(_SUMS)}) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                + ", ".join(f"{each} = {each} + excluded.{each}" for each in _SUMS),
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
    """What lines add up to, by hour and names; how many were records, and how many were none.

    `first` says whether a record of this id and hour has not been counted before.
    """
    sums: dict[tuple[Any, ...], Counter[str]] = {}
    records = garbled = 0
    for line in lines:
        try:
            name, of, figures = _record(line)
        except _NO_RECORD:
            garbled += bool(line.strip())
            behind = line.rfind(
                BEGIN
            )  # somebody was killed within a line, and another's record follows on it
            if behind <= 0:
                continue
            try:
                name, of, figures = _record(line[behind:])
            except _NO_RECORD:
                continue
        if name and not first(name, of[0]):
            continue
        records += 1
        sums.setdefault(of, Counter()).update(figures)
    return [(of, tuple(found[each] for each in _SUMS)) for of, found in sums.items()], records, garbled


def _record(line: bytes) -> tuple[str, tuple[Any, ...], dict[str, int]]:
    found = json.loads(line)
    hour = int(datetime.fromisoformat(found["time"]).timestamp() // HOUR_S)
    names = [found[name] for name in NAMES]
    figures = {name: found[name] for name in FIGURES}
    id = found.get("id", "")
    if not all(type(each) is str for each in (id, *names)):
        raise TypeError
    if not all(type(each) is int and 0 <= each < 1 << 40 for each in figures.values()):
        raise ValueError
    return id, (hour, *names), {"requests": 1, **figures, "estimated": int(found["estimated"] is True)}


def used(
    store: StateStore, by: Sequence[str], since_s: float = 0.0, until_s: float | None = None
) -> list[dict[str, Any]]:
    """Sums over whole hours, one row for each combination of what is asked for, in its order.

    `by` has names and periods; tokens of requests that were refused count only where `outcome` is among them.
    """
    for each in by:
        if each not in (*NAMES, *PERIODS):
            raise InputError("--by", f"{each!r} is none of {', '.join((*PERIODS, *NAMES))}")
    listed = ", ".join(f"'{each}'" for each in SERVED)
    counts = "" if "outcome" in by else f" * (outcome IN ({listed}))"
    answered = ", ".join(f"'{each}'" for each in ANSWERED)
    columns = [
        *(f"{PERIODS.get(each, each)} AS {each}_" for each in by),
        "SUM(requests)",
        f"SUM(requests * (outcome IN ({answered})))",
        *(f"SUM({each}{counts})" for each in (*FIGURES, "estimated")),
    ]
    groups = ", ".join(f"{each}_" for each in by)
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

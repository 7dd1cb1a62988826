"""Clients' keys: in the state as the gateway's file has them, with hashes only, and that file made from it.

The gateway reads its file alone, so that it serves without controller and state. The file is written inside the
transaction that changes the keys: whoever writes last has read last, and where it cannot be written no key changes.
Until the first key is added the file says that none is asked for; after that only while a person has opened it
(`set_open`), whatever is revoked or lost.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from potluck.control.atomic_files import written
from potluck.control.store.state_store import StateStore
from potluck.core.errors import InputError, UnknownNameError

KEY_FILE = "keys.jsonl"
HEADER = "# Made from state.db by `potluck keys`; what is written here by hand is lost.\n"
OPEN = json.dumps({"open": True}) + "\n"
OPEN_BESIDE = json.dumps({"open": "beside keys"}) + "\n"
OPENED = "keys open"
"""The setting that lets clients without a key in although there are keys."""
SHA256_BYTES = 32
_COLUMNS = "sha256, name, line, made_s, expires_s, revoked_s"


@dataclass(frozen=True, slots=True)
class KeptKey:
    """A key, without the key itself. Several may have one name: those that are being rotated out, and the new one."""

    sha256: str
    name: str
    line: Mapping[str, object]
    """Tenant and limits, as a line of the gateway's file has them."""
    made_s: float
    expires_s: float | None = None
    revoked_s: float | None = None

    @property
    def ends_s(self) -> float | None:
        found = [each for each in (self.expires_s, self.revoked_s) if each is not None]
        return min(found) if found else None

    def holds(self, now_s: float) -> bool:
        return self.ends_s is None or self.ends_s > now_s


def kept_keys(store: StateStore) -> tuple[KeptKey, ...]:
    """All that there ever were, the oldest first."""
    return tuple(map(_key, store.rows(f"SELECT {_COLUMNS} FROM keys ORDER BY made_s, sha256")))


def is_open(store: StateStore) -> bool:
    """Whether clients without a key are let in."""
    return bool(store.get(OPENED)) or not kept_keys(store)


def set_open(store: StateStore, folder: Path, opened: bool, now_s: float) -> bool:
    """Let clients without a key in, or only those with one; whether that is a change."""
    if is_open(store) == opened:
        return False

    def change(db: sqlite3.Connection, known: tuple[KeptKey, ...]) -> None:
        if not opened and not any(each.holds(now_s) for each in known):
            raise InputError("keys", "none holds, so that nobody could get in; `potluck keys add NAME` first")
        _open(db, opened)

    what = "clients without a key are let in" if opened else "every client needs a key"
    _changed(store, folder, now_s, change, what)
    return True


def add_key(store: StateStore, folder: Path, key: KeptKey) -> None:
    """From then on every client needs one."""

    def change(db: sqlite3.Connection, known: tuple[KeptKey, ...]) -> None:
        if any(each.name == key.name and each.holds(key.made_s) for each in known):
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
        mine = [each for each in _named(name, known) if each.holds(now_s)]
        if not mine:
            raise InputError(name, "has no key that holds; `potluck keys add` makes one")
        last = mine[-1]
        for each in mine:
            ends_s = min(now_s + grace_s, each.ends_s or now_s + grace_s)
            db.execute("UPDATE keys SET expires_s = ? WHERE sha256 = ?", (ends_s, each.sha256))
        made.append(replace(last, sha256=sha256, made_s=now_s))
        _insert(db, made[0])

    _changed(
        store, folder, now_s, change, f"{name} was rotated; the key before holds for {grace_s / 3600:g} h"
    )
    return made[0]


def revoke_key(store: StateStore, folder: Path, name: str, now_s: float) -> int:
    """None of this name is let in any more; how many there were."""
    ended: list[str] = []

    def change(db: sqlite3.Connection, known: tuple[KeptKey, ...]) -> None:
        ended.extend(each.sha256 for each in _named(name, known) if each.holds(now_s))
        if not ended:
            raise InputError(name, "has no key that holds")
        db.execute("UPDATE keys SET revoked_s = ? WHERE name = ? AND revoked_s IS NULL", (now_s, name))

    _changed(store, folder, now_s, change, f"{name} was revoked")
    return len(ended)


def publish_keys(store: StateStore, folder: Path, now_s: float) -> bool:
    """Make the gateway's file what the state says; whether it was another.

    A state that has no keys takes those of the file: one that was lost must not open what was closed.
    """
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


def _changed(
    store: StateStore,
    folder: Path,
    now_s: float,
    change: Callable[[sqlite3.Connection, tuple[KeptKey, ...]], None],
    what: str,
) -> None:
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
    found = [each for each in known if each.name == name]
    if not found:
        raise UnknownNameError("keys", name, [each.name for each in known])
    return found


def _text(keys: tuple[KeptKey, ...], opened: bool) -> str:
    """Of the gateway's file, in which keys of one name must have the same tenant and limits.

    Where all were revoked the last one stays, ended: an empty file would say nothing.
    """
    if not keys:
        return HEADER + OPEN
    newest = {each.name: each.line for each in keys}
    listed = [each for each in keys if each.revoked_s is None and each.line == newest[each.name]]
    return HEADER + (OPEN_BESIDE if opened else "") + "".join(_line(each) for each in listed or keys[-1:])


def _listed(text: str, path: Path, now_s: float) -> list[KeptKey]:
    """The keys of a file."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line in (OPEN.strip(), OPEN_BESIDE.strip()):
            continue
        try:
            said = dict(json.loads(line))
            name, sha256, expires = said.pop("name"), said.pop("sha256"), said.pop("expires", None)
            ends_s = None if expires is None else datetime.fromisoformat(expires)
            if not isinstance(name, str) or len(bytes.fromhex(sha256)) != SHA256_BYTES:
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise InputError(
                f"{path}:{number}", "is no key, and the state has none; mend it, or move the file away"
            ) from None
        if ends_s is not None and ends_s.tzinfo is None:
            ends_s = ends_s.replace(tzinfo=UTC)
        found.append(KeptKey(sha256, name, said, now_s, None if ends_s is None else ends_s.timestamp()))
    return found


def _line(key: KeptKey) -> str:
    line = {"name": key.name, "sha256": key.sha256, **key.line}
    if key.ends_s is not None:
        line["expires"] = datetime.fromtimestamp(key.ends_s, UTC).isoformat(timespec="milliseconds")
    return json.dumps(line) + "\n"


def _key(row: tuple[str, str, str, float, float | None, float | None]) -> KeptKey:
    sha256, name, line, made_s, expires_s, revoked_s = row
    return KeptKey(sha256, name, json.loads(line), made_s, expires_s, revoked_s)

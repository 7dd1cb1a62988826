"""The state file: plans, engines, what happened and why, rates of the past; keys and usage are in accounts.py.

One process acts (`Lease`), any may read; commands of operators add notes and plan versions. Every change is one
transaction, so that a controller that is killed at any instant leaves either the state before it or the one after.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from potluck.control.control_values import EngineInstance, EngineSpec
from potluck.core.codec import decode, encode
from potluck.core.errors import CapacityError, FormatError, InputError, PotluckError
from potluck.core.values.plan import Plan, mark_of, plan_from_json, plan_to_json


def written(path: Path, text: str) -> None:
    """A file with this text, readable by its owner alone; the one before stays where there is no room."""
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise CapacityError(
            f"{path} cannot be written ({error.strerror or error}); make room there, or name another --state"
        ) from error


_INSTANCE = ("name", "make", "state", "since_s", "url", "replica", "problem", "pinned")
BUSY_S = 5.0
MAX_EVENTS = 100_000
BATCH = 1_000


class StateError(PotluckError):
    """The state could not be read or written; the line says what to do."""


@dataclass(frozen=True, slots=True)
class PlanVersion:
    version: int
    at_s: float
    reason: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    id: int
    at_s: float
    kind: str
    what: str
    why: str


class StateStore:
    """One open state file. Times are seconds since 1970, so that they outlast the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marks: dict[int, str] = {}  # Plan version to its mark: versions never change.
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            path.chmod(0o600)
            with self.guarded():
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._db.execute("PRAGMA foreign_keys = ON")
                migrate(self._db, str(path))
        except OSError as error:
            raise InputError("--state", f"{path}: {error.strerror or error}") from error

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever SQLite says, in one line that says how to go on."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            line = " ".join(str(error).split())
            if "malformed" in line or "not a database" in line:
                aside = self.path.with_name("damaged")
                # All that belongs to it must go: what waits beside the old file would be written into the new one.
                raise StateError(
                    f"{self.path} is damaged ({line}); engines go on serving. Move it away "
                    f"(mkdir -p {aside} && mv {self.path}* {aside}/) and start again; keys and usage "
                    "come back from the files beside it"
                ) from error
            if "full" in line or "readonly" in line or "disk I/O" in line:
                raise StateError(
                    f"{self.path} cannot be written ({line}); make room and start again"
                ) from error
            if "locked" in line or "busy" in line:
                raise StateError(f"{self.path} is in use by another process ({line}); try again") from error
            raise StateError(f"{self.path}: {line}") from error

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        with self.guarded():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                if self._db.in_transaction:  # a full disk has ended it already
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self.guarded():
            return self._db.execute(query, values).fetchall()

    # Plans.

    def add_plan(self, plan: Plan, at_s: float, reason: str) -> int:
        with self.change() as db:
            row = db.execute(
                "INSERT INTO plans (at_s, reason, plan) VALUES (?, ?, ?)", (at_s, reason, plan_to_json(plan))
            )
            assert row.lastrowid is not None
            return row.lastrowid

    def forget_plan(self, version: int) -> None:
        with self.change() as db:
            db.execute("DELETE FROM plans WHERE version = ?", (version,))
        self._marks.pop(version, None)

    def versions(self, last: int = -1) -> tuple[tuple[int, str], ...]:
        """All versions, or the newest, each with its reason; the newest first."""
        return tuple(self.rows("SELECT version, reason FROM plans ORDER BY version DESC LIMIT ?", last))

    def plan(self, version: int | None = None) -> PlanVersion | None:
        query = "SELECT version, at_s, reason, plan FROM plans"
        if version is None:
            rows = self.rows(f"{query} ORDER BY version DESC LIMIT 1")
        else:
            rows = self.rows(f"{query} WHERE version = ?", version)
        return PlanVersion(*rows[0][:3], *map(plan_from_json, rows[0][3:])) if rows else None

    def plan_marks(self, last: int = 8) -> tuple[str, ...]:
        """Of the newest versions, the newest first: what a gateway calls the plan that it serves."""
        rows = self.rows("SELECT version FROM plans ORDER BY version DESC LIMIT ?", last)
        for (version,) in rows:
            if version not in self._marks:
                ((text,),) = self.rows("SELECT plan FROM plans WHERE version = ?", version)
                self._marks[version] = mark_of(text)
        return tuple(self._marks[version] for (version,) in rows)

    # Engines.

    def instances(self) -> tuple[EngineInstance, ...]:
        rows = self.rows(f"SELECT {', '.join(_INSTANCE)} FROM instances ORDER BY name")
        return tuple(map(_instance, rows))

    def places(self) -> dict[str, dict[str, Any]]:
        rows = self.rows("SELECT name, place FROM instances")
        return {name: json.loads(place or "{}") for name, place in rows}

    def put(self, instance: EngineInstance, place: dict[str, Any] | None = None) -> None:
        values: dict[str, Any] = {name: getattr(instance, name) for name in _INSTANCE}
        values["make"] = json.dumps(encode(instance.make))
        if place is not None:
            values["place"] = json.dumps(place)
        with self.change() as db:
            db.execute(
                f"INSERT INTO instances ({', '.join(values)}) VALUES ({', '.join('?' * len(values))}) "
                f"ON CONFLICT (name) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in values)}",
                (*values.values(),),
            )

    def remove(self, name: str) -> None:
        with self.change() as db:
            db.execute("DELETE FROM instances WHERE name = ?", (name,))

    # What happened.

    def note(self, at_s: float, kind: str, what: str, why: str) -> None:
        with self.change() as db:
            row = db.execute(
                "INSERT INTO events (at_s, kind, what, why) VALUES (?, ?, ?, ?)", (at_s, kind, what, why)
            )
            if row.lastrowid is not None and row.lastrowid % BATCH == 0:
                db.execute("DELETE FROM events WHERE id <= ?", (row.lastrowid - MAX_EVENTS,))

    def happenings(self, after: int = 0, most: int = BATCH) -> tuple[RecordedEvent, ...]:
        """The newest ones after a number, by their time: what others decided is often noted a moment later."""
        rows = self.rows(
            "SELECT id, at_s, kind, what, why FROM events WHERE id > ? ORDER BY id DESC LIMIT ?", after, most
        )
        return tuple(
            sorted(
                (RecordedEvent(*row) for row in rows),
                key=lambda recorded_event: (recorded_event.at_s, recorded_event.id),
            )
        )

    # Rates of the past, for forecasts.

    def add_rates(self, bin_number: int, rates_per_s: Iterable[tuple[str, float]]) -> None:
        with self.change() as db:
            db.executemany(
                "INSERT OR REPLACE INTO rates (model, bin, rate_per_s) VALUES (?, ?, ?)",
                [(model, bin_number, rate) for model, rate in rates_per_s],
            )

    def rates(self, model: str, last_bin: int, bins: int) -> tuple[float | None, ...]:
        """Of so many bins up to and with the last one; None for unobserved bins."""
        query = "SELECT bin, rate_per_s FROM rates WHERE model = ? AND bin > ? AND bin <= ?"
        rows = dict(self.rows(query, model, last_bin - bins, last_bin))
        return tuple(rows.get(index) for index in range(last_bin - bins + 1, last_bin + 1))

    def rated_models(self) -> tuple[str, ...]:
        return tuple(model for (model,) in self.rows("SELECT DISTINCT model FROM rates ORDER BY model"))

    # Few plain settings: addresses, changes by hand.

    def get(self, name: str) -> Any:
        rows = self.rows("SELECT value FROM settings WHERE name = ?", name)
        return json.loads(rows[0][0]) if rows else None

    def set(self, name: str, value: object) -> None:
        with self.change() as db:
            db.execute(
                "INSERT INTO settings (name, value) VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                (name, json.dumps(value)),
            )

    # The lease.

    def claim(self, holder: str, now_s: float, lasts_s: float) -> int | None:
        """Take or keep the lease: the number of this holder's turn, or None while another holder has it."""
        with self.change() as db:
            row = db.execute("SELECT holder, turn, until_s FROM lease WHERE id = 1").fetchone()
            if row is not None and row[0] != holder and row[2] > now_s:
                return None
            turn = 1 if row is None else cast(int, row[1]) + (row[0] != holder)
            db.execute(
                "INSERT OR REPLACE INTO lease (id, holder, turn, until_s) VALUES (1, ?, ?, ?)",
                (holder, turn, now_s + lasts_s),
            )
            return turn

    def holder(self) -> str | None:
        rows = self.rows("SELECT holder FROM lease WHERE id = 1")
        return str(rows[0][0]) if rows else None

    def release(self, holder: str) -> None:
        with self.change() as db:
            db.execute("UPDATE lease SET until_s = 0 WHERE id = 1 AND holder = ?", (holder,))


def _instance(row: tuple[Any, ...]) -> EngineInstance:
    values = dict(zip(_INSTANCE, row, strict=True))
    where = f"state: instance {values['name']}"
    try:
        values["make"] = decode(EngineSpec, json.loads(values["make"]), where)
    except ValueError as error:
        raise FormatError(where, "has a garbled make") from error
    return EngineInstance(**values | {"pinned": bool(values["pinned"])})


MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE plans (version INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL,
            reason TEXT NOT NULL, plan TEXT NOT NULL)""",
        """CREATE TABLE instances (name TEXT PRIMARY KEY, make TEXT NOT NULL, state TEXT NOT NULL,
            since_s REAL NOT NULL, url TEXT NOT NULL DEFAULT '', replica TEXT NOT NULL DEFAULT '',
            problem TEXT NOT NULL DEFAULT '', pinned INTEGER NOT NULL DEFAULT 0,
            place TEXT NOT NULL DEFAULT '')""",
        """CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL,
            kind TEXT NOT NULL, what TEXT NOT NULL, why TEXT NOT NULL)""",
        """CREATE TABLE rates (model TEXT NOT NULL, bin INTEGER NOT NULL, rate_per_s REAL NOT NULL,
            PRIMARY KEY (model, bin)) WITHOUT ROWID""",
        """CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID""",
        """CREATE TABLE lease (id INTEGER PRIMARY KEY CHECK (id = 1), holder TEXT NOT NULL,
            turn INTEGER NOT NULL, until_s REAL NOT NULL)""",
    ),
    (
        """CREATE TABLE keys (sha256 TEXT PRIMARY KEY, name TEXT NOT NULL, line TEXT NOT NULL,
            made_s REAL NOT NULL, expires_s REAL, revoked_s REAL) WITHOUT ROWID""",
        """CREATE TABLE usage (hour INTEGER NOT NULL, key TEXT NOT NULL, tenant TEXT NOT NULL,
            model TEXT NOT NULL, class TEXT NOT NULL, outcome TEXT NOT NULL, requests INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
            estimated INTEGER NOT NULL, PRIMARY KEY (hour, key, tenant, model, class,
            outcome)) WITHOUT ROWID""",
        """CREATE TABLE usage_files (mark TEXT PRIMARY KEY, name TEXT NOT NULL,
            read_bytes INTEGER NOT NULL, garbled INTEGER NOT NULL) WITHOUT ROWID""",
    ),
    (
        """CREATE TABLE usage_ids (id TEXT PRIMARY KEY, hour INTEGER NOT NULL) WITHOUT ROWID""",
        """CREATE INDEX usage_ids_by_hour ON usage_ids (hour)""",
    ),
)
VERSION = len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, where: str) -> None:
    """Bring a file to this release's version; one of a newer release is left alone."""
    (result,) = connection.execute("PRAGMA user_version").fetchone()
    if result > VERSION:
        raise FormatError(
            where,
            f"was written by a newer release (version {result}, this one knows {VERSION}); upgrade potluck",
        )
    for version, statements in enumerate(MIGRATIONS[result:], result + 1):
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            # Another process may have done it while this one waited.
            if connection.execute("PRAGMA user_version").fetchone()[0] >= version:
                continue
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version}")


CONTROLLER_LEASE_S = 6.0
ACT_S = 2.0  # So much of it must be left to begin something.


def gone(number: int) -> bool:
    """Whether no process has this number: then its former holder cannot act any more."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class Lease:
    """One controller's claim. `clock` is the time of day, which all who share the file share."""

    def __init__(
        self, store: StateStore, clock: Callable[[], float] = time.time, lasts_s: float = CONTROLLER_LEASE_S
    ) -> None:
        self._store, self._clock, self._lasts_s = store, clock, lasts_s
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._until_s = 0.0

    def renew(self) -> bool:
        """Take or keep the lease; False while another process has it."""
        now_s = self._clock()
        if self._store.claim(self.holder, now_s, self._lasts_s) is None:
            self._until_s = 0.0
            return False
        self._until_s = now_s + self._lasts_s
        return True

    def inherit(self) -> bool:
        """Take it at once where its holder was a local process that has ended."""
        holder = self._store.holder()
        if holder is not None and holder != self.holder:
            where, number = holder.rpartition("-")[0].rpartition("-")[::2]
            if where == socket.gethostname() and number.isdecimal() and gone(int(number)):
                self._store.release(holder)
        return self.renew()

    @property
    def held(self) -> bool:
        return self._until_s - self._clock() >= ACT_S

    def release(self) -> None:
        self._until_s = 0.0
        self._store.release(self.holder)

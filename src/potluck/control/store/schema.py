"""The tables of the state file. Each migration brings a file one version further; none is ever changed afterwards."""

from __future__ import annotations

import sqlite3

from potluck.core.errors import FormatError

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE plans (
            version INTEGER PRIMARY KEY AUTOINCREMENT,
            at_s REAL NOT NULL,
            reason TEXT NOT NULL,
            plan TEXT NOT NULL
        )""",
        """CREATE TABLE instances (
            name TEXT PRIMARY KEY,
            make TEXT NOT NULL,
            state TEXT NOT NULL,
            since_s REAL NOT NULL,
            url TEXT NOT NULL DEFAULT '',
            replica TEXT NOT NULL DEFAULT '',
            problem TEXT NOT NULL DEFAULT '',
            pinned INTEGER NOT NULL DEFAULT 0,
            place TEXT NOT NULL DEFAULT ''
        )""",
        """CREATE TABLE events (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            at_s REAL NOT NULL,
            kind TEXT NOT NULL,
            what TEXT NOT NULL,
            why TEXT NOT NULL
        )""",
        """CREATE TABLE rates (
            model TEXT NOT NULL,
            bin INTEGER NOT NULL,
            rate_per_s REAL NOT NULL,
            PRIMARY KEY (model, bin)
        ) WITHOUT ROWID""",
        """CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID""",
        """CREATE TABLE lease (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            holder TEXT NOT NULL,
            turn INTEGER NOT NULL,
            until_s REAL NOT NULL
        )""",
    ),
    (
        """CREATE TABLE keys (
            sha256 TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            line TEXT NOT NULL,
            made_s REAL NOT NULL,
            expires_s REAL,
            revoked_s REAL
        ) WITHOUT ROWID""",
        """CREATE TABLE usage (
            hour INTEGER NOT NULL,
            key TEXT NOT NULL,
            tenant TEXT NOT NULL,
            model TEXT NOT NULL,
            class TEXT NOT NULL,
            outcome TEXT NOT NULL,
            requests INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            output_tokens INTEGER NOT NULL,
            estimated INTEGER NOT NULL,
            PRIMARY KEY (hour, key, tenant, model, class, outcome)
        ) WITHOUT ROWID""",
        """CREATE TABLE usage_files (
            mark TEXT PRIMARY KEY,
            name TEXT NOT NULL,
            read_bytes INTEGER NOT NULL,
            garbled INTEGER NOT NULL
        ) WITHOUT ROWID""",
    ),
    (
        """CREATE TABLE usage_ids (id TEXT PRIMARY KEY, hour INTEGER NOT NULL) WITHOUT ROWID""",
        """CREATE INDEX usage_ids_by_hour ON usage_ids (hour)""",
    ),
)
VERSION = len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, where: str) -> None:
    """Bring a file to this release's version; one of a newer release is left alone."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > VERSION:
        raise FormatError(
            where,
            f"was written by a newer release (version {found}, this one knows {VERSION}); upgrade potluck",
        )
    for version, statements in enumerate(MIGRATIONS[found:], found + 1):
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            # Another process may have done it while this one waited.
            if connection.execute("PRAGMA user_version").fetchone()[0] >= version:
                continue
            for statement in statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {version}")

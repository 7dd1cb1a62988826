"""Keys and usage of a service, kept beside its engines: records counted, the gateway's key file kept whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from potluck.control.store.state_store import StateStore
from potluck.control.store.stored_keys import KEY_FILE, publish_keys
from potluck.control.store.stored_usage import UsageReader

LOOK_S = 5.0
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
            self._next_s = now_s + LOOK_S
        if publish_keys(self._store, self._folder, now_s):
            self._note("keys", f"{KEY_FILE} is as the state has it again", "somebody changed it by hand")


def count(reader: UsageReader, note: Note) -> bool:
    """Count what is new; whether there is more of it."""
    read = reader.turn()
    if read.garbled:
        note("usage", f"{read.garbled} lines are no records", "they count nowhere")
    return read.more


def count_all(store: StateStore, folder: Path, now_s: float) -> None:
    """Everything that was written until now, for whoever asks or ends."""
    reader = UsageReader(store, folder)
    while count(reader, lambda *what: store.note(now_s, *what)):
        pass

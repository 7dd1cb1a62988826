"""A gateway's process, started and started again; imports little, as clients wait when it is needed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from potluck.control.held_sockets import HeldSockets, hands_over, takeover_in
from potluck.control.launchers.process import ProcessId, alive, spawn
from potluck.control.store.state_store import StateStore

GATEWAY_MARK = "POTLUCK_GATEWAY"
LOOPBACK = "127.0.0.1"
FIRST_S = 15.0
LOOK_S = 0.05


def launched(
    folder: Path, command: list[str], place: Mapping[str, object], held: HeldSockets
) -> dict[str, object]:
    """A gateway's process, and what is written down of it."""
    files, said = held.passed()
    marks = {GATEWAY_MARK: str(folder.resolve()), **said}
    try:
        pid = spawn(command, marks, folder / "logs" / "gateway.log", files=files)
    finally:
        for each in files:
            os.close(each)
    return {**place, "pid": pid.number, "started": pid.started, "command": command}


def revive(folder: Path, held: HeldSockets) -> None:
    """Start the gateway again that the state names, where it is gone, and wait until it serves or has gone again."""
    if not (folder / "state.db").is_file():
        return
    store = StateStore(folder / "state.db")
    try:
        place = store.get("gateway") or {}
        command = place.get("command")
        if command and not alive(ProcessId(int(place["pid"]), int(place["started"]))):
            again = launched(folder, list(command), place, held)
            store.set("gateway", again)
            store.note(time.time(), "gateway", f"is started again at {again['url']}", "it was not there")
            until_s = time.monotonic() + FIRST_S
            pid = ProcessId(int(str(again["pid"])), int(str(again["started"])))
            while alive(pid) and not hands_over(takeover_in(folder)) and time.monotonic() < until_s:
                time.sleep(LOOK_S)
    finally:
        store.close()

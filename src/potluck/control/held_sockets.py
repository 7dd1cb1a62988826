"""The gateway's listening sockets, also held by the controller: connections queue while no gateway runs.

A controller gets them from the gateway over its takeover socket (`gateway/http/takeover.py`), and says nothing there,
so that the gateway goes on. It gives them to a gateway that it starts (LISTEN_FDS), and to its own supervisor, which
has them for the controller that comes after it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from potluck.control.launchers.process import ProcessId, alive, spawn
from potluck.core.errors import PotluckError

HIGH = 200  # Files are passed on by numbers from here on, in a row.
ANSWER_S = 2.0
MOST_BYTES, MOST_SOCKETS = 65_536, 64


class HeldSockets:
    def __init__(self) -> None:
        self.clients: list[socket.socket] = []
        self.operators: list[socket.socket] = []
        self.folder = ""  # The state of the service that they belong to.
        self.link: socket.socket | None = None

    def __bool__(self) -> bool:
        return bool(self.clients)

    def told(self, said: bytes, numbers: list[int]) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            document = json.loads(said)
            count, self.folder = int(document["clients"]), str(document.get("folder", self.folder))
            self.close()
            made = [socket.socket(fileno=number) for number in numbers]
            self.clients, self.operators = made[:count], made[count:]

    def fetch(self, path: Path) -> bool:
        """Take the sockets from a gateway that hands them over; returns whether one does."""
        with closing_link() as link:
            try:
                connect(link, path)
                text, numbers, _, _ = socket.recv_fds(link, MOST_BYTES, MOST_SOCKETS)
            except OSError:
                return False
        self.told(text, list(numbers))
        return bool(self)

    def give(self, folder: Path) -> None:
        """Pass the sockets to the supervisor, which restarts the controller and gives them to its successor."""
        self.folder = str(folder)
        if self.link is None:
            return
        text = json.dumps({"clients": len(self.clients), "folder": self.folder}).encode()
        files = [client.fileno() for client in (*self.clients, *self.operators)]
        with contextlib.suppress(OSError):
            socket.send_fds(self.link, [text], files)

    def passed(self) -> tuple[list[int], dict[str, str]]:
        """Files for a process that is started, and the variables by which it finds them; to be closed after that."""
        every = (*self.clients, *self.operators)
        if not every:
            return [], {}
        first = HIGH
        while any(_is_open(first + place) for place in range(len(every))):
            first += len(every)
        files = [fcntl.fcntl(item, fcntl.F_DUPFD, first + place) for place, item in enumerate(every)]
        names = ["clients"] * len(self.clients) + ["operators"] * len(self.operators)
        return files, {
            "LISTEN_FDS": str(len(files)),
            "LISTEN_FDNAMES": ":".join(names),
            "LISTEN_FDS_FIRST": str(first),
        }

    def close(self) -> None:
        for client in (*self.clients, *self.operators):
            client.close()
        self.clients, self.operators = [], []


def takeover_in(folder: Path) -> Path:
    return folder / "gateway.sock"


def hands_over(path: Path) -> bool:
    """Whether a gateway waits there for its successor."""
    with closing_link() as link:
        try:
            connect(link, path)
        except OSError:
            return False
    return True


def is_supervised(folder: Path) -> bool:
    """Whether the gateway that the state names runs, and one hands over there: that one, or its predecessor."""
    from potluck.control.state_store import StateStore

    if not hands_over(takeover_in(folder)):
        return False
    try:
        with contextlib.closing(StateStore(folder / "state.db")) as store:
            place = store.get("gateway") or {}
    except PotluckError:  # the controller reports it
        return True
    return "pid" in place and alive(ProcessId(int(place["pid"]), int(place["started"])))


def closing_link() -> contextlib.closing[socket.socket]:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(ANSWER_S)
    return contextlib.closing(link)


def connect(link: socket.socket, path: Path) -> None:
    """However long the path is: an address of such a socket has 107 bytes at most."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        link.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


GATEWAY_MARK = "POTLUCK_GATEWAY"
FIRST_S = 15.0
POLL_INTERVAL_S = 0.05


def launched(
    folder: Path, command: list[str], place: Mapping[str, object], held: HeldSockets
) -> dict[str, object]:
    files, texts = held.passed()
    marks = {GATEWAY_MARK: str(folder.resolve()), **texts}
    try:
        pid = spawn(command, marks, folder / "logs" / "gateway.log", files=files)
    finally:
        for file in files:
            os.close(file)
    return {**place, "pid": pid.number, "started": pid.started, "command": command}


def revive(folder: Path, held: HeldSockets) -> None:
    """Start the gateway again that the state names, where it is gone, and wait until it serves or has gone again."""
    from potluck.control.state_store import StateStore

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
                time.sleep(POLL_INTERVAL_S)
    finally:
        store.close()

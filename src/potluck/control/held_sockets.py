"""The gateway's listening sockets, held by whoever looks after it too: nobody is refused while no gateway runs.

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
from pathlib import Path

HIGH = 200
"""Files are passed on by numbers from here on, in a row."""
ANSWER_S = 2.0
MOST_BYTES, MOST_SOCKETS = 65_536, 64


class HeldSockets:
    """Some for clients, some for operators."""

    def __init__(self) -> None:
        self.clients: list[socket.socket] = []
        self.operators: list[socket.socket] = []
        self.folder = ""
        """The state of the service that they belong to."""
        self.link: socket.socket | None = None
        """To our supervisor, where there is one."""

    def __bool__(self) -> bool:
        return bool(self.clients)

    def told(self, said: bytes, numbers: list[int]) -> None:
        """By whoever has them."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(said)
            count, self.folder = int(told["clients"]), str(told.get("folder", self.folder))
            self.close()
            made = [socket.socket(fileno=number) for number in numbers]
            self.clients, self.operators = made[:count], made[count:]

    def fetch(self, path: Path) -> bool:
        """From the gateway that hands its ports over there; whether somebody does."""
        with closing_link() as link:
            try:
                connect(link, path)
                said, numbers, _, _ = socket.recv_fds(link, MOST_BYTES, MOST_SOCKETS)
            except OSError:
                return False
        self.told(said, list(numbers))
        return bool(self)

    def give(self, folder: Path) -> None:
        """To our supervisor: it is to bring us back from now on, and has them for whoever comes after us."""
        self.folder = str(folder)
        if self.link is None:
            return
        said = json.dumps({"clients": len(self.clients), "folder": self.folder}).encode()
        with contextlib.suppress(OSError):
            socket.send_fds(self.link, [said], [each.fileno() for each in (*self.clients, *self.operators)])

    def passed(self) -> tuple[list[int], dict[str, str]]:
        """Files for a process that is started, and the variables by which it finds them; to be closed after that."""
        every = (*self.clients, *self.operators)
        if not every:
            return [], {}
        first = HIGH
        while any(_is_open(first + place) for place in range(len(every))):
            first += len(every)
        files = [fcntl.fcntl(each, fcntl.F_DUPFD, first + place) for place, each in enumerate(every)]
        names = ["clients"] * len(self.clients) + ["operators"] * len(self.operators)
        return files, {
            "LISTEN_FDS": str(len(files)),
            "LISTEN_FDNAMES": ":".join(names),
            "LISTEN_FDS_FIRST": str(first),
        }

    def close(self) -> None:
        for each in (*self.clients, *self.operators):
            each.close()
        self.clients, self.operators = [], []


def takeover_in(folder: Path) -> Path:
    """Where the gateway of a state hands its ports over."""
    return folder / "gateway.sock"


def hands_over(path: Path) -> bool:
    """Whether a gateway waits there for its successor."""
    with closing_link() as link:
        try:
            connect(link, path)
        except OSError:
            return False
    return True


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

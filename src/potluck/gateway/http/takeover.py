"""A gateway hands its ports to the next one, so that no connection is refused while one takes the other's place.

    new ─▶ old    connects to a Unix socket that only their user can open
    old ─▶ new    the listening sockets of clients and operators: both processes accept waiting connections;
                  and which replicas and nodes are cordoned
    new ─▶ old    "serving", once it can answer: the old gateway accepts no more and ends after its open requests

A successor that dies before it serves changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.core.errors import InputError

FIELD = "--takeover"
SERVING = b"serving"
ANSWER_S = 5.0
MOST_SOCKETS = 64
MOST_BYTES = 65_536
LONGEST_ADDRESS = 100


@dataclass(frozen=True, slots=True)
class InheritedSockets:
    link: socket.socket
    clients: list[socket.socket]
    operators: list[socket.socket]
    cordons: tuple[str, ...] = ()

    def serving(self) -> None:
        with contextlib.suppress(OSError):  # it has ended by itself
            self.link.sendall(SERVING)
        self.link.close()


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of such a socket has 107 bytes at most; its folder may be deeper than that."""
    if len(os.fsencode(path)) <= LONGEST_ADDRESS:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def take_over(path: Path) -> InheritedSockets | None:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(ANSWER_S)
    try:
        with _short(path) as address:
            link.connect(address)
        text, numbers, _, _ = socket.recv_fds(link, MOST_BYTES, MOST_SOCKETS)
        document = json.loads(text)
        count, cordons = document["clients"], tuple(map(str, document.get("cordons", ())))
    except (FileNotFoundError, ConnectionRefusedError):
        link.close()
        return None
    except (OSError, ValueError, KeyError) as error:
        link.close()
        raise InputError(FIELD, f"{path} is no gateway's socket ({error})") from error
    sockets = [socket.socket(fileno=number) for number in numbers]
    return InheritedSockets(link, sockets[:count], sockets[count:], cordons)


class SocketHandover:
    def __init__(
        self,
        path: Path,
        clients: Sequence[socket.socket],
        operators: Sequence[socket.socket],
        handed: Callable[[], None],
        cordons: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._cordons = cordons
        self._path, self._on_handed = path, handed
        self.handed = False
        self._clients, self._operators = clients, operators
        self._loop = asyncio.get_running_loop()
        self._links: set[socket.socket] = set()
        self._inode = 0
        self._listener = socket.socket(socket.AF_UNIX)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            before = os.umask(0o177)
            try:
                fresh.unlink(missing_ok=True)
                with _short(fresh) as address:
                    self._listener.bind(address)
            finally:
                os.umask(before)
            self._listener.listen(4)
            self._inode = fresh.stat().st_ino
            fresh.replace(path)  # replaces the socket of the gateway before at once
        except OSError as error:
            self._listener.close()
            raise InputError(FIELD, f"{path} cannot be made ({error.strerror or error})") from error
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._came)

    def _came(self) -> None:
        try:
            link, _ = self._listener.accept()
            self._links.add(link)
            message = json.dumps({"clients": len(self._clients), "cordons": list(self._cordons())}).encode()
            sockets = [client.fileno() for client in (*self._clients, *self._operators)]
            socket.send_fds(link, [message], sockets)
            link.setblocking(False)
            self._loop.add_reader(link, self._told, link)
        except OSError:
            return  # it has gone again

    def _told(self, link: socket.socket) -> None:
        try:
            received = link.recv(64)
        except OSError:
            received = b""
        self._drop(link)
        if received == SERVING:
            self.handed = True
            self._on_handed()

    def _drop(self, link: socket.socket) -> None:
        self._loop.remove_reader(link)
        self._links.discard(link)
        link.close()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for link in tuple(self._links):
            self._drop(link)
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


FIRST = 3
OPERATORS = "operators"  # What such a socket is called (LISTEN_FDNAMES); others are for clients.


def inherited() -> tuple[list[socket.socket], list[socket.socket]]:
    """Listening sockets from the environment, for clients and for operators; child processes do not inherit them."""
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    first = os.environ.pop("LISTEN_FDS_FIRST", "")  # a controller of ours says from which number on
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if not count.isdigit() or (pid and pid != str(os.getpid())):
        return [], []
    clients: list[socket.socket] = []
    operators: list[socket.socket] = []
    for place in range(int(count)):
        made = socket.socket(fileno=(int(first) if first.isdigit() else FIRST) + place)
        made.set_inheritable(False)
        (operators if names[place : place + 1] == [OPERATORS] else clients).append(made)
    return clients, operators

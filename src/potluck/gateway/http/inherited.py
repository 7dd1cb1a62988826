"""Listening sockets that whoever started this process holds for it, as systemd passes them (LISTEN_FDS)."""

from __future__ import annotations

import os
import socket

FIRST = 3
OPERATORS = "operators"
"""What such a socket is called (LISTEN_FDNAMES); others are for clients."""


def inherited() -> tuple[list[socket.socket], list[socket.socket]]:
    """Those for clients and those for operators; taken once, and by nobody whom this process starts."""
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if not count.isdigit() or (pid and pid != str(os.getpid())):
        return [], []
    clients: list[socket.socket] = []
    operators: list[socket.socket] = []
    for place in range(int(count)):
        made = socket.socket(fileno=FIRST + place)
        made.set_inheritable(False)
        (operators if names[place : place + 1] == [OPERATORS] else clients).append(made)
    return clients, operators


def passed(clients: list[socket.socket], operators: list[socket.socket]) -> tuple[list[int], dict[str, str]]:
    """The files and variables with which a process finds them."""
    names = ["clients"] * len(clients) + [OPERATORS] * len(operators)
    files = [each.fileno() for each in (*clients, *operators)]
    return files, {"LISTEN_FDS": str(len(files)), "LISTEN_FDNAMES": ":".join(names)}

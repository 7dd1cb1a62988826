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

"""Listening sockets that outlive their process: copied, inherited, held by a supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from potluck.control.held_sockets import (
    MOST_BYTES,
    MOST_SOCKETS,
    HeldSockets,
    hands_over,
    revive,
    takeover_in,
)
from potluck.control.launchers.process import ProcessId, alive, started_at
from potluck.control.state_store import StateStore
from potluck.gateway.http.takeover import SocketHandover

PROBE = """
import json, sys
from potluck.gateway.http.takeover import inherited
clients, operators = inherited()
print(json.dumps([[each.getsockname()[1] for each in held] for held in (clients, operators)]))
"""


@pytest.fixture
def long_socket_folder(tmp_path: Path) -> Path:
    """A folder whose sockets have longer names than the system takes."""
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    return folder


def listening_socket() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_gateway_serves_on_while_its_listening_sockets_are_copied(long_socket_folder: Path) -> None:
    async def scenario() -> None:
        client, operator, handed = listening_socket(), listening_socket(), asyncio.Event()
        path, held = takeover_in(long_socket_folder), HeldSockets()
        assert not hands_over(path)
        assert not held.fetch(path)
        heritage = SocketHandover(path, [client], [operator], handed.set)
        assert await asyncio.to_thread(held.fetch, path)
        assert await asyncio.to_thread(hands_over, path)
        assert [item.getsockname() for item in (*held.clients, *held.operators)] == [
            client.getsockname(),
            operator.getsockname(),
        ]
        await asyncio.sleep(0.05)
        assert not handed.is_set(), "nobody took its place"
        heritage.close()
        at = client.getsockname()
        client.close()
        operator.close()
        socket.create_connection(at, timeout=10).close()  # whoever comes now waits, and is not refused
        held.close()
        with pytest.raises(OSError):
            socket.create_connection(at, timeout=10)

    asyncio.run(scenario())


def test_started_process_inherits_the_held_sockets() -> None:
    held = HeldSockets()
    held.clients, held.operators = [listening_socket(), listening_socket()], [listening_socket()]
    files, text = held.passed()
    try:
        out = subprocess.run(
            [sys.executable, "-c", PROBE],
            pass_fds=files,
            env={**os.environ, **text},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
    finally:
        for file in files:
            os.close(file)
    assert json.loads(out) == [
        [client.getsockname()[1] for client in held.clients],
        [operator.getsockname()[1] for operator in held.operators],
    ]
    held.close()
    for wrong in ({}, {"LISTEN_FDS": "2", "LISTEN_PID": "1"}, {"LISTEN_FDS": "x"}):
        out = subprocess.run(
            [sys.executable, "-c", PROBE], env={**os.environ, **wrong}, stdout=subprocess.PIPE, check=True
        ).stdout
        assert json.loads(out) == [[], []], "those are for somebody else"


def test_supervisor_holds_copies_of_the_sockets() -> None:
    mine, theirs = socket.socketpair()
    held, kept = HeldSockets(), HeldSockets()
    held.give(Path("/nobody"))  # without a supervisor nothing happens
    held.clients, held.link = [listening_socket()], theirs
    held.give(Path("/state"))
    text, numbers, _, _ = socket.recv_fds(mine, MOST_BYTES, MOST_SOCKETS)
    kept.told(text, list(numbers))
    assert (kept.folder, len(kept.clients), len(kept.operators)) == ("/state", 1, 0)
    assert kept.clients[0].getsockname() == held.clients[0].getsockname()
    for item in (held, kept, mine, theirs):
        item.close()


def test_lost_gateway_is_restarted_with_its_command_and_sockets(tmp_path: Path) -> None:
    held = HeldSockets()
    revive(tmp_path, held)  # of a state that is not there nothing is started
    assert not (tmp_path / "state.db").exists()
    held.clients = [listening_socket()]
    text = tmp_path / "said"
    command = [
        sys.executable,
        "-c",
        f"{PROBE.replace('print(', 'open(sys.argv[1], chr(119)).write(')}",
        str(text),
    ]
    place = {"pid": os.getpid(), "started": started_at(os.getpid()), "port": 1, "command": command}
    place |= {"url": "http://127.0.0.1:1", "admin": "http://127.0.0.1:2"}
    store = StateStore(tmp_path / "state.db")
    store.set("gateway", place)
    revive(tmp_path, held)
    assert store.get("gateway") == place, "it lives"
    store.set("gateway", {**place, "started": 1})
    revive(tmp_path, held)
    result = store.get("gateway")
    assert result is not None
    assert (result["port"], result["admin"], result["command"]) == (1, "http://127.0.0.1:2", command)
    assert not alive(ProcessId(result["pid"], result["started"])), "it is waited for until it serves or ends"
    assert json.loads(text.read_text()) == [[held.clients[0].getsockname()[1]], []]
    held.close()
    store.close()


SUPERVISOR = """
import os, sys
from pathlib import Path
from potluck.cli.supervisor import SUPERVISED, supervised
import socket, time

def run():
    if len(sys.argv) > 2 and not SUPERVISED.again:
        SUPERVISED.held.clients = [socket.create_server(("127.0.0.1", 0))]
        SUPERVISED.held.give(Path(sys.argv[1]))
    port = SUPERVISED.held.clients[0].getsockname()[1] if SUPERVISED.held else 0
    print(os.getpid(), SUPERVISED.again, port, flush=True)
    sys.stdin.readline()
    return 7

sys.exit(supervised(run))
"""


def start_supervisor(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def status_line(process: subprocess.Popen[str]) -> tuple[int, str, int]:
    assert process.stdout is not None
    pid, again, port = process.stdout.readline().split()
    return int(pid), again, int(port)


def exit_code(process: subprocess.Popen[str]) -> int:
    code = process.wait(60)
    for item in (process.stdin, process.stdout):
        assert item is not None
        item.close()
    return code


def test_killed_serving_command_is_restarted_with_its_sockets(tmp_path: Path) -> None:
    state = StateStore(tmp_path / "state.db")
    process = start_supervisor(str(tmp_path), "serves")
    pid, again, port = status_line(process)
    assert again == "False"
    os.kill(pid, 9)
    second, again, same = status_line(process)
    assert (again, same) == ("True", port)
    assert second != pid
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert exit_code(process) == 7, "it ended by itself"
    state.close()


def test_command_that_never_served_is_not_restarted(tmp_path: Path) -> None:
    process = start_supervisor(str(tmp_path))
    os.kill(status_line(process)[0], 9)
    assert exit_code(process) == 128 + 9


@pytest.mark.parametrize("number", [15, 2])
def test_command_gets_the_signals_of_its_supervisor(tmp_path: Path, number: int) -> None:
    process = start_supervisor(str(tmp_path), "serves")
    status_line(process)
    os.kill(process.pid, number)
    assert exit_code(process) != 7


def test_command_ends_with_its_supervisor(tmp_path: Path) -> None:
    process = start_supervisor(str(tmp_path), "serves")
    pid, _, _ = status_line(process)
    gone = threading.Event()

    def watch() -> None:
        watched = os.pidfd_open(pid)
        select.select([watched], [], [], 60)
        os.close(watched)
        gone.set()

    watching = threading.Thread(target=watch)
    watching.start()
    process.kill()
    assert gone.wait(60)
    watching.join()
    exit_code(process)

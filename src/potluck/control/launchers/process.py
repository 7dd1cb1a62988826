"""Processes of this machine: started so that they outlive us, recognised again, ended.

A process is known by its number and by when it started, as numbers are used again. Those that are started here carry
a mark in their environment, so that a controller that died between starting one and writing that down finds it.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from potluck.control.http_client import answers_well
from potluck.core.errors import CapacityError, InputError

PROC = Path("/proc")
START_FIELD = 19
"""Of /proc/PID/stat, counted behind the name in brackets: when it started, in ticks since the machine did."""
LARGEST_LOG_BYTES = 10_000_000
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG.


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, and no other that gets its number later."""

    number: int
    started: int


def spawn(
    command: Sequence[str],
    marks: Mapping[str, str],
    log: Path,
    *,
    with_us: bool = False,
    files: Sequence[int] = (),
) -> ProcessId:
    """Start a process in a session of its own; what it prints goes to the end of a file.
    It outlives us, unless it is to end `with_us`; it gets these `files` of ours."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise CapacityError(f"{log} cannot be written ({error.strerror or error})") from error
    try:
        made = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **marks},
            start_new_session=True,
            close_fds=True,
            pass_fds=files,
            preexec_fn=_end_with_parent if with_us else None,
        )
    except OSError as error:
        raise CapacityError(f"{command[0]} could not be started ({error.strerror or error})") from error
    finally:
        os.close(out)
    # Whether it lives is read from /proc, also by those who are not its parent; so it is not waited for here.
    made.returncode = 0
    return ProcessId(made.pid, started_at(made.pid) or 0)


def _end_with_parent() -> None:
    """Where the system can do that (Linux): killed when the thread that started it is no more."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    with suppress(OSError):  # Ray's own processes stand back behind all others; an engine must not
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _stat(number: int) -> list[str]:
    """What /proc says of a process, from its state on; nothing where it is gone."""
    try:
        text = (PROC / str(number) / "stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def started_at(number: int) -> int | None:
    """When a process started; None when there is none, or only what is left of one."""
    fields = _stat(number)
    return None if not fields or fields[0] in ("Z", "X") else int(fields[START_FIELD])


def is_hung(pid: ProcessId) -> bool:
    return _stat(pid.number)[:1] == ["T"]


def parent_of(pid: ProcessId) -> int:
    fields = _stat(pid.number)
    return int(fields[1]) if fields else 0


def title_of(pid: ProcessId) -> str:
    try:
        return (PROC / str(pid.number) / "comm").read_text().strip()
    except OSError:
        return ""


def alive(pid: ProcessId) -> bool:
    _reap(pid.number)
    return started_at(pid.number) == pid.started


def _reap(number: int) -> None:
    """Reap ended children, which are zombies until then."""
    try:
        os.waitpid(number, os.WNOHANG)
    except (ChildProcessError, OSError):
        return


def end(pid: ProcessId, *, insist: bool = False) -> None:
    """Ask a process to end, or make it; its own children too, as it has a session of its own."""
    if not alive(pid):
        return
    try:
        if insist:  # that ends one that was stopped as well
            os.killpg(pid.number, signal.SIGKILL)
        else:
            os.kill(pid.number, signal.SIGCONT)
            os.kill(pid.number, signal.SIGTERM)
    except (ProcessLookupError, PermissionError):
        return


def marked(name: str, value: str) -> Iterator[tuple[ProcessId, dict[str, str]]]:
    """Processes of ours whose environment has this, each with all of its own."""
    wanted = f"{name}={value}".encode()
    for folder in PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted not in variables:
            continue
        started = started_at(int(folder.name))
        # Only the first of a session was started by us; the others are its children.
        if started is None or os.getsid(int(folder.name)) != int(folder.name):
            continue
        texts = (variable.decode("utf-8", "replace") for variable in variables if b"=" in variable)
        pairs = (text.partition("=") for text in texts)
        yield ProcessId(int(folder.name), started), {key: text for key, _, text in pairs}


def last_words(log: Path, most: int = 2000) -> str:
    lines = last_lines(log, 1, most)
    return " ".join(lines[-1].split()).removeprefix("potluck: error: ")[:300] if lines else ""


def last_lines(log: Path, count: int, most_bytes: int = 8000) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
            return file.read().decode("utf-8", "replace").strip().splitlines()[-count:]
    except OSError:
        return []


def rotate(log: Path, largest_bytes: int = LARGEST_LOG_BYTES) -> None:
    """Keep a log from growing for ever: its contents go to NAME.1, and the writer continues at its start."""
    try:
        if log.stat().st_size <= largest_bytes:
            return
        with log.open("rb+") as file:
            (log.with_name(f"{log.name}.1")).write_bytes(file.read())
            file.truncate(0)
    except OSError:
        return


REQUEST_TIMEOUT_S = 1.0
LEASE_S = 900.0  # In which the new owner of a port listens on it: vLLM loads weights first.
TRIES = 50
FIRST_PORT = 10_000
GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOOPBACK = "127.0.0.1"


def own_ports(given_out: Path = GIVEN_OUT) -> range:
    """Ports below the system's ephemeral range; all ports where that range is nearly everything."""
    try:
        lowest = int(given_out.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = 32_768
    return range(FIRST_PORT, lowest if lowest >= 2 * FIRST_PORT else 1 << 16)


class Ports:
    """Gives no port to two who do not listen yet, and none that the system may give to another until then."""

    def __init__(self, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._clock, self._own = host, clock, own_ports()
        self._leased: dict[int, float] = {}

    def free(self, count: int = 1) -> int:
        """A port that is free and was not assigned lately; the first of `count` in a row."""
        now_s = self._clock()
        self._leased = {port: until_s for port, until_s in self._leased.items() if until_s > now_s}
        for _ in range(TRIES):
            port = random.choice(self._own[: 1 - count or None])
            row = range(port, port + count)
            if not any(number in self._leased for number in row) and all(map(self._is_free, row)):
                self._leased |= dict.fromkeys(row, now_s + LEASE_S)
                return port
        raise CapacityError("no port is free on this machine")

    def _is_free(self, port: int) -> bool:
        with socket.socket() as probe:
            try:
                probe.bind((self._host, port))
            except (OSError, OverflowError):
                return False
        return True


def taken(port: int) -> str:
    """Why a loopback port cannot be listened on; empty where it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""


def require_free_port(port: int) -> None:
    if why := taken(port):
        raise InputError("--port", f"{port} cannot be used ({why}); say another, or 0 for a free one")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return cast(int, probe.getsockname()[1])


def next_free(first: int) -> int:
    """This port, or the next free one; any free port where the next ones are taken."""
    return next((port for port in range(first, first + TRIES) if not taken(port)), None) or free_port()


def healthy(url: str, within_s: float = REQUEST_TIMEOUT_S, authority: str = "") -> bool:
    return answers_well(url, "/health", within_s, authority)

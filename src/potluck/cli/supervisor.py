"""The first process of `potluck up`: it forks the command, and again when that is killed. It imports next to nothing.

The command is the controller. Gateway and engines outlive it; this process brings it back, keeps its sockets
meanwhile, and has the gateway started should that die before the controller is back. A command that ends by itself,
or that is killed before it served, has ended. Should this process die, the command dies with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from potluck.control.held_sockets import (
    MOST_BYTES,
    MOST_SOCKETS,
    HeldSockets,
    hands_over,
    is_supervised,
    takeover_in,
)
from potluck.core.errors import PotluckError

AGAIN_S = (0.0, 0.2, 1.0)  # Before it is started again: the longer, the sooner it was killed.
STEADY_S = 3.0
POLL_INTERVAL_S = 0.1
FIRST_S = 5.0
"""So long a controller that comes back leaves the cores to a gateway that starts: clients wait for that one."""
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG.
FORWARDED = (signal.SIGINT, signal.SIGTERM)


class Supervised:
    """In the command's process: what it has of its supervisor; without one there is nothing."""

    def __init__(self) -> None:
        self.again = False  # Whether an earlier one was killed after it served.
        self.held = HeldSockets()


SUPERVISED = Supervised()


def supervised(run: Callable[[], int]) -> int:
    """The code with which `run` ends, in the end."""
    supervisor, tries = _Supervisor(), 0
    while True:
        began_s, parent = time.monotonic(), os.getpid()
        mine, theirs = socket.socketpair()
        pid = _forked()
        if not pid:
            mine.close()
            _be_command(parent, theirs, supervisor.held, again=tries > 0)
            return run()
        theirs.close()
        code = supervisor.waited(pid, mine, again=tries > 0)
        mine.close()
        if code >= 0 or supervisor.ending or not supervisor.held:
            return code if code >= 0 else 128 - code
        tries = 1 if time.monotonic() - began_s > STEADY_S else tries + 1
        print("potluck: the controller was killed; it is started again", file=sys.stderr, flush=True)
        time.sleep(AGAIN_S[min(tries, len(AGAIN_S)) - 1])


def _forked() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return pid


def _be_command(parent: int, link: socket.socket, held: HeldSockets, *, again: bool) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that could be asked for
        os._exit(1)
    SUPERVISED.again, SUPERVISED.held, held.link = again, held, link
    until_s = time.monotonic() + FIRST_S
    while again and time.monotonic() < until_s and not is_supervised(Path(held.folder)):
        time.sleep(POLL_INTERVAL_S)


class _Supervisor:
    def __init__(self) -> None:
        self.held = HeldSockets()
        self.ending = False  # Whether it was told to stop.
        self._reviver = 0
        self._woken, self._wake = socket.socketpair()
        for item in (self._woken, self._wake):
            item.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, _noted)

    def waited(self, pid: int, link: socket.socket, *, again: bool) -> int:
        """The command's code once it has ended. One started `again` leaves the gateway alone until it says so."""
        listened, alone = [self._woken, link], again
        first = True
        while True:
            if alone:
                self._revive(look=not first)
                first = False
            ready, _, _ = select.select(listened, [], [], POLL_INTERVAL_S if alone else None)
            if link in ready:
                text, numbers, _, _ = socket.recv_fds(link, MOST_BYTES, MOST_SOCKETS)
                if numbers:
                    self.held.told(text, list(numbers))
                    alone = False
                elif not text:
                    listened = [self._woken]
            if self._woken in ready:
                self._pass_on(self._woken.recv(4096), pid)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)

    def _pass_on(self, numbers: bytes, pid: int) -> None:
        """Ctrl-C is heard by both, as they are of one group: what was sent to this process alone is passed on."""
        for number in numbers:
            if number in FORWARDED:
                self.ending = True
                if number == signal.SIGTERM or not _in_front():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

    def _revive(self, look: bool) -> None:
        """Have the gateway started, unless it runs or is being started. The `look` whether one answers does not
        show that its supervisor was killed: the process that answers may outlive it, and needs a successor."""
        if self._reviver:
            if not os.waitpid(self._reviver, os.WNOHANG)[0]:
                return
            self._reviver = 0
        folder = Path(self.held.folder)
        if look and hands_over(takeover_in(folder)):
            return
        self._reviver = _forked()
        if self._reviver:
            return
        try:  # in a process of its own, so that this one stays small
            from potluck.control.held_sockets import revive

            revive(folder, self.held)
        except (PotluckError, OSError) as error:  # the controller will say it better
            print(f"potluck: the gateway: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(0)


def _noted(number: int, frame: object) -> None:
    """Only to be woken: the number is read from the wakeup socket."""


def _in_front() -> bool:
    """Whether Ctrl-C reaches this process: its group is the one in front of a terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False

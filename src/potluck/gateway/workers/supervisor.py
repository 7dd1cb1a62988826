"""The supervisor, the first process of every gateway: it forks the others, and again when they die.

    parent ─┬─ Brain: the Brain, the fleet, the log, the operators' port; with one worker, clients as well
            └─ workers, where there are several: clients; each has a line to the Brain

It holds what must outlive them: the listening sockets, so that nobody is refused while one is replaced, the socket
that workers call, a directory. A successor hears from the workers what is under way. Should the parent die, the
Brain ends, and the workers with it; one whose ports can be taken over serves until a successor does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.core.errors import PotluckError
from potluck.gateway.http.limits import calm
from potluck.gateway.http.server import bound
from potluck.gateway.http.takeover import InheritedSockets, inherited, take_over
from potluck.gateway.values import ListenAddresses
from potluck.gateway.workers import worker_process
from potluck.gateway.workers.worker import WorkerContext

AGAIN_S = (0.0, 0.2, 1.0)
"""Before one is started again that did not come to serve: the longer, the more often."""
LOOK_S = 0.5  # How often children are looked after when no signal tells of them.
LEAVE_S = 1.0
BACKLOG = 128
SERVES, FOLLOWED = b"+", b"-"
"""What a child tells: that it serves; that another gateway has its ports, so that nobody is to take its place."""

log = logging.getLogger(__name__)


@dataclass
class BrainProcessContext:
    home: Path
    brain_loop: socket.socket
    clients: Sequence[Sequence[socket.socket]]
    operators: Sequence[socket.socket] = ()
    life: int = -1
    again: bool = False
    taken: InheritedSockets | None = None
    orphaned: bool = False
    tell: Callable[[bytes], None] = lambda said: None

    def close(self) -> None:
        for operator in (self.brain_loop, *self.operators, *(item for held in self.clients for item in held)):
            operator.close()
        shutil.rmtree(self.home, ignore_errors=True)


async def make_post(addresses: ListenAddresses, takeover: Path | None = None) -> BrainProcessContext:
    """Ports that another gateway hands over, that whoever started this one holds, or that are opened here."""
    taken = None if takeover is None else take_over(takeover)
    held, operators = inherited()
    if taken is not None:
        for item in (*held, *operators):
            item.close()
        held, operators = taken.clients, taken.operators
    operators = operators or await bound(addresses.admin_host, addresses.admin_port)
    clients, port = [], addresses.port
    for _ in range(addresses.workers):
        mine = held or await bound(addresses.host, port, shared=addresses.workers > 1)
        port = mine[0].getsockname()[1]
        clients.append(mine)
    home = Path(tempfile.mkdtemp(prefix="potluck-"))
    brain_loop = socket.socket(socket.AF_UNIX)
    brain_loop.bind(str(home / worker_process.BRAIN))
    brain_loop.listen(BACKLOG)
    return BrainProcessContext(home, brain_loop, clients, operators, taken=taken)


class SupervisedProcess:
    """A process that is started again whenever it dies: a fork that does `run`, given whom to tell how it is."""

    def __init__(self, name: str, run: Callable[[Callable[[bytes], None]], None]) -> None:
        self.name, self._run = name, run
        self.pid = 0
        self.said = b""
        self._said = -1
        self._due_s = 0.0
        self._tries = 0

    def look(self, now_s: float) -> int | None:
        """Start it when it is time to; its code if it has just ended."""
        if not self.pid:
            if now_s >= self._due_s:
                self._fork()
            return None
        code = self.ended()
        if code is None:
            return None
        if SERVES in self.said:  # Clients wait for another, at once.
            self._tries = 0
        self._due_s = now_s + AGAIN_S[min(self._tries, len(AGAIN_S) - 1)]
        self._tries += 1
        if code == 0 or FOLLOWED in self.said:
            return 0
        log.error("%s ended with %s; another one takes its place", self.name, code)
        return code

    def ended(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.pid = 0
        self.said = os.read(self._said, 4096)
        os.close(self._said)
        return os.waitstatus_to_exitcode(status)

    def _fork(self) -> None:
        self._said, say = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            os.close(say)
            return
        code = 1
        try:
            os.close(self._said)
            os.setsid()  # Ctrl-C is the parent's to hear.
            _entitle(self.name)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            self._run(lambda said: _tell(say, said))
            code = 0
        except PotluckError as error:
            _tell(say, str(error).encode()[:4000])
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, number: signal.Signals) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, within_s: float) -> None:
        until_s = time.monotonic() + within_s
        while self.pid and self.ended() is None:
            if time.monotonic() >= until_s:
                self.send(signal.SIGKILL)
            time.sleep(0.01)


def worker(
    context: WorkerContext, process: BrainProcessContext, place: int, first: Callable[[], None] = lambda: None
) -> SupervisedProcess:
    def run(tell: Callable[[bytes], None]) -> None:
        first()
        worker_process.run(context, process.home, place, process.clients[place], lambda: tell(SERVES))

    return SupervisedProcess(f"{worker_process.__name__} {place}", run)


class Supervisor:
    def __init__(self, context: WorkerContext, brain: Callable[[BrainProcessContext], None]) -> None:
        addresses = context.settings.places
        self._process = asyncio.run(make_post(addresses, context.settings.takeover))
        self._process.life, self._alive = os.pipe()
        self._run_brain = brain
        self._stopping = False
        self._brain = SupervisedProcess(
            "potluck-gateway" if addresses.workers == 1 else "potluck-gateway-brain", self._be_brain
        )
        self._workers: list[SupervisedProcess] = []
        if addresses.workers > 1:
            self._workers = [
                worker(context, self._process, place, self._forked) for place in range(addresses.workers)
            ]

    def _forked(self) -> None:
        """In a child: only the parent keeps the end of the pipe by which it is known to live."""
        os.close(self._alive)

    def _be_brain(self, tell: Callable[[bytes], None]) -> None:
        self._forked()
        self._process.tell = tell
        self._run_brain(self._process)

    def run(self) -> None:
        """Until a signal says to end; raises what kept the first Brain from serving."""
        calm()  # No Brain needs to look at what it has from here.
        woken, wake = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        try:
            while self._look(time.monotonic()):
                select.select([woken], [], [], LOOK_S)
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
        finally:
            self._end()
            signal.set_wakeup_fd(before)
            woken.close()
            wake.close()

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True
        self._brain.send(signal.SIGTERM)

    def _look(self, now_s: float) -> bool:
        if self._stopping:
            return bool(self._brain.pid) and self._brain.ended() is None
        code = self._brain.look(now_s)
        if code is not None:
            message = self._brain.said
            if SERVES not in message and not self._process.again:
                text = message.decode("utf-8", "replace")
                raise PotluckError(text or f"the Brain's process ended with {code}; its log says why")
            if code == 0:  # It was told to end, or another gateway serves.
                return False
            self._process.again = True
            self._brain.look(now_s)
        for process in self._workers:
            if process.look(now_s) is not None:
                process.look(now_s)
        return True

    def _end(self) -> None:
        self._stopping = True
        self._brain.end(0.0)
        for process in self._workers:
            process.end(LEAVE_S)
        os.close(self._alive)
        os.close(self._process.life)
        self._process.close()


def _entitle(title: str) -> None:
    """What `ps` shows: over the words that the parent was started with (/proc/self/stat, fields 48 and 49)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, room = int(fields[45]), int(fields[46]) - int(fields[45])
        if start and room > 0:
            ctypes.memset(start, 0, room)
            ctypes.memmove(start, title.encode()[: room - 1], min(len(title), room - 1))


def _tell(pipe: int, said: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        os.write(pipe, said)

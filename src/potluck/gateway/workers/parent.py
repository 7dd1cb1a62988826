"""The first process of a gateway with several workers: it starts the desk and them, and again when they die.

    parent ─┬─ desk: the Brain, the fleet, the log, the operators' port
            └─ workers: clients; each has a line to the desk

It does nothing else, and holds what must outlive a desk: the ports, the socket that workers call, a directory. A desk
is a fork of it, so that a successor is there within milliseconds; what is under way it hears from the workers. Should
the parent itself die, the desk ends as if it were told to, and the workers with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.core.errors import InputError, PotluckError
from potluck.gateway.collector import calm
from potluck.gateway.http.port import bound
from potluck.gateway.settings import Places

AGAIN_S = (0.0, 0.2, 1.0)
"""Before one is started again that died: the longer, the sooner it died before."""
STEADY_S = 30.0
"""One that lived so long did not die at its start."""
LOOK_S = 0.5
"""How often children are looked after when no signal tells of them."""
LEAVE_S = 1.0
BACKLOG = 128

log = logging.getLogger(__name__)


@dataclass
class Post:
    """What all desks of a gateway have from their parent."""

    home: Path
    """A directory for nobody else's eyes."""
    desk: socket.socket
    """Where workers call."""
    clients: socket.socket
    """The clients' port, so that no worker finds it taken, and so that 0 is the same for all."""
    operators: Sequence[socket.socket] = ()
    life: int = -1
    """Readable when the parent is gone."""
    again: bool = False
    """Whether there was a desk before."""

    @property
    def path(self) -> str:
        return str(self.home / "desk")

    def close(self) -> None:
        for each in (self.desk, self.clients, *self.operators):
            each.close()
        shutil.rmtree(self.home, ignore_errors=True)


def make_post(places: Places, operators: Sequence[socket.socket] = ()) -> Post:
    home = Path(tempfile.mkdtemp(prefix="potluck-"))
    desk = socket.socket(socket.AF_UNIX)
    desk.bind(str(home / "desk"))
    desk.listen(BACKLOG)
    found = socket.getaddrinfo(places.host, places.port, type=socket.SOCK_STREAM)[0]
    clients = socket.socket(found[0], found[1])
    clients.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    post = Post(home, desk, clients, operators)
    try:
        clients.bind(found[4])
    except OSError as error:
        post.close()
        why = error.strerror or error
        raise InputError("--port", f"{places.host}:{places.port} cannot be used ({why})") from error
    return post


class Child:
    """A process that is started again whenever it dies. `start` makes one, `ended` has its code when it is over."""

    def __init__(self, name: str, start: Callable[[], int], ended: Callable[[], int | None]) -> None:
        self.name, self._start, self._ended = name, start, ended
        self.pid = 0
        """0 while there is none."""
        self._began_s = self._due_s = 0.0
        self.tries = 0
        """Starts in a row that came to nothing."""

    def look(self, now_s: float) -> int | None:
        """Start it when it is time to; its code if it has just ended."""
        if self.pid:
            code = self._ended()
            if code is None:
                return None
            self.pid = 0
            if now_s - self._began_s > STEADY_S:
                self.tries = 0
            self._due_s = now_s + AGAIN_S[min(self.tries, len(AGAIN_S) - 1)]
            self.tries += 1
            log.error("%s ended with %s; another one takes its place", self.name, code)
            if now_s < self._due_s:
                return code
            self._begin(now_s)
            return code
        if now_s >= self._due_s:
            self._begin(now_s)
        return None

    def _begin(self, now_s: float) -> None:
        self._began_s = now_s
        self.pid = self._start()

    def send(self, number: signal.Signals) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, within_s: float) -> None:
        """By itself if it does so in time."""
        until_s = time.monotonic() + within_s
        while self.pid and self._ended() is None:
            if time.monotonic() >= until_s:
                self.send(signal.SIGKILL)
            time.sleep(0.01)
        self.pid = 0


def worker(post: Post, place: int) -> Child:
    """A process for clients."""
    kept: list[subprocess.Popen[bytes]] = []

    def start() -> int:
        command = (sys.executable, "-m", "potluck.gateway.workers.hand", post.path, str(place))
        kept[:] = [subprocess.Popen(command, start_new_session=True)]
        return kept[0].pid

    return Child(f"worker {place}", start, lambda: kept[0].poll())


class Parent:
    """`desk` is what a desk does until it is told to end, given the post and whom to tell that it serves."""

    def __init__(self, places: Places, desk: Callable[[Post, Callable[[], None]], None]) -> None:
        operators = asyncio.run(bound(places.admin_host, places.admin_port))
        self._post = make_post(places, operators)
        self._post.life, self._alive = os.pipe()
        self._run_desk = desk
        self._said = -1
        self._stopping = False
        self._desk = Child("the desk", self._fork, self._desk_ended)
        self._workers = [worker(self._post, place) for place in range(places.workers)]

    def run(self) -> None:
        """Until a signal says to end; raises what kept the first desk from serving."""
        calm()  # No desk needs to look at what it has from here.
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

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True
        self._desk.send(signal.SIGTERM)

    def _look(self, now_s: float) -> bool:
        """Whether to go on."""
        if self._stopping and not self._desk.pid:
            return False
        code = self._desk_ended() if self._stopping else self._desk.look(now_s)
        if self._stopping:
            return code is None
        if code == 0:  # It was told to end itself.
            return False
        for each in self._workers:
            each.look(now_s)
        return True

    def _end(self) -> None:
        """Whatever is left; workers that were told to end are about to."""
        self._stopping = True
        self._desk.end(0.0)
        for each in self._workers:
            each.end(LEAVE_S)
        os.close(self._alive)
        self._post.close()

    # The desk.

    def _fork(self) -> int:
        said, say = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            os.close(say)
            self._said = said
            return pid
        os.close(said)
        self._be_desk(say)
        raise AssertionError("a desk does not come back")

    def _be_desk(self, say: int) -> None:
        code = 1
        try:
            os.setsid()  # Ctrl-C is the parent's to hear.
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.close(self._alive)
            self._run_desk(self._post, lambda: _tell(say, b"+"))
            code = 0
        except PotluckError as error:
            _tell(say, str(error).encode())
            code = 2
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _desk_ended(self) -> int | None:
        pid, status = os.waitpid(self._desk.pid, os.WNOHANG)
        if not pid:
            return None
        self._desk.pid = 0
        text = os.read(self._said, 4096).decode("utf-8", "replace")
        os.close(self._said)
        if text.startswith("+"):  # It did serve: clients wait for another, at once.
            self._desk.tries = 0
        served, self._post.again = text.startswith("+") or self._post.again, True
        code = os.waitstatus_to_exitcode(status)
        if not served and not self._stopping:
            raise PotluckError(text or f"the desk's process ended with {code}; its log says why")
        return code


def _tell(pipe: int, text: bytes) -> None:
    os.write(pipe, text[:4000])

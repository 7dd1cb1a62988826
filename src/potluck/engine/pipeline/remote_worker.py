"""The driver's side of one worker: asking it, keeping the same tables, noticing that it is gone."""

from __future__ import annotations

import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from potluck.core.errors import PotluckError
from potluck.engine.memory.block_tables import BlockTables
from potluck.engine.pipeline import pipeline_messages as msg
from potluck.engine.pipeline.pipeline_connection import Bytes, LinkError, PipelineConnection


@dataclass(frozen=True, slots=True)
class WorkerReturned:
    """In an answer's place: a worker that is there again, and where those of the stage before connect to it."""

    host: str
    port: int


Event = tuple["RemoteWorker", "msg.Answer | str | WorkerReturned", bytearray]
"""A worker's answer with its body; or, as text, why there will be no more; or that it is one that has come back."""


class RemoteWorker:
    """One worker. Its tables here and there change alike: here at once, there before the next command."""

    def __init__(
        self,
        name: str,
        stage: int,
        place: int,
        connection: PipelineConnection,
        tables: BlockTables,
        inbox: queue.SimpleQueue[Event],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.name, self.stage, self.place = name, stage, place
        self.tables = tables
        self.lost: str | None = None
        self._silent: str | None = None  # The same, as soon as its connection has ended.
        self._link, self._inbox, self.process = connection, inbox, process
        self._ops: list[tuple[int, int, int, int]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def report_to(self, inbox: queue.SimpleQueue[Event]) -> None:
        """What it says is heard there from now on; that it has ended meanwhile, too."""
        self._inbox = inbox
        if self._silent is not None:
            inbox.put((self, self._silent, bytearray()))

    @property
    def gone(self) -> str | None:
        """Why it is gone, perhaps before the driver has taken note. Any thread may ask."""
        return self.lost or self._silent

    def _read(self) -> None:
        nothing = bytearray()
        try:
            while True:
                head, body = self._link.receive()
                self._inbox.put((self, msg.read_answer(head), body))
        except PotluckError as error:
            self._silent = self._gone(str(error))
            self._inbox.put((self, str(error), nothing))

    def open(self) -> int:
        row = self.tables.open()
        self._note(msg.OPEN, row)
        return row

    def close(self, row: int) -> None:
        self.tables.close(row)
        self._note(msg.CLOSE, row)

    def grow(self, row: int, tokens: int, since: int) -> None:
        self.tables.grow(row, tokens, since)
        self._note(msg.GROW, row, tokens, since)

    def set_back(self, row: int, length: int) -> None:
        """The row holds no more than `length` tokens."""
        self.tables.advance(row, length)
        self._note(msg.BACK, row, length)

    def _note(self, what: int, row: int, tokens: int = 0, since: int = 0) -> None:
        if self.lost is None:
            self._ops.append((what, row, tokens, since))

    def post(self, command: msg.Command, bodies: Sequence[Bytes] = ()) -> None:
        """Send a command behind all changes to rows. A worker that is gone shows in the inbox, not here."""
        if self.lost is not None:
            return
        try:
            if self._ops:
                self._link.send(msg.to_bytes(msg.RowChanges(len(self._ops))), [msg.numbers(self._ops)])
                self._ops = []
            self._link.send(msg.to_bytes(command), bodies)
        except LinkError as error:
            self._inbox.put((self, str(error), bytearray()))

    def lose(self, why: str) -> None:
        """It is gone, or as good as gone: nothing is sent to it any more."""
        if self.lost is not None:
            return
        self._link.close()
        self._ops = []
        if self.process is not None:
            end_worker(self.process, 0.2)
            why = f"{why} (exit code {self.process.returncode})"
        self.lost = self._gone(why)

    def _gone(self, why: str) -> str:
        return f"{self.name} is gone: {why.removeprefix(f'{self.name}: ')}"

    def stop(self) -> None:
        if self.lost is None:
            self.post(msg.StopWorker(0))
            self._link.close()
        if self.process is not None:
            end_worker(self.process, END_S)


RETRY_S, RETRY_MOST_S = 1.0, 30.0


Reach = Callable[[RemoteWorker], tuple[RemoteWorker, WorkerReturned]]
"""Makes a worker in the place of one that is lost, ready for steps; raises a PotluckError while that cannot be."""


class WorkerRejoin:
    """A thread for each worker that is missed. The driver hears of those that are back through its inbox."""

    def __init__(self, reach: Reach, inbox: queue.SimpleQueue[Event], retry_s: float = RETRY_S) -> None:
        self._reach, self._inbox, self._retry_s = reach, inbox, retry_s
        self._over = threading.Event()
        self._back: set[int] = set()

    def miss(self, lost_worker: RemoteWorker) -> None:
        threading.Thread(
            target=self._seek, args=(lost_worker,), daemon=True, name=f"seek {lost_worker.name}"
        ).start()

    def awaited(self, stage: int) -> bool:
        """Whether a worker of a stage is back that the driver has not taken in yet. Any thread may ask."""
        return stage in self._back

    def taken_in(self, stage: int) -> None:
        self._back.discard(stage)

    def close(self) -> None:
        self._over.set()

    def _seek(self, lost_worker: RemoteWorker) -> None:
        wait_s = self._retry_s
        while not self._over.wait(wait_s):
            try:
                remote, where = self._reach(lost_worker)
            except PotluckError:
                wait_s = min(RETRY_MOST_S, 1.5 * wait_s)
                continue
            if self._over.is_set():
                remote.stop()
                return
            remote.report_to(self._inbox)
            self._back.add(lost_worker.stage)
            self._inbox.put((remote, where, bytearray()))
            return


START_S = 120.0  # Importing torch on a busy machine takes its time.
END_S = 5.0


def start_worker(secret: bytes) -> subprocess.Popen[bytes]:
    """A worker that listens on a loopback port; `worker_port` waits for it."""
    command = [sys.executable, "-m", "potluck.engine.pipeline", "--listen", "127.0.0.1:0"]
    # In a session of its own: Ctrl-C is for the driver, which then stops its workers in order.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )
    assert process.stdin is not None
    try:
        process.stdin.write(secret + b"\n")
        process.stdin.close()
    except OSError as error:
        end_worker(process)
        raise LinkError(f"worker: did not start ({error})") from error
    return process


def worker_port(process: subprocess.Popen[bytes], within_s: float = START_S) -> int:
    assert process.stdout is not None
    line = _line(process.stdout, time.monotonic() + within_s)
    if not line.strip().isdigit():
        end_worker(process)
        raise LinkError(f"worker: did not start (exit code {process.returncode})")
    return int(line)


def _line(stream: IO[bytes], deadline_s: float) -> bytes:
    text = b""
    while not text.endswith(b"\n") and len(text) < 16:
        left = deadline_s - time.monotonic()
        if left <= 0 or not select.select([stream], [], [], left)[0]:
            return b""
        byte = stream.read(1)
        if not byte:
            return b""
        text += byte
    return text


def end_worker(process: subprocess.Popen[bytes], within_s: float = 0.0) -> None:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()

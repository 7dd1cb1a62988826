"""The driver's side of one worker: asking it, keeping the same tables, noticing that it is gone."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.core.errors import PotluckError
from potluck.engine.memory.block_tables import BlockTables
from potluck.engine.pipeline import spawn
from potluck.engine.pipeline.pipeline_connection import Bytes, LinkError, PipelineConnection
from potluck.engine.pipeline.pipeline_messages import (
    BACK,
    CLOSE,
    GROW,
    OPEN,
    Answer,
    Command,
    RowChanges,
    StopWorker,
    numbers,
    read_answer,
    to_bytes,
)


@dataclass(frozen=True, slots=True)
class WorkerReturned:
    """In an answer's place: a worker that is there again, and where those of the stage before connect to it."""

    host: str
    port: int


Event = tuple["RemoteWorker", "Answer | str | WorkerReturned", bytearray]
"""A worker's answer with its body; or, as text, why there will be no more; or that it is one that has come back."""


class RemoteWorker:
    """One worker. Its tables here and there change alike: here at once, there before the next command."""

    def __init__(
        self,
        name: str,
        stage: int,
        place: int,
        link: PipelineConnection,
        tables: BlockTables,
        inbox: queue.SimpleQueue[Event],
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.name, self.stage, self.place = name, stage, place
        self.tables = tables
        self.lost: str | None = None
        """Why it is gone."""
        self._silent: str | None = None
        """The same, as soon as its connection has ended."""
        self._link, self._inbox, self.process = link, inbox, process
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
                self._inbox.put((self, read_answer(head), body))
        except PotluckError as error:
            self._silent = self._gone(str(error))
            self._inbox.put((self, str(error), nothing))

    def open(self) -> int:
        row = self.tables.open()
        self._note(OPEN, row)
        return row

    def close(self, row: int) -> None:
        self.tables.close(row)
        self._note(CLOSE, row)

    def grow(self, row: int, tokens: int, since: int) -> None:
        self.tables.grow(row, tokens, since)
        self._note(GROW, row, tokens, since)

    def set_back(self, row: int, length: int) -> None:
        """The row holds no more than `length` tokens."""
        self.tables.advance(row, length)
        self._note(BACK, row, length)

    def _note(self, what: int, row: int, tokens: int = 0, since: int = 0) -> None:
        if self.lost is None:
            self._ops.append((what, row, tokens, since))

    def post(self, command: Command, bodies: Sequence[Bytes] = ()) -> None:
        """Send a command behind all changes to rows. A worker that is gone shows in the inbox, not here."""
        if self.lost is not None:
            return
        try:
            if self._ops:
                self._link.send(to_bytes(RowChanges(len(self._ops))), [numbers(self._ops)])
                self._ops = []
            self._link.send(to_bytes(command), bodies)
        except LinkError as error:
            self._inbox.put((self, str(error), bytearray()))

    def lose(self, why: str) -> None:
        """It is gone, or as good as gone: nothing is sent to it any more."""
        if self.lost is not None:
            return
        self._link.close()
        self._ops = []
        if self.process is not None:
            spawn.end(self.process, 0.2)
            why = f"{why} (exit code {self.process.returncode})"
        self.lost = self._gone(why)

    def _gone(self, why: str) -> str:
        return f"{self.name} is gone: {why.removeprefix(f'{self.name}: ')}"

    def stop(self) -> None:
        """An orderly end."""
        if self.lost is None:
            self.post(StopWorker(0))
            self._link.close()
        if self.process is not None:
            spawn.end(self.process, spawn.END_S)

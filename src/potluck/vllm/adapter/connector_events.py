"""What the connectors in vLLM tell, over a local socket that they connect to when vLLM starts."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.kv.handles import model_in
from potluck.kv.peer_connections import Address
from potluck.vllm.held_blocks import HeldBlocks

RECENT_STEPS = 4096
SHOWN_STEPS = 256
"""That a mean is of."""
LONGEST_LINE = 1 << 24
MOST_FATES = 4096
MOST_PEERS = 256
"""That are reported on."""


@dataclass(frozen=True, slots=True)
class ConnectorWorker:
    """What a worker says of itself when it starts."""

    rank: int
    kv: Address
    fingerprint: str
    token_bytes: int
    block_tokens: int
    blocks: int
    dtype: str
    version: str


@dataclass(frozen=True, slots=True)
class SendResult:
    """What became of KV that was given away, on one worker."""

    state: str
    claimed: bool
    problem: str


@dataclass(slots=True)
class ReceivedTotals:
    """What came from other engines, since the start."""

    bytes: int = 0
    failed: int = 0
    peers: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By sender: bytes, and seconds that they took."""


@dataclass(slots=True)
class _Fate:
    done: asyncio.Future[SendResult]
    left: int
    worst: SendResult | None = None


@dataclass(slots=True)
class VllmSteps:
    """What vLLM computes, exactly: (number, tokens, sequences, seconds) of the latest steps."""

    count: int = 0
    tokens: int = 0
    recent: deque[tuple[int, int, int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _before: tuple[int, int, int] | None = None

    def add(self, tokens: int, sequences: int, before_s: float) -> None:
        """One begins; `before_s` is what the one before it took, if vLLM was not idle between them."""
        if before_s and self._before is not None:
            self.recent.append((*self._before, before_s))
        self.count += 1
        self.tokens += tokens
        self._before = self.count, tokens, sequences


class ConnectorEvents:
    def __init__(self, path: Path, workers: int) -> None:
        self._path, self._expected = path, workers
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._fates: dict[str, _Fate] = {}
        self.workers: dict[int, ConnectorWorker] = {}
        self.moved = ReceivedTotals()
        self.held = HeldBlocks()
        """Prefixes that vLLM holds."""
        self.steps = VllmSteps()
        self.here = asyncio.Event()
        """All workers have told who they are."""
        self._peers: list[str] = []
        self._talks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._came, str(self._path), limit=LONGEST_LINE)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        with suppress(OSError):
            self._path.unlink()

    def expect(self, handle: str) -> asyncio.Future[SendResult]:
        """What will become of KV that is given away under this handle, on all workers."""
        while len(self._fates) >= MOST_FATES:
            self._fates.pop(next(iter(self._fates)))
        fate = _Fate(asyncio.get_running_loop().create_future(), self._expected)
        self._fates[handle] = fate
        return fate.done

    def forget(self, handle: str) -> None:
        self._fates.pop(handle, None)

    def allow(self, peers: Iterable[str]) -> None:
        """From whom KV may come."""
        self._peers = sorted(peers)
        for writer in self._writers.values():
            self._tell(writer)

    def _tell(self, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"peers": self._peers}).encode() + b"\n")

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            while line := await reader.readline():
                self._heard(json.loads(line), writer)
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # vLLM is gone; whoever watches its process knows.
        finally:
            self._talks.discard(task)
            writer.close()

    def _heard(self, said: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "steps" in said:
            for step in said["steps"]:
                self.steps.add(*step)
        if "cache" in said:
            self._cached(said["cache"])
        if "gave" in said:
            self._gave(
                str(said["gave"]), SendResult(str(said["state"]), bool(said["claimed"]), str(said["problem"]))
            )
        elif "took" in said:
            self._took(said)
        elif "worker" in said:
            worker = _worker(said)
            self.workers[worker.rank] = worker
            if worker.rank == 0:
                self.held.model = model_in(worker.fingerprint)
            self._writers[worker.rank] = writer
            self._tell(writer)
            if len(self.workers) == self._expected:
                self.here.set()

    def _cached(self, lines: list[Any]) -> None:
        for kind, *said in lines:
            if kind == "+":
                self.held.stored(*said)
            elif kind == "-":
                self.held.removed(*said)
            else:
                self.held.cleared()

    def _gave(self, handle: str, gave: SendResult) -> None:
        fate = self._fates.get(handle)
        if fate is None:
            return
        fate.left -= 1
        if fate.worst is None or gave.state != "fetched":
            fate.worst = gave
        if (fate.left <= 0 or gave.state != "fetched") and not fate.done.done():
            fate.done.set_result(fate.worst)

    def _took(self, said: dict[str, Any]) -> None:
        problem = str(said.get("problem", ""))
        if problem:
            self.moved.failed += 1
            return
        size, peers = int(said["moved_bytes"]), self.moved.peers
        self.moved.bytes += size
        peer = str(said["kv"])
        before, busy_s = peers.get(peer, (0, 0.0))
        if peer in peers or len(peers) < MOST_PEERS:
            peers[peer] = before + size, busy_s + float(said["wall_s"])


def _worker(said: dict[str, Any]) -> ConnectorWorker:
    host, port = said["kv"]
    return ConnectorWorker(
        int(said["worker"]),
        (str(host), int(port)),
        str(said["fingerprint"]),
        int(said["token_bytes"]),
        int(said["block_tokens"]),
        int(said["blocks"]),
        str(said["dtype"]),
        str(said["version"]),
    )

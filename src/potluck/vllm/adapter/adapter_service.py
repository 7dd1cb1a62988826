"""What all handlers share: vLLM, its connectors' news, the role, the limits; and what the engine says of itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from potluck import __version__
from potluck.api.http import HttpRefusal
from potluck.core.errors import UnknownNameError
from potluck.core.values.kv_layout import Address, KvAddress, KvLayout, reachable, written
from potluck.kv.frames import VERSION
from potluck.kv.prefix_pool import CacheFeed
from potluck.vllm.adapter.vllm_process import VllmProcess
from potluck.vllm.adapter_channel import ConnectorSocket, HeldBlocks

RECENT_STEPS = 4096
SHOWN_STEPS = 256
MOST_FATES = 4096
MOST_PEERS = 256


@dataclass(frozen=True, slots=True)
class ConnectorWorker:
    """What a worker says of itself when it starts."""

    rank: int
    kv: Address
    tensor: tuple[int, int]  # Which of how many parts it has of every layer of its stage.
    stage: tuple[int, int]
    layers: tuple[int, int]  # From the first to the one behind the last.
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
        self._socket, self._expected = ConnectorSocket(path, self._line), workers
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._fates: dict[str, _Fate] = {}
        self.workers: dict[int, ConnectorWorker] = {}
        self.moved = ReceivedTotals()
        self.held = HeldBlocks()
        self.steps = VllmSteps()
        self.here = asyncio.Event()  # All workers have told who they are.
        self._peers: list[str] = []

    async def open(self) -> None:
        await self._socket.open()

    async def close(self) -> None:
        await self._socket.close()

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
        self._peers = sorted(peers)
        for writer in self._writers.values():
            self._tell(writer)

    def _tell(self, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"peers": self._peers}).encode() + b"\n")

    def _line(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        self.heard(json.loads(line), writer)

    def heard(self, said: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """A line of a connector's; `writer` leads to it."""
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
                self.held.model = worker.fingerprint
            self._writers[worker.rank] = writer
            self._tell(writer)
            if len(self.workers) == self._expected:
                self.here.set()

    def _cached(self, lines: list[Any]) -> None:
        for kind, *text in lines:
            if kind == "+":
                self.held.stored(*text)
            elif kind == "-":
                self.held.removed(*text)
            else:
                self.held.cleared()

    def _gave(self, handle: str, result: SendResult) -> None:
        fate = self._fates.get(handle)
        if fate is None:
            return
        fate.left -= 1
        if fate.worst is None or result.state != "fetched":
            fate.worst = result
        if (fate.left <= 0 or result.state != "fetched") and not fate.done.done():
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
        _pair(said.get("tensor", (0, 1))),
        _pair(said.get("stage", (0, 1))),
        _pair(said.get("layers", (0, 0))),
        str(said["fingerprint"]),
        int(said["token_bytes"]),
        int(said["block_tokens"]),
        int(said["blocks"]),
        str(said["dtype"]),
        str(said["version"]),
    )


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)


def address_of_all(workers: Iterable[ConnectorWorker]) -> KvAddress:
    """Where the KV of all of them is fetched: by each stage's first worker, and how the model is cut."""
    firsts = sorted((worker for worker in workers if not worker.tensor[0]), key=lambda worker: worker.stage)
    layers = tuple(worker.layers[1] - worker.layers[0] for worker in firsts)
    layout = KvLayout(firsts[0].tensor[1], layers if len(layers) > 1 else ())
    return KvAddress(tuple(worker.kv for worker in firsts), layout)


METRICS_S = 0.2  # How old figures from vLLM may be.
MODELS_S = 5.0
ROLES = ("prefill", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    open_requests: int = 1024
    deadline_s: float = 600.0
    handover_s: float = 120.0
    lease_s: float = 60.0
    body_bytes: int = 8_000_000
    start_s: float = 600.0


class AdapterService:
    def __init__(
        self,
        name: str,
        vllm_process: VllmProcess,
        connector_events: ConnectorEvents,
        limits: AdapterLimits,
        always: frozenset[Address],
    ) -> None:
        self.name, self.server, self.connector_events = name, vllm_process, connector_events
        self.limits, self.always = limits, always
        self.role, self.draining = "mixed", False
        self.feed = CacheFeed(connector_events.held)
        self.problem = ""
        self.started_s = time.monotonic()
        self.peers: frozenset[KvAddress] = frozenset()
        self.open_requests = self.todo_tokens = self.context_tokens = 0
        self.max_tokens = self.max_running = 0
        self.adapters: tuple[str, ...] = ()  # LoRA that vLLM has loaded: models by the name of their own.
        self._listed_s = 0.0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self._metrics: dict[str, float] = {}
        self._asked_s = 0.0
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def fingerprint(self) -> str:
        """Of the model, however it is cut: replicas that are cut otherwise serve the same."""
        return self.connector_events.workers[0].fingerprint

    @property
    def kv(self) -> str:
        return str(address_of_all(self.connector_events.workers.values()))

    def must_be(self, model: str) -> None:
        if model != self.name and model not in self.adapters:
            raise UnknownNameError("model", model, [self.name, *self.adapters])

    def must_be_peer(self, address: KvAddress) -> None:
        if not reachable(address, self.always.union(*(peer.workers for peer in self.peers))):
            line = "source.kv: is no peer of this engine; --kv-from or PUT /peers tells it of its peers"
            raise HttpRefusal(403, line, "not_a_peer", "source.kv")

    def allow(self, peers: frozenset[KvAddress]) -> None:
        self.peers = peers
        self.connector_events.allow([*map(str, peers), *map(written, self.always)])

    @asynccontextmanager
    async def admitted(self, tokens: int) -> AsyncIterator[ActiveSegment]:
        """The place of one request, `tokens` of which are to be computed."""
        if self.problem:
            raise HttpRefusal(503, f"vLLM has failed ({self.problem})", "failed")
        if self.draining:
            # vLLM itself would answer with nothing, and call that an answer.
            raise HttpRefusal(503, "the engine is draining and takes nothing new", "draining")
        if self.open_requests >= self.limits.open_requests:
            raise HttpRefusal(429, f"{self.open_requests} requests are open; try again", "overloaded")
        segment = ActiveSegment(self, tokens)
        self.open_requests += 1
        try:
            yield segment
        finally:
            self.open_requests -= 1
            segment.computed()

    async def metrics_text(self) -> str:
        timeout = aiohttp.ClientTimeout(total=5)
        async with self.session.get(f"{self.server.base}/metrics", timeout=timeout) as answer:
            return await answer.text()

    async def figures(self) -> Mapping[str, float]:
        """vLLM's gauges and counters by name, all their labels summed up."""
        now_s = time.monotonic()
        if now_s - self._asked_s > METRICS_S and not self.problem:
            self._asked_s = now_s
            with suppress(aiohttp.ClientError, TimeoutError):  # whether it is alive, its process tells
                self._metrics = summed(await self.metrics_text())
        return self._metrics

    async def look(self) -> None:
        """What it serves, and how long a request may be; adapters may come and go."""
        self._listed_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=5)
        async with self.session.get(f"{self.server.base}/v1/models", timeout=timeout) as answer:
            models = (await answer.json())["data"]
        self.max_tokens = int(models[0].get("max_model_len") or 0)
        self.adapters = tuple(sorted(str(model["id"]) for model in models if model.get("parent")))

    async def status(self) -> dict[str, object]:
        figures = await self.figures()
        if time.monotonic() - self._listed_s > MODELS_S and not self.problem:
            with suppress(aiohttp.ClientError, TimeoutError):
                await self.look()
        worker, steps = self.connector_events.workers[0], self.connector_events.steps
        latest = islice(reversed(steps.recent), SHOWN_STEPS)
        times = sorted(seconds for _, _, _, seconds in latest)
        # vLLM writes its gauges at the end of a step, before the blocks of requests that ended in it are free.
        used = figures.get("vllm:kv_cache_usage_perc", 0.0) if self.open_requests else 0.0
        total = worker.blocks
        running = int(figures.get("vllm:num_requests_running", 0))
        waiting = max(0, self.open_requests - running)
        return {
            "version": f"{__version__} (vLLM {worker.version})",
            "model": self.name,
            "fingerprint": self.fingerprint,
            "role": self.role,
            "state": self.state,
            "waiting": waiting,
            "running": min(running, self.open_requests),
            "context_tokens": round(used * total) * worker.block_tokens,
            "todo_tokens": self.todo_tokens,
            "free_blocks": total - round(used * total),
            "total_blocks": total,
            "block_tokens": worker.block_tokens,
            "max_tokens": self.max_tokens,
            "max_running": self.max_running,
            "steps": steps.count,
            "step_mean_s": sum(times) / len(times) if times else 0.0,
            "step_p99_s": times[min(len(times) - 1, int(len(times) * 0.99))] if times else 0.0,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "preemptions": int(figures.get("vllm:num_preemptions_total", 0)),
            "uptime_s": time.monotonic() - self.started_s,
            "kv": self.kv,
            "kv_version": VERSION,
            "links": [
                {
                    "peer": peer,
                    "moved_bytes": size,
                    "goodput_bytes_per_s": size / busy_s if busy_s else 0.0,
                    "queue_bytes": 0,
                }
                for peer, (size, busy_s) in self.connector_events.moved.peers.items()
            ],
            "received_bytes": self.connector_events.moved.bytes,
            "failed_fetches": self.connector_events.moved.failed,
            "own": True,
            "adapters": list(self.adapters),
            "problem": self.problem,
        }

    @property
    def state(self) -> str:
        if self.problem:
            return "failed"
        if self.draining:
            return "draining" if self.open_requests else "drained"
        return "ready"


class ActiveSegment:
    """A request that is here, as the status counts it."""

    def __init__(self, service: AdapterService, tokens: int) -> None:
        self._service, self._tokens = service, tokens
        service.todo_tokens += tokens

    def computed(self) -> None:
        self._service.todo_tokens -= self._tokens
        self._tokens = 0


def summed(text: str) -> dict[str, float]:
    """Prometheus text to a number for each name."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        try:
            values[name] = values.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return values


SERVICE = web.AppKey("service", AdapterService)

"""What all handlers share: vLLM, its connectors' news, the role, the limits; and what the engine says of itself."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice

import aiohttp
from aiohttp import web

from potluck import __version__
from potluck.api.http import HttpRefusal
from potluck.core.errors import UnknownNameError
from potluck.kv.frames import VERSION
from potluck.kv.handles import model_in
from potluck.kv.peer_connections import Address
from potluck.kv.prefix_pool import CacheFeed
from potluck.vllm.adapter.connector_events import SHOWN_STEPS, ConnectorEvents
from potluck.vllm.adapter.vllm_process import VllmProcess

METRICS_S = 0.2
"""How old figures from vLLM may be."""
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
        server: VllmProcess,
        connector_events: ConnectorEvents,
        limits: AdapterLimits,
        always: frozenset[Address],
    ) -> None:
        self.name, self.server, self.connector_events, self.limits, self.always = (
            name,
            server,
            connector_events,
            limits,
            always,
        )
        self.role, self.next_role, self.draining = "mixed", "", False
        self.feed = CacheFeed(connector_events.held)
        self.problem = ""
        self.started_s = time.monotonic()
        self.peers: frozenset[Address] = frozenset()
        self.open_requests = self.todo_tokens = self.context_tokens = 0
        self.max_tokens = self.max_running = 0
        self.adapters: tuple[str, ...] = ()
        """LoRA that vLLM has loaded: models by the name of their own."""
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
        return model_in(self.connector_events.workers[0].fingerprint)

    @property
    def kv(self) -> str:
        host, port = self.connector_events.workers[0].kv
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def must_be(self, model: str) -> None:
        if model != self.name and model not in self.adapters:
            raise UnknownNameError("model", model, [self.name, *self.adapters])

    def must_be_peer(self, address: Address) -> None:
        if address not in self.peers | self.always and (address[0], 0) not in self.always:
            line = "source.kv: is no peer of this engine; --kv-from or PUT /peers tells it of its peers"
            raise HttpRefusal(403, line, "not_a_peer", "source.kv")

    def allow(self, peers: frozenset[Address]) -> None:
        self.peers = peers
        self.connector_events.allow(
            f"{host}:{port}" if ":" not in host else f"[{host}]:{port}" for host, port in peers | self.always
        )

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
        held = ActiveSegment(self, tokens)
        self.open_requests += 1
        try:
            yield held
        finally:
            self.open_requests -= 1
            held.computed()

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
        self.adapters = tuple(sorted(str(each["id"]) for each in models if each.get("parent")))

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

    async def watch(self) -> None:
        """If vLLM ends, whoever asks is told."""
        await self.server.wait()
        self.problem = f"vLLM ended: {self.server.last_words()}"


class ActiveSegment:
    """A request that is here, as the status counts it."""

    def __init__(self, service: AdapterService, tokens: int) -> None:
        self._service, self._tokens = service, tokens
        service.todo_tokens += tokens

    def computed(self) -> None:
        """Its prompt is."""
        self._service.todo_tokens -= self._tokens
        self._tokens = 0


def summed(text: str) -> dict[str, float]:
    """Prometheus text to a number for each name."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return found


SERVICE = web.AppKey("service", AdapterService)

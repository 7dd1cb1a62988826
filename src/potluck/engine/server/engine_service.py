"""What all handlers share: the model's name and text, the role, the limits, and the way to the loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from aiohttp import web

from potluck import __version__
from potluck.api.http import HttpRefusal
from potluck.api.model_files import GenerationConfig
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.errors import CapacityError, InputError, UnknownNameError
from potluck.core.values.kv_layout import Address, KvAddress, reachable
from potluck.core.values.model import FullAttention, Model
from potluck.core.values.sampling import Sampling
from potluck.engine.compute.logit_edits import Grammars
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.engine_status import EngineCounters, EngineStatus, Role, step_times
from potluck.engine.loop.jobs import Job
from potluck.engine.loop.loop_thread import LoopThread
from potluck.engine.server.engine_metrics import EngineMetrics
from potluck.engine.server.http_connection import RequestLimits, Uploads
from potluck.engine.server.kv_connector import KvConnector, KvSettings, KvTransfer
from potluck.engine.server.request_channels import RequestChannel, RequestChannels
from potluck.kv.frames import VERSION
from potluck.kv.prefix_pool import CacheFeed

T = TypeVar("T")


def kv_heads(model: Model) -> int:
    """KV heads of a whole model; 1 where it has latents, or nothing by heads."""
    kinds = [layer.attention for layer in model.layers]
    return max((kind.kv_heads for kind in kinds if isinstance(kind, FullAttention)), default=1)


class EngineService:
    def __init__(
        self,
        name: str,
        loop: EngineLoop,
        loop_thread: LoopThread,
        channels: RequestChannels,
        tokenizer: ModelTokenizer | None,
        limits: RequestLimits,
        kv: KvSettings | None = None,
        generation: GenerationConfig | None = None,
        kv_transfer: KvTransfer | None = None,
    ) -> None:
        self.name = name
        generation = generation or GenerationConfig()
        self.defaults = generation.defaults  # How tokens are drawn where a request does not say.
        self.text = tokenizer
        self.hub = channels
        self.limits = limits
        self.role: Role = "mixed"
        self.draining = False
        self.ends_drained = False
        """Whether it ends once it was drained, so that whoever looks after it starts another."""
        self.change_pace: Callable[[float], None] | None = None
        """Makes a mock engine slower or faster than the GPU that it emulates."""
        self.change_network: Callable[[float], None] | None = None  # The same for its network card: Gbit/s.
        self.started_s = time.monotonic()
        self.created_s = int(time.time())
        self.dropped: Counter[str] = Counter()
        self.metrics = EngineMetrics(name, lambda: (self.status(), self.counters), self.dropped)
        self.kv = kv or KvSettings()
        self.kv_connector: KvConnector | None = None  # As long as the application runs.
        self._peers: frozenset[KvAddress] = frozenset()
        self.open_requests = 0
        """Kept prefixes that wait for whoever fetches them, or are on their way here."""
        self.uploads = Uploads(limits.body_bytes, limits.bodies_bytes)
        self._loop, self.driver = loop, loop_thread
        self.feed = CacheFeed(loop.prefixes)  # Used in the loop's thread.
        executor = loop.executor
        self.vocab = executor.config.model.vocab
        self.eos = frozenset(executor.config.eos_tokens + generation.end_tokens)
        self.fingerprint = executor.fingerprint
        self.layers = executor.config.model.layer_count
        self.most_tokens = loop.most_tokens
        self.grammars = Grammars(tokenizer, self.vocab, self.eos)
        self.kv_transfer = kv_transfer or KvTransfer(
            getattr(executor, "nic", None),
            executor.kv_dtype,
            kv_heads(executor.config.model),
            executor.ordered,
        )

    @property
    def drained(self) -> bool:
        return self.draining and self._loop.idle and not self.open_requests

    def must_be(self, model: str) -> None:
        if model != self.name:
            raise UnknownNameError("model", model, [self.name])

    @property
    def always(self) -> frozenset[Address]:
        """From whom caches may come whatever the peers; a port of 0 stands for any."""
        return frozenset(self.kv.fleet)

    @property
    def peers(self) -> frozenset[KvAddress]:
        """From whom caches may come as well."""
        return self._peers

    @peers.setter
    def peers(self, peers: frozenset[KvAddress]) -> None:
        self._peers = peers
        if self.kv_connector is not None:
            self.kv_connector.links.allow(self.senders)

    @property
    def senders(self) -> frozenset[Address]:
        """Whom KV may be fetched from."""
        return self.always.union(*(peer.workers for peer in self._peers))

    def must_be_peer(self, address: KvAddress) -> None:
        """Said before anything is tried, so that nobody learns what listens where."""
        if not reachable(address, self.senders):
            line = "source.kv: is no peer of this engine; --kv-from or PUT /peers tells it of its peers"
            raise HttpRefusal(403, line, "not_a_peer", "source.kv")

    @property
    def must_have_text(self) -> ModelTokenizer:
        if self.text is None:
            raise InputError("prompt", "this model has no tokenizer; send tokens")
        return self.text

    @property
    def problem(self) -> str:
        """Why nothing can be served; empty when it can."""
        return self.driver.problem

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        if self.problem:
            raise HttpRefusal(503, f"the engine has failed ({self.problem})", "failed")
        if self.draining:
            raise HttpRefusal(503, "the engine is draining and takes nothing new", "draining")
        if self.open_requests >= self.limits.open_requests:
            raise HttpRefusal(429, f"{self.open_requests} requests are open; try again", "overloaded")
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1

    @asynccontextmanager
    async def run(self, job: Job) -> AsyncIterator[RequestChannel]:
        async with self.hub.run(job, self.limits.deadline_s) as channel:
            try:
                yield channel
            finally:
                if channel.ended is not None:
                    self.metrics.ended(job, channel.ended, channel.tokens)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text, made off the event loop; what is hopelessly long is refused before."""
        words = self.must_have_text
        most = self.most_tokens * words.longest_token_chars
        if len(text) > most:
            raise CapacityError(f"a prompt of {len(text)} characters cannot fit in {self.most_tokens} tokens")
        return await asyncio.to_thread(words.encode, text, special=special)

    def holding(self, sampling: Sampling, ends: frozenset[int], prompt: int, min_tokens: int) -> Sampling:
        """The same, but nothing that ends the output is drawn before there are `min_tokens` behind the prompt."""
        barred = tuple(sorted(token for token in ends if 0 <= token < self.vocab))
        if not min_tokens or not barred:
            return sampling
        if len(barred) >= self.vocab:
            raise InputError("min_tokens", "nothing is left to draw, since every token would end the output")
        return replace(sampling, barred=barred, barred_before=prompt + min_tokens)

    def room_for(self, prompt: int, asked: int | None) -> int:
        """Output tokens that fit behind a prompt; an error if there is not room for those asked for."""
        room = self.most_tokens - prompt
        if asked is not None and asked < 1:
            raise InputError("max_tokens", f"must be at least 1, is {asked}")
        if room < (asked or 1):
            raise CapacityError(
                f"a prompt of {prompt} tokens and {asked or 1} more exceed the {self.most_tokens} that fit"
            )
        return room if asked is None else asked

    def status(self) -> EngineStatus:
        """Single figures read from another thread: each is right, together they may be a step apart."""
        loop, counters = self._loop, self._loop.counters
        batcher = loop.batcher
        mean_s, p99_s = step_times(counters)
        problem = self.problem
        state = "failed" if problem else "ready"
        if self.draining and not problem:
            state = "drained" if loop.idle else "draining"
        return EngineStatus(
            version=__version__,
            model=self.name,
            fingerprint=self.fingerprint,
            role=self.role,
            state=state,
            waiting=loop.waiting,
            running=batcher.running,
            context_tokens=batcher.held_tokens,
            todo_tokens=batcher.todo_tokens,
            free_blocks=batcher.free_blocks,
            total_blocks=batcher.limits.total_blocks,
            block_tokens=batcher.limits.block_tokens,
            max_tokens=self.most_tokens,
            max_running=batcher.limits.max_running,
            steps=counters.steps,
            step_mean_s=mean_s,
            step_p99_s=p99_s,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            prefix_hit_share=counters.prefix_hits / max(counters.prefix_queries, 1),
            prefix_bytes=loop.prefixes.used_bytes,
            preemptions=counters.preemptions,
            checks=counters.checks,
            uptime_s=time.monotonic() - self.started_s,
            exact=loop.executor.exact.holds,
            products=loop.executor.exact.products,
            kv=self.kv_connector.address if self.kv_connector else "",
            kv_version=VERSION,
            links=self.kv_connector.reports() if self.kv_connector else (),
            problem=problem,
            notes=dict(loop.executor.notes()),
        )

    @property
    def connector(self) -> KvConnector:
        assert self.kv_connector is not None
        return self.kv_connector

    @property
    def counters(self) -> EngineCounters:
        return self._loop.counters


SERVICE = web.AppKey("service", EngineService)

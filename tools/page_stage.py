"""A gateway without engines for the page: the real Brain, desk and operators' port over a fleet that is made up.

What engines would say (computed, handed on, tokens, the end) is said at times that are made up as well, from a seed.
So the page can be tested, measured and pictured with any fleet on any machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from page_fleets import MODEL, PREFILL_PER_S, TPOT_S, small_fleet

from potluck.catalog import models, nodes
from potluck.core.state import events
from potluck.core.state.actions import Action, DrainReplica, Refuse, Run, StartReplica
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.service import Tenant
from potluck.core.values.types import Link, Region, Request, Slo
from potluck.gateway.admin.families import SEGMENT_TOKENS
from potluck.gateway.admin.operations import Operations
from potluck.gateway.core import GatewayCore
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.serve import AdminServer
from potluck.gateway.values import GatewaySettings, ListenAddresses, RequestOutcome
from potluck.runtime.resolved_plan import ResolvedPlan

KEY = "the-operators-key"
TENANTS = (("search", 2.0), ("support", 1.0), ("batch", 1.0))
ANSWER = "Everybody brings what they have and all of it goes on one table so that nobody has to cook alone"
KV_BYTES_PER_TOKEN = 131_072
ANSWER_WORDS = ANSWER.count(" ") + 1


@dataclass(slots=True)
class StagedRequest:
    request: Request
    output_tokens: int
    came_s: float
    run: Run | None = None
    streamed: int = 0
    first_s: float | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    news: asyncio.Queue[str | None] | None = None  # Where its words go, if anywhere.


class Stage:
    """Used in one event loop. `send` begins a request, `kill` ends a replica, `flood` sends many."""

    def __init__(
        self, fleet: tuple[Plan, tuple[Region, ...], tuple[Link, ...]], key: str | None = KEY, seed: int = 1
    ) -> None:
        plan, regions, links = fleet
        model = models.model("llama-3.1-8b")
        types = {offer.node: nodes.node_type(offer.node) for region in regions for offer in region.offers}
        resolved = ResolvedPlan(
            plan, {MODEL: model}, types, regions, links, {MODEL: Slo(1.5, 0.045)}, {MODEL: (500.0, 60.0)}
        )
        policy = Policy(tenants=tuple(Tenant(name, weight) for name, weight in TENANTS))
        self._chance = random.Random(seed)
        self.core = GatewayCore(resolved, policy, ConnectionPool())
        self.operators = AdminServer(self.core, GatewaySettings(ListenAddresses(admin_port=0), admin_key=key))
        self.operations = Operations(self.core)
        self.line = self.core.brain_loop.line(self._act)
        self.core.brain_loop.manage = self._manage
        self.core.brain_loop.at_ticks.remove(self.core.watch.look)
        self.core.lacking = lambda model: ""  # type: ignore[method-assign]
        self.open_requests: dict[str, StagedRequest] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.sent = 0
        self.starts_s = 3.0
        """How long another engine takes to start."""
        self._later = asyncio.get_running_loop().call_later
        self._begun = False
        self._moved: dict[tuple[str, str], float] = {}

    async def start(self) -> str:
        url = await self.operators.listen()
        self.core.start()
        self._begun = True
        self.operators.page.chat.url = await self._clients()
        self._tasks += [asyncio.create_task(self._report()), asyncio.create_task(self._control())]
        return url

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()
        await self.core.close()
        await self.operators.close()

    def _manage(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartReplica(replica_spec):
                    wait_s = self.starts_s if self._begun else 0.0
                    self._later(wait_s, self._ready, replica_spec.id)
                case DrainReplica(replica):
                    self._later(0.2, self._drained, replica)

    def _ready(self, replica: str) -> None:
        if replica in self.core.brain.fleet.views:
            self.core.brain_loop.tell(events.ReplicaReady(replica))

    def _drained(self, replica: str) -> None:
        replica_state = self.core.brain.fleet.views.get(replica)
        if replica_state is not None and replica_state.open_requests:
            self._later(0.2, self._drained, replica)
        elif replica_state is not None:
            self.core.brain_loop.tell(events.ReplicaDrained(replica))

    def kill(self, replica: str) -> None:
        """Its engine is gone, and all that it worked on has failed."""
        self.core.brain_loop.tell(events.ReplicaLost(replica, "its process ended"))
        for name, staged in list(self.open_requests.items()):
            run = staged.run
            if run is not None and any(segment.replica == replica for segment in run.route.segments):
                self._stop(staged)
                self.line.tell(events.AttemptFailed(name, run.attempt, "replica", replica, staged.streamed))

    async def _control(self) -> None:
        """As a controller does: asks what is wanted, and kills whom it should."""
        while True:
            for replica in list(self.operations.wanted()["kill"]):  # type: ignore[call-overload]
                self.kill(replica)
            await asyncio.sleep(0.2)

    async def _report(self) -> None:
        while True:
            views = self.core.brain.fleet.views
            for name, replica in list(views.items()):
                if replica.state == "starting":
                    continue
                total = 4000
                used = min(total - 1, replica.open_context_tokens // 16 + replica.open_requests)
                prefill, free = replica.open_prefill_tokens, total - used
                status = events.ReplicaStatus(0, replica.open_requests, prefill, 0, free, total, 0.02)
                self.core.brain_loop.tell(events.ReplicaReported(name, status))
            self.core.watch.links = tuple(
                events.LinkReported(*ends, min(1.0, self._moved.pop(ends, 0.0) * 2 * 8e-9 / gbps), 0.0, gbps)
                for ends, gbps in self.core.links_gbps.items()
            )
            await asyncio.sleep(0.5)

    def send(
        self, prompt_tokens: int, output_tokens: int, tenant: str = "search", name: str = "", news: Any = None
    ) -> str:
        name = name or secrets.token_hex(12)
        now_s = self.core.brain_loop.now_s()
        request = Request(name, MODEL, now_s, prompt_tokens, output_tokens, tenant=tenant)
        self.open_requests[name] = StagedRequest(request, output_tokens, time.monotonic(), news=news)
        self.sent += 1
        self.line.tell(events.RequestArrived(request))
        return name

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            staged = self.open_requests.get(action.request)  # type: ignore[union-attr]
            if staged is None:
                continue
            if isinstance(action, Run):
                self._stop(staged)
                staged.run = action
                self._run(staged, action)
            elif isinstance(action, Refuse):
                self._ended(staged, "overloaded", 429)

    def _stop(self, staged: StagedRequest) -> None:
        for timer in staged.timers:
            timer.cancel()
        staged.timers.clear()

    def _run(self, staged: StagedRequest, run: Run) -> None:
        at_s, name = 0.003, staged.request.id
        for place, segment in enumerate(run.route.segments):
            node, crowd = self._node(segment.replica)
            stop = run.prompt_tokens if segment.stop is None else segment.stop
            at_s += (stop - segment.start) / PREFILL_PER_S[node] * crowd + 0.012
            if segment.stop is None:
                break
            computed = events.SegmentComputed(name, run.attempt, place)
            staged.timers.append(self._later(at_s, self.line.tell, computed))
            size = (stop - segment.start) * KV_BYTES_PER_TOKEN
            at_s += 0.008 + size / 2.5e9
            staged.timers.append(self._later(at_s, self._handed, staged, run, place, size))
        node, crowd = self._node(run.route.decoder)
        staged.timers.append(self._later(at_s, self._token, staged, run, TPOT_S[node] * crowd))

    def _node(self, replica: str) -> tuple[str, float]:
        """Its type, and how much longer all takes with what it has to do."""
        replica_state = self.core.brain.fleet.views.get(replica)
        if replica_state is None:
            return "1xL4", 1.0
        part = self.core.replica_models.templates[replica_state.member.template].replicas[
            replica_state.member.index
        ]
        node = next(iter(part.layout.node_counts))
        return node, (1.0 + 0.06 * replica_state.open_requests) * self._chance.uniform(0.92, 1.12)

    def _handed(self, staged: StagedRequest, run: Run, place: int, size: int) -> None:
        source, target = (segment.replica for segment in run.route.segments[place : place + 2])
        self.operators._moved(source, target, "raw", size, 0.01)
        self.operators.meter.count(SEGMENT_TOKENS, (source, "prompt"), size // KV_BYTES_PER_TOKEN)
        views = self.core.brain.fleet.views
        if source in views and target in views:
            ends = (views[source].member.region, views[target].member.region)
            self._moved[ends] = self._moved.get(ends, 0.0) + size
        self.line.tell(events.SegmentDone(staged.request.id, run.attempt, place))

    def _token(self, staged: StagedRequest, run: Run, tpot_s: float) -> None:
        if staged.first_s is None:
            staged.first_s = time.monotonic()
        if staged.streamed == run.streamed_tokens:
            self.line.tell(events.FirstToken(staged.request.id, run.attempt))
        staged.streamed += 1
        if staged.news is not None:
            staged.news.put_nowait(ANSWER.split()[(staged.streamed - 1) % ANSWER_WORDS])
        if staged.streamed >= staged.output_tokens:
            self.line.tell(events.RequestFinished(staged.request.id, run.attempt, staged.streamed))
            last = run.route.segments[-1]
            self.operators.meter.count(
                SEGMENT_TOKENS, (run.route.decoder, "prompt"), run.prompt_tokens - last.start
            )
            self.operators.meter.count(SEGMENT_TOKENS, (run.route.decoder, "output"), staged.streamed)
            self._ended(staged, "length", 200)
            return
        # One timer per token for who reads them; else one for many, which nobody sees.
        step = 1 if staged.news is not None else min(8, staged.output_tokens - staged.streamed)
        staged.streamed += step - 1
        staged.timers[:] = [self._later(tpot_s * step, self._token, staged, run, tpot_s)]

    def _ended(self, staged: StagedRequest, outcome: str, status: int) -> None:
        self.open_requests.pop(staged.request.id, None)
        if staged.news is not None:
            staged.news.put_nowait(None)
        request = staged.request
        times = (staged.came_s, staged.first_s, time.monotonic())
        ends = (request.prompt_tokens, 0, staged.streamed, *times, True)
        asked = (request.id, "", request.tenant, MODEL, "standard")
        self.operators.meter.answered(RequestOutcome(*asked, outcome, status, *ends))

    async def flood(self, rate_per_s: float, lasts_s: float, output_tokens: int = 60) -> None:
        end_s = time.monotonic() + lasts_s
        next_s = time.monotonic()
        while next_s < end_s:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            tenant = self._chance.choices(("search", "support", "batch"), (5, 3, 2))[0]
            prompt = int(self._chance.lognormvariate(6.0, 0.6)) + 20
            self.send(min(prompt, 4000), max(2, int(self._chance.expovariate(1 / output_tokens))), tenant)
            next_s += self._chance.expovariate(rate_per_s)

    async def _clients(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """Says what was asked, word for word, and some words of its own."""
        body = await request.json()
        asked = str(body["messages"][-1]["content"])
        name, news = secrets.token_hex(12), asyncio.Queue[str | None]()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.send(max(900, len(asked)), int(body.get("max_tokens", 40)), "support", name, news)
        piece, first = f"You asked: {asked}\n", True
        with suppress(ConnectionError):
            while piece is not None:
                delta = {"content": piece if first else f" {piece}"}
                choice = {"index": 0, "delta": delta, "finish_reason": None}
                line = json.dumps({"id": f"chatcmpl-{name}", "choices": [choice]})
                await response.write(f"data: {line}\n\n".encode())
                piece, first = await news.get(), False  # type: ignore[assignment]
            await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def stage(fleet: Any = None, key: str | None = KEY, seed: int = 1) -> AsyncIterator[tuple[Stage, str]]:
    made = Stage(fleet or small_fleet(), key, seed)
    try:
        yield made, await made.start()
    finally:
        await made.close()

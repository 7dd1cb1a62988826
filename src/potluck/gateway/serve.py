"""A gateway put together: the core, a worker for clients, and the operators' port."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from aiohttp import web

from potluck.api.aiohttp_requests import set_up
from potluck.api.http import ServedNames, allow_open_files, server_tls
from potluck.core.state.policy import Policy
from potluck.gateway.admin import families
from potluck.gateway.admin.app import AdminContext, build_admin
from potluck.gateway.admin.counters import Counters
from potluck.gateway.admin.metrics import GatewayMetrics
from potluck.gateway.admin.operations import Operations
from potluck.gateway.admin.usage import UsageFile
from potluck.gateway.core import GatewayCore
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.http.limits import calm
from potluck.gateway.http.server import bound, url_of
from potluck.gateway.http.takeover import SocketHandover
from potluck.gateway.openai.keys import KeyRing
from potluck.gateway.openai.requests import ModelCard
from potluck.gateway.operator_state import OperatorState
from potluck.gateway.page.routes import PageRoutes
from potluck.gateway.page.snapshot import notices
from potluck.gateway.page.stream import PageStream
from potluck.gateway.registry.engine_list import EngineEntry, EngineListFile
from potluck.gateway.values import LOOPBACK, GatewaySettings
from potluck.gateway.workers.supervisor import FOLLOWED, SERVES, BrainProcessContext, Supervisor
from potluck.gateway.workers.worker import Worker, WorkerContext, calls_of, model_card
from potluck.gateway.workers.worker_pool import WorkerPool
from potluck.runtime.resolved_plan import ResolvedPlan

HANDED_S = 600.0
"""A gateway that another has followed ends when its last answer has, however long: as long as engines allow."""
KNOWN_S = 30.0  # In which one that is to follow another, which serves meanwhile, has met its engines.
MET_S = 2.0
FIRST_PROBE_S = 2.0
"""Before it listens, a gateway of servers that others run waits so long for the answers to its first probes."""
LOOK_S = 0.01
Ready = Callable[[str, str], None]


class AdminServer:
    def __init__(self, core: GatewayCore, settings: GatewaySettings) -> None:
        self._settings = settings
        self._usage = None if settings.usage is None else UsageFile(settings.usage, time.time)
        self.page = PageRoutes(PageStream(core, self._tokens, lambda: notices(core, settings)))
        self.meter = Counters(
            core.registry.region_of,
            record=None
            if (usage := self._usage) is None
            else lambda told: usage.record(told, time.monotonic()),
            told=self.page.show.hour.told,
        )
        self._syncing: asyncio.Future[None] | None = None
        self._keys = None
        if settings.keys is not None:
            unreachable = settings.places.unreachable
            self._keys = KeyRing(settings.keys, time.monotonic(), time.time, may_open=unreachable)
        self.metrics = GatewayMetrics(self.meter, Operations(core), self._gauges)
        self._context = AdminContext(
            self.metrics,
            Operations(core, settings.engine_key),
            self._notes,
            key=settings.admin_key,
            served=ServedNames(keyed=settings.admin_key is not None),
            page=self.page,
            near=settings.places.admin_host in LOOPBACK,
        )
        self._runner: web.AppRunner | None = None
        self.sockets: Sequence[socket.socket] = ()
        core.decision_log.decided = self.meter.decided
        core.watch.moved = self._moved
        core.brain_loop.at_ticks += [self.metrics.look, self._flush, self.page.show.look]

    def _moved(self, source: str, target: str, codec: str, moved_bytes: int, took_s: float) -> None:
        self.meter.moved(source, target, codec, moved_bytes, took_s)
        self.page.show.flows.moved(source, target, codec, moved_bytes, took_s)

    def _tokens(self) -> Mapping[tuple[str, ...], float]:
        """By replica and kind, since the gateway started."""
        return self.meter.counted(families.SEGMENT_TOKENS)

    def _flush(self) -> None:
        if self._usage is not None:
            self._usage.look()
            self._sync(self._usage)
        if self._keys is not None:
            self._keys.look(time.monotonic())

    def _sync(self, usage: UsageFile) -> None:
        if self._syncing is None or self._syncing.done():
            sync = usage.unsynced()
            if sync is not None:
                self._syncing = asyncio.get_running_loop().run_in_executor(None, sync)

    def _gauges(self) -> dict[families.Family, float]:
        if self._keys is None:
            return {}
        return {families.KEYS: len(self._keys), families.KEYS_BROKEN: float(bool(self._keys.problem))}

    def _notes(self) -> dict[str, object]:
        notes: dict[str, object] = {}
        if self._keys is not None:
            notes["keys"] = {"known": len(self._keys), "problem": self._keys.problem}
        if self._usage is not None:
            losses = [(self._usage.notice, self._usage.lost), *self.meter.usage_notes.values()]
            problem = next((why for why, _ in losses if why), "")
            notes["usage"] = {"lost": sum(lost for _, lost in losses), "problem": problem}
        return notes

    async def listen(self, sockets: Sequence[socket.socket] = ()) -> str:
        addresses = self._settings.places
        sockets = sockets or await bound(addresses.admin_host, addresses.admin_port)
        self.sockets = sockets
        # Whoever is on this machine needs no certificate to believe it.
        far = self._settings.tls is not None and addresses.admin_host not in LOOPBACK
        tls = server_tls(*self._settings.tls) if far and self._settings.tls else None
        # Who has gone watches no more, and what was asked for them is given up.
        self._runner = web.AppRunner(
            build_admin(self._context), access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await set_up(self._runner)
        for item in sockets:
            await web.SockSite(self._runner, item, ssl_context=tls).start()
        return url_of(sockets[0], tls)

    async def leave(self) -> None:
        """Orders and questions are a successor's from now on; those who watch may go on."""
        if self._runner is not None:
            for site in tuple(self._runner.sites):
                await site.stop()

    async def close(self, followed: bool = False) -> None:
        """`followed`: who watches is at home with the next gateway, and needs no goodbye."""
        if not followed:
            self.page.show.goodbye()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._usage is not None:
            self._usage.close()


def cards_of(
    resolved: ResolvedPlan, settings: GatewaySettings, engine_list: tuple[EngineEntry, ...]
) -> tuple[Callable[[], ModelCard], ...]:
    cards = []
    for name, model in resolved.models.items():
        entries = [entry for entry in engine_list if entry.model in ("", name)]
        plain = {entry.kind for entry in entries} == {"openai"}
        unknown = name in resolved.unknown_models
        known, vocab = (0, 0) if unknown else (model.max_context_tokens, model.vocab)
        context_tokens = context_of(known, entries)
        only = settings.mock_engines or context_tokens != known
        least = min((entry.max_model_len for entry in entries if entry.max_model_len), default=0)
        folder = settings.files.get(name)
        cards.append(partial(model_card, name, context_tokens, vocab, plain, folder, only, least))
    return tuple(cards)


def context_of(model_tokens: int, entries: Sequence[EngineEntry]) -> int:
    """The longest request of a model: as its servers tell where all of them do, within its own; 0: unknown."""
    limits = [entry.max_model_len for entry in entries]
    if not limits or not all(limits):
        return model_tokens
    return min(max(limits), model_tokens or max(limits))


def worker_beside(
    core: GatewayCore,
    context: WorkerContext,
    connection_pool: ConnectionPool,
    counters: Counters,
    answers: Path | None = None,
) -> Worker:
    worker = Worker(
        context, core.registry, connection_pool, counters, core.lacking, core.brain_loop.line, answers=answers
    )
    core.registry.on_gone.append(worker.dispatcher.gone)
    core.watch.streamed_s = worker.dispatcher.streamed_s
    return worker


async def serve(
    resolved: ResolvedPlan, context: WorkerContext, ready: Ready, process: BrainProcessContext
) -> None:
    """Serve until a signal says to end; `ready` hears the addresses. A parent holds the ports."""
    settings = context.settings
    allow_open_files()
    connection_pool = calls_of(settings)
    core = GatewayCore(
        resolved,
        context.policy,
        connection_pool,
        engine_list=settings.engines,
        log=settings.log,
        operator_state=_memory(settings, process),
        why=settings.why,
        plan_version=settings.plan_version,
    )
    admin_server = AdminServer(core, settings)
    workers: Worker | WorkerPool
    if settings.places.workers == 1:
        workers = worker_beside(
            core, context, connection_pool, admin_server.meter, settings.answers_in(process.home)
        )
    else:
        workers = WorkerPool(core, admin_server.meter, settings, process)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def parent_is_gone() -> None:
        """Nobody would replace this process; where its ports can be taken over, it serves until that is done."""
        loop.remove_reader(process.life)
        process.orphaned = True
        if settings.takeover is None:
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if process.life >= 0:
        loop.add_reader(process.life, parent_is_gone)
    handover: SocketHandover | None = None
    try:
        if isinstance(workers, Worker):
            url, admin, handover = await _succeed(core, workers, admin_server, settings, process, stop)
        else:
            url, admin = await workers.start(), await admin_server.listen(process.operators)
            core.start()
        admin_server.page.chat.url = url
        calm()
        ready(url, admin)
        process.tell(SERVES)
        await stop.wait()
    finally:
        followed = handover is not None and handover.handed
        if followed:
            process.tell(FOLLOWED)
        if handover is not None:
            handover.close()
        if followed:
            await admin_server.leave()
        await workers.close(HANDED_S if followed else settings.drain_s, followed)
        await core.close()
        await admin_server.close(followed)
        await connection_pool.close()
        if process.orphaned:
            process.close()


def _memory(settings: GatewaySettings, process: BrainProcessContext) -> OperatorState:
    """What this gateway was told before its process died; of one that was started anew, only which engines run."""
    if settings.state is None:
        return OperatorState(process.home)
    settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    operator_state = OperatorState(settings.state)
    if not process.again:
        operator_state.only_entries()
    return operator_state


async def _succeed(
    core: GatewayCore,
    worker: Worker,
    admin_server: AdminServer,
    settings: GatewaySettings,
    process: BrainProcessContext,
    stop: asyncio.Event,
) -> tuple[str, str, SocketHandover | None]:
    """Take the place of the gateway that had these ports, once the fleet is known; or be the first one."""
    taken = None if process.again else process.taken
    if taken is not None:
        core.cordons.inherit(taken.cordons)
    core.start()
    if core.registry.engines:  # else somebody will say which there are
        # What the one before cannot serve either need not be waited for; nobody is refused meanwhile.
        with contextlib.suppress(TimeoutError):
            first_probe_s = FIRST_PROBE_S if settings.attached else 0.0
            within_s = KNOWN_S if taken is not None else MET_S if process.again else first_probe_s
            async with asyncio.timeout(within_s):
                while any(map(core.lacking, core.replica_models.resolved.models)):
                    if settings.attached and all(engine.asked_s for engine in core.registry.engines):
                        break
                    await asyncio.sleep(LOOK_S)
    url = await worker.listen(process.clients[0])
    admin = await admin_server.listen(process.operators)
    handover = None
    if settings.takeover is not None:
        marks = core.cordons
        handover = SocketHandover(
            settings.takeover, process.clients[0], admin_server.sockets, stop.set, lambda: marks.marks
        )
    if taken is not None:
        taken.serving()
    return url, admin, handover


def serve_forever(resolved: ResolvedPlan, policy: Policy, settings: GatewaySettings, ready: Ready) -> None:
    import uvloop

    engine_list = () if settings.engines is None else EngineListFile(settings.engines).entries
    context = WorkerContext(settings, policy, cards_of(resolved, settings, engine_list))

    def brain(process: BrainProcessContext) -> None:
        def said(url: str, admin: str) -> None:
            if not process.again:
                ready(url, admin)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(resolved, context, said, process))

    Supervisor(context, brain).run()

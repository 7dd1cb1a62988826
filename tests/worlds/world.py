"""A world: the gateway's own processes, mock engines, clients, and what befalls them; all drawn from one seed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from potluck.api import http as api_http
from potluck.api.tokenizer import ModelTokenizer
from potluck.catalog import models, nodes
from potluck.core.state.events import AttemptFailed, Event
from potluck.core.state.policy import Policy
from potluck.core.values.layout import single
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedReplica,
    PlannedShare,
    Template,
)
from potluck.core.values.types import NodeOffer, Region, Role
from potluck.gateway import serve as gateway_serve
from potluck.gateway.admin import usage
from potluck.gateway.admin.counters import Counters
from potluck.gateway.core import GatewayCore
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.openai import handler as openai_handler
from potluck.gateway.openai.requests import ModelCard
from potluck.gateway.values import GatewaySettings, ListenAddresses
from potluck.gateway.workers import worker_process
from potluck.gateway.workers.supervisor import BrainProcessContext
from potluck.gateway.workers.worker import Worker, WorkerContext
from potluck.runtime import brain_log
from potluck.runtime.resolved_plan import ResolvedPlan
from worlds import faults, mock, rules, virtual
from worlds.clients import LETTERS, SPARE, Ask, Client, Outcome
from worlds.control import ControllerService
from worlds.engines import END, Engine
from worlds.loop import UNIX, ListeningSocket, WorldLoop
from worlds.sockets import Wire
from worlds.virtual import DEAD, InlineExecutor, InlineThread, Process

NODE = nodes.canonical("1xA10")
LLAMA = models.model("Llama-3.1-8B")
CLIENTS, OPERATORS = ("gw", 8000), ("gw", 8001)
MARGIN_S = 12.0  # In which whoever was struck is well again, and known to be.
SETTLED_S = 60.0  # From the end of trouble until all that is wanted is there.
LEFT_S = 100.0  # From the last answer until nothing is left: a connection may idle for 75 s.
READ_S = 2.5  # In which a file of keys that was changed is read.
MINUTE_S = 61.0
ADMIN_KEY = "operators"


def without_threads() -> None:
    openai_handler.ThreadPoolExecutor = InlineExecutor  # type: ignore[misc, assignment]
    brain_log.threading = type("threading", (), {"Thread": InlineThread})  # type: ignore[assignment]
    usage.reserve, usage.free_bytes = virtual.reserve, virtual.free_bytes
    gateway_serve.calm = worker_process.calm = lambda: None
    gateway_serve.allow_open_files = worker_process.allow_open_files = lambda: None


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    target: int
    lasts_s: float
    amount: float = 0.0


@dataclass(frozen=True)
class Scenario:
    seed: int
    mixed: int  # Replicas that do whole requests.
    combos: int  # Pairs of one for prompts and one for answers.
    workers: int
    pieces: float
    latency_s: float
    token_s: float
    policy: Policy
    limits: tuple[tuple[str, float], ...]  # Of the first key.
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    controlled: bool = False
    shipped: bool = False  # Engines are the mock that ships, with its KV transport.

    @property
    def trouble_ends_s(self) -> float:
        return max([fault.at_s + fault.lasts_s for fault in self.faults] + [ask.at_s for ask in self.asks])


ENGINE_FAULTS = (
    "die", "restart", "other", "freeze", "stuck", "mute", "slow", "lie", "refuse", "forget", "wrong_kv",
)  # fmt: skip
LINK_FAULTS = ("cut", "half_cut", "thin", "delay", "reset")
WIRE_FAULTS = ("flip", "wire_cut", "stall")  # Of KV on its way to an engine that ships.
KV_FAULTS = (*WIRE_FAULTS, "forget", "wrong_kv")
GATEWAY_FAULTS = ("brain_kill", "brain_freeze", "worker_kill", "worker_freeze", "power", "term")
OTHER_FAULTS = ("keys", "disk_full", "clock", "limits")
CONTROLLER_FAULTS = ("ctl_kill", "ctl_fuse", "ctl_freeze", "ctl_second", "spawn_fails")
UPGRADES = ("upgrade", "ctl_older")  # Of an engine, and a controller of the release before.
ORDERS = ("drain", "kill", "cordon")  # Of operators, where a controller puts others in their place.


def scenario_of(seed: int, shipped: bool = True) -> Scenario:
    chance = random.Random(f"scenario {seed}")
    large = chance.random() < 0.02
    mixed = 20 if large else chance.choice((1, 2, 2, 3, 4, 6))
    combos = chance.choice((0, 0, 1, 2))
    span_s = chance.uniform(3.0, 15.0)
    count = 60 if large else chance.randint(3, 14)
    if chance.random() < 0.1:  # all at once
        span_s = 0.6
    controlled = chance.random() < 0.25
    known = (*ENGINE_FAULTS, *LINK_FAULTS, *GATEWAY_FAULTS, *OTHER_FAULTS)
    kinds = chance.sample(
        known + CONTROLLER_FAULTS * 2 + ORDERS if controlled else known, chance.randint(1, 5)
    )
    faults = tuple(
        Fault(
            chance.uniform(0.5, span_s),
            chance.choice(kinds),
            chance.randrange(1000),
            chance.choice((0.2, 1.0, 3.0, 5.0, chance.uniform(0.0, 15.0))),
            chance.random(),
        )
        for _ in range(chance.choice((0, 1, 2, 3, 5, 8)))
    )
    scenario = Scenario(
        seed,
        mixed,
        combos,
        chance.choice((1, 1, 2)),
        chance.choice((0.0, 0.2, 0.9)),
        chance.choice((2e-4, 2e-3, 2e-2)),
        chance.choice((0.02, 0.05, 0.2)),
        Policy(affinity=chance.choice((0.0, 1.0))),
        chance.choice(((), _tokens(seed), (("concurrent", 2),), (("requests_per_min", 2),))),
        tuple(_ask(chance, number, span_s) for number in range(count)),
        tuple(sorted((*faults, *_upgrades(seed, span_s, controlled)), key=lambda fault: fault.at_s)),
        controlled,
    )
    return _shipped(scenario, span_s) if shipped and not large else scenario


def _tokens(seed: int) -> tuple[tuple[str, float], ...]:
    """Drawn apart: whatever else a seed has stays as it is."""
    most = random.Random(f"tokens {seed}").choice((0, 0, 40, 150))
    return (("tokens_per_min", most),) if most else ()


def _shipped(scenario: Scenario, span_s: float) -> Scenario:
    """One world in three has engines that ship, most of them pairs; drawn apart, so that others stay as they are."""
    chance = random.Random(f"engines {scenario.seed}")
    if chance.random() > 1 / 3:
        return scenario
    mixed, combos = min(scenario.mixed, 2), scenario.combos or chance.choice((0, 1, 1))
    struck = range(mixed, mixed + 2 * combos) if combos else range(mixed)
    draw = chance.choice
    more = [
        Fault(
            chance.uniform(0.5, span_s),
            draw(KV_FAULTS),
            draw(struck),
            draw((0.5, 3.0, 10.0)),
            chance.random(),
        )
        for _ in range(draw((0, 1, 2, 4)))
    ]
    return replace(
        scenario,
        mixed=mixed,
        combos=combos,
        asks=tuple(replace(ask, shipped=True) for ask in scenario.asks),
        faults=tuple(sorted((*scenario.faults, *more), key=lambda fault: fault.at_s)),
        shipped=True,
    )


def _upgrades(seed: int, span_s: float, controlled: bool) -> list[Fault]:
    """Drawn apart: whatever else a seed has stays as it is."""
    chance = random.Random(f"upgrade {seed}")
    count = chance.choice((1, 2, 3)) if chance.random() < 0.08 else 0
    return [
        Fault(
            chance.uniform(0.5, span_s),
            UPGRADES[controlled],
            chance.randrange(1000),
            chance.uniform(0.2, 3.0),
        )
        for _ in range(count)
    ]


def _ask(chance: random.Random, number: int, span_s: float) -> Ask:
    how = chance.choices(
        ("patient", "leaves", "stalls", "trickles", "stranger", "retries", "twins", "reuses"),
        (24, 4, 1, 2, 1, 6, 2, 1),
    )[0]
    long = how == "stalls" or chance.random() < 0.01
    most = chance.randint(400, 900) if long else chance.choice((1, 2, 8, 20, 40, 80))
    amounts = {
        "leaves": chance.randint(0, 8),
        "stalls": chance.uniform(1.0, 45.0),
        "trickles": chance.uniform(0.0, 0.6),
    }
    return Ask(
        number,
        chance.uniform(0.0, span_s),
        chance.randrange(3),
        chance.choice((1, 2, 15, 16, 17, 40, 100)),
        most,
        chance.choice((0, most)),
        long or chance.random() < 0.7,
        how,
        float(amounts.get(how, 0)),
    )


@lru_cache(maxsize=64)
def resolved_of(mixed: int, combos: int) -> ResolvedPlan:
    templates, deployments = [], []
    kinds: tuple[tuple[str, tuple[Role, ...], int], ...] = (
        ("homogeneous", ("mixed",), mixed),
        ("combo", ("prefill", "decode"), combos),
    )
    for kind, roles, count in kinds:
        replicas = tuple(PlannedReplica(role, single(NODE, 1, LLAMA.layer_count)) for role in roles)
        capacity = (BucketCapacity(0, 0.0, 0.0, 5.0, 0.2, 0.03),)
        templates.append(
            Template(kind, kind, "m", (NodeCount(NODE, len(roles)),), replicas, capacity, "measured")  # type: ignore[arg-type]
        )
        if count:
            deployments.append(Deployment(kind, "near", count))
    shares = tuple(PlannedShare(item.template, "near", 0, "closed", 5.0 * item.count) for item in deployments)
    buckets = (LengthBucket("m", 0, 8192, 10.0),)
    plan = Plan("test", tuple(templates), tuple(deployments), buckets, shares, (), (), 1.0, 0.0)
    region = Region("near", (NodeOffer(NODE, 1.0, 100),))
    return ResolvedPlan(
        plan, {"m": LLAMA}, {NODE: nodes.node_type(NODE)}, (region,), (), {}, {"m": (60.0, 30.0)}
    )


@lru_cache(maxsize=1)
def card() -> ModelCard:
    tokenizer = Tokenizer(BPE(vocab={letter: place for place, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = Fuse()
    return ModelCard(
        "m", 4096, ModelTokenizer(tokenizer), ends=frozenset({END}), vocab=len(LETTERS), created_s=1
    )


class Keys:
    """The file of keys, and what clients know of it. A rotated key's old secret holds for a while."""

    def __init__(self, path: Path, limits: Sequence[tuple[str, float]]) -> None:
        self._path, self.limits = path, dict(limits)
        self._round = [0, 0, 0]
        self._since_s = [0.0, 0.0, 0.0]
        self._spare = [SPARE]
        self.write()

    def secret(self, key: int, now_s: float) -> str:
        """Whoever has a new one uses it when the gateway had time to read it."""
        return f"sk-{key}-{max(0, self._round[key] - (now_s < self._since_s[key] + READ_S))}"

    def rotate(self, key: int, now_s: float) -> None:
        if now_s >= self._since_s[key] + READ_S:
            self._round[key] += 1
            self._since_s[key] = now_s
            self.write()

    def retire(self) -> None:
        """The key that nobody used is taken away."""
        self._spare.clear()
        self.write()

    def write(self) -> None:
        lines = [
            json.dumps({"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()})
            for name in self._spare
        ]
        for key, number in enumerate(self._round):
            for kept in range(max(0, number - 1), number + 1):
                digest = hashlib.sha256(f"sk-{key}-{kept}".encode()).hexdigest()
                limits = self.limits if key == 0 else {}
                lines.append(json.dumps({"name": f"k{key}", "sha256": digest, "tenant": f"t{key}", **limits}))
        fresh = self._path.with_suffix(".new")
        fresh.write_text("\n".join(lines))
        os.utime(fresh, (virtual.EPOCH_S, virtual.EPOCH_S + sum(self._round) - len(self._spare)))
        os.replace(fresh, self._path)


def settings_of(home: Path, addresses: ListenAddresses, controlled: bool = False) -> GatewaySettings:
    folder = home / "gw"
    return GatewaySettings(
        addresses,
        engines=None if controlled else folder / "engines.yaml",
        keys=home / "keys.jsonl",
        usage=folder / "usage.jsonl",
        log=folder / "brain.log",
        admin_key=ADMIN_KEY,
        secret=b"s" * 32,
        state=folder / "state",
    )


class GatewayService:
    """What a supervisor has: sockets and a folder that outlive the processes, which it starts again."""

    def __init__(self, world: World) -> None:
        self.world, self.loop = world, world.loop
        self.host = world.loop.network.host("gw")
        self.host.folder = folder = world.folder / "gw"
        self.host.reserves = world.scenario.seed % 2 == 0
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        scenario = world.scenario
        self.workers = scenario.workers
        addresses = ListenAddresses(*CLIENTS, *OPERATORS, workers=self.workers)
        self.settings = settings_of(world.folder, addresses, scenario.controlled)
        self.usage, self.log = folder / "usage.jsonl", folder / "brain.log"
        self.resolved = resolved_of(scenario.mixed, scenario.combos)
        self.context = WorkerContext(self.settings, scenario.policy, (card,))
        self.brain_socket = ListeningSocket((UNIX, str(self.home / worker_process.BRAIN)))  # type: ignore[arg-type]
        self.clients = [ListeningSocket(CLIENTS) for _ in range(self.workers)]
        self.operators = ListeningSocket(OPERATORS)
        held = self.loop.network.held
        held |= {item.address: item for item in (self.brain_socket, self.operators, self.clients[0])}
        self.processes: dict[int, Process] = {}  # -1: the Brain's.
        self.begun = self.starts = 0
        self.ready = self.ending = False  # Ending: it was told to, and is started anew when all have.

    def start(self) -> None:
        for item in (self.operators, *self.clients):
            item.open = True
        self.start_brain()
        for place in range(self.workers if self.workers > 1 else 0):
            self.start_worker(place)

    def start_brain(self) -> None:
        process = self._process(-1, "brain")
        post = BrainProcessContext(
            self.home,
            self.brain_socket,  # type: ignore[arg-type]
            [[item] for item in self.clients],  # type: ignore[list-item]
            [self.operators],  # type: ignore[list-item]
            again=self.begun > 0,
        )
        self.begun += 1
        self._run(process, gateway_serve.serve(self.resolved, self.context, self._ready, post))

    def start_worker(self, place: int) -> None:
        process = self._process(place, f"worker {place}")
        sockets: Any = [self.clients[place]]
        self._run(process, worker_process.work(self.context, self.home, place, sockets, lambda: None))

    def _process(self, place: int, name: str) -> Process:
        process = self.processes[place] = Process(self.loop, name, self.host)
        process.made = {}  # type: ignore[attr-defined]
        self.starts += 1
        return process

    def _run(self, process: Process, work: Any) -> None:
        task = process.run(self.loop.create_task, work)
        process.remains.append(task)
        task.add_done_callback(lambda done: self._ended(process, done))

    def _ready(self, url: str, admin: str) -> None:
        self.ready = True

    def _ended(self, process: Process, done: asyncio.Task[None]) -> None:
        if process.state == DEAD or self.world.over:
            return
        error = None if done.cancelled() else done.exception()
        self.loop.told("ended", process.name, repr(error))
        if error is not None:
            self.world.breaks(f"{process.name} ended with {error!r}")
        self.kill(next(place for place, item in self.processes.items() if item is process))

    def kill(self, place: int, silent: bool = False) -> None:
        """It is started again, as its supervisor does."""
        process = self.processes[place]
        if process.state == DEAD:
            return
        process.kill(silent)
        wait_s = self.loop.chance.uniform(0.02, 0.3)
        if self.ending:
            if all(item.state == DEAD for item in self.processes.values()):
                self.ending, self.begun = False, 0
                self.loop.call_later(wait_s, self.start, context=self.world.kernel)
            return
        again = self.start_brain if place < 0 else lambda: self.start_worker(place)
        self.loop.call_later(wait_s, again, context=self.world.kernel)

    def made(self, kind: type) -> list[Any]:
        return [
            item.made[kind] for item in self.processes.values() if item.state != DEAD and kind in item.made
        ]


def _noted(kind: type) -> None:
    """Objects that rules look into are noted by the process that makes them."""
    begin = kind.__init__

    def noted(self: Any, *given: Any, **more: Any) -> None:
        process = virtual.running()
        if process is not None and hasattr(process, "made"):
            process.made[kind] = self
        begin(self, *given, **more)

    kind.__init__ = noted  # type: ignore[misc]


def _failures_noted() -> None:
    """Note each attempt that a process reports to the Brain as failed, to compare their number with its metrics.

    A process reports one failure again each time the Brain queries the attempt: a set has it once.
    """
    tell = Dispatcher._tell

    def told(self: Dispatcher, event: Event) -> None:
        process = virtual.running()
        if isinstance(event, AttemptFailed) and process is not None:
            failed = process.__dict__.setdefault("failed_attempts", set())
            failed.add((event.request, event.attempt))
        tell(self, event)

    Dispatcher._tell = told  # type: ignore[method-assign]


_noted(GatewayCore)
_noted(Worker)
_noted(Counters)
_failures_noted()


class LogTrap(logging.Handler):
    """An error that the product logs is a rule broken, unless the world asked for it."""

    ASKED = ("usage cannot be", "the Brain is gone", "the Brain lost this worker")

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self._world.loop.told("log", record.name.removeprefix("potluck."), message)
        if record.levelno >= logging.ERROR and not message.startswith(self.ASKED):
            error = "" if record.exc_info is None else repr(record.exc_info[1])
            self._world.breaks(f"logged: {message.splitlines()[0]} {error}")
            self._world.problem = self._world.problem or record


@dataclass
class Trouble:
    """When something was not as it should be: a name and an interval."""

    where: str
    from_s: float
    to_s: float


class World:
    engine_faults = (*ENGINE_FAULTS, *WIRE_FAULTS, "upgrade")
    link_faults, gateway_faults = LINK_FAULTS, GATEWAY_FAULTS
    controller_faults, orders = (*CONTROLLER_FAULTS, "ctl_older"), ORDERS
    controller: ControllerService | None = None
    hub = "gw"

    def __init__(self, scenario: Scenario, check_log: bool = False) -> None:
        without_threads()
        self.scenario, self.check_log = scenario, check_log
        self.loop = WorldLoop(scenario.seed)
        self.kernel = virtual.contextvars.Context()
        self.folder = Path(
            tempfile.mkdtemp(prefix="world-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        self.broken = self.loop.broken
        self.problem: Any = None
        self.over = False
        self.troubles: list[Trouble] = self.loop.troubles
        self.power_lost_s: list[float] = []
        self.limited = bool(scenario.limits)
        self.faults: Counter[str] = Counter()
        self.clients: list[Client] = []
        self.outcomes: list[Outcome] = []
        self.engines: list[Engine] = []
        self.keys_path = self.folder / "keys.jsonl"
        self.keys = Keys(self.keys_path, scenario.limits)
        if scenario.shipped:
            mock.install()
        self.loop.switches = (0.0, 0.05, 0.3)[scenario.seed % 3]
        # A Brain that takes another's place counts a request's failures from 0.
        again = ("brain_kill", "brain_freeze", "worker_kill", "worker_freeze", "power", "term")
        self.loop.replaces_brains = any(fault.kind in again for fault in scenario.faults)
        network = self.loop.network
        network.pieces, network.far.latency_s = scenario.pieces, scenario.latency_s
        network.far.jitter_s = scenario.latency_s

    @property
    def begin_s(self) -> float:
        return 8.0 if self.scenario.controlled else 3.0

    def launched(self, marks: Mapping[str, str]) -> None:
        """By whoever has the lease, and no more than are wanted and may be silent."""
        process, service = virtual.running(), self.controller
        assert process is not None
        assert service is not None
        with sqlite3.connect(service.path) as db:
            holder, until_s = db.execute("SELECT holder, until_s FROM lease").fetchone()
        now_s = virtual.EPOCH_S + self.loop.now_s + service.host.skew_s
        if holder != process.lease.holder or until_s < now_s:  # type: ignore[attr-defined]
            self.breaks(f"{process.name} starts an engine, and {holder} has the lease")
        names = [
            kept["POTLUCK_INSTANCE"] for engine, kept in service.machine.running.values() if engine.alive
        ]
        well = [
            engine
            for engine, _ in service.machine.running.values()
            if engine.alive
            and not engine.draining
            and not any(trouble.where == engine.name for trouble in self.troubles)
        ]
        if len(well) >= self.scenario.mixed + 2 * self.scenario.combos:
            self.breaks(f"{process.name} starts an engine beside {len(well)}, more than the plan pays for")
        if marks["POTLUCK_INSTANCE"] in names:
            self.breaks(f"{marks['POTLUCK_INSTANCE']} is started twice")

    def breaks(self, line: str) -> None:
        if line not in self.broken:
            self.broken.append(line)
            self.loop.told("BROKEN", "", line)

    def door(self, ask: Ask) -> tuple[str, int]:
        return CLIENTS

    def served_by(self, transport: Any) -> str:
        return str(transport.peer.process.name)

    def troubled(self, where: str, lasts_s: float) -> None:
        self.troubles.append(Trouble(where, self.loop.now_s, self.loop.now_s + lasts_s + MARGIN_S))

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.loop.told(
            "answer", f"request {outcome.ask.number}", f"{outcome.ask.how} {outcome.status} {outcome.code}"
        )
        rules.outcome(self, outcome)

    # The engines.

    def start_engine(self, place: int, role: str, fingerprint: str = "f") -> Engine:
        host = self.loop.network.host(f"e{place}")
        self.loop.wires.setdefault(host.name, Wire())
        host.down = False
        process = Process(self.loop, f"engine {place}", host)
        given = self.loop, process, role, fingerprint, self.scenario.token_s
        engine = mock.MockEngine(*given) if self.scenario.shipped else Engine(*given)
        if place < len(self.engines):
            self.engines[place] = engine
        else:
            self.engines.append(engine)
        return engine

    def units(self, since_s: float) -> list[list[int]]:
        """Engines that can serve a request together since then, by their places."""
        if self.scenario.controlled:
            return [
                [place]
                for place, engine in enumerate(self.engines)
                if engine.alive and engine.role == "mixed" and engine.began_s + MARGIN_S < since_s
            ]
        mixed, combos = self.scenario.mixed, self.scenario.combos
        pairs = [[mixed + 2 * n, mixed + 2 * n + 1] for n in range(combos)]
        return [[place] for place in range(mixed)] + pairs

    def _begin(self) -> None:
        scenario = self.scenario
        self.gateway = GatewayService(self)
        if scenario.controlled:
            self.controller = ControllerService(self)
            self.controller.start()
        else:
            for place in range(scenario.mixed + 2 * scenario.combos):
                self.start_engine(place, "mixed")
            self._list_engines()
        self.gateway.start()
        self._schedule(self.begin_s)

    def _list_engines(self) -> None:
        mixed, lines = self.scenario.mixed, ["engines:"]
        for place, engine in enumerate(self.engines):
            template, index = ("homogeneous", 0) if place < mixed else ("combo", (place - mixed) % 2)
            lines.append(f"- {{url: '{engine.url}', template: {template}, index: {index}, region: near}}")
        (self.folder / "gw" / "engines.yaml").write_text("\n".join(lines))

    def _schedule(self, begin_s: float) -> None:
        for ask in self.scenario.asks:
            client = Client(self, ask)
            self.clients.append(client)
            self.loop.call_at(begin_s + ask.at_s, client.start, context=self.kernel)
        for fault in self.scenario.faults:
            self.loop.call_at(begin_s + fault.at_s, faults.strike, self, fault, context=self.kernel)

    def probes(self) -> list[Client]:
        return [
            self._comes(Ask(1000 + n, 0.0, 1 + n % 2, 20, 12, 0, n % 2 == 0, shipped=self.scenario.shipped))
            for n in range(3)
        ]

    def _comes(self, ask: Ask) -> Client:
        client = Client(self, ask)
        self.clients.append(client)
        self.loop.call_soon(client.start, context=self.kernel)
        return client

    def run(self) -> World:
        virtual.active, virtual.Process._next = self.loop, 1
        api_http._words.clear()
        trap = LogTrap(self)
        logger = logging.getLogger("potluck")
        logger.addHandler(trap)
        logger.propagate = False
        self.loop.set_exception_handler(self._unhandled)
        asyncio.events._set_running_loop(self.loop)
        try:
            self._begin()
            self._until(self.begin_s + self.scenario.trouble_ends_s)
            self._until(self.loop.now_s + SETTLED_S, lambda: not rules.unsettled(self))
            self._last_requests()
            rules.at_the_end(self)
        finally:
            self.over = True
            asyncio.events._set_running_loop(None)
            virtual.active = None
            logger.removeHandler(trap)
            shutil.rmtree(self.folder, ignore_errors=True)
        return self

    def _until(self, at_s: float, holds: Callable[[], bool] = lambda: False) -> None:
        """Until a time, or until something holds, which is looked at once in a second."""
        loop, look_s = self.loop, self.loop.now_s
        while loop.now_s < at_s and len(self.broken) < 3:
            if loop.now_s < look_s:
                loop._run_once(look_s)
            look_s = min(at_s, loop.now_s + 1.0)
            if holds():
                break

    def _last_requests(self) -> None:
        """Trouble is over: whoever asks now is answered."""
        self.keys.retire()
        self._until(self.loop.now_s + READ_S)
        probes = self.probes()
        probes.append(self._comes(replace(probes[0].ask, number=1003, how="retired")))
        self._until(self.loop.now_s + 500.0, lambda: all(client.done for client in self.clients))
        for client in probes:
            if not client.outcomes or client.outcomes[-1].status != client.ask.status:
                self.breaks(f"trouble is over, and request {client.ask.number} is answered wrongly")
        self._until(self.loop.now_s + LEFT_S, lambda: not (rules.left_over(self) or rules.unsettled(self)))
        if "tokens_per_min" in self.keys.limits and not self.broken:
            self._spend_budget(int(self.keys.limits["tokens_per_min"]))

    def _spend_budget(self, most: int) -> None:
        """A request that may use all of a key's tokens and ends early leaves room for another one at once."""
        self._until(self.loop.now_s + MINUTE_S)  # By then the key has all its tokens again.
        shipped = self.scenario.shipped
        drawn = (Ask(n, 0.0, 0, 1, most - 2, 0, True, shipped=shipped) for n in range(2000, 20_000))
        first = next((ask for ask in drawn if len(ask.answer()) <= most // 3), None)
        if first is None:
            return
        left = most - first.prompt - len(first.answer())
        if self.scenario.workers > 1:
            # A worker takes all that others used since it last heard of them as of when they used something last.
            left -= sum(one.ask.prompt + one.ask.most for one in self.outcomes if one.ask.key == 0)
        if left < most // 2:
            return
        for ask in (first, Ask(1999, 0.0, 0, 1, left - 2, 0, True, shipped=shipped)):
            client = self._comes(ask)
            self._until(self.loop.now_s + MINUTE_S, lambda: client.done)  # noqa: B023
            outcome = client.outcomes[-1] if client.outcomes else None
            if ask is first and outcome is not None and outcome.status == 429:
                return  # A request beyond the limit was let in lately, and is still paid off.
            if outcome is None or outcome.status != 200:
                self.breaks("tokens that were charged and not used are not given back to a key")
        self._until(self.loop.now_s + LEFT_S, lambda: not (rules.left_over(self) or rules.unsettled(self)))

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        self.breaks(f"unhandled: {context.get('message')} {context.get('exception')!r}")
        self.problem = self.problem or context.get("exception")

    @property
    def digest(self) -> str:
        return f"{self.loop.digest:08x}"

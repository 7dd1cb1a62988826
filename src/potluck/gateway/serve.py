"""A gateway put together: the Brain at its desk, the fleet, a worker, and the ports.

Center    what there is once, however many workers: the Brain, the fleet, the log
Worker    what each process for clients has: connections to engines, a driver, a door
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from potluck.api.origin import Served
from potluck.core.brain.brain import Brain
from potluck.core.brain.events import Planned
from potluck.core.brain.policy import Policy
from potluck.core.errors import InputError
from potluck.core.values.plan import Plan
from potluck.gateway.desk.desk import Act, Desk
from potluck.gateway.door.cards import ModelCard, read_card
from potluck.gateway.door.front import DoorSettings, FrontDoor
from potluck.gateway.door.keys import KeyRing
from potluck.gateway.drive.rides import Rides
from potluck.gateway.fleet.keeper import Keeper
from potluck.gateway.fleet.roster import Entry, RosterFile
from potluck.gateway.fleet.watch import Watch
from potluck.gateway.http.calls import Calls
from potluck.gateway.http.limits import allow_open_files
from potluck.gateway.http.port import Port, open_port
from potluck.gateway.meters import SilentMeter
from potluck.gateway.parts import Directory, Line, Meter
from potluck.gateway.settings import Settings
from potluck.worlds.kits import Kits
from potluck.worlds.log import FLUSH_S, Logged, open_log
from potluck.worlds.mind import Mind
from potluck.worlds.scene import Scene

CODECS = {"fp16": "raw", "int8": "int8", "int4": "int4"}
"""What a plan calls them, and what engines do: as it is stored is as it is sent."""

log = logging.getLogger(__name__)
Ready = Callable[[str, str], None]
"""Hears the addresses for clients and for operators."""


class Center:
    """What there is once."""

    def __init__(self, scene: Scene, policy: Policy, settings: Settings, outgoing: Calls) -> None:
        self.kits = Kits(scene)
        self.kits.learn(scene.plan)
        self.plan = scene.plan
        facts = self.kits.facts()
        self.brain = Brain(facts, policy)
        mind: Mind = self.brain
        self.logged: Logged | None = None
        if settings.log is not None:
            out = open_log(settings.log)
            mind = self.logged = Logged(mind, out, facts, policy, zero_utc_s=time.time(), flush_s=FLUSH_S)
        self.desk = Desk(mind, self.brain.flights, tick_s=policy.tick_s)
        self.keeper = Keeper(self.desk.tell, outgoing, self._busy, codec=self.codec)
        self.desk.manage = self.keeper.act
        self.watch = Watch(
            self.keeper, self.desk.tell, caches=policy.affinity > 0, planned_gbps=facts.links_gbps
        )
        self.roster = None if settings.engines is None else RosterFile(settings.engines)
        self.desk.at_ticks += [self._look, self.keeper.look, self.watch.look]

    def start(self) -> None:
        """From the first plan on; needs a running event loop."""
        if self.roster is not None:
            self.keeper.enlist(self.roster.entries)
        self.desk.tell(Planned(self.plan))
        self.watch.look()
        self.desk.start(asyncio.get_running_loop())

    def adopt(self, plan: Plan) -> None:
        """Another plan, from an operator or a planner."""
        self.kits.learn(plan)
        self.plan = plan
        self.keeper.planned()
        self.desk.tell(Planned(plan))

    def enlist(self, entries: tuple[Entry, ...]) -> None:
        """Another roster, told by whoever starts engines."""
        self.keeper.enlist(entries)
        self.watch.look()

    def _look(self) -> None:
        if self.roster is not None and self.roster.changed():
            self.enlist(self.roster.entries)

    def _busy(self, replica: str) -> int:
        view = self.brain.fleet.views.get(replica)
        return 0 if view is None else view.open_requests

    def codec(self, model: str, source_region: str, target_region: str) -> str:
        return CODECS[self.kits.codecs.get((model, source_region, target_region), "fp16")]

    def lacking(self, model: str) -> str:
        """Why a model cannot be served now; empty when it can."""
        if any(each.model == model for each in self.keeper.endpoints):
            return ""
        notes = {each.note for each in self.keeper.engines if each.note}
        return f"no replica of {model} is ready" + (f" ({'; '.join(sorted(notes))[:300]})" if notes else "")

    async def close(self) -> None:
        self.desk.stop()
        await self.keeper.close()
        if self.logged is not None:
            self.logged.close()


class Worker:
    """What a process for clients has."""

    def __init__(
        self,
        cards: Mapping[str, ModelCard],
        directory: Directory,
        outgoing: Calls,
        meter: Meter,
        settings: Settings,
        policy: Policy,
        ready: Callable[[str], str],
        connect: Callable[[Act], Line],
    ) -> None:
        """`connect` makes the line to the desk from what the desk's orders go to."""
        loop = asyncio.get_running_loop()
        line = connect(lambda actions: self.rides.act(actions))
        self.rides = Rides(line, directory, outgoing, time.monotonic, loop.call_later)
        keys = None if settings.keys is None else KeyRing(settings.keys, time.monotonic(), time.time)
        self.door = FrontDoor(
            cards,
            self.rides,
            meter,
            keys=keys,
            settings=DoorSettings(
                classes=frozenset(each.name for each in policy.classes),
                served=Served(keyed=keys is not None),
            ),
            ready=ready,
        )
        self.port: Port | None = None

    async def listen(self, settings: Settings, *, shared: bool = False) -> str:
        places = settings.places
        tls = None if settings.tls is None else tls_of(*settings.tls)
        self.port = await open_port(self.door, places.host, places.port, tls=tls, shared=shared)
        return self.port.address

    async def close(self, within_s: float) -> None:
        """Nothing new is taken; what is open may end."""
        self.door.closing = "the gateway is shutting down; try again"
        if self.port is not None:
            await self.port.close(within_s)
        self.door.close()


def cards_of(scene: Scene, files: Mapping[str, Path], roster: tuple[Entry, ...]) -> dict[str, ModelCard]:
    """What is known of each model. Without files only tokens can be sent to engines."""
    found = {}
    for name, model in scene.models.items():
        kinds = {entry.kind for entry in roster if entry.model in ("", name)}
        plain = kinds == {"openai"}
        if name in files:
            found[name] = read_card(name, files[name], plain=plain, created_s=int(time.time()))
        else:
            found[name] = ModelCard(
                name, model.max_context_tokens, plain=plain, vocab=model.vocab, created_s=int(time.time())
            )
    return found


def tls_of(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InputError("--tls", f"{certificate} and {key} cannot be used ({error})") from error
    return context


async def serve(scene: Scene, policy: Policy, settings: Settings, ready: Ready) -> None:
    """Serve until a signal says to end; `ready` hears the addresses."""
    allow_open_files()
    outgoing = Calls()
    center = Center(scene, policy, settings, outgoing)
    entries = () if center.roster is None else center.roster.entries
    cards = cards_of(scene, settings.files, entries)
    meter = SilentMeter()
    worker = Worker(cards, center.keeper, outgoing, meter, settings, policy, center.lacking, center.desk.line)
    gone = getattr(worker.rides, "gone", None)
    if gone is not None:
        center.keeper.on_gone.append(gone)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        center.start()
        ready(await worker.listen(settings), "")
        await stop.wait()
    finally:
        await worker.close(settings.drain_s)
        await center.close()
        await outgoing.close()


def serve_forever(scene: Scene, policy: Policy, settings: Settings, ready: Ready) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(scene, policy, settings, ready))

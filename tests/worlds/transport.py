"""The KV transport by itself: a sender and a receiver on two hosts of a world (`python -m worlds --kv SEED`)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from potluck.core.errors import PotluckError
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.fetch import FetchRequest, KvFetch
from potluck.kv.handles import bound_to, new_handle
from potluck.kv.kv_sender import KvSender, SenderLimits
from potluck.kv.peer_connections import LinkLimits, PeerConnections
from worlds import faults, sockets, threads, virtual
from worlds.faults import WIRE
from worlds.loop import WorldLoop
from worlds.threads import Thread
from worlds.virtual import DEAD, Process
from worlds.world import LINK_FAULTS, Fault

FROM = ("a", 9000)
MARK, TOKENS = "f" * 32, "5a" * 32
LATE_S = 1.0  # Beyond its deadline, for a fetch to end its threads.


@dataclass(frozen=True)
class Trial:
    """One cache: when it is asked for, what it is, and how either side behaves."""

    at_s: float
    rows: tuple[int, ...]  # Of each chunk.
    pause_s: float  # Between two chunks, at the sender; and for each, at the receiver.
    sink_s: float
    degree: int
    deadline_s: float
    offered_s: float  # So long after it is asked for.
    how: str  # "whole", "fails" or "cancels".


@dataclass(frozen=True)
class TransportScenario:
    seed: int
    asks: tuple[Trial, ...]
    faults: tuple[Fault, ...]
    latency_s: float
    pieces: float
    switches: float
    window_bytes: int
    held_bytes: int


def scenario_of(seed: int) -> TransportScenario:
    chance = random.Random(f"transport {seed}")
    choice = chance.choice
    trials = [
        Trial(
            chance.uniform(0.0, 4.0),
            tuple(choice((1, 42, 43, 200, chance.randint(1, 500))) for _ in range(chance.randint(0, 8))),
            choice((0.0, 0.01, 0.5)),
            choice((0.0, 0.0, 0.02, 0.3)),
            chance.randint(1, 4),
            choice((4.0, 30.0, 30.0)),
            choice((0.0, -1.0, 2.0)),
            chance.choices(("whole", "fails", "cancels"), (8, 1, 1))[0],
        )
        for _ in range(chance.randint(1, 4))
    ]
    kinds = chance.sample((*WIRE, *WIRE, *LINK_FAULTS, "freeze", "die"), chance.randint(1, 3))
    struck = [
        Fault(
            chance.uniform(0.0, 5.0),
            kind := choice(kinds),
            0 if kind in LINK_FAULTS else chance.randrange(2),
            choice((0.2, 1.0, 4.0, 12.0)),
            chance.uniform(0.5 if kind in LINK_FAULTS else 0.0, 1.0),
        )
        for _ in range(choice((0, 1, 1, 2, 4)))
    ]
    latency_s, pieces, switches = (
        choice((2e-4, 2e-3, 2e-2)),
        choice((0.0, 0.2, 0.9)),
        choice((0.0, 0.05, 0.3)),
    )
    window_bytes, held_bytes = 1 << choice((13, 15, 17)), 1 << choice((13, 16, 24))
    links = latency_s, pieces, switches, window_bytes, held_bytes
    return TransportScenario(seed, tuple(trials), tuple(struck), *links)


class Fetched:
    """What became of one trial."""

    def __init__(self, seed: int, place: int, trial: Trial) -> None:
        chance = random.Random(f"chunks {seed} {place}")
        self.trial, self.handle, self.request = trial, new_handle(), f"r{place}"
        self.chunks = [
            KvChunk(layer, "latent", 0, count, "float32", (count, 1, 24), chance.randbytes(96 * count))
            for layer, count in enumerate(trial.rows)
        ]
        self.got: list[KvChunk] = []
        self.states: list[str] = []  # As its sender was told.
        self.result = ""  # "all", or why not.
        self.took_s = 0.0


class Transport:
    engine_faults, link_faults, hub = ("die", "freeze", *WIRE), LINK_FAULTS, "b"
    controller = problem = None

    def __init__(self, scenario: TransportScenario) -> None:
        self.scenario, self.loop = scenario, WorldLoop(f"transport {scenario.seed}")
        loop, network = self.loop, self.loop.network
        self.broken, self.outcomes = loop.broken, list[Any]()
        self.faults: Counter[str] = Counter()
        loop.switches, network.pieces = scenario.switches, scenario.pieces
        loop.preempts = 0.02 if scenario.switches > 0.1 else 0.0
        network.far.latency_s = network.far.jitter_s = scenario.latency_s
        loop.wires = {name: sockets.Wire() for name in "ab"}
        self.sending, self.receiving = (Process(loop, name, network.host(name)) for name in "ab")
        self.engines = [
            SimpleNamespace(name=item.name, process=item, alive=True, fingerprint="f")
            for item in (self.sending, self.receiving)
        ]
        self.kernel = virtual.contextvars.Context()
        loop.set_exception_handler(self._unhandled)

    def breaks(self, line: str) -> None:
        self.broken.append(line)
        self.loop.told("BROKEN", "", line)

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        self.breaks(f"unhandled: {context['message']} {context.get('exception')!r}")

    def troubled(self, where: str, lasts_s: float) -> None: ...

    def start_engine(self, place: int, role: str, fingerprint: str) -> None:
        """Who died stays dead."""

    @property
    def digest(self) -> str:
        return f"{self.loop.digest:08x}"

    # The two processes.

    def _begin(self) -> None:
        scenario = self.scenario
        limits = SenderLimits(piece_bytes=4096, most_bytes=scenario.held_bytes)
        self.sender = self.sending.run(lambda: KvSender(*FROM, limits=limits, shared_memory=False))
        wanted = LinkLimits(window_bytes=scenario.window_bytes, piece_bytes=4096)
        self.links = PeerConnections([FROM], limits=wanted, shared_memory=False)
        self.trials = [Fetched(scenario.seed, place, trial) for place, trial in enumerate(scenario.asks)]
        for fetched in self.trials:
            at_s = 1.0 + fetched.trial.at_s
            self._later(at_s + fetched.trial.offered_s, self.sending, self._send, fetched)
            self._later(at_s, self.receiving, self._fetch, fetched)
        for fault in scenario.faults:
            self.loop.call_at(1.0 + fault.at_s, faults.strike, self, fault, context=self.kernel)

    def _later(self, at_s: float, process: Process, call: Any, *given: Any) -> None:
        start = lambda: Thread(call, given, call.__name__).start()  # noqa: E731
        self.loop.call_at(at_s, start, context=process.context.copy())

    def _send(self, fetched: Fetched) -> None:
        asked, bound = threads.Event(), bound_to(fetched.request, MARK, TOKENS)

        def opened(have: int) -> KvManifest:
            asked.set()
            return KvManifest(MARK, 0, 500, TOKENS)

        transfer = self.sender.offer(fetched.handle, bound, opened, 60.0, fetched.states.append)
        asked.wait(60.0)
        try:
            for number, chunk in enumerate(fetched.chunks):
                threads._sleep(fetched.trial.pause_s)
                if fetched.trial.how == "fails" and number >= len(fetched.chunks) // 2:
                    transfer.fail("was told to")
                transfer.put(chunk, 30.0)
            transfer.finish()
        except PotluckError as error:
            transfer.fail(str(error))

    def _fetch(self, fetched: Fetched) -> None:
        trial, began_s = fetched.trial, self.loop.now_s
        fetch_request = FetchRequest(fetched.handle, fetched.request, MARK, TOKENS)
        fetch = KvFetch(self.links, FROM, fetch_request, degree=trial.degree, deadline_s=trial.deadline_s)
        if trial.how == "cancels":
            self._later(self.loop.now_s + 0.01 + trial.sink_s, self.receiving, fetch.cancel)

        def sink(chunk: KvChunk) -> None:
            threads._sleep(trial.sink_s)
            fetched.got.append(replace(chunk, data=bytes(chunk.data), parameters=bytes(chunk.parameters)))

        try:
            fetch.run(lambda manifest: None, sink)
            fetched.result = "all"
        except (PotluckError, OSError) as error:
            fetched.result = f"{type(error).__name__}: {error}"
        fetched.took_s = self.loop.now_s - began_s
        self.loop.told(
            "fetched", fetched.request, f"{fetched.result} {len(fetched.got)} of {len(fetched.chunks)}"
        )

    # What must be true.

    def run(self) -> Transport:
        sockets.install()
        virtual.active, virtual.Process._next = self.loop, 1
        asyncio.events._set_running_loop(self.loop)
        try:
            self.receiving.context.copy().run(self._begin)
            self._until(140.0)  # Every deadline, every lease and every idle connection is over.
            for fetched in self.trials:
                self._check_end(fetched)
            self._check_left()
        finally:
            asyncio.events._set_running_loop(None)
            virtual.active = None
        return self

    def _until(self, at_s: float) -> None:
        self.loop.call_at(at_s, lambda: None, context=self.kernel)
        while self.loop.now_s < at_s:
            self.loop._run_once()

    def _check_end(self, fetched: Fetched) -> None:
        """All of it and nothing else, or an error in time; and all, where nothing was harmed that can be mended."""
        trial, name = fetched.trial, f"fetch {fetched.request}"
        gentle, harmed = (
            not set(self.faults) - set(WIRE),
            sum(wire.harmed for wire in self.loop.wires.values()),
        )
        frozen_s = sum(fault.lasts_s for fault in self.scenario.faults if fault.kind == "freeze")
        in_time = fetched.result and fetched.took_s <= trial.deadline_s + frozen_s + LATE_S
        if self.receiving.state != DEAD and not in_time:
            self.breaks(f"{name} did not end within its {trial.deadline_s:g} s")
        came = sorted(fetched.got, key=lambda chunk: chunk.layer)
        if any(chunk not in fetched.chunks for chunk in came) or len({c.layer for c in came}) < len(came):
            self.breaks(f"{name} brought what was not sent")
        elif fetched.result == "all" and came != fetched.chunks:
            self.breaks(f"{name} brought {len(came)} of {len(fetched.chunks)} chunks as if all")
        mended = gentle and harmed <= (1 if self.faults["stall"] else 4)
        if mended and trial.how == "whole" and trial.deadline_s > 20.0 and fetched.result != "all":
            self.breaks(f"{name} failed, and should not have: {fetched.result}")
        if self.sending.state != DEAD and len(fetched.states) != 1:
            self.breaks(f"the sender was told {fetched.states} of {name}")
        if gentle and not harmed and fetched.result == "all" and fetched.states != ["fetched"]:
            self.breaks(f"{name} has all, and is {fetched.states} to its sender")

    def _check_left(self) -> None:
        """Nothing is held, and nothing open once both have ended."""
        left = self.links.buffers.out_bytes, [thread.name for thread in self.receiving.threads]
        if self.receiving.state != DEAD and any(left):
            self.breaks(f"the receiver still has {left[0]} bytes, threads {left[1]}")
        if self.sending.state != DEAD and (self.sender.held_bytes or self.sender.transfers):
            self.breaks(
                f"the sender still has {self.sender.transfers} transfers, {self.sender.held_bytes} bytes"
            )
        self._later(self.loop.now_s, self.receiving, self.links.close)
        self._later(self.loop.now_s, self.sending, self.sender.close)
        self._until(self.loop.now_s + 20.0)
        for process in (self.sending, self.receiving):
            if process.state != DEAD and (process.threads or process.sockets or process.listeners):
                names = [thread.name for thread in process.threads]
                self.breaks(f"{process.name} still has {len(process.sockets)} sockets, threads {names}")

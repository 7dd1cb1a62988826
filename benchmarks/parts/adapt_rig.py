"""A whole service on this machine: `potluck up` with mock engines, its load, and what was seen of both.

Times of everything are seconds since the load began: requests', the controller's notes', the gateway's events'.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parts.common import POTLUCK
from potluck.control.gateway_client import GatewayClient
from potluck.control.launchers.local_launcher import engines_of
from potluck.control.launchers.process import ProcessId
from potluck.control.local_stack import owner_of, pid_of, stop_all
from potluck.control.state_store import RecordedEvent, StateStore
from potluck.core.errors import PotluckError
from potluck.core.state.actions import Run, StartReplica
from potluck.core.values.types import Slo
from potluck.gateway.admin.counters import Counters
from potluck.gateway.core import DecisionLog
from potluck.loadgen.load_client import TimedRequest, kept, shoot, whole
from potluck.runtime.brain_log import FLUSH_S
from potluck.runtime.replay import LogHead, LogReader
from potluck.sim.load.workload import Workload

MODEL = "m"
PROMPT, OUTPUT = 1200, 40
"""Requests that keep slow GPUs busy at few a second, so that the machine itself is not what is measured."""
NEVER_S = 1e3  # For what did not happen.
UP_S = 300.0  # In which a service must be there, on a machine that has much else to do.
LOOK_S = 0.25
TOKENS = range(5, 200)
Json = dict[str, Any]


Sent = tuple[float, str, tuple[str, ...]]
"""When a request was sent for the first time, on which kind of route, over whom."""
News = tuple[float, str, str]  # When something was decided, what, and why.


def told_by(log: Iterable[str], zero_utc_s: float = 0.0) -> tuple[list[Sent], list[News]]:
    """What a Brain's log tells; times are seconds since a moment, or of a simulation."""
    sent: list[Sent] = []
    news: list[News] = []
    regions: dict[str, str] = {}
    counters, decisions, begun_s = Counters(regions.__getitem__), DecisionLog(str), 0.0
    for item in LogReader(log):
        if isinstance(item, LogHead):
            begun_s = (item.zero_utc_s or 0.0) - zero_utc_s
            continue
        at_s = begun_s + item.at_s
        decisions.decided = lambda what, why, at_s=at_s: news.append((at_s, what, why))
        decisions(item.at_s, item.event, item.actions)
        for action in item.actions:
            if isinstance(action, StartReplica):
                regions[action.member.id] = action.member.region
            elif isinstance(action, Run) and not action.attempt:
                names = tuple(segment.replica for segment in action.route.segments)
                sent.append((at_s, counters.route_kind(action), names))
    return sent, news


@dataclass(frozen=True)
class Phase:
    lasts_s: float
    rate_per_s: float
    prompt_tokens: int = PROMPT
    output_tokens: int = OUTPUT


def shots_of(phases: Sequence[Phase], seed: int) -> list[TimedRequest]:
    """Poisson arrivals; lengths within a quarter of their mean; no two prompts alike."""
    chance = random.Random(seed)
    made, begins_s = [], 0.0
    for phase in phases:
        at_s = begins_s
        while phase.rate_per_s > 0:
            at_s += chance.expovariate(phase.rate_per_s)
            if at_s >= begins_s + phase.lasts_s:
                break
            prompt = chance.choices(TOKENS, k=_about(chance, phase.prompt_tokens))
            made.append(TimedRequest(at_s, MODEL, prompt, _about(chance, phase.output_tokens)))
        begins_s += phase.lasts_s
    return made


def shots_of_load(workload: Workload, key: str = "", seed: int = 11) -> list[TimedRequest]:
    """The simulator's requests for a live gateway; no two prompts begin alike."""
    numbers = np.random.default_rng(seed)
    columns = (workload.arrival_s, workload.model, workload.prompt_tokens, workload.output_tokens)
    return [
        TimedRequest(
            at_s, workload.models[model], numbers.integers(20, 400, prompt).tolist(), output, key=key
        )
        for at_s, model, prompt, output in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _about(chance: random.Random, mean: int) -> int:
    return max(2, round(mean * chance.uniform(0.75, 1.25)))


@dataclass
class Seen:
    at_s: float
    replicas: list[Json]
    usd_per_h: float

    def ready(self, **wanted: str) -> int:
        return sum(
            replica["state"] == "ready" and all(replica[name] == value for name, value in wanted.items())
            for replica in self.replicas
        )


@dataclass
class Rig:
    folder: Path
    url: str
    process: subprocess.Popen[str]
    command: list[str]
    client: GatewayClient
    store: StateStore
    shots: list[TimedRequest] = field(default_factory=list)
    looks: list[Seen] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    zero_s: float = 0.0  # When the load began, by the time of day.
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def now_s(self) -> float:
        return time.time() - self.zero_s

    def load(self, phases: Sequence[Phase], seed: int) -> None:
        with self.fired(shots_of(phases, seed)):
            pass

    @contextmanager
    def fired(self, shots: list[TimedRequest]) -> Iterator[None]:
        """Requests come while the block runs, and all of them are waited for at its end."""
        self.shots = shots
        self.zero_s = time.time() + 0.2
        threads = [
            threading.Thread(target=shoot, args=(self.url, self.shots), kwargs={"within_s": 180.0}),
            threading.Thread(target=self._watch, daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
            threads[0].join()
        finally:
            self._over.set()
            threads[1].join()
            time.sleep(2 * FLUSH_S)
            with (self.folder / "state" / "brain.log").open() as log:
                self.sent, self.news = told_by(log, self.zero_s)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                result = self.client.snapshot()
            except PotluckError:
                continue
            usd = sum(item["usd_per_h"] for item in result["models"].values())
            self.looks.append(Seen(self.now_s, result["replicas"], usd))

    def sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self.now_s))

    def wait_for(self, what: Callable[[Seen], bool], within_s: float) -> float | None:
        """When a look first shows something; None when none does in time."""
        begun, until_s = len(self.looks), self.now_s + within_s
        while self.now_s < until_s:
            for look in self.looks[begun:]:
                if what(look):
                    return look.at_s
            time.sleep(LOOK_S / 2)
        return None

    def notes(self, *kinds: str) -> list[RecordedEvent]:
        return [happening for happening in self.store.happenings(most=10_000) if happening.kind in kinds]

    def note_s(self, kind: str, after_s: float, part: str = "") -> float:
        """How long after a moment the controller noted something."""
        times = [note.at_s - self.zero_s for note in self.notes(kind) if part in f"{note.what} {note.why}"]
        return min((at_s - after_s for at_s in times if at_s >= after_s), default=NEVER_S)

    def news_s(self, part: str, after_s: float) -> float:
        times = [at_s for at_s, what, _ in self.news if part in what and at_s >= after_s]
        return min(times, default=after_s + NEVER_S) - after_s

    def attainment(self, slo: Slo, from_s: float, to_s: float) -> float:
        mine = [request for request in self.shots if from_s <= request.at_s < to_s]
        return sum(kept(request, slo) for request in mine) / len(mine) if mine else 1.0

    def recovered_s(self, slo: Slo, after_s: float, share: float = 0.9, window_s: float = 5.0) -> float:
        """How long after a moment requests are kept again, and stay so for a window."""
        last_s = max((request.at_s for request in self.shots), default=0.0)
        at_s = after_s
        while at_s + window_s <= last_s:
            if self.attainment(slo, at_s, at_s + window_s) >= share:
                return at_s - after_s
            at_s += 0.5
        return NEVER_S

    @property
    def lost(self) -> int:
        return sum(not whole(request) for request in self.shots)

    def problems(self) -> list[str]:
        return sorted(
            {f"{request.status} {request.problem[:160]}" for request in self.shots if not whole(request)}
        )[:5]

    def engines(self) -> list[tuple[ProcessId, str]]:
        """Those that run and carry this service's mark, each with its name; one that nobody wrote down has none."""
        names = {pid_of(place): name for name, place in self.store.places().items()}
        return [(pid, names.get(pid, f"process {pid.number}")) for pid in engines_of(owner_of(self.store))]

    def again(self) -> None:
        self.process = _spawn(self.command, self.folder)

    def controlled(self, within_s: float) -> None:
        """Wait until the controller that was started again looks after the state."""
        until_s = time.monotonic() + within_s
        while (self.store.get("controller") or {}).get("pid") != self.process.pid:
            if time.monotonic() > until_s or self.process.poll() is not None:
                raise RuntimeError(f"no controller: {(self.folder / 'up.log').read_text()[-2000:]}")
            time.sleep(0.02)

    def close(self) -> None:
        self._over.set()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        stop_all(self.store, "the benchmark is over", 5.0)
        self.store.close()


def _spawn(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    with (folder / "up.log").open("a") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


@contextmanager
def service(
    folder: Path, files: Sequence[Path], policy: Mapping[str, object], flags: Sequence[str] = ()
) -> Iterator[Rig]:
    """`potluck up` over a spec, or a plan and its spec, until the block ends."""
    state = folder / "state"
    command = [*POTLUCK, "up", *map(str, files), "--state", str(state)]
    command += ["--engine", "mock", "--port", "0", "--json", *flags]
    command += [f"--policy={name}={value}" for name, value in policy.items()]
    process = _spawn(command, folder)
    watchdog = threading.Timer(UP_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    line = process.stdout.readline()
    watchdog.cancel()
    if not line:
        raise RuntimeError(f"no service: {(folder / 'up.log').read_text()[-2000:]}")
    store = StateStore(state / "state.db")
    place = store.get("gateway")
    key = (state / "admin.key").read_text()
    rig = Rig(folder, json.loads(line)["url"], process, command, GatewayClient(place["admin"], key), store)
    try:
        yield rig
    finally:
        rig.close()

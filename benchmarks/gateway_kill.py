"""Engines die, stand still or lie under load, and every answer must be right.

    python benchmarks/gateway_kill.py [--quick] [--json] [--only KIND]... [--real]

    killed    SIGKILL every 3 s, and started again at the same address
    stopped   SIGSTOP every 3 s, SIGCONT some seconds later
    lying     one engine answers every segment with garbage, and looks well otherwise
    desk      SIGKILL of the gateway's process that decides, every 3 s, with two workers beside it

One of six engines after another, never more than half of them at a time. Every answer is compared with that of an
engine asked directly: `wrong` counts those that differ, were refused or cut. A stall is the longest wait between two
pieces of one answer. Engines are mocks, or compute (`--real`), at a small rate.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from parts.common import ROOT, WORDS, Background, options, run, say

sys.path.insert(0, str(ROOT / "tools"))

from live_fleet import LiveFleet, Process
from live_plans import COMBO, MODEL, WHOLE, Unit, write_plans

from parts.hosts_load import VOCAB, wrong
from potluck.loadgen.load_client import TimedRequest, shoot

KINDS = ("killed", "stopped", "lying", "desk")
SEED = 1
SIX = WHOLE * 4 + COMBO


@dataclass(frozen=True)
class Load:
    streams: int
    over_s: float
    prompt: int
    output: int
    every_s: float = 3.0
    most_strikes: int = 10_000
    stopped_s: float = 4.0


def shots_of(load: Load, seed: int) -> list[TimedRequest]:
    """Half of them greedy, half drawn with a seed; every fourth with a stop string."""
    chance = random.Random(seed)
    made = []
    for place in range(load.streams):
        size = chance.randrange(load.prompt // 2, load.prompt * 2)
        prompt = [chance.randrange(5, VOCAB) for _ in range(size)]
        extra: dict[str, object] = {}
        if place % 2:
            extra |= {"temperature": 0.9, "seed": place}
        if place % 4 == 3:
            extra |= {"stop": ["qu", "zzz"]}
        made.append(TimedRequest(place * load.over_s / load.streams, MODEL, prompt, load.output, extra=extra))
    return made


class Trouble(Background):
    def __init__(self, fleet: LiveFleet, how: str, load: Load) -> None:
        super().__init__()
        self._fleet, self._how, self._load, self.happened = fleet, how, load, 0

    def work(self) -> None:
        back: list[Future[None]] = []  # done when an engine is there again; at most half are away at a time
        with ThreadPoolExecutor(8) as pool:
            while self.happened < self._load.most_strikes and not self.over.wait(self._load.every_s):
                if self._how == "desk":
                    os.kill(desk_of(self._fleet), signal.SIGKILL)
                    self.happened += 1
                elif sum(not entry.done() for entry in back) < len(self._fleet.engines) // 2:
                    self.happened += 1
                    place = self.happened % len(self._fleet.engines)
                    back = [*back[-9:], pool.submit(self._strike, place)]
            for item in back:
                item.result()

    def _strike(self, place: int) -> None:
        engine = self._fleet.engines[place]
        assert engine.popen is not None
        if "killed" in self._how:
            engine.popen.send_signal(signal.SIGKILL)
            engine.popen.wait()
            self._fleet.restart(place)
        else:
            engine.popen.send_signal(signal.SIGSTOP)
            time.sleep(self._load.stopped_s)
            engine.popen.send_signal(signal.SIGCONT)


def desk_of(fleet: LiveFleet) -> int:
    """The process of a gateway that has the Brain: its child that is no worker."""
    assert fleet.gateway is not None
    assert fleet.gateway.popen is not None
    pid = fleet.gateway.popen.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    (result,) = [pid for pid, name in named.items() if b"worker_process" not in name]
    return int(result)


class LyingFleet(LiveFleet):
    def _start_engines(self) -> None:
        super()._start_engines()
        arguments = [sys.executable, str(ROOT / "tools" / "lying_engine.py"), str(self.engine_list[0]["url"])]
        self.liar = Process(arguments, self.folder / "liar.log", self._env)
        self.liar.start()
        self.engine_list[0]["url"] = self.liar.hear()["url"]

    def close(self) -> None:
        super().close()
        if hasattr(self, "liar"):
            self.liar.end()


def trial(
    how: str, load: Load, engine: tuple[str, ...], seed: int, units: Sequence[Unit] = SIX
) -> dict[str, float]:
    """One fleet, one kind of trouble (or `killed, lying`)."""
    shots = shots_of(load, seed)
    with tempfile.TemporaryDirectory() as folder:
        plan, spec = write_plans(Path(folder), units)
        kind = LyingFleet if "lying" in how else LiveFleet
        workers = ("--workers", "2") if how == "desk" else ()
        with kind(plan, spec, gateway=("--files", f"{MODEL}={WORDS}", *workers), engine=engine) as fleet:
            trouble = Trouble(fleet, how, load)
            if how != "lying":
                trouble.start()
            shoot(fleet.url, shots, keep_text=True, within_s=300.0)
            if how != "lying":
                trouble.end()
            failures, wrongs = failures_of(fleet), wrong(fleet, shots, by=0)
    for line in wrongs:
        say(f"wrong: {line}")
    gaps = sorted(request.longest_gap_s for request in shots)
    firsts = sorted(request.ttft_s for request in shots)
    return {
        "streams": len(shots),
        "wrong": len(wrongs),
        "struck": trouble.happened,
        "attempts_failed": failures,
        "stall_p50_s": gaps[len(gaps) // 2],
        "stall_p99_s": gaps[int(0.99 * (len(gaps) - 1))],
        "stall_most_s": gaps[-1],
        "ttft_p99_s": firsts[int(0.99 * (len(firsts) - 1))],
    }


def failures_of(fleet: LiveFleet) -> float:
    with urllib.request.urlopen(f"{fleet.admin}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line.rsplit(" ", 1)[1] for line in lines if line.startswith("potluck_failures_total")]
    return sum(map(float, counts))


def measure(quick: bool, real: bool, kinds: Sequence[str]) -> dict[str, float]:
    """Real engines share the machine's cores, so they are asked for less at a time."""
    streams = (40 if real else 500) // (10 if quick else 1)
    load = Load(streams, streams / (1.0 if real else 8.0), 200, 40 if real else 100)
    engine = ("--speed-up", "4") if real else ("--mock",)
    return {f"{how}_{name}": value for how in kinds for name, value in trial(how, load, engine, SEED).items()}


if __name__ == "__main__":
    given = options(real=False, only=KINDS)
    run(
        "gateway_kill",
        lambda quick: measure(quick, given.real, given.only),
        {f"{how}_wrong": ("<=", 0.0) for how in given.only},
        seeds=(SEED,),
        quick_without="nine tenths of the streams",
    )

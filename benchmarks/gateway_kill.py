"""Engines die, stand still or lie under load, and every answer must be right: `python benchmarks/gateway_kill.py`.

Streams come over a minute through a gateway to six engines, of which one after another is

    killed    SIGKILL every 3 s, and started again at the same address
    stopped   SIGSTOP every 3 s, SIGCONT some seconds later
    lying     one engine answers every segment with garbage, and looks well otherwise
    desk      the gateway's own: SIGKILL of the process that decides, every 3 s, with two workers beside it

and never more than half of them at a time (a real one takes seconds to start). Every answer is compared with that of
an engine left alone: `wrong` counts those that differ, were refused or cut. Mock engines (tokens are hashes
of the history) take a large rate, real ones (`--real`) a small one.
A stall is the longest wait between two pieces of one answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from parts.common import run

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from live_fleet import LiveFleet, Process
from live_plans import COMBO, MODEL, WHOLE, Unit, write_plans

import potluck.engine
from potluck.loadgen.load_client import TimedRequest, shoot

WORDS = Path(potluck.engine.__file__).parent / "data" / "words"
KINDS = ("killed", "stopped", "lying", "desk")
VOCAB = 200
"""Prompts are of these tokens, which every model has."""
SIX = WHOLE * 4 + COMBO


@dataclass(frozen=True)
class Load:
    """How much is asked of the fleet, and how often something happens to it."""

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
        prompt = [
            chance.randrange(5, VOCAB) for _ in range(chance.randrange(load.prompt // 2, load.prompt * 2))
        ]
        extra: dict[str, object] = {}
        if place % 2:
            extra |= {"temperature": 0.9, "seed": place}
        if place % 4 == 3:
            extra |= {"stop": ["qu", "zzz"]}
        made.append(TimedRequest(place * load.over_s / load.streams, MODEL, prompt, load.output, extra=extra))
    return made


def reference(url: str, shot: TimedRequest) -> str:
    """What an engine says that nobody disturbs."""
    body = {
        "model": shot.model,
        "prompt": list(shot.prompt),
        "max_tokens": shot.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **shot.extra,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(json.load(answer)["choices"][0]["text"])


class Trouble(threading.Thread):
    """What happens to engines, one after another, until it is told to end."""

    def __init__(self, fleet: LiveFleet, how: str, load: Load) -> None:
        super().__init__(daemon=True)
        self._fleet, self._how, self._load = fleet, how, load
        self._over = threading.Event()
        self._back: list[Future[None]] = []
        """Done when an engine is there again; at most half of them are away at a time."""
        self.happened = 0
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            while self._how == "desk" and not self._over.wait(self._load.every_s):
                os.kill(desk_of(self._fleet), signal.SIGKILL)
                self.happened += 1
            if self._how == "desk":
                return
            with ThreadPoolExecutor(8) as pool:
                while self.happened < self._load.most_strikes and not self._over.wait(self._load.every_s):
                    if sum(not entry.done() for entry in self._back) < len(self._fleet.engines) // 2:
                        self.happened += 1
                        place = self.happened % len(self._fleet.engines)
                        self._back = [*self._back[-9:], pool.submit(self._strike, place)]
                for item in self._back:
                    item.result()
        except Exception as error:
            self.problem = error

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

    def end(self) -> None:
        self._over.set()
        self.join()
        if self.problem is not None:
            raise self.problem


def desk_of(fleet: LiveFleet) -> int:
    """The process of a gateway that has the Brain: its child that is no worker."""
    assert fleet.gateway is not None
    assert fleet.gateway.popen is not None
    pid = fleet.gateway.popen.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (result,) = [
        child for child in children if b"worker_process" not in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return int(result)


class LyingFleet(LiveFleet):
    """The first engine has a liar before it."""

    def _start_engines(self) -> None:
        super()._start_engines()
        liar = Path(__file__).resolve().parent.parent / "tools" / "lying_engine.py"
        arguments = [sys.executable, str(liar), str(self.engine_list[0]["url"])]
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
            whole = str(fleet.engines[0].said["url"])
            with ThreadPoolExecutor(16) as pool:
                expected = list(pool.map(lambda shot: reference(whole, shot), shots))
            trouble = Trouble(fleet, how, load)
            if how != "lying":
                trouble.start()
            shoot(fleet.url, shots, keep_text=True, within_s=300.0)
            if how != "lying":
                trouble.end()
            failures = failures_of(fleet)
    return figures_of(shots, expected, trouble.happened, failures)


def failures_of(fleet: LiveFleet) -> float:
    """Attempts that failed, as the gateway counts them."""
    with urllib.request.urlopen(f"{fleet.admin}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line.rsplit(" ", 1)[1] for line in lines if line.startswith("potluck_failures_total")]
    return sum(map(float, counts))


def figures_of(
    shots: list[TimedRequest], expected: list[str], happened: int, failures: float
) -> dict[str, float]:
    right = [shot.ended and shot.text == text for shot, text in zip(shots, expected, strict=True)]
    for shot, text, fine in zip(shots, expected, right, strict=True):
        if not fine:
            print(
                f"wrong: {shot.status} {shot.problem[:200]} {shot.text[-40:]!r} {text[-40:]!r}",
                file=sys.stderr,
            )
    gaps = sorted(shot.longest_gap_s for shot in shots)
    firsts = sorted(shot.ttft_s for shot in shots)
    return {
        "streams": len(shots),
        "wrong": len(shots) - sum(right),
        "struck": happened,
        "attempts_failed": failures,
        "stall_p50_s": gaps[len(gaps) // 2],
        "stall_p99_s": gaps[int(0.99 * (len(gaps) - 1))],
        "stall_most_s": gaps[-1],
        "ttft_p99_s": firsts[int(0.99 * (len(firsts) - 1))],
    }


def measure(quick: bool, real: bool, kinds: Sequence[str], seed: int) -> dict[str, float]:
    """Real engines share the machine's cores, so they are asked for less at a time."""
    streams = (40 if real else 500) // (10 if quick else 1)
    load = Load(streams, streams / (1.0 if real else 8.0), 200, 40 if real else 100)
    engine = ("--speed-up", "4") if real else ("--mock",)
    figures: dict[str, float] = {}
    for how in kinds:
        for name, value in trial(how, load, engine, seed).items():
            figures[f"{how}_{name}"] = value
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--real", action="store_true", help="engines that compute, at a small rate")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--seed", type=int, default=1)
    options, rest = parser.parse_known_args()
    kinds = [options.only] if options.only else list(KINDS)
    return run(
        "gateway_kill",
        lambda quick: measure(quick, options.real, kinds, options.seed),
        {f"{how}_wrong": ("<=", 0.0) for how in kinds},
        seeds=(options.seed,),
        arguments=rest,
        quick_without="nine tenths of the streams",
    )


if __name__ == "__main__":
    sys.exit(main())

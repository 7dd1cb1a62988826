"""Worlds by the thousand, each in a process of its own that leaves nothing behind; failing ones are made smaller."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from worlds.transport import Transport
from worlds.world import Scenario, World, card, resolved_of, scenario_of

LONGEST_CPU_S = 60
SHIPPED = 2  # A seed with engines that ship.


@dataclass
class Result:
    seed: int
    broken: list[str] = field(default_factory=list)
    digest: str = ""
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    answers: dict[str, bool] = field(default_factory=dict)  # By request, whether its last try was answered.
    lines: dict[str, list[int]] = field(default_factory=dict)


def made(scenario: Any, check_log: bool) -> Any:
    return World(scenario, check_log) if isinstance(scenario, Scenario) else Transport(scenario)


def play(scenario: Any, lines: Callable[[], dict[str, list[int]]] | None = None) -> Result:
    """In this process, which should end afterwards: a killed process's remains are still in it."""
    began_s = time.process_time()
    world = made(scenario, check_log=scenario.seed % 4 == 0)
    try:
        world.run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        world.broken.append(
            f"the world ended with {error!r} at {where.filename.split('/')[-1]}:{where.lineno}"
        )
    return Result(
        scenario.seed,
        list(world.broken),
        world.digest,
        world.loop.now_s,
        time.process_time() - began_s,
        dict(world.faults),
        len(world.outcomes),
        answers(world),
        {} if lines is None else lines(),
    )


def answers(world: Any) -> dict[str, bool]:
    return {f"{seen.ask.number}": seen.status == 200 for seen in world.outcomes if seen.ask.number < 1000}


def apart(scenario: Any, before: Callable[[], Any] | None = None) -> Result:
    """In a fork of this process."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reads)
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_CPU_S, LONGEST_CPU_S))
        try:
            result = play(scenario, None if before is None else before())
        except BaseException as error:  # whatever it is, somebody waits for a word
            result = Result(scenario.seed, [f"could not be played: {error!r}"])
        with os.fdopen(writes, "w") as out:
            out.write(json.dumps(asdict(result)))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as lines:
        text = lines.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        number = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else str(status)
        return Result(scenario.seed, [f"its process ended with {number}"])
    return Result(**json.loads(text))


def warm() -> None:
    """What every world needs is made once, before any process is forked."""
    for seed in (1, SHIPPED):
        World(replace(scenario_of(seed), faults=(), controlled=seed == 1)).run()
    card()
    for mixed in (1, 2, 3, 4, 6, 20):
        for combos in range(3):
            resolved_of(mixed, combos)
    gc.collect()
    gc.freeze()
    gc.disable()


def found(
    bug: Callable[[], None], first: int, most: int, draw: Callable[[int], Any] = scenario_of
) -> tuple[int, Result] | None:
    """How many seeds it takes until a rule finds a bug that was put in, and what is broken then."""
    for count in range(1, most + 1):
        result = apart(draw(first + count - 1), bug)
        if result.broken:
            return count, result
    return None


def shorter(scenario: Any, rule: str) -> Any:
    """The same failure with fewer faults and fewer requests, as far as leaving some out keeps it."""

    def fails(tried: Any) -> bool:
        return any(_gist(line) == _gist(rule) for line in apart(tried).broken)

    for name in ("faults", "asks"):
        size = max(1, len(getattr(scenario, name)) // 2)
        while size:
            items: Sequence[Any] = getattr(scenario, name)
            place = 0
            while place < len(items):
                tried = replace(scenario, **{name: (*items[:place], *items[place + size :])})
                if fails(tried):
                    scenario, items = tried, getattr(tried, name)
                else:
                    place += size
            size //= 2
    return scenario


def _gist(line: str) -> str:
    """A broken rule without its figures."""
    return "".join(letter for letter in line if not letter.isdigit())[:60]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

"""Play worlds.

python -m worlds SEED                tell what happened in one; ends with 1 where a rule is broken
python -m worlds SEED --shorter      the same, after leaving out what is not needed for the failure
python -m worlds --seconds 20 [--first SEED]    as many as can be played in so many CPU-seconds
python -m worlds --kv ...            the same of the KV transport by itself
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import time
import traceback
from collections.abc import Callable
from typing import Any

from worlds import bugs, runner, transport
from worlds.runner import say
from worlds.world import scenario_of

Draw = Callable[[int], Any]


def tell(scenario: Any, trace: bool) -> bool:
    began_s = time.process_time()
    world = runner.made(scenario, check_log=True).run()
    took_s = time.process_time() - began_s
    for at_s, kind, who, what in world.loop.story:
        say(f"{at_s:10.4f}  {kind:8} {who:16} {what}")
    say(
        f"seed {scenario.seed}: {world.loop.now_s:.1f} s in {took_s:.2f} CPU-s, {world.loop.handles} callbacks, "
        f"digest {world.digest}, {'broken' if world.broken else 'all rules held'}"
    )
    for line in world.broken:
        say(f"  {line}")
    problem = world.problem
    if isinstance(problem, logging.LogRecord) and problem.exc_info:
        problem = problem.exc_info[1]
    if trace and isinstance(problem, BaseException):
        traceback.print_exception(problem)
    elif trace and problem is not None:
        say(str(problem.getMessage()))
    return bool(world.broken)


def many(draw: Draw, first: int, cpu_s: float) -> bool:
    runner.warm()
    spent_s = played = failed = 0.0
    for seed in range(first, first + 1_000_000):
        result = runner.apart(draw(seed))
        spent_s, played = spent_s + result.cpu_s, played + 1
        if result.broken:
            failed += 1
            option = "" if draw is scenario_of else "--kv "
            say(f"seed {seed}: {result.broken[0]}; to see it: (cd tests && python -m worlds {option}{seed})")
        if spent_s >= cpu_s:
            break
    say(f"{played:g} worlds from seed {first}, {failed:g} with a broken rule")
    return failed > 0


def look_for(draw: Draw, names: list[str], first: int, most: int) -> bool:
    """Whether one of them was not found."""
    runner.warm()
    results = {name: runner.found(bugs.BUGS[name], first, most, draw) for name in names}
    for name, result in results.items():
        line = "not found" if result is None else f"found by seed {result[1].seed}: {result[1].broken[0]}"
        say(f"{name}: {line}")
    return None in results.values()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worlds", description="Play worlds.")
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--shorter", action="store_true", help="leave out what the failure does not need")
    parser.add_argument("--trace", action="store_true", help="with the traceback of what went wrong first")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="CPU-seconds of seeds, where none is named"
    )
    parser.add_argument("--first", type=int, help="the first of them; else a fresh one")
    parser.add_argument("--bug", action="append", choices=bugs.BUGS, help="put this one in; may be repeated")
    parser.add_argument("--most", type=int, default=500, help="seeds to look for it in")
    parser.add_argument("--kv", action="store_true", help="of the KV transport by itself")
    given = parser.parse_args()
    draw: Draw = transport.scenario_of if given.kv else scenario_of
    if given.seed is None:
        first = secrets.randbelow(1 << 40) if given.first is None else given.first
        if given.bug:
            os._exit(look_for(draw, given.bug, first, given.most))
        os._exit(many(draw, first, given.seconds))
    scenario = draw(given.seed)
    if given.shorter:
        broken = runner.apart(scenario).broken
        scenario = runner.shorter(scenario, broken[0]) if broken else scenario
    os._exit(tell(scenario, given.trace))


main()

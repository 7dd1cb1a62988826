"""Wanted beside started: what to do next. Level-triggered: nothing is remembered but how often starts failed.

1. A replica keeps its engine as long as that lives.
2. One without takes an engine of its make that is nobody: up before starting, oldest first. So a replica that was
   lost for a moment, or wanted in another role, costs no start.
3. Else one is started, unless starts of this make failed lately: then after 1 s, 2 s, 4 s, ... 60 s.
4. An engine that is nobody is stopped once that lasted `linger_s`, sooner never: a plan often changes its mind.
   One that was started by hand is left alone. One whose replica was drained by hand goes at once.
5. A start that takes longer than `start_s` has failed. What is dead is cleared away, with its reason.

Orders of one call can be carried out in any order, all or some of them: the next call sees what became of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from potluck.control.values import Assign, Clear, Halt, Instance, Launch, Make, Order, Want

LINGER_S = 20.0
MOST_WHY = 160
START_S = 600.0
RETRY_S = 1.0
RETRY_MOST_S = 60.0


@dataclass(frozen=True, slots=True)
class Failures:
    """Starts of one make that came to nothing, one after another."""

    count: int = 0
    last_s: float = 0.0
    why: str = ""
    """Of the last one."""

    @property
    def again_s(self) -> float:
        """When to try again."""
        return self.last_s + min(RETRY_MOST_S, RETRY_S * 2.0 ** (self.count - 1)) if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What must be remembered between two steps."""

    failures: Mapping[Make, Failures] = field(default_factory=dict)
    idle_since_s: Mapping[str, float] = field(default_factory=dict)
    """Engine to when it was first seen to be nobody."""

    def failed(self, make: Make, at_s: float, why: str) -> Memory:
        count = self.failures.get(make, Failures()).count + 1
        return replace(self, failures={**self.failures, make: Failures(count, at_s, why)})


@dataclass(frozen=True, slots=True)
class Step:
    orders: tuple[Order, ...]
    memory: Memory
    waiting: tuple[str, ...] = ()
    """What is wanted and not done yet, with the reason: one line each."""


def step(
    wants: Sequence[Want],
    instances: Iterable[Instance],
    memory: Memory,
    now_s: float,
    *,
    linger_s: float = LINGER_S,
    start_s: float = START_S,
    leaving: Collection[str] = (),
) -> Step:
    """What to do now; engines that are `leaving` become nobody's again."""
    orders: list[Order] = []
    living: list[Instance] = []
    for each in instances:
        late = each.state == "starting" and now_s - each.since_s > start_s
        if each.state == "dead" or late:
            why = each.problem or (f"was not ready after {start_s:g} s" if late else "ended by itself")
            orders.append(Halt(each.name, why) if late else Clear(each.name, why))
            if late or not each.url:  # it never was up: a start that failed
                memory = memory.failed(each.make, now_s, why)
        else:
            living.append(each)
            if each.state == "up" and each.make in memory.failures:
                left = {make: found for make, found in memory.failures.items() if make != each.make}
                memory = replace(memory, failures=left)
    taken, lacking = _matched(wants, living)
    nobody = sorted((each for each in living if each.name not in taken), key=_usefulness)
    waiting: list[str] = []
    for want in lacking:
        found = next((each for each in nobody if each.make == want.make and each.name not in leaving), None)
        if found is not None:
            nobody.remove(found)
            orders.append(Assign(found.name, want.replica, "it is there and nobody"))
        elif want.draining:
            continue
        elif now_s < (again_s := memory.failures.get(want.make, Failures()).again_s):
            failed = memory.failures[want.make]
            waiting.append(
                f"{want.replica}: {failed.count} starts failed, the last as {_cut(failed.why)!r}; "
                f"the next in {again_s - now_s:.0f} s"
            )
        else:
            orders.append(Launch(want, "the plan wants it and nobody is there for it"))
    idle = {each.name: memory.idle_since_s.get(each.name, now_s) for each in nobody}
    for each in nobody:
        if each.replica:
            orders.append(Assign(each.name, "", f"{each.replica} is not wanted any more"))
        if each.name in leaving and not each.pinned:
            orders.append(Halt(each.name, "its replica was drained by hand, or its machine goes"))
        elif now_s - idle[each.name] >= linger_s and not each.pinned:
            orders.append(Halt(each.name, f"is not wanted since {now_s - idle[each.name]:.0f} s"))
    return Step(tuple(orders), replace(memory, idle_since_s=idle), tuple(waiting))


def _matched(wants: Sequence[Want], living: Iterable[Instance]) -> tuple[set[str], list[Want]]:
    """(engines that are a wanted replica, wanted replicas without one)"""
    by_replica = {each.replica: each for each in living if each.replica}
    taken: set[str] = set()
    lacking = []
    for want in wants:
        found = by_replica.get(want.replica)
        if found is not None and found.make == want.make:
            taken.add(found.name)
        else:
            lacking.append(want)
    return taken, lacking


def _usefulness(each: Instance) -> tuple[bool, float, str]:
    return each.state != "up", each.since_s, each.name


def _cut(why: str) -> str:
    return why if len(why) <= MOST_WHY else why[: MOST_WHY - 1] + "…"

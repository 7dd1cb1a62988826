"""Wanted beside started: what to do next. Level-triggered: nothing is remembered but how often starts failed.

1. A replica keeps its engine as long as that lives.
2. One without takes an engine of its make that is free: up before starting, oldest first. So a replica that was
   lost for a moment, or wanted in another role, costs no start.
3. Else one is started, unless starts of this make failed lately: then later, ever more rarely (`StartFailures`).
4. An engine that is free is stopped once that lasted `linger_s`, sooner never: a plan often changes its mind.
   One that was started by hand is left alone. One whose replica was drained by hand goes at once.
5. A start that takes longer than `start_s` has failed, and is ended without asking. So is an engine that is silent
   for `silent_s`: it was up and does not answer, nor does the gateway reach it, or its process stands still. What is
   dead is cleared away, with its reason.

Orders of one call can be carried out in any order, all or some of them: the next call sees what became of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from potluck.control.control_values import (
    AssignEngine,
    EngineInstance,
    EngineSpec,
    ForgetEngine,
    LaunchEngine,
    Order,
    StopEngine,
    WantedReplica,
)

RETRY_S = 1.0
RETRY_MOST_S = 60.0
IN_VAIN = 3  # Starts that failed in the same way, after which another one will too.
IN_VAIN_MOST_S = 300.0
_CHANGING = re.compile(r"\b[0-9a-f]{8}\b|[0-9.]+")
"""What differs between two starts that fail alike: names of engines, ports, sizes."""


@dataclass(frozen=True, slots=True)
class StartFailures:
    """Starts of one make that came to nothing, one after another."""

    count: int = 0
    last_s: float = 0.0
    why: str = ""
    alike: int = 0  # So many of the last ones failed in the same way.
    engine: str = ""

    @property
    def in_vain(self) -> bool:
        return self.alike >= IN_VAIN

    @property
    def again_s(self) -> float:
        """When to try again: after 1 s, 2 s, 4 s, ... 60 s; in vain, after 1 min, 2 min, 4 min, 5 min."""
        if not self.count:
            return 0.0
        if self.in_vain:
            return self.last_s + min(IN_VAIN_MOST_S, RETRY_MOST_S * 2.0 ** (self.alike - IN_VAIN))
        return self.last_s + min(RETRY_MOST_S, RETRY_S * 2.0 ** (self.count - 1))

    def more(self, at_s: float, why: str, engine: str = "") -> StartFailures:
        alike = self.alike + 1 if self.count and _gist(self.why) == _gist(why) else 1
        return StartFailures(self.count + 1, at_s, why, alike, engine)


@dataclass(frozen=True, slots=True)
class StuckReplica:
    replica: str
    failures: StartFailures


def stuck(
    wants: Sequence[WantedReplica],
    instances: Iterable[EngineInstance],
    failures: Mapping[EngineSpec, StartFailures],
) -> tuple[StuckReplica, ...]:
    there = {instance.replica for instance in instances if instance.state != "dead"}
    return tuple(
        StuckReplica(want.replica, failures[want.make])
        for want in wants
        if want.make in failures and want.replica not in there and not want.draining
    )


def _gist(why: str) -> str:
    return _CHANGING.sub("#", why)


LINGER_S = 20.0
MAX_REASON_CHARS = 160
START_S = 600.0
SILENT_S = 20.0


@dataclass(frozen=True, slots=True)
class ReconcilerMemory:
    failures: Mapping[EngineSpec, StartFailures] = field(default_factory=dict)
    idle_since_s: Mapping[str, float] = field(default_factory=dict)
    """Engine to when it was first seen to be free."""
    silent_since_s: Mapping[str, float] = field(default_factory=dict)
    """Engine to when it was first seen to be silent."""

    def failed(self, engine_spec: EngineSpec, at_s: float, why: str, engine: str = "") -> ReconcilerMemory:
        before = self.failures.get(engine_spec, StartFailures())
        return replace(self, failures={**self.failures, engine_spec: before.more(at_s, why, engine)})


@dataclass(frozen=True, slots=True)
class ReconcilerStep:
    orders: tuple[Order, ...]
    memory: ReconcilerMemory
    waiting: tuple[str, ...] = ()  # What is wanted and not done yet, with the reason: one line each.


def step(
    wants: Sequence[WantedReplica],
    instances: Iterable[EngineInstance],
    memory: ReconcilerMemory,
    now_s: float,
    *,
    linger_s: float = LINGER_S,
    start_s: float = START_S,
    leaving: Collection[str] = (),
    silent: Collection[str] = (),
    silent_s: float = SILENT_S,
) -> ReconcilerStep:
    """What to do now; engines that are `leaving` are not used again."""
    memory = replace(memory, silent_since_s={name: memory.silent_since_s.get(name, now_s) for name in silent})
    orders, living, memory = _ended(instances, memory, now_s, start_s, silent_s)
    taken, lacking = _matched(wants, living)
    free = sorted((one for one in living if one.name not in taken), key=_usefulness)
    waiting: list[str] = []
    for want in lacking:
        found = next((one for one in free if one.make == want.make and one.name not in leaving), None)
        failed = memory.failures.get(want.make, StartFailures())
        if found is not None:
            free.remove(found)
            orders.append(AssignEngine(found.name, want.replica, "it was there and free"))
        elif want.draining:
            continue
        elif now_s < failed.again_s:
            alike = " in the same way" if failed.in_vain else ""
            starts = f"{failed.count} starts" if failed.count > 1 else "1 start"
            waiting.append(
                f"{want.replica}: {starts} failed{alike}, the last as {_cut(failed.why)!r}; "
                f"the next in {failed.again_s - now_s:.0f} s"
            )
        else:
            orders.append(LaunchEngine(want, "the plan wants it, and no engine is free for it"))
    idle = {one.name: memory.idle_since_s.get(one.name, now_s) for one in free}
    for one in free:
        idle_s = now_s - idle[one.name]
        if one.replica:
            orders.append(AssignEngine(one.name, "", f"{one.replica} is not wanted any more"))
        if one.name in leaving and not one.pinned:
            orders.append(StopEngine(one.name, "its replica was drained by hand, or its machine goes"))
        elif idle_s >= linger_s and not one.pinned:
            orders.append(StopEngine(one.name, f"is not wanted since {idle_s:.0f} s"))
    return ReconcilerStep(tuple(orders), replace(memory, idle_since_s=idle), tuple(waiting))


def _ended(
    instances: Iterable[EngineInstance],
    memory: ReconcilerMemory,
    now_s: float,
    start_s: float,
    silent_s: float,
) -> tuple[list[Order], list[EngineInstance], ReconcilerMemory]:
    """What becomes of those that are dead, late or silent; those that live; and which starts failed."""
    orders: list[Order] = []
    living: list[EngineInstance] = []
    late = f"was not ready after {start_s:g} s"
    for one in instances:
        stuck, dead = "", one.state == "dead"
        if one.state == "starting" and now_s - one.since_s > start_s:
            stuck = late
        elif now_s - memory.silent_since_s.get(one.name, now_s) >= silent_s and not one.pinned:
            stuck = f"was silent for {silent_s:g} s"
        if dead or stuck:
            why = one.problem or stuck or "ended by itself"
            orders.append(ForgetEngine(one.name, why) if dead else StopEngine(one.name, why, True))
            # It never was up: a start that failed. Of one that was late that is known when it ends.
            if (stuck == late and not one.problem) or (dead and not one.url and why != late):
                memory = memory.failed(one.make, now_s, why, one.name)
        else:
            living.append(one)
            failed = memory.failures.get(one.make)
            # One that came up before the last failure does not show that starts succeed again.
            if one.state == "up" and failed is not None and one.since_s >= failed.last_s:
                left = {
                    engine_spec: failure
                    for engine_spec, failure in memory.failures.items()
                    if engine_spec != one.make
                }
                memory = replace(memory, failures=left)
    return orders, living, memory


def _matched(
    wants: Sequence[WantedReplica], living: Iterable[EngineInstance]
) -> tuple[set[str], list[WantedReplica]]:
    by_replica = {one.replica: one for one in living if one.replica}
    taken, lacking = set[str](), []
    for want in wants:
        one = by_replica.get(want.replica)
        if one is not None and one.make == want.make:
            taken.add(one.name)
        else:
            lacking.append(want)
    return taken, lacking


def _usefulness(instance: EngineInstance) -> tuple[bool, float, str]:
    return instance.state != "up", instance.since_s, instance.name


def _cut(why: str) -> str:
    return why if len(why) <= MAX_REASON_CHARS else why[: MAX_REASON_CHARS - 1] + "…"

"""Wanted beside started: what to do next. Level-triggered: nothing is remembered but how often starts failed.

1. A replica keeps its engine as long as that lives.
2. One without takes an engine of its make that is free: up before starting, oldest first. So a replica that was
   lost for a moment, or wanted in another role, costs no start.
3. Else one is started, unless starts of this make failed lately: then later, ever more rarely (`failing.py`).
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
IN_VAIN = 3
"""Starts that failed in the same way, after which another one will too."""
IN_VAIN_MOST_S = 300.0
_CHANGING = re.compile(r"\b[0-9a-f]{8}\b|[0-9.]+")
"""What differs between two starts that fail alike: names of engines, ports, sizes."""


@dataclass(frozen=True, slots=True)
class StartFailures:
    """Starts of one make that came to nothing, one after another."""

    count: int = 0
    last_s: float = 0.0
    why: str = ""
    alike: int = 0
    """So many of the last ones failed in the same way."""
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
MOST_WHY = 160
START_S = 600.0
SILENT_S = 20.0


@dataclass(frozen=True, slots=True)
class ReconcilerMemory:
    failures: Mapping[EngineSpec, StartFailures] = field(default_factory=dict)
    idle_since_s: Mapping[str, float] = field(default_factory=dict)
    """Engine to when it was first seen to be free."""
    silent_since_s: Mapping[str, float] = field(default_factory=dict)
    """Engine to when it was first seen to be silent."""

    def failed(self, make: EngineSpec, at_s: float, why: str, engine: str = "") -> ReconcilerMemory:
        before = self.failures.get(make, StartFailures())
        return replace(self, failures={**self.failures, make: before.more(at_s, why, engine)})


@dataclass(frozen=True, slots=True)
class ReconcilerStep:
    orders: tuple[Order, ...]
    memory: ReconcilerMemory
    waiting: tuple[str, ...] = ()
    """What is wanted and not done yet, with the reason: one line each."""


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
    orders: list[Order] = []
    living: list[EngineInstance] = []
    memory = replace(memory, silent_since_s={name: memory.silent_since_s.get(name, now_s) for name in silent})
    late = f"was not ready after {start_s:g} s"
    for instance in instances:
        stuck = ""
        if instance.state == "starting" and now_s - instance.since_s > start_s:
            stuck = late
        elif now_s - memory.silent_since_s.get(instance.name, now_s) >= silent_s and not instance.pinned:
            stuck = f"was silent for {silent_s:g} s"
        if instance.state == "dead" or stuck:
            why = instance.problem or stuck or "ended by itself"
            orders.append(
                ForgetEngine(instance.name, why)
                if instance.state == "dead"
                else StopEngine(instance.name, why, True)
            )
            # It never was up: a start that failed. Of one that was late that is known when it ends.
            if (stuck == late and not instance.problem) or (
                instance.state == "dead" and not instance.url and why != late
            ):
                memory = memory.failed(instance.make, now_s, why, instance.name)
        else:
            living.append(instance)
            if instance.state == "up" and instance.make in memory.failures:
                left = {make: failure for make, failure in memory.failures.items() if make != instance.make}
                memory = replace(memory, failures=left)
    taken, lacking = _matched(wants, living)
    free = sorted((item for item in living if item.name not in taken), key=_usefulness)
    waiting: list[str] = []
    for want in lacking:
        result = next((item for item in free if item.make == want.make and item.name not in leaving), None)
        if result is not None:
            free.remove(result)
            orders.append(AssignEngine(result.name, want.replica, "it was there and free"))
        elif want.draining:
            continue
        elif now_s < (again_s := memory.failures.get(want.make, StartFailures()).again_s):
            failed = memory.failures[want.make]
            alike = " in the same way" if failed.in_vain else ""
            starts = f"{failed.count} starts" if failed.count > 1 else "1 start"
            waiting.append(
                f"{want.replica}: {starts} failed{alike}, the last as {_cut(failed.why)!r}; "
                f"the next in {again_s - now_s:.0f} s"
            )
        else:
            orders.append(LaunchEngine(want, "the plan wants it, and no engine is free for it"))
    idle = {item.name: memory.idle_since_s.get(item.name, now_s) for item in free}
    for engine_instance in free:
        if engine_instance.replica:
            orders.append(
                AssignEngine(engine_instance.name, "", f"{engine_instance.replica} is not wanted any more")
            )
        if engine_instance.name in leaving and not engine_instance.pinned:
            orders.append(
                StopEngine(engine_instance.name, "its replica was drained by hand, or its machine goes")
            )
        elif now_s - idle[engine_instance.name] >= linger_s and not engine_instance.pinned:
            orders.append(
                StopEngine(
                    engine_instance.name, f"is not wanted since {now_s - idle[engine_instance.name]:.0f} s"
                )
            )
    return ReconcilerStep(tuple(orders), replace(memory, idle_since_s=idle), tuple(waiting))


def _matched(
    wants: Sequence[WantedReplica], living: Iterable[EngineInstance]
) -> tuple[set[str], list[WantedReplica]]:
    """(engines that are a wanted replica, wanted replicas without one)"""
    by_replica = {instance.replica: instance for instance in living if instance.replica}
    taken: set[str] = set()
    lacking = []
    for want in wants:
        engine_instance = by_replica.get(want.replica)
        if engine_instance is not None and engine_instance.make == want.make:
            taken.add(engine_instance.name)
        else:
            lacking.append(want)
    return taken, lacking


def _usefulness(each: EngineInstance) -> tuple[bool, float, str]:
    return each.state != "up", each.since_s, each.name


def _cut(why: str) -> str:
    return why if len(why) <= MOST_WHY else why[: MOST_WHY - 1] + "…"

"""The controller: read what is wanted and what is there, do one step, write down what was done and why.

    turn   wanted (the gateway, or what it wanted last) + seen (the launcher) ─▶ step ─▶ orders, each done and noted
           ─▶ the roster told to the gateway ─▶ a plan, where one was asked for

A turn does not wait for anything to become ready. Everything that must be known after a crash is in the store before
the next thing is begun; an engine is written down before it is started.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from potluck.control.byhand import is_by_hand, leaving
from potluck.control.gateway import GatewayAway, GatewayClient, wants_of
from potluck.control.launch.base import Launcher
from potluck.control.step import LINGER_S, START_S, Memory, step
from potluck.control.store.lease import Lease
from potluck.control.store.store import Store
from potluck.control.values import Assign, Clear, Halt, Instance, Launch, Order, Want
from potluck.core.errors import PotluckError
from potluck.core.values.plan import Plan, Template

Planner = Callable[[dict[str, float]], Plan | None]
"""Rates per model to a plan; None where there is none better. May take long, and is called in a thread."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn found and did."""

    acted: bool
    """False: another controller has the lease."""
    wanted: int = 0
    up: int = 0
    orders: tuple[Order, ...] = ()
    waiting: tuple[str, ...] = ()
    problem: str = ""

    @property
    def settled(self) -> bool:
        return self.acted and not self.orders and not self.waiting and self.wanted == self.up


class Controller:
    """Used from one thread. `clock` is the time of day: it outlasts processes."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        launcher: Launcher,
        gateway: GatewayClient,
        planner: Planner | None = None,
        *,
        advise: bool = False,
        clock: Callable[[], float] = time.time,
        linger_s: float = LINGER_S,
        start_s: float = START_S,
    ) -> None:
        self._store, self._lease, self._launcher = store, lease, launcher
        self._gateway, self._planner, self._advise, self._clock = gateway, planner, advise, clock
        self._linger_s, self._start_s = linger_s, start_s
        self._memory = Memory()
        self._templates: dict[str, Template] = {}
        self._planning: Future[Plan | None] | None = None
        self._answered: Any = None
        """The request for a plan that is being answered, or was."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="potluck-plan")
        self._said: dict[str, str] = {}
        newest = store.plan()
        if newest is not None:
            self.learn(newest.plan)

    def learn(self, plan: Plan) -> None:
        self._templates |= {template.name: template for template in plan.templates}

    def turn(self) -> Turn:
        """One look and one step."""
        if not self._lease.renew():
            self._note_once("lease", "waits", "another controller acts on this state")
            return Turn(False)
        wanted, problem = self._wanted()
        instances = self._seen()
        wants = wants_of(wanted, self._templates)
        found = step(
            wants,
            instances,
            self._memory,
            self._clock(),
            linger_s=self._linger_s,
            start_s=self._start_s,
            leaving=leaving(self._store),
        )
        self._memory = found.memory
        done = tuple(order for order in found.orders if self._lease.held and self._do(order))
        for line in found.waiting:
            self._note_once(f"wait {line.rpartition(': ')[0]}", "waits", line)
        there = self._store.instances()
        if not problem:
            problem = self._tell(there)
            self._plan(wanted.get("replan"))
        up = {each.replica for each in there if each.state == "up"}
        return Turn(
            True,
            len(wants),
            sum(want.replica in up for want in wants),
            done,
            found.waiting,
            problem,
        )

    def _wanted(self) -> tuple[dict[str, Any], str]:
        try:
            wanted = self._gateway.wanted()
        except (GatewayAway, PotluckError) as error:
            self._note_once("gateway", "away", str(error))
            return self._store.get("wanted") or {}, str(error)
        self._said.pop("gateway", None)
        if wanted != self._store.get("wanted"):
            self._store.set("wanted", wanted)
        return wanted, ""

    def _seen(self) -> tuple[Instance, ...]:
        """What the launcher finds, written down where it is new."""
        instances = {each.name: each for each in self._store.instances()}
        for seen in self._launcher.look(self._store.places()):
            before = instances.get(seen.name)
            if before is None or (before.state, before.problem) == (seen.state, seen.problem):
                continue
            if before.state == "up" and seen.state == "starting":
                continue  # it is busy for a moment; whether it serves is the gateway's to say
            now = replace(
                before,
                state=seen.state,
                since_s=self._clock(),
                url=seen.url or before.url,
                problem=seen.problem,
            )
            self._store.put(now)
            instances[seen.name] = now
            self._note(seen.state, seen.name, seen.problem or f"for {before.replica or 'nobody'}")
        return tuple(instances.values())

    def _do(self, order: Order) -> bool:
        """Carry out one order; whether something was done."""
        match order:
            case Launch(want, why):
                return self._launch(want, why)
            case Assign(name, replica, why):
                found = self._one(name)
                if found is not None:
                    self._store.put(replace(found, replica=replica))
                    self._note("assign", f"{name} is {replica or 'nobody'}", why)
            case Halt(name, why):
                self._launcher.stop(name, self._store.places().get(name, {}))
                self._note_once(f"stop {name}", "stop", why)
            case Clear(name, why):
                self._store.remove(name)
                self._note("clear", name, why)
        return True

    def _launch(self, want: Want, why: str) -> bool:
        name = f"{want.make.model}-{secrets.token_hex(4)}"
        instance = Instance(name, want.make, "starting", self._clock(), replica=want.replica)
        self._store.put(instance, {})
        try:
            place = self._launcher.start(name, want.make)
        except PotluckError as error:
            self._store.put(replace(instance, state="dead", problem=str(error)))
            self._note("failed", name, str(error))
            return True
        self._store.put(instance, place)
        self._note("start", f"{name} for {want.replica}", why)
        return True

    def _one(self, name: str) -> Instance | None:
        return next((each for each in self._store.instances() if each.name == name), None)

    def _tell(self, instances: tuple[Instance, ...]) -> str:
        try:
            self._gateway.set_fleet(instances)
        except PotluckError as error:
            return str(error)
        return ""

    # Plans.

    def _plan(self, asked: dict[str, Any] | None) -> None:
        """Have a plan made where the Brain asks for one, and hand it over when it is there."""
        if self._planning is not None:
            if not self._planning.done():
                return
            finished, self._planning = self._planning, None
            self._adopt(finished, str((self._answered or {}).get("reason", "")))
            return
        if asked is None:
            self._answered = None
        elif self._planner is not None and asked != self._answered:
            self._answered = asked
            self._note("plan", "begins", str(asked.get("reason", "")))
            self._planning = self._pool.submit(self._planner, dict(asked.get("rates_per_s", {})))

    def _adopt(self, finished: Future[Plan | None], reason: str) -> None:
        try:
            plan = finished.result()
        except PotluckError as error:
            self._note("plan", "failed", str(error))
            return
        if plan is None:
            self._note("plan", "stays", "there is none better")
            return
        newest = self._store.plan()
        if newest is not None and is_by_hand(newest):
            held = (
                f"version {newest.version} was made by hand and holds; `potluck scale --auto` lets go of it"
            )
            self._note("advice", f"a plan for ${plan.cost_usd_per_h:.2f}/h", f"{reason}; {held}")
            return
        if self._advise:
            self._note("advice", f"a plan for ${plan.cost_usd_per_h:.2f}/h", reason)
            return
        self.change_plan(plan, reason)

    def change_plan(self, plan: Plan, reason: str) -> int:
        """From now on this one; its version."""
        version = self._store.add_plan(plan, self._clock(), reason)
        self.learn(plan)
        self._gateway.set_plan(plan)
        self._note("plan", f"version {version}, ${plan.cost_usd_per_h:.2f}/h", reason)
        return version

    # Notes.

    def _note(self, kind: str, what: str, why: str) -> None:
        self._store.note(self._clock(), kind, what, why)

    def _note_once(self, key: str, kind: str, why: str) -> None:
        """What stays the same is not said again."""
        gist = why.rpartition(" in ")[0] or why
        if self._said.get(key) != gist:
            self._said[key] = gist
            self._note(kind, key.partition(" ")[2] or key, why)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._lease.release()

"""The controller: read what is wanted and what is there, do one step, write down what was done and why.

    turn   prices and notices (the market) ─▶ the gateway
           wanted (the gateway, or what it wanted last) + seen (the launcher) ─▶ step ─▶ orders, each done and noted
           ─▶ the engines told to the gateway ─▶ a plan, where one was asked for (plan_requests.py)
           what the gateway decided meanwhile, and rates ─▶ the store (decision_history.py)
           usage and keys (accounts.py)

A turn does not wait for anything to become ready. Everything that must be known after a crash is in the store before
the next thing is begun; an engine is written down before it is started.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from potluck.control import control_values
from potluck.control.accounts import Accounts
from potluck.control.control_values import Launcher
from potluck.control.decision_history import DecisionHistory, ObservedSpeeds, gist
from potluck.control.gateway_client import GatewayAway, GatewayClient, wants_of
from potluck.control.manual_changes import KeptCordons, is_by_hand, leave, leaving, put_plan
from potluck.control.market import MarketSource
from potluck.control.plan_requests import DayPlans, Planner, PlanRequests
from potluck.control.reconciler import LINGER_S, START_S, ReconcilerMemory, StuckReplica, step, stuck
from potluck.control.state_store import Lease, StateStore
from potluck.core.codec import encode
from potluck.core.errors import PotluckError
from potluck.core.values.plan import Plan, Template, price_text

SCHEDULED = "scheduled"
"""The setting with the time from which on the day's schedule has the plan that was put into force last."""
STUCK = "stuck"  # The setting that has replicas whose starts failed, with how often and why.
ELSEWHERE_S = 10.0  # A gateway plan without a version for this long was set by another client.


@dataclass(frozen=True, slots=True)
class ControllerTurn:
    acted: bool  # False: another controller has the lease.
    wanted: int = 0
    up: int = 0
    orders: tuple[control_values.Order, ...] = ()
    waiting: tuple[str, ...] = ()
    problem: str = ""
    stuck: tuple[StuckReplica, ...] = ()

    @property
    def settled(self) -> bool:
        return self.acted and not self.orders and not self.waiting and self.wanted == self.up


class Controller:
    """Used from one thread. `clock` is the time of day: it outlasts processes."""

    def __init__(
        self,
        store: StateStore,
        lease: Lease,
        launcher: Launcher,
        gateway: GatewayClient,
        planner: Planner | None = None,
        *,
        market: MarketSource | None = None,
        day: DayPlans | None = None,
        advise: bool = False,
        clock: Callable[[], float] = time.time,
        linger_s: float = LINGER_S,
        start_s: float = START_S,
        attached: bool = False,
    ) -> None:
        """`attached`: others start and stop the engines, which a file lists; this one only watches."""
        self._store, self._lease, self._launcher = store, lease, launcher
        self._gateway, self._market, self._clock = gateway, market, clock
        self._day, self._advise = day, advise
        self._linger_s, self._start_s, self._attached = linger_s, start_s, attached
        self._memory = ReconcilerMemory()
        self._templates: dict[str, Template] = {}
        paces = ObservedSpeeds(store, self._templates, clock)
        self.planning = PlanRequests(
            store, planner, self.change_plan, self._note, advise=advise, paces=paces.now
        )
        self._history = DecisionHistory(store, gateway, self._note_once, clock, paces.hear)
        self._accounts = Accounts(store, store.path.parent, self._note, clock)
        self._elsewhere_s: float | None = None
        self._numbered = 0
        """The version whose number the gateway was last told; one of an older release keeps its own."""
        self._cordons = KeptCordons(store, lambda marks: gateway.cordon_again(marks))
        self._said: dict[str, str] = {}
        newest = store.plan()
        if newest is not None:
            self.learn(newest.plan)

    def learn(self, plan: Plan) -> None:
        self._templates |= {template.name: template for template in plan.repertoire}

    def _learn_of(self, wanted: dict[str, Any]) -> None:
        """Templates of a plan that another process stored and sent."""
        if any(item["template"] not in self._templates for item in wanted.get("replicas", ())):
            newest = self._store.plan()
            if newest is not None:
                self.learn(newest.plan)

    def turn(self) -> ControllerTurn:
        if not self._lease.renew():
            self._note_once("lease", "waits", "another controller acts on this state")
            return ControllerTurn(False)
        wanted, problem = self._wanted()
        if not problem:
            wanted = self._tell_market(wanted)
            self._tell_plan(wanted)
            self._follow_day()
            self._kill(frozenset(wanted.get("kill", ())))
            if untold := self._cordons.heed(wanted):
                self._note_once("cordon", "cordon", untold)
        instances, silent = self._seen()
        self._let_go(instances, frozenset(wanted.get("leave", ())))
        self._heed_notices(instances, wanted)
        self._learn_of(wanted)
        wants = () if self._attached else wants_of(wanted, self._templates)
        to_do = step(
            wants,
            instances,
            self._memory,
            self._clock(),
            linger_s=self._linger_s,
            start_s=self._start_s,
            leaving=leaving(self._store),
            silent=() if problem else silent - _reached(wanted, instances),
        )
        self._memory = to_do.memory
        done = tuple(order for order in to_do.orders if self._lease.held and self._do(order))
        for line in to_do.waiting:
            cut = line.find(": ", line.find("@"))  # a replica's name may have a colon, before its region
            self._note_once(f"wait {line[:cut]}", "waits", line[cut + 2 :])
        there = self._store.instances()
        if not problem and not self._attached:
            problem = self._tell(there)
        if not problem:
            self.planning.turn(wanted, None if self._market is None else self._market.regions)
            self._history.turn()
        self._accounts.turn()
        failing = stuck(wants, there, self._memory.failures)
        self._keep_stuck(failing)
        up = {instance.replica for instance in there if instance.state == "up"}
        ready = sum(want.replica in up for want in wants)
        return ControllerTurn(True, len(wants), ready, done, to_do.waiting, problem, failing)

    def _keep_stuck(self, failing: tuple[StuckReplica, ...]) -> None:
        """For `potluck status`, which says why something is missing and when it is tried again."""
        names = ("count", "alike", "why", "again_s", "engine")
        kept = {one.replica: {name: getattr(one.failures, name) for name in names} for one in failing}
        if kept != (self._store.get(STUCK) or {}):
            self._store.set(STUCK, kept)

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

    def _seen(self) -> tuple[tuple[control_values.EngineInstance, ...], frozenset[str]]:
        """What the launcher finds, written down where it is new; and which of them do nothing that can be seen."""
        silent: set[str] = set()
        instances = {instance.name: instance for instance in self._store.instances()}
        for seen in self._launcher.look(self._store.places()):
            before = instances.get(seen.name)
            if before is None or before.state == "dead":
                continue  # why is known from when it died
            if seen.is_hung or (before.state == "up" and seen.state == "starting"):
                silent.add(seen.name)
            if before.state == seen.state or (before.state == "up" and seen.state == "starting"):
                continue  # it is busy for a moment; whether it serves is the gateway's to say
            problem, url = before.problem or seen.problem, seen.url or before.url
            now = replace(before, state=seen.state, since_s=self._clock(), url=url, problem=problem)
            self._store.put(now)
            instances[seen.name] = now
            self._note(seen.state, seen.name, now.problem or f"for {before.replica or 'no replica'}")
        return tuple(instances.values()), frozenset(silent)

    def _do(self, order: control_values.Order) -> bool:
        match order:
            case control_values.LaunchEngine(want, why):
                return self._launch(want, why)
            case control_values.AssignEngine(name, replica, why):
                one = self._one(name)
                if one is not None:
                    self._store.put(replace(one, replica=replica))
                    self._note("assign", f"{name} serves as {replica}" if replica else f"{name} is free", why)
            case control_values.StopEngine(name, why, insist):
                one = self._one(name)
                if insist and one is not None and not one.problem:
                    self._store.put(replace(one, problem=why))  # what it dies of is known already
                self._end(name, insist)
                self._note_once(f"stop {name}", "stop", why)
            case control_values.ForgetEngine(name, why):
                self._store.remove(name)
                self._note("clear", name, why)
        return True

    def _end(self, name: str, insist: bool) -> None:
        launcher, place = self._launcher, self._store.places().get(name, {})
        (launcher.kill if insist else launcher.stop)(name, place)

    def _launch(self, want: control_values.WantedReplica, why: str) -> bool:
        name = f"{want.make.model}-{secrets.token_hex(4)}"
        instance = control_values.EngineInstance(
            name, want.make, "starting", self._clock(), replica=want.replica
        )
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

    def _kill(self, replicas: frozenset[str]) -> None:
        """Kill the engines of these replicas, on an operator's request."""
        for instance in self._store.instances() if replicas else ():
            if instance.replica not in replicas or instance.state == "dead":
                continue
            self._end(instance.name, insist=True)
            self._note_once(f"kill {instance.name}", "kill", f"{instance.replica} by hand")

    def _let_go(self, instances: tuple[control_values.EngineInstance, ...], urls: frozenset[str]) -> None:
        """Mark engines of replicas that an operator drained; new engines replace them."""
        going = {instance.name for instance in instances if instance.url in urls and instance.state != "dead"}
        new = going - leaving(self._store)
        if new:
            leave(self._store, new)
            for name in sorted(new):
                self._note("drain", name, "its replica was drained by hand")

    def _one(self, name: str) -> control_values.EngineInstance | None:
        return next((instance for instance in self._store.instances() if instance.name == name), None)

    def _tell(self, instances: tuple[control_values.EngineInstance, ...]) -> str:
        try:
            self._gateway.set_fleet(instances)
        except PotluckError as error:
            return str(error)
        return ""

    # Prices, and machines that will vanish.

    def _tell_market(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """The gateway knows the prices and nodes of now; what it wants then."""
        if self._market is None:
            return wanted
        self._market.look()
        if self._market.problem:
            self._note_once("market", "market", f"{self._market.problem}; what was read last holds")
        regions = self._market.regions
        encoded = [encode(region) for region in regions]
        if wanted.get("market") == encoded or (wanted.get("market") is None and regions == self._market.spec):
            return wanted
        try:
            self._gateway.set_market(regions)
            self._note("market", "prices or offers of GPUs changed", self._market.changes())
            return self._wanted()[0]
        except PotluckError as error:
            self._note_once("market", "market", str(error))
            return wanted

    def _heed_notices(
        self, instances: tuple[control_values.EngineInstance, ...], wanted: dict[str, Any]
    ) -> None:
        """Replicas on machines that will vanish are emptied before, and their engines not used again."""
        living = [instance for instance in instances if instance.state != "dead"]
        going = self._news()
        if self._market is not None and self._market.market.notices:
            notices = self._market.market.leaving(living).items()
            going |= {name: notice.at_s - self._clock() for name, notice in notices}
        new = going.keys() - leaving(self._store)
        if not new:
            return
        leave(self._store, new)
        replicas = wanted.get("replicas", ())
        ready = {item["id"] for item in replicas if item.get("url") and not item["draining"]}
        for one in (one for one in living if one.name in new):
            line = f"its machine goes in {going[one.name]:.0f} s; it is emptied before"
            self._note("notice", one.name, line)
            if one.replica in ready:
                try:
                    self._gateway.drain(one.replica)
                except PotluckError as error:
                    self._note("notice", f"{one.replica} could not be drained", str(error))

    def _news(self) -> dict[str, float]:
        going: dict[str, float] = {}
        for news in self._launcher.news():
            self._note(news.kind, news.node, news.why)
            if news.kind == "notice":
                going |= dict.fromkeys(news.engines, news.notice_s)
        return going

    # Plans.

    def _tell_plan(self, wanted: dict[str, Any]) -> None:
        """A controller that died between writing a plan down and telling it is made good for."""
        mark = wanted.get("plan_mark")
        marks = self._store.plan_marks()
        if mark is None or not marks:
            self._elsewhere_s = None
            return
        ((number, _),) = self._store.versions(1)
        if mark == marks[0] and number in (self._numbered, wanted.get("plan_version", number)):
            self._elsewhere_s = None
            return
        self._numbered = number
        newest = self._store.plan()
        assert newest is not None
        if mark in marks:
            self.learn(newest.plan)
            try:
                self._gateway.set_plan(newest.plan, newest.reason, newest.version)
                self._note("plan", f"version {newest.version} is told again", "the gateway had another")
            except PotluckError as error:
                self._note_once("plan", "plan", f"version {newest.version} was not taken: {error}")
            return
        self._elsewhere_s = self._elsewhere_s or self._clock()
        if self._clock() - self._elsewhere_s > ELSEWHERE_S:
            self._note_once(
                "elsewhere", "plan", f"the gateway serves another plan than version {newest.version}"
            )

    def _follow_day(self) -> None:
        """Put the plan that the day's schedule has for now into force, once; what is done by hand holds."""
        if self._day is None:
            return
        begin, plan = self._day.due(self._clock())
        newest = self._store.plan()
        if self._store.get(SCHEDULED) == begin:
            return
        if self._advise or is_by_hand(newest):
            held = "only advice is asked for" if self._advise else "what was set by hand holds"
            self._note_once("schedule", "advice", f"the plan from {begin} on is due; {held}")
            return
        if newest is None or newest.plan.deployments != plan.deployments:
            reason = f"schedule: from {begin} on"
            try:  # tried again at the next turn, so one that is not taken leaves no version behind
                version = put_plan(self._store, self._gateway.set_plan, plan, reason, self._clock())
            except PotluckError as error:
                self._note_once("schedule", "schedule", str(error))
                return
            self.learn(plan)
            self._note("plan", f"version {version}, {price_text(plan)}", reason)
        self._store.set(SCHEDULED, begin)

    def change_plan(self, plan: Plan, reason: str) -> int:
        version = self._store.add_plan(plan, self._clock(), reason)
        self.learn(plan)
        self._gateway.set_plan(plan, reason, version)
        self._note("plan", f"version {version}, {price_text(plan)}", reason)
        return version

    # Notes.

    def _note(self, kind: str, what: str, why: str) -> None:
        self._store.note(self._clock(), kind, what, why)

    def _note_once(self, key: str, kind: str, why: str) -> None:
        """What stays the same but for its figures is not said again."""
        if self._said.get(key) != gist(why):
            self._said[key] = gist(why)
            self._note(kind, key.partition(" ")[2] or key, why)

    def close(self) -> None:
        self.planning.close()
        self._lease.release()


def _reached(wanted: dict[str, Any], instances: Iterable[control_values.EngineInstance]) -> frozenset[str]:
    """Engines that the gateway has for replicas: to it they answer."""
    urls = {item.get("url") for item in wanted.get("replicas", ())} - {"", None}
    return frozenset(instance.name for instance in instances if instance.url in urls)

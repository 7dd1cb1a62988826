"""What operators see of the center and say to it: the admin room's `Overseer`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from potluck.core.brain.actions import Action, Drain, Flip, Move, Recount, Replan, Start, Stop
from potluck.core.brain.events import Drained, Event, Ordered, Planned, ReplicaLost, ReplicaReady
from potluck.core.brain.fleet import View
from potluck.core.brain.flight import RUNNING
from potluck.core.codec import encode
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.scale.roles import FLIPPABLE
from potluck.core.values.plan import plan_from_json
from potluck.gateway.admin.overseer import Json, QueueSeen, ReplicaSeen
from potluck.gateway.desk.center import Center
from potluck.gateway.fleet.roster import read_roster


class Oversight:
    """Reads the center; changes it only by its own calls."""

    def __init__(self, center: Center) -> None:
        self._center = center

    def replicas(self) -> Iterable[ReplicaSeen]:
        now_s = self._center.desk.now_s()
        for name, view in self._center.brain.fleet.views.items():
            status = view.status
            if status is None:
                yield ReplicaSeen(name, view.member.model, view.state)
                continue
            used = 1.0 - status.free_blocks / status.total_blocks if status.total_blocks else 0.0
            age_s = max(0.0, now_s - view.status_at_s)
            yield ReplicaSeen(name, view.member.model, view.state, status.running, status.queued, used, age_s)

    def queues(self) -> Iterable[QueueSeen]:
        waiting: Counter[tuple[str, str]] = Counter()
        running: Counter[tuple[str, str]] = Counter()
        for flight in self._center.brain.flights.values():
            key = (flight.request.model, flight.request.tenant)
            (running if flight.state == RUNNING else waiting)[key] += 1
        for model, tenant in sorted({*waiting, *running}):
            yield QueueSeen(model, tenant, waiting[model, tenant], running[model, tenant])

    def usd_per_h(self) -> Mapping[str, float]:
        """What the copies that are there cost, each for its model."""
        kits, found = self._center.kits, Counter[str]()
        copies = {view.member.unit: view.member for view in self._center.brain.fleet.views.values()}
        for member in copies.values():
            template = kits.templates.get(member.template)
            if template is not None:
                for each in template.nodes:
                    price = kits.scene.price_usd_per_h(member.region, each.node)
                    found[member.model] += each.count * price  # type: ignore[assignment]
        return dict(found)

    def snapshot(self) -> Json:
        center = self._center
        return {
            "at_s": center.desk.now_s(),
            "plan": {
                "version": center.plan_version,
                "strategy": center.plan.strategy,
                "cost_usd_per_h": center.plan.cost_usd_per_h,
                "deployments": [encode(each) for each in center.plan.deployments],
            },
            "scaling": center.policy.scaling,
            "copies": self._copies(),
            "models": {
                name: {
                    "ready": not center.lacking(name),
                    "why": center.lacking(name),
                    "slo": None
                    if name not in center.kits.scene.slos
                    else encode(center.kits.scene.slos[name]),
                    "usd_per_h": self.usd_per_h().get(name, 0.0),
                }
                for name in center.kits.scene.models
            },
            "replicas": [self._replica(name) for name in center.brain.fleet.views],
            "links": [each._asdict() for each in center.watch.links],
            "queues": [each._asdict() for each in self.queues()],
            **self.fleet(),
            "wanted": self.wanted(),
            "open_requests": center.desk.open_requests,
            "notes": list(center.brain.steward.notes),
            "problems": [problem for problem in self._problems() if problem],
        }

    def _copies(self) -> list[Json]:
        """What a copy of each template of the plan costs in each region that has nodes for it."""
        scene = self._center.kits.scene
        return [
            {
                "template": template.name,
                "region": region.name,
                "usd_per_h": sum(
                    each.count * scene.price_usd_per_h(region.name, each.node) for each in template.nodes
                ),
            }
            for template in self._center.plan.templates
            for region in scene.regions
            if all(region.offer(each.node) is not None for each in template.nodes)
        ]

    def _problems(self) -> Iterable[str]:
        center = self._center
        if center.roster is not None:
            yield center.roster.problem
        if center.logged is not None:
            yield center.logged.trouble

    def _replica(self, name: str) -> Json:
        view = self._center.brain.fleet.views[name]
        endpoint = self._center.keeper.find(name)
        return {
            "replica": name,
            "unit": view.member.unit,
            "template": view.member.template,
            "index": view.member.index,
            "model": view.member.model,
            "region": view.member.region,
            "role": view.role,
            "state": view.state,
            "by_hand": name in self._center.brain.steward.by_hand,
            "doubted": view.doubted,
            "pace": view.pace,
            "open_requests": view.open_requests,
            "open_prefill_tokens": view.open_prefill_tokens,
            "url": None if endpoint is None else f"http://{endpoint.address.host}:{endpoint.address.port}",
            "status": None if view.status is None else view.status._asdict(),
        }

    def fleet(self) -> Json:
        return {
            "engines": [
                {
                    "url": each.entry.url,
                    "kind": each.entry.kind,
                    "up": each.up,
                    "replica": each.replica,
                    "note": each.note,
                    "model": "" if each.said is None else each.said.model,
                    "role": "" if each.said is None else each.said.role,
                    "state": "" if each.said is None else each.said.state,
                    "kv": "" if each.said is None else each.said.kv,
                }
                for each in self._center.keeper.engines
            ]
        }

    def set_fleet(self, body: Json) -> Json:
        if self._center.roster is not None:
            raise InputError("engines", "are listed in a file (--engines); change that, or start without it")
        before = {each.entry.url for each in self._center.keeper.engines}
        entries = read_roster(json.dumps(body), "fleet")
        self._center.enlist(entries)
        after = {each.url for each in entries}
        return {"engines": len(after), "came": sorted(after - before), "went": sorted(before - after)}

    def set_plan(self, body: Json) -> Json:
        center = self._center
        plan = plan_from_json(json.dumps(body))
        for template in plan.templates:
            if template.model not in center.kits.scene.models:
                raise UnknownNameError("plan: model", template.model, center.kits.scene.models)
        center.adopt(plan)
        return {
            "version": center.plan_version,
            "cost_usd_per_h": plan.cost_usd_per_h,
            "wanted": self.wanted(),
        }

    def drain(self, body: Json) -> Json:
        view = self._ready(body)
        unit = self._center.brain.fleet.units[view.member.unit]
        others = sorted(each.member.id for each in unit.views if each is not view)
        self._center.desk.tell(Ordered(view.member.id, "drain"))
        return {"replica": view.member.id, "with_it": others, "open_requests": view.open_requests}

    def flip(self, body: Json) -> Json:
        view, role = self._ready(body), body.get("role")
        if role not in ("prefill", "decode"):
            raise InputError("role", f"must be prefill or decode, is {role!r}")
        member = view.member
        if member.kind not in FLIPPABLE or view.role == "mixed":
            raise InputError(
                "replica", f"{member.id} ({member.kind}, {view.role}) does both and keeps its role"
            )
        peers = self._center.brain.fleet.views.values()
        others = [
            each.role
            for each in peers
            if each.member.model == member.model and each.serves and each is not view
        ]
        for needed, says in (("decode", "prefill"), ("prefill", "decode")):
            if role == says and all(each == says for each in others):
                raise InputError("role", f"{says} would leave nobody to {needed} for {member.model}")
        before = view.role
        self._center.desk.tell(Ordered(member.id, "prefill" if role == "prefill" else "decode"))
        return {"replica": member.id, "role": view.role, "before": before, "planned": member.role}

    def _ready(self, body: Json) -> View:
        """The replica that an order names."""
        views, name = self._center.brain.fleet.views, body.get("replica")
        if not isinstance(name, str):
            raise InputError("replica", "must be the name of one")
        if name not in views:
            raise UnknownNameError("replica", name, views)
        if views[name].state != "ready":
            raise InputError("replica", f"{name} is {views[name].state}; only one that is ready takes orders")
        return views[name]

    def wanted(self) -> Json:
        found = self._center.keeper.wanted()
        return {
            "version": found.version,
            "plan_version": self._center.plan_version,
            "replicas": [
                {**encode_member(member), "role": role, "draining": draining, "url": url}
                for member, role, draining, url in found.replicas
            ],
            "idle": list(found.stop),
            "replan": None
            if found.replan is None
            else {"rates_per_s": dict(found.replan.rates_per_s), "reason": found.replan.reason},
        }


def encode_member(member: object) -> Json:
    """A member's fields, without the codec's own mark."""
    found = encode(member)
    assert isinstance(found, dict)
    return {name: value for name, value in found.items() if name != "type"}


class Herald:
    """Tells whoever watches what happens to the fleet, and why: a watcher of the desk."""

    def __init__(self, decided: Callable[[str, str], None]) -> None:
        self._decided = decided

    def __call__(self, at_s: float, event: Event, actions: Sequence[Action]) -> None:
        match event:
            case ReplicaReady(replica):
                self._decided(f"{replica} is ready", "its engine answers")
            case ReplicaLost(replica, reason):
                self._decided(f"{replica} is lost", reason)
            case Drained(replica):
                self._decided(f"{replica} is empty", "it was asked to drain")
            case Ordered(replica, what):
                self._decided(f"{replica}: {what}", "by hand")
            case Planned(plan):
                self._decided(f"plan of {plan.strategy} adopted", f"${plan.cost_usd_per_h:.2f}/h")
        for action in actions:
            self._act(action, "by hand" if isinstance(event, Ordered) else "")

    def _act(self, action: Action, why: str) -> None:
        match action:
            case Start(member):
                self._decided(f"{member.id} is wanted", f"{member.template} in {member.region}")
            case Drain(replica):
                self._decided(f"{replica} drains", why or "the plan or scaling needs it no more")
            case Stop(replica):
                self._decided(f"{replica} stops", "it is empty or its grace is over")
            case Flip(replica, role):
                self._decided(f"{replica} becomes {role}", why or "the workload shifted")
            case Replan(_, reason):
                self._decided("another plan is asked for", reason)
            case Move(blocks, source, target):
                self._decided(
                    f"{len(blocks)} blocks are copied from {source} to {target}", "they are in demand"
                )
            case Recount(replica):
                self._decided(f"{replica} is asked for all it caches", "a report was lost")

"""What operators see of the center and say to it: the admin room's `Overseer`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from potluck.core.brain.events import Ordered
from potluck.core.brain.fleet import View
from potluck.core.brain.flight import RUNNING
from potluck.core.codec import decode, encode
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.scale.roles import FLIPPABLE
from potluck.core.values.member import Member
from potluck.core.values.plan import plan_from_json
from potluck.core.values.types import Region
from potluck.gateway.admin.overseer import Json, QueueSeen, ReplicaSeen
from potluck.gateway.desk.center import Center
from potluck.gateway.fleet.lateness import slow_lines
from potluck.gateway.fleet.roster import read_roster

CONTROLLER_S = 10.0
"""Without a question for so long, nobody is there who starts and stops engines."""
DRAINED_S = 60.0
"""For so long a controller may hear whose engines were drained by hand."""
MOST_NOTE = 400
NOTES = ("note", "act", "outcome", "saving", "end")
"""Kinds of lines that come from outside."""


class Oversight:
    """Reads the center; changes it only by its own calls."""

    def __init__(self, center: Center, engine_key: str = "") -> None:
        """The key is what engines ask for that are told here."""
        self._center, self._engine_key = center, engine_key

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
                    price = self._center.price_usd_per_h(member.region, each.node)
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
            "standby": {
                "copies": [
                    {"template": template, "region": region, "count": count}
                    for (template, region), count in center.brain.steward.standby.items()
                ],
                "usd_per_h": center.brain.steward.standby_usd_per_h,
            },
            "copies": self._copies(),
            "regions": [encode(each) for each in center.regions],
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
            "thresholds": [
                {"model": model, "link": link, "tokens": each.tokens, "planned_tokens": each.base_tokens}
                for model, mine in center.brain.router.thresholds.links.items()
                for link, each in mine.items()
            ],
            "queues": [each._asdict() for each in self.queues()],
            **self.fleet(),
            "wanted": self._wanted(),
            "open_requests": center.desk.open_requests,
            "notes": list(center.brain.steward.notes),
            "slowdown": center.watch.lateness.slowdown,
            "notices": slow_lines(center.watch.lateness.slowdown),
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
                    each.count * self._center.price_usd_per_h(region.name, each.node)
                    for each in template.nodes
                ),
            }
            for template in self._center.plan.holding(self._live()).templates
            for region in scene.regions
            if all(region.offer(each.node) is not None for each in template.nodes)
        ]

    def _live(self) -> dict[tuple[str, str], int]:
        """Copies that are there: scaling may have begun some of what the plan only offers."""
        found = Counter((unit.template, unit.region) for unit in self._center.brain.fleet.units.values())
        return dict(found)

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
            "standby": view.member.standby,
            "by_hand": name in self._center.brain.steward.by_hand,
            "doubted": view.doubted,
            "cordoned": view.cordoned,
            "pace": view.pace,
            "open_requests": view.open_requests,
            "open_prefill_tokens": view.open_prefill_tokens,
            "url": None if endpoint is None else endpoint.address.url,
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
                    "uptime_s": 0.0 if each.said is None else each.said.uptime_s,
                    "version": "" if each.said is None else each.said.version,
                    "kv_version": 0 if each.said is None else each.said.kv_version,
                }
                for each in self._center.keeper.engines
            ]
        }

    def set_fleet(self, body: Json) -> Json:
        if self._center.roster is not None:
            raise InputError("engines", "are listed in a file (--engines); change that, or start without it")
        before = {each.entry.url for each in self._center.keeper.engines}
        told = read_roster(json.dumps(body), "fleet")
        entries = tuple(replace(each, key=self._engine_key) for each in told)
        self._center.enlist(entries)
        after = {each.url for each in entries}
        return {"engines": len(after), "came": sorted(after - before), "went": sorted(before - after)}

    def set_plan(self, body: Json, why: str = "", version: int = 0) -> Json:
        center = self._center
        plan = plan_from_json(json.dumps(body))
        for template in plan.repertoire:
            if template.model not in center.kits.scene.models:
                raise UnknownNameError("plan: model", template.model, center.kits.scene.models)
        center.adopt(plan, why, version)
        return {
            "version": center.plan_version,
            "cost_usd_per_h": plan.cost_usd_per_h,
            "wanted": self._wanted(),
        }

    def drain(self, body: Json) -> Json:
        view = self._ready(body)
        unit = self._center.brain.fleet.units[view.member.unit]
        others = sorted(each.member.id for each in unit.views if each is not view)
        drains, keeper = self._center.drains, self._center.keeper
        for name in (view.member.id, *others):  # before it is empty, which it may be at once
            endpoint = keeper.find(name)
            if endpoint is not None:
                drains[endpoint.address.url] = self._center.desk.now_s()
        self._center.desk.tell(Ordered(view.member.id, "drain"))
        return {"replica": view.member.id, "with_it": others, "open_requests": view.open_requests}

    def cordon(self, body: Json) -> Json:
        changed = self._center.cordons.told(body)
        return {"cordoned": self._center.cordons.marks, "changed": changed}

    def uncordon(self, body: Json) -> Json:
        changed = self._center.cordons.lift(body)
        return {"cordoned": self._center.cordons.marks, "changed": changed}

    def flip(self, body: Json) -> Json:
        view, role = self._ready(body), body.get("role")
        if role not in ("prefill", "decode"):
            raise InputError("role", f"must be prefill or decode, is {role!r}")
        member = view.member
        if member.standby:
            raise InputError("replica", f"{member.id} is on standby; only one that serves changes its role")
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
                raise InputError("role", f"{says} would leave no replica to {needed} for {member.model}")
        before = view.role
        self._center.desk.tell(Ordered(member.id, "prefill" if role == "prefill" else "decode"))
        return {"replica": member.id, "role": view.role, "before": before, "planned": member.role}

    def kill(self, body: Json) -> Json:
        """Only whoever started an engine can end it, and hears of it when it asks what is wanted."""
        center, view = self._center, self._named(body)
        if center.desk.now_s() - center.asked_s > CONTROLLER_S:
            raise InputError(
                "replica", "cannot be killed: no controller asks what is wanted; end its engine where it runs"
            )
        name = view.member.id
        center.kills.add(name)
        center.herald.say("order", f"{name}: kill", "by hand")
        return {"replica": name, "open_requests": view.open_requests}

    def note(self, body: Json) -> Json:
        """A line of an operator's in the log of decisions; an act is followed by its outcome."""
        what, why, kind = body.get("what"), body.get("why", ""), body.get("kind", NOTES[0])
        if not isinstance(what, str) or not isinstance(why, str) or not what.strip():
            raise InputError("what", "must be a line of text; `why` another")
        if kind not in NOTES:
            raise InputError("kind", f"must be one of {', '.join(NOTES)}")
        if max(len(what), len(why)) > MOST_NOTE:
            raise InputError("what", f"and why have at most {MOST_NOTE} characters")
        self._center.herald.say(str(kind), what, why)
        return {"what": what, "why": why, "kind": kind}

    def _ready(self, body: Json) -> View:
        """The replica that an order names."""
        view = self._named(body)
        if view.state != "ready":
            raise InputError(
                "replica", f"{view.member.id} is {view.state}; only one that is ready takes orders"
            )
        return view

    def _named(self, body: Json) -> View:
        views, name = self._center.brain.fleet.views, body.get("replica")
        if not isinstance(name, str):
            raise InputError("replica", "must be the name of one")
        if name not in views:
            raise UnknownNameError("replica", name, views)
        return views[name]

    def wanted(self) -> Json:
        self._center.asked_s = self._center.desk.now_s()
        return self._wanted()

    def _wanted(self) -> Json:
        self._center.kills &= self._center.brain.fleet.views.keys()
        now_s, drains = self._center.desk.now_s(), self._center.drains
        for url in [url for url, at_s in drains.items() if now_s - at_s > DRAINED_S]:
            del drains[url]
        found = self._center.keeper.wanted()
        return {
            "version": found.version,
            "plan_version": self._center.plan_version,
            "plan_mark": self._center.plan_mark,
            "replicas": [
                {
                    **encode_member(member),
                    "role": role,
                    "draining": draining,
                    "url": url,
                    "step_tokens": self._step_tokens(member),
                }
                for member, role, draining, url in found.replicas
            ],
            "idle": list(found.stop),
            "kill": sorted(self._center.kills),
            "cordoned": self._center.cordons.marks,
            "up_s": now_s,
            "leave": sorted(drains),
            "replan": None
            if found.replan is None
            else {
                "rates_per_s": dict(found.replan.rates_per_s),
                "reason": found.replan.reason,
                "lengths": [each._asdict() for each in found.replan.lengths],
            },
            "market": None if self._center.market is None else [encode(each) for each in self._center.market],
        }

    def _step_tokens(self, member: Member) -> int:
        """What the Brain's facts and the simulator reckon with, so that whoever starts an engine can say so."""
        kit = self._center.kits.kits.get((member.template, member.index))
        return 0 if kit is None else kit.engine.token_budget

    def set_market(self, body: Json) -> Json:
        """What nodes cost and how many can be had, region by region as the spec names them."""
        listed = body.get("regions")
        if set(body) != {"regions"} or not isinstance(listed, list):
            raise InputError("regions", "is the only key: a list of regions with their offers")
        regions = tuple(decode(Region, each, f"regions[{place}]") for place, each in enumerate(listed))
        known = {region.name: region for region in self._center.kits.scene.regions}
        for region in regions:
            if region.name not in known:
                raise UnknownNameError("regions: name", region.name, known)
            nodes = [offer.node for offer in known[region.name].offers]
            for offer in region.offers:
                if offer.node not in nodes:
                    raise UnknownNameError(f"regions: {region.name}: node", offer.node, nodes)
        told = {region.name: region for region in regions}
        self._center.quote(tuple(told.get(name, region) for name, region in known.items()))
        return {"regions": len(regions)}

    def decisions(self, after: int) -> Json:
        """What was decided since, what scaling thinks now, and what replicas took of late beside what they should."""
        herald = self._center.herald
        return {
            "epoch": herald.epoch,
            "decisions": [
                {
                    "number": each.number,
                    "at_s": each.at_s,
                    "kind": each.kind,
                    "what": each.what,
                    "why": each.why,
                }
                for each in herald.kept
                if each.number > after
            ],
            "thinks": self._center.brain.steward.why(),
            "paces": [
                {
                    "replica": name,
                    "template": view.member.template,
                    "index": view.member.index,
                    "observed_s": view.observed_s,
                    "planned_s": view.planned_s,
                    "learned_s": view.learned_s,
                }
                for name, view in self._center.brain.fleet.views.items()
                if view.planned_s > 0
            ],
        }


def encode_member(member: object) -> Json:
    """A member's fields, without the codec's own mark."""
    found = encode(member)
    assert isinstance(found, dict)
    return {name: value for name, value in found.items() if name != "type"}

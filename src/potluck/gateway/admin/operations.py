"""What operators see of the gateway, and what they may tell it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from potluck.core.codec import decode, encode
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.scaling.roles import FLIPPABLE
from potluck.core.state.events import OperatorOrdered
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.request_state import RUNNING
from potluck.core.values.fleet_cost import heads_usd_per_h, offers_in, rent_usd_per_h
from potluck.core.values.plan import ReplicaSpec, plan_from_json
from potluck.core.values.types import Region
from potluck.gateway.core import GatewayCore
from potluck.gateway.registry.engine_client import EngineRecord
from potluck.gateway.registry.engine_list import engines_in
from potluck.gateway.registry.health import slow_lines

Json = dict[str, object]


class ReplicaView(NamedTuple):
    replica: str
    model: str
    state: str
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    age_s: float = 0.0


class QueueView(NamedTuple):
    """Requests of one tenant for one model: those that wait before the replicas, and those that were sent."""

    model: str
    tenant: str
    waiting: int
    running: int


ENGINE_TEXTS = ("model", "role", "state", "kv", "version")
CONTROLLER_S = 10.0  # Without a question for so long, nobody is there who starts and stops engines.
DRAINED_S = 60.0
MOST_NOTE = 400
NOTES = ("note", "act", "outcome", "saving", "end")


class Operations:
    def __init__(self, core: GatewayCore, engine_key: str = "") -> None:
        self._core, self._engine_key = core, engine_key

    def replicas(self) -> Iterable[ReplicaView]:
        now_s = self._core.brain_loop.now_s()
        for name, replica in self._core.brain.fleet.views.items():
            status = replica.status
            if status is None:
                yield ReplicaView(name, replica.member.model, replica.state)
                continue
            used = 1.0 - status.free_blocks / status.total_blocks if status.total_blocks else 0.0
            age_s = max(0.0, now_s - replica.status_at_s)
            yield ReplicaView(
                name, replica.member.model, replica.state, status.running, status.queued, used, age_s
            )

    def queues(self) -> Iterable[QueueView]:
        waiting: Counter[tuple[str, str]] = Counter()
        running: Counter[tuple[str, str]] = Counter()
        for request in self._core.brain.requests.values():
            key = (request.request.model, request.request.tenant)
            (running if request.state == RUNNING else waiting)[key] += 1
        for model, tenant in sorted({*waiting, *running}):
            yield QueueView(model, tenant, waiting[model, tenant], running[model, tenant])

    def usd_per_h(self) -> Mapping[str, float]:
        """Each model's part of what the copies that are there cost, by the prices of their nodes: each has a part of
        reserved nodes and head nodes, as in a plan. Models on unknown hardware have no price."""
        core, listed, nodes = self._core, dict[str, float](), Counter[tuple[str, str]]()
        copies = {replica.member.unit: replica.member for replica in core.brain.fleet.views.values()}
        for replica_spec in copies.values():
            template = core.replica_models.templates.get(replica_spec.template)
            copy = None if template is None else core.copy_usd_per_h(template, replica_spec.region)
            if template is not None and copy is not None:
                listed[replica_spec.model] = listed.get(replica_spec.model, 0.0) + copy
                for node_count in template.nodes:
                    nodes[replica_spec.region, node_count.node] += node_count.count
        paid = rent_usd_per_h(offers_in(core.regions), nodes)
        paid += heads_usd_per_h(core.regions, {region for region, _ in nodes})
        whole = sum(listed.values())
        return {model: paid * usd / whole if whole > 0 else 0.0 for model, usd in listed.items()}

    def model_usd_per_h(self, model: str) -> float | None:
        """None where the hardware of some copy that is planned is unknown."""
        templates = (template for template in self._core.plan.templates if template.model == model)
        known = all(template.hardware_known for template in templates)
        return self.usd_per_h().get(model, 0.0) if known else None

    def snapshot(self) -> Json:
        core, slos = self._core, self._core.replica_models.resolved.slos
        return {
            "at_s": core.brain_loop.now_s(),
            "plan": {
                "version": core.plan_version,
                "strategy": core.plan.strategy,
                "cost_usd_per_h": core.plan.known_total_usd_per_h,
                "deployments": [encode(deployment) for deployment in core.plan.deployments],
            },
            "scaling": core.policy.scaling,
            "copies": self._copies(),
            "regions": [encode(item) for item in core.regions],
            "models": {
                name: {
                    "ready": not core.lacking(name),
                    "why": core.lacking(name),
                    "slo": None if name not in slos else encode(slos[name]),
                    "usd_per_h": self.model_usd_per_h(name),
                }
                for name in core.replica_models.resolved.models
            },
            "replicas": [self._replica(name) for name in core.brain.fleet.views],
            "links": [link._asdict() for link in core.watch.links],
            "thresholds": [
                {
                    "model": model,
                    "link": link,
                    "tokens": threshold.tokens,
                    "planned_tokens": threshold.base_tokens,
                }
                for model, mine in core.brain.router.thresholds.links.items()
                for link, threshold in mine.items()
            ],
            "queues": [queue._asdict() for queue in self.queues()],
            **self.fleet(),
            "wanted": self._wanted(),
            "open_requests": core.brain_loop.open_requests,
            "notes": list(core.brain.autoscaler.notes),
            "slowdown": core.watch.lateness.slowdown,
            "notices": [*slow_lines(core.watch.lateness.slowdown), *server_lines(core)],
            "problems": [problem for problem in self._problems() if problem],
        }

    def _copies(self) -> list[Json]:
        resolved = self._core.replica_models.resolved
        return [
            {
                "template": template.name,
                "region": region.name,
                "usd_per_h": self._core.copy_usd_per_h(template, region.name),
            }
            for template in self._core.plan.holding(self._live()).templates
            for region in resolved.regions
            if template.hardware_known
            and all(region.offer(nodes.node) is not None for nodes in template.nodes)
        ]

    def _live(self) -> dict[tuple[str, str], int]:
        counter = Counter(
            (template_copy.template, template_copy.region)
            for template_copy in self._core.brain.fleet.units.values()
        )
        return dict(counter)

    def _problems(self) -> Iterable[str]:
        core = self._core
        if core.engine_list is not None:
            yield core.engine_list.problem
        if core.logged is not None:
            yield core.logged.trouble

    def _replica(self, name: str) -> Json:
        replica = self._core.brain.fleet.views[name]
        endpoint = self._core.registry.find(name)
        return {
            "replica": name,
            **fields_of(replica.member, "unit", "template", "index", "model", "region"),
            **fields_of(
                replica, "role", "state", "doubted", "cordoned", "open_requests", "open_prefill_tokens"
            ),
            "pace": replica.shown_pace,
            "by_hand": name in self._core.brain.autoscaler.by_hand,
            "url": None if endpoint is None else endpoint.address.url + endpoint.path_prefix,
            "status": None if replica.status is None else replica.status._asdict(),
        }

    def fleet(self) -> Json:
        return {"engines": [self._engine(engine) for engine in self._core.registry.engines]}

    @staticmethod
    def _engine(engine: EngineRecord) -> Json:
        row = {
            "url": engine.entry.url,
            "kind": engine.entry.kind,
            "template": engine.entry.template,
            **fields_of(engine, "up", "replica", "note"),
            "models": None if engine.models is None else [model.id for model in engine.models],
        }
        if engine.said is None:
            named = dict.fromkeys(ENGINE_TEXTS, "") | {"model": engine.entry.model}
            return row | named | {"uptime_s": 0.0, "kv_version": 0}
        return row | fields_of(engine.said, *ENGINE_TEXTS, "uptime_s", "kv_version")

    def set_fleet(self, body: Json) -> Json:
        if self._core.engine_list is not None:
            raise InputError("engines", "are listed in a file (--engines); change that, or start without it")
        before = {engine.entry.url for engine in self._core.registry.engines}
        listed = engines_in(body, "fleet")
        entries = tuple(replace(entry, key=self._engine_key) for entry in listed)
        self._core.enlist(entries)
        after = {entry.url for entry in entries}
        return {"engines": len(after), "came": sorted(after - before), "went": sorted(before - after)}

    def set_plan(self, body: Json, why: str = "", version: int = 0) -> Json:
        core = self._core
        plan = plan_from_json(json.dumps(body))
        for template in plan.repertoire:
            if template.model not in core.replica_models.resolved.models:
                raise UnknownNameError("plan: model", template.model, core.replica_models.resolved.models)
        core.adopt(plan, why, version)
        cost = plan.known_total_usd_per_h
        return {"version": core.plan_version, "cost_usd_per_h": cost, "wanted": self._wanted()}

    def drain(self, body: Json) -> Json:
        replica = self._ready(body)
        template_copy = self._core.brain.fleet.units[replica.member.unit]
        others = sorted(
            other_replica.member.id for other_replica in template_copy.views if other_replica is not replica
        )
        drains, registry = self._core.drains, self._core.registry
        for name in (replica.member.id, *others):  # before it is empty, which it may be at once
            endpoint = registry.find(name)
            if endpoint is not None:
                drains[endpoint.address.url] = self._core.brain_loop.now_s()
        self._core.brain_loop.tell(OperatorOrdered(replica.member.id, "drain"))
        return {"replica": replica.member.id, "with_it": others, "open_requests": replica.open_requests}

    def cordon(self, body: Json) -> Json:
        changed = self._core.cordons.told(body)
        return {"cordoned": self._core.cordons.marks, "changed": changed}

    def uncordon(self, body: Json) -> Json:
        changed = self._core.cordons.lift(body)
        return {"cordoned": self._core.cordons.marks, "changed": changed}

    def flip(self, body: Json) -> Json:
        replica, role = self._ready(body), body.get("role")
        if role not in ("prefill", "decode"):
            raise InputError("role", f"must be prefill or decode, is {role!r}")
        replica_spec = replica.member
        if replica_spec.kind not in FLIPPABLE or replica.role == "mixed":
            raise InputError(
                "replica",
                f"{replica_spec.id} ({replica_spec.kind}, {replica.role}) does both and keeps its role",
            )
        peers = [
            peer for peer in self._core.brain.fleet.views.values() if peer.member.model == replica_spec.model
        ]
        if all(peer.role == role for peer in peers if peer.serves and peer is not replica):
            needed = "decode" if role == "prefill" else "prefill"
            raise InputError("role", f"{role} would leave no replica to {needed} for {replica_spec.model}")
        before = replica.role
        self._core.brain_loop.tell(
            OperatorOrdered(replica_spec.id, "prefill" if role == "prefill" else "decode")
        )
        return {
            "replica": replica_spec.id,
            "role": replica.role,
            "before": before,
            "planned": replica_spec.role,
        }

    def kill(self, body: Json) -> Json:
        """Only whoever started an engine can end it, and hears of it when it asks what is wanted."""
        core, replica = self._core, self._named(body)
        if core.brain_loop.now_s() - core.asked_s > CONTROLLER_S:
            raise InputError(
                "replica", "cannot be killed: no controller asks what is wanted; end its engine where it runs"
            )
        name = replica.member.id
        core.kills.add(name)
        core.decision_log.say("order", f"{name}: kill", "by hand")
        return {"replica": name, "open_requests": replica.open_requests}

    def note(self, body: Json) -> Json:
        what, why, kind = body.get("what"), body.get("why", ""), body.get("kind", NOTES[0])
        if not isinstance(what, str) or not isinstance(why, str) or not what.strip():
            raise InputError("what", "must be a line of text; `why` another")
        if kind not in NOTES:
            raise InputError("kind", f"must be one of {', '.join(NOTES)}")
        if max(len(what), len(why)) > MOST_NOTE:
            raise InputError("what", f"and why have at most {MOST_NOTE} characters")
        self._core.decision_log.say(str(kind), what, why)
        return {"what": what, "why": why, "kind": kind}

    def _ready(self, body: Json) -> ReplicaState:
        replica = self._named(body)
        if replica.state != "ready":
            raise InputError(
                "replica", f"{replica.member.id} is {replica.state}; only one that is ready takes orders"
            )
        return replica

    def _named(self, body: Json) -> ReplicaState:
        views, name = self._core.brain.fleet.views, body.get("replica")
        if not isinstance(name, str):
            raise InputError("replica", "must be the name of one")
        if name not in views:
            raise UnknownNameError("replica", name, views)
        return views[name]

    def wanted(self) -> Json:
        self._core.asked_s = self._core.brain_loop.now_s()
        return self._wanted()

    def _wanted(self) -> Json:
        self._core.kills &= self._core.brain.fleet.views.keys()
        now_s, drains = self._core.brain_loop.now_s(), self._core.drains
        for url in [url for url, at_s in drains.items() if now_s - at_s > DRAINED_S]:
            del drains[url]
        wanted_fleet = self._core.registry.wanted()
        return {
            "version": wanted_fleet.version,
            "plan_version": self._core.plan_version,
            "plan_mark": self._core.plan_mark,
            "replicas": [
                {
                    **encode_member(replica_spec),
                    "role": role,
                    "draining": draining,
                    "url": url,
                    "step_tokens": self._step_tokens(replica_spec),
                }
                for replica_spec, role, draining, url in wanted_fleet.replicas
            ],
            "idle": list(wanted_fleet.stop),
            "kill": sorted(self._core.kills),
            "cordoned": self._core.cordons.marks,
            "up_s": now_s,
            "leave": sorted(drains),
            "replan": None
            if wanted_fleet.replan is None
            else {
                "rates_per_s": dict(wanted_fleet.replan.rates_per_s),
                "reason": wanted_fleet.replan.reason,
                "lengths": [length._asdict() for length in wanted_fleet.replan.lengths],
            },
            "market": None if self._core.market is None else [encode(region) for region in self._core.market],
        }

    def _step_tokens(self, replica_spec: ReplicaSpec) -> int:
        replica_model = self._core.replica_models.replica_models.get(
            (replica_spec.template, replica_spec.index)
        )
        return 0 if replica_model is None else replica_model.engine.token_budget

    def set_market(self, body: Json) -> Json:
        listed = body.get("regions")
        if set(body) != {"regions"} or not isinstance(listed, list):
            raise InputError("regions", "is the only key: a list of regions with their offers")
        regions = tuple(decode(Region, item, f"regions[{place}]") for place, item in enumerate(listed))
        known = {region.name: region for region in self._core.replica_models.resolved.regions}
        for region in regions:
            if region.name not in known:
                raise UnknownNameError("regions: name", region.name, known)
            nodes = [offer.node for offer in known[region.name].offers]
            for offer in region.offers:
                if offer.node not in nodes:
                    raise UnknownNameError(f"regions: {region.name}: node", offer.node, nodes)
        by_name = {region.name: region for region in regions}
        self._core.quote(tuple(by_name.get(name, region) for name, region in known.items()))
        return {"regions": len(regions)}

    def decisions(self, after: int) -> Json:
        decision_log = self._core.decision_log
        return {
            "epoch": decision_log.epoch,
            "decisions": [decision._asdict() for decision in decision_log.kept if decision.number > after],
            "thinks": self._core.brain.autoscaler.why(),
            "paces": [
                {
                    "replica": name,
                    "template": replica.member.template,
                    "index": replica.member.index,
                    **fields_of(replica, "observed_s", "planned_s", "learned_s"),
                }
                for name, replica in self._core.brain.fleet.views.items()
                if replica.planned_s > 0 and replica.shown_pace is not None
            ],
        }


def server_lines(core: GatewayCore) -> list[str]:
    """Servers that others run and that cannot be used, each with the reason."""
    engines = core.registry.engines
    return list(dict.fromkeys(each.note for each in engines if each.entry.kind == "openai" and each.note))


def fields_of(value: object, *names: str) -> Json:
    return {name: getattr(value, name) for name in names}


def encode_member(member: object) -> Json:
    result = encode(member)
    assert isinstance(result, dict)
    return {name: value for name, value in result.items() if name != "type"}

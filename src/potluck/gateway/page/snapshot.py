"""The fleet at one moment as tables, each a name to a row of plain JSON values. Figures are rounded to what an eye
sees, so that what has not really changed is not told again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from potluck.core.state.fleet import ReplicaState
from potluck.core.values.kv import LEAST_CONNECTIONS, lossy_notices
from potluck.core.values.layout import Layout
from potluck.core.values.plan import Plan, Template
from potluck.gateway.admin.operations import Operations, QueueView, fields_of, server_lines
from potluck.gateway.core import GatewayCore
from potluck.gateway.registry.health import slow_lines
from potluck.gateway.values import GatewaySettings

Row = dict[str, Any]
Tables = dict[str, dict[str, Row]]
LOST_S = 60.0
BUSY_S = 3.0
FLOW_S = 4.0
TOKENS_S = 8.0
"""Over which a replica's tokens are averaged: they are counted when its part in a request ends."""
MOST_FLOWS = 60
MOST_FLOW_GROUPS = 12
OTHER_FLOWS = "other"
LEAST_FLOW_BYTES_PER_S = 1_000.0
TOKEN_KINDS = ("prompt", "output")
Key = TypeVar("Key")


class Rates(Generic[Key]):
    """Amounts a second over the last `over_s`: each enters the average once and fades."""

    def __init__(self, over_s: float, least: float) -> None:
        self._over_s, self._least = over_s, least
        self._new: Counter[Key] = Counter()
        self._rates: dict[Key, float] = {}

    def add(self, key: Key, amount: float) -> None:
        self._new[key] += amount  # type: ignore[assignment]

    def look(self, span_s: float) -> dict[Key, float]:
        keep = max(0.0, 1.0 - span_s / self._over_s)
        new, self._new = self._new, Counter()
        values = {
            key: self._rates.get(key, 0.0) * keep + new[key] / self._over_s for key in {*self._rates, *new}
        }
        self._rates = {key: rate for key, rate in values.items() if rate > self._least}
        return self._rates


class KvFlows:
    def __init__(self) -> None:
        self._rates: Rates[tuple[str, str, str]] = Rates(FLOW_S, LEAST_FLOW_BYTES_PER_S)

    def moved(self, source: str, target: str, codec: str, moved_bytes: int, took_s: float) -> None:
        self._rates.add((source, target, codec), moved_bytes)

    def look(self, span_s: float, replicas: Mapping[str, Row]) -> tuple[dict[str, Row], dict[str, Row]]:
        """The largest flows between two replicas, and all flows by GPU, role and region of both ends."""
        rates = self._rates.look(span_s)
        largest = sorted(rates.items(), key=lambda flow: -flow[1])[:MOST_FLOWS]
        flows = {
            f"{source} > {target}": {
                "source": source,
                "target": target,
                "codec": codec,
                "mbit_per_s": _mbit_per_s(rate),
            }
            for (source, target, codec), rate in largest
        }
        return flows, flow_groups(rates, replicas)


def _mbit_per_s(bytes_per_s: float) -> float:
    return float(f"{bytes_per_s * 8e-6:.2g}")


def flow_groups(
    bytes_per_s: Mapping[tuple[str, str, str], float], replicas: Mapping[str, Row]
) -> dict[str, Row]:
    """KV flows summed by group; the smallest groups beyond MOST_FLOW_GROUPS are one row, `other`."""
    totals: dict[tuple[str, str], float] = {}
    pairs: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for (source, target, _), rate in bytes_per_s.items():
        ends = (_flow_group(source, replicas), _flow_group(target, replicas))
        totals[ends] = totals.get(ends, 0.0) + rate
        pairs.setdefault(ends, set()).add((source, target))
    largest = sorted(totals, key=lambda ends: (-totals[ends], ends))
    shown = len(largest) if len(largest) <= MOST_FLOW_GROUPS else MOST_FLOW_GROUPS - 1
    rows: dict[str, Row] = {
        f"{source} > {target}": {
            "source": source,
            "target": target,
            "pairs": len(pairs[source, target]),
            "mbit_per_s": _mbit_per_s(totals[source, target]),
        }
        for source, target in largest[:shown]
    }
    if rest := largest[shown:]:
        rows[OTHER_FLOWS] = {
            "source": "",
            "target": "",
            "pairs": sum(len(pairs[ends]) for ends in rest),
            "mbit_per_s": _mbit_per_s(sum(totals[ends] for ends in rest)),
        }
    return rows


def _flow_group(replica: str, replicas: Mapping[str, Row]) -> str:
    """As the page names it: GPU, role and region; a replica that is gone has only its name's region."""
    row = replicas.get(replica)
    if row is None:
        return f"gone {replica.rpartition('@')[2].partition('#')[0]}"
    return f"{row['gpu']} {row['role']} {row['region']}"


@dataclass(frozen=True, slots=True)
class LastMinute:
    """What ended in the last minute. Tokens are by tenant."""

    models: Mapping[str, Row] = field(default_factory=dict)
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    output_tokens: Mapping[str, int] = field(default_factory=dict)
    refusals: Mapping[str, Row] = field(default_factory=dict)


NOTHING_YET = LastMinute()


class FleetSnapshot:
    def __init__(
        self,
        core: GatewayCore,
        flows: KvFlows,
        tokens: Callable[[], Mapping[tuple[str, ...], float]] = dict,
        notices: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._core, self._flows = core, flows
        self._tokens, self._notices = tokens, notices
        self._counted: Mapping[tuple[str, ...], float] | None = None
        self._token_rates: Rates[tuple[str, ...]] = Rates(TOKENS_S, 0.05)
        self._operations = Operations(core)
        self._plain: dict[str, tuple[object, Row]] = {}
        self._rows: dict[str, Row] = {}
        self._busy: dict[str, float] = {}
        self._used: dict[tuple[str, str], float] = {}
        """Share of each link, averaged as flows are: between two transfers a link is not idle to the eye."""
        self._plan: tuple[int, dict[str, Row]] = (-1, {})
        self._looked_s: float | None = None

    def look(self, now_utc_s: float, last_min: LastMinute = NOTHING_YET) -> Tables:
        now_s = self._core.brain_loop.now_s()
        span_s = 1e9 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        queues = list(self._operations.queues())
        usd = self._operations.usd_per_h()
        replicas = self._replicas(span_s, now_utc_s)
        flows, groups = self._flows.look(span_s, replicas)
        return {
            "plan": {"now": self._plan_row(usd)},
            "deployments": self._deployments(),
            "regions": self._regions(),
            "models": self._models(queues, last_min),
            "replicas": replicas,
            "links": self._links(span_s),
            "flows": flows,
            "flow_groups": groups,
            "tenants": self._tenants(queues, last_min),
            "refusals": dict(last_min.refusals),
        }

    def _plan_row(self, usd: Mapping[str, float]) -> Row:
        core = self._core
        plan = core.plan
        return {
            "version": core.plan_version,
            "strategy": plan.strategy,
            "why": core.plan_why,
            "usd_per_h": round(plan.total_usd_per_h, 3) if plan.priced else None,
            "now_usd_per_h": round(sum(usd.values()), 3) if plan.priced else None,
            "gap": round(plan.gap, 4),
            "fraction": round(plan.fraction, 3),
            "scaling": core.policy.scaling,
            "thinks": core.brain.autoscaler.why(),
            "open_requests": core.brain_loop.open_requests,
            "problems": [*core.brain.autoscaler.notes],
            "notices": [*self._notices()],
        }

    def _deployments(self) -> dict[str, Row]:
        version, rows = self._plan
        if version != self._core.plan_version:
            rows = deployments_of(self._core.plan, self._core.copy_usd_per_h)
            self._plan = (self._core.plan_version, rows)
        return rows

    def _regions(self) -> dict[str, Row]:
        core = self._core
        rented: Counter[tuple[str, str]] = Counter()
        for template_copy in core.brain.fleet.units.values():
            template = core.replica_models.templates.get(template_copy.template)
            for nodes in () if template is None else template.nodes:
                rented[template_copy.region, nodes.node] += nodes.count
        return {
            region.name: {
                "offers": [
                    {
                        "node": offer.node,
                        "usd_per_h": offer.price_usd_per_h,
                        "available": offer.available,
                        "rented": rented[region.name, offer.node],
                    }
                    for offer in region.offers
                ]
            }
            for region in core.regions
        }

    def _models(self, queues: list[QueueView], last_min: LastMinute) -> dict[str, Row]:
        core, result = self._core, {}
        predictions = {prediction.model: prediction for prediction in core.plan.predictions}
        for name, model in core.replica_models.resolved.models.items():
            slo, promise = core.replica_models.resolved.slos.get(name), predictions.get(name)
            why, unknown = core.lacking(name), name in core.replica_models.resolved.unknown_models
            usd_per_h = self._operations.model_usd_per_h(name)
            result[name] = {
                "weights": None if unknown else model.name,
                "layers": None if unknown else model.layer_count,
                "ready": not why,
                "why": why,
                "slo": None if slo is None else fields_of(slo, "ttft_s", "tpot_s", "e2e_s", "attainment"),
                "planned": None
                if promise is None
                else {
                    "demand_per_s": round(promise.demand_per_s, 3),
                    "capacity_per_s": round(promise.capacity_per_s, 3),
                    "ttft_s": round(promise.ttft_s, 5),
                    "tpot_s": round(promise.tpot_s, 5),
                    "confidence": promise.confidence,
                },
                "usd_per_h": None if usd_per_h is None else round(usd_per_h, 3),
                "running": sum(queue.running for queue in queues if queue.model == name),
                "waiting": sum(queue.waiting for queue in queues if queue.model == name),
                "last_min": last_min.models.get(name),
            }
        return result

    def _tenants(self, queues: list[QueueView], last_min: LastMinute) -> dict[str, Row]:
        weights = {item.name: item.weight for item in self._core.policy.tenants}
        prompt, output = last_min.prompt_tokens, last_min.output_tokens
        names = {*weights, *prompt, *output, *(queue.tenant for queue in queues)}
        whole = sum(prompt.values()) + sum(output.values())
        return {
            name: {
                "weight": weights.get(name, 1.0),
                "running": sum(queue.running for queue in queues if queue.tenant == name),
                "waiting": sum(queue.waiting for queue in queues if queue.tenant == name),
                "prompt_tokens_last_min": prompt.get(name, 0),
                "output_tokens_last_min": output.get(name, 0),
                "share": round((prompt.get(name, 0) + output.get(name, 0)) / whole, 3) if whole else 0.0,
            }
            for name in sorted(names)
        }

    def _links(self, span_s: float) -> dict[str, Row]:
        planned, weight = self._core.links_gbps, min(1.0, span_s / FLOW_S)
        wires = {(wire.source, wire.target): wire.connections for wire in self._core.plan.wires}
        for link in self._core.watch.links:
            before = self._used.get((link.source, link.target), 0.0)
            self._used[link.source, link.target] = before + (link.utilisation - before) * weight
        return {
            f"{link.source} > {link.target}": {
                "source": link.source,
                "target": link.target,
                "used": round(self._used[link.source, link.target], 2),
                "gbps": float(f"{link.gbps:.3g}"),
                "planned_gbps": planned.get((link.source, link.target), link.gbps),
                "waiting_mb": round(link.queued_bytes / 1e6, 1),
                "connections": wires.get((link.source, link.target), LEAST_CONNECTIONS),
            }
            for link in self._core.watch.links
        }

    def _replicas(self, span_s: float, now_utc_s: float) -> dict[str, Row]:
        weight = min(1.0, span_s / BUSY_S)
        views = self._core.brain.fleet.views
        tokens = self._tokens_per_s(span_s)
        rows = {name: self._replica(name, replica, weight, tokens) for name, replica in views.items()}
        for name, (lost_s, why) in self._core.decision_log.lost.items():
            if name not in rows and name in self._rows and now_utc_s - lost_s < LOST_S:
                row = self._rows[name]
                if row["state"] != "lost":
                    row = {
                        **row,
                        **dict.fromkeys(("open", "running", "waiting"), 0),
                        "state": "lost",
                        "why": why,
                    }
                    row |= {"busy": 0.0, **_token_rates({}, name)}
                rows[name] = row
        self._busy = {name: busy for name, busy in self._busy.items() if name in rows}
        self._plain = {name: item for name, item in self._plain.items() if name in views}
        self._rows = rows
        return rows

    def _tokens_per_s(self, span_s: float) -> Mapping[tuple[str, ...], float]:
        before, self._counted = self._counted, self._tokens()
        for key, count in self._counted.items():
            self._token_rates.add(key, count - (count if before is None else before.get(key, 0.0)))
        return self._token_rates.look(span_s)

    def _replica(
        self, name: str, replica: ReplicaState, weight: float, tokens: Mapping[tuple[str, ...], float]
    ) -> Row:
        known = self._plain.get(name)
        if known is None or known[0] is not replica.member:
            known = self._plain[name] = (replica.member, self._plain_row(replica))
        status = replica.status
        before = self._busy.get(name, 0.0)
        busy = self._busy[name] = before + ((replica.open_requests > 0) - before) * weight
        total = 0 if status is None else status.total_blocks
        return {
            **known[1],
            **fields_of(replica, "role", "state", "doubted", "cordoned"),
            "by_hand": name in self._core.brain.autoscaler.by_hand,
            "open": replica.open_requests,
            "running": 0 if status is None else status.running,
            "waiting": 0 if status is None else status.queued,
            "kv": round(1.0 - status.free_blocks / total, 2) if status is not None and total else 0.0,
            "busy": round(busy, 1),
            **_token_rates(tokens, name),
            **self._why_not_ready(replica),
            "pace": None if replica.shown_pace is None else round(replica.shown_pace, 2),
        }

    def _why_not_ready(self, replica: ReplicaState) -> Row:
        """Of a replica that waits for a server that others run: why that cannot be used."""
        if replica.state != "starting":
            return {}
        engines = (each for each in self._core.registry.engines if each.note)
        notes = [each.note for each in engines if each.entry.template == replica.member.template]
        return {"why": "; ".join(notes)} if notes else {}

    def _plain_row(self, replica: ReplicaState) -> Row:
        replica_spec = replica.member
        template = self._core.replica_models.templates.get(replica_spec.template)
        layout = None if template is None else template.replicas[replica_spec.index].layout
        return {
            **fields_of(replica_spec, "model", "region", "unit", "template", "kind", "index"),
            "members": 0 if template is None else len(template.replicas),
            "planned_role": replica_spec.role,
            "gpu": "?" if layout is None else gpu_of(layout),
            "stages": [] if layout is None else stages_of(layout),
        }


def _token_rates(tokens: Mapping[tuple[str, ...], float], replica: str) -> Row:
    return {f"{kind}_tokens_per_s": float(f"{tokens.get((replica, kind), 0.0):.2g}") for kind in TOKEN_KINDS}


def gpu_of(layout: Layout) -> str:
    parts = [name if count == 1 else f"{count} {name}" for name, count in layout.node_counts.items()]
    return " + ".join(parts)


def stages_of(layout: Layout) -> list[Row]:
    return [
        {"layers": stage.layers, "nodes": [[node.node, node.tp] for node in stage.nodes]}
        for stage in layout.stages
    ]


def deployments_of(plan: Plan, copy_usd_per_h: Callable[[Template, str], float | None]) -> dict[str, Row]:
    result = {}
    longest = {(bucket.model, bucket.bucket): bucket.longest_tokens for bucket in plan.buckets}
    for deployment in plan.deployments:
        template = plan.template(deployment.template)
        shares = [
            share
            for share in plan.shares
            if (share.template, share.region) == (deployment.template, deployment.region)
            and template.hardware_known  # else they are weights, not rates
        ]
        copy = copy_usd_per_h(template, deployment.region)
        result[f"{deployment.template}@{deployment.region}"] = {
            "model": template.model,
            "region": deployment.region,
            "kind": template.kind,
            "count": deployment.count,
            "confidence": template.confidence,
            "replicas": [
                {"role": replica.role, "gpu": gpu_of(replica.layout), "stages": stages_of(replica.layout)}
                for replica in template.replicas
            ],
            "usd_per_h": None if copy is None else round(deployment.count * copy, 3),
            "shares": [
                {
                    "up_to_tokens": longest.get((template.model, share.bucket)),
                    "phase": share.phase,
                    "rate_per_s": round(share.rate_per_s, 3),
                }
                for share in shares
            ],
        }
    return result


def notices(core: GatewayCore, settings: GatewaySettings) -> Iterator[str]:
    if settings.mock_engines:
        yield "Mock engines: they take the time of the planned GPUs, and make their tokens up."
    yield from slow_lines(core.watch.lateness.slowdown)
    yield from lossy_notices(core.plan)
    yield from server_lines(core)

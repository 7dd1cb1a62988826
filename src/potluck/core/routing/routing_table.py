"""A plan made ready for routing: per model and bucket, the ways a request may go.

A way is the closed targets (they do a whole request), a flow from a region's prefill replicas to a region's decode
replicas, or a hand-over inside a group's copy. Ways take turns by weight; a flow's is

    planned rate x min(ready prefill weight / planned prefill, ready decode weight / planned decode)

and over a link never more than planned. A change of the fleet touches only the replica that changed. Should all be
shut, any target that does whole requests is used, then any replica. Long requests have ways by length class."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from potluck.core.routing.balance import Balancer, BalanceRule
from potluck.core.routing.group_sharing import MeanLengths, bucket_tokens, group_shares
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.routing.template_weights import (
    LengthThreshold,
    ModelWeights,
    Phase,
    RegionFlow,
    TemplateWeights,
    merge_weights,
    model_weights,
    prefer_region,
)
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import FleetState, ReplicaState, TemplateCopy
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState
from potluck.core.state.targets import PLAIN, Target, intact_share, kind_of
from potluck.core.values.plan import Plan, Template

UNBOUNDED_TOKENS: Final = 1 << 62
CLOSED: Final = -1
ANY: Final = -2
LAST: Final = -3
RatedFlows = list[tuple[str, str, float]]
"""In place of a bucket: any target that does whole requests; any replica but those that prefill one by one; those."""


@dataclass(slots=True, eq=False)
class ModelRoutes:
    offers: ModelWeights
    limits_tokens: list[int]
    thresholds: dict[str, LengthThreshold] = field(default_factory=dict)
    """The plan's length thresholds by link, if it has any; then every way is open to every bucket."""
    ways: dict[tuple[int, int], RouteOptions] = field(default_factory=dict)

    longest_tokens: tuple[float, ...] = field(init=False)
    """The longest prompt of each bucket; the last is infinite."""
    limit_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest_tokens = self.offers.longest_tokens
        self.limit_tokens = self.limits_tokens[-1] if self.limits_tokens else 0

    def kind(self, request: RequestState) -> tuple[int, int]:
        total, limits = request.total_tokens, self.limits_tokens
        length_class = 0 if total <= limits[0] else bisect_left(limits, total)
        return bisect_left(self.longest_tokens, request.prompt_tokens), length_class

    def too_long(self, request: RequestState) -> str:
        return (
            f"prompt and answer take up to {request.total_tokens} tokens, "
            f"the longest that a replica of {request.request.model} holds is {self.limit_tokens}"
        )


class RoutingTable:
    def __init__(self, facts: FleetFacts, policy: Policy, rule: BalanceRule, fleet: FleetState) -> None:
        self.facts = facts
        self._balance, self.rule, self._home = policy.balance, rule, policy.home
        self._by_length = policy.adapt_threshold and rule.by_length
        self.fleet = fleet
        self._templates: dict[str, Template] = {}
        self.models: dict[str, ModelRoutes] = {}
        self.singles: dict[str, Target] = {}
        self.groups: dict[str, Target] = {}
        self._lengths: dict[str, MeanLengths] = {}
        """Models whose lengths have shifted from what groups were planned for."""

    def adopt(self, plan: Plan) -> None:
        """Compile a plan; copies of templates that it does not name go on serving until they are drained."""
        for template in plan.repertoire:
            self._templates[template.name] = template
        live = {(template_copy.template, template_copy.region) for template_copy in self.fleet.units.values()}

        fresh = model_weights(plan, self._balance)
        if self._home:
            fresh = {model: prefer_region(weights, self._home) for model, weights in fresh.items()}
        for model, routes in self.models.items():
            if model in fresh:
                fresh[model] = merge_weights(fresh[model], routes.offers, live)
            elif any(self._templates[name].model == model for name, _ in live):
                fresh[model] = routes.offers
        self.models = {model: ModelRoutes(weights, self._limits(weights)) for model, weights in fresh.items()}
        for stated in plan.thresholds if self._by_length else ():
            self.models[stated.model].thresholds[stated.link] = LengthThreshold(stated.tokens, stated.tokens)
        for target in (*self.singles.values(), *self.groups.values()):
            target.indexes.clear()

    def divide(self, model: str, threshold: LengthThreshold) -> bool:
        """Let length decide where the plan does not, if anything crosses; prompts may then stay at home."""
        routes = self.models.get(model)
        if routes is None or not self._by_length or routes.thresholds:
            return False
        flows = routes.offers.flows
        crossing = [flow for flow in flows if flow.source != flow.target]
        at_home = {flow.target for flow in flows if flow.source == flow.target}
        more = {flow.target: RegionFlow(flow.target, flow.target, flow.rates_per_s) for flow in crossing}
        if not crossing:
            return False
        added = tuple(flow for region, flow in more.items() if region not in at_home)
        routes.offers = replace(routes.offers, flows=flows + added)
        routes.thresholds = {f"{flow.source}->{flow.target}": threshold for flow in crossing}
        routes.ways.clear()
        for target in (*self.singles.values(), *self.groups.values()):
            target.indexes.clear()
        return True

    def update(self, unit_id: str, changed_replica: ReplicaState) -> None:
        """A replica became ready, left, changed its role, or is doubted or trusted again."""
        template_copy = self.fleet.units.get(unit_id)
        ready = changed_replica.serves and changed_replica.member.id in self.fleet.views
        single = self.singles.get(changed_replica.member.id)
        if ready and single is None:
            single = self.singles[changed_replica.member.id] = Target(PLAIN, unit_id, changed_replica)
        elif not ready:
            self.singles.pop(changed_replica.member.id, None)
        group = self._group(unit_id, template_copy, changed_replica)
        routes = self.models.get(changed_replica.member.model)
        if routes is None:
            return
        for route_options in routes.ways.values():
            if single is not None:
                self._put(routes, route_options, single, ready)
            if group is not None:
                self._put(routes, route_options, group, template_copy is not None)
            if template_copy is None:
                route_options.join(unit_id, "", [])
            else:
                self._join(routes, route_options, template_copy)
            route_options.settle()

    def reported(self, replica: ReplicaState) -> None:
        """Count what other gateways sent a replica, as it says itself: what it has, less what we sent."""
        target, status = self.singles.get(replica.member.id), replica.status
        if self._home and self.rule.in_seconds and target is not None and status is not None:
            others = max(0, status.queued + status.running - replica.open_requests)
            before_s, target.others_s = target.others_s, others * self.request_s(target)
            target.lighten(before_s - target.others_s)

    def shifted(self, model: str, lengths: MeanLengths) -> None:
        self._lengths[model] = lengths
        routes = self.models.get(model)
        for route_options in routes.ways.values() if routes is not None else ():
            for template_copy in self.fleet.units.values():
                if template_copy.model == model and routes is not None:
                    self._join(routes, route_options, template_copy)
            route_options.settle()

    def timed(self, views: Iterable[ReplicaState]) -> None:
        for replica in views if self.rule.learns else ():
            for target in (self.singles.get(replica.member.id), self.groups.get(replica.member.unit)):
                if target is not None:
                    target.timed()
                    target.lighten(0.0)

    def ways(self, routes: ModelRoutes, bucket: int, total_tokens: int) -> RouteOptions:
        """Where requests of a bucket go that get no longer than this. The caller checks the model's limit."""
        limits = routes.limits_tokens
        length_class = 0 if total_tokens <= limits[0] else bisect_left(limits, total_tokens)
        route_options = routes.ways.get((bucket, length_class))
        if route_options is None:
            route_options = routes.ways[bucket, length_class] = self._build(routes, bucket, length_class)
        return route_options

    def _group(
        self, unit_id: str, template_copy: TemplateCopy | None, changed_replica: ReplicaState
    ) -> Target | None:
        template = self._templates.get(changed_replica.member.template)
        kind = kind_of(template) if template is not None else PLAIN
        if kind == PLAIN:
            return None
        group = self.groups.get(unit_id)
        if group is None:
            group = self.groups[unit_id] = Target(kind, unit_id)
        group.refresh(template_copy)
        if template_copy is None:
            del self.groups[unit_id]
        return group

    def _build(self, routes: ModelRoutes, bucket: int, length_class: int) -> RouteOptions:
        flows: RatedFlows = []
        if bucket >= 0:
            for flow in routes.offers.flows:
                rate = flow.rates_per_s[bucket]
                if not rate and routes.thresholds:
                    rate = sum(flow.rates_per_s) / len(flow.rates_per_s)
                if rate:
                    flows.append((flow.source, flow.target, rate))
        route_options = RouteOptions(self.rule.new_balancer, flows, bucket, length_class)
        for target in (*self.singles.values(), *self.groups.values()):
            self._put(routes, route_options, target, True)
        for template_copy in self.fleet.units.values():
            if template_copy.model == routes.offers.model:
                self._join(routes, route_options, template_copy)
        route_options.settle()
        return route_options

    def _join(self, routes: ModelRoutes, route_options: RouteOptions, template_copy: TemplateCopy) -> None:
        """Share a group's requests among its replicas; other units have nothing to share."""
        template, bucket = self._templates.get(template_copy.template), route_options.bucket
        if template is None or not template.flows or bucket < 0:
            return
        template_weights = routes.offers.copy((template_copy.template, template_copy.region))
        weight = (
            self._weight(routes, template_weights, "closed", bucket) if template_weights is not None else 0.0
        )
        singles: dict[int, Target] = {}
        for replica in template_copy.views:
            single = self.singles.get(replica.member.id)
            if (
                single is not None
                and weight > 0
                and self._fits(routes, [replica], route_options.length_class)
            ):
                singles[replica.member.index] = single
        serving = {place: target.view.role for place, target in singles.items() if target.view is not None}
        known_facts = self.facts.groups.get(template_copy.template)
        lengths = self._lengths.get(template_copy.model)
        if lengths is None:
            prompt = bucket_tokens(routes.longest_tokens, bucket, known_facts)
            lengths = MeanLengths(prompt, known_facts.output_tokens if known_facts is not None else 256.0)
        pairs, alone = [], dict.fromkeys(singles, 0.0)

        shares = group_shares(
            self.facts, template, serving, bucket, lengths, template_copy.model in self._lengths
        )
        for first, second, share in shares:
            if first == second:
                alone[first] += share * weight
            else:
                pairs.append((singles[first], singles[second], share * weight))
        for place, own in alone.items():
            route_options.put(singles[place], TargetWeights(template_copy.region, own))
        route_options.join(template_copy.id, template_copy.region, pairs)

    def _put(self, routes: ModelRoutes, route_options: RouteOptions, target: Target, there: bool) -> None:
        """Set what a target weighs in these ways; nothing when it is another model's, too small or gone."""
        views = target.views()
        if views and views[0].member.model != routes.offers.model:
            return
        if there and views and self._fits(routes, views, route_options.length_class):
            route_options.put(target, self._weights(routes, route_options, target, views))
        else:
            route_options.put(target, TargetWeights(views[0].member.region if views else ""))

    def _weights(
        self, routes: ModelRoutes, route_options: RouteOptions, target: Target, views: list[ReplicaState]
    ) -> TargetWeights:
        replica_spec, bucket = views[0].member, route_options.bucket
        template = self._templates[replica_spec.template]
        region = replica_spec.region
        grouped = kind_of(template) != PLAIN
        if bucket in (ANY, LAST):
            facts = views[0].facts
            one_by_one = views[0].role == "prefill" and facts is not None and facts.decode_batch == 1
            return TargetWeights(region, float(target.kind == PLAIN and one_by_one is (bucket == LAST)))
        if grouped and target.kind == PLAIN:
            return TargetWeights(region)
        if bucket == CLOSED:
            whole = intact_share(target, template) if grouped else float(views[0].role == "mixed")
            return TargetWeights(region, _most_closed(template) * whole)
        template_weights = routes.offers.copy((replica_spec.template, region))
        if template_weights is None or template.flows:  # what a group's replicas do, `_join` says
            return TargetWeights(region)
        if grouped:
            share = intact_share(target, template)
            return TargetWeights(region, self._weight(routes, template_weights, "closed", bucket) * share)
        role = views[0].role
        closed = self._plain(routes, template_weights, template, "closed", bucket) if role == "mixed" else 0.0
        prefill = (
            self._plain(routes, template_weights, template, "prefill", bucket) if role != "decode" else 0.0
        )
        decode = (
            self._plain(routes, template_weights, template, "decode", bucket) if role != "prefill" else 0.0
        )
        if role != replica_spec.role and role == "prefill" and not prefill:
            prefill = self._borrowed(route_options.prefill(region), views[0], "prefill")
        if role != replica_spec.role and role == "decode" and not decode:
            decode = self._borrowed(route_options.decode(region), views[0], "decode")
        return TargetWeights(region, closed, prefill, decode)

    def _plain(
        self,
        routes: ModelRoutes,
        template_weights: TemplateWeights,
        template: Template,
        phase: Phase,
        bucket: int,
    ) -> float:
        role = {"closed": "mixed", "prefill": "prefill", "decode": "decode"}[phase]
        able = [replica for replica in template.replicas if replica.role in (role, "mixed")]
        return self._weight(routes, template_weights, phase, bucket) / max(1, len(able))

    def _weight(
        self, routes: ModelRoutes, template_weights: TemplateWeights, phase: Phase, bucket: int
    ) -> float:
        """A copy's weight; under a length threshold also in buckets that the plan sends elsewhere. Not for whole
        requests where others prefill at home: a combo has as many of each side as its own buckets need."""
        weights = template_weights.weights(phase)
        planned = phase == "closed" and any(flow.source == flow.target for flow in routes.offers.flows)
        if weights[bucket] or planned or not routes.thresholds:
            return weights[bucket]
        given = [weight for weight in weights if weight > 0]
        return sum(given) / len(given) if given else 0.0

    def _borrowed(self, colleagues: Balancer, replica: ReplicaState, phase: Phase) -> float:
        """What a replica whose role was flipped weighs: as its new colleagues do, by the ratio of their speeds."""
        others = [t for t in colleagues.members() if t.view is not None and t.view.role == t.view.member.role]
        if not others or others[0].view is None:
            return 1.0
        mean = colleagues.total / len(colleagues)
        mine, theirs = self._speed(replica, phase), self._speed(others[0].view, phase)
        return mean * mine / theirs if mine and theirs else mean

    def _speed(self, replica: ReplicaState, phase: Phase) -> float:
        facts = replica.facts
        if facts is None:
            return 0.0
        if phase == "prefill":
            return 1.0 / max(facts.prefill_s_per_token, 1e-12)
        return facts.decode_batch / max(facts.decode_step_s, 1e-12)

    def ready(self, model: str) -> list[ReplicaState]:
        views = [target.view for target in self.singles.values() if target.view is not None]
        return [replica for replica in views if replica.member.model == model]

    def request_s(self, target: Target) -> float:
        template = self._templates[target.views()[0].member.template]
        rates = [max(c.closed_per_s, c.prefill_per_s, c.decode_per_s) for c in template.capacity]
        best = max(rates, default=0.0)
        share = len(template.replicas) if target.kind == PLAIN else 1
        return share / best if best > 0 else 0.0

    def _fits(self, routes: ModelRoutes, views: list[ReplicaState], length_class: int) -> bool:
        if length_class == 0:
            return True
        least = routes.limits_tokens[length_class]
        return all(self._limit(replica.member.template, replica.member.index) >= least for replica in views)

    def _limit(self, template: str, index: int) -> int:
        facts = self.facts.replicas.get((template, index))
        return facts.max_tokens if facts is not None else UNBOUNDED_TOKENS

    def _limits(self, model: ModelWeights) -> list[int]:
        """Of what is planned; copies that scaling may begin only divide lengths more finely."""
        limits = self._limits_of(name for name, _ in model.copies)
        most = max(limits, default=0)
        return sorted(limits | {limit for limit in self._limits_of(model.spare) if limit < most})

    def _limits_of(self, names: Iterable[str]) -> set[int]:
        return {
            self._limit(name, index) for name in names for index in range(len(self._templates[name].replicas))
        }


def _most_closed(template: Template) -> float:
    """What a copy serves by itself at best, shared among its replicas when each is a target; 1 if not known."""
    best = max((bucket_capacity.closed_per_s for bucket_capacity in template.capacity), default=0.0)
    share = len(template.replicas) if kind_of(template) == PLAIN else 1
    return best / share if best > 0 else 1.0


class PrefillChoice(NamedTuple):
    """Whether a request should be prefilled over a link, and how much of it is to be computed on either side."""

    remote: bool
    fetch: bool  # The other side's cached prefix is the longer one and should be sent over.
    here_tokens: int
    there_tokens: int


class RouteOption:
    """One way: its closed targets (no regions), or a flow between two regions."""

    __slots__ = ("decodes", "link", "planned_per_s", "prefills", "source", "target")

    def __init__(
        self, prefill_balancer: Balancer, decode_balancer: Balancer | None, source: str = "", target: str = ""
    ) -> None:
        self.prefills = prefill_balancer  # Closed targets, or where prompts are prefilled.
        self.decodes = decode_balancer
        self.source = source
        self.target = target
        self.link = f"{source}->{target}"
        self.planned_per_s = 0.0

    @property
    def crosses(self) -> bool:
        return self.source != self.target

    @property
    def open(self) -> bool:
        return len(self.prefills) > 0 and (self.decodes is None or len(self.decodes) > 0)


class SingleChoice:
    __slots__ = ("_member", "total")

    def __init__(self, target: Target) -> None:
        self._member = target
        self.total = 1.0

    def __len__(self) -> int:
        return 1

    def __contains__(self, target: Target) -> bool:
        return target is self._member

    def set(self, target: Target, weight: float) -> None:
        """It stays as long as its way does."""

    def pick(self) -> Target | None:
        return self._member

    def swap(self, picked_target: Target, other_target: Target) -> None:
        """There is no other."""

    def members(self) -> tuple[Target, ...]:
        return (self._member,)


class RouteOptions:
    def __init__(
        self, new_chooser: Callable[[], Balancer], flows: RatedFlows, bucket: int = 0, length_class: int = 0
    ) -> None:
        self._new, self.bucket, self.length_class = new_chooser, bucket, length_class
        self._prefill: dict[str, Balancer] = {}
        self._decode: dict[str, Balancer] = {}
        self.closed = RouteOption(new_chooser(), None)
        self.flows: list[RouteOption] = []
        self.turns: WeightedRoundRobin[RouteOption] = WeightedRoundRobin()
        self.local: WeightedRoundRobin[RouteOption] = WeightedRoundRobin()
        self.remote: WeightedRoundRobin[RouteOption] = WeightedRoundRobin()
        for source, target, planned_per_s in flows:
            route_option = RouteOption(self.prefill(source), self.decode(target), source, target)
            route_option.planned_per_s = planned_per_s
            self.flows.append(route_option)
        self.pairs: dict[str, dict[tuple[Target, Target], RouteOption]] = {}
        """Unit to the hand-overs inside it."""
        self.simple = not self.flows  # Only closed targets: the commonest case, and the fastest.

    def prefill(self, region: str) -> Balancer:
        return self._pool(self._prefill, region)

    def decode(self, region: str) -> Balancer:
        return self._pool(self._decode, region)

    def put(self, target: Target, weights: TargetWeights) -> None:
        self.closed.prefills.set(target, weights.closed)
        if self.simple:
            return
        if weights.region in self._prefill:
            self._prefill[weights.region].set(target, weights.prefill)
        if weights.region in self._decode:
            self._decode[weights.region].set(target, weights.decode)

    def join(self, unit: str, region: str, pairs: list[tuple[Target, Target, float]]) -> None:
        """The hand-overs inside a group's copy, with their weights, instead of those before; `settle` must follow."""
        old = self.pairs.pop(unit, {})
        new: dict[tuple[Target, Target], RouteOption] = {}
        for first_target, second_target, weight in pairs:
            route_option = old.pop((first_target, second_target), None)
            if route_option is None:
                route_option = RouteOption(
                    SingleChoice(first_target), SingleChoice(second_target), region, region
                )
            route_option.planned_per_s = weight
            new[first_target, second_target] = route_option
        for route_option in old.values():
            self._weigh(route_option, 0.0)
        if new:
            self.pairs[unit] = new
        self.simple = not (self.flows or self.pairs)

    def settle(self) -> None:
        if self.simple:
            return
        for pairs in self.pairs.values():
            for route_option in pairs.values():
                self._weigh(route_option, route_option.planned_per_s)
        out: dict[str, float] = {}
        into: dict[str, float] = {}
        for route_option in self.flows:
            out[route_option.source] = out.get(route_option.source, 0.0) + route_option.planned_per_s
            into[route_option.target] = into.get(route_option.target, 0.0) + route_option.planned_per_s
        self._weigh(self.closed, self.closed.prefills.total if len(self.closed.prefills) else 0.0)
        for route_option in self.flows:
            share = 0.0
            if route_option.open and route_option.decodes is not None:
                planned = route_option.planned_per_s
                share = min(
                    route_option.prefills.total / out[route_option.source],
                    route_option.decodes.total / into[route_option.target],
                )
                share = planned * (min(1.0, share) if route_option.crosses else share)
            self._weigh(route_option, share)

    def _weigh(self, route_option: RouteOption, weight: float) -> None:
        self.turns.set(route_option, weight)
        (self.remote if route_option.crosses else self.local).set(route_option, weight)

    def _pool(self, pools: dict[str, Balancer], region: str) -> Balancer:
        if region not in pools:
            pools[region] = self._new()
        return pools[region]


class TargetWeights(NamedTuple):
    region: str
    closed: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

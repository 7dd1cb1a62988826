"""A plan compiled for routing: per model and bucket, the route options with their weights.

An option is the closed targets (each serves whole requests), a flow from one region's prefill replicas to another's
decode replicas, or a hand-over inside a group's copy. Options are picked by weighted round robin. A flow's weight is

    planned rate x min(ready prefill weight / planned prefill, ready decode weight / planned decode)

and over a link at most the planned rate. A fleet change updates only the changed replica. If no option is open, any
target that serves whole requests is used, then any replica. Requests of different length classes have options of
their own, as not every replica's memory holds long requests."""

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
CLOSED_BUCKET: Final = -1
ANY_REPLICA_BUCKET: Final = -2
ONE_BY_ONE_BUCKET: Final = -3
RatedFlows = list[tuple[str, str, float]]
"""Pseudo-buckets: targets that serve whole requests; any replica except those that prefill one prompt at a time;
only those."""


@dataclass(slots=True, eq=False)
class ModelRoutes:
    """A model's routing weights and route options."""

    weights: ModelWeights
    limits_tokens: list[int]
    thresholds: dict[str, LengthThreshold] = field(default_factory=dict)
    """The plan's length thresholds by link, if it has any; then every option is open to every bucket."""
    options: dict[tuple[int, int], RouteOptions] = field(default_factory=dict)

    longest_tokens: tuple[float, ...] = field(init=False)
    """The longest prompt of each bucket; infinite for the last."""
    limit_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest_tokens = self.weights.longest_tokens
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
    """The compiled routes of all models, and the targets they lead to."""

    def __init__(self, facts: FleetFacts, policy: Policy, rule: BalanceRule, fleet: FleetState) -> None:
        self.facts = facts
        self._balance, self.rule, self._home = policy.balance, rule, policy.home
        self._by_length = policy.adapt_threshold and rule.by_length
        self.fleet = fleet
        self._templates: dict[str, Template] = {}
        self.models: dict[str, ModelRoutes] = {}
        self.singles: dict[str, Target] = {}
        self.groups: dict[str, Target] = {}
        self._mean_lengths: dict[str, MeanLengths] = {}
        """Mean lengths of models that differ from what groups were planned for."""

    def adopt(self, plan: Plan) -> None:
        """Compile a plan. Copies of templates that it does not name keep serving until they are drained."""
        for template in plan.repertoire:
            self._templates[template.name] = template
        live_copies = {
            (template_copy.template, template_copy.region) for template_copy in self.fleet.units.values()
        }

        new_weights = model_weights(plan, self._balance)
        if self._home:
            new_weights = {
                model: prefer_region(weights, self._home) for model, weights in new_weights.items()
            }
        for model, routes in self.models.items():
            if model in new_weights:
                new_weights[model] = merge_weights(new_weights[model], routes.weights, live_copies)
            elif any(self._templates[name].model == model for name, _ in live_copies):
                new_weights[model] = routes.weights
        self.models = {
            model: ModelRoutes(weights, self._length_limits(weights))
            for model, weights in new_weights.items()
        }
        for threshold in plan.thresholds if self._by_length else ():
            self.models[threshold.model].thresholds[threshold.link] = LengthThreshold(
                threshold.tokens, threshold.tokens
            )
        for target in (*self.singles.values(), *self.groups.values()):
            target.indexes.clear()

    def apply_threshold(self, model: str, threshold: LengthThreshold) -> bool:
        """Let length decide which prompts cross regions where the plan has no threshold; returns whether any flow
        crosses."""
        routes = self.models.get(model)
        if routes is None or not self._by_length or routes.thresholds:
            return False
        flows = routes.weights.flows
        crossing_flows = [flow for flow in flows if flow.source != flow.target]
        local_targets = {flow.target for flow in flows if flow.source == flow.target}
        local_flows = {
            flow.target: RegionFlow(flow.target, flow.target, flow.rates_per_s) for flow in crossing_flows
        }
        if not crossing_flows:
            return False
        added_flows = tuple(flow for region, flow in local_flows.items() if region not in local_targets)
        routes.weights = replace(routes.weights, flows=flows + added_flows)
        routes.thresholds = {f"{flow.source}->{flow.target}": threshold for flow in crossing_flows}
        routes.options.clear()
        for target in (*self.singles.values(), *self.groups.values()):
            target.indexes.clear()
        return True

    def update(self, unit_id: str, changed_replica: ReplicaState) -> None:
        """Update all options after a replica became ready, left, changed its role, or became suspect or trusted."""
        template_copy = self.fleet.units.get(unit_id)
        ready = changed_replica.serves and changed_replica.member.id in self.fleet.views
        single = self.singles.get(changed_replica.member.id)
        if ready and single is None:
            single = self.singles[changed_replica.member.id] = Target(PLAIN, unit_id, changed_replica)
        elif not ready:
            self.singles.pop(changed_replica.member.id, None)
        group = self._refresh_group(unit_id, template_copy, changed_replica)
        routes = self.models.get(changed_replica.member.model)
        if routes is None:
            return
        for route_options in routes.options.values():
            if single is not None:
                self._set_target(routes, route_options, single, ready)
            if group is not None:
                self._set_target(routes, route_options, group, template_copy is not None)
            if template_copy is None:
                route_options.set_pairs(unit_id, "", [])
            else:
                self._share_group(routes, route_options, template_copy)
            route_options.update_weights()

    def count_other_gateways(self, replica: ReplicaState) -> None:
        """Count the load that other gateways put on a replica: what it reports, less this gateway's open requests."""
        target, status = self.singles.get(replica.member.id), replica.status
        if self._home and self.rule.in_seconds and target is not None and status is not None:
            other_requests = max(0, status.queued + status.running - replica.open_requests)
            before_s, target.others_s = target.others_s, other_requests * self.request_s(target)
            target.remove_load(before_s - target.others_s)

    def set_mean_lengths(self, model: str, lengths: MeanLengths) -> None:
        self._mean_lengths[model] = lengths
        routes = self.models.get(model)
        for route_options in routes.options.values() if routes is not None else ():
            for template_copy in self.fleet.units.values():
                if template_copy.model == model and routes is not None:
                    self._share_group(routes, route_options, template_copy)
            route_options.update_weights()

    def update_paces(self, views: Iterable[ReplicaState]) -> None:
        for replica in views if self.rule.learns else ():
            for target in (self.singles.get(replica.member.id), self.groups.get(replica.member.unit)):
                if target is not None:
                    target.update_paces()
                    target.remove_load(0.0)

    def options(self, routes: ModelRoutes, bucket: int, total_tokens: int) -> RouteOptions:
        """The route options of a bucket for requests of up to this many tokens. The caller checks the model's
        limit."""
        limits = routes.limits_tokens
        length_class = 0 if total_tokens <= limits[0] else bisect_left(limits, total_tokens)
        route_options = routes.options.get((bucket, length_class))
        if route_options is None:
            route_options = routes.options[bucket, length_class] = self._build_options(
                routes, bucket, length_class
            )
        return route_options

    def _refresh_group(
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

    def _build_options(self, routes: ModelRoutes, bucket: int, length_class: int) -> RouteOptions:
        flows: RatedFlows = []
        if bucket >= 0:
            for flow in routes.weights.flows:
                rate = flow.rates_per_s[bucket]
                if not rate and routes.thresholds:
                    rate = sum(flow.rates_per_s) / len(flow.rates_per_s)
                if rate:
                    flows.append((flow.source, flow.target, rate))
        route_options = RouteOptions(self.rule.new_balancer, flows, bucket, length_class)
        for target in (*self.singles.values(), *self.groups.values()):
            self._set_target(routes, route_options, target, True)
        for template_copy in self.fleet.units.values():
            if template_copy.model == routes.weights.model:
                self._share_group(routes, route_options, template_copy)
        route_options.update_weights()
        return route_options

    def _share_group(
        self, routes: ModelRoutes, route_options: RouteOptions, template_copy: TemplateCopy
    ) -> None:
        """Set the weights of a group copy's replicas and hand-overs; does nothing for other copies."""
        template, bucket = self._templates.get(template_copy.template), route_options.bucket
        if template is None or not template.flows or bucket < 0:
            return
        template_weights = routes.weights.copy((template_copy.template, template_copy.region))
        weight = (
            self._copy_weight(routes, template_weights, "closed", bucket)
            if template_weights is not None
            else 0.0
        )
        singles: dict[int, Target] = {}
        for replica in template_copy.views:
            single = self.singles.get(replica.member.id)
            if (
                single is not None
                and weight > 0
                and self._all_hold_length(routes, [replica], route_options.length_class)
            ):
                singles[replica.member.index] = single
        serving_roles = {
            index: target.view.role for index, target in singles.items() if target.view is not None
        }
        group_facts = self.facts.groups.get(template_copy.template)
        lengths = self._mean_lengths.get(template_copy.model)
        if lengths is None:
            prompt_tokens = bucket_tokens(routes.longest_tokens, bucket, group_facts)
            lengths = MeanLengths(
                prompt_tokens, group_facts.output_tokens if group_facts is not None else 256.0
            )
        pairs, single_weights = [], dict.fromkeys(singles, 0.0)

        shares = group_shares(
            self.facts, template, serving_roles, bucket, lengths, template_copy.model in self._mean_lengths
        )
        for prefill_index, decode_index, share in shares:
            if prefill_index == decode_index:
                single_weights[prefill_index] += share * weight
            else:
                pairs.append((singles[prefill_index], singles[decode_index], share * weight))
        for index, single_weight in single_weights.items():
            route_options.set_target(singles[index], TargetWeights(template_copy.region, single_weight))
        route_options.set_pairs(template_copy.id, template_copy.region, pairs)

    def _set_target(
        self, routes: ModelRoutes, route_options: RouteOptions, target: Target, is_ready: bool
    ) -> None:
        """Set a target's weights in these options; zero when the target is gone or too small for the length class."""
        views = target.views()
        if views and views[0].member.model != routes.weights.model:
            return
        if is_ready and views and self._all_hold_length(routes, views, route_options.length_class):
            route_options.set_target(target, self._target_weights(routes, route_options, target, views))
        else:
            route_options.set_target(target, TargetWeights(views[0].member.region if views else ""))

    def _target_weights(
        self, routes: ModelRoutes, route_options: RouteOptions, target: Target, views: list[ReplicaState]
    ) -> TargetWeights:
        replica_spec, bucket = views[0].member, route_options.bucket
        template = self._templates[replica_spec.template]
        region = replica_spec.region
        grouped = kind_of(template) != PLAIN
        if bucket in (ANY_REPLICA_BUCKET, ONE_BY_ONE_BUCKET):
            facts = views[0].facts
            one_by_one = views[0].role == "prefill" and facts is not None and facts.decode_batch == 1
            return TargetWeights(
                region, float(target.kind == PLAIN and one_by_one is (bucket == ONE_BY_ONE_BUCKET))
            )
        if grouped and target.kind == PLAIN:
            return TargetWeights(region)
        if bucket == CLOSED_BUCKET:
            closed = intact_share(target, template) if grouped else float(views[0].role == "mixed")
            return TargetWeights(region, _max_closed_rate(template) * closed)
        template_weights = routes.weights.copy((replica_spec.template, region))
        if template_weights is None or template.flows:  # what a group's replicas do, `_share_group` says
            return TargetWeights(region)
        if grouped:
            share = intact_share(target, template)
            return TargetWeights(
                region, self._copy_weight(routes, template_weights, "closed", bucket) * share
            )
        role = views[0].role
        closed = (
            self._replica_weight(routes, template_weights, template, "closed", bucket)
            if role == "mixed"
            else 0.0
        )
        prefill = (
            self._replica_weight(routes, template_weights, template, "prefill", bucket)
            if role != "decode"
            else 0.0
        )
        decode = (
            self._replica_weight(routes, template_weights, template, "decode", bucket)
            if role != "prefill"
            else 0.0
        )
        if role != replica_spec.role and role == "prefill" and not prefill:
            prefill = self._flipped_weight(route_options.prefill(region), views[0], "prefill")
        if role != replica_spec.role and role == "decode" and not decode:
            decode = self._flipped_weight(route_options.decode(region), views[0], "decode")
        return TargetWeights(region, closed, prefill, decode)

    def _replica_weight(
        self,
        routes: ModelRoutes,
        template_weights: TemplateWeights,
        template: Template,
        phase: Phase,
        bucket: int,
    ) -> float:
        role = {"closed": "mixed", "prefill": "prefill", "decode": "decode"}[phase]
        capable_replicas = [replica for replica in template.replicas if replica.role in (role, "mixed")]
        return self._copy_weight(routes, template_weights, phase, bucket) / max(1, len(capable_replicas))

    def _copy_weight(
        self, routes: ModelRoutes, template_weights: TemplateWeights, phase: Phase, bucket: int
    ) -> float:
        """A copy's weight in a bucket; under a length threshold also in buckets that the plan sends elsewhere,
        except whole requests where the plan prefills on other replicas of the region: a combo has as many replicas
        of each role as its own buckets need."""
        weights = template_weights.weights(phase)
        has_local_flows = phase == "closed" and any(
            flow.source == flow.target for flow in routes.weights.flows
        )
        if weights[bucket] or has_local_flows or not routes.thresholds:
            return weights[bucket]
        positive_weights = [weight for weight in weights if weight > 0]
        return sum(positive_weights) / len(positive_weights) if positive_weights else 0.0

    def _flipped_weight(self, balancer: Balancer, replica: ReplicaState, phase: Phase) -> float:
        """The weight of a replica in a flipped role: the mean weight of the replicas with that role, scaled by the
        speed ratio."""
        unflipped_targets = [
            target
            for target in balancer.members()
            if target.view is not None and target.view.role == target.view.member.role
        ]
        if not unflipped_targets or unflipped_targets[0].view is None:
            return 1.0
        mean_weight = balancer.total / len(balancer)
        own_rate, other_rate = (
            self._phase_rate(replica, phase),
            self._phase_rate(unflipped_targets[0].view, phase),
        )
        return mean_weight * own_rate / other_rate if own_rate and other_rate else mean_weight

    def _phase_rate(self, replica: ReplicaState, phase: Phase) -> float:
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
        rates = [
            max(capacity.closed_per_s, capacity.prefill_per_s, capacity.decode_per_s)
            for capacity in template.capacity
        ]
        best_rate = max(rates, default=0.0)
        share = len(template.replicas) if target.kind == PLAIN else 1
        return share / best_rate if best_rate > 0 else 0.0

    def _all_hold_length(self, routes: ModelRoutes, views: list[ReplicaState], length_class: int) -> bool:
        if length_class == 0:
            return True
        length_limit = routes.limits_tokens[length_class]
        return all(
            self._max_tokens(replica.member.template, replica.member.index) >= length_limit
            for replica in views
        )

    def _max_tokens(self, template: str, index: int) -> int:
        facts = self.facts.replicas.get((template, index))
        return facts.max_tokens if facts is not None else UNBOUNDED_TOKENS

    def _length_limits(self, model: ModelWeights) -> list[int]:
        """The token limits that separate length classes: those of planned replicas; spare templates only add lower
        ones."""
        limits = self._token_limits(name for name, _ in model.copies)
        max_limit = max(limits, default=0)
        return sorted(limits | {limit for limit in self._token_limits(model.spare) if limit < max_limit})

    def _token_limits(self, names: Iterable[str]) -> set[int]:
        return {
            self._max_tokens(name, index)
            for name in names
            for index in range(len(self._templates[name].replicas))
        }


def _max_closed_rate(template: Template) -> float:
    """The highest rate of whole requests of a copy, divided among its replicas when each is a target; 1 if
    unknown."""
    best_rate = max((bucket_capacity.closed_per_s for bucket_capacity in template.capacity), default=0.0)
    share = len(template.replicas) if kind_of(template) == PLAIN else 1
    return best_rate / share if best_rate > 0 else 1.0


class PrefillChoice(NamedTuple):
    """Whether to prefill a request over a link, and the tokens to compute in either region."""

    remote: bool
    fetch: bool  # Send the other region's cached prefix first: it is the longer one.
    here_tokens: int
    there_tokens: int


class RouteOption:
    """One route option: the closed targets (no regions), or a flow between two regions."""

    __slots__ = ("decodes", "link", "planned_per_s", "prefills", "source", "target")

    def __init__(
        self, prefill_balancer: Balancer, decode_balancer: Balancer | None, source: str = "", target: str = ""
    ) -> None:
        self.prefills = prefill_balancer  # Closed targets, or prefill targets.
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
    """A Balancer with one target."""

    __slots__ = ("_target", "total")

    def __init__(self, target: Target) -> None:
        self._target = target
        self.total = 1.0

    def __len__(self) -> int:
        return 1

    def __contains__(self, target: Target) -> bool:
        return target is self._target

    def set(self, target: Target, weight: float) -> None:
        """Nothing to do: the target belongs to its option."""

    def pick(self) -> Target | None:
        return self._target

    def swap(self, picked_target: Target, other_target: Target) -> None:
        """Nothing to do: there is only one target."""

    def members(self) -> tuple[Target, ...]:
        return (self._target,)


class RouteOptions:
    """All ways that requests of one bucket and length class may take, with their weights."""

    def __init__(
        self, new_chooser: Callable[[], Balancer], flows: RatedFlows, bucket: int = 0, length_class: int = 0
    ) -> None:
        self._new_balancer, self.bucket, self.length_class = new_chooser, bucket, length_class
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
        """Template copy -> hand-overs between its replicas."""
        # Only closed targets: the most common case, with the shortest code path.
        self.simple = not self.flows

    def prefill(self, region: str) -> Balancer:
        return self._pool(self._prefill, region)

    def decode(self, region: str) -> Balancer:
        return self._pool(self._decode, region)

    def set_target(self, target: Target, weights: TargetWeights) -> None:
        self.closed.prefills.set(target, weights.closed)
        if self.simple:
            return
        if weights.region in self._prefill:
            self._prefill[weights.region].set(target, weights.prefill)
        if weights.region in self._decode:
            self._decode[weights.region].set(target, weights.decode)

    def set_pairs(self, unit: str, region: str, pairs: list[tuple[Target, Target, float]]) -> None:
        """Replace the hand-overs inside a group's copy; `update_weights` must follow."""
        old_options = self.pairs.pop(unit, {})
        new_options: dict[tuple[Target, Target], RouteOption] = {}
        for first_target, second_target, weight in pairs:
            route_option = old_options.pop((first_target, second_target), None)
            if route_option is None:
                route_option = RouteOption(
                    SingleChoice(first_target), SingleChoice(second_target), region, region
                )
            route_option.planned_per_s = weight
            new_options[first_target, second_target] = route_option
        for route_option in old_options.values():
            self._set_weight(route_option, 0.0)
        if new_options:
            self.pairs[unit] = new_options
        self.simple = not (self.flows or self.pairs)

    def update_weights(self) -> None:
        if self.simple:
            return
        for pairs in self.pairs.values():
            for route_option in pairs.values():
                self._set_weight(route_option, route_option.planned_per_s)
        planned_from: dict[str, float] = {}
        planned_to: dict[str, float] = {}
        for route_option in self.flows:
            planned_from[route_option.source] = (
                planned_from.get(route_option.source, 0.0) + route_option.planned_per_s
            )
            planned_to[route_option.target] = (
                planned_to.get(route_option.target, 0.0) + route_option.planned_per_s
            )
        self._set_weight(self.closed, self.closed.prefills.total if len(self.closed.prefills) else 0.0)
        for route_option in self.flows:
            weight = 0.0
            if route_option.open and route_option.decodes is not None:
                planned = route_option.planned_per_s
                weight = min(
                    route_option.prefills.total / planned_from[route_option.source],
                    route_option.decodes.total / planned_to[route_option.target],
                )
                weight = planned * (min(1.0, weight) if route_option.crosses else weight)
            self._set_weight(route_option, weight)

    def _set_weight(self, route_option: RouteOption, weight: float) -> None:
        self.turns.set(route_option, weight)
        (self.remote if route_option.crosses else self.local).set(route_option, weight)

    def _pool(self, pools: dict[str, Balancer], region: str) -> Balancer:
        if region not in pools:
            pools[region] = self._new_balancer()
        return pools[region]


class TargetWeights(NamedTuple):
    """A target's weights in one bucket, by phase."""

    region: str
    closed: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

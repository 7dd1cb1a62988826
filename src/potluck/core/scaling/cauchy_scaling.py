"""CAUCHY's autoscaling (its 3.5, Algorithm 1): add or remove whole copies when the rate leaves their capacity.

With Q the window's mean rate and C the copies' capacity for the observed lengths (times the headroom):

    wait until the local window has passed since the last change
    Q - C >  ratio C      start the best copies that cover Q - C, from all templates that the strategy offers
    C - Q >  ratio C      remove copies, the largest first, as long as the rest still serves Q
    else, after the global window: ask for a new plan at its mean rate

Beyond the paper: a jump in the last quarter of a window is acted on at once; queued requests count as demand;
differences must exceed NOISE_DEVIATIONS standard deviations; no copy is removed while others start or leave; the last
copy stays; where a model must survive a loss, C is the capacity after the worst loss; where the plan sends some
lengths here and others there, each deployment is scaled separately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Final

from potluck.core.scaling import copy_capacity, rule
from potluck.core.scaling.copy_capacity import ZERO_RATES, CopyKey, CopyRates, Resource
from potluck.core.scaling.traffic_window import ModelTraffic, ObservedTraffic
from potluck.core.state.facts import ModelFacts
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import Region

NOISE_DEVIATIONS = 3.0  # At a steady rate one window in about 700 deviates that far.
RECENT_NOISE_DEVIATIONS = 3.5  # The same for a quarter of a window; there are more of these.
FOLLOW_UP_WINDOW_SHARE = 0.25  # Share of a window after which more copies may be started after other starts.
TOLERATED_QUEUE_S = 5.0
NO_MODELS: Final[Mapping[str, ModelFacts]] = {}


@dataclass(frozen=True, slots=True)
class _FleetCapacity:
    """A model's copies that stay, with their rates, at one tick."""

    plan: Plan
    counts: dict[CopyKey, int]
    rates: dict[CopyKey, CopyRates]  # The rates of one copy; unknown keys are missing.
    moving: int
    startable_rates: dict[CopyKey, CopyRates]  # The rates of one copy of each template that could be started.
    busy: dict[CopyKey, float] | None = None
    """Where copies take different requests: copies of each that one request/s keeps busy (`_cover_deployments`)."""
    planned: frozenset[CopyKey] = frozenset()

    def serves(self, counts: Mapping[CopyKey, int]) -> CopyRates:
        if self.busy is None:
            return copy_capacity.sum_rates(
                self.rates.get(key, ZERO_RATES).times(n) for key, n in counts.items()
            )
        return copy_capacity.rates_with_busy_copies(self.busy, counts).plus(self.unplanned(counts))

    def unplanned(self, counts: Mapping[CopyKey, int]) -> CopyRates:
        added = {key: n for key, n in counts.items() if key not in self.planned}
        return copy_capacity.sum_rates(self.rates.get(key, ZERO_RATES).times(n) for key, n in added.items())


class CauchyScaling(rule.Scaler):
    """State: the wanted counts, and when each model was last changed."""

    def __init__(
        self, policy: Policy, regions: tuple[Region, ...] = (), models: Mapping[str, ModelFacts] = NO_MODELS
    ) -> None:
        super().__init__()
        self._policy, self._regions, self._models = policy, regions, models
        self._last_s: dict[str, float] = {}
        self._resized_s: dict[str, float] = {}
        self._plan: Plan | None = None
        self._wanted: dict[CopyKey, int] = {}
        self._quoted = False

    def market_changed(self, regions: tuple[Region, ...]) -> None:
        self._regions, self._quoted = regions, True

    def on_tick(
        self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> rule.Decisions:
        if plan is not self._plan:
            self._plan = plan
            self._wanted = {(d.template, d.region): d.count for d in plan.deployments}
        decisions: list[rule.ScaleDecision] = []
        if self._quoted and observed.models:
            self._quoted = False
            rates = tuple((traffic.model, rate_to_plan_per_s(traffic, False)) for traffic in observed.models)
            decisions.append(rule.AskReplan(rates, rule.MARKET_CHANGED_REASON))
        stable = []
        for model in sorted({item.model for item in plan.templates}):
            traffic = observed.of(model)
            if traffic is None:
                self._notes.say(model, "no request seen yet")
                continue
            last_s = self._last_s.setdefault(model, at_s - traffic.span_s)
            window_s = self._policy.window_s
            left_s = window_s - (at_s - last_s)
            if left_s > 0 and at_s - self._resized_s.get(model, at_s) < FOLLOW_UP_WINDOW_SHARE * window_s:
                self._notes.wait(model, f"looks again in {left_s:.0f} s, a window after the last change")
                continue
            standing = self._standing(model, traffic, fleet, plan)
            resizes = self._resizes(traffic, standing, fleet, only_out=left_s > 0)
            if left_s > 0 and not resizes:
                self._notes.wait(model, f"looks again in {left_s:.0f} s, unless more is needed before")
                continue
            if resizes:
                self._last_s[model] = self._resized_s[model] = at_s
                decisions += resizes
            elif at_s - last_s >= self._policy.global_window_s:
                stable.append(model)
        if stable:
            decisions.append(self._request_replan(at_s, stable, observed))
        return tuple(decisions)

    def _standing(self, model: str, traffic: ModelTraffic, fleet: FleetState, plan: Plan) -> _FleetCapacity:
        """The copies that stay: existing ones up to the wanted counts, and all those that were never wanted by this
        rule."""
        buckets = copy_capacity.buckets_of(plan, model)
        shares = traffic.bucket_shares([bucket.longest_tokens for bucket in buckets])
        mix = {bucket.bucket: share for bucket, share in zip(buckets, shares, strict=True)}
        if not any(mix.values()):
            mix = {bucket.bucket: 1.0 for bucket in buckets}
        templates = {item.name: item for item in plan.repertoire if item.model == model}
        copies = [template_copy for template_copy in fleet.units.values() if template_copy.model == model]
        moving = sum(not template_copy.whole for template_copy in copies)
        staying = [
            template_copy
            for template_copy in copies
            if not any(replica.state == "draining" for replica in template_copy.views)
        ]
        existing = Counter((template_copy.template, template_copy.region) for template_copy in staying)
        counts = {key: min(n, self._wanted.get(key, n)) for key, n in existing.items()}
        keys = {*counts, *(key for key in self._wanted if key[0] in templates)}
        rates_by_key = {
            key: copy_capacity.rates_of(templates[key[0]], mix) for key in keys if key[0] in templates
        }
        rates = {key: rates for key, rates in rates_by_key.items() if rates.known}
        startable_by_key = startable_rates(plan, model, mix, self._regions, keys)
        startable = {key: copy_rates for key, copy_rates in startable_by_key.items() if copy_rates.known}
        planned = frozenset((deployment.template, deployment.region) for deployment in plan.deployments)
        busy = copy_capacity.busy_copies_per_rate(plan, model, mix)
        return _FleetCapacity(plan, counts, rates, moving, startable, busy, planned)

    def _resizes(
        self, traffic: ModelTraffic, standing: _FleetCapacity, fleet: FleetState, only_out: bool
    ) -> list[rule.ScaleDecision]:
        model, policy = traffic.model, self._policy
        unknown = sorted({key[0] for key, n in standing.counts.items() if n and key not in standing.rates})
        if unknown:
            self._notes.say(model, f"not scaled: the capacity of {', '.join(unknown)} is not known")
            return []
        if not standing.rates and not standing.startable_rates:
            self._notes.say(model, "not scaled: none of its templates has a known capacity")
            return []
        served_per_s = self._rate_after_loss_per_s(model, standing, standing.counts) * policy.headroom
        loss_margin_per_s = standing.serves(standing.counts).served_per_s * policy.headroom - served_per_s
        queued = traffic.held + rule.queued_requests(fleet, model)
        excess_queue = max(0.0, queued - TOLERATED_QUEUE_S * served_per_s - sum(standing.counts.values()))
        if only_out:
            excess_queue = 0.0  # It was counted at the last change; what was started then will serve it.
        # How far would a quarter of a window deviate at the rate that the copies are for?
        noise = RECENT_NOISE_DEVIATIONS * max(
            traffic.recent_error_per_s, sqrt(served_per_s / max(traffic.recent_span_s, 1e-9))
        )
        demand = traffic.recent_rate_per_s + excess_queue / policy.window_s
        if traffic.recent_rate_per_s > traffic.rate_per_s and demand - served_per_s > max(
            policy.ratio * served_per_s, noise
        ):
            state_text = _state_text(traffic.recent_rate_per_s, queued, demand, served_per_s)
            return self._scale_out(model, demand + loss_margin_per_s, standing, fleet, state_text)
        # The same for a whole window.
        noise = NOISE_DEVIATIONS * max(traffic.error_per_s, sqrt(served_per_s / traffic.span_s))
        demand = traffic.rate_per_s + excess_queue / policy.window_s
        state_text = _state_text(traffic.rate_per_s, queued, demand, served_per_s)
        if demand - served_per_s > max(policy.ratio * served_per_s, noise):
            return self._scale_out(model, demand + loss_margin_per_s, standing, fleet, state_text)
        if only_out:
            return []
        if served_per_s - demand > policy.ratio * served_per_s:
            if standing.moving:
                self._notes.say(
                    model, f"{state_text}; waits for {standing.moving} copies that start or leave"
                )
                return []
            if excess_queue:
                self._notes.say(model, f"{state_text}; nothing goes while requests queue")
                return []
            return self._scale_in(model, demand + noise, standing, state_text)
        self._notes.say(model, f"{state_text}, within {policy.ratio:.0%} or the noise of {noise:.3g}")
        return []

    def _rate_after_loss_per_s(
        self, model: str, standing: _FleetCapacity, counts: Mapping[CopyKey, int]
    ) -> float:
        """Requests/s that copies serve, or still serve after the worst loss that must be survived, divided by the
        share then required."""
        rate_per_s = standing.serves(counts).served_per_s
        facts = self._models.get(model)
        if facts is None or facts.survive is None:
            return rate_per_s
        for key, n in counts.items():
            if not n:
                continue
            if facts.survive == "node":
                remaining = {**counts, key: n - 1}
            else:
                remaining = {
                    other_key: 0 if other_key[1] == key[1] else count for other_key, count in counts.items()
                }
            rate_per_s = min(rate_per_s, standing.serves(remaining).served_per_s / facts.survive_share)
        return rate_per_s

    def _scale_out(
        self, model: str, demand: float, standing: _FleetCapacity, fleet: FleetState, state_text: str
    ) -> list[rule.ScaleDecision]:
        free_nodes = self._free_nodes(fleet, standing.plan)
        cover = self._cover_phases if standing.busy is None else self._cover_deployments
        added, is_partial = cover(demand, standing, free_nodes)
        if not added:
            self._notes.say(model, f"{state_text}; more is needed but no nodes are free")
            return []
        shortage = ", all that nodes allow" if is_partial else ""
        self._notes.say(model, f"{state_text}; starts {_listing(added)}{shortage}")
        return self._resize_decisions(standing, added, f"{state_text}{shortage}")

    def _cover_phases(
        self, demand: float, standing: _FleetCapacity, free_nodes: dict[Resource, int] | None
    ) -> tuple[dict[CopyKey, int], bool]:
        """(the best copies for the missing rate of each phase, whether nodes allow only some)."""
        rates, added, is_partial = standing.serves(standing.counts), dict[CopyKey, int](), False
        for phase in self._phases(standing):
            options = copy_options(standing.plan, standing.startable_rates, self._regions, phase)
            missing = demand / self._policy.headroom - (
                rates.served_per_s if phase == "closed_per_s" else rates.closed_per_s + getattr(rates, phase)
            )
            if missing <= 0:
                continue
            cover_counts = cheapest_cover(options, missing, free_nodes)
            if cover_counts is None:
                cover_counts, is_partial = most_capacity_within(options, free_nodes or {}), True
            for option in options:
                _take_nodes(free_nodes, option, cover_counts.get(option.key, 0))
            for key, n in cover_counts.items():
                added[key] = added.get(key, 0) + n
        return added, is_partial

    def _cover_deployments(
        self, demand: float, standing: _FleetCapacity, free_nodes: dict[Resource, int] | None
    ) -> tuple[dict[CopyKey, int], bool]:
        """Where copies take different requests: more copies of each deployment, or copies that take all requests,
        whichever weighs less."""
        assert standing.busy is not None
        rate_per_s = demand / self._policy.headroom
        options = copy_options(standing.plan, standing.startable_rates, self._regions)
        weights = {option.key: option.weight for option in options}
        unplanned_per_s = standing.unplanned(standing.counts).served_per_s
        needs = {option.key: option.needs for option in options if option.key in standing.planned}
        added, is_partial = copy_capacity.copies_to_add(
            standing.busy, standing.counts, rate_per_s - unplanned_per_s, needs, free_nodes
        )
        unplanned_options = [option for option in options if option.key not in standing.planned]
        missing = rate_per_s - standing.serves(standing.counts).served_per_s
        unplanned_cover = (
            cheapest_cover(unplanned_options, missing, free_nodes)
            if unplanned_options and missing > 0
            else None
        )
        if unplanned_cover and (
            is_partial or _total_weight(unplanned_cover, weights) < _total_weight(added, weights)
        ):
            return unplanned_cover, False
        return added, is_partial

    def _phases(self, standing: _FleetCapacity) -> tuple[str, ...]:
        """Copies that serve whole requests are scaled as such; prefill and decode copies separately, each by its
        own deficit."""
        rates = standing.rates or standing.startable_rates
        if any(rate.closed_per_s > 0 for rate in rates.values()):
            return ("closed_per_s",)
        return ("prefill_per_s", "decode_per_s")

    def _scale_in(
        self, model: str, needed: float, standing: _FleetCapacity, state_text: str
    ) -> list[rule.ScaleDecision]:
        """Remove the largest copy that the excess covers, repeatedly; the needed rate is never 0."""
        counts = dict(standing.counts)
        removed: dict[CopyKey, int] = {}
        while True:
            served_per_s = self._rate_after_loss_per_s(model, standing, counts)
            best_rank: tuple[float, float, CopyKey] | None = None
            for key in sorted(counts):
                if not counts[key] or key not in self._wanted:
                    continue
                after_per_s = self._rate_after_loss_per_s(model, standing, {**counts, key: counts[key] - 1})
                if after_per_s * self._policy.headroom < needed:
                    continue
                rank = (served_per_s - after_per_s, standing.rates[key].served_per_s, key)
                best_rank = rank if best_rank is None or rank[:2] > best_rank[:2] else best_rank
            if best_rank is None:
                break
            counts[best_rank[2]] -= 1
            removed[best_rank[2]] = removed.get(best_rank[2], 0) - 1
        if not removed:
            self._notes.say(model, f"{state_text}; no copy is small enough to go")
            return []
        self._notes.say(model, f"{state_text}; stops {_listing({key: -n for key, n in removed.items()})}")
        return self._resize_decisions(standing, removed, state_text)

    def _resize_decisions(
        self, standing: _FleetCapacity, change: Mapping[CopyKey, int], reason: str
    ) -> list[rule.ScaleDecision]:
        decisions: list[rule.ScaleDecision] = []
        for key, n in sorted(change.items()):
            self._wanted[key] = standing.counts.get(key, 0) + n
            decisions.append(rule.Resize(*key, self._wanted[key], reason))
        return decisions

    def _free_nodes(self, fleet: FleetState, plan: Plan) -> dict[Resource, int] | None:
        limits = rule.available_nodes(self._regions)
        if limits is None:
            return None
        used = rule.used_nodes(fleet.units, {template.name: template for template in plan.repertoire})
        return {key: n - used.get(key, 0) for key, n in limits.items()}

    def _request_replan(self, at_s: float, stable: list[str], observed: ObservedTraffic) -> rule.AskReplan:
        """The rate was steady for the global window: ask for the cheapest fleet at it (Algorithm 1, lines 22 to
        27)."""
        for model in stable:
            self._last_s[model] = at_s
            self._notes.say(model, "steady for the global window; asks for a new plan")
        rates = tuple(
            (traffic.model, rate_to_plan_per_s(traffic, traffic.model in stable))
            for traffic in observed.models
        )
        return rule.AskReplan(rates, f"steady for {self._policy.global_window_s:.0f} s: {', '.join(stable)}")


def _state_text(rate_per_s: float, queued: int, demand: float, serves: float) -> str:
    return f"{rate_per_s:.3g} requests/s and {queued} queued need {demand:.3g}, served are {serves:.3g}"


def rate_to_plan_per_s(traffic: ModelTraffic, is_steady: bool) -> float:
    """The rate to plan for: the long window's mean if it was steady, else the latest. Never 0: the last copy
    stays."""
    rate = traffic.long_rate_per_s if is_steady else traffic.rate_per_s
    return max(rate, 1.0 / max(traffic.long_span_s, 1.0))


def _take_nodes(free: dict[Resource, int] | None, option: CopyOption, count: int) -> None:
    if free is not None:
        for node, need in option.needs.items():
            free[node] = free.get(node, 0) - need * count


def _total_weight(counts: Mapping[CopyKey, int], weights: Mapping[CopyKey, float]) -> float:
    return sum(n * weights.get(key, 0.0) for key, n in counts.items())


def _listing(counts: Mapping[CopyKey, int]) -> str:
    return ", ".join(f"{n} of {name}@{region}" for (name, region), n in sorted(counts.items()))


SEARCH_STEPS = 20_000
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CopyOption:
    key: CopyKey
    serves_per_s: float
    # The quantity to minimize: its rent, or the weight in the strategy's program (`copy_weight`).
    weight: float
    needs: Mapping[Resource, int]


def cheapest_cover(
    copy_options: Sequence[CopyOption], deficit_per_s: float, free: Mapping[Resource, int] | None
) -> dict[CopyKey, int] | None:
    """The number of copies of each option that covers a deficit at the least weight; None if none fits. `free`
    None: unlimited nodes."""
    serving_options = [option for option in copy_options if option.serves_per_s > 0]
    serving_options.sort(
        key=lambda option: (option.weight / option.serves_per_s, -option.serves_per_s, option.key)
    )
    candidates = without_dominated_options(serving_options)
    search = _CoverSearch(candidates, dict(free) if free is not None else None)
    search.branch(0, deficit_per_s, 0.0)
    if search.best is None:
        return None
    return {option.key: n for option, n in zip(candidates, search.best, strict=True) if n}


def without_dominated_options(copy_options: Sequence[CopyOption]) -> list[CopyOption]:
    """Options without those that another one dominates: as much capacity for no more weight and nodes."""
    kept: list[CopyOption] = []
    for option in copy_options:
        at_least_as_good = [
            other
            for other in kept
            if other.serves_per_s >= option.serves_per_s and other.weight <= option.weight
        ]
        if not any(
            all(n <= option.needs.get(node, 0) for node, n in other.needs.items())
            for other in at_least_as_good
        ):
            kept.append(option)
    return kept


def most_capacity_within(
    copy_options: Sequence[CopyOption], free: Mapping[Resource, int]
) -> dict[CopyKey, int]:
    """The most capacity within the free nodes, chosen greedily by weight per capacity."""
    remaining_nodes, counts = dict(free), {}
    serving_options = [option for option in copy_options if option.serves_per_s > 0]
    for option in sorted(
        serving_options,
        key=lambda option: (option.weight / option.serves_per_s, -option.serves_per_s, option.key),
    ):
        count = _max_copies(option, remaining_nodes)
        if count:
            counts[option.key] = count
            _take_nodes(remaining_nodes, option, count)
    return counts


def _max_copies(option: CopyOption, free: Mapping[Resource, int] | None) -> int:
    if free is None:
        return 10**6
    return max(0, min((free.get(node, 0) // need for node, need in option.needs.items()), default=10**6))


class _CoverSearch:
    """Branch and bound over the number of copies of each option."""

    def __init__(self, copy_options: Sequence[CopyOption], free: dict[Resource, int] | None) -> None:
        self.copy_options, self.free = copy_options, free
        self.best: list[int] | None = None
        self.cost = inf
        self.counts = [0] * len(copy_options)
        self.steps = 0

    def branch(self, index: int, missing_per_s: float, cost: float) -> None:
        self.steps += 1
        if missing_per_s <= ROUNDING:
            if cost < self.cost - ROUNDING:
                self.best, self.cost = list(self.counts), cost
            return
        if index == len(self.copy_options):
            return
        option = self.copy_options[index]
        lower_bound = cost + missing_per_s * option.weight / option.serves_per_s
        if lower_bound >= self.cost - ROUNDING or self.steps > SEARCH_STEPS:
            return
        max_useful = ceil(missing_per_s / option.serves_per_s - ROUNDING)
        for count in range(min(max_useful, _max_copies(option, self.free)), -1, -1):
            _take_nodes(self.free, option, count)
            self.counts[index] = count
            new_cost = cost + count * option.weight
            self.branch(index + 1, missing_per_s - count * option.serves_per_s, new_cost)
            _take_nodes(self.free, option, -count)
            if self.steps > SEARCH_STEPS:
                break
        self.counts[index] = 0


def copy_weight(strategy: str, template: Template, price_usd_per_h: float, serves_per_s: float) -> float:
    """The weight of one copy in the strategy's program; USD/h except for strategies that weigh by efficiency."""
    if strategy not in ("cauchy", "cauchy-ce", "cauchy-mce"):
        return price_usd_per_h
    efficiency = template.ce_tokens_per_usd if strategy == "cauchy-ce" else 0.0
    if efficiency <= 0 and price_usd_per_h > 0:
        efficiency = 3600.0 * serves_per_s / price_usd_per_h
    if efficiency <= 0:
        return price_usd_per_h if price_usd_per_h > 0 or serves_per_s > 0 else inf
    return 1.0 / efficiency if strategy == "cauchy-mce" else price_usd_per_h / efficiency


def startable_rates(
    plan: Plan, model: str, mix: Mapping[int, float], regions: tuple[Region, ...], wanted: Iterable[CopyKey]
) -> dict[CopyKey, CopyRates]:
    """The rates of one copy of each template that could be started; templates of one phase only where the plan has
    the other."""
    templates = {item.name: item for item in plan.repertoire if item.model == model and not item.machines}
    if not plan.candidates or not regions:
        keys = [key for key in wanted if key[0] in templates]
        return {key: copy_capacity.rates_of(templates[key[0]], mix) for key in sorted(keys)}
    sources = {flow.prefill_region for flow in plan.flows if flow.model == model}
    targets = {flow.decode_region for flow in plan.flows if flow.model == model}
    rates_by_key = {}
    planned_templates = {item.name for item in plan.templates}
    for name, template in sorted(templates.items()):
        if name not in planned_templates and not _serves_whole_mix(template, mix):
            continue
        rates = copy_capacity.rates_of(template, mix)
        for region in regions:
            serves_whole = rates.closed_per_s > 0
            can_prefill, can_decode = rates.prefill_per_s > 0, rates.decode_per_s > 0
            joins_flow = (can_prefill and region.name in sources) or (can_decode and region.name in targets)
            if (serves_whole or joins_flow) and rule.unit_price_usd_per_h(
                template, region.name, regions
            ) is not None:
                rates_by_key[name, region.name] = rates
    return rates_by_key


def _serves_whole_mix(template: Template, mix: Mapping[int, float]) -> bool:
    buckets = {c.bucket for c in template.capacity if c.closed_per_s > 0}
    buckets = buckets or {c.bucket for c in template.capacity if c.prefill_per_s > 0 or c.decode_per_s > 0}
    return all(bucket in buckets for bucket, share in mix.items() if share > 0)


def copy_options(
    plan: Plan, known: Mapping[CopyKey, CopyRates], regions: tuple[Region, ...], phase: str = "closed_per_s"
) -> list[CopyOption]:
    """One option per template and region, weighed by the strategy; without prices by its nodes."""
    templates = {item.name: item for item in plan.repertoire}
    strategy = plan.strategy
    if strategy == "cauchy-ce" and any(templates[name].ce_tokens_per_usd <= 0 for name, _ in known):
        strategy = "cauchy-mc"  # Like the planner: least cost, where not all templates are ranked.
    options = []
    for key, rates in sorted(known.items()):
        template = templates[key[0]]
        serves_per_s = getattr(rates, phase)
        price = (
            rule.unit_price_usd_per_h(template, key[1], regions)
            if rule.available_nodes(regions) is not None
            else float(sum(node.count for node in template.nodes))
        )
        if price is None or template.machines:
            continue  # It is not offered there, or needs named machines, which cannot be duplicated.
        weight = copy_weight(strategy, template, price, serves_per_s)
        if weight < inf:
            options.append(CopyOption(key, serves_per_s, weight, node_needs(template, key[1])))
    return options


def node_needs(template: Template, region: str) -> dict[Resource, int]:
    return {(region, node_count.node): node_count.count for node_count in template.nodes}

"""CAUCHY's autoscaling (its 3.5, Algorithm 1): add or remove whole copies when the rate leaves what they serve.

With Q the window's mean rate and C what the copies serve under the lengths now seen (times the headroom):

    wait until the local window has passed since the last change
    Q - C >  ratio C      start the best copies that cover Q - C, of all that the strategy has on offer (`repertoire`)
    C - Q >  ratio C      take away copies, the largest first, as long as the rest still serves Q
    else, when the global window has passed: ask for a new plan at its mean rate

Beyond the paper: a jump in the last quarter of a window is acted on at once; requests that queue are demand;
differences must exceed NOISE standard deviations; while copies start or leave nothing goes; the last copy stays;
where a model must survive a loss, C is what is left after the worst one; where the plan
sends some lengths here and others there, each deployment is scaled apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Final

from potluck.core.scaling import copy_capacity, rule
from potluck.core.scaling.copy_capacity import NOTHING, CopyRates, Key, Resource
from potluck.core.scaling.traffic_window import ModelTraffic, ObservedTraffic
from potluck.core.state.facts import ModelFacts
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import Region

NOISE = 3.0  # Standard deviations: at a steady rate one window in about 700 is as far off.
RECENT_NOISE = 3.5  # The same for a quarter of a window, of which there are more.
ON = 0.25  # Share of a window after which more may be started after other starts.
QUEUE_S = 5.0
NO_MODELS: Final[Mapping[str, ModelFacts]] = {}


@dataclass(frozen=True, slots=True)
class _Standing:
    plan: Plan
    counts: dict[Key, int]
    rates: dict[Key, CopyRates]  # What one copy serves; keys without are not known.
    moving: int
    startable: dict[Key, CopyRates]  # What one copy would serve of all that could be started.
    busy: dict[Key, float] | None = None
    """Where copies take different requests: how many of each one request a second keeps busy (`parts`)."""
    planned: frozenset[Key] = frozenset()

    def serves(self, counts: Mapping[Key, int]) -> CopyRates:
        if self.busy is None:
            return copy_capacity.total(self.rates.get(key, NOTHING).times(n) for key, n in counts.items())
        return copy_capacity.served_by(self.busy, counts).plus(self.unplanned(counts))

    def unplanned(self, counts: Mapping[Key, int]) -> CopyRates:
        added = {key: n for key, n in counts.items() if key not in self.planned}
        return copy_capacity.total(self.rates.get(key, NOTHING).times(n) for key, n in added.items())


class CauchyScaling(rule.Scaler):
    def __init__(
        self, policy: Policy, regions: tuple[Region, ...] = (), models: Mapping[str, ModelFacts] = NO_MODELS
    ) -> None:
        super().__init__()
        self._policy, self._regions, self._models = policy, regions, models
        self._last_s: dict[str, float] = {}
        self._resized_s: dict[str, float] = {}
        self._plan: Plan | None = None
        self._wanted: dict[Key, int] = {}
        self._quoted = False

    def quoted(self, regions: tuple[Region, ...]) -> None:
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
            rates = tuple((traffic.model, asked_per_s(traffic, False)) for traffic in observed.models)
            decisions.append(rule.AskReplan(rates, rule.QUOTED))
        stable = []
        for model in sorted({item.model for item in plan.templates}):
            traffic = observed.of(model)
            if traffic is None:
                self._notes.say(model, "no request seen yet")
                continue
            last_s = self._last_s.setdefault(model, at_s - traffic.span_s)
            window_s = self._policy.window_s
            left_s = window_s - (at_s - last_s)
            if left_s > 0 and at_s - self._resized_s.get(model, at_s) < ON * window_s:
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
            decisions.append(self._refine(at_s, stable, observed))
        return tuple(decisions)

    def _standing(self, model: str, traffic: ModelTraffic, fleet: FleetState, plan: Plan) -> _Standing:
        """Copies that stay: of what is wanted, those that are there; and all those that were never asked for."""
        buckets = copy_capacity.buckets_of(plan, model)
        shares = traffic.bucket_shares([bucket.longest_tokens for bucket in buckets])
        mix = {bucket.bucket: share for bucket, share in zip(buckets, shares, strict=True)}
        if not any(mix.values()):
            mix = {bucket.bucket: 1.0 for bucket in buckets}
        templates = {item.name: item for item in plan.repertoire if item.model == model}
        mine = [template_copy for template_copy in fleet.units.values() if template_copy.model == model]
        moving = sum(not template_copy.whole for template_copy in mine)
        stay = [
            template_copy
            for template_copy in mine
            if not any(replica.state == "draining" for replica in template_copy.views)
        ]
        there = Counter((template_copy.template, template_copy.region) for template_copy in stay)
        counts = {key: min(n, self._wanted.get(key, n)) for key, n in there.items()}
        keys = {*counts, *(key for key in self._wanted if key[0] in templates)}
        known = {key: copy_capacity.rates_of(templates[key[0]], mix) for key in keys if key[0] in templates}
        rates = {key: rates for key, rates in known.items() if rates.known}
        copy_rate = startable(plan, model, mix, self._regions, keys)
        able = {key: copy_rates for key, copy_rates in copy_rate.items() if copy_rates.known}
        planned = frozenset((deployment.template, deployment.region) for deployment in plan.deployments)
        busy = copy_capacity.busy_copies(plan, model, mix)
        return _Standing(plan, counts, rates, moving, able, busy, planned)

    def _resizes(
        self, traffic: ModelTraffic, standing: _Standing, fleet: FleetState, only_out: bool
    ) -> list[rule.ScaleDecision]:
        model, policy = traffic.model, self._policy
        unknown = sorted({key[0] for key, n in standing.counts.items() if n and key not in standing.rates})
        if unknown:
            self._notes.say(model, f"not scaled: the capacity of {', '.join(unknown)} is not known")
            return []
        if not standing.rates and not standing.startable:
            self._notes.say(model, "not scaled: none of its templates has a known capacity")
            return []
        serves = self._sure_per_s(model, standing, standing.counts) * policy.headroom
        spare = standing.serves(standing.counts).served_per_s * policy.headroom - serves
        queued = traffic.held + rule.queued_requests(fleet, model)
        late = max(0.0, queued - QUEUE_S * serves - sum(standing.counts.values()))
        if only_out:
            late = 0.0  # it was counted at the last change, and goes on until what was started then serves
        # At the rate the copies are made for, how far off would a quarter of a window be?
        noise = RECENT_NOISE * max(
            traffic.recent_error_per_s, sqrt(serves / max(traffic.recent_span_s, 1e-9))
        )
        demand = traffic.recent_rate_per_s + late / policy.window_s
        if traffic.recent_rate_per_s > traffic.rate_per_s and demand - serves > max(
            policy.ratio * serves, noise
        ):
            state = _state(traffic.recent_rate_per_s, queued, demand, serves)
            return self._out(model, demand + spare, standing, fleet, state)
        # And a whole one?
        noise = NOISE * max(traffic.error_per_s, sqrt(serves / traffic.span_s))
        demand = traffic.rate_per_s + late / policy.window_s
        state = _state(traffic.rate_per_s, queued, demand, serves)
        if demand - serves > max(policy.ratio * serves, noise):
            return self._out(model, demand + spare, standing, fleet, state)
        if only_out:
            return []
        if serves - demand > policy.ratio * serves:
            if standing.moving:
                self._notes.say(model, f"{state}; waits for {standing.moving} copies that start or leave")
                return []
            if late:
                self._notes.say(model, f"{state}; nothing goes while requests queue")
                return []
            return self._in(model, demand + noise, standing, state)
        self._notes.say(model, f"{state}, within {policy.ratio:.0%} or the noise of {noise:.3g}")
        return []

    def _sure_per_s(self, model: str, standing: _Standing, counts: Mapping[Key, int]) -> float:
        """What copies serve, or what is left of it after the worst loss that must be survived, over its share."""
        sure = standing.serves(counts).served_per_s
        facts = self._models.get(model)
        if facts is None or facts.survive is None:
            return sure
        for key, n in counts.items():
            if not n:
                continue
            if facts.survive == "node":
                left = {**counts, key: n - 1}
            else:
                left = {other: 0 if other[1] == key[1] else count for other, count in counts.items()}
            sure = min(sure, standing.serves(left).served_per_s / facts.survive_share)
        return sure

    def _out(
        self, model: str, demand: float, standing: _Standing, fleet: FleetState, state: str
    ) -> list[rule.ScaleDecision]:
        free = self._free(fleet, standing.plan)
        cover = self._cover if standing.busy is None else self._parts
        more, partly = cover(demand, standing, free)
        if not more:
            self._notes.say(model, f"{state}; more is needed but no nodes are free")
            return []
        short = ", all that nodes allow" if partly else ""
        self._notes.say(model, f"{state}; starts {_listed(more)}{short}")
        return self._resized(standing, more, f"{state}{short}")

    def _cover(
        self, demand: float, standing: _Standing, free: dict[Resource, int] | None
    ) -> tuple[dict[Key, int], bool]:
        """The best copies for what is missing of each phase; and whether nodes allow only some."""
        rates, more, partly = standing.serves(standing.counts), dict[Key, int](), False
        for phase in self._phases(standing):
            offers = options(standing.plan, standing.startable, self._regions, phase)
            missing = demand / self._policy.headroom - (
                rates.served_per_s if phase == "closed_per_s" else rates.closed_per_s + getattr(rates, phase)
            )
            if missing <= 0:
                continue
            numbers = cheapest_cover(offers, missing, free)
            if numbers is None:
                numbers, partly = largest_within(offers, free or {}), True
            for offer in offers:
                _take(free, offer, numbers.get(offer.key, 0))
            for key, n in numbers.items():
                more[key] = more.get(key, 0) + n
        return more, partly

    def _parts(
        self, demand: float, standing: _Standing, free: dict[Resource, int] | None
    ) -> tuple[dict[Key, int], bool]:
        """Where copies take different requests: more of each, or copies that take all, whichever is better."""
        assert standing.busy is not None
        rate_per_s = demand / self._policy.headroom
        offers = options(standing.plan, standing.startable, self._regions)
        weights = {offer.key: offer.weight for offer in offers}
        alone = standing.unplanned(standing.counts).served_per_s
        needs = {offer.key: offer.needs for offer in offers if offer.key in standing.planned}
        more, partly = copy_capacity.missing_copies(
            standing.busy, standing.counts, rate_per_s - alone, needs, free
        )
        whole = [offer for offer in offers if offer.key not in standing.planned]
        missing = rate_per_s - standing.serves(standing.counts).served_per_s
        other = cheapest_cover(whole, missing, free) if whole and missing > 0 else None
        if other and (partly or _weighs(other, weights) < _weighs(more, weights)):
            return other, False
        return more, partly

    def _phases(self, standing: _Standing) -> tuple[str, ...]:
        """Copies that serve alone are scaled as such; prefill and decode apart, each by its own deficit."""
        rates = standing.rates or standing.startable
        if any(rate.closed_per_s > 0 for rate in rates.values()):
            return ("closed_per_s",)
        return ("prefill_per_s", "decode_per_s")

    def _in(self, model: str, needed: float, standing: _Standing, state: str) -> list[rule.ScaleDecision]:
        """Take away the copy that fits the excess most closely, again and again; what is needed is never 0."""
        counts = dict(standing.counts)
        less: dict[Key, int] = {}
        while True:
            serves = self._sure_per_s(model, standing, counts)
            best: tuple[float, float, Key] | None = None
            for key in sorted(counts):
                if not counts[key] or key not in self._wanted:
                    continue
                after = self._sure_per_s(model, standing, {**counts, key: counts[key] - 1})
                if after * self._policy.headroom < needed:
                    continue
                rank = (serves - after, standing.rates[key].served_per_s, key)
                best = rank if best is None or rank[:2] > best[:2] else best
            if best is None:
                break
            counts[best[2]] -= 1
            less[best[2]] = less.get(best[2], 0) - 1
        if not less:
            self._notes.say(model, f"{state}; no copy is small enough to go")
            return []
        self._notes.say(model, f"{state}; stops {_listed({key: -n for key, n in less.items()})}")
        return self._resized(standing, less, state)

    def _resized(
        self, standing: _Standing, change: Mapping[Key, int], reason: str
    ) -> list[rule.ScaleDecision]:
        decisions: list[rule.ScaleDecision] = []
        for key, n in sorted(change.items()):
            self._wanted[key] = standing.counts.get(key, 0) + n
            decisions.append(rule.Resize(*key, self._wanted[key], reason))
        return decisions

    def _free(self, fleet: FleetState, plan: Plan) -> dict[Resource, int] | None:
        limits = rule.available_nodes(self._regions)
        if limits is None:
            return None
        used = rule.used_nodes(fleet.units, {template.name: template for template in plan.repertoire})
        return {key: n - used.get(key, 0) for key, n in limits.items()}

    def _refine(self, at_s: float, stable: list[str], observed: ObservedTraffic) -> rule.AskReplan:
        """The rate held for the global window: ask for the cheapest fleet at it (Algorithm 1, lines 22 to 27)."""
        for model in stable:
            self._last_s[model] = at_s
            self._notes.say(model, "steady for the global window; asks for a new plan")
        rates = tuple(
            (traffic.model, asked_per_s(traffic, traffic.model in stable)) for traffic in observed.models
        )
        return rule.AskReplan(rates, f"steady for {self._policy.global_window_s:.0f} s: {', '.join(stable)}")


def _state(rate_per_s: float, queued: int, demand: float, serves: float) -> str:
    return f"{rate_per_s:.3g} requests/s and {queued} queued need {demand:.3g}, served are {serves:.3g}"


def asked_per_s(traffic: ModelTraffic, steady: bool) -> float:
    """The rate to plan for: the long window's mean if it held, else the latest. Never nothing: a last copy stays."""
    rate = traffic.long_rate_per_s if steady else traffic.rate_per_s
    return max(rate, 1.0 / max(traffic.long_span_s, 1.0))


def _take(free: dict[Resource, int] | None, option: CopyOption, count: int) -> None:
    if free is not None:
        for node, need in option.needs.items():
            free[node] = free.get(node, 0) - need * count


def _weighs(counts: Mapping[Key, int], weights: Mapping[Key, float]) -> float:
    return sum(n * weights.get(key, 0.0) for key, n in counts.items())


def _listed(counts: Mapping[Key, int]) -> str:
    return ", ".join(f"{n} of {name}@{region}" for (name, region), n in sorted(counts.items()))


SEARCH_STEPS = 20_000
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CopyOption:
    key: Key
    serves_per_s: float
    weight: float  # What is to be small: its rent, or what else a strategy's program weighs (`repertoire`).
    needs: Mapping[Resource, int]


def cheapest_cover(
    options: Sequence[CopyOption], deficit_per_s: float, free: Mapping[Resource, int] | None
) -> dict[Key, int] | None:
    """How many of each; None when no cover within the free nodes was found. Without `free` they are plenty."""
    able = [option for option in options if option.serves_per_s > 0]
    able.sort(key=lambda o: (o.weight / o.serves_per_s, -o.serves_per_s, o.key))
    useful = undominated(able)
    search = _CoverSearch(useful, dict(free) if free is not None else None)
    search.branch(0, deficit_per_s, 0.0)
    if search.best is None:
        return None
    return {option.key: n for option, n in zip(useful, search.best, strict=True) if n}


def undominated(options: Sequence[CopyOption]) -> list[CopyOption]:
    """Without those beside which another one serves as much, weighs no more and needs no more nodes."""
    kept: list[CopyOption] = []
    for option in options:
        better = [o for o in kept if o.serves_per_s >= option.serves_per_s and o.weight <= option.weight]
        if not any(all(n <= option.needs.get(node, 0) for node, n in o.needs.items()) for o in better):
            kept.append(option)
    return kept


def largest_within(options: Sequence[CopyOption], free: Mapping[Resource, int]) -> dict[Key, int]:
    """As much capacity as the free nodes hold, taken greedily in order of cost per capacity."""
    left, largest = dict(free), {}
    able = [option for option in options if option.serves_per_s > 0]
    for option in sorted(able, key=lambda o: (o.weight / o.serves_per_s, -o.serves_per_s, o.key)):
        count = _most(option, left)
        if count:
            largest[option.key] = count
            _take(left, option, count)
    return largest


def _most(option: CopyOption, free: Mapping[Resource, int] | None) -> int:
    if free is None:
        return 10**6
    return max(0, min((free.get(node, 0) // need for node, need in option.needs.items()), default=10**6))


class _CoverSearch:
    def __init__(self, options: Sequence[CopyOption], free: dict[Resource, int] | None) -> None:
        self.options, self.free = options, free
        self.best: list[int] | None = None
        self.cost = inf
        self.counts = [0] * len(options)
        self.steps = 0

    def branch(self, place: int, left_per_s: float, cost: float) -> None:
        self.steps += 1
        if left_per_s <= ROUNDING:
            if cost < self.cost - ROUNDING:
                self.best, self.cost = list(self.counts), cost
            return
        if place == len(self.options):
            return
        option = self.options[place]
        least = cost + left_per_s * option.weight / option.serves_per_s
        if least >= self.cost - ROUNDING or self.steps > SEARCH_STEPS:
            return
        enough = ceil(left_per_s / option.serves_per_s - ROUNDING)
        for count in range(min(enough, _most(option, self.free)), -1, -1):
            _take(self.free, option, count)
            self.counts[place] = count
            spent = cost + count * option.weight
            self.branch(place + 1, left_per_s - count * option.serves_per_s, spent)
            _take(self.free, option, -count)
            if self.steps > SEARCH_STEPS:
                break
        self.counts[place] = 0


def weight(strategy: str, template: Template, price_usd_per_h: float, serves_per_s: float) -> float:
    """What the strategy's program would have one copy cost; USD an hour but for those that weigh by efficiency."""
    if strategy not in ("cauchy", "cauchy-ce", "cauchy-mce"):
        return price_usd_per_h
    efficiency = template.ce_tokens_per_usd if strategy == "cauchy-ce" else 0.0
    if efficiency <= 0 and price_usd_per_h > 0:
        efficiency = 3600.0 * serves_per_s / price_usd_per_h
    if efficiency <= 0:
        return price_usd_per_h if price_usd_per_h > 0 or serves_per_s > 0 else inf
    return 1.0 / efficiency if strategy == "cauchy-mce" else price_usd_per_h / efficiency


def startable(
    plan: Plan, model: str, mix: Mapping[int, float], regions: tuple[Region, ...], wanted: Iterable[Key]
) -> dict[Key, CopyRates]:
    """What one copy would serve of all that could be started; one phase alone only where the plan has the other."""
    templates = {item.name: item for item in plan.repertoire if item.model == model and not item.machines}
    if not plan.candidates or not regions:
        keys = [key for key in wanted if key[0] in templates]
        return {key: copy_capacity.rates_of(templates[key[0]], mix) for key in sorted(keys)}
    sources = {flow.prefill_region for flow in plan.flows if flow.model == model}
    targets = {flow.decode_region for flow in plan.flows if flow.model == model}
    copy_rate = {}
    used = {item.name for item in plan.templates}
    for name, template in sorted(templates.items()):
        if name not in used and not _serves_all(template, mix):
            continue
        rates = copy_capacity.rates_of(template, mix)
        for region in regions:
            alone = rates.closed_per_s > 0
            prefills, decodes = rates.prefill_per_s > 0, rates.decode_per_s > 0
            joins = (prefills and region.name in sources) or (decodes and region.name in targets)
            if (alone or joins) and rule.unit_price_usd_per_h(template, region.name, regions) is not None:
                copy_rate[name, region.name] = rates
    return copy_rate


def _serves_all(template: Template, mix: Mapping[int, float]) -> bool:
    able = {c.bucket for c in template.capacity if c.closed_per_s > 0}
    able = able or {c.bucket for c in template.capacity if c.prefill_per_s > 0 or c.decode_per_s > 0}
    return all(bucket in able for bucket, share in mix.items() if share > 0)


def options(
    plan: Plan, known: Mapping[Key, CopyRates], regions: tuple[Region, ...], phase: str = "closed_per_s"
) -> list[CopyOption]:
    """One more copy of each, weighed by the strategy; without prices by its nodes."""
    templates = {item.name: item for item in plan.repertoire}
    strategy = plan.strategy
    if strategy == "cauchy-ce" and any(templates[name].ce_tokens_per_usd <= 0 for name, _ in known):
        strategy = "cauchy-mc"  # as the planner's fallback: the least cost, where not all are ranked
    copy_options = []
    for key, rates in sorted(known.items()):
        template = templates[key[0]]
        serves = getattr(rates, phase)
        price = (
            rule.unit_price_usd_per_h(template, key[1], regions)
            if rule.available_nodes(regions) is not None
            else float(sum(node.count for node in template.nodes))
        )
        if price is None or template.machines:
            continue  # it cannot be had there; or stands on machines with names, which cannot be had twice
        worth = weight(strategy, template, price, serves)
        if worth < inf:
            copy_options.append(CopyOption(key, serves, worth, needs_of(template, key[1])))
    return copy_options


def needs_of(template: Template, region: str) -> dict[Resource, int]:
    return {(region, node_count.node): node_count.count for node_count in template.nodes}

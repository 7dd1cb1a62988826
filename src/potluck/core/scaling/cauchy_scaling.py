"""CAUCHY's autoscaling (its 3.5, Algorithm 1): add or remove whole copies when the rate leaves what they serve.

With Q the window's mean rate and C what the copies serve under the lengths now seen (times the headroom):

    wait until the local window has passed since the last change
    Q - C >  ratio C      start the best copies that cover Q - C, of all that the strategy has on offer (`repertoire`)
    C - Q >  ratio C      take away copies, the largest first, as long as the rest still serves Q
    else, when the global window has passed: ask for a new plan at its mean rate; reconciling starts before it stops

Beyond the paper, each for a failure seen in other scalers:
- A jump is not a window old: more is also started where the last quarter of the window alone asks for it, beyond its
  own, larger noise, and a quarter of a window after other starts. A window that must fill first would start a part of
  what is needed, and wait for the next one with the rest.
- Requests that queue are demand too: Q includes what is needed to work off within one window whatever waits beyond
  `QUEUE_S` of work and one request a copy; while it does, nothing is taken away.
- Noise is not a change: the difference must also exceed NOISE standard deviations of the rate, so that at a steady
  rate the fleet stays still; and copies go only if the rest serves Q plus as much again.
- The objective plays no part: a TTFT that no fleet could keep neither adds copies for ever nor keeps idle ones.
- C counts the copies that are there and wanted, not what a plan once said; while copies start or leave nothing is
  taken away, and more is added only if those on their way will not do.
- A template whose capacity is not known is never scaled, and `why` says so. The last copy of a model stays.
- If nodes suffice for a part of the deficit only, that part is started.
- Copies on standby that are ready come first, whatever they cost: they are paid already, and there at once.
- Where a model must survive the loss of a node, C is what is left of its copies after the worst loss, over the share
  that is to be served then, where that is less: a spare copy is not taken away, and one is started where it is
  missing (zones count as regions: where in one a node comes up is not known).
- Where the plan sends some lengths here and others there, each deployment is scaled by its own part (`parts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from potluck.core.scaling.cheapest_cover import CopyOption, cheapest_cover, largest_within
from potluck.core.scaling.copy_capacity import Key, Resource
from potluck.core.scaling.copy_rates import NOTHING, CopyRates, buckets_of, rates_of, total
from potluck.core.scaling.partial_service import busy_copies, missing_copies, served_by
from potluck.core.scaling.rule import (
    QUOTED,
    AskReplan,
    Resize,
    RuleNotes,
    ScaleDecision,
    available_nodes,
    queued_requests,
    used_nodes,
)
from potluck.core.scaling.standby import ready_copies, taken_by_parts, taken_first
from potluck.core.scaling.startable import options, startable
from potluck.core.scaling.traffic_window import ModelTraffic, ObservedTraffic
from potluck.core.state.facts import ModelFacts
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region

NOISE = 3.0
"""Standard deviations: at a steady rate one window in about 700 is as far off."""
RECENT_NOISE = 3.5
"""The same for a quarter of a window, of which there are more."""
ON = 0.25
"""Share of a window after which more may be started after other starts."""
QUEUE_S = 5.0
NO_MODELS: Final[Mapping[str, ModelFacts]] = {}


@dataclass(frozen=True, slots=True)
class _Standing:
    """One model's copies and what they serve."""

    counts: dict[Key, int]
    rates: dict[Key, CopyRates]
    """What one copy serves; keys without are not known."""
    moving: int
    """Copies that start or leave."""
    startable: dict[Key, CopyRates]
    """What one copy would serve of all that could be started."""
    busy: dict[Key, float] | None = None
    """Where copies take different requests: how many of each one request a second keeps busy (`parts`)."""
    planned: frozenset[Key] = frozenset()
    """What the plan deploys."""

    def serves(self, counts: Mapping[Key, int]) -> CopyRates:
        if self.busy is None:
            return total(self.rates.get(key, NOTHING).times(n) for key, n in counts.items())
        added = {key: n for key, n in counts.items() if key not in self.planned}
        return served_by(self.busy, counts).plus(
            total(self.rates.get(key, NOTHING).times(n) for key, n in added.items())
        )


class CauchyScaling:
    """Algorithm 1, model by model. State: when each model last changed, and the counts asked for."""

    def __init__(
        self, policy: Policy, regions: tuple[Region, ...] = (), models: Mapping[str, ModelFacts] = NO_MODELS
    ) -> None:
        self._policy, self._regions, self._models = policy, regions, models
        self._last_s: dict[str, float] = {}
        self._resized_s: dict[str, float] = {}
        self._plan: Plan | None = None
        self._wanted: dict[Key, int] = {}
        self._quoted = False
        """Prices or nodes changed, which calls for a refinement."""
        self._notes = RuleNotes()

    def why(self) -> str:
        return self._notes.text()

    def quoted(self, regions: tuple[Region, ...]) -> None:
        self._regions, self._quoted = regions, True

    def on_tick(
        self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> tuple[ScaleDecision, ...]:
        if plan is not self._plan:
            self._plan = plan
            self._wanted = {(d.template, d.region): d.count for d in plan.deployments}
        decisions: list[ScaleDecision] = []
        if self._quoted and observed.models:
            self._quoted = False
            rates = tuple((seen.model, asked_per_s(seen, False)) for seen in observed.models)
            decisions.append(AskReplan(rates, QUOTED))
        stable = []
        for model in sorted({each.model for each in plan.templates}):
            seen = observed.of(model)
            if seen is None:
                self._notes.say(model, "no request seen yet")
                continue
            last_s = self._last_s.setdefault(model, at_s - seen.span_s)
            window_s = self._policy.window_s
            left_s = window_s - (at_s - last_s)
            if left_s > 0 and at_s - self._resized_s.get(model, at_s) < ON * window_s:
                self._notes.wait(model, f"looks again in {left_s:.0f} s, a window after the last change")
                continue
            standing = self._standing(model, seen, fleet, plan)
            resizes = self._resizes(seen, standing, fleet, plan, only_out=left_s > 0)
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

    def _standing(self, model: str, seen: ModelTraffic, fleet: FleetState, plan: Plan) -> _Standing:
        """Copies that stay: of what is wanted, those that are there; and all those that were never asked for."""
        buckets = buckets_of(plan, model)
        shares = seen.bucket_shares([bucket.longest_tokens for bucket in buckets])
        mix = {bucket.bucket: share for bucket, share in zip(buckets, shares, strict=True)}
        if not any(mix.values()):
            mix = {bucket.bucket: 1.0 for bucket in buckets}
        templates = {each.name: each for each in plan.repertoire if each.model == model}
        there: dict[Key, int] = {}
        moving = 0
        for unit in fleet.units.values():
            if unit.model != model or unit.standby:
                continue
            moving += not unit.whole
            if not any(view.state == "draining" for view in unit.views):
                key = (unit.template, unit.region)
                there[key] = there.get(key, 0) + 1
        counts = {key: min(n, self._wanted.get(key, n)) for key, n in there.items()}
        keys = {*counts, *(key for key in self._wanted if key[0] in templates)}
        known = {key: rates_of(templates[key[0]], mix) for key in keys if key[0] in templates}
        rates = {key: rates for key, rates in known.items() if rates.known}
        found = startable(plan, model, mix, self._regions, keys)
        able = {key: each for key, each in found.items() if each.known}
        planned = frozenset((each.template, each.region) for each in plan.deployments)
        return _Standing(counts, rates, moving, able, busy_copies(plan, model, mix), planned)

    def _resizes(
        self, seen: ModelTraffic, standing: _Standing, fleet: FleetState, plan: Plan, only_out: bool
    ) -> list[ScaleDecision]:
        model, policy = seen.model, self._policy
        unknown = sorted({key[0] for key, n in standing.counts.items() if n and key not in standing.rates})
        if unknown:
            self._notes.say(model, f"not scaled: the capacity of {', '.join(unknown)} is not known")
            return []
        if not standing.rates and not standing.startable:
            self._notes.say(model, "not scaled: none of its templates has a known capacity")
            return []
        serves = self._sure_per_s(model, standing, standing.counts) * policy.headroom
        spare = standing.serves(standing.counts).served_per_s * policy.headroom - serves
        queued = seen.held + queued_requests(fleet, model)
        late = max(0.0, queued - QUEUE_S * serves - sum(standing.counts.values()))
        if only_out:
            late = 0.0  # it was counted at the last change, and goes on until what was started then serves
        # At the rate the copies are made for, how far off would a quarter of a window be?
        noise = RECENT_NOISE * max(seen.recent_error_per_s, sqrt(serves / max(seen.recent_span_s, 1e-9)))
        demand = seen.recent_rate_per_s + late / policy.window_s
        if seen.recent_rate_per_s > seen.rate_per_s and demand - serves > max(policy.ratio * serves, noise):
            state = _state(seen.recent_rate_per_s, queued, demand, serves)
            return self._out(model, demand + spare, standing, fleet, plan, state)
        # And a whole one?
        noise = NOISE * max(seen.error_per_s, sqrt(serves / seen.span_s))
        demand = seen.rate_per_s + late / policy.window_s
        state = _state(seen.rate_per_s, queued, demand, serves)
        if demand - serves > max(policy.ratio * serves, noise):
            return self._out(model, demand + spare, standing, fleet, plan, state)
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
        self, model: str, demand: float, standing: _Standing, fleet: FleetState, plan: Plan, state: str
    ) -> list[ScaleDecision]:
        free, ready = self._free(fleet, plan), ready_copies(fleet, model)
        if standing.busy is not None:
            more, partly = self._parts(demand, standing, plan, free, ready)
        else:
            more, partly = self._cover(demand, standing, plan, free, ready)
        if not more:
            self._notes.say(model, f"{state}; more is needed but no nodes are free")
            return []
        short = ", all that nodes allow" if partly else ""
        self._notes.say(model, f"{state}; starts {_listed(more)}{short}")
        return self._resized(standing, more, f"{state}{short}")

    def _cover(
        self,
        demand: float,
        standing: _Standing,
        plan: Plan,
        free: dict[Resource, int] | None,
        ready: dict[Key, int],
    ) -> tuple[dict[Key, int], bool]:
        """The best copies for what is missing of each phase; and whether nodes allow only some."""
        rates, more, partly = standing.serves(standing.counts), dict[Key, int](), False
        for phase in self._phases(standing):
            offers = options(plan, standing.startable, self._regions, phase)
            missing = demand / self._policy.headroom - (
                rates.served_per_s if phase == "closed_per_s" else rates.closed_per_s + getattr(rates, phase)
            )
            for key, n in taken_first(ready, standing.rates, phase, missing).items():
                more[key] = more.get(key, 0) + n
                missing -= n * getattr(standing.rates[key], phase)
            if missing <= 0:
                continue
            found = cheapest_cover(offers, missing, free)
            if found is None:
                found, partly = largest_within(offers, free or {}), True
            _take(free, offers, found)
            for key, n in found.items():
                more[key] = more.get(key, 0) + n
        return more, partly

    def _parts(
        self,
        demand: float,
        standing: _Standing,
        plan: Plan,
        free: dict[Resource, int] | None,
        ready: Mapping[Key, int],
    ) -> tuple[dict[Key, int], bool]:
        """Where copies take different requests: more of each, or copies that take all of them, whichever is better.

        Where there are nodes for neither, more of each as far as they go.
        """
        assert standing.busy is not None
        rate_per_s = demand / self._policy.headroom
        offers = options(plan, standing.startable, self._regions)
        weights = {each.key: each.weight for each in offers}
        added = {key: n for key, n in standing.counts.items() if key not in standing.planned}
        alone = total(standing.rates.get(key, NOTHING).times(n) for key, n in added.items()).served_per_s
        needs = {each.key: each.needs for each in offers if each.key in standing.planned}
        first = taken_by_parts(ready, standing.busy, standing.counts, rate_per_s - alone)
        counts = _sum(standing.counts, first)
        more, partly = missing_copies(standing.busy, counts, rate_per_s - alone, needs, free)
        whole = [each for each in offers if each.key not in standing.planned]
        missing = rate_per_s - standing.serves(counts).served_per_s
        other = cheapest_cover(whole, missing, free) if whole and missing > 0 else None
        if other and (partly or _weighs(other, weights) < _weighs(more, weights)):
            return _sum(first, other), False
        return _sum(first, more), partly

    def _phases(self, standing: _Standing) -> tuple[str, ...]:
        """Copies that serve alone are scaled as such; prefill and decode apart, each by its own deficit."""
        rates = standing.rates or standing.startable
        if any(each.closed_per_s > 0 for each in rates.values()):
            return ("closed_per_s",)
        return ("prefill_per_s", "decode_per_s")

    def _in(self, model: str, needed: float, standing: _Standing, state: str) -> list[ScaleDecision]:
        """Take away the copy that fits the excess most closely, again and again.

        What is needed includes noise and so is never nothing: the last copy stays.
        """
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

    def _resized(self, standing: _Standing, change: Mapping[Key, int], reason: str) -> list[ScaleDecision]:
        decisions: list[ScaleDecision] = []
        for key, n in sorted(change.items()):
            self._wanted[key] = standing.counts.get(key, 0) + n
            decisions.append(Resize(*key, self._wanted[key], reason))
        return decisions

    def _free(self, fleet: FleetState, plan: Plan) -> dict[Resource, int] | None:
        """The nodes that nobody holds; None where that is not known."""
        limits = available_nodes(self._regions)
        if limits is None:
            return None
        used = used_nodes(fleet.units, {each.name: each for each in plan.repertoire})
        return {key: n - used.get(key, 0) for key, n in limits.items()}

    def _refine(self, at_s: float, stable: list[str], observed: ObservedTraffic) -> AskReplan:
        """The rate held for the global window: ask for the cheapest fleet at it (Algorithm 1, lines 22 to 27)."""
        for model in stable:
            self._last_s[model] = at_s
            self._notes.say(model, "steady for the global window; asks for a new plan")
        rates = tuple((seen.model, asked_per_s(seen, seen.model in stable)) for seen in observed.models)
        return AskReplan(rates, f"steady for {self._policy.global_window_s:.0f} s: {', '.join(stable)}")


def _state(rate_per_s: float, queued: int, demand: float, serves: float) -> str:
    return f"{rate_per_s:.3g} requests/s and {queued} queued need {demand:.3g}, served are {serves:.3g}"


def asked_per_s(seen: ModelTraffic, steady: bool) -> float:
    """The rate to plan for: the long window's mean if it held, else the latest.

    Never nothing: the model's last copy would go.
    """
    rate = seen.long_rate_per_s if steady else seen.rate_per_s
    return max(rate, 1.0 / max(seen.long_span_s, 1.0))


def _take(free: dict[Resource, int] | None, offers: Sequence[CopyOption], counts: Mapping[Key, int]) -> None:
    for offer in offers if free is not None else ():
        for node, need in offer.needs.items():
            assert free is not None
            free[node] = free.get(node, 0) - need * counts.get(offer.key, 0)


def _sum(counts: Mapping[Key, int], more: Mapping[Key, int]) -> dict[Key, int]:
    return {key: counts.get(key, 0) + more.get(key, 0) for key in {**counts, **more}}


def _weighs(counts: Mapping[Key, int], weights: Mapping[Key, float]) -> float:
    whole = 0.0
    for key, n in counts.items():
        whole += n * weights.get(key, 0.0)
    return whole


def _listed(counts: Mapping[Key, int]) -> str:
    return ", ".join(f"{n} of {name}@{region}" for (name, region), n in sorted(counts.items()))

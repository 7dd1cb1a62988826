"""PrfaaS's two timescales (its 3.4): how long a prompt must be to be prefilled elsewhere, and how many decode here.

With L the uncached prompt length, t the threshold, p = P(L > t), l_long and l_short the means above and below t, and
sums over the replicas there are instead of counts of equal ones (equations 3 to 6):

    Θ_prfaas = min(sum 1 / T_prefill(l_long), B_out / S_kv(l_long))       remote replicas; the links' present rate
    Θ_pd-p   = sum 1 / T_prefill(l_short)                                 local replicas that prefill
    Θ_pd-d   = sum BS / (T_decode L_out)                                  local replicas that decode
    Λ_max    = min(Θ_prfaas / p, Θ_pd-p / (1 - p), Θ_pd-d)

Every window the t with the largest Λ_max; every global window also how many local replicas prefill, by role flips,
never the last of a role. Both by trying all (equations 7 and 8 hold at the best), only for a gain beyond the noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from potluck.core.routing.group_sharing import MeanLengths
from potluck.core.scaling.roles import Flippable, flippable
from potluck.core.scaling.rule import Decisions, FlipRole, ScaleDecision, Scaler, SetThreshold
from potluck.core.scaling.traffic_window import LengthCount, ModelTraffic, ObservedTraffic
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.fleet import FleetState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Codec, Role

NEVER_TOKENS = 10**9  # A threshold above all prompts: everything stays local.
MAX_FLIPS = 4
LEAST_GAIN_SHORT = 0.05
LEAST_GAIN_LONG = 0.1
NOISE = 3.0
LEAST_SEEN = 50


@dataclass(frozen=True, slots=True)
class ClusterBalance:
    remote: Mapping[ReplicaFacts, int]
    local: tuple[Flippable, ...]
    egress_bytes_per_s: float
    model: ModelFacts
    codec: Codec = "fp16"


def split_lengths(lengths: Sequence[LengthCount], threshold_tokens: int) -> tuple[float, float, float]:
    away = [length for length in lengths if length.low_tokens > threshold_tokens]
    stay = [length for length in lengths if length.low_tokens <= threshold_tokens]
    n_away, n_stay = sum(length.count for length in away), sum(length.count for length in stay)
    p = n_away / max(n_away + n_stay, 1)
    long = sum(length_count.tokens for length_count in away) / n_away if n_away else 0.0
    short = sum(length_count.tokens for length_count in stay) / n_stay if n_stay else 0.0
    return p, long, short


def rate_per_s(
    cluster_balance: ClusterBalance,
    lengths: Sequence[LengthCount],
    threshold_tokens: int,
    decoders: Sequence[bool],
) -> float:
    """Λ_max at a threshold, with those local replicas decoding that are marked so; equations 3 to 6."""
    return _rate_per_s(cluster_balance, lengths, threshold_tokens, *_parts(cluster_balance, decoders))


def best_threshold(
    cluster_balance: ClusterBalance, lengths: Sequence[LengthCount], decoders: Sequence[bool]
) -> tuple[float, int]:
    """(Λ_max, t): the largest rate, and of equal ones the longest threshold, which spares the link."""
    parts = _parts(cluster_balance, decoders)
    tries = [0, *(length.high_tokens - 1 for length in lengths[:-1])] if cluster_balance.remote else []
    return max((_rate_per_s(cluster_balance, lengths, t, *parts), t) for t in [*tries, NEVER_TOKENS])


def best_split(
    cluster_balance: ClusterBalance, lengths: Sequence[LengthCount], most: int = MAX_FLIPS
) -> tuple[float, int, list[tuple[str, Role]]]:
    """(Λ_max, t, flips): the best number of local prefill replicas within so many flips, and its threshold."""
    now = [item.role == "decode" for item in cluster_balance.local]
    prefills_now = len(now) - sum(now)
    best_rate, best_t = best_threshold(cluster_balance, lengths, now)
    best_flips: list[tuple[str, Role]] = []
    for prefills in range(max(1, prefills_now - most), min(len(now), prefills_now + most + 1)):
        wanted = [place >= prefills for place in range(len(now))]
        flips: list[tuple[str, Role]] = [
            (item.replica, "decode" if decodes else "prefill")
            for item, was, decodes in zip(cluster_balance.local, now, wanted, strict=True)
            if was != decodes
        ]
        if len(flips) <= most and _keeps_roles(cluster_balance, wanted):
            rate, threshold = best_threshold(cluster_balance, lengths, wanted)
            if rate > best_rate:
                best_rate, best_t, best_flips = rate, threshold, flips
    return best_rate, best_t, best_flips


def _parts(cluster_balance: ClusterBalance, decoders: Sequence[bool]) -> tuple[Counter[ReplicaFacts], float]:
    both = list(zip(cluster_balance.local, decoders, strict=True))
    prefill = Counter(item.facts for item, decodes in both if not decodes)
    return prefill, sum(item.decode_per_s for item, decodes in both if decodes)


def _rate_per_s(
    cluster_balance: ClusterBalance,
    lengths: Sequence[LengthCount],
    t: int,
    prefill: Counter[ReplicaFacts],
    decode: float,
) -> float:
    p, long, short = split_lengths(lengths, t)
    remote = local = inf
    if p > 0:
        compute = sum(n / replica_facts.prompt_s(long) for replica_facts, n in cluster_balance.remote.items())
        cargo = cluster_balance.model.wire_bytes(long, cluster_balance.codec)
        remote = min(compute, cluster_balance.egress_bytes_per_s / cargo if cargo > 0 else inf) / p
    if p < 1:
        local = sum(n / replica_facts.prompt_s(short) for replica_facts, n in prefill.items()) / (1 - p)
    return min(remote, local, decode)


def _keeps_roles(cluster_balance: ClusterBalance, decoders: Sequence[bool]) -> bool:
    """Regions that prefill and decode now do so afterwards."""
    before = {(item.region, item.role == "decode") for item in cluster_balance.local}
    after = {(item.region, decodes) for item, decodes in zip(cluster_balance.local, decoders, strict=True)}
    return before <= after


class PrfaasScaling(Scaler):
    """State: per model, the threshold in force and when each timescale was last looked at."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        super().__init__()
        self._policy, self._facts = policy, facts
        self._plan: Plan | None = None
        self._thresholds: dict[str, int] = {}
        self._short_s: dict[str, float] = {}
        self._long_s: dict[str, float] = {}

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Decisions:
        if plan is not self._plan:
            self._plan = plan
            stated = sorted(plan.thresholds, key=lambda each: -each.tokens)  # of several links' the lowest
            self._thresholds = {each.model: round(each.tokens) for each in stated}
            self._short_s.clear()
            self._long_s.clear()
        decisions: list[ScaleDecision] = []
        for model in sorted({template.model for template in plan.templates}):
            short_s = self._short_s.setdefault(model, at_s)
            long_s = self._long_s.setdefault(model, at_s)
            if at_s - short_s < self._policy.window_s:
                left_s = self._policy.window_s - (at_s - short_s)
                self._notes.wait(model, f"looks again in {left_s:.0f} s")
                continue
            traffic = observed.of(model)
            if traffic is None or traffic.arrivals < LEAST_SEEN or not traffic.mean_output_tokens:
                self._notes.say(model, f"fewer than {LEAST_SEEN} requests in the window, or none ended")
                continue
            cluster_balance = self._site(traffic, observed, fleet, plan)
            if cluster_balance is None:
                continue
            self._short_s[model] = at_s
            if at_s - long_s >= self._policy.global_window_s:
                self._long_s[model] = at_s
                decisions += self._long(traffic, cluster_balance)
            else:
                decisions += self._short(traffic, cluster_balance)
        return tuple(decisions)

    def _short(self, traffic: ModelTraffic, cluster_balance: ClusterBalance) -> list[ScaleDecision]:
        now = [item.role == "decode" for item in cluster_balance.local]
        rate, threshold = best_threshold(cluster_balance, traffic.lengths, now)
        old = self._thresholds.get(traffic.model)
        if old is not None:
            before = rate_per_s(cluster_balance, traffic.lengths, old, now)
            need = _least(LEAST_GAIN_SHORT, traffic)
            if rate < before * (1 + need) or threshold == old:
                self._notes.say(traffic.model, f"keeps {old} tokens: another gains less than {need:.0%}")
                return []
        return [self._set(traffic.model, threshold, f"sustains {rate:.3g} requests/s")]

    def _long(self, traffic: ModelTraffic, cluster_balance: ClusterBalance) -> list[ScaleDecision]:
        now = [item.role == "decode" for item in cluster_balance.local]
        before, _ = best_threshold(cluster_balance, traffic.lengths, now)
        rate, threshold, flips = best_split(cluster_balance, traffic.lengths)
        if not flips or rate < before * (1 + _least(LEAST_GAIN_LONG, traffic)):
            return self._short(traffic, cluster_balance)
        reason = f"sustains {rate:.3g} instead of {before:.3g} requests/s"
        set_ = self._set(traffic.model, threshold, reason)
        self._notes.say(traffic.model, f"flips {', '.join(name for name, _ in flips)}; {reason}")
        return [*(FlipRole(name, role, reason) for name, role in flips), set_]

    def _set(self, model: str, threshold: int, reason: str) -> SetThreshold:
        self._thresholds[model] = threshold
        self._notes.say(model, f"threshold {threshold} tokens {reason}")
        return SetThreshold(model, threshold, reason)

    def _site(
        self, traffic: ModelTraffic, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> ClusterBalance | None:
        model = traffic.model
        lengths = MeanLengths(traffic.mean_prompt_tokens, traffic.mean_output_tokens)
        replicas, untimed = flippable(fleet, self._facts, model, lengths)
        cargo = self._facts.models.get(model)
        if untimed or cargo is None:
            self._notes.say(model, f"no balance: no times are known of {', '.join(untimed) or 'its KV'}")
            return None
        here = {replica.region for replica in replicas if replica.role == "decode"}
        local = [replica for replica in replicas if replica.region in here]
        if not any(item.role == "prefill" for item in local) or not here:
            self._notes.say(model, "no balance: no region both prefills and decodes")
            return None
        local.sort(key=lambda each: (-each.prefill_per_s / each.decode_per_s, each.role == "decode"))
        remote = [replica for replica in replicas if replica.region not in here]
        away = {item.region for item in remote}
        gbps = dict(self._facts.links_gbps)
        gbps.update({(link.source, link.target): link.gbps for link in observed.links})
        egress = sum(rate for (source, target), rate in gbps.items() if source in away and target in here)
        crossing = [f.codec for f in plan.flows if f.model == model and f.prefill_region != f.decode_region]
        codec = crossing[0] if crossing else "fp16"
        return ClusterBalance(
            Counter(item.facts for item in remote), tuple(local), egress * 1e9 / 8, cargo, codec
        )


def _least(gain: float, traffic: ModelTraffic) -> float:
    """A gain that the sample's own noise cannot feign."""
    return max(gain, NOISE * traffic.prompt_error_tokens / max(traffic.mean_prompt_tokens, 1.0))

"""PrfaaS's two timescales (its 3.4): the length threshold for remote prefill, and the split of local replicas.

With L the uncached prompt length, t the threshold, p = P(L > t), l_long and l_short the means above and below t, and
sums over the actual replicas instead of counts of equal ones (equations 3 to 6):

    Θ_prfaas = min(sum 1 / T_prefill(l_long), B_out / S_kv(l_long))       remote replicas; the links' present rate
    Θ_pd-p   = sum 1 / T_prefill(l_short)                                 local replicas that prefill
    Θ_pd-d   = sum BS / (T_decode L_out)                                  local replicas that decode
    Λ_max    = min(Θ_prfaas / p, Θ_pd-p / (1 - p), Θ_pd-d)

Every window the t with the largest Λ_max is chosen; every global window also the number of local prefill replicas, by
role flips, never of the last replica of a role. Both try all values (equations 7 and 8 hold at the best), and change
something only for a gain beyond the noise."""

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

NEVER_TOKENS = 10**9  # A threshold above all prompts: everything is prefilled locally.
MAX_FLIPS = 4
MIN_THRESHOLD_GAIN = 0.05
MIN_FLIP_GAIN = 0.1
NOISE_DEVIATIONS = 3.0
MIN_ARRIVALS = 50


@dataclass(frozen=True, slots=True)
class ClusterBalance:
    remote: Mapping[ReplicaFacts, int]
    local: tuple[Flippable, ...]
    egress_bytes_per_s: float
    model: ModelFacts
    codec: Codec = "fp16"


def split_lengths(lengths: Sequence[LengthCount], threshold_tokens: int) -> tuple[float, float, float]:
    remote_lengths = [length for length in lengths if length.low_tokens > threshold_tokens]
    local_lengths = [length for length in lengths if length.low_tokens <= threshold_tokens]
    remote_count, local_count = (
        sum(length.count for length in remote_lengths),
        sum(length.count for length in local_lengths),
    )
    remote_share = remote_count / max(remote_count + local_count, 1)
    mean_remote = (
        sum(length_count.tokens for length_count in remote_lengths) / remote_count if remote_count else 0.0
    )
    mean_local = (
        sum(length_count.tokens for length_count in local_lengths) / local_count if local_count else 0.0
    )
    return remote_share, mean_remote, mean_local


def rate_per_s(
    cluster_balance: ClusterBalance,
    lengths: Sequence[LengthCount],
    threshold_tokens: int,
    decoders: Sequence[bool],
) -> float:
    """Λ_max at a threshold; `decoders` marks the local replicas that decode (equations 3 to 6)."""
    return _rate_per_s(
        cluster_balance, lengths, threshold_tokens, *_local_capacity(cluster_balance, decoders)
    )


def best_threshold(
    cluster_balance: ClusterBalance, lengths: Sequence[LengthCount], decoders: Sequence[bool]
) -> tuple[float, int]:
    """(Λ_max, t): the largest rate; of equal ones the highest threshold, which sends least over the link."""
    local_capacity = _local_capacity(cluster_balance, decoders)
    thresholds = [0, *(length.high_tokens - 1 for length in lengths[:-1])] if cluster_balance.remote else []
    return max(
        (_rate_per_s(cluster_balance, lengths, threshold, *local_capacity), threshold)
        for threshold in [*thresholds, NEVER_TOKENS]
    )


def best_split(
    cluster_balance: ClusterBalance, lengths: Sequence[LengthCount], most: int = MAX_FLIPS
) -> tuple[float, int, list[tuple[str, Role]]]:
    """(Λ_max, t, flips): the best number of local prefill replicas within `most` flips, and its threshold."""
    decoders_now = [item.role == "decode" for item in cluster_balance.local]
    prefill_count_now = len(decoders_now) - sum(decoders_now)
    best_rate, best_t = best_threshold(cluster_balance, lengths, decoders_now)
    best_flips: list[tuple[str, Role]] = []
    for prefill_count in range(
        max(1, prefill_count_now - most), min(len(decoders_now), prefill_count_now + most + 1)
    ):
        decoders = [index >= prefill_count for index in range(len(decoders_now))]
        flips: list[tuple[str, Role]] = [
            (item.replica, "decode" if decodes else "prefill")
            for item, decoded, decodes in zip(cluster_balance.local, decoders_now, decoders, strict=True)
            if decoded != decodes
        ]
        if len(flips) <= most and _keeps_roles(cluster_balance, decoders):
            rate, threshold = best_threshold(cluster_balance, lengths, decoders)
            if rate > best_rate:
                best_rate, best_t, best_flips = rate, threshold, flips
    return best_rate, best_t, best_flips


def _local_capacity(
    cluster_balance: ClusterBalance, decoders: Sequence[bool]
) -> tuple[Counter[ReplicaFacts], float]:
    replicas_and_roles = list(zip(cluster_balance.local, decoders, strict=True))
    prefill = Counter(item.facts for item, decodes in replicas_and_roles if not decodes)
    return prefill, sum(item.decode_per_s for item, decodes in replicas_and_roles if decodes)


def _rate_per_s(
    cluster_balance: ClusterBalance,
    lengths: Sequence[LengthCount],
    threshold: int,
    prefill: Counter[ReplicaFacts],
    decode: float,
) -> float:
    remote_share, mean_remote, mean_local = split_lengths(lengths, threshold)
    remote = local = inf
    if remote_share > 0:
        compute_per_s = sum(
            n / replica_facts.prompt_s(mean_remote) for replica_facts, n in cluster_balance.remote.items()
        )
        kv_bytes = cluster_balance.model.wire_bytes(mean_remote, cluster_balance.codec)
        remote = (
            min(compute_per_s, cluster_balance.egress_bytes_per_s / kv_bytes if kv_bytes > 0 else inf)
            / remote_share
        )
    if remote_share < 1:
        local = sum(n / replica_facts.prompt_s(mean_local) for replica_facts, n in prefill.items()) / (
            1 - remote_share
        )
    return min(remote, local, decode)


def _keeps_roles(cluster_balance: ClusterBalance, decoders: Sequence[bool]) -> bool:
    """Whether every region keeps the roles that it has now."""
    before = {(item.region, item.role == "decode") for item in cluster_balance.local}
    after = {(item.region, decodes) for item, decodes in zip(cluster_balance.local, decoders, strict=True)}
    return before <= after


class PrfaasScaling(Scaler):
    """State: per model, the present threshold and when each timescale was last evaluated."""

    def __init__(self, policy: Policy, facts: FleetFacts) -> None:
        super().__init__()
        self._policy, self._facts = policy, facts
        self._plan: Plan | None = None
        self._thresholds: dict[str, int] = {}
        self._threshold_set_s: dict[str, float] = {}
        self._roles_set_s: dict[str, float] = {}

    def on_tick(self, at_s: float, observed: ObservedTraffic, fleet: FleetState, plan: Plan) -> Decisions:
        if plan is not self._plan:
            self._plan = plan
            # The lowest of several links' thresholds.
            stated = sorted(plan.thresholds, key=lambda each: -each.tokens)
            self._thresholds = {each.model: round(each.tokens) for each in stated}
            self._threshold_set_s.clear()
            self._roles_set_s.clear()
        decisions: list[ScaleDecision] = []
        for model in sorted({template.model for template in plan.templates}):
            short_s = self._threshold_set_s.setdefault(model, at_s)
            long_s = self._roles_set_s.setdefault(model, at_s)
            if at_s - short_s < self._policy.window_s:
                left_s = self._policy.window_s - (at_s - short_s)
                self._notes.wait(model, f"looks again in {left_s:.0f} s")
                continue
            traffic = observed.of(model)
            if traffic is None or traffic.arrivals < MIN_ARRIVALS or not traffic.mean_output_tokens:
                self._notes.say(model, f"fewer than {MIN_ARRIVALS} requests in the window, or none ended")
                continue
            cluster_balance = self._cluster_balance(traffic, observed, fleet, plan)
            if cluster_balance is None:
                continue
            self._threshold_set_s[model] = at_s
            if at_s - long_s >= self._policy.global_window_s:
                self._roles_set_s[model] = at_s
                decisions += self._adapt_roles(traffic, cluster_balance)
            else:
                decisions += self._adapt_threshold(traffic, cluster_balance)
        return tuple(decisions)

    def _adapt_threshold(self, traffic: ModelTraffic, cluster_balance: ClusterBalance) -> list[ScaleDecision]:
        decoders = [item.role == "decode" for item in cluster_balance.local]
        rate, threshold = best_threshold(cluster_balance, traffic.lengths, decoders)
        old_threshold = self._thresholds.get(traffic.model)
        if old_threshold is not None:
            present_per_s = rate_per_s(cluster_balance, traffic.lengths, old_threshold, decoders)
            needed_gain = _needed_gain(MIN_THRESHOLD_GAIN, traffic)
            if rate < present_per_s * (1 + needed_gain) or threshold == old_threshold:
                self._notes.say(
                    traffic.model, f"keeps {old_threshold} tokens: another gains less than {needed_gain:.0%}"
                )
                return []
        return [self._set_threshold(traffic.model, threshold, f"sustains {rate:.3g} requests/s")]

    def _adapt_roles(self, traffic: ModelTraffic, cluster_balance: ClusterBalance) -> list[ScaleDecision]:
        decoders = [item.role == "decode" for item in cluster_balance.local]
        present_per_s, _ = best_threshold(cluster_balance, traffic.lengths, decoders)
        rate, threshold, flips = best_split(cluster_balance, traffic.lengths)
        if not flips or rate < present_per_s * (1 + _needed_gain(MIN_FLIP_GAIN, traffic)):
            return self._adapt_threshold(traffic, cluster_balance)
        reason = f"sustains {rate:.3g} instead of {present_per_s:.3g} requests/s"
        decision = self._set_threshold(traffic.model, threshold, reason)
        self._notes.say(traffic.model, f"flips {', '.join(name for name, _ in flips)}; {reason}")
        return [*(FlipRole(name, role, reason) for name, role in flips), decision]

    def _set_threshold(self, model: str, threshold: int, reason: str) -> SetThreshold:
        self._thresholds[model] = threshold
        self._notes.say(model, f"threshold {threshold} tokens {reason}")
        return SetThreshold(model, threshold, reason)

    def _cluster_balance(
        self, traffic: ModelTraffic, observed: ObservedTraffic, fleet: FleetState, plan: Plan
    ) -> ClusterBalance | None:
        model = traffic.model
        lengths = MeanLengths(traffic.mean_prompt_tokens, traffic.mean_output_tokens)
        replicas, untimed = flippable(fleet, self._facts, model, lengths)
        model_facts = self._facts.models.get(model)
        if untimed or model_facts is None:
            self._notes.say(model, f"no balance: no times are known of {', '.join(untimed) or 'its KV'}")
            return None
        decode_regions = {replica.region for replica in replicas if replica.role == "decode"}
        local = [replica for replica in replicas if replica.region in decode_regions]
        if not any(item.role == "prefill" for item in local) or not decode_regions:
            self._notes.say(model, "no balance: no region both prefills and decodes")
            return None
        local.sort(key=lambda each: (-each.prefill_per_s / each.decode_per_s, each.role == "decode"))
        remote = [replica for replica in replicas if replica.region not in decode_regions]
        remote_regions = {item.region for item in remote}
        gbps = dict(self._facts.links_gbps)
        gbps.update({(link.source, link.target): link.gbps for link in observed.links})
        egress_gbps = sum(
            rate
            for (source, target), rate in gbps.items()
            if source in remote_regions and target in decode_regions
        )
        codecs = [
            flow.codec
            for flow in plan.flows
            if flow.model == model and flow.prefill_region != flow.decode_region
        ]
        codec = codecs[0] if codecs else "fp16"
        return ClusterBalance(
            Counter(item.facts for item in remote), tuple(local), egress_gbps * 1e9 / 8, model_facts, codec
        )


def _needed_gain(gain: float, traffic: ModelTraffic) -> float:
    """The gain that is needed to exceed the sample's own noise."""
    return max(gain, NOISE_DEVIATIONS * traffic.prompt_error_tokens / max(traffic.mean_prompt_tokens, 1.0))

"""Length thresholds (PrfaaS 3.3 and 3.4.3): prefill locally or in another region; one threshold t per model and link.

A request is prefilled in the other region when more than t of its tokens have to be computed:

    bandwidth scarce      each region's cache by itself:  l_total - l_here                 > t
    bandwidth abundant    the best cache anywhere:        l_total - max(l_here, l_there)   > t

In the second case, if the region that does not compute has the longer cached prefix, its KV crosses first. t starts
at the plan's value. Bytes queued on the link and prompts queued in the other region raise it; once the link is clear
it returns by tenths (ours)."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Final

from potluck.core.routing.prefix_affinity import PrefixAffinity
from potluck.core.routing.routing_table import PrefillChoice, RouteOptions, RoutingTable
from potluck.core.routing.template_weights import LengthThreshold
from potluck.core.state.events import LinkReported
from potluck.core.state.request_state import RequestState

NO_CHOICES: Final[dict[str, PrefillChoice]] = {}


class LengthThresholds:
    def __init__(self, table: RoutingTable, affinity: PrefixAffinity) -> None:
        self._table = table
        self._fleet = table.fleet
        self._affinity = affinity
        self.links: dict[str, dict[str, LengthThreshold]] = {}  # Model to `source->target` to its threshold.

    def adopt(self) -> None:
        """Take over a new plan's thresholds, each moved from its base as far as the one before it was."""
        before, self.links = self.links, {}
        for model in self._table.models:
            self._adopt_model(model, before.get(model, {}))

    def rebase(self, model: str, tokens: float) -> None:
        """Set a new long-term threshold, also where the plan has none if requests of the model cross regions."""
        if model not in self.links:
            if self._table.apply_threshold(model, LengthThreshold(tokens, tokens)):
                self._adopt_model(model, {})
            return
        self.links[model] = {link: rebased(old, tokens) for link, old in self.links[model].items()}

    def linked(self, event: LinkReported) -> None:
        link = f"{event.source}->{event.target}"
        for model, links in self.links.items():
            if link in links:
                ahead_s = self._remote_delay_s(model, event, links[link].tokens)
                links[link] = after_report(links[link], event, ahead_s)

    def choices(self, request: RequestState, route_options: RouteOptions) -> dict[str, PrefillChoice]:
        """For each link, whether a request should be prefilled over it; empty where length does not decide."""
        links = self.links.get(request.request.model)
        if not links:
            return NO_CHOICES
        prompt, cached = request.prompt_tokens, self._affinity.cached_by_region(request, route_options)
        prefill_choices = {}
        for route_option in route_options.flows:
            threshold = links.get(route_option.link) if route_option.crosses else None
            if threshold is not None:
                here, there = cached.get(route_option.target, 0), cached.get(route_option.source, 0)
                prefill_choices[route_option.link] = decide(threshold, prompt, here, there)
        return prefill_choices

    def _adopt_model(self, model: str, before: dict[str, LengthThreshold]) -> None:
        fresh = self._table.models[model].thresholds
        if fresh:
            self.links[model] = {
                link: rebased(before[link], new_threshold.base_tokens) if link in before else new_threshold
                for link, new_threshold in fresh.items()
            }

    def _remote_delay_s(self, model: str, event: LinkReported, tokens: float) -> float:
        """How much later a prompt of t tokens is computed in the link's prefill region than where it is decoded, in
        s."""
        remote_s, local_s = (
            self._mean_prefill_s(model, region, tokens) for region in (event.source, event.target)
        )
        return remote_s - local_s if remote_s is not None and local_s is not None else 0.0

    def _mean_prefill_s(self, model: str, region: str, tokens: float) -> float | None:
        """Mean seconds to a computed prompt over the region's prefill replicas, queued prompts included but not the
        running one; None without such a replica."""
        prefill_times_s: list[float] = []
        for replica in self._fleet.views.values():
            serves_here = replica.member.model == model and replica.member.region == region and replica.serves
            if serves_here and replica.role != "decode" and replica.facts is not None:
                waiting_tokens = replica.open_prefill_tokens * (1.0 - 1.0 / max(1, replica.open_requests))
                prompts_s = waiting_tokens * replica.facts.prefill_s_per_token + replica.facts.prompt_s(
                    tokens
                )
                prefill_times_s.append(prompts_s * replica.pace)
        return sum(prefill_times_s) / len(prefill_times_s) if prefill_times_s else None


CONGESTED_UTILISATION: Final = 0.9
CLEAR_UTILISATION: Final = 0.7
ABUNDANT_UTILISATION: Final = 0.5
MAX_LINK_QUEUE_S: Final = 0.5
LOSSY_SHARE: Final = 0.01
MAX_REMOTE_DELAY_S: Final = 1.0
# Share of the plan's t by which it rises for each second beyond MAX_REMOTE_DELAY_S.
RAISE_PER_DELAY_S: Final = 0.5
RAISE_PER_QUEUE_S: Final = 0.15
"""The same for each second that bytes wait on the link. It is small: a thin link does most when it is full of the
longest prompts. If t rose as long as the link is full, the link would run empty; if t stayed, the link would fill
with shorter prompts and long ones would be prefilled locally."""
RAISE_FACTOR: Final = 1.1
# Growth per report of the rate that a link is assumed to carry, up to the planned rate.
RATE_REGAIN_FACTOR: Final = 1.05
LEAST_TOKENS: Final = 512.0  # A lower t rises from this value.
RETURN_SHARE: Final = 0.1
MAX_RAISE_FACTOR: Final = 64.0  # Limit of t over its base value.


def decide(threshold: LengthThreshold, total_tokens: int, here: int, there: int) -> PrefillChoice:
    """Whether to prefill remotely, given the tokens cached `here` (decode region) and `there` (prefill region)."""
    uncached_tokens = (total_tokens - here, total_tokens - there)
    if threshold.scarce:
        return PrefillChoice(uncached_tokens[0] > threshold.tokens, False, *uncached_tokens)
    remote = min(uncached_tokens) > threshold.tokens
    return PrefillChoice(remote, here > there if remote else there > here, *uncached_tokens)


def after_report(threshold: LengthThreshold, report: LinkReported, ahead_s: float = 0.0) -> LengthThreshold:
    """The threshold after a link report; `ahead_s` is how much later the remote region computes such prompts than
    the local one. A link that carried less than planned while bytes waited is full at that rate, although it looks
    idle once none wait."""
    tokens, least_tokens = threshold.tokens, max(threshold.base_tokens, LEAST_TOKENS)
    queue_s = report.queued_bytes * 8 / (report.gbps * 1e9) if report.gbps > 0 else inf
    carried = min(report.gbps, max(threshold.carried_gbps * RATE_REGAIN_FACTOR, LOSSY_SHARE * report.gbps))
    utilisation = 1.0 if queue_s > MAX_LINK_QUEUE_S else report.utilisation * report.gbps / carried
    # Otherwise the loss was a burst, not a full link.
    lossy = report.lost_share > LOSSY_SHARE and utilisation >= ABUNDANT_UTILISATION
    # Prompts wait longer locally than bytes wait on the link.
    local_delay_s = -ahead_s - max(queue_s, MAX_REMOTE_DELAY_S)
    if queue_s > MAX_LINK_QUEUE_S:
        target_tokens = least_tokens * min(
            MAX_RAISE_FACTOR, 1.0 + RAISE_PER_QUEUE_S * (queue_s - MAX_LINK_QUEUE_S)
        )
    elif (lossy or utilisation >= CONGESTED_UTILISATION) and local_delay_s < 0:
        target_tokens = least_tokens * MAX_RAISE_FACTOR
    elif ahead_s > MAX_REMOTE_DELAY_S:
        target_tokens = least_tokens * min(
            MAX_RAISE_FACTOR, 1.0 + RAISE_PER_DELAY_S * (ahead_s - MAX_REMOTE_DELAY_S)
        )
    else:
        target_tokens = (
            threshold.base_tokens if utilisation < CLEAR_UTILISATION or local_delay_s > 0 else tokens
        )
    if target_tokens > tokens:
        tokens = min(max(tokens, LEAST_TOKENS) * RAISE_FACTOR, target_tokens)
    elif local_delay_s > 0:
        tokens = max(tokens / RAISE_FACTOR, target_tokens)
    else:
        tokens += (target_tokens - tokens) * RETURN_SHARE
    scarce = threshold.scarce
    if utilisation >= CLEAR_UTILISATION or lossy:
        scarce = True
    elif utilisation < ABUNDANT_UTILISATION:
        scarce = False
    return replace(threshold, tokens=tokens, scarce=scarce, carried_gbps=carried)


def rebased(threshold: LengthThreshold, base_tokens: float) -> LengthThreshold:
    """The threshold at a new long-term value, raised above it by the same ratio as before."""
    if threshold.tokens <= threshold.base_tokens:
        return replace(threshold, base_tokens=base_tokens, tokens=base_tokens)
    raise_ratio = max(threshold.tokens, LEAST_TOKENS) / max(threshold.base_tokens, LEAST_TOKENS)
    tokens = max(base_tokens, LEAST_TOKENS) * raise_ratio if raise_ratio > 1.0 else base_tokens
    return replace(threshold, base_tokens=base_tokens, tokens=tokens)

"""Prefill here or in another region, by length (PrfaaS 3.3 and 3.4.3): one threshold t for each model and link.

A request is prefilled elsewhere when more than t of its tokens have to be computed:

    bandwidth scarce      each region's cache by itself:  l_total - l_here                 > t
    bandwidth abundant    the best cache anywhere:        l_total - max(l_here, l_there)   > t

In the second case, if the region that does not compute has the longer prefix, its KV crosses first. t starts where
the plan has it; what waits on the link or at the far end raises it, a clear link lets it return by tenths (ours)."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Final

from potluck.core.routing.prefix_affinity import PrefixAffinity
from potluck.core.routing.routing_table import PrefillChoice, RouteOptions, RoutingTable
from potluck.core.routing.template_weights import LengthThreshold
from potluck.core.state.events import LinkReported
from potluck.core.state.request_state import RequestState

NONE: Final[dict[str, PrefillChoice]] = {}


class LengthThresholds:
    def __init__(self, table: RoutingTable, affinity: PrefixAffinity) -> None:
        self._table = table
        self._fleet = table.fleet
        self._affinity = affinity
        self.links: dict[str, dict[str, LengthThreshold]] = {}  # Model to `source->target` to its threshold.

    def adopt(self) -> None:
        """The table has a new plan: its thresholds, each moved as far as the one before it was."""
        before, self.links = self.links, {}
        for model in self._table.models:
            self._take(model, before.get(model, {}))

    def rebase(self, model: str, tokens: float) -> None:
        """A new long-term threshold; also where the plan had none, if anything crosses."""
        if model not in self.links:
            if self._table.divide(model, LengthThreshold(tokens, tokens)):
                self._take(model, {})
            return
        self.links[model] = {link: rebased(old, tokens) for link, old in self.links[model].items()}

    def linked(self, event: LinkReported) -> None:
        link = f"{event.source}->{event.target}"
        for model, links in self.links.items():
            if link in links:
                ahead_s = self._ahead_s(model, event, links[link].tokens)
                links[link] = after_report(links[link], event, ahead_s)

    def choices(self, request: RequestState, route_options: RouteOptions) -> dict[str, PrefillChoice]:
        """Link by link, whether a request should go over it; nothing where length does not decide."""
        links = self.links.get(request.request.model)
        if not links:
            return NONE
        prompt, cached = request.prompt_tokens, self._affinity.by_region(request, route_options)
        prefill_choices = {}
        for route_option in route_options.flows:
            threshold = links.get(route_option.link) if route_option.crosses else None
            if threshold is not None:
                here, there = cached.get(route_option.target, 0), cached.get(route_option.source, 0)
                prefill_choices[route_option.link] = decide(threshold, prompt, here, there)
        return prefill_choices

    def _take(self, model: str, before: dict[str, LengthThreshold]) -> None:
        fresh = self._table.models[model].thresholds
        if fresh:
            self.links[model] = {
                link: rebased(before[link], new_threshold.base_tokens) if link in before else new_threshold
                for link, new_threshold in fresh.items()
            }

    def _ahead_s(self, model: str, event: LinkReported, tokens: float) -> float:
        """How much later a prompt of t tokens is computed in the link's prefill cluster than where it is decoded."""
        there, here = (self._takes_s(model, region, tokens) for region in (event.source, event.target))
        return there - here if there is not None and here is not None else 0.0

    def _takes_s(self, model: str, region: str, tokens: float) -> float | None:
        """Mean of the replicas that prefill, with prompts that wait but without the one at work; None for none."""
        takes: list[float] = []
        for replica in self._fleet.views.values():
            mine = replica.member.model == model and replica.member.region == region and replica.serves
            if mine and replica.role != "decode" and replica.facts is not None:
                waiting = replica.open_prefill_tokens * (1.0 - 1.0 / max(1, replica.open_requests))
                prompts_s = waiting * replica.facts.prefill_s_per_token + replica.facts.prompt_s(tokens)
                takes.append(prompts_s * replica.pace)
        return sum(takes) / len(takes) if takes else None


CONGESTED: Final = 0.9
CLEAR: Final = 0.7
ABUNDANT: Final = 0.5
QUEUE_S: Final = 0.5
LOST: Final = 0.01
AHEAD_S: Final = 1.0
AHEAD_SHARE: Final = 0.5  # Of the plan's t, by how much it may rise for each second beyond that.
QUEUE_SHARE: Final = 0.15
"""The same for each second that bytes wait. A thin link does most when full of the longest prompts: where t rises for
as long as it is full, it falls empty; where t stays, it is full of shorter ones and long ones stay at home."""
RAISE: Final = 1.1
REGAINED: Final = 1.05  # Times what it carried last, a link may carry a report later, up to the plan's.
LEAST_TOKENS: Final = 512.0  # From where a t rises that is lower.
RETURN: Final = 0.1
MOST_RAISED: Final = 64.0  # How far above its base t may go.


def decide(threshold: LengthThreshold, total_tokens: int, here: int, there: int) -> PrefillChoice:
    """With so much cached `here`, where it would be decoded, and `there`, where it could be prefilled instead."""
    own = (total_tokens - here, total_tokens - there)
    if threshold.scarce:
        return PrefillChoice(own[0] > threshold.tokens, False, *own)
    remote = min(own) > threshold.tokens
    return PrefillChoice(remote, here > there if remote else there > here, *own)


def after_report(threshold: LengthThreshold, report: LinkReported, ahead_s: float = 0.0) -> LengthThreshold:
    """The threshold after a word of the link; its prefill cluster is `ahead_s` later with such prompts than home.

    A link that carried less than planned while bytes waited is full at that, though it looks empty once none wait."""
    tokens, least = threshold.tokens, max(threshold.base_tokens, LEAST_TOKENS)
    queue_s = report.queued_bytes * 8 / (report.gbps * 1e9) if report.gbps > 0 else inf
    carried = min(report.gbps, max(threshold.carried_gbps * REGAINED, LOST * report.gbps))
    used = 1.0 if queue_s > QUEUE_S else report.utilisation * report.gbps / carried
    lossy = report.lost_share > LOST and used >= ABUNDANT  # else it was a burst, not a full link
    later_s = -ahead_s - max(queue_s, AHEAD_S)  # Prompts wait longer at home than bytes on the link.
    if queue_s > QUEUE_S:
        wanted = least * min(MOST_RAISED, 1.0 + QUEUE_SHARE * (queue_s - QUEUE_S))
    elif (lossy or used >= CONGESTED) and later_s < 0:
        wanted = least * MOST_RAISED
    elif ahead_s > AHEAD_S:
        wanted = least * min(MOST_RAISED, 1.0 + AHEAD_SHARE * (ahead_s - AHEAD_S))
    else:
        wanted = threshold.base_tokens if used < CLEAR or later_s > 0 else tokens
    if wanted > tokens:
        tokens = min(max(tokens, LEAST_TOKENS) * RAISE, wanted)
    elif later_s > 0:
        tokens = max(tokens / RAISE, wanted)
    else:
        tokens += (wanted - tokens) * RETURN
    scarce = threshold.scarce
    if used >= CLEAR or lossy:
        scarce = True
    elif used < ABUNDANT:
        scarce = False
    return replace(threshold, tokens=tokens, scarce=scarce, carried_gbps=carried)


def rebased(threshold: LengthThreshold, base_tokens: float) -> LengthThreshold:
    """A new long-term value; how far congestion has moved t above it stays, as a ratio."""
    if threshold.tokens <= threshold.base_tokens:
        return replace(threshold, base_tokens=base_tokens, tokens=base_tokens)
    moved = max(threshold.tokens, LEAST_TOKENS) / max(threshold.base_tokens, LEAST_TOKENS)
    tokens = max(base_tokens, LEAST_TOKENS) * moved if moved > 1.0 else base_tokens
    return replace(threshold, base_tokens=base_tokens, tokens=tokens)

"""The length thresholds in force: one for each model and link, moved by what is heard of the link and its far end.

`threshold.py` has the rule for one of them; here is where they are kept. With several prefill clusters each link has
its own: a congested one keeps more prompts at home, or leaves them to another cluster, while the others stay.
"""

from __future__ import annotations

from typing import Final

from potluck.core.routing.options import RouteOptions
from potluck.core.routing.prefix_affinity import PrefixAffinity
from potluck.core.routing.routing_table import RoutingTable
from potluck.core.routing.threshold import LengthThreshold, PrefillChoice, after_report, decide, rebased
from potluck.core.state.events import LinkReported
from potluck.core.state.fleet import FleetState
from potluck.core.state.request_state import RequestState

NONE: Final[dict[str, PrefillChoice]] = {}


class LengthThresholds:
    """Changed by the Brain alone, through the Router."""

    def __init__(self, table: RoutingTable, fleet: FleetState, affinity: PrefixAffinity) -> None:
        self._table = table
        self._fleet = fleet
        self._affinity = affinity
        self.links: dict[str, dict[str, LengthThreshold]] = {}
        """Model to `source->target` to its threshold."""

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
        self.links[model] = {link: rebased(each, tokens) for link, each in self.links[model].items()}

    def linked(self, event: LinkReported) -> None:
        """A link said how it fares."""
        link = f"{event.source}->{event.target}"
        for model, links in self.links.items():
            if link in links:
                links[link] = after_report(links[link], event, self._ahead_s(model, event))

    def choices(self, req: RequestState, ways: RouteOptions) -> dict[str, PrefillChoice]:
        """Link by link, whether a request should go over it; nothing where length does not decide."""
        links = self.links.get(req.request.model)
        if not links:
            return NONE
        prompt, cached = req.prompt_tokens, self._affinity.by_region(req, ways)
        found = {}
        for way in ways.flows:
            threshold = links.get(way.link) if way.crosses else None
            if threshold is not None:
                found[way.link] = decide(
                    threshold, prompt, cached.get(way.target, 0), cached.get(way.source, 0)
                )
        return found

    def _take(self, model: str, before: dict[str, LengthThreshold]) -> None:
        table = self._table.models[model]
        fresh = table.threshold
        if fresh is None:
            return
        crossing = [flow for flow in table.offers.flows if flow.source != flow.target]
        links = [f"{flow.source}->{flow.target}" for flow in crossing]
        self.links[model] = {
            link: rebased(before[link], fresh.base_tokens) if link in before else fresh for link in links
        }

    def _ahead_s(self, model: str, event: LinkReported) -> float:
        """By how much a mean prompt waits longer in the link's prefill cluster than where it would be decoded."""
        there, here = self._waits_s(model, event.source), self._waits_s(model, event.target)
        return there - here if there is not None and here is not None else 0.0

    def _waits_s(self, model: str, region: str) -> float | None:
        """Seconds of prompts that wait at each replica that prefills, the one it works on left out; None for none."""
        waits = [
            view.open_prefill_tokens
            * (1.0 - 1.0 / max(1, view.open_requests))
            * view.facts.prefill_s_per_token
            * view.pace
            for view in self._fleet.views.values()
            if view.member.model == model
            and view.member.region == region
            and view.serves
            and view.role != "decode"
            and view.facts is not None
        ]
        return sum(waits) / len(waits) if waits else None

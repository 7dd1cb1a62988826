"""Whether to go round a link: it is slow or full, and the prompt would be computed sooner without it."""

from __future__ import annotations

from math import inf

from potluck.core.brain.flight import Flight
from potluck.core.routing.links import Links
from potluck.core.routing.table import ANY, CLOSED, ModelTable, Table
from potluck.core.routing.targets import prefilled_s
from potluck.core.routing.ways import Way, Ways


class Detours:
    """Answers from the table and the links; owns nothing."""

    def __init__(self, table: Table, links: Links) -> None:
        self._table = table
        self._links = links

    def late(self, way: Way, flight: Flight, ways: Ways, table: ModelTable) -> bool:
        """Whether a way's link is slow or full, and the prompt would be computed sooner without it."""
        late_s = self._links.late_s(way.source, way.target, flight)
        patience_s = self._links.patience_s(way.source, way.target) if late_s > 0 else inf
        first = way.prefills.pick() if late_s > patience_s else None
        if first is None:
            return False
        there_s = max(
            prefilled_s(first, flight.prompt_tokens), late_s
        )  # prompts are sent while others are computed
        return self._soonest_s(flight, ways, table) + patience_s < there_s

    def again_s(self, flight: Flight, before_tokens: int) -> float:
        """Until the prompt of a request that is on its way would be computed anew, without a link, after others."""
        table = self._table.models.get(flight.request.model)
        return self._soonest_s(flight, None, table, before_tokens) if table is not None else inf

    def _soonest_s(
        self, flight: Flight, ways: Ways | None, table: ModelTable, before_tokens: int = 0
    ) -> float:
        """Until the request's prompt is computed where no link is needed; infinite if that is nowhere."""
        spare = [self._table.ways(table, bucket, flight.total_tokens) for bucket in (CLOSED, ANY)]
        choosers = [each.closed.prefills for each in spare]
        if ways is not None:
            choosers += [way.prefills for way in (ways.closed, *ways.flows) if not way.crosses]
        tokens = flight.prompt_tokens + before_tokens / max(1, *map(len, choosers))
        found = [chooser.pick() for chooser in choosers]
        return min((prefilled_s(each, tokens) for each in found if each is not None), default=inf)

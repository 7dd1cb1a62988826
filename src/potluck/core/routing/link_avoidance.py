"""Whether to go round a link: it is slow or full, and the prompt would be computed sooner without it."""

from __future__ import annotations

from math import inf

from potluck.core.routing.link_states import LinkStates
from potluck.core.routing.options import RouteOption, RouteOptions
from potluck.core.routing.routing_table import ANY, CLOSED, ModelRoutes, RoutingTable
from potluck.core.routing.targets import prefilled_s
from potluck.core.state.request_state import RequestState


class LinkAvoidance:
    """Answers from the table and the links; owns nothing."""

    def __init__(self, table: RoutingTable, links: LinkStates) -> None:
        self._table = table
        self._links = links

    def late(self, way: RouteOption, req: RequestState, ways: RouteOptions, table: ModelRoutes) -> bool:
        """Whether a way's link is slow or full, and the prompt would be computed sooner without it."""
        late_s = self._links.late_s(way.source, way.target, req)
        patience_s = self._links.patience_s(way.source, way.target) if late_s > 0 else inf
        first = way.prefills.pick() if late_s > patience_s else None
        if first is None:
            return False
        there_s = max(
            prefilled_s(first, req.prompt_tokens), late_s
        )  # prompts are sent while others are computed
        return self._soonest_s(req, ways, table) + patience_s < there_s

    def again_s(self, req: RequestState, before_tokens: int) -> float:
        """Until the prompt of a request that is on its way would be computed anew, without a link, after others."""
        table = self._table.models.get(req.request.model)
        return self._soonest_s(req, None, table, before_tokens) if table is not None else inf

    def _soonest_s(
        self, req: RequestState, ways: RouteOptions | None, table: ModelRoutes, before_tokens: int = 0
    ) -> float:
        """Until the request's prompt is computed where no link is needed; infinite if that is nowhere."""
        spare = [self._table.ways(table, bucket, req.total_tokens) for bucket in (CLOSED, ANY)]
        choosers = [each.closed.prefills for each in spare]
        if ways is not None:
            choosers += [way.prefills for way in (ways.closed, *ways.flows) if not way.crosses]
        tokens = req.prompt_tokens + before_tokens / max(1, *map(len, choosers))
        found = [chooser.pick() for chooser in choosers]
        return min((prefilled_s(each, tokens) for each in found if each is not None), default=inf)

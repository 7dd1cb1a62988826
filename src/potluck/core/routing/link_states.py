"""What links between regions carry at present, what of ours is on its way over them, and when to go round one.

    late_s = bytes before it / present rate + its own bytes (1 / present rate - 1 / planned rate)

is by how much KV sent now would come later than planned. Tenants share a link by weight: before a request's KV are
all bytes of its tenant, and of each other tenant its due until those have passed."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Final

from potluck.core.routing.capacity import ReplicaCapacity
from potluck.core.routing.routing_table import (
    ANY,
    CLOSED,
    ModelRoutes,
    PrefillChoice,
    RouteOption,
    RouteOptions,
    RoutingTable,
)
from potluck.core.state.events import LinkReported
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.request_state import RequestState
from potluck.core.state.targets import prefilled_s
from potluck.core.values.kv import LOSSLESS
from potluck.core.values.route import Route
from potluck.core.values.types import Codec

LATE_S: Final = 0.5
"""A way over a link at its full rate that is later than planned by more than this is compared with others."""
SLOW: Final = 0.5
"""Share of its planned rate below which a link is slow: then what is on it may be done again elsewhere."""
SOONER_S: Final = 2.0  # By so much a prompt must be sooner over a link to cross though it is short.
PATIENCE_S: Final = 1.0  # What is on its way already is given up only if that saves so much.
LEAST_BYTES: Final = 0.5  # Less than that is nothing: sums of floats.
LOCAL_GBPS: Final = 10.0  # What is counted on inside a region where nobody said what network cards carry.


class TenantInFlight:
    __slots__ = ("requests", "size_bytes", "weight")

    def __init__(self) -> None:
        self.requests = 0
        self.size_bytes = 0.0
        self.weight = 1.0


class LinkStates:
    def __init__(self, facts: FleetFacts) -> None:
        self._facts = facts
        self._gbps: dict[str, float] = {}
        self._open: dict[str, dict[RequestState, float]] = {}
        """Link to requests on their way over it, in the order they were sent, with their bytes."""
        self._shares: dict[str, dict[str, TenantInFlight]] = {}
        self._cards: dict[str, float] = {}
        """Replica to bytes that have yet to leave or reach it, of prompts with prefixes."""
        self.dead: set[str] = set()  # `source->target` of those that carry nothing at present.
        self.codecs: dict[tuple[str, str, str], Codec] = {}
        """(model, source, target) to how KV crosses; as it is where the plan does not say."""

    def reported(self, event: LinkReported) -> None:
        link = f"{event.source}->{event.target}"
        self._gbps[link] = event.gbps
        (self.dead.discard if event.gbps > 0 else self.dead.add)(link)

    def carries(self, source: str, target: str, request: RequestState) -> bool:
        """Whether there is a link that carries something, and did not fail the request before."""
        link = f"{source}->{target}"
        return (
            (source, target) in self._facts.links_gbps and link not in self.dead and link not in request.avoid
        )

    def fetch_s(
        self,
        request: RequestState,
        holding_replica: ReplicaState,
        first_replica: ReplicaState,
        start: int,
        stop: int,
    ) -> float:
        """Until a held prefix is at another replica: the holder's turn, its card's queue, then the bytes."""
        source, target = holding_replica.member.region, first_replica.member.region
        facts, model = holding_replica.facts, self._facts.models.get(request.request.model)
        if facts is None or model is None:
            return inf
        before, codec = 0.0, self.codec(request, source, target)
        if source == target:
            cards = [
                replica.facts.card_gbps
                for replica in (holding_replica, first_replica)
                if replica.facts is not None
            ]
            gbps = min((card for card in cards if card > 0), default=LOCAL_GBPS)
            before = max(
                self._cards.get(replica_state.member.id, 0.0)
                for replica_state in (holding_replica, first_replica)
            )
        else:
            link = f"{source}->{target}"
            gbps = self._gbps.get(link, self._facts.links_gbps.get((source, target), 0.0))
        if gbps <= 0:
            return inf
        waiting_s = holding_replica.open_prefill_tokens * facts.prefill_s_per_token
        turn_s = (waiting_s + facts.prefill_fixed_s) * holding_replica.pace
        return turn_s + (before + model.wire_bytes(stop, codec, start)) * 8e-9 / gbps

    def send(self, request: RequestState, source: str, target: str, tokens: int) -> None:
        if source == target:
            return
        link, size = f"{source}->{target}", self._size_bytes(request, source, target, tokens)
        self._open.setdefault(link, {})[request] = size
        shares = self._shares.setdefault(link, {})
        share = shares.setdefault(request.request.tenant, TenantInFlight())
        share.requests += 1
        share.size_bytes += size
        share.weight, request.link = request.weight, link

    def arrived(self, request: RequestState) -> None:
        tenant, shares = request.request.tenant, self._shares[request.link]
        share = shares[tenant]
        share.size_bytes -= self._open[request.link].pop(request)
        share.requests -= 1
        if not share.requests:
            del shares[tenant]
        request.link = ""

    def load(self, request: RequestState, route: Route) -> None:
        model, cargo = self._facts.models.get(request.request.model), []
        for here, there in pairwise(route.segments):
            size = 0.0 if model is None else model.wire_bytes(there.start)
            cargo.append((here.replica, there.replica, size))
            for name in (here.replica, there.replica):
                self._cards[name] = self._cards.get(name, 0.0) + size
        request.cargo = tuple(cargo)

    def handed(self, request: RequestState, going_on: bool) -> None:
        """One of its segments is done, the last that hands over unless it is going on."""
        if request.cargo:
            self._landed(request, request.done - 1)
        if request.link and not going_on:
            self.arrived(request)

    def over(self, request: RequestState) -> None:
        if request.link:
            self.arrived(request)
        if request.cargo:
            self._landed(request)

    def _landed(self, request: RequestState, place: int | None = None) -> None:
        """What follows one of its segments is over, or all of it."""
        cargo = list(request.cargo)
        for at in range(len(cargo)) if place is None else (place,):
            here, there, size = cargo[at]
            for name in (here, there) if size else ():
                left = self._cards[name] - size
                if left > LEAST_BYTES:
                    self._cards[name] = left
                else:
                    del self._cards[name]
            cargo[at] = (here, there, 0.0)
        request.cargo = () if place is None else tuple(cargo)

    @property
    def open_bytes(self) -> float:
        tenants = [share.size_bytes for shares in self._shares.values() for share in shares.values()]
        return sum(self._cards.values()) + sum(tenants)

    def _others_bytes(self, link: str, tenant: str, weight: float, own_bytes: float) -> float:
        """What passes of other tenants' KV while so much of a tenant's own does."""
        others = [share for name, share in self._shares.get(link, {}).items() if name != tenant]
        return sum([min(share.size_bytes, own_bytes * share.weight / weight) for share in others])

    def late_s(self, source: str, target: str, request: RequestState) -> float:
        """By how much a request's KV would be later than planned; 0 where nothing is known of the link."""
        planned = self._facts.links_gbps.get((source, target), 0.0)
        link = f"{source}->{target}"
        gbps = self._gbps.get(link, planned)
        if planned <= 0:
            return 0.0
        if gbps <= 0:
            return inf
        own = self._size_bytes(request, source, target, request.prompt_tokens)
        tenant = request.request.tenant
        share = self._shares.get(link, {}).get(tenant)
        before = share.size_bytes if share is not None else 0.0
        before += self._others_bytes(link, tenant, request.weight, before + own)
        late_s = before * 8e-9 / gbps + own * 8e-9 * (1.0 / gbps - 1.0 / planned)
        if request.request.exact:  # its own bytes may be more than the plan counted on
            model = self._facts.models.get(request.request.model)
            codec = self.codecs.get((request.request.model, source, target), LOSSLESS)
            counted = 0.0 if model is None else model.wire_bytes(request.prompt_tokens, codec)
            late_s += (own - counted) * 8e-9 / planned
        return max(0.0, late_s)

    def patience_s(self, source: str, target: str) -> float:
        """How much later than planned a link may be: the less of its rate is left, the less."""
        planned = self._facts.links_gbps.get((source, target), 0.0)
        gbps = self._gbps.get(f"{source}->{target}", planned)
        return LATE_S * min(1.0, gbps / planned) if planned > 0 else LATE_S

    def waits_s(self, event: LinkReported) -> list[tuple[str, float]]:
        """On a link that has become slow: the requests on it, last sent first, and when they will be over."""
        planned = self._facts.links_gbps.get((event.source, event.target), 0.0)
        if not 0 < event.gbps < SLOW * planned:
            return []
        result: list[tuple[str, float]] = []
        before: dict[str, float] = {}
        link = f"{event.source}->{event.target}"
        for request, size in self._open.get(link, {}).items():
            tenant = request.request.tenant
            own = before[tenant] = before.get(tenant, 0.0) + size
            passed = own + self._others_bytes(link, tenant, request.weight, own)
            result.append((request.request.id, passed * 8e-9 / event.gbps))
        return result[::-1]

    def codec(self, request: RequestState, source: str, target: str) -> Codec:
        if request.request.exact:
            return LOSSLESS
        return self.codecs.get((request.request.model, source, target), LOSSLESS)

    def _size_bytes(self, request: RequestState, source: str, target: str, tokens: int) -> float:
        model = self._facts.models.get(request.request.model)
        return 0.0 if model is None else model.wire_bytes(tokens, self.codec(request, source, target))


class LinkAvoidance:
    def __init__(self, table: RoutingTable, links: LinkStates, capacity: ReplicaCapacity | None) -> None:
        self._table, self._links, self._room = table, links, capacity

    def late(
        self,
        route_option: RouteOption,
        request: RequestState,
        route_options: RouteOptions,
        routes: ModelRoutes,
    ) -> bool:
        """Whether a way's link is slow or full, and the prompt would be computed sooner without it."""
        late_s = self._links.late_s(route_option.source, route_option.target, request)
        patience_s = self._links.patience_s(route_option.source, route_option.target) if late_s > 0 else inf
        first_target = route_option.prefills.pick() if late_s > patience_s else None
        if first_target is None:
            return False
        # Prompts are sent while others are computed.
        there_s = max(prefilled_s(first_target, request.prompt_tokens), late_s)
        return self._soonest_s(request, route_options, routes, request.prompt_tokens) + patience_s < there_s

    def again_s(self, request: RequestState, before_tokens: int) -> float:
        """Until the prompt of a request that is on its way would be computed anew, without a link, after others."""
        routes = self._table.models.get(request.request.model)
        if routes is None:
            return inf
        route_options = self._table.ways(routes, routes.kind(request)[0], request.total_tokens)
        return self._soonest_s(request, route_options, routes, request.prompt_tokens, before_tokens)

    def sooner(
        self,
        choices: dict[str, PrefillChoice],
        request: RequestState,
        route_options: RouteOptions,
        routes: ModelRoutes,
    ) -> dict[str, PrefillChoice]:
        """Let a prompt cross that length keeps at home, where it is computed much sooner so: a threshold follows its
        link slowly, and knows no queues."""
        for route_option in route_options.flows:
            choice = (
                choices.get(route_option.link)
                if route_option.crosses and route_option.link not in self._links.dead
                else None
            )
            first_target = route_option.prefills.pick() if choice is not None and not choice.remote else None
            if choice is None or first_target is None:
                continue
            late_s = self._links.late_s(route_option.source, route_option.target, request)
            there_s = max(prefilled_s(first_target, choice.there_tokens), late_s)
            if there_s + SOONER_S < self._soonest_s(request, route_options, routes, choice.here_tokens):
                choices[route_option.link] = choice._replace(remote=True, fetch=False)
        return choices

    def _soonest_s(
        self,
        request: RequestState,
        route_options: RouteOptions,
        routes: ModelRoutes,
        own: int,
        before_tokens: int = 0,
    ) -> float:
        """Until its `own` tokens, behind those that wait, are computed where no link is needed; infinite if that is
        nowhere. Who would also answer counts while it has room for that; who only decodes, where nobody else is."""
        closed, spare = (self._table.ways(routes, place, request.total_tokens) for place in (CLOSED, ANY))
        at_home = [
            route_option
            for route_option in (closed.closed, route_options.closed, *route_options.flows)
            if not route_option.crosses
        ]
        at_home = [route_option for route_option in at_home if len(route_option.prefills)] or [spare.closed]
        tokens = own + before_tokens / max(1, *(len(route_option.prefills) for route_option in at_home))
        able, capacity = [], self._room
        for route_option in at_home:
            target = route_option.prefills.pick()
            if target is not None and (
                route_option.decodes is not None or capacity is None or capacity.fits(target, request)
            ):
                able.append(prefilled_s(target, tokens))
        return min(able, default=inf)

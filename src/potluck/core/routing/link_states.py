"""States of the links between regions: present rates, the KV in flight, and when to avoid a link.

    late_s = bytes before it / present rate + its own bytes (1 / present rate - 1 / planned rate)

is how much later than planned KV sent now would arrive. Tenants share a link by weight: a request's KV waits for all
bytes of its tenant, and for each other tenant's share until those have passed."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Final

from potluck.core.routing.capacity import ReplicaCapacity
from potluck.core.routing.routing_table import (
    ANY_REPLICA_BUCKET,
    CLOSED_BUCKET,
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
from potluck.core.state.targets import prefill_done_s
from potluck.core.values.kv import LOSSLESS
from potluck.core.values.route import Route
from potluck.core.values.types import Codec

MAX_DELAY_S: Final = 0.5
"""Delay over plan from which a flow over a link at its full rate is compared with local prefill."""
SLOW_LINK_SHARE: Final = 0.5
"""Share of its planned rate below which a link is slow: requests on it may be recalled and computed elsewhere."""
MIN_TIME_SAVED_S: Final = 2.0  # Time that a prompt below the threshold must save to cross the link.
MIN_RECALL_SAVING_S: Final = 1.0  # Time that a recall must save to give up a transfer in flight.
ROUNDING_BYTES: Final = 0.5  # Smaller byte counts are rounding errors.
LOCAL_GBPS: Final = 10.0  # Assumed network rate inside a region where the cards' rates are unknown.


class TenantInFlight:
    """One tenant's KV in flight over a link."""

    __slots__ = ("requests", "size_bytes", "weight")

    def __init__(self) -> None:
        self.requests = 0
        self.size_bytes = 0.0
        self.weight = 1.0


class LinkStates:
    """Rates of all links, and the KV in flight over them and over replicas' network cards."""

    def __init__(self, facts: FleetFacts) -> None:
        self._facts = facts
        self._gbps: dict[str, float] = {}
        self._in_flight: dict[str, dict[RequestState, float]] = {}
        """Link -> requests in flight over it with their bytes, in the order they were sent."""
        self._shares: dict[str, dict[str, TenantInFlight]] = {}
        self._card_bytes: dict[str, float] = {}
        """Replica -> bytes of prefixes that it has yet to send or receive."""
        self.dead: set[str] = set()  # Links that carry nothing at present, as `source->target`.
        self.codecs: dict[tuple[str, str, str], Codec] = {}
        """(model, source, target) -> codec of the KV; lossless where the plan has none."""

    def update(self, event: LinkReported) -> None:
        link = f"{event.source}->{event.target}"
        self._gbps[link] = event.gbps
        (self.dead.discard if event.gbps > 0 else self.dead.add)(link)

    def carries(self, source: str, target: str, request: RequestState) -> bool:
        """Whether a link exists, is up, and did not fail the request before."""
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
        """Seconds until a cached prefix is at another replica: the holder's queue, its card's queue, then the
        transfer."""
        source, target = holding_replica.member.region, first_replica.member.region
        facts, model = holding_replica.facts, self._facts.models.get(request.request.model)
        if facts is None or model is None:
            return inf
        queued_bytes, codec = 0.0, self.codec(request, source, target)
        if source == target:
            cards = [
                replica.facts.card_gbps
                for replica in (holding_replica, first_replica)
                if replica.facts is not None
            ]
            gbps = min((card for card in cards if card > 0), default=LOCAL_GBPS)
            queued_bytes = max(
                self._card_bytes.get(replica_state.member.id, 0.0)
                for replica_state in (holding_replica, first_replica)
            )
        else:
            link = f"{source}->{target}"
            gbps = self._gbps.get(link, self._facts.links_gbps.get((source, target), 0.0))
        if gbps <= 0:
            return inf
        waiting_s = holding_replica.open_prefill_tokens * facts.prefill_s_per_token
        queue_s = (waiting_s + facts.prefill_fixed_s) * holding_replica.pace
        return queue_s + (queued_bytes + model.wire_bytes(stop, codec, start)) * 8e-9 / gbps

    def register_crossing(self, request: RequestState, source: str, target: str, tokens: int) -> None:
        if source == target:
            return
        link, size = f"{source}->{target}", self._size_bytes(request, source, target, tokens)
        self._in_flight.setdefault(link, {})[request] = size
        shares = self._shares.setdefault(link, {})
        share = shares.setdefault(request.request.tenant, TenantInFlight())
        share.requests += 1
        share.size_bytes += size
        share.weight, request.link = request.weight, link

    def complete_crossing(self, request: RequestState) -> None:
        tenant, shares = request.request.tenant, self._shares[request.link]
        share = shares[tenant]
        share.size_bytes -= self._in_flight[request.link].pop(request)
        share.requests -= 1
        if not share.requests:
            del shares[tenant]
        request.link = ""

    def register_transfers(self, request: RequestState, route: Route) -> None:
        model, transfers = self._facts.models.get(request.request.model), []
        for source, target in pairwise(route.segments):
            size = 0.0 if model is None else model.wire_bytes(target.start)
            transfers.append((source.replica, target.replica, size))
            for name in (source.replica, target.replica):
                self._card_bytes[name] = self._card_bytes.get(name, 0.0) + size
        request.transfers = tuple(transfers)

    def segment_handed_over(self, request: RequestState, going_on: bool) -> None:
        """A segment of a request was handed over; with `going_on` it was not the last one."""
        if request.transfers:
            self._complete_transfers(request, request.done - 1)
        if request.link and not going_on:
            self.complete_crossing(request)

    def request_ended(self, request: RequestState) -> None:
        if request.link:
            self.complete_crossing(request)
        if request.transfers:
            self._complete_transfers(request)

    def _complete_transfers(self, request: RequestState, segment: int | None = None) -> None:
        """Complete the transfer after one segment, or all of the request's transfers."""
        transfers = list(request.transfers)
        for index in range(len(transfers)) if segment is None else (segment,):
            source, target, size = transfers[index]
            for name in (source, target) if size else ():
                remaining_bytes = self._card_bytes[name] - size
                if remaining_bytes > ROUNDING_BYTES:
                    self._card_bytes[name] = remaining_bytes
                else:
                    del self._card_bytes[name]
            transfers[index] = (source, target, 0.0)
        request.transfers = () if segment is None else tuple(transfers)

    @property
    def open_bytes(self) -> float:
        tenants = [share.size_bytes for shares in self._shares.values() for share in shares.values()]
        return sum(self._card_bytes.values()) + sum(tenants)

    def _other_tenants_bytes(self, link: str, tenant: str, weight: float, own_bytes: float) -> float:
        """Bytes of other tenants' KV that pass while this tenant sends `own_bytes`."""
        others = [share for name, share in self._shares.get(link, {}).items() if name != tenant]
        return sum([min(share.size_bytes, own_bytes * share.weight / weight) for share in others])

    def delay_s(self, source: str, target: str, request: RequestState) -> float:
        """Delay of a request's KV over plan in s; 0 where the link is unknown."""
        planned_gbps = self._facts.links_gbps.get((source, target), 0.0)
        link = f"{source}->{target}"
        gbps = self._gbps.get(link, planned_gbps)
        if planned_gbps <= 0:
            return 0.0
        if gbps <= 0:
            return inf
        own_bytes = self._size_bytes(request, source, target, request.prompt_tokens)
        tenant = request.request.tenant
        share = self._shares.get(link, {}).get(tenant)
        tenant_bytes = share.size_bytes if share is not None else 0.0
        tenant_bytes += self._other_tenants_bytes(link, tenant, request.weight, tenant_bytes + own_bytes)
        delay_s = tenant_bytes * 8e-9 / gbps + own_bytes * 8e-9 * (1.0 / gbps - 1.0 / planned_gbps)
        if request.request.exact:  # An exact request's KV may be larger than the plan assumed.
            model = self._facts.models.get(request.request.model)
            codec = self.codecs.get((request.request.model, source, target), LOSSLESS)
            planned_bytes = 0.0 if model is None else model.wire_bytes(request.prompt_tokens, codec)
            delay_s += (own_bytes - planned_bytes) * 8e-9 / planned_gbps
        return max(0.0, delay_s)

    def max_delay_s(self, source: str, target: str) -> float:
        """Delay over plan that is tolerated; less the slower the link is."""
        planned_gbps = self._facts.links_gbps.get((source, target), 0.0)
        gbps = self._gbps.get(f"{source}->{target}", planned_gbps)
        return MAX_DELAY_S * min(1.0, gbps / planned_gbps) if planned_gbps > 0 else MAX_DELAY_S

    def recall_candidates(self, event: LinkReported) -> list[tuple[str, float]]:
        """For a link that has become slow: (request, seconds until its KV has crossed), last sent first."""
        planned_gbps = self._facts.links_gbps.get((event.source, event.target), 0.0)
        if not 0 < event.gbps < SLOW_LINK_SHARE * planned_gbps:
            return []
        result: list[tuple[str, float]] = []
        bytes_by_tenant: dict[str, float] = {}
        link = f"{event.source}->{event.target}"
        for request, size in self._in_flight.get(link, {}).items():
            tenant = request.request.tenant
            tenant_bytes = bytes_by_tenant[tenant] = bytes_by_tenant.get(tenant, 0.0) + size
            bytes_ahead = tenant_bytes + self._other_tenants_bytes(link, tenant, request.weight, tenant_bytes)
            result.append((request.request.id, bytes_ahead * 8e-9 / event.gbps))
        return result[::-1]

    def codec(self, request: RequestState, source: str, target: str) -> Codec:
        if request.request.exact:
            return LOSSLESS
        return self.codecs.get((request.request.model, source, target), LOSSLESS)

    def _size_bytes(self, request: RequestState, source: str, target: str, tokens: int) -> float:
        model = self._facts.models.get(request.request.model)
        return 0.0 if model is None else model.wire_bytes(tokens, self.codec(request, source, target))


class LinkAvoidance:
    """Decides when local prefill is faster than a flow over a link, and the reverse."""

    def __init__(self, table: RoutingTable, links: LinkStates, capacity: ReplicaCapacity | None) -> None:
        self._table, self._links, self._capacity = table, links, capacity

    def is_delayed(
        self,
        route_option: RouteOption,
        request: RequestState,
        route_options: RouteOptions,
        routes: ModelRoutes,
    ) -> bool:
        """Whether a flow's link is slow or full and local prefill is faster."""
        delay_s = self._links.delay_s(route_option.source, route_option.target, request)
        max_delay_s = (
            self._links.max_delay_s(route_option.source, route_option.target) if delay_s > 0 else inf
        )
        first_target = route_option.prefills.pick() if delay_s > max_delay_s else None
        if first_target is None:
            return False
        # Transfers overlap with the prefill of other prompts.
        remote_s = max(prefill_done_s(first_target, request.prompt_tokens), delay_s)
        return (
            self._local_prefill_s(request, route_options, routes, request.prompt_tokens) + max_delay_s
            < remote_s
        )

    def recompute_s(self, request: RequestState, before_tokens: int) -> float:
        """Seconds to compute the prompt of a request in flight anew without a link, behind the queues."""
        routes = self._table.models.get(request.request.model)
        if routes is None:
            return inf
        route_options = self._table.options(routes, routes.kind(request)[0], request.total_tokens)
        return self._local_prefill_s(request, route_options, routes, request.prompt_tokens, before_tokens)

    def allow_faster_crossings(
        self,
        choices: dict[str, PrefillChoice],
        request: RequestState,
        route_options: RouteOptions,
        routes: ModelRoutes,
    ) -> dict[str, PrefillChoice]:
        """Let prompts below the threshold cross a link where that is much faster: a threshold follows its link
        slowly and does not see queues."""
        for route_option in route_options.flows:
            choice = (
                choices.get(route_option.link)
                if route_option.crosses and route_option.link not in self._links.dead
                else None
            )
            first_target = route_option.prefills.pick() if choice is not None and not choice.remote else None
            if choice is None or first_target is None:
                continue
            delay_s = self._links.delay_s(route_option.source, route_option.target, request)
            remote_s = max(prefill_done_s(first_target, choice.there_tokens), delay_s)
            if remote_s + MIN_TIME_SAVED_S < self._local_prefill_s(
                request, route_options, routes, choice.here_tokens
            ):
                choices[route_option.link] = choice._replace(remote=True, fetch=False)
        return choices

    def _local_prefill_s(
        self,
        request: RequestState,
        route_options: RouteOptions,
        routes: ModelRoutes,
        own_tokens: int,
        before_tokens: int = 0,
    ) -> float:
        """Seconds until `own` tokens are computed behind the queues without a link; infinite if nowhere. Targets
        that also decode count while they have room to; decode replicas count where no other can prefill."""
        closed, any_replica = (
            self._table.options(routes, bucket, request.total_tokens)
            for bucket in (CLOSED_BUCKET, ANY_REPLICA_BUCKET)
        )
        local_options = [
            route_option
            for route_option in (closed.closed, route_options.closed, *route_options.flows)
            if not route_option.crosses
        ]
        local_options = [route_option for route_option in local_options if len(route_option.prefills)] or [
            any_replica.closed
        ]
        tokens = own_tokens + before_tokens / max(
            1, *(len(route_option.prefills) for route_option in local_options)
        )
        prefill_times_s, capacity = [], self._capacity
        for route_option in local_options:
            target = route_option.prefills.pick()
            if target is not None and (
                route_option.decodes is not None or capacity is None or capacity.fits(target, request)
            ):
                prefill_times_s.append(prefill_done_s(target, tokens))
        return min(prefill_times_s, default=inf)

"""What links between regions carry at present, and what of ours is on its way over them.

    late_s = bytes before it / present rate + its own bytes (1 / present rate - 1 / planned rate)

is by how much KV sent now would come later than the plan counts on. The rate is what the link last reported, or the
planned one; the bytes are the Brain's own count, so that a link which is slower than it says shows as well, once
enough is waiting for it. Nothing here is used while `late_s` is small: the plan chose the way.

Tenants share a link by weight. So before a request's KV are all bytes of its tenant, and of each other tenant what
is its due until those have passed, or all that it has: a tenant that floods a link makes it late for itself alone.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Final

from potluck.core.state.events import LinkReported
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.request_state import RequestState
from potluck.core.values.lossy_hops import LOSSLESS
from potluck.core.values.route import Route
from potluck.core.values.types import Codec

LATE_S: Final = 0.5
"""A way over a link at its full rate that is later than planned by more than this is compared with others."""
SLOW: Final = 0.5
"""Share of its planned rate below which a link is slow: then what is on it may be done again elsewhere."""
PATIENCE_S: Final = 1.0
"""What is on its way already is given up only if that saves so much."""
LEAST_BYTES: Final = 0.5
"""Less than that is nothing: sums of floats."""
LOCAL_GBPS: Final = 10.0
"""What is counted on inside a region where nobody said what network cards carry."""


class TenantInFlight:
    """A tenant's part of what is on a link."""

    __slots__ = ("requests", "size_bytes", "weight")

    def __init__(self) -> None:
        self.requests = 0
        self.size_bytes = 0.0
        self.weight = 1.0


class LinkStates:
    """Changed by the Brain alone."""

    def __init__(self, facts: FleetFacts) -> None:
        self._facts = facts
        self._gbps: dict[str, float] = {}
        """As reported, by `source->target`."""
        self._open: dict[str, dict[RequestState, float]] = {}
        """Link to requests on their way over it, in the order they were sent, with their bytes."""
        self._shares: dict[str, dict[str, TenantInFlight]] = {}
        """Link to tenants with KV on it."""
        self._cards: dict[str, float] = {}
        """Replica to bytes that have yet to leave or reach it, of prompts with prefixes."""
        self.dead: set[str] = set()
        """`source->target` of those that carry nothing at present."""
        self.codecs: dict[tuple[str, str, str], Codec] = {}
        """(model, source, target) to how KV crosses; as it is where the plan does not say."""

    def reported(self, event: LinkReported) -> None:
        link = f"{event.source}->{event.target}"
        self._gbps[link] = event.gbps
        (self.dead.discard if event.gbps > 0 else self.dead.add)(link)

    def carries(self, source: str, target: str, req: RequestState) -> bool:
        """Whether there is a link that carries something, and did not fail the request before."""
        link = f"{source}->{target}"
        return (source, target) in self._facts.links_gbps and link not in self.dead and link not in req.avoid

    def fetch_s(
        self, req: RequestState, holder: ReplicaState, first: ReplicaState, start: int, stop: int
    ) -> float:
        """Until a held prefix is at another replica: the holder's turn, then its bytes at the present rate.

        Network cards first carry what was promised of them before. Links are asked only where they have bandwidth to
        spare, so what is on them is not counted.
        """
        source, target = holder.member.region, first.member.region
        facts, model = holder.facts, self._facts.models.get(req.request.model)
        if facts is None or model is None:
            return inf
        before, codec = 0.0, self.codec(req, source, target)
        if source == target:
            cards = [each.facts.card_gbps for each in (holder, first) if each.facts is not None]
            gbps = min((card for card in cards if card > 0), default=LOCAL_GBPS)
            before = max(self._cards.get(each.member.id, 0.0) for each in (holder, first))
        else:
            link = f"{source}->{target}"
            gbps = self._gbps.get(link, self._facts.links_gbps.get((source, target), 0.0))
        if gbps <= 0:
            return inf
        turn_s = (
            holder.open_prefill_tokens * facts.prefill_s_per_token + facts.prefill_fixed_s
        ) * holder.pace
        return turn_s + (before + model.wire_bytes(stop, codec, start)) * 8e-9 / gbps

    def send(self, req: RequestState, source: str, target: str, tokens: int) -> None:
        """Count a request's KV as on its way; none within a region."""
        if source == target:
            return
        link, size = f"{source}->{target}", self._size_bytes(req, source, target, tokens)
        self._open.setdefault(link, {})[req] = size
        shares = self._shares.setdefault(link, {})
        share = shares.setdefault(req.request.tenant, TenantInFlight())
        share.requests += 1
        share.size_bytes += size
        share.weight = req.weight
        req.link = link

    def arrived(self, req: RequestState) -> None:
        """It is over, or given up."""
        tenant, shares = req.request.tenant, self._shares[req.link]
        share = shares[tenant]
        share.size_bytes -= self._open[req.link].pop(req)
        share.requests -= 1
        if not share.requests:
            del shares[tenant]
        req.link = ""

    def load(self, req: RequestState, route: Route) -> None:
        """Count what a request with a prefix will send between replicas."""
        model, cargo = self._facts.models.get(req.request.model), []
        for here, there in pairwise(route.segments):
            size = 0.0 if model is None else model.wire_bytes(there.start)
            cargo.append((here.replica, there.replica, size))
            for name in (here.replica, there.replica):
                self._cards[name] = self._cards.get(name, 0.0) + size
        req.cargo = tuple(cargo)

    def handed(self, req: RequestState, going_on: bool) -> None:
        """One of its segments is done, the last that hands over unless it is going on."""
        if req.cargo:
            self._landed(req, req.done - 1)
        if req.link and not going_on:
            self.arrived(req)

    def over(self, req: RequestState) -> None:
        """It ended, or goes elsewhere."""
        if req.link:
            self.arrived(req)
        if req.cargo:
            self._landed(req)

    def _landed(self, req: RequestState, place: int | None = None) -> None:
        """What follows one of its segments is over, or all of it."""
        cargo = list(req.cargo)
        for at in range(len(cargo)) if place is None else (place,):
            here, there, size = cargo[at]
            for name in (here, there) if size else ():
                left = self._cards[name] - size
                if left > LEAST_BYTES:
                    self._cards[name] = left
                else:
                    del self._cards[name]
            cargo[at] = (here, there, 0.0)
        req.cargo = () if place is None else tuple(cargo)

    @property
    def open_bytes(self) -> float:
        """On their way over all links and cards."""
        total = 0.0
        for size in self._cards.values():
            total += size
        for shares in self._shares.values():
            for share in shares.values():
                total += share.size_bytes
        return total

    def _others_bytes(self, link: str, tenant: str, weight: float, own_bytes: float) -> float:
        """What passes of other tenants' KV while so much of a tenant's own does."""
        passed = 0.0
        for name, share in self._shares.get(link, {}).items():
            if name != tenant:
                passed += min(share.size_bytes, own_bytes * share.weight / weight)
        return passed

    def late_s(self, source: str, target: str, req: RequestState) -> float:
        """By how much a request's KV would be later than planned; 0 where nothing is known of the link."""
        planned = self._facts.links_gbps.get((source, target), 0.0)
        link = f"{source}->{target}"
        gbps = self._gbps.get(link, planned)
        if planned <= 0:
            return 0.0
        if gbps <= 0:
            return inf
        own = self._size_bytes(req, source, target, req.prompt_tokens)
        tenant = req.request.tenant
        share = self._shares.get(link, {}).get(tenant)
        before = share.size_bytes if share is not None else 0.0
        before += self._others_bytes(link, tenant, req.weight, before + own)
        late_s = before * 8e-9 / gbps + own * 8e-9 * (1.0 / gbps - 1.0 / planned)
        if req.request.exact:  # its own bytes may be more than the plan counted on
            late_s += (own - self._planned_bytes(req, source, target)) * 8e-9 / planned
        return max(0.0, late_s)

    def patience_s(self, source: str, target: str) -> float:
        """How much later than planned a link may be: the less of its rate is left, the less.

        Transfers share a link, so a slow one keeps all of them longer than its queue alone says.
        """
        planned = self._facts.links_gbps.get((source, target), 0.0)
        gbps = self._gbps.get(f"{source}->{target}", planned)
        return LATE_S * min(1.0, gbps / planned) if planned > 0 else LATE_S

    def waits_s(self, event: LinkReported) -> list[tuple[str, float]]:
        """On a link that has become slow: the requests on it, last sent first, and when they will be over."""
        planned = self._facts.links_gbps.get((event.source, event.target), 0.0)
        if not 0 < event.gbps < SLOW * planned:
            return []
        found: list[tuple[str, float]] = []
        before: dict[str, float] = {}
        link = f"{event.source}->{event.target}"
        for req, size in self._open.get(link, {}).items():
            tenant = req.request.tenant
            own = before[tenant] = before.get(tenant, 0.0) + size
            passed = own + self._others_bytes(link, tenant, req.weight, own)
            found.append((req.request.id, passed * 8e-9 / event.gbps))
        return found[::-1]

    def codec(self, req: RequestState, source: str, target: str) -> Codec:
        """In which a request's KV crosses: as the plan says, unless it must stay exact."""
        if req.request.exact:
            return LOSSLESS
        return self.codecs.get((req.request.model, source, target), LOSSLESS)

    def _size_bytes(self, req: RequestState, source: str, target: str, tokens: int) -> float:
        model = self._facts.models.get(req.request.model)
        return 0.0 if model is None else model.wire_bytes(tokens, self.codec(req, source, target))

    def _planned_bytes(self, req: RequestState, source: str, target: str) -> float:
        """What the plan counts on for its prompt."""
        name = req.request.model
        model, codec = self._facts.models.get(name), self.codecs.get((name, source, target), LOSSLESS)
        return 0.0 if model is None else model.wire_bytes(req.prompt_tokens, codec)

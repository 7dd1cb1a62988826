"""A pipe of given bandwidth, shared by tenants as they weigh, and by each one's transfers evenly: exact.

With W the weights of the tenants that have transfers open, tenant t gets rate x w / W, and each of its n transfers
rate x w / (W n), whatever the others have open: processor sharing within processor sharing. Let v(t) be the bytes
that a transfer of tenant t open all the time would have got: dv/dt = rate w / (W n). A transfer of b bytes ends when
v has grown by b since it began, whoever else comes and goes, so its end in v is fixed then, and one heap of ends per
tenant is all there is to keep: O(log n) per change, and as many looks as tenants are on the pipe. A change of the
bandwidth only bends v.

What passes is counted twice, by the clock (`served_bytes`, the rate over the busy time) and by the transfers
(`sent_bytes`, what each asked for or had got when it was broken off); both must agree.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Final

from potluck.core.errors import InputError
from potluck.core.routing.link_states import GRANTED
from potluck.core.state.events import FailureKind
from potluck.core.values.types import Link
from potluck.perf.delays.transfer import alpha_beta, link_alpha_beta
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.world.sim_state import SimAttempt, SimMachine, SimReplica


class TenantTransfers:
    """One tenant's transfers on a pipe."""

    __slots__ = ("count", "heap", "virtual", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.count = 0
        self.virtual = 0.0
        """v"""
        self.heap: list[tuple[float, int]] = []
        """Ends in v, and whose; may hold some that were broken off."""


class SharedPipe:
    """One direction of a link, or one network card. Times must not go back; the caller keeps them."""

    __slots__ = (
        "_at_s",
        "_lanes",
        "_open",
        "_weight",
        "alpha_s",
        "busy_s",
        "due_s",
        "kind",
        "lost_bytes",
        "name",
        "rate_bytes_per_s",
        "sent_bytes",
        "served_bytes",
        "source",
        "target",
        "transfers",
    )

    def __init__(self, kind: str, source: str, target: str, rate_bytes_per_s: float, alpha_s: float) -> None:
        if not 0 <= rate_bytes_per_s < inf:
            raise InputError(f"pipe {source}->{target}", f"must not be negative, is {rate_bytes_per_s}")
        self.kind = kind
        self.source = source
        self.target = target
        self.name = f"{source}->{target}" if target else source
        self.rate_bytes_per_s = rate_bytes_per_s
        self.alpha_s = alpha_s
        self.sent_bytes = 0.0
        self.served_bytes = 0.0
        self.lost_bytes = 0.0
        self.busy_s = 0.0
        self.transfers = 0
        self.due_s = inf
        """The earliest time at which the agenda has this pipe; kept by whoever has the agenda."""
        self._at_s = 0.0
        self._open: dict[int, tuple[float, float, str]] = {}
        """Transfer to (its end in v, its bytes, its tenant)."""
        self._lanes: dict[str, TenantTransfers] = {}
        """By tenant; only those with transfers under way."""
        self._weight = 0.0
        """W"""

    def __len__(self) -> int:
        """Transfers under way."""
        return len(self._open)

    def __contains__(self, key: int) -> bool:
        return key in self._open

    @property
    def keys(self) -> list[int]:
        """Transfers under way, oldest first."""
        return list(self._open)

    def start(self, now_s: float, key: int, size_bytes: float, tenant: str = "", weight: float = 1.0) -> None:
        """Let a transfer begin; `key` must not be under way. A tenant weighs what its last transfer said."""
        self._advance(now_s)
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = TenantTransfers(weight)
            self._weigh()
        elif lane.weight != weight:
            lane.weight = weight
            self._weigh()
        end = lane.virtual + size_bytes
        self._open[key] = (end, size_bytes, tenant)
        lane.count += 1
        heappush(lane.heap, (end, key))
        self.transfers += 1

    def next_s(self) -> float:
        """When the next transfer ends if nothing changes; inf when none will."""
        return self._next()[0]

    def done(self, now_s: float) -> list[int]:
        """The transfers that have ended by now, in the order of their ends."""
        found: list[int] = []
        while True:
            due_s, tenant = self._next()
            if due_s > now_s:
                break
            self._advance(due_s)
            lane = self._lanes[tenant]
            end, key = heappop(lane.heap)
            self.sent_bytes += self._open[key][1]
            # The clock and the sum of shares differ by rounding; the end is the better number.
            lane.virtual = end
            self._close(key)
            found.append(key)
        self._advance(now_s)
        return found

    def abort(self, now_s: float, key: int) -> float:
        """Break a transfer off; the bytes it had got. Unknown ones are ignored."""
        self._advance(now_s)
        held = self._open.get(key)
        if held is None:
            return 0.0
        end, size_bytes, tenant = held
        got = min(size_bytes, max(0.0, size_bytes - (end - self._lanes[tenant].virtual)))
        self._close(key)
        self.sent_bytes += got
        self.lost_bytes += got
        return got

    def _next(self) -> tuple[float, str]:
        """When the next transfer ends, and whose it is."""
        if self.rate_bytes_per_s <= 0:
            return inf, ""
        opened, best_s, first = self._open, inf, ""
        for tenant, lane in self._lanes.items():
            heap = lane.heap
            while heap:
                end, key = heap[0]
                held = opened.get(key)
                if held is not None and held[0] == end:
                    break
                heappop(heap)
            if not heap:
                continue
            wait_s = (
                (heap[0][0] - lane.virtual)
                * lane.count
                * (self._weight / lane.weight)
                / self.rate_bytes_per_s
            )
            if wait_s < best_s:
                best_s, first = wait_s if wait_s > 0 else 0.0, tenant
        return self._at_s + best_s, first

    def _close(self, key: int) -> None:
        """It is under way no more."""
        tenant = self._open.pop(key)[2]
        lane = self._lanes[tenant]
        lane.count -= 1
        if not lane.count:
            del self._lanes[tenant]
            self._weigh()

    def _weigh(self) -> None:
        weight = 0.0
        for lane in self._lanes.values():
            weight += lane.weight
        self._weight = weight

    def set_rate(self, now_s: float, rate_bytes_per_s: float) -> None:
        """From now on it carries so much."""
        self._advance(now_s)
        self.rate_bytes_per_s = rate_bytes_per_s

    def share_bytes_per_s(self, more: int = 0, tenant: str = "", weight: float = 1.0) -> float:
        """What each transfer of a tenant gets with so many more of its own than there are."""
        lane = self._lanes.get(tenant)
        others = self._weight - (lane.weight if lane is not None else 0.0)
        own = (lane.count if lane is not None else 0) + more
        return self.rate_bytes_per_s * (weight / (weight + max(0.0, others))) / max(1, own)

    def queued_bytes(self, now_s: float) -> float:
        """Bytes that still have to pass for the transfers under way."""
        self._advance(now_s)
        queued = 0.0
        for end, _, tenant in self._open.values():
            queued += max(0.0, end - self._lanes[tenant].virtual)
        return queued

    def open_bytes(self, now_s: float) -> float:
        """Bytes that the transfers under way have already got."""
        asked = 0.0
        for _, size_bytes, _ in self._open.values():
            asked += size_bytes
        return asked - self.queued_bytes(now_s)

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        self._at_s = now_s
        if self._lanes:
            served = passed_s * self.rate_bytes_per_s
            for lane in self._lanes.values():
                lane.virtual += served * (lane.weight / self._weight) / lane.count
            self.served_bytes += served
            self.busy_s += passed_s


ROUND_TRIP_S: Final = 1e-4
"""Between two machines of one region."""


def card_pipe(name: str, gbps: float) -> SharedPipe:
    path = alpha_beta(gbps, ROUND_TRIP_S, window_bytes=None)
    return SharedPipe("card", name, "", path.beta_bytes_per_s, path.alpha_s)


class SimNetwork:
    """All pipes of a run.

        same machine         the GPUs' interconnect: fast and not shared here
        named machines  pipes of their own between each two, where the pool gives their bandwidth: each layer goes
                             from the machine that has it to the one that needs it, all pipes side by side
        same region          the network cards: the one of the two that has less to give each transfer now
        other region         the link; no faster than either card

    A transfer is shared at one place only, its narrowest; the other places bound its speed but are not slowed by it.
    That is exact while at most one end is contended, and never gives a link more than it carries.
    """

    __slots__ = ("_granted", "_links", "_machines", "_ways", "links", "pipes", "resolved")

    def __init__(self, resolved: ResolvedPlan, granted: bool = False) -> None:
        self.resolved = resolved
        self._granted = granted
        """Whether senders keep to what they are granted: all of them together to a share of a link."""
        self.pipes: list[SharedPipe] = []
        self._links: dict[tuple[str, str], Link] = {}
        self.links: dict[tuple[str, str], SharedPipe] = {}
        self._machines: dict[tuple[str, str], SharedPipe] = {}
        self._ways: dict[tuple[str, str], tuple[tuple[SharedPipe, float], ...]] = {}
        """By the ids of two replicas."""
        for link in resolved.links:
            ends = (link.source, link.target)
            self._links[ends] = link
            self.links[ends] = self._add(
                SharedPipe("link", *ends, self.full_rate(ends), link_alpha_beta(link).alpha_s)
            )

    def card(self, name: str, gbps: float) -> SharedPipe:
        return self._add(card_pipe(name, gbps))

    def full_rate(self, ends: tuple[str, str]) -> float:
        """Bytes a second that a link was built for."""
        return self.rate_of(ends, self._links[ends].gbps)

    def rate_of(self, ends: tuple[str, str], gbps: float) -> float:
        """Bytes a second of payload at another bandwidth of the same link."""
        if gbps <= 0:
            return 0.0
        rate = alpha_beta(gbps, self._links[ends].rtt_s).beta_bytes_per_s
        return min(rate, GRANTED * gbps * 1e9 / 8) if self._granted else rate

    def gbps_of(self, ends: tuple[str, str]) -> float:
        """What a link carries at present, as its bandwidth is written."""
        full = self.full_rate(ends)
        return self._links[ends].gbps * self.links[ends].rate_bytes_per_s / full

    def carries(self, source: str, target: str) -> bool:
        """Whether there is a link between two regions that carries something at present."""
        pipe = self.links.get((source, target))
        return pipe is not None and pipe.rate_bytes_per_s > 0

    def obstacle(self, running: SimAttempt) -> tuple[FailureKind, str] | None:
        """Why a route cannot be gone: a replica too small, or no link for its KV."""
        output_tokens = running.request.max_output_tokens - running.before_tokens
        sites, last = running.sites, len(running.sites) - 1
        if running.prompt_tokens + output_tokens > sites[last].room_tokens:
            return "memory", sites[last].id
        for place in range(last):
            source, target = sites[place].member.region, sites[place + 1].member.region
            if source != target and not self.carries(source, target):
                return "link", f"{source}->{target}"
        for place in range(last):
            stop = running.segments[place].stop
            if stop is not None and stop > sites[place].room_tokens:
                return "memory", sites[place].id
        return None

    def pipe(
        self, source: SimReplica, target: SimReplica, running: SimAttempt | None = None
    ) -> SharedPipe | None:
        """The pipe between two replicas; None when they share a machine, or no link joins their regions."""
        if source.member.region != target.member.region:
            return self.links.get((source.member.region, target.member.region))
        if near(source, target):
            return None
        ways = self.ways(source, target)
        if ways:
            return ways[0][0]
        first, second = source.card, target.card
        tenant, weight = (running.request.tenant, running.weight) if running is not None else ("", 1.0)
        left = first.share_bytes_per_s(1, tenant, weight)
        return first if left <= second.share_bytes_per_s(1, tenant, weight) else second

    def floor_s(
        self, source: SimReplica, target: SimReplica, pipe: SharedPipe | None, size_bytes: float
    ) -> float:
        """Seconds that a transfer takes at least, whatever its share of the pipe."""
        if pipe is None:
            return size_bytes / min(
                source.replica_model.inside_bytes_per_s, target.replica_model.inside_bytes_per_s
            )
        if pipe.kind == "link":
            return size_bytes / min(source.card.rate_bytes_per_s, target.card.rate_bytes_per_s)
        return 0.0

    def ways(self, source: SimReplica, target: SimReplica) -> tuple[tuple[SharedPipe, float], ...]:
        """(pipe, share of a request's KV) between the named machines of two replicas, the slowest first.

        Empty where nothing is said of their links, and where all stays within machines.
        """
        if not self.resolved.machine_gbps or source.member.region != target.member.region:
            return ()
        key = (source.member.id, target.member.id)
        found = self._ways.get(key)
        if found is None:
            found = self._ways[key] = self._side_by_side(source, target)
        return found

    def _side_by_side(self, source: SimReplica, target: SimReplica) -> tuple[tuple[SharedPipe, float], ...]:
        first, second = source.replica_model.owners, target.replica_model.owners
        if not first or len(first) != len(second):
            return ()
        layers: dict[tuple[str, str], int] = {}
        for ends in zip(first, second, strict=True):
            layers[ends] = layers.get(ends, 0) + 1
        found = []
        for ends, count in layers.items():
            if ends[0] == ends[1]:
                continue
            pipe = self._between(ends)
            if pipe is None:
                return ()
            found.append((count / len(first) / max(pipe.rate_bytes_per_s, 1.0), pipe, count / len(first)))
        found.sort(key=lambda each: (-each[0], each[1].name))
        return tuple([(pipe, share) for _, pipe, share in found])

    def _between(self, ends: tuple[str, str]) -> SharedPipe | None:
        if ends not in self._machines:
            said = self.resolved.machine_gbps.get(ends)
            if said is None:
                return None
            path = alpha_beta(said[0], said[1])
            self._machines[ends] = self._add(SharedPipe("card", *ends, path.beta_bytes_per_s, path.alpha_s))
        return self._machines[ends]

    def _add(self, pipe: SharedPipe) -> SharedPipe:
        self.pipes.append(pipe)
        return pipe


def near(source: SimReplica, target: SimReplica) -> bool:
    """Whether two replicas stand on one machine."""
    machines = target.machines
    for machine in source.machines:  # noqa: SIM110 - asked for every hand-over, and `any` makes a generator each time
        if machine in machines:
            return True
    return False


def machine_name(unit: str, node: str, place: int) -> str:
    return f"{unit}/{node}/{place}"


__all__ = ["ROUND_TRIP_S", "SimMachine", "SimNetwork", "card_pipe", "machine_name", "near"]

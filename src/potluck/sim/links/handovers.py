"""Transfers of KV from one segment to the next.

The receiver reserves blocks before the first byte is sent. KV that is computed while the receiver has no free
blocks waits in the sender's host memory, up to SEND_QUEUE_BYTES. Blocks reserved for KV that is not computed yet
are released when the receiver idles for lack of them. With overlap a transfer takes its share of the pipe from the
moment its segment begins to be computed, and KV is sent layer by layer. With L layers of B bytes in all, computed
evenly in c seconds, the last byte arrives at

    max(f + c / L, e + (B / L) / r) + alpha

f is when the pipe would have carried B bytes (its share counted from the beginning of the computation), e when the
computation ended, r the share at that time. For one transfer alone this is exact.
Without overlap the whole leaves at e, and arrives at f + alpha.

With full host memory, replicas can wait for each other's blocks. An attempt that has waited for STUCK_AFTER_S at an
idle replica fails for lack of memory; the Brain then retries or refuses its request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from potluck.core.state.facts import SEND_QUEUE_BYTES
from potluck.core.values.kv import LOSSLESS
from potluck.core.values.types import Codec
from potluck.sim.links.link import SharedPipe
from potluck.sim.links.sim_network import SimNetwork, Ways
from potluck.sim.world.event_queue import HANDED, PIPE, EventQueue
from potluck.sim.world.sim_state import SimAttempt, SimHandover, SimReplica

STUCK_AFTER_S: Final = 10.0


def codec_of(
    codecs: Mapping[tuple[str, str, str], Codec],
    attempt: SimAttempt,
    source_replica: SimReplica,
    target_replica: SimReplica,
) -> Codec:
    """The codec of KV between two replicas. KV that arrived lossy cannot be sent on as lossless."""
    if attempt.request.exact:
        return LOSSLESS
    here, there, codec = source_replica.member, target_replica.member, source_replica.replica_model.codec
    if here.unit != there.unit:
        codec = codecs.get((here.model, here.region, there.region), LOSSLESS)
    return attempt.codec if codec == LOSSLESS else codec


class SimHandovers:
    """All transfers of KV under way."""

    def __init__(self, events: EventQueue, network: SimNetwork, overlap: bool = True) -> None:
        self._events = events
        self.network = network
        self.overlap = overlap
        self.waited = 0
        """Number of hand-overs that had to wait for free blocks."""
        self._open: dict[int, SimHandover | Callable[[float], None]] = {}
        self._waiting: list[SimHandover] = []
        """Hand-overs that wait for free blocks, oldest first; may contain some that no longer wait."""
        self._next_key = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, now_s: float, attempt: SimAttempt, size_bytes: float, codec: Codec) -> None:
        """Register the transfer of a segment that was just submitted to its replica."""
        handover = SimHandover(self._next_key, attempt, size_bytes, codec)
        self._next_key += 1
        self._open[handover.key] = handover
        attempt.handover = handover
        computing = handover.source.computing
        computing.append(attempt)
        if computing[0] is attempt:
            self._begin_computing(now_s, handover)

    def computed(self, now_s: float, attempt: SimAttempt) -> None:
        handover = attempt.handover
        assert handover is not None
        handover.computed_s = now_s
        self._end_computing(now_s, handover)
        if handover.started_s == inf:
            self._request_room(now_s, handover)
            if handover.started_s == inf:
                self._move_to_host_memory(now_s, handover)
        elif handover.piped_s < inf:
            self._schedule_arrival(now_s, handover)

    def admit_waiting(self, now_s: float, replica: SimReplica) -> None:
        """Start waiting transfers in order, after blocks became free at a replica."""
        waiting = replica.waiting
        while waiting:
            handover = waiting[0]
            if handover.over:
                waiting.popleft()
                continue
            if not self._reserve(now_s, handover):
                return
            waiting.popleft()
            self._start(now_s, handover)

    def release_reservations(self, now_s: float) -> None:
        """Release blocks reserved for KV not computed yet, at replicas that idle for lack of blocks."""
        for handover in list(self._open.values()):
            if isinstance(handover, SimHandover) and handover.reserved and handover.computed_s == inf:
                target_replica = handover.target
                if target_replica.replica.idle and target_replica.replica.batch.queued:
                    self._abort_transfer(now_s, handover)
                    handover.reserved, handover.started_s, handover.piped_s = False, inf, inf
                    target_replica.replica.release(now_s, handover.attempt.key)
                    self._events.look(target_replica)

    def stuck(self, now_s: float) -> list[SimHandover]:
        """For each idle replica without free blocks the transfer that has waited longest there."""
        self._waiting = [
            handover for handover in self._waiting if not handover.over and not handover.reserved
        ]
        handovers: dict[int, SimHandover] = {}
        for handover in self._waiting:
            if now_s - handover.waits_s >= STUCK_AFTER_S and handover.target.replica.idle:
                handovers.setdefault(handover.target.index, handover)
        return list(handovers.values())

    def pipe_due(self, now_s: float, pipe: SharedPipe) -> None:
        if now_s < pipe.due_s:
            return  # a later wake-up has replaced this one
        pipe.due_s = inf
        for key in pipe.done(now_s):
            handover = self._open.get(key)
            if isinstance(handover, SimHandover):
                handover.left -= 1
                if key != handover.key:
                    del self._open[key]
                if handover.left:
                    continue
                handover.piped_s = now_s
                if handover.computed_s < inf:
                    self._schedule_arrival(now_s, handover)
            elif handover is not None:
                del self._open[key]
                handover(now_s)
        self.schedule(pipe)

    def finish(self, handover: SimHandover) -> bool:
        """End a transfer whose last byte has arrived; False if it was cancelled before."""
        if handover.over:
            return False
        self._end(handover)
        del self._open[handover.key]
        handover.attempt.handover = None
        return True

    def cancel(self, now_s: float, attempt: SimAttempt) -> None:
        """Cancel an attempt's transfer: the attempt failed, was cancelled or re-routed."""
        handover = attempt.handover
        if handover is None:
            return
        attempt.handover = None
        self._end(handover)
        self._open.pop(handover.key, None)
        self._abort_transfer(now_s, handover)
        self._end_computing(now_s, handover)

    def broken(self, pipe: SharedPipe) -> list[SimAttempt]:
        hands = (self._open[key] for key in pipe.keys)
        return [handover.attempt for handover in hands if isinstance(handover, SimHandover)]

    def schedule(self, pipe: SharedPipe) -> None:
        """Enqueue the next end of a transfer of a pipe, unless the queue has an earlier wake-up of it."""
        due_s = pipe.next_s()
        if due_s < pipe.due_s:
            pipe.due_s = due_s
            self._events.push(due_s, PIPE, pipe)

    def _abort_transfer(self, now_s: float, handover: SimHandover) -> None:
        if handover.pipe is not None and handover.key in handover.pipe:
            handover.pipe.abort(now_s, handover.key)
            self.schedule(handover.pipe)
        for key, pipe in handover.parts:
            self._open.pop(key, None)
            if key in pipe:
                pipe.abort(now_s, key)
                self.schedule(pipe)
        handover.pipe, handover.parts, handover.left = None, (), 1

    def _begin_computing(self, now_s: float, handover: SimHandover) -> None:
        handover.began_s = now_s
        if (
            self.overlap
            and handover.started_s == inf
            and handover.source.replica.batch.begins(handover.attempt.key)
        ):
            self._request_room(now_s, handover)

    def _end_computing(self, now_s: float, handover: SimHandover) -> None:
        """Remove an attempt from its sender's queue; the next attempt begins to be computed."""
        line = handover.source.computing
        if handover.attempt not in line:
            return
        line.remove(handover.attempt)
        if line:
            following = line[0].handover
            if following is not None and following.began_s == inf:
                self._begin_computing(now_s, following)

    def _move_to_host_memory(self, now_s: float, handover: SimHandover) -> None:
        """Move computed KV out of the sender's blocks, which other requests may need."""
        source_replica = handover.source
        if source_replica.aside_bytes + handover.size_bytes <= SEND_QUEUE_BYTES:
            handover.aside = True
            source_replica.aside_bytes += handover.size_bytes
            source_replica.replica.release(now_s, handover.attempt.key)
            self._events.look(source_replica)

    def _end(self, handover: SimHandover) -> None:
        handover.over = True
        if handover.aside:
            handover.source.aside_bytes -= handover.size_bytes

    def _request_room(self, now_s: float, handover: SimHandover) -> None:
        target_replica = handover.target
        if handover.reserved or handover in target_replica.waiting:
            return
        if target_replica.waiting or not self._reserve(now_s, handover):
            target_replica.waiting.append(handover)
            handover.waits_s = now_s
            self._waiting.append(handover)
            self.waited += 1
            return
        self._start(now_s, handover)

    def _reserve(self, now_s: float, handover: SimHandover) -> bool:
        """Reserve blocks at the receiver, if it has enough; its next event may then be earlier."""
        attempt, target_replica = handover.attempt, handover.target
        handover.reserved = target_replica.replica.reserve(
            now_s, attempt.key, attempt.segments[attempt.place].stop or 0
        )
        self._events.look(target_replica)
        return handover.reserved

    def _start(self, now_s: float, handover: SimHandover) -> None:
        handover.started_s = now_s
        ways = self.network.ways(handover.source, handover.target)
        if ways and handover.size_bytes > 0:
            self._start_over_several_pipes(now_s, handover, ways)
            return
        pipe = self.network.pipe(handover.source, handover.target, handover.attempt)
        if handover.size_bytes <= 0 or pipe is None:
            handover.piped_s = now_s + self.network.floor_s(
                handover.source, handover.target, None, handover.size_bytes
            )
            if handover.computed_s < inf:
                self._schedule_arrival(now_s, handover)
            return
        handover.pipe = pipe
        attempt = handover.attempt
        pipe.start(now_s, handover.key, handover.size_bytes, attempt.request.tenant, attempt.weight)
        self.schedule(pipe)

    def _start_over_several_pipes(self, now_s: float, handover: SimHandover, ways: Ways) -> None:
        """Send each layer from the machine that has it to the one that needs it, over all pipes at once."""
        attempt = handover.attempt
        parts = []
        for pipe, share in ways:
            key = handover.key
            if handover.pipe is None:
                handover.pipe = pipe
            else:
                key = self._next_key
                self._next_key += 1
                self._open[key] = handover
                parts.append((key, pipe))
            pipe.start(now_s, key, handover.size_bytes * share, attempt.request.tenant, attempt.weight)
            self.schedule(pipe)
        handover.parts, handover.left = tuple(parts), len(ways)

    def _schedule_arrival(self, now_s: float, handover: SimHandover) -> None:
        """Schedule the arrival of the last byte of a transfer that is computed and sent."""
        size_bytes, pipe = handover.size_bytes, handover.pipe
        at_s = handover.piped_s
        if size_bytes > 0:
            floor_s = self.network.floor_s(handover.source, handover.target, pipe, size_bytes)
            at_s = max(at_s, handover.started_s + floor_s)
            if handover.started_s < handover.computed_s:
                layers = handover.source.replica_model.layers
                layer_bytes = size_bytes / layers
                share = 0.0
                if pipe is not None and pipe.rate_bytes_per_s:
                    attempt = handover.attempt
                    share = layer_bytes / pipe.share_bytes_per_s(1, attempt.request.tenant, attempt.weight)
                computed_s = handover.computed_s - handover.began_s
                tail_s = max(share, floor_s / layers)
                at_s = max(at_s + computed_s / layers, handover.computed_s + tail_s)
            if pipe is not None:
                at_s += pipe.alpha_s
        self._events.push(max(at_s, now_s), HANDED, handover)

"""KV on its way from one segment to the next.

The receiver sets blocks aside before the first byte leaves. KV that is computed while it has no room waits in the
sender's host memory, as far as that goes (SEND_QUEUE_BYTES). Blocks set aside for what is not computed are given back
where the receiver idles for want of them. With overlap a transfer takes its share of the pipe from the moment its
segment begins to be computed, and KV leaves layer by layer. With L layers of B bytes in all, computed evenly in c
seconds, the last byte arrives at

    max(f + c / L, e + (B / L) / r) + alpha

f is when the pipe would have carried B bytes (its share counted from the beginning of the computation), e when the
computation ended, r the share at that time. For one transfer alone this is exact.
Without overlap the whole leaves at e, and arrives at f + alpha.

Where the host's memory is full, replicas can wait for each other's room. Whoever has waited for STUCK_S at a replica
that does nothing fails for want of memory, and is sent again or refused.
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

STUCK_S: Final = 10.0


def codec_of(
    codecs: Mapping[tuple[str, str, str], Codec],
    attempt: SimAttempt,
    source_replica: SimReplica,
    target_replica: SimReplica,
) -> Codec:
    """In which KV goes from one replica to another. What came in fewer bits cannot go on as if it were whole."""
    if attempt.request.exact:
        return LOSSLESS
    here, there, codec = source_replica.member, target_replica.member, source_replica.replica_model.codec
    if here.unit != there.unit:
        codec = codecs.get((here.model, here.region, there.region), LOSSLESS)
    return attempt.codec if codec == LOSSLESS else codec


class SimHandovers:
    def __init__(self, events: EventQueue, network: SimNetwork, overlap: bool = True) -> None:
        self._events = events
        self.network = network
        self.overlap = overlap
        self.waited = 0
        """Hand-overs that found no room at first."""
        self._open: dict[int, SimHandover | Callable[[float], None]] = {}
        self._waiting: list[SimHandover] = []
        """For room, oldest first; may hold some that wait no more."""
        self._next_key = 0

    def __len__(self) -> int:
        return len(self._open)

    def expect(self, now_s: float, attempt: SimAttempt, size_bytes: float, codec: Codec) -> None:
        """The segment under way was given to its replica; its KV will go to the next."""
        hand = SimHandover(self._next_key, attempt, size_bytes, codec)
        self._next_key += 1
        self._open[hand.key] = hand
        attempt.hand = hand
        computing = hand.source.computing
        computing.append(attempt)
        if computing[0] is attempt:
            self._computing(now_s, hand)

    def computed(self, now_s: float, attempt: SimAttempt) -> None:
        hand = attempt.hand
        assert hand is not None
        hand.computed_s = now_s
        self._leave(now_s, hand)
        if hand.started_s == inf:
            self._ask(now_s, hand)
            if hand.started_s == inf:
                self._put_aside(now_s, hand)
        elif hand.piped_s < inf:
            self._settle(now_s, hand)

    def room(self, now_s: float, replica: SimReplica) -> None:
        """Blocks became free at a replica: let those in who wait, in order."""
        waiting = replica.waiting
        while waiting:
            hand = waiting[0]
            if hand.over:
                waiting.popleft()
                continue
            if not self._reserved(now_s, hand):
                return
            waiting.popleft()
            self._start(now_s, hand)

    def give_back(self, now_s: float) -> None:
        """Of replicas that do nothing for want of blocks, those set aside for what is not computed yet."""
        for hand in list(self._open.values()):
            if isinstance(hand, SimHandover) and hand.reserved and hand.computed_s == inf:
                target_replica = hand.target
                if target_replica.replica.idle and target_replica.replica.batch.queued:
                    self._off_pipe(now_s, hand)
                    hand.reserved, hand.started_s, hand.piped_s = False, inf, inf
                    target_replica.replica.release(now_s, hand.running.key)
                    self._events.look(target_replica)

    def stuck(self, now_s: float) -> list[SimHandover]:
        """The longest waiting at each replica that has no room for it and nothing to do that would make some."""
        self._waiting = [hand for hand in self._waiting if not hand.over and not hand.reserved]
        handovers: dict[int, SimHandover] = {}
        for hand in self._waiting:
            if now_s - hand.waits_s >= STUCK_S and hand.target.replica.idle:
                handovers.setdefault(hand.target.index, hand)
        return list(handovers.values())

    def pipe_due(self, now_s: float, pipe: SharedPipe) -> None:
        if now_s < pipe.due_s:
            return  # an older look; a later one is on the agenda, and following both would double them
        pipe.due_s = inf
        for key in pipe.done(now_s):
            hand = self._open.get(key)
            if isinstance(hand, SimHandover):
                hand.left -= 1
                if key != hand.key:
                    del self._open[key]
                if hand.left:
                    continue
                hand.piped_s = now_s
                if hand.computed_s < inf:
                    self._settle(now_s, hand)
            elif hand is not None:
                del self._open[key]
                hand(now_s)
        self.schedule(pipe)

    def handed(self, hand: SimHandover) -> bool:
        """The last byte is there; False when nobody waits for it any more."""
        if hand.over:
            return False
        self._close(hand)
        del self._open[hand.key]
        hand.running.hand = None
        return True

    def drop(self, now_s: float, attempt: SimAttempt) -> None:
        """Forget a journey's hand-over: it failed, was cancelled or re-routed."""
        hand = attempt.hand
        if hand is None:
            return
        attempt.hand = None
        self._close(hand)
        self._open.pop(hand.key, None)
        self._off_pipe(now_s, hand)
        self._leave(now_s, hand)

    def broken(self, pipe: SharedPipe) -> list[SimAttempt]:
        hands = (self._open[key] for key in pipe.keys)
        return [hand.running for hand in hands if isinstance(hand, SimHandover)]

    def schedule(self, pipe: SharedPipe) -> None:
        """Put a pipe's next end on the agenda unless an earlier look is there already."""
        due_s = pipe.next_s()
        if due_s < pipe.due_s:
            pipe.due_s = due_s
            self._events.push(due_s, PIPE, pipe)

    def _off_pipe(self, now_s: float, hand: SimHandover) -> None:
        if hand.pipe is not None and hand.key in hand.pipe:
            hand.pipe.abort(now_s, hand.key)
            self.schedule(hand.pipe)
        for key, pipe in hand.parts:
            self._open.pop(key, None)
            if key in pipe:
                pipe.abort(now_s, key)
                self.schedule(pipe)
        hand.pipe, hand.parts, hand.left = None, (), 1

    def _computing(self, now_s: float, hand: SimHandover) -> None:
        hand.began_s = now_s
        if self.overlap and hand.started_s == inf and hand.source.replica.batch.begins(hand.running.key):
            self._ask(now_s, hand)

    def _leave(self, now_s: float, hand: SimHandover) -> None:
        """It is not computed here any more; the next in line is."""
        line = hand.source.computing
        if hand.running not in line:
            return
        line.remove(hand.running)
        if line:
            following = line[0].hand
            if following is not None and following.began_s == inf:
                self._computing(now_s, following)

    def _put_aside(self, now_s: float, hand: SimHandover) -> None:
        """Out of the sender's blocks, which others may need before the receiver has room."""
        source_replica = hand.source
        if source_replica.aside_bytes + hand.size_bytes <= SEND_QUEUE_BYTES:
            hand.aside = True
            source_replica.aside_bytes += hand.size_bytes
            source_replica.replica.release(now_s, hand.running.key)
            self._events.look(source_replica)

    def _close(self, hand: SimHandover) -> None:
        hand.over = True
        if hand.aside:
            hand.source.aside_bytes -= hand.size_bytes

    def _ask(self, now_s: float, hand: SimHandover) -> None:
        target_replica = hand.target
        if hand.reserved or hand in target_replica.waiting:
            return
        if target_replica.waiting or not self._reserved(now_s, hand):
            target_replica.waiting.append(hand)
            hand.waits_s = now_s
            self._waiting.append(hand)
            self.waited += 1
            return
        self._start(now_s, hand)

    def _reserved(self, now_s: float, hand: SimHandover) -> bool:
        """Whether there is room for it; then what the receiver does next may be due earlier."""
        attempt, target_replica = hand.running, hand.target
        hand.reserved = target_replica.replica.reserve(
            now_s, attempt.key, attempt.segments[attempt.place].stop or 0
        )
        self._events.look(target_replica)
        return hand.reserved

    def _start(self, now_s: float, hand: SimHandover) -> None:
        hand.started_s = now_s
        ways = self.network.ways(hand.source, hand.target)
        if ways and hand.size_bytes > 0:
            self._start_side_by_side(now_s, hand, ways)
            return
        pipe = self.network.pipe(hand.source, hand.target, hand.running)
        if hand.size_bytes <= 0 or pipe is None:
            hand.piped_s = now_s + self.network.floor_s(hand.source, hand.target, None, hand.size_bytes)
            if hand.computed_s < inf:
                self._settle(now_s, hand)
            return
        hand.pipe = pipe
        attempt = hand.running
        pipe.start(now_s, hand.key, hand.size_bytes, attempt.request.tenant, attempt.weight)
        self.schedule(pipe)

    def _start_side_by_side(self, now_s: float, hand: SimHandover, ways: Ways) -> None:
        """Layers go from the machine that has them to the one that needs them, over all their links at once."""
        attempt = hand.running
        parts = []
        for pipe, share in ways:
            key = hand.key
            if hand.pipe is None:
                hand.pipe = pipe
            else:
                key = self._next_key
                self._next_key += 1
                self._open[key] = hand
                parts.append((key, pipe))
            pipe.start(now_s, key, hand.size_bytes * share, attempt.request.tenant, attempt.weight)
            self.schedule(pipe)
        hand.parts, hand.left = tuple(parts), len(ways)

    def _settle(self, now_s: float, hand: SimHandover) -> None:
        """Both computed and carried: when is the last byte there?"""
        size_bytes, pipe = hand.size_bytes, hand.pipe
        at_s = hand.piped_s
        if size_bytes > 0:
            floor_s = self.network.floor_s(hand.source, hand.target, pipe, size_bytes)
            at_s = max(at_s, hand.started_s + floor_s)
            if hand.started_s < hand.computed_s:
                layers = hand.source.replica_model.layers
                layer_bytes = size_bytes / layers
                share = 0.0
                if pipe is not None and pipe.rate_bytes_per_s:
                    attempt = hand.running
                    share = layer_bytes / pipe.share_bytes_per_s(1, attempt.request.tenant, attempt.weight)
                computed_s = hand.computed_s - hand.began_s
                tail_s = max(share, floor_s / layers)
                at_s = max(at_s + computed_s / layers, hand.computed_s + tail_s)
            if pipe is not None:
                at_s += pipe.alpha_s
        self._events.push(max(at_s, now_s), HANDED, hand)

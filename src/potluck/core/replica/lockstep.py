"""Decoding sequences in closed form: each step adds a token to every one of them.

With c the number of steps so far (the clock), a decoding sequence has the context `base + c` and makes its last
token when the clock reaches its `end`. Its blocks are its context, rounded up. So a set of them needs four
figures, whatever its size: how many there are, their contexts' sum, the earliest end, and how many need a new
block at each value of the clock modulo the block size, which says how much all the rounding up adds.
"""

from __future__ import annotations

from heapq import heappop, heappush

from potluck.core.replica.batch_values import DECODE, FINISHED, GONE, Happening, Sequence


class DecodeLockstep:
    """The decodes of one Batcher, which alone changes them."""

    __slots__ = ("_edges", "clock", "context_tokens", "count", "ends", "fill", "size")

    def __init__(self, block_tokens: int) -> None:
        self.size = block_tokens
        self.clock = 0
        """Steps so far, those without decodes included."""
        self.count = 0
        self.context_tokens = 0
        """Tokens of context, added up."""
        self.ends: list[tuple[int, int, Sequence]] = []
        """A heap by end; may hold some that left before."""
        self.fill = [0] * block_tokens
        """Sequences by the clock, modulo the block size, at which they need a block."""
        self._edges = 0
        """Those clocks, added up over all sequences."""

    def join(self, sequence: Sequence) -> None:
        """It decodes from now on, `left` tokens."""
        clock, held = self.clock, sequence.held
        sequence.state = DECODE
        sequence.base = base = held - clock
        sequence.end = end = clock + sequence.left
        self.count += 1
        self.context_tokens += held
        edge = -base % self.size
        self.fill[edge] += 1
        self._edges += edge
        heappush(self.ends, (end, sequence.order, sequence))

    def leave(self, sequence: Sequence) -> None:
        base = sequence.base
        self.count -= 1
        self.context_tokens -= base + self.clock
        edge = -base % self.size
        self.fill[edge] -= 1
        self._edges -= edge
        sequence.state = GONE

    def live(self) -> list[Sequence]:
        return [entry[2] for entry in self.ends if entry[2].state == DECODE]

    def keys(self) -> list[int]:
        """Who they are, earliest arrival first."""
        return [sequence.key for sequence in sorted(self.live(), key=lambda s: s.order)]

    def until_end(self) -> int:
        """Steps until the first of them makes its last token. There must be one."""
        ends = self.ends
        while ends[0][2].state != DECODE:
            heappop(ends)
        return ends[0][0] - self.clock

    def blocks(self, steps: int = 0) -> int:
        """Blocks of all of them, so many steps from now."""
        if not self.count:
            return 0
        size = self.size
        at = (self.clock + steps) % size
        # A block has to spare how far its edge is from here; those before it are a block's length away from that.
        unused = self._edges - at * self.count + size * sum(self.fill[:at])
        return (self.context_tokens + steps * self.count + unused) // size

    def blocks_at_most(self, steps: int) -> int:
        """No fewer than `blocks`, without looking at each."""
        return (self.context_tokens + self.count * (steps + self.size - 1)) // self.size

    def until_full(self, room_blocks: int) -> int:
        """Steps that so many blocks suffice for."""
        rounds, rest = divmod(room_blocks - self.blocks(), self.count)
        steps = rounds * self.size
        while (needed := self.fill[(self.clock + steps) % self.size]) <= rest:
            rest -= needed
            steps += 1
        return steps

    def ended(self, found: list[Happening], by_key: dict[int, Sequence]) -> None:
        """Let go of those that made their last token."""
        ends, clock = self.ends, self.clock
        while ends and ends[0][0] <= clock:
            sequence = heappop(ends)[2]
            if sequence.state == DECODE:
                base, key = sequence.base, sequence.key  # `leave`, written out
                self.count -= 1
                self.context_tokens -= base + clock
                edge = -base % self.size
                self.fill[edge] -= 1
                self._edges -= edge
                sequence.state = GONE
                del by_key[key]
                found.append((FINISHED, key))

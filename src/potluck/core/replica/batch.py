"""Continuous batching with chunked prefill: what one replica computes in its next step.

The rules are those of Orca (OSDI '22), Sarathi-Serve (OSDI '24) and vLLM (SOSP '23 and its v1 scheduler):

1. Every decoding sequence gets one token. The budget is at least the number of slots, so all of them fit.
2. What is left goes to prompts that have begun: higher priority first, then in the order in which they began.
3. Then waiting ones begin: higher priority first, then earlier arrival; nobody overtakes. A sequence begins when
   there is a slot and room for its whole prompt; beside others a few blocks stay spare. Several tenants divide the
   budget by weight, each with a line of its own.
4. When the decodes outgrow the memory, the sequence of the lowest priority that arrived last is preempted: all it had
   becomes prompt again, and it waits ahead of everyone who arrived after it.

The step that computes a prompt's last token yields the first output token. All decodes move in lockstep, so a
simulator need not step: `steady` says how many steps will be alike, `advance(k)` does k at the cost of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from potluck.core.errors import CapacityError, InputError
from potluck.core.state.facts import BLOCK_TOKENS

FIRST: Final = 0
DONE: Final = 1
FINISHED: Final = 2
PREEMPTED: Final = 3
RESUMED: Final = 4
"""First output token; end of a segment that hands over; last token; loss of its blocks; first token after that."""
WAITING: Final = 0
PREFILL: Final = 1
DECODE: Final = 2
KEPT: Final = 3
GONE: Final = 4

LATE: Final = -1_000_000
"""Priority of prompts that are late anyway, below all users' own. One is computed at a time: it takes room."""
LOWEST: Final = -(1 << 60)

Happening = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    total_blocks: int
    token_budget: int = 2048  # New tokens of one step, prompts and decodes together.
    max_running: int = 1024  # Sequences that have begun: slots.
    chunk_tokens: int | None = None
    """New tokens of one prompt in one step, where that is less than the budget."""
    spare_blocks: int = -1
    """Blocks left free when a sequence begins beside others; a hundredth of all unless said."""
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        for name in ("total_blocks", "token_budget", "max_running", "block_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"limits: {name}", f"must be at least 1, is {getattr(self, name)}")
        if self.token_budget < self.max_running:
            problem = f"must give each of the {self.max_running} sequences a token"
            raise InputError("limits: token_budget", problem)
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise InputError("limits: chunk_tokens", f"must be at least 1, is {self.chunk_tokens}")

    @property
    def spare(self) -> int:
        return self.spare_blocks if self.spare_blocks >= 0 else self.total_blocks // 100


Chunks = list[tuple[int, int, int]]  # (key, new tokens, context before them)


class BatchStep:
    __slots__ = ("chunks", "context_tokens", "decodes", "newcomers", "preempted")

    def __init__(
        self, chunks: Chunks, decodes: int, context_tokens: int, newcomers: int, preempted: list[int]
    ) -> None:
        self.chunks = chunks
        self.decodes = decodes
        self.context_tokens = context_tokens  # Of the decodes, added up.
        self.newcomers = newcomers  # Decodes that make their first token here.
        self.preempted = preempted

    @property
    def tokens(self) -> int:
        return self.decodes + sum(chunk[1] for chunk in self.chunks)


class Sequence:
    """A sequence as the Batcher keeps it; written by nobody else."""

    __slots__ = ("asked", "base", "blocks", "end", "held", "key", "left", "order", "priority", "state",
                 "tenant", "todo")  # fmt: skip

    base: int  # Its context less the clock, once it decodes.
    end: int  # The clock at its last token, once it decodes.

    def __init__(self, key: int, priority: int, order: int, todo: int, held: int, asked: int) -> None:
        self.key = key
        self.priority = priority
        self.order = order
        self.todo = todo
        self.held = held  # Tokens whose KV is there; while decoding it is base + clock instead.
        self.asked = asked
        self.left = asked  # Output tokens to make; while decoding it is end - clock instead.
        self.blocks = 0  # Blocks of the prompt; while decoding they follow from the context.
        self.state = WAITING
        self.tenant = ""  # Whose it is; not said while all are one tenant's.

    def left_at(self, clock: int) -> int:
        return self.end - clock if self.state == DECODE else self.left


Queue = list[tuple[int, int, Sequence]]
"""A heap by priority, highest first, then arrival; may hold some that left it."""


def head_of(queue: Queue) -> Sequence | None:
    while queue:
        if queue[0][2].state == WAITING:
            return queue[0][2]
        heappop(queue)
    return None


def require_fit(most_tokens: int, key: int, new_tokens: int, context_tokens: int, output_tokens: int) -> None:
    """A sequence must have a prompt, and room to end; nothing to compute is fine where there is context."""
    whole = new_tokens + context_tokens
    if new_tokens < 0 or context_tokens < 0 or output_tokens < 0 or not whole:
        raise InputError(f"sequence {key}", "needs a prompt of at least one token")
    # The last output token is not put in again, so it needs no room.
    if whole + max(output_tokens - 1, 0) > most_tokens:
        tokens = f"{whole} + {output_tokens} tokens"
        raise CapacityError(f"sequence {key} of {tokens} can never fit in {most_tokens}")


class DecodeLockstep:
    __slots__ = ("_edges", "clock", "context_tokens", "count", "ends", "fill", "size")

    def __init__(self, block_tokens: int) -> None:
        self.size = block_tokens
        self.clock = 0  # Steps so far, those without decodes included.
        self.count = 0
        self.context_tokens = 0
        self.ends: list[tuple[int, int, Sequence]] = []  # A heap by end; may hold some that left before.
        self.fill = [0] * block_tokens
        """Sequences by the clock, modulo the block size, at which they need a block."""
        self._edges = 0  # Those clocks, added up over all sequences.

    def join(self, sequence: Sequence) -> None:
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
        return [sequence.key for sequence in sorted(self.live(), key=lambda s: s.order)]

    def until_end(self) -> int:
        """Steps until the first of them makes its last token. There must be one."""
        ends = self.ends
        while ends[0][2].state != DECODE:
            heappop(ends)
        return ends[0][0] - self.clock

    def blocks(self, steps: int = 0) -> int:
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
        rounds, rest = divmod(room_blocks - self.blocks(), self.count)
        steps = rounds * self.size
        while (needed := self.fill[(self.clock + steps) % self.size]) <= rest:
            rest -= needed
            steps += 1
        return steps

    def ended(self, happenings: list[Happening], by_key: dict[int, Sequence]) -> None:
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
                happenings.append((FINISHED, key))


MOST_WEIGHT: Final = 1e9


def require_weight(weight: float) -> None:
    if not 0 < weight < MOST_WEIGHT:
        raise InputError("weight", f"must be above 0 and below {MOST_WEIGHT:g}, is {weight}")


class TenantShares:
    """The tenants of one replica, each with its line of waiting sequences. `Batcher` alone changes it."""

    __slots__ = ("_had", "_weights", "lines")

    def __init__(self, tenant: str, queue: Queue) -> None:
        self.lines: dict[str, Queue] = {tenant: queue}
        self._weights: dict[str, float] = {tenant: 1.0}
        self._had: dict[str, float] = {tenant: 0.0}  # Tokens computed for it, over its weight.

    def come(self, tenant: str, weight: float) -> None:
        """A sequence of a tenant came. A newcomer has had as much as whoever has had least."""
        if tenant not in self.lines:
            self._had[tenant] = min(self._had.values())
            self.lines[tenant] = []
        self._weights[tenant] = weight

    def had(self, tenant: str, tokens: int) -> None:
        self._had[tenant] += tokens / self._weights[tenant]

    def parts(self, budget: int, wants: Mapping[str, int]) -> list[tuple[str, int]]:
        """Who may have how much, whoever has had least first; they add up to the budget, or to all that is wanted."""
        order = sorted((tenant for tenant, tokens in wants.items() if tokens), key=self._had.__getitem__)
        given = divided(budget, [(self._weights[tenant], wants[tenant]) for tenant in order])
        return list(zip(order, given, strict=True))


def divided(budget: int, wants: list[tuple[float, int]]) -> list[int]:
    """(weight, tokens wanted) to tokens given; fractions go to those that come first."""
    given = [0] * len(wants)
    open_ = [place for place, (_, tokens) in enumerate(wants) if tokens > 0]
    while open_ and budget > 0:
        weight = _weight(wants, open_)
        small = [place for place in open_ if wants[place][1] * weight <= budget * wants[place][0]]
        if not small:
            break
        for place in small:
            given[place] = wants[place][1]
        budget -= sum(given[place] for place in small)
        open_ = [place for place in open_ if place not in small]
    weight = _weight(wants, open_)
    for place in open_:
        given[place] = int(budget * wants[place][0] / weight)
    left = budget - sum(given[place] for place in open_)
    for place in open_[:left]:
        given[place] += 1
    return given


def _weight(wants: list[tuple[float, int]], places: list[int]) -> float:
    """A loop, as compiled code takes a sum that begins with 0 for one of whole numbers."""
    weight = 0.0
    for place in places:
        weight += wants[place][0]
    return weight


class Batcher:
    """The sequences of one replica: all that came and did not end, and their only mutator."""

    __slots__ = (
        "_budget", "_by_key", "_chunk", "_most_tokens", "_newcomers", "_order", "_other_blocks", "_own",
        "_pending", "_prefills", "_queue", "_shares", "_slots", "_spare", "_tenant", "_total", "blocked",
        "decoding", "limits", "queued", "reserved", "size", "todo_tokens",
    )  # fmt: skip

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.size = limits.block_tokens
        self._total = limits.total_blocks
        self._most_tokens = limits.total_blocks * limits.block_tokens
        self._chunk = limits.token_budget if limits.chunk_tokens is None else limits.chunk_tokens
        self._budget = limits.token_budget
        self._slots = limits.max_running
        self._spare = limits.spare
        self.decoding = DecodeLockstep(limits.block_tokens)
        """The sequences that decode. Others may read it: `keys` says who they are."""
        self.queued = 0
        self.todo_tokens = 0
        self._other_blocks = 0  # Blocks of all but the decodes.
        self._order = 0
        self.blocked = False
        """The next in line has no slot or no room, and nothing was freed since: nobody begins for now."""
        self._by_key: dict[int, Sequence] = {}
        self._queue: Queue = []
        self._own: Queue = []  # Waiting sequences that have their blocks.
        self._prefills: list[Sequence] = []
        self.reserved: dict[int, int] = {}  # Blocks set aside for those to come. Others may read it.
        self._pending: BatchStep | None = None
        self._newcomers: list[Sequence] = []
        self._tenant = ""  # Whose sequences these are, while they are all of one tenant.
        self._shares: TenantShares | None = None
        """From the second tenant on, until nobody is left: their lines and shares; `_queue` is empty then."""

    def add(
        self,
        key: int,
        compute_tokens: int,
        context_tokens: int = 0,
        output_tokens: int = 0,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        """A sequence to run; `context_tokens` have their KV. No output: it keeps its blocks until `release`."""
        whole = compute_tokens + context_tokens
        if key in self._by_key:
            raise InputError(f"sequence {key}", "is already here")
        if compute_tokens < 1 or context_tokens < 0 or not 0 <= output_tokens <= self._most_tokens - whole:
            require_fit(self._most_tokens, key, compute_tokens, context_tokens, output_tokens)
        todo = compute_tokens or 1
        order = self._order
        self._order = order + 1
        sequence = Sequence(key, priority, order, todo, whole - todo, output_tokens)
        if tenant != self._tenant or self._shares is not None:
            self._divide(sequence, tenant, weight)
        self._by_key[key] = sequence
        self.queued += 1
        self.todo_tokens += todo
        queue = self._queue if self._shares is None else self._shares.lines[tenant]
        if self.reserved and key in self.reserved and self._claim(sequence, -(-whole // self.size)):
            queue = self._own
        heappush(queue, (-priority, order, sequence))
        if self.blocked and queue[0][2] is sequence:
            self.blocked = False

    def reserve(self, key: int, tokens: int, after_steps: int = 0) -> bool:
        """Take blocks for a prompt whose KV is on its way, or say that there is no room (after so many steps)."""
        blocks = -(-tokens // self.size)
        room = self._total - self._other_blocks - blocks
        if self.decoding.blocks_at_most(after_steps + 1) > room:  # as a rule it fits by far
            free = self.free_after(after_steps) if after_steps else self.free_blocks
            if blocks > free:
                return False
        if key in self.reserved or key in self._by_key:
            return False
        self._other_blocks += blocks
        self.reserved[key] = blocks
        return True

    def release(self, key: int) -> None:
        """Free what is kept for a sequence that is not running: handed over, or reserved and not needed."""
        sequence = self._by_key.get(key)
        if sequence is None or sequence.state == KEPT:
            self.cancel(key)

    def cancel(self, key: int) -> None:
        """Forget a sequence in whatever state; an unknown one is none of ours any more."""
        self.blocked = False
        self._other_blocks -= self.reserved.pop(key, 0)
        sequence = self._by_key.get(key)
        if sequence is not None:
            self._drop(sequence)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has; what the scheduled step takes is taken."""
        return self.free_after(0 if self._pending is None else 1)

    def free_after(self, steps: int) -> int:
        """Blocks that nobody has once the decodes have grown by so many steps."""
        return self._total - self._other_blocks - self.decoding.blocks(steps)

    @property
    def running(self) -> int:
        return self.decoding.count + len(self._prefills)

    @property
    def held_tokens(self) -> int:
        return self.decoding.context_tokens + sum(sequence.held for sequence in self._prefills)

    def keys(self) -> list[int]:
        return list(self._by_key)

    def begins(self, key: int) -> bool:
        sequence = self._by_key[key]
        if sequence.state != WAITING or sequence.blocks:
            return True
        return -(-(sequence.todo + sequence.held) // self.size) <= self.free_blocks

    def streamed(self, key: int) -> int:
        sequence = self._by_key[key]
        return sequence.asked - sequence.left_at(self.decoding.clock)

    def _drop(self, sequence: Sequence) -> None:
        self.todo_tokens -= sequence.todo
        if sequence.state == DECODE:
            self.decoding.leave(sequence)
        else:
            self._other_blocks -= sequence.blocks
            if sequence.state == WAITING:
                self.queued -= 1
            elif sequence.state == PREFILL:
                self._prefills.remove(sequence)
        sequence.state = GONE
        del self._by_key[sequence.key]

    def _claim(self, sequence: Sequence, blocks: int) -> bool:
        """Turn a reservation into blocks. When even more are needed and not there, the KV is given up."""
        reserved = self.reserved.pop(sequence.key)
        if blocks - reserved <= self.free_blocks:
            self._other_blocks += blocks - reserved
            sequence.blocks = blocks
            return True
        self._other_blocks -= reserved
        self.blocked = False
        self.todo_tokens += sequence.held
        sequence.todo += sequence.held
        sequence.held = 0
        return False

    def _divide(self, sequence: Sequence, tenant: str, weight: float) -> None:
        """A second tenant came, or there are several: each has a line of its own. With nobody left there is one."""
        sequence.tenant = tenant
        if not self._by_key:
            self._tenant, self._shares = tenant, None
            return
        shares = self._shares
        if shares is None:
            for item in self._by_key.values():
                item.tenant = self._tenant
            shares = self._shares = TenantShares(self._tenant, self._queue)
            self._queue = []
        shares.come(tenant, weight)

    def next_step(self, *, admit: bool = True) -> BatchStep:
        """Schedule a step: blocks are taken now, progress counts at `commit`. With `admit` false nobody begins."""
        if self._pending is not None:
            raise InputError("batch: next_step", "the last step is not committed yet")
        decoding, size = self.decoding, self.size
        count = decoding.count
        chunks: Chunks = []
        preempted: list[int] = []
        room = self._total - self._other_blocks
        # Lockstep.blocks_at_most first: it nearly always settles the question.
        if decoding.context_tokens // size + count > room and decoding.blocks(1) > room:
            preempted = self._make_room()
            count = decoding.count
        budget = self._budget - count
        admit = admit and not (preempted and (count or self._prefills))
        if self._shares is not None and (self._prefills or self.queued):
            self._divided(self._shares, budget, chunks, admit)
        else:
            waits = self.queued > 0 and not self.blocked and admit
            if self._prefills:
                if waits and self._queue and -self._queue[0][0] > self._prefills[-1].priority:
                    budget = self._overtake(budget, chunks)
                else:
                    budget = self._go_on(self._prefills, budget, chunks)
            if waits and not self.blocked:
                self._admit(budget, chunks, self._queue)
        step = BatchStep(chunks, decoding.count, decoding.context_tokens, len(self._newcomers), preempted)
        self._pending = step
        return step

    def commit(self, step: BatchStep) -> list[Happening]:
        if step is not self._pending:
            raise InputError("batch: commit", "is not the step that was scheduled")
        self._pending = None
        decoding, by_key = self.decoding, self._by_key
        clock = decoding.clock + 1
        decoding.clock = clock
        decoding.context_tokens += decoding.count
        happenings: list[Happening] = []
        if self._newcomers:
            for sequence in self._newcomers:
                if sequence.state == DECODE:
                    self.todo_tokens -= 1
                    sequence.todo = 0
                    happenings.append((FIRST, sequence.key))
            self._newcomers = []
        ends = decoding.ends
        if ends and ends[0][0] <= clock:
            decoding.ended(happenings, by_key)
            self.blocked = False
        for key, tokens, _ in step.chunks:
            prefill = by_key.get(key)
            if prefill is not None and prefill.state == PREFILL:  # not cancelled meanwhile
                self.todo_tokens -= tokens
                prefill.held += tokens
                prefill.todo -= tokens
                if not prefill.todo:
                    self._computed(prefill, happenings)
        return happenings

    # What only a simulator needs.

    def steady(self) -> int:
        """How many further steps hold just the present decodes; the last may end some. 0: ask `next_step`."""
        decoding = self.decoding
        count = decoding.count
        if not count or self._prefills or (self.queued and not self.blocked) or self._pending is not None:
            return 0
        end, _, first = decoding.ends[0]
        steps = end - decoding.clock if first.state == DECODE else decoding.until_end()
        room = self._total - self._other_blocks
        # Lockstep.blocks_at_most, written out: this is asked before every run.
        if (decoding.context_tokens + count * (steps + self.size - 1)) // self.size > room:
            return min(steps, decoding.until_full(room))
        return steps

    def advance(self, steps: int) -> list[Happening]:
        """As many steps as `steady` allows, at once: the same as `next_step` and `commit` for each."""
        decoding = self.decoding
        clock = decoding.clock + steps
        decoding.clock = clock
        decoding.context_tokens += steps * decoding.count
        happenings: list[Happening] = []
        if decoding.ends[0][0] <= clock:
            decoding.ended(happenings, self._by_key)
            self.blocked = False
        return happenings

    def lone(self, steps: int) -> tuple[int, int, int] | None:
        """The only one that waits, as a chunk, if sure to begin whole after so many steps; 0 tokens: a decode."""
        decoding = self.decoding
        if self.queued != 1 or self._prefills or decoding.count >= self._slots or self._shares is not None:
            return None
        own = head_of(self._own) if self._own else None
        head = own or head_of(self._queue)
        if head is None or head.todo > min(self._chunk, self._budget - decoding.count):
            return None
        room = self._total - self._other_blocks
        if own is None:
            room -= self._spare - (-(head.todo + head.held) // self.size)
        if decoding.blocks_at_most(steps + 1) > room:
            return None
        return head.key, 0 if head.todo == 1 and head.left else head.todo, head.held

    def _overtake(self, budget: int, chunks: Chunks) -> int:
        head = head_of(self._queue)
        least = head.priority if head is not None else LOWEST
        first = [prefill for prefill in self._prefills if prefill.priority >= least]
        rest = self._prefills[len(first) :]
        budget = self._go_on(first, budget, chunks)
        if rest:
            budget = self._admit(budget, chunks, self._queue, rest[0].priority)
        return self._go_on(rest, budget, chunks)

    def _go_on(self, begun: list[Sequence], budget: int, chunks: Chunks) -> int:
        """The next chunks of prompts that have begun; returns what they leave of the budget."""
        for sequence in begun:
            tokens = min(sequence.todo, budget, self._chunk)
            if tokens:
                chunks.append((sequence.key, tokens, sequence.held))
                budget -= tokens
        return budget

    def _divided(self, shares: TenantShares, budget: int, chunks: Chunks, admit: bool) -> None:
        """Each tenant has its part of the budget, who has had least first; begun prompts take what is left over."""
        begun: dict[str, list[Sequence]] = {}
        for sequence in self._prefills:
            begun.setdefault(sequence.tenant, []).append(sequence)
        wants = {
            tenant: sum(min(item.todo, self._chunk) for item in begun.get(tenant, ()))
            + (budget if head_of(line) is not None or self._own else 0)
            for tenant, line in shares.lines.items()
        }
        for tenant, part in shares.parts(budget, wants):
            left = self._go_on(begun.get(tenant, []), part, chunks)
            if left and self.queued and not self.blocked and admit:
                left = self._admit(left, chunks, shares.lines[tenant])
            budget -= part - left
            shares.had(tenant, part - left)
        if budget > 0:
            self._fill_up(budget, chunks)

    def _fill_up(self, budget: int, chunks: Chunks) -> None:
        for place, (key, tokens, held) in enumerate(chunks):
            more = min(self._by_key[key].todo - tokens, self._chunk - tokens, budget)
            if more > 0:
                chunks[place] = (key, tokens + more, held)
                budget -= more

    def _admit(self, budget: int, chunks: Chunks, queue: Queue, above: int = LOWEST) -> int:
        """Let waiting ones begin, above a priority, while tokens, slots and room last; returns the budget's rest."""
        decoding, own, size = self.decoding, self._own, self.size
        running = decoding.count + len(self._prefills)
        while budget > 0 and self.queued:
            if running >= self._slots:
                self.blocked = True
                return budget
            head = head_of(own) if own else None
            if head is not None:
                if head.priority <= above:
                    return budget
                heappop(own)
            else:
                while queue and queue[0][2].state != WAITING:  # it left
                    heappop(queue)
                if not queue:  # the others are other tenants'
                    return budget
                head = queue[0][2]
                late = head.priority <= LATE and len(self._prefills) > 0
                if head.priority <= above or (late and self._prefills[-1].priority <= LATE):
                    return budget
                blocks = -(-(head.todo + head.held) // size)
                room = self._total - self._other_blocks - blocks
                if running:
                    room -= self._spare
                if decoding.context_tokens // size + decoding.count > room and decoding.blocks(1) > room:
                    self.blocked = True
                    return budget
                heappop(queue)
                self._other_blocks += blocks
                head.blocks = blocks
            self.queued -= 1
            running += 1
            tokens = head.todo
            if tokens == 1 and head.left:
                self._newcomers.append(head)
                self._other_blocks -= head.blocks
                decoding.join(head)
                budget -= 1
                continue
            if tokens > budget or tokens > self._chunk:
                tokens = min(budget, self._chunk)
            chunks.append((head.key, tokens, head.held))
            self._begun(head)
            head.state = PREFILL
            budget -= tokens
        return budget

    def _begun(self, sequence: Sequence) -> None:
        begun = self._prefills
        place = len(begun)
        while place and begun[place - 1].priority < sequence.priority:
            place -= 1
        begun.insert(place, sequence)

    def _computed(self, sequence: Sequence, happenings: list[Happening]) -> None:
        self._prefills.remove(sequence)
        asked, left, key = sequence.asked, sequence.left, sequence.key
        if not asked:
            sequence.state = KEPT
            happenings.append((DONE, key))
            self.blocked = False
            return
        happenings.append((FIRST if left == asked else RESUMED, key))
        self._other_blocks -= sequence.blocks
        if left > 1:
            sequence.left = left - 1
            self.decoding.join(sequence)
            return
        sequence.state = GONE
        del self._by_key[key]
        happenings.append((FINISHED, key))
        self.blocked = False

    def _make_room(self) -> list[int]:
        """Preempt the least deserving sequences until the decodes have their blocks for one step."""
        preempted: list[int] = []
        while self._other_blocks + self.decoding.blocks(1) > self._total:
            preempted_sequence = min(
                self._prefills + self.decoding.live(), key=lambda s: (s.priority, -s.order)
            )
            self._preempt(preempted_sequence)
            preempted.append(preempted_sequence.key)
        return preempted

    def _preempt(self, preempted_sequence: Sequence) -> None:
        """What it had is prompt again: its context, and the token that was to be put in next."""
        self.blocked = False
        left = preempted_sequence.left_at(self.decoding.clock)
        todo = (
            preempted_sequence.base + self.decoding.clock + 1
            if preempted_sequence.state == DECODE
            else preempted_sequence.todo + preempted_sequence.held
        )
        self._drop(preempted_sequence)
        again = Sequence(
            preempted_sequence.key,
            preempted_sequence.priority,
            preempted_sequence.order,
            todo,
            0,
            preempted_sequence.asked,
        )
        again.left, again.tenant = left, preempted_sequence.tenant
        self._by_key[preempted_sequence.key] = again
        self.queued += 1
        self.todo_tokens += todo
        queue = self._queue if self._shares is None else self._shares.lines[preempted_sequence.tenant]
        heappush(queue, (-preempted_sequence.priority, preempted_sequence.order, again))

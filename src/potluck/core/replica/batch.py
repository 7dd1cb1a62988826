"""Continuous batching with chunked prefill: what one replica computes in its next step.

The rules are those of Orca (OSDI '22: batches change between any two steps), Sarathi-Serve (OSDI '24: prompts
run in chunks beside the decodes, under a token budget) and vLLM (SOSP '23 and its v1 scheduler):

1. Every decoding sequence gets one token. The budget is at least the number of slots, so all of them fit.
2. What is left of the token budget goes to prompts that have begun, in the order in which they began.
3. Then waiting ones begin: higher priority first, then earlier arrival, and nobody overtakes. A sequence begins
   when there is a slot and room for its whole prompt; beside others a few blocks stay spare, so that those can
   grow. Sequences whose KV came from elsewhere have their blocks already and wait for nothing but a slot.
4. When the decodes outgrow the memory, the sequence of the lowest priority that arrived last is preempted: its
   blocks are freed, all it had becomes prompt again, and it waits ahead of everyone who arrived after it.

The step that computes the last token of a prompt yields the first output token, so O output tokens take O - 1
steps more. A sequence of which only one prompt token is missing (its KV was received) is a decode at once.

`next_step` and `commit` are what an engine calls. All decodes move in lockstep, which is why a simulator need
not step (`lockstep.py`): `steady` says how many steps will be alike, `advance(k)` does k of them at once, at the
same cost as one.
"""

from __future__ import annotations

from heapq import heappop, heappush

from potluck.core.errors import InputError
from potluck.core.replica.batch_values import (
    DECODE,
    DONE,
    FINISHED,
    FIRST,
    GONE,
    KEPT,
    PREEMPTED,
    PREFILL,
    RESUMED,
    WAITING,
    Happening,
    Limits,
    Queue,
    Sequence,
    Step,
    head_of,
    require_fit,
)
from potluck.core.replica.lockstep import Lockstep

__all__ = ["DONE", "FINISHED", "FIRST", "PREEMPTED", "RESUMED", "Batcher", "Happening", "Limits", "Step"]


class Batcher:
    """The sequences of one replica, and their only mutator."""

    # fmt: off
    __slots__ = (
        "_budget", "_by_key", "_chunk", "_most_tokens", "_newcomers", "_order", "_other_blocks", "_own",
        "_pending", "_prefills", "_queue", "_slots", "_spare", "_total", "blocked", "decoding", "limits",
        "queued", "reserved", "size", "todo_tokens",
    )
    # fmt: on

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.size = limits.block_tokens
        self._total = limits.total_blocks
        self._most_tokens = limits.total_blocks * limits.block_tokens
        self._chunk = limits.token_budget if limits.chunk_tokens is None else limits.chunk_tokens
        self._budget = limits.token_budget
        self._slots = limits.max_running
        self._spare = limits.spare
        self.decoding = Lockstep(limits.block_tokens)
        """The sequences that decode. Others may read it: `keys` says who they are."""
        self.queued = 0
        """Sequences that have not begun."""
        self.todo_tokens = 0
        """Prompt tokens not computed, of all sequences."""
        self._other_blocks = 0
        """Blocks of all but the decodes."""
        self._order = 0
        self.blocked = False
        """The next in line has no slot or no room, and nothing was freed since that was found: nobody begins
        before something ends."""
        self._by_key: dict[int, Sequence] = {}
        self._queue: Queue = []
        self._own: Queue = []
        """Waiting sequences that have their blocks."""
        self._prefills: list[Sequence] = []
        self.reserved: dict[int, int] = {}
        """Blocks set aside for those to come. Others may read it."""
        self._pending: Step | None = None
        self._newcomers: list[Sequence] = []

    def add(
        self,
        key: int,
        compute_tokens: int,
        context_tokens: int = 0,
        output_tokens: int = 0,
        priority: int = 0,
    ) -> None:
        """A sequence to run. `context_tokens` have their KV here already; no output tokens: a segment that
        hands its KV over, and keeps its blocks until `release`. At least one token is always computed."""
        whole = compute_tokens + context_tokens
        if key in self._by_key:
            raise InputError(f"sequence {key}", "is already here")
        if compute_tokens < 1 or context_tokens < 0 or not 0 <= output_tokens <= self._most_tokens - whole:
            require_fit(self._most_tokens, key, compute_tokens, context_tokens, output_tokens)
        todo = compute_tokens or 1
        order = self._order
        self._order = order + 1
        sequence = Sequence(key, priority, order, todo, whole - todo, output_tokens)
        self._by_key[key] = sequence
        self.queued += 1
        self.todo_tokens += todo
        queue = self._queue
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

    def finish(self, key: int) -> None:
        """The end of a sequence before its last token (it said so itself) leaves as little behind."""
        self.cancel(key)

    def next_step(self, *, admit: bool = True) -> Step:
        """Schedule a step: who computes what. Blocks are taken now, progress counts at `commit`. With `admit`
        false nobody begins (the step began before they came)."""
        if self._pending is not None:
            raise InputError("batch: next_step", "the last step is not committed yet")
        decoding, size = self.decoding, self.size
        count = decoding.count
        chunks: list[tuple[int, int, int]] = []
        preempted: list[int] = []
        room = self._total - self._other_blocks
        # Lockstep.blocks_at_most first: it nearly always settles the question.
        if decoding.context_tokens // size + count > room and decoding.blocks(1) > room:
            preempted = self._make_room()
            count = decoding.count
        budget = self._budget - count
        if self._prefills:
            budget = self._go_on(budget, chunks)
        if self.queued and not self.blocked and admit and not (preempted and (count or self._prefills)):
            self._admit(budget, chunks)
        step = Step(chunks, decoding.count, decoding.context_tokens, len(self._newcomers), preempted)
        self._pending = step
        return step

    def commit(self, step: Step) -> list[Happening]:
        """The step was computed: count its tokens, and say what happened, to whom."""
        if step is not self._pending:
            raise InputError("batch: commit", "is not the step that was scheduled")
        self._pending = None
        decoding, by_key = self.decoding, self._by_key
        clock = decoding.clock + 1
        decoding.clock = clock
        decoding.context_tokens += decoding.count
        found: list[Happening] = []
        if self._newcomers:
            for sequence in self._newcomers:
                if sequence.state == DECODE:
                    self.todo_tokens -= 1
                    sequence.todo = 0
                    found.append((FIRST, sequence.key))
            self._newcomers = []
        ends = decoding.ends
        if ends and ends[0][0] <= clock:
            decoding.ended(found, by_key)
            self.blocked = False
        for key, tokens, _ in step.chunks:
            prefill = by_key.get(key)
            if prefill is not None and prefill.state == PREFILL:  # not cancelled meanwhile
                self.todo_tokens -= tokens
                prefill.held += tokens
                prefill.todo -= tokens
                if not prefill.todo:
                    self._computed(prefill, found)
        return found

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
        found: list[Happening] = []
        if decoding.ends[0][0] <= clock:
            decoding.ended(found, self._by_key)
            self.blocked = False
        return found

    def lone(self, steps: int) -> tuple[int, int, int] | None:
        """The only one that waits, if after so many steady steps it is sure to begin, and whole.

        As a chunk: (key, new tokens, context before them); no new tokens: it is a decode at once.
        """
        decoding = self.decoding
        if self.queued != 1 or self._prefills or decoding.count >= self._slots:
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

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has; what the scheduled step takes is taken."""
        return self.free_after(0 if self._pending is None else 1)

    def free_after(self, steps: int) -> int:
        """Blocks that nobody has once the decodes have grown by so many steps."""
        return self._total - self._other_blocks - self.decoding.blocks(steps)

    @property
    def running(self) -> int:
        """Sequences that have begun."""
        return self.decoding.count + len(self._prefills)

    @property
    def held_tokens(self) -> int:
        """KV tokens of running sequences."""
        return self.decoding.context_tokens + sum(sequence.held for sequence in self._prefills)

    def keys(self) -> list[int]:
        """All sequences, those kept for handing over included."""
        return list(self._by_key)

    def streamed(self, key: int) -> int:
        """Output tokens made so far."""
        sequence = self._by_key[key]
        return sequence.asked - sequence.left_at(self.decoding.clock)

    def _go_on(self, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        """The next chunks of prompts that have begun; returns what they leave of the budget."""
        for sequence in self._prefills:
            tokens = min(sequence.todo, budget, self._chunk)
            if tokens:
                chunks.append((sequence.key, tokens, sequence.held))
                budget -= tokens
        return budget

    def _admit(self, budget: int, chunks: list[tuple[int, int, int]]) -> None:
        """Let waiting ones begin while there are tokens, slots and room."""
        decoding, own, queue, size = self.decoding, self._own, self._queue, self.size
        running = decoding.count + len(self._prefills)
        while budget > 0 and self.queued:
            if running >= self._slots:
                self.blocked = True
                return
            head = head_of(own) if own else None
            if head is not None:
                heappop(own)
            else:
                while queue[0][2].state != WAITING:  # it left
                    heappop(queue)
                head = queue[0][2]
                blocks = -(-(head.todo + head.held) // size)
                room = self._total - self._other_blocks - blocks
                if running:
                    room -= self._spare
                if decoding.context_tokens // size + decoding.count > room and decoding.blocks(1) > room:
                    self.blocked = True
                    return
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
            self._prefills.append(head)
            head.state = PREFILL
            budget -= tokens

    def _computed(self, sequence: Sequence, found: list[Happening]) -> None:
        """The last chunk of a prompt is done."""
        self._prefills.remove(sequence)
        asked, left, key = sequence.asked, sequence.left, sequence.key
        if not asked:
            sequence.state = KEPT
            found.append((DONE, key))
            self.blocked = False
            return
        found.append((FIRST if left == asked else RESUMED, key))
        self._other_blocks -= sequence.blocks
        if left > 1:
            sequence.left = left - 1
            self.decoding.join(sequence)
            return
        sequence.state = GONE
        del self._by_key[key]
        found.append((FINISHED, key))
        self.blocked = False

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

    def _make_room(self) -> list[int]:
        """Preempt the least deserving sequences until the decodes have their blocks for one step."""
        preempted: list[int] = []
        while self._other_blocks + self.decoding.blocks(1) > self._total:
            victim = min(self._prefills + self.decoding.live(), key=lambda s: (s.priority, -s.order))
            self._preempt(victim)
            preempted.append(victim.key)
        return preempted

    def _preempt(self, victim: Sequence) -> None:
        """What it had is prompt again: its context, and the token that was to be put in next."""
        self.blocked = False
        left = victim.left_at(self.decoding.clock)
        todo = victim.base + self.decoding.clock + 1 if victim.state == DECODE else victim.todo + victim.held
        self._drop(victim)
        again = Sequence(victim.key, victim.priority, victim.order, todo, 0, victim.asked)
        again.left = left
        self._by_key[victim.key] = again
        self.queued += 1
        self.todo_tokens += todo
        heappush(self._queue, (-victim.priority, victim.order, again))

"""Continuous batching with chunked prefill: what one replica computes in its next step.

The rules are those of Orca (OSDI '22), Sarathi-Serve (OSDI '24) and vLLM (SOSP '23 and its v1 scheduler):

1. Every decoding sequence gets one token. The budget is at least the number of slots, so all of them fit.
2. What is left of the budget goes to prompts that have begun: higher priority first, then in the order in which they
   began. Somebody waiting that has a higher priority than one of these begins before it goes on.
3. Then waiting ones begin: higher priority first, then earlier arrival; nobody overtakes. A sequence begins when
   there is a slot and room for its whole prompt; beside others a few blocks stay spare. Sequences whose KV came from
   elsewhere have their blocks already. Several tenants divide the budget by weight, each with a line of its own.
4. When the decodes outgrow the memory, the sequence of the lowest priority that arrived last is preempted: all it had
   becomes prompt again, and it waits ahead of everyone who arrived after it.

The step that computes the last token of a prompt yields the first output token. A sequence of which only one prompt
token is missing (its KV was received) is a decode at once. All decodes move in lockstep, so a simulator need not
step: `steady` says how many steps will be alike, `advance(k)` does k of them at once, at the same cost as one.
"""

from __future__ import annotations

from heapq import heappop, heappush

from potluck.core.errors import InputError
from potluck.core.replica.sequences import (
    DECODE,
    DONE,
    FINISHED,
    FIRST,
    GONE,
    KEPT,
    LATE,
    LOWEST,
    PREFILL,
    RESUMED,
    WAITING,
    BatchStep,
    Happening,
    Queue,
    Sequence,
    Sequences,
    TenantShares,
    head_of,
)


class Batcher(Sequences):
    """The sequences of one replica, and their only mutator."""

    __slots__ = ()

    def next_step(self, *, admit: bool = True) -> BatchStep:
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
        """The step was computed: count its tokens, and say what happened, to whom."""
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
        """The only one that waits, if after so many steady steps it is sure to begin, and whole.

        As a chunk: (key, new tokens, context before them); no new tokens: it is a decode at once.
        """
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

    def _overtake(self, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        """Somebody waits that goes before prompts that have begun: these go on with what is left of the budget."""
        head = head_of(self._queue)
        least = head.priority if head is not None else LOWEST
        first = [prefill for prefill in self._prefills if prefill.priority >= least]
        rest = self._prefills[len(first) :]
        budget = self._go_on(first, budget, chunks)
        if rest:
            budget = self._admit(budget, chunks, self._queue, rest[0].priority)
        return self._go_on(rest, budget, chunks)

    def _go_on(self, begun: list[Sequence], budget: int, chunks: list[tuple[int, int, int]]) -> int:
        """The next chunks of prompts that have begun; returns what they leave of the budget."""
        for sequence in begun:
            tokens = min(sequence.todo, budget, self._chunk)
            if tokens:
                chunks.append((sequence.key, tokens, sequence.held))
                budget -= tokens
        return budget

    def _divided(
        self, shares: TenantShares, budget: int, chunks: list[tuple[int, int, int]], admit: bool
    ) -> None:
        """The same for several tenants: each goes on and begins in its part of the budget, by its own order, the one
        that has had least first. What one leaves, prompts that have begun take."""
        begun: dict[str, list[Sequence]] = {}
        for sequence in self._prefills:
            begun.setdefault(sequence.tenant, []).append(sequence)
        wants = {
            tenant: sum(min(item.todo, self._chunk) for item in begun.get(tenant, ()))
            + (budget if head_of(line) is not None or self._own else 0)
            for tenant, line in shares.lines.items()
        }
        for tenant, part in shares.parts(budget, wants):
            left = part
            for sequence in begun.get(tenant, ()):
                tokens = min(sequence.todo, left, self._chunk)
                if tokens:
                    chunks.append((sequence.key, tokens, sequence.held))
                    left -= tokens
            if left and self.queued and not self.blocked and admit:
                left = self._admit(left, chunks, shares.lines[tenant])
            budget -= part - left
            shares.had(tenant, part - left)
        if budget > 0:
            self._fill_up(budget, chunks)

    def _fill_up(self, budget: int, chunks: list[tuple[int, int, int]]) -> None:
        """Let chunks grow into what is left of the budget, in their order."""
        for place, (key, tokens, held) in enumerate(chunks):
            more = min(self._by_key[key].todo - tokens, self._chunk - tokens, budget)
            if more > 0:
                chunks[place] = (key, tokens + more, held)
                budget -= more

    def _admit(
        self, budget: int, chunks: list[tuple[int, int, int]], queue: Queue, above: int = LOWEST
    ) -> int:
        """Let waiting ones begin, above a priority, while there are tokens, slots and room; returns what they leave
        of the budget."""
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
                if head.priority <= above or (head.priority <= LATE and self._yields()):
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

    def _yields(self) -> bool:
        """Whether a prompt that is late anyway has begun."""
        return bool(self._prefills) and self._prefills[-1].priority <= LATE

    def _begun(self, sequence: Sequence) -> None:
        """Prompts that have begun are in the order in which they go on."""
        begun = self._prefills
        place = len(begun)
        while place and begun[place - 1].priority < sequence.priority:
            place -= 1
        begun.insert(place, sequence)

    def _computed(self, sequence: Sequence, happenings: list[Happening]) -> None:
        """The last chunk of a prompt is done."""
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
        again.left, again.tenant = left, victim.tenant
        self._by_key[victim.key] = again
        self.queued += 1
        self.todo_tokens += todo
        queue = self._queue if self._shares is None else self._shares.lines[victim.tenant]
        heappush(queue, (-victim.priority, victim.order, again))

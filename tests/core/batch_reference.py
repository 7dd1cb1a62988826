"""A plain reference batcher that looks at every sequence in every step."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from potluck.core.replica.batch import DONE, FINISHED, FIRST, LATE, LOWEST, RESUMED, BatchLimits, Happening


@dataclass
class PlainSequence:
    """One sequence."""

    key: int
    priority: int
    order: int
    todo: int
    held: int
    asked: int
    left: int
    state: str = "waiting"
    blocks: int = 0
    began: int = 0
    chunk: int = 0


class PlainBatcher:
    """What `Batcher` must be equal to."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.all: list[PlainSequence] = []
        self.reserved: dict[int, int] = {}
        self.count = 0
        self.steps = 0

    def of(self, *states: str) -> list[PlainSequence]:
        return [s for s in self.all if s.state in states]

    def blocks(self, tokens: int) -> int:
        return ceil(tokens / self.limits.block_tokens)

    @property
    def used(self) -> int:
        return sum(s.blocks for s in self.all) + sum(self.reserved.values())

    @property
    def free(self) -> int:
        return self.limits.total_blocks - self.used

    def add(self, key: int, compute: int, context: int, output: int, priority: int) -> None:
        todo = max(compute, 1)
        new = PlainSequence(key, priority, self.count, todo, compute + context - todo, output, output)
        self.count += 1
        self.all.append(new)
        if key in self.reserved:
            had = self.reserved.pop(key)
            if self.blocks(compute + context) <= self.free:
                new.blocks = self.blocks(compute + context)
                new.state = "own"
            else:
                new.todo, new.held = new.todo + new.held, 0
            del had

    def reserve(self, key: int, tokens: int) -> bool:
        if self.blocks(tokens) > self.free or key in self.reserved or any(s.key == key for s in self.all):
            return False
        self.reserved[key] = self.blocks(tokens)
        return True

    def release(self, key: int) -> None:
        self.reserved.pop(key, None)
        self.all = [s for s in self.all if s.key != key or s.state != "kept"]

    def cancel(self, key: int) -> None:
        self.reserved.pop(key, None)
        self.all = [s for s in self.all if s.key != key]

    def next_step(self) -> tuple[list[tuple[int, int, int]], int, int, list[int]]:
        preempted = self._preempt()
        for s in self.of("decode"):
            s.blocks = self.blocks(s.held + 1)
        budget = self.limits.token_budget - len(self.of("decode"))
        chunks = []
        for s in self.all:
            s.chunk = 0
        begun = sorted(self.of("prefill"), key=lambda s: (-s.priority, s.began))
        begins = not preempted or not self.of("prefill", "decode")
        least = max((s.priority for s in self.of("waiting")), default=LOWEST) if begins else LOWEST
        rest = [s for s in begun if s.priority < least]
        for s in begun[: len(begun) - len(rest)]:
            budget = self._give(s, budget, chunks)
        if rest:
            budget = self._begin(budget, chunks, rest[0].priority)
        for s in rest:
            budget = self._give(s, budget, chunks)
        if begins:
            self._begin(budget, chunks, LOWEST)
        decodes = self.of("decode", "new")
        return chunks, len(decodes), sum(s.held for s in decodes), preempted

    def _preempt(self) -> list[int]:
        preempted = []
        while True:
            growing = sum(self.blocks(s.held + 1) - s.blocks for s in self.of("decode"))
            if growing <= self.free:
                return preempted
            victim = min(self.of("prefill", "decode"), key=lambda s: (s.priority, -s.order))
            victim.todo += victim.held + (1 if victim.state == "decode" else 0)
            victim.held = victim.blocks = 0
            victim.state = "waiting"
            preempted.append(victim.key)

    def _give(self, s: PlainSequence, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        most = self.limits.chunk_tokens or self.limits.token_budget
        s.chunk = min(s.todo, budget, most)
        if s.chunk:
            chunks.append((s.key, s.chunk, s.held))
        return budget - s.chunk

    def _begin(self, budget: int, chunks: list[tuple[int, int, int]], above: int) -> int:
        def turn(s: PlainSequence) -> tuple[int, int]:
            return -s.priority, s.order

        while budget > 0:
            running = self.of("prefill", "decode", "new")
            line = sorted(self.of("own"), key=turn) or sorted(self.of("waiting"), key=turn)
            if not line or len(running) >= self.limits.max_running or line[0].priority <= above:
                return budget
            head = line[0]
            if head.state == "waiting":
                if head.priority <= LATE and any(s.priority <= LATE for s in self.of("prefill")):
                    return budget
                needed = self.blocks(head.todo + head.held)
                if needed + (self.limits.spare if running else 0) > self.free:
                    return budget
                head.blocks = needed
            self.steps += 1
            head.began = self.steps
            if head.todo == 1 and head.asked:
                head.state = "new"
                budget -= 1
            else:
                head.state = "prefill"
                budget = self._give(head, budget, chunks)
        return budget

    def commit(self) -> list[Happening]:
        happenings: list[Happening] = []
        for s in list(self.all):
            if s.state in ("new", "decode"):
                s.held += 1
                s.left -= 1
                if s.state == "new":
                    happenings.append((FIRST, s.key))
                    s.todo = 0
                s.state = "decode"
                if not s.left:
                    self._gone(s, happenings)
            elif s.state == "prefill":
                s.held += s.chunk
                s.todo -= s.chunk
                if not s.todo:
                    self._computed(s, happenings)
        return happenings

    def _computed(self, s: PlainSequence, happenings: list[Happening]) -> None:
        if not s.asked:
            s.state = "kept"
            happenings.append((DONE, s.key))
            return
        happenings.append((FIRST if s.left == s.asked else RESUMED, s.key))
        s.left -= 1
        s.state = "decode"
        if not s.left:
            self._gone(s, happenings)

    def _gone(self, s: PlainSequence, happenings: list[Happening]) -> None:
        self.all.remove(s)
        happenings.append((FINISHED, s.key))

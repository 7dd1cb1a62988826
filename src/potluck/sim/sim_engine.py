"""The engine of a simulated replica: a Batcher with step times from a table, advanced on demand.

Under way is either one scheduled step, or a run of equal decode steps, from `_start_s` to `_end_s`. An arrival cuts a
run at the end of the step under way. So the cost grows with arrivals and ends, not with tokens. With `fast_forward`
off every step is scheduled on its own, with equal times up to rounding.
"""

from __future__ import annotations

from math import inf
from typing import Final

import numpy as np

from potluck.core.replica.batch import PREEMPTED, RESUMED, Batcher, BatchLimits, BatchStep, Happening
from potluck.core.state.events import ReplicaStatus
from potluck.perf.phases import CHUNK_TOKENS
from potluck.perf.step_timer import Floats
from potluck.perf.throughput import MAX_BATCH
from potluck.sim.step_table import DecodeRow, StepTimes

BINS_PER_DOUBLING: Final = 16  # Bins are 4.4 % wide.
LEAST_S: Final = 2.0**-20
BINS: Final = 40 * BINS_PER_DOUBLING
BUFFER: Final = 1 << 14

EDGES_S: Floats = LEAST_S * 2.0 ** (np.arange(BINS + 1) / BINS_PER_DOUBLING)
"""Bin i holds gaps from EDGES_S[i] to EDGES_S[i + 1]; what lies outside is in the first or last bin."""
UPPER_S: Final = [LEAST_S * 2.0 ** ((place + 1) / BINS_PER_DOUBLING) for place in range(BINS)]


class TokenGaps:
    """A histogram of the gaps between output tokens; gaps are counted in chunks."""

    def __init__(self) -> None:
        self._counts: Floats | None = None
        self.gaps_s: list[float] = []
        """Gaps not counted yet; `tokens` has the number of tokens of each."""
        self.tokens: list[int] = []

    def add(self, gap_s: float, tokens: int) -> None:
        self.gaps_s.append(gap_s)
        self.tokens.append(tokens)
        if len(self.tokens) >= BUFFER:
            self._count()

    def filled(self) -> list[tuple[int, int]]:
        self._count()
        if self._counts is None:
            return []
        places = np.flatnonzero(self._counts)
        return [*zip(places.tolist(), np.rint(self._counts[places]).astype(np.int64).tolist(), strict=True)]

    def _count(self) -> None:
        if self.tokens:
            where = np.clip(np.searchsorted(EDGES_S, self.gaps_s, side="right") - 1, 0, BINS - 1)
            more: Floats = np.bincount(where, self.tokens, BINS).astype(np.float64)
            self._counts = more if self._counts is None else self._counts + more
            self.gaps_s.clear()
            self.tokens.clear()


TimedHappening = tuple[float, int, int]
"""(time, FIRST, DONE, FINISHED or PREEMPTED of `core.replica.batch`, request key)."""


def replica_limits(
    table: StepTimes, total_blocks: int, *, token_budget: int = CHUNK_TOKENS, max_running: int = MAX_BATCH
) -> BatchLimits:
    """A pipeline's round has a token budget for each of its lanes; a prompt is in one lane."""
    return BatchLimits(
        total_blocks,
        token_budget=max(token_budget * table.lanes, max_running),
        max_running=max_running,
        chunk_tokens=token_budget,
    )


class SimEngine:
    """Times must not decrease; callers call `advance` at `wake_s` at the latest."""

    def __init__(self, table: StepTimes, limits: BatchLimits, *, fast_forward: bool = True) -> None:
        self.table = table
        self._rows = table.rows
        self.batch = Batcher(limits)
        self.gaps = TokenGaps()
        """Gaps between output tokens, as a histogram."""
        self.computed_tokens = 0
        """Prompt tokens computed, including recomputation."""
        self.decoded_tokens = 0
        self._fast = fast_forward
        self._speed = 1.0
        self._busy_s = 0.0
        """Before `_since_s`, when it was last idle."""
        self._since_s = 0.0
        self._start_s = 0.0
        self._end_s = inf
        self.wake_s = inf
        """Time of the next event; infinite when idle; after `_end_s` when the following step is known."""
        self._ahead: tuple[int, int, int, float] | None = None
        """The following step: chunks, decodes, their context tokens, seconds."""
        self._asked = (-1.0, -1.0, 0, 0.0)
        """The last question how far a run is: when, of the run begun when, and the answer of `DecodeRow.cut`."""
        self._step: BatchStep | None = None
        self._step_s = 0.0
        self._steps = 0
        """Steps of the run under way, when `_step` is None."""
        self._row: DecodeRow | None = None
        self._context = 0
        self._out: list[TimedHappening] = []
        self._paused: dict[int, float] = {}
        """Time of the last token of preempted requests, by key."""

    def add(
        self,
        now_s: float,
        key: int,
        compute_tokens: int,
        context_tokens: int = 0,
        output_tokens: int = 0,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        """Submit a segment of a request; it begins with the next step that has room for it.

        `context_tokens` have their KV here, received or cached. Without output tokens the segment hands over.
        """
        if self._end_s < now_s:
            self._catch_up(now_s)
        batch = self.batch
        if batch.reserved and (compute_tokens + context_tokens) > batch.reserved.get(key, inf) * batch.size:
            self._settle(now_s)  # whether it gets the blocks it lacks depends on how far the run is
        batch.add(key, compute_tokens, context_tokens, output_tokens, priority, tenant, weight)
        if self._end_s == inf:
            self._wake(now_s)
        elif self._step is None and not batch.blocked:
            self._cut(now_s)
        if self._out:
            self.wake_s = now_s

    def advance(self, to_s: float) -> list[TimedHappening]:
        """Everything up to a time, in order: count what was under way and begin what is next, again and again."""
        out, end_s = self._out, self._end_s
        batch, gaps = self.batch, self.gaps
        while end_s <= to_s:
            step = self._step
            if step is None:
                steps = self._steps
                tokens = steps * batch.decoding.count
                gaps.gaps_s.append((end_s - self._start_s) / steps)
                gaps.tokens.append(tokens)
                self.decoded_tokens += tokens
                committed = batch.advance(steps)
            else:
                committed = self._committed(step)
            for what, key in committed:
                if what == RESUMED:
                    gaps.add(end_s - self._paused.pop(key), 1)
                else:
                    out.append((end_s, what, key))
            steps = batch.steady() if self._fast else 0
            if steps:
                decoding = batch.decoding
                count, context = decoding.count, decoding.context_tokens
                self._row = row = self._rows.get(count) or self.table.row(count)
                self._context = context
                self._step = None
                self._steps = steps
                self._start_s = end_s
                self._end_s = end_s = end_s + self._speed * row.run_s(context, steps)
            else:
                self._begin(end_s)
                end_s = self._end_s
        self.wake_s = end_s
        if out:
            self._out = []
        return out

    def cancel(self, now_s: float, key: int) -> None:
        self._settle(now_s)
        self.batch.cancel(key)
        self._paused.pop(key, None)
        if self._end_s == inf:
            self._wake(now_s)

    def reserve(self, now_s: float, key: int, tokens: int) -> bool:
        """Take room for a prompt of so many tokens whose KV is to come; false when there is none."""
        batch = self.batch
        lasting = self._step is None and self._ahead is None and now_s <= self._end_s < inf
        if lasting and batch.reserve(key, tokens, self._steps + 1):
            return True  # there is room even at the end of the run under way, as a rule
        done = self._done(now_s)
        if done is None:
            return batch.reserve(key, tokens)
        taken = batch.reserve(key, tokens, done + 1)
        if taken and batch.steady() < self._steps:
            self._settle(now_s)
        return taken

    def release(self, now_s: float, key: int) -> None:
        if self.batch.queued:
            self._settle(now_s)
        self.batch.release(key)
        if self._end_s == inf:
            self._wake(now_s)

    def set_speed(self, now_s: float, factor: float) -> None:
        """From the next step on, steps take `factor` times as long."""
        self._settle(now_s)
        self._speed = factor

    def status(self, now_s: float) -> ReplicaStatus:
        done, batch = self._done(now_s), self.batch
        held, free, step_s = batch.held_tokens, 0, self._step_s
        if done is None:
            free = batch.free_blocks
        elif self._row is not None:
            free = batch.free_after(done + 1)
            held += done * self._row.count
            step_s = self._speed * self._row.step_s(held)
        return ReplicaStatus(
            batch.queued, batch.running, batch.todo_tokens, held, free, batch.limits.total_blocks, step_s
        )

    def free_blocks(self, now_s: float) -> int:
        """Blocks that nobody has now; those of the step under way are taken."""
        done = self._done(now_s)
        return self.batch.free_blocks if done is None else self.batch.free_after(done + 1)

    def busy_s(self, now_s: float) -> float:
        return self._busy_s if self._end_s == inf else self._busy_s + max(0.0, now_s - self._since_s)

    def streamed(self, now_s: float, key: int) -> int:
        self._settle(now_s)
        return self.batch.streamed(key)

    @property
    def idle(self) -> bool:
        return self._end_s == inf

    @property
    def used_blocks(self) -> int:
        """As of the last step that was counted; `free_blocks` knows the time."""
        return self.batch.limits.total_blocks - self.batch.free_blocks

    @property
    def total_blocks(self) -> int:
        return self.batch.limits.total_blocks

    def _wake(self, now_s: float) -> None:
        """Begin after having been idle. Nobody decodes, so it is with a step, not with a run."""
        self._since_s = now_s
        self._begin(now_s)

    def _begin(self, at_s: float) -> None:
        step = self.batch.next_step()
        for key in step.preempted:
            self._out.append((at_s, PREEMPTED, key))
            self._paused.setdefault(key, at_s)
        chunks, decodes, ahead = step.chunks, step.decodes, self._ahead
        if not chunks and not decodes:
            self._rest(at_s, step)
            return
        context = step.context_tokens
        if ahead is not None and ahead[:3] == (len(chunks), decodes, context):
            seconds = ahead[3]
        else:
            seconds = self._speed * self.table.step_s(chunks, decodes, context)
        self._ahead = None
        self._step = step
        self._step_s = seconds
        self._start_s = at_s
        self._end_s = self.wake_s = at_s + seconds

    def _rest(self, at_s: float, step: BatchStep) -> None:
        self.batch.commit(step)
        self._busy_s += at_s - self._since_s
        self._ahead = self._step = None
        self._steps = 0
        self._step_s = 0.0
        self._end_s = self.wake_s = inf

    def _committed(self, step: BatchStep) -> list[Happening]:
        decodes = step.decodes
        if decodes:
            self.gaps.add(self._step_s, decodes - step.newcomers)
            self.decoded_tokens += decodes
        for chunk in step.chunks:
            self.computed_tokens += chunk[1]
        return self.batch.commit(step)

    def _cut(self, now_s: float) -> None:
        """Somebody came and may begin: end the run with the step under way, and foresee the one after it."""
        before = self._steps
        self._ahead = None
        if before == 1:
            self.wake_s = self._end_s
            return
        row, context = self._row, self._context
        assert row is not None
        if self._asked[0] != now_s or self._asked[1] != self._start_s:
            steps, seconds = row.cut(context, (now_s - self._start_s) / self._speed, before)
        else:
            _, _, steps, seconds = self._asked
        end_s = self._start_s + self._speed * seconds
        self._steps = steps
        self._end_s = self.wake_s = end_s
        lone = self.batch.lone(steps) if steps < before else None
        if lone is not None:
            decodes = row.count
            context += steps * decodes
            if lone[1]:
                seconds = self._speed * self.table.step_s((lone,), decodes, context)
                self._ahead = (1, decodes, context, seconds)
            else:
                decodes, context = decodes + 1, context + lone[2]
                seconds = self._speed * self.table.row(decodes).step_s(context)
                self._ahead = (0, decodes, context, seconds)
            self.wake_s = end_s + seconds

    def _catch_up(self, now_s: float) -> None:
        """Steps that ended before now and nobody asked for: what happened is kept for the next `advance`."""
        self._out = self.advance(now_s)
        if self._out:
            self.wake_s = now_s

    def _done(self, now_s: float) -> int | None:
        """Steps of the run under way that are complete; None when there is no run."""
        if self._end_s < now_s:
            self._catch_up(now_s)
        if self._step is not None or not self._steps:
            return None
        row = self._row
        assert row is not None
        asked = self._asked
        if asked[0] != now_s or asked[1] != self._start_s:
            steps, seconds = row.cut(self._context, (now_s - self._start_s) / self._speed, self._steps)
            self._asked = asked = (now_s, self._start_s, steps, seconds)
        return asked[2] - 1

    def _settle(self, now_s: float) -> None:
        """Make the step under way one that the Batcher knows, so that it can be told what happens meanwhile."""
        done, row = self._done(now_s), self._row
        if done is not None and row is not None:
            if done:
                done_s = self._speed * row.run_s(self._context, done)
                self.gaps.add(done_s / done, done * row.count)
                self.decoded_tokens += done * row.count
                self.batch.advance(done)
                self._start_s += done_s
                self._context += done * row.count
            self._step = self.batch.next_step(admit=False)
            self._step_s = self._speed * row.step_s(self._context)
            self._end_s = self._start_s + self._step_s
        self._ahead = None
        self.wake_s = now_s if self._out else self._end_s

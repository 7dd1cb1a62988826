"""Emulating a GPU that one does not have: each step takes the time that `perf` predicts for it.

A small model computes real tokens, and the rest of the large one's time is slept; or, in a mock engine, a timer waits
for all of it. `speed_up` divides all predicted times. A step that takes longer than predicted is counted as late: an
engine with many late steps no longer tells what the GPU would do.

Predicted times include the moment between two steps in which the host schedules (`perf.timers.engine_host`). So a
step that follows another at once is paced from the end of that one, up to that much; and what a step lasted too long
is taken off the next one, so that errors do not add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import floor, isfinite, prod

from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.layout import Ep
from potluck.core.values.model import Model
from potluck.core.values.types import NodeType
from potluck.engine.compute.executor import SequenceWork
from potluck.kv.chunks import KvChunk
from potluck.perf.kv_capacity import kv_tokens, require_fit, stage_memory
from potluck.perf.memory import kv_bytes_per_token, state_bytes, window_bytes_per_token
from potluck.perf.step_timer import StepBatch, StepTimer, steps
from potluck.perf.timers.engine_host import DEFAULT_HOST
from potluck.perf.transfer import AlphaBeta

Clock = Callable[[], float]
Sleep = Callable[[float], None]

FOLLOWS = 10.0
"""A step follows another when no more than so many times the host's moment lies between them."""
LATE_SHARE = 0.1
"""A step that nobody sleeps through is late when its end was seen later than by so much of its length."""
TYPICAL_TOKENS = 1024.0
"""Length of the requests that capacity is worked out for; it matters only where layers keep a fixed state."""


def steps_of(works: Sequence[SequenceWork]) -> StepBatch:
    """A step as `perf` sees it. A single token behind a context is a decode, as it is for the scheduler."""
    chunks = [(len(work.tokens), work.start) for work in works if len(work.tokens) > 1 or not work.start]
    contexts = [work.start for work in works if len(work.tokens) == 1 and work.start]
    return steps(
        [[new for new, _ in chunks] or [0]],
        [[cached for _, cached in chunks] or [0]],
        len(contexts),
        sum(contexts),
    )


class StepPacer:
    """Steps, one after the other, each made to last as long as a timer says. Called from one thread."""

    def __init__(
        self,
        timer: StepTimer | None,
        speed_up: float = 1.0,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
        host_s: float = DEFAULT_HOST.fixed_s,
        lasts_s: Callable[[Sequence[SequenceWork]], float] | None = None,
    ) -> None:
        """Without a timer, `lasts_s` says how long a step is, or `start` is told."""
        if not 0 < speed_up < float("inf"):
            raise InputError("speed_up", f"must be positive, is {speed_up}")
        self.steps = 0
        self.late_steps = 0
        """Steps that took longer than they should have, in spite of no sleep at all."""
        self.late_s = 0.0
        self.predicted_s = 0.0
        """Of all steps together, as they are paced."""
        self.took_s = 0.0
        """The same as they were: no less than predicted, more where this machine computed for longer."""
        self._timer, self._speed_up, self._clock, self._sleep = timer, speed_up, clock, sleep
        self._lasts_s = lasts_s
        self._host_s = host_s / speed_up
        self._last_end_s = -float("inf")
        self._over_s = 0.0
        """By how much the last step ended too late."""
        self._start_s = self._length_s = self._began_s = 0.0

    def change(self, speed_up: float) -> None:
        """Steps that begin from now on are so many times faster."""
        self._speed_up = speed_up

    def begin(self, works: Sequence[SequenceWork]) -> None:
        if self._lasts_s is not None:
            self.start(self._lasts_s(works))
            return
        assert self._timer is not None
        self.start(float(self._timer.step_s(steps_of(works))[0]))

    def start(self, predicted_s: float) -> tuple[float, float]:
        """A step starts now that takes so long: (from when it is paced, and for how long)."""
        now = self._began_s = self._clock()
        self._length_s = predicted_s / self._speed_up
        credit = self._host_s + self._over_s
        follows = now - self._last_end_s <= FOLLOWS * credit
        self._start_s = max(self._last_end_s, now - credit) if follows else now
        return self._start_s, self._length_s

    @property
    def due_s(self) -> float:
        """When the step that is under way would be over."""
        return self._start_s + self._length_s

    def reach(self, share: float) -> None:
        """Sleep until the share of the step that is under way would be done."""
        self._until(self._start_s + share * self._length_s)

    def end(self) -> bool:
        """Sleep until the step would be over; whether it is late already."""
        due, now = self.due_s, self._clock()
        late = now > due
        self._count(now - due if late else 0.0, late, now - self._began_s)
        self._until(due)
        self._follow(self._clock())
        return late

    def landed(self) -> None:
        """The step was over when it was due, and nobody slept: this is when its end is seen."""
        now = self._clock()
        over_s = max(0.0, now - self.due_s)
        self._count(over_s, over_s > LATE_SHARE * self._length_s, self._length_s + over_s)
        self._follow(now)

    def _count(self, late_s: float, late: bool, took_s: float) -> None:
        self.steps += 1
        self.took_s += max(took_s, self._length_s)
        self.predicted_s += self._length_s
        self.late_steps += late
        self.late_s += late_s

    def _follow(self, now: float) -> None:
        """What the next step has to make up for."""
        due = self.due_s
        # A hiccup is made up for by the steps behind it; what is too slow for good piles up no more than one step.
        self._over_s = min(max(0.0, now - due), self._length_s)
        self._last_end_s = now - self._over_s

    def _until(self, due_s: float) -> None:
        while (left := due_s - self._clock()) > 0:
            self._sleep(left)

    def notes(self) -> dict[str, float]:
        return {
            "emulated_steps": float(self.steps),
            "emulated_late_steps": float(self.late_steps),
            "emulated_late_s": self.late_s,
            "emulated_predicted_s": self.predicted_s,
            "emulated_took_s": self.took_s,
        }


class EmulatedNic:
    """A network card that KV crosses byte by byte: says when each chunk would be there. One direction.

    A chunk of layer l of the small model's n stands for the large model's layers [l N / n, (l + 1) N / n).
    """

    def __init__(
        self,
        large_model: Model,
        small_layers: int,
        alpha_beta: AlphaBeta,
        speed_up: float = 1.0,
        clock: Clock = time.monotonic,
    ) -> None:
        if not 1 <= small_layers <= large_model.layer_count:
            raise InputError("emulate", f"a model of {small_layers} layers cannot act as {large_model.name}")
        self._large, self._layers = large_model, small_layers
        self._link, self._speed_up, self._clock = alpha_beta, speed_up, clock
        self._free_s = -float("inf")

    def kv_bytes(self, chunk: KvChunk) -> float:
        """What the chunk would weigh if it were the large model's."""
        many, few = self._large.layer_count, self._layers
        layers = range(chunk.layer * many // few, (chunk.layer + 1) * many // few)
        if chunk.part == "memory":  # comes with a `conv`, which is charged for both
            return 0.0
        if chunk.part == "conv":
            return state_bytes(self._large, layers) * _share(chunk)
        tokens = chunk.stop - chunk.first
        size = tokens * kv_bytes_per_token(self._large, layers)
        for window, rate in window_bytes_per_token(self._large, layers).items():
            size += rate * min(tokens, window)
        return size * _share(chunk)

    def due_s(self, chunk: KvChunk) -> float:
        """When a chunk that is handed in now would be there, by the clock; those before it go first."""
        start = max(self._free_s, self._clock())
        self._free_s = start + self.kv_bytes(chunk) / self._link.beta_bytes_per_s / self._speed_up
        return self._free_s + self._link.alpha_s / self._speed_up


def _share(chunk: KvChunk) -> float:
    """What a codec leaves of 16-bit numbers."""
    if chunk.codec == "raw":
        return 1.0
    return (len(chunk.data) + len(chunk.parameters)) / (2 * prod(chunk.shape))


def emulated_blocks(
    model: Model, node: NodeType, tp: int, layers: range | None = None, ep: Ep = "none"
) -> int:
    """Blocks of KV that `tp` GPUs of a node would have room for beside the weights."""
    chosen = range(model.layer_count) if layers is None else layers
    memory = stage_memory(model, node, tp, chosen, ep=ep)
    require_fit(model, memory, node, tp)
    tokens = kv_tokens(model, memory, tp, TYPICAL_TOKENS, chosen, ep)
    return max(1, floor(tokens / BLOCK_TOKENS)) if isfinite(tokens) else 1 << 20

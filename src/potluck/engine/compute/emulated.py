"""Acting as a GPU that one does not have: each step takes the time that `perf` predicts for it.

The small model computes real tokens, in less time than the large one would take on the GPU in question; the rest of
that time is slept. `speed_up` divides all predicted times. A step that really takes longer than predicted cannot be
made shorter: it is counted as late, and an engine with many late steps no longer tells what the GPU would do.

Predicted times include the moment between two steps in which the host schedules (`perf.timers.host`). So a step
that follows another at once is paced from the end of that one, up to that much; and what a step lasted too long (its
sleep did, or the machine was busy) is taken off the next one, so that errors do not add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import floor, isfinite, prod

from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.layout import Ep
from potluck.core.values.model import Model
from potluck.core.values.sampling import SampledToken
from potluck.core.values.types import NodeType
from potluck.engine.compute.executor import CacheExport, Deliver, Executor, IncomingCache, TokenDraw
from potluck.engine.compute.work import RunnerSize, SequenceWork
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers.exactness import Exactness
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.perf.delays.transfer import AlphaBeta, alpha_beta
from potluck.perf.sizes.capacity import kv_tokens, require_fit, stage_memory
from potluck.perf.sizes.memory import kv_bytes_per_token, state_bytes, window_bytes_per_token
from potluck.perf.step_timer import StepBatch, StepTimer, steps
from potluck.perf.timers.engine_host import DEFAULT_HOST

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
    ) -> None:
        """Without a timer, `start` is told how long steps are."""
        if not 0 < speed_up < float("inf"):
            raise InputError("speed_up", f"must be positive, is {speed_up}")
        self.steps = 0
        self.late_steps = 0
        """Steps that took longer than they should have, in spite of no sleep at all."""
        self.late_s = 0.0
        """How much longer, added up."""
        self.predicted_s = 0.0
        """Of all steps together, as they are paced."""
        self.took_s = 0.0
        """The same as they were: no less than predicted, more where this machine computed for longer."""
        self._timer, self._speed_up, self._clock, self._sleep = timer, speed_up, clock, sleep
        self._host_s = host_s / speed_up
        self._last_end_s = -float("inf")
        self._over_s = 0.0
        """By how much the last step ended too late."""
        self._start_s = self._length_s = self._began_s = 0.0

    def change(self, speed_up: float) -> None:
        """Steps that begin from now on are so many times faster."""
        self._speed_up = speed_up

    def begin(self, works: Sequence[SequenceWork]) -> None:
        """A step starts now."""
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


class EmulatedExecutor:
    """An executor whose steps last as long as those of a GPU."""

    microbatches = 1

    def __init__(
        self,
        executor: Executor,
        timer: StepTimer,
        speed_up: float = 1.0,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
        host_s: float = DEFAULT_HOST.fixed_s,
        kv: EmulatedNic | None = None,
    ) -> None:
        self._inner = executor
        self.kv = kv
        """For whoever sends its parcels over a network."""
        self.pacer = StepPacer(timer, speed_up, clock, sleep, host_s)

    @property
    def config(self) -> EngineModelConfig:
        return self._inner.config

    @property
    def size(self) -> RunnerSize:
        return self._inner.size

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    @property
    def exact(self) -> Exactness:
        return self._inner.exact

    def open(self) -> int:
        return self._inner.open()

    def close(self, row: int) -> None:
        self._inner.close(row)

    def held(self, row: int) -> int:
        return self._inner.held(row)

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        self._inner.grow(row, tokens, since)

    def step(
        self,
        works: Sequence[SequenceWork],
        draws: Sequence[TokenDraw],
        exports: Sequence[CacheExport] = (),
        deliver: Deliver | None = None,
    ) -> list[SampledToken]:
        """As the inner one does; a layer's parcels are delivered when that part of the step would be done."""
        layers, send = self.config.model.layer_count, deliver

        def in_time(row: int, parcels: tuple[KvChunk, ...]) -> None:
            if parcels:
                self.pacer.reach((parcels[0].layer + 1) / layers)
            if send is not None:
                send(row, parcels)

        self.pacer.begin(works)
        choices = self._inner.step(works, draws, exports, None if deliver is None else in_time)
        self.pacer.end()
        return choices

    def begin(
        self,
        works: Sequence[SequenceWork],
        draws: Sequence[TokenDraw],
        exports: Sequence[CacheExport] = (),
        deliver: Deliver | None = None,
    ) -> Callable[[], list[SampledToken]]:
        found = self.step(works, draws, exports, deliver)
        return lambda: found

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        return self._inner.export(row, layer, start, stop)

    def arrival(self, row: int, about: KvManifest, tokens: Sequence[int]) -> IncomingCache:
        return self._inner.arrival(row, about, tokens)

    def check(self) -> None:
        self._inner.check()

    def health(self) -> str:
        return self._inner.health()

    def degraded(self) -> str:
        return self._inner.degraded()

    def notes(self) -> Mapping[str, float]:
        return {**self._inner.notes(), **self.pacer.notes()}

    def shutdown(self) -> None:
        self._inner.shutdown()


class EmulatedNic:
    """A network card that KV crosses byte by byte: says when each parcel would be there. One direction.

    A parcel of layer l of the small model's n stands for the large model's layers [l N / n, (l + 1) N / n).
    """

    def __init__(
        self,
        large: Model,
        small_layers: int,
        link: AlphaBeta,
        speed_up: float = 1.0,
        clock: Clock = time.monotonic,
    ) -> None:
        if not 1 <= small_layers <= large.layer_count:
            raise InputError("emulate", f"a model of {small_layers} layers cannot act as {large.name}")
        self._large, self._layers = large, small_layers
        self._link, self._speed_up, self._clock = link, speed_up, clock
        self._free_s = -float("inf")

    def kv_bytes(self, parcel: KvChunk) -> float:
        """What the parcel would weigh if it were the large model's."""
        many, few = self._large.layer_count, self._layers
        layers = range(parcel.layer * many // few, (parcel.layer + 1) * many // few)
        if parcel.part == "memory":  # comes with a `conv`, which is charged for both
            return 0.0
        if parcel.part == "conv":
            return state_bytes(self._large, layers) * _share(parcel)
        tokens = parcel.stop - parcel.first
        size = tokens * kv_bytes_per_token(self._large, layers)
        for window, rate in window_bytes_per_token(self._large, layers).items():
            size += rate * min(tokens, window)
        return size * _share(parcel)

    def due_s(self, parcel: KvChunk) -> float:
        """When a parcel that is handed in now would be there, by the clock; those before it go first."""
        start = max(self._free_s, self._clock())
        self._free_s = start + self.kv_bytes(parcel) / self._link.beta_bytes_per_s / self._speed_up
        return self._free_s + self._link.alpha_s / self._speed_up


def _share(parcel: KvChunk) -> float:
    """What a codec leaves of 16-bit numbers."""
    if parcel.codec == "raw":
        return 1.0
    return (len(parcel.data) + len(parcel.parameters)) / (2 * prod(parcel.shape))


def card_of(node: NodeType) -> AlphaBeta:
    """A node's network card as a link."""
    return alpha_beta(node.network_gbps)


def emulated_blocks(
    model: Model, node: NodeType, tp: int, layers: range | None = None, ep: Ep = "none"
) -> int:
    """Blocks of KV that `tp` GPUs of a node would have room for beside the weights."""
    chosen = range(model.layer_count) if layers is None else layers
    memory = stage_memory(model, node, tp, chosen, ep=ep)
    require_fit(model, memory, node, tp)
    tokens = kv_tokens(model, memory, tp, TYPICAL_TOKENS, chosen, ep)
    return max(1, floor(tokens / BLOCK_TOKENS)) if isfinite(tokens) else 1 << 20

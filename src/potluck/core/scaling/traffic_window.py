"""What has been asked lately: rates and lengths per model over a sliding window, and over a long one.

Time is cut into slots. An arrival or an end is only noted, and counted when its slot is over or someone looks. Prompt
lengths go into a histogram of 8 bins per octave that also keeps each bin's tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from operator import attrgetter

from potluck.core.state.events import LinkReported
from potluck.core.values.types import Request, Slo

SLOTS = 24  # Slots of the short window; an edge is sharp to 1/24 of it.
BLOCK_SLOTS = 6  # Slots counted together where burstiness is measured: a quarter of the short window.
LEAST_RECENT = 10  # Requests in a quarter of the window from which on their mean means something.
SUB_BITS = 3  # Bins per octave of lengths: 2^3, so a bin is at most an eighth of its lower end wide.


@dataclass(frozen=True, slots=True)
class LengthCount:
    """A bin of prompt lengths [low, high): how many prompts fell in, and their tokens in all."""

    low_tokens: int
    high_tokens: int
    count: int
    tokens: int

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.count


@dataclass(frozen=True, slots=True)
class ModelTraffic:
    """One model's traffic over the short window, and its rate over the long one."""

    model: str
    span_s: float  # How much time the figures cover: the window, or less soon after the start.
    arrivals: int
    rate_per_s: float
    error_per_s: float
    """One standard deviation of that rate: of a Poisson process, or more if the long window was burstier."""
    mean_prompt_tokens: float  # Without what caches save.
    mean_output_tokens: float
    """Of the answers that ended in the window; before any did, of the long window; 0 when nothing ended yet."""
    prompt_error_tokens: float
    output_error_tokens: float  # One standard deviation of those two means.
    finished: int
    attained: int  # Of those, how many kept the objective; all where none was given.
    refused: int
    held: int  # Requests that wait before the replicas: because none is ready, or none has room.
    long_span_s: float
    long_rate_per_s: float
    lengths: tuple[LengthCount, ...]
    arrivals_ever: int = 0  # Since the model was first watched.
    recent_prompt_tokens: float = 0.0
    recent_output_tokens: float = 0.0
    """The two means over the last quarter of the window; 0 where too few were seen."""
    recent_span_s: float = 0.0
    recent_rate_per_s: float = 0.0
    recent_error_per_s: float = 0.0
    """The rate over that quarter, and one standard deviation of it; 0 where too few were seen."""

    @property
    def attainment(self) -> float:
        """Share of the requests that ended within the objective; refused ones did not; 1 when none ended."""
        ended = self.finished + self.refused
        return self.attained / ended if ended else 1.0

    def bucket_shares(self, longest_tokens: Sequence[int]) -> list[float]:
        """Share of each bucket, given the buckets' longest prompts in rising order; the last takes what is longer."""
        if not self.arrivals or not longest_tokens:
            return [0.0] * len(longest_tokens)
        edges = [_below(self.lengths, tokens) / self.arrivals for tokens in longest_tokens[:-1]] + [1.0]
        return [high - low for low, high in zip([0.0, *edges], edges, strict=False)]


@dataclass(frozen=True, slots=True)
class ObservedTraffic:
    """All that scaling rules may know of the traffic at one moment."""

    at_s: float
    models: tuple[ModelTraffic, ...]
    links: tuple[LinkReported, ...] = ()

    def of(self, model: str) -> ModelTraffic | None:
        return next((model_traffic for model_traffic in self.models if model_traffic.model == model), None)


@dataclass(slots=True)
class _WindowSlot:
    number: int
    arrivals: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    attained: int = 0
    refused: int = 0
    output_tokens: int = 0
    output_squares: int = 0
    bins: dict[int, list[int]] = field(default_factory=dict)  # bin to [count, tokens]


def _drop_before(slots: deque[_WindowSlot], number: int) -> None:
    while slots and slots[0].number < number:
        slots.popleft().bins = {}  # only the short window asks for lengths


def _sum(slots: Iterable[_WindowSlot], name: str) -> int:
    return sum(map(attrgetter(name), slots))


@dataclass(slots=True)
class _JumpWatch:
    """One model: the present slot with notes not yet counted, and the two windows behind it."""

    slot: _WindowSlot
    slo: Slo | None
    end_s: float
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    short: deque[_WindowSlot] = field(default_factory=deque)
    long: deque[_WindowSlot] = field(default_factory=deque)
    arrivals_ever: int = 0


class TrafficWindow:
    """The sliding windows of all models. Its methods are its only mutators; the Brain owns it."""

    __slots__ = ("_links", "_long_slots", "_slos", "_slot_s", "_start_s", "_watches")

    def __init__(
        self, window_s: float = 120.0, long_window_s: float = 1800.0, slos: Mapping[str, Slo] | None = None
    ) -> None:
        self._slot_s = window_s / SLOTS
        self._long_slots = max(SLOTS, round(long_window_s / self._slot_s))
        self._slos = dict(slos or {})
        self._watches: dict[str, _JumpWatch] = {}
        self._links: dict[tuple[str, str], LinkReported] = {}
        self._start_s: float | None = None

    def watch(self, at_s: float, model: str, slo: Slo | None = None) -> None:
        """Count from now on: that nothing arrives is news as well."""
        if slo is not None:
            self._slos[model] = slo
        self._at(at_s, model).slo = self._slos.get(model)

    def arrived(self, at_s: float, request: Request, cached_tokens: int = 0) -> None:
        watch = self._watches.get(request.model)
        if watch is None or at_s >= watch.end_s:
            watch = self._at(at_s, request.model)
        tokens = request.prompt_tokens - cached_tokens
        watch.prompts.append(tokens if tokens > 0 else 1)

    def finished(
        self, at_s: float, model: str, output_tokens: int, ttft_s: float = 0.0, tpot_s: float = 0.0
    ) -> None:
        watch = self._watches.get(model)
        if watch is None or at_s >= watch.end_s:
            watch = self._at(at_s, model)
        watch.outputs.append(output_tokens)
        slo = watch.slo
        # (output - 1) gaps after the first token are the rest of the whole time.
        if slo is None or slo.kept(ttft_s, tpot_s, ttft_s + tpot_s * (output_tokens - 1)):
            watch.slot.attained += 1

    def refused(self, at_s: float, model: str) -> None:
        self._at(at_s, model).slot.refused += 1

    def linked(self, event: LinkReported) -> None:
        self._links[event.source, event.target] = event

    def observed(self, at_s: float, held: Mapping[str, int] | None = None) -> ObservedTraffic:
        """What the windows show now. Costs as much as there are slots and models, not arrivals."""
        model_traffics = []
        for model in sorted(self._watches):
            _count(self._at(at_s, model))
            model_traffics.append(self._model(at_s, model, (held or {}).get(model, 0)))
        links = tuple(self._links[key] for key in sorted(self._links))
        return ObservedTraffic(at_s, tuple(model_traffics), links)

    def _at(self, at_s: float, model: str) -> _JumpWatch:
        watch = self._watches.get(model)
        number = int(at_s / self._slot_s)
        if watch is None:
            if self._start_s is None:
                self._start_s = at_s
            watch = _JumpWatch(_WindowSlot(number), self._slos.get(model), (number + 1) * self._slot_s)
            self._watches[model] = watch
        elif number > watch.slot.number:
            _count(watch)
            watch.short.append(watch.slot)
            watch.long.append(watch.slot)
            _drop_before(watch.short, number - SLOTS)
            _drop_before(watch.long, number - self._long_slots)
            watch.slot = _WindowSlot(number)
            watch.end_s = (number + 1) * self._slot_s
        return watch

    def _model(self, at_s: float, model: str, held: int) -> ModelTraffic:
        watch = self._watches[model]
        slots, long = [*watch.short, watch.slot], [*watch.long, watch.slot]
        span_s, long_span_s = self._span_s(at_s, SLOTS), self._span_s(at_s, self._long_slots)
        arrivals, finished, ended = _sum(slots, "arrivals"), _sum(slots, "finished"), _sum(long, "finished")
        long_rate = _sum(long, "arrivals") / long_span_s
        answers = (slots, finished) if finished else (long, ended)
        mean_output = _sum(answers[0], "output_tokens") / answers[1] if ended else 0.0
        mean_prompt = _sum(slots, "prompt_tokens") / max(arrivals, 1)
        lengths = _histogram(slots)
        prompt_squares = sum(length.tokens * length.mean_tokens for length in lengths)
        return ModelTraffic(
            model,
            span_s,
            arrivals,
            arrivals / span_s,
            self._error_per_s(watch, arrivals, span_s, long_rate),
            mean_prompt,
            mean_output,
            _error(prompt_squares, mean_prompt, arrivals),
            _error(_sum(slots, "output_squares"), mean_output, finished),
            finished,
            _sum(slots, "attained"),
            _sum(slots, "refused"),
            held,
            long_span_s,
            long_rate,
            lengths,
            watch.arrivals_ever,
            *_recent(slots[-BLOCK_SLOTS - 1 :]),
            *self._recent_rate(at_s, watch, slots[-BLOCK_SLOTS - 1 :], long_rate),
        )

    def _recent_rate(
        self, at_s: float, watch: _JumpWatch, slots: Sequence[_WindowSlot], long_rate_per_s: float
    ) -> tuple[float, float, float]:
        arrivals, span_s = _sum(slots, "arrivals"), self._span_s(at_s, BLOCK_SLOTS)
        if arrivals < LEAST_RECENT:
            return span_s, 0.0, 0.0
        return span_s, arrivals / span_s, self._error_per_s(watch, arrivals, span_s, long_rate_per_s)

    def _span_s(self, at_s: float, slots: int) -> float:
        """From the start of the oldest slot of a window of so many whole slots until now."""
        assert self._start_s is not None
        oldest_s = (int(at_s / self._slot_s) - slots) * self._slot_s
        return max(at_s - max(oldest_s, self._start_s), self._slot_s)

    def _error_per_s(self, watch: _JumpWatch, arrivals: int, span_s: float, long_rate_per_s: float) -> float:
        """Standard deviation of the window's rate: sqrt(D n) / span for n arrivals, D = 1 for a Poisson process. D is
        the variance over the mean of the long window's counts, by differences of neighbours: a rate that changed and
        stays is no noise. A window that saw few arrivals by chance must not believe itself to be certain."""
        assert self._start_s is not None
        first = max(watch.slot.number - self._long_slots, int(self._start_s / self._slot_s) + 1)
        blocks = (watch.slot.number - SLOTS - first) // BLOCK_SLOTS
        counts = [0] * blocks
        for slot in watch.long:
            place = (slot.number - first) // BLOCK_SLOTS
            if 0 <= place < blocks:
                counts[place] += slot.arrivals
        mean = sum(counts) / blocks if blocks else 0.0
        dispersion = 1.0
        if blocks > 1 and mean > 0:
            steps = sum((after - before) ** 2 for before, after in pairwise(counts))
            dispersion = max(1.0, steps / 2 / (blocks - 1) / mean)
        return sqrt(dispersion * max(arrivals, long_rate_per_s * span_s, 1.0)) / span_s


def _count(watch: _JumpWatch) -> None:
    slot, bins = watch.slot, watch.slot.bins
    slot.arrivals += len(watch.prompts)
    watch.arrivals_ever += len(watch.prompts)
    slot.prompt_tokens += sum(watch.prompts)
    for tokens in watch.prompts:
        bits = tokens.bit_length()
        place = tokens if bits <= SUB_BITS else (bits << SUB_BITS) | (tokens >> bits - 1 - SUB_BITS) & 7
        both = bins.get(place)
        if both is None:
            bins[place] = [1, tokens]
        else:
            both[0] += 1
            both[1] += tokens
    slot.finished += len(watch.outputs)
    slot.output_tokens += sum(watch.outputs)
    slot.output_squares += sum(tokens * tokens for tokens in watch.outputs)
    watch.prompts.clear()
    watch.outputs.clear()


def _recent(slots: Sequence[_WindowSlot]) -> tuple[float, float]:
    arrivals, finished = _sum(slots, "arrivals"), _sum(slots, "finished")
    prompts = _sum(slots, "prompt_tokens") / arrivals if arrivals >= LEAST_RECENT else 0.0
    outputs = _sum(slots, "output_tokens") / finished if finished >= LEAST_RECENT else 0.0
    return prompts, outputs


def _histogram(slots: Sequence[_WindowSlot]) -> tuple[LengthCount, ...]:
    sums: dict[int, list[int]] = {}
    for slot in slots:
        for place, (count, tokens) in slot.bins.items():
            both = sums.setdefault(place, [0, 0])
            both[0] += count
            both[1] += tokens
    return tuple(LengthCount(*_edges(place), *sums[place]) for place in sorted(sums))


def _error(squares: float, mean: float, count: int) -> float:
    """Standard deviation of a mean over so many values with these squares in total."""
    return sqrt(max(0.0, squares / count - mean * mean) / count) if count else 0.0


def _edges(place: int) -> tuple[int, int]:
    bits, sub = place >> SUB_BITS, place & 7
    if bits == 0:
        return place, place + 1
    width = 1 << bits - 1 - SUB_BITS
    low = (8 + sub) * width
    return low, low + width


def _below(lengths: Sequence[LengthCount], tokens: int) -> float:
    """How many prompts have at most so many tokens; a bin that is cut counts in part."""
    below = 0.0
    for length in lengths:
        if length.high_tokens <= tokens + 1:
            below += length.count
        elif length.low_tokens <= tokens:
            width = length.high_tokens - length.low_tokens
            below += length.count * (tokens + 1 - length.low_tokens) / width
    return below

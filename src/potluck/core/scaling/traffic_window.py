"""Observed traffic: rates and lengths per model over a short and a long sliding window.

Time is cut into slots. An arrival or an end is recorded in a list and counted when its slot is over or the window is
read. Prompt lengths go into a histogram of 8 bins per octave that also keeps each bin's tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from operator import attrgetter

from potluck.core.state.events import LinkReported
from potluck.core.values.types import Request, Slo

SHORT_WINDOW_SLOTS = 24  # Slots of the short window; an edge is sharp to 1/24 of it.
BURST_BLOCK_SLOTS = 6  # Slots per block in the burstiness estimate: a quarter of the short window.
MIN_RECENT_REQUESTS = 10  # Requests in a quarter of the window that its mean needs.
BINS_PER_OCTAVE_BITS = (
    3  # Bins per octave of lengths: 2^3, so a bin is at most an eighth of its lower end wide.
)


@dataclass(frozen=True, slots=True)
class LengthCount:
    """A histogram bin of prompt lengths [low, high): the prompts in it and their tokens."""

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
    span_s: float  # Time that the figures cover: the window, or less soon after the start.
    arrivals: int
    rate_per_s: float
    error_per_s: float
    """One standard deviation of that rate: Poisson noise, or more if the long window was burstier."""
    mean_prompt_tokens: float  # Without cached tokens.
    mean_output_tokens: float
    """Mean over the answers that ended in the window; over the long window before any did; 0 if no answer ended
    yet."""
    prompt_error_tokens: float
    output_error_tokens: float  # One standard deviation of either mean.
    finished: int
    attained: int  # Finished requests that met the SLO; all of them without an SLO.
    refused: int
    held: int  # Requests that wait for a replica, or for room on one.
    long_span_s: float
    long_rate_per_s: float
    lengths: tuple[LengthCount, ...]
    arrivals_ever: int = 0  # Arrivals since the model was first observed.
    recent_prompt_tokens: float = 0.0
    recent_output_tokens: float = 0.0
    """The two means over the last quarter of the window; 0 where too few were seen."""
    recent_span_s: float = 0.0
    recent_rate_per_s: float = 0.0
    recent_error_per_s: float = 0.0
    """The rate over that quarter, and one standard deviation of it; 0 where too few were seen."""

    @property
    def attainment(self) -> float:
        """SLO attainment: the share of ended requests that met the SLO; refused ones count as missed; 1 when none
        ended."""
        ended_requests = self.finished + self.refused
        return self.attained / ended_requests if ended_requests else 1.0

    def bucket_shares(self, longest_tokens: Sequence[int]) -> list[float]:
        """Share of arrivals in each bucket, given the buckets' longest prompts in rising order; the last has no
        limit."""
        if not self.arrivals or not longest_tokens:
            return [0.0] * len(longest_tokens)
        edges = [_prompts_up_to(self.lengths, tokens) / self.arrivals for tokens in longest_tokens[:-1]] + [
            1.0
        ]
        return [high - low for low, high in zip([0.0, *edges], edges, strict=False)]


@dataclass(frozen=True, slots=True)
class ObservedTraffic:
    """The traffic at one moment, as scaling rules see it."""

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
        slots.popleft().bins = {}  # Only the short window needs lengths.


def _sum(slots: Iterable[_WindowSlot], name: str) -> int:
    return sum(map(attrgetter(name), slots))


@dataclass(slots=True)
class _ModelWindow:
    """One model's windows: the present slot, its uncounted requests, and the slots of both windows."""

    slot: _WindowSlot
    slo: Slo | None
    end_s: float
    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    short: deque[_WindowSlot] = field(default_factory=deque)
    long: deque[_WindowSlot] = field(default_factory=deque)
    arrivals_ever: int = 0


class TrafficWindow:
    """The sliding windows of all models; owned by the Brain."""

    __slots__ = ("_links", "_long_slots", "_slos", "_slot_s", "_start_s", "_windows")

    def __init__(
        self, window_s: float = 120.0, long_window_s: float = 1800.0, slos: Mapping[str, Slo] | None = None
    ) -> None:
        self._slot_s = window_s / SHORT_WINDOW_SLOTS
        self._long_slots = max(SHORT_WINDOW_SLOTS, round(long_window_s / self._slot_s))
        self._slos = dict(slos or {})
        self._windows: dict[str, _ModelWindow] = {}
        self._links: dict[tuple[str, str], LinkReported] = {}
        self._start_s: float | None = None

    def watch(self, at_s: float, model: str, slo: Slo | None = None) -> None:
        """Observe a model from now on, so that its rate is known even without arrivals."""
        if slo is not None:
            self._slos[model] = slo
        self._window_at(at_s, model).slo = self._slos.get(model)

    def arrived(self, at_s: float, request: Request, cached_tokens: int = 0) -> None:
        model_window = self._windows.get(request.model)
        if model_window is None or at_s >= model_window.end_s:
            model_window = self._window_at(at_s, request.model)
        tokens = request.prompt_tokens - cached_tokens
        model_window.prompts.append(tokens if tokens > 0 else 1)

    def finished(
        self, at_s: float, model: str, output_tokens: int, ttft_s: float = 0.0, tpot_s: float = 0.0
    ) -> None:
        model_window = self._windows.get(model)
        if model_window is None or at_s >= model_window.end_s:
            model_window = self._window_at(at_s, model)
        model_window.outputs.append(output_tokens)
        slo = model_window.slo
        # The (output - 1) gaps after the first token make up the rest of the latency.
        if slo is None or slo.kept(ttft_s, tpot_s, ttft_s + tpot_s * (output_tokens - 1)):
            model_window.slot.attained += 1

    def refused(self, at_s: float, model: str) -> None:
        self._window_at(at_s, model).slot.refused += 1

    def linked(self, event: LinkReported) -> None:
        self._links[event.source, event.target] = event

    def observed(self, at_s: float, held: Mapping[str, int] | None = None) -> ObservedTraffic:
        """The present traffic. The cost grows with slots and models, not arrivals."""
        model_traffics = []
        for model in sorted(self._windows):
            _count_pending(self._window_at(at_s, model))
            model_traffics.append(self._model_traffic(at_s, model, (held or {}).get(model, 0)))
        links = tuple(self._links[key] for key in sorted(self._links))
        return ObservedTraffic(at_s, tuple(model_traffics), links)

    def _window_at(self, at_s: float, model: str) -> _ModelWindow:
        model_window = self._windows.get(model)
        number = int(at_s / self._slot_s)
        if model_window is None:
            if self._start_s is None:
                self._start_s = at_s
            model_window = _ModelWindow(
                _WindowSlot(number), self._slos.get(model), (number + 1) * self._slot_s
            )
            self._windows[model] = model_window
        elif number > model_window.slot.number:
            _count_pending(model_window)
            model_window.short.append(model_window.slot)
            model_window.long.append(model_window.slot)
            _drop_before(model_window.short, number - SHORT_WINDOW_SLOTS)
            _drop_before(model_window.long, number - self._long_slots)
            model_window.slot = _WindowSlot(number)
            model_window.end_s = (number + 1) * self._slot_s
        return model_window

    def _model_traffic(self, at_s: float, model: str, held: int) -> ModelTraffic:
        model_window = self._windows[model]
        slots, long = [*model_window.short, model_window.slot], [*model_window.long, model_window.slot]
        span_s, long_span_s = self._span_s(at_s, SHORT_WINDOW_SLOTS), self._span_s(at_s, self._long_slots)
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
            self._error_per_s(model_window, arrivals, span_s, long_rate),
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
            model_window.arrivals_ever,
            *_recent(slots[-BURST_BLOCK_SLOTS - 1 :]),
            *self._recent_rate(at_s, model_window, slots[-BURST_BLOCK_SLOTS - 1 :], long_rate),
        )

    def _recent_rate(
        self, at_s: float, model_window: _ModelWindow, slots: Sequence[_WindowSlot], long_rate_per_s: float
    ) -> tuple[float, float, float]:
        arrivals, span_s = _sum(slots, "arrivals"), self._span_s(at_s, BURST_BLOCK_SLOTS)
        if arrivals < MIN_RECENT_REQUESTS:
            return span_s, 0.0, 0.0
        return span_s, arrivals / span_s, self._error_per_s(model_window, arrivals, span_s, long_rate_per_s)

    def _span_s(self, at_s: float, slots: int) -> float:
        """From the start of the oldest slot of a window of so many whole slots until now."""
        assert self._start_s is not None
        oldest_s = (int(at_s / self._slot_s) - slots) * self._slot_s
        return max(at_s - max(oldest_s, self._start_s), self._slot_s)

    def _error_per_s(
        self, model_window: _ModelWindow, arrivals: int, span_s: float, long_rate_per_s: float
    ) -> float:
        """Standard deviation of the window's rate: sqrt(D n) / span for n arrivals; D = 1 for a Poisson process. D
        is the variance over the mean of the long window's block counts, from differences of neighbours, so that a
        lasting change of rate does not count as noise. The long window's rate bounds n below, so that a window with
        few arrivals by chance does not look certain."""
        assert self._start_s is not None
        first_slot = max(model_window.slot.number - self._long_slots, int(self._start_s / self._slot_s) + 1)
        blocks = (model_window.slot.number - SHORT_WINDOW_SLOTS - first_slot) // BURST_BLOCK_SLOTS
        counts = [0] * blocks
        for slot in model_window.long:
            block = (slot.number - first_slot) // BURST_BLOCK_SLOTS
            if 0 <= block < blocks:
                counts[block] += slot.arrivals
        mean = sum(counts) / blocks if blocks else 0.0
        dispersion = 1.0
        if blocks > 1 and mean > 0:
            squared_steps = sum((after - before) ** 2 for before, after in pairwise(counts))
            dispersion = max(1.0, squared_steps / 2 / (blocks - 1) / mean)
        return sqrt(dispersion * max(arrivals, long_rate_per_s * span_s, 1.0)) / span_s


def _count_pending(model_window: _ModelWindow) -> None:
    slot, bins = model_window.slot, model_window.slot.bins
    slot.arrivals += len(model_window.prompts)
    model_window.arrivals_ever += len(model_window.prompts)
    slot.prompt_tokens += sum(model_window.prompts)
    for tokens in model_window.prompts:
        bits = tokens.bit_length()
        bin_index = (
            tokens
            if bits <= BINS_PER_OCTAVE_BITS
            else (bits << BINS_PER_OCTAVE_BITS) | (tokens >> bits - 1 - BINS_PER_OCTAVE_BITS) & 7
        )
        count_and_tokens = bins.get(bin_index)
        if count_and_tokens is None:
            bins[bin_index] = [1, tokens]
        else:
            count_and_tokens[0] += 1
            count_and_tokens[1] += tokens
    slot.finished += len(model_window.outputs)
    slot.output_tokens += sum(model_window.outputs)
    slot.output_squares += sum(tokens * tokens for tokens in model_window.outputs)
    model_window.prompts.clear()
    model_window.outputs.clear()


def _recent(slots: Sequence[_WindowSlot]) -> tuple[float, float]:
    arrivals, finished = _sum(slots, "arrivals"), _sum(slots, "finished")
    prompts = _sum(slots, "prompt_tokens") / arrivals if arrivals >= MIN_RECENT_REQUESTS else 0.0
    outputs = _sum(slots, "output_tokens") / finished if finished >= MIN_RECENT_REQUESTS else 0.0
    return prompts, outputs


def _histogram(slots: Sequence[_WindowSlot]) -> tuple[LengthCount, ...]:
    sums: dict[int, list[int]] = {}
    for slot in slots:
        for bin_index, (count, tokens) in slot.bins.items():
            count_and_tokens = sums.setdefault(bin_index, [0, 0])
            count_and_tokens[0] += count
            count_and_tokens[1] += tokens
    return tuple(LengthCount(*_bin_range(bin_index), *sums[bin_index]) for bin_index in sorted(sums))


def _error(squares: float, mean: float, count: int) -> float:
    """Standard deviation of a mean over so many values with these squares in total."""
    return sqrt(max(0.0, squares / count - mean * mean) / count) if count else 0.0


def _bin_range(bin_index: int) -> tuple[int, int]:
    bits, sub_bin = bin_index >> BINS_PER_OCTAVE_BITS, bin_index & 7
    if bits == 0:
        return bin_index, bin_index + 1
    width = 1 << bits - 1 - BINS_PER_OCTAVE_BITS
    low = (8 + sub_bin) * width
    return low, low + width


def _prompts_up_to(lengths: Sequence[LengthCount], tokens: int) -> float:
    """The number of prompts of up to `tokens` tokens; a bin that is cut counts in part."""
    below = 0.0
    for length in lengths:
        if length.high_tokens <= tokens + 1:
            below += length.count
        elif length.low_tokens <= tokens:
            width = length.high_tokens - length.low_tokens
            below += length.count * (tokens + 1 - length.low_tokens) / width
    return below

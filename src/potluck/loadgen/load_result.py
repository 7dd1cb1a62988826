"""What came of a run: times, how many kept the objective, errors by kind.

Everything that was to be sent is in the count: a request that was refused, cut off or never answered keeps no
objective, though it has no times.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from potluck.core.values.types import Slo
from potluck.loadgen.load_client import TimedRequest

MOST_WORDS = 200
"""Characters of an example."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of seconds; each is a value that was seen."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one run found."""

    requests: int
    answered: int
    """Whole answers."""
    errors: tuple[tuple[str, int], ...]
    """Kind to how many, most first."""
    examples: tuple[tuple[str, str], ...]
    """Kind to what the first of them was told."""
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    e2e_s: Percentiles | None
    prompt_tokens: int
    output_tokens: int
    span_s: float
    """From the first that was to be sent to the last that came."""
    late_s: float
    """How much later than it should have the client sent, at most: its own doing, counted to the server."""
    attained: int | None
    """Requests that kept the objective; None without one."""

    @property
    def attainment(self) -> float | None:
        return None if self.attained is None else self.attained / self.requests if self.requests else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.answered / self.span_s if self.span_s > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.span_s if self.span_s > 0 else 0.0


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """None of nothing."""
    ranked = sorted(values)
    if not ranked:
        return None

    def at(share: float) -> float:
        return ranked[max(0, ceil(share * len(ranked)) - 1)]

    return Percentiles(sum(ranked) / len(ranked), at(0.5), at(0.9), at(0.99), ranked[-1])


def tpot_of(shot: TimedRequest) -> float | None:
    """Seconds per token after the first; None where the answer had but one."""
    tokens = shot.output_tokens
    return (shot.last_s - shot.first_s) / (tokens - 1) if tokens > 1 else None


def kind_of(shot: TimedRequest) -> str:
    """Of what went wrong, in a few words; empty when nothing did."""
    if whole(shot):
        return ""
    if shot.status and shot.status != 200:
        return f"HTTP {shot.status}"
    if "error" in shot.problem[:20]:
        return "error in the stream"
    if shot.problem.startswith("TimeoutError"):
        return "no answer in time"
    if shot.problem.startswith("cut off"):
        return "cut off"
    if shot.problem.startswith("not HTTP"):
        return "not HTTP"
    if shot.sent_s < 0:
        return "no connection"
    return "ended early"


def whole(shot: TimedRequest) -> bool:
    return shot.ended and shot.first_s >= 0 and not shot.problem


def kept(shot: TimedRequest, slo: Slo) -> bool:
    """Whether one request kept the objective."""
    if not whole(shot):
        return False
    tpot_s = tpot_of(shot)
    return slo.kept(shot.ttft_s, 0.0 if tpot_s is None else tpot_s, shot.last_s - shot.at_s)


def measured(shots: Sequence[TimedRequest], slo: Slo | None = None) -> LoadResult:
    """All of a run's requests, sent or not."""
    answered = [shot for shot in shots if whole(shot)]
    errors = Counter(kind_of(shot) for shot in shots if not whole(shot))
    ends = [shot.done_s for shot in shots if shot.done_s >= 0]
    first_s = min((shot.at_s for shot in shots), default=0.0)
    return LoadResult(
        len(shots),
        len(answered),
        tuple(errors.most_common()),
        tuple((kind, _told(next(shot for shot in shots if kind_of(shot) == kind))) for kind in errors),
        percentiles(shot.ttft_s for shot in answered),
        percentiles(tpot for shot in answered if (tpot := tpot_of(shot)) is not None),
        percentiles(shot.last_s - shot.at_s for shot in answered),
        sum(_length(shot) for shot in answered),
        sum(shot.output_tokens for shot in answered),
        max(ends, default=first_s) - first_s,
        max((shot.sent_s - shot.at_s for shot in shots if shot.sent_s >= 0), default=0.0),
        None if slo is None else sum(kept(shot, slo) for shot in shots),
    )


def _told(shot: TimedRequest) -> str:
    """What a server said that went wrong, in one line."""
    text = shot.problem[shot.problem.find("{") :] if "{" in shot.problem else ""
    try:
        said = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = shot.problem
    return " ".join(str(said).split())[:MOST_WORDS]


def _length(shot: TimedRequest) -> int:
    return len(shot.prompt.split()) if isinstance(shot.prompt, str) else len(shot.prompt)

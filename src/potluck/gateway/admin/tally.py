"""What happens, counted: cheap enough to be called for every token.

A worker's tally can be taken apart from time to time and added to another process's: all of it is sums.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from potluck.core.brain.actions import Run
from potluck.core.brain.events import FailureKind
from potluck.gateway.admin import families as known
from potluck.gateway.admin.families import FAMILIES, Family
from potluck.gateway.parts import Asked, Told

Labels = tuple[str, ...]
MOST_SERIES = 2_000
"""Of one family; what comes beyond is counted under `other`, so that no client can make them without end."""
OTHER = "other"
ANSWERED = frozenset({"stop", "length"})


class Histogram:
    """How many were at most each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def see(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Iterable[int], total: float) -> None:
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total


class Seat:
    """One tenant's requests for one model: what is counted for each of them, within reach."""

    __slots__ = (
        "answered",
        "cached_tokens",
        "output",
        "output_tokens",
        "prompt",
        "prompt_tokens",
        "requests",
        "tenant_ttft",
        "tpot",
        "ttft",
        "whole",
    )

    def __init__(
        self,
        ttft: Histogram,
        tenant_ttft: Histogram,
        tpot: Histogram,
        whole: Histogram,
        prompt: Histogram,
        output: Histogram,
    ) -> None:
        self.ttft, self.tenant_ttft, self.tpot, self.whole = ttft, tenant_ttft, tpot, whole
        self.prompt, self.output = prompt, output
        self.requests = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.answered = dict.fromkeys(ANSWERED, 0)


class Tally:
    """Counts of everything in `families` that is not read when asked for: parts.Meter."""

    def __init__(
        self,
        region_of: Callable[[str], str] = lambda replica: "",
        published: Callable[[str, dict[str, object]], None] | None = None,
    ) -> None:
        self._region_of = region_of
        self.published = published
        """Whoever watches what happens; None while nobody does."""
        self._counts: dict[str, Counter[Labels]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self._gaps: dict[str, Histogram] = {}
        self._seats: dict[tuple[str, str], Seat] = {}
        self.open = 0

    def count(self, family: Family, labels: Labels = (), amount: float = 1) -> None:
        if not amount:
            return
        series = self._counts.get(family.name)
        if series is None:
            series = self._counts[family.name] = Counter()
        if labels not in series and len(series) >= MOST_SERIES:
            labels = (OTHER,) * len(labels)
        series[labels] += amount  # type: ignore[assignment]

    def histogram(self, family: Family, labels: Labels) -> Histogram:
        series = self._histograms.setdefault(family.name, {})
        found = series.get(labels)
        if found is None:
            if len(series) >= MOST_SERIES:
                labels = (OTHER,) * len(labels)
            found = series.setdefault(labels, Histogram(family.buckets))
        return found

    # parts.Meter

    def came(self, model: str, tenant: str) -> None:
        self.open += 1

    def gap(self, model: str, gap_s: float) -> None:
        found = self._gaps.get(model)
        if found is None:
            found = self._gaps[model] = self.histogram(known.GAP, (model,))
        found.see(gap_s)

    def answered(self, told: Told) -> None:
        model, tenant, outcome = told.model, told.tenant, told.outcome
        self.open -= bool(model)
        seat = self._seats.get((model, tenant))
        if seat is None:
            seat = self._seats[model, tenant] = self._seat(model, tenant)
        self.count(known.REQUESTS, (model, told.request_class, outcome))
        seat.requests += 1
        output = told.output_tokens
        if told.first_s is not None:
            waited_s = told.first_s - told.came_s
            seat.ttft.see(waited_s)
            seat.tenant_ttft.see(waited_s)
            each = output / told.choices
            if each > 1:
                seat.tpot.see((told.ended_s - told.first_s) / (each - 1))
        if outcome in ANSWERED:
            seat.whole.see(told.ended_s - told.came_s)
            seat.prompt.see(told.prompt_tokens)
            seat.output.see(output)
            seat.answered[outcome] += 1
            seat.prompt_tokens += told.prompt_tokens
            seat.cached_tokens += told.cached_tokens
        seat.output_tokens += output
        if self.published is not None:
            self.published("request", told._asdict())

    def _seat(self, model: str, tenant: str) -> Seat:
        if len(self._seats) >= MOST_SERIES:
            self._settle()
        return Seat(
            self.histogram(known.TTFT, (model,)),
            self.histogram(known.TENANT_TTFT, (tenant,)),
            self.histogram(known.TPOT, (model,)),
            self.histogram(known.WHOLE, (model,)),
            self.histogram(known.PROMPT, (model,)),
            self.histogram(known.OUTPUT, (model,)),
        )

    def _settle(self) -> None:
        """What the seats counted goes to where it is read."""
        for (model, tenant), seat in self._seats.items():
            self.count(known.TENANT_REQUESTS, (model, tenant), seat.requests)
            for outcome, number in seat.answered.items():
                self.count(known.SUCCESS, (model, outcome), number)
            self.count(known.PROMPTS, (model,), seat.prompt_tokens)
            self.count(known.QUERIED, (model,), seat.prompt_tokens)
            self.count(known.HITS, (model,), seat.cached_tokens)
            self.count(known.OUTPUTS, (model,), seat.output_tokens)
            self.count(known.TENANT_TOKENS, (model, tenant, "prompt"), seat.prompt_tokens)
            self.count(known.TENANT_TOKENS, (model, tenant, "cached"), seat.cached_tokens)
            self.count(known.TENANT_TOKENS, (model, tenant, "output"), seat.output_tokens)
        self._seats = {}

    def turned_away(self, status: int, code: str) -> None:
        self.count(known.TURNED_AWAY, (str(status), code))

    def routed(self, asked: Asked, run: Run) -> None:
        kind = self.route_kind(run)
        self.count(known.ROUTES, (asked.model, kind))
        if run.attempt > 0:
            self.count(known.RETRIES, (asked.model,))
        stop = run.route.segments[0].stop
        if stop is not None:
            self.histogram(known.SPLITS, (asked.model,)).see(stop)
        if self.published is not None:
            segments = [[each.replica, each.start, each.stop] for each in run.route.segments]
            self.published(
                "route",
                {
                    "request": asked.id,
                    "model": asked.model,
                    "kind": kind,
                    "attempt": run.attempt,
                    "segments": segments,
                },
            )

    def route_kind(self, run: Run) -> str:
        segments = run.route.segments
        if run.attempt > 0:
            return "recovered"
        if len(segments) == 1:
            return "in_place"
        if len({self._region_of(segment.replica) for segment in segments}) > 1:
            return "remote"
        return "prefill_decode" if (segments[0].stop or 0) >= run.prompt_tokens - 1 else "split"

    def segment(
        self, asked: Asked, replica: str, began_s: float, ended_s: float, tokens: int, problem: str = ""
    ) -> None:
        self.count(known.SEGMENTS, (replica, "failed" if problem else "done"))
        self.count(known.SEGMENT_TOKENS, (replica,), tokens)
        self.histogram(known.SEGMENT_TIME, (replica,)).see(ended_s - began_s)
        if self.published is not None:
            told = {"request": asked.id, "replica": replica, "took_s": ended_s - began_s, "tokens": tokens}
            self.published("segment", {**told, "problem": problem})

    def failed(self, asked: Asked, where: str, kind: FailureKind, why: str) -> None:
        self.count(known.FAILURES, (where, kind))
        if self.published is not None:
            self.published("failure", {"request": asked.id, "where": where, "kind": kind, "why": why})

    def moved(self, source: str, target: str, codec: str, moved_bytes: int, took_s: float) -> None:
        self.count(known.KV_BYTES, (source, target, codec), moved_bytes)
        self.count(known.KV_TIME, (source, target, codec), took_s)
        if self.published is not None:
            told = {
                "source": source,
                "target": target,
                "codec": codec,
                "bytes": moved_bytes,
                "took_s": took_s,
            }
            self.published("transfer", told)

    def decided(self, what: str, why: str) -> None:
        self.count(known.DECISIONS)
        if self.published is not None:
            self.published("decision", {"what": what, "why": why})

    # Between processes.

    def take(self) -> dict[str, Any]:
        """All that was counted since the last time, as JSON values; `add` of another tally takes it."""
        self._settle()
        counts = [
            [name, list(labels), value]
            for name, series in self._counts.items()
            for labels, value in series.items()
        ]
        histograms = [
            [name, list(labels), each.counts, each.total]
            for name, series in self._histograms.items()
            for labels, each in series.items()
            if any(each.counts)
        ]
        self._counts, self._histograms, self._gaps = {}, {}, {}
        return {"counts": counts, "histograms": histograms, "open": self.open}

    def add(self, taken: dict[str, Any]) -> None:
        """What another process counted; how many it has open is for its owner to keep."""
        for name, labels, value in taken["counts"]:
            self.count(FAMILIES[name], tuple(labels), value)
        for name, labels, counts, total in taken["histograms"]:
            self.histogram(FAMILIES[name], tuple(labels)).add(counts, total)

    def counted(self, family: Family) -> dict[Labels, float]:
        self._settle()
        return dict(self._counts.get(family.name, {}))

    def seen(self, family: Family) -> dict[Labels, Histogram]:
        return self._histograms.get(family.name, {})

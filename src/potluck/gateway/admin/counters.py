"""What happens, counted: cheap enough for every token. All of it is sums, so that processes' counts can be added."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from potluck.core.state.actions import Run
from potluck.core.state.events import FailureKind
from potluck.gateway.admin import families as known
from potluck.gateway.admin.families import FAMILIES, Family
from potluck.gateway.values import RequestOutcome

Labels = tuple[str, ...]
MOST_SERIES = 2_000
"""Of one family; what comes beyond is counted under `other`, so that no client can make them without end."""
MOST_NOTED = 1_000
OTHER = "other"
ANSWERED = frozenset({"stop", "length"})


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def see_all(self, values: Sequence[float]) -> None:
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)

    def add(self, counts: Iterable[int], total: float) -> None:
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total


class Counters:
    """What comes with every request and token is noted, and counted many at a time."""

    def __init__(
        self,
        region_of: Callable[[str], str] = lambda replica: "",
        *,
        record: Callable[[RequestOutcome], None] | None = None,
        told: Callable[[RequestOutcome], None] | None = None,
    ) -> None:
        """`record` writes down what this process answered; `told` hears of other processes' answers as well."""
        self._region_of, self._record, self.told = region_of, record, told
        self.usage_notes: dict[object, tuple[str, int]] = {}
        """What other processes say of their records: what is wrong, and how many were lost."""
        self._counts: dict[str, Counter[Labels]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self._gaps: dict[str, list[float]] = {}
        self._ended: list[RequestOutcome] = []
        self._segments: list[tuple[str, float, int, int, bool]] = []
        self._routes: Counter[tuple[str, str]] = Counter()
        self.open = 0

    def count(self, family: Family, labels: Labels = (), amount: float = 1) -> None:
        if not amount:
            return
        series = self._counts.setdefault(family.name, Counter())
        if labels not in series and len(series) >= MOST_SERIES:
            labels = (OTHER,) * len(labels)
        series[labels] += amount  # type: ignore[assignment]

    def histogram(self, family: Family, labels: Labels) -> Histogram:
        series = self._histograms.setdefault(family.name, {})
        result = series.get(labels)
        if result is None:
            if len(series) >= MOST_SERIES:
                labels = (OTHER,) * len(labels)
            result = series.setdefault(labels, Histogram(family.buckets))
        return result

    def came(self) -> None:
        self.open += 1

    def gaps(self, model: str) -> Callable[[float], None]:
        return self._gaps.setdefault(model, []).append

    def answered(self, outcome: RequestOutcome) -> None:
        if self._record is not None:
            self._record(outcome)
        self.open -= bool(outcome.model)
        self._ended.append(outcome)
        if len(self._ended) >= MOST_NOTED:
            self._settle_ended()
        if self.told is not None:
            self.told(outcome)

    def _settle(self) -> None:
        self._settle_gaps()
        self._settle_ended()
        self._settle_segments()
        routes, self._routes = self._routes, Counter()
        for labels, number in routes.items():
            self.count(known.ROUTES, labels, number)

    def _settle_gaps(self) -> None:
        for model, gaps in self._gaps.items():
            self.histogram(known.GAP, (model,)).see_all(gaps)
            gaps.clear()  # Others hold its `append`.

    def _settle_segments(self) -> None:
        noted, self._segments = self._segments, []
        of: dict[str, list[tuple[float, int, int, bool]]] = {}
        for replica, took_s, prompt, output, failure in noted:
            of.setdefault(replica, []).append((took_s, prompt, output, failure))
        for replica, segments in of.items():
            times_s, prompt_tokens, output_tokens, failed = zip(*segments, strict=True)
            self.count(known.SEGMENTS, (replica, "failed"), sum(failed))
            self.count(known.SEGMENTS, (replica, "done"), len(segments) - sum(failed))
            self.count(known.SEGMENT_TOKENS, (replica, "prompt"), sum(prompt_tokens))
            self.count(known.SEGMENT_TOKENS, (replica, "output"), sum(output_tokens))
            self.histogram(known.SEGMENT_TIME, (replica,)).see_all(times_s)

    def _settle_ended(self) -> None:
        noted, self._ended = self._ended, []
        of: dict[tuple[str, str], list[RequestOutcome]] = {}
        for ended in noted:
            of.setdefault((ended.model, ended.tenant), []).append(ended)
        for (model, tenant), outcomes in of.items():
            self._settle_tenant(model, tenant, outcomes)

    def _settle_tenant(self, model: str, tenant: str, ended: list[RequestOutcome]) -> None:
        for (request_class, outcome), number in Counter(
            (one.request_class, one.outcome) for one in ended
        ).items():
            self.count(known.REQUESTS, (model, request_class, outcome), number)
            if outcome in ANSWERED:
                self.count(known.SUCCESS, (model, outcome), number)
        begun = [(one, one.first_s) for one in ended if one.first_s is not None]
        whole = [one for one in ended if one.outcome in ANSWERED]
        waited_s = [first_s - one.came_s for one, first_s in begun]
        per_token_s = [
            (one.ended_s - first_s) / (one.output_tokens / one.choices - 1)
            for one, first_s in begun
            if one.output_tokens > one.choices
        ]
        self.histogram(known.TENANT_TTFT, (tenant,)).see_all(waited_s)
        for family, values in (
            (known.TTFT, waited_s),
            (known.TPOT, per_token_s),
            (known.WHOLE, [one.ended_s - one.came_s for one in whole]),
            (known.PROMPT, [one.prompt_tokens for one in whole]),
            (known.OUTPUT, [one.output_tokens for one in whole]),
        ):
            self.histogram(family, (model,)).see_all(values)
        prompt = sum(one.prompt_tokens for one in whole)
        cached = sum(one.cached_tokens for one in whole)
        output = sum(one.output_tokens for one in ended)
        self.count(known.TENANT_REQUESTS, (model, tenant), len(ended))
        for family, tokens in ((known.PROMPTS, prompt), (known.QUERIED, prompt), (known.HITS, cached)):
            self.count(family, (model,), tokens)
        self.count(known.OUTPUTS, (model,), output)
        for kind, tokens in (("prompt", prompt), ("cached", cached), ("output", output)):
            self.count(known.TENANT_TOKENS, (model, tenant, kind), tokens)

    def turned_away(self, status: int, code: str) -> None:
        self.count(known.TURNED_AWAY, (str(status), code))

    def replayed(self) -> None:
        self.count(known.REPLAYED)

    def routed(self, model: str, run: Run) -> None:
        if run.attempt == 0 and len(run.route.segments) == 1:
            self._routes[model, "in_place"] += 1  # Most of them.
            return
        self.count(known.ROUTES, (model, self.route_kind(run)))
        if run.attempt > 0:
            self.count(known.RETRIES, (model,))
        stop = run.route.segments[0].stop
        if stop is not None:
            self.histogram(known.SPLITS, (model,)).see_all([stop])

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
        self, replica: str, took_s: float, prompt_tokens: int, output_tokens: int, problem: str = ""
    ) -> None:
        self._segments.append((replica, took_s, prompt_tokens, output_tokens, bool(problem)))
        if len(self._segments) >= MOST_NOTED:
            self._settle_segments()

    def failed(self, where: str, kind: FailureKind) -> None:
        self.count(known.FAILURES, (where, kind))

    def moved(self, source: str, target: str, codec: str, moved_bytes: int, took_s: float) -> None:
        self.count(known.KV_BYTES, (source, target, codec), moved_bytes)
        self.count(known.KV_TIME, (source, target, codec), took_s)

    def decided(self, what: str, why: str) -> None:
        self.count(known.DECISIONS)

    # Between processes.

    def take(self) -> dict[str, Any]:
        self._settle()
        counts = [
            [name, list(labels), value]
            for name, series in self._counts.items()
            for labels, value in series.items()
        ]
        histograms = [
            [name, list(labels), histogram.counts, histogram.total]
            for name, series in self._histograms.items()
            for labels, histogram in series.items()
            if any(histogram.counts)
        ]
        self._counts, self._histograms = {}, {}
        return {"counts": counts, "histograms": histograms, "open": self.open}

    def add(self, taken: dict[str, Any]) -> None:
        for name, labels, value in taken["counts"]:
            self.count(FAMILIES[name], tuple(labels), value)
        for name, labels, counts, total in taken["histograms"]:
            self.histogram(FAMILIES[name], tuple(labels)).add(counts, total)

    def counted(self, family: Family) -> dict[Labels, float]:
        self._settle()
        return dict(self._counts.get(family.name, {}))

    def seen(self, family: Family) -> dict[Labels, Histogram]:
        self._settle()
        return self._histograms.get(family.name, {})

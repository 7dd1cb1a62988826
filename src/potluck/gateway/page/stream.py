"""One stream for all who watch: the whole once, then what changed, made once a tick for all of them.

    whole   {"format": "potluck.page", "version": 2, "at_s": ..., "window_s": ..., "tables": {...}, "requests": {...},
             "events": [...], "points": {...}}
    news    {"at_s": ..., "set": {table: {name: {field: value}}}, "gone": {table: [name]}, "requests": {...},
             "events": [...], "point": {...}}      what is empty is left out
    bye     {"what": ..., "why": ...}      the last line of a gateway that was asked to end

Between ticks nothing is done; with nobody watching only a point of history every few seconds, and some requests are
followed. The last hour is kept in memory: figures of each model every POINT_S, and the fleet every FRAME_S.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, get_args

from potluck.core.state import events
from potluck.core.state.actions import Action, Refuse, Run
from potluck.core.state.events import Event
from potluck.core.values.types import Request, Slo
from potluck.gateway.core import Decision, GatewayCore
from potluck.gateway.page.snapshot import FleetSnapshot, KvFlows, LastMinute, Row, Tables
from potluck.gateway.values import RequestOutcome

POINT_S = 2.0
POINTS = 1_800
FRAME_S = 10.0
FRAMES = 360
MOST_NOTED = 100_000
WINDOW_S = 15.0
"""A point's rates and percentiles are of what ended in so long before it. The page's tiles and plots both show
points, so that a tile is always the last value of its plot."""
LAST_MIN_S = 60.0
MOST_REFUSAL_GROUPS = 20
OTHER_REFUSALS = "other"
MOST_REFUSAL_DETAILS = 200
ANSWERED = frozenset({"stop", "length"})
CANCELLED = "cancelled"
Point = dict[str, Any]
RefusalKey = tuple[str, str, str, str]
"""Model, tenant, class, reason."""


@dataclass(slots=True)
class ModelBatch:
    """One model's requests that ended within some time, or within several batches' time."""

    span_s: float = 0.0
    requests: int = 0
    in_time: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    """Of requests that were answered."""
    output_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    by_class: dict[str, list[int]] = field(default_factory=dict)
    """Class to requests, and requests within the objective."""
    usd: float | None = 0.0
    """None where the price of a replica is unknown."""

    def add(self, outcome: RequestOutcome, slo: Slo | None) -> None:
        self.requests += 1
        self.output_tokens += outcome.output_tokens
        by_class = self.by_class.setdefault(outcome.request_class, [0, 0])
        by_class[0] += 1
        answered = outcome.outcome in ANSWERED
        self.refused += is_refusal(outcome)
        self.prompt_tokens += outcome.prompt_tokens if answered else 0
        if outcome.first_s is None:
            return
        ttft_s = outcome.first_s - outcome.came_s
        tokens = outcome.output_tokens / max(1, outcome.choices)
        tpot_s = (outcome.ended_s - outcome.first_s) / (tokens - 1) if tokens > 1 else 0.0
        self.ttft_s.append(ttft_s)
        if tokens > 1:
            self.tpot_s.append(tpot_s)
        if answered and (slo is None or slo.kept(ttft_s, tpot_s, outcome.ended_s - outcome.came_s)):
            self.in_time += 1
            by_class[1] += 1

    def merge(self, other_batch: ModelBatch) -> None:
        self.span_s += other_batch.span_s
        self.requests += other_batch.requests
        self.in_time += other_batch.in_time
        self.refused += other_batch.refused
        self.prompt_tokens += other_batch.prompt_tokens
        self.output_tokens += other_batch.output_tokens
        self.ttft_s += other_batch.ttft_s
        self.tpot_s += other_batch.tpot_s
        self.usd = None if self.usd is None or other_batch.usd is None else self.usd + other_batch.usd
        for name, (requests, in_time) in other_batch.by_class.items():
            mine = self.by_class.setdefault(name, [0, 0])
            mine[0] += requests
            mine[1] += in_time

    def per_s(self, amount: float, digits: int) -> float:
        return round(amount / self.span_s, digits) if self.span_s else 0.0

    @property
    def usd_per_mtok(self) -> float | None:
        """Of prompt and output tokens together."""
        tokens = self.prompt_tokens + self.output_tokens
        return None if self.usd is None or not tokens else round(self.usd / tokens * 1e6, 3)


def is_refusal(outcome: RequestOutcome) -> bool:
    return outcome.outcome not in ANSWERED and outcome.outcome != CANCELLED


@dataclass(frozen=True, slots=True)
class EndedBatch:
    """What ended between two looks at the fleet."""

    at_s: float
    span_s: float
    models: Mapping[str, ModelBatch]
    prompt_tokens: Counter[str]
    output_tokens: Counter[str]
    """By tenant; also of requests that were refused, whose prompts a tenant sent all the same."""
    refusals: Counter[RefusalKey]

    def mostly_within(self, window_s: float, now_s: float) -> bool:
        return self.at_s - self.span_s / 2 > now_s - window_s


class PageHistory:
    def __init__(
        self, slos: Mapping[str, Slo], refusal_details: Mapping[RefusalKey, str] | None = None
    ) -> None:
        self._slos = slos
        self._refusal_details = {} if refusal_details is None else refusal_details
        self._noted: deque[RequestOutcome] = deque(maxlen=MOST_NOTED)
        self.told: Callable[[RequestOutcome], None] = self._noted.append
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._frames: deque[tuple[float, bytes]] = deque(maxlen=FRAMES)
        self._batches: deque[EndedBatch] = deque()
        self._last_s: float | None = None
        self.last_min = LastMinute()

    def due(self, now_s: float) -> bool:
        return self._last_s is None or now_s - self._last_s >= POINT_S

    def look(self, now_s: float, tables: Tables) -> Point:
        span_s = POINT_S if self._last_s is None else max(now_s - self._last_s, 1e-3)
        self._last_s = now_s
        models = tables.get("models", {})
        self._batches.append(self._batch(now_s, span_s, models))
        while not self._batches[0].mostly_within(LAST_MIN_S, now_s) and len(self._batches) > 1:
            self._batches.popleft()
        recent = [batch for batch in self._batches if batch.mostly_within(WINDOW_S, now_s)] or [
            self._batches[-1]
        ]
        self.last_min = self._last_minute()
        point = {
            "at_s": round(now_s, 2),
            "models": {
                name: _figures(_merged(recent, name), _usd_per_h(models, name))
                for name in {**models, **dict.fromkeys(name for batch in recent for name in batch.models)}
            },
        }
        self._points.append(point)
        if not self._frames or now_s - self._frames[-1][0] >= FRAME_S:
            packed = zlib.compress(json.dumps(tables, separators=(",", ":")).encode(), 1)
            self._frames.append((now_s, packed))
        return point

    def _batch(self, now_s: float, span_s: float, models: Mapping[str, Row]) -> EndedBatch:
        outcomes = list(self._noted)
        self._noted.clear()
        batches = {name: ModelBatch(span_s) for name in models}
        prompt_tokens, output_tokens = Counter[str](), Counter[str]()
        refusals = Counter[RefusalKey]()
        for outcome in outcomes:
            if is_refusal(outcome):
                refusals[outcome.model, outcome.tenant, outcome.request_class, outcome.outcome] += 1
            if outcome.model:
                batches.setdefault(outcome.model, ModelBatch(span_s)).add(
                    outcome, self._slos.get(outcome.model)
                )
                prompt_tokens[outcome.tenant] += outcome.prompt_tokens
                output_tokens[outcome.tenant] += outcome.output_tokens
        for name, batch in batches.items():
            usd_per_h = _usd_per_h(models, name)
            batch.usd = None if usd_per_h is None else usd_per_h * span_s / 3600
            batch.ttft_s.sort()
            batch.tpot_s.sort()
        return EndedBatch(now_s, span_s, batches, prompt_tokens, output_tokens, refusals)

    def _last_minute(self) -> LastMinute:
        names = {name: None for batch in self._batches for name in batch.models}
        return LastMinute(
            {name: _last_min_row(_merged(self._batches, name)) for name in names},
            sum((batch.prompt_tokens for batch in self._batches), Counter[str]()),
            sum((batch.output_tokens for batch in self._batches), Counter[str]()),
            self._refusal_rows(),
        )

    def _refusal_rows(self) -> dict[str, Row]:
        """Refusals of the last minute, the most frequent first; the rest beyond the limit is one row, `other`."""
        counts, last_s = Counter[RefusalKey](), dict[RefusalKey, float]()
        for batch in self._batches:
            counts.update(batch.refusals)
            last_s.update(dict.fromkeys(batch.refusals, batch.at_s))
        groups = sorted(counts, key=lambda key: (-counts[key], key))
        shown = len(groups) if len(groups) <= MOST_REFUSAL_GROUPS else MOST_REFUSAL_GROUPS - 1
        rows: dict[str, Row] = {}
        for key in groups[:shown]:
            model, tenant, request_class, reason = key
            rows["\t".join(key)] = {
                "model": model,
                "tenant": tenant,
                "class": request_class,
                "reason": reason,
                "why": self._refusal_details.get(key, ""),
                "count": counts[key],
                "last_s": round(last_s[key], 1),
            }
        if rest := groups[shown:]:
            rows[OTHER_REFUSALS] = {
                **dict.fromkeys(("model", "tenant", "class", "reason", "why"), ""),
                "count": sum(counts[key] for key in rest),
                "last_s": round(max(last_s[key] for key in rest), 1),
            }
        return rows

    def columns(self) -> Point:
        names = {name: None for point in self._points for name in point["models"]}
        figures: Point = next(iter(self._points[-1]["models"].values()), {}) if self._points else {}
        return {
            "at_s": [point["at_s"] for point in self._points],
            "models": {
                name: {
                    figure: [point["models"].get(name, {}).get(figure) for point in self._points]
                    for figure in figures
                }
                for name in names
            },
        }

    def frame(self, at_s: float) -> tuple[float, Tables] | None:
        """The fleet as it was at the last look before a time; at the first one where there is none before."""
        if not self._frames:
            return None
        place = max(0, bisect_right(self._frames, at_s, key=lambda each: each[0]) - 1)
        found_s, packed = self._frames[place]
        return found_s, json.loads(zlib.decompress(packed))


def _merged(batches: Iterable[EndedBatch], model: str) -> ModelBatch:
    """All of a model's batches; a batch before its first request counts as time without any."""
    merged = ModelBatch()
    for batch in batches:
        merged.merge(batch.models.get(model) or ModelBatch(batch.span_s))
    merged.ttft_s.sort()
    merged.tpot_s.sort()
    return merged


def _usd_per_h(models: Mapping[str, Row], name: str) -> float | None:
    """What a model's replicas cost: 0 for one that is not served, None where a price is unknown."""
    usd_per_h = models.get(name, {}).get("usd_per_h", 0.0)
    return None if usd_per_h is None else float(usd_per_h)


def _figures(batch: ModelBatch, usd_per_h: float | None) -> Point:
    return {
        "ended_per_s": batch.per_s(batch.requests, 3),
        "in_time_per_s": batch.per_s(batch.in_time, 3),
        "refused_per_s": batch.per_s(batch.refused, 3),
        "prompt_tokens_per_s": batch.per_s(batch.prompt_tokens, 1),
        "output_tokens_per_s": batch.per_s(batch.output_tokens, 1),
        "ttft_p50_s": quantile(batch.ttft_s, 0.5),
        "ttft_p90_s": quantile(batch.ttft_s, 0.9),
        "tpot_p50_s": quantile(batch.tpot_s, 0.5),
        "tpot_p90_s": quantile(batch.tpot_s, 0.9),
        "usd_per_h": None if usd_per_h is None else round(usd_per_h, 3),
        "usd_per_mtok": batch.usd_per_mtok,
    }


def _last_min_row(batch: ModelBatch) -> Row:
    return {
        "requests": batch.requests,
        "in_time": batch.in_time,
        "requests_per_s": batch.per_s(batch.requests, 3),
        "ttft_p90_s": quantile(batch.ttft_s, 0.9),
        "tpot_p90_s": quantile(batch.tpot_s, 0.9),
        "usd_per_mtok": batch.usd_per_mtok,
        "classes": {name: tuple(counts) for name, counts in sorted(batch.by_class.items())},
    }


def quantile(values: list[float], share: float) -> float | None:
    """The smallest of the sorted values that at least this share is not above."""
    return round(values[max(0, ceil(share * len(values)) - 1)], 5) if values else None


Heard = (
    events.SegmentComputed
    | events.SegmentDone
    | events.FirstToken
    | events.AttemptFailed
    | events.RequestFinished
    | events.RequestCancelled
)
_HEARD = get_args(Heard)
MOST_ROWS = 4_000
MOST_SHOWN = 400
NEW_PER_S = 24  # Requests that begin to be followed in a second, of however many come.
LATEST = 60


class Waterfall:
    """A watcher of the Brain's loop. Times are seconds since the request came; the Brain's began at `zero_utc_s`."""

    def __init__(self, zero_utc_s: float) -> None:
        self._zero_utc_s = zero_utc_s
        self._rows: dict[str, Row] = {}
        self._came_s: dict[str, float] = {}
        self._shown: set[str] = set()
        self._ended: deque[str] = deque(maxlen=LATEST)
        self._changed: dict[str, None] = {}
        self._begun = (0, 0)
        self._watched = False
        self.refusal_details: dict[RefusalKey, str] = {}
        """What the latest request of a group was refused for, in words; the latest MOST_REFUSAL_DETAILS groups."""

    def __call__(self, at_s: float, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, events.RequestArrived):
            self._arrived(at_s, event.request)
        elif isinstance(event, _HEARD):
            value = self._came_s.get(event.request)
            if value is not None:
                self._heard(at_s - value, event)
        for action in actions:
            if type(action) is Run:
                self._sent(at_s, action)
            elif type(action) is Refuse:
                self._note_refusal(action, event)
                self._over(at_s, action.request, "refused", {"why": action.detail, "reason": action.reason})

    def _note_refusal(self, refusal: Refuse, event: Event) -> None:
        """A request that was refused on arrival is known by the event, even if it is not followed."""
        if isinstance(event, events.RequestArrived) and event.request.id == refusal.request:
            request = event.request
            group = (request.model, request.tenant, request.request_class)
        elif (row := self._rows.get(refusal.request)) is not None:
            group = (row["model"], row["tenant"], row["class"])
        else:
            return
        key = (*group, refusal.reason)
        self.refusal_details.pop(key, None)
        self.refusal_details[key] = refusal.detail
        if len(self.refusal_details) > MOST_REFUSAL_DETAILS:
            del self.refusal_details[next(iter(self.refusal_details))]

    def row(self, request: str) -> Row | None:
        return self._rows.get(request)

    def watched(self, watched: bool) -> None:
        self._watched, self._changed = watched, {}

    def latest(self) -> dict[str, Row]:
        wanted = {*self._ended, *self._shown}
        return {name: row for name, row in self._rows.items() if name in wanted}

    def changed(self) -> dict[str, Row]:
        result = {name: self._rows[name] for name in self._changed if name in self._rows}
        self._changed = {}
        return result

    def _arrived(self, at_s: float, request: Request) -> None:
        second, begun = self._begun if self._begun[0] == int(at_s) else (int(at_s), 0)
        followed = begun < NEW_PER_S and len(self._shown) < MOST_SHOWN
        if not followed and not self._watched:
            return
        self._begun = (second, begun + followed)
        while len(self._rows) >= MOST_ROWS:
            gone = next(iter(self._rows))
            del self._rows[gone]
            self._came_s.pop(gone, None)
            self._shown.discard(gone)
        self._came_s[request.id] = at_s
        self._rows[request.id] = {
            "model": request.model,
            "tenant": request.tenant,
            "class": request.request_class,
            "prompt_tokens": request.prompt_tokens,
            "came_s": round(self._zero_utc_s + at_s, 3),
            "state": "waiting",
            "attempts": [],
        }
        if followed:
            self._shown.add(request.id)
            self._touch(request.id)

    def _touch(self, request: str) -> None:
        if self._watched and request in self._shown:
            self._changed[request] = None

    def _sent(self, at_s: float, run: Run) -> None:
        row, came_s = self._rows.get(run.request), self._came_s.get(run.request)
        if row is None or came_s is None:
            return
        row["state"] = "running"
        row["attempts"].append(
            {
                "attempt": run.attempt,
                "sent_s": _short(at_s - came_s),
                "segments": [
                    {"replica": segment.replica, "start": segment.start, "stop": segment.stop}
                    for segment in run.route.segments
                ],
            }
        )
        self._touch(run.request)

    def _heard(self, after_s: float, event: Heard) -> None:
        match event:
            case events.SegmentComputed(request, attempt, place):
                self._mark(request, attempt, place, "computed_s", after_s)
            case events.SegmentDone(request, attempt, place):
                self._mark(request, attempt, place, "handed_s", after_s)
            case events.FirstToken(request, attempt):
                result = self._attempt(request, attempt)
                if result is not None:
                    result["first_s"] = _short(after_s)
                    self._rows[request].setdefault("first_s", _short(after_s))
            case events.AttemptFailed(request, attempt, kind, where, streamed, _):
                result = self._attempt(request, attempt)
                if result is not None:
                    result.update(failed=kind, where=where, ended_s=_short(after_s), streamed=streamed)
                self._shown.add(request)
            case events.RequestFinished(request, _, output_tokens):
                self._over(after_s, request, "done", {"output_tokens": output_tokens}, since=0.0)
            case events.RequestCancelled(request):
                self._over(after_s, request, "cancelled", {}, since=0.0)
        self._touch(event.request)

    def _mark(self, request: str, attempt: int, place: int, field: str, after_s: float) -> None:
        result = self._attempt(request, attempt)
        if result is not None and place < len(result["segments"]):
            result["segments"][place].setdefault(field, _short(after_s))

    def _attempt(self, request: str, attempt: int) -> Row | None:
        row = self._rows.get(request)
        if row is None:
            return None
        return next((item for item in reversed(row["attempts"]) if item["attempt"] == attempt), None)

    def _over(
        self, at_s: float, request: str, state: str, more: Mapping[str, Any], since: float | None = None
    ) -> None:
        came_s = self._came_s.pop(request, None)
        row = self._rows.get(request)
        if row is None or came_s is None:
            return
        row.update(more, state=state, ended_s=_short(at_s - (came_s if since is None else since)))
        self._touch(request)
        self._shown.discard(request)
        self._ended.append(request)


def _short(after_s: float) -> float:
    return round(after_s, 4)


FORMAT, VERSION = "potluck.page", 2
TICK_S = 0.25
STOPPED = ("The service was stopped.", "This page goes on when it is started again.")
MOST_WATCHERS = 16
MOST_MESSAGES = 40  # That wait for one reader; one that has more is given the whole again.


class PageReader:
    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.late = False
        self.over = False

    def put(self, message: bytes) -> None:
        if len(self._messages) >= MOST_MESSAGES:
            self.late = True
            return
        self._messages.append(message)
        self._news.set()

    def again(self, whole: bytes) -> None:
        self._messages.clear()
        self.late = False
        self.put(whole)

    def end(self, last: bytes) -> None:
        self._messages.append(last)
        self.over = True
        self._news.set()

    async def next(self, wait_s: float) -> bytes:
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return b": nothing\n\n"
        self._news.clear()
        text = b"".join(self._messages)
        self._messages.clear()
        return text


class PageStream:
    def __init__(
        self,
        core: GatewayCore,
        tokens: Callable[[], Mapping[tuple[str, ...], float]] = dict,
        notices: Callable[[], Iterable[str]] = tuple,
        clock: Callable[[], float] = time.time,
        tick_s: float = TICK_S,
    ) -> None:
        self._core, self._clock, self._tick_s = core, clock, tick_s
        self.flows = KvFlows()
        self.requests = Waterfall(clock() - core.brain_loop.now_s())
        self.hour = PageHistory(dict(core.replica_models.resolved.slos), self.requests.refusal_details)
        self._snapshot = FleetSnapshot(core, self.flows, tokens, notices)
        self._watchers: list[PageReader] = []
        self._before: Tables = {}
        self._event = 0
        self._point: Row | None = None
        self._ticking: asyncio.TimerHandle | None = None
        core.brain_loop.watchers.append(self.requests)

    def look(self) -> None:
        now_s = self._clock()
        if self.hour.due(now_s):
            tables = self._before if self._watchers else self._tables(now_s)
            self._point = self.hour.look(now_s, tables)

    def _tables(self, now_s: float) -> Tables:
        return self._snapshot.look(now_s, self.hour.last_min)

    def history(self) -> Row:
        return {
            "format": FORMAT,
            "version": VERSION,
            "at_s": self._clock(),
            "window_s": WINDOW_S,
            "points": self.hour.columns(),
            "events": [event_of(decision) for decision in self._core.decision_log.kept],
        }

    def moment(self, at_s: float) -> Row | None:
        result = self.hour.frame(at_s)
        if result is None:
            return None
        return {"format": FORMAT, "version": VERSION, "at_s": result[0], "tables": result[1]}

    def watch(self) -> PageReader | None:
        if len(self._watchers) >= MOST_WATCHERS:
            return None
        if not self._watchers:
            self._begin()
        page_reader = PageReader()
        page_reader.put(self._whole())
        self._watchers.append(page_reader)
        return page_reader

    def leave(self, page_reader: PageReader) -> None:
        if page_reader in self._watchers:
            self._watchers.remove(page_reader)
        if not self._watchers:
            self._rest()

    @property
    def watched(self) -> bool:
        return bool(self._watchers)

    def _begin(self) -> None:
        self.requests.watched(True)
        self._before, self._point = self._tables(self._clock()), None
        kept = self._core.decision_log.kept
        self._event = kept[-1].number if kept else 0
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _rest(self) -> None:
        self.requests.watched(False)
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def goodbye(self) -> None:
        """The last line to all who watch: that the gateway was asked to end, or what was said of it."""
        last = next(
            (decision for decision in reversed(self._core.decision_log.kept) if decision.kind == "end"), None
        )
        what, why = STOPPED if last is None else (last.what, last.why)
        line = message("bye", {"what": what, "why": why})
        self._rest()
        for page_reader in self._watchers:
            page_reader.end(line)

    def _whole(self) -> bytes:
        return message(
            "whole",
            {
                "format": FORMAT,
                "version": VERSION,
                "at_s": round(self._clock(), 3),
                "tick_s": self._tick_s,
                "window_s": WINDOW_S,
                "tables": self._before,
                "requests": self.requests.latest(),
                "events": [
                    event_of(decision)
                    for decision in self._core.decision_log.kept
                    if decision.number <= self._event
                ],
                "points": self.hour.columns(),
            },
        )

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        text = self.news()
        line = message("news", text)
        for page_reader in self._watchers:
            page_reader.put(line)
        if any(page_reader.late for page_reader in self._watchers):
            whole = self._whole()
            for page_reader in self._watchers:
                if page_reader.late:
                    page_reader.again(whole)

    def news(self) -> Row:
        now_s = self._clock()
        after = self._tables(now_s)
        changed, gone = changes(self._before, after)
        self._before = after
        row: Row = {"at_s": round(now_s, 3)}
        if changed:
            row["set"] = changed
        if gone:
            row["gone"] = gone
        if rows := self.requests.changed():
            row["requests"] = rows
        new = [decision for decision in self._core.decision_log.kept if decision.number > self._event]
        if new:
            self._event = new[-1].number
            row["events"] = [event_of(decision) for decision in new]
        if self._point is not None:
            row["point"], self._point = self._point, None
        return row


def changes(before: Tables, after: Tables) -> tuple[dict[str, dict[str, Row]], dict[str, list[str]]]:
    changed: dict[str, dict[str, Row]] = {}
    gone: dict[str, list[str]] = {}
    for table, rows in after.items():
        old = before.get(table, {})
        new = {}
        for name, row in rows.items():
            was = old.get(name)
            if was is None:
                new[name] = row
            elif was != row:
                new[name] = {key: value for key, value in row.items() if was.get(key, _NOTHING) != value}
        if new:
            changed[table] = new
        missing = [name for name in old if name not in rows]
        if missing:
            gone[table] = missing
    return changed, gone


_NOTHING: Any = object()


def event_of(each: Decision) -> Row:
    return {**each._asdict(), "at_s": round(each.at_s, 3)}


def message(kind: str, row: Row) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(row, separators=(',', ':'))}\n\n".encode()

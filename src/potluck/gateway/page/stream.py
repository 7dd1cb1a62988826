"""One stream for all who watch: the whole once, then what changed, made once a tick for all of them.

    whole   {"format": "potluck.page", "version": 1, "at_s": ..., "tables": {...}, "requests": {...}, "events": [...],
             "points": {...}}
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
from math import ceil
from typing import Any, get_args

from potluck.core.state import events
from potluck.core.state.actions import Action, Hedge, Refuse, Run
from potluck.core.state.events import Event
from potluck.core.values.types import Request, Slo
from potluck.gateway.core import Decision, GatewayCore
from potluck.gateway.page.snapshot import FleetSnapshot, KvFlows, Row, Tables
from potluck.gateway.values import RequestOutcome

POINT_S = 2.0
POINTS = 1_800
FRAME_S = 10.0
FRAMES = 360
MOST_NOTED = 100_000
WINDOW = 30  # Points over which tenants' shares are told: a minute.
ANSWERED = frozenset({"stop", "length"})
Point = dict[str, Any]


class PageHistory:
    def __init__(self, slos: Mapping[str, Slo]) -> None:
        self._slos = slos
        self._noted: deque[RequestOutcome] = deque(maxlen=MOST_NOTED)
        self.told: Callable[[RequestOutcome], None] = self._noted.append
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._frames: deque[tuple[float, bytes]] = deque(maxlen=FRAMES)
        self._tenants: deque[Counter[str]] = deque(maxlen=WINDOW)
        self._last_s: float | None = None

    def due(self, now_s: float) -> bool:
        return self._last_s is None or now_s - self._last_s >= POINT_S

    def look(self, now_s: float, tables: Tables) -> Point:
        span_s = POINT_S if self._last_s is None else max(now_s - self._last_s, 1e-3)
        self._last_s = now_s
        ended = list(self._noted)
        self._noted.clear()
        by_model: dict[str, list[RequestOutcome]] = {name: [] for name in tables.get("models", {})}
        tokens: Counter[str] = Counter()
        for one in ended:
            if one.model:
                by_model.setdefault(one.model, []).append(one)
                tokens[one.tenant] += one.prompt_tokens + one.output_tokens
        self._tenants.append(tokens)
        point = {
            "at_s": round(now_s, 2),
            "models": {
                name: self._figures(outcomes, span_s, name, tables.get("models", {}).get(name, {}))
                for name, outcomes in by_model.items()
            },
        }
        self._points.append(point)
        if not self._frames or now_s - self._frames[-1][0] >= FRAME_S:
            packed = zlib.compress(json.dumps(tables, separators=(",", ":")).encode(), 1)
            self._frames.append((now_s, packed))
        return point

    def _figures(
        self, ended: list[RequestOutcome], span_s: float, model: str, row: Mapping[str, Any]
    ) -> Point:
        slo = self._slos.get(model)
        ttft_s, tpot_s, in_time, tokens = [], [], 0, 0
        classes: dict[str, list[int]] = {}
        for one in ended:
            tokens += one.output_tokens
            mine = classes.setdefault(one.request_class, [0, 0])
            mine[0] += 1
            if one.first_s is None:
                continue
            waited_s = one.first_s - one.came_s
            value = one.output_tokens / max(1, one.choices)
            gap_s = (one.ended_s - one.first_s) / (value - 1) if value > 1 else 0.0
            ttft_s.append(waited_s)
            if value > 1:
                tpot_s.append(gap_s)
            if one.outcome in ANSWERED and (
                slo is None or slo.kept(waited_s, gap_s, one.ended_s - one.came_s)
            ):
                in_time += 1
                mine[1] += 1
        answered = sum(message.outcome in ANSWERED for message in ended)
        prompts = sum(message.prompt_tokens for message in ended if message.outcome in ANSWERED)
        usd_per_h = row.get("usd_per_h", 0.0)
        whole = tokens + prompts
        usd = None if usd_per_h is None or not whole else usd_per_h * span_s / 3600 / whole * 1e6
        return {
            "ended_per_s": round(len(ended) / span_s, 3),
            "in_time_per_s": round(in_time / span_s, 3),
            "refused_per_s": round((len(ended) - answered) / span_s, 3),
            "tokens_per_s": round(tokens / span_s, 1),
            "ttft_p50_s": quantile(ttft_s, 0.5),
            "ttft_p90_s": quantile(ttft_s, 0.9),
            "tpot_p50_s": quantile(tpot_s, 0.5),
            "tpot_p90_s": quantile(tpot_s, 0.9),
            "classes": {
                name: [round(all_of / span_s, 3), round(kept / span_s, 3)]
                for name, (all_of, kept) in sorted(classes.items())
            },
            "usd_per_h": None if usd_per_h is None else round(usd_per_h, 3),
            "usd_per_mtok": None if usd is None else round(usd, 3),
        }

    @property
    def tenants(self) -> dict[str, int]:
        return dict(sum(self._tenants, Counter()))

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


def quantile(values: list[float], share: float) -> float | None:
    """The smallest of them that at least this share is not above."""
    if not values:
        return None
    values = sorted(values)
    return round(values[max(0, ceil(share * len(values)) - 1)], 5)


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

    def __call__(self, at_s: float, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, events.RequestArrived):
            self._arrived(at_s, event.request)
        elif isinstance(event, _HEARD):
            value = self._came_s.get(event.request)
            if value is not None:
                self._heard(at_s - value, event)
        for action in actions:
            if type(action) is Run or type(action) is Hedge:
                self._sent(at_s, action)
            elif type(action) is Refuse:
                self._over(at_s, action.request, "refused", {"why": action.detail, "reason": action.reason})

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

    def _sent(self, at_s: float, run: Run | Hedge) -> None:
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


FORMAT, VERSION = "potluck.page", 1
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
        tokens: Callable[[], Mapping[str, float]] = dict,
        notices: Callable[[], Iterable[str]] = tuple,
        clock: Callable[[], float] = time.time,
        tick_s: float = TICK_S,
    ) -> None:
        self._core, self._clock, self._tick_s = core, clock, tick_s
        self.flows = KvFlows()
        self.hour = PageHistory(dict(core.replica_models.resolved.slos))
        self._snapshot = FleetSnapshot(core, self.flows, tokens, notices)
        self._watchers: list[PageReader] = []
        self._before: Tables = {}
        self._event = 0
        self._point: Row | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self.requests = Waterfall(clock() - core.brain_loop.now_s())
        core.brain_loop.watchers.append(self.requests)

    def look(self) -> None:
        now_s = self._clock()
        if self.hour.due(now_s):
            tables = self._before if self._watchers else self._tables(now_s)
            self._point = self.hour.look(now_s, tables)

    def _tables(self, now_s: float) -> Tables:
        return self._snapshot.look(now_s, self.hour.tenants)

    def history(self) -> Row:
        return {
            "format": FORMAT,
            "version": VERSION,
            "at_s": self._clock(),
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
        watcher = PageReader()
        watcher.put(self._whole())
        self._watchers.append(watcher)
        return watcher

    def leave(self, watcher: PageReader) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
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
        for watcher in self._watchers:
            watcher.end(line)

    def _whole(self) -> bytes:
        return message(
            "whole",
            {
                "format": FORMAT,
                "version": VERSION,
                "at_s": round(self._clock(), 3),
                "tick_s": self._tick_s,
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
        for watcher in self._watchers:
            watcher.put(line)
        if any(watcher.late for watcher in self._watchers):
            whole = self._whole()
            for watcher in self._watchers:
                if watcher.late:
                    watcher.again(whole)

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


def message(kind: str, what: Row) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(what, separators=(',', ':'))}\n\n".encode()

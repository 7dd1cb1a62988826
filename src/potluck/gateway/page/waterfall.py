"""Requests as the desk hears of them: when each came, was sent, handed on, answered.

One row per request. Of many a second only some are followed as they go, and those that fail. While somebody watches
all are kept for a while, for who asks by name; else only the followed, for who comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from potluck.core.state.actions import Action, Hedge, Refuse, Run
from potluck.core.state.events import (
    AttemptFailed,
    Event,
    FirstToken,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SegmentComputed,
    SegmentDone,
)
from potluck.core.values.types import Request

Row = dict[str, Any]
Heard = SegmentComputed | SegmentDone | FirstToken | AttemptFailed | RequestFinished | RequestCancelled
_HEARD = (SegmentComputed, SegmentDone, FirstToken, AttemptFailed, RequestFinished, RequestCancelled)
MOST_ROWS = 4_000
MOST_SHOWN = 400
"""Rows under way that are followed live."""
NEW_PER_S = 24
"""Requests that begin to be followed in a second, of however many come."""
LATEST = 60
"""That have ended, and are told to who comes."""


class Waterfall:
    """A watcher of the desk. Times are seconds since the request came."""

    def __init__(self, zero_utc_s: float) -> None:
        """`zero_utc_s`: the time of day when the desk's time was 0."""
        self._zero_utc_s = zero_utc_s
        self._rows: dict[str, Row] = {}
        self._came_s: dict[str, float] = {}
        """Those under way; by the desk's time."""
        self._shown: set[str] = set()
        """Of those, the followed."""
        self._ended: deque[str] = deque(maxlen=LATEST)
        self._changed: dict[str, None] = {}
        self._begun = (0, 0)
        """A second, and how many began to be followed in it."""
        self._watched = False

    def __call__(self, at_s: float, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, RequestArrived):
            self._arrived(at_s, event.request)
        elif isinstance(event, _HEARD):
            found = self._came_s.get(event.request)
            if found is not None:
                self._heard(at_s - found, event)
        for action in actions:
            if type(action) is Run or type(action) is Hedge:
                self._sent(at_s, action)
            elif type(action) is Refuse:
                self._over(at_s, action.request, "refused", {"why": action.detail, "reason": action.reason})

    def row(self, request: str) -> Row | None:
        return self._rows.get(request)

    def watched(self, watched: bool) -> None:
        """Whether somebody looks from now on."""
        self._watched, self._changed = watched, {}

    def latest(self) -> dict[str, Row]:
        """The last that ended, and the followed that have not."""
        wanted = {*self._ended, *self._shown}
        return {name: row for name, row in self._rows.items() if name in wanted}

    def changed(self) -> dict[str, Row]:
        """Rows that are followed and are not what they were at the last look."""
        found = {name: self._rows[name] for name in self._changed if name in self._rows}
        self._changed = {}
        return found

    # One request.

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
                    {"replica": each.replica, "start": each.start, "stop": each.stop}
                    for each in run.route.segments
                ],
            }
        )
        self._touch(run.request)

    def _heard(self, after_s: float, event: Heard) -> None:
        match event:
            case SegmentComputed(request, attempt, place):
                self._mark(request, attempt, place, "computed_s", after_s)
            case SegmentDone(request, attempt, place):
                self._mark(request, attempt, place, "handed_s", after_s)
            case FirstToken(request, attempt):
                found = self._attempt(request, attempt)
                if found is not None:
                    found["first_s"] = _short(after_s)
                    self._rows[request].setdefault("first_s", _short(after_s))
            case AttemptFailed(request, attempt, kind, where, streamed):
                found = self._attempt(request, attempt)
                if found is not None:
                    found.update(failed=kind, where=where, ended_s=_short(after_s), streamed=streamed)
                self._shown.add(request)
            case RequestFinished(request, _, output_tokens):
                self._over(after_s, request, "done", {"output_tokens": output_tokens}, since=0.0)
            case RequestCancelled(request):
                self._over(after_s, request, "cancelled", {}, since=0.0)
        self._touch(event.request)

    def _mark(self, request: str, attempt: int, place: int, field: str, after_s: float) -> None:
        found = self._attempt(request, attempt)
        if found is not None and place < len(found["segments"]):
            found["segments"][place].setdefault(field, _short(after_s))

    def _attempt(self, request: str, attempt: int) -> Row | None:
        row = self._rows.get(request)
        if row is None:
            return None
        return next((each for each in reversed(row["attempts"]) if each["attempt"] == attempt), None)

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

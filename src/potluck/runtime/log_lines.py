"""One line of a log: `[time, event, actions]`, where events and actions are `[name, field, ...]`.

Plain ASCII; floats come back to the last bit. Prefix blocks stand in one string of hexadecimal numbers. What comes by
the thousand a second is put together by hand, three times as fast as `json` does it; the rest goes through the codec.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as text_of
from typing import Any, get_args

from potluck.core.codec import decode, encode
from potluck.core.errors import FormatError
from potluck.core.state import actions, events
from potluck.core.state.actions import Action
from potluck.core.state.events import Event
from potluck.core.values.plan import Plan, ReplicaSpec
from potluck.core.values.route import Route, Segment
from potluck.core.values.types import Region, Request

dumps: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode

EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}
ACTIONS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Action)}


def line(at_s: float, event: Event, answer: Sequence[Action]) -> str:
    """What was told when, and what was asked for."""
    text = written(answer) if answer else "[]"
    return f"[{number(at_s)},{_WRITERS.get(type(event), _other)(event)},{text}]\n"


def written(answer: Sequence[Action]) -> str:
    return f"[{','.join([_WRITERS.get(type(item), _other)(item) for item in answer])}]"


def number(value: float) -> str:
    return repr(value) if value.__class__ is float and value - value == 0.0 else dumps(value)


def names(blocks: Sequence[int]) -> str:
    return ("%x " * len(blocks) % tuple(blocks))[:-1] if blocks else ""


def blocks_of(said: str) -> tuple[int, ...]:
    return tuple([int(part, 16) for part in said.split()])


def _arrived(event: events.RequestArrived) -> str:
    return f'["RequestArrived",{_request(event.request)}]'


def request_flags(request: Request) -> str:
    """The last fields of a request, which most requests leave at their defaults."""
    if request.grammar:
        return f",{'true' if request.exact else 'false'},true"
    return ",true" if request.exact else ""


def _request(request: Request) -> str:
    deadline = "null" if request.deadline_s is None else number(request.deadline_s)
    return (
        f"{text_of(request.id)},{text_of(request.model)},{number(request.arrival_s)},{request.prompt_tokens},"
        f'{request.max_output_tokens},{request.priority},{deadline},"{names(request.blocks)}",'
        f"{text_of(request.tenant)},{text_of(request.request_class)}{request_flags(request)}"
    )


def _adopted(event: events.RequestAdopted) -> str:
    route = "null" if event.route is None else _route(event.route)
    text = f"{event.attempt},{event.streamed_tokens},{route},{event.done},{dumps(event.first)}"
    return f'["RequestAdopted",[{_request(event.request)}],{text}]'


def _first_token(event: events.FirstToken) -> str:
    return f'["FirstToken",{text_of(event.request)},{event.attempt}]'


def _segment_done(event: events.SegmentDone) -> str:
    return f'["SegmentDone",{text_of(event.request)},{event.attempt},{event.segment}]'


def _finished(event: events.RequestFinished) -> str:
    return f'["RequestFinished",{text_of(event.request)},{event.attempt},{event.output_tokens}]'


def _reported(event: events.ReplicaReported) -> str:
    s = event.status
    return (
        f'["ReplicaReported",{text_of(event.replica)},{s.queued},{s.running},{s.queued_tokens},{s.context_tokens},'
        f"{s.free_blocks},{s.total_blocks},{number(s.step_s)}]"
    )


def _cached(event: events.CacheReported) -> str:
    return (
        f'["CacheReported",{text_of(event.replica)},{event.sequence},"{names(event.added)}","{names(event.removed)}",'
        f'"{names(event.marked)}","{names(event.unmarked)}",{event.epoch},{dumps(event.whole)}]'
    )


def _run(action: actions.Run) -> str:
    return (
        f'["Run",{text_of(action.request)},{_route(action.route)},{action.attempt},{action.prompt_tokens},'
        f"{action.streamed_tokens},{number(action.weight)}{',true' if action.yields else ''}]"
    )


def _route(route: Route) -> str:
    texts = [
        f"[{text_of(s.replica)},{s.start},{'null' if s.stop is None else s.stop}]" for s in route.segments
    ]
    return f"[{','.join(texts)}]"


def _nested(value: events.PlanReceived | actions.StartReplica | actions.Reassign) -> str:
    return dumps([type(value).__name__, encode(value[0])])


def _quoted(event: events.MarketReported) -> str:
    return dumps(["MarketReported", [encode(region) for region in event.regions]])


def _other(value: Any) -> str:
    return dumps([type(value).__name__, *value])


_WRITERS: dict[type[Any], Callable[[Any], str]] = {
    events.RequestArrived: _arrived,
    events.RequestAdopted: _adopted,
    events.FirstToken: _first_token,
    events.SegmentDone: _segment_done,
    events.RequestFinished: _finished,
    events.ReplicaReported: _reported,
    events.CacheReported: _cached,
    events.PlanReceived: _nested,
    events.MarketReported: _quoted,
    actions.Run: _run,
    actions.StartReplica: _nested,
    actions.Reassign: _nested,
}


def kind_of(text: str) -> str:
    """The name of a line's event, read without the rest of it; empty where there is none."""
    start = text.find('["', 0, 64) + 2
    return text[start : text.find('"', start)] if start > 1 else ""


def read_line(text: str, place: str) -> tuple[float, Event, list[Action]]:
    """What `line` wrote. `place` is where it stands, for errors."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(place, f"is not JSON ({error})") from error
    if not isinstance(data, list) or len(data) != 3 or not isinstance(data[2], list):
        raise FormatError(place, "must be [time, event, actions]")
    if not isinstance(data[0], float | int):
        raise FormatError(place, "must begin with a time")
    answer = [_unpack(ACTIONS, datum, place) for datum in data[2]]
    return float(data[0]), _unpack(EVENTS, data[1], place), answer


def _unpack(kinds: dict[str, type[Any]], data: Any, place: str) -> Any:
    if not isinstance(data, list) or not data or not isinstance(data[0], str) or data[0] not in kinds:
        raise FormatError(place, f"has no known event or action: {str(data)[:60]}")
    name, *fields = data
    reader = _READERS.get(name)
    try:
        if reader is not None:
            return reader(fields, place)
        return kinds[name](*(tuple(field) if isinstance(field, list) else field for field in fields))
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise FormatError(place, f"{name}: {error}") from error


def _read_arrived(fields: list[Any], place: str) -> events.RequestArrived:
    return events.RequestArrived(_read_request(fields))


def _read_request(fields: list[Any]) -> Request:
    fields[7] = blocks_of(fields[7])
    return Request(*fields)


def _read_adopted(fields: list[Any], place: str) -> events.RequestAdopted:
    request, attempt, streamed_tokens, route, done, first = fields
    along = None if route is None else _read_route(route)
    return events.RequestAdopted(_read_request(request), attempt, streamed_tokens, along, done, first)


def _read_route(said: list[Any]) -> Route:
    return Route(tuple(Segment(*item) for item in said))


def _read_cached(fields: list[Any], place: str) -> events.CacheReported:
    replica, sequence, *blocks, epoch, whole = fields
    added, removed, marked, unmarked = map(blocks_of, blocks)
    return events.CacheReported(replica, sequence, added, removed, marked, unmarked, epoch, whole)


def _read_run(fields: list[Any], place: str) -> actions.Run:
    request, route, *rest = fields
    return actions.Run(request, _read_route(route), *rest)


def _read_replan(rates: list[Any], reason: str, lengths: Sequence[Any] = ()) -> actions.Replan:
    seen = [
        actions.SeenLengths(model, out, tuple([(a, b) for a, b in prompts]))
        for model, out, prompts in lengths
    ]
    return actions.Replan(tuple([(model, rate) for model, rate in rates]), reason, tuple(seen))


_READERS: dict[str, Callable[[list[Any], str], Any]] = {
    "RequestArrived": _read_arrived,
    "RequestAdopted": _read_adopted,
    "CacheReported": _read_cached,
    "Run": _read_run,
    "ReplicaReported": lambda fields, _: events.ReplicaReported(fields[0], events.ReplicaStatus(*fields[1:])),
    "PlanReceived": lambda fields, place: events.PlanReceived(decode(Plan, fields[0], place)),
    "MarketReported": lambda fields, place: events.MarketReported(
        tuple(decode(Region, field, place) for field in fields[0])
    ),
    "Reassign": lambda fields, place: actions.Reassign(decode(ReplicaSpec, fields[0], place)),
    "StartReplica": lambda fields, place: actions.StartReplica(decode(ReplicaSpec, fields[0], place)),
    "Replan": lambda fields, _: _read_replan(*fields),
}

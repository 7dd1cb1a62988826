"""A log read back, and fed to a fresh Brain: the same policy in both worlds must ask for the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from potluck.core.brain import actions, events
from potluck.core.brain.actions import Action
from potluck.core.brain.events import Event
from potluck.core.brain.facts import Facts, ModelFacts, ReplicaFacts, SplitFacts
from potluck.core.brain.policy import Policy
from potluck.core.codec import decode
from potluck.core.errors import FormatError
from potluck.core.values.member import Member
from potluck.core.values.plan import Plan
from potluck.core.values.route import Route, Segment
from potluck.core.values.types import Region, Request
from potluck.worlds.log import FORMAT, VERSION, dumps, pack
from potluck.worlds.mind import Mind

_EVENTS: dict[str, type[Any]] = {
    each.__name__: each
    for each in (
        events.Arrived,
        events.SegmentDone,
        events.FirstToken,
        events.Finished,
        events.Failed,
        events.Underway,
        events.Cancelled,
        events.Reported,
        events.LinkReported,
        events.Cached,
        events.ReplicaReady,
        events.ReplicaLost,
        events.Drained,
        events.Planned,
        events.Tick,
    )
}
_ACTIONS: dict[str, type[Any]] = {
    each.__name__: each
    for each in (
        actions.Run,
        actions.Refuse,
        actions.Abandon,
        actions.Inquire,
        actions.Start,
        actions.Drain,
        actions.Stop,
        actions.Flip,
        actions.Replan,
        actions.Recount,
        actions.Move,
    )
}


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a replay went."""

    lines: int
    actions: int
    difference: str
    """The first line at which the Brain asked for something else; empty when none."""


def replay(lines: Iterable[str], brain: Callable[[Facts, Policy], Mind]) -> Replayed:
    """Feed a log to a fresh Brain and compare."""
    source = iter(lines)
    facts, policy = _read_header(next(source, ""), 1)
    mind = brain(facts, policy)
    count = asked = 0
    for number, text in enumerate(source, 2):
        if text.startswith("{"):
            _grow(facts, _read_header(text, number)[0])
            continue
        at_s, event, expected = _read_line(text, number)
        answer = [pack(action) for action in mind.on(at_s, event)]
        count += 1
        asked += len(answer)
        # Through JSON once, so that tuples and lists compare alike.
        if json.loads(dumps(answer)) != expected:
            where = f"line {number}: {type(event).__name__} at {at_s:g} s"
            return Replayed(count, asked, f"{where}: {_short(answer)} instead of {_short(expected)}")
    return Replayed(count, asked, "")


def read(lines: Iterable[str]) -> Iterator[tuple[float, Event, list[Action]]]:
    """The events and actions of a log."""
    source = iter(lines)
    _read_header(next(source, ""), 1)
    for number, text in enumerate(source, 2):
        if text.startswith("{"):
            continue
        at_s, event, answer = _read_line(text, number)
        yield at_s, event, [_unpack(_ACTIONS, each, number) for each in answer]


def _unpack(kinds: dict[str, type[Any]], data: Any, number: int) -> Any:
    where = f"log: line {number}"
    if not isinstance(data, list) or not data or data[0] not in kinds:
        raise FormatError(where, f"has no known event or action: {str(data)[:60]}")
    name, *fields = data
    try:
        if name == "Arrived":
            *rest, blocks, tenant, request_class = fields[0]
            return events.Arrived(Request(*rest, tuple(blocks), tenant, request_class))  # type: ignore[call-arg]
        if name == "Run":
            request, route, *rest = fields
            return actions.Run(request, Route(tuple(Segment(*each) for each in route)), *rest)
        if name == "Planned":
            return events.Planned(decode(Plan, fields[0], where))
        if name == "Start":
            return actions.Start(decode(Member, fields[0], where))
        if name == "Reported":
            return events.Reported(fields[0], events.Status(*fields[1]))
        if name == "Replan":
            return actions.Replan(tuple((model, rate) for model, rate in fields[0]), fields[1])
        return kinds[name](*(tuple(each) if isinstance(each, list) else each for each in fields))
    except (TypeError, ValueError) as error:
        raise FormatError(where, f"{name}: {error}") from error


def _grow(facts: Facts, more: Facts) -> None:
    """What is known now is known from here on; the Brain holds the same mappings."""
    for old, new in (
        (facts.models, more.models),
        (facts.replicas, more.replicas),
        (facts.splits, more.splits),
        (facts.places, more.places),
    ):
        assert isinstance(old, dict)
        old.update(new)


def _read_header(text: str, number: int) -> tuple[Facts, Policy]:
    data = _loads(text, number)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f"log: line {number}", f"is not the beginning of a {FORMAT}")
    if data.get("version") != VERSION:
        raise FormatError("log: version", f"is {data.get('version')}, this release reads {VERSION}")
    try:
        facts = Facts(
            {name: decode(ModelFacts, each, f"models.{name}") for name, each in data["models"].items()},
            {(name, place): decode(ReplicaFacts, each, "replicas") for name, place, each in data["replicas"]},
            {name: decode(SplitFacts, each, f"splits.{name}") for name, each in data["splits"].items()},
            {(source, target): gbps for source, target, gbps in data["links"]},
            tuple(decode(Region, each, "regions") for each in data["regions"]),
            {name: tuple(each) for name, each in data["history"].items()},
            {(name, index): tuple(each) for name, index, each in data["places"]},
        )
        return facts, decode(Policy, data["policy"], "policy")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"log: line {number}", f"lacks or garbles {error}") from error


def _read_line(text: str, number: int) -> tuple[float, Event, list[Any]]:
    data = _loads(text, number)
    if not isinstance(data, list) or len(data) != 3:
        raise FormatError(f"log: line {number}", "must be [time, event, actions]")
    return float(data[0]), _unpack(_EVENTS, data[1], number), data[2]


def _loads(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FormatError(f"log: line {number}", f"is not JSON ({error})") from error


def _short(value: Any) -> str:
    text = dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

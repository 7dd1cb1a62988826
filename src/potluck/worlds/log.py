"""A log of every event told and every action asked for, which replays (`replay.py`).

JSON lines. The first has the facts and the policy (again where a later plan brings templates that were not known
before); each other one is `[time, event, actions]`, where events and actions are `[name, field, ...]` in the order
of their fields. A live log has the same lines as a simulated one.
"""

from __future__ import annotations

import json
from typing import IO, Any

from potluck.core.brain.actions import Action
from potluck.core.brain.events import Event
from potluck.core.brain.facts import Facts
from potluck.core.brain.policy import Policy
from potluck.core.codec import encode
from potluck.worlds.mind import Mind

FORMAT, VERSION = "potluck.log", 2


class Logged:
    """A Brain whose talk is written down."""

    def __init__(self, mind: Mind, out: IO[str], facts: Facts, policy: Policy) -> None:
        self._mind = mind
        self._out = out
        self._facts = facts
        self._policy = policy
        self._known = -1

    def on(self, at_s: float, event: Event) -> list[Action]:
        if len(self._facts.replicas) != self._known:
            self._known = len(self._facts.replicas)
            self._out.write(header(self._facts, self._policy))
        answer = self._mind.on(at_s, event)
        self._out.write(line(at_s, event, answer))
        return answer


def header(facts: Facts, policy: Policy) -> str:
    """The first line of a log."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "policy": encode(policy),
        "models": {name: encode(each) for name, each in facts.models.items()},
        "replicas": [[*key, encode(each)] for key, each in facts.replicas.items()],
        "splits": {name: encode(each) for name, each in facts.splits.items()},
        "links": [[*ends, gbps] for ends, gbps in facts.links_gbps.items()],
        "regions": [encode(region) for region in facts.regions],
        "history": facts.history,
        "places": [[*key, each] for key, each in facts.places.items()],
    }
    return dumps(body) + "\n"


def line(at_s: float, event: Event, answer: list[Action]) -> str:
    """One further line."""
    return dumps([at_s, pack(event), [pack(action) for action in answer]]) + "\n"


def pack(value: Any) -> list[Any]:
    """A named tuple as its name and fields; nested values through the codec."""
    kind = type(value).__name__
    if kind == "Arrived":
        r = value.request
        fields = [
            r.id,
            r.model,
            r.arrival_s,
            r.prompt_tokens,
            r.max_output_tokens,
            r.priority,
            r.deadline_s,
            r.blocks,
            r.tenant,
            r.request_class,
        ]
        return [kind, fields]
    if kind == "Run":
        route = [[s.replica, s.start, s.stop] for s in value.route.segments]
        return [
            kind,
            value.request,
            route,
            value.attempt,
            value.prompt_tokens,
            value.streamed_tokens,
            value.weight,
        ]
    if kind in ("Planned", "Start"):
        return [kind, encode(value[0])]
    return [kind, *value]


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

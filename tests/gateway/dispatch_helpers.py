"""Fake engines, a clock, a client and a Brain for tests of the dispatcher.

Each token is drawn from a hash of all tokens before it, so that any answer can be checked whatever became of it on
the way. Tests say when an engine writes its next line, and what goes wrong.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, Literal

from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Action, Refuse, Run, StartReplica
from potluck.core.state.events import Event, PlanReceived, ReplicaReady, RequestArrived, SegmentComputed, Tick
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.policy import Policy
from potluck.core.values.layout import single
from potluck.core.values.plan import (
    BucketCapacity,
    Deployment,
    LengthBucket,
    NodeCount,
    Plan,
    PlannedReplica,
    PlannedShare,
    Template,
)
from potluck.core.values.route import Route
from potluck.core.values.sampling import SampledToken
from potluck.core.values.types import Role
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.dispatch.engine_replies import LONGEST_LINE
from potluck.gateway.http.connection_pool import ResponseListener
from potluck.gateway.values import Address, ChoiceRequest, Endpoint, TokenCounts

VOCAB, EOS = 40, 0
MODEL = "m"


def next_token(history: Sequence[int], barred: bool = False) -> int:
    """What comes behind these tokens."""
    digest = blake2b(json.dumps(list(history)).encode(), digest_size=4).digest()
    token = int.from_bytes(digest, "little") % VOCAB
    return 1 if barred and token == EOS else token


def right_answer(asked: ChoiceRequest) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < asked.max_output_tokens:
        tokens.append(next_token([*asked.prompt, *tokens], len(tokens) < asked.min_tokens))
        if tokens[-1] in asked.ends:
            break
    return tokens


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def now_s(self) -> float:
        return self.now

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._number), call))

    def pass_s(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            due_s, _, call = heapq.heappop(self._due)
            self.now = max(self.now, due_s)
            call()
        self.now = until


@dataclass
class RecordedAnswer:
    asked: ChoiceRequest
    received: list[int] = field(default_factory=list)
    choices: list[SampledToken] = field(default_factory=list)
    end: str | None = None
    refusal: Refuse | None = None
    stop_after: int | None = None  # Where a stop string is found.
    cached: int = 0
    on_tokens: Callable[[], None] | None = None
    relayed: bytes = b""
    status: int = 0
    relay_ended: bool = False
    counts: TokenCounts | None = None

    def tokens(self, choices: Sequence[SampledToken]) -> bool:
        assert not self.over, "more after the end"
        self.choices += choices
        self.received += [sampled_token.token for sampled_token in choices]
        if self.on_tokens is not None:
            self.on_tokens()
        if self.stop_after is not None and len(self.received) >= self.stop_after:
            self.end = "stop string"
            return True
        return False

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None:
        assert not self.over, "ended twice"
        self.end, self.cached = reason, cached_tokens

    def relay_begin(self, status: int, content_type: bytes) -> None:
        assert not self.status, "begun twice"
        self.status = status

    def relay(self, data: bytes) -> None:
        assert self.status
        assert not self.over
        self.relayed += data

    def relay_end(self, counts: TokenCounts | None = None) -> None:
        assert self.status
        assert not self.over
        self.relay_ended, self.counts = True, counts

    def relay_whole(self, status: int, kind: bytes, body: bytes, counts: TokenCounts | None = None) -> None:
        self.relay_begin(status, kind)
        self.relay(body)
        self.relay_end(counts)

    def refused(self, refusal: Refuse) -> None:
        assert not self.over, "ended twice"
        self.refusal = refusal

    @property
    def over(self) -> bool:
        return self.end is not None or self.refusal is not None or self.relay_ended

    def assert_right(self) -> None:
        """All of the right answer, once."""
        assert self.refusal is None, self.refusal
        expected = right_answer(self.asked)
        assert self.received == expected
        assert self.end == ("stop" if expected[-1] in self.asked.ends else "length")


class FakeCall:
    def __init__(
        self, fleet: FakeEngines, replica: str, path: bytes, raw: bytes, listener: ResponseListener
    ) -> None:
        self.fleet, self.replica, self.path, self.listener = fleet, replica, path, listener
        self.raw = raw
        self.body: dict[str, Any] = json.loads(raw)
        self.cancelled = self.over = self.paused = False
        self.sent = True
        self.place = 0
        self.output: list[int] = []

    def cancel(self) -> None:
        self.cancelled = True
        self.fleet.calls.pop(self, None)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    # What the engine does.

    @property
    def live(self) -> bool:
        return self in self.fleet.calls and self.replica not in self.fleet.stopped

    def write(self, *lines: object) -> None:
        if self.live:
            if self.place == 0:
                self.listener.head(200, {b"content-type": b"application/x-ndjson"})
            self.place += 1
            self.write_raw(
                b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
            )

    def write_raw(self, data: bytes) -> None:
        if self.live:
            self.listener.data(data)

    def end(self) -> None:
        if self.live:
            del self.fleet.calls[self]
            self.over = True
            self.listener.done()

    def lose(self, why: str = "connection reset") -> None:
        if self in self.fleet.calls:
            del self.fleet.calls[self]
            self.over = True
            self.listener.lost(why)

    def refuse(self, status: int, code: str | None = None) -> None:
        if self.live:
            self.listener.head(status, {})
            self.write_raw(json.dumps({"error": {"message": "no", "code": code}}).encode())
            self.end()

    @property
    def hands_on(self) -> bool:
        return "stop" in self.body

    def line(self) -> list[object]:
        """What it would write next; nothing while it waits for another engine."""
        tokens = self.body["tokens"]
        counts = {"prompt_tokens": len(tokens), "cached_tokens": 0, "output_tokens": len(self.output)}
        if self.hands_on:
            handle = self.body["handle"]
            if self.place == 0:
                return [{"handle": handle, "tokens": self.body["stop"]}]
            if "source" in self.body and self.body["source"]["handle"] not in self.fleet.delivered:
                return []
            if self.place == 1:
                return [{"computed": self.body["stop"] - self.body.get("start", 0), "handle": handle}]
            if any(call.body.get("source", {}).get("handle") == handle for call in self.fleet.calls):
                self.fleet.delivered.add(handle)
                return [{"ended": "handed_on", **counts}]
            return []
        if "source" in self.body and self.body["source"]["handle"] not in self.fleet.delivered:
            return []
        if self.output and (
            len(self.output) >= self.body["max_tokens"] or self.output[-1] in self.body.get("end_tokens", ())
        ):
            stops = self.output[-1] in self.body.get("end_tokens", ())
            return [{"ended": "stop" if stops else "length", **counts}]
        barred = len(self.output) < self.body["min_tokens"]
        self.output.append(next_token([*tokens, *self.output], barred))
        return [{"token": self.output[-1]}]

    def step(self, lines: int = 1) -> bool:
        """Write the next lines at once; whether there were any."""
        if not self.live or self.paused:
            return False
        result: list[object] = []
        while len(result) < lines and (more := self.line()):
            result += more
            if "ended" in more[0]:  # type: ignore[operator]
                break
            if self.hands_on:
                break
        if not result:
            return False
        self.write(*result)
        if "ended" in result[-1]:  # type: ignore[operator]
            self.end()
        return True


@dataclass
class FakeEngines:
    """Outgoing and Directory in one."""

    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    calls: dict[FakeCall, None] = field(default_factory=dict)
    sent: list[FakeCall] = field(default_factory=list)
    delivered: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    codecs: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, replica: str, region: str = "near", **more: Any) -> None:
        port = len(self.endpoints) + 1
        kv = f"h:{port}"
        self.endpoints[replica] = Endpoint(replica, MODEL, region, Address("h", port), kv=kv, **more)

    def find(self, replica: str) -> Endpoint | None:
        return self.endpoints.get(replica)

    def segments(self, model: str) -> bool:
        return True

    def codec(self, source_endpoint: Endpoint, target_endpoint: Endpoint) -> str:
        return self.codecs.get((source_endpoint.region, target_endpoint.region), "raw")

    def connections(self, source_endpoint: Endpoint, target_endpoint: Endpoint) -> int:
        return 2 if source_endpoint.region == target_endpoint.region else 6

    def send(
        self,
        address: Address,
        method: bytes,
        path: bytes,
        body: bytes,
        listener: ResponseListener,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> FakeCall:
        replica = next(item.replica for item in self.endpoints.values() if item.address == address)
        call = FakeCall(self, replica, path, body, listener)
        self.sent.append(call)
        self.calls[call] = None
        if replica in self.dead:
            call.lose("connection refused")
        return call

    def kill(self, replica: str) -> None:
        for call in [call for call in self.calls if call.replica == replica]:
            call.lose()

    def step_all(self, lines: int = 1) -> bool:
        stepped = [call.step(lines) for call in list(self.calls)]
        return any(stepped)


def plan_of(names: Sequence[Sequence[Role]], region: str = "near") -> Plan:
    """A unit for each list of roles: one mixed replica, or a combo of prefill and decode."""
    templates = []
    for place, roles in enumerate(names):
        kind = "homogeneous" if len(roles) == 1 else "combo"
        capacity = (BucketCapacity(0, 0.0, 0.0, 1.0, 0.1, 0.02),)
        replicas = tuple(PlannedReplica(role, single("node", 1, 8)) for role in roles)
        templates.append(
            Template(f"t{place}", kind, MODEL, (NodeCount("node", 1),), replicas, capacity, "measured")  # type: ignore[arg-type]
        )
    return Plan(
        "test",
        tuple(templates),
        tuple(Deployment(template.name, region, 1) for template in templates),
        (LengthBucket(MODEL, 0, 100_000, 1.0),),
        tuple(PlannedShare(template.name, region, 0, "closed", 1.0) for template in templates),
        (),
        (),
        1.0,
        0.0,
    )


class FakeBrainLine:
    """A Brain with its clock; replicas that it starts are ready at once."""

    def __init__(self, clock: Clock, fleet: FakeEngines, plan: Plan, policy: Policy) -> None:
        self.clock, self.fleet = clock, fleet
        self.brain = Brain(
            FleetFacts(
                {MODEL: ModelFacts(1e5)},
                {
                    (template.name, place): ReplicaFacts(1e-4, 1e-3, 0.02, 8, 20_000, 200_000)
                    for template in plan.templates
                    for place in range(len(template.replicas))
                },
                {},
                {},
            ),
            policy,
        )
        self.told: list[Event] = []
        self.dispatcher: Dispatcher | None = None
        self.tell(PlanReceived(plan))

    def tell(self, event: Event) -> None:
        self.told.append(event)
        actions: list[Action] = self.brain.on(self.clock.now, event)
        for action in actions:
            if isinstance(action, StartReplica):
                self.fleet.add(action.member.id, action.member.region)
                self.tell(ReplicaReady(action.member.id))
        if self.dispatcher is not None:
            self.dispatcher.act(actions)

    def now_s(self) -> float:
        return self.clock.now

    def tick(self, seconds: float = 1.0) -> None:
        self.clock.pass_s(seconds)
        self.tell(Tick())


class RecordingLine:
    """A Line that only writes down what it is told."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.told: list[Event] = []

    def tell(self, event: Event) -> None:
        self.told.append(event)

    def now_s(self) -> float:
        return self.clock.now


def choice_request(name: str = "r", prompt: int = 20, most: int = 12, **more: Any) -> ChoiceRequest:
    tokens = tuple((7 * place + len(name) + sum(name.encode())) % (VOCAB - 1) + 1 for place in range(prompt))
    return ChoiceRequest(name, MODEL, tokens, prompt, most, **({"ends": (EOS,), "vocab": VOCAB} | more))


def dispatcher_of(line: FakeBrainLine | RecordingLine, fleet: FakeEngines, clock: Clock) -> Dispatcher:
    dispatcher = Dispatcher(line, fleet, fleet, clock.now_s, clock.later, Counters())
    if isinstance(line, FakeBrainLine):
        line.dispatcher = dispatcher
    return dispatcher


class DispatchHarness:
    """A driver, its engines and one who writes down what it tells."""

    def __init__(self, *replicas: str, far: tuple[str, ...] = ()) -> None:
        self.clock, self.fleet = Clock(), FakeEngines()
        for replica in replicas:
            self.fleet.add(replica, "far" if replica in far else "near")
        self.line = RecordingLine(self.clock)
        self.dispatcher = dispatcher_of(self.line, self.fleet, self.clock)

    def begin(self, what: ChoiceRequest, route: Route, weight: float = 1.0) -> RecordedAnswer:
        heard = RecordedAnswer(what)
        self.dispatcher.begin(what, heard)
        self.dispatcher.act([Run(what.id, route, 0, what.prompt_tokens, 0, weight)])
        return heard

    def again(self, what: ChoiceRequest, route: Route, attempt: int, streamed: int) -> None:
        self.dispatcher.act([Run(what.id, route, attempt, what.prompt_tokens + streamed, streamed)])

    def run_to_end(self) -> None:
        while self.fleet.step_all():
            pass

    def call(self, replica: str) -> FakeCall:
        return next(call for call in reversed(self.fleet.sent) if call.replica == replica)

    @property
    def news(self) -> list[object]:
        """What was told behind the arrival."""
        assert isinstance(self.line.told[0], RequestArrived)
        return self.line.told[1:]

    @property
    def turns(self) -> list[object]:
        """The same without what was computed and is still on its way."""
        return [item for item in self.news if not isinstance(item, SegmentComputed)]

    def assert_idle(self) -> None:
        assert self.dispatcher.sizes() == {"open": 0, "watched": 0, "news": 0}
        assert not self.fleet.calls


LIES = {
    "no JSON": b"<html>\n",
    "no object": b"[1]\n",
    "too deep": b"[" * 60_000 + b"\n",
    "nothing": b"{}\n",
    "outside of the vocabulary": b'{"token":%d}\n' % VOCAB,
    "far outside": b'{"token":' + b"9" * 30 + b"}\n",
    "negative": b'{"token":-1}\n',
    "no number": b'{"token":"5"}\n',
    "true": b'{"token":true}\n',
    "wrong log probabilities": b'{"token":5,"logprob":"x","top":[]}\n',
    "a foreign alternative": b'{"token":5,"logprob":-1,"top":[[400,-1]]}\n',
    "an end too early": b'{"ended":"length","prompt_tokens":20,"cached_tokens":0,"output_tokens":1}\n',
    "an end before it began": b'{"ended":"stop","prompt_tokens":20,"cached_tokens":0,"output_tokens":0}\n',
    "another count": b'{"ended":"stop","prompt_tokens":20,"cached_tokens":0,"output_tokens":7}\n',
    "another prompt": b'{"ended":"stop","prompt_tokens":21,"cached_tokens":0,"output_tokens":1}\n',
    "no counts": b'{"ended":"stop"}\n',
    "no reason": b'{"ended":5,"prompt_tokens":20,"cached_tokens":0,"output_tokens":1}\n',
    "more behind its end": b'{"ended":"stop","prompt_tokens":20,"cached_tokens":0,"output_tokens":1}\n{"token":5}\n',
    "an end that nobody asked for": b'{"ended":"cancelled","prompt_tokens":20,"cached_tokens":0,"output_tokens":1}\n',
    "a line without an end": b"x" * (LONGEST_LINE + 1),
}

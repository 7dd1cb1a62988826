"""One driver with its engines, one who writes down what it tells, and all lies that engines tell."""

from __future__ import annotations

from drive_kit import VOCAB, Call, Clock, Fleet, Heard, Script, driver

from potluck.core.state.actions import Run
from potluck.core.state.events import RequestArrived, SegmentComputed
from potluck.core.values.route import Route
from potluck.gateway.dispatch.engine_replies import LONGEST_LINE
from potluck.gateway.values import ChoiceRequest


class Stage:
    """A driver, its engines and one who writes down what it tells."""

    def __init__(self, *replicas: str, far: tuple[str, ...] = ()) -> None:
        self.clock, self.fleet = Clock(), Fleet()
        for each in replicas:
            self.fleet.add(each, "far" if each in far else "near")
        self.line = Script(self.clock)
        self.dispatcher = driver(self.line, self.fleet, self.clock)

    def begin(self, what: ChoiceRequest, route: Route, weight: float = 1.0) -> Heard:
        heard = Heard(what)
        self.dispatcher.begin(what, heard)
        self.dispatcher.act([Run(what.id, route, 0, what.prompt_tokens, 0, weight)])
        return heard

    def again(self, what: ChoiceRequest, route: Route, attempt: int, streamed: int) -> None:
        self.dispatcher.act([Run(what.id, route, attempt, what.prompt_tokens + streamed, streamed)])

    def to_end(self) -> None:
        while self.fleet.step_all():
            pass

    def call(self, replica: str) -> Call:
        return next(call for call in reversed(self.fleet.sent) if call.replica == replica)

    @property
    def news(self) -> list[object]:
        """What was told behind the arrival."""
        assert isinstance(self.line.told[0], RequestArrived)
        return self.line.told[1:]

    @property
    def turns(self) -> list[object]:
        """The same without what was computed and is still on its way."""
        return [each for each in self.news if not isinstance(each, SegmentComputed)]

    def at_rest(self) -> None:
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

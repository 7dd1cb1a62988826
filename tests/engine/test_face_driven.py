"""The gateway's driver over engines that compute: the same tokens for every kind of route, also when engines fail.

Routes are drawn by chance here, so that every cut comes up; what a Brain would choose is a case of these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal
from urllib.parse import urlsplit

import pytest
from engine_models import VOCAB
from face_kit import NAME, Client, face, make_service

from potluck.core.state.actions import Refuse, Run
from potluck.core.state.events import AttemptFailed, Event, RequestArrived, RequestFinished
from potluck.core.values.route import Route, Segment, aggregated, handed_over
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.core.values.types import Request
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch import active_request as silence
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.values import Address, ChoiceRequest, Endpoint

STREAMS, TOKENS = 64, 6
NAMES = ("a", "b", "c")


@dataclass
class Heard:
    """One answer."""

    choices: list[SampledToken] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    def tokens(self, choices: Sequence[SampledToken]) -> bool:
        assert not self.reason
        self.choices += choices
        return False

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None:
        assert not self.reason
        self.reason = reason
        self.over.set()

    def refused(self, refusal: Refuse) -> None:
        raise AssertionError(refusal)

    def relay_begin(self, status: int, content_type: bytes) -> None:
        raise AssertionError("nobody writes in the engines' place")

    def relay(self, data: bytes) -> None:
        raise AssertionError

    def relay_end(self) -> None:
        raise AssertionError


class Chooser:
    """A Line that draws a route of a given kind for every attempt, and a Directory of the engines."""

    def __init__(self, engines: Sequence[Client], kinds: Sequence[str], seed: int) -> None:
        self.dispatcher: Dispatcher | None = None
        self.failed: list[AttemptFailed] = []
        self.finished = 0
        self._chance = Random(seed)
        self._kinds = kinds
        self._open: dict[str, Request] = {}
        self._endpoints = {}
        for name, engine in zip(NAMES, engines, strict=True):
            where = urlsplit(engine.url)
            assert where.hostname is not None
            assert where.port is not None
            address = Address(where.hostname, where.port)
            self._endpoints[name] = Endpoint(name, NAME, "here", address, kv=engine.kv)

    def find(self, replica: str) -> Endpoint | None:
        return self._endpoints[replica]

    def codec(self, source: Endpoint, target: Endpoint) -> str:
        return "raw"

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def tell(self, event: Event) -> None:
        assert self.dispatcher is not None
        if isinstance(event, RequestArrived):
            self._open[event.request.id] = event.request
            self._run(event.request, 0, 0)
        elif isinstance(event, AttemptFailed):
            self.failed.append(event)
            self._run(self._open[event.request], event.attempt + 1, event.streamed_tokens)
        elif isinstance(event, RequestFinished):
            self.finished += 1

    def _run(self, request: Request, attempt: int, streamed: int) -> None:
        assert self.dispatcher is not None
        length = request.prompt_tokens + streamed
        route = self._route(self._chance.choice(self._kinds), length)
        self.dispatcher.act([Run(request.id, route, attempt, length, streamed)])

    def _route(self, kind: str, length: int) -> Route:
        one, two, three = self._chance.sample(NAMES, 3)
        if kind == "in place":
            return aggregated(one)
        if kind == "prefill apart":
            return handed_over(one, two, length)
        if kind == "split":
            return handed_over(one, two, self._chance.randrange(1, length))
        first, second = sorted(self._chance.sample(range(1, length), 2))
        return Route((Segment(one, 0, first), Segment(two, first, second), Segment(three, second, None)))


def questions(seed: int) -> list[ChoiceRequest]:
    """Half greedy, half drawn with a seed; some that may not end early, some with log probabilities."""
    chance = Random(seed)
    made = []
    for place in range(STREAMS):
        prompt = tuple(chance.randrange(VOCAB) for _ in range(chance.randrange(3, 40)))
        way = Sampling(0.8, seed=place) if place % 2 else Sampling()
        if place % 8 == 0:
            way = Sampling(logprobs=2)
        made.append(
            ChoiceRequest(
                f"q{place}", NAME, prompt, len(prompt), TOKENS, way, min_tokens=place % 3, vocab=VOCAB
            )
        )
    return made


async def answers(
    engines: Sequence[Client], kinds: Sequence[str], asked: Sequence[ChoiceRequest], troubles: int = 0
) -> tuple[list[Heard], Chooser]:
    """All at once; now and then all engines are said to be gone while they stream."""
    loop = asyncio.get_running_loop()
    calls = ConnectionPool()
    chooser = Chooser(engines, kinds, 5)
    dispatcher = chooser.dispatcher = Dispatcher(
        chooser, chooser, calls, loop.time, loop.call_later, Counters()
    )
    heard = [Heard() for _ in asked]
    for what, answer in zip(asked, heard, strict=True):
        dispatcher.begin(what, answer)
    async with asyncio.timeout(60):
        for _ in range(troubles):
            # Somebody has some of an answer and not all of it: all engines are gone for a moment.
            while not any(each.choices and not each.over.is_set() for each in heard):
                assert not all(each.over.is_set() for each in heard), "all were answered before"
                await asyncio.sleep(0)
            for name in NAMES:
                dispatcher.gone(name)
            enough = sum(len(each.choices) for each in heard) + 40
            while sum(len(each.choices) for each in heard) < enough and not all(
                each.over.is_set() for each in heard
            ):
                await asyncio.sleep(0)
        await asyncio.gather(*(each.over.wait() for each in heard))
    assert dispatcher.sizes() == {"open": 0, "watched": 0, "news": 0}
    await calls.close()
    return heard, chooser


def test_every_route_and_every_recovery_gives_the_tokens_of_one_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Engines are said to be gone while they stream, which is otherwise not believed.
    monkeypatch.setattr(silence, "HEARD_S", -1.0)
    monkeypatch.setattr(silence, "GAPS", -1.0)

    async def run() -> None:
        services = [make_service("full", max_running=2 * STREAMS) for _ in NAMES]
        async with face(services[0]) as a, face(services[1]) as b, face(services[2]) as c:
            engines, asked = (a, b, c), questions(3)
            alone, _ = await answers(engines, ["in place"], asked)
            heard, told = await answers(engines, ["prefill apart", "split", "three"], asked)
            assert [each.choices for each in heard] == [each.choices for each in alone]
            assert told.finished == STREAMS
            assert not told.failed
            heard, told = await answers(engines, ["in place", "prefill apart", "split", "three"], asked, 4)
            assert [each.choices for each in heard] == [each.choices for each in alone]
            assert [each.reason for each in heard] == [each.reason for each in alone]
            assert told.finished == STREAMS
            assert any(each.streamed_tokens for each in told.failed), "nobody had anything yet"

    asyncio.run(run())

"""A pipeline behind HTTP: it answers as one process does, and goes on as long as each stage has a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from engine_models import KINDS, VOCAB, prompt
from loop_helpers import LoopHarness
from pipeline_workers import HYBRID, PLAIN, SECRET, SEED, placed, standing
from server_helpers import NAME, TRIAL, Client, face, letters, make_service, spell, tokens_in

from potluck.core.state.actions import Refuse, Run
from potluck.core.state.events import AttemptFailed, Event, RequestArrived, RequestFinished
from potluck.core.values.route import Route, Segment, aggregated, handed_over
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.core.values.types import Request
from potluck.engine.compute.executor import Executor, RunnerSize
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.pipeline.launch import launch
from potluck.engine.pipeline.pipeline_executor import PipelineExecutor
from potluck.engine.serve import EngineSettings, service_of
from potluck.engine.server.engine_service import EngineService
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch import active_request as silence
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.values import Address, ChoiceRequest, Endpoint
from potluck.kv.handles import new_handle

SIZE = RunnerSize(26, 600, 512, 256)
LENGTHS = (1, 5, 40, 77, 130)
OUTPUT = 7
ASKS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def workers() -> list[tuple[str, int]]:
    return standing(6)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    result = {}
    for name, config in (("hybrid", HYBRID), ("plain", PLAIN)):
        engine = LoopHarness(config)
        result[name] = [engine.answer(tokens, OUTPUT) for tokens in ASKS]
    return result


def joined(
    config: EngineModelConfig, stages: str, workers: list[tuple[str, int]], returns: bool = True
) -> PipelineExecutor:
    return launch(
        config,
        placed(stages, workers),
        SIZE,
        seed=SEED,
        secret=SECRET,
        wait_s=20.0,
        worth_tokens=16,
        returns=returns,
    )


def serving(executor: Executor, **fields: Any) -> EngineService:
    settings = EngineSettings(max_running=18, chunk_tokens=48, **{"prefix_cache_bytes": 0, **fields})
    return service_of(executor, settings, name=NAME, tokenizer=letters(), kv=TRIAL)


async def asked(one: Client, place: int) -> list[int]:
    status, lines = await one.segment(ASKS[place], max_tokens=OUTPUT, ignore_eos=True)
    assert (status, lines[-1]["ended"]) == (200, "length"), lines
    return tokens_in(lines)


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["5", "2,3", "4x2,1", "1,2x2,2", "1,1,2x2,1"])
async def test_a_pipeline_answers_as_one_process_does(
    stages: str, workers: list[tuple[str, int]], expected: dict[str, list[list[int]]]
) -> None:
    """17 at once, in as many lanes as there are stages; then cut in two, into the pipeline and out of it."""
    alone = LocalExecutor(Runner(HYBRID, RandomSource(SEED), SIZE), SIZE)

    executor = joined(HYBRID, stages, workers)
    executor.microbatches = len(stages.split(","))  # more than there is something to gain from
    pipe = serving(executor, prefix_cache_bytes=300_000)
    async with face(pipe) as many, face(serving(alone)) as single:
        assert len(pipe._loop.microbatches.all) == executor.microbatches
        order = [place % len(ASKS) for place in range(17)]
        result = await asyncio.gather(*(asked(many, place) for place in order))
        assert result == [expected["hybrid"][place] for place in order]
        body = {"model": NAME, "prompt": spell(ASKS[3]), "temperature": 0, "max_tokens": OUTPUT}
        _, reply = await many.post("/v1/completions", body)
        assert reply["choices"][0]["text"] == spell(expected["hybrid"][3])
        for sender, receiver, cut in ((many, single, 33), (single, many, 64), (many, many, 129)):
            handle = new_handle()
            source = {"kv": sender.kv, "handle": handle}
            _, (status, lines) = await asyncio.gather(
                sender.segment(ASKS[4], stop=cut, handle=handle),
                receiver.segment(ASKS[4], start=cut, max_tokens=OUTPUT, source=source, ignore_eos=True),
            )
            assert status == 200, lines
            assert tokens_in(lines) == expected["hybrid"][4]
        await many.until_idle()
        await single.until_idle()
        _, status = await many.get("/status")
        assert (status["state"], status["notes"]["pipeline_workers_lost"]) == ("ready", 0)


async def test_a_pipeline_goes_on_with_the_workers_that_are_left(
    workers: list[tuple[str, int]], expected: dict[str, list[list[int]]]
) -> None:
    executor = joined(PLAIN, "1,2x2", workers, returns=False)
    second = executor._stages[1]

    async with face(serving(executor)) as one:
        running = [
            asyncio.create_task(one.segment(ASKS[2], max_tokens=300, ignore_eos=True)) for _ in range(6)
        ]
        while (await one.get("/status"))[1]["output_tokens"] < 12:
            await asyncio.sleep(0.01)
        second[0]._link.close()
        ends = [(await task)[1][-1] for task in running]
        lost = [end for end in ends if end["ended"] == "error"]
        assert len(lost) == 3
        assert all("stage 1 worker 0 is gone" in end["problem"] for end in lost)
        assert [end["ended"] for end in ends].count("length") == 3
        code, health = await one.get("/health")
        assert (code, health["status"]) == (200, "degraded")
        assert health["problem"].startswith("1 of 3 workers are lost; stage 1 worker 0 is gone")
        _, status = await one.get("/status")
        assert (status["state"], status["problem"]) == ("degraded", health["problem"])
        _, text = await one.get("/metrics")
        assert 'potluck:pipeline_workers_lost{engine="0",model_name="tiny"} 1.0' in text
        result = await asyncio.gather(*(asked(one, place) for place in range(len(ASKS))))
        assert list(result) == expected["plain"]
        await one.until_idle()
        second[1]._link.close()
        while (await one.get("/health"))[0] == 200:
            await asyncio.sleep(0.01)
        code, body = await one.segment(ASKS[0], max_tokens=1)
        assert (code, body["error"]["code"]) == (503, "failed")
        assert "stage 1 has no worker left: stage 1 worker 1 is gone" in body["error"]["message"]
        assert (await one.get("/status"))[1]["state"] == "failed"
        await one.until_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_role_change_during_an_answer_changes_no_token(kind: str) -> None:
    tokens = prompt(90)

    async with face(make_service(kind)) as one:
        _, lines = await one.segment(tokens, max_tokens=60, ignore_eos=True)
        body = {"request": "r", "model": NAME, "tokens": tokens, "max_tokens": 60, "ignore_eos": True}
        async with one.session.post(one.url + "/segments", json=body) as reply:
            await reply.content.readline()
            assert (await one.post("/role", {"role": "prefill"}))[0] == 200
            assert tokens_in((await one.segment(tokens, max_tokens=1))[1]) == tokens_in(lines)[:1]
            assert (await one.post("/role", {"role": "decode"}))[0] == 200
            text = (await reply.read()).decode()
        assert text.count('"token"') == 59
        _, again = await one.segment(tokens, max_tokens=60, ignore_eos=True)
        assert tokens_in(again) == tokens_in(lines)
        assert [f'{{"token":{token}}}' for token in tokens_in(lines)[1:]] == text.splitlines()[:-1]


STREAMS, TOKENS = 64, 6
NAMES = ("a", "b", "c")


@dataclass
class Heard:
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

    def codec(self, source_endpoint: Endpoint, target_endpoint: Endpoint) -> str:
        return "raw"

    def connections(self, source_endpoint: Endpoint, target_endpoint: Endpoint) -> int:
        return 2

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
        sampling = Sampling(0.8, seed=place) if place % 2 else Sampling()
        if place % 8 == 0:
            sampling = Sampling(logprobs=2)
        made.append(
            ChoiceRequest(
                f"q{place}", NAME, prompt, len(prompt), TOKENS, sampling, min_tokens=place % 3, vocab=VOCAB
            )
        )
    return made


async def answers(
    engines: Sequence[Client], kinds: Sequence[str], asked: Sequence[ChoiceRequest], troubles: int = 0
) -> tuple[list[Heard], Chooser]:
    """All at once; now and then all engines are said to be gone while they stream."""
    loop = asyncio.get_running_loop()
    connection_pool = ConnectionPool()
    chooser = Chooser(engines, kinds, 5)
    dispatcher = chooser.dispatcher = Dispatcher(
        chooser, chooser, connection_pool, loop.time, loop.call_later, Counters()
    )
    heard = [Heard() for _ in asked]
    for what, answer in zip(asked, heard, strict=True):
        dispatcher.begin(what, answer)
    async with asyncio.timeout(60):
        for _ in range(troubles):
            # Somebody has some of an answer and not all of it: all engines are gone for a moment.
            while not any(item.choices and not item.over.is_set() for item in heard):
                assert not all(item.over.is_set() for item in heard), "all were answered before"
                await asyncio.sleep(0)
            for name in NAMES:
                dispatcher.gone(name)
            enough = sum(len(item.choices) for item in heard) + 40
            while sum(len(item.choices) for item in heard) < enough and not all(
                item.over.is_set() for item in heard
            ):
                await asyncio.sleep(0)
        await asyncio.gather(*(item.over.wait() for item in heard))
    assert dispatcher.sizes() == {"open": 0, "watched": 0, "news": 0}
    await connection_pool.close()
    return heard, chooser


@pytest.mark.slow
def test_every_route_and_recovery_gives_the_tokens_of_one_engine(
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
            heard, message = await answers(engines, ["prefill apart", "split", "three"], asked)
            assert [item.choices for item in heard] == [item.choices for item in alone]
            assert message.finished == STREAMS
            assert not message.failed
            heard, message = await answers(engines, ["in place", "prefill apart", "split", "three"], asked, 4)
            assert [item.choices for item in heard] == [item.choices for item in alone]
            assert [item.reason for item in heard] == [item.reason for item in alone]
            assert message.finished == STREAMS
            assert any(item.streamed_tokens for item in message.failed), "nobody had anything yet"

    asyncio.run(run())

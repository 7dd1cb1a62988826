"""A pipeline behind HTTP: it answers as one process does, and goes on as long as each stage has a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_models import KINDS, prompt
from face_kit import NAME, TRIAL, Client, face, letters, make_service, played, spell, tokens_in
from loop_kit import Desk
from pipeline_workers import HYBRID, PLAIN, SECRET, SEED, placed, standing

from potluck.engine.compute.executor import Executor
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner, RunnerSize
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.pipeline.launch import launch
from potluck.engine.pipeline.pipeline_executor import PipelineExecutor
from potluck.engine.serve import EngineSettings, service_of
from potluck.engine.server.engine_service import EngineService
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
    found = {}
    for name, config in (("hybrid", HYBRID), ("plain", PLAIN)):
        engine = Desk(config)
        found[name] = [engine.answer(tokens, OUTPUT) for tokens in ASKS]
    return found


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
    return service_of(executor, settings, name=NAME, text=letters(), kv=TRIAL)


async def asked(one: Client, place: int) -> list[int]:
    status, lines = await one.segment(ASKS[place], max_tokens=OUTPUT, ignore_eos=True)
    assert (status, lines[-1]["ended"]) == (200, "length"), lines
    return tokens_in(lines)


@pytest.mark.parametrize("stages", ["5", "2,3", "4x2,1", "1,2x2,2", "1,1,2x2,1"])
def test_a_pipeline_answers_as_one_process_does(
    stages: str, workers: list[tuple[str, int]], expected: dict[str, list[list[int]]]
) -> None:
    """17 at once, in as many lanes as there are stages; then cut in two, into the pipeline and out of it."""
    alone = LocalExecutor(Runner(HYBRID, RandomSource(SEED), SIZE), SIZE)

    async def scenario() -> None:
        executor = joined(HYBRID, stages, workers)
        executor.microbatches = len(stages.split(","))  # more than there is something to gain from
        pipe = serving(executor, prefix_cache_bytes=300_000)
        async with face(pipe) as many, face(serving(alone)) as single:
            assert len(pipe._loop.microbatches.all) == executor.microbatches
            order = [place % len(ASKS) for place in range(17)]
            found = await asyncio.gather(*(asked(many, place) for place in order))
            assert found == [expected["hybrid"][place] for place in order]
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

    played(scenario)


def test_a_pipeline_goes_on_with_the_workers_that_are_left(
    workers: list[tuple[str, int]], expected: dict[str, list[list[int]]]
) -> None:
    executor = joined(PLAIN, "1,2x2", workers, returns=False)
    second = executor._stages[1]

    async def scenario() -> None:
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
            found = await asyncio.gather(*(asked(one, place) for place in range(len(ASKS))))
            assert list(found) == expected["plain"]
            await one.until_idle()
            second[1]._link.close()
            while (await one.get("/health"))[0] == 200:
                await asyncio.sleep(0.01)
            code, body = await one.segment(ASKS[0], max_tokens=1)
            assert (code, body["error"]["code"]) == (503, "failed")
            assert "stage 1 has no worker left: stage 1 worker 1 is gone" in body["error"]["message"]
            assert (await one.get("/status"))[1]["state"] == "failed"
            await one.until_idle()

    played(scenario)


@pytest.mark.parametrize("kind", KINDS)
def test_a_role_change_in_the_middle_changes_no_token(kind: str) -> None:
    tokens = prompt(90)

    async def scenario() -> None:
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

    played(scenario)

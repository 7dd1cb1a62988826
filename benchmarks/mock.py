"""Mock engines: what they cost, and how well they keep the pace of the GPU that they act as.

The loop alone: CPU per step of 64 decodes. A whole engine as a process with a client that streams: memory, CPU until
it serves, idle, per token, and the time of all streams beside what `perf` predicts. Last twenty engines in one
process, each with a few streams: how late their steps are.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from parts.common import POTLUCK, most_resident_mb, run, spent_cpu_s
from potluck.catalog import models, nodes
from potluck.core.replica.batch import BatchLimits
from potluck.core.values.model import Model
from potluck.engine.compute.executor import RunnerSize
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.jobs import Job
from potluck.engine.mock.mock_engine import LAYER, StepDurations
from potluck.engine.mock.mock_executor import MockExecutor, Vocabulary
from potluck.engine.mock.mock_transfer import KvSizes
from potluck.engine.model.config import EngineModelConfig
from potluck.perf.timers.roofline import roofline

GPU, MODEL = "A100", "llama-3.1-8b"
ROWS = 64
FLEET, FLEET_ROWS = 20, 4
WORDS = Vocabulary(4096, tuple(range(3, 4096)), 2)
TARGETS = {
    "resident_mb": ("<=", 100.0),
    "start_cpu_s": ("<=", 2.0),
    "loop_step_64_cpu_ms": ("<=", 1.0),
    "idle_cpu_share": ("<=", 0.01),
    "pace_ratio": ("<=", 1.05),
}


def measure(quick: bool) -> dict[str, float]:
    figures = {"loop_step_64_cpu_ms": loop_step_ms(200 if quick else 1000)}
    figures |= asyncio.run(one_engine(64 if quick else 256))
    return figures | asyncio.run(fleet(5.0 if quick else 20.0))


def loop_step_ms(steps: int) -> float:
    """CPU of a turn with 64 decodes, and nobody listening."""
    large_model = models.model(MODEL)
    config = EngineModelConfig(Model("p", 1, WORDS.vocab, (LAYER,) * KvSizes(large_model).layers, 1 << 17))
    size = RunnerSize(ROWS + 8, 20_000, 1 << 17)
    lasts = StepDurations(roofline(large_model, nodes.node_type(GPU), 1))
    executor = MockExecutor(config, size, WORDS, lasts, fingerprint="f")
    loop = EngineLoop(executor, BatchLimits(size.blocks, 2048, ROWS), lambda events: None, await_steps=False)
    for key in range(ROWS):
        loop.submit(Job(key, tuple(range(3, 203)), output_tokens=steps + 100), 0.0)
    for _ in range(50):
        loop.turn(0.0)
    before = time.process_time()
    for _ in range(steps):
        loop.turn(0.0)
    return (time.process_time() - before) / steps * 1e3


@contextmanager
def serving(count: int) -> Iterator[tuple[int, list[str]]]:
    flags = ["--emulate", f"{GPU}:{MODEL}", "--mock", "--json", "--port", "0", "--max-running", str(ROWS)]
    command = [*POTLUCK, "engine", "serve", *flags, "--count", str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, [json.loads(process.stdout.readline())["url"] for _ in range(count)]
    finally:
        process.terminate()
        process.wait(20)


async def stream(session: ClientSession, url: str, number: int, tokens: int) -> int:
    prompt = [3 + (number * 31 + place) % 4000 for place in range(100)]
    body = {"request": f"r{number}", "model": "words", "tokens": prompt, "max_tokens": tokens}
    count = 0
    async with session.post(f"{url}/segments", json=body) as reply:
        reply.raise_for_status()
        async for chunk in reply.content.iter_any():
            count += chunk.count(b'"token"')
    return count


async def notes(session: ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/status") as reply:
        return dict(await reply.json())


def client() -> ClientSession:
    return ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=300))


async def one_engine(tokens: int) -> dict[str, float]:
    with serving(1) as (pid, (url,)):
        figures = {"start_cpu_s": spent_cpu_s(pid)}
        async with client() as session:
            await stream(session, url, 0, 4)
            before_s = spent_cpu_s(pid)
            await asyncio.sleep(5.0)
            figures["idle_cpu_share"] = (spent_cpu_s(pid) - before_s) / 5.0
            was, before_s = await notes(session, url), spent_cpu_s(pid)
            began_s = time.monotonic()
            counts = await asyncio.gather(*(stream(session, url, n, tokens) for n in range(ROWS)))
            lasted_s = time.monotonic() - began_s
            spent_s, now = spent_cpu_s(pid) - before_s, await notes(session, url)
        steps = now["steps"] - was["steps"]
        figures["face_cpu_us_per_token"] = spent_s / sum(counts) * 1e6
        figures["face_step_64_cpu_ms"] = spent_s / steps * 1e3
        more = {key: value - was["notes"][key] for key, value in now["notes"].items()}
        figures["pace_ratio"] = lasted_s / more["emulated_predicted_s"]
        figures["late_share"] = more["emulated_late_steps"] / more["emulated_steps"]
        figures["resident_mb"] = most_resident_mb(pid)
    return figures


async def fleet(seconds: float) -> dict[str, float]:
    with serving(FLEET) as (pid, urls):
        start_s, resident = spent_cpu_s(pid), most_resident_mb(pid)
        async with client() as session:
            ends_s = time.monotonic() + seconds
            before_s = spent_cpu_s(pid)

            async def keep(url: str, number: int) -> int:
                count = 0
                while time.monotonic() < ends_s:
                    count += await stream(session, url, number, 50)
                return count

            asked = [keep(url, n * FLEET_ROWS + k) for n, url in enumerate(urls) for k in range(FLEET_ROWS)]
            began_s = time.monotonic()
            total = sum(await asyncio.gather(*asked))
            lasted_s = time.monotonic() - began_s
            spent_s = spent_cpu_s(pid) - before_s
            every = [(await notes(session, url))["notes"] for url in urls]
    steps = sum(item["emulated_steps"] for item in every)
    return {
        "fleet_start_cpu_s": start_s,
        "fleet_resident_mb": resident,
        "fleet_tokens_per_s": total / lasted_s,
        "fleet_cpu_share": spent_s / lasted_s,
        "fleet_late_ms_per_step": sum(item["emulated_late_s"] for item in every) / steps * 1e3,
        "fleet_late_share": sum(item["emulated_late_steps"] for item in every) / steps,
    }


if __name__ == "__main__":
    run("mock", measure, TARGETS)

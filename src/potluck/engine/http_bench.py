"""Measuring an engine over HTTP (`POST /segments`, `GET /status`), wherever it runs.

A prompt that is computed in one step: the engine itself says how long it took, from beginning to first token. Behind
a context of whole chunks, the time of the context alone is subtracted. Decodes: many requests at once, and the median
time between tokens while all of them decode, by this process's clock. A prompt beside decodes: as a prompt.
The engine should have nothing else to do meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from aiohttp import ClientError, ClientSession, ClientTimeout

from potluck.core.errors import FormatError, InputError
from potluck.engine.local_bench import EngineBounds, ShapeGrid
from potluck.perf.timers.profile import ProfilePoint

REQUEST_S = 600.0
STEADY_TOKENS = 24
"""Tokens that every request should make while all of them decode."""
SAFE_VOCAB = 128
"""Token numbers that every model has."""


@dataclass(slots=True)
class _Stream:
    times_s: list[float] = field(default_factory=list)
    ended: dict[str, object] = field(default_factory=dict)


class HttpBench:
    def __init__(
        self, client: ClientSession, url: str, chunk_tokens: int, repeats: int = 3, seed: int = 0
    ) -> None:
        self._client, self._url, self._repeats = client, url.rstrip("/"), repeats
        self._chunk = chunk_tokens
        self._chance = random.Random(seed)
        self.model = self.version = ""
        self._bounds: EngineBounds | None = None
        self._asked = 0

    async def look(self) -> EngineBounds:
        status = await self.ask("/status") or {}
        try:
            self.model, self.version = str(status["model"]), str(status["version"])
            blocks, size = int(str(status["total_blocks"])), int(str(status["block_tokens"]))
            most, running = int(str(status["max_tokens"])), int(str(status["max_running"]))
        except (KeyError, ValueError) as error:
            raise FormatError(
                f"{self._url}/status", "does not say what an engine of ours says; is it an engine?"
            ) from error
        if status.get("running") or status.get("waiting"):
            raise InputError(self._url, "is at work; an engine is measured while it has nothing else to do")
        return EngineBounds(most, running, self._chunk, blocks * size)

    async def points(self, grid: ShapeGrid, bounds: EngineBounds) -> AsyncIterator[ProfilePoint]:
        """Contexts before chunks are made whole chunks, since only then is the last step one chunk."""
        self._bounds = bounds
        before = sorted({-(-cached // self._chunk) * self._chunk for cached in grid.cached})
        for cached in (number for number in before if number + grid.chunks[-1] < bounds.max_tokens):
            base = await self._prompts_s(cached) if cached else 0.0
            for new in grid.chunks:
                seconds = await self._prompts_s(cached + new) - base
                yield ProfilePoint(new, cached, 0, 0, max(seconds, 1e-6), self._repeats)
        for context in grid.contexts:
            for batch in grid.batches_at(context):
                yield await self._decodes(batch, context, 0)
            for new, batch in grid.mixed_at(context):
                yield await self._decodes(batch, context, new)

    async def ask(self, path: str) -> dict[str, object] | None:
        try:
            async with self._client.get(f"{self._url}{path}", timeout=ClientTimeout(total=10)) as answer:
                document = json.loads(await answer.read()) if answer.status == 200 else None
        except (ClientError, TimeoutError, OSError) as error:
            raise InputError(self._url, f"cannot be reached ({error or type(error).__name__})") from error
        except ValueError as error:
            raise FormatError(f"{self._url}{path}", "is not JSON; is it an engine?") from error
        return document if isinstance(document, dict) else None

    async def _prompts_s(self, tokens: int) -> float:
        """Seconds from beginning to first token, of prompts one after the other."""
        values = [_worked_s(await self.run(tokens, 1)) for _ in range(self._repeats + 1)]
        return median(values[1:])

    async def _decodes(self, batch: int, context: int, new: int) -> ProfilePoint:
        """Requests that decode together; with `new`, prompts of that length arrive among them."""
        assert self._bounds is not None
        # Early ones decode while the others' prompts are still computed.
        steps = batch * context // self._chunk + STEADY_TOKENS + (8 * self._repeats if new else 0)
        tokens = max(2, min(steps + 2, self._bounds.max_tokens - context))
        streams = [_Stream() for _ in range(batch)]
        runs = [asyncio.create_task(self.run(context, tokens, stream)) for stream in streams]
        try:
            while not all(stream.times_s for stream in streams):
                await self._still(runs)
            at = len(streams[-1].times_s)
            extra_s = [_worked_s(await self.run(new, 1)) for _ in range(self._repeats if new else 0)]
            await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
        if new:
            return ProfilePoint(new, 0, batch, batch * (context + at), median(extra_s), self._repeats)
        gaps, reached = _steady(streams)
        return ProfilePoint(0, 0, batch, round(batch * (context + reached)), median(gaps), len(gaps))

    async def _still(self, runs: list[asyncio.Task[_Stream]]) -> None:
        """A moment; an error as soon as one of them has one."""
        done, _ = await asyncio.wait(runs, timeout=0.002, return_when=asyncio.FIRST_EXCEPTION)
        for run in done:
            run.result()

    async def run(self, prompt: int, tokens: int, stream: _Stream | None = None) -> _Stream:
        """One request. `stream` is written while it runs."""
        stream = stream or _Stream()
        self._asked += 1
        body = {
            "request": f"profile-{self._asked}",
            "model": self.model,
            "tokens": [self._chance.randrange(SAFE_VOCAB) for _ in range(prompt)],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        limit = ClientTimeout(total=REQUEST_S)
        try:
            async with self._client.post(f"{self._url}/segments", json=body, timeout=limit) as answer:
                if answer.status != 200:
                    text = " ".join((await answer.content.read(400)).decode("utf-8", "replace").split())
                    raise InputError(self._url, f"refused a request ({answer.status}: {text})")
                async for line in answer.content:
                    self._line(line, stream)
        except (ClientError, TimeoutError, OSError) as error:
            raise InputError(self._url, f"cannot be reached ({error or type(error).__name__})") from error
        if "problem" in stream.ended or not stream.ended:
            raise InputError(self._url, f"a request failed ({stream.ended.get('problem', 'it was cut off')})")
        return stream

    def _line(self, line: bytes, stream: _Stream) -> None:
        try:
            body = json.loads(line)
        except ValueError as error:
            raise FormatError(self._url, "answers with something that is not JSON") from error
        if "token" in body:
            stream.times_s.append(time.perf_counter())
        elif "ended" in body:
            stream.ended = body


def _worked_s(stream: _Stream) -> float:
    """From when an engine began with a prompt to its first token, by its own clock."""
    first, queued = stream.ended.get("ttft_s"), stream.ended.get("queue_s")
    if not isinstance(first, int | float) or not isinstance(queued, int | float):
        raise FormatError("/segments", "does not say ttft_s and queue_s at a request's end")
    return max(float(first) - float(queued), 1e-9)


def _steady(streams: list[_Stream]) -> tuple[list[float], float]:
    """Times between tokens while all requests decode, and how many tokens each had by then, on average."""
    begin = max(stream.times_s[0] for stream in streams)
    end = min(stream.times_s[-1] for stream in streams)
    gaps: list[float] = []
    reached: list[int] = []
    for stream in streams:
        times = stream.times_s
        inside = [
            place for place in range(1, len(times)) if begin <= times[place - 1] and times[place] <= end
        ]
        gaps += [times[place] - times[place - 1] for place in inside]
        reached += inside
    if not gaps:  # so few tokens that they never all decoded at once
        gaps = [b - a for s in streams for a, b in zip(s.times_s, s.times_s[1:], strict=False)] or [1e-6]
        reached = [len(stream.times_s) for stream in streams]
    return [max(gap, 1e-6) for gap in gaps], sum(reached) / len(reached)


SETTLE_S = 0.3
"""After which all of an engine's steps have been told."""
REPEATS = 3


class ReportedStep(NamedTuple):
    number: int
    tokens: int
    sequences: int
    seconds: float


async def steps_told(bench: HttpBench) -> ReportedStepBench | None:
    """A bench for an engine that tells of its steps; None for one that does not."""
    return None if await bench.ask("/steps") is None else ReportedStepBench(bench)


class ReportedStepBench:
    def __init__(self, bench: HttpBench) -> None:
        self._bench = bench
        self._seen = 0

    async def points(self, grid: ShapeGrid, bounds: EngineBounds) -> AsyncIterator[ProfilePoint]:
        await self._new()
        for cached in grid.cached:
            for new in grid.chunks:
                if cached + new + 2 < bounds.max_tokens:
                    yield await self._prompt(cached + new)
        for context in grid.contexts:
            for batch in grid.batches_at(context):
                yield await self._decodes(batch, context, 0, bounds)
            for new, batch in grid.mixed_at(context):
                yield await self._decodes(batch, context, new, bounds)

    async def _prompt(self, total: int) -> ProfilePoint:
        """The last step of a prompt, which has all tokens that were not computed before."""
        result: dict[int, list[float]] = {}
        for place in range(REPEATS + 1):
            await self._bench.run(total, 2)
            alone = [step for step in await self._new() if step.sequences == 1 and step.tokens > 1]
            if place and alone:
                result.setdefault(alone[-1].tokens, []).append(alone[-1].seconds)
        if not result:
            raise InputError("/steps", f"tell of no step of a prompt of {total} tokens")
        new, times = max(result.items(), key=lambda each: len(each[1]))
        return ProfilePoint(new, total - new, 0, 0, median(times), len(times))

    async def _decodes(self, batch: int, context: int, new: int, bounds: EngineBounds) -> ProfilePoint:
        steps = batch * context // bounds.chunk_tokens + STEADY_TOKENS + (8 * REPEATS if new else 0)
        tokens = max(3, min(steps + 2, bounds.max_tokens - context))
        runs = [asyncio.create_task(self._bench.run(context, tokens)) for _ in range(batch)]
        try:
            while new and not all(run.done() for run in runs):
                await self._bench.run(new, 1)
            await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
        told = await self._new()
        beside = [step for step in told if (step.tokens, step.sequences) == (new + batch, batch + 1)]
        together = [step for step in told if step.tokens == step.sequences == batch]
        if new and beside:
            reached, seconds = _middle(told, beside, batch)
            return ProfilePoint(new, 0, batch, batch * (context + reached), seconds, len(beside))
        if not together:
            raise InputError("/steps", f"tell of no step of {batch} decodes; the engine may have other work")
        reached, seconds = _middle(told, together, batch)
        return ProfilePoint(0, 0, batch, batch * (context + reached), seconds, len(together))

    async def _new(self) -> list[ReportedStep]:
        await asyncio.sleep(SETTLE_S)
        text = await self._bench.ask(f"/steps?after={self._seen}")
        try:
            assert text is not None
            listed: Any = text["steps"]
            steps = [
                ReportedStep(int(item[0]), int(item[1]), int(item[2]), float(item[3])) for item in listed
            ]
            self._seen = int(str(text["count"]))
        except (AssertionError, KeyError, TypeError, ValueError, IndexError) as error:
            raise FormatError("/steps", "do not say numbers, tokens, sequences and seconds") from error
        return steps


def _middle(told: list[ReportedStep], some: list[ReportedStep], batch: int) -> tuple[int, float]:
    """Of some steps: tokens that each of the decodes had made by the middle one, on average (those of all steps
    before it that only decoded); and the median time."""
    number = some[len(some) // 2].number
    made = sum(step.sequences for step in told if step.number < number and step.tokens == step.sequences)
    return made // batch, median(step.seconds for step in some)

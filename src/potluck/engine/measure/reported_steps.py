"""Measuring an engine that tells of its steps (`GET /steps`: vLLM behind its adapter), exactly.

What is sent is the same as ever (`http.py`); what counts is which steps the engine made of it, how many tokens and
sequences each had and how long it took, by the engine's own clock. A step is timed by the one behind it, so every
request makes one token more than it must. Steps that a prompt was cut into are points of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from statistics import median
from typing import Any, NamedTuple

from potluck.core.errors import FormatError, InputError
from potluck.engine.measure.http_bench import STEADY_TOKENS, HttpBench
from potluck.engine.measure.local_bench import EngineBounds, ShapeGrid
from potluck.perf.timers.profile import ProfilePoint

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

    async def points(self, what: ShapeGrid, bounds: EngineBounds) -> AsyncIterator[ProfilePoint]:
        await self._new()
        for cached in what.cached:
            for new in what.chunks:
                if cached + new + 2 < bounds.max_tokens:
                    yield await self._prompt(cached + new)
        for context in what.contexts:
            for batch in what.batches:
                yield await self._decodes(batch, context, 0, bounds)
            for new, batch in what.mixed:
                yield await self._decodes(batch, context, new, bounds)

    async def _prompt(self, total: int) -> ProfilePoint:
        """The last step of a prompt, which has all tokens that were not computed before."""
        found: dict[int, list[float]] = {}
        for place in range(REPEATS + 1):
            await self._bench.run(total, 2)
            alone = [step for step in await self._new() if step.sequences == 1 and step.tokens > 1]
            if place and alone:
                found.setdefault(alone[-1].tokens, []).append(alone[-1].seconds)
        if not found:
            raise InputError("/steps", f"tell of no step of a prompt of {total} tokens")
        new, times = max(found.items(), key=lambda each: len(each[1]))
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
            reached = _reached(told, beside[len(beside) // 2], batch)
            seconds = median(step.seconds for step in beside)
            return ProfilePoint(new, 0, batch, batch * (context + reached), seconds, len(beside))
        if not together:
            raise InputError("/steps", f"tell of no step of {batch} decodes; the engine may have other work")
        reached = _reached(told, together[len(together) // 2], batch)
        seconds = median(step.seconds for step in together)
        return ProfilePoint(0, 0, batch, batch * (context + reached), seconds, len(together))

    async def _new(self) -> list[ReportedStep]:
        """Those since the last look."""
        await asyncio.sleep(SETTLE_S)
        said = await self._bench.ask(f"/steps?after={self._seen}")
        try:
            assert said is not None
            listed: Any = said["steps"]
            found = [
                ReportedStep(int(each[0]), int(each[1]), int(each[2]), float(each[3])) for each in listed
            ]
            self._seen = int(str(said["count"]))
        except (AssertionError, KeyError, TypeError, ValueError, IndexError) as error:
            raise FormatError("/steps", "do not say numbers, tokens, sequences and seconds") from error
        return found


def _reached(told: list[ReportedStep], step: ReportedStep, batch: int) -> int:
    """Tokens that each of the decodes had made by then, on average: those of all steps before that only decoded."""
    made = sum(each.sequences for each in told if each.number < step.number and each.tokens == each.sequences)
    return made // batch

"""Engines that tell of their steps are measured by those: what comes out is how long the steps really took."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from potluck.core.errors import FormatError
from potluck.engine.measure import reported_steps
from potluck.engine.measure.local_bench import EngineBounds, ShapeGrid
from potluck.engine.measure.reported_steps import ReportedStepBench, steps_told
from potluck.perf.timers.profile import ProfilePoint

BUDGET = 64
BOUNDS = EngineBounds(1024, 8, BUDGET, 8192)


def took_s(tokens: int, sequences: int) -> float:
    return 0.001 + tokens * 1e-4 + sequences * 1e-5


@dataclass(eq=False)
class Asked:
    left: int
    tokens: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    """Schedules as vLLM does: decodes first, then chunks of prompts within the budget."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []
        self._told: list[tuple[int, int, int, float]] = []
        self._count = 0
        self._working: asyncio.Task[None] | None = None

    async def run(self, prompt: int, tokens: int) -> list[float]:
        asked = Asked(prompt, tokens)
        self._asked.append(asked)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        await asked.done.wait()
        return []

    async def ask(self, path: str) -> dict[str, object] | None:
        after = int(path.partition("=")[2] or 0)
        return {"count": self._count, "steps": [list(each) for each in self._told if each[0] > after]}

    async def _work(self) -> None:
        while self._asked:
            await asyncio.sleep(0)
            room, sequences, used = BUDGET, 0, 0
            for asked in sorted(self._asked, key=lambda each: each.left > 0):
                part = min(asked.left or 1, room)
                if not part:
                    continue
                room, used, sequences = room - part, used + part, sequences + 1
                asked.left = max(0, asked.left - part)
                asked.tokens -= not asked.left
                if not asked.tokens:
                    asked.done.set()
            self._count += 1
            self._asked = [asked for asked in self._asked if asked.tokens]
            if self._asked:  # else nobody knows when the step ended
                self._told.append((self._count, used, sequences, took_s(used, sequences)))


def test_points_are_the_steps_that_the_engine_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported_steps, "SETTLE_S", 0.0)
    what = ShapeGrid((16, 48), (0, 64, 100), (1, 4), (32,), ((16, 2),))

    async def measured() -> list[ProfilePoint]:
        bench = await steps_told(Engine())  # type: ignore[arg-type]
        assert isinstance(bench, ReportedStepBench)
        return [point async for point in bench.points(what, BOUNDS)]

    points = asyncio.run(measured())
    assert len(points) == what.count
    for point in points:
        sequences = point.decodes + (1 if point.chunk_new else 0)
        assert point.seconds == pytest.approx(took_s(point.chunk_new + point.decodes, sequences))
    prompts = [(point.chunk_new, point.chunk_cached) for point in points if not point.decodes]
    assert prompts == [(16, 0), (48, 0), (16, 64), (48, 64), (52, 64), (20, 128)], "as they were cut"
    decodes = [point for point in points if point.decodes and not point.chunk_new]
    assert all(32 < point.decode_context / point.decodes < 32 + 30 for point in decodes)


def test_an_engine_that_tells_nothing_or_nonsense() -> None:
    class Silent(Engine):
        async def ask(self, path: str) -> dict[str, object] | None:
            return None

    class Odd(Engine):
        async def ask(self, path: str) -> dict[str, object] | None:
            return {"count": 1, "steps": [["x"]]}

    assert asyncio.run(steps_told(Silent())) is None  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="/steps"):
        asyncio.run(ReportedStepBench(Odd())._new())  # type: ignore[arg-type]

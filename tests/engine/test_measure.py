"""Engines that tell of their steps are measured by those: what comes out is how long the steps really took."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from executor_loop import PLAIN, local
from hypothesis import given
from hypothesis import strategies as st
from test_emulated import FakeTime

from potluck.catalog import models, nodes
from potluck.cli.main import run
from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.engine import gpu_share, http_bench, serve
from potluck.engine.compute.emulated import StepPacer
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.http_bench import HttpBench, ReportedStepBench, steps_told
from potluck.engine.local_bench import EngineBounds, LocalBench, ShapeGrid, grid
from potluck.engine.serve import EngineSettings, service_of
from potluck.engine.server.engine_app import build
from potluck.perf.step_timer import steps
from potluck.perf.timers.profile import ProfilePoint, ProfileTimer, profile_from_json
from potluck.perf.timers.roofline import roofline

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
        return {"count": self._count, "steps": [list(item) for item in self._told if item[0] > after]}

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


def test_profile_points_equal_the_reported_engine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bench, "SETTLE_S", 0.0)
    grid = ShapeGrid((16, 48), (0, 64, 100), (1, 4), (32,), ((16, 2),))

    async def measured() -> list[ProfilePoint]:
        bench = await steps_told(Engine())  # type: ignore[arg-type]
        assert isinstance(bench, ReportedStepBench)
        return [point async for point in bench.points(grid, BOUNDS)]

    points = asyncio.run(measured())
    assert len(points) == grid.count
    for point in points:
        sequences = point.decodes + (1 if point.chunk_new else 0)
        assert point.seconds == pytest.approx(took_s(point.chunk_new + point.decodes, sequences))
    prompts = [(point.chunk_new, point.chunk_cached) for point in points if not point.decodes]
    assert prompts == [(16, 0), (48, 0), (16, 64), (48, 64), (52, 64), (20, 128)], "as they were cut"
    decodes = [point for point in points if point.decodes and not point.chunk_new]
    assert all(32 < point.decode_context / point.decodes < 32 + 30 for point in decodes)


def test_engine_without_step_reports_is_not_measured_by_them() -> None:
    class Silent(Engine):
        async def ask(self, path: str) -> dict[str, object] | None:
            return None

    class Odd(Engine):
        async def ask(self, path: str) -> dict[str, object] | None:
            return {"count": 1, "steps": [["x"]]}

    assert asyncio.run(steps_told(Silent())) is None  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="/steps"):
        asyncio.run(ReportedStepBench(Odd())._new())  # type: ignore[arg-type]


GRID = ShapeGrid((16, 64), (0, 64), (1, 4), (64, 128), ((16, 4),))


def test_measured_profile_equals_the_emulated_step_times() -> None:
    """An emulated GPU on a clock that only it moves: the profile says what `perf` says, to the nanosecond."""
    time, alone = FakeTime(), local(PLAIN)
    timer = roofline(models.model("Llama-3.1-8B"), nodes.node_type("A10"), 1)
    paced = LocalExecutor(alone.runner, alone.size, StepPacer(timer, 1.0, time.clock, time.sleep, host_s=0.0))
    points = list(LocalBench(paced, repeats=1, clock=time.clock).points(GRID))
    assert len(points) == GRID.count == 10
    for p in points:
        expected = timer.step_s(steps(p.chunk_new, p.chunk_cached, p.decodes, p.decode_context))
        assert p.seconds == pytest.approx(float(expected[0]), abs=1e-8)
    chunks = [(16, 0, 0), (64, 0, 0), (16, 64, 0), (64, 64, 0)]
    assert [(p.chunk_new, p.chunk_cached, p.decodes) for p in points] == chunks + [
        (0, 0, 1),
        (0, 0, 4),
        (16, 0, 4),
    ] * 2
    for p, context in zip(points[4:], [64] * 3 + [128] * 3, strict=True):
        assert context <= p.decode_context / p.decodes <= context + 12
    alone.check()


def test_measured_step_has_no_pending_work_before_it(monkeypatch):
    executor, steps_made, drawn = local(PLAIN), [], []
    begin = executor.begin
    monkeypatch.setattr(executor, "begin", lambda step: (steps_made.append(len(step.draws)), begin(step))[1])

    bench = LocalBench(executor, 1, lambda: float(drawn.append(all(steps_made[-1:])) or 0))
    assert len(list(bench.points(replace(GRID, behind=(0, 128))))) == 12
    assert all(drawn)


def test_profile_on_a_gpu_share_stops_its_mps_daemon(tmp_path, monkeypatch):
    log, told, control = tmp_path / "log", tmp_path / "told", tmp_path / "control"
    control.write_text(f'#!/bin/sh\necho "$@" $(cat) >> {log}\ngrep -q -e -d {log}\n')
    control.chmod(0o755)
    monkeypatch.setattr(gpu_share, "CONTROL", str(control))
    program = "import json, os, sys; json.dump([dict(os.environ), sys.argv[2:]], open(sys.argv[1], 'w'))"
    options = {"max_batch": 4, "quick": True, "json": False}
    assert gpu_share.run_on_share(25, [sys.executable, "-c", program, str(told)], options) == 0
    variables, words = json.loads(told.read_text())
    assert (variables[gpu_share.SHARE], words) == ("25", ["--max-batch=4", "--quick"])
    assert not Path(variables[gpu_share.PIPES]).exists()
    assert log.read_text().split() == ["get_server_list", "-d", "quit"]


@given(
    st.builds(EngineBounds, *map(st.integers, (128, 2, 32, 256), (1 << 17, 512, 8192, 1 << 22))),
    st.booleans(),
)
def test_every_shape_of_a_profile_grid_can_run(bounds: EngineBounds, quick: bool) -> None:
    try:
        result = grid(bounds, quick, behind=True)
    except CapacityError:
        assert bounds.max_tokens < 512 or bounds.total_tokens < 8192 or bounds.chunk_tokens < 64
        return
    assert result.count >= 8
    assert max(result.chunks) <= bounds.chunk_tokens
    assert max(max(result.cached) + max(result.chunks), max(result.contexts) + 1) <= bounds.max_tokens
    assert max(result.batches) <= bounds.max_running
    for context in result.contexts:
        alone = [batch * context for batch in result.batches_at(context)]
        mixed = [new + max(result.behind) + batch * context for new, batch in result.mixed_at(context)]
        assert max(alone + mixed, default=0) <= bounds.total_tokens
    assert all(max(result.behind) + new <= bounds.max_tokens for new, _ in result.mixed)
    assert all(new + decodes <= bounds.chunk_tokens for new, decodes in result.mixed)


def run_with_engine(use: Callable[[ClientSession, str], Awaitable[None]]) -> None:
    """An engine behind HTTP in this process, as long as `use` runs."""

    async def inner() -> None:
        settings = EngineSettings(max_running=6, token_budget=64, prefix_cache_bytes=0)
        runner = web.AppRunner(build(service_of(local(PLAIN), settings, name="small")), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with ClientSession() as client:
                await use(client, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    asyncio.run(inner())


def test_engine_is_profiled_over_http() -> None:
    profile_points: list[ProfilePoint] = []

    async def use(client: ClientSession, url: str) -> None:
        bench = HttpBench(client, url, chunk_tokens=64, repeats=2)
        bounds = await bench.look()
        assert (bounds.max_tokens, bounds.max_running, bounds.chunk_tokens) == (512, 6, 64)
        profile_points.extend([point async for point in bench.points(GRID, bounds)])
        assert bench.model == "small"

    run_with_engine(use)
    shapes = [(p.chunk_new, p.chunk_cached, p.decodes) for p in profile_points]
    assert shapes[:4] == [(16, 0, 0), (64, 0, 0), (16, 64, 0), (64, 64, 0)]
    assert shapes[4:] == [(0, 0, 1), (0, 0, 4), (16, 0, 4)] * 2
    for point in profile_points[4:]:
        assert 64 <= point.decode_context / point.decodes <= 128 + 64
        assert 0 < point.seconds < 10


def test_unmeasurable_engine_is_refused_with_its_reason() -> None:
    async def use(client: ClientSession, url: str) -> None:
        bench = HttpBench(client, url, chunk_tokens=64)
        bounds = await bench.look()
        bench.model = "unknown"
        with pytest.raises(InputError, match="refused a request .404"):
            _ = [point async for point in bench.points(GRID, bounds)]
        with pytest.raises(InputError, match="is it an engine"):
            await HttpBench(client, f"{url}/v1", 64).look()
        with pytest.raises(InputError, match="cannot be reached"):
            await HttpBench(client, "http://127.0.0.1:9", 64).look()

    run_with_engine(use)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of them"),
        (["http://x", "--local"], "one of them"),
        (["ftp://x", "--gpu", "A10"], "must begin with http"),
        (["http://127.0.0.1:9"], "--gpu"),
        (["http://127.0.0.1:9", "--gpu", "A10"], "cannot be reached"),
        (["--local", "--out", "/nowhere/x.json"], "cannot be written"),
        (["--local", "--model", "/nowhere"], "/nowhere"),
        (["--local", "--emulate", "A11:llama-3.1-8b"], "A11"),
        (["--local", "--share", "0"], "must be 1 to 100 per cent of a GPU, is 0"),
        (["--local", "--share", "50"], "needs an NVIDIA GPU with CUDA MPS"),
        (["http://127.0.0.1:9", "--gpu", "A10", "--share", "50"], "is for --local"),
    ],
)
def test_profile_command_refuses_invalid_options_in_one_line(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_share, "CONTROL", "no-such-control")
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "p.json")]
    assert run(["profile", *arguments, *out]) == 2
    text = capsys.readouterr().err
    assert says in text
    assert len(text.splitlines()) == 1
    assert not (tmp_path / "p.json").exists()


def test_profile_command_writes_a_profile_of_a_gpu_share(tmp_path, capsys, monkeypatch):
    """On a CPU that takes itself for a quarter of a GPU."""
    out, make = tmp_path / "p.json", serve.local_executor
    monkeypatch.setattr(serve, "local_executor", lambda *given: make(*given[:3], "cpu"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setenv(gpu_share.SHARE, "25")
    flags = "--local --quick --max-tokens 384 --max-batch 4 --chunk-tokens 128 --repeats 1 --device cuda"
    assert run(["profile", *flags.split(), "--json", "--out", str(out)]) == 0
    body = json.loads(capsys.readouterr().out)
    profile = profile_from_json(out.read_text("utf-8"))
    assert (profile.gpu, profile.model, profile.engine) == ("NVIDIA H200 25 %", "words", "potluck")
    assert (profile.versions["hardware"], profile.versions["share"]) == ("NVIDIA H200", "25 %")
    assert body["points"] == len(profile.points) >= 8
    timer = ProfileTimer(profile)
    point = profile.points[-1]
    asked = steps(point.chunk_new, point.chunk_cached, point.decodes, point.decode_context)
    assert float(timer.step_s(asked)[0]) == pytest.approx(point.seconds, rel=1e-2)

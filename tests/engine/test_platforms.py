"""Systems that lack something: simulated by taking it away."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_models import KINDS

from potluck.core.errors import CapacityError
from potluck.engine.compute.executor import RunnerSize
from potluck.engine.numbers.kernels import products
from potluck.engine.serve import _must_fit, _on_signals

FAR_TOO_MANY = RunnerSize(8, 10**9, 1024)


def gone(*_: object) -> None:
    raise ValueError("unrecognized configuration name")


def test_engine_starts_where_the_memory_size_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    model = KINDS["full"].model
    with pytest.raises(CapacityError, match="lower --kv-blocks"):
        _must_fit(model, FAR_TOO_MANY, "cpu")
    monkeypatch.setattr(os, "sysconf", gone)
    _must_fit(model, FAR_TOO_MANY, "cpu")
    monkeypatch.delattr(os, "sysconf")
    _must_fit(model, FAR_TOO_MANY, "cpu")


def test_engine_ends_by_signal_where_event_loops_have_no_signal_handlers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers: dict[int, Callable[..., object]] = {}
    monkeypatch.setattr(signal, "signal", lambda number, call: handlers.update({number: call}))

    async def scenario() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def none(*_: object) -> None:
            raise RuntimeError("not on this system")

        monkeypatch.setattr(loop, "add_signal_handler", none)
        _on_signals(loop, stop.set)
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        await asyncio.wait_for(stop.wait(), 60)

    asyncio.run(scenario())
    assert set(handlers) == {signal.SIGINT, signal.SIGTERM}


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64"), ("win32", "AMD64")]
)
def test_other_processors_have_no_tile_products(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert not products.available()


def test_benchmark_measurements_work_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from parts import common

    here = common.spent_cpu_s(os.getpid())
    monkeypatch.setattr(sys, "platform", "darwin")
    text = {"time": "1-02:03:04.50", "rss": "2048"}
    monkeypatch.setattr(common, "_ps", lambda pid, field: text[field])
    assert common.spent_cpu_s(1) == 86_400 + 2 * 3600 + 3 * 60 + 4.5
    assert common.most_resident_mb(1) == 2.048
    assert here > 0
    assert common.peak_bytes() > 0


def test_quick_benchmark_skips_parts_without_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from parts import common

    budget = common.Budget(True, 5.0)
    assert budget.allows("one", 4.0)
    budget.spend(4.5)
    assert not budget.allows("two", 4.0)
    assert common.Budget(False, 0.0).allows("three", 1e9)
    assert "left out, for lack of time: two" in capsys.readouterr().err
    targets = {"a": (">=", 1.0), "b": (">=", 1.0)}
    common.run("made up", lambda quick: {"a": 2.0}, targets, arguments=["--quick"])
    assert "left out by --quick: b" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no figure for"):
        common.run("made up", lambda quick: {"a": 2.0}, targets, arguments=[])

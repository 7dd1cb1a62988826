"""Whether a machine keeps up with the GPUs that its engines act as, from what they say of their steps."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from potluck.core.errors import FormatError
from potluck.gateway.registry.engine_client import EngineRecord, StatusReport, read_status
from potluck.gateway.registry.engine_list import EngineEntry
from potluck.gateway.registry.health import WINDOW_S, EmulationLag, HealthChecker, slow_lines
from potluck.gateway.values import Address


def test_a_slow_machine_is_told_of_and_a_quick_one_is_not() -> None:
    late = EmulationLag()
    assert slow_lines(late.slowdown) == []
    late.told("a", 5.0, 500.0)
    assert late.slowdown is None, "what an engine did before it was asked is its warming up"
    late.told("a", 6.0, 504.0)
    late.told("b", 0.0, 0.0)
    late.told("b", 1.0, 2.0)
    assert late.slowdown == pytest.approx(3.0), "4 s and 2 s of what should have been 2 s"
    assert slow_lines(late.slowdown) == [
        "this machine computes 3.0 times slower than the GPUs it stands for: "
        "latencies are the CPU's, not the plan's"
    ]
    for second in range(7, 7 + 20 * int(WINDOW_S)):
        late.told("a", float(second), 504.0 + second - 6.0)
    assert late.slowdown == pytest.approx(1.0, abs=0.01), "it keeps up by now"
    assert slow_lines(late.slowdown) == []
    late.told("a", 1.0, 9.0)
    late.told("a", 2.0, 10.0)
    assert late.slowdown == pytest.approx(1.0, abs=0.01), "an engine that was restarted counts from there"


def test_engines_that_compute_for_real_say_nothing_of_it() -> None:
    said = read_status(b'{"state": "ready"}')
    assert (said.predicted_s, said.took_s) == (0.0, 0.0)
    late = EmulationLag()
    for _ in range(3):
        late.told("a", said.predicted_s, said.took_s)
    assert late.slowdown is None
    with pytest.raises(FormatError, match="emulated_took_s"):
        read_status(b'{"state": "ready", "notes": {"emulated_took_s": "long"}}')


def test_the_watch_adds_up_what_engines_say() -> None:
    answers = iter((1.0, 2.0, 3.0))

    async def status(_: EngineRecord) -> StatusReport:
        seconds = next(answers)
        notes = {"emulated_predicted_s": seconds, "emulated_took_s": 2.5 * seconds}
        return read_status(json.dumps({"state": "ready", "notes": notes}).encode())

    registry = SimpleNamespace(caller=SimpleNamespace(status=status), heard=lambda engine: None)
    watch = HealthChecker(registry, lambda event: None, caches=False, planned_gbps={})  # type: ignore[arg-type]
    engine = EngineRecord(EngineEntry("http://h:2", Address("h", 2)))
    for _ in range(3):
        asyncio.run(watch._ask(engine))
    assert watch.lateness.slowdown == pytest.approx(2.5)

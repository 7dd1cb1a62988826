"""Processes that die, stand still and lie, behind a gateway of its own process: every answer is the right one.

A small part of benchmarks/gateway_kill.py, which has the figures.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def kill() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("gateway_kill", ROOT / "benchmarks" / "gateway_kill.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["gateway_kill"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


def test_every_answer_is_right_whatever_becomes_of_engines(kill: ModuleType) -> None:
    """One of three engines lies, another is killed, and started again."""
    load = kill.Load(streams=24, over_s=2.0, prompt=60, output=40, every_s=1.0, most_strikes=1)
    figures = kill.trial("killed, lying", load, ("--pretend",), seed=2, units=kill.WHOLE * 3)
    assert figures["wrong"] == 0
    assert figures["attempts_failed"] > 0, "nothing happened to anybody"

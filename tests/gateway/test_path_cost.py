"""How many steps a request and a token take in the whole gateway: counted, so that no change adds some unseen.

benchmarks/gateway_path.py has the figures; a small part of it runs here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_CALLS, MOST_CALLS_PER_TOKEN = 155, 8
"""Of Python functions, the benchmark's own few included; 137 and 5 when this was written."""


@pytest.fixture(scope="module")
def path() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("gateway_path", ROOT / "benchmarks" / "gateway_path.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["gateway_path"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


def test_a_request_and_a_token_take_few_steps(path: ModuleType) -> None:
    found = path.measure(True)
    assert 50 < found["calls_per_request"] <= MOST_CALLS
    assert 2 < found["calls_per_token"] <= MOST_CALLS_PER_TOKEN

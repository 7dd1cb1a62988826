"""Settings for every test: examples are searched without a deadline, and without chance under CI. The longest begin
first."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "potluck",
    deadline=None,
    max_examples=60,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("potluck")

os.environ["XDG_CONFIG_HOME"] = (CONFIG := tempfile.TemporaryDirectory()).name  # Not a user's.
LONGEST = (
    "docs/test_tutorial.py", "cli/test_demo.py", "hosts/test_hosts.py", "gateway/test_gateway_benchmarks.py",
    "plan/test_strategies.py", "papers/test_cronus.py", "hosts/test_upgrade.py", "docs/test_contributing.py",
    "page/test_page_browser.py", "gateway/test_processes_die.py", "cli/test_up_killed.py", "cli/test_up_demo.py",
    "test_worlds.py", "cli/test_up_operated.py", "vllm_engine/test_vllm_groups.py", "cli/test_up_gpus.py",
)  # fmt: skip
"""Files whose tests start processes and wait for them, or plan much."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers begin with equal parts of the tests, in order, and take from each other's ends: each part has
    some of the longest in front, so that nobody waits for one of them at the end."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    ranks = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in ranks)
    long = [item for item in items if item.path in ranks]
    others = [item for item in items if item.path not in ranks]
    size = -(-len(others) // workers)
    parts = [others[worker * size : (worker + 1) * size] for worker in range(workers)]
    for item in reversed(long):
        parts[ranks[item.path] % workers].insert(0, item)
    items[:] = [item for part in parts for item in part]


def pytest_collection_finish() -> None:
    gc.freeze()  # What tests import stays: whoever looks for garbage need not look at it.
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[None]:
    """Template libraries of tests go to a folder of their own, not to the user's cache; and what is printed is not
    folded to the width of whoever runs them."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.delenv("COLUMNS", raising=False)
        yield

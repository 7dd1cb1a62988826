"""One Ray cluster for all tests of this folder; without Ray they are skipped with the reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_helpers import three_nodes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ray") is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="needs Ray, in an environment of its own: make test-ray")
                )


@pytest.fixture(scope="session")
def cluster() -> Iterator[tuple[Any, dict[str, Any]]]:
    with three_nodes() as result:
        yield result

"""Settings for every test: examples are searched without a deadline, and without chance under CI."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

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


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[None]:
    """Template libraries of tests go to a folder of their own, not to the user's cache; and what is printed is not
    folded to the width of whoever runs them."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.delenv("COLUMNS", raising=False)
        yield

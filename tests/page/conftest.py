"""One browser and one stage for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from page_lab import Lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab()
    made.run(made.open())
    yield made
    made.close()

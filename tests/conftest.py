"""Settings for every test: examples are searched without a deadline, and without chance under CI."""

from __future__ import annotations

import os

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

"""What simulator and gateway share: a plan with what its names mean, a log that replays, one style sheet."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def base_css() -> str:
    """Colours, type, figures, tables and plots; what else a page needs it adds."""
    return resources.files("potluck.runtime").joinpath("data", "base.css").read_text("utf-8")

"""Options that `potluck up` and `up --attach` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of `up` beside its files and the cluster that engines run in."""

    port: int | None
    state: Path | None
    style: Literal["emulated", "mock", "gpu", "vllm"]
    vllm_python: str
    vllm_flags: str
    model: Path | None
    measure: bool
    shares: str
    device: str
    engine_ca: Path | None
    averages: bool
    advise: bool
    market: Path | None
    schedule: Path | None
    policy: tuple[str, ...]
    time_limit_s: float
    check: bool
    within_s: float
    as_json: bool

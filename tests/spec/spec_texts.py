"""A small sound spec as text, and helpers to break it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from potluck.spec.load_spec import parse_spec
from potluck.spec.spec_problems import SpecError, SpecProblem
from potluck.spec.spec_values import Spec

GOOD = """\
models:
  - model: Llama-3.1-8B
    name: chat
    slo: {ttft_ms: 500, tpot_ms: 50}
    traffic:
      rate_per_s: 4
      input: 1024
      output: {mean: 200, cv: 0.5}
fleet:
  regions:
    - name: east
      nodes:
        - node: 2xL40S
          available: 4
          price_usd_per_h: 3.5
        - node: 1xL4
          available: 2
          price_usd_per_h: 0.8
    - name: west
      nodes:
        - {node: 8xH100, available: 1, price_usd_per_h: 20}
links:
  - {between: [east, west], gbps: 10, rtt_ms: 60}
"""


def changed_spec(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def parsed_spec(text: str = GOOD, folder: Path = Path()) -> Spec:
    return parse_spec(text, folder=folder)


def problems_of(text: str | bytes, folder: Path = Path()) -> tuple[SpecProblem, ...]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, folder=folder)
    assert caught.value.problems
    assert all("\n" not in str(problem) for problem in caught.value.problems)
    return caught.value.problems


def only_problem(text: str | bytes, folder: Path = Path()) -> str:
    result = problems_of(text, folder)
    assert len(result) == 1, [str(problem) for problem in result]
    return str(result[0])


def data_folder() -> Path:
    """Where the public traces lie: POTLUCK_DATA, else `shared/data` beside the checkout."""
    return Path(os.environ.get("POTLUCK_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))

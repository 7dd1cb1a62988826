"""A pair of a pool's replicas, tried by itself in simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.cli.common.inputs import load_problem
from potluck.cli.planning.rehearsal import RehearsalOptions, estimate_of
from potluck.core.values.layout import Layout, Stage, StageNode
from potluck.core.values.plan import PlannedReplica
from potluck.core.values.types import Role, Slo
from potluck.rehearse.pair_trials import PairTrial
from potluck.spec.load_spec import parse_spec

SPEC = """\
models:
- model: Llama-2-13B
  name: chat
  slo: {ttft_ms: 2500, tpot_ms: 100}
  traffic: {rate_per_s: 2, input: 900, output: 50}
pool:
  machines:
  - {name: node0, node: 2xA40, price_usd_per_h: 0.8}
  - {name: node1, node: 2xA40, price_usd_per_h: 0.8}
  gbps: 20
"""


def replica(role: Role, machine: str) -> PlannedReplica:
    return PlannedReplica(role, Layout((Stage(40, (StageNode("2xA40", 2, machine),)),)))


@pytest.fixture(scope="module")
def trial() -> PairTrial:
    spec = parse_spec(SPEC)
    made = estimate_of(spec, load_problem(spec, 0.8, None, (), 0.0), RehearsalOptions(attainment="simulated"))
    assert isinstance(made, PairTrial)
    return replace(made, requests=150)


def test_a_pair_keeps_its_objective_until_it_is_asked_for_too_much(trial: PairTrial) -> None:
    prefill, decode = replica("prefill", "node0"), replica("decode", "node1")
    assert trial(prefill, decode, 1.0) == 1.0
    assert trial(prefill, decode, 1.0) == trial(prefill, decode, 1.0)
    assert trial(prefill, decode, 40.0) < 0.5
    both = replica("mixed", "node0")
    assert trial(both, both, 0.5) == 1.0


def test_all_objectives_count(trial: PairTrial) -> None:
    """An answer takes about a second; promised in a tenth of it none is in time, whatever TTFT and TPOT are."""
    slo = Slo(2.5, 0.1, e2e_s=0.1)
    strict = replace(trial, world=replace(trial.world, slos={"chat": slo}))
    assert strict(replica("prefill", "node0"), replica("decode", "node1"), 1.0) == 0.0

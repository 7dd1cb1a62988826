"""Prefill apart from decode, arrivals in bursts: the prefill replica answers too where decoders are full."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.simulating.simulation import SimulationInputs, scene_of
from potluck.core.state.policy import Policy
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.sim.load.workload import at_rate, of_traffic
from potluck.sim.run import simulate

SPEC = """
models:
  - model: Llama-3.1-8B
    slo: {ttft_ms: 2000, tpot_ms: 80}
    traffic: {rate_per_s: 6, input: {mean: 800, cv: 0.8}, output: {mean: 120, cv: 0.7}}
fleet:
  regions:
    - name: east
      nodes:
        - {node: 1xA100-80, available: 1}
        - {node: 1xL4, available: 3}
"""


def test_what_is_planned_is_kept_and_more_is_borne_than_decoders_bear(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    spec = read_spec(path)
    problem = load_problem(spec, 0.8, None, (), 0.0)
    plan = STRATEGIES["coral"](TemplateFactory(problem), SolveSettings()).plan
    used = [plan.template(each.template) for each in plan.deployments]
    roles = {replica.role for template in used for replica in template.replicas}
    assert roles == {"prefill", "decode"}
    resolved, slo = scene_of(SimulationInputs(spec, problem, plan)), spec.models[0].slo
    for rate_per_s, least_per_s in ((6.0, 0.99 * 6.0), (12.0, 9.0)):
        load = at_rate(of_traffic([model.traffic for model in spec.models], 600, 11), rate_per_s)
        seen = simulate(resolved, load, Policy()).records
        gaps = np.maximum(seen.output_tokens - 1, 1)
        soon = seen.first_token_s - seen.arrival_s <= slo.ttft_s
        good = soon & ((seen.finish_s - seen.first_token_s) / gaps <= slo.tpot_s)
        assert good.sum() / len(good) * rate_per_s >= least_per_s

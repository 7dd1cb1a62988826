"""What can be pinned of the papers' experiments without their hardware, and the pages that are written of them."""

from __future__ import annotations

import gzip
from itertools import combinations, islice, product
from pathlib import Path

import numpy as np
import pytest
from papers.coral import CAUCHY, CORAL, HOMO, Solver
from papers.helix import best_flow
from papers.rows import Line, Plot, Reproduction, Row

from papers import (
    cauchy,
    coral_settings,
    cronus,
    pages,
    prfaas,
    prfaas_case,
    thunderserve,
    thunderserve_split,
    together,
    together_simulated,
)
from potluck.core.state.policy import Policy
from potluck.core.values.types import Slo
from potluck.plan.strategies import SolveSettings, TemplateFactory
from potluck.sim.run import simulate


@pytest.mark.slow
def test_corals_core_setting_costs_are_reproduced() -> None:
    """Published: Homo 1.62 and Cauchy 1.60 times Coral, on Qwen3-32B 2.02 and 1.88 times."""
    costs = Solver("core").costs([HOMO, CAUCHY, CORAL], [None])
    assert costs[HOMO] / costs[CORAL] == pytest.approx(1.62, rel=0.1)
    assert costs[CAUCHY] / costs[CORAL] == pytest.approx(1.60, rel=0.1)


def least_cut(placed: list[tuple[int, int, float]], layers: int) -> float:
    """What is the most that flows through (first layer, layers, rate) of nodes, by all cuts."""
    inner = range(1, layers)
    cuts = [{0, *some} for size in range(layers) for some in combinations(inner, size)]
    return min(
        sum(rate for a, j, rate in placed if a + j not in cut and cut & set(range(a, a + j))) for cut in cuts
    )


@pytest.mark.parametrize("seed", range(4))
def test_helix_flow_equals_the_best_of_all_placements(seed: int) -> None:
    """Three nodes of two types, four layers: every placement, each worth its least cut."""
    rates = np.sort(np.random.default_rng(seed).uniform(0.0, 9.0, (2, 4)))[:, ::-1] * [1, 1, 1, 0]
    ranges = [(a, j) for j in (1, 2, 3) for a in range(5 - j)]
    best = max(
        least_cut([(a, j, rates[t, j - 1]) for t, (a, j) in zip((0, 0, 1), chosen, strict=True)], 4)
        for chosen in product(ranges, repeat=3)
    )
    flow = best_flow(rates, [2, 1])
    assert flow.per_s == pytest.approx(best, abs=1e-6)
    assert flow.bound_per_s == pytest.approx(best, rel=1e-3)
    held = [(a, j, rates[t, j - 1] * n) for (t, a, j), n in flow.placed.items()]
    assert least_cut(held, 4) == pytest.approx(best, abs=1e-6)


def test_light_rescheduling_attains_nearly_as_much_as_full_rescheduling() -> None:
    """THUNDERSERVE's Figure 11: none, light, full."""
    rows = thunderserve.losing_a_node("conversation", quick=True)
    kept = {row.metric.removeprefix("attainment, "): row.ours for row in rows if row.unit == "share"}
    assert kept["none"] <= kept["light"] <= kept["full"] < kept["before"]
    assert kept["light"] >= 0.9 * kept["full"]


def test_thunderserve_table_5_does_not_follow_from_its_own_times() -> None:
    assert all(row.ours < 0.7 * (row.published or 0.0) for row in thunderserve.by_its_own_times())


def test_splitting_two_replicas_gains_nothing_in_simulation() -> None:
    """Its Table 5 has 2.04 and 1.36 times."""
    gains = [row.ours for row in thunderserve_split.table_5(48) if row.unit == "times"]
    assert gains[1] < gains[0] < 1.0


def test_coding_workload_needs_more_prefill_replicas_than_conversation() -> None:
    """Its Figures 6 and 14."""
    best = {(row.setting, row.metric): row.ours for row in thunderserve.ratios(list(thunderserve.WORK))[0]}
    metric = "best prefill replicas of 8"
    assert best["coding", metric] > best["conversation", metric]


def test_second_turns_hit_the_prefix_cache_and_half_of_the_prompts_cross() -> None:
    best, lengths = prfaas.case_study()["PrfaaS-PD"], prfaas.case_lengths()
    workload = prfaas_case.conversations(prfaas_case.load(lengths, 2.0, 120.0, 1), 40)
    policy = Policy(admission=False, max_wait_s=1e9)
    result = simulate(prfaas_case.fleet(best, prfaas.case_site()), workload, policy)
    records = result.records
    assert 0.05 < records.cached_tokens.sum() / records.prompt_tokens.sum() < 0.5
    assert {result.replicas[place].region for place in records.prefill_replica} == {"far", "near"}


def test_auto_is_no_worse_than_any_strategy_on_the_first_settings(tmp_path: Path) -> None:
    first = list(islice(together.settings(tmp_path, True), 3))
    found = together.compare_all(first)
    assert all(one.no_worse(name) for one in found for name in one.answers)
    assert "`cauchy`" in together.page(found, "a command")


FOUR_PAIRS = next(one for one in cronus.SETTINGS if one.low == "A30" and "Qwen" in one.name)


@pytest.mark.slow
def test_cheaper_auto_plan_attains_its_objective_given_enough_nodes() -> None:
    """Four pairs of A100 and A30: `auto` costs a fifth less than any single strategy. A third of it does not do."""
    usd = {f"1x{gpu}": (price, 4) for gpu, price in (("A100-80", 1.35), ("A30", 0.3))}
    planning_problem = together.one_model(FOUR_PAIRS.model, Slo(3.0, 0.1), 30.0, cronus.MEAN_TOKENS, usd)
    plans = [
        together.STRATEGIES[way](TemplateFactory(planning_problem), SolveSettings(20.0)).plan
        for way in ("cauchy", "auto")
    ]
    done, holds = together_simulated.simulated(planning_problem, plans, most=False, least=1000)
    assert holds == (plans[1].cost_usd_per_h < plans[0].cost_usd_per_h)
    assert done[1].holds
    few = together.times(planning_problem, 3.0)
    assert not together_simulated.simulated(few, plans, most=False, least=1000)[1]


def test_bound_proves_an_optimal_plan_and_shows_the_gap_of_a_dear_one() -> None:
    nodes = {node: (usd, 8) for node, usd in cauchy.PRICES_USD_PER_H.items() if node.startswith("1x")}
    planning_problem = together.one_model(
        cauchy.MODEL, cauchy.LOADS[0].slo, 16.0, cauchy.LOADS[0].mean_tokens, nodes
    )
    factory = TemplateFactory(planning_problem)
    auto, dear = (together.STRATEGIES[way](factory, SolveSettings(20.0)).plan for way in ("auto", "cauchy"))
    assert together.proven_gap(factory, auto) < together.EQUAL
    assert together.proven_gap(factory, dear) == pytest.approx(1 - auto.cost_usd_per_h / dear.cost_usd_per_h)


def test_short_availability_trace_becomes_shares_of_each_type(tmp_path: Path) -> None:
    head = "kind,nodes_probed,campaign,zone,device,gap_seconds,start_tick,run_length_ticks,value"
    rows = [head, *(f"availability,16-node,c,z,v100_1,360,{n},1,{n % 17}" for n in range(100))]
    with gzip.open(tmp_path / coral_settings.TRACE, "wt", encoding="utf-8") as stream:
        stream.write("\n".join(rows))
    there = coral_settings.availability(coral_settings.problem("core"), tmp_path, 0)
    first = [next(iter(shares.values())) for shares in there.shares]
    assert first == [(n + 1) / 17 for n in range(coral_settings.EPOCHS)]


def test_written_paper_page_keeps_its_head_and_replaces_its_tables(tmp_path: Path) -> None:
    (tmp_path / "paper.md").write_text("# PAPER\n\nWords.\n\n", "utf-8")
    plot = Plot("Figure 1", "x", "y", (Line("a", (0.0, 1.0), (1.0, 2.0)),))
    found = Reproduction("PAPER", (Row("Figure 1", "s", "m", "u", 4.0, 5.0, "why"),), (plot,))
    for _ in range(2):
        text = pages.write(tmp_path, found, "a command").read_text("utf-8")
    assert text.startswith("# PAPER\n\nWords.\n\n## Its experiments beside ours")
    assert text.count("| s | m, u | 4 | 5 | 1.25 |") == 1
    assert "Made by `a command`" in text
    assert (tmp_path / "paper-figure-1.svg").read_text("utf-8").startswith("<svg")

"""What can be pinned of the papers' experiments without their hardware, and the pages that are written of them."""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path

import pytest
from papers.coral import CAUCHY, CORAL, HOMO, Solver
from papers.rows import Line, Plot, Reproduction, Row

from papers import coral_settings, pages, prfaas, prfaas_case, thunderserve, together
from potluck.core.state.policy import Policy
from potluck.sim.run import simulate


def test_corals_core_setting_costs_what_it_did() -> None:
    """Published: Homo 1.62 and Cauchy 1.60 times Coral, on Qwen3-32B 2.02 and 1.88 times."""
    costs = Solver("core").costs([HOMO, CAUCHY, CORAL], [None])
    assert costs[HOMO] / costs[CORAL] == pytest.approx(1.62, rel=0.1)
    assert costs[CAUCHY] / costs[CORAL] == pytest.approx(1.60, rel=0.1)


def test_light_rescheduling_comes_near_full_with_small_groups() -> None:
    """THUNDERSERVE's Figure 11: none, light, full."""
    rows = thunderserve.losing_a_node("conversation", quick=True)
    kept = {row.metric.removeprefix("attainment, "): row.ours for row in rows if row.unit == "share"}
    assert kept["none"] <= kept["light"] <= kept["full"] < kept["before"]
    assert kept["light"] >= 0.9 * kept["full"]


def test_table_5_of_thunderserve_does_not_follow_from_its_own_times() -> None:
    assert all(row.ours < 0.7 * (row.published or 0.0) for row in thunderserve.by_its_own_times())


def test_a_second_turn_finds_the_first_and_half_of_the_prompts_cross() -> None:
    best, lengths = prfaas.case_study()["PrfaaS-PD"], prfaas.case_lengths()
    made = prfaas_case.conversations(prfaas_case.load(lengths, 2.0, 120.0, 1), 40)
    policy = Policy(admission=False, max_wait_s=1e9)
    result = simulate(prfaas_case.fleet(best, prfaas.case_site()), made, policy)
    records = result.records
    assert 0.05 < records.cached_tokens.sum() / records.prompt_tokens.sum() < 0.5
    assert {result.replicas[place].region for place in records.prefill_replica} == {"far", "near"}


def test_auto_is_no_worse_than_any_strategy_on_the_first_settings(tmp_path: Path) -> None:
    first = list(islice(together.settings(tmp_path, True), 3))
    found = together.compare_all(first)
    assert all(one.no_worse(name) for one in found for name in one.answers)
    assert "`cauchy`" in together.page(found, "a command")


def test_a_short_trace_becomes_shares_of_each_type(tmp_path: Path) -> None:
    head = "kind,nodes_probed,campaign,zone,device,gap_seconds,start_tick,run_length_ticks,value"
    rows = [head, *(f"availability,16-node,c,z,v100_1,360,{n},1,{n % 17}" for n in range(100))]
    with gzip.open(tmp_path / coral_settings.TRACE, "wt", encoding="utf-8") as stream:
        stream.write("\n".join(rows))
    there = coral_settings.availability(coral_settings.problem("core"), tmp_path, 0)
    first = [next(iter(shares.values())) for shares in there.shares]
    assert first == [(n + 1) / 17 for n in range(coral_settings.EPOCHS)]


def test_a_page_keeps_its_head_and_replaces_its_tables(tmp_path: Path) -> None:
    (tmp_path / "paper.md").write_text("# PAPER\n\nWords.\n\n", "utf-8")
    plot = Plot("Figure 1", "x", "y", (Line("a", (0.0, 1.0), (1.0, 2.0)),))
    found = Reproduction("PAPER", (Row("Figure 1", "s", "m", "u", 4.0, 5.0, "why"),), (plot,))
    for _ in range(2):
        text = pages.write(tmp_path, found, "a command").read_text("utf-8")
    assert text.startswith("# PAPER\n\nWords.\n\n## Its experiments beside ours")
    assert text.count("| s | m, u | 4 | 5 | 1.25 |") == 1
    assert "Made by `a command`" in text
    assert (tmp_path / "paper-figure-1.svg").read_text("utf-8").startswith("<svg")

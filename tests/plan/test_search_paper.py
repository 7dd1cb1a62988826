"""THUNDERSERVE's plans (its Tables 3 and 5) with the GPU figures of its Table 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from papers.peak_costs import PeakCosts
from search_pools import CLOUD, CODING, CONVERSATION, catalog_node, paper_node, paper_pool, workload

from potluck.core.values.types import Slo
from potluck.perf.step_timer import steps
from potluck.plan.search.tabu import SearchLimits, SearchResult, SearchSettings, search
from potluck.plan.search.workload import CalibratedCosts, LayerTiming, uniform_pool

PAPER = SearchSettings(phases=("prefill", "decode"), timing=PeakCosts(), limits=SearchLimits(walks=4))
ACROSS = ((0, 2), (1, 2))


@pytest.mark.parametrize(("timing", "vendor"), [(PeakCosts(), False), (CalibratedCosts(), True)])
def test_table_5_phases_of_thunderserve_are_found_for_fast_and_thin_links(
    timing: LayerTiming, vendor: bool
) -> None:
    """Fast links: the A40s prefill, the 3090Tis decode. Thin ones: KV stays inside the instances.

    The table has no output length, but one request's 1126 ms of decoding on four 3090Ti: each cost model gets the
    length that takes it so long.
    """
    members = [
        catalog_node(gpu, f"RTX{gpu}" if gpu == "3090Ti" else gpu, 4) if vendor else paper_node(gpu, gpu, 4)
        for gpu in ("A40", "3090Ti")
    ]
    model = workload().model
    one = steps(decodes=np.ones(1), decode_context=np.full(1, 1024.0))
    layer_s, rest_s = timing.parts(model, members[1].type, 4, one)
    output = round(1.126 / float(layer_s[0] * model.layer_count + rest_s[0]))
    work = workload(lengths=(1024, output), rate_per_s=100.0, slo=Slo(10.0, 0.2))
    fast, thin = (
        search(uniform_pool(members, gbps), work, replace(PAPER, timing=timing)).state for gbps in (40.0, 5.0)
    )
    assert {(group.phase, node) for group in fast.groups for node, _ in group.takes} == {(0, 0), (1, 1)}
    assert fast.idle == ()
    assert sorted(group.phase for group in thin.groups) == [0, 1]
    assert all(group.takes == ACROSS for group in thin.groups)


def prefilling(search_result: SearchResult, gpu: str) -> int:
    mine = [place for place, (name, _) in enumerate(CLOUD) if name == gpu]
    taken = [group.takes for group in search_result.state.groups if group.phase == 0]
    return sum(count for takes in taken for place, count in takes if place in mine)


def test_table_3_phase_counts_of_thunderserve_follow_the_workload() -> None:
    settings = SearchSettings(phases=PAPER.phases, timing=PAPER.timing, limits=PAPER.limits, max_group_gpus=4)
    plans = [search(paper_pool(), workload(lengths=item), settings) for item in (CONVERSATION, CODING)]
    conversation, coding = ([group.phase for group in plan.state.groups] for plan in plans)
    assert conversation.count(1) > conversation.count(0)
    assert coding.count(0) > coding.count(1)
    assert prefilling(plans[0], "A40") == 8
    assert prefilling(plans[0], "3090Ti") == 0

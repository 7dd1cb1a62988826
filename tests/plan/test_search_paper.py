"""THUNDERSERVE's plans (its Tables 3 and 5) with the GPU figures of its Table 1."""

from __future__ import annotations

import pytest
from search_pools import CLOUD, CODING, CONVERSATION, paper_pool, workload

from potluck.core.types import Slo
from potluck.plan.search.costs import Peak
from potluck.plan.search.tabu import Found, Limits, Settings, search

PAPER = Settings(phases=("prefill", "decode"), timing=Peak(), limits=Limits(walks=4))
ACROSS = ((0, 2), (1, 2))


@pytest.mark.parametrize(
    ("gbps", "plan"),
    [(40.0, {(0, ((0, 4),)), (1, ((1, 4),))}), (5.0, {(0, ACROSS), (1, ACROSS)})],
)
def test_table_5(gbps: float, plan: set[tuple[int, object]]) -> None:
    """Fast links: the A40s prefill, the 3090Tis decode. Thin ones: KV stays inside the instances."""
    pool = paper_pool((("A40", 4), ("3090Ti", 4)), gbps)
    work = workload(lengths=(1024, 64), rate_per_s=100.0, slo=Slo(10.0, 0.2))
    found = search(pool, work, PAPER)
    assert {(group.phase, group.takes) for group in found.state.groups} == plan


def prefilling(found: Found, gpu: str) -> int:
    mine = [place for place, (name, _) in enumerate(CLOUD) if name == gpu]
    taken = [group.takes for group in found.state.groups if group.phase == 0]
    return sum(count for takes in taken for place, count in takes if place in mine)


def test_table_3_in_groups_of_four() -> None:
    settings = Settings(phases=PAPER.phases, timing=PAPER.timing, limits=PAPER.limits, max_group_gpus=4)
    plans = [search(paper_pool(), workload(lengths=each), settings) for each in (CONVERSATION, CODING)]
    conversation, coding = ([group.phase for group in plan.state.groups] for plan in plans)
    assert conversation.count(1) > conversation.count(0)
    assert coding.count(0) > coding.count(1)
    assert prefilling(plans[0], "A40") == 8
    assert prefilling(plans[0], "3090Ti") == 0

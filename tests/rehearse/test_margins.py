"""Queueing margins of plans against theory."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rehearse_builders import SETTINGS, a_problem, melange

from potluck.plan.strategies import TemplateFactory
from potluck.rehearse.queueing_margins import G_PREFILL, DeploymentQueue, _late_share, queues_of

PROBLEM = a_problem()
ASK = PROBLEM.demands[0]
QUEUE = DeploymentQueue("prefill", 1, 0.7, 0.1, 1.0, 0.0, 0.0, 0.3, 1.0)


def test_queue_margin_of_one_server_follows_m_m_1() -> None:
    """M/M/1: P(wait > w) = u exp(-(1 - u) w / S), but for the fitted factor in the exponent."""
    left_s = 0.9 * ASK.slo.ttft_s - QUEUE.own_s
    assert _late_share(QUEUE, ASK, 1.0, 1.0) == pytest.approx(0.7 * exp(-G_PREFILL * 0.3 * left_s / 0.1))


@given(
    st.builds(
        DeploymentQueue,
        st.sampled_from(["closed", "prefill", "decode"]),
        st.integers(1, 20),
        st.floats(0.01, 1.2),
        st.floats(0.01, 3.0),
        st.floats(0.0, 3.0),
        st.floats(0.5, 60.0),
        st.floats(0.5, 200.0),
        st.floats(0.01, 2.0),
        st.just(1.0),
    ),
    st.floats(0.0, 5.0),
    st.floats(1.0, 3.0),
)
def test_queue_margin_improves_with_headroom_and_even_arrivals(
    queue: DeploymentQueue, cv: float, more: float
) -> None:
    seen = _late_share(queue, ASK, cv, 1.0)
    assert 0.0 <= seen <= 1.0
    assert _late_share(queue, ASK, cv, more) <= seen + 1e-9
    assert _late_share(queue, ASK, cv + 1.0, 1.0) >= seen - 1e-9
    if queue.phase != "decode":
        assert _late_share(replace(queue, servers=2 * queue.servers), ASK, cv, 1.0) <= seen + 1e-9


def test_plan_queues_have_the_planned_utilization_and_cover_all_requests() -> None:
    queues = list(queues_of(PROBLEM, melange(TemplateFactory(PROBLEM), SETTINGS).plan, ASK))
    assert sum(queue.share for queue in queues) == pytest.approx(1.0)
    assert all(0 < queue.busy <= PROBLEM.headroom + 1e-6 for queue in queues)

"""Prices and nodes that change: the Brain is told once a moment, and the planner sees the moment."""

from __future__ import annotations

import pytest
from sim_fleets import SLOW, closed_plan, load, mixed, problem
from sim_minds import Around, requests

from potluck.core.state.actions import Action
from potluck.core.state.events import Event, MarketReported
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Deployment, Plan
from potluck.core.values.types import NodeOffer
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.faults import Faults, PriceChange, SupplyChange
from potluck.sim.world.plan_question import PlanQuestion

FAST_NODE, SLOW_NODE = "1xH100-SXM", "1xL4"
PLAN = closed_plan((mixed(), "east", 2))
MARKET = Faults(
    prices=(
        PriceChange(300.0, "east", FAST_NODE, 9.0),
        PriceChange(300.0, "east", SLOW_NODE, 0.1),
        PriceChange(600.0, "east", SLOW_NODE, 0.2),
    ),
    availability=(SupplyChange(300.0, "east", FAST_NODE, 1, notice_s=20.0),),
)


def offer(moment: PlanQuestion, node: str) -> NodeOffer:
    found = next(region for region in moment.regions if region.name == "east").offer(node)
    assert found is not None
    return found


def test_the_planner_sees_the_moment_and_what_is_left() -> None:
    asked: list[PlanQuestion] = []

    def planner(moment: PlanQuestion) -> Plan:
        asked.append(moment)
        return closed_plan((mixed(), "east", 1), (mixed(SLOW), "east", 1))

    result = simulate(
        problem(PLAN),
        load(1300, 2.0),
        Policy(scaling="replan", replan_s=400.0),
        faults=MARKET,
        planner=planner,
        settings=SimSettings(planner_s=30.0),
    )
    assert [moment.at_s for moment in asked] == [300.0, 600.0], "at once, not with the next interval"
    first, later = asked
    assert (offer(first, FAST_NODE).price_usd_per_h, offer(first, FAST_NODE).available) == (9.0, 1)
    assert offer(first, SLOW_NODE).price_usd_per_h == 0.1
    assert first.running.deployments == (Deployment(PLAN.templates[0].name, "east", 2),)
    counts = {each.template: each.count for each in later.running.deployments}
    assert counts == {PLAN.templates[0].name: 1, mixed(SLOW).name: 1}, "one machine went, and one was started"
    (began,) = [replica for replica in result.replicas if replica.began_s > 0]
    (ready_s,) = [at_s for at_s, state, _ in began.changes if state == "ready"]
    assert summarise(result).start_usd == pytest.approx(0.1 * (ready_s - began.began_s) / 3600), (
        "at 0.1 an hour"
    )


def test_the_brain_is_told_once_for_all_that_changes_in_a_moment() -> None:
    told: list[tuple[float, MarketReported]] = []

    class Listening(Around):
        def on(self, at_s: float, event: Event) -> list[Action]:
            if isinstance(event, MarketReported):
                told.append((at_s, event))
            return self.brain.on(at_s, event)

    result = simulate(
        problem(PLAN),
        load(1300, 2.0),
        faults=MARKET,
        mind=lambda replica_models, policy: Listening(replica_models.facts(), policy),
    )
    assert [at_s for at_s, _ in told] == [300.0, 600.0]
    assert len(result.replicas) == 2, "nothing is started where there is no machine"


def test_what_is_drained_for_a_new_plan_ends_its_answers() -> None:
    """CORAL 5.1: an instance that goes shuts down once its requests complete, however long they take."""
    moved = closed_plan((mixed(SLOW), "east", 1))
    steady = [(float(at_s), 200, 5) for at_s in range(0, 700, 10)]
    work = requests(*sorted([*steady, (395.0, 200, 12_000)]))
    result = simulate(
        problem(closed_plan((mixed(), "east", 1))),
        work,
        Policy(scaling="replan"),
        faults=Faults(prices=(PriceChange(300.0, "east", FAST_NODE, 99.0),)),
        planner=lambda moment: moved,
    )
    old = result.replicas[0]
    drained_s, stopped_s = (at_s for at_s, state, _ in old.changes if state in ("draining", "stopped"))
    (long,) = [place for place, tokens in enumerate(work.output_tokens) if tokens == 12_000]
    assert 395.0 < drained_s < stopped_s - 40.0
    assert result.records.finish_s[long] == pytest.approx(stopped_s)
    assert (result.records.attempts == 1).all()

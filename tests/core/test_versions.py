"""Replicas whose caches cross in unlike versions: each answers whole requests, none hands over to the other."""

from __future__ import annotations

import brain_builders as build
import pytest

from potluck.core.state.actions import Run
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan

FIRST = build.template("first", ("prefill",), prefill=(1.0,))
SECOND = build.template("second", ("decode",), decode=(1.0,))
COMBO = build.template("combo", ("prefill", "decode"), "combo", closed=(1.0,))
PAIR = build.template("pair", ("prefill", "mixed"), "pair", closed=(1.0,))


def flow(source: str) -> Plan:
    counts = {("first", source): 1, ("second", "near"): 1}
    shares: dict[tuple[str, str, build.Phase], tuple[float, ...]] = {
        ("first", source, "prefill"): (1.0,),
        ("second", "near", "decode"): (1.0,),
    }
    return build.plan((FIRST, SECOND), counts, shares, {("m", source, "near"): (1.0,)}, (100_000,))


def closed(name: str) -> Plan:
    template = COMBO if name == "combo" else PAIR
    return build.plan(
        (template,), {(name, "near"): 1}, {(name, "near", "closed"): (1.0,)}, longest=(100_000,)
    )


PLANS = {"flow": flow("near"), "crossing": flow("far"), "combo": closed("combo"), "pair": closed("pair")}


def replicas_of(plan: Plan, versions: tuple[int, int]) -> list[tuple[str, ...]]:
    """Where 12 requests are sent, when the plan's two replicas have these versions."""
    world = build.world(plan, Policy(opportunistic=False), ready=False)
    names = list(world.brain.fleet.views)
    for name, version in zip(names, versions, strict=True):
        world.make_ready(name, version)
    found = []
    for place in range(12):
        (run,) = world.arrive(build.request(f"r{place}", prompt=3000))
        assert isinstance(run, Run)
        found.append(tuple(each.replica for each in run.route.segments))
        world.finish(f"r{place}")
    build.assert_at_rest(world.brain)
    return found


@pytest.mark.parametrize("kind", PLANS)
def test_who_agrees_hands_over_and_who_does_not_answers_alone(kind: str) -> None:
    alike = replicas_of(PLANS[kind], (2, 2))
    assert any(len(each) == 2 for each in alike), "nothing is handed over even where all agree"
    answers = {each[-1] for each in alike if len(each) == 2}
    unlike = replicas_of(PLANS[kind], (2, 3))
    assert all(len(each) == 1 for each in unlike)
    assert answers <= {each[0] for each in unlike}, "whoever was to answer does so still"

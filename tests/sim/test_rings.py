"""Replicas that hand over to each other, whoever to whom and with more than they can hold: all are answered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_fleets import closed_plan, mixed, problem
from sim_minds import Fixed, requests

from potluck.core.state.actions import Action, Run
from potluck.core.state.events import AttemptFailed, Event, RequestArrived
from potluck.core.values.route import aggregated, handed_over
from potluck.sim.links import handovers
from potluck.sim.results.records import ANSWERED
from potluck.sim.run import build, result_of
from potluck.sim.sim_settings import SimSettings
from potluck.sim.world.invariants import check
from potluck.sim.world.world import SimWorld

MIXED = mixed().name + "@east"
BLOCKS = 70
"""For one prompt of 1,000 tokens at a time."""


class Along(Fixed):
    """Each request is computed by one and answered by another, as told; who fails is run by one alone."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        super().__init__(lambda tokens: None)
        self.pairs = pairs
        self.failed: list[tuple[float, AttemptFailed]] = []

    def on(self, at_s: float, event: Event) -> list[Action]:
        if isinstance(event, RequestArrived):
            name, tokens = event.request.id, event.request.prompt_tokens
            first, second = (f"{MIXED}#{each}/0" for each in self.pairs[int(name)])
            return [Run(name, handed_over(first, second, tokens), 0, tokens, 0)]
        if isinstance(event, AttemptFailed):
            self.failed.append((at_s, event))
            return [Run(event.request, aggregated(event.where), 1, 1000, 0)]
        return super().on(at_s, event)


def ran(pairs: list[tuple[int, int]], prompts: list[int], overlap: bool) -> tuple[SimWorld, Along]:
    mind = Along(pairs)
    work = requests(*((0.01 * place, prompt, 20) for place, prompt in enumerate(prompts)))
    world = build(
        problem(closed_plan((mixed(), "east", 4))),
        work,
        settings=SimSettings(overlap=overlap),
        mind=lambda replica_models, policy: mind,
    )
    for key, replica_model in world.replica_models.replica_models.items():
        world.replica_models.replica_models[key] = replace(replica_model, total_blocks=BLOCKS)
    world.run()
    assert check(world) == []
    assert (result_of(world, 0).records.outcome == ANSWERED).all()
    return world, mind


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_ring_of_replicas_that_are_all_full_goes_on(length: int, overlap: bool) -> None:
    pairs = [(place % length, (place + 1) % length) for place in range(40)]
    world, mind = ran(pairs, [1000] * 40, overlap)
    assert world.handovers.waited
    assert mind.failed == []


graph = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 3)).map(lambda pair: (pair[0], (pair[0] + pair[1]) % 4)),
    min_size=5,
    max_size=40,
)


@settings(max_examples=30, deadline=None)
@given(graph, st.booleans(), st.data())
def test_whoever_hands_over_to_whom_all_are_answered(
    pairs: list[tuple[int, int]], overlap: bool, data: st.DataObject
) -> None:
    prompts = data.draw(st.lists(st.integers(200, 1080), min_size=len(pairs), max_size=len(pairs)))
    assert ran(pairs, prompts, overlap)[1].failed == []


@pytest.mark.skipif(
    not handovers.__file__.endswith(".py"), reason="constants of compiled code stay as they are"
)
def test_where_nothing_can_be_put_aside_somebody_gives_up_and_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handovers, "OUTBOX_BYTES", 0)
    pairs = [(place % 3, (place + 1) % 3) for place in range(12)]
    _, mind = ran(pairs, [1000] * 12, overlap=False)
    assert {event.kind for _, event in mind.failed} == {"memory"}
    assert mind.failed[0][0] == pytest.approx(handovers.STUCK_S, abs=1.5)

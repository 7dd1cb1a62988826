"""Users with places and classes in simulation: drawn as often as asked for, seen as late as they are far."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sim_fleets import closed_plan, mixed, problem

from potluck.core.state.policy import Policy
from potluck.core.values.types import LengthBin, Traffic
from potluck.sim.load.workload import of_traffic
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate

TRAFFIC = Traffic(
    "chat",
    4.0,
    (LengthBin(200, 30, 1.0),),
    classes=(("interactive", 0.3), ("batch", 0.2)),
    origins=(("europe", 0.75), ("asia", 0.25)),
)


def test_classes_and_origins_are_drawn_by_their_shares() -> None:
    made = of_traffic([TRAFFIC], 4000, 7)
    labels = made.labels
    assert labels is not None
    assert labels.classes == ("interactive", "batch", "standard")
    assert np.bincount(labels.request_class) / 4000 == pytest.approx([0.3, 0.2, 0.5], abs=0.03)
    assert np.bincount(labels.from_origin) / 4000 == pytest.approx([0.75, 0.25], abs=0.03)
    plain = of_traffic([replace(TRAFFIC, classes=(), origins=())], 4000, 7)
    assert plain.labels is None
    assert (plain.arrival_s == made.arrival_s).all()
    assert (plain.prompt_tokens == made.prompt_tokens).all()


def test_first_tokens_are_seen_as_late_as_users_are_far() -> None:
    resolved = problem(closed_plan((mixed(), "east", 2)))
    load = of_traffic([TRAFFIC], 300, 1)
    near = simulate(resolved, load, Policy(admission=False), seed=1)
    rtt_s = {("europe", "east"): 0.1, ("asia", "east"): 0.3}
    far = simulate(replace(resolved, rtt_s=rtt_s), load, Policy(admission=False), seed=1)
    labels = far.records.labels
    assert labels is not None
    later = np.where(labels.from_origin == 0, 0.1, 0.3)
    assert far.records.first_token_s == pytest.approx(near.records.first_token_s + later)
    assert far.records.finish_s == pytest.approx(near.records.finish_s + later)
    classes = {each.model: each for each in summarise(far).classes}
    assert set(classes) == {"interactive", "batch", "standard"}
    assert all(each.attainment is not None for each in classes.values())

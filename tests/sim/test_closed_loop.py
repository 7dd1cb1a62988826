"""The default balance in a simulated world: replicas slower than planned, links slower than planned."""

from __future__ import annotations

import numpy as np
import sim_fleets as fleets

from potluck.core.brain.brain import Brain
from potluck.core.state.policy import Policy
from potluck.runtime.decider import Decider
from potluck.runtime.replica_models import ReplicaModels
from potluck.sim.results.metrics import judge
from potluck.sim.results.records import SimResult
from potluck.sim.run import simulate
from potluck.sim.world.faults import Fault, Faults

FOUR = fleets.problem(fleets.closed_plan((fleets.mixed(), "east", 4)))
ACROSS = fleets.problem(
    fleets.flow_plan((fleets.prefill_only(), "west", 2), (fleets.decode_only(), "east", 2)), gbps=100.0
)


def attainment(result: SimResult) -> float:
    found = judge(result.records, result.slos, result.end_s)
    return float(found.met.sum() / found.judged.sum())


def test_paces_come_to_the_true_ones_and_a_slow_replica_gets_what_it_can_do() -> None:
    brains: list[Brain] = []

    def mind(replica_models: ReplicaModels, policy: Policy) -> Decider:
        brains.append(Brain(replica_models.facts(), policy))
        return brains[0]

    slow = Faults((Fault(0.0, "slow", replica="*#0/0", factor=3.0),))
    result = simulate(FOUR, fleets.load(1500, 40.0, seed=3), faults=slow, mind=mind)
    paces = {name: view.pace for name, view in brains[0].fleet.views.items()}
    hers = next(name for name in paces if "#0/" in name)
    others = [pace for name, pace in paces.items() if name != hers]
    assert 2.4 < paces[hers] / np.mean(others) < 3.6
    assert max(others) / min(others) < 1.2
    sent = np.bincount(result.records.decode_replica)
    assert sent[0] < 0.6 * sent[1:].mean()
    assert attainment(result) > 0.99
    assert (
        attainment(simulate(FOUR, fleets.load(1500, 40.0, seed=3), Policy(balance="goodput"), faults=slow))
        < 0.9
    )


def test_a_slow_link_is_no_worse_than_a_dead_one() -> None:
    requests = fleets.load(400, 14.0, seed=2)
    found = {}
    for factor in (0.3, 0.1, 0.02, 0.0):
        fault = Fault(8.0, "link", source="west", target="east", factor=factor, duration_s=15.0)
        found[factor] = attainment(simulate(ACROSS, requests, faults=Faults((fault,))))
    assert min(found.values()) >= found[0.0] - 0.005, found
    assert found[0.0] > 0.99


def test_the_same_run_learns_the_same() -> None:
    faults = Faults((Fault(1.0, "slow", replica="*", factor=2.0, duration_s=5.0),))
    once, again = (simulate(FOUR, fleets.load(300, 30.0, blocks=5), faults=faults) for _ in range(2))
    assert (once.records.finish_s == again.records.finish_s).all()
    assert (once.records.decode_replica == again.records.decode_replica).all()

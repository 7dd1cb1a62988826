"""Brains that die during a simulation: each successor continues the open requests."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pytest
from sim_fleets import closed_plan, combo, decode_only, flow_plan, load, mixed, pair, prefill_only, problem

from potluck.core.brain.brain import Brain
from potluck.core.state.actions import Abort, Action, Refuse, Run, StartReplica
from potluck.core.state.events import (
    AttemptFailed,
    Event,
    FirstToken,
    PlanReceived,
    ReplicaReady,
    RequestAdopted,
    RequestArrived,
    RequestFinished,
    SegmentDone,
)
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.route import handed_over
from potluck.core.values.types import Request
from potluck.runtime.brain_log import LoggedBrain
from potluck.runtime.replay import replay
from potluck.runtime.replica_models import ReplicaModels
from potluck.sim.results.records import ANSWERED
from potluck.sim.run import simulate


@dataclass
class OpenRequests:
    request: Request
    run: Run | None = None
    going: bool = False
    streamed: int = 0
    done: int = 0
    first: bool = False

    def told(self) -> Event:
        if self.run is None:
            return RequestArrived(self.request)
        if not self.going:
            return RequestAdopted(self.request, self.run.attempt, self.streamed, None)
        run = self.run
        return RequestAdopted(
            self.request, run.attempt, run.streamed_tokens, run.route, self.done, self.first
        )


class MortalBrain:
    """Dies behind every so many events, and stands up as another."""

    def __init__(self, replica_models: ReplicaModels, policy: Policy, every: int) -> None:
        self._kits, self._policy, self._every = replica_models, policy, every
        self.brain = Brain(replica_models.facts(), policy)
        self.deaths = self._heard = 0
        self._known: dict[str, OpenRequests] = {}
        self._ready: list[str] = []
        self._plan: Plan | None = None
        self.adopted = 0

    def on(self, at_s: float, event: Event) -> list[Action]:
        self._note(event)
        actions = self._noted(self.brain.on(at_s, event))
        self._heard += 1
        if self._heard % self._every == 0 and self._plan is not None:
            actions += self._die(at_s)
        return actions

    def _note(self, event: Event) -> None:
        match event:
            case PlanReceived(plan):
                self._plan = plan
            case ReplicaReady(replica):
                self._ready.append(replica)
            case RequestArrived(request):
                self._known[request.id] = OpenRequests(request)
            case SegmentDone(request, _, place):
                self._known[request].done = place + 1
            case FirstToken(request, _):
                self._known[request].first = True
            case AttemptFailed(request, _, _, _, streamed):
                known = self._known[request]
                known.going, known.streamed = False, streamed
            case RequestFinished(request, _, _):
                del self._known[request]
            case _:
                pass

    def _noted(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Run):
                known = self._known[action.request]
                known.run, known.going, known.done, known.first = action, True, 0, False
            elif isinstance(action, Refuse):
                self._known.pop(action.request, None)
            else:
                assert not isinstance(action, Abort), "nothing fails here"
        return actions

    def _die(self, at_s: float) -> list[Action]:
        assert self._plan is not None
        self.deaths += 1
        known = {replica_state.member for replica_state in self.brain.fleet.views.values()}
        self.brain = Brain(self._kits.facts(), self._policy)
        started = self.brain.on(at_s, PlanReceived(self._plan))
        assert {each.member for each in started if isinstance(each, StartReplica)} == known, "the same names"
        actions: list[Action] = []
        for replica in self._ready:
            actions += self._noted(self.brain.on(at_s, ReplicaReady(replica)))
        for item in list(self._known.values()):
            event = item.told()
            self.adopted += isinstance(event, RequestAdopted)
            actions += self._noted(self.brain.on(at_s, event))
        return actions


PLANS = {
    "whole": closed_plan((mixed(), "east", 3)),
    "combo": closed_plan((combo(1, 2), "east", 2)),
    "pair": closed_plan((pair(), "east", 2)),
    "flow": flow_plan((prefill_only(), "west", 2), (decode_only(), "east", 2)),
}


@pytest.mark.parametrize("every", [7, 50])
@pytest.mark.parametrize("name", PLANS)
def test_successor_brains_answer_every_request_once(name: str, every: int) -> None:
    """The simulator's own books must balance as well; `simulate` sees to that."""
    minds: list[MortalBrain] = []

    def mind(replica_models: ReplicaModels, policy: Policy) -> MortalBrain:
        minds.append(MortalBrain(replica_models, policy, every))
        return minds[-1]

    work = load(150, 8.0, seed=every)
    records = simulate(problem(PLANS[name]), work, Policy(admission=False), mind=mind).records
    assert records.outcome.tolist() == [ANSWERED] * 150
    assert np.array_equal(records.streamed_tokens, work.output_tokens)
    assert records.attempts.max() == 1, "nothing was sent twice: it went on where it was"
    (mortal,) = minds
    assert mortal.deaths > 3
    assert mortal.adopted > mortal.deaths, "some were under way at most deaths"
    for replica in mortal.brain.fleet.views.values():
        assert (replica.open_requests, replica.open_prefill_tokens, replica.open_context_tokens) == (0, 0, 0)


def test_log_with_adopted_requests_replays() -> None:
    """The successor's own log: what it was told, adoptions included, gives the same actions again."""
    plan, policy = PLANS["combo"], Policy()
    replica_models = ReplicaModels(problem(plan))
    replica_models.learn(plan)
    out = io.StringIO()
    logged = LoggedBrain(Brain(replica_models.facts(), policy), out, replica_models.facts(), policy)
    members = [
        item.member.id for item in logged.on(0.0, PlanReceived(plan)) if isinstance(item, StartReplica)
    ]
    for replica in members:
        logged.on(0.1, ReplicaReady(replica))
    request = Request("r", "chat", 0.0, 100, 20)
    logged.on(0.2, RequestAdopted(request, 1, 4, handed_over(members[0], members[1], 104), 1, False))
    logged.on(0.3, RequestAdopted(Request("s", "chat", 0.0, 100, 20), 2, 5, None))
    logged.on(0.4, AttemptFailed("r", 1, "replica", members[1], 9))
    result = replay(io.StringIO(out.getvalue()), Brain)
    assert (result.difference, result.runs) == ("", 1)
    assert result.actions > len(members)

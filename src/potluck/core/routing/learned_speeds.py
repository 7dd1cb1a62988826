"""How fast replicas are in truth, learned from when their requests end: the plan's facts are the prior.

    pace = (PRIOR_S + sum of observed) / (PRIOR_S + sum of planned)      older ones count ever less

Observed is the time from first to last token, or from sending a prompt until it is computed; planned is what the
facts say for it. One that is much slower (or faster) several times in a row has changed: its past is forgotten."""

from __future__ import annotations

from math import inf
from typing import Final

from potluck.core.routing.balance import decode_seconds
from potluck.core.state.facts import BLOCK_TOKENS, FleetFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.request_state import RequestState

FADE_S: Final = 10.0  # A replica without news for so long is believed half as much.
FEW: Final = 8
SAMPLE: Final = 4
TIMED: Final = 64
"""With fewer than FEW open requests all count for a pace, else one in SAMPLE; up to TIMED are timed for changes."""
ROOMY: Final = 0.8  # Share of its KV that may be spoken for where prompts are not waiting for memory.
ANSWERS: Final = 32


class LearnedSpeeds:
    """What is learned; changed by the Brain as requests go on and end. Paces are kept on the views."""

    def __init__(self, facts: FleetFacts, fleet: FleetState, learns: bool) -> None:
        self._models = facts.models
        self._fleet = fleet
        self._learns = learns  # Otherwise all are as planned.
        self._answers: dict[str, float] = {}
        self._prompts: dict[str, float] = {}  # The same of the prompts that were answered.

    def wait_s(self, replica: ReplicaState) -> float:
        """Until a request sent there now would be computed: prompts before it, and places in a full batch."""
        facts = replica.facts
        if facts is None:
            return 0.0
        wait_s = replica.open_prefill_tokens * facts.prefill_s_per_token
        over = replica.open_requests - facts.decode_batch
        if over > 0:
            wait_s += over * decode_seconds(facts, round(self.answer_tokens(replica.member.model, 1 << 20)))
        return wait_s * replica.pace

    def answer_tokens(self, model: str, most: int) -> float:
        return min(most, self._answers.get(model, inf))

    def prompt_tokens(self, model: str) -> float:
        """How long prompts were lately; 0 before any was answered."""
        return self._prompts.get(model, 0.0)

    # As requests go on.

    def began(self, at_s: float, request: RequestState, replica: ReplicaState) -> None:
        """What a replica does for a request from now on is timed; of very many at once, one in SAMPLE will do."""
        if self._learns and (replica.open_requests < TIMED or replica.done_prompts % SAMPLE == 0):
            request.watched_s = at_s
            request.watched = (replica.done_s, replica.done_prompts, replica.open_requests)

    def computed(self, at_s: float, request: RequestState, replica: ReplicaState) -> None:
        """A prompt was computed where it is answered: tells if the replica has changed, unless memory was short."""
        planned_s, sent_s = self._planned_s(request, replica), request.sent[0]
        request.sent = (-1.0, 0.0, 0)
        if planned_s >= 0:
            self._fleet.learn(at_s, replica, at_s - sent_s, planned_s, False)
            if request.charges:
                _time(request)

    def _planned_s(self, request: RequestState, replica: ReplicaState) -> float:
        """For all that a replica computed since a request was sent there; below 0: tells nothing."""
        _, done_s, prompts = request.sent
        facts = replica.facts
        if not self._learns or facts is None or replica.open_requests > facts.decode_batch:
            return -1.0
        if replica.open_context_tokens > ROOMY * facts.total_blocks * BLOCK_TOKENS:
            return -1.0
        steps = replica.done_prompts - prompts + 1
        return replica.done_s - done_s + steps * facts.batch_step_s(replica.open_requests)

    def handed(self, at_s: float, request: RequestState, replica: ReplicaState, tells: bool = True) -> None:
        """A timed prompt was computed, or handed on; between regions a link takes its time, which tells nothing."""
        if tells:
            done_s, prompts, others = request.watched
            counts = others < FEW or prompts % SAMPLE == 0
            self._fleet.learn(at_s, replica, at_s - request.watched_s, replica.done_s - done_s, counts)
            _time(request)
        request.watched_s = -1.0

    def ended(self, at_s: float, request: RequestState, output_tokens: int) -> None:
        self.answered(request, output_tokens)
        replica = request.last
        if replica is None or replica.facts is None:
            return
        done_s, prompts, others = request.watched
        steps = output_tokens - request.streamed_tokens - 1 - (replica.done_prompts - prompts)
        planned_s = replica.done_s - done_s
        if steps > 0:
            planned_s += steps * replica.facts.batch_step_s(0.5 * (others + replica.open_requests))
        counts = others < FEW or prompts % SAMPLE == 0
        self._fleet.learn(at_s, replica, at_s - request.watched_s, planned_s, counts)
        if not counts:
            return
        facts, gaps = self._models.get(request.request.model), output_tokens - request.streamed_tokens - 1
        if facts is not None and facts.slo is not None and gaps > 0:
            self._fleet.answered(replica, at_s - request.watched_s > gaps * facts.slo.tpot_s)
        _time(request)

    def came_whole(self, request: RequestState, output_tokens: int) -> None:
        """Nobody saw its first token: how long it took says nothing of its tokens, but its prompt was computed."""
        self.answered(request, output_tokens)
        if request.last is not None and request.last_tokens:
            self._fleet.prefilled(request.last, request.last_tokens)
            request.last_tokens = 0

    def answered(self, request: RequestState, output_tokens: int) -> None:
        if not self._learns:
            return
        model = request.request.model
        mean = self._answers.get(model, float(output_tokens))
        self._answers[model] = mean + (output_tokens - mean) / ANSWERS
        prompt_tokens = float(request.prompt_tokens)
        mean = self._prompts.get(model, prompt_tokens)
        self._prompts[model] = mean + (prompt_tokens - mean) / ANSWERS

    def faded(self, at_s: float) -> list[ReplicaState]:
        """Believe less of what was heard long ago; those whose pace fell."""
        return [
            replica
            for replica in self._fleet.views.values()
            if replica.planned_s > 0
            and at_s - replica.learned_s >= FADE_S
            and self._fleet.fade(at_s, replica)
        ]


def _time(request: RequestState) -> None:
    for target, _ in request.charges:
        target.timed()

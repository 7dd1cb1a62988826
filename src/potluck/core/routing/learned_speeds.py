"""Learned replica speeds: what requests took, against the plan's facts as the prior.

    pace = (PRIOR_S + sum of observed) / (PRIOR_S + sum of planned)      older observations count less

Observed is the time from first to last token, or from dispatch until a prompt is computed; planned is the time that
the facts give for it. After several observations far from its pace a replica has changed: its past is reset."""

from __future__ import annotations

from math import inf
from typing import Final

from potluck.core.routing.balance import decode_seconds
from potluck.core.state.facts import BLOCK_TOKENS, FleetFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.request_state import RequestState

STALE_AFTER_S: Final = 10.0  # Without observations for so long, the learned pace counts half as much.
SAMPLE_FROM_REQUESTS: Final = 8
SAMPLE_EVERY: Final = 4
MAX_TIMED_REQUESTS: Final = 64
"""Below SAMPLE_FROM_REQUESTS open requests every one counts for the pace, above it one in SAMPLE_EVERY; with up to
MAX_TIMED_REQUESTS open, all are timed to detect changes."""
# Share of the KV memory that may be allocated while prompts do not wait for memory.
FREE_MEMORY_KV_SHARE: Final = 0.8
MEAN_OVER_REQUESTS: Final = 32


class LearnedSpeeds:
    """The learned state; the Brain updates it as requests progress and end. Paces are kept on the ReplicaStates."""

    def __init__(self, facts: FleetFacts, fleet: FleetState, learns: bool) -> None:
        self._models = facts.models
        self._fleet = fleet
        self._learns = learns  # If False, paces stay as planned.
        self._answer_tokens: dict[str, float] = {}
        self._prompt_tokens: dict[str, float] = {}  # Mean prompt tokens of answered requests, by model.

    def wait_s(self, replica: ReplicaState) -> float:
        """Seconds until a request sent there now would be computed: queued prompts, and requests beyond the planned
        batch."""
        facts = replica.facts
        if facts is None:
            return 0.0
        wait_s = replica.open_prefill_tokens * facts.prefill_s_per_token
        excess_requests = replica.open_requests - facts.decode_batch
        if excess_requests > 0:
            wait_s += excess_requests * decode_seconds(
                facts, round(self.answer_tokens(replica.member.model, 1 << 20))
            )
        return wait_s * replica.pace

    def answer_tokens(self, model: str, max_tokens: int) -> float:
        return min(max_tokens, self._answer_tokens.get(model, inf))

    def prompt_tokens(self, model: str) -> float:
        """Mean recent prompt length of a model in tokens; 0 before any was answered."""
        return self._prompt_tokens.get(model, 0.0)

    # As requests go on.

    def began(self, at_s: float, request: RequestState, replica: ReplicaState) -> None:
        """Start timing a replica on a request; with many open requests only one in SAMPLE_EVERY is timed."""
        if self._learns and (
            replica.open_requests < MAX_TIMED_REQUESTS or replica.done_prompts % SAMPLE_EVERY == 0
        ):
            request.timed_since_s = at_s
            request.timing_start = (replica.done_s, replica.done_prompts, replica.open_requests)

    def computed(self, at_s: float, request: RequestState, replica: ReplicaState) -> None:
        """A prompt was computed on its decode replica. The time shows whether the replica has changed, unless
        memory was short."""
        planned_s, sent_s = self._planned_s(request, replica), request.sent[0]
        request.sent = (-1.0, 0.0, 0)
        if planned_s >= 0:
            self._fleet.learn(at_s, replica, at_s - sent_s, planned_s, False)
            if request.added_loads:
                _update_target_paces(request)

    def _planned_s(self, request: RequestState, replica: ReplicaState) -> float:
        """Planned seconds of all that a replica computed since the request was sent there, with `more` decode
        steps; below 0 when the time says nothing about its speed."""
        _, done_s, done_prompts = request.sent
        facts = replica.facts
        if not self._learns or facts is None or replica.open_requests > facts.decode_batch:
            return -1.0
        if replica.open_context_tokens > FREE_MEMORY_KV_SHARE * facts.total_blocks * BLOCK_TOKENS:
            return -1.0
        steps = replica.done_prompts - done_prompts + 1
        return replica.done_s - done_s + steps * facts.batch_step_s(replica.open_requests)

    def handed(self, at_s: float, request: RequestState, replica: ReplicaState, tells: bool = True) -> None:
        """A timed prompt was computed or handed over. `tells`: its time counts; the time of a link between regions
        does not."""
        if tells:
            done_s, prompts, others = request.timing_start
            counts = others < SAMPLE_FROM_REQUESTS or prompts % SAMPLE_EVERY == 0
            self._fleet.learn(at_s, replica, at_s - request.timed_since_s, replica.done_s - done_s, counts)
            _update_target_paces(request)
        request.timed_since_s = -1.0

    def ended(self, at_s: float, request: RequestState, output_tokens: int) -> None:
        self.answered(request, output_tokens)
        replica = request.last
        if replica is None or replica.facts is None:
            return
        done_s, prompts, others = request.timing_start
        steps = output_tokens - request.streamed_tokens - 1 - (replica.done_prompts - prompts)
        planned_s = replica.done_s - done_s
        if steps > 0:
            planned_s += steps * replica.facts.batch_step_s(0.5 * (others + replica.open_requests))
        counts = others < SAMPLE_FROM_REQUESTS or prompts % SAMPLE_EVERY == 0
        self._fleet.learn(at_s, replica, at_s - request.timed_since_s, planned_s, counts)
        if not counts:
            return
        facts, gaps = self._models.get(request.request.model), output_tokens - request.streamed_tokens - 1
        if facts is not None and facts.slo is not None and gaps > 0:
            self._fleet.observe_answer(replica, at_s - request.timed_since_s > gaps * facts.slo.tpot_s)
        _update_target_paces(request)

    def finished_untimed(self, request: RequestState, output_tokens: int) -> None:
        """An answer arrived whole: its decode time is unknown, but its prompt was computed."""
        self.answered(request, output_tokens)
        if request.last is not None and request.last_tokens:
            self._fleet.prefilled(request.last, request.last_tokens)
            request.last_tokens = 0

    def answered(self, request: RequestState, output_tokens: int) -> None:
        if not self._learns:
            return
        model = request.request.model
        mean = self._answer_tokens.get(model, float(output_tokens))
        self._answer_tokens[model] = mean + (output_tokens - mean) / MEAN_OVER_REQUESTS
        prompt_tokens = float(request.prompt_tokens)
        mean = self._prompt_tokens.get(model, prompt_tokens)
        self._prompt_tokens[model] = mean + (prompt_tokens - mean) / MEAN_OVER_REQUESTS

    def decay_stale(self, at_s: float) -> list[ReplicaState]:
        """Halve the weight of stale observations; returns the replicas whose pace fell."""
        return [
            replica
            for replica in self._fleet.views.values()
            if replica.planned_s > 0
            and at_s - replica.learned_s >= STALE_AFTER_S
            and self._fleet.decay(at_s, replica)
        ]


def _update_target_paces(request: RequestState) -> None:
    for target, _ in request.added_loads:
        target.update_paces()

"""What balances by load count for a request: where, how much, until when.

    token         all of its tokens where it decodes, and along a flow its prompt where that is computed
    least-work    seconds of its prompt and of its part of the decode steps, by the facts
    learned       the same, with answers as long as they were lately; a prompt counts until it is computed

`RequestState.charges` remembers them, so that what is taken off is what was put on.
"""

from __future__ import annotations

from potluck.core.routing.balance import decode_seconds, prefill_seconds
from potluck.core.routing.learned_speeds import LearnedSpeeds
from potluck.core.routing.routing_table import RoutingTable
from potluck.core.routing.targets import Target
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState


class LoadAccounting:
    """Puts them on targets; the Brain takes them off."""

    def __init__(self, policy: Policy, table: RoutingTable, speeds: LearnedSpeeds) -> None:
        self._table = table
        self._speeds = speeds
        self._in_tokens = policy.balance == "token"
        self._learns = policy.balance == "learned"

    def whole(
        self,
        req: RequestState,
        target: Target,
        tokens: int,
        firsts: list[ReplicaState],
        seconds: list[ReplicaState],
    ) -> None:
        """All of a request on one target. Where speeds are learned, prompt and answer apart, as they end apart."""
        loads: tuple[float, ...]
        if self._in_tokens:
            loads = (float(req.total_tokens),)
        elif self._learns and seconds[0].facts is None:
            loads = (0.0, self._table.request_s(target) or 1.0)
        else:
            first_s = _prefill_s(firsts[0], tokens) / len(firsts)
            rest_s = _decode_s(seconds[0], self._answer_tokens(req)) / len(seconds)
            loads = (first_s, rest_s) if self._learns else (first_s + rest_s,)
        req.charges = tuple([(target, load) for load in loads])
        for load in loads:
            target.load += load

    def plain(self, req: RequestState, target: Target, view: ReplicaState) -> None:
        """The same on a single replica that computes all of the prompt: most requests, so written out."""
        facts = view.facts
        if facts is None or not self._learns:
            self.whole(req, target, req.prompt_tokens, [view], [view])
            return
        first_s = prefill_seconds(facts, req.prompt_tokens)
        answer_tokens = self._speeds.answer_tokens(req.request.model, req.output_tokens)
        rest_s = answer_tokens * facts.decode_step_s / max(1, facts.decode_batch)
        target.load += first_s
        target.load += rest_s
        req.charges = ((target, first_s), (target, rest_s))

    def flow(self, req: RequestState, first: Target, second: Target, tokens: int) -> None:
        """The prompt on one target, the answer on another."""
        assert first.view is not None
        assert second.view is not None
        loads = (float(tokens), float(req.total_tokens))
        if not self._in_tokens:
            answer_tokens = self._answer_tokens(req)
            loads = (_prefill_s(first.view, tokens), _decode_s(second.view, answer_tokens))
        req.charges = ((first, loads[0]), (second, loads[1]))
        for target, load in req.charges:
            target.load += load

    def _answer_tokens(self, req: RequestState) -> float:
        most = req.output_tokens
        return self._speeds.answer_tokens(req.request.model, most) if self._learns else most


def _prefill_s(view: ReplicaState, tokens: int) -> float:
    return prefill_seconds(view.facts, tokens) if view.facts is not None else float(tokens)


def _decode_s(view: ReplicaState, tokens: float) -> float:
    return decode_seconds(view.facts, tokens) if view.facts is not None else float(tokens)

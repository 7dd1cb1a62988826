"""Attempts that went silent: they are asked after, never guessed about.

Only the driver knows how much of an answer has reached its user. So when an attempt should have been heard of and
was not, the Brain asks (`QueryAttempt`), and the driver says what became of it: `Finished`, `Failed` with what was
streamed, or `Underway`. Should even that stay out, the request is refused: sent again it might repeat tokens that
the user has.

Asked after is an attempt whose replica was lost or stopped, when `Failed` did not come within `FAILED_S` (and the
notice that the loss came with); one of which nothing was heard for `SILENCE_S`; and, at once, one that is recalled
from a slow link (`recovery.py`).
"""

from __future__ import annotations

from typing import Final

from potluck.core.state.actions import Action, QueryAttempt
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.request_state import RUNNING, RequestState

FAILED_S: Final = 5.0
"""From the loss of a replica to the word that its requests failed."""
SILENCE_S: Final = 900.0
ANSWER_S: Final = 5.0
"""From a question to its answer; then it is asked again."""
QUESTIONS: Final = 3
"""That many stay without an answer before a request is given up."""
LOOKS: Final = 256
"""Open requests looked at for silence in one tick: what a tick costs does not grow with them."""


class AttemptQueries:
    """What was asked, and what to ask next. Changed by the Brain alone."""

    __slots__ = ("_asked", "_gone", "_open", "_round")

    def __init__(self, requests: dict[str, RequestState]) -> None:
        self._open = requests
        self._gone: list[tuple[float, ReplicaState]] = []
        """Replicas that are gone, and by when their requests should be known to have failed."""
        self._asked: dict[str, tuple[int, int, float]] = {}
        """Request to (attempt, questions so far, when the answer is overdue)."""
        self._round: list[str] = []
        """Those still to be looked at in this round."""

    def __len__(self) -> int:
        return len(self._asked) + len(self._gone)

    def gone(self, until_s: float, view: ReplicaState) -> None:
        """A replica went, or goes at a time that was told; then its requests fail, and that is to be heard soon."""
        if view.open_requests:
            self._gone.append((until_s + FAILED_S, view))

    def underway(self, at_s: float, req: RequestState) -> None:
        """It goes on. If its replica was said to be gone, that may be wrong, and is asked about again later."""
        req.heard_s = at_s
        if self._asked.pop(req.request.id, None) is not None:
            self._asked[req.request.id] = (req.attempt, 0, at_s + FAILED_S)

    def ask(self, at_s: float, req: RequestState) -> Action:
        """What became of an attempt that is abandoned: its driver stops it, and then says where its user is."""
        return self._ask(at_s, req, 0)

    def tick(self, at_s: float) -> tuple[list[Action], list[RequestState]]:
        """Questions to ask now, and requests of which nobody knows anything."""
        actions: list[Action] = []
        hopeless: list[RequestState] = []
        for name, (attempt, questions, due_s) in list(self._asked.items()):
            req = self._open.get(name)
            if req is None or req.attempt != attempt or req.state != RUNNING:
                del self._asked[name]
            elif due_s <= at_s:
                if questions == 0 and not self._orphan(req):
                    del self._asked[name]
                elif questions >= QUESTIONS:
                    del self._asked[name]
                    hopeless.append(req)
                else:
                    actions.append(self._ask(at_s, req, questions))
        silent = [each for each in self._silent(at_s) if each.state == RUNNING and each not in hopeless]
        actions += [self._ask(at_s, each, 0) for each in silent if each.request.id not in self._asked]
        return actions, hopeless

    def _silent(self, at_s: float) -> list[RequestState]:
        due = {view for due_s, view in self._gone if due_s <= at_s}
        if due:
            self._gone = [each for each in self._gone if each[1] not in due]
            return [req for req in self._open.values() if not due.isdisjoint(req.views())]
        if not self._round:
            self._round = list(self._open)
        names, self._round = self._round[-LOOKS:], self._round[:-LOOKS]
        looked = [self._open.get(name) for name in names]
        return [each for each in looked if each is not None and at_s - each.heard_s >= SILENCE_S]

    def _ask(self, at_s: float, req: RequestState, questions: int) -> Action:
        self._asked[req.request.id] = (req.attempt, questions + 1, at_s + ANSWER_S)
        return QueryAttempt(req.request.id, req.attempt)

    @staticmethod
    def _orphan(req: RequestState) -> bool:
        """Whether one of its replicas is no longer in the fleet."""
        return any(view.gone for view in req.views())

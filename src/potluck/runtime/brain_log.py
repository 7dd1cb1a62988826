"""A log of every event told and every action asked for, which replays (`replay.py`).

JSON lines, the same from a simulation and from a live gateway. A header has the facts and the policy; each other line
is `[time, event, actions]` (`lines.py`). A header says what begins with it: `run` a new Brain, whose time starts at 0
again, `facts` only that more is known from here on, since a later plan brought templates that were not known before,
`state` a piece of a live log (`pieces.py`) that can be read without those before it: it has the Brain as it is there
(`checkpoint.py`). So a gateway that starts again goes on writing to the same file, and old pieces can be dropped. A
live header also says when its time 0 was.

Nothing that was asked or answered is in a log: prompts are numbers of tokens and the names of their blocks, which are
hashes. Tenants, models and replicas appear by their names.
"""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import IO, Any, Literal

from potluck.core.codec import encode
from potluck.core.state.actions import Action
from potluck.core.state.events import Event, PlanReceived
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.runtime.brain_checkpoint import NotPlain, checkpoint
from potluck.runtime.decider import Decider
from potluck.runtime.log_files import LogFiles
from potluck.runtime.log_lines import dumps, line

FORMAT, VERSION = "potluck.log", 4
FLUSH_S = 1.0
"""A live log is this far behind at most: what a killed gateway loses of it."""
STATE_S = 900.0
"""A piece that begins so long after the last state has one: all else waits while it is written down."""

Begins = Literal["run", "facts", "state"]


class LoggedBrain:
    """A Brain whose talk is written down.

    `zero_utc_s` is the wall clock at time 0, of a live log. With `flush_s` what was written reaches the operating
    system whenever an event is told so much later than at the last time; whoever serves tells a Tick now and then.
    When writing fails, the log ends there and `trouble` says why: to serve matters more than to write about it.
    """

    def __init__(
        self,
        mind: Decider,
        out: IO[str] | LogFiles,
        facts: FleetFacts,
        policy: Policy,
        *,
        zero_utc_s: float | None = None,
        flush_s: float = inf,
    ) -> None:
        self._mind, self._on = mind, mind.on
        self._out = out
        self._facts = facts
        self._policy = policy
        self._zero_utc_s = zero_utc_s
        self._flush_s = flush_s
        self._flushed_s = self._state_s = 0.0
        self._known = -1
        self._body: dict[str, Any] = {}
        self.trouble = ""
        """Why nothing is written any more; empty while all is well."""

    def on(self, at_s: float, event: Event) -> list[Action]:
        if len(self._facts.replicas) != self._known or type(event) is PlanReceived:
            self._head()
        answer = self._on(at_s, event)
        if not self.trouble:
            try:
                self._out.write(line(at_s, event, answer))
                if at_s - self._flushed_s >= self._flush_s:
                    self._flushed_s = at_s
                    self._out.flush()
                if isinstance(self._out, LogFiles) and self._out.full and self._out.cut():
                    self._begin_piece(at_s)
            except OSError as error:
                self._failed(error)
        return answer

    def _begin_piece(self, at_s: float) -> None:
        """Its first line."""
        begins: Begins = "facts"
        state = None
        if at_s - self._state_s >= STATE_S:
            with suppress(NotPlain):
                state = checkpoint((self._mind, self._facts))
                begins, self._state_s = "state", at_s
        self._out.write(header(self._facts, self._policy, begins, self._zero_utc_s, state))

    def close(self) -> None:
        """Everything reaches the file."""
        try:
            self._out.close()
        except OSError as error:
            self._failed(error)

    def _head(self) -> None:
        """What is known, where it is more than the log says so far."""
        body = facts_body(self._facts)
        if body == self._body:
            return
        begins: Begins = "facts" if self._body else "run"
        self._known, self._body = len(self._facts.replicas), body
        if not self.trouble:
            try:
                self._out.write(header(self._facts, self._policy, begins, self._zero_utc_s))
            except OSError as error:
                self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.trouble = self.trouble or f"the log ends here: {error.strerror or error}"


def header(
    facts: FleetFacts,
    policy: Policy,
    begins: Begins = "run",
    zero_utc_s: float | None = None,
    state: object = None,
) -> str:
    """The line that says what all others rest on."""
    start = {"format": FORMAT, "version": VERSION, "begins": begins, "zero_utc_s": zero_utc_s}
    has = {} if state is None else {"state": state}
    return dumps(start | {"policy": encode(policy)} | facts_body(facts) | has) + "\n"


def facts_body(facts: FleetFacts) -> dict[str, Any]:
    """The facts as plain values."""
    return {
        "models": {name: encode(each) for name, each in facts.models.items()},
        "replicas": [[*key, encode(each)] for key, each in facts.replicas.items()],
        "splits": {name: encode(each) for name, each in facts.splits.items()},
        "links": [[*ends, gbps] for ends, gbps in facts.links_gbps.items()],
        "regions": [encode(region) for region in facts.regions],
        "history": {name: list(rates) for name, rates in facts.history.items()},
        "places": [[*key, list(each)] for key, each in facts.places.items()],
        "zones": dict(facts.zones),
        "groups": {name: encode(each) for name, each in facts.groups.items()},
    }

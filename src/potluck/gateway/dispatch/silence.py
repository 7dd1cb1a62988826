"""How long an engine's silence is borne: from what it does otherwise, generously, and within bounds.

Several times a second every engine that owes something is looked at:

    it is not in the directory any more, and says nothing       GONE_S
    whoever keeps the fleet says that it is gone or silent      HEARD_S, or a few of its usual gaps
    answers flow, and then none of them does                    FACTOR times its usual gap, LEAST_S to MOST_S
    only prompts are under way, and nothing is heard            FACTOR times what such prompts take, LEAST_FIRST_S to
                                                                MOST_FIRST_S
    one answer stands still while others go on                  ALONE times as long
    a prompt is computed, and its cache does not arrive         HANDOVER_S

An engine that owes nothing is never late: its answer is paused, or it waits for a cache that another one computes.
When this process itself was held up, the time is not counted: what engines said meanwhile has not been read yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf

from potluck.core.state.events import FailureKind
from potluck.gateway.registry.directory import ReplicaDirectory

SWEEP_S = 0.25
FACTOR = 25.0
LEAST_S, MOST_S = 2.0, 30.0
LEAST_FIRST_S, MOST_FIRST_S = 10.0, 120.0
ALONE = 5.0
"""One that has no blocks left may set an answer aside for a while."""
GONE_S = 1.0
HEARD_S, GAPS = 0.5, 3.0
HANDOVER_S = 60.0
START_GAP_S, START_TOKEN_S = 0.2, 2e-3
RECENT = 16
"""What was observed lately counts as much as so many observations."""


class AwaitingReply(ABC):
    pulse: EnginePulse | None = None
    owes = False
    flows = False
    since_s = 0.0
    """Since when it owes, or last was read again."""
    heard_s = 0.0
    until_s = inf
    """When something that it need not do by itself must have happened: a cache was fetched."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    @abstractmethod
    def stalled(self, kind: FailureKind) -> None:
        """Nothing was heard for too long: its engine is dead (`replica`), or only this one is (`timeout`)."""

    @abstractmethod
    def undelivered(self) -> None:
        """Its cache was not fetched in time."""

    # What it says of itself.

    def expect(self, now_s: float) -> None:
        self.owes = True
        self.since_s = self.heard_s = now_s

    def rest(self) -> None:
        self.owes = False

    def hear(self, now_s: float) -> None:
        pulse = self.pulse
        if pulse is not None:
            pulse.heard_s = now_s
            if self.flows and self.owes:
                pulse.gap_s += (now_s - self.heard_s - pulse.gap_s) / RECENT
        self.heard_s = now_s

    def computed(self, now_s: float) -> None:
        pulse = self.pulse
        if pulse is not None and self.owes:
            took_s = (now_s - self.since_s) / max(self.tokens, 1)
            pulse.token_s += (took_s - pulse.token_s) / RECENT


class EnginePulse:
    __slots__ = ("debtors", "gap_s", "heard_s", "replica", "token_s")

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.debtors: dict[AwaitingReply, None] = {}
        self.heard_s = -inf
        self.gap_s = START_GAP_S
        self.token_s = START_TOKEN_S

    @property
    def gap_limit_s(self) -> float:
        return min(MOST_S, max(LEAST_S, FACTOR * self.gap_s))

    def first_limit_s(self, tokens: int) -> float:
        return min(MOST_FIRST_S, max(LEAST_FIRST_S, FACTOR * self.token_s * tokens))


class SilenceMonitor:
    def __init__(
        self,
        directory: ReplicaDirectory,
        now_s: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._directory = directory
        self._now_s = now_s
        self._later = later
        self._pulses: dict[str, EnginePulse] = {}
        self._open = 0
        self._armed = False
        self._swept_s = 0.0

    def __len__(self) -> int:
        return self._open

    def join(self, debtor: AwaitingReply, replica: str, now_s: float) -> None:
        pulse = self._pulses.get(replica)
        if pulse is None:
            pulse = self._pulses[replica] = EnginePulse(replica)
        debtor.pulse = pulse
        debtor.since_s = debtor.heard_s = now_s
        pulse.debtors[debtor] = None
        self._open += 1
        if not self._armed:
            self._armed = True
            self._swept_s = now_s
            self._later(SWEEP_S, self.sweep)

    def leave(self, debtor: AwaitingReply) -> None:
        pulse, debtor.pulse = debtor.pulse, None
        if pulse is not None:
            del pulse.debtors[debtor]
            self._open -= 1

    def gone(self, replica: str) -> None:
        """Whoever keeps the fleet says that it is gone, or silent. Where its answers flow, that is not believed."""
        pulse = self._pulses.get(replica)
        if pulse is not None and self._now_s() - pulse.heard_s > max(HEARD_S, GAPS * pulse.gap_s):
            _stall(list(pulse.debtors), "replica")

    def sweep(self) -> None:
        now_s = self._now_s()
        late_s = now_s - self._swept_s - SWEEP_S
        self._swept_s = now_s
        if late_s > SWEEP_S:
            self._excuse(late_s)
        for replica, pulse in list(self._pulses.items()):
            if pulse.debtors:
                self._look(now_s, pulse)
            elif self._directory.find(replica) is None:
                del self._pulses[replica]
        self._armed = self._open > 0
        if self._armed:
            self._later(SWEEP_S, self.sweep)

    def _excuse(self, late_s: float) -> None:
        for pulse in self._pulses.values():
            pulse.heard_s += late_s
            for debtor in pulse.debtors:
                debtor.since_s += late_s
                debtor.heard_s += late_s
                debtor.until_s += late_s

    def _look(self, now_s: float, pulse: EnginePulse) -> None:
        debtors = list(pulse.debtors)
        silent_s = now_s - max(pulse.heard_s, min(each.since_s for each in debtors))
        if silent_s > GONE_S and self._directory.find(pulse.replica) is None:
            _stall(debtors, "replica")
            return
        owing = [each for each in debtors if each.owes]
        flowing = [each for each in owing if each.flows]
        gap_s = pulse.gap_limit_s
        first_s = pulse.first_limit_s(sum(each.tokens for each in owing if not each.flows))
        limit_s, asked = (gap_s, flowing) if flowing else (first_s, owing)
        if asked and now_s - max(pulse.heard_s, min(each.since_s for each in asked)) > limit_s:
            _stall(debtors, "replica")
            return
        for each in owing:
            alone_s = ALONE * gap_s if each.flows else max(first_s, MOST_FIRST_S)
            if now_s - each.heard_s > alone_s:
                _stall([each], "timeout")
        for each in debtors:
            if now_s > each.until_s and each.pulse is pulse:
                each.undelivered()


def _stall(debtors: list[AwaitingReply], kind: FailureKind) -> None:
    for each in debtors:
        if each.pulse is not None:  # One that fails may take others of its request with it.
            each.stalled(kind)

"""Plays the acts of a day, one after the other, and says on the page what happens and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from demo.acts import (
    FAR,
    LAB,
    LEAST_USD,
    LINK,
    RATE_PER_S,
    SHOP,
    Act,
    ActEvidence,
    DemoControls,
    FleetLook,
    LoggedDecision,
    chosen,
    decided_since,
    look_at,
    not_shown,
)
from demo.traffic import (
    DemoTraffic,
    Phase,
    RequestCounts,
    SentRequest,
    attainment_text,
    counted,
    ended_first,
    limited,
)
from potluck.control.gateway_client import GatewayAway
from potluck.core.values.types import Slo

LOOK_S = 0.4
PATIENCE_S = 180.0
"""So long an act waits at most for its moment, for its answer to show, and for its requests to end. All three are
conditions, so a slow machine only takes longer."""
EARLIER = 1 / 3  # Of an act's time, in which is seen how things are without it, where that is told.
MOST_WORDS = 400
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ActOutcome:
    """What one act showed."""

    act: Act
    shown: bool
    chosen: str
    result: str  # In sentences.
    saved_usd_per_h: float
    lasted_s: float
    moved: int
    replicas: tuple[int, int]  # Ready before and after.
    usd_per_h: tuple[float, float]
    counts: RequestCounts = RequestCounts()
    """Of all requests that were sent during the act: the only figures of it that are printed anywhere."""


@dataclass(slots=True)
class Player:
    """`play` runs in a thread of its own; `stopped` ends it early."""

    means: DemoControls
    traffic: DemoTraffic
    slo: Slo
    least_s: float  # An act lasts so long, whether its answer showed sooner or not.
    said: Callable[[str], None]
    stopped: Callable[[], bool]
    near_usd_per_h: float = 0.0  # As `ActEvidence` has it.
    window_s: float = 0.0  # As `ActEvidence` has it.
    outcomes: list[ActOutcome] = field(default_factory=list)
    _last: int = 0

    def play(self, acts: Sequence[Act]) -> None:
        self.traffic.start()
        try:
            for act in acts:
                if self.stopped():
                    return
                self.outcomes.append(self._one(act))
        finally:
            self.traffic.ask("", ())
            self.traffic.close(wait=not self.stopped())

    def _one(self, act: Act) -> ActOutcome:
        client = self.means.client
        before = self._moment(act)
        began_s = time.monotonic()
        self.said(f"{act.title}: {act.happens}")
        patient(lambda: client.note(act.title, act.happens, "act"))
        victim = patient(lambda: act.begin(self.means, before))
        until_s = began_s + self.least_s + PATIENCE_S
        while True:
            evidence = self._answer(act, before, victim, began_s, until_s)
            lasted_s = time.monotonic() - began_s
            evidence, counts = self._with_all_ended(act, evidence)
            shown = act.shown(evidence)
            if shown or self.stopped() or time.monotonic() >= until_s:
                break
        outcome = ActOutcome(
            act,
            shown,
            chosen(act, evidence),
            act.result(evidence) if shown else not_shown(evidence),
            max(0.0, act.saved_usd_per_h(evidence)) if shown else 0.0,
            lasted_s,
            evidence.moved,
            (len(before.ready()), len(evidence.now.ready())),
            (before.usd_per_h, evidence.now.usd_per_h),
            counts,
        )
        self._tell(outcome)
        return outcome

    def _tell(self, outcome: ActOutcome) -> None:
        """Write what came of an act to the page and to the terminal."""
        kind = "saving" if outcome.saved_usd_per_h > LEAST_USD else "outcome"
        attainment = attainment_text(outcome.counts)
        patient(lambda: self.means.client.note(outcome.result[:MOST_WORDS], attainment, kind))
        lines = [
            f"  {outcome.result} {attainment}".rstrip(),
            *([f"    {outcome.chosen}"] if outcome.chosen else []),
        ]
        self.said("\n".join(lines))

    def _answer(
        self, act: Act, before: FleetLook, victim: str, began_s: float, until_s: float
    ) -> ActEvidence:
        """Send the act's requests until its answer shows, at least as long as an act lasts."""
        self.traffic.ask(act.name, act.asks)
        while True:
            time.sleep(LOOK_S)
            evidence = self._seen(act, before, victim)
            if act.lasts:
                act.begin(self.means, evidence.now)
            now_s = time.monotonic()
            over = now_s - began_s >= self.least_s and act.shown(evidence)
            if self.stopped() or over or now_s >= until_s:
                return evidence

    def _with_all_ended(self, act: Act, evidence: ActEvidence) -> tuple[ActEvidence, RequestCounts]:
        """The same fleet, with all requests of the act counted, once they have ended.

        Requests go on meanwhile, no faster than usual, and count for no act: a service without any would scale in.
        """
        self.traffic.ask(act.name, limited(act.asks, RATE_PER_S), "after")
        patient(lambda: act.end(self.means, evidence.now))
        until_s = time.monotonic() + PATIENCE_S
        while True:
            sent = self.traffic.of(act.name)
            if all(request.has_ended for request in sent) or self.stopped() or time.monotonic() >= until_s:
                break
            time.sleep(LOOK_S)
        ended = [request for request in sent if request.has_ended]
        return replace(evidence, by_tenant=self._by_tenant(ended)), counted(ended, self.slo)

    def _moment(self, act: Act) -> FleetLook:
        """Wait until it may begin: how things are then."""
        first, since_s = self._look(), time.monotonic()
        if act.earlier:
            self.traffic.ask(act.name, act.earlier, "before")
        patient(lambda: act.prepare(self.means, first))
        least_s = EARLIER * self.least_s if act.earlier else 0.0
        while True:
            evidence = self._seen(act, first)
            waited_s = time.monotonic() - since_s
            may_begin = act.moment(replace(evidence, waited_s=waited_s))
            if self.stopped() or waited_s >= (least_s if may_begin else PATIENCE_S):
                return evidence.now
            time.sleep(LOOK_S)

    def day_counts(self) -> RequestCounts:
        """Of all requests of the day that have ended, those between acts too."""
        return counted([request for request in list(self.traffic.sent) if request.has_ended], self.slo)

    def _by_tenant(self, ended: Sequence[SentRequest]) -> dict[str, RequestCounts]:
        return {
            tenant: counted([request for request in ended if request.tenant == tenant], self.slo)
            for tenant in (SHOP, LAB)
        }

    def _seen(self, act: Act, before: FleetLook, victim: str = "") -> ActEvidence:
        def by_tenant(phase: Phase) -> dict[str, RequestCounts]:
            return self._by_tenant(ended_first(self.traffic.of(act.name, phase)))

        # What the day begins with was decided before its first act.
        since = before.last if self.outcomes else 0
        decided = patient(lambda: self._decided(since))
        return ActEvidence(
            before,
            self._look(),
            decided,
            by_tenant("during"),
            by_tenant("before"),
            victim,
            self.near_usd_per_h,
            window_s=self.window_s,
        )

    def _decided(self, since: int) -> tuple[LoggedDecision, ...]:
        decided = decided_since(self.means.client, since)
        if decided:
            self._last = decided[-1].number
        return decided

    def _look(self) -> FleetLook:
        def look() -> FleetLook:
            self._decided(self._last)
            return look_at(self.means.client, FAR, LINK, self._last)

        return patient(look)


def patient(call: Callable[[], Result], within_s: float = PATIENCE_S) -> Result:
    """What a gateway says that may be busy for a moment, or without a core."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            return call()
        except GatewayAway:
            if time.monotonic() > until_s:
                raise
            time.sleep(LOOK_S)

"""Plays the acts of a day, one after the other, and says on the page what happens and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from demo.acts import (
    FAR,
    LAB,
    LEAST_USD,
    LINK,
    SHOP,
    Act,
    ActEvidence,
    DemoControls,
    FleetLook,
    LoggedDecision,
    chosen,
    decided_since,
    look_at,
)
from demo.traffic import DemoTraffic, RequestCounts, counted
from potluck.control.gateway_client import GatewayAway
from potluck.core.values.types import Slo

LOOK_S = 0.4
PATIENCE_S = 90.0
"""So long an act waits for its moment, and for its answer to show, on a machine that has much else to do."""
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
        self.traffic.ask(act.name, act.asks)
        victim = patient(lambda: act.begin(self.means, before))
        while True:
            time.sleep(LOOK_S)
            seen = self._seen(act, before, victim)
            if act.lasts:
                act.begin(self.means, seen.now)
            shown = act.shown(seen)
            lasted_s = time.monotonic() - began_s
            if self.stopped() or lasted_s >= (self.least_s if shown else self.least_s + PATIENCE_S):
                break
        what, result = (
            chosen(act, seen),
            act.result(seen) if shown else "Nothing like the expected answer was seen.",
        )
        saved = act.saved_usd_per_h(seen) if shown else 0.0
        counts = self.counts(act)
        in_time = (
            f"{counts.attained:.0%} of {counts.requests} requests were in time." if counts.requests else ""
        )
        kind = "saving" if saved > LEAST_USD else "outcome"
        patient(lambda: client.note(result[:MOST_WORDS], in_time, kind))
        self.said(f"  {result} {in_time}".rstrip() + (f"\n    {what}" if what else ""))
        return ActOutcome(
            act,
            shown,
            what,
            result,
            max(0.0, saved),
            lasted_s,
            seen.moved,
            (len(before.ready()), len(seen.now.ready())),
            (before.usd_per_h, seen.now.usd_per_h),
        )

    def _moment(self, act: Act) -> FleetLook:
        """Wait until it may begin: how things are then."""
        first, since_s = self._look(), time.monotonic()
        if act.earlier:
            self.traffic.ask(act.name, act.earlier, before=True)
        patient(lambda: act.prepare(self.means, first))
        least_s = EARLIER * self.least_s if act.earlier else 0.0
        while True:
            seen = self._seen(act, first)
            waited_s = time.monotonic() - since_s
            if self.stopped() or waited_s >= (least_s if act.moment(seen) else PATIENCE_S):
                return seen.now
            time.sleep(LOOK_S)

    def told(self) -> list[tuple[ActOutcome, RequestCounts]]:
        return [(outcome, self.counts(outcome.act)) for outcome in self.outcomes]

    def counts(self, act: Act) -> RequestCounts:
        """Of its requests that have ended."""
        return counted(
            [sent_request for sent_request in self.traffic.of(act.name) if sent_request.shot.done_s >= 0],
            self.slo,
        )

    def _seen(self, act: Act, before: FleetLook, victim: str = "") -> ActEvidence:
        ended = [sent_request for sent_request in self.traffic.of(act.name) if sent_request.shot.done_s >= 0]
        during, earlier = (
            {
                tenant: counted(
                    (
                        sent_request
                        for sent_request in ended
                        if (sent_request.tenant, sent_request.before) == (tenant, so)
                    ),
                    self.slo,
                )
                for tenant in (SHOP, LAB)
            }
            for so in (False, True)
        )
        # What the day begins with was decided before its first act.
        since = before.last if self.outcomes else 0
        decided = patient(lambda: self._decided(since))
        return ActEvidence(before, self._look(), decided, during, earlier, victim, self.near_usd_per_h)

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

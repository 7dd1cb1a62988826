"""Plays the acts of a day, one after the other, and says on the page what happens, what was chosen, what it saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from potluck.cli.demo.acts import FAR, LAB, SHOP, Act, Means, Seen, chosen
from potluck.cli.demo.looks import Decided, Look, decided_since, look_at
from potluck.cli.demo.traffic import Counts, Traffic, counted
from potluck.control.gateway import GatewayAway
from potluck.core.values.types import Slo

LOOK_S = 0.4
PATIENCE_S = 150.0
"""So long an act waits for its answer to show, on a machine that has much else to do."""
MOST_WORDS = 400
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one act showed."""

    act: Act
    shown: bool
    chosen: str
    saved: str
    lasted_s: float
    moved: int
    replicas: tuple[int, int]
    """Ready before and after."""
    usd_per_h: tuple[float, float]


@dataclass(slots=True)
class Player:
    """`play` runs in a thread of its own; `stopped` ends it early."""

    means: Means
    traffic: Traffic
    slo: Slo
    least_s: float
    """An act lasts so long, whether its answer showed sooner or not."""
    said: Callable[[str], None]
    stopped: Callable[[], bool]
    outcomes: list[Outcome] = field(default_factory=list)
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

    def _one(self, act: Act) -> Outcome:
        client = self.means.client
        began_s = time.monotonic()
        before = self._look()
        self.said(f"{act.title}: {act.happens}")
        patient(lambda: client.note(act.title, act.happens, "act"))
        self.traffic.ask(act.name, act.asks)
        victim = patient(lambda: act.begin(self.means, before))
        while True:
            time.sleep(LOOK_S)
            seen = self._seen(act, before, victim)
            shown = act.shown(seen)
            lasted_s = time.monotonic() - began_s
            if self.stopped() or lasted_s >= (self.least_s if shown else self.least_s + PATIENCE_S):
                break
        what, saved = chosen(act, seen), act.saved(seen) if shown else "nothing like it was seen"
        counts = self.counts(act)
        in_time = (
            f"{counts.attained:.0%} of {counts.requests} requests in time"
            if counts.requests
            else "none ended yet"
        )
        why = f"{what}; {in_time}".lstrip("; ")[:MOST_WORDS]
        patient(lambda: client.note(f"{act.title}: {saved}"[:MOST_WORDS], why, "outcome"))
        self.said(f"  {saved}; {in_time}" + (f"\n    {what}" if what else ""))
        return Outcome(
            act,
            shown,
            what,
            saved,
            lasted_s,
            seen.moved,
            (len(before.ready()), len(seen.now.ready())),
            (before.usd_per_h, seen.now.usd_per_h),
        )

    def counts(self, act: Act, tenant: str = "") -> Counts:
        """Of its requests that have ended."""
        ended = [each for each in self.traffic.of(act.name, tenant) if each.shot.done_s >= 0]
        return counted(ended, self.slo)

    def _seen(self, act: Act, before: Look, victim: str) -> Seen:
        by_tenant = {tenant: self.counts(act, tenant) for tenant in (SHOP, LAB)}
        decided = patient(lambda: self._decided(before.last))
        return Seen(before, self._look(), decided, by_tenant, victim)

    def _decided(self, since: int) -> tuple[Decided, ...]:
        found = decided_since(self.means.client, since)
        if found:
            self._last = found[-1].number
        return found

    def _look(self) -> Look:
        def look() -> Look:
            self._decided(self._last)
            return look_at(self.means.client, FAR, self._last)

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

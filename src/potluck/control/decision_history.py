"""What the gateway decided and what was asked of it, kept in the state: reasons for `events`, rates for forecasts.

The gateway numbers its decisions anew when it starts (another epoch), and counts requests from nothing; so what was
read last is kept with its epoch, and nothing is counted twice, whoever reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from potluck.control.gateway_client import GatewayClient
from potluck.control.store.state_store import StateStore
from potluck.core.errors import PotluckError
from potluck.core.scaling.forecast import BIN_S

READ = "gateway read"
"""The setting that says how far was read."""
HISTORY_BINS = 14 * 144
"""Two weeks."""
DAY_BINS = 144
LEAST_SHARE = 0.5
"""Of a bin that somebody must have looked at it, for its rate to mean something."""
_NUMBERS = re.compile(r"[0-9.]+")


class DecisionHistory:
    """Made by the controller, which asks for a turn after each of its own."""

    def __init__(
        self,
        store: StateStore,
        gateway: GatewayClient,
        note_once: Callable[[str, str, str], None],
        clock: Callable[[], float],
        paces: Callable[[Sequence[dict[str, Any]]], None] = lambda said: None,
    ) -> None:
        """`paces` hears what the Brain thinks of its replicas' speed."""
        self._store, self._gateway, self._note_once, self._clock = store, gateway, note_once, clock
        self._paces = paces

    def turn(self) -> None:
        read = self._store.get(READ) or {}
        try:
            said = self._gateway.decisions(int(read.get("number", 0)))
        except PotluckError:
            return  # it is asked again at the next turn
        if said.get("epoch") != read.get("epoch"):  # another gateway: all that it says is new
            read = {"epoch": said.get("epoch"), "number": 0, "ended": {}}
            try:
                said = self._gateway.decisions(0)
            except PotluckError:
                return
        self._paces(said.get("paces", ()))
        number = int(read.get("number", 0))
        for each in said.get("decisions", ()):
            if each["number"] > number:
                self._store.note(each["at_s"], "brain", str(each["what"]), str(each["why"]))
                number = each["number"]
        thinks = str(said.get("thinks", ""))
        if thinks:
            # What only differs in its figures was said before.
            self._note_once("brain scaling", "brain", thinks)
        now = {**read, "number": number, **self._counted(read, said.get("ended") or {})}
        if now != read:
            self._store.set(READ, now)

    def _counted(self, read: dict[str, Any], ended: dict[str, int]) -> dict[str, Any]:
        """Requests that ended since, in the bin of now; a bin that is over becomes a rate."""
        now_s = self._clock()
        place = int(now_s // BIN_S)
        counts = dict(read.get("counts") or {})
        since_s = float(read.get("since_s", now_s))
        if read.get("bin", place) != place:
            begun_s = read["bin"] * BIN_S
            watched_s = begun_s + BIN_S - max(begun_s, since_s)
            if watched_s >= LEAST_SHARE * BIN_S and counts:
                self._store.add_rates(read["bin"], [(name, n / watched_s) for name, n in counts.items()])
            counts, since_s = dict.fromkeys(counts, 0), place * BIN_S
        before = read.get("ended") or {}
        for model, count in ended.items():
            counts[model] = counts.get(model, 0) + max(0, count - before.get(model, 0))
        return {"ended": ended, "counts": counts, "bin": place, "since_s": since_s}


def gist(line: str) -> str:
    """A line without its figures."""
    return _NUMBERS.sub("", line)


def history_of(store: StateStore, now_s: float, bins: int = HISTORY_BINS) -> dict[str, tuple[float, ...]]:
    """Each model's rates up to now, for forecasts: from the first bin that was seen, without gaps."""
    last = int(now_s // BIN_S) - 1
    found = {model: without_gaps(store.rates(model, last, bins)) for model in store.rated_models()}
    return {model: rates for model, rates in found.items() if rates}


def without_gaps(rates: Sequence[float | None]) -> tuple[float, ...]:
    """Bins in which nobody looked are as on the day before, or else as the last one that was seen."""
    found: list[float] = []
    for rate in rates:
        if rate is None and not found:
            continue
        if rate is None:
            rate = found[-DAY_BINS] if len(found) >= DAY_BINS else found[-1]
        found.append(rate)
    return tuple(found)

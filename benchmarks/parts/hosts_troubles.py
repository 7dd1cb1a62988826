"""What may happen to a host, one thing after the other, and how long until the gateway knows and all is well."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts_fleet import HostsFleet

SLOW = 1.3
"""A replica that takes so many times as long as it did counts as found to be slow."""
LOOK_S = 0.2


@dataclass(frozen=True)
class Times:
    noticed_s: float
    """From the trouble until nothing more is sent there, or less."""
    back_s: float
    """From its end until the engine is sent requests again."""


def within(holds: Callable[[], bool], most_s: float = 60.0) -> float:
    """Seconds until it holds."""
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > most_s:
            raise RuntimeError(f"was waited for in vain, {most_s:g} s")
        time.sleep(LOOK_S)
    return time.monotonic() - began_s


class Troubles:
    def __init__(self, fleet: HostsFleet, last_s: float) -> None:
        """Each trouble goes on for so long after it was noticed."""
        self._fleet, self._last_s = fleet, last_s

    def row(self, place: int) -> dict[str, Any] | None:
        """An engine's replica as the first gateway knows it; None while it sends nothing there."""
        url = self._fleet.engine_list[place]["url"]
        for each in self._fleet.ask(0, "/snapshot")["replicas"]:
            if each["url"] == url and each["state"] == "ready" and not each["doubted"]:
                return dict(each)
        return None

    def away(self, place: int) -> bool:
        return self.row(place) is None

    def back(self, place: int) -> bool:
        return self.row(place) is not None

    def cut(self, place: int) -> Times:
        """Its cable is pulled, and put in again."""
        fleet = self._fleet
        fleet.bed.cut(fleet.engine_hosts[place])
        noticed_s = within(lambda: self.away(place))
        time.sleep(self._last_s)
        fleet.bed.mend(fleet.engine_hosts[place])
        return Times(noticed_s, within(lambda: self.back(place)))

    def slow(self, place: int, bits_per_s: float) -> Times:
        """So little goes over its cable that answers come late."""
        fleet, before = self._fleet, self.row(place)
        usual = 1.0 if before is None else float(before["pace"])

        def slower() -> bool:
            now = self.row(place)
            return now is None or now["pace"] > SLOW * usual

        fleet.bed.slow(fleet.engine_hosts[place], bits_per_s)
        noticed_s = within(slower)
        time.sleep(self._last_s)
        fleet.bed.full_speed(fleet.engine_hosts[place])
        return Times(noticed_s, within(lambda: self.back(place)))

    def kill(self, place: int, odd: dict[str, object] | None = None, source: Path | None = None) -> Times:
        """It dies, and what is started in its place may be of another release."""
        process = self._fleet.engines[place]
        process.send(signal.SIGKILL)
        noticed_s = within(lambda: self.away(place))
        began_s = time.monotonic()
        self._fleet.replace(place, odd, source)
        within(lambda: self.back(place))
        return Times(noticed_s, time.monotonic() - began_s)

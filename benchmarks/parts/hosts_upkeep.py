"""What starts engines again that have ended, as systemd or a container's restart policy would."""

from __future__ import annotations

import threading
from collections.abc import Callable

from live_fleet import LiveFleet

LOOK_S = 0.1


class Upkeep(threading.Thread):
    """Starts the next release of whatever ended, until it is told to stop."""

    def __init__(self, fleet: LiveFleet, again: Callable[[int], None]) -> None:
        """`again` starts an engine by its place among the fleet's."""
        super().__init__(daemon=True)
        self._fleet, self._again = fleet, again
        self._over = threading.Event()
        self.started = 0
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            while not self._over.wait(LOOK_S):
                for place, process in enumerate(self._fleet.engines):
                    if process.popen is not None and process.popen.poll() is not None:
                        self._again(place)
                        self.started += 1
        except Exception as error:
            self.problem = error

    def end(self) -> None:
        self._over.set()
        self.join()
        if self.problem is not None:
            raise self.problem

"""What starts engines again that have ended, as systemd or a container's restart policy would."""

from __future__ import annotations

import threading

from hosts_fleet import HostsFleet

LOOK_S = 0.1


class Upkeep(threading.Thread):
    """Starts the next release of whatever ended, until it is told to stop."""

    def __init__(self, fleet: HostsFleet, odd: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._fleet, self._odd = fleet, odd
        self._over = threading.Event()
        self.started = 0
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            while not self._over.wait(LOOK_S):
                for place, process in enumerate(self._fleet.engines):
                    if process.popen is not None and process.popen.poll() is not None:
                        self._fleet.replace(place, self._odd)
                        self.started += 1
        except Exception as error:
            self.problem = error

    def end(self) -> None:
        self._over.set()
        self.join()
        if self.problem is not None:
            raise self.problem

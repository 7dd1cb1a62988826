"""The whole system on one machine: a gateway, engines, and the controller that looks after both.

The controller runs in this process; gateway and engines are processes that outlive it. So one that was killed and is
started again over the same state finds them serving, and carries on.
"""

from __future__ import annotations

import http.client
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from potluck.control.gateway import GatewayClient
from potluck.control.launch.command import EngineMaker
from potluck.control.launch.local import LocalLauncher
from potluck.control.launch.process import Pid, alive, end, last_words, rotate, spawn
from potluck.control.loop import Controller, Planner, Turn
from potluck.control.store.lease import Lease
from potluck.control.store.store import Store
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.plan import Plan, plan_to_json

TURN_S = 0.5
GATEWAY_S = 30.0
"""In which a gateway must listen."""
DRAIN_S = 45.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StandSettings:
    folder: Path
    """Where the state, the logs and the plan lie."""
    spec: Path
    port: int = 8000
    """Where clients ask; 0: a free one."""
    maker: EngineMaker = field(default_factory=EngineMaker)
    gateway: tuple[str, ...] = ()
    """Further words for `potluck serve`."""
    advise: bool = False


class Stand:
    """Made once per process. `planner` answers the Brain when it asks for another plan."""

    def __init__(self, settings: StandSettings, plan: Plan, planner: Planner | None = None) -> None:
        self._settings = settings
        self._folder = settings.folder
        self.store = Store(self._folder / "state.db")
        self._lease = Lease(self.store)
        if not self._lease.renew():
            raise InputError(
                "--state", f"{self._folder}: another controller runs it; `potluck status` shows it"
            )
        self.launcher = LocalLauncher(
            settings.maker, self._folder / "logs", str((self._folder / "state.db").resolve())
        )
        newest = self.store.plan()
        if newest is None or newest.plan != plan:
            self.store.add_plan(plan, time.time(), "potluck up")
        self._plan_file = self._folder / "plan.json"
        self._plan_file.write_text(plan_to_json(plan), "utf-8")
        self._key_file = self._folder / "admin.key"
        if not self._key_file.exists():
            self._key_file.touch(0o600)
            self._key_file.write_text(secrets.token_urlsafe(32))
        self.client = GatewayClient("", self._key_file.read_text("utf-8"))
        self.controller = Controller(
            self.store, self._lease, self.launcher, self.client, planner, advise=settings.advise
        )
        self.url = ""

    # The gateway.

    def open(self) -> None:
        """Find the gateway that is there, or start one."""
        place = self.store.get("gateway") or {}
        pid = _pid(place)
        if pid is None or not alive(pid):
            place = self._start_gateway(int(place.get("port", 0)) or self._settings.port)
        self.url, self.client.url = str(place["url"]), str(place["admin"])

    def _start_gateway(self, port: int) -> dict[str, object]:
        port, admin = port or _free_port(), _free_port()
        _must_be_free(port)
        settings = self._settings
        command = [
            *(sys.executable, "-m", "potluck.cli.main", "serve", str(self._plan_file), str(settings.spec)),
            *("--port", str(port), "--admin-port", str(admin), "--json"),
            *("--admin-key-file", str(self._key_file), "--log", str(self._folder / "brain.log")),
            *settings.gateway,
        ]
        log = self._folder / "logs" / "gateway.log"
        pid = spawn(command, {"POTLUCK_GATEWAY": str(self._folder)}, log)
        place: dict[str, object] = {
            "pid": pid.number,
            "started": pid.started,
            "port": port,
            "url": f"http://{LOOPBACK}:{port}",
            "admin": f"http://{LOOPBACK}:{admin}",
        }
        self.store.set("gateway", place)
        until_s = time.monotonic() + GATEWAY_S
        while not _answers(port, "/health"):
            if not alive(pid):
                raise CapacityError(f"the gateway did not start: {last_words(log) or 'it said nothing'}")
            if time.monotonic() > until_s:
                end(pid, insist=True)
                raise CapacityError(f"the gateway did not listen within {GATEWAY_S:g} s; see {log}")
            time.sleep(0.05)
        self.store.note(time.time(), "gateway", f"listens at {place['url']}", "it was not there")
        return place

    def turn(self) -> Turn:
        """One look at everything."""
        self.open()
        rotate(self._folder / "logs" / "gateway.log")
        return self.controller.turn()

    @property
    def ready(self) -> bool:
        return _answers(int(self.url.rsplit(":", 1)[1]), "/ready")

    def run(self, stopped: Callable[[], bool], seen: Callable[[Turn], None]) -> None:
        """Look after it all until told to stop; `seen` hears of every turn."""
        while not stopped():
            began_s = time.monotonic()
            seen(self.turn())
            while not stopped() and time.monotonic() - began_s < TURN_S:
                time.sleep(0.05)

    # The end.

    def down(self, within_s: float = DRAIN_S) -> int:
        """Drain and stop everything; how many processes had to be made to end."""
        pids = []
        gateway = _pid(self.store.get("gateway") or {})
        if gateway is not None:
            end(gateway)
            _wait([gateway], within_s)
            pids.append(gateway)
        places = self.store.places()
        for name, place in places.items():
            self.launcher.stop(name, place)
            pid = _pid(place)
            if pid is not None:
                pids.append(pid)
        left = _wait(pids, 15.0)
        for pid in left:
            end(pid, insist=True)
        _wait(left, 5.0)
        for name in places:
            self.store.remove(name)
        self.store.set("gateway", None)
        self.store.note(time.time(), "down", "all was stopped", "somebody asked for it")
        return len(left)

    def close(self) -> None:
        """Leave everything as it is, for a successor."""
        self.controller.close()
        self.store.close()


def _wait(pids: list[Pid], within_s: float) -> list[Pid]:
    """Those that have not ended by then."""
    until_s = time.monotonic() + within_s
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.05)
    return left


def _pid(place: dict[str, object]) -> Pid | None:
    number, started = place.get("pid"), place.get("started")
    return Pid(number, started) if isinstance(number, int) and isinstance(started, int) else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _must_be_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            line = f"{port} cannot be used ({error.strerror}); say another, or 0 for a free one"
            raise InputError("--port", line) from error


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=2.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()

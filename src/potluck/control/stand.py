"""The whole system on one machine: a gateway, engines, and the controller that looks after both.

The controller runs in this process; gateway and engines are processes that outlive it. So one that was killed and is
started again over the same state finds them serving, and carries on.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from potluck.control.byhand import is_by_hand
from potluck.control.chronicle import history_of
from potluck.control.ending import DRAIN_S, living, owner_of, stop_all
from potluck.control.gateway import GatewayClient
from potluck.control.launch.command import EngineMaker
from potluck.control.launch.local import LocalLauncher
from potluck.control.launch.process import alive, end, last_words, rotate, spawn, started_at
from potluck.control.loop import Controller, Turn
from potluck.control.market import MarketFile
from potluck.control.planning import Planner
from potluck.control.store.lease import Lease
from potluck.control.store.store import Store
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.plan import Plan, plan_to_json

TURN_S = 0.5
GATEWAY_S = 30.0
"""In which a gateway must listen."""
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
    market: MarketFile | None = None
    """Prices and nodes, where a file says."""


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
        self.launcher = LocalLauncher(settings.maker, self._folder / "logs", owner_of(self.store))
        self.store.set("controller", {"pid": os.getpid(), "started": started_at(os.getpid())})
        self.plan = self._chosen(plan)
        self._plan_file = self._folder / "plan.json"
        self._key_file = self._folder / "admin.key"
        if not self._key_file.exists():
            self._key_file.touch(0o600)
            self._key_file.write_text(secrets.token_urlsafe(32))
        self.client = GatewayClient("", self._key_file.read_text("utf-8"))
        self.controller = Controller(
            self.store,
            self._lease,
            self.launcher,
            self.client,
            planner,
            market=settings.market,
            advise=settings.advise,
        )
        self.url = ""

    def _chosen(self, plan: Plan) -> Plan:
        """The plan that was made, unless the gateway serves one that somebody made by hand."""
        newest = self.store.plan()
        if newest is not None and is_by_hand(newest):
            if living(self.store.get("gateway")):
                self.store.note(time.time(), "plan", f"version {newest.version} stays", newest.reason)
                return newest.plan
            self.store.note(
                time.time(), "plan", f"version {newest.version}, made by hand, goes", "potluck up"
            )
        if newest is None or newest.plan != plan:
            self.store.add_plan(plan, time.time(), "potluck up")
        return plan

    # The gateway.

    def open(self) -> None:
        """Find the gateway that is there, or start one."""
        place = self.store.get("gateway") or {}
        if not living(place):
            place = self._start_gateway(int(place.get("port", 0)) or self._settings.port)
        self.url, self.client.url = str(place["url"]), str(place["admin"])

    def _start_gateway(self, port: int) -> dict[str, object]:
        newest = self.store.plan()
        self._plan_file.write_text(plan_to_json(self.plan if newest is None else newest.plan), "utf-8")
        port, admin = port or _free_port(), _free_port()
        _must_be_free(port)
        settings = self._settings
        command = [
            *(sys.executable, "-m", "potluck.cli.main", "serve", str(self._plan_file), str(settings.spec)),
            *("--port", str(port), "--admin-port", str(admin), "--json"),
            *("--admin-key-file", str(self._key_file), "--log", str(self._folder / "brain.log")),
            *("--history", str(self._history())),
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

    def _history(self) -> Path:
        """The rates of the past, for the new gateway's forecasts."""
        path = self._folder / "history.json"
        path.write_text(json.dumps(history_of(self.store, time.time())), "utf-8")
        return path

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
        return stop_all(self.store, "somebody asked for it", within_s)

    def close(self) -> None:
        """Leave everything as it is, for a successor."""
        self.controller.close()
        self.store.close()


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

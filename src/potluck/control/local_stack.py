"""The whole system on one machine: a gateway, engines, and the controller that looks after both.

The controller runs in this process; gateway and engines are processes that outlive it. So one that was killed and is
started again over the same state finds them serving, and carries on.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from potluck.control.accounts import KEY_FILE, USAGE_FILE, count_all, is_open, publish_keys
from potluck.control.control_values import Launcher, Place
from potluck.control.controller import Controller, ControllerTurn
from potluck.control.decision_history import history_of
from potluck.control.gateway_client import GatewayClient
from potluck.control.held_sockets import GATEWAY_MARK, HeldSockets, hands_over, launched, takeover_in
from potluck.control.http_client import answers_well
from potluck.control.launchers import local_launcher, process
from potluck.control.launchers.engine_command import DeferredCommands, EngineCommands
from potluck.control.launchers.local_capacity import GATEWAY_BYTES, must_have_room
from potluck.control.manual_changes import is_by_hand
from potluck.control.market import MarketSource
from potluck.control.plan_requests import DayPlans, Planner
from potluck.control.reconciler import START_S
from potluck.control.state_store import Lease, StateStore, written
from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.core.values.plan import Plan, mark_of, plan_to_json

DRAIN_S = 45.0  # In which a gateway lets what is open end.
ENGINES_S = 15.0
INSIST_S = 5.0


def pid_of(place: Mapping[str, object] | None) -> process.ProcessId | None:
    number, started = (place or {}).get("pid"), (place or {}).get("started")
    return (
        process.ProcessId(number, started) if isinstance(number, int) and isinstance(started, int) else None
    )


def living(place: Mapping[str, object] | None) -> bool:
    pid = pid_of(place)
    return pid is not None and process.alive(pid)


def wait(pids: Iterable[process.ProcessId], within_s: float) -> list[process.ProcessId]:
    until_s = time.monotonic() + within_s
    while left := [pid for pid in pids if process.alive(pid)]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.05)
    return left


def owner_of(store: StateStore) -> str:
    return str(store.path.resolve())


def gateways_of(store: StateStore) -> list[process.ProcessId]:
    """The gateway's supervisor and the process that answers, which may outlive it."""
    written = pid_of(store.get("gateway"))
    process_ids = [pid for pid, _ in process.marked(GATEWAY_MARK, str(store.path.parent.resolve()))]
    return list(dict.fromkeys([*([written] if written is not None else []), *process_ids]))


def stop_all(store: StateStore, why: str, within_s: float = DRAIN_S, launcher: Launcher | None = None) -> int:
    """The gateway drains and ends, then the engines; how many processes had to be made to end. `launcher` is who
    started engines elsewhere."""
    gateways = gateways_of(store)
    for pid in gateways:
        process.end(pid)
    wait(gateways, within_s)
    places = store.places()
    elsewhere = 0 if launcher is None else _ended(launcher, places)
    process_ids = [pid_of(place) for place in places.values()]
    # Those that were started and never written down carry the mark all the same.
    process_ids += local_launcher.engines_of(owner_of(store))
    pids = list({pid for pid in [*gateways, *process_ids] if pid is not None})
    for pid in pids:
        process.end(pid)
    left = wait(pids, ENGINES_S)
    for pid in left:
        process.end(pid, insist=True)
    wait(left, INSIST_S)
    count_all(store, store.path.parent, time.time())
    for name in places:
        store.remove(name)
    store.set("gateway", None)
    store.note(time.time(), "down", "all was stopped", why)
    return len(left) + elsewhere


def _ended(launcher: Launcher, places: dict[str, Place]) -> int:
    """A launcher's engines are asked to end, and made to; how many had to be."""
    for name, place in places.items():
        launcher.stop(name, place)
    made = 0
    for within_s in (ENGINES_S, INSIST_S):
        until_s = time.monotonic() + within_s
        # One that nothing is heard of may still be there.
        while left := {*places} - {seen.name for seen in launcher.look(places) if seen.state == "dead"}:
            if time.monotonic() > until_s:
                break
            time.sleep(0.2)
        for name in sorted(left) if within_s == ENGINES_S else ():
            launcher.kill(name, places[name])
            made += 1
    return made


TURN_S = 0.5
GATEWAY_S = 90.0
USUAL_PORT = 8000
"""Where clients ask unless told; operators and the page have the next one. `potluck serve` has the same."""
PORT_TRIES = 3
ANSWER_S = 2.0
FORKED = ("emulated", "mock")  # Styles of engines that share what they loaded.


@dataclass(frozen=True, slots=True)
class LocalStackSettings:
    folder: Path
    spec: Path | None
    """None: a plan over attached servers, which needs none."""
    port: int | None = None
    """Where clients ask; 0: any free one; None: the usual one, or the next that is free."""
    maker: EngineCommands | DeferredCommands = field(default_factory=EngineCommands)
    gateway: tuple[str, ...] = ()
    advise: bool = False
    market: MarketSource | None = None
    """Prices and nodes from a market file or cluster; None without one."""
    day: DayPlans | None = None
    """Plans that take turns by the time of day."""
    start_s: float = START_S
    """In which an engine must be ready; then another is tried."""
    profiles: tuple[Path, ...] = ()
    launcher: Launcher | None = None
    """Who starts engines elsewhere; None: they are processes of this machine."""
    host: str = process.LOOPBACK
    attached: bool = False
    """Engines are servers that others run, listed in a file that the `gateway` words name."""
    why: str = "potluck up"
    """The reason for the plan that is begun with."""
    held: HeldSockets = field(default_factory=HeldSockets)
    """The gateway's listening sockets, where an earlier controller had them."""


class LocalStack:
    """Made once per process. `planner` answers the Brain when it asks for another plan; engines are forked from the
    `fork_server` where there is one. Without a `plan`, the newest one of the state stays. `later` makes a fork server
    once the gateway is looked after: supervision does not need one."""

    def __init__(
        self,
        settings: LocalStackSettings,
        plan: Plan | None,
        planner: Planner | None = None,
        fork_server: local_launcher.ForkServer | None = None,
        later: Callable[[], local_launcher.ForkServer | None] | None = None,
    ) -> None:
        self._settings, self._fork_server, self._later = settings, fork_server, later
        self.folder = settings.folder
        self.store = StateStore(self.folder / "state.db")
        self._lease = Lease(self.store)
        if not self._lease.inherit():
            raise InputError(
                "--state", f"{self.folder}: another controller runs it; `potluck status` shows it"
            )
        self.launcher: Launcher = settings.launcher or local_launcher.LocalLauncher(
            settings.maker, self.folder / "logs", owner_of(self.store), fork_server=fork_server
        )
        self.store.set("controller", {"pid": os.getpid(), "started": process.started_at(os.getpid())})
        profiles = [str(path) for path in settings.profiles]
        spec_path = None if settings.spec is None else str(settings.spec)
        files = {"path": spec_path, "profiles": profiles, "style": settings.maker.style}
        self.store.set("spec files", files)
        self.plan = self._chosen(plan)
        self._plan_file = self.folder / "plan.json"
        self._takeover = takeover_in(self.folder)
        self._held = settings.held
        self._told = False
        self.key_file = self._secret("admin.key")
        self.client = GatewayClient("", self.key_file.read_text("utf-8"))
        self.controller = Controller(
            self.store,
            self._lease,
            self.launcher,
            self.client,
            planner,
            market=settings.market,
            day=settings.day,
            advise=settings.advise,
            start_s=settings.start_s,
            attached=settings.attached,
        )
        self.url = ""
        self.fresh = False  # Whether the gateway was started by this very controller.
        self.said: list[str] = []  # Lines for the operator, beside the state.

    def _secret(self, name: str) -> Path:
        """A file with a random secret that lasts as long as the state folder."""
        path = self.folder / name
        if not path.exists():
            written(path, secrets.token_urlsafe(32))
        return path

    @property
    def keyed(self) -> bool:
        return not is_open(self.store)

    def must_have_room(self) -> None:
        """Refuse at once what this machine has no memory for, rather than engine by engine."""
        if self._settings.launcher is not None or self._settings.attached:
            return
        style = self._settings.maker.style
        planned = sum(
            deployment.count * (sum(replica.layout.node_counts.values()) if style == "gpu" else 1)
            for deployment in self.plan.deployments
            for replica in self.plan.template(deployment.template).replicas
        )
        places = [place for place in self.store.places().values() if living(place)]
        there = sum(str(place.get("chip", "")).count(",") + 1 for place in places)
        more = 0 if living(self.store.get("gateway")) else GATEWAY_BYTES
        forked = self._fork_server is not None and style == "emulated"
        must_have_room("forked" if forked else style, planned - there, more_bytes=more)

    def _chosen(self, plan: Plan | None) -> Plan:
        """The plan that was made, unless a gateway serves one for this spec, or one that was made by hand."""
        newest = self.store.plan()
        if plan is None:
            if newest is None:
                raise InputError("--state", f"{self.folder}: has no plan; start again with `potluck up`")
            return newest.plan
        spec = self._settings.spec
        mark = mark_of(spec.read_text("utf-8")) if spec is not None and spec.is_file() else ""
        same = self.store.get("spec") == mark
        self.store.set("spec", mark)
        if newest is not None and living(self.store.get("gateway")) and (same or is_by_hand(newest)):
            self.store.note(time.time(), "plan", f"version {newest.version} stays", "its gateway serves it")
            return newest.plan
        if newest is not None and is_by_hand(newest):
            line = f"version {newest.version}, made by hand, goes"
            self.store.note(time.time(), "plan", line, "potluck up")
        if newest is None or newest.plan != plan:
            self.store.add_plan(plan, time.time(), self._settings.why)
        return plan

    # The gateway.

    def open(self) -> None:
        place = self.store.get("gateway") or {}
        if not living(place):
            if not self._kept(place):
                self._end_forgotten()
                self._held.close()
            place = self._started(place)
            self.fresh = True
        self.url, self.client.url = str(place["url"]), str(place["admin"])
        if not self._told and (self._held or self._held.fetch(self._takeover)):
            self._told = True
            self._held.give(self.folder)

    def _kept(self, before: Mapping[str, object]) -> bool:
        """Whether the former gateway's ports are held, by this process or a worker that outlived its supervisor."""
        if before.get("port") is None or self._settings.port not in (None, 0, before["port"]):
            return False
        return bool(self._held) or hands_over(self._takeover)

    def _started(self, before: Mapping[str, object]) -> dict[str, object]:
        """A gateway. Without given ports, others are tried if the first ones are taken."""
        if self._kept(before):
            return self._start_gateway(int(str(before["port"])), int(str(before["admin"]).rpartition(":")[2]))
        for left in reversed(range(PORT_TRIES)):
            port = self._port(before)
            admin = self._admin_port(port, before)
            try:
                return self._start_gateway(port, admin)
            except CapacityError:
                if not left or self._settings.port or not (process.taken(port) or process.taken(admin)):
                    raise
        raise AssertionError("the last try raised")

    def _end_forgotten(self) -> None:
        """A gateway of this folder that the state knows nothing of (it was damaged, say) holds the port."""
        for pid, _ in process.marked(GATEWAY_MARK, str(self.folder.resolve())):
            self.store.note(time.time(), "gateway", f"process {pid.number} is stopped", "the state lost it")
            process.end(pid)
            if wait([pid], DRAIN_S):
                process.end(pid, insist=True)
                wait([pid], INSIST_S)

    def _port(self, before: Mapping[str, object]) -> int:
        """Where the gateway was told to be, where it was, or where it can be."""
        number, known = self._settings.port, before.get("port")
        if not number and isinstance(known, int) and (number is None or not process.taken(known)):
            number = known
        if number is None:
            return self._next(USUAL_PORT, "port")
        port = number or process.free_port()
        process.require_free_port(port)
        return port

    def _admin_port(self, port: int, before: Mapping[str, object]) -> int:
        """Where operators ask and the page is: where it was, the next to clients' port, or any where that is any."""
        known = str(before.get("admin", "")).rpartition(":")[2]
        if known.isdecimal() and int(known) != port and not process.taken(int(known)):
            return int(known)
        return process.free_port() if self._settings.port == 0 else self._next(port + 1, "the page's port")

    def _next(self, wanted: int, what: str) -> int:
        port = process.next_free(wanted)
        if port != wanted:
            self.said.append(f"{what} {wanted} is taken; it is {port} instead")
        return port

    def _start_gateway(self, port: int, admin: int) -> dict[str, object]:
        newest = self.store.plan()
        written(self._plan_file, plan_to_json(self.plan if newest is None else newest.plan))
        publish_keys(self.store, self.folder, time.time())
        settings = self._settings
        command = [
            *(sys.executable, "-m", "potluck.cli.main", "serve", str(self._plan_file)),
            *(() if settings.spec is None else (str(settings.spec),)),
            *("--host", settings.host, "--port", str(port), "--admin-port", str(admin), "--json"),
            *("--admin-key-file", str(self.key_file), "--log", str(self.folder / "brain.log")),
            *("--history", str(self._history()), "--usage", str(self.folder / USAGE_FILE)),
            *("--keys", str(self.folder / KEY_FILE), "--secret-file", str(self._secret("salts.key"))),
            *(f"--profile={path}" for path in settings.profiles),
            *("--state", str(self.folder / "gateway"), "--takeover", str(self._takeover)),
            f"--why={settings.why if newest is None else newest.reason}",
            f"--plan-version={1 if newest is None else newest.version}",
            *settings.gateway,
        ]
        log = self.folder / "logs" / "gateway.log"
        place: dict[str, object] = {
            "port": port,
            "host": settings.host,
            "keyed": True,
            "url": f"http://{process.LOOPBACK}:{port}",
            "admin": f"http://{process.LOOPBACK}:{admin}",
        }
        place = launched(self.folder, command, place, self._held)
        pid = process.ProcessId(int(str(place["pid"])), int(str(place["started"])))
        self.store.set("gateway", place)
        until_s = time.monotonic() + GATEWAY_S
        while not answers_well(str(place["url"]), "/health", ANSWER_S):
            if not process.alive(pid):
                raise CapacityError(
                    f"the gateway did not start: {process.last_words(log) or 'it printed nothing'}"
                )
            if time.monotonic() > until_s:
                process.end(pid, insist=True)
                raise CapacityError(f"the gateway did not listen within {GATEWAY_S:g} s; see {log}")
            time.sleep(0.05)
        self.store.note(time.time(), "gateway", f"listens at {place['url']}", "it was not there")
        return place

    def _history(self) -> Path:
        path = self.folder / "history.json"
        written(path, json.dumps(history_of(self.store, time.time())))
        return path

    def turn(self) -> ControllerTurn:
        self.open()
        process.rotate(self.folder / "logs" / "gateway.log")
        turn = self.controller.turn()
        if self._later is not None and not turn.problem:
            self._fork_server, self._later = self._later(), None
            assert isinstance(self.launcher, local_launcher.LocalLauncher)
            self.launcher.fork_server = self._fork_server
        return turn

    @property
    def ready(self) -> bool:
        return answers_well(self.url, "/ready", ANSWER_S)

    def run(self, stopped: Callable[[], bool], seen: Callable[[ControllerTurn], None]) -> None:
        while not stopped():
            began_s = time.monotonic()
            seen(self.turn())
            while not stopped() and time.monotonic() - began_s < TURN_S:
                time.sleep(0.05)

    # The end.

    def down(self, within_s: float = DRAIN_S) -> int:
        return stop_all(self.store, "by hand", within_s, self._settings.launcher)

    def running(self) -> list[str]:
        """What lives, by name; as far as the state can still be read."""
        try:
            texts = ["gateway"] if living(self.store.get("gateway")) else []
            if self._settings.launcher is not None:
                return texts + [one.name for one in self.store.instances() if one.state != "dead"]
            return texts + [name for name, place in self.store.places().items() if living(place)]
        except PotluckError:
            return ["what was started"]

    def close(self) -> None:
        """Leave everything as it is, for a successor."""
        if self._fork_server is not None:
            self._fork_server.close()
        self._held.close()
        self.controller.close()
        self.store.close()


def fork_server_of(folder: Path, style: str) -> local_launcher.ForkServer | None:
    """One for the engines of this state; None where it cannot be, or they are of a style that is not forked."""
    if style not in FORKED:
        return None
    marks = {local_launcher.OWNER_MARK: str((folder / "state.db").resolve()), local_launcher.FORK_MARK: "1"}
    try:
        return local_launcher.ForkServer(marks, folder / "logs" / "fork-server.log", style=style)
    except OSError:
        return None

"""The controller in a world: its state file, its lease, and the launcher for this machine with made-up processes.

It blocks where it waits for the gateway: the world goes on below it until the answer is there.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from potluck.control import http_client, state_store
from potluck.control.controller import Controller
from potluck.control.gateway_client import GatewayClient
from potluck.control.launchers import local_launcher
from potluck.control.launchers.process import ProcessId
from potluck.control.state_store import CONTROLLER_LEASE_S, Lease, StateStore
from potluck.core.errors import CapacityError, FormatError, PotluckError
from worlds import virtual
from worlds.engines import HTTP, Engine
from worlds.virtual import DEAD, FROZEN, Killed, Process

if TYPE_CHECKING:
    from worlds.world import World

TURN_S = 1.0
LINGER_S = 5.0
START_S = 15.0
ROUND_S = 0.5  # In which one turn tries all starts that are due.


class BlockingHttp:
    """In place of http.client's connection."""

    def __init__(self, url: str, timeout_s: float, tls: object = None) -> None:
        parts = urlsplit(url)
        self._at, self._timeout_s = (parts.hostname, parts.port), timeout_s
        self.status, self._body = 0, b""

    def request(
        self, method: str, path: str, body: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        loop, process = virtual.active, virtual.running()
        assert loop is not None
        assert process is not None
        process.fuse()  # type: ignore[attr-defined]
        data = (body or "").encode()
        lines = [f"{method} {path} HTTP/1.1", "host: gw", "connection: close", f"content-length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        asking = loop.create_task(self._ask("\r\n".join(lines).encode() + b"\r\n\r\n" + data))
        process.remains.append(asking)
        text = loop.pump(asking, process)
        head, found, self._body = text.partition(b"\r\n\r\n")
        size = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        if not found or len(self._body) < int(size or 0):
            raise http.client.RemoteDisconnected("closed without an answer")
        self.status = int(head.split()[1])
        process.fuse()  # type: ignore[attr-defined]

    async def _ask(self, data: bytes) -> bytes:
        async with asyncio.timeout(self._timeout_s):
            reader, writer = await asyncio.open_connection(*self._at)
            try:
                writer.write(data)
                return await reader.read()
            finally:
                writer.close()

    def getresponse(self) -> BlockingHttp:
        return self

    def read(self, most: int = -1) -> bytes:
        return self._body

    def close(self) -> None: ...


class WorldStore(StateStore):
    """It may die before, within or behind every change."""

    @contextmanager
    def change(self) -> Iterator[Any]:
        process = virtual.running()
        fuse = getattr(process, "fuse", lambda: None)
        fuse()
        with super().change() as db:
            yield db
            fuse()
        fuse()


class Machine:
    """Processes of engines, as the launcher's functions for them see it."""

    def __init__(self, world: World) -> None:
        self.world, self.host = world, "e0"
        self.style = "mock"
        self.running: dict[ProcessId, tuple[Engine, dict[str, str]]] = {}
        self.fails_until_s = -1.0
        self._came_up: list[Engine] = []
        self._count = 0

    # What makes commands.

    def workers(self, make: object) -> int:
        return 1

    def chips_for(self, make: object) -> tuple[str, ...]:
        return ()

    def command(self, make: object, port: int, kv_port: int) -> list[str]:
        self.host = f"e{self._count}"
        return ["engine", str(self._count)]

    # What processes do.

    def spawn(self, command: Sequence[str], marks: Mapping[str, str], log: Path, **_: object) -> ProcessId:
        virtual.running().fuse()  # type: ignore[union-attr]
        if self.world.loop.now_s < self.fails_until_s:
            self._fails(virtual.running())
            raise CapacityError("no memory left")
        self.world.launched(marks)
        engine = self.world.kernel.run(self.world.start_engine, self._count, "mixed")
        engine.boots_s = self.world.loop.chance.uniform(0.3, 4.0)
        self._count += 1
        pid = ProcessId(engine.process.pid, 1)
        self.running[pid] = engine, dict(marks)
        virtual.running().fuse()  # type: ignore[union-attr]
        return pid

    def _fails(self, process: Any) -> None:
        """After each round of starts that fail, a controller waits twice as long: 1 s, 2 s, 4 s and so on."""
        now_s = self.world.loop.now_s
        rounds: list[float] = process.__dict__.setdefault("failed_starts_s", [])
        if rounds and now_s - rounds[-1] < ROUND_S:  # Of several that are wanted, each is tried once.
            return
        if len(rounds) > 1 and now_s - rounds[-1] < 2.0 ** (len(rounds) - 1) - ROUND_S:
            self.world.breaks(
                f"{process.name} tries starts that failed {len(rounds)} times without waiting longer"
            )
        rounds.append(now_s)

    def alive(self, pid: ProcessId) -> bool:
        return pid in self.running and self.running[pid][0].alive

    def end(self, pid: ProcessId, *, insist: bool = False) -> None:
        if self.alive(pid) and (insist or self.running[pid][0].process.state != FROZEN):
            engine = self.running[pid][0]
            self.world.troubled(engine.name, 0.0)
            engine.process.kill()

    def healthy(self, url: str) -> bool:
        for engine, _ in self.running.values():
            if engine.url == url and engine.alive:
                well = not engine.mute and self.world.loop.now_s > engine.began_s + engine.boots_s
                if well and engine not in self._came_up:  # Starts do come to something: counts begin anew.
                    self._came_up.append(engine)
                    for process in self.world.loop.processes.values():
                        process.__dict__.pop("failed_starts_s", None)
                return well
        return False

    def is_hung(self, pid: ProcessId) -> bool:
        return self.alive(pid) and self.running[pid][0].process.state == FROZEN

    def marked(self, name: str, value: str) -> Iterator[tuple[ProcessId, dict[str, str]]]:
        yield from ((pid, marks) for pid, (_, marks) in self.running.items() if self.alive(pid))

    def install(self) -> None:
        local_launcher.process = SimpleNamespace(  # type: ignore[attr-defined]
            ProcessId=ProcessId,
            Ports=lambda host, clock: SimpleNamespace(free=lambda count=1: HTTP),
            spawn=self.spawn,
            alive=self.alive,
            end=self.end,
            healthy=self.healthy,
            is_hung=self.is_hung,
            marked=self.marked,
            parent_of=lambda pid: 0,
            title_of=lambda pid: "",
            rotate=lambda log: None,
            last_words=lambda log: "",
        )


@contextmanager
def _release_before(applies: bool = True) -> Iterator[None]:
    """What state files were in the release before this one."""
    whole = state_store.MIGRATIONS
    if applies:
        state_store.MIGRATIONS = whole[:-1]
    state_store.VERSION = len(state_store.MIGRATIONS)
    try:
        yield
    finally:
        state_store.MIGRATIONS, state_store.VERSION = whole, len(whole)


class ControllerService:
    def __init__(self, world: World) -> None:
        self.world, self.loop = world, world.loop
        self.host = world.loop.network.host("ctl")
        self.host.folder = world.folder / "ctl"
        self.path = self.host.folder / "state.db"
        self.machine = Machine(world)
        self.machine.install()
        http_client.connection_to = BlockingHttp  # type: ignore[assignment]
        self.processes: list[Process] = []
        self.fuses: list[int] = []
        with _release_before(any(fault.kind == "ctl_older" for fault in world.scenario.faults)):
            store = StateStore(self.path)
        store.add_plan(world.gateway.resolved.plan, 0.0, "begin")
        store.close()

    def older(self) -> None:
        """A controller of the release before is started beside: it refuses, and leaves all as it is."""
        before = self._content()
        try:
            with _release_before():
                StateStore(self.path)
        except FormatError as error:
            self.loop.told("refused", "an older controller", str(error))
        else:
            self.world.breaks("a controller takes the state of a newer release")
        if self._content() != before:
            self.world.breaks("a controller that refuses a state has changed it")

    def _content(self) -> list[str]:
        with closing(sqlite3.connect(self.path)) as db:
            return [*db.iterdump(), str(db.execute("PRAGMA user_version").fetchone())]

    def start(self) -> None:
        process = Process(self.loop, f"controller {len(self.processes)}", self.host)
        process.fuse = lambda: self._fuse(process)  # type: ignore[attr-defined]
        self.processes.append(process)
        self.loop.call_soon(self._begin, process, context=process.context.copy())

    def _fuse(self, process: Process) -> None:
        if self.fuses and not self.world.over:
            self.fuses[0] -= 1
            if self.fuses[0] <= 0:
                self.fuses.pop(0)
                self.kill(process)
        if process.state == DEAD:
            raise Killed

    def kill(self, process: Process) -> None:
        if process.state != DEAD:
            self.loop.told("fault", "killed", process.name)
            process.kill()
            wait_s = self.loop.chance.uniform(0.05, 4.0)
            self.loop.call_later(wait_s, self.start, context=self.world.kernel)

    def _begin(self, process: Process) -> None:
        try:
            store = WorldStore(self.path)
            process.remains.append(store)
            process.store = store  # type: ignore[attr-defined]
            lease = Lease(store)
            launcher = local_launcher.LocalLauncher(
                self.machine,  # type: ignore[arg-type]
                self.host.folder / "logs",  # type: ignore[operator]
                "owner",
                free=lambda: None,
            )
            gateway = GatewayClient("http://gw:8001", "operators")
            controller = Controller(store, lease, launcher, gateway, linger_s=LINGER_S, start_s=START_S)
            process.lease = lease  # type: ignore[attr-defined]
            lease.inherit()
        except Killed:
            return
        except PotluckError as error:
            self._failed(process, error)
            return
        self._turn(process, controller)

    def _turn(self, process: Process, controller: Controller) -> None:
        began_s = time.time()
        try:
            turn = controller.turn()
        except Killed:
            return
        except PotluckError as error:
            self._failed(process, error)
            return
        if process.state != DEAD:
            if turn.acted and self._lease_s(process) < began_s + CONTROLLER_LEASE_S:
                self.world.breaks(f"{process.name} took a turn, and did not renew its lease")
            self.loop.call_later(TURN_S, self._turn, process, controller, context=process.context.copy())

    def _lease_s(self, process: Process) -> float:
        """Until when the lease is this process's, by the state; for ever if another has taken it meanwhile."""
        ((holder, until_s),) = process.store.rows("SELECT holder, until_s FROM lease")  # type: ignore[attr-defined]
        return float(until_s) if holder == process.lease.holder else inf  # type: ignore[attr-defined]

    def _failed(self, process: Process, error: PotluckError) -> None:
        """It ends with a line; whoever runs it starts it again."""
        self.loop.told("ended", process.name, str(error))
        self.world.breaks(f"{process.name} ended with {json.dumps(str(error))}")
        self.kill(process)

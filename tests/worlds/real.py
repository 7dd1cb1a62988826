"""The faults of a seed against real processes: is a world kinder than the kernel?

python -m worlds.real --count 20 [--first SEED] [--minutes 20]

The gateway is started by its own supervisor, each engine is a process of its own, clients are in this one; all speak
TCP over loopback. Links are cut, thinned and delayed by a relay between them, processes are killed and stopped by
signals. What clients saw, the usage file and the log are judged by the rules of worlds; then the same scenario is
played in a world. Left out: faults of disks, clocks and controllers, and answers that would take minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import uvloop

from potluck.gateway.serve import serve
from potluck.gateway.values import ListenAddresses
from potluck.gateway.workers.supervisor import BrainProcessContext, Supervisor
from potluck.gateway.workers.worker import WorkerContext
from worlds import rules
from worlds.clients import Ask, Outcome
from worlds.engines import HTTP, KV
from worlds.loop import Link
from worlds.real_engine import RealLoop
from worlds.runner import answers, apart, say
from worlds.virtual import DEAD, FROZEN, RUNS, Host
from worlds.world import ADMIN_KEY, Keys, Scenario, World, card, resolved_of, scenario_of, settings_of

KNOBS = ("slow", "refuses", "refusal", "lies", "stuck", "mute", "forgets", "wrong_kv")
LEFT_OUT = ("power", "disk_full", "clock", "upgrade")
MOST_ENGINES, MOST, MOST_STALL_S = 6, 80, 10.0
ENDS_S, SETTLES_S, LOOK_S = 150.0, 60.0, 0.01


@dataclass(eq=False)
class End:
    """Of a relayed connection, where it leaves to."""

    link: Link
    writer: asyncio.StreamWriter
    peer: Any = None

    def _reset(self) -> None:
        self.writer.transport.abort()


class RealNetwork:
    """Hosts are addresses of loopback: 127.N.0.x is an engine as others see it, 127.N.1.x where it listens."""

    def __init__(self) -> None:
        self.number, self.far = 10 + os.getpid() % 200, Link(0.0, 0.0, 1e9)
        self.links: defaultdict[tuple[str, str], Link] = defaultdict(lambda: replace(self.far, held=[]))
        self.hosts: dict[str, Host] = {}
        self.servers: defaultdict[str, list[asyncio.Server]] = defaultdict(list)
        self.open: dict[End, None] = {}

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def address(self, kind: int, place: int = 0) -> str:
        return f"127.{self.number}.{kind}.{place + 1}"

    def link(self, source: str, target: str) -> Link:
        if source[0] == target[0] == "e":  # between engines: the KV of one of them
            source, target = (source, "kv") if source < target else ("kv", target)
        return self.links[source, target]

    def heal(self, link: Link) -> None:
        link.cut = False

    def ends(self, *links: Link) -> list[End]:
        return [end for end in self.open if any(end.link is link for link in links)]

    async def relay(self, far: str, name: str, listen: tuple[str, int], target: tuple[str, int]) -> None:
        """From `far` to whoever is called `name`."""
        there, back = self.link(far, name), self.link(name, far)

        async def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while there.cut or back.cut:
                await asyncio.sleep(LOOK_S)
            try:
                other, onward = await asyncio.open_connection(*target)
            except OSError:
                writer.transport.abort()
                return
            ends = End(there, onward), End(back, writer)
            ends[0].peer, ends[1].peer = ends[1], ends[0]
            await asyncio.gather(self._flow(reader, ends[0]), self._flow(other, ends[1]))

        self.servers[name].append(await asyncio.start_server(arrived, *listen))

    async def _flow(self, reader: asyncio.StreamReader, end: End) -> None:
        self.open[end], link = None, end.link
        try:
            data = b" "
            while data:
                data = await reader.read(1 << 16)
                await asyncio.sleep(link.latency_s + len(data) / link.bytes_per_s)
                while link.cut:
                    await asyncio.sleep(LOOK_S)
                end.writer.write(data)
                await end.writer.drain()
            end.writer.close()
        except OSError:
            end.writer.transport.abort()
        del self.open[end]

    def close(self, name: str) -> None:
        for server in self.servers.pop(name, ()):
            server.close()


class RealProcess:
    def __init__(self, pid: int, name: str, popen: subprocess.Popen[str] | None = None) -> None:
        self.pid, self.name, self.popen, self.host = pid, name, popen, Host(name)
        self.frozen, self.ends_by = False, pid  # A Brain is told to end by its parent.
        self.before_kill: Any = lambda silent: None

    @property
    def state(self) -> str:
        if (self.popen is not None and self.popen.poll() is not None) or not Path(
            f"/proc/{self.pid}"
        ).exists():
            return DEAD
        return FROZEN if self.frozen else RUNS

    def freeze(self) -> None:
        self.frozen = True
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.frozen = False
        self.signal(signal.SIGCONT)

    def kill(self, silent: bool = False) -> None:
        self.before_kill(silent)
        self.signal(signal.SIGKILL)
        if self.popen is not None:
            self.popen.wait()

    def signal(self, number: int) -> None:
        if self.state != DEAD:
            os.kill(self.ends_by if number == signal.SIGTERM else self.pid, number)


class RealEngine:
    """An engine's process, as faults see it: what they set is told to it."""

    def __init__(self, loop: RealLoop, place: int, fingerprint: str, token_s: float) -> None:
        self.name, self.role, self.fingerprint = f"e{place}", "mixed", fingerprint
        self.running: dict[Any, None] = {}
        network, self.began_s = loop.network, loop.now_s
        places = network.address(1, place), network.address(0, place)
        self.url = f"http://{places[1]}:{HTTP}"
        command = [sys.executable, "-m", "worlds.real_engine", *places, fingerprint, str(token_s)]
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.process = RealProcess(popen.pid, self.name, popen)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in KNOBS and self.alive:
            self.process.popen.stdin.write(json.dumps({name: value}) + "\n")  # type: ignore[union-attr]

    @property
    def alive(self) -> bool:
        return self.process.state != DEAD

    def unstick(self) -> None:
        self.stuck = False


def be_gateway(folder: str, host: str, seed: str) -> None:
    """As `serve_forever`, with a world's plan and model."""
    scenario = fit(scenario_of(int(seed), shipped=False))
    assert scenario is not None
    addresses = ListenAddresses(host, HTTP, host, HTTP + 1, workers=scenario.workers)
    context = WorkerContext(settings_of(Path(folder), addresses), scenario.policy, (card,))
    resolved = resolved_of(scenario.mixed, scenario.combos)

    def brain(process: BrainProcessContext) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(resolved, context, lambda url, admin: None, process))

    Supervisor(context, brain).run()


class RealGateway:
    """The gateway's supervisor and what it forked, by their titles."""

    def __init__(self, world: RealWorld) -> None:
        self.world, self.host = world, Host(world.loop.network.address(3))
        self.workers, self.starts, self.ending = world.scenario.workers, 0, False
        self.settings = settings_of(world.folder, ListenAddresses())
        self.usage, self.log = world.folder / "gw/usage.jsonl", world.folder / "gw/brain.log"
        self._known: dict[int, RealProcess] = {}

    def start(self) -> None:
        self.starts += 1
        words = str(self.world.folder), self.host.name, str(self.world.scenario.seed)
        with (self.world.folder / "stderr").open("a") as errors:
            command = [sys.executable, "-m", "worlds.real", "--gateway", *words]
            self.popen = subprocess.Popen(command, stderr=errors)

    @property
    def processes(self) -> dict[int, RealProcess]:
        result = {}
        path = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        for pid in map(int, path.read_text().split() if path.exists() else ()):
            title = Path(f"/proc/{pid}/cmdline").read_text().strip("\0")
            place = int(title.split()[-1]) if "worker_process" in title else -1
            result[place] = process = self._known.setdefault(pid, RealProcess(pid, title))
            if place < 0:
                process.ends_by = self.popen.pid
        return result

    def kill(self, place: int) -> None:
        self.starts += 1
        self.processes[place].kill()

    def look(self) -> None:
        """One that was told to end is started anew."""
        if self.popen.poll() is not None:
            if not self.ending:
                self.world.breaks(
                    f"the gateway ended with {self.popen.returncode}, and nobody had told it to"
                )
            self.ending = False
            self.start()

    def close(self) -> None:
        children = tuple(self.processes.values())
        for process in children:
            process.thaw()
        self.popen.terminate()
        try:
            self.popen.wait(2 * self.settings.drain_s)
        except subprocess.TimeoutExpired:
            self.world.breaks("the gateway does not end")
            self.popen.kill()
            for process in children:
                process.kill()

    def made(self, kind: type) -> list[Any]:
        return []


def _told(host: str, port: int, path: str) -> dict[str, Any]:
    asked = Request(f"http://{host}:{port}/{path}", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    with urlopen(asked, timeout=10.0) as answer:
        return dict(json.load(answer))


class RealWorld(World):
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.check_log = scenario, True
        self.loop: Any = RealLoop(scenario.seed)
        self.loop.network = RealNetwork()
        self.kernel = contextvars.Context()
        self.folder = Path(tempfile.mkdtemp(prefix="real-"))
        self.broken, self.problem = [], None
        self.begun, self.over, self.limited = False, False, bool(scenario.limits)
        self.troubles, self.power_lost_s, self.faults = [], [], Counter()
        self.clients, self.outcomes, self.engines = [], [], []
        (self.folder / "gw").mkdir()
        self.keys = Keys(self.folder / "keys.jsonl", scenario.limits)
        self.gateway: Any = RealGateway(self)

    def door(self, ask: Ask) -> tuple[str, int]:
        return self.loop.network.address(2, ask.number % 7), HTTP

    def served_by(self, transport: Any) -> str:
        return "gw"

    def troubled(self, where: str, lasts_s: float) -> None:
        super().troubled(
            "gw" if where.startswith("worker") else where, lasts_s
        )  # whose clients' is not known

    def start_engine(self, place: int, role: str, fingerprint: str = "f") -> Any:
        engine: Any = RealEngine(self.loop, place, fingerprint, self.scenario.token_s)
        self.engines[place : place + 1] = [engine]
        network, out = self.loop.network, engine.process.popen.stdout
        engine.process.host = host = network.host(engine.name)
        links = network.link("gw", engine.name), network.link(engine.name, "gw")

        def gone(silent: bool) -> None:
            if silent:  # its machine is off: nobody says so
                links[0].cut = links[1].cut = True
            else:
                network.close(engine.name)

        async def listen() -> None:
            network.close(engine.name)
            seen, here = network.address(0, place), network.address(1, place)
            await network.relay("gw", engine.name, (seen, HTTP), (here, HTTP))
            await network.relay("kv", engine.name, (seen, KV), (here, KV))
            if host.down:
                links[0].cut = links[1].cut = host.down = False

        def said() -> None:
            line = out.readline().strip()
            if line == "ready":
                self.loop.create_task(listen())
            elif line:
                self.breaks(line)
            else:
                self.loop.remove_reader(out)

        engine.process.before_kill = gone
        self.loop.add_reader(out, said)
        return engine

    async def _play(self) -> None:
        scenario, network = self.scenario, self.loop.network
        for place in range(scenario.mixed + 2 * scenario.combos):
            self.start_engine(place, "mixed")
        self._list_engines()
        self.gateway.start()
        for place in range(7):
            there = network.address(3), HTTP
            await network.relay(f"c{place}", "gw", (network.address(2, place), HTTP), there)
        await self._serves()
        self.begun = True
        self._schedule(self.loop.time() + 1.0)
        await self._until(1.0 + scenario.trouble_ends_s, lambda: False)
        await self._until(ENDS_S, lambda: all(client.done for client in self.clients))
        for client in self.clients:
            if not client.done:
                self.breaks(f"request {client.ask.number} ({client.ask.how}): never ended")
        if not await self._serves():
            self.breaks("trouble is over, and not every request is answered")
        if not await self._until(SETTLES_S, lambda: not self._left()):
            self.breaks(f"everybody has gone, and there is still {self._left()}")

    def _left(self) -> dict[str, int]:
        """Requests that the Brain has, and segments that engines run."""
        network = self.loop.network
        left = {"brain": _told(network.address(3), HTTP + 1, "snapshot")["open_requests"]}
        for place, engine in enumerate(self.engines):
            left[engine.name] = _told(network.address(1, place), HTTP, "status")["running"]
        return {name: count for name, count in left.items() if count}

    async def _serves(self) -> bool:
        """Whether each of a few requests is answered before long."""
        for _ in range(60):
            probes = self.probes()
            await self._until(SETTLES_S, lambda: all(client.done for client in probes))  # noqa: B023
            self.clients = [client for client in self.clients if client.ask.number < 1000]
            if all(client.outcomes and client.outcomes[-1].status == 200 for client in probes):
                return True
            await asyncio.sleep(0.5)
        return False

    async def _until(self, within_s: float, holds: Callable[[], bool]) -> bool:
        until_s = self.loop.time() + within_s
        while self.loop.time() < until_s:
            if holds():
                return True
            self.gateway.look()
            await asyncio.sleep(0.1)
        return False

    def ended(self, outcome: Outcome) -> None:
        if self.begun:
            super().ended(outcome)
        elif outcome.status == 200:  # others came before anybody served
            self.outcomes.append(outcome)

    def run(self) -> Any:
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(lambda *given: self.over or self._unhandled(*given))
        try:
            self.loop.run_until_complete(self._play())
        finally:
            self.over = True
            self.gateway.close()
            for name in tuple(self.loop.network.servers):
                self.loop.network.close(name)
            for engine in self.engines:
                engine.process.kill()
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0.1))
            self.loop.close()
        errors = (self.folder / "stderr").read_text()
        if "Traceback" in errors:
            self.breaks(f"the gateway raised: {errors[errors.index('Traceback') :][-300:]!r}")
        rules._usage(self)
        rules._replays(self)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self


def fit(scenario: Scenario) -> Scenario | None:
    """What of it real processes can be put through in a minute; None: too little."""
    asks = tuple(
        replace(
            ask, most=min(ask.most, MOST), least=min(ask.least, MOST), amount=min(ask.amount, MOST_STALL_S)
        )
        for ask in scenario.asks
    )
    struck = tuple(fault for fault in scenario.faults if fault.kind not in LEFT_OUT)
    small = scenario.mixed + 2 * scenario.combos <= MOST_ENGINES
    if scenario.controlled or not struck or not small:
        return None
    return replace(scenario, asks=asks, faults=struck, token_s=min(0.05, scenario.token_s))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worlds.real")
    parser.add_argument("--gateway", nargs=3, help="be one: folder, address, seed")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=20.0)
    given = parser.parse_args()
    if given.gateway:
        be_gateway(*given.gateway)
        return
    end_s, seed, played, differ = time.monotonic() + 60 * given.minutes, given.first, 0, 0
    say(
        "| seed | faults | requests | answered: real, world | rules broken: real, world |\n|---|---|---|---|---|"
    )
    while played < given.count and time.monotonic() < end_s:
        scenario = fit(scenario_of(seed, shipped=False))
        seed += 1
        if scenario is None:
            continue
        played += 1
        real = RealWorld(scenario).run()
        there = apart(scenario)
        sides = (answers(real), real.broken), (there.answers, there.broken)
        kinds = ", ".join(fault.kind for fault in scenario.faults)
        counts = ", ".join(str(sum(ends.values())) for ends, _ in sides)
        words = ", ".join(broken[0] if broken else "none" for _, broken in sides)
        differ += bool(real.broken) != bool(there.broken)
        say(f"| {scenario.seed} | {kinds} | {len(scenario.asks)} | {counts} | {words} |")
    say(f"{played} seeds, {differ} with another verdict")
    os._exit(differ > 0)


if __name__ == "__main__":
    main()

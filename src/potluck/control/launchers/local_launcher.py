"""Engines as processes of this machine. They outlive the controller: one that comes back finds them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from potluck.control.control_values import EngineSighting, EngineSpec, NodeNews, Place
from potluck.control.launchers import local_capacity, process
from potluck.control.launchers.engine_command import DeferredCommands, EngineCommands
from potluck.core.errors import CapacityError

MODULE = "potluck.cli.engine.fork_server"
READY_S = 120.0
ANSWER_S = 4.0  # To fork; less than a controller's lease lasts.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ForkServer:
    """Loads from when it is made, and refuses where it cannot fork, and the caller then starts a process."""

    def __init__(
        self, marks: Mapping[str, str], log: Path, module: str = MODULE, style: str = "emulated"
    ) -> None:
        """`style`: of the engines that are to come, as `EngineCommands` has it."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._ready = False
        self._read = b""
        self.cpu: local_capacity.CpuCost | None = None
        """What computing takes here, once it is ready; None where engines compute nothing."""
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, style],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, **ONE_THREAD, **marks},
                start_new_session=True,
            )

    def wait_ready(self, within_s: float = READY_S) -> bool:
        """Whether it has loaded everything by then; if not it is given up."""
        if not self._is_ready(within_s):
            self.close()
        return self._ready

    def _is_ready(self, within_s: float) -> bool:
        if not self._ready:
            line = self._line(within_s)
            self._ready, self.cpu = line.get("ready") is True, local_capacity.cost_of(line.get("cpu"))
        return self._ready

    def fork(self, arguments: Sequence[str], log: Path) -> process.ProcessId | None:
        stdin = self._process.stdin
        if stdin is None or stdin.closed or not self._is_ready(0.0):
            return None
        try:
            stdin.write(json.dumps({"arguments": list(arguments), "log": str(log)}).encode() + b"\n")
            stdin.flush()
        except OSError:
            self.close()
            return None
        number = self._line(ANSWER_S).get("pid")
        started = process.started_at(number) if isinstance(number, int) else None
        if not isinstance(number, int) or started is None:
            self.close()
            return None
        return process.ProcessId(number, started)

    def _line(self, within_s: float) -> dict[str, object]:
        stdout = self._process.stdout
        until_s = time.monotonic() + within_s
        while stdout is not None and b"\n" not in self._read:
            if not select.select([stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
                return {}
            more = os.read(stdout.fileno(), 65_536)
            if not more:
                return {}
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        try:
            document = json.loads(line)
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    def close(self) -> None:
        self._ready = False
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.kill()  # it has nothing to put in order, and may have been stopped
        self._process.wait()


NAME_MARK, OWNER_MARK, FORK_MARK = "POTLUCK_INSTANCE", "POTLUCK_OWNER", "POTLUCK_NURSERY"
FORKED_TITLE = "potluck-engine"
GRACE_S = 15.0  # From asking a process to end to making it.


class LocalLauncher:
    """`owner` is this controller's mark, the same after a restart: the path of its state file, say."""

    def __init__(
        self,
        engine_commands: EngineCommands | DeferredCommands,
        folder: Path,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
        free: local_capacity.Free = local_capacity.free_bytes,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._maker, self._folder, self._owner, self._clock = engine_commands, folder, owner, clock
        self._free, self.fork_server = free, fork_server
        self._ports = process.Ports(engine_commands.host, clock)
        self._ending: dict[str, float] = {}
        self._chips: dict[str, str] = {}

    def log_of(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def start(self, name: str, engine_spec: EngineSpec) -> Place:
        local_capacity.must_have_room(self._maker.style, 1, self._free)
        port, kv_port = self._ports.free(), self._ports.free(self._maker.workers(engine_spec))
        command = self._maker.command(engine_spec, port, kv_port)
        marks, log = {NAME_MARK: name, OWNER_MARK: self._owner}, self.log_of(name)
        chip = self._chips_for(engine_spec)
        if chip:
            self._chips[name] = chip
            marks |= self._maker.variables.get(chip, {local_capacity.VISIBLE: chip})
        pid = None if self.fork_server is None else self.fork_server.fork(command[3:], log)
        if pid is None:
            pid = process.spawn(command, marks, log)
        return {
            "pid": pid.number,
            "started": pid.started,
            "url": f"http://{self._maker.host}:{port}",
            **({"chip": chip} if chip else {}),
        }

    def _chips_for(self, engine_spec: EngineSpec) -> str:
        """A GPU of the right kind for each of an engine's workers that no other engine has, in their order."""
        taken = {chip for chips in self._chips.values() for chip in chips.split(",")}
        texts: list[str] = []
        for node in self._maker.chips_for(engine_spec):
            mine = [chip for kind, chip in self._maker.chips if kind == node]
            free = [chip for chip in mine if chip not in taken]
            if not free:
                raise CapacityError(f"all {len(mine)} GPUs of type {node} on this machine are in use")
            texts.append(free[0])
            taken.add(free[0])
        return ",".join(texts)

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        engine_sightings = [self._seen(name, place) for name, place in places.items()]
        known = {place.get("pid") for place in places.values()}
        for pid in engines_of(self._owner):
            if pid.number not in known:
                # Started, but not recorded, as the controller was killed in between.
                process.end(pid)
        self._insist(places)
        there = {seen.name: places[seen.name] for seen in engine_sightings if seen.state != "dead"}
        self._chips = {name: str(place["chip"]) for name, place in there.items() if place.get("chip")}
        return tuple(engine_sightings)

    def _seen(self, name: str, place: Place) -> EngineSighting:
        pid = _pid(place)
        log = self.log_of(name)
        if pid is None:
            return EngineSighting(name, "dead", problem="was never started")
        if not process.alive(pid):
            asked = self._ending.pop(name, None) is not None
            problem = "was asked to end" if asked else process.last_words(log) or "ended and printed nothing"
            return EngineSighting(name, "dead", problem=problem)
        process.rotate(log)
        url = str(place.get("url", ""))
        if process.is_hung(pid):  # it is not waited for
            return EngineSighting(name, "starting", is_hung=True)
        return EngineSighting(name, "up", url) if process.healthy(url) else EngineSighting(name, "starting")

    def stop(self, name: str, place: Place) -> None:
        pid = _pid(place)
        if pid is not None and name not in self._ending:
            self._ending[name] = self._clock()
            process.end(pid)

    def kill(self, name: str, place: Place) -> None:
        pid = _pid(place)
        if pid is not None:
            self._chips.pop(name, None)  # the one in its place has them
            process.end(pid, insist=True)

    def _insist(self, places: dict[str, Place]) -> None:
        for name, asked_s in list(self._ending.items()):
            pid = _pid(places.get(name, {}))
            if pid is None or not process.alive(pid):
                del self._ending[name]
            elif self._clock() - asked_s > GRACE_S:
                process.end(pid, insist=True)

    def news(self) -> tuple[NodeNews, ...]:
        return ()


def engines_of(owner: str) -> Iterator[process.ProcessId]:
    """Engines with this owner's mark, recorded in the state or not, and children that outlived their engine."""
    process_ids = [
        pid
        for pid, variables in process.marked(OWNER_MARK, owner)
        # One that was forked has its fork server's variables, and a title of its own.
        if NAME_MARK in variables or (FORK_MARK in variables and process.title_of(pid) == FORKED_TITLE)
    ]
    # Workers of vLLM have their engine's variables, and end with it.
    engines = {pid.number for pid in process_ids}
    yield from (pid for pid in process_ids if process.parent_of(pid) not in engines)


def _pid(place: Place) -> process.ProcessId | None:
    number, started = place.get("pid"), place.get("started")
    return (
        process.ProcessId(number, started) if isinstance(number, int) and isinstance(started, int) else None
    )

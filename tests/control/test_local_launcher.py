"""Engine processes on this machine: found by successors, and ended on request or by force."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from potluck.cli.engine.fork_server import MOCK_MODULES, MODULES
from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import EngineCommands, emulate_text
from potluck.control.launchers.local_capacity import CpuCost, cost_of, needed_cpus, slow_line
from potluck.control.launchers.local_launcher import (
    FORK_MARK,
    OWNER_MARK,
    ForkServer,
    LocalLauncher,
    engines_of,
)
from potluck.control.launchers.process import (
    Ports,
    ProcessId,
    alive,
    end,
    last_words,
    marked,
    own_ports,
    rotate,
    spawn,
)
from potluck.core.codec import decode
from potluck.core.errors import InputError
from potluck.core.values.layout import EmulatedReplica, Layout, Stage, StageNode, single
from potluck.core.values.plan import Deployment, Plan, PlannedReplica, Prediction, Template
from potluck.core.values.types import LengthBin, Traffic

MAKE = EngineSpec("m", single("1xA10", 1, 2), "east")
HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def wait_until(what: Callable[[], bool], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s, "it never came about"
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class ScriptEngines(EngineCommands):
    script: str = HEALTHY

    def command(self, engine_spec: EngineSpec, port: int, kv_port: int) -> list[str]:
        return [sys.executable, "-S", "-c", self.script, str(port)]


def test_local_engine_is_found_by_a_successor_and_ends(tmp_path: Path) -> None:
    owner = str(tmp_path)
    first = LocalLauncher(ScriptEngines(), tmp_path, owner)
    place = first.start("i1", MAKE)
    wait_until(lambda: first.look({"i1": place})[0].state == "up")
    second = LocalLauncher(ScriptEngines(), tmp_path, owner)
    (seen,) = second.look({"i1": place})
    assert (seen.state, seen.url) == ("up", place["url"])
    second.stop("i1", place)
    wait_until(lambda: second.look({"i1": place})[0].state == "dead")
    assert list(marked("POTLUCK_OWNER", owner)) == []


def test_unrecorded_engine_process_is_ended(tmp_path: Path) -> None:
    owner = str(tmp_path)
    lost = LocalLauncher(ScriptEngines(), tmp_path, owner)
    place = lost.start("i1", MAKE)
    pid = ProcessId(int(str(place["pid"])), int(str(place["started"])))
    assert alive(pid)
    successor = LocalLauncher(ScriptEngines(), tmp_path, owner)

    def gone() -> bool:
        successor.look({})
        return not alive(pid)

    wait_until(gone)


def test_engine_processes_of_another_owner_are_left_alone(tmp_path: Path) -> None:
    mine = LocalLauncher(ScriptEngines(), tmp_path, f"{tmp_path}/mine")
    place = mine.start("i1", MAKE)
    LocalLauncher(ScriptEngines(), tmp_path, f"{tmp_path}/theirs").look({})
    assert mine.look({"i1": place})[0].state != "dead"
    mine.stop("i1", place)
    wait_until(lambda: mine.look({"i1": place})[0].state == "dead")


def test_dead_engine_reports_its_last_log_line(tmp_path: Path) -> None:
    launcher = LocalLauncher(
        ScriptEngines(script="import sys; sys.exit('potluck: error: no memory left')"),
        tmp_path,
        str(tmp_path),
    )
    place = launcher.start("i1", MAKE)
    wait_until(lambda: launcher.look({"i1": place})[0].state == "dead")
    assert launcher.look({"i1": place})[0].problem == "no memory left"


def test_engine_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    now = [0.0]
    launcher = LocalLauncher(ScriptEngines(script=DEAF), tmp_path, str(tmp_path), clock=lambda: now[0])
    place = launcher.start("i1", MAKE)
    wait_until(lambda: last_words(launcher.log_of("i1")) == "deaf")
    launcher.stop("i1", place)
    assert launcher.look({"i1": place})[0].state == "starting"
    now[0] = 16.0
    launcher.look({"i1": place})
    wait_until(lambda: launcher.look({"i1": place})[0].state == "dead")


def test_frozen_engine_is_reported_silent_and_killed(tmp_path: Path) -> None:
    launcher = LocalLauncher(ScriptEngines(), tmp_path, str(tmp_path))
    place = launcher.start("i1", MAKE)
    wait_until(lambda: launcher.look({"i1": place})[0].state == "up")
    number = int(str(place["pid"]))
    os.kill(number, signal.SIGSTOP)
    wait_until(lambda: launcher.look({"i1": place})[0].is_hung)
    os.kill(number, signal.SIGCONT)
    wait_until(lambda: launcher.look({"i1": place})[0].state == "up")
    os.kill(number, signal.SIGSTOP)
    launcher.kill("i1", place)
    wait_until(lambda: launcher.look({"i1": place})[0].state == "dead")


def test_reused_process_id_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    pid = spawn([sys.executable, "-S", "-c", "import time; time.sleep(60)"], {}, tmp_path / "log")
    other = ProcessId(pid.number, pid.started + 1)
    assert not alive(other)
    end(other)
    assert alive(pid)
    end(pid, insist=True)
    wait_until(lambda: not alive(pid))


def test_engine_log_is_rotated_while_its_writer_continues(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import sys, time\nfor i in range(400):\n print('x' * 99, flush=True); time.sleep(0.001)\nprint('end')"
    pid = spawn([sys.executable, "-S", "-c", script], {}, log)
    wait_until(lambda: log.exists() and log.stat().st_size > 5000)
    rotate(log, 5000)
    wait_until(lambda: not alive(pid))
    assert log.with_name("log.1").stat().st_size > 5000
    assert log.stat().st_size < 40_000
    assert b"\0" not in log.read_bytes()  # no hole in its place
    assert last_words(log) == "end"


def test_engine_commands_have_the_planned_layout_and_budget() -> None:
    command = EngineCommands(style="mock", catalog_names=(("m", "llama-3.1-8b"),)).command(MAKE, 1, 2)
    assert command[command.index("--emulate") + 1] == "1xA10:llama-3.1-8b:1"
    assert "--mock" in command
    long = Layout(
        (Stage(2, (StageNode("1xA10", 1),)), Stage(2, (StageNode("1xL4", 1), StageNode("1xL4", 1))))
    )
    body = json.loads(emulate_text(EngineSpec("m", long, "east"), "x"))
    assert decode(EmulatedReplica, body) == EmulatedReplica("x", long)
    planned = EngineCommands(style="mock").command(replace(MAKE, step_tokens=192), 1, 2)
    assert planned[planned.index("--token-budget") + 1] == "192"
    assert "--token-budget" not in command, "nothing was said of it"
    emulated = EngineCommands(style="emulated").command(EngineSpec("m", long, "east"), 1, 2)
    assert json.loads(emulated[emulated.index("--emulate") + 1])["layout"]["stages"], (
        "one process acts as all"
    )
    with pytest.raises(InputError, match="--engine"):
        EngineCommands(style="magic")


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_stopped_process_is_ended(tmp_path: Path) -> None:
    launcher = LocalLauncher(ScriptEngines(), tmp_path, str(tmp_path))
    place = launcher.start("i1", MAKE)
    wait_until(lambda: launcher.look({"i1": place})[0].state == "up")
    os.kill(int(str(place["pid"])), signal.SIGSTOP)
    launcher.stop("i1", place)
    wait_until(lambda: launcher.look({"i1": place})[0].state == "dead")


L4 = single("1xL4", 1, 32)
TEMPLATE = Template(
    "t",
    "combo",
    "words",
    (),
    (PlannedReplica("prefill", L4), PlannedReplica("decode", L4), PlannedReplica("mixed", L4)),
    (),
    "measured",
)
PLAN = Plan(
    "auto",
    (TEMPLATE,),
    (Deployment("t", "east", 2),),
    (),
    (),
    (),
    (Prediction("words", 10.0, 12.0, 0.1, 0.05, "measured"),),
    1.0,
    0.0,
)


def traffic_of(rate_per_s: float, answer: int = 80) -> tuple[Traffic, ...]:
    return (Traffic("words", rate_per_s, (LengthBin(500, answer, 1.0),)),)


def test_needed_cpus_are_the_sum_of_prompt_step_and_sequence_costs() -> None:
    cost = CpuCost(1e-4, 5e-3, 1e-4)
    # 10 x 500 prompt tokens; four replicas answer, 20 steps a second each; 10 x 80 answer tokens
    assert needed_cpus(PLAN, traffic_of(10.0), cost) == pytest.approx(0.5 + 80 * 5e-3 + 0.08)
    # no more steps than tokens
    assert needed_cpus(PLAN, traffic_of(0.1), cost) == pytest.approx(0.005 + 8 * 5e-3 + 0.0008)


def test_machine_too_slow_for_emulation_is_reported_with_its_limit() -> None:
    cost = CpuCost(4e-4, 5e-3, 0.0)
    line = slow_line(PLAN, traffic_of(10.0), cost, 1)
    assert line.startswith("this machine would have to compute 2.4 times faster to stand for these GPUs")
    assert "at the planned 10.0 requests/s: beyond about 3.00 requests/s latencies are the CPU's" in line
    assert slow_line(PLAN, traffic_of(10.0), cost, 2) == ""


@pytest.mark.parametrize("said", [None, {}, {"prompt_token_s": 1.0}, "quick", {"prompt_token_s": "x"}])
def test_missing_cpu_cost_report_is_ignored(said: object) -> None:
    assert cost_of(said) is None


def test_fork_server_cpu_costs_are_validated() -> None:
    assert cost_of({"prompt_token_s": 1, "step_s": 2.0, "sequence_s": 0}) == CpuCost(1, 2.0, 0)
    assert cost_of({"prompt_token_s": float("nan"), "step_s": 2.0, "sequence_s": 0}) is None


WITHIN_S = 60.0
TINY = """
import threading, time
from potluck.cli.engine import fork_server
fork_server.load = lambda style: {load}
fork_server.main()
"""


def _fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: str) -> ForkServer:
    """The real one, but that it loads nothing: engines import what they need."""
    (tmp_path / "tiny_fork_server.py").write_text(TINY.format(load=load))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))
    marks = {OWNER_MARK: str(tmp_path), FORK_MARK: "1"}
    return ForkServer(marks, tmp_path / "logs" / "fork-server.log", "tiny_fork_server")


@pytest.fixture
def fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    result = _fork_server(tmp_path, monkeypatch, "None")
    yield result
    result.close()
    for pid in engines_of(str(tmp_path)):
        end(pid, insist=True)


def _wait_until(what: object) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.parametrize("module", sorted({*MODULES, *MOCK_MODULES}))
def test_fork_server_modules_exist(module: str) -> None:
    """Where something is not, it ends, and every engine is started from nothing: ten times the work, and no word."""
    assert find_spec(module) is not None


def test_forked_engine_runs_logs_and_is_reaped(fork_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    assert fork_server.fork(["--version"], log) is None, "not before it is ready"
    assert fork_server.wait_ready(WITHIN_S)
    pid = fork_server.fork(["--version"], log)
    assert pid is not None
    _wait_until(lambda: not alive(pid))
    assert log.read_text().startswith("potluck, version")


def test_forked_engine_outlives_the_fork_server_and_is_found_by_its_mark(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    assert fork_server.wait_ready(WITHIN_S)
    arguments = ["engine", "serve", "--emulate", "A10:llama-3.1-8b", "--mock", "--port", "0", "--json"]
    log = tmp_path / "two.log"
    pid = fork_server.fork(arguments, log)
    assert pid is not None
    _wait_until(lambda: log.exists() and '"url"' in log.read_text())
    fork_server.close()
    assert alive(pid)
    assert list(engines_of(str(tmp_path))) == [pid], "the fork server itself is no engine"
    assert fork_server.fork(arguments, log) is None, "who asks then starts a process instead"
    end(pid)
    _wait_until(lambda: not alive(pid))


def test_frozen_fork_server_is_killed_and_not_used(fork_server: ForkServer, tmp_path: Path) -> None:
    assert fork_server.wait_ready(WITHIN_S)
    process = fork_server._process
    os.kill(process.pid, signal.SIGSTOP)
    assert fork_server.fork(["--version"], tmp_path / "log") is None, "who asks then starts a process instead"
    assert process.returncode == -signal.SIGKILL
    assert list(engines_of(str(tmp_path))) == []


def test_fork_server_with_threads_refuses_to_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    result = _fork_server(tmp_path, monkeypatch, waits)
    try:
        assert result.wait_ready(WITHIN_S)
        assert result.fork(["--version"], tmp_path / "log") is None
        assert not (tmp_path / "log").exists()
    finally:
        result.close()


def test_fork_server_that_cannot_load_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _fork_server(tmp_path, monkeypatch, "1 / 0")
    assert not result.wait_ready(WITHIN_S)
    assert result.fork(["--version"], tmp_path / "log") is None


def test_engine_ports_are_unique_and_outside_the_ephemeral_range(tmp_path: Path) -> None:
    """Who was given one may listen minutes later, and meanwhile thousands of connections get ports of the system."""
    ports = Ports("127.0.0.1")
    numbers = [number for first in (ports.free(4) for _ in range(100)) for number in range(first, first + 4)]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(own_ports())
    given_out = tmp_path / "range"
    for text, due in (
        ("32768\t60999", range(10_000, 32_768)),
        ("1024 65535", range(10_000, 65_536)),
        ("", None),
    ):
        given_out.write_text(text)
        assert own_ports(given_out) == (due or range(10_000, 32_768))

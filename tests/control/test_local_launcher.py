"""Processes of this machine: they are found again, whoever started them, and end when asked or made to."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import EngineCommands, emulate_text
from potluck.control.launchers.local_launcher import LocalLauncher
from potluck.control.launchers.process import ProcessId, alive, end, last_words, marked, rotate, spawn
from potluck.core.codec import decode
from potluck.core.errors import InputError
from potluck.core.values.layout import EmulatedReplica, Layout, Stage, StageNode, single

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


def until(what: Callable[[], bool], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s, "it never came about"
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Scripts(EngineCommands):
    """Engines that are a few lines of Python."""

    script: str = HEALTHY

    def command(self, make: EngineSpec, port: int, kv_port: int) -> list[str]:
        return [sys.executable, "-S", "-c", self.script, str(port)]


def test_an_engine_starts_is_found_by_a_successor_and_ends(tmp_path: Path) -> None:
    owner = str(tmp_path)
    first = LocalLauncher(Scripts(), tmp_path, owner)
    place = first.start("i1", MAKE)
    until(lambda: first.look({"i1": place})[0].state == "up")
    second = LocalLauncher(Scripts(), tmp_path, owner)
    (seen,) = second.look({"i1": place})
    assert (seen.state, seen.url) == ("up", place["url"])
    second.stop("i1", place)
    until(lambda: second.look({"i1": place})[0].state == "dead")
    assert list(marked("POTLUCK_OWNER", owner)) == []


def test_one_that_was_never_written_down_is_ended(tmp_path: Path) -> None:
    owner = str(tmp_path)
    lost = LocalLauncher(Scripts(), tmp_path, owner)
    place = lost.start("i1", MAKE)
    pid = ProcessId(int(str(place["pid"])), int(str(place["started"])))
    assert alive(pid)
    successor = LocalLauncher(Scripts(), tmp_path, owner)

    def gone() -> bool:
        successor.look({})
        return not alive(pid)

    until(gone)


def test_others_of_the_same_machine_are_left_alone(tmp_path: Path) -> None:
    mine = LocalLauncher(Scripts(), tmp_path, f"{tmp_path}/mine")
    place = mine.start("i1", MAKE)
    LocalLauncher(Scripts(), tmp_path, f"{tmp_path}/theirs").look({})
    assert mine.look({"i1": place})[0].state != "dead"
    mine.stop("i1", place)
    until(lambda: mine.look({"i1": place})[0].state == "dead")


def test_why_it_died_is_the_last_thing_it_said(tmp_path: Path) -> None:
    launcher = LocalLauncher(
        Scripts(script="import sys; sys.exit('potluck: error: no memory left')"), tmp_path, str(tmp_path)
    )
    place = launcher.start("i1", MAKE)
    until(lambda: launcher.look({"i1": place})[0].state == "dead")
    assert launcher.look({"i1": place})[0].problem == "no memory left"


def test_one_that_does_not_listen_to_reason_is_made_to_end(tmp_path: Path) -> None:
    now = [0.0]
    launcher = LocalLauncher(Scripts(script=DEAF), tmp_path, str(tmp_path), clock=lambda: now[0])
    place = launcher.start("i1", MAKE)
    until(lambda: last_words(launcher.log_of("i1")) == "deaf")
    launcher.stop("i1", place)
    assert launcher.look({"i1": place})[0].state == "starting"
    now[0] = 16.0
    launcher.look({"i1": place})
    until(lambda: launcher.look({"i1": place})[0].state == "dead")


def test_one_that_stands_still_is_seen_to_and_is_killed_as_it_stands(tmp_path: Path) -> None:
    launcher = LocalLauncher(Scripts(), tmp_path, str(tmp_path))
    place = launcher.start("i1", MAKE)
    until(lambda: launcher.look({"i1": place})[0].state == "up")
    number = int(str(place["pid"]))
    os.kill(number, signal.SIGSTOP)
    until(lambda: launcher.look({"i1": place})[0].stands_still)
    os.kill(number, signal.SIGCONT)
    until(lambda: launcher.look({"i1": place})[0].state == "up")
    os.kill(number, signal.SIGSTOP)
    launcher.kill("i1", place)
    until(lambda: launcher.look({"i1": place})[0].state == "dead")


def test_a_number_that_was_used_again_is_somebody_else(tmp_path: Path) -> None:
    pid = spawn([sys.executable, "-S", "-c", "import time; time.sleep(60)"], {}, tmp_path / "log")
    other = ProcessId(pid.number, pid.started + 1)
    assert not alive(other)
    end(other)
    assert alive(pid)
    end(pid, insist=True)
    until(lambda: not alive(pid))


def test_a_log_does_not_grow_for_ever_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import sys, time\nfor i in range(400):\n print('x' * 99, flush=True); time.sleep(0.001)\nprint('end')"
    pid = spawn([sys.executable, "-S", "-c", script], {}, log)
    until(lambda: log.exists() and log.stat().st_size > 5000)
    rotate(log, 5000)
    until(lambda: not alive(pid))
    assert log.with_name("log.1").stat().st_size > 5000
    assert log.stat().st_size < 40_000
    assert log.read_bytes()[:1] == b"x"
    assert last_words(log) == "end"


def test_commands_say_what_was_planned() -> None:
    command = EngineCommands(style="pretended", catalog_names=(("m", "llama-3.1-8b"),)).command(MAKE, 1, 2)
    assert command[command.index("--emulate") + 1] == "1xA10:llama-3.1-8b:1"
    assert "--pretend" in command
    long = Layout(
        (Stage(2, (StageNode("1xA10", 1),)), Stage(2, (StageNode("1xL4", 1), StageNode("1xL4", 1))))
    )
    said = json.loads(emulate_text(EngineSpec("m", long, "east"), "x"))
    assert decode(EmulatedReplica, said) == EmulatedReplica("x", long)
    planned = EngineCommands(style="pretended").command(replace(MAKE, step_tokens=192), 1, 2)
    assert planned[planned.index("--token-budget") + 1] == "192"
    assert "--token-budget" not in command, "nothing was said of it"
    with pytest.raises(InputError, match="layout"):
        EngineCommands().command(EngineSpec("m", long, "east"), 1, 2)
    with pytest.raises(InputError, match="--engine"):
        EngineCommands(style="magic")


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_stopped_process_still_ends(tmp_path: Path) -> None:
    launcher = LocalLauncher(Scripts(), tmp_path, str(tmp_path))
    place = launcher.start("i1", MAKE)
    until(lambda: launcher.look({"i1": place})[0].state == "up")
    os.kill(int(str(place["pid"])), signal.SIGSTOP)
    launcher.stop("i1", place)
    until(lambda: launcher.look({"i1": place})[0].state == "dead")

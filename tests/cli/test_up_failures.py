"""Failures of `potluck up`: each is one clear message with what is kept and how to continue."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from live_plans import WHOLE, write_plans

from potluck.cli.main import run
from potluck.cli.simulating.simulation import read_one_spec, read_plan_and_spec
from potluck.cli.up import up as up_module
from potluck.cli.up.prepare import PreparedPlan
from potluck.cli.up.run_service import run_stack
from potluck.control import local_stack as stand_module
from potluck.control.control_values import EngineSpec
from potluck.control.controller import ControllerTurn
from potluck.control.launchers.engine_command import EngineCommands
from potluck.control.launchers.local_capacity import free_bytes, must_have_room
from potluck.control.launchers.local_launcher import LocalLauncher, engines_of
from potluck.control.launchers.process import alive, end, marked, spawn, taken
from potluck.control.local_stack import GATEWAY_MARK, LocalStack, LocalStackSettings, owner_of, stop_all
from potluck.control.reconciler import StartFailures, StuckReplica
from potluck.control.state_store import StateError, StateStore, written
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.layout import single

A10 = EngineSpec("live", single("1xA10", 1, 32), "near")
KB = 1024


@dataclass(frozen=True)
class FailingEngines(EngineCommands):
    program: str = "import time; time.sleep(600)"

    def command(self, engine_spec: EngineSpec, port: int, kv_port: int) -> list[str]:
        return [sys.executable, "-c", self.program]


def _stack_of(
    tmp_path: Path, engine_commands: EngineCommands, port: int | None = 0
) -> tuple[LocalStack, PreparedPlan]:
    plan, spec = write_plans(tmp_path, WHOLE)
    inputs = read_plan_and_spec(plan, read_one_spec((spec,)))
    settings = LocalStackSettings(tmp_path / "state", spec, port, engine_commands)
    return LocalStack(settings, inputs.plan), PreparedPlan(inputs)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    made, _ = _stack_of(tmp_path, FailingEngines("mock"), None)
    yield made
    stop_all(made.store, "the test is over", 5.0)
    made.close()


@pytest.fixture
def handlers() -> Iterator[None]:
    """`up` takes signals; pytest wants its own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _error_output(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_up_refuses_an_unreachable_objective_before_it_writes_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, spec = write_plans(tmp_path, WHOLE, ttft_ms=2, tpot_ms=1)
    assert run(["up", str(spec), "--state", str(tmp_path / "state"), "--engine", "mock"]) == 2
    assert "live" in _error_output(capsys), "which model, and why"
    assert not (tmp_path / "state" / "state.db").exists(), "nothing was begun"


def test_up_refuses_a_model_that_fits_on_no_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor a pipeline of the one that there is."""
    _, spec = write_plans(tmp_path, WHOLE)
    text = spec.read_text().replace("Llama-3.1-8B", "Qwen3-32B").replace("1xA10", "1xA100-40")
    spec.write_text(
        text.replace("available: 99", "available: 1").replace("rate_per_s: 1,", "rate_per_s: 0.1,")
    )
    assert run(["up", str(spec), "--state", str(tmp_path / "state"), "--averages"]) == 2
    assert "fit on no node" in _error_output(capsys)
    assert not (tmp_path / "state" / "state.db").exists(), "nothing was begun"


def test_used_port_is_refused_if_given_and_replaced_if_default(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        held = other.getsockname()[1]
        with pytest.raises(InputError, match=f"--port: {held} cannot be used .*0 for a free one"):
            stack._port({"port": held})
        monkeypatch.setattr(stand_module, "USUAL_PORT", held)
        port = stack._port({})
        assert port != held, "nobody told which: the next one will do"
        assert stack.said == [f"port {held} is taken; it is {port} instead"]


def test_default_port_taken_meanwhile_is_replaced_by_the_next(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that start at once find the same one free; the later one takes the next."""
    first = next(port for port in range(30_000, 32_000) if not any(map(taken, range(port, port + 4))))
    monkeypatch.setattr(stand_module, "USUAL_PORT", first)
    tried: list[tuple[int, int]] = []
    with socket.socket() as other:

        def start(port: int, admin: int) -> dict[str, object]:
            tried.append((port, admin))
            if len(tried) == 1:
                other.bind(("127.0.0.1", port))
                other.listen()
                raise CapacityError("the gateway did not start: in use")
            return {"port": port}

        monkeypatch.setattr(stack, "_start_gateway", start)
        assert stack._started({}) == {"port": first + 1}
        assert tried == [(first, first + 1), (first + 1, first + 2)]
        monkeypatch.setattr(stack, "_settings", replace(stack._settings, port=first + 3))

        def fail(port: int, admin: int) -> dict[str, object]:
            raise CapacityError("the gateway did not start: no memory")

        monkeypatch.setattr(stack, "_start_gateway", fail)
        with pytest.raises(CapacityError, match="no memory"):
            stack._started({})


def test_default_ports_are_the_same_at_every_start(
    stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(port for port in range(20_000, 30_000) if not taken(port) and not taken(port + 1))
    monkeypatch.setattr(stand_module, "USUAL_PORT", first)
    assert stack._port({}) == first
    assert stack._admin_port(first, {}) == first + 1, "the page's is beside it"
    assert stack.said == []
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + 1))
        other.listen()
        assert stack._admin_port(first, {}) > first + 1
        assert stack.said[0].startswith(f"the page's port {first + 1} is taken; it is ")
        before = {"port": first, "admin": f"http://127.0.0.1:{first + 1}"}
        assert stack._port(before) == first, "a gateway that is started again is where it was"
        any_one = replace(stack._settings, port=0)
        monkeypatch.setattr(stack, "_settings", any_one)
        assert stack._port({}) not in (first, first + 1), "0 is any free one"
        assert stack._port({"port": first}) == first
        monkeypatch.setattr(stack, "_settings", replace(any_one, port=first))
        assert stack._port({"port": first + 1}) == first, "what is said counts, wherever it was"


@pytest.mark.parametrize("text", [b"this is no database at all" * 100, b""])
def test_up_and_status_report_a_damaged_state_file(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, spec = write_plans(tmp_path, WHOLE)
    state = tmp_path / "state"
    store = StateStore(state / "state.db")
    for number in range(200):
        store.note(0.0, "kind", f"{number}", "why" * 50)
    store.close()
    whole = (state / "state.db").read_bytes()
    # Garbage, or cut in the middle of what its header promises.
    (state / "state.db").write_bytes(text or whole[: len(whole) // 2])
    arguments = ["up", str(plan), str(spec), "--state", str(state), "--engine", "mock"]
    assert run([*arguments, "--averages", "--check", "--within", "1"]) == 2
    message = _error_output(capsys)
    assert "state.db is damaged" in message
    assert "mv " in message, "how to go on"
    assert run(["status", "--state", str(state)]) == 2
    assert "is damaged" in _error_output(capsys)


def test_processes_left_by_a_lost_state_are_ended(stack: LocalStack) -> None:
    folder = str(stack.folder.resolve())
    left = spawn(
        [sys.executable, "-c", "import time; time.sleep(600)"], {GATEWAY_MARK: folder}, Path("/dev/null")
    )
    while not any(pid == left for pid, _ in marked(GATEWAY_MARK, folder)):
        time.sleep(0.01)  # it has its mark from when it runs
    stack._end_forgotten()
    assert not alive(left), "or the new gateway would not get its port"
    assert any("the state lost it" in happening.why for happening in stack.store.happenings())


def _file_size_limit(most_bytes: int) -> Callable[[], None]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    return limit


@pytest.mark.parametrize("most_kb", [2, 40])
def test_full_disk_stops_up_with_an_error_and_no_engines(most_kb: int, tmp_path: Path) -> None:
    """No file may grow beyond a size, so that writes fail as on a full disk."""
    plan, spec = write_plans(tmp_path, WHOLE)
    state = tmp_path / "state"
    command = [sys.executable, "-m", "potluck.cli.main", "up", str(plan), str(spec), "--state", str(state)]
    command += ["--engine", "mock", "--averages", "--check", "--within", "60", "--port", "0"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=_file_size_limit(most_kb * KB),
        env={**os.environ, "NUMBA_DISABLE_JIT": "0", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr or "did not start" in done.stderr, done.stderr
    assert list(engines_of(str((state / "state.db").resolve()))) == []


def test_failed_file_write_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    written(path, "before")
    code = (
        "import resource, sys; from pathlib import Path; from potluck.control.state_store import written\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try:\n    written(Path(sys.argv[1]), 'x' * 1000)\nexcept Exception as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert "cannot be written (File too large); make room there" in done.stdout
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0


def test_engine_that_never_becomes_ready_stops_the_start(tmp_path: Path, handlers: None) -> None:
    stand, prepared = _stack_of(tmp_path, FailingEngines("mock"))
    owner = owner_of(stand.store)
    show = up_module._Show(
        stand, prepared, False, time.monotonic(), True, 1.0, lambda line: None, lambda: None
    )
    with pytest.raises(CapacityError, match="not ready within 1 s: 0 of 1 engines are up; live-") as error:
        run_stack(show)
    assert f"kept in {tmp_path / 'state'}" in str(error.value)
    assert ".log" in str(error.value), "where to look"
    assert list(engines_of(owner)) == []


def test_repeated_identical_engine_failure_stops_the_start(tmp_path: Path, handlers: None) -> None:
    program = "import os; print('a line before'); print(f'port {os.getpid()} is closed'); raise SystemExit(1)"
    stand, prepared = _stack_of(tmp_path, FailingEngines("mock", program=program))
    owner, store = owner_of(stand.store), stand.store
    notes: list[str] = []
    show = up_module._Show(
        stand, prepared, False, time.monotonic(), False, 600.0, lambda line: None, lambda: None
    )
    closing = stand.close
    stand.close = lambda: (notes.extend(happening.kind for happening in store.happenings()), closing())  # type: ignore
    with pytest.raises(CapacityError, match="3 starts failed in the same way: port .* is closed") as error:
        run_stack(show)
    assert "  a line before\n" in str(error.value), "its last lines"
    assert "all was stopped; state and logs are kept" in str(error.value)
    assert list(engines_of(owner)) == []
    assert notes.count("start") == 3, "and no more"


def test_resumed_service_is_not_stopped_for_one_failing_engine(tmp_path: Path) -> None:
    """Its gateway served before: other engines may, and this one is tried ever more rarely."""
    stand, prepared = _stack_of(tmp_path, FailingEngines("mock"))
    show = up_module._Show(
        stand, prepared, False, time.monotonic(), False, 600.0, lambda line: None, lambda: None
    )
    failures = StartFailures()
    for _ in range(3):
        failures = failures.more(0.0, "no memory", "live-1")
    turn = ControllerTurn(True, 1, 0, stuck=(StuckReplica("r", failures),))
    show.seen(turn)
    assert not show.stop.is_set()
    stand.fresh = True
    show.seen(turn)
    assert show.stop.is_set()
    assert "r: 3 starts failed in the same way: no memory" in show.failed
    stand.close()


def test_missing_vllm_is_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, spec = write_plans(tmp_path, WHOLE)
    asked = ["up", str(spec), "--state", str(tmp_path / "state"), "--averages", "--engine", "vllm"]
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without anything that was installed
    bare.chmod(0o700)
    assert run([*asked, "--vllm-python", str(bare)]) == 2
    (line,) = _error_output(capsys).splitlines()
    assert f"{bare} has no vLLM; `{bare} -m pip install vllm==" in line
    assert run([*asked, "--vllm-python", str(tmp_path / "none")]) == 2
    assert "none cannot be run" in _error_output(capsys)
    assert not (tmp_path / "state" / "state.db").exists(), "nothing was begun"


def test_engine_without_memory_reports_memory_error(tmp_path: Path) -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); bytearray(1 << 30)"
    )
    launcher = LocalLauncher(FailingEngines("mock", program=program), tmp_path, str(tmp_path))
    places = {"one": launcher.start("one", A10)}
    until_s = time.monotonic() + 60.0
    while (seen := launcher.look(places)[0]).state != "dead":
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert seen.problem == "MemoryError"


def test_free_memory_is_checked_before_engines_start(
    tmp_path: Path, stack: LocalStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        CapacityError, match=r"5 engines need about 2\.1 GB of memory, 1\.0 GB are free; .*mock"
    ):
        must_have_room("emulated", 5, lambda: 1_000_000_000, 150_000_000)
    must_have_room("emulated", 5, lambda: None)
    must_have_room("emulated", 0, lambda: 0)
    launcher = LocalLauncher(FailingEngines("mock"), tmp_path, str(tmp_path), free=lambda: 1000)
    with pytest.raises(CapacityError, match="one more engine needs"):
        launcher.start("one", A10)
    assert list(engines_of(str(tmp_path))) == []
    monkeypatch.setattr(must_have_room, "__defaults__", (lambda: 1000, 0))
    with pytest.raises(CapacityError, match="1 engines need"):
        stack.must_have_room()


def test_free_memory_respects_machine_and_container_limits(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert free_bytes(tmp_path / "meminfo", tmp_path) == 50 * KB
    (tmp_path / "memory.max").write_text("40000\n")
    (tmp_path / "memory.current").write_text("30000\n")
    assert free_bytes(tmp_path / "meminfo", tmp_path) == 10_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path / "nothing", tmp_path) is None


@pytest.mark.parametrize("check", [False, True])
def test_controller_that_cannot_continue_reports_what_keeps_running(
    check: bool, tmp_path: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full while it runs, say: engines and gateway serve on, unless it was only a check."""
    stand, prepared = _stack_of(tmp_path, FailingEngines("mock"))
    mine = spawn([sys.executable, "-c", "import time; time.sleep(600)"], {}, tmp_path / "log")
    stand.store.set("gateway", {"pid": mine.number, "started": mine.started})
    show = up_module._Show(
        stand, prepared, False, time.monotonic(), check, 1.0, lambda line: None, lambda: None
    )

    def full(*_: object) -> None:
        raise StateError("state.db cannot be written (database or disk is full); make room and start again")

    monkeypatch.setattr(stand, "run", full)
    monkeypatch.setattr(stand.controller, "close", full)  # nor can the lease be given back
    with pytest.raises(CapacityError, match="disk is full.*make room") as error:
        run_stack(show)
    if check:
        assert "nothing is left running; state and logs are kept" in str(error.value)
        assert not alive(mine)
        return
    assert "on without a controller: gateway; `potluck up` takes over" in str(error.value)
    assert alive(mine)
    end(mine, insist=True)

"""A resumed controller of `potluck up` acts before it loads the planner and engine commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from live_plans import WHOLE, write_plans

from potluck.cli.up.resume import RESUME, DeferredLoad, remember, resumed
from potluck.control.control_values import EngineSpec, PlanReply, PlanRequest
from potluck.control.held_sockets import HeldSockets
from potluck.control.launchers.engine_command import DeferredCommands, EngineCommands
from potluck.control.local_stack import LocalStackSettings
from potluck.control.state_store import StateStore
from potluck.core.errors import InputError
from potluck.core.values.layout import single
from potluck.core.values.plan import Plan, mark_of, plan_from_json

HEAVY = (
    *("numpy", "numba", "highspy", "scipy", "pydantic", "torch", "aiohttp", "rich", "tokenizers"),
    *("potluck.plan", "potluck.sim", "potluck.rehearse", "potluck.perf", "potluck.spec", "potluck.engine"),
)
"""Modules that supervision does not need."""
FIRST_TURN = """
import json, sys
from potluck.cli.main import run
from potluck.cli.supervisor import SUPERVISED
from potluck.control.local_stack import LocalStack

def turn(self):
    modules = [name for name in {heavy!r} if name in sys.modules]
    print(json.dumps({{"modules": modules, "plan": self.plan.strategy, "gateway": self._settings.gateway}}))
    sys.exit(0)

LocalStack.turn = turn
SUPERVISED.again = True
sys.exit(run(sys.argv[1:]))
"""


def killed_service_state(tmp_path: Path) -> tuple[Path, Path, Path, Plan]:
    """The files of a service whose controller was killed: state folder, plan, spec, and the plan in force."""
    plan_path, spec = write_plans(tmp_path, WHOLE * 2)
    plan = plan_from_json(plan_path.read_text("utf-8"))
    folder = tmp_path / "state"
    folder.mkdir()
    store = StateStore(folder / "state.db")
    store.add_plan(plan, 0.0, "begin")
    store.set("spec", mark_of(spec.read_text("utf-8")))
    settings = LocalStackSettings(
        folder, spec.resolve(), 0, gateway=("--mock",), why="because", start_s=7.0, host="0.0.0.0"
    )
    remember(store, settings)
    store.close()
    return folder, plan_path, spec, plan


def test_resumed_controller_acts_before_it_loads_the_planner(tmp_path: Path) -> None:
    folder, plan, spec, _ = killed_service_state(tmp_path)
    script = FIRST_TURN.format(heavy=HEAVY)
    options = ("--state", str(folder), "--engine", "mock", "--port", "0")
    done = subprocess.run(
        [sys.executable, "-c", script, "up", str(plan), str(spec), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"modules": [], "plan": "by hand", "gateway": ["--mock"]}


def not_loaded(plan: Plan) -> tuple[EngineCommands, None]:
    raise AssertionError("nothing needs it")


def test_resumed_service_keeps_the_newest_plan_and_starts_engines_once_commands_are_loaded(
    tmp_path: Path,
) -> None:
    folder, _, spec, plan = killed_service_state(tmp_path)
    loads: list[Plan] = []

    def load(newest: Plan) -> tuple[EngineCommands, None]:
        loads.append(newest)
        return EngineCommands("mock"), None

    stack = resumed(folder, spec.resolve(), "mock", 0, HeldSockets(), load)
    assert stack is not None
    try:
        assert stack.plan == plan
        assert stack._settings.start_s == 7.0
        assert stack._settings.host == "0.0.0.0", "clients on other machines still reach its gateway"
        assert not loads
        assert stack._settings.maker.chips == ()
        assert stack._settings.maker.variables == {}
        assert loads == [plan]
        assert stack._settings.why == "because"
    finally:
        stack.close()


@pytest.mark.parametrize("what", ["spec", "record", "plan", "release"])
def test_service_with_changed_spec_or_incomplete_state_is_not_resumed(tmp_path: Path, what: str) -> None:
    folder, _, spec, _ = killed_service_state(tmp_path)
    store = StateStore(folder / "state.db")
    if what == "spec":
        spec.write_text(spec.read_text("utf-8") + "\n# changed\n", "utf-8")
    elif what == "record":
        store.set(RESUME, None)
    elif what == "release":
        store.set(RESUME, {"gateway": [], "other": 1})
    else:
        with store.change() as db:
            db.execute("DELETE FROM plans")
    store.close()
    assert resumed(folder, spec.resolve(), "mock", 0, HeldSockets(), not_loaded) is None


def test_settings_that_cannot_be_restored_from_the_state_are_not_stored(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state.db")
    remember(store, LocalStackSettings(tmp_path, tmp_path / "spec.yaml"))
    assert store.get(RESUME) is not None
    remember(store, LocalStackSettings(tmp_path, tmp_path / "spec.yaml", profiles=(tmp_path / "profile",)))
    assert store.get(RESUME) is None
    store.close()


ASKED = PlanRequest({"live": 1.0}, "rates changed")


def test_deferred_load_loads_once_for_several_threads() -> None:
    began, loads = threading.Event(), []

    def load() -> tuple[EngineCommands, None]:
        loads.append(threading.get_ident())
        began.wait(5)
        return EngineCommands("mock"), None

    deferred = DeferredLoad(load)
    replies: list[PlanReply] = []
    threads = [threading.Thread(target=lambda: replies.append(deferred.first(ASKED))) for _ in range(3)]
    for thread in threads:
        thread.start()
    began.set()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert replies == [PlanReply(None, "scaling is `none`")] * 3
    assert deferred.full(ASKED).plan is None


def test_deferred_load_that_fails_is_retried() -> None:
    tries: list[int] = []

    def load() -> tuple[EngineCommands, None]:
        tries.append(1)
        if len(tries) < 3:
            raise InputError("spec", "cannot be read")
        return EngineCommands("mock"), None

    deferred = DeferredLoad(load)
    deferred.load_ahead()
    with pytest.raises(InputError, match="cannot be read"):
        deferred.full(ASKED)
    assert deferred.loaded()[0].style == "mock"


def test_deferred_commands_equal_the_engine_commands() -> None:
    made = EngineCommands("mock", more=("--x",))
    deferred = DeferredCommands("mock", lambda: made)
    assert (deferred.style, deferred.host) == (made.style, made.host)
    engine_spec = EngineSpec("m", single("1xA10", 1, 32), "near")
    assert deferred.command(engine_spec, 1, 2) == made.command(engine_spec, 1, 2)
    assert (deferred.workers(engine_spec), deferred.chips_for(engine_spec)) == (1, ())

"""Starts that fail in the same way: counted, left for longer, told with what the engine said last."""

from __future__ import annotations

from pathlib import Path

from test_controller import World
from test_reconciler import A, B, _up, _want

from potluck.control.control_values import EngineInstance
from potluck.control.reconciler import StartFailures, StuckReplica, stuck
from potluck.control.service_view import ServiceView
from potluck.control.state_store import StateStore


def test_starts_that_fail_alike_are_given_up_for_longer_and_longer() -> None:
    failures, waits = StartFailures(), []
    for number in range(9):
        # Ports and names of engines differ from try to try.
        failures = failures.more(
            100.0, f"words-0000000{number}: port 90{number} refused", f"words-0000000{number}"
        )
        waits.append(failures.again_s - 100.0)
        assert failures.in_vain == (number >= 2)
    assert waits == [1.0, 2.0, 60.0, 120.0, 240.0, 300.0, 300.0, 300.0, 300.0]
    assert failures.engine == "words-00000008", "whose log is read"
    other = failures.more(100.0, "no memory", "words-00000009")
    assert (other.count, other.alike, other.in_vain) == (10, 1, False), "another reason may pass"


def test_who_is_stuck() -> None:
    wants = [_want("r1"), _want("r2"), _want("r3", B), _want("r4", draining=True)]
    failures = {A: StartFailures(2, 5.0, "no memory", 2, "i9")}
    dead = EngineInstance("i9", A, "dead", 5.0, replica="r1")
    assert stuck(wants, [dead, _up("i2", "r2")], failures) == (StuckReplica("r1", failures[A]),)


def test_a_controller_stops_hammering_and_status_says_why(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.gateway.replicas = ["a"]
    world.machine.broken = True
    controller = world.controller()
    world.turns(controller, 50)
    store = StateStore(world.path)
    failed = [each for each in store.happenings() if each.kind == "failed"]
    assert len(failed) == 3, "in 50 s, and the next not before a minute has passed"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"{failed[-1].what}.log").write_text("a line before\nno memory left\n")
    service = ServiceView(world.path.parent)
    service.controller_lives = True
    (lacking,) = service.status(world.now_s)["lacking"]
    assert lacking["why"].startswith("3 starts failed in the same way: no memory left; the next try in ")
    assert lacking["engine"] == failed[-1].what
    assert lacking["log"] == ["a line before", "no memory left"]
    world.machine.broken = False
    world.turns(controller, 20)
    assert world.last.settled
    assert store.get("stuck") == {}
    service.close()

"""Engines that live and will never answer: they are ended, and others come in their place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_controller import Gateway, Machine, World

from potluck.control.launchers.launcher import EngineSighting, Place
from potluck.control.state_store import StateStore


@dataclass
class Freezer(Machine):
    """Some of its processes stand still."""

    frozen: set[str] = field(default_factory=set)

    def look(self, places: dict[str, Place]) -> tuple[EngineSighting, ...]:
        states = dict(self.running)
        found = super().look(places)
        self.running |= {name: states[name] for name in self.frozen & self.running.keys()}
        return tuple(
            EngineSighting(each.name, "starting", stands_still=states[each.name] == "starting")
            if each.name in self.frozen & self.running.keys()
            else each
            for each in found
        )


@dataclass
class Reaching(Gateway):
    """Says which engine its replicas have."""

    at: str = ""

    def wanted(self) -> dict[str, Any]:
        found = super().wanted()
        return found | {"replicas": [{**each, "url": self.at} for each in found["replicas"]]}


class Frozen(World):
    machine: Freezer
    gateway: Reaching


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> Frozen:
    made = Frozen(tmp_path)
    made.machine, made.gateway = Freezer(), Reaching()
    return made


@pytest.mark.parametrize("starting", [False, True])
def test_an_engine_that_is_frozen_for_good_is_killed_and_another_comes(world: Frozen, starting: bool) -> None:
    """It lives and will never answer: what takes its replica's place must not be it."""
    world.gateway.replicas = ["a"]
    controller = world.controller()
    world.turns(controller, 1 if starting else 4)
    (victim,) = world.machine.running
    world.machine.frozen = {victim}
    world.gateway.replicas = ["again"]
    world.turns(controller, 15)
    assert world.machine.killed == [], "for a while it may go on"
    world.turns(controller, 15)
    assert world.machine.killed == [victim]
    (serving,) = world.gateway.fleet
    assert (serving.replica, serving.name == victim) == ("again", False)
    (cleared,) = [each for each in StateStore(world.path).happenings() if each.kind == "clear"]
    assert (cleared.what, cleared.why) == (victim, "was silent for 20 s")


@pytest.mark.parametrize("unsure", ["the gateway reaches it", "nobody knows what the gateway has"])
def test_an_engine_that_does_not_answer_us_is_left_alone_where_it_may_serve(
    world: Frozen, unsure: str
) -> None:
    world.gateway.replicas = ["a"]
    controller = world.controller()
    world.turns(controller, 4)
    (name,) = world.machine.running
    world.gateway.at = f"http://{name}"
    world.machine.frozen = {name}
    world.gateway.away = unsure == "nobody knows what the gateway has"
    world.turns(controller, 60)
    assert world.machine.killed == []
    assert list(world.machine.running) == [name]

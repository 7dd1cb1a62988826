"""Engines that live and will never answer: they are ended, and others come in their place."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_controller import World

from potluck.control.store.store import Store


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("starting", [False, True])
def test_an_engine_that_is_frozen_for_good_is_killed_and_another_comes(world: World, starting: bool) -> None:
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
    (cleared,) = [each for each in Store(world.path).happenings() if each.kind == "clear"]
    assert (cleared.what, cleared.why) == (victim, "was silent for 20 s")


@pytest.mark.parametrize("unsure", ["the gateway reaches it", "nobody knows what the gateway has"])
def test_an_engine_that_does_not_answer_us_is_left_alone_where_it_may_serve(
    world: World, unsure: str
) -> None:
    world.gateway.replicas = ["a"]
    controller = world.controller()
    world.turns(controller, 4)
    (name,) = world.machine.running
    world.gateway.urls, world.gateway.at = True, f"http://{name}"
    world.machine.frozen = {name}
    world.gateway.away = unsure == "nobody knows what the gateway has"
    world.turns(controller, 60)
    assert world.machine.killed == []
    assert list(world.machine.running) == [name]

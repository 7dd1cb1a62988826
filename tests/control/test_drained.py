"""A replica that was drained at the gateway: the controller hears of it, and puts a fresh engine in its place."""

from __future__ import annotations

from pathlib import Path

from test_controller import World


def test_an_engine_whose_replica_was_drained_at_the_gateway_is_let_go_and_a_fresh_one_comes(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.gateway.replicas = ["a"]
    controller = world.controller()
    world.turns(controller, 4)
    (drained,) = world.gateway.fleet
    said = world.gateway.wanted
    world.gateway.wanted = lambda: {**said(), "leave": [drained.url]}  # type: ignore[method-assign]
    world.gateway.replicas = []
    world.turns(controller, 1)
    world.gateway.replicas = ["a2"]
    world.turns(controller, 5)
    (fresh,) = world.gateway.fleet
    assert (fresh.replica, fresh.name != drained.name) == ("a2", True), "not the same one under another name"
    assert drained.name not in world.machine.running

"""A layout counts its layers and nodes, and refuses to be empty."""

from __future__ import annotations

from collections import Counter

import core_strategies as build
import pytest
from hypothesis import given

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout, Stage, StageNode, single


@given(build.layouts)
def test_layers_and_nodes_add_up(layout: Layout) -> None:
    names = [node.node for stage in layout.stages for node in stage.nodes]
    assert layout.node_counts == Counter(names)
    assert sum(layout.node_counts.values()) == sum(len(stage.nodes) for stage in layout.stages)
    assert layout.layer_count == sum(stage.layers for stage in layout.stages) >= len(layout.stages)


def test_the_plainest_layout() -> None:
    layout = single("2xL40S", 2, 32)
    assert layout.stages == (Stage(32, (StageNode("2xL40S", 2),)),)
    assert (layout.layer_count, layout.node_counts) == (32, {"2xL40S": 1})


def test_nodes_of_one_stage_may_be_unlike() -> None:
    stage = Stage(8, (StageNode("8xH100", 8), StageNode("2xL40S", 2)))
    assert Layout((stage, stage)).node_counts == {"8xH100": 2, "2xL40S": 2}


def test_what_is_not_a_layout_says_why() -> None:
    node = StageNode("1xL4", 1)
    for build_it, says in [
        (lambda: StageNode("1xL4", 0), "1xL4: tp: must be at least 1, is 0"),
        (lambda: Stage(0, (node,)), "stage: layers: must be at least 1, is 0"),
        (lambda: Stage(1, ()), "stage: nodes: a stage needs at least one node"),
        (lambda: Layout(()), "layout: stages: a layout needs at least one stage"),
    ]:
        with pytest.raises(InputError) as caught:
            build_it()
        assert str(caught.value) == says


def test_stages_on_one_named_machine_count_it_once() -> None:
    def on(*places: tuple[str, str]) -> Layout:
        return Layout(tuple(Stage(8, (StageNode(node, 2, machine),)) for node, machine in places))

    named = on(("4xA40", "x"), ("4xA40", "x"), ("4xA40", "y"), ("2xL4", "z"))
    assert named.node_counts == {"4xA40": 2, "2xL4": 1}
    assert named.machines == {"x": 4, "y": 2, "z": 2}
    unnamed = on(("4xA40", ""), ("4xA40", ""))
    assert unnamed.node_counts == {"4xA40": 2}
    assert unnamed.machines == {}

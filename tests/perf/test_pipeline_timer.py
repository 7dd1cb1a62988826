"""Layouts: one stage is the roofline, stages add their latencies, the slowest stage sets the pace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.errors import CapacityError, InputError, UnknownNameError
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.types import NodeType
from potluck.perf.operators.network import handover_s
from potluck.perf.sizes.capacity import max_requests, stage_memory
from potluck.perf.step_timer import steps
from potluck.perf.timers.engine_host import DEFAULT_HOST, NO_HOST
from potluck.perf.timers.pipeline_timer import layout_requests, pipeline, stage_layers
from potluck.perf.timers.roofline import roofline

LLAMA, BIG = models.model("Llama-3.1-8B"), models.model("Llama-3-70B")
NODES: dict[str, NodeType] = {
    name: nodes.node_type(name)
    for name in ("1xH100-SXM", "1xA10", "1xL4", "4xH100-SXM", "2xL40S", "1xMI300X")
}
BATCH = steps([512.0, 0.0, 2048.0, 100.0], [0.0, 0.0, 4096.0, 50.0], [0, 32, 16, 1], [0, 32_000, 9000, 700])


def stage(layers: int, *members: tuple[str, int]) -> Stage:
    return Stage(layers, tuple(StageNode(node, tp) for node, tp in members))


def halves(node: str = "1xH100-SXM") -> Layout:
    return Layout((stage(16, (node, 1)), stage(16, (node, 1))))


@pytest.mark.parametrize(("model", "node", "tp"), [(LLAMA, "1xA10", 1), (BIG, "4xH100-SXM", 4)])
def test_one_stage_is_the_roofline(model: object, node: str, tp: int) -> None:
    whole = pipeline(model, single(node, tp, model.layer_count), NODES)  # type: ignore[attr-defined,arg-type]
    plain = roofline(model, NODES[node], tp)  # type: ignore[arg-type]
    assert whole.step_s(BATCH) == pytest.approx(plain.step_s(BATCH), rel=1e-12)
    assert whole.interval_s(BATCH) == pytest.approx(plain.step_s(BATCH), rel=1e-12)
    assert whole.confidence == plain.confidence


def test_two_halves_take_as_long_and_deliver_twice_as_often() -> None:
    layouts = (single("1xH100-SXM", 1, 32), halves())
    one, two = (pipeline(LLAMA, layout, NODES, host=NO_HOST) for layout in layouts)
    node = NODES["1xH100-SXM"]
    handed = handover_s(BATCH.tokens * 4096 * 2, node, node) + handover_s(BATCH.sequences * 8, node, node)
    assert two.step_s(BATCH) == pytest.approx(one.step_s(BATCH) + handed, rel=1e-12)
    # The second half also has the output head: 1 GB of the 16 GB, so it is a little more than half.
    ratio = two.interval_s(BATCH) / one.interval_s(BATCH)
    assert np.all((ratio > 0.5) & (ratio < 0.56))


def test_the_slowest_stage_sets_the_pace() -> None:
    mixed = pipeline(LLAMA, Layout((stage(16, ("1xH100-SXM", 1)), stage(16, ("1xL4", 1)))), NODES)
    slow = roofline(LLAMA, NODES["1xL4"], 1, layers=range(16, 32), host=NO_HOST)
    assert mixed.interval_s(BATCH) == pytest.approx(slow.step_s(BATCH) + DEFAULT_HOST.step_s(BATCH))
    assert np.all(mixed.step_s(BATCH) > mixed.interval_s(BATCH))


def test_nodes_side_by_side_share_the_work() -> None:
    """Two alike nodes deliver twice as often; a slow one beside a fast one adds its own rate."""
    double = Layout((stage(32, ("1xH100-SXM", 1), ("1xH100-SXM", 1)),))
    one, two = pipeline(LLAMA, single("1xH100-SXM", 1, 32), NODES), pipeline(LLAMA, double, NODES)
    assert two.interval_s(BATCH) == pytest.approx(one.interval_s(BATCH) / 2)
    assert two.step_s(BATCH) == pytest.approx(one.step_s(BATCH))
    unlike = pipeline(LLAMA, Layout((stage(32, ("1xH100-SXM", 1), ("1xA10", 1)),)), NODES)
    slow = pipeline(LLAMA, single("1xA10", 1, 32), NODES)
    rates = 1 / one.interval_s(BATCH) + 1 / slow.interval_s(BATCH)
    assert 1 / unlike.interval_s(BATCH) == pytest.approx(rates)
    assert unlike.step_s(BATCH) == pytest.approx(slow.step_s(BATCH))


@settings(max_examples=15)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_any_cut_has_the_same_work(cuts: list[int]) -> None:
    """Latency without hand-overs is the model's; the pace lies between an equal share and the whole."""
    layers = [*cuts, 32 - sum(cuts)] if sum(cuts) < 32 else [32]
    layout = Layout(tuple(stage(count, ("1xH100-SXM", 1)) for count in layers))
    cut, whole = pipeline(LLAMA, layout, NODES), pipeline(LLAMA, single("1xH100-SXM", 1, 32), NODES)
    assert np.all(cut.step_s(BATCH) >= whole.step_s(BATCH) * (1 - 1e-12))
    assert np.all(cut.interval_s(BATCH) <= whole.interval_s(BATCH) * (1 + 1e-12))
    assert np.all(cut.interval_s(BATCH) >= whole.interval_s(BATCH) / len(layers) * (1 - 1e-12))


def test_empty_steps_take_no_time() -> None:
    timer = pipeline(LLAMA, halves(), NODES)
    assert timer.step_s(steps([0.0, 5.0])).tolist()[0] == 0.0
    assert timer.interval_s(steps([0.0, 5.0])).tolist()[0] == 0.0


def test_confidence_is_the_least() -> None:
    layout = Layout((stage(16, ("1xH100-SXM", 1)), stage(16, ("1xMI300X", 1))))
    assert pipeline(LLAMA, layout, NODES).confidence == "assumed"
    layout = Layout((stage(16, ("1xH100-SXM", 1)), stage(16, ("1xA10", 1))))
    assert pipeline(LLAMA, layout, NODES).confidence == "transferred"


def test_stages_hold_consecutive_layers() -> None:
    layout = Layout((stage(5, ("1xA10", 1)), stage(20, ("1xL4", 1)), stage(7, ("1xA10", 1))))
    assert [layers for _, layers in stage_layers(LLAMA, layout)] == [range(5), range(5, 25), range(25, 32)]


@pytest.mark.parametrize("layers", [31, 33])
def test_a_layer_too_many_or_too_few(layers: int) -> None:
    with pytest.raises(InputError, match=f"hold {layers} layers, Llama-3.1-8B has 32"):
        pipeline(LLAMA, single("1xA10", 1, layers), NODES)
    with pytest.raises(InputError, match="layers"):
        layout_requests(LLAMA, single("1xA10", 1, layers), NODES, 100)


def test_a_node_that_nobody_knows() -> None:
    with pytest.raises(UnknownNameError, match="1xA11.*did you mean '1xA10'"):
        pipeline(LLAMA, single("1xA11", 1, 32), NODES)
    with pytest.raises(InputError, match="tp"):
        pipeline(LLAMA, single("2xL40S", 4, 32), NODES)


def test_the_tightest_stage_decides_how_many_fit() -> None:
    """An A10 has 24 GB for its half of the model, an H100 80 GB for the other."""
    layout = Layout((stage(16, ("1xH100-SXM", 1)), stage(16, ("1xA10", 1))))
    small = stage_memory(LLAMA, NODES["1xA10"], 1, range(16, 32))
    expected = max_requests(LLAMA, small, 1, 1500, range(16, 32))
    assert layout_requests(LLAMA, layout, NODES, 1500) == expected > 0
    turned = Layout((stage(16, ("1xA10", 1)), stage(16, ("1xH100-SXM", 1))))
    first = stage_memory(LLAMA, NODES["1xA10"], 1, range(16))
    assert layout_requests(LLAMA, turned, NODES, 1500) == max_requests(LLAMA, first, 1, 1500, range(16))
    both = Layout((stage(16, ("1xH100-SXM", 1)), stage(16, ("1xA10", 1), ("1xA10", 1))))
    assert layout_requests(LLAMA, both, NODES, 1500) == 2 * expected


def test_one_stage_fits_what_the_node_fits() -> None:
    memory = stage_memory(LLAMA, NODES["1xA10"], 1)
    assert layout_requests(LLAMA, single("1xA10", 1, 32), NODES, 900) == max_requests(LLAMA, memory, 1, 900)


def test_a_stage_without_room_is_an_error() -> None:
    with pytest.raises(CapacityError, match="Llama-3-70B does not fit on 1xA10"):
        layout_requests(BIG, Layout((stage(60, ("4xH100-SXM", 4)), stage(20, ("1xA10", 1)))), NODES, 100)


def test_known_links_take_the_place_of_network_cards() -> None:
    """The same numbers as the cards give the same times; a link slower than the stages sets the pace."""
    node = NODES["1xH100-SXM"]
    per_byte = 8.0 / (node.network_gbps * 0.8 * 1e9)
    fixed = float(handover_s(0.0, node, node))
    by_card, by_link = (
        pipeline(LLAMA, halves(), NODES),
        pipeline(LLAMA, halves(), NODES, None, ((fixed, per_byte),) * 2),
    )
    assert by_link.step_s(BATCH) == pytest.approx(by_card.step_s(BATCH), rel=1e-12)
    slow = pipeline(LLAMA, halves(), NODES, None, ((0.0, 1e-6), (0.0, 0.0)))
    assert slow.interval_s(BATCH) == pytest.approx(BATCH.tokens * 4096 * 2 * 1e-6, rel=1e-12)

"""Lengths and memory shares for engines: one more token would not fit; no stage gets less than was planned with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.errors import CapacityError
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.perf.engine_limits import (
    ENGINE_BYTES,
    MOST_SHARE,
    longest_request,
    longest_served,
    memory_share,
    stage_weight_bytes,
)
from potluck.perf.kv_capacity import stage_memory
from potluck.perf.memory import kv_bytes_per_gpu, weight_bytes

TYPES = {node.name: node for node in map(nodes.node_type, ("1xH100", "2xA100-80", "1xL4", "1xT4", "8xH200"))}


@pytest.mark.parametrize(
    "model_name", ["Llama-3.1-8B", "Qwen3-32B", "GPT-OSS-20B", "Kimi-Linear-48B-A3B", "DeepSeek-V3"]
)
@pytest.mark.parametrize(("node", "tp"), [("1xH100-SXM", 1), ("2xA100-80", 2), ("8xH200", 8), ("1xL4", 1)])
def test_longest_request_is_the_longest_that_fits_in_kv_memory(model_name: str, node: str, tp: int) -> None:
    model = models.model(model_name)
    memory = stage_memory(model, TYPES[node], tp)
    layout = single(node, tp, model.layer_count)
    if memory.kv_bytes <= 0:
        with pytest.raises(CapacityError, match="does not fit"):
            longest_request(model, layout, TYPES)
        return
    tokens = longest_request(model, layout, TYPES)
    assert kv_bytes_per_gpu(model, tokens, tp) <= memory.kv_bytes
    assert tokens == model.max_context_tokens or kv_bytes_per_gpu(model, tokens + 1, tp) > memory.kv_bytes


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(1, 200_000))
def test_longest_served_length_is_between_the_needed_and_the_fitting_length(
    needed: int, wanted: int, fits: int
) -> None:
    if needed > fits:
        with pytest.raises(CapacityError, match="its longest request has"):
            longest_served(needed, wanted, fits, "template x")
        return
    result = longest_served(needed, wanted, fits, "template x")
    assert needed <= result <= fits
    assert result >= min(wanted, fits - fits % 16)


@given(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=4))
def test_memory_share_gives_every_stage_its_planned_kv_memory(names: list[str]) -> None:
    layout = Layout(tuple(Stage(1, (StageNode(name, 1),)) for name in names))
    share = memory_share(layout, TYPES)
    for name in names:
        memory = TYPES[name].gpu.memory_bytes
        assert share == MOST_SHARE or share * memory - ENGINE_BYTES >= 0.9 * memory
    assert memory_share(single("1xT4", 1, 1), TYPES) >= share


def test_stage_weights_add_up_to_the_model() -> None:
    model = models.model("Qwen3-32B")
    layout = Layout((Stage(40, (StageNode("1xH100-SXM", 1),)), Stage(24, (StageNode("2xA100-80", 2),))))
    stages = stage_weight_bytes(model, layout)
    assert sum(stages) >= weight_bytes(model)
    assert stages[0] > stages[1]
    assert stage_weight_bytes(model, single("1xH100-SXM", 1, 64)) == (pytest.approx(weight_bytes(model)),)

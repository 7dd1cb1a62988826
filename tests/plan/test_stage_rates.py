"""Rates of a node as one pipeline stage, against the step timer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from potluck.catalog import models, nodes
from potluck.core.errors import InputError
from potluck.core.values.model import FullAttention, Model
from potluck.core.values.types import NodeType, Slo
from potluck.perf.kv_capacity import max_requests, stage_memory
from potluck.perf.operators.network import handover_s
from potluck.perf.phases import decode_step_s
from potluck.perf.step_timer import steps
from potluck.perf.throughput import MAX_BATCH
from potluck.perf.timers.roofline import roofline
from potluck.plan.timing.stage_rates import StageRates, largest_tp, stage_rates

NAMES = ("1xL4", "2xA10G", "1xL40S", "4xA100-80", "8xH100-SXM")
NODES = tuple(nodes.node_type(name) for name in NAMES)
SLO = Slo(1.2, 0.06)
INPUT, OUTPUT = 1155, 211


@pytest.fixture(scope="module", params=["Phi-4", "GPT-OSS-20B", "MiMo-V2-Flash"])
def phase_rates(request: pytest.FixtureRequest) -> tuple[StageRates, StageRates]:
    return stage_rates(models.model(request.param), NODES, SLO, INPUT, OUTPUT)


def decode_units(model: Model, node: NodeType, layers: range, stages: int, latency_s: float) -> float:
    tp = largest_tp(model, node)
    timer = roofline(model, node, tp, layers=layers)
    memory = stage_memory(model, node, tp, layers)
    most = min(max_requests(model, memory, tp, INPUT + OUTPUT, layers) // stages, MAX_BATCH)
    if most < 1:
        return 0.0
    requests = np.arange(1.0, most + 1)
    step_s = decode_step_s(timer, requests, INPUT + OUTPUT / 2)
    copies = node.gpus // tp
    wire_s = 0.0 if stages == 1 else 2.0 * handover_s(copies * requests * model.hidden * 2.0, node, node)
    within = step_s + wire_s <= latency_s / stages
    return float(np.where(within, copies * requests / step_s, 0.0).max() * 100)


def test_stage_rate_of_a_whole_model_on_one_node_equals_the_step_timer(
    phase_rates: tuple[StageRates, StageRates],
) -> None:
    prefill, decode = phase_rates
    model, layers = prefill.model, range(prefill.model.layer_count)
    for g, node in enumerate(NODES):
        expected = decode_units(model, node, layers, 1, SLO.tpot_s)
        assert decode.units[0, g, -1] == pytest.approx(expected, abs=1.001)
        memory = stage_memory(model, node, prefill.tps[g], layers)
        most = min(max_requests(model, memory, prefill.tps[g], INPUT), 8192 // INPUT)
        timer = roofline(model, node, prefill.tps[g])
        times_s = [float(timer.step_s(steps([[float(INPUT)] * n]))[0]) for n in range(1, most + 1)]
        copies = node.gpus // prefill.tps[g]
        rates = [copies * n * INPUT / time_s for n, time_s in enumerate(times_s, 1) if time_s <= SLO.ttft_s]
        assert prefill.units[0, g, -1] == pytest.approx(100 * max(rates, default=0.0), abs=1.001)


def test_stage_rate_never_rises_with_more_layers_or_a_smaller_budget(
    phase_rates: tuple[StageRates, StageRates],
) -> None:
    for rates in phase_rates:
        assert rates.units.shape == (6, len(NODES), rates.model.layer_count)
        assert (np.diff(rates.units, axis=2) <= 0).all()
        # From two stages on: a whole model on one node also has both tables to keep.
        assert (np.diff(rates.units[1:], axis=0) <= 0).all()
        assert rates.units.max() > 0
        # The small mixture is in time on every node, whatever part of the budget a stage has.
        assert (rates.units.min() == 0) == (rates.model.name != "GPT-OSS-20B" or rates.phase == "decode")


@pytest.mark.parametrize("name", ["Phi-4", "Llama-3-70B"])
def test_stage_rate_never_exceeds_the_rate_of_its_own_layers(name: str) -> None:
    model = models.model(name)
    _, decode = stage_rates(model, NODES, SLO, INPUT, OUTPUT)
    count = model.layer_count
    for stages in (2, 3, 6):
        held = count // stages
        for start in (0, held, count - held):
            for g, node in enumerate(NODES):
                truth = decode_units(model, node, range(start, start + held), stages, SLO.tpot_s)
                promised = int(decode.units[stages - 1, g, held - 1])
                assert promised <= truth + 1e-6
                # The head is charged to every stage: that is all there is between the two.
                if start + held == count:
                    assert promised >= 0.97 * truth - 1


def test_stage_rate_is_zero_on_a_node_that_cannot_hold_the_layers() -> None:
    prefill, decode = stage_rates(models.model("Llama-3-70B"), NODES, SLO, INPUT, OUTPUT)
    for rates in (prefill, decode):
        assert rates.units[0, NAMES.index("1xL4"), -1] == 0
    assert prefill.units[0, NAMES.index("8xH100-SXM"), -1] > 0


def test_stage_rates_are_zero_for_an_objective_below_the_physical_minimum() -> None:
    prefill, decode = stage_rates(models.model("Phi-4"), NODES, Slo(1e-6, 1e-6), INPUT, OUTPUT)
    assert not prefill.units.any()
    assert not decode.units.any()


def test_stage_rate_of_a_long_prompt_is_that_of_one_step() -> None:
    prefill, _ = stage_rates(models.model("Llama-3.1-8B"), NODES, Slo(60.0, 0.1), 20_000, 100, max_stages=2)
    assert prefill.units[0, NAMES.index("8xH100-SXM"), -1] > 0


def test_largest_tp_degree_divides_the_attention_heads() -> None:
    model = models.model("Phi-4")
    assert [largest_tp(model, node) for node in NODES] == [1, 2, 1, 2, 2]  # 10 KV heads
    attention = model.layers[0].attention
    assert isinstance(attention, FullAttention)
    six = replace(
        model, layers=(replace(model.layers[0], attention=replace(attention, heads=6, kv_heads=6)),)
    )
    assert largest_tp(six, nodes.node_type("4xL4")) == 2
    assert largest_tp(six, nodes.node_type("6xL4")) == 6


@pytest.mark.parametrize(
    ("chosen", "lengths", "stages"),
    [
        ((), (10, 10), 2),
        (NODES[:1] * 2, (10, 10), 2),
        (NODES, (0, 10), 2),
        (NODES, (10, 0), 2),
        (NODES, (16_000, 1000), 2),
        (NODES, (10, 10), 0),
    ],
)
def test_stage_rates_refuse_invalid_arguments(
    chosen: tuple[NodeType, ...], lengths: tuple[int, int], stages: int
) -> None:
    with pytest.raises(InputError):
        stage_rates(models.model("Phi-4"), chosen, SLO, *lengths, max_stages=stages)

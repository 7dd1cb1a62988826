"""Step times of whole models: consistent, monotone, never faster than physics, honest about their basis."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from accuracy_study.scores import stored_scores
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.catalog import models, nodes
from potluck.core.errors import CapacityError, InputError, UnknownNameError
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.types import Interconnect, NodeType
from potluck.perf.kv_capacity import max_requests, stage_memory
from potluck.perf.operators.calibration import bundled, curves_for
from potluck.perf.operators.kernels import stream_s
from potluck.perf.operators.layers import step_sums
from potluck.perf.operators.network import OWN_MOST_BYTES, all_reduce_s, all_to_all_s, handover_s
from potluck.perf.phases import (
    chunked_iteration_s,
    chunked_prefill_s,
    chunked_prefills_s,
    decode_step_s,
    prefill_s,
)
from potluck.perf.step_timer import StepBatch, steps
from potluck.perf.timers.engine_host import DEFAULT_HOST, NO_HOST
from potluck.perf.timers.pipeline_timer import layout_requests, pipeline, stage_layers
from potluck.perf.timers.roofline import BLOCK_ROWS, TOKEN_GRID, RooflineTimer, gemm_time_s, roofline

CASES = [
    ("Llama-3.1-8B", "H100-SXM", 1), ("Llama-3.1-8B", "A100-80", 1), ("Llama-3.1-8B", "L40S", 1),
    ("Llama-3.1-8B", "RTX4090", 1), ("Llama-3.1-8B", "A10", 1), ("Llama-3.1-8B", "MI300X", 1),
    ("Llama-3-70B", "4xH100-SXM", 4), ("Qwen3-32B", "2xL40S", 2), ("GPT-OSS-120B", "H200", 1),
    ("DeepSeek-V3", "8xH200", 8), ("Kimi-Linear-48B", "2xA100-80", 2),
]  # fmt: skip


@cache
def timer(model: str, node: str, tp: int = 1) -> RooflineTimer:
    return roofline(models.model(model), nodes.node_type(node), tp)


def random_steps(count: int, chunks: int, seed: int) -> StepBatch:
    rng = np.random.default_rng(seed)
    used = rng.random((count, chunks)) < 0.7
    decodes = rng.integers(0, 200, count)
    return steps(
        rng.integers(1, 3000, (count, chunks)) * used,
        rng.integers(0, 9000, (count, chunks)),
        decodes,
        decodes * rng.integers(1, 5000, count),
    )


def row(batch: StepBatch, i: int) -> StepBatch:
    one = slice(i, i + 1)
    return StepBatch(
        batch.chunk_new[one], batch.chunk_cached[one], batch.decodes[one], batch.decode_context[one]
    )


@pytest.mark.parametrize(("model", "node", "tp"), CASES)
def test_batched_step_times_equal_single_step_times(model: str, node: str, tp: int) -> None:
    batch = random_steps(40, 3, 1)
    together = timer(model, node, tp).step_s(batch)
    apart = [float(timer(model, node, tp).step_s(row(batch, i))[0]) for i in range(len(batch))]
    assert together == pytest.approx(apart, rel=1e-9)


def test_step_times_do_not_depend_on_row_blocks() -> None:
    count = 2 * BLOCK_ROWS + 7
    batch = random_steps(count, 1, 2)
    whole = timer("Llama-3.1-8B", "H100-SXM").step_s(batch)
    for start in (0, BLOCK_ROWS - 3, count - 10):
        some = slice(start, start + 10)
        part = StepBatch(
            batch.chunk_new[some], batch.chunk_cached[some], batch.decodes[some], batch.decode_context[some]
        )
        assert whole[some] == pytest.approx(timer("Llama-3.1-8B", "H100-SXM").step_s(part), rel=1e-12)


@pytest.mark.parametrize(("model", "node", "tp"), CASES)
def test_step_time_does_not_depend_on_the_order_of_chunks(model: str, node: str, tp: int) -> None:
    batch = random_steps(30, 4, 3)
    mirrored = StepBatch(
        batch.chunk_new[:, ::-1], batch.chunk_cached[:, ::-1], batch.decodes, batch.decode_context
    )
    one, other = (timer(model, node, tp).step_s(item) for item in (batch, mirrored))
    assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize(("model", "node", "tp"), CASES)
def test_unused_chunks_and_empty_steps_take_no_time(model: str, node: str, tp: int) -> None:
    here = timer(model, node, tp)
    assert here.step_s(steps(0.0, 700.0)).tolist() == [0.0]
    padded = steps([[500.0, 0.0]], [[100.0, 4000.0]], 3, 900)
    assert here.step_s(padded) == pytest.approx(here.step_s(steps(500.0, 100.0, 3, 900)), rel=0.02)


@pytest.mark.parametrize(("model", "node", "tp"), CASES)
def test_no_step_is_faster_than_the_data_sheet_allows(model: str, node: str, tp: int) -> None:
    """Ideal FLOPs, and ideal bytes of weights and KV, at 1.1 of the printed rates: GPUs do boost."""
    here, batch = timer(model, node, tp), random_steps(300, 2, 4)
    sums, gpu = step_sums(here.model, batch, tp), here.node.gpu
    peak = max(gpu.fp16_tflops, gpu.fp8_tflops or 0.0 if here.model.weight_bits == 8 else 0.0)
    compute_s = sums.flops / (1.1 * peak * 1e12)
    memory_s = (sums.weight_bytes + sums.kv_bytes) / (1.1 * gpu.bandwidth_gb_per_s * 1e9)
    busy = batch.tokens > 0
    assert np.all(here.step_s(batch)[busy] >= np.maximum(compute_s, memory_s)[busy])


@pytest.mark.parametrize(("model", "node", "tp"), CASES)
def test_longer_prompts_take_longer(model: str, node: str, tp: int) -> None:
    """Waves and surfaces make small dents; a tenth more tokens never gain more than 6 %."""
    tokens = np.unique(np.geomspace(16, 60_000, 90).round())
    times = prefill_s(timer(model, node, tp), tokens)
    assert np.all(times[1:] >= 0.94 * times[:-1])
    assert np.all(times[12:] >= times[:-12])  # about three times the tokens


@pytest.mark.parametrize(("model", "node", "tp"), CASES)
def test_larger_decode_batches_take_longer_and_have_higher_throughput(model: str, node: str, tp: int) -> None:
    batches = 2.0 ** np.arange(10)
    times = decode_step_s(timer(model, node, tp), batches, 800.0)
    assert np.all(times[1:] >= 0.97 * times[:-1])
    assert np.all(np.diff(batches / times) > 0)


@settings(max_examples=25)
@given(st.integers(1, 4000), st.integers(0, 20_000), st.integers(1, 200), st.integers(1, 8000))
def test_mixed_step_costs_no_more_than_its_prefill_and_decode_steps(
    new: int, cached: int, count: int, context: int
) -> None:
    """The weights are read once, but no half comes for free. An H100 runs both halves at full speed."""
    here = timer("Llama-3.1-8B", "H100-SXM")
    chunk, decode = float(prefill_s(here, new, cached)[0]), float(decode_step_s(here, count, context)[0])
    both = float(chunked_iteration_s(here, new, cached, count, context)[0])
    assert both <= (chunk + decode) * 1.02
    assert both >= max(chunk, decode) * 0.95


def test_host_time_is_added_once_per_step() -> None:
    model, node = models.model("Llama-3.1-8B"), nodes.node_type("H100-SXM")
    batch = random_steps(20, 2, 5)
    with_host, without = roofline(model, node, 1), roofline(model, node, 1, host=NO_HOST)
    assert with_host.step_s(batch) - without.step_s(batch) == pytest.approx(
        np.where(batch.tokens > 0, DEFAULT_HOST.step_s(batch), 0.0)
    )


def test_stage_times_add_up_to_the_whole_model() -> None:
    model, node = models.model("GPT-OSS-120B"), nodes.node_type("H200")
    batch = random_steps(30, 2, 6)
    parts = [range(10), range(10, 27), range(27, 36)]
    total = sum(roofline(model, node, 1, layers=layers, host=NO_HOST).step_s(batch) for layers in parts)
    assert total == pytest.approx(roofline(model, node, 1, host=NO_HOST).step_s(batch), rel=1e-9)


def test_dense_time_table_is_the_sum_of_its_parts() -> None:
    """Products, element-wise work and two all-reduces a layer, added up by hand at one token count."""
    here = timer("Llama-3-70B", "4xH100-SXM", 4)
    ((work, count),) = here.works
    at = int(np.searchsorted(TOKEN_GRID, 1000))
    tokens = float(TOKEN_GRID[at])
    layer = sum(float(gemm_time_s(gemm, tokens, here.node.gpu, here.curves)) for gemm in work.gemms)
    chip, stream = here.curves.chip, here.curves.stream
    layer += float(stream_s(tokens * work.stream_bytes_per_token, work.launches, chip, stream))
    interconnect, size = here.node.interconnect, tokens * here.model.hidden * 2
    layer += 2 * float(all_reduce_s(size, 4, interconnect, bundled().networks))
    assert count == 80
    assert here.dense_s[at] == pytest.approx(80 * layer)


def test_step_time_is_proportional_beyond_the_token_table() -> None:
    here = timer("Llama-3.1-8B", "H100-SXM")
    last = TOKEN_GRID[-1]
    one, two = (here.step_s(steps(decodes=n, decode_context=n)) for n in (last, 2 * last))
    assert two == pytest.approx(2 * one, rel=0.02)


@pytest.mark.parametrize(
    ("model", "node", "confidence", "words"),
    [
        ("Llama-3.1-8B", "H100-SXM", "measured", "H100-SXM measured"),
        ("Llama-3.1-8B", "H200", "transferred", "carried over from H100-SXM"),
        ("Llama-3.1-8B", "MI300X", "assumed", "fitted to whole batches on engines of 2024"),
        ("Qwen3-235B-A22B", "H100-SXM", "measured", "H100-SXM measured"),
        ("Qwen3-235B-A22B", "RTX4090", "transferred", "carried over: bf16 experts"),
        ("DeepSeek-V3", "H200", "transferred", "carried over from H100-SXM"),
        ("Kimi-Linear-48B", "A100-80", "assumed", "linear attention"),
    ],
)
def test_timer_confidence_is_that_of_its_weakest_part(
    model: str, node: str, confidence: str, words: str
) -> None:
    here = timer(model, node)
    assert here.confidence == confidence
    assert words in here.basis


@pytest.mark.parametrize(
    ("model", "node", "tp", "words"),
    [
        ("Llama-3.1-8B", "2xL40S", 4, "4 exceeds the 2 GPU"),
        ("Llama-3.1-8B", "L40S", 0, "at least 1"),
        ("Llama-3.1-8B", "L40S", -2, "at least 1"),
        ("Llama-3.1-8B", "3xL40S", 3, "does not divide the 32 attention heads"),
    ],
)
def test_invalid_tp_degree_is_refused(model: str, node: str, tp: int, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        roofline(models.model(model), nodes.node_type(node), tp)
    assert caught.value.field == "tp"


def test_single_decode_on_an_h100_takes_the_time_of_reading_the_weights() -> None:
    """15.0 GB at 3.35 TB/s are 4.5 ms; kernels reach nine tenths, launches and host add 1 to 2 ms."""
    assert 5e-3 < float(decode_step_s(timer("Llama-3.1-8B", "H100-SXM"), 1, 500)[0]) < 9e-3


def test_decode_of_a_70b_model_on_four_h100_is_within_hand_bounds() -> None:
    """35 GB per GPU are 10.4 ms at the printed rate, 12 at nine tenths, 160 all-reduces of 25 us add 4."""
    assert 14e-3 < float(decode_step_s(timer("Llama-3-70B", "4xH100-SXM", 4), 1, 500)[0]) < 26e-3


def test_prefill_of_an_8b_model_on_an_h100_is_within_hand_bounds() -> None:
    """2,048 tokens are 31 TFLOP: 31 ms at the printed rate, 60 at half of it."""
    assert 31e-3 < float(prefill_s(timer("Llama-3.1-8B", "H100-SXM"), 2048)[0]) < 60e-3


@pytest.mark.parametrize("tokens", [1, 64, 1024, 8192])
def test_more_ranks_are_faster_by_at_most_their_number(tokens: int) -> None:
    times = [float(prefill_s(timer("Llama-3-70B", "8xH100-SXM", tp), tokens)[0]) for tp in (1, 2, 4, 8)]
    for few, many in pairwise(times):
        assert few / 2.1 <= many <= few  # no less than launches take


def test_slow_links_reduce_the_gain_of_tensor_parallelism() -> None:
    """8,192 tokens over PCIe: the all-reduce takes a visible share; over NVLink it does not."""
    fast = float(prefill_s(timer("Llama-3.1-8B", "2xA100-80", 2), 8192)[0])
    slow = float(prefill_s(timer("Llama-3.1-8B", "2xL40S", 2), 8192)[0])
    single_fast = float(prefill_s(timer("Llama-3.1-8B", "A100-80"), 8192)[0])
    assert single_fast / fast > float(prefill_s(timer("Llama-3.1-8B", "L40S"), 8192)[0]) / slow


def test_fp8_weights_use_the_fp8_rate() -> None:
    here = roofline(models.model("DeepSeek-V3"), nodes.node_type("H200"), 1)
    gemm = next(gemm for gemm in here.works[0][0].gemms if gemm.name == "gate_up")
    assert gemm.bits == 8
    wide = gemm_time_s(gemm, 8192, here.node.gpu, here.curves)
    gpu = nodes.node_type("A100-80").gpu
    ampere = gemm_time_s(gemm, 8192, nodes.node_type("A100-80").gpu, curves_for(gpu, bundled()))
    plain = gemm_time_s(replace(gemm, format="bf16", bits=16.0), 8192, here.node.gpu, here.curves)
    # Less than twice as fast: the inputs are made small first.
    assert plain / 2 < wide < plain < ampere


def test_chunked_prefill_time_is_the_sum_of_its_iterations() -> None:
    here = timer("Llama-3.1-8B", "H100-SXM")
    sizes, starts = [2048.0, 2048.0, 904.0], [0.0, 2048.0, 4096.0]
    expected = sum(
        float(chunked_iteration_s(here, size, start, 8, 700)[0])
        for size, start in zip(sizes, starts, strict=True)
    )
    assert chunked_prefill_s(here, 5000, requests=8, context=700) == pytest.approx(expected)
    many = chunked_prefills_s(here, 5000, requests=[0.0, 8.0, 64.0], context=700)
    one_by_one = [chunked_prefill_s(here, 5000, requests=n, context=700) for n in (0.0, 8.0, 64.0)]
    assert many == pytest.approx(one_by_one)
    assert chunked_prefill_s(here, 5000) == pytest.approx(float(prefill_s(here, 5000)[0]), rel=0.1)


def test_all_reduce_time_grows_with_bytes_and_ranks() -> None:
    interconnect = nodes.node_type("4xH100-SXM").interconnect
    calibration = bundled()
    sizes = np.array([0.0, 1e6, 1e8])
    assert all_reduce_s(sizes, 1, interconnect, calibration.networks).tolist() == [0.0, 0.0, 0.0]
    two, eight = (all_reduce_s(sizes, ranks, interconnect, calibration.networks) for ranks in (2, 8))
    assert np.all(np.diff(two) > 0)
    assert np.all(eight >= two)
    wire = 2 * 7 / 8 * 1e8 / (interconnect.gb_per_s * 1e9)
    assert eight[2] > wire  # a ring moves that much at least
    assert float(all_reduce_s(1e8, 8, interconnect, ())) == pytest.approx(2e-5 + wire / 0.7)


def test_handover_time_uses_the_slower_network_card() -> None:
    fast, slow = nodes.node_type("8xH100-SXM"), nodes.node_type("L4")
    assert slow.network_gbps < fast.network_gbps
    assert handover_s(1e9, fast, slow) == handover_s(1e9, slow, fast) == handover_s(1e9, slow, slow)
    assert float(handover_s(1e9, fast, fast)) >= 8.0 / fast.network_gbps


SWITCH = Interconnect("nvswitch", 450.0, 7e-6)


PEERS = Interconnect("pcie", 32.0, 24e-6)


PAIRS = Interconnect("pcie", 32.0, 24e-6, domain=2)


ALONE = Interconnect("pcie", 32.0, 24e-6, domain=1)


MEASURED = Path(os.environ.get("POTLUCK_DATA", Path(__file__).parents[3] / "shared" / "data")) / "measured"


def reduce_us(size_bytes: float, ranks: int, interconnect: Interconnect) -> float:
    return float(all_reduce_s(size_bytes, ranks, interconnect, bundled().networks)) * 1e6


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_small_all_reduce_over_a_switch_takes_a_few_microseconds(ranks: int) -> None:
    # Measured on H100: 4.2 to 5.6 µs up to 16 KiB, in a CUDA graph.
    assert 3.5 < reduce_us(256, ranks, SWITCH) < reduce_us(16384, ranks, SWITCH) < 7.0


def test_all_reduce_time_over_a_switch_does_not_fall_at_algorithm_changes() -> None:
    """From direct to split to library no size is much cheaper than a smaller one."""
    sizes = np.geomspace(256, 1 << 30, 400)
    for ranks in (2, 4, 8):
        times = all_reduce_s(sizes, ranks, SWITCH, bundled().networks)
        assert (times[1:] > 0.85 * times[:-1]).all()


def test_ranks_beyond_peer_access_share_the_path_through_the_host() -> None:
    size = 8 << 20
    pair, four, eight = (reduce_us(size, ranks, PAIRS) for ranks in (2, 4, 8))
    assert pair < reduce_us(size, 2, ALONE)
    # Each of n ranks sends 2 (n-1)/n of it through a way that all n share: 2 (n-1).
    assert eight / four == pytest.approx(7 / 3, rel=0.02)
    assert four > 4 * reduce_us(size, 4, PEERS)


def test_gpus_without_peer_access_have_their_own_pcie_lanes() -> None:
    """Eight RTX 4090: twice the ranks take little longer; Helix's T4 left 4 to 6 GB/s of PCIe 3."""
    size = 64 << 20
    assert reduce_us(size, 8, ALONE) / reduce_us(size, 4, ALONE) == pytest.approx((7 / 8) / (3 / 4), rel=0.02)
    bus_gb_per_s = 1.5 * size / reduce_us(size, 4, nodes.node_type("4xT4").interconnect) / 1e3
    assert 4.0 < bus_gb_per_s < 7.0


def test_all_reduce_over_a_mesh_without_a_switch_uses_the_library() -> None:
    mesh = Interconnect("nvlink", 300.0, 7e-6)
    assert reduce_us(1024, 4, mesh) > 2 * reduce_us(1024, 4, Interconnect("nvswitch", 300.0, 7e-6))
    assert reduce_us(1024, 2, mesh) == reduce_us(1024, 2, Interconnect("nvswitch", 300.0, 7e-6))


@given(st.sampled_from(["nvswitch", "pcie", "xgmi"]), st.sampled_from([2, 4, 8]), st.floats(1e3, 1e9))
def test_all_reduce_time_never_grows_with_faster_links_or_smaller_sizes(
    kind: str, ranks: int, size: float
) -> None:
    slow, fast = (Interconnect(kind, rate, 1e-5) for rate in (440.0, 450.0))  # type: ignore[arg-type]
    networks = bundled().networks
    for function in (all_reduce_s, all_to_all_s):
        assert function(size, ranks, fast, networks) <= function(size, ranks, slow, networks)
    if size * 1.1 < OWN_MOST_BYTES / 40:
        assert all_reduce_s(size, ranks, slow, networks) <= all_reduce_s(size * 1.1, ranks, slow, networks)


def test_catalog_marks_gpus_without_peer_access() -> None:
    domains = {name: nodes.node_type(f"8x{name}").interconnect.domain for name in ("RTX4090", "L40S", "A40")}
    assert domains == {"RTX4090": 1, "L40S": 2, "A40": None}
    assert nodes.node_type("2xA40").interconnect.domain == 2
    assert [f.value for f in nodes.facts("8xL40S").figures if f.field == "domain"] == [2]
    with pytest.raises(InputError, match="domain"):
        Interconnect("pcie", 32.0, 0.0, domain=0)


def test_stored_link_errors_are_within_their_targets() -> None:
    """All-reduce over NVSwitch within 20 % from the others (but B200's starts are longer), 12 % when calibrated."""
    result = {(s.question, s.gpu): s.median for s in stored_scores() if s.kind == "all-reduce"}
    assert all(result["GPU left out", gpu] <= 0.20 for gpu in ("A100-80", "H100-SXM"))
    assert all(result["calibrated", gpu] <= 0.12 for gpu in ("B200", "H100-SXM", "L40S", "RTX-PRO-6000"))


@pytest.mark.skipif(not MEASURED.is_dir(), reason="needs the folder of measurements")
def test_bundled_networks_are_near_the_measured_collectives() -> None:
    from accuracy_study.networks import LINKS, predict, read_collectives

    for rows in read_collectives(MEASURED):
        if rows.op == "all_reduce":
            error = np.abs(predict(rows, LINKS[rows.gpu], bundled().networks) / rows.seconds - 1.0)
            assert float(np.median(error)) < 0.08, rows.gpu


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
def test_pipeline_of_one_stage_equals_the_roofline(model: object, node: str, tp: int) -> None:
    whole = pipeline(model, single(node, tp, model.layer_count), NODES)  # type: ignore[attr-defined,arg-type]
    plain = roofline(model, NODES[node], tp)  # type: ignore[arg-type]
    assert whole.step_s(BATCH) == pytest.approx(plain.step_s(BATCH), rel=1e-12)
    assert whole.interval_s(BATCH) == pytest.approx(plain.step_s(BATCH), rel=1e-12)
    assert whole.confidence == plain.confidence


def test_pipeline_of_two_halves_has_the_same_latency_and_twice_the_throughput() -> None:
    layouts = (single("1xH100-SXM", 1, 32), halves())
    one, two = (pipeline(LLAMA, layout, NODES, host=NO_HOST) for layout in layouts)
    node = NODES["1xH100-SXM"]
    handed = handover_s(BATCH.tokens * 4096 * 2, node, node) + handover_s(BATCH.sequences * 8, node, node)
    assert two.step_s(BATCH) == pytest.approx(one.step_s(BATCH) + handed, rel=1e-12)
    # The second half also has the output head: 1 GB of the 16 GB, so it is a little more than half.
    ratio = two.interval_s(BATCH) / one.interval_s(BATCH)
    assert np.all((ratio > 0.5) & (ratio < 0.56))


def test_slowest_stage_sets_the_pipeline_interval() -> None:
    mixed = pipeline(LLAMA, Layout((stage(16, ("1xH100-SXM", 1)), stage(16, ("1xL4", 1)))), NODES)
    slow = roofline(LLAMA, NODES["1xL4"], 1, layers=range(16, 32), host=NO_HOST)
    assert mixed.interval_s(BATCH) == pytest.approx(slow.step_s(BATCH) + DEFAULT_HOST.step_s(BATCH))
    assert np.all(mixed.step_s(BATCH) > mixed.interval_s(BATCH))


def test_nodes_of_one_stage_share_its_work() -> None:
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
def test_pipeline_latency_and_interval_are_bounded_for_any_cut(cuts: list[int]) -> None:
    """Latency without hand-overs is the model's; the pace lies between an equal share and the whole."""
    layers = [*cuts, 32 - sum(cuts)] if sum(cuts) < 32 else [32]
    layout = Layout(tuple(stage(count, ("1xH100-SXM", 1)) for count in layers))
    cut, whole = pipeline(LLAMA, layout, NODES), pipeline(LLAMA, single("1xH100-SXM", 1, 32), NODES)
    assert np.all(cut.step_s(BATCH) >= whole.step_s(BATCH) * (1 - 1e-12))
    assert np.all(cut.interval_s(BATCH) <= whole.interval_s(BATCH) * (1 + 1e-12))
    assert np.all(cut.interval_s(BATCH) >= whole.interval_s(BATCH) / len(layers) * (1 - 1e-12))


def test_empty_pipeline_steps_take_no_time() -> None:
    timer = pipeline(LLAMA, halves(), NODES)
    assert timer.step_s(steps([0.0, 5.0])).tolist()[0] == 0.0
    assert timer.interval_s(steps([0.0, 5.0])).tolist()[0] == 0.0


def test_pipeline_confidence_is_the_lowest_of_its_stages() -> None:
    layout = Layout((stage(16, ("1xH100-SXM", 1)), stage(16, ("1xMI300X", 1))))
    assert pipeline(LLAMA, layout, NODES).confidence == "assumed"
    layout = Layout((stage(16, ("1xH100-SXM", 1)), stage(16, ("1xA10", 1))))
    assert pipeline(LLAMA, layout, NODES).confidence == "transferred"


def test_pipeline_stages_hold_consecutive_layers() -> None:
    layout = Layout((stage(5, ("1xA10", 1)), stage(20, ("1xL4", 1)), stage(7, ("1xA10", 1))))
    assert [layers for _, layers in stage_layers(LLAMA, layout)] == [range(5), range(5, 25), range(25, 32)]


@pytest.mark.parametrize("layers", [31, 33])
def test_layout_with_a_wrong_layer_count_is_refused(layers: int) -> None:
    with pytest.raises(InputError, match=f"hold {layers} layers, Llama-3.1-8B has 32"):
        pipeline(LLAMA, single("1xA10", 1, layers), NODES)
    with pytest.raises(InputError, match="layers"):
        layout_requests(LLAMA, single("1xA10", 1, layers), NODES, 100)


def test_layout_with_an_unknown_node_or_degree_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="1xA11.*did you mean '1xA10'"):
        pipeline(LLAMA, single("1xA11", 1, 32), NODES)
    with pytest.raises(InputError, match="tp"):
        pipeline(LLAMA, single("2xL40S", 4, 32), NODES)


def test_tightest_stage_limits_the_number_of_requests() -> None:
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


def test_layout_of_one_stage_fits_as_many_requests_as_its_node() -> None:
    memory = stage_memory(LLAMA, NODES["1xA10"], 1)
    assert layout_requests(LLAMA, single("1xA10", 1, 32), NODES, 900) == max_requests(LLAMA, memory, 1, 900)


def test_stage_without_memory_for_its_layers_is_refused() -> None:
    with pytest.raises(CapacityError, match="Llama-3-70B does not fit on 1xA10"):
        layout_requests(BIG, Layout((stage(60, ("4xH100-SXM", 4)), stage(20, ("1xA10", 1)))), NODES, 100)


def test_known_links_replace_network_cards_in_pipeline_times() -> None:
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

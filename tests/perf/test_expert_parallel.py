"""Experts spread over the GPUs of a node: memory, step times, what may be spread at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from potluck.catalog import models, nodes
from potluck.core.errors import InputError
from potluck.core.values.layout import StageNode, single
from potluck.perf.kv_capacity import max_requests, stage_memory
from potluck.perf.memory import active_parameters, parameters, weight_bytes, weight_bytes_per_gpu
from potluck.perf.operators.kernels import busiest_share
from potluck.perf.operators.layers import GemmWork
from potluck.perf.phases import prefill_s
from potluck.perf.step_timer import steps
from potluck.perf.timers.roofline import RooflineTimer, check_tp, roofline

OSS, DEEPSEEK, LLAMA = (models.model(item) for item in ("GPT-OSS-120B", "DeepSeek-V3", "Llama-3.1-8B"))
H100, H200 = nodes.node_type("8xH100"), nodes.node_type("8xH200")


def timer(ep: str, node: object = H100, model: object = OSS) -> RooflineTimer:
    return roofline(model, node, 8, ep=ep)  # type: ignore[arg-type]


def decoding_s(timed: RooflineTimer, count: float) -> float:
    return float(timed.step_s(steps(decodes=count, decode_context=count * 2000))[0])


def test_expert_parallel_weights_take_the_memory_of_sharded_weights() -> None:
    assert weight_bytes_per_gpu(OSS, 8, ep="tp") == pytest.approx(weight_bytes_per_gpu(OSS, 8))
    experts = (parameters(OSS) - active_parameters(OSS)) / (1 - 4 / 128)  # 4 of 128 experts are active
    held = experts * (OSS.expert_bits / 8)
    apart = weight_bytes_per_gpu(OSS, 8, ep="dp")
    assert apart == pytest.approx(weight_bytes(OSS) - held * 7 / 8, rel=0.01), "all else is on every GPU"
    assert weight_bytes_per_gpu(OSS, 6, ep="tp") > weight_bytes_per_gpu(OSS, 6), "22 of 128 experts on one"


def test_latent_kv_is_not_replicated_under_data_parallel_attention() -> None:
    """DeepSeek's latent stands on every tensor-parallel rank; with requests of its own each has another."""
    rooms = {
        ep: max_requests(DEEPSEEK, stage_memory(DEEPSEEK, H200, 8, ep=ep), 8, 4000, ep=ep)  # type: ignore[arg-type]
        for ep in ("none", "tp", "dp")
    }
    assert rooms["none"] == rooms["tp"]
    assert rooms["dp"] > 4 * rooms["none"]


def test_busiest_expert_rank_load_equals_the_simulated_mean() -> None:
    rng = np.random.default_rng(3)
    for ranks in (2, 4, 8):
        for rows in (32, 4000):
            drawn = rng.multinomial(rows, [1 / ranks] * ranks, size=4000).max(axis=1).mean() / rows
            assert float(busiest_share(np.array([float(rows)]), ranks)[0]) == pytest.approx(drawn, rel=0.05)
    assert float(busiest_share(np.array([1.0]), 8)[0]) <= 1.0
    apart = replace(GemmWork("experts", 100, 100, 16, 64, 4), ranks=8)
    rows, used = apart.spread(np.array([1e6]))
    assert used[0] == 8, "its own eight of 64"
    assert float(rows[0] * used[0]) == pytest.approx(4e6 / 8, rel=0.01)


def test_data_parallel_attention_is_slower_for_one_prompt_and_faster_for_large_batches() -> None:
    sharded, spread, apart = timer("none"), timer("tp"), timer("dp")
    assert float(prefill_s(apart, 4000)[0]) > float(prefill_s(sharded, 4000)[0])
    assert decoding_s(spread, 1.0) > decoding_s(sharded, 1.0), "one token's experts are on few GPUs"
    assert decoding_s(apart, 512.0) < decoding_s(sharded, 512.0)
    eight = steps(chunk_new=np.full((1, 8), 500.0))
    one = steps(chunk_new=500.0)
    assert float(apart.step_s(eight)[0]) < 4 * float(apart.step_s(one)[0]), "eight prompts on eight GPUs"


def test_expert_parallel_tokens_use_the_links_within_the_node() -> None:
    slow = replace(H100, interconnect=replace(H100.interconnect, gb_per_s=H100.interconnect.gb_per_s / 10))
    added = decoding_s(timer("dp", slow), 512.0) - decoding_s(timer("dp"), 512.0)
    mixtures = sum(1 for layer in OSS.layers if hasattr(layer.ffn, "experts"))
    # 64 tokens a GPU, 4 experts each, there and back, of which 7 in 8 leave; 2 bytes a number.
    size = 2 * mixtures * 64 * 4 * OSS.hidden * 2 * 7 / 8
    least = size / (H100.interconnect.gb_per_s * 1e9) * 9
    assert least < added < 3 * least


def test_invalid_expert_parallel_layout_is_refused() -> None:
    with pytest.raises(InputError, match="0 experts"):
        check_tp(LLAMA, H100, 8, "tp")
    with pytest.raises(InputError, match="one has them all"):
        check_tp(OSS, H100, 1, "tp")
    with pytest.raises(InputError, match="several GPUs"):
        StageNode("8xH100-SXM", 1, ep="dp")
    with pytest.raises(InputError, match="must be one of none, tp, dp"):
        single("8xH100-SXM", 8, 36, "pp")  # type: ignore[arg-type]


def test_expert_parallel_timer_has_assumed_confidence() -> None:
    assert timer("dp").confidence == "assumed"
    assert "expert parallelism" in timer("dp").basis
    assert "expert parallelism" not in timer("none").basis

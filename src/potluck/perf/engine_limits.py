"""What an engine is told of memory, so that it has what was planned with: its longest request, its share of a GPU.

An engine such as vLLM refuses to start when the KV of one request of its longest length does not fit beside the
weights; and it takes its own context, buffers and recorded graphs from the share it is given, which the planner
counts outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from potluck.core.errors import CapacityError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.layout import Layout
from potluck.core.values.model import Model
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import LengthBin, NodeType, Role
from potluck.perf.kv_capacity import USABLE_SHARE, require_fit, stage_memory
from potluck.perf.memory import attention_ways, kv_bytes_per_gpu, weight_bytes_per_gpu
from potluck.perf.timers.pipeline_timer import stage_layers

ENGINE_BYTES = 1e9
"""Of a GPU, for the engine itself: CUDA context, communication buffers, recorded graphs."""
MOST_SHARE = 0.97
"""Of a GPU: more is never free when an engine starts."""
LEAST_TOKENS = 4096
"""Of the longest request, where that fits: few services mean to refuse more."""


def longest_request(model: Model, layout: Layout, nodes: Mapping[str, NodeType]) -> int:
    """Tokens of the longest request whose KV fits in a replica that has no other, at most the model's context."""
    least = model.max_context_tokens
    for stage, layers in stage_layers(model, layout):
        for stage_node in stage.nodes:
            memory = stage_memory(model, nodes[stage_node.node], stage_node.tp, layers, ep=stage_node.ep)
            require_fit(model, memory, nodes[stage_node.node], stage_node.tp)
            ways = attention_ways(stage_node.tp, stage_node.ep)
            low, high = 0, least
            while low < high:
                middle = (low + high + 1) // 2
                fits = kv_bytes_per_gpu(model, middle, ways, layers) <= memory.kv_bytes
                low, high = (middle, high) if fits else (low, middle - 1)
            least = low
    return least


def longest_served(needed_tokens: int, wanted_tokens: int, fits_tokens: int, what: str) -> int:
    """The longest request that an engine is started for: at least what it must take, at most what fits.

    What is wanted is rounded up to a power of two, as lengths of a spec are those of typical requests.
    """
    if needed_tokens > fits_tokens:
        raise CapacityError(
            f"{what}: its longest request has {needed_tokens:,} tokens, and KV of {fits_tokens:,} fits there: "
            "plan it on more or larger GPUs, or with shorter requests"
        )
    rounded = 1 << (max(wanted_tokens, needed_tokens, LEAST_TOKENS) - 1).bit_length()
    if rounded <= fits_tokens:
        return rounded
    return max(needed_tokens, fits_tokens // BLOCK_TOKENS * BLOCK_TOKENS)


def memory_share(layout: Layout, nodes: Mapping[str, NodeType]) -> float:
    """Of each GPU's memory, such that no stage has less for KV than was planned with; the smallest GPU decides."""
    smallest = min(
        nodes[stage_node.node].gpu.memory_bytes for stage in layout.stages for stage_node in stage.nodes
    )
    return min(MOST_SHARE, ceil(100 * (USABLE_SHARE + ENGINE_BYTES / smallest)) / 100)


def stage_weight_bytes(model: Model, layout: Layout) -> tuple[float, ...]:
    """Of each stage the bytes of weights on the GPUs of one of its nodes together, the model's tables counted in."""
    return tuple(
        max(
            stage_node.tp * weight_bytes_per_gpu(model, stage_node.tp, layers, tables=True, ep=stage_node.ep)
            for stage_node in stage.nodes
        )
        for stage, layers in stage_layers(model, layout)
    )


def planned_lengths(plan: Plan, template: Template, lengths: Iterable[LengthBin]) -> tuple[LengthBin, ...]:
    """Lengths of the requests that a template is planned for; all of `lengths` where the plan does not say."""
    taken = {
        share.bucket for share in plan.shares if share.template == template.name and share.rate_per_s > 0
    }
    longest = [
        bucket.longest_tokens
        for bucket in plan.buckets
        if bucket.model == template.model and bucket.bucket in taken
    ]
    most = max(longest, default=None)
    bins = tuple(item for item in lengths if item.share > 0)
    return tuple(item for item in bins if most is None or item.input_tokens <= most) or bins


def longest_tokens(bins: tuple[LengthBin, ...], role: Role) -> int:
    """Of prompt and answer together; who prefills for others makes one token."""
    if role == "prefill":
        return max(ceil(item.input_tokens) for item in bins) + 1
    return max(ceil(item.input_tokens + item.output_tokens) for item in bins if item.share > 0)

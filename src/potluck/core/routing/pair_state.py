"""What is known of a pair's two sides when a request is split between them (CRONUS; the rules are in `split.py`)."""

from __future__ import annotations

from potluck.core.routing.split import keeps_decode, partial_prefill_s, sooner_whole
from potluck.core.routing.targets import Target
from potluck.core.state.facts import BLOCK_TOKENS, SplitFacts
from potluck.core.state.fleet import ReplicaState


def waits_s(
    splits: SplitFacts, target: Target, low: ReplicaState, high: ReplicaState, part: int
) -> tuple[float, float]:
    """Seconds of prompts before a new one, on either side; those that wait count as if they were like it."""
    waiting = low.open_prefill_tokens + len(target.waiting) * part
    facts = high.facts
    high_s = high.open_prefill_tokens * facts.prefill_s_per_token if facts is not None else 0.0
    return max(0.0, partial_prefill_s(splits, waiting)), high_s


def high_end(view: ReplicaState) -> tuple[int, float, int]:
    """Decodes, their context and free blocks: as reported, or as sent when nothing was reported yet."""
    status, facts = view.status, view.facts
    if status is not None:
        return status.running, float(status.context_tokens), status.free_blocks
    used = -(-view.open_context_tokens // BLOCK_TOKENS)
    free = max(0, facts.total_blocks - used) if facts is not None else 1 << 40
    return view.open_requests, float(view.open_context_tokens), free


def passes(
    splits: SplitFacts, target: Target, low: ReplicaState, high: ReplicaState, prompt_tokens: int, part: int
) -> bool:
    """Whether a prompt that finds the low-end side full goes whole to the high-end one.

    Not beyond the batch that this was planned for: there decoding binds, and all its answers pay for the prompt.
    """
    decodes, context, free = high_end(high)
    if free * BLOCK_TOKENS < prompt_tokens:
        return False
    if high.facts is not None and high.open_requests >= high.facts.decode_batch:
        return False
    low_s, high_s = waits_s(splits, target, low, high, part)
    return sooner_whole(splits, prompt_tokens, part, decodes, context, low_s, high_s)


def stays_low(target: Target, low: ReplicaState, high: ReplicaState, total_tokens: int) -> bool:
    """Whether a request of so many tokens should also decode on the low-end side."""
    weak, strong = low.facts, high.facts
    if weak is None or strong is None:
        return False
    if low.open_context_tokens + total_tokens > weak.total_blocks * BLOCK_TOKENS:
        return False
    decoding = max(0, low.open_requests - target.in_low)
    return keeps_decode(strong, high.open_requests, weak, decoding, target.busy)

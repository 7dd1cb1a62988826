"""Partially disaggregated prefill (CRONUS 4.3, Algorithm 1): how much of a prompt the low-end GPU computes.

    T_parprefill(L_p) = k_p L_p + b_p                                    low-end: the first L_p of L tokens
    t_chunked(c)      = k_ctxp c + k_ctxd (sum of L_d) + b_c             high-end: one iteration at context c
    T_chunked(L_p)    = sum over i < N of t_chunked(L_p + i n_p),        N = ceil((L - L_p) / n_p), n_p = B - n_d

L_p is chosen where the two times are nearest; it is the whole prompt when the high-end GPU has too few free blocks. A
low-end instance holds at most two requests. Algorithm 1 prints N (k_ctxp (L_in + L_last) / 2 + ...), whose first
context should be L_p as in equation 1. We use the sum itself; `printed_tokens` is the paper's (`split_rule=printed`).
Beyond the paper: `low_decodes` (its section 6) keeps a request on the low-end GPU while the high-end one is slower;
with `split_overflow` a prompt that finds the low-end GPU full goes whole to the high-end one."""

from __future__ import annotations

from math import ceil, floor, inf
from typing import Final

from potluck.core.routing.opportunistic import step_seconds
from potluck.core.state.facts import BLOCK_TOKENS, ReplicaFacts, SplitFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.targets import Target

MAX_LOW_END_REQUESTS: Final = 2
PRINTED_SPLIT_STEPS: Final = 512
# (decoding requests, their context tokens, free blocks) of a high-end replica.
HighEndLoad = tuple[int, float, int]


def partial_tokens(prompt_tokens: int, facts: SplitFacts, load: HighEndLoad) -> int:
    """L_p, the tokens that the low-end GPU computes: from 1 to the whole prompt."""
    decodes, context_tokens, free_blocks = load
    chunk = facts.chunk_tokens - decodes
    if free_blocks < ceil(prompt_tokens / BLOCK_TOKENS) or chunk < 1:
        return prompt_tokens
    base_s = facts.k_ctxd * context_tokens + facts.b_c
    max_chunks = ceil((prompt_tokens - 1) / chunk)
    if facts.k_p >= max_chunks * facts.k_ctxp and base_s >= 0:
        return _by_bisection(prompt_tokens, facts, chunk, base_s, max_chunks)
    splits = [_best_split_for_chunks(prompt_tokens, facts, chunk, base_s, n) for n in range(max_chunks + 1)]
    return min(splits, key=lambda split: (split[1], split[0]))[0]


def printed_tokens(prompt_tokens: int, facts: SplitFacts, load: HighEndLoad) -> int:
    """L_p as Algorithm 1 of the paper is printed: 512 candidates, L_in for the first context."""
    decodes, context_tokens, free_blocks = load
    chunk = facts.chunk_tokens - decodes
    if free_blocks < ceil(prompt_tokens / BLOCK_TOKENS) or chunk < 1:
        return prompt_tokens
    best_part, least_difference_s = prompt_tokens, inf
    for i in range(1, PRINTED_SPLIT_STEPS + 1):
        part = ceil(i * prompt_tokens / PRINTED_SPLIT_STEPS)
        remaining_tokens = prompt_tokens - part
        last_context = part + remaining_tokens // chunk * chunk
        step_s = facts.k_ctxp * (prompt_tokens + last_context) / 2 + facts.k_ctxd * context_tokens + facts.b_c
        difference_s = abs(partial_prefill_s(facts, part) - ceil(remaining_tokens / chunk) * step_s)
        if difference_s < least_difference_s:
            best_part, least_difference_s = part, difference_s
    return best_part


def partial_prefill_s(facts: SplitFacts, tokens: int) -> float:
    return facts.k_p * tokens + facts.b_p


def chunked_s(facts: SplitFacts, chunk: int, base_s: float, prompt_tokens: int, part: int) -> float:
    """T_chunked: the arithmetic series in closed form."""
    n = ceil((prompt_tokens - part) / chunk)
    return n * (facts.k_ctxp * (part + (n - 1) * chunk / 2) + base_s)


def decodes_faster_on_low_end(
    high_facts: ReplicaFacts, high_open: int, low_facts: ReplicaFacts, low_open: int, busy: float
) -> bool:
    if high_open < high_facts.decode_batch:
        return False
    low_s, high_s = step_seconds(low_facts, low_open + 1), step_seconds(high_facts, high_open + 1)
    return low_s < (1.0 - busy) * high_s


def finishes_sooner_on_high_end(
    facts: SplitFacts, prompt_tokens: int, part: int, load: HighEndLoad, low_wait_s: float, high_wait_s: float
) -> bool:
    """Whether the high-end GPU alone finishes a prompt before both together would, given the work queued on each."""
    chunk = facts.chunk_tokens - load[0]
    if chunk < 1:
        return False
    base_s = facts.k_ctxd * load[1] + facts.b_c
    handed_s = max(low_wait_s + max(0.0, partial_prefill_s(facts, part)), high_wait_s)
    split_s = handed_s + chunked_s(facts, chunk, base_s, prompt_tokens, part)
    return high_wait_s + chunked_s(facts, chunk, base_s, prompt_tokens, 0) < split_s


def _by_bisection(prompt: int, facts: SplitFacts, chunk: int, base_s: float, most: int) -> int:
    """The difference rises with L_p, so its root is bracketed by its sign at the longest L_p of each chunk count."""
    low, high = 0, most  # chunks; find the least count where the difference at its longest L_p is <= 0
    while low < high:
        middle = (low + high) // 2
        if _time_difference_s(prompt, facts, chunk, base_s, _longest_part(prompt, chunk, middle)) <= 0:
            high = middle
        else:
            low = middle + 1
    counts = [n for n in (low - 1, low, low + 1) if 0 <= n <= most]
    result = [_best_split_for_chunks(prompt, facts, chunk, base_s, n) for n in counts]
    return min(result, key=lambda nearest: (nearest[1], nearest[0]))[0]


def _longest_part(prompt: int, chunk: int, n: int) -> int:
    """The largest L_p that leaves n chunks."""
    return prompt if n == 0 else prompt - (n - 1) * chunk - 1


def _best_split_for_chunks(
    prompt: int, facts: SplitFacts, chunk: int, base_s: float, n: int
) -> tuple[int, float]:
    """(L_p, difference of the two times in s) of the best L_p that leaves exactly n chunks."""
    longest_part = _longest_part(prompt, chunk, n)
    shortest_part = prompt if n == 0 else max(1, prompt - n * chunk)
    slope = facts.k_p - n * facts.k_ctxp
    difference_s = _time_difference_s(prompt, facts, chunk, base_s, shortest_part)
    parts = {shortest_part, longest_part}
    if slope != 0:
        root = shortest_part - difference_s / slope
        if shortest_part < root < longest_part:
            parts |= {floor(root), ceil(root)}
    best_part = min(
        parts, key=lambda part: (abs(_time_difference_s(prompt, facts, chunk, base_s, part)), part)
    )
    return best_part, abs(_time_difference_s(prompt, facts, chunk, base_s, best_part))


def _time_difference_s(prompt: int, facts: SplitFacts, chunk: int, base_s: float, part: int) -> float:
    return partial_prefill_s(facts, part) - chunked_s(facts, chunk, base_s, prompt, part)


def high_end_load(replica: ReplicaState) -> HighEndLoad:
    status, facts = replica.status, replica.facts
    if status is not None:
        return status.running, float(status.context_tokens), status.free_blocks
    used_blocks = -(-replica.open_context_tokens // BLOCK_TOKENS)
    free_blocks = max(0, facts.total_blocks - used_blocks) if facts is not None else 1 << 40
    return replica.open_requests, float(replica.open_context_tokens), free_blocks


def overflows_to_high_end(
    splits: SplitFacts,
    target: Target,
    low_replica: ReplicaState,
    high_replica: ReplicaState,
    prompt_tokens: int,
    part: int,
) -> bool:
    """Whether a prompt that finds the low-end side full runs whole on the high-end one, within its planned batch."""
    load, facts = high_end_load(high_replica), high_replica.facts
    if load[2] * BLOCK_TOKENS < prompt_tokens or (facts and high_replica.open_requests >= facts.decode_batch):
        return False
    # Waiting requests count with the part of this prompt.
    low_s = max(0.0, partial_prefill_s(splits, low_replica.open_prefill_tokens + len(target.waiting) * part))
    high_s = high_replica.open_prefill_tokens * facts.prefill_s_per_token if facts is not None else 0.0
    return finishes_sooner_on_high_end(splits, prompt_tokens, part, load, low_s, high_s)


def keeps_on_low_end(
    target: Target, low_replica: ReplicaState, high_replica: ReplicaState, total_tokens: int
) -> bool:
    low_facts, high_facts = low_replica.facts, high_replica.facts
    if low_facts is None or high_facts is None:
        return False
    if low_replica.open_context_tokens + total_tokens > low_facts.total_blocks * BLOCK_TOKENS:
        return False
    decoding = max(0, low_replica.open_requests - target.in_low)
    return decodes_faster_on_low_end(high_facts, high_replica.open_requests, low_facts, decoding, target.busy)

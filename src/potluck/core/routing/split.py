"""Partially disaggregated prefill (CRONUS 4.3, Algorithm 1): how much of a prompt the low-end GPU takes.

    T_parprefill(L_p) = k_p L_p + b_p                                    low-end: the first L_p of L tokens
    t_chunked(c)      = k_ctxp c + k_ctxd (sum of L_d) + b_c             high-end: one iteration at context c
    T_chunked(L_p)    = sum over i < N of t_chunked(L_p + i n_p),        N = ceil((L - L_p) / n_p), n_p = B - n_d

L_p is where the two times are nearest; all of the prompt when the high-end GPU has too few free blocks. At most two
requests are in the low-end instance at a time. Algorithm 1 prints N (k_ctxp (L_in + L_last) / 2 + ...), whose first
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

MOST_IN_LOW: Final = 2
CANDIDATES: Final = 512
HighEndLoad = tuple[int, float, int]  # Requests that decode there, their context tokens, free blocks.


def partial_tokens(prompt_tokens: int, facts: SplitFacts, load: HighEndLoad) -> int:
    """L_p: tokens that the low-end GPU computes, from 1 to all."""
    decodes, context_tokens, free_blocks = load
    chunk = facts.chunk_tokens - decodes
    if free_blocks < ceil(prompt_tokens / BLOCK_TOKENS) or chunk < 1:
        return prompt_tokens
    base_s = facts.k_ctxd * context_tokens + facts.b_c
    most = ceil((prompt_tokens - 1) / chunk)
    if facts.k_p >= most * facts.k_ctxp and base_s >= 0:
        return _by_bisection(prompt_tokens, facts, chunk, base_s, most)
    results = [_nearest(prompt_tokens, facts, chunk, base_s, n) for n in range(most + 1)]
    return min(results, key=lambda result: (result[1], result[0]))[0]


def printed_tokens(prompt_tokens: int, facts: SplitFacts, load: HighEndLoad) -> int:
    """L_p as Algorithm 1 of the paper is printed: 512 candidates, L_in for the first context."""
    decodes, context_tokens, free_blocks = load
    chunk = facts.chunk_tokens - decodes
    if free_blocks < ceil(prompt_tokens / BLOCK_TOKENS) or chunk < 1:
        return prompt_tokens
    best, least_s = prompt_tokens, inf
    for i in range(1, CANDIDATES + 1):
        part = ceil(i * prompt_tokens / CANDIDATES)
        rest = prompt_tokens - part
        last = part + rest // chunk * chunk
        step_s = facts.k_ctxp * (prompt_tokens + last) / 2 + facts.k_ctxd * context_tokens + facts.b_c
        apart_s = abs(partial_prefill_s(facts, part) - ceil(rest / chunk) * step_s)
        if apart_s < least_s:
            best, least_s = part, apart_s
    return best


def partial_prefill_s(facts: SplitFacts, tokens: int) -> float:
    return facts.k_p * tokens + facts.b_p


def chunked_s(facts: SplitFacts, chunk: int, base_s: float, prompt_tokens: int, part: int) -> float:
    """T_chunked: the arithmetic series in closed form."""
    n = ceil((prompt_tokens - part) / chunk)
    return n * (facts.k_ctxp * (part + (n - 1) * chunk / 2) + base_s)


def keeps_decode(
    high_facts: ReplicaFacts, high_open: int, low_facts: ReplicaFacts, low_open: int, busy: float
) -> bool:
    if high_open < high_facts.decode_batch:
        return False
    low_s, high_s = step_seconds(low_facts, low_open + 1), step_seconds(high_facts, high_open + 1)
    return low_s < (1.0 - busy) * high_s


def sooner_whole(
    facts: SplitFacts, prompt_tokens: int, part: int, load: HighEndLoad, low_wait_s: float, high_wait_s: float
) -> bool:
    """Whether the high-end GPU alone is done with a prompt before both are, given what each has to do before it."""
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
        if _difference(prompt, facts, chunk, base_s, _longest(prompt, chunk, middle)) <= 0:
            high = middle
        else:
            low = middle + 1
    counts = [n for n in (low - 1, low, low + 1) if 0 <= n <= most]
    result = [_nearest(prompt, facts, chunk, base_s, n) for n in counts]
    return min(result, key=lambda nearest: (nearest[1], nearest[0]))[0]


def _longest(prompt: int, chunk: int, n: int) -> int:
    """The largest L_p that leaves n chunks."""
    return prompt if n == 0 else prompt - (n - 1) * chunk - 1


def _nearest(prompt: int, facts: SplitFacts, chunk: int, base_s: float, n: int) -> tuple[int, float]:
    """The best L_p that leaves exactly n chunks, and how far apart the times then are."""
    last = _longest(prompt, chunk, n)
    first = prompt if n == 0 else max(1, prompt - n * chunk)
    slope = facts.k_p - n * facts.k_ctxp
    at_first = _difference(prompt, facts, chunk, base_s, first)
    tries = {first, last}
    if slope != 0:
        root = first - at_first / slope
        if first < root < last:
            tries |= {floor(root), ceil(root)}
    best = min(tries, key=lambda part: (abs(_difference(prompt, facts, chunk, base_s, part)), part))
    return best, abs(_difference(prompt, facts, chunk, base_s, best))


def _difference(prompt: int, facts: SplitFacts, chunk: int, base_s: float, part: int) -> float:
    return partial_prefill_s(facts, part) - chunked_s(facts, chunk, base_s, prompt, part)


def high_end(replica: ReplicaState) -> HighEndLoad:
    status, facts = replica.status, replica.facts
    if status is not None:
        return status.running, float(status.context_tokens), status.free_blocks
    used = -(-replica.open_context_tokens // BLOCK_TOKENS)
    free = max(0, facts.total_blocks - used) if facts is not None else 1 << 40
    return replica.open_requests, float(replica.open_context_tokens), free


def passes(
    splits: SplitFacts,
    target: Target,
    low_replica: ReplicaState,
    high_replica: ReplicaState,
    prompt_tokens: int,
    part: int,
) -> bool:
    """Whether a prompt that finds the low-end side full goes whole to the high-end one, within its planned batch."""
    load, facts = high_end(high_replica), high_replica.facts
    if load[2] * BLOCK_TOKENS < prompt_tokens or (facts and high_replica.open_requests >= facts.decode_batch):
        return False
    # Those that wait count as if they were like it.
    low_s = max(0.0, partial_prefill_s(splits, low_replica.open_prefill_tokens + len(target.waiting) * part))
    high_s = high_replica.open_prefill_tokens * facts.prefill_s_per_token if facts is not None else 0.0
    return sooner_whole(splits, prompt_tokens, part, load, low_s, high_s)


def stays_low(
    target: Target, low_replica: ReplicaState, high_replica: ReplicaState, total_tokens: int
) -> bool:
    weak, strong = low_replica.facts, high_replica.facts
    if weak is None or strong is None:
        return False
    if low_replica.open_context_tokens + total_tokens > weak.total_blocks * BLOCK_TOKENS:
        return False
    decoding = max(0, low_replica.open_requests - target.in_low)
    return keeps_decode(strong, high_replica.open_requests, weak, decoding, target.busy)

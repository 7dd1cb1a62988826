"""Hits on a real trace: as many as with infinite memory when there is enough, fewer and fewer when there is not."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from potluck.core.replica.blocks import BlockPool

DATA = Path(os.environ.get("POTLUCK_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
TRACE = DATA / "mooncake_fast25_conversation.jsonl.gz"
TOKENS = 512

pytestmark = pytest.mark.skipif(not TRACE.exists(), reason="the Mooncake trace is not here (POTLUCK_DATA)")


@pytest.fixture(scope="module")
def trace() -> list[tuple[tuple[int, ...], int]]:
    with gzip.open(TRACE, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [(tuple(name + 1 for name in row["hash_ids"]), row["input_length"] // TOKENS) for row in rows]


def hits(trace: list[tuple[tuple[int, ...], int]], blocks: int) -> float:
    pool = BlockPool(blocks, block_tokens=TOKENS)
    result = 0
    for prompt, _ in trace:
        result += pool.longest((), prompt, len(prompt) * TOKENS).blocks
        pool.keep(prompt)
    pool.check()
    return result / sum(len(prompt) for prompt, _ in trace)


def test_prefix_hits_fall_from_those_of_an_infinite_cache_with_its_size(
    trace: list[tuple[tuple[int, ...], int]],
) -> None:
    seen: set[int] = set()
    best = 0
    for prompt, _ in trace:
        best += sum(name in seen for name in prompt)
        seen.update(prompt)
    infinite = best / sum(len(prompt) for prompt, _ in trace)
    sizes = [len(seen), len(seen) // 2, len(seen) // 10, len(seen) // 50]
    result = [hits(trace, size) for size in sizes]
    assert result[0] == infinite
    assert result[1] >= 0.99 * infinite
    assert result == sorted(result, reverse=True)
    assert result[2] > 0.7 * infinite
    assert result[3] > 0


def test_hybrid_model_hits_only_at_checkpoints(
    trace: list[tuple[tuple[int, ...], int]],
) -> None:
    """The first 3,000 requests, without a bound: what is found is the longest prefix that ends at a checkpoint."""
    pool = BlockPool(400_000, exact=True, block_tokens=TOKENS)
    marks: set[int] = set()
    total = partial = 0
    for prompt, full in trace[:3000]:
        result = pool.longest((), prompt, len(prompt) * TOKENS)
        lengths = [depth for depth in range(1, len(prompt) + 1) if prompt[depth - 1] in marks]
        assert result.blocks == max(lengths, default=0)
        assert result.blocks <= result.shared_blocks
        total += result.blocks
        partial += result.shared_blocks
        pool.keep(prompt)
        branch = {result.shared_blocks} if result.shared_blocks > result.blocks else set()
        for depth in branch | ({full} if full else set()):
            pool.keep_checkpoint(prompt[:depth], (), 3)
            marks.add(prompt[depth - 1])
    assert 0 < total < partial, "some of what is there cannot be resumed"

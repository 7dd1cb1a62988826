"""The block pool and the index over all pools: hits on a real trace at several sizes, and CPU time.

Mooncake's conversation trace (12,031 requests, blocks of 512 tokens), each request looked up and then kept. `hit` is
the share of prompt blocks that were found. The hybrid model resumes only where a checkpoint is: at the end of each
prompt (`ends`), there and where it left the way of others (`branches`), or after every block (`every`). Pool sizes
are shares of what an infinite cache of the same policy holds, `at_50000` is in blocks.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from math import ceil

from parts.common import DATA, cpu_s, run, say, skip
from potluck.catalog.models import model
from potluck.core.replica.blocks import BlockPool, CacheChanges, PrefixHit
from potluck.core.routing.prefix_index import CacheAnnouncer, PrefixIndex
from potluck.perf.memory import kv_bytes_per_token, state_bytes

TRACE = "mooncake_fast25_conversation.jsonl.gz"
TOKENS = 512
HYBRID = "kimi-linear-48b-a3b"
SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
QUICK_SHARES = (1.0, 0.1)
SEED = 7

Policy = Callable[[PrefixHit, int], Sequence[int]]
POLICIES: dict[str, Policy] = {
    "ends": lambda prefix, blocks: (blocks,) if blocks else (),
    "branches": lambda prefix, blocks: sorted({blocks, _branch(prefix) or blocks} if blocks else ()),
    "every": lambda prefix, blocks: range(1, blocks + 1),
}


def _branch(prefix: PrefixHit) -> int:
    return prefix.shared_blocks if prefix.shared_blocks > prefix.blocks else 0


class Prompt(tuple[int, ...]):
    """Names of blocks, of which the first `full` are full."""

    full: int


def prompts() -> list[Prompt]:
    result = []
    with gzip.open(DATA / TRACE, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            prompt = Prompt(name + 1 for name in row["hash_ids"])  # zero stands for the beginning
            prompt.full = row["input_length"] // TOKENS
            result.append(prompt)
    return result


def infinite(trace: Sequence[Prompt], policy: Policy | None = None) -> tuple[float, int, int]:
    """(hit, blocks held in the end, checkpoints held in the end) without any bound, by sets."""
    blocks: set[int] = set()
    marks: set[int] = set()
    hits = total = 0
    for prompt in trace:
        shared = next((place for place, name in enumerate(prompt) if name not in blocks), len(prompt))
        result = shared
        while policy is not None and result and prompt[result - 1] not in marks:
            result -= 1
        hits += result
        total += len(prompt)
        blocks.update(prompt)
        if policy is not None:
            about = PrefixHit(result * TOKENS, result, None, shared)
            marks.update(prompt[depth - 1] for depth in policy(about, prompt.full))
    return hits / total, len(blocks), len(marks)


def hit(trace: Sequence[Prompt], blocks: int, policy: Policy | None = None, units: int = 0) -> float:
    pool = BlockPool(blocks, exact=policy is not None, block_tokens=TOKENS)
    hits = total = 0
    for prompt in trace:
        result = pool.longest((), prompt, len(prompt) * TOKENS)
        hits += result.blocks
        total += len(prompt)
        pool.keep(prompt)
        if policy is not None:
            for depth in policy(result, prompt.full):
                pool.keep_checkpoint(prompt[:depth], (), units)
    pool.check()
    return hits / total


def ratios(trace: Sequence[Prompt], quick: bool) -> Iterator[tuple[str, float]]:
    best, blocks, _ = infinite(trace)
    yield "full_hit_infinite", best
    shares = QUICK_SHARES if quick else SHARES
    if quick:
        say(f"left out: all sizes but {shares[0]:g} and {shares[1]:g} of what is held")
    for share in shares:
        result = hit(trace, round(blocks * share))
        yield f"full_hit_at_{share:g}", result
        if share == 1.0:
            yield "full_ample_shortfall", 1 - result / best
    block_bytes = TOKENS * kv_bytes_per_token(model(HYBRID))
    units = ceil(state_bytes(model(HYBRID)) / block_bytes)
    yield "hybrid_block_mib", block_bytes / 2**20
    yield "hybrid_checkpoint_blocks", units
    for name, policy in POLICIES.items():
        limit, held, marks = infinite(trace, policy)
        yield f"hybrid_{name}_hit_infinite", limit
        yield f"hybrid_{name}_checkpoints", marks
        ample = held + units * marks
        for share in shares:
            result = hit(trace, round(ample * share), policy, units)
            yield f"hybrid_{name}_hit_at_{share:g}", result
            if share == 1.0:
                yield f"hybrid_{name}_ample_shortfall", 1 - result / limit
        if not quick:
            yield f"hybrid_{name}_hit_at_50000", hit(trace, 50_000, policy, units)


def operations(trace: Sequence[Prompt], quick: bool) -> Iterator[tuple[str, float]]:
    """Look-ups of the trace's prompts, and blocks of new prompts as long as those, in a pool of 50,000."""
    count = 50_000 if quick else 500_000
    chance = random.Random(SEED)
    pool = BlockPool(50_000, block_tokens=TOKENS)
    for prompt in trace:
        pool.keep(prompt)
    asked = chance.choices(trace, k=count)
    fresh: list[range] = []
    name, left = 1 << 40, count
    while left > 0:
        size = min(left, len(chance.choice(trace)))
        fresh.append(range(name, name + size))
        name, left = name + size, left - size

    def look() -> None:
        for prompt in asked:
            pool.longest((), prompt, len(prompt) * TOKENS)

    def keep() -> None:
        for chain in fresh:
            pool.keep(chain)

    looked_s, kept_s = cpu_s(look), cpu_s(keep)
    yield "pool_us_per_prompt_looked_up", looked_s / count * 1e6
    yield "pool_us_per_block_kept", kept_s / count * 1e6
    yield "pool_million_cpu_s", (looked_s + kept_s) / (2 * count) * 1e6


def index_operations(trace: Sequence[Prompt], quick: bool) -> Iterator[tuple[str, float]]:
    """Eight replicas in two clusters report what they keep of the trace; then its prompts are looked up."""
    index = PrefixIndex()
    announcers = [CacheAnnouncer(f"r{place}", 1) for place in range(8)]
    pools = [BlockPool(20_000, block_tokens=TOKENS) for _ in announcers]
    events = []
    blocks = 0
    for place, prompt in enumerate(trace):
        pool = pools[place % 8]
        pool.keep(prompt)
        changes: CacheChanges = pool.changes()
        blocks += len(changes.added) + len(changes.removed)
        events.append(announcers[place % 8].report(changes))

    def report() -> None:
        for event in events:
            index.apply(event, f"c{int(event.replica[1:]) % 2}")

    count = 10_000 if quick else 100_000
    asked = random.Random(SEED).choices(trace, k=count)

    def look() -> None:
        for prompt in asked:
            index.longest(prompt)

    reported_s, looked_s = cpu_s(report), cpu_s(look)
    yield "index_us_per_block_reported", reported_s / blocks * 1e6
    yield "index_us_per_prompt_looked_up", looked_s / count * 1e6
    yield "index_million_cpu_s", (reported_s / blocks + looked_s / count) / 2 * 1e6


def measure(quick: bool) -> dict[str, float]:
    trace = prompts()
    figures = dict(ratios(trace, quick))
    figures |= dict(operations(trace, quick))
    return figures | dict(index_operations(trace, quick))


TARGETS = {
    "full_ample_shortfall": ("<=", 0.01),
    **{f"hybrid_{name}_ample_shortfall": ("<=", 0.01) for name in POLICIES},
    "pool_million_cpu_s": ("<=", 10.0),
    "index_million_cpu_s": ("<=", 10.0),
}


if __name__ == "__main__":
    if not (DATA / TRACE).exists():
        skip("kv_pool", f"{DATA} has no {TRACE}")
    run("kv_pool", measure, TARGETS, seeds=[SEED])

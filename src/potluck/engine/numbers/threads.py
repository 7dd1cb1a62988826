"""Compiled loops over several threads: as many as torch may use, where the work is worth it.

A loop is cut into ranges that do not depend on each other, so the threads change no bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

WORTH = 20_000_000
"""Products for which a thread is woken: some tens of microseconds of work."""


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="potluck-kernel")


def parts(work: int) -> int:
    """Threads for so many products."""
    return max(1, min(torch.get_num_threads(), work // WORTH))


def over(count: int, threads: int, call: Callable[[int, int], None]) -> None:
    """`call(begin, stop)` for ranges that together are [0, count)."""
    if threads == 1 or count == 1:
        call(0, count)
        return
    cuts = [count * part // threads for part in range(threads + 1)]
    ranges = [(begin, stop) for begin, stop in pairwise(cuts) if begin < stop]
    others = [_pool(threads - 1).submit(call, *each) for each in ranges[1:]]
    call(*ranges[0])
    for other in others:
        other.result()

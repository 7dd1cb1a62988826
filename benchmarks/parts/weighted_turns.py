"""Data parallel as CRONUS has it (section 5.1): a client that sends each request to an engine by weighted turns.

An engine with weight n has n turns in a row, and at most n requests in its waiting queue; while all queues are full,
requests stay here, in their order. Those without a first token are the waiting ones and the one being computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from potluck.loadgen.load_client import LoadTarget, TimedRequest

COMPUTING, LOOK_S = 1, 0.002


async def fire(weights: Sequence[tuple[str, int]], shots: Sequence[TimedRequest], within_s: float) -> None:
    """Open loop. `weights`: of each engine's address."""
    targets = [LoadTarget(url, False, within_s) for url, _ in weights]
    for target in targets:
        target.start_s = targets[0].start_s
    order = [place for place, (_, weight) in enumerate(weights) for _ in range(weight)]
    open_requests, turn = [0] * len(weights), 0
    door, changed = asyncio.Lock(), asyncio.Event()

    def next_place() -> int | None:
        nonlocal turn
        for _ in order:
            place = order[turn % len(order)]
            turn += 1
            if open_requests[place] < weights[place][1] + COMPUTING:
                return place
        return None

    async def one(request: TimedRequest) -> None:
        await targets[0].wait(request.at_s)
        async with door:  # First come, first served.
            while (place := next_place()) is None:
                changed.clear()
                await changed.wait()
            open_requests[place] += 1
        sending = asyncio.ensure_future(targets[place].shoot(request))
        while request.first_s < 0 and not sending.done():
            await asyncio.sleep(LOOK_S)
        open_requests[place] -= 1
        changed.set()
        await sending

    await asyncio.gather(*map(one, shots))

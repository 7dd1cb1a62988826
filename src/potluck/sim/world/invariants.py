"""The books must balance: what any run has to satisfy, whatever the fleet, the faults and the workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from potluck.sim.results.records import ANSWERED, OPEN
from potluck.sim.world.sim_state import SimHandover

if TYPE_CHECKING:
    from potluck.sim.world.world import SimWorld

RELATIVE = 1e-6


def check(world: SimWorld) -> list[str]:
    """Everything that does not hold at the end of a run; empty when all does. `midway` holds at any time."""
    return [*midway(world), *_requests(world), *_idle(world)]


def midway(world: SimWorld) -> list[str]:
    """What holds at any time: no replica over its memory, no pipe with more or less than it was given."""
    found = []
    for site in world.sites.values():
        replica = site.replica
        if not 0 <= replica.used_blocks <= replica.total_blocks:
            found.append(f"{site.id} uses {replica.used_blocks} of {replica.total_blocks} blocks")
    for pipe in world.network.pipes:
        told = pipe.sent_bytes + pipe.open_bytes(world.now_s)
        if abs(told - pipe.served_bytes) > RELATIVE * max(told, 1.0):
            found.append(f"{pipe.name} carried {pipe.served_bytes:.0f} bytes for {told:.0f} asked")
    return found


def _requests(world: SimWorld) -> list[str]:
    ledger, load = world.ledger, world.workload
    records = ledger.records(load)
    found = []
    still = int((records.outcome[: world.arrived] == OPEN).sum())
    if still != len(world.attempts.open):
        found.append(f"{still} requests without an outcome, {len(world.attempts.open)} open")
    answered = records.outcome == ANSWERED
    short = answered & (records.streamed_tokens != records.output_tokens)
    if short.any():
        found.append(
            f"{int(short.sum())} answers have not the tokens asked for, such as {np.flatnonzero(short)[:3]}"
        )
    with np.errstate(invalid="ignore"):
        disorder = answered & ~(
            (records.arrival_s <= records.first_token_s) & (records.first_token_s <= records.finish_s)
        )
        over = records.streamed_tokens > records.output_tokens
        early = (records.outcome != OPEN) & ~(records.finish_s >= records.arrival_s)
    for what, mask in (
        ("times out of order", disorder),
        ("too many tokens", over),
        ("ended too early", early),
    ):
        if mask.any():
            found.append(f"{int(mask.sum())} requests with {what}, such as {np.flatnonzero(mask)[:3]}")
    unreasoned = (records.outcome == 2) & (records.reason == 0)
    if unreasoned.any():
        found.append(f"{int(unreasoned.sum())} refusals without a reason")
    return found


def _idle(world: SimWorld) -> list[str]:
    """With no request open, nothing may be left anywhere."""
    if world.attempts.open:
        return []
    found = []
    for site in world.fleet.all_sites:
        left = len(site.attempts) + len(site.computing) + sum(not hand.over for hand in site.waiting)
        if left:
            found.append(f"{site.id} still has {left} requests")
        if site.there and site.replica.used_blocks:
            found.append(f"{site.id} still uses {site.replica.used_blocks} blocks")
    found += [
        f"{pipe.name} still has {len(pipe)} transfers"
        for pipe in world.network.pipes
        if any(isinstance(world.handovers.what(key), SimHandover) for key in pipe.keys)
    ]
    return found

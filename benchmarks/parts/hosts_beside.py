"""Two gateways in the place of one: how right limits of keys are, and how often a cache that is there is found."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

import host_bed
import uvloop
from hosts_fleet import HostsFleet
from live_plans import MODEL, WHOLE, write_plans

from parts.common import WORDS
from potluck.loadgen.load_client import LoadTarget, TimedRequest

REQUESTS_PER_MIN = 60
ASKED_PER_S = 6.0
TALKS, TURNS, TURN_TOKENS = 12, 5, 160
"""Conversations that go on at once, how often each asks, and by how much it grows each time."""


def beside(quick: bool) -> dict[str, float]:
    """The same clients, sent to one gateway or to two, by turns or at random as balancers do."""
    figures: dict[str, float] = {}
    for count, balancer in ((1, "turns"), (2, "turns"), (2, "random")):
        result = trial(quick, count, balancer)
        figures |= {f"{name}_{count}_{balancer}": value for name, value in result.items()}
    for balancer in ("turns", "random"):
        for name in ("granted", "cached"):
            figures[f"{name}_share_{balancer}"] = figures[f"{name}_2_{balancer}"] / figures[f"{name}_1_turns"]
    return figures


def trial(quick: bool, count: int, balancer: str) -> dict[str, float]:
    units = WHOLE * 3
    with tempfile.TemporaryDirectory() as name, host_bed.Bed(len(units) + count) as bed:
        plan, spec = write_plans(Path(name), units)
        words = ("--files", f"{MODEL}={WORDS}", "--gateways", str(count))
        with HostsFleet(bed, plan, spec, gateways=count, gateway=words) as fleet:
            cached = uvloop.run(talks(fleet, balancer))
        limits = {"requests_per_min": REQUESTS_PER_MIN}
        with HostsFleet(bed, plan, spec, gateways=count, gateway=words, limits=limits) as fleet:
            granted = uvloop.run(crowd(fleet, balancer, 20.0 if quick else 90.0))
    return {"cached": cached, "granted": granted}


class Balancer:
    def __init__(self, fleet: HostsFleet, kind: str) -> None:
        self._to = [LoadTarget(gateway.url, False, 120.0, fleet.tls) for gateway in fleet.gateways]
        self._kind, self._turn, self._chance = kind, 0, random.Random(1)

    async def send(self, request: TimedRequest) -> None:
        self._turn += 1
        to = self._chance.choice(self._to) if self._kind == "random" else self._to[self._turn % len(self._to)]
        await to.shoot(request)


async def crowd(fleet: HostsFleet, kind: str, lasts_s: float) -> float:
    """Far more than a key may ask for: how much was granted, as a share of its limit over that time."""
    balancer = Balancer(fleet, kind)
    count = round(ASKED_PER_S * lasts_s)
    shots = [TimedRequest(0.0, MODEL, [7, place % 100 + 5, 9], 1, key=fleet.key) for place in range(count)]
    sent = []
    for request in shots:
        sent.append(asyncio.ensure_future(balancer.send(request)))
        await asyncio.sleep(1.0 / ASKED_PER_S)
    await asyncio.gather(*sent)
    granted = sum(request.status == 200 for request in shots)
    # A bucket is full at first: a minute's worth, and what comes in meanwhile.
    return granted / (REQUESTS_PER_MIN * (1.0 + lasts_s / 60.0))


async def talks(fleet: HostsFleet, kind: str) -> float:
    """Conversations that grow: the share of what was said before that an engine still held."""
    balancer = Balancer(fleet, kind)
    result = await asyncio.gather(*(talk(fleet, balancer, place) for place in range(TALKS)))
    cached, could = map(sum, zip(*result, strict=True))
    return cached / could


async def talk(fleet: HostsFleet, balancer: Balancer, place: int) -> tuple[float, float]:
    chance = random.Random(place)
    text: list[int] = []
    cached = could = 0.0
    for turn in range(TURNS):
        before = len(text)
        text = [*text, *(chance.randrange(5, 200) for _ in range(TURN_TOKENS))]
        usage = {"stream_options": {"include_usage": True}}
        request = TimedRequest(0.0, MODEL, text, 4, key=fleet.key, extra=usage)
        await balancer.send(request)
        if not request.ended:
            raise RuntimeError(f"a conversation was not answered: {request.problem}")
        if turn:
            cached, could = cached + request.cached_tokens, could + before
        await asyncio.sleep(0.6 + chance.random() * 0.6)
    return cached, could

"""Load for fleets over several hosts: requests at a steady rate until somebody says enough, each answer checked."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import uvloop
from live_fleet import LiveFleet
from live_plans import MODEL

from potluck.loadgen.load_client import LoadTarget, TimedRequest

VOCAB = 200
"""Prompts are of these tokens, which every model has."""


def shot_of(place: int, at_s: float, key: str, prompt: int, output: int) -> TimedRequest:
    """Half of them greedy, half drawn with a seed; no two alike."""
    chance = random.Random(place)
    tokens = [place % VOCAB + 5, *(chance.randrange(5, VOCAB) for _ in range(prompt))]
    extra: dict[str, object] = {"temperature": 0.9, "seed": place} if place % 2 else {}
    return TimedRequest(at_s, MODEL, tokens, output, key=key, extra=extra)


class Load(threading.Thread):
    """Sends from the moment it is started; over all gateways by turns, as a balancer before them would."""

    def __init__(
        self,
        fleet: LiveFleet,
        rate_per_s: float,
        *,
        prompt: int = 60,
        output: int = 30,
        within_s: float = 120.0,
    ) -> None:
        super().__init__(daemon=True)
        self._fleet, self._rate_per_s = fleet, rate_per_s
        self._prompt, self._output, self._within_s = prompt, output, within_s
        self._enough = threading.Event()
        self.urls = fleet.urls
        """Those that the balancer sends to; may be changed meanwhile."""
        self.shots: list[TimedRequest] = []
        self._problem: Exception | None = None

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._send())
        except Exception as error:
            self._problem = error

    async def _send(self) -> None:
        to = {}
        under_way = []
        clock = LoadTarget(self.urls[0], True, self._within_s, self._fleet.tls)
        place = 0
        while not self._enough.is_set():
            at_s = place / self._rate_per_s
            await clock.wait(at_s)
            url = self.urls[place % len(self.urls)]
            if url not in to:
                to[url] = LoadTarget(url, True, self._within_s, self._fleet.tls)
                to[url].start_s = clock.start_s
            shot = shot_of(place, at_s, self._fleet.key, self._prompt, self._output)
            self.shots.append(shot)
            under_way.append(asyncio.ensure_future(to[url].shoot(shot)))
            place += 1
        await asyncio.gather(*under_way)

    def end(self) -> list[TimedRequest]:
        """No more are sent; all that were, are over."""
        self._enough.set()
        self.join()
        if self._problem is not None:
            raise self._problem
        return self.shots


def wrong(fleet: LiveFleet, shots: Sequence[TimedRequest], by: int) -> list[str]:
    """What is wrong with answers, beside those of an engine that is asked directly."""
    url = str(fleet.engine_list[by]["url"])

    def right(shot: TimedRequest) -> str:
        body = json.loads(shot.body()) | {"stream": False}
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {fleet.engine_key}"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=300, context=fleet.tls) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    with ThreadPoolExecutor(24) as pool:
        expected = list(pool.map(right, shots))
    return [
        f"at {shot.at_s:.1f} s: {shot.status} {shot.problem[:160]} {shot.text[-30:]!r} for {text[-30:]!r}"
        for shot, text in zip(shots, expected, strict=True)
        if not (shot.ended and shot.text == text)
    ]

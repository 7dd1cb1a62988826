"""Load for fleets over several hosts: requests at a steady rate until somebody says enough, each answer checked."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import uvloop
from hosts_fleet import HostsFleet
from live_fleet import LiveFleet
from live_plans import MODEL

from parts.common import Background
from potluck.loadgen.load_client import LoadTarget, TimedRequest

WITHIN_S, PROMPT, VOCAB = 120.0, 60, 200  # Prompts are of these tokens, which every model has.


def shot_of(place: int, at_s: float, key: str, prompt: int, output: int) -> TimedRequest:
    """Half of them greedy, half drawn with a seed; no two alike."""
    chance = random.Random(place)
    tokens = [place % VOCAB + 5, *(chance.randrange(5, VOCAB) for _ in range(prompt))]
    extra: dict[str, object] = {"temperature": 0.9, "seed": place} if place % 2 else {}
    return TimedRequest(at_s, MODEL, tokens, output, key=key, extra=extra)


class Load(Background):
    """Sends from the moment it is started; over all gateways by turns, as a balancer before them would."""

    def __init__(self, fleet: LiveFleet, rate_per_s: float, output: int = 30) -> None:
        super().__init__()
        self._fleet, self._rate_per_s, self._output = fleet, rate_per_s, output
        self.urls = fleet.urls
        """Those that the balancer sends to; may be changed meanwhile."""
        self.shots: list[TimedRequest] = []

    def work(self) -> None:
        uvloop.run(self._send())

    async def _send(self) -> None:
        to = {}
        under_way = []
        clock = LoadTarget(self.urls[0], True, WITHIN_S, self._fleet.tls)
        place = 0
        while not self.over.is_set():
            at_s = place / self._rate_per_s
            await clock.wait(at_s)
            url = self.urls[place % len(self.urls)]
            if url not in to:
                to[url] = LoadTarget(url, True, WITHIN_S, self._fleet.tls)
                to[url].start_s = clock.start_s
            request = shot_of(place, at_s, self._fleet.key, PROMPT, self._output)
            self.shots.append(request)
            under_way.append(asyncio.ensure_future(to[url].shoot(request)))
            place += 1
        await asyncio.gather(*under_way)

    def sent(self) -> list[TimedRequest]:
        """No more are sent; all that were, are over."""
        self.end()
        return self.shots


def wrong(fleet: LiveFleet, shots: Sequence[TimedRequest], by: int) -> list[str]:
    """What is wrong with answers, beside those of an engine that is asked directly."""
    url = str(fleet.engine_list[by]["url"])

    def right(timed_request: TimedRequest) -> str:
        body = json.loads(timed_request.body()) | {"stream": False}
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {fleet.engine_key}"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=300, context=fleet.tls) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    with ThreadPoolExecutor(24) as pool:
        expected = list(pool.map(right, shots))
    return [
        f"at {reply.at_s:.1f} s: {reply.status} {reply.problem[:160]} {reply.text[-30:]!r} for {text[-30:]!r}"
        for reply, text in zip(shots, expected, strict=True)
        if not (reply.ended and reply.text == text)
    ]


LOOK_S = 0.2


class Upkeep(Background):
    """Starts the next release of whatever ended, until it is told to stop."""

    def __init__(self, fleet: LiveFleet, again: Callable[[int], None]) -> None:
        """`again` starts an engine by its place among the fleet's."""
        super().__init__()
        self._fleet, self._again, self.started = fleet, again, 0

    def work(self) -> None:
        while not self.over.wait(LOOK_S):
            for place, process in enumerate(self._fleet.engines):
                if process.popen is not None and process.popen.poll() is not None:
                    self._again(place)
                    self.started += 1


SLOW = 1.3  # A replica that takes so many times as long as it did counts as found to be slow.


@dataclass(frozen=True)
class Times:
    noticed_s: float  # From the trouble until nothing more is sent there, or less.
    back_s: float  # From its end until the engine is sent requests again.


def within(holds: Callable[[], bool], most_s: float = 60.0) -> float:
    began_s = time.monotonic()
    while not holds():
        if time.monotonic() - began_s > most_s:
            raise RuntimeError(f"was waited for in vain, {most_s:g} s")
        time.sleep(LOOK_S)
    return time.monotonic() - began_s


class Troubles:
    def __init__(self, fleet: HostsFleet, last_s: float) -> None:
        """Each trouble goes on for so long after it was noticed."""
        self._fleet, self._last_s = fleet, last_s

    def row(self, place: int) -> dict[str, Any] | None:
        """An engine's replica as the first gateway knows it; None while it sends nothing there."""
        url = self._fleet.engine_list[place]["url"]
        for item in self._fleet.ask(0, "/snapshot")["replicas"]:
            if item["url"] == url and item["state"] == "ready" and not item["doubted"]:
                return dict(item)
        return None

    def away(self, place: int) -> bool:
        return self.row(place) is None

    def cut(self, place: int) -> Times:
        fleet = self._fleet
        fleet.bed.cut(fleet.engine_hosts[place])
        noticed_s = within(lambda: self.away(place))
        time.sleep(self._last_s)
        fleet.bed.mend(fleet.engine_hosts[place])
        return Times(noticed_s, within(lambda: not self.away(place)))

    def slow(self, place: int, bits_per_s: float) -> Times:
        fleet, before = self._fleet, self.row(place)
        usual = 1.0 if before is None else float(before["pace"])

        def slower() -> bool:
            now = self.row(place)
            return now is None or now["pace"] > SLOW * usual

        fleet.bed.slow(fleet.engine_hosts[place], bits_per_s)
        noticed_s = within(slower)
        time.sleep(self._last_s)
        fleet.bed.full_speed(fleet.engine_hosts[place])
        return Times(noticed_s, within(lambda: not self.away(place)))

    def kill(self, place: int, odd: dict[str, object] | None = None) -> Times:
        """It dies, and what is started in its place may be of another release."""
        process = self._fleet.engines[place]
        process.send(signal.SIGKILL)
        noticed_s = within(lambda: self.away(place))
        began_s = time.monotonic()
        self._fleet.replace(place, odd)
        within(lambda: not self.away(place))
        return Times(noticed_s, time.monotonic() - began_s)

"""The requests of the demo's day: as many as its act says, until told otherwise."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import ceil
from typing import Literal

from potluck.core.values.types import Slo
from potluck.loadgen.load_client import LoadTarget, TimedRequest, kept, whole

TOKENS = range(5, 200)
WITHIN_S = 180.0
IDLE_S = 0.05
EVEN = 12.0  # Of the gamma distribution of gaps: a variation of 0.3.
REFUSED = (429, 503, 504)  # Answers that say no, and when to come again.
MOST = 0.95  # Share of first tokens that came within `RequestCounts.ttft_s`.
Phase = Literal["before", "during", "after"]
"""When a request was sent: while the act waited for its moment, in the act, or while the act's requests ended."""


@dataclass(frozen=True, slots=True)
class DemoLoad:
    """So many requests a second of one tenant, of such mean lengths."""

    tenant: str
    rate_per_s: float
    prompt_tokens: int
    output_tokens: int
    request_class: str = "standard"


@dataclass(slots=True)
class SentRequest:
    """A request that was sent, and during which act."""

    act: str
    tenant: str
    shot: TimedRequest
    phase: Phase = "during"

    @property
    def has_ended(self) -> bool:
        return self.shot.done_s >= 0


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What came of some requests."""

    requests: int = 0
    in_time: int = 0
    refused: int = 0
    lost: int = 0  # Neither answered whole nor told no.
    ttft_s: float = 0.0  # Within which 19 of 20 had their first token, of those that were answered.
    no: str = ""  # What those who were told no were told most often.
    why_lost: str = ""  # What became of one that was lost.

    @property
    def answered(self) -> int:
        return self.requests - self.refused - self.lost

    @property
    def answered_share(self) -> float:
        return self.answered / max(1, self.requests)

    @property
    def attained(self) -> float:
        """Share within the objective."""
        return self.in_time / self.requests if self.requests else 1.0


def counted(sent: Iterable[SentRequest], slo: Slo) -> RequestCounts:
    """All of them have ended."""
    requests = in_time = refused = lost = 0
    why_lost = ""
    ttfts_s: list[float] = []
    counter = Counter[str]()
    for sent_request in sent:
        request = sent_request.shot
        requests += 1
        in_time += kept(request, slo)
        if whole(request):
            ttfts_s.append(request.ttft_s)
        elif request.status in REFUSED:
            refused += 1
            counter[_message(request.problem)] += 1
        else:
            lost += 1
            why_lost = (
                f"status {request.status} after {request.pieces} pieces of text: {_message(request.problem)}"
            )
    slow_s = sorted(ttfts_s)[ceil(MOST * len(ttfts_s)) - 1] if ttfts_s else 0.0
    return RequestCounts(
        requests, in_time, refused, lost, slow_s, counter.most_common(1)[0][0] if counter else "", why_lost
    )


def ended_first(sent: Sequence[SentRequest]) -> list[SentRequest]:
    """The requests sent before the first one that is still open.

    Those that merely ended early are mostly the fast and the refused ones, so their share would mislead.
    """
    return list(takewhile(lambda request: request.has_ended, sent))


def attainment_text(counts: RequestCounts) -> str:
    return f"SLO attainment {counts.attained:.0%} of {counts.requests} requests." if counts.requests else ""


def limited(asks: tuple[DemoLoad, ...], rate_per_s: float) -> tuple[DemoLoad, ...]:
    """The same mix of requests, sent no faster than this."""
    rate_now_per_s = sum(load.rate_per_s for load in asks)
    part = min(1.0, rate_per_s / rate_now_per_s) if rate_now_per_s else 1.0
    return tuple(replace(load, rate_per_s=load.rate_per_s * part) for load in asks)


def _message(body: str) -> str:
    """What an answer that says no gives as its reason."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body


@dataclass(slots=True)
class DemoTraffic:
    """Sends in a thread of its own. `ask` changes what is sent from now on; `close` waits for all answers."""

    url: str
    model: str
    keys: Mapping[str, str]
    """Tenant to key."""
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    sent: list[SentRequest] = field(default_factory=list)
    _now: tuple[str, Phase, tuple[DemoLoad, ...]] = ("", "during", ())
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _wait: bool = True

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="potluck-demo-traffic", daemon=True)
        self._thread.start()

    def ask(self, act: str, asks: tuple[DemoLoad, ...], phase: Phase = "during") -> None:
        self._now = (act, phase, asks)

    def of(self, act: str, phase: Phase = "during") -> list[SentRequest]:
        """In the order in which they were sent."""
        return [request for request in list(self.sent) if (request.act, request.phase) == (act, phase)]

    def close(self, wait: bool = True) -> None:
        """Send no more; those under way are waited for, or given up."""
        self._wait = wait
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._send())

    async def _send(self) -> None:
        to = LoadTarget(self.url, False, WITHIN_S)
        under_way: set[asyncio.Task[None]] = set()
        due_s = 0.0
        while not self._over.is_set():
            act, phase, asks = self._now
            rate = sum(demo_load.rate_per_s for demo_load in asks)
            if rate <= 0:
                due_s = to.now_s
                await asyncio.sleep(IDLE_S)
                continue
            # Even rather than by chance: what the acts do is what is to be noticed, not noise.
            due_s = max(due_s + self.chance.gammavariate(EVEN, 1.0 / (EVEN * rate)), to.now_s - 1.0)
            await to.wait(due_s)
            ask = self.chance.choices(asks, [demo_load.rate_per_s for demo_load in asks])[0]
            request = self._shot(ask, due_s)
            self.sent.append(SentRequest(act, ask.tenant, request, phase))
            task = asyncio.create_task(to.shoot(request))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        if under_way and self._wait:
            await asyncio.wait(under_way, timeout=WITHIN_S)

    def _shot(self, ask: DemoLoad, at_s: float) -> TimedRequest:
        prompt = self.chance.choices(TOKENS, k=self._about(ask.prompt_tokens))
        return TimedRequest(
            at_s,
            self.model,
            prompt,
            self._about(ask.output_tokens),
            key=self.keys[ask.tenant],
            headers=(("x-potluck-class", ask.request_class),),
        )

    def _about(self, mean: int) -> int:
        """Some are long: a spread of about 0.3 of the mean, as the spec has it."""
        return max(2, round(mean * self.chance.lognormvariate(-0.045, 0.3)))

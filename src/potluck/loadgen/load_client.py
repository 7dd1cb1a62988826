"""Requests sent to a server that speaks OpenAI's API, each timed token by token.

    open loop     each at its time, whatever becomes of those before: what users do, who do not know of each other
    closed loop   so many at once, the next when one has ended: a server that is slow is asked less

Lean on purpose: on a machine with two cores the client must not be what is measured. Answers are streamed, each on a
connection of its own.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Literal, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from potluck.core.errors import InputError
from potluck.core.values.types import Slo

Prompt = Sequence[int] | str
LEAD_S = 0.2  # From the call to the first request: everything is made by then.


@dataclass(slots=True)
class TimedRequest:
    """One request: what is asked, when, and what came of it. Times are seconds since the run began."""

    at_s: float
    model: str
    prompt: Prompt
    max_tokens: int
    key: str = field(default="", repr=False)
    extra: dict[str, object] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()
    chat: bool = False  # Ask as a chat, for servers that know nothing else.
    sent_s: float = -1.0
    head_s: float = -1.0  # When the answer's head was there, whatever its status.
    first_s: float = -1.0
    last_s: float = -1.0
    gaps_s: list[float] = field(default_factory=list, repr=False)  # Between events with text.
    pieces: int = 0  # Events with text.
    told_tokens: int = 0  # Output tokens as the server counts them; 0 where it does not say.
    cached_tokens: int = 0  # Of its prompt, those that the server says it held already.
    status: int = 0
    retry_after: str = ""
    text: str = ""
    ended: bool = False  # The whole answer came.
    done_s: float = -1.0  # When nothing more was to come, for better or worse.
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        """From when it should have been sent: a client that was late is not the server's merit."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / (self.max_tokens - 1) if self.max_tokens > 1 else 0.0

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)

    @property
    def output_tokens(self) -> int:
        return self.told_tokens or self.pieces

    def body(self) -> bytes:
        asked: dict[str, object] = (
            {"messages": [{"role": "user", "content": self.prompt}]}
            if self.chat
            else {"prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt)}
        )
        fixed = {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        whole = {"model": self.model, **asked, **fixed, **self.extra}
        return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


class _Shooting(asyncio.Protocol):
    def __init__(
        self,
        request: TimedRequest,
        to: SplitResult,
        start_s: float,
        keep_text: bool,
        done: asyncio.Future[None],
    ) -> None:
        self._shot, self._to, self._start_s, self._keep, self._done = request, to, start_s, keep_text, done
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(
            asyncio.Transport, transport
        )  # uvloop's is none, but does the same
        request = self._shot
        body = request.body()
        base = self._to.path.rstrip("/").removesuffix("/v1")
        lines = [
            f"POST {base}/v1/{'chat/completions' if request.chat else 'completions'} HTTP/1.1",
            f"Host: {self._to.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {request.key}"] if request.key else []),
            *(f"{name}: {value}" for name, value in request.headers),
        ]
        request.sent_s = time.monotonic() - self._start_s
        transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._shot.retry_after = value.decode()

    def on_headers_complete(self) -> None:
        self._shot.status = self._parser.get_status_code()
        self._shot.head_s = time.monotonic() - self._start_s

    def on_body(self, data: bytes) -> None:
        request = self._shot
        if request.status != 200:
            request.problem += data.decode("utf-8", "replace")[:300]
            return
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        now_s = time.monotonic() - self._start_s
        for event in events:
            if event.startswith(b"data: [DONE]"):
                request.ended = not request.problem
            elif event.startswith(b'data: {"error"'):
                request.problem = event.decode("utf-8", "replace")[:300]
            elif event.startswith(b"data:"):
                self._piece(event, now_s)

    def _piece(self, event: bytes, now_s: float) -> None:
        request = self._shot
        if b'"completion_tokens"' in event:
            body = json.loads(event[5:])
            usage = body.get("usage") or {}
            request.told_tokens = int(usage.get("completion_tokens", 0))
            request.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            if not body.get("choices"):
                return
        if request.chat and (
            b'"content"' not in event or b'"content":""' in event or b'"content": ""' in event
        ):
            return  # who speaks, or why it ended: no text
        if self._keep:
            for choice in json.loads(event[5:])["choices"]:
                request.text += choice["delta"].get("content", "") if request.chat else choice["text"]
        request.pieces += 1
        if request.first_s < 0:
            request.first_s = now_s
        else:
            request.gaps_s.append(now_s - request.last_s)
        request.last_s = now_s

    def on_message_complete(self) -> None:
        self._end("")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("" if self._shot.ended else f"cut off {exc or ''}")

    def _end(self, problem: str) -> None:
        if problem and not self._shot.problem:
            self._shot.problem = problem
        if not self._done.done():
            self._shot.done_s = time.monotonic() - self._start_s
            self._done.set_result(None)
        if self._transport is not None:
            self._transport.close()


class LoadTarget:
    """Where shots go, and by which clock."""

    def __init__(self, url: str, keep_text: bool, within_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._to = server_of(url)
        self._tls = (tls or ssl.create_default_context()) if self._to.scheme == "https" else None
        self._keep, self._within_s = keep_text, within_s
        self.start_s = time.monotonic() + LEAD_S

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.start_s

    async def wait(self, until_s: float) -> None:
        await asyncio.sleep(max(0.0, until_s - self.now_s))

    async def shoot(self, request: TimedRequest) -> None:
        """One request, from now until nothing more is to come."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(self._within_s):
                transport, _ = await loop.create_connection(
                    lambda: _Shooting(request, self._to, self.start_s, self._keep, done),
                    self._to.hostname or "",
                    self._to.port or (443 if self._tls else 80),
                    ssl=self._tls,
                )
                await done
        except (OSError, TimeoutError) as error:
            request.problem = request.problem or f"{type(error).__name__} {error}"
            request.done_s = self.now_s if request.done_s < 0 else request.done_s
        finally:
            if transport is not None:
                # With TLS both sides would say goodbye, for longer than the loop may last.
                cast(asyncio.Transport, transport).abort() if self._tls else transport.close()


def server_of(url: str) -> SplitResult:
    parts = urlsplit(url)
    try:
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise InputError("URL", f"{url!r} is none; write it as http://HOST:PORT")
    return parts


async def fire(
    url: str,
    shots: Sequence[TimedRequest],
    *,
    keep_text: bool = False,
    within_s: float = 600.0,
    tls: ssl.SSLContext | None = None,
) -> float:
    """Open loop: send all of them in time; returns when the run began, by the monotonic clock. `tls` is for servers
    whose authority this machine does not know."""
    to = LoadTarget(url, keep_text, within_s, tls)

    async def one(request: TimedRequest) -> None:
        await to.wait(request.at_s)
        await to.shoot(request)

    await asyncio.gather(*(one(request) for request in shots))
    return to.start_s


async def take_turns(
    url: str,
    shots: Iterable[TimedRequest],
    at_once: int,
    *,
    seconds: float | None = None,
    within_s: float = 600.0,
) -> list[TimedRequest]:
    """Closed loop: so many at once, nothing new after `seconds`; those that were sent.

    A request's time begins when it is sent, as there is no other.
    """
    to = LoadTarget(url, False, within_s)
    left = iter(shots)
    sent: list[TimedRequest] = []

    async def one_after_another() -> None:
        await to.wait(0.0)
        while seconds is None or to.now_s < seconds:
            request = next(left, None)
            if request is None:
                return
            sent.append(request)
            request.at_s = to.now_s
            await to.shoot(request)

    await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return sent


def shoot(
    url: str,
    shots: Sequence[TimedRequest],
    *,
    keep_text: bool = False,
    within_s: float = 600.0,
    tls: ssl.SSLContext | None = None,
) -> float:
    """Open loop, from plain code."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(fire(url, shots, keep_text=keep_text, within_s=within_s, tls=tls))


def shoot_in_turns(
    url: str,
    shots: Iterable[TimedRequest],
    at_once: int,
    *,
    seconds: float | None = None,
    within_s: float = 600.0,
) -> list[TimedRequest]:
    """Closed loop, from plain code."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(take_turns(url, shots, at_once, seconds=seconds, within_s=within_s))


Style = Literal["ids", "text", "chat"]  # Token numbers, of exact length; text; or text as a chat.
LOWEST, HIGHEST = 20, 400
"""Token numbers that any vocabulary has, and that mean nothing special in those we know."""
WORDS = (
    "river",
    "mill",
    "wheel",
    "rain",
    "child",
    "story",
    "stone",
    "bread",
    "light",
    "road",
    "song",
    "cloud",
)


def prompt_of(numbers: Random, tokens: int, style: Style) -> Prompt:
    """About so many tokens; exactly so many as token numbers. No two begin alike."""
    if style == "ids":
        return [numbers.randrange(LOWEST, HIGHEST) for _ in range(tokens)]
    return " ".join([f"{numbers.randrange(16**6):06x}", *numbers.choices(WORDS, k=max(0, tokens - 4))])


def poisson(numbers: Random, rate_per_s: float, count: int | None, seconds: float | None) -> list[float]:
    """Times at which requests come, independently of each other: so many, or as long as told."""
    if rate_per_s <= 0:
        raise InputError("--rate", f"must be above 0, is {rate_per_s:g}")
    values: list[float] = []
    at_s = 0.0
    while count is None or len(values) < count:
        if values:
            at_s += numbers.expovariate(rate_per_s)
        if seconds is not None and at_s > seconds:
            break
        values.append(at_s)
    return values


def shots(
    rows: Iterable[tuple[float, str, int, int]],
    *,
    seed: int = 0,
    style: Style = "ids",
    key: str = "",
    until_eos: bool = False,
) -> Iterator[TimedRequest]:
    """Requests from (when, which model, tokens of the prompt, tokens of the answer)."""
    numbers = Random(seed)
    extra: dict[str, object] = {"stream_options": {"include_usage": True}}
    if until_eos:
        extra["ignore_eos"] = None
    for at_s, model, prompt, output in rows:
        yield TimedRequest(
            at_s, model, prompt_of(numbers, prompt, style), output, key, extra, chat=style == "chat"
        )


def same(
    times: Iterable[float], model: str, prompt: int, output: int
) -> Iterator[tuple[float, str, int, int]]:
    return ((at_s, model, prompt, output) for at_s in times)


MOST_WORDS = 200  # Characters of an example.


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of seconds; each is a value that was seen."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    requests: int
    answered: int
    """Whole answers."""
    errors: tuple[tuple[str, int], ...]
    """Kind to how many, most first."""
    examples: tuple[tuple[str, str], ...]
    """Kind to what the first of them was told."""
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    e2e_s: Percentiles | None
    prompt_tokens: int
    output_tokens: int
    span_s: float
    """From the first that was to be sent to the last that came."""
    late_s: float
    """How much later than it should have the client sent, at most: its own doing, counted to the server."""
    attained: int | None
    """Requests that kept the objective; None without one."""

    @property
    def attainment(self) -> float | None:
        return None if self.attained is None else self.attained / self.requests if self.requests else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.answered / self.span_s if self.span_s > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.span_s if self.span_s > 0 else 0.0


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """None of nothing."""
    ranked = sorted(values)
    if not ranked:
        return None

    def at(share: float) -> float:
        return ranked[max(0, ceil(share * len(ranked)) - 1)]

    return Percentiles(sum(ranked) / len(ranked), at(0.5), at(0.9), at(0.99), ranked[-1])


def tpot_of(request: TimedRequest) -> float | None:
    """Seconds per token after the first; None where the answer had but one."""
    tokens = request.output_tokens
    return (request.last_s - request.first_s) / (tokens - 1) if tokens > 1 else None


def kind_of(request: TimedRequest) -> str:
    """Of what went wrong, in a few words; empty when nothing did."""
    if whole(request):
        return ""
    if request.status and request.status != 200:
        return f"HTTP {request.status}"
    if "error" in request.problem[:20]:
        return "error in the stream"
    if request.problem.startswith("TimeoutError"):
        return "no answer in time"
    if request.problem.startswith("cut off"):
        return "cut off"
    if request.problem.startswith("not HTTP"):
        return "not HTTP"
    if request.sent_s < 0:
        return "no connection"
    return "ended early"


def whole(request: TimedRequest) -> bool:
    return request.ended and request.first_s >= 0 and not request.problem


def kept(request: TimedRequest, slo: Slo) -> bool:
    """Whether one request kept the objective."""
    if not whole(request):
        return False
    tpot_s = tpot_of(request)
    return slo.kept(request.ttft_s, 0.0 if tpot_s is None else tpot_s, request.last_s - request.at_s)


def measured(shots: Sequence[TimedRequest], slo: Slo | None = None) -> LoadResult:
    answered = [request for request in shots if whole(request)]
    errors = Counter(kind_of(request) for request in shots if not whole(request))
    ends = [request.done_s for request in shots if request.done_s >= 0]
    first_s = min((request.at_s for request in shots), default=0.0)
    return LoadResult(
        len(shots),
        len(answered),
        tuple(errors.most_common()),
        tuple(
            (kind, _told(next(request for request in shots if kind_of(request) == kind))) for kind in errors
        ),
        percentiles(request.ttft_s for request in answered),
        percentiles(tpot for request in answered if (tpot := tpot_of(request)) is not None),
        percentiles(request.last_s - request.at_s for request in answered),
        sum(_length(request) for request in answered),
        sum(request.output_tokens for request in answered),
        max(ends, default=first_s) - first_s,
        max((request.sent_s - request.at_s for request in shots if request.sent_s >= 0), default=0.0),
        None if slo is None else sum(kept(request, slo) for request in shots),
    )


def _told(request: TimedRequest) -> str:
    """What a server said that went wrong, in one line."""
    text = request.problem[request.problem.find("{") :] if "{" in request.problem else ""
    try:
        load = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        load = request.problem
    return " ".join(str(load).split())[:MOST_WORDS]


def _length(request: TimedRequest) -> int:
    return len(request.prompt.split()) if isinstance(request.prompt, str) else len(request.prompt)

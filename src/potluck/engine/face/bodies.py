"""What clients write, read strictly: unknown fields are refused, as OpenAI does, and so is what cannot be done."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web

from potluck.core.codec import decode
from potluck.core.errors import FormatError, InputError
from potluck.engine.compute.sample import Sampling
from potluck.engine.face.errors import Refused
from potluck.kv.codec.layout import Codec

T = TypeVar("T")
IGNORED = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields that change nothing about the answer."""
MOST_CHOICES = 64
BODY_S = 30.0
"""In which a body must have come."""
HALF = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_object(request: web.Request, *, optional: bool = False) -> dict[str, object]:
    """The body as a JSON object; its size is capped by the application, its time here."""
    try:
        async with asyncio.timeout(BODY_S):
            raw = await request.read()
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise FormatError("body", "cannot be decoded as its headers say") from error
    return {} if optional and not raw else parse_object(raw)


def parse_object(raw: bytes) -> dict[str, object]:
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if HALF.search(raw):
            _whole_characters(found)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            "body", f"is not JSON ({(str(error).splitlines() or ['too deep'])[0][:120]})"
        ) from error
    if not isinstance(found, dict):
        raise FormatError("body", "must be a JSON object")
    return found


def _whole_characters(value: object) -> None:
    """JSON can write half of a pair (\\ud800) alone; such text cannot be encoded."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FormatError("body", "has half a character, such as \\ud800 alone") from error
    elif isinstance(value, dict):
        for each in (*value, *value.values()):
            _whole_characters(each)
    elif isinstance(value, list):
        for each in value:
            _whole_characters(each)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def shaped(kind: type[T], body: dict[str, object]) -> T:
    """A dataclass from a body. null counts as not given; the codec's own `type` key is no field here."""
    values = {key: value for key, value in body.items() if key not in IGNORED and value is not None}
    if "type" in values:
        raise FormatError("type", "unknown key")
    return decode(kind, values)


def tokens_of(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise FormatError(where, "must be a list of token numbers")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False
    include_obfuscation: bool = False


@dataclass(frozen=True, slots=True)
class Common:
    """What completions and chats have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    """Higher first."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MOST_CHOICES:
            raise InputError("n", f"must be 1 to {MOST_CHOICES}, is {self.n}")
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise InputError(name, "is not supported by this engine; leave it out")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def sampling(self, seed: int, logprobs: int | None) -> Sampling:
        return Sampling(self.temperature, max(self.top_k, 0), self.top_p, self.min_p, seed, logprobs)


@dataclass(frozen=True, slots=True)
class Completion(Common):
    max_tokens: int = 16
    logprobs: int | None = None
    best_of: int = 1
    echo: bool = False

    def __post_init__(self) -> None:
        Common.__post_init__(self)
        if self.echo:
            raise InputError("echo", "is not supported by this engine")
        if self.best_of not in (1, self.n):
            raise InputError("best_of", "is not supported by this engine; ask for n")


@dataclass(frozen=True, slots=True)
class Chat(Common):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def completion_of(body: dict[str, object]) -> tuple[Completion, list[str | tuple[int, ...]]]:
    """A completion and its prompts, each text or tokens."""
    body = dict(body)
    prompt = body.pop("prompt", None)
    asked = shaped(Completion, body)
    if isinstance(prompt, str):
        return asked, [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise FormatError("prompt", "must be text, a list of texts, tokens, or a list of tokens")
    if all(type(item) is int for item in prompt):
        return asked, [tuple(prompt)]
    if len(prompt) * asked.n > MOST_CHOICES:
        raise InputError(
            "prompt", f"{len(prompt)} prompts and n {asked.n} are more than {MOST_CHOICES} answers"
        )
    return asked, [
        item if isinstance(item, str) else tokens_of(item, f"prompt[{place}]")
        for place, item in enumerate(prompt)
    ]


def chat_of(body: dict[str, object], speakers: tuple[str, ...]) -> tuple[Chat, list[dict[str, str]]]:
    body = dict(body)
    messages = body.pop("messages", None)
    form = body.pop("response_format", None)
    if form not in (None, {"type": "text"}):
        raise InputError("response_format", "only text is supported by this engine")
    for name in ("tools", "functions"):
        if body.pop(name, None):
            raise InputError(name, "is not supported by this engine")
    asked = shaped(Chat, body)
    if not isinstance(messages, list) or not messages:
        raise FormatError("messages", "must be a list of at least one message")
    return asked, [_message(item, f"messages[{place}]", speakers) for place, item in enumerate(messages)]


def _message(value: object, where: str, speakers: tuple[str, ...]) -> dict[str, str]:
    if not isinstance(value, dict):
        raise FormatError(where, "must be an object")
    role, content = value.get("role"), value.get("content")
    if role not in speakers:
        raise InputError(f"{where}.role", f"must be one of {', '.join(speakers)}")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise InputError(f"{where}.content", "may only have parts of type text")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise FormatError(f"{where}.content", "must be text")
    return {"role": str(role), "content": content}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a segment's cache comes from: an engine's HOST:PORT for caches, and the handle that it was given."""

    kv: str
    handle: str


@dataclass(frozen=True, slots=True)
class Draws:
    """How tokens are drawn, as Sampling has it."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.logprobs)


@dataclass(frozen=True, slots=True)
class SegmentAsk:
    """The body of POST /segments, beside its tokens."""

    request: str
    model: str
    start: int = 0
    stop: int | None = None
    max_tokens: int = 0
    sampling: Draws = field(default_factory=Draws)
    end_tokens: tuple[int, ...] = ()
    """Beside the model's own."""
    ignore_eos: bool = False
    priority: int = 0
    source: Source | None = None
    handle: str | None = None
    """Under which the cache of [0, stop) can be fetched; made up and told if not given."""
    codec: Codec = "raw"
    """How that cache is sent."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.request) <= 200 or not self.request.isprintable():
            raise InputError("request", "must be a name of 1 to 200 characters")
        if (self.start > 0) != (self.source is not None):
            raise InputError("source", "is needed when start is beyond 0, and only then")
        if self.handle is not None and self.stop is None:
            raise InputError("handle", "is only for a segment with a stop")
        if self.codec != "raw" and self.stop is None:
            raise InputError("codec", "is only for a segment with a stop")


def segment_of(body: dict[str, object]) -> tuple[SegmentAsk, tuple[int, ...]]:
    body = dict(body)
    tokens = tokens_of(body.pop("tokens", None), "tokens")
    source = body.get("source")
    if isinstance(source, dict):
        body["source"] = {"type": "Source", **source}
    return shaped(SegmentAsk, body), tokens

"""What a segment's engine is asked: the body of POST /segments, read strictly (docs/engine.md)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from potluck.api.grammar_fields import check_grammar_fields
from potluck.api.http import shaped, tokens_of
from potluck.api.json_schema_limits import check_json_schema_text
from potluck.core.errors import FormatError, InputError
from potluck.core.replica.batch import require_weight
from potluck.core.replica.blocks import LONGEST_SALT
from potluck.core.values.kv import LEAST_CONNECTIONS, MOST_CONNECTIONS
from potluck.core.values.sampling import Sampling


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where a segment's cache comes from: an engine's HOST:PORT for caches, and the handle that it was given."""

    kv: str
    handle: str
    connections: int = LEAST_CONNECTIONS
    """That it comes over, as the plan has them for the link between the two."""

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= MOST_CONNECTIONS:
            raise InputError("source.connections", f"must be 1 to {MOST_CONNECTIONS}, is {self.connections}")


UNSUPPORTED = "unsupported_value"
"""The code of an engine that cannot do what a request asks for, such as JSON of a schema: no other engine can."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ClientBody:
    path: str
    body: dict[str, object]

    def __post_init__(self) -> None:
        if self.path not in (COMPLETIONS, CHATS):
            raise InputError("own.path", f"must be {COMPLETIONS} or {CHATS}")


@dataclass(frozen=True, slots=True)
class SamplingBody:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str = ""

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{item.name: getattr(self, item.name) for item in fields(self)})


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """The body of POST /segments, beside its tokens."""

    request: str
    model: str
    start: int = 0
    stop: int | None = None
    max_tokens: int = 0
    sampling: SamplingBody = field(default_factory=SamplingBody)
    end_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    generated: int = 0
    """How many of the last tokens are output already, of an attempt before: penalties and formats count them so."""
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    salt: str = ""
    source: KvSource | None = None
    handle: str | None = None
    """Under which the cache of [0, stop) can be fetched; made up and told if not given."""
    codec: Literal["raw", "int8", "int4"] = "raw"
    """How that cache is sent."""
    own: ClientBody | None = None
    """What the last segment answers in the engine's own words."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.request) <= 200 or not self.request.isprintable():
            raise InputError("request", "must be a name of 1 to 200 characters")
        if len(self.tenant) > 200 or not (not self.tenant or self.tenant.isprintable()):
            raise InputError("tenant", "must be a name of at most 200 characters")
        require_weight(self.weight)
        if len(self.salt) > LONGEST_SALT:
            raise InputError("salt", f"must have at most {LONGEST_SALT} characters")
        if (self.start > 0) != (self.source is not None):
            raise InputError("source", "is needed when start is beyond 0, and only then")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InputError("min_tokens", f"must be 0 to max_tokens, is {self.min_tokens}")
        if self.generated < 0:
            raise InputError("generated", f"must not be negative, is {self.generated}")
        if self.handle is not None and self.stop is None:
            raise InputError("handle", "is only for a segment with a stop")
        if self.codec != "raw" and self.stop is None:
            raise InputError("codec", "is only for a segment with a stop")
        if self.own is not None and self.stop is not None:
            raise InputError("own", "is only for the segment that decodes")


def segment_of(body: dict[str, object]) -> tuple[SegmentRequest, tuple[int, ...]]:
    body = dict(body)
    tokens = tokens_of(body.pop("tokens", None), "tokens")
    source = body.get("source")
    if isinstance(source, dict):
        body["source"] = {"type": "KvSource", **source}
    own = body.pop("own", None)
    segment_request = shaped(SegmentRequest, body)
    if segment_request.sampling.json_schema:
        check_json_schema_text(segment_request.sampling.json_schema, "sampling.json_schema")
    return (segment_request if own is None else replace(segment_request, own=_own(own))), tokens


def _own(value: object) -> ClientBody:
    if not isinstance(value, dict) or set(value) != {"path", "body"}:
        raise FormatError("own", "must have a path and a body")
    path, body = value["path"], value["body"]
    if not isinstance(path, str) or not isinstance(body, dict):
        raise FormatError("own", "must have a path and a body")
    check_grammar_fields(body)
    return ClientBody(path, body)

"""Plain values that the parts of the gateway pass to each other, and how it is set up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_bytes
from typing import Literal, NamedTuple, Protocol

from potluck.core.state.actions import Refuse
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.core.values.types import DEFAULT_CLASS, DEFAULT_TENANT


class Address(NamedTuple):
    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


EngineKind = Literal["segments", "openai"]
"""Whether it runs segments (docs/engine.md), or whole requests over plain OpenAI."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica is reached. One that is restarted is another replica, mostly at the same address."""

    replica: str
    model: str
    region: str
    address: Address
    kind: EngineKind = "segments"
    kv: str = ""
    """HOST:PORT of its caches; empty where it has none."""
    fingerprint: str = ""
    """Of its model and weights; hand-overs need equal ones. Whoever answers with another is not who it was."""
    served_model: str = ""
    key: str = field(default="", repr=False)
    """What it wants as a bearer, if anything."""
    token_ids: bool = False
    """Whether, over plain OpenAI, it tells tokens (`return_token_ids`): a broken answer goes on elsewhere."""
    cache_salt: bool = False
    """Whether, over plain OpenAI, it keeps prefixes apart by a `cache_salt` in the body, as vLLM does."""
    unit: str = ""
    """The copy that it belongs to."""
    codec: str = "raw"
    """How its KV goes to others of that copy."""
    own: bool = False
    """Whether it takes the client's own request with a last segment (`ChoiceRequest.own`)."""
    adapters: tuple[str, ...] = ()
    """Of the model, that it has loaded."""
    path_prefix: str = ""
    """What stands before `/v1` in its paths, of a server of OpenAI's API."""


class RewrittenBody(bytes):
    """A client's large body with `model` as its first member, `cache_salt` as its last one, and no name twice."""

    before_salt: int
    """Where what comes before the `cache_salt` ends; before the last brace where there is none."""


class PreparedPrompt(NamedTuple):
    """What the dispatch of a long prompt needs, computed beforehand, off the event loop."""

    text: str
    """Its tokens as a list in JSON, without the last bracket."""
    fingerprint: str
    """Of the model's weights, by which the blocks are named."""
    blocks: tuple[int, ...]


class ChoiceRequest(NamedTuple):
    """One answer that a client wants. A request with `n` or several prompts asks for several."""

    id: str
    """The Brain's name for it; unguessable, since engines and logs show it."""
    model: str
    prompt: tuple[int, ...]
    """Its tokens; empty where only servers of plain OpenAI have the model and nobody here can tokenise for it."""
    prompt_tokens: int
    """How many there are; an estimate where `prompt` is empty."""
    max_output_tokens: int
    sampling: Sampling = Sampling()
    ends: tuple[int, ...] = ()
    """Tokens that end the answer: by them it is known to be whole although its engine died before saying so."""
    ignore_eos: bool = False
    min_tokens: int = 0
    tenant: str = DEFAULT_TENANT
    request_class: str = DEFAULT_CLASS
    priority: int = 0
    deadline_s: float | None = None
    """By the monotonic clock, as all times of the gateway."""
    salt: str = ""
    """Prefixes are shared among requests with the same one."""
    path: bytes = b""
    """What the client called, /v1/chat/completions say, and with what: for servers of plain OpenAI."""
    body: bytes = b""
    stream: bool = False
    vocab: int = 0
    """How many tokens the model has: an engine that tells of others lies. 0 where that is not known."""
    own: bool = False
    """Whether it asks for more than tokens: whoever decodes gets `body` itself, and answers in its own words."""
    adapter: str = ""
    """What engines call it, where it is an adapter (LoRA) of the model."""
    exact: bool = False
    """Whether its KV must cross as it is, though the plan allows a lossy codec."""
    grammar: bool = False
    """Whether the engine that decodes it compiles a grammar for it, such as one of a JSON schema."""
    prepared: PreparedPrompt | None = None
    """Of a long prompt; None: the event loop computes it."""


class TokenCounts(NamedTuple):
    """Tokens of an answer; None where they were not told."""

    prompt: int | None
    output: int | None
    cached: int


class AnswerSink(Protocol):
    """Where an answer goes; it is turned into what the client reads.

    Either `tokens` are told and then `finished`; or a server of plain OpenAI wrote the client's bytes itself:
    `relay_begin`, `relay` ..., `relay_end`; so does an engine that got the client's own request. Or `refused`, which
    may come after some of either.
    """

    def tokens(self, choices: Sequence[SampledToken]) -> bool:
        """The next tokens. True: a stop string was found, the answer is over, and nothing more is to be told."""

    def finished(self, reason: Literal["stop", "length"], cached_tokens: int) -> None: ...

    def relay_begin(self, status: int, content_type: bytes) -> None: ...

    def relay(self, data: bytes) -> None: ...

    def relay_end(self, counts: TokenCounts | None = None) -> None:
        """`counts` where the tokens are known from elsewhere than the bytes that were relayed."""

    def relay_whole(
        self, status: int, content_type: bytes, body: bytes, counts: TokenCounts | None = None
    ) -> None: ...

    def refused(self, refusal: Refuse) -> None: ...


class RequestOutcome(NamedTuple):
    """How a client's request went, told once when it has ended one way or another. All times are monotonic."""

    request: str
    """The x-request-id that the client saw."""
    key: str
    """The name of its key, never the key; empty where none is asked for."""
    tenant: str
    model: str
    request_class: str
    outcome: str
    """`stop`, `length`, `cancelled`, or why it was refused."""
    status: int
    """Of the HTTP answer; 499 where the client left before there was one."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    came_s: float
    first_s: float | None
    """When its first token was passed on."""
    ended_s: float
    streamed: bool
    estimated: bool = False
    """Whether tokens were guessed, since neither a tokenizer nor the server's usage told them."""
    choices: int = 1
    id: str = ""
    """Of its record: unguessable, and the same if it is written twice."""


LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    workers: int = 1

    @property
    def unreachable(self) -> bool:
        return self.host in LOOPBACK


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    places: ListenAddresses = ListenAddresses()
    engines: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    """Model to where its tokenizer lies."""
    mock_engines: bool = False
    """Of those only the tokenizer counts: engines act as the models that the spec names."""
    keys: Path | None = None
    usage: Path | None = None
    log: Path | None = None
    tls: tuple[Path, Path] | None = None
    engine_ca: Path | None = None
    """Whose certificates engines show; None: of anybody whom the machine trusts."""
    admin_key: str | None = field(default=None, repr=False)
    engine_key: str = field(default="", repr=False)
    """What engines ask for that a controller tells."""
    secret: bytes = field(default_factory=lambda: token_bytes(32), repr=False)
    why: str = ""
    plan_version: int = 1
    attached: bool = False
    """Engines are started and stopped by others: a request whose model no engine serves is refused at once."""
    drain_s: float = 30.0
    gateways: int = 1
    """So many share the clients: each grants its part of every key's limits."""
    state: Path | None = None
    """A directory that outlives the gateway: which engines there are, and answers for whoever asks again."""
    takeover: Path | None = None
    """Where a gateway hands its ports to the next one, or gets them from the one before."""

    def answers_in(self, home: Path) -> Path:
        return (self.state or home) / "answers"

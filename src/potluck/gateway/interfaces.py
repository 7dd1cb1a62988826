"""What the gateway's rooms see of each other, and no more.

    client ─▶ http Exchange ─▶ door ─▶ Asked, Answer ─▶ drive ─▶ Line ─▶ desk (the Brain)
                                          ▲              │  ▲              │
                                          └── tokens ────┘  └── actions ───┘
                                                         └─▶ http EngineConnections ─▶ engines

Nothing here waits: every call returns at once, and what comes later comes as another call, in the one event loop of a
worker. So a token costs a few function calls, and no task is made for a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from potluck.core.state.actions import Action, Refuse, Run
from potluck.core.state.events import Event, FailureKind
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.core.values.types import DEFAULT_CLASS, DEFAULT_TENANT

Headers = Mapping[bytes, bytes]
"""Names in small letters; of a name that comes twice the values are joined by a comma, or the message is refused."""


# Bytes: made by http/.


class Exchange(Protocol):
    """One request of a client that has come whole, and its answer. Exactly one answer is given."""

    method: bytes
    path: bytes
    """Without the query."""
    query: bytes
    headers: Headers
    body: bytes
    peer: str
    """The client's address."""
    came_s: float
    """When its first byte came, by the monotonic clock."""
    on_gone: Callable[[], None] | None
    """To be set by whoever answers: called once when the client leaves before the answer's end."""
    on_room: Callable[[bool], None] | None
    """To be set as well: False when the client reads more slowly than is written, True when it has caught up."""

    def reply(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), lines: bytes = b""
    ) -> None:
        """The whole answer at once; its length is said for you. `lines` are headers as they are sent, each with its
        line end, that were made of nothing that a client or a server said."""

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), lines: bytes = b"") -> None:
        """An answer that comes in pieces."""

    def write(self, data: bytes) -> None:
        """A piece. After the client has left this does nothing."""

    def end(self) -> None:
        """The last piece was written."""

    def drop(self) -> None:
        """Cut the connection: what was written must not be taken for whole."""


Handler = Callable[[Exchange], None]
"""Called for every request that has come whole. It may answer at once or later."""


class Address(NamedTuple):
    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class ResponseListener(Protocol):
    """Who hears an engine's answer. After `done` or `lost`, of which exactly one comes, it hears no more."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, data: bytes) -> None:
        """A piece of the body, without HTTP's own framing."""

    def done(self) -> None: ...

    def lost(self, why: str) -> None:
        """No connection, cut off, not HTTP, or silent for too long; one line."""


class Call(Protocol):
    """A request on its way to an engine."""

    def cancel(self) -> None:
        """Nobody wants it any more: the connection is closed, which tells the engine; the listener hears nothing."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self) -> None: ...


class EngineConnections(Protocol):
    """Connections to engines, kept alive between requests."""

    def send(
        self,
        address: Address,
        method: bytes,
        path: bytes,
        body: bytes,
        listener: ResponseListener,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        silence_s: float = 60.0,
    ) -> Call:
        """Send a request. With nothing heard for `silence_s` (before its answer or in it) the call is lost."""


# Who asks for what: made by door/.


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
    """Tokens that end the answer; where they are known, the model's own among them unless `ignore_eos`. By them the
    driver knows that an answer is whole although its engine died before saying so."""
    ignore_eos: bool = False
    min_tokens: int = 0
    tenant: str = DEFAULT_TENANT
    request_class: str = DEFAULT_CLASS
    priority: int = 0
    deadline_s: float | None = None
    """By the monotonic clock, as all times of the gateway."""
    session: str = ""
    """Requests that name the same one belong together."""
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


class TokenCounts(NamedTuple):
    """Tokens of an answer; None where they were not told."""

    prompt: int | None
    output: int | None
    cached: int


class AnswerSink(Protocol):
    """Where an answer goes; the door turns it into what the client reads.

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
    ) -> None:
        """All three at once."""

    def refused(self, refusal: Refuse) -> None:
        """It will not be answered, or not to its end."""


# Who does it: made by drive/.


class RequestDispatcher(Protocol):
    """A worker's requests under way."""

    def begin(self, asked: ChoiceRequest, answer: AnswerSink) -> None:
        """Have it answered. The answer may hear of it before this returns."""

    def resume(self, asked: ChoiceRequest, answer: AnswerSink, output: Sequence[int]) -> None:
        """The same from where another process left it: the answer has these tokens already."""

    def cancel(self, request: str) -> None:
        """The client went away."""

    def room(self, request: str, there: bool) -> None:
        """The client reads too slowly for now, or has caught up."""

    def act(self, actions: Sequence[Action]) -> None:
        """What the Brain asks of this worker: Run, Twin, Refuse, Abandon, Inquire."""

    def gone(self, replica: str) -> None:
        """The fleet's keeper says that it is gone: what runs there has failed, whatever its connections say."""


# Who decides: made by desk/.


class BrainClient(Protocol):
    """A worker's way to the Brain. What it wants comes back through `RequestDispatcher.act`, perhaps before this
    returns."""

    def tell(self, event: Event) -> None: ...

    def now_s(self) -> float:
        """The Brain's time: seconds since its log began."""


# Who is there: made by fleet/.

EngineKind = Literal["face", "openai"]
"""Whether it runs segments (docs/engine.md), or whole requests over plain OpenAI."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica is reached. One that is restarted is another replica, mostly at the same address."""

    replica: str
    model: str
    region: str
    address: Address
    kind: EngineKind = "face"
    kv: str = ""
    """HOST:PORT of its caches; empty where it has none."""
    fingerprint: str = ""
    """Of its model and weights; hand-overs need equal ones. Whoever answers with another is not who it was."""
    served_model: str = ""
    """What it calls the model itself."""
    key: str = field(default="", repr=False)
    """What it wants as a bearer, if anything."""
    token_ids: bool = False
    """Whether, over plain OpenAI, it tells tokens when asked (`return_token_ids`) and takes them as a prompt: then
    an answer that breaks off goes on elsewhere."""
    cache_salt: bool = False
    """Whether, over plain OpenAI, it keeps prefixes apart by a `cache_salt` in the body, as vLLM does. Others may
    refuse what they do not know."""
    unit: str = ""
    """The copy that it belongs to."""
    codec: str = "raw"
    """How its KV goes to others of that copy."""
    own: bool = False
    """Whether it takes the client's own request with a last segment (`ChoiceRequest.own`)."""
    adapters: tuple[str, ...] = ()
    """Of the model, that it has loaded."""


class ReplicaDirectory(Protocol):
    """The replicas that can be reached now, as a worker knows them."""

    def find(self, replica: str) -> Endpoint | None: ...

    def segments(self, model: str) -> bool:
        """Whether engines can be reached that run segments of this model's requests, and so need their tokens."""

    def owns(self, model: str) -> bool:
        """Whether all of them take clients' own requests (`Endpoint.own`)."""

    def adapters(self) -> Mapping[str, str]:
        """Adapters (LoRA) that all engines of a model have loaded, and the model of each."""

    def codec(self, source: Endpoint, target: Endpoint) -> str:
        """How KV crosses between them, as the plan has it inside a copy or between regions: raw, int8 or int4."""


# What happens: heard by admin/.


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
    """Answers that it asked for."""
    id: str = ""
    """Of its record: unguessable, and the same if it is written twice."""


class Meter(Protocol):
    """What happens, for metrics and whoever watches. Every call is cheap, and none fails."""

    def came(self, model: str, tenant: str) -> None:
        """A request was let in; `answered` will tell how it went."""

    def answered(self, told: RequestOutcome) -> None: ...

    def turned_away(self, status: int, code: str) -> None:
        """A request was not let in: no key, over its limits, nothing at that path."""

    def replayed(self) -> None:
        """Somebody asked again, and reads an answer that was computed before, or is for another."""

    def gaps(self, model: str) -> Callable[[float], None]:
        """Who is to hear of the seconds between two tokens of one answer, or two pieces of it where tokens are not
        seen: one call for each, straight to where they are noted."""

    def routed(self, asked: ChoiceRequest, run: Run) -> None:
        """An attempt is sent on its way; a further one is a retry."""

    def hedged(self, asked: ChoiceRequest, run: Run) -> None:
        """A second attempt is sent beside one that is late."""

    def segment(
        self,
        asked: ChoiceRequest,
        replica: str,
        began_s: float,
        ended_s: float,
        tokens: int,
        problem: str = "",
    ) -> None:
        """A replica's part in an attempt is over: how many tokens it computed or streamed."""

    def failed(self, asked: ChoiceRequest, where: str, kind: FailureKind, why: str) -> None:
        """An attempt was lost."""

    def moved(self, source: str, target: str, codec: str, moved_bytes: int, took_s: float) -> None:
        """KV crossed from one replica to another."""

    def decided(self, what: str, why: str) -> None:
        """Something about the fleet, or a rule, with its reason: one line each."""

"""Every request of a client: who asks, what for, and an answer whatever happens."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import TypeVar
from urllib.parse import unquote_to_bytes

from potluck.api.grammar_fields import GRAMMAR_FIELDS
from potluck.api.http import (
    HttpRefusal,
    ServedNames,
    check_origin,
    compact,
    parse_object,
    random_word,
    refusal,
    request_id,
)
from potluck.api.large_json import INLINE_BODY_BYTES, LargeObject, read_large_object
from potluck.api.openai_replies import model_entry
from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.service import CLASSES, PrefixSharing
from potluck.core.values.types import DEFAULT_TENANT
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.http.parser import Headers
from potluck.gateway.http.server import Exchange
from potluck.gateway.openai.kept_answers import AnswerRecording, KeptAnswers, digest_of, meet
from potluck.gateway.openai.keys import ApiKey, KeyRing, nobody
from potluck.gateway.openai.requests import (
    LengthEstimates,
    ModelCard,
    Submission,
    TenantLength,
    ValidatedRequest,
    options_of,
    understand,
    validate,
    validate_plain,
    with_model_first,
)
from potluck.gateway.openai.response import (
    JSON,
    ChoiceWriter,
    OpenRequests,
    RateLimited,
    ResponseWriter,
    limited,
    reply_error,
    reply_json,
)
from potluck.gateway.registry.registry import ReplicaDirectory
from potluck.gateway.values import ChoiceRequest

T = TypeVar("T")

INLINE_CHARS = 500
"""Up to here a text is tokenised at once: it takes less time than handing it to a thread and back."""
MOST_WAITING_CHARS = 64_000_000
INLINE_GRAMMAR_BYTES = 4_000
"""Of a body that asks for a grammar: the limits of a larger one are checked beside the event loop."""
THREADS = 2
SWITCH_S = 0.0005
"""The longest that the event loop waits for a thread to release the interpreter, once for each ready socket."""


class ClientLeft(Exception):
    """Nobody waits for the result of a step any more."""


class TokenizerPool:
    """Threads for what takes long. `then` hears the result or what went wrong, in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, threads: int = THREADS) -> None:
        self._loop, self._threads = loop, threads
        self._pool: ThreadPoolExecutor | None = None
        self.waiting_chars = 0

    def do(self, chars: int, task: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        if chars <= INLINE_CHARS:
            then(task())
            return
        if self.waiting_chars + chars > MOST_WAITING_CHARS:
            raise HttpRefusal(429, "too many long prompts at once; try again", "overloaded")
        self.waiting_chars += chars
        loop = self._loop or asyncio.get_running_loop()
        if self._pool is None:
            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tokens")

        def told(future: Future[T]) -> None:
            self.waiting_chars -= chars
            error = future.exception()
            if error is None:
                then(future.result())
            else:
                then(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))

        def done(future: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(told, future)

        self._pool.submit(task).add_done_callback(done)

    def soon(self, then: Callable[[], None]) -> None:
        """Call it in the event loop, once what runs there now is done."""
        (self._loop or asyncio.get_running_loop()).call_soon(then)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


log = logging.getLogger(__name__)

Ready = Callable[[str], str]
MOST_SALTS = 100_000
POST_ONLY = frozenset({b"/v1/completions", b"/v1/chat/completions"})
OPEN = frozenset({b"/health", b"/ready", b"/openapi.json"})  # Without a key.
UNSERVED = frozenset(
    {b"/v1/embeddings", b"/v1/audio/speech", b"/v1/images/generations", b"/v1/moderations", b"/v1/rerank"}
)
"""Of OpenAI's and others', which no model here can do."""


@dataclass(frozen=True, slots=True)
class HandlerSettings:
    classes: frozenset[str] = frozenset(request_class.name for request_class in CLASSES)
    secret: bytes = b""
    sharing: tuple[PrefixSharing, ...] = ()
    """Which tenants may use each other's cached prefixes."""
    served: ServedNames = ServedNames()
    """Under which names the gateway is reached; asked only where there are no keys."""
    most_open: int = 20_000
    attached: bool = False
    """Nothing starts engines here: without a usable one a request is refused at once, not held."""


class ClientHandler(OpenRequests):
    def __init__(
        self,
        cards: Mapping[str, ModelCard],
        dispatcher: Dispatcher,
        counters: Counters,
        *,
        key_ring: KeyRing | None = None,
        settings: HandlerSettings | None = None,
        ready: Ready = lambda model: "",
        directory: ReplicaDirectory | None = None,
        tokenizer_pool: TokenizerPool | None = None,
        kept_answers: KeptAnswers | None = None,
        clock: Callable[[], float] = time.monotonic,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        self._cards, self._driver, self._meter, self._keys = dict(cards), dispatcher, counters, key_ring
        self._settings = settings or HandlerSettings()
        self._ready, self._clock, self._calendar = ready, clock, calendar
        self._directory, self._lengths = directory, LengthEstimates()
        self._counting, self._repeats = tokenizer_pool or TokenizerPool(), kept_answers
        self._nobody = nobody(clock())
        self._secret = self._settings.secret or secrets.token_bytes(32)
        self._salts: dict[str, str] = {}
        self._hosts: set[bytes] = set()
        self._openapi = b""
        self.closing = ""

    def __call__(self, exchange: Exchange) -> None:
        given = exchange.headers.get(b"x-request-id")
        name = f"req-{random_word()}" if given is None else request_id(given.decode("latin-1"))
        try:
            path = exchange.path
            if path in POST_ONLY:
                key_ring = self._keys
                if key_ring is None or key_ring.opened(now_s := self._clock()):
                    key = self._who(exchange)
                else:
                    key = key_ring.who(exchange.headers.get(b"authorization"), now_s)
                if exchange.method != b"POST":
                    raise HttpRefusal(405, f"{_shown(path)} takes POST", "method_not_allowed")
                named = given is not None or b"idempotency-key" in exchange.headers
                kept_answers = self._repeats if named and not self.closing else None
                if kept_answers is not None and len(exchange.body) > INLINE_BODY_BYTES:
                    self._digest(exchange, name, key, kept_answers)
                else:
                    self._meet(exchange, name, key, kept_answers, None)
            else:
                self._other(exchange, (b"x-request-id", name.encode()))
        except Exception as error:
            self._turn_away(exchange, name, error)

    def _turn_away(self, exchange: Exchange, name: str, error: Exception) -> None:
        known = refusal(error) or self._unexpected(error)
        self._meter.turned_away(known.status, known.code or "invalid")
        reply_error(exchange, (b"x-request-id", name.encode()), known, None)

    def _digest(self, exchange: Exchange, name: str, key: ApiKey, kept_answers: KeptAnswers) -> None:
        """Compute by what a large request is known again, in a thread, and go on with it."""
        gone: list[bool] = []
        exchange.on_gone = lambda: gone.append(True)

        def then(digest: str | Exception) -> None:
            exchange.on_gone = None
            if gone:
                return
            try:
                if isinstance(digest, Exception):
                    raise digest
                self._meet(exchange, name, key, kept_answers, digest)
            except Exception as error:
                self._turn_away(exchange, name, error)

        self._counting.do(len(exchange.body), partial(digest_of, exchange.path, exchange.body), then)

    def _meet(
        self, exchange: Exchange, name: str, key: ApiKey, kept_answers: KeptAnswers | None, digest: str | None
    ) -> None:
        """Answer a request from what was kept, or else compute its answer."""
        if kept_answers is not None:
            met = meet(kept_answers, exchange, key.tenant, name, self, digest)
            if met is None:
                self._meter.replayed()
                return
            exchange = met
        try:
            writer = self._enter(exchange, name, key)
        except Exception as error:
            self._turn_away(exchange, name, error)
            return
        try:
            writer.recording = exchange if isinstance(exchange, AnswerRecording) else None
            self._generate(exchange, writer, key, chat=exchange.path != b"/v1/completions")
        except Exception as error:
            known = refusal(error) or self._unexpected(error)
            writer.fail(known, _outcome(known))

    def close(self) -> None:
        self._counting.close()
        for card in self._cards.values():
            if card.text is not None:
                card.text.close()

    def why_unready(self, model: str) -> str:
        return self._ready(model)

    def _who(self, exchange: Exchange) -> ApiKey:
        key_ring = self._keys
        if key_ring is not None and not key_ring.opened(self._clock()):
            return key_ring.who(exchange.headers.get(b"authorization"), self._clock())
        self._check_page(exchange.method, exchange.headers)
        shown = (
            None
            if key_ring is None
            else key_ring.shown(exchange.headers.get(b"authorization"), self._clock())
        )
        return shown or self._nobody

    def _check_page(self, method: bytes, headers: Headers) -> None:
        """Without keys, pages of other origins could use the gateway through their reader's browser."""
        host, origin, site = headers.get(b"host"), headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is None and site is None and host in self._hosts:
            return
        texts = {"Host": host, "Origin": origin, "Sec-Fetch-Site": site}
        decoded = {name: value.decode("latin-1") for name, value in texts.items() if value is not None}
        check_origin(method.decode("latin-1"), decoded, self._settings.served)
        if origin is None and site is None and host is not None and len(self._hosts) < 64:
            self._hosts.add(host)

    def _enter(self, exchange: Exchange, name: str, key: ApiKey) -> ResponseWriter:
        if self.closing:
            raise HttpRefusal(503, self.closing, "shutting_down")
        if self.open >= self._settings.most_open:
            raise RateLimited(f"{self.open} requests are open; try again", "overloaded", 1.0)
        allowance, now_s = key.allowance, self._clock()
        quota_exceeded = allowance.enter(now_s)
        if quota_exceeded is not None:
            raise limited(key.allowance, quota_exceeded, now_s)
        self.open += 1
        writer = ResponseWriter(exchange, name, key, self._driver, self._meter, self._clock, self)
        exchange.on_gone = writer.gone
        quota = allowance.quota
        if (
            quota.requests_per_min is not None and quota.tokens_per_min is None
        ):  # else when tokens are reserved
            writer.limits = allowance.headers(now_s)
        return writer

    def _generate(self, exchange: Exchange, writer: ResponseWriter, key: ApiKey, *, chat: bool) -> None:
        raw = exchange.body
        if len(raw) <= INLINE_BODY_BYTES:
            self._validate(exchange, writer, key, chat, parse_object(raw), None)
            return

        def parsed(large_object: LargeObject) -> None:
            self._validate(exchange, writer, key, chat, large_object.values, large_object)

        self._off_loop(writer, len(raw), partial(read_large_object, raw), parsed)

    def _off_loop(
        self, writer: ResponseWriter, chars: int, task: Callable[[], T], then: Callable[[T], None]
    ) -> None:
        """A step of a request that may take long, in a thread; the next one in the event loop, if it still counts."""

        def run() -> T:
            if writer.over:
                raise ClientLeft
            return task()

        def resume(result: T | Exception) -> None:
            if writer.over:  # the client left meanwhile
                return
            try:
                if isinstance(result, Exception):
                    raise result
                then(result)
            except Exception as error:
                known = refusal(error) or self._unexpected(error)
                writer.fail(known, _outcome(known))

        self._counting.do(chars, run, resume)

    def _validate(
        self,
        exchange: Exchange,
        writer: ResponseWriter,
        key: ApiKey,
        chat: bool,
        body: dict[str, object],
        large_object: LargeObject | None,
    ) -> None:
        """Read the fields: of a large body, which may have many values, in a thread."""
        model = body.get("model")
        card = (self._cards.get(model) if type(model) is str else None) or self._card(model)
        directory = self._directory
        owns = not card.plain and directory is not None and directory.owns(card.base or card.name)

        quick = len(exchange.body) <= INLINE_GRAMMAR_BYTES or GRAMMAR_FIELDS.isdisjoint(body)
        if large_object is None and quick:
            plain = card.plain
            validated = (
                validate_plain(card, body, chat) if plain else validate(card, body, chat=chat, owns=owns)
            )
            self._admit(exchange, writer, key, validated)
            return

        def read() -> ValidatedRequest:
            if not card.plain:
                return validate(card, body, chat=chat, owns=owns)
            validated = validate_plain(card, body, chat)
            if large_object is not None:
                validated.understood = understand(validated)
                validated.forwarded = with_model_first(exchange.body, large_object.members, card.name)
            return validated

        self._off_loop(writer, len(exchange.body), read, partial(self._admit, exchange, writer, key))

    def _admit(
        self, exchange: Exchange, writer: ResponseWriter, key: ApiKey, validated: ValidatedRequest
    ) -> None:
        card, chars = validated.card, validated.chars
        validated.manner = options_of(
            exchange.headers, validated.body, exchange.came_s, self._settings.classes, key
        )
        writer.validated = validated
        self._meter.came()
        if self._settings.attached and (reason := self._ready(card.base or card.name)):
            raise HttpRefusal(503, reason, "no_capacity")
        if chars > card.most_chars:
            card.must_fit(chars)
        submission = self._submission(exchange, key, validated)
        word = random_word()

        def begin(asks: list[ChoiceRequest]) -> None:
            self._begin(writer, key, submission, word, asks)

        if card.plain:
            length = self._lengths.of(card.name, key.tenant)
            if validated.chat or all(isinstance(prompt, str) for prompt in validated.prompts):
                validated.length = length
            if card.text is None or not self._tokenises(card, validated, length):
                self._begin(writer, key, submission, word, submission.asks(word, []))
                return
        size = len(exchange.body)
        if size <= INLINE_BODY_BYTES and not validated.own:
            size = chars
        fingerprint = self._driver.fingerprint(card.base or card.name)
        self._off_loop(writer, size, partial(submission.tokenised, word, fingerprint), begin)

    def _tokenises(self, card: ModelCard, validated: ValidatedRequest, length: TenantLength) -> bool:
        """Whether a prompt is tokenised although servers of plain OpenAI do that themselves."""
        if (self._directory is not None and self._directory.segments(card.name)) or length.sampled():
            return True
        return not length.fits(validated.chars, validated.limit or 1, card.room_tokens)

    def _card(self, model: object) -> ModelCard:
        if not isinstance(model, str):
            raise InputError("model", f"must be the name of a model, one of {', '.join(self._cards)}"[:400])
        card = self._cards.get(model) or self._adapters().get(model)
        if card is None:
            raise UnknownNameError("model", model[:100], self._cards)
        return card

    def _adapters(self) -> dict[str, ModelCard]:
        texts = {} if self._directory is None else self._directory.adapters()
        return {
            name: replace(self._cards[base], name=name, base=base)
            for name, base in texts.items()
            if base in self._cards and name not in self._cards
        }

    def _submission(self, exchange: Exchange, key: ApiKey, validated: ValidatedRequest) -> Submission:
        tenant, own = key.tenant, validated.own_salt
        card = validated.card
        circle = self._circle(tenant, card.base or card.name) if self._settings.sharing else tenant
        if card.base:  # An adapter: its KV is not the model's.
            own = f"{card.name}\0{own or ''}"
        salt = (self._salts.get(circle) if own is None else None) or self._salt(circle, own)
        return Submission(validated, tenant, salt, exchange.path, validated.forwarded or exchange.body)

    def _begin(
        self,
        writer: ResponseWriter,
        key: ApiKey,
        submission: Submission,
        word: str,
        asks: list[ChoiceRequest],
    ) -> None:
        validated = submission.validated
        if submission.tokens_known and validated.length is not None:
            validated.length.learn(validated.chars, submission.prompt_tokens)
        writer.estimated = submission.estimated
        if key.allowance.quota.tokens_per_min is not None:
            self._reserve(writer, key, submission.most_tokens)
        if len(asks) == 1:
            writers = [ChoiceWriter(writer, validated, word, 0)]
        else:
            writers = [ChoiceWriter(writer, validated, asked.id, place) for place, asked in enumerate(asks)]
        created_s, recording = self._calendar(), writer.recording
        if recording is not None:
            asks, word, created_s = recording.begins(asks, word, created_s)
        writer.start(validated, word, created_s, writers, submission.prompt_tokens)
        choices = list(zip(asks, writers, strict=True))
        if validated.grammar and len(choices) > 1:
            # All at once could lose an engine each by compiling the same grammar.
            rest = partial(self._drive_rest, writer, choices[1:])
            writer.on_first_output = partial(self._counting.soon, rest)
            del choices[1:]
        self._drive(writer, choices)

    def _drive(
        self, response_writer: ResponseWriter, choices: Sequence[tuple[ChoiceRequest, ChoiceWriter]]
    ) -> None:
        recording = response_writer.recording
        for asked, writer in choices:
            if response_writer.over:  # an earlier one was refused at once
                break
            writer.begun = True
            if recording is None:
                self._driver.begin(asked, writer)
            else:
                recording.drive(self._driver, asked, writer)

    def _drive_rest(
        self, writer: ResponseWriter, choices: Sequence[tuple[ChoiceRequest, ChoiceWriter]]
    ) -> None:
        try:
            self._drive(writer, choices)
        except Exception as error:
            known = refusal(error) or self._unexpected(error)
            writer.fail(known, _outcome(known))

    def _reserve(self, writer: ResponseWriter, key: ApiKey, tokens: int) -> None:
        now_s = self._clock()
        quota_exceeded = key.allowance.reserve(tokens, now_s)
        if quota_exceeded is not None:
            raise limited(key.allowance, quota_exceeded, now_s)
        writer.reserved = tokens
        writer.limits = key.allowance.headers(now_s)

    def _circle(self, tenant: str, model: str) -> str:
        """Those who share a salt: a tenant alone, or with others, joined by what no name holds."""
        for prefix_sharing in self._settings.sharing:
            if prefix_sharing.covers(tenant, model):
                return "".join(f"\x01{name}" for name in prefix_sharing.tenants)
        return tenant

    def _salt(self, tenant: str, own: str | None) -> str:
        """Circles with another one share no cached prefix; `own` sets some of their requests apart as well."""
        if self._keys is None or (self._keys.open and tenant == DEFAULT_TENANT):
            tenant = ""
        if not own:
            if not tenant:
                return ""
            if (salt := self._salts.get(tenant)) is not None:
                return salt
        made = hmac.new(self._secret, f"{tenant}\0{own or ''}".encode(), hashlib.sha256).hexdigest()[:32]
        if not own:
            if len(self._salts) >= MOST_SALTS:
                self._salts.clear()
            self._salts[tenant] = made
        return made

    def _other(self, exchange: Exchange, tag: tuple[bytes, bytes]) -> None:
        path, named = exchange.path, exchange.path.removeprefix(b"/v1/models/")
        if path not in OPEN:
            self._who(exchange)
        reads = path in OPEN or path == b"/v1/models" or named != path
        if reads and exchange.method not in (b"GET", b"HEAD"):
            raise HttpRefusal(405, f"{_shown(path)} takes GET", "method_not_allowed")
        if path == b"/health":
            reply_json(exchange, tag, {"status": "ok"})
        elif path == b"/ready":
            self._say_ready(exchange, tag)
        elif path == b"/openapi.json":
            self._openapi = self._openapi or openapi(self._cards)
            exchange.reply(200, self._openapi, [JSON, tag])
        elif path == b"/v1/models":
            cards = [*self._cards.values(), *self._adapters().values()]
            reply_json(exchange, tag, {"object": "list", "data": [_entry(card) for card in cards]})
        elif named != path:
            reply_json(exchange, tag, _entry(self._card(_unquoted(named))))
        elif path in UNSERVED:
            line = f"{_shown(path)}: no model here can do this; they complete text"
            raise HttpRefusal(400, line, "unsupported")
        else:
            line = f"nothing is at {_shown(path)}; docs/gateway.md has what there is"
            raise HttpRefusal(404, line, "not_found")

    def _say_ready(self, exchange: Exchange, tag: tuple[bytes, bytes]) -> None:
        wanted = [_unquoted(part[6:]) for part in exchange.query.split(b"&") if part.startswith(b"model=")]
        models = [self._card(name).name for name in wanted] or list(self._cards)
        reasons = {model: reason for model in models if (reason := self._ready(model))}
        if self.closing:
            reasons = {"gateway": self.closing}
        state = {"status": "waiting", "reasons": reasons} if reasons else {"status": "ready"}
        reply_json(exchange, tag, state, 503 if reasons else 200)

    def _unexpected(self, error: Exception) -> HttpRefusal:
        """A bug of ours. Its message may hold a client's text, so that only its kind and place are logged."""
        place = "".join(traceback.format_tb(error.__traceback__)[-4:])
        log.error("a request failed: %s at\n%s", type(error).__name__, place)
        return HttpRefusal(500, "internal error; the gateway's log says more", "internal_error")


def openapi(models: Iterable[str]) -> bytes:
    document = json.loads(resources.files("potluck.gateway").joinpath("data/openapi.json").read_bytes())
    for name in ("CompletionRequest", "ChatRequest"):
        document["components"]["schemas"][name]["properties"]["model"]["enum"] = list(models)
    return compact(document)


def _outcome(refusal: HttpRefusal) -> str:
    if refusal.status == 429:
        return "limited"
    if refusal.code == "no_capacity":
        return "no_capacity"
    return "internal" if refusal.status == 500 else "invalid" if refusal.status < 500 else "closing"


def _entry(card: ModelCard) -> dict[str, object]:
    return model_entry(card.name, card.created_s, card.context_tokens)


def _unquoted(value: bytes) -> str:
    return unquote_to_bytes(value).decode("utf-8", "replace")


def _shown(path: bytes) -> str:
    text = path[:100].decode("latin-1")
    return text if text.isprintable() else repr(text)

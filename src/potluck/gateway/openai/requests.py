"""A client's body as a validated request, and that with its tokens as one `ChoiceRequest` for each answer.

Tokenising a prompt costs many times what all the rest of a request does. For servers of plain OpenAI, which do it
themselves, a prompt's length is reckoned by how many characters a token had lately, by model and tenant. Tokenised is
where engines run segments, where a prompt might not fit, and the first prompts of a tenant and one in SAMPLE later.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from potluck.api.grammar_fields import GRAMMAR_FIELDS, check_grammar_fields
from potluck.api.http import HttpRefusal, compact
from potluck.api.large_json import INLINE_BODY_BYTES, large_json
from potluck.api.model_files import JsonMembers, read_generation, read_json
from potluck.api.openai_requests import (
    ANY_OBJECT,
    DEFAULT_TOKENS,
    ChatRequest,
    CompletionRequest,
    EngineAbilities,
    Message,
    chat_chars,
    chat_of,
    chat_prompt,
    check_sizes,
    completion_of,
    is_own,
    own_body,
    own_chat,
    own_completion,
    prompts_of,
    sampling_of,
    templated,
)
from potluck.api.text_stream import TextStream
from potluck.api.tokenizer import ModelTokenizer
from potluck.api.tokenizer_process import SLICE_TOKENS
from potluck.api.tool_requests import TEMPLATED
from potluck.core.errors import CapacityError, FormatError, InputError, PotluckError, did_you_mean
from potluck.core.replica.blocks import BlockNamer
from potluck.core.values.sampling import MOST_LOGPROBS, Sampling, SamplingDefaults
from potluck.core.values.types import DEFAULT_CLASS
from potluck.gateway.http.parser import Headers
from potluck.gateway.openai.keys import ApiKey
from potluck.gateway.values import ChoiceRequest, PreparedPrompt, RewrittenBody

GUESSED_CHARS = 4.0  # Of a token, before anything is known.
LEAST_CHARS, MOST_CHARS = 0.5, 16.0  # Whatever is said, no fewer and no more are believed.
RECENT = 64
FEW, SAMPLE = 8, 512
MARGIN = 1.5
MOST_KEPT = 10_000


class TenantLength:
    __slots__ = ("_chars", "_tokens", "asked", "chars_per_token")

    def __init__(self) -> None:
        self.chars_per_token = GUESSED_CHARS
        self.asked = 0
        self._chars = self._tokens = 0.0

    def learn(self, chars: int, tokens: int) -> None:
        if chars <= 0 or tokens <= 0:
            return
        keep = 1.0 - 1.0 / RECENT
        self._chars = self._chars * keep + chars
        self._tokens = self._tokens * keep + tokens
        self.chars_per_token = min(MOST_CHARS, max(LEAST_CHARS, self._chars / self._tokens))

    def sampled(self) -> bool:
        self.asked += 1
        return self.asked <= FEW or self.asked % SAMPLE == 0

    def fits(self, chars: int, more_tokens: int, room_tokens: int) -> bool:
        return chars / self.chars_per_token * MARGIN + more_tokens <= room_tokens


class LengthEstimates:
    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], TenantLength] = {}

    def of(self, model: str, tenant: str) -> TenantLength:
        tenant_length = self._kept.get((model, tenant))
        if tenant_length is None:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            tenant_length = self._kept[model, tenant] = TenantLength()
        return tenant_length


ENGINES = EngineAbilities(frozenset({"service_tier"}), most_logprobs=MOST_LOGPROBS, draws=True)
OWN_FORM = "potluck"  # Configurations that the engine writes itself, such as the shipped hybrid model's.
LONGEST_CHARS = 16
UNKNOWN_CONTEXT_TOKENS = 1 << 30
UNKNOWN_ROOM_TOKENS = 1 << 17
"""An answer without a limit counts for so many tokens where the context is unknown."""
CERTAIN_CHARS_PER_TOKEN = 8.0
"""A prompt whose tokens are only estimated is refused where it is too long even with such long tokens."""
PREPARED_TOKENS = 8_192
"""From here on a prompt is prepared for dispatch beside being tokenised: its text and block names take a while."""
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "n_predict")
"""Of one answer; the last is llama.cpp's, where a number below 0 means no limit."""
COPIES_BYTES_MAX = 64_000_000
"""Of the bodies that one request with several answers becomes, one for each."""
REMEMBER_BYTES = 8 << 20
"""Of a model's texts that were tokenised lately, with their tokens: some 1,000 prompts of 1,000 tokens."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    context_tokens: int
    """Longest prompt and answer together; 0: unknown, the server that computes the request decides."""
    text: ModelTokenizer | None = None
    """Its tokenizer; without one, only tokens can be sent to engines, and prompts to other servers are reckoned."""
    plain: bool = False
    """Only servers of plain OpenAI have it: what they can do is theirs to say, and bodies go on as they came."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    ends: frozenset[int] = frozenset()
    vocab: int = 0
    able: EngineAbilities = ENGINES
    created_s: int = 0
    base: str = ""
    least_context_tokens: int = 0
    """Where a model's servers take requests of unlike lengths: what all of them take; 0: as `context_tokens`."""
    room_tokens: int = field(default=0, init=False)
    """Of a prompt and its answer together; a very large number where the context is unknown."""
    most_chars: int = field(default=0, init=False)
    """A longer prompt cannot fit, whatever its tokens."""

    def __post_init__(self) -> None:
        longest = LONGEST_CHARS if self.text is None else self.text.longest_token_chars
        object.__setattr__(self, "room_tokens", self.context_tokens or UNKNOWN_CONTEXT_TOKENS)
        object.__setattr__(self, "most_chars", self.room_tokens * longest)

    def must_fit(self, chars: int) -> None:
        if chars > self.most_chars:
            raise CapacityError(
                f"a prompt of {chars} characters cannot fit in {self.context_tokens} tokens; send less"
            )


def read_card(
    name: str, directory: str | Path, *, context_tokens: int = 0, plain: bool = False, created_s: int = 0
) -> ModelCard:
    folder = Path(directory)
    tokenizer = ModelTokenizer.read(folder, REMEMBER_BYTES)
    generation = read_generation(folder)
    ends, context, vocab = set(generation.end_tokens), 0, 0
    if (folder / "config.json").is_file():
        members = JsonMembers(read_json(folder / "config.json"))
        inner = members.part("text_config")
        for json_members in (members, inner):
            ends.update(json_members.tokens("eos_token_id"))
            context = context or int(json_members.number("max_position_embeddings", 0))
            vocab = vocab or int(json_members.number("vocab_size", 0))
        if members.text("model_type", default="") == OWN_FORM:
            own, model = members.part("config"), members.part("config").part("model")
            ends.update(own.tokens("eos_tokens"))
            context, vocab = int(model.number("max_context_tokens", 0)), int(model.number("vocab", 0))
    if not context_tokens and not context:
        raise CapacityError(f"{folder}: config.json says no max_position_embeddings; say the model's context")
    return ModelCard(
        name,
        context_tokens or context,
        tokenizer,
        plain,
        generation.defaults,
        frozenset(ends),
        vocab or (0 if tokenizer is None else tokenizer.vocab),
        created_s=created_s,
    )


CLASS, DEADLINE, EXACT = b"x-potluck-class", b"x-potluck-deadline-ms", b"x-potluck-exact"
SWITCH: Mapping[bytes, bool] = {b"1": True, b"true": True, b"0": False, b"false": False}
TIERS = {"auto": DEFAULT_CLASS, "default": DEFAULT_CLASS, "flex": "batch", "priority": "interactive"}
"""OpenAI's service tiers, as classes."""
LONGEST_WORD = 256
MOST_DEADLINE_MS = 86_400_000
MOST_PRIORITY = 1_000
Prompt = str | tuple[int, ...]


class RequestOptions(NamedTuple):
    request_class: str = DEFAULT_CLASS
    priority: int = 0
    deadline_s: float | None = None
    exact: bool = False  # Whether KV may only cross as it is.


@dataclass(slots=True)
class ValidatedRequest:
    card: ModelCard
    chat: bool
    body: dict[str, object]
    asked: CompletionRequest | ChatRequest | None
    """None: the body goes to a server of plain OpenAI, whose affair it is."""
    prompts: list[Prompt]
    messages: list[Message] | None
    """Of a chat, from which the one prompt is yet to be made."""
    special: bool | None
    """Whether the tokenizer adds its own tokens; None: as the chat template wants."""
    n: int
    limit: int | None
    stream: bool
    chars: int
    own_salt: str | None = None
    length: TenantLength | None = None
    """By what its tokens are reckoned, where all of it is text for servers of plain OpenAI."""
    manner: RequestOptions = RequestOptions()
    own: bool = False
    """Whether it asks for more than tokens, and whoever decodes gets the body itself."""
    grammar: bool = False
    """Whether its engine compiles a grammar for it."""
    understood: CompletionRequest | ChatRequest | None = None
    """Of a large body for plain servers: what `understand` makes of it, read beforehand."""
    forwarded: RewrittenBody | None = None
    """Of a large body for plain servers: how it goes on to them."""

    @property
    def usage_said(self) -> bool:
        options = None if self.asked is None else self.asked.stream_options
        return options is not None and options.include_usage

    def tokenised(self, tenant: str = "") -> list[tuple[int, ...]]:
        """The prompts as tokens; takes as long as the text is that the tenant has not sent lately."""
        try:
            return self._tokenised(tenant)
        except InputError:
            if not self.card.plain:
                raise
            return []  # what the template cannot do the server may

    def _tokenised(self, tenant: str) -> list[tuple[int, ...]]:
        tokenizer = self.card.text
        if self.messages is not None:
            if tokenizer is None:
                raise InputError("messages", "this model has no tokenizer; send tokens to /v1/completions")
            special = not tokenizer.chat_has_specials if self.special is None else self.special
            prompt_text = self._prompt(tokenizer)
            self.card.must_fit(len(prompt_text))
            return [tuple(tokenizer.encode(prompt_text, special=special, apart=tenant))]
        made = []
        for prompt in self.prompts:
            if isinstance(prompt, str):
                if tokenizer is None:
                    raise InputError("prompt", "this model has no tokenizer; send tokens")
                prompt = tuple(tokenizer.encode(prompt, special=self.special is not False, apart=tenant))
            made.append(prompt)
        return made

    def _prompt(self, tokenizer: ModelTokenizer) -> str:
        """The prompt of a chat as a text."""
        assert self.messages is not None
        if self.own:
            messages, more = templated(self.body, self.messages)
            return tokenizer.chat(messages, **more)
        if isinstance(self.asked, ChatRequest):
            return chat_prompt(tokenizer, self.asked, self.messages)
        if not self.body.keys().isdisjoint(TEMPLATED):
            # Engines that run segments may have the model as well: their prompt must have the tools.
            with suppress(InputError):
                return chat_prompt(tokenizer, *chat_of(self.body, self.card.able))
        return tokenizer.chat(self.messages)


def validate(card: ModelCard, body: dict[str, object], *, chat: bool, owns: bool = False) -> ValidatedRequest:
    """Reads a body; raises at what engines cannot honour. What a plain server can do is left to it, and so is what
    engines can that take clients' own requests (`owns`)."""
    if card.plain:
        return validate_plain(card, body, chat)
    asked: CompletionRequest | ChatRequest
    prompts: list[Prompt] = []
    messages = None
    own = owns and is_own(body, card.able, chat=chat)
    grammar = own and check_grammar_fields(body)
    if chat:
        asked, messages = own_chat(body) if own else chat_of(body, card.able)
    else:
        asked, prompts = own_completion(body) if own else completion_of(body, card.able)
    if not own:
        grammar = asked.response_format not in ("", ANY_OBJECT)
    special, chars = asked.add_special_tokens, _chars(prompts, messages)
    if isinstance(asked, ChatRequest) and messages is not None:
        chars = chat_chars(messages, asked)
    sizes = (asked.n, asked.limit, asked.stream, chars, asked.cache_salt)
    return ValidatedRequest(
        card, chat, body, asked, prompts, messages, special, *sizes, own=own, grammar=grammar
    )


def _chars(prompts: list[Prompt], messages: list[Message] | None) -> int:
    texts = [*(message["content"] for message in messages or ()), *prompts]
    return sum(len(text) for text in texts if isinstance(text, str))


def understand(validated: ValidatedRequest) -> CompletionRequest | ChatRequest:
    if validated.understood is not None:
        return validated.understood
    try:
        asked = validate(replace(validated.card, plain=False), validated.body, chat=validated.chat).asked
        assert asked is not None
        return asked
    except PotluckError:  # It took what engines do not: of that the text alone is shown.
        return (ChatRequest if validated.chat else CompletionRequest)(validated.card.name, validated.stream)


def validate_plain(card: ModelCard, body: dict[str, object], chat: bool) -> ValidatedRequest:
    check_sizes(body)
    prompts: list[Prompt] = []
    messages: list[Message] | None = None
    if chat:
        given = body.get("messages")
        alone = given[0] if type(given) is list and len(given) == 1 else None
        text = alone.get("content") if type(alone) is dict else None
        if type(text) is str and card.text is None:
            chars = len(text)  # One message, and nobody here who would tokenise it: most of them.
        else:
            messages = _texts(given)
            chars = _chars(prompts, messages)
    else:
        prompts = prompts_of(body.get("prompt"))
        chars = _chars(prompts, None)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise FormatError("stream", "must be true or false")
    limit, n = body.get("max_completion_tokens") if chat else None, body.get("n")
    if limit is None:
        limit = body.get("max_tokens")
        limit = (None if chat else DEFAULT_TOKENS) if limit is None else _count(limit, "max_tokens")
    else:
        limit = _count(limit, "max_completion_tokens")
    n = 1 if n is None else _count(n, "n")
    if n * (len(prompts) or 1) > card.able.most_choices:
        raise InputError("n", f"more than {card.able.most_choices} answers to one request")
    salt = body.get("cache_salt")
    salt = salt if isinstance(salt, str) else None
    grammar = not GRAMMAR_FIELDS.isdisjoint(body) and check_grammar_fields(body)
    sizes = (n, limit, stream is True, chars, salt)
    return ValidatedRequest(card, chat, body, None, prompts, messages, None, *sizes, grammar=grammar)


def with_model_first(raw: bytes, members: Mapping[str, tuple[int, int]], model: str) -> RewrittenBody:
    """A body whose model can be replaced, and a salt added, without reading it again."""
    pieces = [b'{"model":', json.dumps(model).encode()]
    for name, (start, stop) in members.items():
        if name not in ("model", "cache_salt"):
            pieces += (b",", raw[start:stop])
    before_salt = sum(map(len, pieces))
    if "cache_salt" in members:
        start, stop = members["cache_salt"]
        pieces += (b",", raw[start:stop])
    body = RewrittenBody(b"".join((*pieces, b"}")))
    body.before_salt = before_salt
    return body


def _count(value: object, name: str) -> int:
    if type(value) is not int or value < 1:
        raise InputError(name, "must be a whole number of at least 1")
    return value


def _texts(value: object) -> list[Message]:
    """A chat's messages as far as they are text: what else there is only the server knows how to read."""
    if not isinstance(value, list) or not value:
        raise FormatError("messages", "must be a list of at least one message")
    made = []
    for place, message in enumerate(value):
        if not isinstance(message, dict):
            raise FormatError(f"messages[{place}]", "must be an object")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(part for part in parts if isinstance(part, str))
        role = message.get("role")
        text = content if isinstance(content, str) else ""
        made.append({"role": role if isinstance(role, str) else "user", "content": text})
    return made


def options_of(
    headers: Headers, body: dict[str, object], came_s: float, classes: frozenset[str], key: ApiKey
) -> RequestOptions:
    """Class, priority, deadline and exactness of a request; raises for what is unknown, or not for this key."""
    tier, priority = body.get("service_tier"), body.get("priority")
    given, deadline, exact = headers.get(CLASS), headers.get(DEADLINE), headers.get(EXACT)
    if tier is priority is given is deadline is exact is None and key.classes is None:
        return PLAIN
    request_class = _default_class(key, classes)
    tier_class = None if tier is None else _tier_class(tier, request_class)
    if given is not None:
        request_class = _word(given, "x-potluck-class")
        if request_class not in classes:
            hint = did_you_mean(request_class[:60], classes)
            raise HttpRefusal(400, f"x-potluck-class: unknown{hint}", "unknown_class", "x-potluck-class")
        _check_allowed(key, request_class, "x-potluck-class")
    # Checked even where the header decides: plain OpenAI servers get the body, and the tier in it, as it came.
    if tier_class is not None:
        _check_allowed(key, tier_class, "service_tier")
        request_class = request_class if given is not None else tier_class
    if priority is None:
        priority = 0
    elif type(priority) is not int or abs(priority) > MOST_PRIORITY:
        raise InputError("priority", f"must be a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}")
    elif priority and key.classes is not None:
        line = "this key is limited to classes and may not set a priority; leave it out"
        raise HttpRefusal(403, line, "priority_not_allowed", "priority")
    return RequestOptions(request_class, priority, _deadline_s(deadline, came_s), _switch(exact))


def _default_class(key: ApiKey, classes: frozenset[str]) -> str:
    """The class of a request that names none: the usual one, or the first that a limited key may use."""
    if key.classes is None or DEFAULT_CLASS in key.classes:
        return DEFAULT_CLASS
    served_class = next((name for name in key.classes if name in classes), None)
    if served_class is None:
        line = f"this key may ask for {', '.join(key.classes)}, and this gateway has no such class"[:400]
        raise HttpRefusal(403, line, "class_not_allowed", "x-potluck-class")
    return served_class


def _tier_class(tier: object, default_class: str) -> str:
    """OpenAI's service tier as a class; `auto` leaves the choice to the service."""
    if not isinstance(tier, str) or tier not in TIERS:
        raise InputError("service_tier", f"must be one of {', '.join(TIERS)}")
    return default_class if tier == "auto" else TIERS[tier]


def _check_allowed(key: ApiKey, request_class: str, field: str) -> None:
    if key.classes is not None and request_class not in key.classes:
        line = f"this key may not ask for class {request_class}; it may for {', '.join(sorted(key.classes))}"
        raise HttpRefusal(403, line[:400], "class_not_allowed", field)


def _switch(given: bytes | None) -> bool:
    switch = False if given is None else SWITCH.get(given)
    if switch is None:
        raise InputError("x-potluck-exact", "must be 1, 0, true or false")
    return switch


def _deadline_s(given: bytes | None, came_s: float) -> float | None:
    if given is None:
        return None
    if not given.isdigit() or len(given) > 9 or not 1 <= int(given) <= MOST_DEADLINE_MS:
        raise InputError("x-potluck-deadline-ms", f"must be 1 to {MOST_DEADLINE_MS} milliseconds")
    return came_s + int(given) / 1000


def _word(value: bytes, name: str) -> str:
    text = value.decode("latin-1")
    if not 1 <= len(text) <= LONGEST_WORD or not text.isprintable():
        raise InputError(name, f"must have 1 to {LONGEST_WORD} characters that can be shown")
    return text


PLAIN = RequestOptions()
GREEDY = Sampling()


class Submission:
    def __init__(self, validated: ValidatedRequest, tenant: str, salt: str, path: bytes, body: bytes) -> None:
        self.validated, self._tenant, self._salt = validated, tenant, salt
        self._path, self._body = path, body
        self.prompt_tokens = 0
        self.most_tokens = 0
        """That the request may use: each prompt once, and all of its answers at their longest."""
        self.estimated = self.tokens_known = False
        self._seed: int | None = None
        self._ends: tuple[int, ...] = ()

    def tokenised(self, word: str, fingerprint: str = "") -> list[ChoiceRequest]:
        """What is asked, with its prompts as tokens; takes as long as these are."""
        asks = self.asks(word, self.validated.tokenised(self._tenant))
        drawn = 1 if self.validated.card.plain else self.validated.n
        for first in range(0, len(asks), drawn):  # Answers to the same prompt stand side by side.
            prompt = asks[first].prompt
            if len(prompt) >= PREPARED_TOKENS:
                prepared = prepared_prompt(prompt, fingerprint, self._salt)
                for place in range(first, first + drawn):
                    asks[place] = asks[place]._replace(prepared=prepared)
        return asks

    def asks(self, word: str, prompts: list[tuple[int, ...]]) -> list[ChoiceRequest]:
        """`word` becomes their name. A server of plain OpenAI gets the request whole, whatever it asks for."""
        validated, card = self.validated, self.validated.card
        self.tokens_known = bool(prompts)
        if card.plain:
            return [self._plain(card, word, prompts)]
        self._ends = tuple(ends_of(validated))
        if validated.asked is not None:
            _check_biases(card, validated.asked.logit_bias)
        made: list[ChoiceRequest] = []
        answers = len(prompts) * validated.n
        alone = answers == 1
        if answers * len(self._body) > COPIES_BYTES_MAX:
            line = (
                f"{answers} answers to a body of {len(self._body)} bytes are too many; ask for fewer at once"
            )
            raise InputError("n", line)
        for prompt in prompts:
            self.prompt_tokens += _checked(card, prompt)
            output = self._room(card, len(prompt))
            for drawn in range(validated.n):
                sampling = self._drawing(drawn)
                name = word if alone else f"{word}-{len(made)}"
                body = self._body if alone and not validated.own else self._alone(prompt, sampling)
                made.append(self._asked(name, prompt, len(prompt), output, sampling, body))
        self.most_tokens = self.prompt_tokens + sum(choice.max_output_tokens for choice in made)
        return made

    def _plain(self, card: ModelCard, word: str, prompts: list[tuple[int, ...]]) -> ChoiceRequest:
        validated = self.validated
        self.estimated = not prompts
        prompt_tokens = sum(map(len, prompts)) or self._estimated_tokens(card)
        self.prompt_tokens = prompt_tokens
        output = validated.limit
        if output is None or prompt_tokens + output > card.room_tokens:
            output = min(self._room(card, prompt_tokens), card.room_tokens)
        room = max(card.room_tokens - prompt_tokens, 1)
        longest = room if validated.limit is None and card.context_tokens else min(output, room)
        if "max_completion_tokens" in validated.body or "n_predict" in validated.body:
            longest = max(
                longest, _most_limit(validated, room if card.context_tokens else UNKNOWN_ROOM_TOKENS)
            )
        self.most_tokens = prompt_tokens + longest * _answers(validated)
        self._ends = tuple(card.ends)
        prompt = prompts[0] if len(prompts) == 1 else ()
        return self._asked(word, prompt, prompt_tokens, output, GREEDY, self._body)

    def _estimated_tokens(self, card: ModelCard) -> int:
        """Tokens of a prompt that nothing here tokenises. One that may fit counts as one that does: the server has
        its tokenizer and decides."""
        validated, limit = self.validated, self.validated.limit or 1
        known = 0
        if validated.prompts:
            known = sum(len(prompt) for prompt in validated.prompts if not isinstance(prompt, str))
        least = known + int(validated.chars / CERTAIN_CHARS_PER_TOKEN)
        if least + limit > card.room_tokens:
            raise CapacityError(
                f"a prompt of at least {least} tokens and {limit} more exceed the model's {card.context_tokens}"
            )
        length = validated.length
        chars_per_token = GUESSED_CHARS if length is None else length.chars_per_token
        return max(1, min(known + int(validated.chars / chars_per_token), card.room_tokens - limit))

    def _room(self, card: ModelCard, prompt_tokens: int) -> int:
        limit = self.validated.limit
        if limit is None and prompt_tokens < card.least_context_tokens:
            return card.least_context_tokens - prompt_tokens  # so that each of the servers may get it
        if limit is None and not card.context_tokens:
            return UNKNOWN_ROOM_TOKENS
        room = card.room_tokens - prompt_tokens
        if room < (limit or 1) and not self.estimated:
            raise CapacityError(
                f"a prompt of {prompt_tokens} tokens and {limit or 1} more exceed the model's {card.context_tokens}"
            )
        asked = self.validated.asked
        output = max(room, 1) if limit is None else limit
        if asked is not None and asked.min_tokens > output:
            raise InputError("min_tokens", f"there is room for {output}, not {asked.min_tokens}")
        return output

    def _drawing(self, drawn: int) -> Sampling:
        """Chance differs from choice to choice, and is the same again for the same seed."""
        asked, defaults = self.validated.asked, self.validated.card.defaults
        assert asked is not None
        if self._seed is None:
            plain = sampling_of(asked, defaults, seed=0, logprobs=asked.reported)
            if plain.temperature == 0 and asked.seed is None:
                return plain  # nothing is drawn
            self._seed = secrets.randbits(62) if asked.seed is None else asked.seed
        return sampling_of(asked, defaults, seed=self._seed + (drawn << 32), logprobs=asked.reported)

    def _alone(self, prompt: tuple[int, ...], sampling: Sampling) -> bytes:
        """One of several choices as a body of its own, for a server of plain OpenAI; or the one of an own request."""
        validated = self.validated
        if validated.own:
            seed = sampling.seed if sampling.temperature > 0 else None
            return self._written(own_body(validated.body, None if validated.chat else prompt, seed))
        body = {**validated.body, "n": 1, "best_of": None}
        body["stream_options"] = {"include_usage": True} if validated.stream else None
        if not validated.chat:
            body["prompt"] = list(prompt)
        if self._seed is not None:
            body["seed"] = sampling.seed
        return self._written({name: value for name, value in body.items() if value is not None})

    def _written(self, body: dict[str, object]) -> bytes:
        return compact(body) if len(self._body) <= INLINE_BODY_BYTES else large_json(body)

    def _asked(
        self,
        id: str,
        prompt: tuple[int, ...],
        prompt_tokens: int,
        output: int,
        sampling: Sampling,
        body: bytes,
    ) -> ChoiceRequest:
        validated, asked, manner = self.validated, self.validated.asked, self.validated.manner
        return ChoiceRequest(
            id,
            validated.card.base or validated.card.name,
            prompt,
            prompt_tokens,
            output,
            sampling,
            self._ends,
            asked is not None and asked.ignore_eos,
            0 if asked is None else asked.min_tokens,
            self._tenant,
            manner.request_class,
            manner.priority,
            manner.deadline_s,
            self._salt,
            self._path,
            body,
            validated.stream,
            validated.card.vocab,
            validated.own,
            validated.card.name if validated.card.base else "",
            manner.exact,
            validated.grammar,
        )


def _most_limit(validated: ValidatedRequest, room: int) -> int:
    """The largest limit in a body for a server of plain OpenAI: servers differ in which of several they follow."""
    limits = [value for name in LIMIT_FIELDS if type(value := validated.body.get(name)) is int]
    return room if any(limit < 0 for limit in limits) else min(max(limits, default=0), room)


def _answers(validated: ValidatedRequest) -> int:
    """How many a server of plain OpenAI computes: `best_of` are drawn for each prompt, and all of them are used."""
    best_of = validated.body.get("best_of")
    drawn = max(validated.n, best_of) if type(best_of) is int else validated.n
    return min(drawn, validated.card.able.most_choices) * (len(validated.prompts) or 1)


def prepared_prompt(prompt: tuple[int, ...], fingerprint: str, salt: str) -> PreparedPrompt:
    """In slices, so that other threads run in between."""
    texts = [
        json.dumps(prompt[start : start + SLICE_TOKENS], separators=(",", ":"))[1:-1]
        for start in range(0, len(prompt), SLICE_TOKENS)
    ]
    blocks = BlockNamer(runs=1).names(prompt, fingerprint, salt) if fingerprint else ()
    return PreparedPrompt(f"[{','.join(texts)}", fingerprint, blocks)


def text_stream_of(validated: ValidatedRequest) -> TextStream | None:
    asked = validated.asked
    return None if asked is None else TextStream(validated.card.text, asked.shown, ends_of(validated))


def ends_of(validated: ValidatedRequest) -> frozenset[int]:
    asked = validated.asked
    if asked is None:
        return validated.card.ends
    ends = frozenset[int]() if asked.ignore_eos else validated.card.ends
    return ends.union(asked.stop_token_ids) if asked.stop_token_ids else ends


def _check_biases(card: ModelCard, biases: tuple[tuple[int, float], ...]) -> None:
    for token, _ in biases:
        if card.vocab and token >= card.vocab:
            raise InputError("logit_bias", f"token {token} is not in the vocabulary of {card.vocab}")


def _checked(card: ModelCard, prompt: tuple[int, ...]) -> int:
    if not prompt:
        raise InputError("prompt", "must have at least one token")
    if card.vocab and len(prompt) < card.context_tokens:  # A longer one is refused for its length.
        for start in range(0, len(prompt), SLICE_TOKENS):  # Other threads run in between.
            piece = prompt[start : start + SLICE_TOKENS]
            if not 0 <= min(piece) <= max(piece) < card.vocab:
                raise InputError("prompt", f"tokens must be 0 to {card.vocab - 1}")
    return len(prompt)

"""A body as what is wanted: which prompts, how long, how it is to be treated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from potluck.api.fields import DEFAULT_TOKENS, ChatRequest, CompletionRequest, Message, chat_of, completion_of
from potluck.api.http_errors import HttpRefusal
from potluck.api.json_bodies import tokens_of
from potluck.api.passthrough_requests import is_own, own_chat, own_completion, templated
from potluck.core.errors import FormatError, InputError, PotluckError, did_you_mean
from potluck.core.values.types import DEFAULT_CLASS
from potluck.gateway.interfaces import Headers
from potluck.gateway.openai.keys import ApiKey
from potluck.gateway.openai.length_estimate import GUESSED_CHARS, TenantLength
from potluck.gateway.openai.model_card import ModelCard

CLASS, DEADLINE, SESSION = b"x-potluck-class", b"x-potluck-deadline-ms", b"x-potluck-session"
EXACT = b"x-potluck-exact"
SWITCH: Mapping[bytes, bool] = {b"1": True, b"true": True, b"0": False, b"false": False}
TIERS: Mapping[str, str] = {
    "auto": DEFAULT_CLASS,
    "default": DEFAULT_CLASS,
    "flex": "batch",
    "priority": "interactive",
}
"""OpenAI's service tiers, as classes."""
LONGEST_SESSION = 256
MOST_DEADLINE_MS = 86_400_000
MOST_PRIORITY = 1_000
Prompt = str | tuple[int, ...]


class RequestOptions(NamedTuple):
    """How a request is to be treated."""

    request_class: str = DEFAULT_CLASS
    priority: int = 0
    deadline_s: float | None = None
    session: str = ""
    exact: bool = False
    """Whether KV may only cross as it is."""


@dataclass(slots=True)
class ValidatedRequest:
    """What a client asks a model for."""

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
    """Of text that is to be tokenised."""
    own_salt: str | None = None
    """What the client itself sets its cached prefixes apart by."""
    length: TenantLength | None = None
    """By what its tokens are reckoned, where all of it is text for servers of plain OpenAI."""
    manner: RequestOptions = RequestOptions()
    own: bool = False
    """Whether it asks for more than tokens, and whoever decodes gets the body itself."""

    @property
    def usage_said(self) -> bool:
        """Whether every part of a stream says something of the usage."""
        options = None if self.asked is None else self.asked.stream_options
        return options is not None and (options.include_usage or options.continuous_usage_stats)

    def tokenised(self, tenant: str = "") -> list[tuple[int, ...]]:
        """The prompts as tokens; takes as long as the text is that the tenant has not sent lately."""
        if self.card.plain:
            try:
                return self._tokenised(tenant)
            except InputError:  # what the template cannot do the server may
                return []
        return self._tokenised(tenant)

    def _tokenised(self, tenant: str) -> list[tuple[int, ...]]:
        text = self.card.text
        if self.messages is not None:
            if text is None:
                raise InputError("messages", "this model has no tokenizer; send tokens to /v1/completions")
            special = not text.chat_has_specials if self.special is None else self.special
            messages, more = templated(self.body, self.messages) if self.own else (self.messages, {})
            return [tuple(text.encode(text.chat(messages, **more), special=special, apart=tenant))]
        made = []
        for prompt in self.prompts:
            if isinstance(prompt, str):
                if text is None:
                    raise InputError("prompt", "this model has no tokenizer; send tokens")
                prompt = tuple(text.encode(prompt, special=self.special is not False, apart=tenant))
            made.append(prompt)
        return made


def wish_of(card: ModelCard, body: dict[str, object], *, chat: bool, owns: bool = False) -> ValidatedRequest:
    """Reads a body; raises at what engines cannot honour. What a plain server can do is left to it, and so is what
    engines can that take clients' own requests (`owns`)."""
    if card.plain:
        return plain_wish(card, body, chat)
    asked: CompletionRequest | ChatRequest
    prompts: list[Prompt] = []
    messages = None
    own = owns and is_own(body, card.able, chat=chat)
    if chat:
        asked, messages = own_chat(body) if own else chat_of(body, card.able)
    else:
        asked, prompts = own_completion(body) if own else completion_of(body, card.able)
    special, chars = asked.add_special_tokens, _chars(prompts, messages)
    return ValidatedRequest(
        card,
        chat,
        body,
        asked,
        prompts,
        messages,
        special,
        asked.n,
        asked.limit,
        asked.stream,
        chars,
        asked.cache_salt,
        own=own,
    )


def _chars(prompts: list[Prompt], messages: list[Message] | None) -> int:
    chars = 0
    for message in messages or ():
        chars += len(message["content"])
    for prompt in prompts:
        if isinstance(prompt, str):
            chars += len(prompt)
    return chars


def understand(validated: ValidatedRequest) -> CompletionRequest | ChatRequest:
    """Reads what was left to a server, where its tokens are told instead of its text."""
    try:
        found = wish_of(replace(validated.card, plain=False), validated.body, chat=validated.chat).asked
        assert found is not None
        return found
    except PotluckError:  # It took what engines do not: of that the text alone is shown.
        return (ChatRequest if validated.chat else CompletionRequest)(validated.card.name, validated.stream)


def plain_wish(card: ModelCard, body: dict[str, object], chat: bool) -> ValidatedRequest:
    """Read as far as the gateway itself must know it."""
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
        prompts = _prompts(body.get("prompt"))
        chars = _chars(prompts, None)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise FormatError("stream", "must be true or false")
    limit, n = body.get("max_completion_tokens"), body.get("n")
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
    return ValidatedRequest(
        card, chat, body, None, prompts, messages, None, n, limit, stream is True, chars, salt
    )


def _count(value: object, name: str) -> int:
    if type(value) is not int or value < 1:
        raise InputError(name, "must be a whole number of at least 1")
    return value


def _prompts(value: object) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise FormatError("prompt", "must be text, a list of texts, tokens, or a list of tokens")
    if all(type(item) is int for item in value):
        return [tuple(value)]
    return [
        item if isinstance(item, str) else tokens_of(item, f"prompt[{place}]")
        for place, item in enumerate(value)
    ]


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
        made.append(
            {
                "role": role if isinstance(role, str) else "user",
                "content": content if isinstance(content, str) else "",
            }
        )
    return made


def reckoned(validated: ValidatedRequest) -> int:
    """Prompt tokens, where the text is not tokenised."""
    known, length = 0, validated.length
    for prompt in validated.prompts:
        if not isinstance(prompt, str):
            known += len(prompt)
    return known + int(validated.chars / (GUESSED_CHARS if length is None else length.chars_per_token)) or 1


def manner_of(
    headers: Headers, body: dict[str, object], came_s: float, classes: frozenset[str], key: ApiKey
) -> RequestOptions:
    """What the headers and a few fields say; raises for a class that is not known, or not this key's."""
    tier, priority = body.get("service_tier"), body.get("priority")
    given, deadline = headers.get(CLASS), headers.get(DEADLINE)
    session, thread = headers.get(SESSION), body.get("prompt_cache_key")
    exact = headers.get(EXACT)
    if tier is priority is given is deadline is session is thread is exact is None and key.classes is None:
        return PLAIN
    request_class = DEFAULT_CLASS
    if given is not None:
        request_class = _word(given, "x-potluck-class")
        if request_class not in classes:
            hint = did_you_mean(request_class[:60], classes)
            raise HttpRefusal(400, f"x-potluck-class: unknown{hint}", "unknown_class", "x-potluck-class")
    elif tier is not None:
        if not isinstance(tier, str) or tier not in TIERS:
            raise InputError("service_tier", f"must be one of {', '.join(TIERS)}")
        request_class = TIERS[tier]
    if key.classes is not None and request_class not in key.classes:
        line = f"this key may not ask for class {request_class}; it may for {', '.join(sorted(key.classes))}"
        raise HttpRefusal(403, line, "class_not_allowed", "x-potluck-class")
    if priority is None:
        priority = 0
    elif type(priority) is not int or abs(priority) > MOST_PRIORITY:
        raise InputError("priority", f"must be a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}")
    name = ""
    if session is not None:
        name = _word(session, "x-potluck-session")
    elif isinstance(thread, str):
        name = thread[:LONGEST_SESSION]
    return RequestOptions(request_class, priority, _deadline_s(deadline, came_s), name, _switch(exact))


def _switch(given: bytes | None) -> bool:
    found = False if given is None else SWITCH.get(given)
    if found is None:
        raise InputError("x-potluck-exact", "must be 1, 0, true or false")
    return found


def _deadline_s(given: bytes | None, came_s: float) -> float | None:
    if given is None:
        return None
    if not given.isdigit() or len(given) > 9 or not 1 <= int(given) <= MOST_DEADLINE_MS:
        raise InputError("x-potluck-deadline-ms", f"must be 1 to {MOST_DEADLINE_MS} milliseconds")
    return came_s + int(given) / 1000


def _word(value: bytes, name: str) -> str:
    text = value.decode("latin-1")
    if not 1 <= len(text) <= LONGEST_SESSION or not text.isprintable():
        raise InputError(name, f"must have 1 to {LONGEST_SESSION} characters that can be shown")
    return text


PLAIN = RequestOptions()

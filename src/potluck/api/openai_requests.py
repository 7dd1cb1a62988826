"""What clients ask of /v1/completions and /v1/chat/completions, as values.

What a request leaves out stays None where a model may have a default of its own: `sampling_of` fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from potluck.api.fields import EngineAbilities, what_counts
from potluck.api.json_bodies import shaped, tokens_of
from potluck.api.messages import Message, messages_of
from potluck.api.sampling_fields import bias_of, schema_of
from potluck.api.stops import checked_stops
from potluck.api.text_stream import TextRules
from potluck.core.errors import FormatError, InputError
from potluck.core.replica.block_values import LONGEST_SALT
from potluck.core.values.sampling import Sampling, SamplingDefaults

DEFAULT_TOKENS = 16
"""Of a completion that says no max_tokens, as OpenAI has it."""
MOST_STOP_TOKENS = 256
LARGEST_SEED = 1 << 63
PLAIN = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False
    """One more part at the end, with the usage of the whole."""
    continuous_usage_stats: bool = False
    """The usage so far in every part."""
    include_obfuscation: bool = False
    """Padding against listeners on the way; there is none."""


@dataclass(frozen=True, slots=True)
class CommonRequest:
    """What completions and chats have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 or less: all."""
    min_p: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own; None: to a completion, and to a chat whose template does not."""
    priority: int = 0
    """Higher first."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    response_format: str = ""
    """As a JSON schema; empty: text."""

    @property
    def shown(self) -> TextRules:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        return TextRules(
            stops, self.min_tokens, self.include_stop_str_in_output, not self.skip_special_tokens
        )


@dataclass(frozen=True, slots=True)
class CompletionRequest(CommonRequest):
    max_tokens: int = DEFAULT_TOKENS
    logprobs: int | None = None
    best_of: int = 1

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def reported(self) -> int | None:
        """How many of the likeliest tokens are told with each; None: no log probabilities."""
        return self.logprobs


@dataclass(frozen=True, slots=True)
class ChatRequest(CommonRequest):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def reported(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def sampling_of(
    asked: CommonRequest, defaults: SamplingDefaults, *, seed: int, logprobs: int | None = None
) -> Sampling:
    """How tokens are drawn: what the request says, else what the model's defaults say."""

    temperature = defaults.temperature if asked.temperature is None else asked.temperature
    top_k = max(defaults.top_k if asked.top_k is None else asked.top_k, 0)
    top_p = defaults.top_p if asked.top_p is None else asked.top_p
    min_p = defaults.min_p if asked.min_p is None else asked.min_p
    repetition = asked.repetition_penalty
    if repetition is None:
        repetition = defaults.repetition_penalty
    way = _drawing(temperature, top_k, top_p, min_p, seed, logprobs)
    presence, frequency = asked.presence_penalty or 0.0, asked.frequency_penalty or 0.0
    if not (presence or frequency or repetition != 1 or asked.logit_bias or asked.response_format):
        return way
    return replace(
        way,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=asked.logit_bias,
        json_schema=asked.response_format,
    )


@lru_cache(maxsize=256)
def _drawing(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, logprobs: int | None
) -> Sampling:
    """Many ask for the same."""
    return Sampling(temperature, top_k, top_p, min_p, seed, logprobs)


def completion_of(
    body: dict[str, object], able: EngineAbilities
) -> tuple[CompletionRequest, list[str | tuple[int, ...]]]:
    """A completion and its prompts, each text or tokens."""
    body = dict(body)
    prompt = body.pop("prompt", None)
    asked = shaped(CompletionRequest, _read(body, able))
    _check(asked, able)
    _within("logprobs", asked.logprobs or 0, 0, able.most_logprobs)
    if asked.best_of != 1 and (asked.best_of < asked.n or (asked.best_of > asked.n and not able.more_draws)):
        raise InputError("best_of", "must be n for this engine; leave it out")
    if isinstance(prompt, str):
        return asked, [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise FormatError("prompt", "must be text, a list of texts, tokens, or a list of tokens")
    if all(type(item) is int for item in prompt):
        return asked, [tuple(prompt)]
    if len(prompt) * asked.n > able.most_choices:
        many = f"{len(prompt)} prompts and n {asked.n} are more than {able.most_choices} answers"
        raise InputError("prompt", many)
    return asked, [
        item if isinstance(item, str) else tokens_of(item, f"prompt[{place}]")
        for place, item in enumerate(prompt)
    ]


def chat_of(body: dict[str, object], able: EngineAbilities) -> tuple[ChatRequest, list[Message]]:
    body = dict(body)
    messages = body.pop("messages", None)
    asked = shaped(ChatRequest, _read(body, able))
    _check(asked, able)
    _within("top_logprobs", asked.top_logprobs, 0, able.most_logprobs)
    if asked.top_logprobs and not asked.logprobs:
        raise InputError("top_logprobs", "needs logprobs to be true")
    return asked, messages_of(messages, tools=able.tools)


def _read(body: dict[str, object], able: EngineAbilities) -> dict[str, object]:
    """What counts of a body, in the reader's own values."""
    kept = what_counts(body, able)
    for name, read in (("logit_bias", bias_of), ("response_format", schema_of)):
        if name in kept:
            kept[name] = read(kept[name])
    return kept


def _check(asked: CompletionRequest | ChatRequest, able: EngineAbilities) -> None:
    """What a shape does not say. Raised here, so that the error names its field."""
    _within("n", asked.n, 1, able.most_choices)
    sampling_of(asked, PLAIN, seed=0)
    if asked.stop != ():
        checked_stops(asked.shown.stops)
    if len(asked.stop_token_ids) > MOST_STOP_TOKENS:
        raise InputError("stop_token_ids", f"at most {MOST_STOP_TOKENS}, got {len(asked.stop_token_ids)}")
    if asked.seed is not None and not -LARGEST_SEED <= asked.seed < LARGEST_SEED:
        raise InputError("seed", "must fit in 64 bits")
    if asked.cache_salt is not None and not 1 <= len(asked.cache_salt) <= LONGEST_SALT:
        raise InputError("cache_salt", f"must have 1 to {LONGEST_SALT} characters")
    if asked.response_format and (asked.min_tokens or asked.ignore_eos):
        name = "min_tokens" if asked.min_tokens else "ignore_eos"
        raise InputError(name, "cannot be kept with a response_format of JSON, which ends when it is whole")
    limit = asked.limit
    if limit is not None and limit < 1:
        name = (
            "max_tokens"
            if isinstance(asked, CompletionRequest) or asked.max_completion_tokens is None
            else ""
        )
        raise InputError(name or "max_completion_tokens", f"must be at least 1, is {limit}")
    if asked.min_tokens < 0 or (limit is not None and asked.min_tokens > limit):
        raise InputError("min_tokens", f"must be 0 to max_tokens, is {asked.min_tokens}")


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(name, f"must be {least} to {most}, is {value}")

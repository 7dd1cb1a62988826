"""Which fields change nothing, and which need an engine that can do them.

Whoever reads a body says what the engine behind it can do. A field that is not known is refused, as OpenAI does; so
is a known one that the engine cannot honour, unless its value asks for nothing (`presence_penalty: 0`, `tools: []`).
Nothing is ignored that would change the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from potluck.api.http import shaped, tokens_of
from potluck.api.json_schema_limits import check_json_schema
from potluck.api.text_stream import MOST_STOPS, TextRules, checked_stops
from potluck.api.tokenizer import ModelTokenizer
from potluck.api.tool_calls import CallFormat
from potluck.api.tool_requests import TEMPLATED, TemplateFields, checked_call_field, take_template_fields
from potluck.core.errors import FormatError, InputError
from potluck.core.replica.blocks import LONGEST_SALT
from potluck.core.values.sampling import Sampling, SamplingDefaults

SILENT = frozenset({
    "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "user",
})  # fmt: skip
"""Fields that change nothing about the answer, whatever they say."""

Neutral = dict[str, tuple[object, ...]]
PENALTIES: Neutral = {"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,)}
TOOLS: Neutral = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
}  # fmt: skip
OTHERS: Neutral = {
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "structured_outputs": ({},), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "guided_decoding_backend": (), "logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],),
    "add_generation_prompt": (True,), "audio": (), "chat_template": (), "chat_template_kwargs": ({},),
    "continue_final_message": (False,), "documents": ([],), "echo": (False,), "kv_transfer_params": ({},),
    "logits_processors": ([],), "mm_processor_kwargs": ({},), "modalities": (["text"],), "prompt_logprobs": (),
    "reasoning_effort": ("none",), "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"), "spaces_between_special_tokens": (True,), "store": (False,), "suffix": ("",),
    "truncate_prompt_tokens": (-1,), "vllm_xargs": ({},), "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip
DRAWN = frozenset(PENALTIES) | {"logit_bias", "response_format"}
"""What engines that run segments can do, each time a token is drawn (`engine/compute/logit_edits.py`)."""
KNOWN = PENALTIES | TOOLS | OTHERS
"""Fields that some engine honours, each with the values that ask for nothing."""
ODD = frozenset(KNOWN) | {"response_format"}


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """What the engine behind a reader can do beyond drawing text under temperature and cuts."""

    fields: frozenset[str] = frozenset()  # Of KNOWN: those that it honours, such as all of PENALTIES.
    formats: frozenset[str] = frozenset({"text"})  # Types of `response_format`.
    most_choices: int = 64
    most_logprobs: int = 20
    draws: bool = False
    """Whether DRAWN, and of chats TEMPLATED, are read here, for engines that run segments."""

    def __post_init__(self) -> None:
        unknown = self.fields - KNOWN.keys()
        if unknown:
            raise InputError("abilities", f"{min(unknown)} is no field of OpenAI's API that is known here")

    @property
    def tools(self) -> bool:
        return "tools" in self.fields


def what_counts(body: dict[str, object], abilities: EngineAbilities) -> dict[str, object]:
    """The fields that say something; raises at one that the engine cannot honour.

    null counts as not given. What the engine honours beyond the reader's own fields is left out as well: it reaches
    the engine in the body, which goes on to it as it came.
    """
    kept = {}
    for name, value in body.items():
        if value is None or name in SILENT:
            continue
        if name in ODD and not (abilities.draws and name in DRAWN) and _settled(name, value, abilities):
            continue
        kept[name] = _said(value) if name == "stream_options" else value
    return kept


def goes_beyond(body: dict[str, object], abilities: EngineAbilities, read: frozenset[str]) -> bool:
    """Whether it asks for something that such engines cannot do, known here or not; `read`: the reader's fields."""
    for name, value in body.items():
        if value is None or name in SILENT or name in read:
            continue
        if name == "response_format":
            kind = value.get("type") if isinstance(value, dict) else None
            if not isinstance(kind, str) or kind not in abilities.formats:
                return True
        elif name not in abilities.fields and not any(_same(value, item) for item in KNOWN.get(name, ())):
            return True
    return False


def _settled(name: str, value: object, abilities: EngineAbilities) -> bool:
    if name == "response_format":
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in abilities.formats:
            raise InputError(
                name, f"must have a type of {', '.join(sorted(abilities.formats))} for this engine"
            )
        return True
    if name not in abilities.fields and not any(_same(value, item) for item in KNOWN[name]):
        raise InputError(name, "is not supported by this engine; leave it out")
    return True


def _said(value: object) -> object:
    return (
        {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value
    )


def _same(value: object, neutral: object) -> bool:
    """Equal, where true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


FIELDS_MAX = 128
LOGIT_BIAS_MAX = 1024
SIZES_MAX = {"logit_bias": LOGIT_BIAS_MAX, "stop": MOST_STOPS, "stop_token_ids": 256}
"""Entries of fields whose every entry is read: more are refused before the first one is."""


def check_sizes(body: Mapping[str, object]) -> None:
    """Refuse a body of too many fields, whatever engine it is for."""
    if len(body) > FIELDS_MAX:
        raise InputError("body", f"at most {FIELDS_MAX} fields, got {len(body)}")


def _check_entries(body: Mapping[str, object]) -> None:
    for name, entries_max in SIZES_MAX.items():
        value = body.get(name)
        if isinstance(value, dict | list) and len(value) > entries_max:
            what = "strings" if name == "stop" else "entries"
            raise InputError(name, f"at most {entries_max} {what}, got {len(value)}")


DEFAULT_TOKENS = 16  # Of a completion that says no max_tokens, as OpenAI has it.
MOST_STOP_TOKENS = 256
LARGEST_SEED = 1 << 63
PLAIN = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # Padding against listeners on the way; there is none.

    @property
    def continuous(self) -> bool:
        """Whether every chunk has the usage so far: only together with `include_usage`, as in vLLM."""
        return self.include_usage and self.continuous_usage_stats


@dataclass(frozen=True, slots=True)
class CommonRequest:
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
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    response_format: str = ""

    @property
    def shown(self) -> TextRules:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        return TextRules(
            stops,
            self.min_tokens,
            self.include_stop_str_in_output,
            not self.skip_special_tokens,
            *self.call_rules,
        )

    @property
    def call_rules(self) -> tuple[CallFormat, bool]:
        """How tool calls are written in the text, and whether there may be several."""
        return "", True


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
        return self.logprobs


@dataclass(frozen=True, slots=True)
class ChatRequest(CommonRequest):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: str = ""
    """These four are as `TemplateFields` has them."""
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: str = ""

    @property
    def call_rules(self) -> tuple[CallFormat, bool]:
        if not self.tools:
            return "", True
        return "bare" if self.tool_choice == "required" else "tagged", self.parallel_tool_calls

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def reported(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def sampling_of(
    asked: CommonRequest, defaults: SamplingDefaults, *, seed: int, logprobs: int | None = None
) -> Sampling:
    temperature = defaults.temperature if asked.temperature is None else asked.temperature
    top_k = max(defaults.top_k if asked.top_k is None else asked.top_k, 0)
    top_p = defaults.top_p if asked.top_p is None else asked.top_p
    min_p = defaults.min_p if asked.min_p is None else asked.min_p
    repetition = asked.repetition_penalty
    if repetition is None:
        repetition = defaults.repetition_penalty
    sampling = _drawing(temperature, top_k, top_p, min_p, seed, logprobs)
    presence, frequency = asked.presence_penalty or 0.0, asked.frequency_penalty or 0.0
    if not (presence or frequency or repetition != 1 or asked.logit_bias or asked.response_format):
        return sampling
    return replace(
        sampling,
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
    return Sampling(temperature, top_k, top_p, min_p, seed, logprobs)


def completion_of(
    body: dict[str, object], abilities: EngineAbilities
) -> tuple[CompletionRequest, list[str | tuple[int, ...]]]:
    body = dict(body)
    prompt = body.pop("prompt", None)
    completion_request = shaped(CompletionRequest, _read(body, abilities))
    _check(completion_request, abilities)
    _within("logprobs", completion_request.logprobs or 0, 0, abilities.most_logprobs)
    if completion_request.best_of not in (1, completion_request.n):
        raise InputError("best_of", "must be n for this engine; leave it out")
    if (
        isinstance(prompt, list)
        and len(prompt) * completion_request.n > abilities.most_choices
        and type(prompt[0]) is not int
    ):
        many = f"{len(prompt)} prompts and n {completion_request.n} are more than {abilities.most_choices} answers"
        raise InputError("prompt", many)
    return completion_request, prompts_of(prompt)


def prompts_of(value: object) -> list[str | tuple[int, ...]]:
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


def chat_of(body: dict[str, object], abilities: EngineAbilities) -> tuple[ChatRequest, list[Message]]:
    body = dict(body)
    messages = body.pop("messages", None)
    fields, schema = take_template_fields(body) if abilities.draws else (TemplateFields(), "")
    asked = shaped(ChatRequest, _read(body, abilities))
    if fields.tools and asked.response_format:
        line = "of JSON cannot be combined with tools; leave one out, or set tool_choice to none"
        raise InputError("response_format", line)
    if fields.tools or fields.chat_template_kwargs:
        asked = replace(asked, **fields._asdict(), response_format=schema or asked.response_format)
    _check(asked, abilities)
    _within("top_logprobs", asked.top_logprobs, 0, abilities.most_logprobs)
    if asked.top_logprobs and not asked.logprobs:
        raise InputError("top_logprobs", "needs logprobs to be true")
    return asked, messages_of(messages, tools=abilities.tools or abilities.draws, checked=abilities.draws)


def _read(body: dict[str, object], abilities: EngineAbilities) -> dict[str, object]:
    check_sizes(body)
    kept = what_counts(body, abilities)
    _check_entries(kept)
    for name, read in (("logit_bias", bias_of), ("response_format", schema_of)):
        if name in kept:
            kept[name] = read(kept[name])
    if "stream_options" in kept and kept.get("stream", False) is False:
        raise InputError("stream_options", "needs stream to be true; set it, or leave stream_options out")
    return kept


def _check(completion_request: CompletionRequest | ChatRequest, abilities: EngineAbilities) -> None:
    """What a shape does not say. Raised here, so that the error names its field."""
    _within("n", completion_request.n, 1, abilities.most_choices)
    sampling_of(completion_request, PLAIN, seed=0)
    if completion_request.stop != ():
        checked_stops(completion_request.shown.stops)
    if len(completion_request.stop_token_ids) > MOST_STOP_TOKENS:
        raise InputError(
            "stop_token_ids", f"at most {MOST_STOP_TOKENS}, got {len(completion_request.stop_token_ids)}"
        )
    if completion_request.seed is not None and not -LARGEST_SEED <= completion_request.seed < LARGEST_SEED:
        raise InputError("seed", "must fit in 64 bits")
    if (
        completion_request.cache_salt is not None
        and not 1 <= len(completion_request.cache_salt) <= LONGEST_SALT
    ):
        raise InputError("cache_salt", f"must have 1 to {LONGEST_SALT} characters")
    if completion_request.response_format and (
        completion_request.min_tokens or completion_request.ignore_eos
    ):
        name = "min_tokens" if completion_request.min_tokens else "ignore_eos"
        raise InputError(name, "cannot be kept with a response_format of JSON, which ends when it is whole")
    limit = completion_request.limit
    if limit is not None and limit < 1:
        name = (
            "max_tokens"
            if isinstance(completion_request, CompletionRequest)
            or completion_request.max_completion_tokens is None
            else ""
        )
        raise InputError(name or "max_completion_tokens", f"must be at least 1, is {limit}")
    if completion_request.min_tokens < 0 or (limit is not None and completion_request.min_tokens > limit):
        raise InputError("min_tokens", f"must be 0 to max_tokens, is {completion_request.min_tokens}")


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(name, f"must be {least} to {most}, is {value}")


ANY_OBJECT = '{"type":"object"}'  # What `json_object` asks for.
FORMATS = ("text", "json_object", "json_schema")
SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


def bias_of(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise FormatError("logit_bias", 'must be an object of tokens and biases, such as {"50": -100}')
    result = []
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit()) or len(name) > 10:
            raise FormatError("logit_bias", f"{name[:40]!r} is not the number of a token")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise FormatError("logit_bias", f"must be a number for token {name}")
        result.append((int(name), float(bias)))
    return tuple(sorted(result))


def schema_of(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in FORMATS:
        raise FormatError("response_format", f"must have a type of {', '.join(FORMATS)}")
    if kind != "json_schema":
        if set(value) != {"type"}:
            raise FormatError("response_format", f"has nothing beside its type {kind}")
        return ANY_OBJECT if kind == "json_object" else ""
    given = value.get("json_schema")
    if set(value) != {"type", "json_schema"} or not isinstance(given, dict):
        raise FormatError("response_format", "of type json_schema must have a json_schema and no more")
    unknown = given.keys() - SCHEMA_KEYS
    if unknown:
        raise FormatError("response_format.json_schema", f"unknown key {min(unknown)[:60]}")
    for name, wanted in (("name", str), ("description", str), ("strict", bool)):
        if given.get(name) is not None and not isinstance(given[name], wanted):
            raise FormatError(f"response_format.json_schema.{name}", f"must be {_called(wanted)}")
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise FormatError("response_format.json_schema.schema", "must be an object: a JSON schema")
    check_json_schema(schema, "response_format.json_schema.schema")
    return json.dumps(schema, separators=(",", ":"))


def _called(kind: type) -> str:
    return "text" if kind is str else "true or false"


SPEAKERS = ("system", "developer", "user", "assistant")
TOOL_SPEAKERS = ("tool", "function")
CHECKED_SPEAKERS = (*SPEAKERS, "tool")
SILENT_KEYS = frozenset({"annotations", "reasoning", "reasoning_content", "refusal"})
"""Keys of earlier answers that say nothing to the model, as clients send them back."""
TOOL_KEYS = frozenset({"function_call", "tool_call_id", "tool_calls"})
KEYS = frozenset({"role", "content", "name", "audio"}) | SILENT_KEYS | TOOL_KEYS
PART_KEYS = frozenset({"type", "text", "refusal", "cache_control"})

Message = dict[str, Any]
"""`role` and `content`, a text; `name` where one was given; the calls of tools where the engine can do them."""


def messages_of(value: object, *, tools: bool, checked: bool = False) -> list[Message]:
    """Read messages; `tools` allows calls of tools, `checked` reads them rather than leave them to the engine."""
    if not isinstance(value, list) or not value:
        raise FormatError("messages", "must be a list of at least one message")
    return [_message(item, f"messages[{place}]", tools, checked) for place, item in enumerate(value)]


def _message(value: object, where: str, tools: bool, checked: bool) -> Message:
    if not isinstance(value, dict):
        raise FormatError(where, "must be an object")
    if not value.keys() <= KEYS:
        raise FormatError(f"{where}.{_word(min(value.keys() - KEYS))}", "unknown key")
    speakers = CHECKED_SPEAKERS if checked else SPEAKERS + TOOL_SPEAKERS if tools else SPEAKERS
    role = value.get("role", "")
    if role not in speakers:
        raise InputError(f"{where}.role", f"must be one of {', '.join(speakers)}")
    if value.get("audio") is not None:
        raise InputError(f"{where}.audio", "is not supported by this engine; leave it out")
    made: Message = {"role": role, "content": _content(value.get("content"), f"{where}.content", role)}
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise FormatError(f"{where}.name", "must be text")
        made["name"] = name
    if checked and role == "tool" and value.get("tool_call_id") is None:
        raise InputError(f"{where}.tool_call_id", "is missing: the id of the call that this answers")
    if value.keys().isdisjoint(TOOL_KEYS):
        return made
    for key in sorted(TOOL_KEYS):
        given = value.get(key)
        if given is None or given == []:
            continue
        if not tools:
            raise InputError(f"{where}.{key}", "is not supported by this engine; leave it out")
        made[key] = checked_call_field(key, given, role, f"{where}.{key}") if checked else given
    return made


def _content(content: object, where: str, role: str) -> str:
    if content is None and role == "assistant":  # An answer may have been a refusal, or the call of a tool.
        return ""
    if isinstance(content, list):
        return "".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))
    if not isinstance(content, str):
        raise FormatError(where, "must be text")
    return content


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
        raise InputError(where, "may only be of type text")
    unknown = part.keys() - PART_KEYS
    if unknown:
        raise FormatError(f"{where}.{_word(min(unknown))}", "unknown key")
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise FormatError(f"{where}.{part['type']}", "must be text")
    return text


def _word(key: str) -> str:
    return key if key.isidentifier() and len(key) <= 60 else repr(key[:60])


# Requests that ask for more than drawing tokens (tools, formats, ...), for engines that can, such as vLLM. They are
# read as far as whoever plans routes must know; the engine gets them as they came, and has the last word. The prompt
# is made here as well, since a route is cut by its tokens.

READ_CHAT = frozenset(field.name for field in fields(ChatRequest)) - DRAWN - {*TEMPLATED} | {"messages"}
READ_COMPLETION = frozenset(field.name for field in fields(CompletionRequest)) - DRAWN | {"prompt"}
KEPT_BACK = frozenset(
    {"best_of", "cache_salt", "n", "priority", "prompt_cache_key", "request_id", "seed", "service_tier"}
)
"""What the reader sees to itself, or says in its own way."""
HAND_OVERS = ("kv_transfer_params", "ec_transfer_params")
READERS = EngineAbilities(frozenset({"tools", "service_tier"}))  # A reader that leaves tools to the engine.


def is_own(body: Mapping[str, object], abilities: EngineAbilities, *, chat: bool) -> bool:
    check_sizes(body)
    if goes_beyond(dict(body), abilities, READ_CHAT if chat else READ_COMPLETION):
        return True
    messages = body.get("messages") if chat else None
    return isinstance(messages, list) and any(
        _calls(message) for message in messages if isinstance(message, dict)
    )


def _calls(message: dict[str, object]) -> bool:
    return message.get("role") in TOOL_SPEAKERS or any(message.get(key) for key in TOOL_KEYS)


def own_chat(body: Mapping[str, object]) -> tuple[ChatRequest, list[Message]]:
    _refuse_transfers(body)
    return chat_of(_known(body, READ_CHAT), READERS)


def own_completion(body: Mapping[str, object]) -> tuple[CompletionRequest, list[str | tuple[int, ...]]]:
    _refuse_transfers(body)
    return completion_of(_known(body, READ_COMPLETION), READERS)


def _refuse_transfers(body: Mapping[str, object]) -> None:
    for name in HAND_OVERS:
        if body.get(name):
            raise InputError(name, "is for whoever plans routes; leave it out")


def _known(body: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in body.items() if name in names or name in SILENT}


def own_body(body: Mapping[str, object], prompt: Sequence[int] | None, seed: int | None) -> dict[str, object]:
    """One answer of it as it goes to an engine; a completion gets its prompt as tokens, so that all agree on them,
    unless its text is to be told again."""
    made = {name: value for name, value in body.items() if name not in KEPT_BACK and value is not None}
    if prompt is not None and not (body.get("echo") and isinstance(body.get("prompt"), str)):
        made["prompt"] = list(prompt)
    if seed is not None:
        made["seed"] = seed
    return made


def templated(
    body: Mapping[str, object], messages: Sequence[Message]
) -> tuple[list[Message], dict[str, Any]]:
    """What a chat template is given, as vLLM gives it: messages, and what else it is told."""
    tools, documents, values = (body.get(name) for name in ("tools", "documents", "chat_template_kwargs"))
    options = dict(values) if isinstance(values, dict) else {}
    effort = body.get("reasoning_effort")
    if effort is not None:
        options = {"enable_thinking": effort != "none", **options, "reasoning_effort": effort}
    more: dict[str, Any] = {"values": options}
    if isinstance(tools, list) and tools:
        more["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    if isinstance(documents, list):
        more["documents"] = [document for document in documents if isinstance(document, dict)]
    if body.get("add_generation_prompt") is False:
        more["add_generation_prompt"] = False
    return [_with_arguments(message) for message in messages], more


def _tool(value: object, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FormatError(where, "must be a function with a name")
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}


def _with_arguments(message: Message) -> Message:
    """The arguments of earlier calls as objects, as templates read them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    given = function.get("arguments")
    try:
        arguments = (json.loads(given) if given else {}) if isinstance(given, str | None) else given
    except (ValueError, RecursionError):
        arguments = given
    return {**call, "function": {**function, "arguments": arguments}}


# Chats with tools and template variables, for engines that run segments.


def chat_prompt(tokenizer: ModelTokenizer, request: ChatRequest, messages: Sequence[Message]) -> str:
    """The prompt of a chat; InputError where the model's template has no place for what it asks."""
    with_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if not (request.tools or request.chat_template_kwargs or with_calls):
        return tokenizer.chat(messages)
    templates = tokenizer.chat_templates
    if request.tools and (templates is None or not templates.uses_tools()):
        raise InputError("tools", "the model's chat template does not use tools; leave them out")
    if with_calls and (templates is None or not templates.shows_calls(with_tools=bool(request.tools))):
        raise InputError(
            "messages", "the model's chat template has no place for calls of tools; leave them out"
        )
    if request.chat_template_kwargs and templates is None:
        raise InputError("chat_template_kwargs", "the model has no chat template; leave it out")
    values = json.loads(request.chat_template_kwargs or "{}")
    tools = json.loads(request.tools) if request.tools else None
    return tokenizer.chat([_with_arguments(message) for message in messages], tools=tools, values=values)


def chat_chars(messages: Sequence[Message], request: ChatRequest) -> int:
    """How much text a template gets: what bounds the work of rendering and tokenising it."""
    calls = sum(len(json.dumps(message["tool_calls"])) for message in messages if "tool_calls" in message)
    texts = sum(len(message["content"]) for message in messages)
    return texts + calls + len(request.tools) + len(request.chat_template_kwargs)

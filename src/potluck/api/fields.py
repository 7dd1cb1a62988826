"""Which fields change nothing, and which need an engine that can do them.

Whoever reads a body says what the engine behind it can do. A field that is not known is refused, as OpenAI does; so
is a known one that the engine cannot honour, unless its value asks for nothing (`presence_penalty: 0`, `tools: []`).
Nothing is ignored that would change the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.errors import InputError

SILENT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "user",
    }
)
"""Fields that change nothing about the answer, whatever they say."""

PENALTIES: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}
TOOLS: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
BEAMS: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
}
GUIDES: dict[str, tuple[object, ...]] = {
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
}
OTHERS: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (-1,),
    "vllm_xargs": ({},),
    "verbosity": ("medium",),
    "web_search_options": (),
}
DRAWN = frozenset(PENALTIES) | {"logit_bias", "response_format"}
"""What engines that run segments can do, each time a token is drawn (`drawing.py`)."""
KNOWN = PENALTIES | TOOLS | BEAMS | GUIDES | OTHERS
"""Fields that some engine honours, each with the values that ask for nothing."""
ODD = frozenset(KNOWN) | {"response_format"}


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """What the engine behind a reader can do beyond drawing text under temperature and cuts."""

    fields: frozenset[str] = frozenset()
    """Of KNOWN: those that it honours, such as all of PENALTIES."""
    formats: frozenset[str] = frozenset({"text"})
    """Types of `response_format`."""
    most_choices: int = 64
    """Answers to one request: prompts times n."""
    most_logprobs: int = 20
    more_draws: bool = False
    """Whether `best_of` may be more than `n`."""
    draws: bool = False
    """Whether DRAWN is read here, for engines that run segments."""

    def __post_init__(self) -> None:
        unknown = self.fields - KNOWN.keys()
        if unknown:
            raise InputError("abilities", f"{min(unknown)} is no field of OpenAI's API that is known here")

    @property
    def tools(self) -> bool:
        return "tools" in self.fields


def what_counts(body: dict[str, object], able: EngineAbilities) -> dict[str, object]:
    """The fields that say something; raises at one that the engine cannot honour.

    null counts as not given. What the engine honours beyond the reader's own fields is left out as well: it reaches
    the engine in the body, which goes on to it as it came.
    """
    kept = {}
    for name, value in body.items():
        if value is None or name in SILENT:
            continue
        if name in ODD and not (able.draws and name in DRAWN) and _settled(name, value, able):
            continue
        kept[name] = _said(value) if name == "stream_options" else value
    return kept


def goes_beyond(body: dict[str, object], able: EngineAbilities, read: frozenset[str]) -> bool:
    """Whether it asks for something that such engines cannot do, known here or not; `read`: the reader's fields."""
    for name, value in body.items():
        if value is None or name in SILENT or name in read:
            continue
        if name == "response_format":
            kind = value.get("type") if isinstance(value, dict) else None
            if not isinstance(kind, str) or kind not in able.formats:
                return True
        elif name not in able.fields and not any(_same(value, each) for each in KNOWN.get(name, ())):
            return True
    return False


def _settled(name: str, value: object, able: EngineAbilities) -> bool:
    if name == "response_format":
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in able.formats:
            raise InputError(name, f"must have a type of {', '.join(sorted(able.formats))} for this engine")
        return True
    if name not in able.fields and not any(_same(value, each) for each in KNOWN[name]):
        raise InputError(name, "is not supported by this engine; leave it out")
    return True


def _said(value: object) -> object:
    return (
        {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
    )


def _same(value: object, neutral: object) -> bool:
    """Equal, where true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)

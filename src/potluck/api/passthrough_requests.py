"""A request that asks for more than drawing tokens (tools, formats, penalties, ...), for engines that can: vLLM.

Read as far as whoever plans routes must know it; all else goes on to the engine as it came, which has the last word.
The prompt is made here as well, since a route is cut by its tokens; where the engine makes another one, that counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from potluck.api.openai_requests import (
    DRAWN,
    SILENT,
    TOOL_KEYS,
    TOOL_SPEAKERS,
    ChatRequest,
    CompletionRequest,
    EngineAbilities,
    Message,
    chat_of,
    completion_of,
    goes_beyond,
)
from potluck.core.errors import FormatError, InputError

READ_CHAT = frozenset(each.name for each in fields(ChatRequest)) - DRAWN | {"messages"}
READ_COMPLETION = frozenset(each.name for each in fields(CompletionRequest)) - DRAWN | {"prompt"}
KEPT_BACK = frozenset(
    {"best_of", "cache_salt", "n", "priority", "prompt_cache_key", "request_id", "seed", "service_tier"}
)
"""What the reader sees to itself, or says in its own way."""
HAND_OVERS = ("kv_transfer_params", "ec_transfer_params")
READERS = EngineAbilities(frozenset({"tools", "service_tier"}))
"""A reader that leaves tools to the engine."""


def is_own(body: Mapping[str, object], able: EngineAbilities, *, chat: bool) -> bool:
    if goes_beyond(dict(body), able, READ_CHAT if chat else READ_COMPLETION):
        return True
    messages = body.get("messages") if chat else None
    return isinstance(messages, list) and any(_calls(each) for each in messages if isinstance(each, dict))


def _calls(message: dict[str, object]) -> bool:
    return message.get("role") in TOOL_SPEAKERS or any(message.get(key) for key in TOOL_KEYS)


def own_chat(body: Mapping[str, object]) -> tuple[ChatRequest, list[Message]]:
    _check(body)
    return chat_of(_read(body, READ_CHAT), READERS)


def own_completion(body: Mapping[str, object]) -> tuple[CompletionRequest, list[str | tuple[int, ...]]]:
    _check(body)
    return completion_of(_read(body, READ_COMPLETION), READERS)


def _check(body: Mapping[str, object]) -> None:
    for name in HAND_OVERS:
        if body.get(name):
            raise InputError(name, "is for whoever plans routes; leave it out")


def _read(body: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
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
    told = dict(values) if isinstance(values, dict) else {}
    effort = body.get("reasoning_effort")
    if effort is not None:
        told = {"enable_thinking": effort != "none", **told, "reasoning_effort": effort}
    more: dict[str, Any] = {"values": told}
    if isinstance(tools, list) and tools:
        more["tools"] = [_tool(each, f"tools[{place}]") for place, each in enumerate(tools)]
    if isinstance(documents, list):
        more["documents"] = [each for each in documents if isinstance(each, dict)]
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
    return {**message, "tool_calls": [_called(each) for each in calls]}


def _called(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    given = function.get("arguments")
    try:
        arguments = (json.loads(given) if given else {}) if isinstance(given, str | None) else given
    except ValueError:
        arguments = given
    return {**call, "function": {**function, "arguments": arguments}}

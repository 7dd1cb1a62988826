"""A chat's messages, read strictly; what they have beside text needs an engine that can do tools."""

from __future__ import annotations

from typing import Any

from potluck.core.errors import FormatError, InputError

SPEAKERS = ("system", "developer", "user", "assistant")
TOOL_SPEAKERS = ("tool", "function")
SILENT_KEYS = frozenset({"annotations", "reasoning", "reasoning_content", "refusal"})
"""Keys of earlier answers that say nothing to the model, as clients send them back."""
TOOL_KEYS = frozenset({"function_call", "tool_call_id", "tool_calls"})
KEYS = frozenset({"role", "content", "name", "audio"}) | SILENT_KEYS | TOOL_KEYS
PART_KEYS = frozenset({"type", "text", "refusal", "cache_control"})

Message = dict[str, Any]
"""`role` and `content`, a text; `name` where one was given; the calls of tools where the engine can do them."""


def messages_of(value: object, *, tools: bool) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise FormatError("messages", "must be a list of at least one message")
    return [_message(item, f"messages[{place}]", tools) for place, item in enumerate(value)]


def _message(value: object, where: str, tools: bool) -> Message:
    if not isinstance(value, dict):
        raise FormatError(where, "must be an object")
    if not value.keys() <= KEYS:
        raise FormatError(f"{where}.{_word(min(value.keys() - KEYS))}", "unknown key")
    speakers = SPEAKERS + TOOL_SPEAKERS if tools else SPEAKERS
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
    if value.keys().isdisjoint(TOOL_KEYS):
        return made
    for key in sorted(TOOL_KEYS):
        given = value.get(key)
        if given is None or given == []:
            continue
        if not tools:
            raise InputError(f"{where}.{key}", "is not supported by this engine; leave it out")
        made[key] = given
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

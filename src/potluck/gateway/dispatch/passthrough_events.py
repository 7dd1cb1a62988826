"""What engines say in their own words, to the client: as it comes, or at once when all of it is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from potluck.core.errors import PotluckError
from potluck.gateway.values import AnswerSink, ChoiceRequest, TokenCounts

Json = dict[str, Any]
TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
HIDDEN = ("prompt_token_ids", "kv_transfer_params")
ONCE = ("finish_reason", "stop_reason")
NUMBERS = ("token_logprobs", "top_logprobs", "content")  # They may differ in their last bits.
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content", "refusal")


class DifferentAnswer(PotluckError):
    """Asked again, the engine answers otherwise than what the client has."""


class ChoiceSoFar:
    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # By name; arguments of the third call are `call 3`.
        self.lists: dict[str, list[Any]] = {}
        self.facts: dict[str, Any] = {}  # What is said once: the role, a call's name.

    def add(self, choice: Json) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            for name in TEXTS:
                self._text(name, delta.get(name))
            if delta.get("role") is not None:
                self.facts["role"] = delta["role"]
            for place, call in enumerate(delta.get("tool_calls") or ()):
                self._call(call, call.get("index", place))
        self._text("text", choice.get("text"))
        logs = choice.get("logprobs")
        for name in LISTS:
            if isinstance(logs, dict) and isinstance(logs.get(name), list):
                self.lists.setdefault(name, []).extend(logs[name])
        if isinstance(choice.get("token_ids"), list):
            self.lists.setdefault("token_ids", []).extend(choice["token_ids"])
        for name in ONCE:
            if choice.get(name) is not None:
                self.facts[name] = choice[name]

    def cover(self, other_choice: ChoiceSoFar) -> None:
        for name, text in other_choice.texts.items():
            if len(text) > len(self.texts.get(name, "")):
                self.texts[name] = text
        for name, items in other_choice.lists.items():
            if len(items) > len(self.lists.get(name, ())):
                self.lists[name] = list(items)
        self.facts = {**other_choice.facts, **self.facts}

    def _text(self, name: str, text: object) -> None:
        if isinstance(text, str):
            self.texts[name] = self.texts.get(name, "") + text

    def _call(self, call: Json, index: int) -> None:
        function = call.get("function") or {}
        self._text(f"call {index}", function.get("arguments") or "")
        if function.get("name"):
            self.facts[f"name {index}"] = function["name"]
            self.facts.setdefault(f"id {index}", call.get("id"))

    def beyond(self, choice_so_far: ChoiceSoFar) -> Json | None:
        for name in choice_so_far.texts.keys() & self.texts.keys():
            _must_begin_alike(self.texts[name], choice_so_far.texts[name])
        for name in choice_so_far.lists.keys() & self.lists.keys():
            if name not in NUMBERS:
                _must_begin_alike(self.lists[name], choice_so_far.lists[name])
        for name in choice_so_far.facts.keys() & self.facts.keys():
            if self.facts[name] != choice_so_far.facts[name] and not name.startswith("id "):
                raise DifferentAnswer(f"{name} was told as {choice_so_far.facts[name]!r}")
        made: Json = {}
        if "text" in self.texts:
            made["text"] = self._more("text", choice_so_far)
        else:
            made["delta"] = self._delta(choice_so_far)
        logs = {
            name: result
            for name in LISTS
            if name in self.lists and (result := self.lists[name][len(choice_so_far.lists.get(name, ())) :])
        }
        if logs:
            made["logprobs"] = logs
        ids = self.lists.get("token_ids", [])[len(choice_so_far.lists.get("token_ids", ())) :]
        if ids:
            made["token_ids"] = ids
        ends = {
            name: self.facts[name] for name in ONCE if name in self.facts and name not in choice_so_far.facts
        }
        if not made.get("text") and not made.get("delta") and not logs and not ids and not ends:
            return None
        return {"index": 0, "logprobs": None, "finish_reason": None, **made, **ends}

    def _more(self, name: str, choice_so_far: ChoiceSoFar) -> str:
        return self.texts.get(name, "")[len(choice_so_far.texts.get(name, "")) :]

    def _delta(self, choice_so_far: ChoiceSoFar) -> Json:
        delta: Json = {name: more for name in TEXTS if (more := self._more(name, choice_so_far))}
        if "role" in self.facts and "role" not in choice_so_far.facts:
            delta = {"role": self.facts["role"], "content": "", **delta}
        calls: list[Json] = []
        for name in self.texts:
            if not name.startswith("call "):
                continue
            index = int(name[5:])
            function: Json = {}
            call: Json = {"index": index, "function": function}
            if f"name {index}" in self.facts and f"name {index}" not in choice_so_far.facts:
                call |= {"id": self.facts[f"id {index}"], "type": "function"}
                function["name"] = self.facts[f"name {index}"]
            if more := self._more(name, choice_so_far):
                function["arguments"] = more
            if function:
                calls.append(call)
        if calls:
            delta["tool_calls"] = calls
        return delta


def _must_begin_alike(now: Sequence[Any], told: Sequence[Any]) -> None:
    short = min(len(now), len(told))
    if now[:short] != told[:short]:
        raise DifferentAnswer("asked again, the engine answered otherwise than it had begun")


class MergedEvents:
    def __init__(self, name: str, model: str, *, usage: bool) -> None:
        self._name, self._model, self._usage = name, model, usage
        self._told: list[Json] = []  # Choices that the client has, in the first attempt's words.
        self._whole: ChoiceSoFar | None = None
        self._now: ChoiceSoFar | None = None
        self._created: object = None

    @property
    def begun(self) -> bool:
        return bool(self._told) or self._whole is not None

    def again(self) -> None:
        if not self.begun:
            return
        if self._whole is None:
            self._whole = ChoiceSoFar()
            for choice in self._told:
                self._whole.add(choice)
            self._told = []
        self._now = ChoiceSoFar()

    def event(self, said: Json) -> bytes:
        choices = [item for item in said.get("choices") or () if isinstance(item, dict)]
        if self._now is not None:
            choices = self._news(choices)
        else:
            choices = [choice for choice in choices if _says(choice)]
            self._told += choices
        usage = said.get("usage") if self._usage else None
        if not choices and usage is None:
            return b""
        return b"data: " + _text(self._named(said, choices, usage)) + b"\n\n"

    def _news(self, choices: list[Json]) -> list[Json]:
        assert self._now is not None
        assert self._whole is not None
        for choice in choices:
            self._now.add(choice)
        result = self._now.beyond(self._whole)
        if result is None:
            return []
        self._whole.cover(self._now)
        return [result]

    def _named(self, said: Json, choices: list[Json], usage: object) -> Json:
        if self._created is None:
            self._created = said.get("created")
        made = {name: value for name, value in said.items() if name not in HIDDEN and name != "usage"}
        made |= {"id": self._name, "created": self._created, "model": self._model, "choices": choices}
        if self._usage:
            made["usage"] = usage
        return made

    def whole(self, said: Json) -> bytes:
        made = {name: value for name, value in said.items() if name != "kv_transfer_params"}
        return _text(made | {"id": self._name, "model": self._model})


def _says(choice: Json) -> bool:
    delta = choice.get("delta")
    message = (
        choice.get("text") or choice.get("finish_reason") or choice.get("token_ids") or choice.get("logprobs")
    )
    return bool(message or (isinstance(delta, dict) and any(value is not None for value in delta.values())))


def _text(body: Json) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


EVENTS, JSON = b"text/event-stream; charset=utf-8", b"application/json"
DONE = b"data: [DONE]\n\n"
WANTS_USAGE = b'"include_usage":true'


class PassthroughEvents(MergedEvents):
    """The same, written to the client."""

    def __init__(self, choice_request: ChoiceRequest, answer: AnswerSink) -> None:
        kind = "cmpl" if choice_request.path.endswith(b"/v1/completions") else "chatcmpl"
        usage = WANTS_USAGE in choice_request.body
        super().__init__(
            f"{kind}-{choice_request.id}", choice_request.adapter or choice_request.model, usage=usage
        )
        self._answer = answer
        self._body: bytes | None = None

    def again(self) -> None:
        super().again()
        self._body = None

    def say(self, events: list[Json], *, stream: bool) -> None:
        if not stream:
            self._body = self.whole(events[-1])
            return
        begun = self.begun
        data = b"".join(map(self.event, events))
        if data and not begun:
            self._answer.relay_begin(200, EVENTS)
        if data:
            self._answer.relay(data)

    def end(self, counts: TokenCounts) -> None:
        if self._body is not None:
            self._answer.relay_whole(200, JSON, self._body, counts)
        else:
            self._answer.relay(DONE)
            self._answer.relay_end(counts)

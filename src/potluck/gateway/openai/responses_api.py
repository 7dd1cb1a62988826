"""/v1/responses as far as it is a chat: text in, text out, streamed or not. Nothing is kept between requests.

The request is turned into a chat's, and whoever answers that writes to `ResponsesExchange`, which turns what is
written into what a client of this API reads. So engines and servers of plain OpenAI need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite

from potluck.api.http import compact, error_object, parse_object
from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.gateway.http.server import Exchange
from potluck.gateway.openai.response import EventParser, parsed

Json = dict[str, object]
SAME = frozenset({
    "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "stream", "temperature", "tool_choice", "top_p", "user",
    # Not OpenAI's; load generators send them, as vLLM has them.
    "add_special_tokens", "cache_salt", "ignore_eos", "include_stop_str_in_output", "min_p", "min_tokens", "priority",
    "seed", "skip_special_tokens", "stop", "stop_token_ids", "top_k",
})  # fmt: skip
"""Fields that mean in a chat what they mean here."""
OPTIONS = frozenset({"include_obfuscation", "include_usage", "continuous_usage_stats"})
"""Of a stream, that ask for nothing: its last event tells the usage in any case."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,), "context_management": ([],), "conversation": (), "include": ([],), "max_tool_calls": (),
    "previous_response_id": (), "prompt": (), "store": (False,), "tools": ([],), "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
}  # fmt: skip
"""Others, with the values that ask for nothing that a chat cannot do."""
ROLES = ("user", "system", "developer", "assistant")


def chat_of_response(body: Json) -> Json:
    chat: Json = {}
    for name, value in body.items():
        if value is None or name in ("input", "instructions"):
            continue
        if name in SAME:
            chat[name] = value
        elif name == "max_output_tokens":
            chat["max_completion_tokens"] = value
        elif name == "text":
            chat["response_format"] = _format(value)
        elif name == "stream_options":
            _check_options(value)
        elif name not in NEUTRAL:
            raise FormatError(name[:60], "unknown key")
        elif value not in NEUTRAL[name]:
            raise InputError(name, "is not supported by this gateway; leave it out")
    if chat.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    chat["messages"] = _messages(body.get("instructions"), body.get("input"))
    return chat


def _format(value: object) -> Json | None:
    """`text.format` as a chat's `response_format`, which has a schema's keys one level deeper."""
    if not isinstance(value, dict):
        raise FormatError("text", "must be an object")
    form = value.get("format")
    if form is None or form == {"type": "text"}:
        return None
    if not isinstance(form, dict):
        raise FormatError("text.format", "must be an object with a type")
    if form.get("type") != "json_schema":
        return form
    return {
        "type": "json_schema",
        "json_schema": {name: item for name, item in form.items() if name != "type"},
    }


def _check_options(value: object) -> None:
    if not isinstance(value, dict) or not value.keys() <= OPTIONS:
        raise InputError("stream_options", f"may only have {', '.join(sorted(OPTIONS))}")


def _messages(instructions: object, given: object) -> list[Json]:
    jsons: list[Json] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise FormatError("instructions", "must be text")
        jsons.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*jsons, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise FormatError("input", "must be text, or a list of messages")
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if not isinstance(item, dict) or item.get("type", "message") != "message":
            raise InputError(where, "may only be a message")
        if item.get("role") not in ROLES:
            raise InputError(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        jsons.append({"role": item["role"], "content": _content(item.get("content"), f"{where}.content")})
    return jsons


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FormatError(where, "must be text, or a list of parts")
    texts = []
    for place, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text"):
            raise InputError(f"{where}[{place}]", "may only be of type input_text or output_text")
        if not isinstance(text, str):
            raise FormatError(f"{where}[{place}].text", "must be text")
        texts.append(text)
    return "".join(texts)


class ResponsesExchange:
    """An exchange whose request is a chat's, and whose answer is a response's: parts.Exchange."""

    path = b"/v1/chat/completions"

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.method, self.query, self.headers = exchange.method, exchange.query, exchange.headers
        self.body = exchange.body
        self.peer, self.came_s = exchange.peer, exchange.came_s
        self._asked: Json = {}
        self._parts = EventParser()
        self._response: Json = {}
        self._text, self._finish, self._number = "", "stop", 0
        self._usage: object = None
        self._over = False

    def read(self) -> None:
        self._asked = parse_object(self.body)
        self.body = compact(chat_of_response(self._asked))

    @property
    def on_gone(self) -> Callable[[], None] | None:
        return self._exchange.on_gone

    @on_gone.setter
    def on_gone(self, called: Callable[[], None] | None) -> None:
        self._exchange.on_gone = called

    @property
    def on_room(self) -> Callable[[bool], None] | None:
        return self._exchange.on_room

    @on_room.setter
    def on_room(self, called: Callable[[bool], None] | None) -> None:
        self._exchange.on_room = called

    def reply(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), lines: bytes = b""
    ) -> None:
        if status == 200:
            try:
                body = compact(self._whole(parsed(body)))
            except PotluckError as error:
                status, body = 502, compact(error_object(502, str(error), code="upstream_failed"))
        self._exchange.reply(status, body, headers, lines)

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), lines: bytes = b"") -> None:
        self._exchange.begin(status, headers, lines)

    def write(self, data: bytes) -> None:
        if self._over:
            return
        try:
            text = b"".join(self._said(part) for part in self._parts.feed(data))
        except PotluckError as error:
            text = self._failed(error_object(502, str(error), code="upstream_failed")["error"])
        if text:
            self._exchange.write(text)

    def end(self) -> None:
        if not self._over and self._response:
            self._exchange.write(self._completed())
        self._exchange.end()

    def drop(self) -> None:
        self._exchange.drop()

    # What a chat says, said as a response.

    def _whole(self, chat: Json) -> Json:
        choices = chat.get("choices")
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
        message = first.get("message")
        if not isinstance(message, dict):
            raise FormatError("answer", "the server's answer has no message")
        self._text = str(message.get("content") or "")
        self._finish = str(first.get("finish_reason"))
        self._usage = chat.get("usage")
        return self._object(chat, self._status(), [self._item("completed")])

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _said(self, part: Json) -> bytes:
        if "error" in part:
            return self._failed(part["error"])
        event = b""
        if not self._response:
            self._response = {
                "id": part.get("id"),
                "created": part.get("created"),
                "model": part.get("model"),
            }
            begun = self._object(self._response, "in_progress", [])
            event = self._event("response.created", response=begun)
            event += self._event("response.in_progress", response=begun)
            event += self._event(
                "response.output_item.added", output_index=0, item=self._item("in_progress", ())
            )
            event += self._place("response.content_part.added", part=_text_part(""))
        self._usage = part.get("usage") or self._usage
        choices = part.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else {}
        if not isinstance(choice, dict):
            return event
        self._finish = str(choice.get("finish_reason") or self._finish)
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else None
        if isinstance(text, str) and text:
            self._text += text
            event += self._place("response.output_text.delta", delta=text, logprobs=[])
        return event

    def _completed(self) -> bytes:
        self._over = True
        item = self._item(self._status())
        last = self._object(self._response, self._status(), [item])
        return (
            self._place("response.output_text.done", text=self._text, logprobs=[])
            + self._place("response.content_part.done", part=_text_part(self._text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{self._status()}", response=last)
        )

    def _failed(self, error: object) -> bytes:
        self._over = True
        result = error if isinstance(error, dict) else {"message": str(error)}
        message = {"code": result.get("code") or "server_error", "message": result.get("message")}
        if not self._response:
            return self._event("error", **message, param=None)
        failed = {**self._object(self._response, "failed", []), "error": message}
        return self._event("response.failed", response=failed)

    def _place(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        data = compact({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    @property
    def _item_id(self) -> str:
        return f"msg_{str(self._response.get('id') or '').removeprefix('chatcmpl-')}"

    def _item(self, status: str, content: tuple[Json, ...] | None = None) -> Json:
        parts = (_text_part(self._text),) if content is None else content
        return {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": list(parts),
        }

    def _object(self, chat: Json, status: str, output: list[Json]) -> Json:
        asked = self._asked
        self._response = self._response or {"id": chat.get("id")}
        return {
            "id": f"resp_{str(chat.get('id') or '').removeprefix('chatcmpl-')}",
            "object": "response",
            "created_at": chat.get("created"),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": chat.get("model"),
            "output": output,
            "parallel_tool_calls": bool(asked.get("parallel_tool_calls", True)),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": asked.get("service_tier") or "auto",
            "store": False,
            "temperature": _number(asked.get("temperature")),
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": [],
            "top_p": _number(asked.get("top_p")),
            "truncation": "disabled",
            "usage": _usage(self._usage) if status in ("completed", "incomplete") else None,
            "user": asked.get("user"),
        }


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and isfinite(value) else None


def _usage(chat: object) -> Json | None:
    if not isinstance(chat, dict):
        return None
    details = chat.get("prompt_tokens_details")
    cached = details.get("cached_tokens", 0) if isinstance(details, dict) else 0
    return {
        "input_tokens": chat.get("prompt_tokens", 0),
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": chat.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat.get("total_tokens", 0),
    }

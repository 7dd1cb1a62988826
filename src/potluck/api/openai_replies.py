"""The shapes of OpenAI's replies. Pure: values in, JSON values out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import NamedTuple

from potluck.api.text_stream import TextDelta
from potluck.api.tokenizer import ModelTokenizer
from potluck.api.tool_calls import ToolCall
from potluck.core.values.sampling import SampledToken

Json = dict[str, object]


class ReplyHead(NamedTuple):
    id: str
    created_s: int
    model: str
    chat: bool
    usage_said: bool = False

    def reply(self, choices: list[Json], *, chunk: bool, usage: Json | None = None) -> Json:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        body: Json = {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }
        if usage is not None or (chunk and self.usage_said):
            body["usage"] = usage
        return body


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


def model_entry(name: str, created_s: int, most_tokens: int) -> Json:
    """A model of /v1/models; with 0 tokens its longest request is unknown, and left out."""
    entry: Json = {"id": name, "object": "model", "created": created_s, "owned_by": "potluck"}
    return {**entry, "max_model_len": most_tokens} if most_tokens else entry


def usage(prompt: int, output: int, cached: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def whole_choice(
    head: ReplyHead, index: int, delta: TextDelta, tokenizer: ModelTokenizer | None, *, logprobs: bool
) -> Json:
    logs = _logs(head, delta.choices, tokenizer, 0) if logprobs else None
    base: Json = {"index": index, "finish_reason": delta.finish, "logprobs": logs}
    if not head.chat:
        return {**base, "text": delta.text}
    message: Json = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.calls:
        message["content"] = delta.text or None
        message["tool_calls"] = [
            {
                "id": call_id(head, index, call),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.calls
        ]
    return {**base, "message": message}


def call_id(head: ReplyHead, choice: int, call: ToolCall) -> str:
    """The same for the same answer, also when another process goes on with it."""
    return f"call_{sha256(f'{head.id} {choice} {call.index}'.encode()).hexdigest()[:24]}"


def part_choices(
    head: ReplyHead,
    index: int,
    delta: TextDelta,
    tokenizer: ModelTokenizer | None,
    *,
    logprobs: bool,
    offset: int,
    first: bool,
) -> list[Json]:
    """The choices of the chunks that a delta becomes: its text, two for each tool call, and last why it ends."""
    if not delta.calls:
        return [part_choice(head, index, delta, tokenizer, logprobs=logprobs, offset=offset, first=first)]
    choices: list[Json] = []
    if first or delta.text or (logprobs and delta.choices):
        words = TextDelta(delta.text, delta.choices)
        choices.append(
            part_choice(head, index, words, tokenizer, logprobs=logprobs, offset=offset, first=first)
        )
    parts: list[Json] = []
    for call in delta.calls:
        function = {"name": call.name, "arguments": ""}
        id = call_id(head, index, call)
        parts.append({"index": call.index, "id": id, "type": "function", "function": function})
        parts.append({"index": call.index, "function": {"arguments": call.arguments}})
    choices += [
        {"index": index, "finish_reason": None, "logprobs": None, "delta": {"tool_calls": [part]}}
        for part in parts
    ]
    if delta.finish is not None:
        choices.append({"index": index, "finish_reason": delta.finish, "logprobs": None, "delta": {}})
    return choices


def part_choice(
    head: ReplyHead,
    index: int,
    delta: TextDelta,
    tokenizer: ModelTokenizer | None,
    *,
    logprobs: bool,
    offset: int,
    first: bool,
) -> Json:
    logs = _logs(head, delta.choices, tokenizer, offset) if logprobs and delta.choices else None
    base: Json = {"index": index, "finish_reason": delta.finish, "logprobs": logs}
    if head.chat:
        message: Json = {"role": "assistant"} if first else {}
        if delta.text or first:
            message["content"] = delta.text
        return {**base, "delta": message}
    return {**base, "text": delta.text}


def offset_behind(choice: Json, offset: int) -> int:
    """Where the token behind a part's last one begins, in the text of all tokens: as in an answer that is not
    streamed, however it was cut into parts, and whatever of its text is still held back."""
    logs = choice["logprobs"]
    if not isinstance(logs, dict) or not logs.get("text_offset"):
        return offset
    last: int = logs["text_offset"][-1] + len(logs["tokens"][-1])
    return last


def _logs(
    head: ReplyHead, choices: Sequence[SampledToken], tokenizer: ModelTokenizer | None, offset: int
) -> Json:
    def name(token: int) -> str:
        return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)

    if head.chat:
        return {"content": [_chat_log(sampled_token, name) for sampled_token in choices], "refusal": None}
    names = [name(sampled_token.token) for sampled_token in choices]
    offsets = []
    for one in names:
        offsets.append(offset)
        offset += len(one)
    return {
        "tokens": names,
        "token_logprobs": [sampled_token.logprob for sampled_token in choices],
        "top_logprobs": [_top_logprobs(sampled_token, name) for sampled_token in choices],
        "text_offset": offsets,
    }


def _top_logprobs(sampled_token: SampledToken, name: Callable[[int], str]) -> Json | None:
    """The most likely tokens by their text, and the sampled token as well, as OpenAI's legacy completions do.

    Tokens may share a text, such as parts of characters. The sampled token keeps its own value then; of two others
    the more likely one does.
    """
    if sampled_token.logprob is None:
        return None
    named: Json = {name(sampled_token.token): sampled_token.logprob}
    for token, logprob in sampled_token.top:
        named.setdefault(name(token), logprob)
    return named


def _chat_log(sampled_token: SampledToken, name: object) -> Json:
    assert callable(name)

    def one(token: int, logprob: float | None) -> Json:
        shown = str(name(token))
        return {"token": shown, "logprob": logprob, "bytes": list(shown.encode())}

    return {
        **one(sampled_token.token, sampled_token.logprob),
        "top_logprobs": [one(*pair) for pair in sampled_token.top],
    }


quoted = json.JSONEncoder().encode


def usage_text(prompt: int, output: int, cached: int) -> str:
    return (
        f'{{"prompt_tokens":{prompt},"completion_tokens":{output},"total_tokens":{prompt + output},'
        f'"prompt_tokens_details":{{"cached_tokens":{cached}}}}}'
    )


class ChoiceChunks:
    __slots__ = ("_after", "_before", "_key", "_open")

    def __init__(self, head: ReplyHead, index: int) -> None:
        kind = "chat.completion.chunk" if head.chat else "text_completion"
        self._open = (
            f'data: {{"id":{quoted(head.id)},"object":"{kind}","created":{head.created_s},'
            f'"model":{quoted(head.model)},"choices":[{{"index":{index},"finish_reason":'
        )
        self._key = '"delta":{"content":' if head.chat else '"text":'
        self._before = f'{self._open}null,"logprobs":null,{self._key}'
        self._after = ("}}]" if head.chat else "}]") + (',"usage":' if head.usage_said else "")

    def part(self, text: str, usage: str = "null") -> bytes:
        return f"{self._before}{quoted(text)}{self._end(usage)}".encode()

    def first(self, text: str, usage: str = "null") -> bytes:
        if self._key == '"text":':
            return self.part(text, usage)
        message = f'"delta":{{"role":"assistant","content":{quoted(text)}'
        return f'{self._open}null,"logprobs":null,{message}{self._end(usage)}'.encode()

    def last(self, text: str, finish: str, usage: str = "null") -> bytes:
        """It is over; not for a choice that has said nothing so far."""
        message = self._key + quoted(text)
        if not text and self._key != '"text":':
            message = '"delta":{'
        return f'{self._open}"{finish}","logprobs":null,{message}{self._end(usage)}'.encode()

    def _end(self, usage: str) -> str:
        after = self._after
        return f"{after}{usage}}}\n\n" if after.endswith(":") else f"{after}}}\n\n"


def whole_reply(head: ReplyHead, text: str, finish: str, usage: str) -> bytes:
    kind = "chat.completion" if head.chat else "text_completion"
    message = quoted(text)
    message = (
        f'"message":{{"role":"assistant","content":{message},"refusal":null}}'
        if head.chat
        else f'"text":{message}'
    )
    return (
        f'{{"id":{quoted(head.id)},"object":"{kind}","created":{head.created_s},"model":{quoted(head.model)},'
        f'"choices":[{{"index":0,"finish_reason":"{finish}","logprobs":null,{message}}}],"usage":{usage}}}'
    ).encode()

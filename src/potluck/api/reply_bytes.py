"""Replies as bytes, written straight: what `answers` shapes and JSON would make of it, in a tenth of the time.

Only for choices without log probabilities; those that tell them are rare, and go the long way.
"""

from __future__ import annotations

import json

from potluck.api.openai_replies import ReplyHead

quoted = json.JSONEncoder().encode
"""A text as JSON."""


def usage_text(prompt: int, output: int, cached: int) -> str:
    return (
        f'{{"prompt_tokens":{prompt},"completion_tokens":{output},"total_tokens":{prompt + output},'
        f'"prompt_tokens_details":{{"cached_tokens":{cached}}}}}'
    )


class ChoiceChunks:
    """The parts of one choice of a stream."""

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
        """More text."""
        return f"{self._before}{quoted(text)}{self._end(usage)}".encode()

    def first(self, text: str, usage: str = "null") -> bytes:
        """The first of a chat's says who speaks."""
        if self._key == '"text":':
            return self.part(text, usage)
        said = f'"delta":{{"role":"assistant","content":{quoted(text)}'
        return f'{self._open}null,"logprobs":null,{said}{self._end(usage)}'.encode()

    def last(self, text: str, finish: str, usage: str = "null") -> bytes:
        """It is over; not for a choice that has said nothing so far."""
        said = self._key + quoted(text)
        if not text and self._key != '"text":':
            said = '"delta":{'
        return f'{self._open}"{finish}","logprobs":null,{said}{self._end(usage)}'.encode()

    def _end(self, usage: str) -> str:
        after = self._after
        return f"{after}{usage}}}\n\n" if after.endswith(":") else f"{after}}}\n\n"


def whole_reply(head: ReplyHead, text: str, finish: str, usage: str) -> bytes:
    """A reply of one choice."""
    kind = "chat.completion" if head.chat else "text_completion"
    said = quoted(text)
    said = (
        f'"message":{{"role":"assistant","content":{said},"refusal":null}}' if head.chat else f'"text":{said}'
    )
    return (
        f'{{"id":{quoted(head.id)},"object":"{kind}","created":{head.created_s},"model":{quoted(head.model)},'
        f'"choices":[{{"index":0,"finish_reason":"{finish}","logprobs":null,{said}}}],"usage":{usage}}}'
    ).encode()

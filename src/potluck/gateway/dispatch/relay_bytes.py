"""What goes to a plain OpenAI server, and what comes back, as bytes: spliced where that will do. No I/O.

An answer that broke off goes on as a completion of the tokens so far, at another server; its events are written anew
so that the client sees one stream: the same id, the same shape, one usage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from potluck.core.errors import FormatError

MODEL = re.compile(rb'"model"\s*:')
MODEL_NAME = re.compile(rb'"model"\s*:\s*"((?:[^"\\]|\\.)*)"')
PROMPT_IDS = re.compile(rb',"prompt_token_ids":(?:null|\[([\d,]*)\])')
TOKEN_IDS = re.compile(rb',"token_ids":(?:null|\[([\d,]*)\])')
SHOWS = re.compile(rb'"(?:content|text)":"[^"]')
"""An event with text: whatever the server held back before it is shown now."""
ANOTHER = re.compile(rb'"index":[1-9]')
ERROR, ABORTED = b'data: {"error"', b'"finish_reason":"abort"'
DONE = b"data: [DONE]"

CARRIED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "repetition_penalty",
    "skip_special_tokens", "spaces_between_special_tokens", "stream_options", "priority", "user", "logit_bias",
    "allowed_token_ids", "bad_words", "include_stop_str_in_output",
)  # fmt: skip
"""What a completion understands as a chat does, and depends on no token before."""
STRANGE = (
    "stop", "tools", "tool_choice", "functions", "function_call", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "presence_penalty", "frequency_penalty",
    "echo", "suffix", "use_beam_search", "prompt_logprobs", "logits_processors", "audio", "modalities",
    "continue_final_message", "reasoning_effort",
)  # fmt: skip
"""What depends on how the answer began, or holds text back, so that it cannot go on from its tokens."""


def forwarded(body: bytes, model: str, served: str, extra: bytes = b"", salt: str = "") -> bytes:
    """A client's body for a server that calls the model otherwise; `extra` fields are added at its end.

    A `salt` takes the place of the client's own, of which it was made: no name stands there twice.
    """
    if salt:
        if b"cache_salt" in body:
            asked = {name: value for name, value in json.loads(body).items() if name != "cache_salt"}
            body = json.dumps(asked, separators=(",", ":")).encode()
        said = b'"cache_salt":' + json.dumps(salt).encode()
        extra = extra + b"," + said if extra else said
    if served and served != model:
        found = MODEL_NAME.search(body)
        if found is None or len(MODEL.findall(body)) > 1:
            body = json.dumps({**json.loads(body), "model": served}, separators=(",", ":")).encode()
        else:
            body = body[: found.start(1)] + json.dumps(served)[1:-1].encode() + body[found.end(1) :]
    if extra:
        body = body.rstrip()[:-1] + b"," + extra + b"}"
    return body


def ids_of(text: bytes | None) -> list[int]:
    return [int(each) for each in text.split(b",")] if text else []


def continuation(
    body: bytes, chat: bool, served: str, tokens: Sequence[int], most: int, streamed: int, salt: str
) -> bytes | None:
    """The rest of an answer as a completion of its tokens; None where it depends on more than those."""
    asked: dict[str, Any] = json.loads(body)
    if any(asked.get(name) not in (None, [], {}, 0, False, "", "none", "auto") for name in STRANGE):
        return None
    if asked.get("n") not in (None, 1) or asked.get("best_of") not in (None, 1):
        return None
    made = {name: asked[name] for name in CARRIED if asked.get(name) is not None}
    made |= {
        "model": served,
        "prompt": list(tokens),
        "max_tokens": most - streamed,
        "min_tokens": max(0, (asked.get("min_tokens") or 0) - streamed),
        "stream": True,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    if salt:
        made["cache_salt"] = salt
    if chat and asked.get("logprobs"):
        made["logprobs"] = asked.get("top_logprobs") or 0
    elif not chat and asked.get("logprobs") is not None:
        made["logprobs"] = asked["logprobs"]
    return json.dumps(made, separators=(",", ":")).encode()


class EventRewriter:
    """Events of a completion in another's name."""

    def __init__(self, first: bytes, chat: bool, prompt_tokens: int, before_tokens: int) -> None:
        said = event_of(first)
        self._head: dict[str, Any] = {
            name: said[name] for name in ("id", "object", "created", "model") if name in said
        }
        self._chat = chat
        self._prompt_tokens, self._before = prompt_tokens, before_tokens

    def event(self, event: bytes) -> bytes:
        """One event, whole; the last one is passed on as it is."""
        if event.startswith(DONE):
            return event
        said = event_of(event)
        choices = [self._choice(each) for each in said.get("choices", [])]
        made: dict[str, Any] = {**self._head, "choices": choices}
        if "usage" in said:
            made["usage"] = self._usage(said["usage"])
        return b"data: " + json.dumps(made, separators=(",", ":")).encode() + b"\n\n"

    def closing(self, body: bytes) -> bytes:
        """The end of an answer that has all its tokens, and whose server died before it said so."""
        last: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        said = [{**self._head, "choices": [self._choice(last)]}]
        options = json.loads(body).get("stream_options") or {}
        if options.get("include_usage"):
            said.append({**self._head, "choices": [], "usage": self._usage({"completion_tokens": 0})})
        events = [b"data: " + json.dumps(each, separators=(",", ":")).encode() + b"\n\n" for each in said]
        return b"".join(events) + DONE + b"\n\n"

    def _choice(self, said: dict[str, Any]) -> dict[str, Any]:
        made = {name: value for name, value in said.items() if name not in ("token_ids", "prompt_token_ids")}
        if self._chat:
            text = made.pop("text", "")
            made["delta"] = {"content": text} if text else {}
            if made.get("logprobs"):
                made["logprobs"] = _chat_logs(made["logprobs"])
        return made

    def _usage(self, said: dict[str, Any] | None) -> dict[str, Any] | None:
        """Of the whole answer: what was told before counts as output, not as prompt."""
        if said is None:
            return None
        output = int(said.get("completion_tokens") or 0) + self._before
        total = self._prompt_tokens + output
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": output, "total_tokens": total}
        return {**said, **counts}


def event_of(event: bytes) -> dict[str, Any]:
    """The object of a server-sent event; raises FormatError for anything else."""
    text = event.strip()
    try:
        said = json.loads(text[5:]) if text.startswith(b"data:") else None
    except (ValueError, RecursionError) as error:
        raise FormatError("answer", "an event is not JSON") from error
    if not isinstance(said, dict) or not isinstance(said.get("choices", []), list):
        raise FormatError("answer", "an event is no part of an answer")
    return said


def _chat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """A completion's log probabilities as a chat has them."""

    def one(token: str, logprob: float | None) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    tops = logs.get("top_logprobs") or [None] * len(logs["tokens"])
    content = [
        {**one(token, logprob), "top_logprobs": [one(*pair) for pair in (top or {}).items()]}
        for token, logprob, top in zip(logs["tokens"], logs["token_logprobs"], tops, strict=True)
    ]
    return {"content": content}

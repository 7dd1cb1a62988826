"""ShareGPT's JSON: a list of conversations in words, without times.

    [{"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, ...]

A conversation gives one request: its first human turn is the prompt and the answer to it the output, as serving
benchmarks do. Conversations without such a pair are passed over and counted. A turn may carry its length
as `tokens`; otherwise it is estimated as one token per 4 bytes of UTF-8, which is about right for English prose
(GPT-like vocabularies) and for Chinese, and wrong by a third or so for code. Say so where the result is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from potluck.core.errors import InputError, did_you_mean
from potluck.spec.spec_problems import shown
from potluck.spec.trace_rows import MAX_TOKENS, TraceRequest, tokens

BYTES_PER_TOKEN = 4
PROMPT_FROM = frozenset({"human", "user"})
ANSWER_FROM = frozenset({"gpt", "chatgpt", "assistant", "bing", "bard"})
_SPACE = " \t\r\n"


def read_sharegpt(text: str, name: str) -> Iterator[TraceRequest | None]:
    """The requests one by one, all at time 0; None for a conversation that has none."""
    decoder = json.JSONDecoder()
    at, line = _skip(text, 0), 1
    line += text.count("\n", 0, at)
    at += 1  # the opening bracket, which told the format
    first = True
    while True:
        following = _skip(text, at)
        line += text.count("\n", at, following)
        at = following
        end = text[at : at + 1]
        if end == "]":
            _nothing_after(text, at + 1, name, line)
            return
        if not first:
            if end != ",":
                raise InputError(f"{name}:{line}", "is not JSON: a comma or ] is missing")
            following = _skip(text, at + 1)
            line += text.count("\n", at, following)
            at = following
        first = False
        try:
            entry, stop = decoder.raw_decode(text, at)
            yield _request(entry)
        except json.JSONDecodeError as error:
            raise InputError(f"{name}:{error.lineno}", f"is not JSON: {error.msg}") from error
        except RecursionError as error:
            raise InputError(f"{name}:{line}", "is nested too deeply") from error
        except ValueError as error:
            raise InputError(f"{name}:{line}", str(error)) from error
        line += text.count("\n", at, stop)
        at = stop


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _nothing_after(text: str, at: int, name: str, line: int) -> None:
    end = _skip(text, at)
    if end < len(text):
        raise InputError(f"{name}:{line + text.count(chr(10), at, end)}", "is not JSON: text after the list")


def _request(entry: object) -> TraceRequest | None:
    if not isinstance(entry, dict):
        raise ValueError("is not a JSON object")
    if "conversations" not in entry:
        raise ValueError(f"'conversations' is missing{did_you_mean('conversations', entry)}")
    turns = entry["conversations"]
    if not isinstance(turns, list):
        raise ValueError(f"conversations must be a list, is {shown(turns)}")
    sides = [_side(turn) for turn in turns]
    for index in range(len(sides) - 1):
        if sides[index] in PROMPT_FROM:
            if sides[index + 1] not in ANSWER_FROM:
                return None
            prompt, answer = _length(turns[index]), _length(turns[index + 1])
            return TraceRequest(0.0, prompt, answer) if prompt else None
    return None


def _side(turn: object) -> str:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise ValueError("every turn must be an object with 'from'")
    return str(turn["from"])


def _length(turn: dict[str, object]) -> int:
    if "tokens" in turn:
        return tokens("tokens", turn["tokens"], least=0)
    value = turn.get("value")
    if not isinstance(value, str):
        raise ValueError(f"a turn needs 'value' or 'tokens', value is {shown(value)}")
    estimate = -(-len(value.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
    return min(estimate, MAX_TOKENS)

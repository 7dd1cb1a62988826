"""What benchmarks/gateway_same.py asks: all manners of asking, spread so that each meets each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from live_plans import MODEL

TEXT = "the a of king river stone and ship night under every was came said"
WORDS = TEXT.split()
TEXTS = (" the ", ", and ", "ing to", "er was", "ould", ".\n", "ness")
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "words": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "words"],
    "additionalProperties": False,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]


def asks_of(count: int, output: int, seed: int) -> list[Ask]:
    chance = random.Random(seed)
    made = []
    for place in range(count):
        words = " ".join(chance.choices(WORDS, k=chance.randrange(20, 220)))
        body: dict[str, Any] = {"model": MODEL, "max_tokens": chance.randrange(output // 2, output + 1)}
        if place % 2:
            body |= {"temperature": 0.9, "seed": place, "top_p": 0.95, "top_k": 200 if place % 3 else -1}
        else:
            body |= {"temperature": 0}
        if place % 4 < 2:
            body["ignore_eos"] = True
        if chance.random() < 0.5:
            body |= stops_of(chance)
        if chance.random() < 0.7:
            body |= STREAMED
        if chance.random() < 0.5:
            body |= edits_of(chance, body)
        if place % 11 == 3:
            body["n"] = 2
        chat = place % 4 == 2
        if chat:
            body["messages"] = [{"role": "user", "content": words}]
        elif place % 4 == 1:
            body["prompt"] = [chance.randrange(5, 4000) for _ in range(chance.randrange(30, 400))]
        else:
            body["prompt"] = words
        if place % 3 == 0:
            body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        made.append(Ask("/v1/chat/completions" if chat else "/v1/completions", body))
    return made


def stops_of(chance: random.Random) -> dict[str, Any]:
    """Pieces of words: most end an answer, many within a token, some across two."""
    stops = []
    for text in chance.choices(TEXTS, k=chance.randrange(1, 4)):
        start = chance.randrange(len(text))
        stops.append(text[start : start + chance.randrange(1, 4)])
    result: dict[str, Any] = {"stop": stops}
    if chance.random() < 0.3:
        result["min_tokens"] = 4
    if chance.random() < 0.2:
        result["include_stop_str_in_output"] = True
    return result


def edits_of(chance: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """What depends on how an answer began: after a recovery the next engine must count on."""
    kind = chance.randrange(3)
    if kind == 0:
        return {"presence_penalty": chance.uniform(-2, 2), "frequency_penalty": chance.uniform(-1, 2)}
    if kind == 1:
        biases = {str(chance.randrange(1, 4000)): chance.uniform(-5, 5) for _ in range(20)}
        return {"repetition_penalty": chance.uniform(0.8, 1.5), "logit_bias": biases}
    for name in ("min_tokens", "ignore_eos"):
        body.pop(name, None)
    if chance.random() < 0.3:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "entry", "schema": ENTRY}}}


def other_way(ask: Ask) -> Ask:
    """Streamed what is not, and the other way round: the answer must be the same."""
    body = {name: value for name, value in ask.body.items() if name not in STREAMED}
    return Ask(ask.path, body if ask.body.get("stream") else body | STREAMED)

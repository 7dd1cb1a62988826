"""A segment as a request to vLLM, and vLLM's answer as what the face says. Values and bytes in and out, no I/O."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.api.http import HttpRefusal
from potluck.api.segments import SamplingBody, SegmentRequest
from potluck.core.errors import InputError

TOO_LONG = ("maximum context length", "maximum model length", "longer than the maximum", "max_model_len")
PREFIX = "token_id:"
EVENT, LAST = b"data: ", b"data: [DONE]"
LONGEST_EVENT = 1 << 22
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A segment of a prompt, in the tokens that are really computed: whoever decodes computes the last one itself."""

    asked: SegmentRequest
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InputError("tokens", "must be at least one")
        if self.whole < 1:
            raise InputError("stop", "leaves nothing to compute")
        if self.received >= self.whole:
            raise InputError("start", f"leaves nothing to compute before {self.whole}")

    @property
    def hands_on(self) -> bool:
        return self.asked.stop is not None

    @property
    def whole(self) -> int:
        """Tokens whose KV is there when the prompt is computed."""
        stop = self.asked.stop
        return len(self.tokens) if stop is None else min(stop, len(self.tokens) - 1)

    @property
    def received(self) -> int:
        """Tokens whose KV comes from elsewhere."""
        return min(self.asked.start, len(self.tokens) - 1)


def moves_of(part: PromptPart, handle: str | None, lasts_s: float, within_s: float) -> Json:
    """What becomes of its KV, and whose prefixes it may use: fields of a request."""
    segment_request = part.asked
    moves: Json = {"request": segment_request.request}
    if segment_request.source is not None:
        source = segment_request.source
        take: Json = {"kv": source.kv, "handle": source.handle, "connections": source.connections}
        moves["take"] = take | {"stop": part.received, "within_s": within_s}
    if handle is not None:
        give = {"handle": handle, "stop": part.whole, "codec": segment_request.codec}
        moves["give"] = give | {"lasts_s": lasts_s}
    result: Json = {"kv_transfer_params": {"potluck": moves}} if len(moves) > 1 else {}
    return result | {"cache_salt": segment_request.salt} if segment_request.salt else result


def folded(seed: int) -> int:
    """A seed of which all bits count: vLLM on a CPU looks at the lower half of one alone."""
    if 0 <= seed < 1 << 31:
        return seed
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4]) >> 1


def body_of(part: PromptPart, handle: str | None, lasts_s: float, within_s: float) -> Json:
    """What vLLM is asked for a segment."""
    segment_request = part.asked
    body: Json = {
        "model": segment_request.model,
        "prompt": list(part.tokens[: part.whole]),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "detokenize": False,
        "temperature": 0,
        "max_tokens": 1,
        **moves_of(part, handle, lasts_s, within_s),
    }
    if part.hands_on:
        return body
    sampling = segment_request.sampling
    body |= {
        "max_tokens": segment_request.max_tokens,
        "min_tokens": segment_request.min_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "ignore_eos": segment_request.ignore_eos,
        "stop_token_ids": list(segment_request.end_tokens),
    }
    body |= _edits(sampling)
    if sampling.temperature > 0:
        body["seed"] = folded(sampling.seed)
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True, "detokenize": True}
    return body


def _edits(sampling: SamplingBody) -> Json:
    """Biases, penalties and a format, in vLLM's words; only those that are asked for."""
    result: Json = {
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "repetition_penalty": None if sampling.repetition_penalty == 1 else sampling.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "structured_outputs": {"json": sampling.json_schema} if sampling.json_schema else None,
    }
    return {name: value for name, value in result.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SegmentEvent:
    """Of one event: lines for whoever asked, why it ended if it did, and how many prompt tokens were cached."""

    lines: tuple[Json, ...] = ()
    reason: str | None = None
    cached_tokens: int | None = None


class VllmEventReader:
    """vLLM's stream, cut anywhere, to what it says."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Json]:
        parts = (self._rest + data).split(b"\n\n")
        self._rest = parts.pop()
        if len(self._rest) > LONGEST_EVENT:
            raise HttpRefusal(502, "vLLM sent an event without an end", "try_again")
        events = [part for part in parts if part.startswith(EVENT) and part != LAST]
        jsons: list[Json] = [json.loads(event[len(EVENT) :]) for event in events]
        for text in jsons:
            if "error" in text:
                error = text["error"]
                code = error.get("code") if isinstance(error, dict) else None
                raise refusal_of(code if isinstance(code, int) else 500, json.dumps(text).encode())
        return jsons


def cached_of(said: Json) -> int | None:
    """How many of the prompt's tokens were cached, where a usage says so."""
    usage = said.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return details.get("cached_tokens") if isinstance(details, dict) else None


def heard_of(said: Json, logprobs: int | None = None) -> SegmentEvent:
    """Read an event; `logprobs` is how many of the most likely tokens the segment's request wants."""
    cached = cached_of(said)
    choices = said.get("choices")
    if not isinstance(choices, list) or not choices:
        return SegmentEvent(cached_tokens=cached)
    choice = choices[0]
    tokens = choice.get("token_ids") or []
    return SegmentEvent(_lines(tokens, choice.get("logprobs"), logprobs), choice.get("finish_reason"), cached)


def _lines(tokens: Sequence[int], logprobs: object, count: int | None) -> tuple[Json, ...]:
    if not isinstance(logprobs, dict):
        return tuple({"token": token} for token in tokens)
    result = []
    for place, token in enumerate(tokens):
        line: Json = {"token": token, "logprob": logprobs["token_logprobs"][place]}
        top = (logprobs.get("top_logprobs") or [{}] * len(tokens))[place] or {}
        pairs = [[int(name.removeprefix(PREFIX)), value] for name, value in top.items()]
        # vLLM lists the sampled token as well; where it is not among the likeliest, it is the last of these.
        line["top"] = sorted(pairs, key=lambda pair: -pair[1])[:count]
        result.append(line)
    return tuple(result)


def refusal_of(status: int, text: bytes) -> HttpRefusal:
    """What vLLM's error means to whoever plans routes; what is wrong with a client's request, in vLLM's words."""
    param: object = None
    try:
        body = json.loads(text)
        error = body.get("error", body)
        line = str(error.get("message", "")) if isinstance(error, dict) else str(error)
        param = error.get("param") if isinstance(error, dict) else None
    except (ValueError, AttributeError):
        line = text[:200].decode("utf-8", "replace")
    line = " ".join(line.split())[:300]
    if status in (400, 413, 422):
        if any(words in line for words in TOO_LONG):
            return HttpRefusal(400, line, "context_length_exceeded")
        return HttpRefusal(400, line, param=param if isinstance(param, str) else None)
    if status == 404:
        return HttpRefusal(404, f"vLLM: {line}", "model_not_found", "model")
    if status == 429:
        return HttpRefusal(429, f"vLLM: {line}", "overloaded")
    return HttpRefusal(503, f"vLLM: {line}", "try_again")

"""What a segment's engine is asked: the body of POST /segments (docs/engine.md). Values in, bytes out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields

from potluck.api.segments import SamplingBody
from potluck.core.values.route import Segment
from potluck.core.values.sampling import Sampling
from potluck.gateway.interfaces import ChoiceRequest

DEFAULTS = Sampling()
DRAWS = tuple(each.name for each in fields(SamplingBody))


def new_handle() -> str:
    """A word that nobody can guess: whoever has it may fetch one cache, once."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """What one engine is to do: neighbouring segments of the same replica are one."""

    place: int
    """In the route, of its last segment: when it is handed on, this one and all before it are done."""
    replica: str
    start: int
    stop: int | None


def stretches(segments: Sequence[Segment], prompt_tokens: int) -> list[SegmentWork]:
    """Who does what. Whoever decodes computes the last token itself, so a segment of that one alone is left out."""
    found: list[SegmentWork] = []
    for place, segment in enumerate(segments):
        start = found[-1].stop if found and found[-1].stop is not None else 0
        if segment.stop is not None and min(segment.stop, prompt_tokens - 1) <= start:
            continue
        if found and found[-1].replica == segment.replica:
            found[-1] = SegmentWork(place, segment.replica, found[-1].start, segment.stop)
        else:
            found.append(SegmentWork(place, segment.replica, start, segment.stop))
    return found


@dataclass(frozen=True, slots=True)
class HandoverTicket:
    """One hand-over: its word, where to fetch, and in how many bits."""

    handle: str
    kv: str
    codec: str


def tokens_text(prompt: Sequence[int], output: Sequence[int]) -> str:
    """The tokens of a prompt and what was streamed behind it: written once for all segments."""
    return json.dumps([*prompt, *output], separators=(",", ":"))


def segment_body(
    asked: ChoiceRequest,
    model: str,
    stretch: SegmentWork,
    streamed: int,
    weight: float,
    priority: int,
    tokens: str,
    source: HandoverTicket | None,
    target: HandoverTicket | None,
) -> bytes:
    said: dict[str, object] = {"request": asked.id, "model": model, "priority": priority}
    if asked.tenant:
        said["tenant"] = asked.tenant
        said["weight"] = weight
    if asked.salt:
        said["salt"] = asked.salt
    if source is not None:
        said["start"] = stretch.start
        said["source"] = {"kv": source.kv, "handle": source.handle}
    if target is not None:
        said["stop"] = stretch.stop
        said["handle"] = target.handle
        if target.codec != "raw":
            said["codec"] = target.codec
    else:
        if asked.own:
            own = f'{{"path":"{asked.path.decode()}","body":{asked.body.decode()}}}'
            return _spliced(said, tokens, own)
        said["max_tokens"] = asked.max_output_tokens - streamed
        said["min_tokens"] = max(0, asked.min_tokens - streamed)
        said["ignore_eos"] = asked.ignore_eos
        if asked.ends:
            said["end_tokens"] = asked.ends
        drawn = {name: getattr(asked.sampling, name) for name in DRAWS}
        drawn = {name: value for name, value in drawn.items() if value != getattr(DEFAULTS, name)}
        if drawn:
            said["sampling"] = drawn
        if streamed and asked.sampling.edits:
            said["generated"] = streamed
    return _spliced(said, tokens)


def _spliced(said: dict[str, object], tokens: str, own: str = "") -> bytes:
    """With what is JSON already."""
    text = json.dumps(said, separators=(",", ":"))
    more = f',"own":{own}' if own else ""
    return f'{text[:-1]},"tokens":{tokens}{more}}}'.encode()

"""The last segment of a request that its engine answers in its own words: tokens to count, and events to pass on.

    {"token": 5}  {"said": {an event as OpenAI has it}}  ...  {"ended": "stop", "prompt_tokens": ..., ...}

An answer that is not streamed is one event; until then `{"steps": n}` says that it goes on. `{"refused": ...}` is
what the client is told where its request is at fault.

Where the engine makes another prompt of the client's messages than we did, KV that was computed for ours is of no use
to it: it says which tokens its own has, and the request is sent again with those.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from potluck.core.values.sampling import SampledToken
from potluck.gateway.dispatch.engine_faults import ended
from potluck.gateway.dispatch.engine_lines import InvalidReply, LastLine, LineReader, Said
from potluck.gateway.dispatch.hop import CLIENTS_FAULT, Hop
from potluck.gateway.dispatch.segment_bodies import SegmentWork
from potluck.gateway.interfaces import Endpoint, TokenCounts

if TYPE_CHECKING:
    from potluck.gateway.dispatch.attempt import Attempt

LONGEST_LINE = 64 << 20
"""An answer that is not streamed is one line."""
OTHER_PROMPT = "other_prompt"
MOST_PROMPT = 1 << 24


class PassthroughHop(Hop):
    __slots__ = ("_prompt", "_refusal", "_said_any", "_streamed")

    def __init__(
        self, attempt: Attempt, stretch: SegmentWork, endpoint: Endpoint, tokens: int, *, stream: bool
    ) -> None:
        super().__init__(attempt, stretch, endpoint, tokens)
        self._lines = LineReader(attempt.vocab, LONGEST_LINE)
        self._streamed = stream
        self._said_any = False
        self._prompt: tuple[int, ...] = ()
        self._refusal: dict[str, Any] | None = None

    def done(self) -> None:
        if not self.over and self._status == CLIENTS_FAULT:
            self.call, self.over = None, True
            self.attempt.turned_down(self, self._status, self._error)
        else:
            super().done()

    def _said(self, found: list[Said | InvalidReply]) -> None:
        tokens = 0
        events: list[dict[str, Any]] = []
        end: Said | InvalidReply | None = None
        for said in found:
            if end is not None:
                self._lied("more behind its end")
                return
            if isinstance(said, SampledToken):
                tokens += 1
            elif isinstance(said, dict) and isinstance(event := said.get("said"), dict):
                events.append(event)
            elif isinstance(said, dict) and isinstance(prompt := said.get("prompt"), list):
                self._prompt = _prompt(prompt, self.attempt.vocab)
            elif isinstance(said, dict) and isinstance(refusal := said.get("refused"), dict):
                self._refusal = refusal
            elif isinstance(said, dict) and "steps" in said:
                continue  # It goes on.
            else:
                end = said
        if tokens:
            self.told += tokens
            if self._streamed and not self.flows:
                self.computed(self.heard_s)
                self.flows = True
        if events:
            self._said_any = True
            self.attempt.said(events, stream=self._streamed)
        if end is not None and not self.over:
            self._ended(end)

    def _ended(self, end: Any) -> None:
        if isinstance(end, InvalidReply):
            self._lied(str(end))
        elif not isinstance(end, LastLine):
            self._lied("a line that says nothing")
        elif end.code == OTHER_PROMPT and self._prompt and end.reason not in ("stop", "length"):
            self.over = True
            self.attempt.other_prompt(self, self._prompt)
        elif self._refusal is not None and end.reason not in ("stop", "length"):
            self.over = True
            self.attempt.turned_down(self, CLIENTS_FAULT, json.dumps(self._refusal).encode())
        elif end.reason not in ("stop", "length"):
            self._fail(ended(end.code, self.has_source, hands_on=False))
        elif end.output_tokens != self.told or not self._said_any:
            self._lied("an end that does not add up")
        else:
            self.over = True
            self.attempt.own_finished(TokenCounts(end.prompt_tokens, self.told, end.cached_tokens))


def _prompt(tokens: list[object], vocab: int) -> tuple[int, ...]:
    """An engine's own prompt; nothing where it is none."""
    most = vocab or 1 << 31
    if len(tokens) > MOST_PROMPT:
        return ()
    found = [token for token in tokens if type(token) is int and 0 <= token < most]
    return tuple(found) if len(found) == len(tokens) else ()

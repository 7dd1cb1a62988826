"""What engines say in their own words, to the client: as it comes, or at once when all of it is there."""

from __future__ import annotations

from typing import Any

from potluck.gateway.dispatch.merged_events import MergedEvents
from potluck.gateway.interfaces import AnswerSink, ChoiceRequest, TokenCounts

EVENTS, JSON = b"text/event-stream; charset=utf-8", b"application/json"
DONE = b"data: [DONE]\n\n"
WANTS_USAGE = b'"include_usage":true'


class PassthroughEvents:
    def __init__(self, asked: ChoiceRequest, answer: AnswerSink) -> None:
        kind = "cmpl" if asked.path.endswith(b"/v1/completions") else "chatcmpl"
        model = asked.adapter or asked.model
        self._retold = MergedEvents(f"{kind}-{asked.id}", model, usage=WANTS_USAGE in asked.body)
        self._answer = answer
        self._whole: bytes | None = None

    @property
    def begun(self) -> bool:
        """Whether the client has some of it."""
        return self._retold.begun

    def again(self) -> None:
        """Another attempt begins."""
        self._retold.again()
        self._whole = None

    def say(self, events: list[dict[str, Any]], *, stream: bool) -> None:
        """Raises Otherwise where the client has other words already."""
        if not stream:
            self._whole = self._retold.whole(events[-1])
            return
        begun = self._retold.begun
        data = b"".join(map(self._retold.event, events))
        if data and not begun:
            self._answer.relay_begin(200, EVENTS)
        if data:
            self._answer.relay(data)

    def end(self, counts: TokenCounts) -> None:
        if self._whole is not None:
            self._answer.relay_whole(200, JSON, self._whole, counts)
        else:
            self._answer.relay(DONE)
            self._answer.relay_end(counts)

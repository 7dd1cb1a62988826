"""One meter of several hearers: the tally always, records of use and spans where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from potluck.core.state.events import FailureKind
from potluck.gateway.admin.counters import Counters
from potluck.gateway.admin.spans import Spans
from potluck.gateway.interfaces import ChoiceRequest, RequestOutcome


class FullMeter(Counters):
    """A tally that passes on what others want to hear as well."""

    def __init__(
        self,
        told: Callable[[RequestOutcome], None] | None = None,
        spans: Spans | None = None,
        region_of: Callable[[str], str] = lambda replica: "",
        *,
        record: Callable[[RequestOutcome], None] | None = None,
    ) -> None:
        """`record` writes down what this process answered; `told` hears of other processes' answers as well."""
        super().__init__(region_of)
        self._told, self._spans, self._record = told, spans, record
        self.usage_notes: dict[object, tuple[str, int]] = {}
        """What other processes say of their records: what is wrong, and how many were lost."""

    def answered(self, told: RequestOutcome) -> None:
        if self._record is not None:
            self._record(told)
        super().answered(told)
        if self._told is not None:
            self._told(told)

    def segment(
        self,
        asked: ChoiceRequest,
        replica: str,
        began_s: float,
        ended_s: float,
        tokens: int,
        problem: str = "",
    ) -> None:
        super().segment(asked, replica, began_s, ended_s, tokens, problem)
        if self._spans is not None:
            self._spans.segment(asked, replica, began_s, ended_s, tokens, problem)

    def failed(self, asked: ChoiceRequest, where: str, kind: FailureKind, why: str) -> None:
        super().failed(asked, where, kind, why)
        if self._spans is not None:
            self._spans.failed(asked, where, kind, why)

    # What other processes counted by themselves.

    def used(self, told: RequestOutcome) -> None:
        if self._told is not None:
            self._told(told)

    def span(self, name: str, asked: ChoiceRequest, what: Sequence[Any]) -> None:
        if self._spans is not None and name == "segment":
            self._spans.segment(asked, *what)
        elif self._spans is not None and name == "failed":
            self._spans.failed(asked, *what)

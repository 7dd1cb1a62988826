"""Meters for those who need none."""

from __future__ import annotations

from collections.abc import Callable

from potluck.core.state.actions import Run
from potluck.core.state.events import FailureKind
from potluck.gateway.interfaces import ChoiceRequest, RequestOutcome


def _nobody(gap_s: float) -> None: ...


class SilentMeter:
    """Hears everything and keeps nothing."""

    def came(self, model: str, tenant: str) -> None: ...

    def answered(self, told: RequestOutcome) -> None: ...

    def turned_away(self, status: int, code: str) -> None: ...

    def replayed(self) -> None: ...

    def gaps(self, model: str) -> Callable[[float], None]:
        return _nobody

    def routed(self, asked: ChoiceRequest, run: Run) -> None: ...

    def hedged(self, asked: ChoiceRequest, run: Run) -> None: ...

    def segment(
        self,
        asked: ChoiceRequest,
        replica: str,
        began_s: float,
        ended_s: float,
        tokens: int,
        problem: str = "",
    ) -> None: ...

    def failed(self, asked: ChoiceRequest, where: str, kind: FailureKind, why: str) -> None: ...

    def moved(self, source: str, target: str, codec: str, moved_bytes: int, took_s: float) -> None: ...

    def decided(self, what: str, why: str) -> None: ...

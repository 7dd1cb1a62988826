"""The books of a run: one row per request in plain arrays, and what the nodes cost over time."""

from __future__ import annotations

from array import array
from dataclasses import fields
from math import nan
from typing import Any

import numpy as np

from potluck.sim.load.workload import Workload
from potluck.sim.results.records import RequestRecords


class RequestLedger:
    """Columns that the world writes by request number; `records` makes the finished table of them."""

    def __init__(self, count: int) -> None:
        self.first_token_s = array("d", [nan]) * count
        self.finish_s = array("d", [nan]) * count
        self.wire_bytes = array("d", [0.0]) * count
        self.streamed_tokens = array("i", [0]) * count
        self.cached_tokens = array("i", [0]) * count
        self.prefill_replica = array("i", [-1]) * count
        self.decode_replica = array("i", [-1]) * count
        self.attempts = array("h", [0]) * count
        self.preemptions = array("h", [0]) * count
        self.outcome = array("b", [0]) * count
        self.reason = array("b", [0]) * count
        self.route = array("b", [0]) * count

    def records(self, workload: Workload) -> RequestRecords:
        """The table; its columns share the ledger's memory."""
        names = ("models", "arrival_s", "model", "prompt_tokens", "output_tokens", "labels")
        columns: dict[str, Any] = {name: getattr(workload, name) for name in names}
        own = [field.name for field in fields(RequestRecords) if field.name not in columns]
        return RequestRecords(**columns, **{name: _column(getattr(self, name)) for name in own})


def _column(column: array[Any]) -> Any:
    return np.frombuffer(column, column.typecode) if len(column) else np.zeros(0, column.typecode)


class CostMeter:
    """What the machines cost: a rate in USD an hour that changes when one comes, goes or changes its price."""

    def __init__(self) -> None:
        self._prices: dict[tuple[str, str], float] = {}
        self._count: dict[tuple[str, str], int] = {}
        self._starting: dict[tuple[str, str], int] = {}
        self.rates: list[tuple[float, float]] = []
        self.start_rates: list[tuple[float, float]] = []
        """Of the same, what is paid for machines that have not served yet."""

    def rent(self, at_s: float, region: str, node: str, price_usd_per_h: float) -> None:
        """A node more; the price counts unless a change was told before."""
        key = (region, node)
        self._prices.setdefault(key, price_usd_per_h)
        self._count[key] = self._count.get(key, 0) + 1
        self._starting[key] = self._starting.get(key, 0) + 1
        self._note(at_s)

    def up(self, at_s: float, region: str, node: str) -> None:
        self._starting[region, node] -= 1
        self._note(at_s)

    def give_back(self, at_s: float, region: str, node: str, served: bool) -> None:
        self._count[region, node] -= 1
        if not served:
            self._starting[region, node] -= 1
        self._note(at_s)

    def reprice(self, at_s: float, region: str, node: str, price_usd_per_h: float) -> None:
        self._prices[region, node] = price_usd_per_h
        self._note(at_s)

    def _note(self, at_s: float) -> None:
        for rates, counts in ((self.rates, self._count), (self.start_rates, self._starting)):
            rate = 0.0
            for key, count in counts.items():
                if count:
                    rate += count * self._prices[key]
            if rates and rates[-1][0] == at_s:
                rates[-1] = (at_s, rate)
            elif not rates or rates[-1][1] != rate:
                rates.append((at_s, rate))

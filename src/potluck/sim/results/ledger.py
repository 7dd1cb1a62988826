"""The ledger of a run: one row per request in plain arrays, and the cost of nodes over time."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import nan
from typing import Any

import numpy as np

from potluck.core.values.fleet_cost import heads_usd_per_h, offers_in, rent_usd_per_h, storage_usd_per_h
from potluck.core.values.types import NodeOffer, Region
from potluck.sim.load.workload import Workload
from potluck.sim.results.records import RequestRecords


class RequestLedger:
    """Columns that the simulated world writes by request number."""

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
        """The table of requests; its columns share the ledger's memory."""
        names = ("models", "arrival_s", "model", "prompt_tokens", "output_tokens", "labels")
        columns: dict[str, Any] = {name: getattr(workload, name) for name in names}
        own = [field.name for field in fields(RequestRecords) if field.name not in columns]
        return RequestRecords(**columns, **{name: _column(getattr(self, name)) for name in own})


def _column(column: array[Any]) -> Any:
    return np.frombuffer(column, column.typecode) if len(column) else np.zeros(0, column.typecode)


class CostMeter:
    """The fleet's cost in USD/h over time; it changes with machines, replicas and prices.

    Reserved nodes, head nodes and weights in storage count as in a plan (`core.values.fleet_cost`).
    """

    def __init__(self, regions: Sequence[Region], weight_bytes: Mapping[str, float]) -> None:
        self._regions = {region.name: region for region in regions}
        self._weight_bytes = weight_bytes
        self._offers = offers_in(regions)
        self._machines: dict[tuple[str, str], int] = {}
        self._starting: dict[tuple[str, str], int] = {}
        self._replicas: dict[tuple[str, str], int] = {}
        """(region, model) to the number of replicas, whose weights are in the region's storage."""
        self.rates: list[tuple[float, float]] = []
        self.start_rates: list[tuple[float, float]] = []
        """The part of the cost for machines that have not served yet."""

    def rent(self, at_s: float, region: str, node: str) -> None:
        """A machine is rented."""
        key = (region, node)
        self._machines[key] = self._machines.get(key, 0) + 1
        self._starting[key] = self._starting.get(key, 0) + 1
        self._note(at_s)

    def up(self, at_s: float, region: str, node: str) -> None:
        self._starting[region, node] -= 1
        self._note(at_s)

    def give_back(self, at_s: float, region: str, node: str, served: bool) -> None:
        self._machines[region, node] -= 1
        if not served:
            self._starting[region, node] -= 1
        self._note(at_s)

    def store(self, at_s: float, region: str, model: str, replicas: int) -> None:
        """Change a model's number of replicas in a region: its weights are in storage while there is one."""
        key = (region, model)
        self._replicas[key] = self._replicas.get(key, 0) + replicas
        self._note(at_s)

    def reprice(self, at_s: float, region: str, node: str, price_usd_per_h: float) -> None:
        offer = self._offers.get((region, node)) or NodeOffer(node, price_usd_per_h, 0)
        self._offers[region, node] = replace(offer, price_usd_per_h=price_usd_per_h)
        self._note(at_s)

    def _note(self, at_s: float) -> None:
        rent = rent_usd_per_h(self._offers, self._machines)
        # Reserved nodes are assigned to machines that have served first.
        served = {key: count - self._starting.get(key, 0) for key, count in self._machines.items()}
        used = {region for (region, _), count in self._machines.items() if count}
        fixed = heads_usd_per_h(self._regions.values(), used)
        for (region, model), count in self._replicas.items():
            if count and region in self._regions:
                fixed += storage_usd_per_h(self._regions[region], self._weight_bytes.get(model, 0.0))
        starting = max(0.0, rent - rent_usd_per_h(self._offers, served))
        for rates, rate in ((self.rates, rent + fixed), (self.start_rates, starting)):
            if rates and rates[-1][0] == at_s:
                rates[-1] = (at_s, rate)
            elif not rates or rates[-1][1] != rate:
                rates.append((at_s, rate))

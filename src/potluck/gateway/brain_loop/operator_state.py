"""What operators told a desk, kept for another one that takes its place: the plan, the roster, prices, cordons.

Files in a directory for nobody else's eyes, which ends with the gateway unless it was given one (`--state`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from potluck.core.codec import decode, encode
from potluck.core.values.plan import Plan
from potluck.core.values.types import Region
from potluck.gateway.registry.engine_list import EngineEntry, address_of

T = TypeVar("T")


class OperatorState:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def only_entries(self) -> None:
        """Forget all but the roster: whoever starts a gateway says the rest, and engines may run from before."""
        for name in ("plan", "market", "cordons"):
            (self._folder / name).unlink(missing_ok=True)

    def planned(self, plan: Plan, version: int, why: str) -> None:
        self._keep("plan", {"plan": encode(plan), "version": version, "why": why})

    def plan(self) -> tuple[Plan | None, int, str]:
        """With its number and its reason."""
        found = self._read("plan")
        if found is None:
            return None, 0, ""
        return decode(Plan, found["plan"], "plan"), found["version"], found["why"]

    def enlisted(self, entries: tuple[EngineEntry, ...]) -> None:
        names = [each.name for each in fields(EngineEntry) if each.name != "address"]
        self._keep("roster", [{name: getattr(entry, name) for name in names} for entry in entries])

    def entries(self) -> tuple[EngineEntry, ...] | None:
        found: list[dict[str, Any]] | None = self._read("roster")
        if found is None:
            return None
        return tuple(EngineEntry(address=address_of(each["url"], "roster"), **each) for each in found)

    def quoted(self, regions: tuple[Region, ...]) -> None:
        self._keep("market", [encode(each) for each in regions])

    def market(self) -> tuple[Region, ...] | None:
        return self._kept("market", tuple[Region, ...])

    def cordoned(self, marks: Iterable[str]) -> None:
        self._keep("cordons", list(marks))

    def cordons(self) -> list[str]:
        return self._kept("cordons", list[str]) or []

    def _keep(self, name: str, value: object) -> None:
        """Whole or not at all."""
        made = self._folder / f"{name}.new"
        made.write_text(json.dumps(value), "utf-8")
        os.replace(made, self._folder / name)

    def _kept(self, name: str, kind: type[T]) -> T | None:
        found = self._read(name)
        return None if found is None else decode(kind, found, name)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self._folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            return None

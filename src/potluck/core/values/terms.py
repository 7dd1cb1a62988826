"""Terms: what a fleet's owner asks of a model's plan beside its demand and objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from potluck.core.errors import InputError

FailureDomain = Literal["node", "zone", "region"]


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """Of one model. Each can be left out, and `asked` tells which are there."""

    survive: FailureDomain | None = None
    """What may be lost, any one of it, while `survive_share` of the demand is still served by the rest."""
    survive_share: float = 1.0
    max_spot_share: float | None = None
    """Without any spot node the rest of the demand must still be served."""
    regions: tuple[str, ...] | None = None
    """Where alone it may run; None: everywhere."""
    residency: tuple[str, ...] | None = None
    """Where alone its prompts, KV and answers may be; None: everywhere."""
    nodes: tuple[str, ...] | None = None
    """On which node types alone; None: on all."""
    max_gpu_kinds: int | None = None
    max_stages: int | None = None
    max_nodes: int | None = None
    """Nodes of one replica."""
    min_copies: int = 0
    max_copies: int | None = None
    priority: int = 0
    """Where not all demand fits, models of a higher one are served first."""

    def __post_init__(self) -> None:
        if not 0 < self.survive_share <= 1:
            raise InputError("redundancy: share", f"must be above 0 and at most 1, is {self.survive_share}")
        if self.max_spot_share is not None and not 0 <= self.max_spot_share <= 1:
            raise InputError("max_spot_share", f"must be between 0 and 1, is {self.max_spot_share}")
        if self.max_copies is not None and self.max_copies < self.min_copies:
            raise InputError("max_copies", f"must not be below min_copies, {self.min_copies}")

    @property
    def asked(self) -> dict[str, str]:
        """Name of each term that is there, to what it asks in words."""
        words = {
            "redundancy": f"{self.survive_share:.0%} served without any one {self.survive}"
            if self.survive
            else "",
            "max_spot_share": f"{1 - (self.max_spot_share or 0):.0%} served without spot nodes"
            if self.max_spot_share is not None
            else "",
            "regions": _only("in", self.regions),
            "residency": _only("data in", self.residency),
            "nodes": _only("on", self.nodes),
            "max_gpu_kinds": _most(self.max_gpu_kinds, "kinds of GPU"),
            "max_stages": _most(self.max_stages, "stages"),
            "max_nodes": _most(self.max_nodes, "nodes a replica"),
            "min_copies": f"at least {self.min_copies} copies" if self.min_copies else "",
            "max_copies": _most(self.max_copies, "copies"),
        }
        return {name: text for name, text in words.items() if text}

    def without(self, name: str) -> ModelTerms:
        """The terms less one of `asked`."""
        if name == "redundancy":
            return replace(self, survive=None)
        if name == "min_copies":
            return replace(self, min_copies=0)
        return replace(self, **{name: None})  # type: ignore[arg-type]

    def allows(self, region: str) -> bool:
        """Whether it may run there."""
        return all(only is None or region in only for only in (self.regions, self.residency))


NO_TERMS = ModelTerms()


def _only(where: str, names: tuple[str, ...] | None) -> str:
    if names is None:
        return ""
    return f"{where} {', '.join(names[:4])}{', ...' if len(names) > 4 else ''} only"


def _most(count: int | None, what: str) -> str:
    return "" if count is None else f"at most {count} {what}"

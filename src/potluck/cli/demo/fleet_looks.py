"""The fleet as the demo sees it: what the gateway says at one moment, and what it decided since another."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from potluck.control.gateway_client import GatewayClient

MOVED_KV = "potluck_kv_bytes_total"
RETRIED = "potluck_retries_total"


@dataclass(frozen=True, slots=True)
class ReplicaLook:
    """A replica."""

    name: str
    role: str
    state: str
    region: str
    template: str
    url: str
    open_requests: int


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """A line of the log of decisions."""

    number: int
    kind: str
    what: str
    why: str

    @property
    def line(self) -> str:
        return f"{self.what} ({self.why})" if self.why else self.what


@dataclass(frozen=True, slots=True)
class FleetLook:
    """One moment."""

    at_s: float
    replicas: tuple[ReplicaLook, ...]
    usd_per_h: float
    threshold_tokens: float
    """From which length on prompts may cross; 0 where none do."""
    crossed_bytes: float
    """KV that came from another region so far."""
    moved: int
    """Attempts beyond requests' first so far."""
    last: int
    """Number of the latest decision."""

    def ready(self, role: str = "", region: str = "") -> tuple[ReplicaLook, ...]:
        return tuple(
            each
            for each in self.replicas
            if each.state == "ready" and role in ("", each.role) and region in ("", each.region)
        )

    @property
    def calm(self) -> bool:
        """Nothing is about to come."""
        return not any(each.state == "starting" for each in self.replicas)

    def count_on(self, node: str, region: str) -> int:
        """Replicas that stay."""
        stay = [each for each in self.replicas if each.state in ("starting", "ready")]
        return sum(node in each.template and each.region == region for each in stay)


def look_at(client: GatewayClient, far: str, link: str, last: int) -> FleetLook:
    """`far` is where KV comes from that crosses the `link`; `last` the latest decision that is known."""
    said = client.snapshot()
    metrics = client.metrics().splitlines()
    return FleetLook(
        time.time(),
        tuple(_standing(each) for each in said["replicas"]),
        sum(each["usd_per_h"] for each in said["models"].values()),
        max((each["tokens"] for each in said["thresholds"] if each["link"] == link), default=0.0),
        _total(metrics, MOVED_KV, f'source="[^"]*@{far}#'),
        round(_total(metrics, RETRIED, "")),
        last,
    )


def _total(lines: Sequence[str], name: str, label: str) -> float:
    """Of a counter, of its lines those that have such a label. To read all of them takes longer than all else."""
    mine = re.compile(rf"{name}{{.*{label}")
    return sum(float(line.rpartition(" ")[2]) for line in lines if mine.match(line))


def decided_since(client: GatewayClient, number: int) -> tuple[LoggedDecision, ...]:
    found: Sequence[dict[str, Any]] = client.decisions(number)["decisions"]
    return tuple(LoggedDecision(each["number"], each["kind"], each["what"], each["why"]) for each in found)


def _standing(each: dict[str, Any]) -> ReplicaLook:
    return ReplicaLook(
        each["replica"],
        each["role"],
        each["state"],
        each["region"],
        each["template"],
        each["url"] or "",
        each["open_requests"],
    )

"""Results of a run: one row per request in columns, and records of replicas, links and costs.

Columns are numpy arrays of one length, in order of arrival, about 70 bytes a request. Times are absolute:
TTFT = first_token_s - arrival_s; TPOT = (finish_s - first_token_s) / (streamed_tokens - 1).

    model             place in `RequestRecords.models`
    output_tokens     asked for; `streamed_tokens` reached the user, as many when answered
    first_token_s     nan when none was made
    finish_s          of the last token, the refusal or the cancellation
    outcome           ANSWERED, REFUSED, CANCELLED (0: still open, only in a run cut short)
    reason            place in REASONS: why it was refused; 0 otherwise
    attempts          times it was sent, retries included; 0 when it never was
    preemptions       times a replica preempted it for lack of memory
    route             AGGREGATED, HANDED_OVER (all of the prompt elsewhere), SPLIT; of the last attempt
    prefill_replica   place in `SimResult.replicas` of the first segment's replica, -1: none; decode_replica: last
    cached_tokens     prompt tokens found in prefix caches, last attempt
    wire_bytes        KV bytes sent for it, all attempts
    tenant            place in `RequestRecords.labels.tenants`, request_class in its `classes`; only with labels"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from potluck.core.state.actions import RefusalReason
from potluck.core.values.service import RequestClass
from potluck.core.values.types import Slo
from potluck.sim.load.workload import RequestLabels

OPEN: Final = 0
ANSWERED: Final = 1
REFUSED: Final = 2
CANCELLED: Final = 3
OUTCOMES = ("open", "answered", "refused", "cancelled")
AGGREGATED: Final = 0
HANDED_OVER: Final = 1
SPLIT: Final = 2
ROUTES = ("aggregated", "handed over", "split")
REASONS: tuple[str, ...] = ("", *get_args(RefusalReason))

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class RequestRecords:
    """One row per request; the module's text explains the columns."""

    models: tuple[str, ...]
    arrival_s: Floats
    model: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    streamed_tokens: Ints
    first_token_s: Floats
    finish_s: Floats
    outcome: Ints
    reason: Ints
    attempts: Ints
    preemptions: Ints
    route: Ints
    prefill_replica: Ints
    decode_replica: Ints
    cached_tokens: Ints
    wire_bytes: Floats
    labels: RequestLabels | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    def columns(self) -> dict[str, NDArray[np.generic]]:
        names = [item.name for item in fields(self) if item.name not in ("models", "labels")]
        result = {name: getattr(self, name) for name in names}
        if self.labels is not None:
            result |= {"tenant": self.labels.tenant, "request_class": self.labels.request_class}
        return result


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica of a run."""

    id: str
    unit: str
    template: str
    model: str
    region: str
    role: str
    """As planned; `changes` has flips."""
    nodes: tuple[str, ...]
    """Node types that it stands on, one entry per node."""
    gpus: int
    changes: tuple[tuple[float, str, str], ...]
    """(time, state, role) from each time on; states: starting, ready, draining, leaving, stopped, lost."""
    busy_s: float
    prefill_tokens: int
    """Prompt tokens computed, including recomputation after preemptions."""
    decode_tokens: int
    gaps: tuple[tuple[float, float], ...] = ()
    """Histogram of the gaps between two output tokens: (upper edge in s, count); the source of TBT."""

    @property
    def ready_s(self) -> float | None:
        return next((at_s for at_s, state, _ in self.changes if state == "ready"), None)

    @property
    def only_starting(self) -> bool:
        """Whether it was still starting when the run ended."""
        return all(state == "starting" for _, state, _ in self.changes)

    def ended_s(self, end_s: float) -> float:
        """When it stopped or was lost; the end of the run when it did not."""
        last_s, state, _ = self.changes[-1]
        return last_s if state in ("stopped", "lost") else end_s


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A directed link between regions, or a network card (`source` and `target` are then the card's name)."""

    source: str
    target: str
    kind: str
    gbps: float
    sent_bytes: float
    busy_s: float
    """Seconds with at least one transfer under way."""
    egress_usd_per_gb: float = 0.0

    @property
    def egress_usd(self) -> float:
        return self.sent_bytes / 1e9 * self.egress_usd_per_gb


@dataclass(frozen=True, slots=True)
class StateSamples:
    """The state at equidistant times, for plots. Rows are times, columns replicas (or links)."""

    at_s: Floats
    queued: Ints
    running: Ints
    used_share: Floats
    """Of KV blocks."""
    busy_s: Floats
    """Seconds in steps, from the beginning of the run to that time."""
    link_bytes: Floats
    """Bytes sent over each link of `SimResult.links`, from the beginning of the run to that time."""


@dataclass(frozen=True, slots=True)
class FaultRecord:
    at_s: float
    what: str


@dataclass(frozen=True, slots=True)
class SimResult:
    records: RequestRecords
    slos: dict[str, Slo]
    replicas: tuple[ReplicaRecord, ...]
    links: tuple[LinkRecord, ...]
    end_s: float
    """When the last request ended, or the last arrival came, whichever is later."""
    cost_rates: tuple[tuple[float, float], ...]
    """(time, USD an hour from then on): nodes are paid from their start until they are given back, without egress."""
    samples: StateSamples | None = None
    faults: tuple[FaultRecord, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    classes: dict[str, RequestClass] = field(default_factory=dict)
    """What requests of each class were promised, by its name."""
    start_rates: tuple[tuple[float, float], ...] = ()
    """Of `cost_rates`, what is paid for nodes that have not served yet."""

    @property
    def cost_usd(self) -> float:
        return cost_between(self.cost_rates, 0.0, self.end_s) + self.egress_usd

    @property
    def egress_usd(self) -> float:
        return sum(link.egress_usd for link in self.links)


def cost_between(rates: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """USD paid in a time, of rates in USD an hour that hold from their time on."""
    total = 0.0
    for place, (from_s, usd_per_h) in enumerate(rates):
        to_s = rates[place + 1][0] if place + 1 < len(rates) else end_s
        total += max(0.0, min(to_s, end_s) - max(from_s, start_s)) * usd_per_h / 3600.0
    return total


def as_users_see(
    records: RequestRecords,
    replicas: Sequence[ReplicaRecord],
    rtt_s: Mapping[tuple[str, str], float],
    added_s: Sequence[float],
) -> RequestRecords:
    """The records with first and last tokens when they reach whoever asked.

    The world counts from a request's arrival at a region, and an engine's steps alone. The server of the first
    segment takes `added_s` (of each replica) besides, before the first token. Where origins are told, a user sends a
    request half a round trip before, to the region of that replica, and has tokens half a round trip after they are
    made, from the region of the last one's. So the first token and the last come later by all of that; TPOT does not.
    """
    later_s = np.array([*added_s, 0.0])[records.prefill_replica]  # the last: no replica
    if records.labels is not None and rtt_s and records.labels.origins != ("",):
        later_s = later_s + _far_s(records, records.labels, replicas, rtt_s)
    seen = np.isfinite(records.first_token_s)
    return replace(
        records,
        first_token_s=records.first_token_s + later_s,
        finish_s=np.where(seen, records.finish_s + later_s, records.finish_s),
    )


def _far_s(
    records: RequestRecords,
    labels: RequestLabels,
    replicas: Sequence[ReplicaRecord],
    rtt_s: Mapping[tuple[str, str], float],
) -> Floats:
    regions = sorted({replica.region for replica in replicas})
    table = np.zeros((len(labels.origins), len(regions) + 1))  # the last column: no replica
    for o, origin in enumerate(labels.origins):
        for r, region in enumerate(regions):
            table[o, r] = rtt_s.get((origin, region), 0.0)
    place = np.array([regions.index(replica.region) for replica in replicas] + [len(regions)], dtype=np.int64)
    origins = labels.from_origin
    first, last = place[records.prefill_replica], place[records.decode_replica]
    far_s: Floats = (table[origins, first] + table[origins, last]) / 2
    return far_s

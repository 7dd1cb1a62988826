"""The network inside a region: what a copy's network cards may carry, and how long KV takes over a busy one.

    t   seconds that one request's KV keeps a card busy: its bits in the codec over the card's payload rate
    u   share of its time that a card is busy
    S   seconds of the prefill behind the KV; w S of a prompt's time is waited for and computed (`rates`)

Transfers share a card evenly, so one takes t / (1 - u) on average (a queue with processor sharing, whatever the
sizes). Layers leave as they are computed, so only what is longer than the prefill shows:

    TTFT = (w - 1) S + max(S, t / (1 - u))

which is CAUCHY's equation 17 where t / (1 - u) <= S: the network hides behind the prefill. A prefill template has
w S within 0.9 of the objective T, so whichever prefills, KV that takes t / (1 - u) <= T (1 - 0.9 (w - 1) / w) is in
time, and a card may be busy for

    u = min(h, 1 - t / (T (1 - 0.9 (w - 1) / w)))           h: the share of time anything is planned to be busy

at most. A bucket whose KV would need a card to be nearly idle does not pass it at all. Between replicas on one
machine no card is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from potluck.core.values.layout import Layout
from potluck.core.values.plan import PlannedReplica, PlannedShare, Template
from potluck.core.values.types import Codec, Link, NodeType
from potluck.perf.step_timer import Floats
from potluck.perf.transfer import alpha_beta, crossing_bytes, link_alpha_beta
from potluck.plan.problem import BucketDemand, ModelDemand
from potluck.plan.timing.replica_rates import HANDOVER_SHARE, UNPROMISED_TTFT_S, wait_factor

MOST_BUSY = 0.99
LEAST_BUSY = 0.1
"""Where KV is in time only over a card that does nothing else nine tenths of its time, it does not pass."""


@dataclass(frozen=True, slots=True)
class NetworkCards:
    one_bits_per_s: float  # What the KV of one request can have at most.
    all_bits_per_s: float


def wire_bits(demand: ModelDemand, codec: Codec) -> Floats:
    """Bits that a mean prompt's KV puts on the wire, bucket by bucket."""
    return np.array([crossing_bytes(demand.model, bucket.kv_bytes, codec) for bucket in demand.buckets]) * 8


def cards_of(replicas: Iterable[PlannedReplica], nodes: Mapping[str, NodeType]) -> NetworkCards:
    """The cards of replicas with their own nodes; small ones share a node as they fill it."""
    one, total = float("inf"), 0.0
    shared: dict[str, int] = {}
    for replica in replicas:
        alone, together = _layout_bits_per_s(replica.layout, nodes)
        one = min(one, alone)
        members = [node for stage in replica.layout.stages for node in stage.nodes]
        if len(members) == 1:
            shared[members[0].node] = shared.get(members[0].node, 0) + members[0].tp
        else:
            total += together
    for node, gpus in shared.items():
        total += ceil(gpus / nodes[node].gpus) * card_bits_per_s(nodes[node])
    return NetworkCards(one, total)


def _layout_bits_per_s(layout: Layout, nodes: Mapping[str, NodeType]) -> tuple[float, float]:
    """(one request's KV, all requests') of a replica: each stage sends its own layers, a request's over one node."""
    one = total = float("inf")
    for stage in layout.stages:
        gpus: dict[str, int] = {}
        for stage_node in stage.nodes:  # groups of one node share its card
            gpus[stage_node.node] = gpus.get(stage_node.node, 0) + stage_node.tp
        cards = {name: card_bits_per_s(nodes[name]) for name in gpus}
        together = sum(ceil(count / nodes[name].gpus) * cards[name] for name, count in gpus.items())
        share = layout.layer_count / stage.layers
        one, total = min(one, share * min(cards.values())), min(total, share * together)
    return one, total


def card_bits_per_s(node: NodeType) -> float:
    return alpha_beta(node.network_gbps, window_bytes=None).beta_bytes_per_s * 8


def link_bits_per_s(link: Link, headroom: float) -> float:
    """What a link between regions is planned to carry: its payload, for as much of the time as anything is busy."""
    return link_alpha_beta(link).beta_bytes_per_s * 8 * min(headroom, MOST_BUSY)


def room_s(model_demand: ModelDemand, demand: BucketDemand, headroom: float) -> float:
    """How long KV may take, from the beginning of its prefill, after the slowest prefill that is planned with."""
    wait = wait_factor(headroom)
    limit_s = model_demand.slo.ttft_s if demand.promised else UNPROMISED_TTFT_S
    return limit_s * (1.0 - (1.0 - HANDOVER_SHARE) * (wait - 1.0) / wait)


def busy_limit(alone_s: float, within_s: float, headroom: float) -> float:
    """u: how busy a card may be so that KV that takes `alone_s` over an idle one is there in time; 0: never is."""
    if within_s <= 0:
        return 0.0
    busy = min(headroom, MOST_BUSY, 1.0 - alone_s / within_s)
    return busy if busy >= min(LEAST_BUSY, headroom) else 0.0


def busy_limits(
    demand: ModelDemand, bits: Floats, cards: NetworkCards, headroom: float
) -> tuple[float, tuple[bool, ...]]:
    """(how busy these cards may be, which buckets may pass them): busy as the tightest bucket that is asked for."""
    values = [
        busy_limit(bit / cards.one_bits_per_s, room_s(demand, bucket, headroom), headroom)
        for bit, bucket in zip(bits, demand.buckets, strict=True)
    ]
    asked = [u for u, bucket in zip(values, demand.buckets, strict=True) if u > 0 and bucket.rate_per_s > 0]
    return min(asked, default=min(headroom, MOST_BUSY)), tuple(u > 0 for u in values)


def sojourn_s(alone_s: float, busy: float) -> float:
    """Seconds that KV takes over a card that is busy for so much of its time."""
    return alone_s / (1.0 - min(busy, MOST_BUSY))


def sides(replicas: Sequence[PlannedReplica]) -> tuple[list[PlannedReplica], list[PlannedReplica]]:
    """Those that prefill for others, and those that take it over."""
    senders = [replica for replica in replicas if replica.role == "prefill"]
    return senders, [replica for replica in replicas if replica.role != "prefill"]


def late_s(
    demand: ModelDemand,
    bits: Floats,
    nodes: Mapping[str, NodeType],
    templates: Mapping[str, Template],
    copies: Mapping[tuple[str, str], int],
    shares: Iterable[PlannedShare],
) -> float:
    """By how much KV comes after its prefill on average, with cards as busy as these shares make them.

    `copies` has how many of a template there are in a region. A prompt's KV takes as long as over the busier of both
    sides' cards; what of that is longer than its prefill is late.
    """
    mine = [share for share in shares if share.phase != "closed" and share.rate_per_s > 0]
    load: dict[tuple[str, str, str], float] = {}
    for share in mine:
        key = (share.template, share.region, share.phase)
        load[key] = load.get(key, 0.0) + share.rate_per_s * float(bits[share.bucket])
    times: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for share in mine:
        cards = cards_of(templates[share.template].replicas, nodes)
        count = copies[share.template, share.region]
        busy = load[share.template, share.region, share.phase] / (cards.all_bits_per_s * count)
        taken_s = sojourn_s(float(bits[share.bucket]) / cards.one_bits_per_s, busy)
        rate = templates[share.template].capacity[share.bucket].prefill_per_s
        service_s = len(templates[share.template].replicas) / rate if rate > 0 else 0.0
        times.setdefault((share.phase, share.bucket), []).append((share.rate_per_s, taken_s, service_s))
    total = late = 0.0
    for bucket in demand.buckets:
        into = times.get(("decode", bucket.bucket), [])
        there = sum(rate for rate, _, _ in into)
        decode_s = sum(rate * taken_s for rate, taken_s, _ in into) / there if there > 0 else 0.0
        for rate, taken_s, service_s in times.get(("prefill", bucket.bucket), []):
            total += rate
            late += rate * max(0.0, max(taken_s, decode_s) - service_s)
    return late / total if total > 0 else 0.0

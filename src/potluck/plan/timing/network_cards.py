"""Network cards inside a region: their allowed load, and KV transfer times over a loaded card.

    t   seconds that one request's KV occupies a card: its bits in the codec over the card's payload rate
    u   utilization of a card
    S   prefill time; a prompt takes w S with queueing (`replica_rates`)

Transfers share a card evenly, so one takes t / (1 - u) on average (processor sharing, for any sizes). Layers are sent
as they are computed, so only the time beyond the prefill counts:

    TTFT = (w - 1) S + max(S, t / (1 - u))

which is CAUCHY's equation 17 where t / (1 - u) <= S: the transfer is hidden by the prefill. A prefill template has
w S within 0.9 of the objective T, so KV with t / (1 - u) <= T (1 - 0.9 (w - 1) / w) is in time after any prefill, and
the utilization of a card is at most

    u = min(h, 1 - t / (T (1 - 0.9 (w - 1) / w)))           h: headroom

A bucket whose KV would need a nearly idle card is not sent over it. Replicas on one machine use no card.
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

MAX_UTILIZATION = 0.99
MIN_UTILIZATION_LIMIT = 0.1
"""A bucket whose KV needs a card with less utilization than this is not sent over the card."""


@dataclass(frozen=True, slots=True)
class NetworkCards:
    """Bandwidth of the network cards of some replicas, for one request's KV and in total."""

    one_bits_per_s: float
    all_bits_per_s: float


def wire_bits(demand: ModelDemand, codec: Codec) -> Floats:
    """Bits on the network for a mean prompt's KV, by bucket."""
    return np.array([crossing_bytes(demand.model, bucket.kv_bytes, codec) for bucket in demand.buckets]) * 8


def cards_of(replicas: Iterable[PlannedReplica], nodes: Mapping[str, NodeType]) -> NetworkCards:
    """Network cards of replicas on separate nodes; replicas smaller than a node share one until it is full."""
    one, total = float("inf"), 0.0
    gpus_of_small_replicas: dict[str, int] = {}
    for replica in replicas:
        one_request, all_requests = _layout_bits_per_s(replica.layout, nodes)
        one = min(one, one_request)
        members = [node for stage in replica.layout.stages for node in stage.nodes]
        if len(members) == 1:
            gpus_of_small_replicas[members[0].node] = (
                gpus_of_small_replicas.get(members[0].node, 0) + members[0].tp
            )
        else:
            total += all_requests
    for node, gpus in gpus_of_small_replicas.items():
        total += ceil(gpus / nodes[node].gpus) * card_bits_per_s(nodes[node])
    return NetworkCards(one, total)


def _layout_bits_per_s(layout: Layout, nodes: Mapping[str, NodeType]) -> tuple[float, float]:
    """(bits/s for one request, for all requests) of a replica; each stage sends its layers over its own cards."""
    one = total = float("inf")
    for stage in layout.stages:
        gpus: dict[str, int] = {}
        for stage_node in stage.nodes:  # Groups on one node share its card.
            gpus[stage_node.node] = gpus.get(stage_node.node, 0) + stage_node.tp
        cards = {name: card_bits_per_s(nodes[name]) for name in gpus}
        together = sum(ceil(count / nodes[name].gpus) * cards[name] for name, count in gpus.items())
        share = layout.layer_count / stage.layers
        one, total = min(one, share * min(cards.values())), min(total, share * together)
    return one, total


def card_bits_per_s(node: NodeType) -> float:
    """Payload rate of a node's network card."""
    return alpha_beta(node.network_gbps, window_bytes=None).beta_bytes_per_s * 8


def link_bits_per_s(link: Link, headroom: float) -> float:
    """Bandwidth of a link between regions that a plan may use: its payload rate times the headroom."""
    return link_alpha_beta(link).beta_bytes_per_s * 8 * min(headroom, MAX_UTILIZATION)


def room_s(demand: ModelDemand, bucket: BucketDemand, headroom: float) -> float:
    """Largest KV transfer time, from the start of its prefill, that meets TTFT after the slowest planned prefill."""
    wait = wait_factor(headroom)
    limit_s = demand.slo.ttft_s if bucket.promised else UNPROMISED_TTFT_S
    return limit_s * (1.0 - (1.0 - HANDOVER_SHARE) * (wait - 1.0) / wait)


def busy_limit(alone_s: float, within_s: float, headroom: float) -> float:
    """Largest utilization u of a card at which KV taking `alone_s` on an idle card arrives in time; 0: never."""
    if within_s <= 0:
        return 0.0
    utilization = min(headroom, MAX_UTILIZATION, 1.0 - alone_s / within_s)
    return utilization if utilization >= min(MIN_UTILIZATION_LIMIT, headroom) else 0.0


def busy_limits(
    demand: ModelDemand, bits: Floats, cards: NetworkCards, headroom: float
) -> tuple[float, tuple[bool, ...]]:
    """(largest utilization of these cards, which buckets may use them), by the tightest bucket with demand."""
    limits = [
        busy_limit(bit / cards.one_bits_per_s, room_s(demand, bucket, headroom), headroom)
        for bit, bucket in zip(bits, demand.buckets, strict=True)
    ]
    active_limits = [
        limit
        for limit, bucket in zip(limits, demand.buckets, strict=True)
        if limit > 0 and bucket.rate_per_s > 0
    ]
    return min(active_limits, default=min(headroom, MAX_UTILIZATION)), tuple(limit > 0 for limit in limits)


def sojourn_s(alone_s: float, busy: float) -> float:
    """Transfer time over a card at this utilization."""
    return alone_s / (1.0 - min(busy, MAX_UTILIZATION))


def prefill_and_other_replicas(
    replicas: Sequence[PlannedReplica],
) -> tuple[list[PlannedReplica], list[PlannedReplica]]:
    """(prefill replicas, all other replicas)."""
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
    """Mean delay of KV after its prefill, with network cards at the load of these shares.

    `copies` has the number of copies by template and region. A prompt's KV takes as long as over the slower of both
    sides' cards; the part beyond its prefill is the delay.
    """
    active_shares = [share for share in shares if share.phase != "closed" and share.rate_per_s > 0]
    bits_per_s: dict[tuple[str, str, str], float] = {}
    for share in active_shares:
        key = (share.template, share.region, share.phase)
        bits_per_s[key] = bits_per_s.get(key, 0.0) + share.rate_per_s * float(bits[share.bucket])
    transfer_times: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for share in active_shares:
        cards = cards_of(templates[share.template].replicas, nodes)
        count = copies[share.template, share.region]
        utilization = bits_per_s[share.template, share.region, share.phase] / (cards.all_bits_per_s * count)
        taken_s = sojourn_s(float(bits[share.bucket]) / cards.one_bits_per_s, utilization)
        rate = templates[share.template].capacity[share.bucket].prefill_per_s
        service_s = len(templates[share.template].replicas) / rate if rate > 0 else 0.0
        transfer_times.setdefault((share.phase, share.bucket), []).append(
            (share.rate_per_s, taken_s, service_s)
        )
    total_rate = total_delay = 0.0
    for bucket in demand.buckets:
        decode_times = transfer_times.get(("decode", bucket.bucket), [])
        decode_rate = sum(rate for rate, _, _ in decode_times)
        decode_s = (
            sum(rate * taken_s for rate, taken_s, _ in decode_times) / decode_rate if decode_rate > 0 else 0.0
        )
        for rate, taken_s, service_s in transfer_times.get(("prefill", bucket.bucket), []):
            total_rate += rate
            total_delay += rate * max(0.0, max(taken_s, decode_s) - service_s)
    return total_delay / total_rate if total_rate > 0 else 0.0

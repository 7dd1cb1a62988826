"""A model's templates as arrays of the program: what each does in every bucket, and which KV may cross to where."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from potluck.core.values.plan import Template
from potluck.core.values.types import Codec, Link
from potluck.perf.delays.transfer import link_alpha_beta
from potluck.plan.allocate.program import DemandBucket, Floats, ModelColumns, NodeSupply
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.timing.network_cards import busy_limits, cards_of, wire_bits
from potluck.plan.timing.rate_cache import RateCache
from potluck.plan.timing.replica_rates import HANDOVER_SHARE, UNPROMISED_TTFT_S

MACHINE = "machine "
"""Before the name of a machine among a fleet's node types."""


class _Row(NamedTuple):
    """What a template is to the program, whatever is asked and rented."""

    prefill_per_s: Floats
    decode_per_s: Floats
    closed_per_s: Floats
    cards_bits_per_s: float


def _row(problem: PlanningProblem, each: ModelDemand, template: Template, bits: Floats) -> _Row:
    table = np.zeros((3, len(each.demands)))
    for capacity in template.capacity:
        rates = capacity.prefill_per_s, capacity.decode_per_s, capacity.closed_per_s
        table[:, capacity.bucket] = rates
    if not table[:2].any():
        return _Row(table[0], table[1], table[2], float("inf"))  # what is handed over inside is in its rate
    cards = cards_of(template.replicas, problem.by_name)
    busy, passes = busy_limits(each, bits, cards, problem.headroom)
    table[:2] *= passes
    return _Row(table[0], table[1], table[2], busy * cards.all_bits_per_s)


def model_columns(
    problem: PlanningProblem,
    each: ModelDemand,
    group: Sequence[Template],
    fleet: NodeSupply,
    codec: Codec,
    book: RateCache,
) -> ModelColumns:
    places = {node: column for column, node in enumerate(fleet.nodes)}
    uses = np.zeros((len(group), len(fleet.nodes)), np.uint8)
    bits = wire_bits(each, codec)
    asked = tuple(
        demand.rate_per_s > 0 for demand in each.demands
    )  # the tightest bucket that is asked for counts
    rows = [
        book.once_of((codec, asked), template, partial(_row, problem, each, template, bits))
        for template in group
    ]
    for row, template in enumerate(group):
        for count in template.nodes:
            uses[row, places[count.node]] = count.count
        for machine in template.machines if template.kind == "group" else ():
            uses[row, places[f"{MACHINE}{machine}"]] = 1
    size = (len(group), len(each.demands))
    prefill, decode, closed = (np.array([row[place] for row in rows]).reshape(size) for place in range(3))
    cards = np.array([row.cards_bits_per_s for row in rows])
    buckets = tuple(
        DemandBucket(
            f"{each.name} up to {d.longest_tokens} tokens",
            d.rate_per_s,
            float(bits[d.bucket]),
            frozenset(
                (fleet.regions.index(link.source), fleet.regions.index(link.target))
                for link in problem.links
                if crossing_s(bits[d.bucket], link) > crossing_room_s(each, d)
            ),
            d.firm,
        )
        for d in each.demands
    )
    return ModelColumns(
        each.name,
        buckets,
        uses,
        prefill,
        decode,
        closed,
        sends_bits_per_s=cards,
        takes_bits_per_s=cards.copy(),
    )


def crossing_s(wire_bits: float, link: Link) -> float:
    """Seconds that a mean prompt's KV is behind its prefill on a link that it has to itself.

    Layers are sent as they are computed, so only the last layer's part and a round trip are left when the
    link keeps up; a link that does not is limited by its bandwidth row. Half of the KV is taken as left.
    """
    return float(link_alpha_beta(link).time_s(wire_bits / 16))


def crossing_room_s(each: ModelDemand, demand: BucketDemand) -> float:
    """The part of TTFT that templates leave free for handing KV over."""
    return (each.slo.ttft_s if demand.promised else UNPROMISED_TTFT_S) * HANDOVER_SHARE

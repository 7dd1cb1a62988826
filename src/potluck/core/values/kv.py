"""What KV weighs on the wire: the one place where its bytes go through a codec.

    bytes of tokens [a, b) = ratio (growing (b - a) + sum of window rates (b - max(a, b - w))) + state

The fixed state of linear attention is never quantised: its errors would stay for the rest of the request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from potluck.core.errors import InputError
from potluck.core.values.plan import KvWire, Plan
from potluck.core.values.types import Codec, Link

CODEC_BITS: dict[Codec, float] = {"fp16": 16.0, "int8": 8.0, "int4": 4.0}
KEY_GROUP, VALUE_GROUP, GROUP_BITS = 128, 64, 32
"""Numbers that share a least one and a step (docs/kv.md), and the bits of both. Latents are keys."""


def codec_ratio(codec: Codec, stored_bits: float = 16.0, *, latent: bool = False) -> float:
    """Wire bytes per byte of KV held at `stored_bits`: (bits + bits of groups) / stored_bits, at most 1."""
    if codec not in CODEC_BITS:
        raise InputError("codec", f"{codec!r} is not one of {', '.join(CODEC_BITS)}")
    if codec == "fp16":
        return 1.0
    groups = (KEY_GROUP,) if latent else (KEY_GROUP, VALUE_GROUP)
    side_bits = sum(GROUP_BITS / group for group in groups) / len(groups)
    return min(1.0, (CODEC_BITS[codec] + side_bits) / stored_bits)


Windows = Iterable[tuple[int, float]]
Span = tuple[float, float]


def wire_bytes(growing_bytes: float, windows: Windows, state_bytes: float, span: Span, ratio: float) -> float:
    """Bytes of the KV of a span of a request's tokens under a codec, with its state; nothing for no tokens."""
    start, stop = span
    if stop <= start:
        return 0.0
    size = growing_bytes * (stop - start)
    for window, rate in windows:
        size += rate * (stop - max(start, stop - window, 0))
    return size * ratio + state_bytes


WINDOW_BYTES = 4 * 2**20
"""Bytes one connection keeps under way: Linux's default limit of a send buffer (net.ipv4.tcp_wmem)."""
PIECE_BYTES = 1 << 23
LEAST_CONNECTIONS, MOST_CONNECTIONS = 2, 32
"""Two where one would do, so that a connection may be lost; so many as a sender lets one receiver have."""


def connections_for(gbps: float, rtt_s: float) -> int:
    """As many as keep a link full: their windows together hold what is under way in a round trip."""
    wanted = ceil(gbps * 1e9 / 8 * rtt_s / WINDOW_BYTES - 1e-9)
    return min(max(wanted, LEAST_CONNECTIONS), MOST_CONNECTIONS)


def wire_of(link: Link) -> KvWire:
    wanted = connections_for(link.gbps, link.rtt_s)
    return KvWire(link.source, link.target, wanted, WINDOW_BYTES, PIECE_BYTES)


LOSSLESS: Codec = "fp16"  # KV crosses as the model has it, whatever format that is.


@dataclass(frozen=True, slots=True)
class LossyHop:
    """KV of one model that crosses in fewer bits than it has."""

    model: str
    where: str
    """From region to region, within one, or the template whose replicas hand over to each other."""
    codec: Codec


def codecs_between(plan: Plan) -> dict[tuple[str, str, str], Codec]:
    """(model, from region, to region) to the codec of its KV, where the plan sends some."""
    return {(flow.model, flow.prefill_region, flow.decode_region): flow.codec for flow in plan.flows}


def lossy_crossings(plan: Plan) -> tuple[LossyHop, ...]:
    """All of them: between regions as its flows say, and within templates; of what scaling may start as well."""
    between = [((f.model, f.prefill_region, f.decode_region), f.codec) for f in plan.flows]
    lossy_hops = [
        LossyHop(model, f"within {here}" if here == there else f"{here} → {there}", codec)
        for (model, here, there), codec in between
        if codec != LOSSLESS
    ]
    lossy_hops += [
        LossyHop(template.model, f"within {template.name}", template.codec)
        for template in plan.repertoire
        if template.codec != LOSSLESS and template.hands_over
    ]
    return tuple(dict.fromkeys(lossy_hops))


def lossy_notices(plan: Plan) -> tuple[str, ...]:
    """A line for each; nothing where all KV crosses as it is."""
    return tuple(
        f"KV of {crossing.model} crosses {crossing.where} in {crossing.codec} (lossy: allowed by kv_codecs)"
        for crossing in lossy_crossings(plan)
    )

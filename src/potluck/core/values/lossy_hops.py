"""Where a plan lets KV lose something on its way from one replica to another, and how that is said to people."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.values.plan import Plan
from potluck.core.values.types import Codec

LOSSLESS: Codec = "fp16"
"""KV crosses as the model has it, whatever format that is."""


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
    found = [
        LossyHop(flow.model, _between(flow.prefill_region, flow.decode_region), flow.codec)
        for flow in plan.flows
        if flow.codec != LOSSLESS
    ]
    found += [
        LossyHop(each.model, f"within {each.name}", each.codec)
        for each in plan.repertoire
        if each.codec != LOSSLESS and each.hands_over
    ]
    return tuple(dict.fromkeys(found))


def _between(source: str, target: str) -> str:
    return f"within {source}" if source == target else f"{source} → {target}"


def lossy_notices(plan: Plan) -> tuple[str, ...]:
    """A line for each; nothing where all KV crosses as it is."""
    return tuple(
        f"KV of {each.model} crosses {each.where} in {each.codec} (lossy: allowed by kv_codecs)"
        for each in lossy_crossings(plan)
    )

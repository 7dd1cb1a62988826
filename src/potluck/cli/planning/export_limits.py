"""What the engines of a plan are told of lengths and memory: as the plan was made, from its spec."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.plan import Plan, Template
from potluck.core.values.types import LengthBin, Role

if TYPE_CHECKING:
    from potluck.export.placement import EngineLimits
    from potluck.spec.spec_values import ModelSpec, Spec


def limits_of(spec: Spec, plan: Plan) -> dict[tuple[str, int], EngineLimits]:
    """Template and replica to its engine's limits; CapacityError where its longest request does not fit there."""
    from potluck.cli.common.inputs import load_problem
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.export.placement import EngineLimits
    from potluck.perf.engine_limits import longest_request, longest_served, memory_share, stage_weight_bytes
    from potluck.runtime.replica_models import ReplicaModels

    spec = spec.in_formats(plan.formats)
    nodes = {node.name: node for node in spec.node_types}
    inputs = SimulationInputs(spec, load_problem(spec, 0.8, None, (), 0.0), plan)
    known = ReplicaModels(scene_of(inputs))
    known.learn(plan)
    used = {deployment.template for deployment in plan.deployments if deployment.count}
    result = {}
    for template in (template for template in plan.templates if template.name in used):
        served = spec.model(template.model)
        for index, replica in enumerate(template.replicas):
            layout = replica.layout
            fits = longest_request(served.model, layout, nodes)
            needed = longest_tokens(bins_of(plan, template, served), replica.role)
            wanted = longest_tokens(served.traffic.lengths, "mixed")
            what = f"template {template.name}: {template.model}"
            planned = known.replica_models[template.name, index]
            result[template.name, index] = EngineLimits(
                longest_served(needed, wanted, fits, what),
                memory_share(layout, nodes),
                planned.total_blocks * BLOCK_TOKENS,
                stage_weight_bytes(served.model, layout),
                planned.engine.token_budget,
            )
    return result


def bins_of(plan: Plan, template: Template, served: ModelSpec) -> tuple[LengthBin, ...]:
    """Lengths of the requests that a template is planned for; all of the model's where the plan does not say."""
    taken = {
        share.bucket for share in plan.shares if share.template == template.name and share.rate_per_s > 0
    }
    longest = [
        bucket.longest_tokens
        for bucket in plan.buckets
        if bucket.model == template.model and bucket.bucket in taken
    ]
    most = max(longest, default=None)
    bins = tuple(item for item in served.traffic.lengths if item.share > 0)
    return tuple(item for item in bins if most is None or item.input_tokens <= most) or bins


def longest_tokens(bins: tuple[LengthBin, ...], role: Role) -> int:
    """Of prompt and answer together; who prefills for others makes one token."""
    if role == "prefill":
        return max(ceil(item.input_tokens) for item in bins) + 1
    return max(ceil(item.input_tokens + item.output_tokens) for item in bins if item.share > 0)

"""From a spec and a few options to the problem that a planner is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from click import option

from potluck.cli.common.files import named, positive
from potluck.core.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from potluck.control.launchers.engine_command import WeightFormats
    from potluck.core.values.plan import Plan
    from potluck.core.values.types import EngineName
    from potluck.plan.problem import PlanningProblem
    from potluck.spec.spec_values import Spec


NODE_COUNT = re.compile(r"(?P<region>[^:=]+):(?P<node>[^:=]+)=(?P<value>\d+)\Z")
NODE_PRICE = re.compile(r"(?P<region>[^:=]+):(?P<node>[^:=]+)=(?P<value>[0-9.]+)\Z")


def read_spec(path: Path | None) -> Spec:
    """The spec at a path, or the bundled example."""
    from potluck.spec.load_spec import load_spec, parse_spec

    if path is not None:
        return load_spec(path)
    raw = resources.files("potluck.spec").joinpath("data/example.yaml").read_bytes()
    return parse_spec(raw, file="example.yaml")


def read_plan(path: Path) -> Plan:
    """The plan in a file; a spec in its place is told so."""
    from potluck.core.values.plan import plan_from_json

    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise InputError(str(path), "is no plan but looks like a spec; the plan (JSON) is named first")
    return named(path, plan_from_json)


def require_runnable(plan: Plan, spec: Spec, where: str) -> None:
    """Refuse a plan that the spec's engine cannot run: the same in all commands, before anything is done with it."""
    from potluck.core.values.engine_abilities import ENGINES, limit_of_format, refusals

    engine = ENGINES[spec.engine]
    lines = list(refusals(plan, {model.name: model.model for model in spec.models}, engine))
    stored = {model.name: model.stored for model in spec.models}
    for name, planned in plan.formats:
        limit = limit_of_format(planned, stored.get(name, planned), engine)
        if limit is not None:
            lines.append(f"{name}: needs {limit.what}, which {engine.title} does not do; plan again")
    if lines:
        more = f" ({len(lines) - 1} more like it)" if len(lines) > 1 else ""
        raise InputError(where, f"{lines[0]}{more}")


STYLE_ENGINES: dict[str, EngineName] = {"gpu": "embedded", "vllm": "vllm"}
"""What `up --engine` names, where that is an engine of its own; the other styles stand in for the spec's."""


def for_style(spec: Spec, style: str) -> Spec:
    return replace(spec, engine=STYLE_ENGINES.get(style, spec.engine))


def load_problem(
    spec: Spec,
    headroom: float,
    budget: float | None,
    what_if: tuple[str, ...],
    init_penalty: float,
    sure: float = 0.5,
) -> PlanningProblem:
    from potluck.core.values.engine_abilities import ENGINES
    from potluck.plan.problem import PlanningProblem, model_demand, without_nodes

    if not 0 < headroom <= 1:
        raise InputError("headroom", f"must be above 0 and at most 1, is {headroom:g}")
    if not 0.5 <= sure < 1:
        raise InputError("confidence", f"must be at least 0.5 and below 1, is {sure:g}")
    asks = tuple(
        model_demand(
            m.name,
            m.model,
            m.slo,
            m.traffic,
            m.terms,
            promises={
                request_class.name: promised
                for request_class in spec.policy.classes
                if (promised := request_class.objective(m.slo)) is not None
            },
            rtt_s=dict(spec.origins),
        )
        for m in spec.models
    )
    asks = tuple(
        replace(demand, sure=sure, formats=m.formats) for demand, m in zip(asks, spec.models, strict=True)
    )
    limit = budget if budget is not None else spec.budget_usd_per_h
    problem = PlanningProblem(
        asks,
        spec.regions,
        spec.node_types,
        spec.links,
        headroom,
        init_penalty,
        limit,
        spec.pool,
        tuple(codec for codec in spec.kv_codecs if codec in ENGINES[spec.engine].codecs),
        ENGINES[spec.engine],
        spec.complexity_share,
        spec.max_group_gpus,
    )
    for text in what_if:
        region, node, count = node_change(problem, "what-if", text)
        problem = without_nodes(problem, region, node, int(count))
    return problem


def node_change(
    problem: PlanningProblem, field: str, text: str, pattern: re.Pattern[str] = NODE_COUNT
) -> tuple[str, str, str]:
    """Region, node type and number of a REGION:NODE=NUMBER option; node types in any spelling of the catalog."""
    match = pattern.match(text)
    if match is None:
        raise InputError(field, f"{text!r} is not REGION:NODE=NUMBER, such as us-east-1:4xL40S=1")
    regions = [region.name for region in problem.regions]
    if match["region"] not in regions:
        raise UnknownNameError(f"{field}: region", match["region"], regions)
    return match["region"], _node_name(problem, match["node"], field), match["value"]


def _node_name(problem: PlanningProblem, name: str, field: str) -> str:
    from potluck.catalog import nodes

    known = {node.name for node in problem.nodes}
    if name in known:
        return name
    try:
        canonical = nodes.canonical(name)
    except InputError:
        canonical = name
    if canonical not in known:
        raise UnknownNameError(f"{field}: node", name, known)
    return canonical


def weights_in(spec: Spec, plan: Plan) -> dict[str, WeightFormats]:
    """Model to the format of its weights and that of its checkpoint, where the plan says so."""
    from potluck.control.launchers.engine_command import WeightFormats

    stored = {model.name: model.stored for model in spec.models}
    return {name: WeightFormats(planned, stored[name]) for name, planned in plan.formats if name in stored}


scale_option = option("--slo-scale", type=float, default=1.0, help="Multiply all SLO latencies by this.")


def scaled(spec: Spec, factor: float) -> Spec:
    """Models' objectives, and those that classes have of their own; a class's factor goes on top."""
    if positive("--slo-scale", factor) == 1.0:
        return spec
    classes = tuple(
        request_class
        if request_class.slo is None
        else replace(request_class, slo=request_class.slo.scaled(factor))
        for request_class in spec.policy.classes
    )
    return replace(
        spec,
        models=tuple(replace(model, slo=model.slo.scaled(factor)) for model in spec.models),
        policy=replace(spec.policy, classes=classes),
    )


def pairs(option: str, given: Sequence[str], known: set[str]) -> dict[str, str]:
    values = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise InputError(option, f"{item!r} is not NAME=VALUE")
        if name not in known:
            raise UnknownNameError(option, name, known)
        values[name] = value
    return values

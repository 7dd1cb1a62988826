"""From a spec and a few options to the problem that a planner is asked."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.cli.common.files import named
from potluck.core.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from potluck.core.values.plan import Plan
    from potluck.plan.problem import PlanningProblem
    from potluck.spec.spec_values import Spec

_WHAT_IF = re.compile(r"(?P<region>[^:=]+):(?P<node>[^:=]+)=(?P<count>\d+)\Z")


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


def load_problem(
    spec: Spec,
    headroom: float,
    budget: float | None,
    what_if: tuple[str, ...],
    init_penalty: float,
    sure: float = 0.5,
) -> PlanningProblem:
    """The planning problem that a spec and the options pose."""
    from potluck.plan.problem import PlanningProblem, ask
    from potluck.plan.reasons.explain import without_nodes

    if not 0 < headroom <= 1:
        raise InputError("headroom", f"must be above 0 and at most 1, is {headroom:g}")
    if not 0.5 <= sure < 1:
        raise InputError("confidence", f"must be at least 0.5 and below 1, is {sure:g}")
    asks = tuple(
        ask(
            m.name,
            m.model,
            m.slo,
            m.traffic,
            m.terms,
            promises={
                each.name: promised
                for each in spec.policy.classes
                if (promised := each.objective(m.slo)) is not None
            },
            rtt_s=dict(spec.origins),
        )
        for m in spec.models
    )
    asks = tuple(
        replace(each, sure=sure, formats=m.formats) for each, m in zip(asks, spec.models, strict=True)
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
        spec.kv_codecs,
    )
    for text in what_if:
        match = _WHAT_IF.match(text)
        if match is None:
            raise InputError("what-if", f"{text!r} is not REGION:NODE=COUNT, such as us-east-1:8xH100=0")
        region, node = match["region"], node_name(problem, match["node"], "what-if")
        if region not in {each.name for each in problem.regions}:
            raise UnknownNameError("what-if: region", region, (each.name for each in problem.regions))
        problem = without_nodes(problem, region, node, int(match["count"]))
    return problem


def node_name(problem: PlanningProblem, name: str, field: str) -> str:
    """A node of the problem by any spelling the catalog knows."""
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

"""Plans made by hand: two engines of unlike size on one machine, single GPUs, a pipeline over two machines."""

from __future__ import annotations

from inspect import signature

from click.testing import CliRunner

from potluck.catalog import nodes
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Deployment, NodeCount, Plan, PlannedReplica, Template, TemplateKind
from potluck.core.values.types import NodeOffer, NodeType, Region
from potluck.export.placement import CommandOptions, PlacedPlan, Style, placed_plan_of

TYPES = tuple(nodes.node_type(name) for name in ("4xL40S", "1xL4", "1xA10G"))
REGIONS = (
    Region(
        "us-east-1",
        (NodeOffer("4xL40S", 8.0, 9), NodeOffer("1xL4", 0.8, 9, spot=True), NodeOffer("1xA10G", 1.0, 9)),
    ),
    Region("lab", (NodeOffer("1xL4", 0.5, 9),)),
)
FOLDERS = {"chat": "/models/chat", "documents": "/models/documents"}


def template(
    name: str, kind: TemplateKind, model: str, rents: dict[str, int], *replicas: PlannedReplica
) -> Template:
    counts = tuple(NodeCount(node, count) for node, count in rents.items())
    return Template(name, kind, model, counts, replicas, (), "measured")


COMBO = template(
    "combo",
    "combo",
    "chat",
    {"4xL40S": 1, "1xL4": 2},
    PlannedReplica("prefill", single("4xL40S", 2, 32)),
    PlannedReplica("prefill", single("4xL40S", 2, 32)),
    PlannedReplica("decode", single("1xL4", 1, 32)),
    PlannedReplica("decode", single("1xL4", 1, 32)),
)
SINGLES = template(
    "singles",
    "homogeneous",
    "documents",
    {"1xL4": 2},
    PlannedReplica("mixed", single("1xL4", 1, 32)),
    PlannedReplica("mixed", single("1xL4", 1, 32)),
)
RANKS = template(
    "ranks",
    "pipeline",
    "documents",
    {"1xA10G": 1, "1xL4": 1},
    PlannedReplica(
        "mixed", Layout((Stage(20, (StageNode("1xA10G", 1),)), Stage(12, (StageNode("1xL4", 1),))))
    ),
)
"""A pipeline as vLLM runs it over unlike machines: one node a stage, equal degrees."""


def plan(*deployed: tuple[Template, str, int]) -> Plan:
    templates = tuple(dict.fromkeys(item for item, _, _ in deployed))
    where = tuple(Deployment(item.name, region, count) for item, region, count in deployed)
    return Plan("auto", templates, where, (), (), (), (), 1.0, 0.0)


def fleet(*deployed: tuple[Template, str, int], types: tuple[NodeType, ...] = TYPES) -> PlacedPlan:
    return placed_plan_of(plan(*deployed), types, REGIONS)


def command_options(style: Style = "vllm") -> CommandOptions:
    return CommandOptions(style, FOLDERS)


def runner() -> CliRunner:
    """With stdout and stderr apart, as click has them by itself from 8.2 on."""
    apart = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    return CliRunner(**apart)

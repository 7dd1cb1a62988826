"""Plans made by hand: two engines of unlike size on one machine, a pipeline over three, machines by name."""

from __future__ import annotations

from potluck.catalog import nodes
from potluck.core.values.layout import Layout, Stage, StageNode, single
from potluck.core.values.plan import Deployment, NodeCount, Plan, Replica, Template, TemplateKind
from potluck.core.values.types import NodeType, Offer, Region
from potluck.export.seats import Roomed, roomed
from potluck.export.words import Style, Wording

TYPES = tuple(nodes.node_type(name) for name in ("4xL40S", "1xL4", "1xA10G"))
REGIONS = (
    Region("us-east-1", (Offer("4xL40S", 8.0, 9), Offer("1xL4", 0.8, 9, spot=True), Offer("1xA10G", 1.0, 9))),
    Region("lab", (Offer("1xL4", 0.5, 9),)),
)
FOLDERS = {"chat": "/models/chat", "documents": "/models/documents"}


def template(
    name: str, kind: TemplateKind, model: str, rents: dict[str, int], *replicas: Replica
) -> Template:
    counts = tuple(NodeCount(node, count) for node, count in rents.items())
    return Template(name, kind, model, counts, replicas, (), "measured")


COMBO = template(
    "combo",
    "combo",
    "chat",
    {"4xL40S": 1, "1xL4": 2},
    Replica("prefill", single("4xL40S", 2, 32)),
    Replica("prefill", single("4xL40S", 2, 32)),
    Replica("decode", single("1xL4", 1, 32)),
    Replica("decode", single("1xL4", 1, 32)),
)
PIPELINE = template(
    "pipeline",
    "pipeline",
    "documents",
    {"1xA10G": 1, "1xL4": 2},
    Replica(
        "mixed",
        Layout(
            (Stage(20, (StageNode("1xA10G", 1),)), Stage(12, (StageNode("1xL4", 1), StageNode("1xL4", 1)))),
        ),
    ),
)


def plan(*deployed: tuple[Template, str, int]) -> Plan:
    templates = tuple(dict.fromkeys(each for each, _, _ in deployed))
    where = tuple(Deployment(each.name, region, count) for each, region, count in deployed)
    return Plan("auto", templates, where, (), (), (), (), 1.0, 0.0)


def fleet(*deployed: tuple[Template, str, int], types: tuple[NodeType, ...] = TYPES) -> Roomed:
    return roomed(plan(*deployed), types, REGIONS)


def wording(style: Style = "vllm") -> Wording:
    return Wording(style, FOLDERS)

"""Small plans by hand for live fleets: each kind of route, over single GPUs in one region or two.

plan, spec = write_plans(folder, [("homogeneous", ("mixed",), "near")] * 6)
plan, spec = write_plans(folder, REMOTE, flows=[("far", "near")])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from potluck.core.values import plan as plans
from potluck.core.values.layout import single
from potluck.core.values.types import Codec, Role

MODEL, CATALOG_MODEL, LAYERS, NODE = "live", "Llama-3.1-8B", 32, "1xA10"
Phase = Literal["prefill", "decode", "closed"]
Unit = tuple[str, tuple[str, ...], str]  # A template's kind, its replicas' roles, its region.
WHOLE: list[Unit] = [("homogeneous", ("mixed",), "near")]
COMBO: list[Unit] = [("combo", ("prefill", "decode"), "near")]
PAIR: list[Unit] = [("pair", ("prefill", "mixed"), "near")]
REMOTE: list[Unit] = [("homogeneous", ("prefill",), "far"), ("homogeneous", ("decode",), "near")]
SPEC = """models:
  - model: {catalog}
    name: {model}
    slo: {{ttft_ms: {ttft_ms}, tpot_ms: {tpot_ms}}}
    traffic: {{rate_per_s: 1, input: 400, output: 100}}
fleet:
  regions:
    - {{name: near, nodes: [{{node: {node}, available: 99, price_usd_per_h: 1.0}}]}}
    - {{name: far, nodes: [{{node: {node}, available: 99, price_usd_per_h: 1.0}}]}}
links:
  - {{from: far, to: near, gbps: 10, rtt_ms: 1}}
  - {{from: near, to: far, gbps: 10, rtt_ms: 1}}
"""


def write_plans(
    folder: Path,
    units: Sequence[Unit],
    flows: Sequence[tuple[str, str]] = (),
    *,
    ttft_ms: int = 60_000,
    tpot_ms: int = 2_000,
    codec: Codec = "fp16",
) -> tuple[Path, Path]:
    """Files of a plan and its spec. Each unit is a template of its own; with flows, units do one phase each.

    KV crosses in this codec, which the spec allows.
    """
    templates: list[plans.Template] = []
    shares: list[plans.PlannedShare] = []
    for place, (kind, roles, region) in enumerate(units):
        phases = [role for role in roles if flows and role != "mixed"] or ["closed"]
        rates = [1.0 if phase in phases else 0.0 for phase in ("prefill", "decode", "closed")]
        capacity = (plans.BucketCapacity(0, *rates, 0.1, 0.02),)
        replicas = tuple(plans.PlannedReplica(cast(Role, role), single(NODE, 1, LAYERS)) for role in roles)
        count = (plans.NodeCount(NODE, len(roles)),)
        about = (f"unit{place}", cast(plans.TemplateKind, kind), MODEL)
        templates.append(plans.Template(*about, count, replicas, capacity, "measured", codec))
        shares += [plans.PlannedShare(about[0], region, 0, cast(Phase, phase), 1.0) for phase in phases]
    deployments = tuple(plans.Deployment(f"unit{n}", region, 1) for n, (_, _, region) in enumerate(units))
    buckets = (plans.LengthBucket(MODEL, 0, 100_000, 1.0),)
    planned_flows = tuple(plans.PlannedFlow(MODEL, 0, *ends, 1.0, codec) for ends in flows)
    parts = (tuple(templates), deployments, buckets, tuple(shares), planned_flows, ())
    plan = plans.Plan("by hand", *parts, float(len(units)), 0.0)
    plan_path, spec_path = folder / "plan.json", folder / "potluck.yaml"
    plan_path.write_text(plans.plan_to_json(plan), "utf-8")
    spec = SPEC.format(catalog=CATALOG_MODEL, model=MODEL, node=NODE, ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    allowed = "" if codec == "fp16" else f"kv_codecs: [raw, {codec}]\n"
    spec_path.write_text(spec + allowed, "utf-8")
    return plan_path, spec_path

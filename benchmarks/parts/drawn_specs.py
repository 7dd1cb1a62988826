"""Specs drawn at random for `random_plans.py`: of all sorts that an operator may have, each with a restriction."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import yaml

SIZES = {"Llama-3.1-8B": 1.0, "Phi-4": 1.8, "GPT-OSS-20B": 1.0, "Qwen3-32B": 4.0, "Llama-3.1-70B": 8.0}
"""Model to how slow it is, about."""
LONG_PROMPTS = {"Llama-3.1-8B", "GPT-OSS-20B", "Llama-3.1-70B"}
"""Whose context has room for the longest prompts."""
NODES = {
    "1xL4": 0.8, "2xL4": 1.7, "1xA10": 0.75, "1xL40S": 1.9, "4xL40S": 7.8, "2xRTX4090": 1.2,
    "1xA100-80": 2.6, "2xA100-80": 5.1, "1xH100": 3.9, "2xH100": 7.9, "1xH200": 4.6,
}  # fmt: skip
KINDS = ("plain", "one-of-each", "n+1", "copies", "spot", "many", "tight", "loose", "long", "busy")
FASTEST_PER_S = {"many": 5.0, "one-of-each": 4.0, "n+1": 6.0, "busy": 1000.0}


@dataclass(frozen=True, slots=True)
class DrawnSpec:
    seed: int
    kind: str
    text: str
    restricted: str
    restriction: str
    attainments: dict[str, float]
    rate_per_s: float
    answer_s: float  # Of the slowest model at its objective.


def drawn_spec(seed: int) -> DrawnSpec:
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    models = [_model(draw, kind, place) for place in range(_models(draw, kind))]
    regions = [_region(draw, kind, name, len(models)) for name in ("east", "west")[: draw.randint(1, 2)]]
    data: dict[str, Any] = {"models": models, "fleet": {"regions": regions}}
    if len(regions) == 2 and draw.random() < 0.6:
        gbps, rtt_ms = draw.choice((5, 10, 25)), draw.choice((5, 30))
        data["links"] = [{"between": ["east", "west"], "gbps": gbps, "rtt_ms": rtt_ms}]
    less, restriction = _restricted(draw, data)
    return DrawnSpec(
        seed,
        kind,
        yaml.safe_dump(data, sort_keys=False),
        yaml.safe_dump(less, sort_keys=False),
        restriction,
        {model["name"]: model["slo"]["attainment"] for model in models},
        sum(model["traffic"]["rate_per_s"] for model in models),
        max(m["traffic"]["output"]["mean"] * m["slo"]["tpot_ms"] / 1000 for m in models),
    )


def _models(draw: random.Random, kind: str) -> int:
    return draw.choice((4, 6, 10)) if kind == "many" else draw.choice((1, 1, 1, 2, 3))


def _model(draw: random.Random, kind: str, place: int) -> dict[str, Any]:
    name = draw.choice(list(SIZES)[:3] if kind == "busy" else list(SIZES))
    slack = {"tight": 0.6, "loose": 5.0}.get(kind, draw.choice((1.0, 1.0, 2.0)))
    most_per_s = FASTEST_PER_S.get(kind, 20.0)
    rate_per_s = round(0.1 * (most_per_s / 0.1) ** draw.random() / SIZES[name] ** 0.5, 3)
    output = draw.choice((1000, 2000, 4000)) if kind == "long" else draw.choice((10, 50, 200, 500))
    ttft_ms = round(slack * 800 * SIZES[name] ** 0.7)
    tpot_ms = round(slack * 45 * SIZES[name] ** 0.4)
    prompt = draw.choice((200, 800, 2500, 6000) if name in LONG_PROMPTS else (200, 800, 2500))
    model: dict[str, Any] = {
        "model": name,
        "name": f"m{place}",
        "slo": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "attainment": draw.choice((0.9, 0.95, 0.99))},
        "traffic": {
            "rate_per_s": max(0.1, rate_per_s),
            "input": {"mean": prompt, "cv": draw.choice((0.3, 1.0))},
            "output": {"mean": output, "cv": draw.choice((0.3, 0.7))},
        },
    }
    if kind == "n+1" or (kind == "one-of-each" and draw.random() < 0.5):
        model["redundancy"] = "node"
    if kind == "copies":
        model["limits"] = {"min_copies": draw.choice((2, 3))}
    if kind == "spot":
        model["max_spot_share"] = draw.choice((0.3, 0.5, 1.0))
    return model


def _region(draw: random.Random, kind: str, name: str, models: int) -> dict[str, Any]:
    offers = []
    for node in draw.sample(list(NODES), draw.randint(3, 6)):
        usd_per_h = round(NODES[node] * draw.uniform(0.8, 1.25), 2)
        many = 400 if kind == "busy" else models * draw.choice((4, 8, 16))
        available = draw.choice((1, 1, 2)) if kind in ("one-of-each",) else many
        offers.append({"node": node, "available": available, "price_usd_per_h": usd_per_h})
        if kind == "spot" and draw.random() < 0.7:
            offers.append(
                {
                    **offers[-1],
                    "price_usd_per_h": round(usd_per_h * 0.4, 2),
                    "spot": True,
                    "preemptions_per_h": 0.1,
                }
            )
    return {"name": name, "nodes": offers}


def _restricted(draw: random.Random, data: dict[str, Any]) -> tuple[dict[str, Any], str]:
    less = copy.deepcopy(data)
    model, region = draw.choice(less["models"]), draw.choice(less["fleet"]["regions"])
    kind = draw.choice(("max_stages", "max_gpu_kinds", "fewer", "without", "max_nodes"))
    if kind == "without":
        gone = region["nodes"].pop(draw.randrange(len(region["nodes"])))
        return less, f"no {gone['node']} in {region['name']}"
    if kind == "fewer":
        offer = draw.choice(region["nodes"])
        offer["available"] = max(1, offer["available"] // 2)
        return less, f"half of {offer['node']} in {region['name']}"
    model.setdefault("limits", {})[kind] = 1
    return less, f"{kind} 1 for {model['name']}"

"""Specs drawn at random for `planned.py` and `deployability.py`, each of a kind that some technique was made for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

Objectives = dict[str, tuple[int, int]]
Range = tuple[float, float]
KINDS = ("pool", "pair", "combo", "pipeline", "remote", "several")
SMALL = {"Llama-3.1-8B": (1000, 50), "Phi-4": (1500, 80), "GPT-OSS-20B": (1000, 40)}
"""Model to the objective it gets: TTFT and TPOT in ms."""
LARGE = {"Qwen3-32B": (4000, 120), "LLaMA-30B": (3000, 200)}
LOW, HIGH = ("1xA10", "1xL4", "2xRTX4090"), ("1xA100-80GB", "1xL40S", "1xH100")
PRICES = {"1xA10": 0.7, "1xL4": 0.6, "2xRTX4090": 0.9, "1xA100-80GB": 1.8, "1xL40S": 1.1, "1xH100": 3.0}
BOXES = ("4xA40", "4xA5000", "2xRTX4090", "4xA6000", "4xRTX3090Ti")


def random_specs(count: int, folder: Path) -> Iterator[Path]:
    """The kinds in turn."""
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        path = folder / f"{kind}-{number // len(KINDS)}.yaml"
        path.write_text(spec_text(kind, number // len(KINDS)), encoding="utf-8")
        yield path


def spec_text(kind: str, seed: int) -> str:
    """A spec of a kind; the same seed, the same text."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    if kind == "pool":
        return _models([_model(rng, LARGE, "one", (1.0, 5.0), (400, 1500), (30, 250))]) + _pool(rng)
    if kind == "pipeline":
        wanted = _model(rng, LARGE, "one", (1.0, 4.0), (400, 1500), (50, 250))
        kinds = rng.choice(("2xRTX4090", "4xA10", "2xL4"), 2, replace=False)
        return _models([wanted]) + _fleet({"home": kinds}, rng)
    if kind == "remote":
        wanted = _model(rng, SMALL, "one", (1.0, 5.0), (3000, 7000), (100, 300), slower=3)
        fleet = _fleet({"near": (rng.choice(LOW),), "far": (rng.choice(HIGH),)}, rng)
        gbps = int(rng.choice((5, 10, 25)))
        ends = (("far", "near"), ("near", "far"))
        links = "".join(f"  - {{from: {a}, to: {b}, gbps: {gbps}, rtt_ms: 10}}\n" for a, b in ends)
        return _models([wanted]) + fleet + "links:\n" + links
    if kind == "several":
        names = rng.choice(list(SMALL), 2, replace=False)
        wanted = [
            _model(rng, {name: SMALL[name]}, f"m{i}", (2.0, 8.0), (300, 2000), (50, 300))
            for i, name in enumerate(names)
        ]
        return _models(wanted) + _fleet({"home": (*rng.choice(LOW, 2, replace=False), rng.choice(HIGH))}, rng)
    wanted = _model(rng, SMALL, "one", (3.0, 12.0), (500, 2500), (50, 300))
    return _models([wanted]) + _fleet({"home": (rng.choice(LOW), rng.choice(HIGH))}, rng)


def _model(rng: np.random.Generator, known: Objectives, name: str, *ranges: Range, slower: int = 1) -> str:
    rates, prompts, outputs = ranges
    model = str(rng.choice(list(known)))
    ttft_ms, tpot_ms = known[model]
    attainment = float(rng.choice((0.9, 0.95)))
    return (
        f"  - model: {model}\n    name: {name}\n"
        f"    slo: {{ttft_ms: {ttft_ms * slower}, tpot_ms: {tpot_ms}, attainment: {attainment}}}\n"
        f"    traffic: {{rate_per_s: {rng.uniform(*rates):.2f}, input: {rng.integers(*prompts)},"
        f" output: {rng.integers(*outputs)}}}\n"
    )


def _models(parts: list[str]) -> str:
    return "models:\n" + "".join(parts)


def _fleet(regions: dict[str, object], rng: np.random.Generator) -> str:
    text = "fleet:\n  regions:\n"
    for region, kinds in regions.items():
        text += f"  - name: {region}\n    nodes:\n"
        for kind in dict.fromkeys(map(str, kinds)):  # type: ignore[call-overload]
            price = PRICES.get(kind, 1.5) * rng.uniform(0.8, 1.25)
            text += f"    - {{node: {kind}, available: 12, price_usd_per_h: {price:.2f}}}\n"
    return text


def _pool(rng: np.random.Generator) -> str:
    count = int(rng.integers(2, 5))
    gbps = rng.choice((5, 10, 20, 40), (count, count))
    gbps = np.minimum(gbps, gbps.T)
    text = "pool:\n  machines:\n"
    for place, box in enumerate(rng.choice(BOXES, count)):
        text += f"    - {{name: n{place}, node: {box}, price_usd_per_h: 1.0}}\n"
    rows = [[0 if a == b else int(gbps[a, b]) for b in range(count)] for a in range(count)]
    return text + f"  gbps: {rows}\n"

"""What `crossdc.py` simulates: links of many widths under a hybrid and a dense model, and prompts with prefixes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parts.case_study import (
    FAR,
    MODEL,
    NEAR,
    SELECTIVE,
    kv_bytes,
    load,
    prompt_lengths,
    scene,
    site,
    write_plan,
    write_profiles,
)
from parts.common import DATA, prefixed, say
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.cli.common.workloads import WorkloadOptions
from potluck.cli.common.workloads import load as load_trace
from potluck.cli.planning.estimate import measured
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.sim.load.workload import PrefixBlocks, Workload
from potluck.sim.run import simulate

from papers.prfaas_model import optimum  # isort: skip

MODELS = {"hybrid": MODEL, "dense": "MiniMax-M2.5"}
"""The dense one is timed as the hybrid one: they differ in nothing but KV, 17 and 254 kB a token."""
WIDTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SECONDS, OVER = 120.0, 1.2
BLOCK = 512  # Tokens; a state is kept after the last full one of a prompt.
TRACE = DATA / "mooncake_fast25_conversation.jsonl.gz"


def dense(quick: bool) -> dict[str, float]:
    """By model and Gbps: requests/s with the far site over those without, as the model has it and simulated
    with its threshold; the share of requests that it and a plan send far."""
    figures: dict[str, float] = {}
    near_only = optimum(site(replace(SELECTIVE, far=0), 1.0, MODEL), prompt_lengths()).rate_per_s
    for kind, name in MODELS.items():
        for gbps in WIDTHS[::2] if quick else WIDTHS:
            best = optimum(site(SELECTIVE, gbps, name), prompt_lengths())
            cut = round(best.threshold_tokens)
            what = replace(SELECTIVE, prefill=best.prefill, decode=best.decode, threshold_tokens=cut or None)
            with tempfile.TemporaryDirectory() as folder:
                profiles = write_profiles(Path(folder), name)
                files = write_plan(Path(folder), what, gbps, name)
                made = load(OVER * best.rate_per_s, SECONDS, 1)
                first_s = simulate(
                    scene(*files, profiles), made, read_spec(files[1]).policy
                ).records.first_token_s
                far = np.nan if quick else planned_far(files[1], profiles)
            served = ((first_s >= SECONDS / 3) & (first_s < SECONDS)).sum() / (SECONDS * 2 / 3)
            key = f"dense_{kind}_{gbps:g}gbps"
            figures |= {
                f"{key}_modelled": best.rate_per_s / near_only,
                f"{key}_simulated": served / near_only,
            }
            figures |= {f"{key}_far": best.remote_share} | ({} if quick else {f"{key}_planned_far": far})
            say(
                "  "
                + ", ".join(f"{name} {value:.3g}" for name, value in figures.items() if name.startswith(key))
            )
    return figures


def planned_far(spec: Path, profiles: tuple[Path, ...]) -> float:
    spec.write_text(spec.read_text("utf-8").replace("available: 12", "available: 8"), "utf-8")
    problem = measured(load_problem(read_spec(spec), 0.8, None, (), 0.0), profiles)
    plan = STRATEGIES["prfaas"](TemplateFactory(problem), SolveSettings(time_limit_s=20.0)).plan
    rates = {True: 0.0, False: 0.0}
    for flow in plan.flows:
        rates[(flow.prefill_region, flow.decode_region) == (FAR, NEAR)] += flow.rate_per_s
    return rates[True] / max(1e-9, sum(rates.values()))


def prefixes(quick: bool) -> dict[str, float]:
    """Bytes over the link, beside those of whole prompts, and who was computed where less of it was cached."""
    if not TRACE.exists():
        say(f"crossdc: prefixes is left out, there is no {TRACE.name}")
        return {}
    made = load_trace(str(TRACE), "m", WorkloadOptions(rate_per_s=2.5, requests=1000 if quick else 6000))
    assert made.blocks is not None
    parts = [
        made.blocks.ids[start : start + tokens // BLOCK]
        for start, tokens in zip(made.blocks.starts, made.prompt_tokens, strict=False)
    ]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    made = replace(
        made,
        blocks=PrefixBlocks(starts, np.concatenate(parts)),
        output_tokens=np.full(len(made), 256, np.int32),
    )
    figures: dict[str, float] = {}
    for kind, name in MODELS.items():
        figures |= prefixed(f"prefixes_{kind}", crossed(made, parts, name))
    return figures


def crossed(made: Workload, blocks: Sequence[NDArray[np.int64]], name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        profiles = write_profiles(Path(folder), name)
        files = write_plan(Path(folder), replace(SELECTIVE, threshold_tokens=8000), 100.0, name)
        result = simulate(scene(*files, profiles), made, read_spec(files[1]).policy)
    records = result.records
    region = np.array([replica.region for replica in result.replicas])
    far = region[records.prefill_replica] == FAR
    whole = kv_bytes(records.prompt_tokens, name)
    moved = sum(link.sent_bytes for link in result.links if (link.source, link.target) == (FAR, NEAR))
    held: dict[str, set[int]] = {FAR: set(), NEAR: set()}
    wrong = 0
    for place, at in enumerate(region[records.prefill_replica].tolist()):
        ids = blocks[place].tolist()
        depth = {
            name: next((n for n, block in enumerate(ids) if block not in had), len(ids))
            for name, had in held.items()
        }
        elsewhere = max(depth.values()) * BLOCK
        wrong += elsewhere > depth[at] * BLOCK and records.cached_tokens[place] < elsewhere - BLOCK
        for name in {at, NEAR}:  # it is decoded near, wherever it was computed
            held[name].update(ids)
    return {
        "requests": float(len(records)),
        "far_share": float(far.mean()),
        "cached_share": float(records.cached_tokens.sum() / records.prompt_tokens.sum()),
        "crossed_gb": moved * 1e-9,
        "crossed_whole_gb": float(whole[far].sum()) * 1e-9,
        "crossed_share": moved / float(whole[far].sum()),
        "wrong_share": wrong / len(records),
    }

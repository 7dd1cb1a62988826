"""Pipeline templates in CORAL's extended setting: 6 models, prefill and decode, 20 node types, N_max 6, ρ 12.

`total_cpu_s` is all 12 libraries from nothing but models and node types, pruned; `every_cpu_s` the same with the
optimum of every valid multiset. CORAL's own way, an integer program per multiset and number of stages, is measured
with HiGHS on random valid multisets; where not all are proven, `program_over_ours` is too low. Optima are compared
with the programs (equal where proven, never below) and with a second search, also on tables with noise.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from parts.common import ROOT, Budget, cpu_s, peak_bytes, run, say
from potluck.catalog import models, nodes
from potluck.core.values.types import NodeType, Slo
from potluck.plan.templates.library import pipeline_libraries
from potluck.plan.templates.pipeline import MAX_NODES, PipelineLibrary, best_placement, pipeline_library
from potluck.plan.timing.stage_rates import StageRates, stage_rates

sys.path.insert(0, str(ROOT / "lab"))
from papers.coral_placement import integer_program

SEED = 42
AZURE_CONVERSATION, AZURE_CODE, BURST_GPT = (1155, 211), (2048, 28), (768, 195)
ASKED = {
    "Phi-4": (Slo(1.2, 0.06), AZURE_CONVERSATION),
    "GPT-OSS-20B": (Slo(0.9, 0.03), AZURE_CODE),
    "Qwen3-32B": (Slo(1.6, 0.1), BURST_GPT),
    "Llama-3-70B": (Slo(1.5, 0.08), BURST_GPT),
    "GPT-OSS-120B": (Slo(1.0, 0.04), AZURE_CONVERSATION),
    "Qwen3-235B-A22B": (Slo(1.8, 0.12), AZURE_CODE),
}
"""CORAL's Table 3: objectives, and the mean lengths of the trace that each model is served with."""
GPUS = ("H100", "A100-80", "L40S", "L4", "A10G")
NOISE = 0.02
TARGETS = {
    "total_cpu_s": ("<=", 10.0),
    "peak_bytes": ("<=", 2e9),
    "program_mismatches": ("==", 0.0),
    "search_mismatches": ("==", 0.0),
}


def node_types() -> tuple[NodeType, ...]:
    return tuple(nodes.node_type(f"{count}x{gpu}") for gpu in GPUS for count in (1, 2, 4, 8))


def all_rates(kinds: Sequence[NodeType]) -> list[StageRates]:
    return [
        rates
        for name, (slo, lengths) in ASKED.items()
        for rates in stage_rates(models.model(name), kinds, slo, *lengths)
    ]


def timed(kinds: Sequence[NodeType], repeats: int, *, prune: bool) -> tuple[list[PipelineLibrary], float]:
    """All libraries, and the least CPU-seconds that they took."""
    made: list[PipelineLibrary] = []

    def make() -> None:
        made[:] = [pipeline_library(rates, prune=prune) for rates in all_rates(kinds)]

    return made, cpu_s(make, repeats)


def measure(quick: bool) -> dict[str, float]:
    kinds, budget = node_types(), Budget(quick)
    figures: dict[str, float] = {}
    repeats = 1 if quick else 5
    _, figures["first_cpu_s"] = timed(kinds, 1, prune=True)
    kept, figures["total_cpu_s"] = timed(kinds, repeats, prune=True)
    figures["stage_rates_cpu_s"] = cpu_s(lambda: all_rates(kinds), repeats)
    every, figures["every_cpu_s"] = timed(kinds, repeats, prune=False)
    figures["peak_bytes"] = peak_bytes()
    figures["templates_before_pruning"] = sum(library.valid for library in kept)
    figures["templates_after_pruning"] = sum(map(len, kept))
    for library in kept:
        name = f"{library.rates.model.name}_{library.rates.phase}".lower().replace("-", "_")
        figures[f"{name}_before"], figures[f"{name}_after"] = library.valid, len(library)
    if quick:
        say("left out: repeats, and all but a few of the multisets that are compared")
    if budget.allows("the second search", figures["every_cpu_s"]):
        figures |= search(every, quick)
    if budget.allows("integer programs", 8.0):
        figures |= program(every, figures["every_cpu_s"], quick)
    if budget.allows("libraries from disk", figures["first_cpu_s"]):
        figures["load_cpu_s"] = stored_cpu_s(kinds)
    return figures


def stored_cpu_s(kinds: Sequence[NodeType]) -> float:
    with tempfile.TemporaryDirectory() as folder:

        def load() -> None:
            for name, (slo, lengths) in ASKED.items():
                pipeline_libraries(models.model(name), kinds, slo, *lengths, folder=Path(folder))

        load()
        return cpu_s(load, 3)


def search(every: Sequence[PipelineLibrary], quick: bool) -> dict[str, float]:
    """Random templates of every library, and of some with noise, against the second search."""
    rng = np.random.default_rng(SEED)
    noisy, noisy_s = [], 0.0
    for library in every[4 : 5 if quick else None : 3]:
        units = library.rates.units
        shaken = (units * rng.uniform(1 - NOISE, 1 + NOISE, units.shape)).astype(np.int64)
        start = time.process_time()
        noisy.append(pipeline_library(replace(library.rates, units=shaken), prune=False))
        noisy_s += time.process_time() - start
    compared = wrong = 0
    for library in [*every, *noisy]:
        for i in rng.integers(0, len(library), 1 if quick else 150):
            result = best_placement(library.rates.units, library.space.types_of(int(library.ids[i])))
            wrong += result is None or result.units != library.units[i]
            compared += 1
    return {
        "search_compared": compared,
        "search_mismatches": wrong,
        "noisy_templates": sum(map(len, noisy)),
        "noisy_cpu_s": noisy_s,
    }


def program(every: Sequence[PipelineLibrary], ours_s: float, quick: bool) -> dict[str, float]:
    """CORAL's integer program on random templates until the CPU budget is spent, and on small ones."""
    rng = np.random.default_rng(SEED + 1)
    total = sum(map(len, every))
    limit_s = 1.0 if quick else 60.0
    solved, proven, wrong, spent_s = compare(every, rng, MAX_NODES, 3.0 if quick else 900.0, limit_s)
    small, small_proven, small_wrong, _ = compare(every, rng, 2, 4.0 if quick else 120.0, max(limit_s, 4.0))
    return {
        "program_templates": solved,
        "program_proven": proven,
        "program_cpu_s_per_template": spent_s / solved,
        "program_over_ours": spent_s / solved / (ours_s / total),
        "program_small_templates": small,
        "program_small_proven": small_proven,
        "program_mismatches": wrong + small_wrong,
    }


def compare(
    every: Sequence[PipelineLibrary], rng: np.random.Generator, nodes: int, budget_s: float, limit_s: float
) -> tuple[int, int, int, float]:
    """(solved, proven, mismatches, CPU-seconds) of random templates of at most so many nodes."""
    chosen = [np.flatnonzero(library.space.sizes(library.ids) <= nodes) for library in every]
    ends = np.cumsum([len(item) for item in chosen])
    solved = proven = wrong = 0
    start = time.process_time()
    while time.process_time() - start < budget_s:
        drawn = int(rng.integers(ends[-1]))
        at = int(np.searchsorted(ends, drawn, side="right"))
        library, i = every[at], int(chosen[at][drawn - ends[at]])
        types = library.space.types_of(int(library.ids[i]))
        result = integer_program(library.rates.units, types, time_limit_s=limit_s)
        units = int(library.units[i])
        solved += 1
        proven += result.proven
        wrong += result.units != units if result.proven else result.units > units
    return solved, proven, wrong, time.process_time() - start


if __name__ == "__main__":
    run("templates", measure, TARGETS, seeds=[SEED, SEED + 1])

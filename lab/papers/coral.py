"""CORAL's rows: mixed pipelines (Figures 1, 13), cost and goodput of two settings (Figures 7 to 11), Helix (12)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from papers import coral_settings as settings
from papers.coral_settings import (
    EPOCHS,
    LARGE,
    PAPER,
    SMALL,
    WAYS,
    Availability,
    Supply,
    problem,
)
from papers.helix import best_flow, node_rates
from papers.rows import Line, Plot, ProgressReporter, Reproduction, Row, Rows, quiet
from potluck.catalog import models, nodes, prices
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.templates.pipeline import PipelineLibrary, pipeline_library
from potluck.plan.timing.stage_rates import stage_rates

HOMO, CAUCHY, CORAL = "homo as printed", "cauchy as printed", "coral"
RIVALS = {"homo": HOMO, "cauchy": CAUCHY}
STRONG = {"homo": "single", "cauchy": "cauchy-mc"}
LIMIT_S, GAP = 120.0, {"core": 1e-4, "extended": 0.05}
"""CPU time that no solve here needs, and how near to the least cost is near enough: so that plans depend on neither
the machine nor what else runs on it.
"""
GPUS = ("H100", "A100-80", "L40S", "L4", "A10G")
FIGURE_1A = {
    "mixed": 526.0,
    "pure H100": 481.0,
}  # Tokens a second for a dollar an hour; the best of three pure ones.
NEAR = 0.01
GAP_NOTE = (
    "each row has one thing changed from the first; slower by as much as a dollar of H100 nodes computes less of "
    "Qwen3-235B's prompts in its Figure 1a; what is left when all are counted is not explained: its traces, profiles "
    "and availability are not published, and by its own Figure 1a mixing is worth 9 % of that prefill"
)
SWEEP = ((2, 4.0), (3, 6.0), (4, 8.0), (5, 10.0), (6, 12.0), (7, 14.0))
SOLVE_S = {"core": (0.24, 0.11), "extended": (9.68, 41.0)}  # Default, scarce.
LARGEST = {"core": ("Qwen3-32B", 2.02, 1.88), "extended": ("Qwen3-235B-A22B", 4.93, 4.08)}
HEAVY = {"core": ((1.82, 1.78), (None, None)), "extended": ((2.79, 3.47), (2.34, 1.64))}
ABOVE = {"core": 1.25, "extended": 1.75}  # What scarce fleets have of the least that suffices.
SCARCE = {"core": ((1.24, 1.0), (1.0, 1.51)), "extended": ((7.64, 2.39), (1 / 1.52, 1.25))}
"""Of Homo and Cauchy: Coral's goodput over theirs; and their cost over Coral's."""
HELIX = {"1xA100-40": 4, "1xV100": 6, "1xL4": 8, "1xT4": 10, "2xL4": 4, "2xT4": 6, "4xT4": 4}
"""The GPUs that Coral's paper counts, in the nodes that Helix's has them in."""
HELIX_SAVED, HELIX_GAIN = 0.21, 1.26
HELIX_PER_S, HELIX_BEYOND_PER_S = 4.0, 40.0
HELIX_STEP, HELIX_LIMIT_S = 4, 20.0  # Layers that move together; CPU-s.
HELIX_NOTE = (
    "for the printed rate Coral rents a part of the cluster here too; of all that comes the order is the other "
    "way round: Helix's flow is the best found with four layers moved together (`at most` bounds those), without "
    "objectives, headroom or time on the way, over all 42 nodes (the paper has what Helix's simulator reported, less "
    "than 4 requests/s), while instances here have six nodes at most (its own have some eighteen), which may be why: "
    "it was not tried with more; how Helix divides these GPUs into nodes is not in Coral's paper"
)


@dataclass(slots=True)
class Solver:
    """Plans a setting by several strategies; what was timed once is kept, and equal questions are asked once."""

    setting: str
    change: Callable[[PlanningProblem], PlanningProblem] = lambda each: each
    known: dict[tuple[str, object, object], tuple[Plan, float]] = field(default_factory=dict)
    factory: TemplateFactory = field(init=False)

    def __post_init__(self) -> None:
        self.factory = TemplateFactory(self.change(problem(self.setting)))

    def plan(
        self, way: str, supply: Supply | None = None, rates: Mapping[str, float] | None = None
    ) -> tuple[Plan, float]:
        """A plan, and the CPU-seconds of the solve."""
        key = way, tuple(sorted((supply or {}).items())), tuple((rates or {}).items())
        if key not in self.known:
            planning_problem, (printed, strategy) = (
                self.change(problem(self.setting, rates, supply)),
                WAYS[way],
            )
            old = self.factory
            fresh = TemplateFactory(
                planning_problem,
                rate_caches=old.rate_caches,
                timed_pipelines=old.timed_pipelines,
                placement_tables=old.placement_tables,
            )
            start_s = time.process_time()
            made = settings.as_printed(planning_problem, fresh) if printed else fresh
            found = strategy(made, SolveSettings(time_limit_s=LIMIT_S, gap_target=GAP[self.setting]))
            self.known[key] = found.plan, time.process_time() - start_s
        return self.known[key]

    def costs(self, ways: Sequence[str], supplies: Sequence[Supply | None]) -> dict[str, float]:
        """Mean USD an hour over epochs."""
        return {way: float(np.mean([self.plan(way, s)[0].cost_usd_per_h for s in supplies])) for way in ways}

    def serves(self, way: str, supply: Supply) -> bool:
        return self.plan(way, supply)[0].fraction >= 1 - 1e-6


def reproduce(
    folder: Path | None, quick: bool, seed: int, report_progress: ProgressReporter = quiet
) -> Reproduction:
    report_progress("CORAL, libraries")
    figure, plots = spectrum()
    first = mixed_pipelines()
    made = [*first, *figure, *sweep(SWEEP[:4] if quick else SWEEP)]
    slow = next(row.ours / row.published for row in first if row.setting == "pure H100" and row.published)
    for setting in ("core",) if quick else ("core", "extended"):
        solver = Solver(setting)
        there = settings.availability(problem(setting), folder, seed)
        report_progress(f"CORAL, {setting}: nodes in plenty")
        made += _ample(solver, quick)
        report_progress(f"CORAL, {setting}: epochs")
        scale = enough(solver, there)
        made += _epochs(solver, there, scale)
        if quick:
            break
        if setting == "extended":
            report_progress("CORAL, extended: what the gap is")
            made += gap(solver, there, scale, slow)
        report_progress(f"CORAL, {setting}: scarce")
        made += _scarce(solver, there)
        report_progress(f"CORAL, {setting}: imbalance")
        made += _heavy(solver)
    if not quick:
        report_progress("CORAL, Helix's cluster")
        made += helix()
    return Reproduction("CORAL", tuple(made), plots)


def library_of(model: str, slo: Slo, lengths: tuple[int, int], phase: int) -> PipelineLibrary:
    """All templates of a model for prefill (0) or decode (1)."""
    kinds = tuple(nodes.node_type(f"{count}x{gpu}") for gpu in GPUS for count in (1, 2, 4, 8))
    return pipeline_library(stage_rates(models.model(model), kinds, slo, *lengths)[phase], prune=False)


def per_usd(library: PipelineLibrary) -> tuple[np.ndarray, list[str]]:
    """Tokens a second for a dollar an hour of each template, and the node types in the order of its counts."""
    names = [node.name for node in library.rates.nodes]
    usd = np.array([_least_usd_per_h(name) for name in names])
    return library.tokens_per_s / (library.counts @ usd), names


def _least_usd_per_h(node: str) -> float:
    """Over the paper's regions; elsewhere where none of them has it."""
    found = [
        price.price_usd_per_h
        for place in settings.REGIONS
        for price in prices.in_region(place)
        if price.node == node
    ]
    return min(found, default=prices.price_usd_per_h(node).price_usd_per_h)


def mixed_pipelines() -> list[Row]:
    """Figure 1a: what a dollar buys of Qwen3-235B's prefill within 1800 ms."""
    library = library_of("Qwen3-235B-A22B", Slo(1.8, 0.12), settings.LENGTHS["code"], 0)
    worth, names = per_usd(library)
    counts, made, best = library.counts, Rows("Figure 1a"), {}
    h100 = (counts[:, [place for place, name in enumerate(names) if "H100" not in name]] == 0).all(axis=1)
    alike = (counts > 0).sum(axis=1) == 1
    kinds = {"mixed": ~h100, "pure H100": h100 & alike, "H100 nodes of several sizes": h100 & ~alike}
    for label, chosen in kinds.items():
        place = int(np.argmax(np.where(chosen, worth, 0.0)))
        best[label] = float(worth[place])
        used = ", ".join(f"{n} {of}" for n, of in zip(counts[place].tolist(), names, strict=True) if n)
        figure = "best template, tokens/s/USD"
        made.add(label, figure, FIGURE_1A.get(label), best[label], f"{label}: {used}")
    theirs, ours = (values["mixed"] / values["pure H100"] for values in (FIGURE_1A, best))
    why = "a dollar buys more here: its lengths are not printed, and step times are ours; the order is as printed"
    made.add("mixed over pure H100", "best template, times", theirs, ours, why)
    return made


def spectrum() -> tuple[list[Row], tuple[Plot, ...]]:
    """Figure 1b: throughputs that templates for GPT-OSS-120B's decode have, of one node type and of all."""
    library = library_of("GPT-OSS-120B", Slo(1.0, 0.04), settings.LENGTHS["conv"], 1)
    alike = (library.counts > 0).sum(axis=1) == 1
    made, lines = Rows("Figure 1b", "drawn, not printed"), []
    for label, chosen in (("one node type", alike), ("all", np.full(len(library), True))):
        steps = np.unique(library.tokens_per_s[chosen])
        wanted = np.linspace(steps[0], library.tokens_per_s[alike].max(), 2000)
        over = steps[np.searchsorted(steps, wanted)] / wanted - 1
        made.add(label, "different throughputs, templates", None, float(len(steps)))
        made.add(label, "mean excess over any demand, share", None, float(over.mean()))
        at = np.linspace(0, len(steps) - 1, min(200, len(steps))).astype(int)
        x, y = steps[at] / library.tokens_per_s.max(), (at + 1) / len(steps)
        lines.append(Line(label, tuple(x.tolist()), tuple(y.tolist())))
    return made, (Plot("Figure 1b", "throughput, normalised", "share of templates", tuple(lines)),)


def sweep(pairs: Sequence[tuple[int, float]]) -> list[Row]:
    """Figure 13: templates, time and the best template as N_max and rho grow."""
    kinds = tuple(nodes.node_type(f"{count}x{gpu}") for gpu in GPUS for count in (1, 2, 4, 8))
    rates = stage_rates(models.model("GPT-OSS-120B"), kinds, Slo(1.0, 0.04), *settings.LENGTHS["conv"])[0]
    made = Rows(
        "Figure 13",
        "the paper draws them: count and time grow exponentially, the best is flat at (6, 12)",
    )
    for most, ratio in pairs:
        start_s = time.process_time()
        library = pipeline_library(rates, max_nodes=most, memory_ratio=ratio, prune=False)
        where, took_s = f"N_max {most}, rho {ratio:g}", time.process_time() - start_s
        made.add(where, "library, templates", None, float(len(library)))
        made.add(where, "time, CPU-s", None, took_s)
        made.add(where, "best template, tokens/s/USD", None, float(per_usd(library)[0].max()))
    return made


def _ample(solver: Solver, quick: bool) -> list[Row]:
    """Baselines as printed and as strong as there are, nodes in plenty; and the model that costs most."""
    setting = solver.setting
    near = f"plans are within {GAP[setting]:.0%} of their least cost" if GAP[setting] > NEAR else ""
    made = Rows(f"Figure 7, {setting}, nodes in plenty", near)
    kinds = {"as printed": RIVALS} | ({} if quick else {"strong": STRONG})
    costs = solver.costs([*(way for ways in kinds.values() for way in ways.values()), CORAL], [None])
    model, *published = LARGEST[setting]
    rents = {way: _model_usd(solver, way, model) for way in (HOMO, CAUCHY, CORAL)}
    for (rival, theirs), of_model in zip(PAPER[setting].items(), published, strict=True):
        for label, ways in kinds.items():
            ratio = costs[ways[rival]] / costs[CORAL]
            made.add("all models", f"{rival} {label} over Coral, times", theirs, ratio)
        ours = rents[RIVALS[rival]] / rents[CORAL]
        made.add(model, f"{rival} as printed over Coral, times", of_model, ours)
    if not quick:
        auto = solver.costs(["auto"], [None])["auto"]
        made.add("all models", "Coral over auto, times", None, costs[CORAL] / auto)
    return made


def gap(solver: Solver, there: Availability, scale: float, slow: float) -> list[Row]:
    """What of the distance to the published savings is what: each row has one thing changed from the first."""
    setting = solver.setting
    made = Rows(f"Figure 7, {setting}, what the gap is", GAP_NOTE)
    epochs = [there.supply(epoch, scale) for epoch in range(EPOCHS)]
    tried: dict[str, tuple[Solver, Sequence[Supply | None], Mapping[str, str]]] = {
        "as printed, nodes in plenty, mean lengths": (solver, [None], RIVALS),
        "baselines with our improvements": (solver, [None], STRONG),
        f"availability: {there.source}": (solver, epochs, RIVALS),
        "lengths: thirds of Azure's prompts": (Solver(setting, settings.with_lengths), [None], RIVALS),
        f"hardware: compute {slow:.3g} times slower": (
            Solver(setting, partial(settings.slower, times=slow)),
            [None],
            RIVALS,
        ),
    }
    for label, (each, supplies, rivals) in tried.items():
        costs = each.costs([*rivals.values(), CORAL], supplies)
        for rival, theirs in PAPER[setting].items():
            made.add(label, f"{rival} over Coral, times", theirs, costs[rivals[rival]] / costs[CORAL])
    return made


def _model_usd(solver: Solver, way: str, model: str) -> float:
    phases = settings.by_phase(problem(solver.setting), solver.plan(way)[0])
    return sum(usd for (name, _), usd in phases.items() if name == model)


def enough(solver: Solver, there: Availability) -> float:
    """The least power of two of GPUs of each type and size in a region with which every strategy serves all."""
    scale = 16.0
    while not all(solver.serves(w, there.supply(e, scale)) for w in (HOMO, CAUCHY) for e in range(EPOCHS)):
        scale *= 2
    return scale


def _epochs(solver: Solver, there: Availability, scale: float) -> list[Row]:
    """Figure 7: five epochs with nodes that come and go, enough for everybody."""
    setting = solver.setting
    supplies = [there.supply(epoch, scale) for epoch in range(EPOCHS)]
    costs = solver.costs([HOMO, CAUCHY, CORAL], supplies)
    note = f"{there.source}, {scale:g} GPUs of each type and size in a region at most; rates are level"
    made = Rows(f"Figure 7, {setting}, five epochs", note)
    for rival, theirs in PAPER[setting].items():
        made.add("all models", f"{rival} over Coral, times", theirs, costs[RIVALS[rival]] / costs[CORAL])
    solve_s = float(np.mean([solver.plan(CORAL, supply)[1] for supply in supplies]))
    solved = "ours also times templates that were not timed before; theirs is Gurobi alone on 32 cores"
    made.add("Coral", "mean time of a solve, CPU-s", SOLVE_S[setting][0], solve_s, solved)
    return made


def least(solver: Solver, there: Availability) -> float:
    """Doubled until Coral serves all in the first epoch."""
    scale = 2.0
    while not solver.serves(CORAL, there.supply(0, scale)):
        scale *= 2
    return scale


def _scarce(solver: Solver, there: Availability) -> list[Row]:
    """Figures 8 to 10: demand is scaled down alike until it can be served."""
    setting = solver.setting
    tight = ABOVE[setting] * least(solver, there)
    supplies = [there.supply(epoch, tight) for epoch in range(EPOCHS)]
    ways = (HOMO, CAUCHY, CORAL)
    costs = solver.costs(ways, supplies)
    served = {w: float(np.mean([solver.plan(w, s)[0].fraction for s in supplies])) for w in ways}
    note = f"{ABOVE[setting]:g} times what Coral can do with, while half of that it cannot: {tight:g} GPUs of each"
    goodputs, usd = SCARCE[setting]
    made = Rows(f"Figures 8 to 10, {setting}, scarce", note)
    for place, (rival, way) in enumerate(RIVALS.items()):
        if served[way] > 0:
            made.add(
                rival, "goodput, Coral's over theirs, times", goodputs[place], served[CORAL] / served[way]
            )
        made.add(rival, "demand that they serve, share", None, served[way])
        made.add(rival, "cost, theirs over Coral's, times", usd[place], costs[way] / costs[CORAL])
    solve_s = float(np.mean([solver.plan(CORAL, supply)[1] for supply in supplies]))
    made.add("Coral", "mean time of a solve, CPU-s", SOLVE_S[setting][1], solve_s)
    return made


def _heavy(solver: Solver) -> list[Row]:
    """Figure 11: four fifths of the requests are for the large models, or for the small ones."""
    setting = solver.setting
    made = Rows(
        f"Figure 11, {setting}", "nodes in plenty; of core, small-heavy the paper says about 10 % cheaper"
    )
    for label, heavy, published in zip(("large", "small"), (LARGE, SMALL), HEAVY[setting], strict=True):
        rates = settings.heavy_rates_per_s(setting, heavy[setting])
        costs = {way: solver.plan(way, None, rates)[0].cost_usd_per_h for way in (HOMO, CAUCHY, CORAL)}
        for rival, theirs in zip(RIVALS, published, strict=True):
            made.add(
                f"{label}-heavy", f"{rival} over Coral, times", theirs, costs[RIVALS[rival]] / costs[CORAL]
            )
    return made


def helix() -> list[Row]:
    """Figure 12: one model on Helix's cluster, all of which Helix rents; then as much as comes."""
    model, lengths, types = models.model("Llama-2-70B"), (763, 232), tuple(map(nodes.node_type, HELIX))
    usd = {node.name: _least_usd_per_h(node.name) for node in types}
    offers = tuple(map(NodeOffer, usd, usd.values(), HELIX.values()))
    whole = sum(offer.price_usd_per_h * offer.available for offer in offers)

    def coral(rate_per_s: float) -> tuple[float, float]:
        """Requests a second that are served, and what they cost."""
        traffic = Traffic("m", rate_per_s, (LengthBin(*lengths, 1.0),))
        asks = (model_demand("m", model, Slo(2.09, 0.73), traffic),)
        planning_problem = PlanningProblem(asks, (Region("cluster", offers),), types, codecs=CODECS)
        plan = STRATEGIES["coral"](TemplateFactory(planning_problem), SolveSettings(time_limit_s=20.0)).plan
        return plan.fraction * rate_per_s, plan.cost_usd_per_h

    served_per_s, cost = coral(HELIX_PER_S)
    most_per_s, _ = coral(HELIX_BEYOND_PER_S)
    flow = best_flow(node_rates(model, types, lengths, HELIX_STEP), list(HELIX.values()), HELIX_LIMIT_S)
    made = Rows("Figure 12", HELIX_NOTE)
    where = f"{HELIX_PER_S:g} requests/s"
    made.add(where, "served by Coral, share", 1.0, served_per_s / HELIX_PER_S)
    made.add(where, "cost that Coral saves, share", HELIX_SAVED, 1 - cost / whole)
    made.add("all that comes", "Helix, requests/s", None, flow.per_s)
    made.add("all that comes", "Helix, at most, requests/s", None, flow.bound_per_s)
    made.add("all that comes", "Coral, requests/s", None, most_per_s)
    made.add("all that comes", "Coral over Helix, times", HELIX_GAIN, most_per_s / flow.per_s)
    return made

"""What rehearsal is worth: random specs with bursty arrivals, planned on averages and planned with rehearsal.

Arrivals are gamma-distributed (coefficient of variation 2 to 4) or switch between busy and quiet. Both plans serve
the same requests, drawn from seeds that neither planning nor rehearsal has seen; a model misses when the share of its
requests within the objective is below what was promised. Specs that cannot be served at all are drawn anew.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from parts.common import run, say
from parts.problems import one_region, resolved
from potluck.catalog import models
from potluck.cli.planning.rehearsal import judge_of
from potluck.core.state.policy import Policy
from potluck.core.values.length_laws import Binned
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, Slo, Traffic
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.rehearse.evidence import Evidence, TrialSetup, evidence_of
from potluck.rehearse.rehearsal import Rehearsal, RehearsalRules, rehearse
from potluck.rehearse.request_sources import FRESH, Source, made_up
from potluck.sim.load import arrivals
from potluck.sim.load.arrivals import draw
from potluck.sim.load.workload import Workload, merge, workload
from potluck.sim.sim_settings import SimSettings as Running

MODELS = {
    "Llama-3.1-8B": (1.0, 0.05),
    "Phi-4": (1.2, 0.06),
    "GPT-OSS-20B": (0.9, 0.03),
    "Qwen3-32B": (1.6, 0.1),
}
"""Model to the tightest objective it gets: TTFT and TPOT in s, about what CORAL asks of them."""
NODES = ("1xL4", "1xA10G", "1xL40S", "2xL40S", "1xA100-80GB", "1xH100")
AVAILABLE = 60
SPECS, QUICK_SPECS = 10, 3
RULES = RehearsalRules(fresh=True)
TEST = 1000 * FRESH
"""Numbers of the runs that decide here."""
SWITCH_S = 5.0


@dataclass(frozen=True, slots=True)
class Case:
    seed: int
    problem: PlanningProblem
    traffic: tuple[Traffic, ...]
    source: Source
    bursts: str

    def trial(self, plan: Plan, source: Source, policy: Policy) -> TrialSetup:
        means = {one.model: (one.mean_input_tokens, one.mean_output_tokens) for one in self.traffic}
        asked = {one.model: one for one in self.traffic}
        return TrialSetup(resolved(self.problem, plan, means), source, policy, Running(), asked)


def case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    chosen = rng.choice(sorted(MODELS), size=int(rng.integers(1, 3)), replace=False)
    traffic, asks = [], []
    for name in (str(item) for item in chosen):
        ttft_s, tpot_s = MODELS[name]
        loose = float(rng.uniform(1.0, 2.5))
        slo = Slo(ttft_s * loose, tpot_s * float(rng.uniform(1.0, 2.0)), float(rng.choice([0.9, 0.95, 0.99])))
        size = 0.3 if name == "Qwen3-32B" else 1.0
        one = Traffic(name, float(rng.uniform(3.0, 15.0)) * size, _lengths(rng))
        traffic.append(one)
        asks.append(model_demand(name, models.model(name), slo, one))
    chosen_nodes = [str(item) for item in rng.choice(NODES, size=4, replace=False)]
    problem = PlanningProblem(tuple(asks), *one_region(chosen_nodes, AVAILABLE), codecs=CODECS)
    if seed % 2:
        cv = float(rng.uniform(2.0, 4.0))
        return Case(seed, problem, tuple(traffic), made_up(traffic, cv), f"gamma, CV {cv:.2g}")
    peak = float(rng.uniform(1.5, 2.5))
    source = switching(tuple(traffic), peak)
    return Case(seed, problem, tuple(traffic), source, f"on/off, {peak:.2g}x when on")


def _lengths(rng: np.random.Generator) -> tuple[LengthBin, ...]:
    """A lognormal of prompts in 12 equal bins, each with its own mean answer."""
    prompts = np.sort(rng.lognormal(rng.uniform(5.5, 7.3), rng.uniform(0.4, 1.0), size=12))
    answers = rng.lognormal(np.log(rng.uniform(60, 300)), 0.5, size=12)
    pairs = zip(np.clip(prompts, 16, 12_000), np.clip(answers, 8, 1_500), strict=True)
    return tuple(LengthBin(float(p), float(a), 1 / 12) for p, a in pairs)


def switching(traffic: tuple[Traffic, ...], peak: float) -> Source:
    """Busy and quiet times of random length, `peak` times the mean rate and the rest; the mean is kept."""

    def source(number: int, names: Collection[str], span: float) -> Workload:
        parts = []
        for place, one in enumerate(traffic):
            if one.model not in names:
                continue
            rng = np.random.default_rng([number, place])
            rates: list[float] = []
            on = bool(rng.random() < 0.5)
            while len(rates) < span:
                rates += [peak if on else max(0.0, 2.0 - peak)] * max(1, round(rng.exponential(SWITCH_S)))
                on = not on
            shape = np.array(rates[: max(1, int(span))])
            when = arrivals.curve(rng, list(shape / shape.mean() * one.rate_per_s), 1.0)
            prompts, answers = draw(rng, Binned(one.lengths), len(when))
            parts.append(workload(one.model, when, prompts, answers))
        return merge(parts)

    return source


Tried = tuple[Rehearsal, tuple[Evidence, ...], tuple[Evidence, ...]]


def tried(each: Case, settings: SolveSettings) -> Tried | None:
    """The rehearsal, and what the plans without and with it do with requests that nobody has seen."""
    factory = TemplateFactory(each.problem)
    first = STRATEGIES["auto"](factory, settings)
    if first.plan.fraction < 1:
        return None
    trial = each.trial(first.plan, each.source, Policy(admission=False))
    result = rehearse(factory, STRATEGIES["auto"], settings, judge_of(trial), RULES, first)
    before, after = (evidence_of(trial, plan, first_run=TEST) for plan in (first.plan, result.best.plan))
    return result, before, after


def _missed(evidence: tuple[Evidence, ...]) -> bool:
    return any(one.mean < one.promised for one in evidence)


def _told(each: Case, rehearsal: Rehearsal, before: tuple[Evidence, ...], after: tuple[Evidence, ...]) -> str:
    words = [
        f"{old.model} {old.promised:.0%}: {old.mean:.1%} -> {new.mean:.1%}"
        for old, new in zip(before, after, strict=True)
    ]
    cost = f"{rehearsal.averages.plan.cost_usd_per_h:.2f} -> {rehearsal.best.cost_usd_per_h:.2f} USD/h"
    state = "" if rehearsal.chosen else f"; no plan held: {rehearsal.reason}"
    return (
        f"  spec {each.seed} ({each.bursts}): {cost}; {'; '.join(words)}; {len(rehearsal.steps)} plans{state}"
    )


def measure(quick: bool) -> dict[str, float]:
    settings = SolveSettings(time_limit_s=10.0)
    wanted, seed, left_out = (QUICK_SPECS if quick else SPECS), 0, 0
    start_s = time.process_time()
    results: list[Tried] = []
    while len(results) < wanted:
        seed += 1
        item = case(seed)
        result = tried(item, settings)
        if result is None:
            left_out += 1
            continue
        say(_told(item, *result))
        results.append(result)
    evidence = [one for _, _, after in results for one in after]
    first = sum(outcome.averages.plan.cost_usd_per_h for outcome, _, _ in results)
    best = sum(outcome.best.cost_usd_per_h for outcome, _, _ in results)
    ratios = [outcome.best.cost_usd_per_h / outcome.averages.plan.cost_usd_per_h for outcome, _, _ in results]
    return {
        "specs": wanted,
        "specs_left_out_as_out_of_reach": left_out,
        "missed_without_rehearsal": sum(_missed(before) for _, before, _ in results),
        "missed_with_rehearsal": sum(_missed(after) for _, _, after in results),
        "no_plan_held": sum(outcome.chosen is None for outcome, _, _ in results),
        "single_batches_missed_with_rehearsal": sum(
            value < one.promised for one in evidence for value in one.attained
        ),
        "single_batches": sum(len(one.attained) for one in evidence),
        "cost_ratio_all": best / first,
        "cost_ratio_least": min(ratios),
        "cost_ratio_most": max(ratios),
        "specs_cheaper_with_rehearsal": sum(ratio < 1 - 1e-9 for ratio in ratios),
        "plans_mean": sum(len(outcome.steps) for outcome, _, _ in results) / wanted,
        "cpu_s_per_spec": (time.process_time() - start_s) / wanted,
    }


if __name__ == "__main__":
    targets = {"missed_without_rehearsal": (">=", 1), "missed_with_rehearsal": ("==", 0)}
    run(
        "rehearse",
        measure,
        targets,
        seeds=range(1, SPECS + 1),
        quick_without="most specs",
    )

"""CAUCHY's three programs beside Mélange's (its 4.3, Figure 8), and what its own printed figures say of them.

Its candidates: H800, A800 and H20 alone, and prefill on one feeding decode on another, nine pairs: "up to 12". Of
two directions the better one stays. Their goodputs are profiled as it does it, by running each (here in simulation,
with the host of an engine of its time), or taken from the performance model as `potluck plan` does it, with today's.
Demands are its 54, 50 and 6 requests/s. Programs and candidates are the planner's; the goodputs alone are put in.

Cost efficiency has two meanings that the paper does not tell apart: of the tokens that are asked for, or of all that
the deployment could serve. By the first MC-LP is the best there can be: the same tokens for the least cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from papers import fleets
from papers.cauchy import (
    LOADS,
    MODEL,
    PRICES_USD_PER_H,
    Effort,
    Load,
    combo_of,
    goodput_per_s,
    node_of,
    problem_of,
    table3_policy,
)
from papers.cronus import OLD_HOST
from papers.rows import Row, Rows
from potluck.catalog import models
from potluck.core.values.plan import BucketCapacity, Plan, Template
from potluck.core.values.types import LengthBin, NodeOffer, Region, Traffic
from potluck.perf.timers.cauchy_timer import CauchyModel, ComboSide, ce
from potluck.plan.problem import PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.templates.combo import served_per_s

GPUS = ("H800", "A800-PCIe", "H20")
AVAILABLE = 8
RATES_PER_S = {"dailymail": 54.0, "sharegpt": 50.0, "longwriter": 6.0}
PROFILED, MODELLED = "profiled", "modelled"
PROFILING = Effort(1.0, (1,), 0.04)
PROGRAMS = {"MCE-LP": "cauchy-mce", "MC-LP": "cauchy-mc", "CO-LP": "cauchy", "Mélange": "melange"}
FIGURE_8 = {("dailymail", "MCE-LP"): 0.469, ("dailymail", "MC-LP"): 0.289}
"""(workload, against): how much higher CO-LP's cost efficiency is; the other bars have no number."""
EXAMPLE = {
    "A800": (0.82, 1.09, 1.07),
    "H20": (1.23, 1.50, 1.15),
}  # Requests/s, USD/h, million tokens/USD (3.3.2).
TABLE_3 = {
    1: (2.32, 1636.24),
    2: (3.14, 1630.15),
    3: (3.22, 1329.15),
}  # Decoding H20: requests/s, thousand tokens/USD.
RANKED = (("H800", "A800-PCIe"), ("A800-PCIe", "H20"), ("A800-PCIe", "A800-PCIe"), ("H800", "H20"))
"""Its candidates for LongWriter, the most cost-efficient first (3.3.3)."""
MC_IS_BEST = (
    "of the tokens asked for nothing can cost less than MC-LP, whatever the goodputs: least cost is its objective; "
    "+28.9 % can only be of all that a deployment could serve, or of goodputs that did not hold"
)
BATCH = 64.0  # Of equation 15; the order below is the same for any.

Goodputs = Mapping[str, tuple[Template, float]]
"""A candidate's name to what it is and the requests a second that it serves."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """What a program chose."""

    plan: Plan
    demand_per_s: float
    goodput_per_s: float
    tokens: float  # Of a mean request.

    @property
    def usd_per_h(self) -> float:
        return self.plan.cost_usd_per_h

    @property
    def asked_ktokens_per_usd(self) -> float:
        return self.demand_per_s * self.tokens * 3.6 / self.usd_per_h

    @property
    def most_ktokens_per_usd(self) -> float:
        return self.goodput_per_s * self.tokens * 3.6 / self.usd_per_h

    @property
    def text(self) -> str:
        return " + ".join(sorted(f"{item.count} {item.template}" for item in self.plan.deployments))


def candidates() -> dict[str, Template]:
    alone = {f"<{gpu}>": fleets.alone(node_of(gpu), MODEL) for gpu in GPUS}
    made = {name: fleets.template(name, "homogeneous", [("mixed", layout)]) for name, layout in alone.items()}
    return made | {f"<{a}, {b}>": combo_of(f"<{a}, {b}>", a, b) for a, b in product(GPUS, GPUS)}


def usd_per_h(template: Template) -> float:
    return sum(PRICES_USD_PER_H[entry.node] * entry.count for entry in template.nodes)


def profile(load: Load, effort: Effort = PROFILING) -> Goodputs:
    """Each candidate by itself, at the highest rate that keeps the objective."""
    policy = table3_policy(True)
    return {
        name: (item, goodput_per_s(problem_of(load, [(item, 1)], OLD_HOST), load, policy, effort))
        for name, item in candidates().items()
    }


def model_goodputs(load: Load) -> Goodputs:
    """The same of the planner's performance model, with the share of time that it plans with."""
    planning = planning_problem(load, RATES_PER_S[load.name])
    factory, demand = TemplateFactory(planning), planning.demands[0]
    rates = {}
    for template in factory.combos(demand):
        first, last = (
            template.replicas[0].layout.stages[0].nodes[0].node,
            template.replicas[-1].layout.stages[0].nodes[0].node,
        )
        names = [first] if len(template.replicas) == 1 else [first, last]
        if len(template.replicas) <= 2:
            rates[f"<{', '.join(name.removeprefix('1x') for name in names)}>"] = served_per_s(
                demand, template
            )
    return {
        name: (item, planning.headroom * rates[name]) for name, item in candidates().items() if name in rates
    }


def planning_problem(
    load: Load, rate_per_s: float, prices: Mapping[str, float] = PRICES_USD_PER_H
) -> PlanningProblem:
    prompt, output = load.mean_tokens
    lengths = LengthBin(round(prompt), round(output), 1.0)
    demand = model_demand(
        fleets.MODEL, models.model(MODEL), load.slo, Traffic(fleets.MODEL, rate_per_s, (lengths,))
    )
    types = tuple(node_of(gpu) for gpu in GPUS)
    offers = tuple(NodeOffer(item.name, prices[item.name], AVAILABLE) for item in types)
    return PlanningProblem((demand,), (Region(fleets.REGION, offers),), types)


def factory_of(
    load: Load, rate_per_s: float, goodputs: Goodputs, prices: Mapping[str, float] = PRICES_USD_PER_H
) -> TemplateFactory:
    """The planner's factory with these candidates in the place of its own: goodputs count as they are."""
    planning = replace(planning_problem(load, rate_per_s, prices), headroom=1.0)
    made = [
        replace(
            item,
            kind="combo" if len(item.replicas) > 1 else "homogeneous",
            capacity=(BucketCapacity(0, 0.0, 0.0, rate, load.ttft_s, load.tbt_s),),
        )
        for item, rate in better_directions(goodputs).values()
    ]
    single = [item for item in made if len(item.replicas) == 1]
    key = planning.demands[0].key
    return TemplateFactory(planning, {("homogeneous", key): single, ("combo", key): made})


def better_directions(goodputs: Goodputs) -> Goodputs:
    """Of two candidates with the same nodes the one that serves more; they cost the same."""
    kept: dict[tuple[tuple[str, int], ...], tuple[str, tuple[Template, float]]] = {}
    for name, (item, rate) in goodputs.items():
        nodes = tuple(sorted(item.node_counts.items()))
        if nodes not in kept or rate > kept[nodes][1][1]:
            kept[nodes] = (name, (item, rate))
    return dict(kept.values())


def deploy(factory: TemplateFactory, program: str) -> Deployed:
    plan = STRATEGIES[PROGRAMS[program]](factory, SolveSettings(time_limit_s=5.0)).plan
    demand = factory.problem.demands[0]
    served = {item.name: item.capacity[0].closed_per_s for item in plan.templates}
    total = sum(served[item.template] * item.count for item in plan.deployments)
    return Deployed(plan, demand.rate_per_s, total, demand.tokens_per_s / demand.rate_per_s)


def profiles(found: Mapping[str, Mapping[str, Goodputs]]) -> list[Row]:
    """What each candidate serves, by hour and dollar: where combos can pay."""
    note = (
        "an H800 alone serves most per dollar with today's host; with a host of its time combos come level with it "
        "on LongWriter, where batches are large and a step's host time counts most"
    )
    made = Rows("Goodputs of its candidates", note)
    for how, by_load in found.items():
        for load, goodputs in by_load.items():
            for name, (item, rate) in goodputs.items():
                made.add(
                    f"{load}, {how}, {name}",
                    "requests served, requests/USD",
                    None,
                    rate * 3600 / usd_per_h(item),
                )
    return made


def figure_8(found: Mapping[str, Mapping[str, Goodputs]], times: Mapping[str, Sequence[float]]) -> list[Row]:
    """`found`: profiled or modelled to the goodputs of each workload; `times` its demands."""
    made = Rows("Figure 8", "drawn, but for two bars")
    for how, load, factor in ((way, load, each) for way in found for load in LOADS for each in times[way]):
        rate = factor * RATES_PER_S[load.name]
        factory = factory_of(load, rate, found[how][load.name])
        chosen = {name: deploy(factory, name) for name in PROGRAMS}
        where = f"{load.name}, {rate:g} requests/s, {how}"
        for text in dict.fromkeys(item.text for item in chosen.values()):
            alike = [name for name, item in chosen.items() if item.text == text]
            made.add(f"{where}, {', '.join(alike)}: {text}", "rent, USD/h", None, chosen[alike[0]].usd_per_h)
        ours = chosen["CO-LP"]
        for name in ("MCE-LP", "MC-LP", "Mélange"):
            theirs, value = FIGURE_8.get((load.name, name)), chosen[name]
            asked = ours.asked_ktokens_per_usd / value.asked_ktokens_per_usd - 1.0
            most = ours.most_ktokens_per_usd / value.most_ktokens_per_usd - 1.0
            note = MC_IS_BEST if name == "MC-LP" else ""
            made.add(where, f"tokens asked for per USD, CO-LP against {name}, change", theirs, asked, note)
            made.add(
                where, f"tokens it could serve per USD, CO-LP against {name}, change", theirs, most, note
            )
    return made


def own_figures() -> list[Row]:
    """What follows from the paper's printed goodputs and prices, without any model of ours."""
    made = Rows("Printed goodputs")
    for name, (rate, usd, mtokens) in EXAMPLE.items():
        made.add(f"{name} alone", "rent for one request/s, USD/h", None, usd / rate)
        made.add(
            f"{name} alone",
            "tokens of a request by its own CE, tokens",
            None,
            mtokens * 1e6 * usd / 3600 / rate,
        )
    for decodes, (rate, ktokens) in TABLE_3.items():
        usd = PRICES_USD_PER_H["1xH800"] + decodes * PRICES_USD_PER_H["1xH20"]
        name = f"H800 -> {decodes} H20, opportunistic"
        made.add(name, "rent for one request/s, USD/h", None, usd / rate)
        made.add(name, "tokens of a request by its own CE, tokens", None, ktokens * 1e3 * usd / 3600 / rate)
    for load in LOADS:
        made.add(load.name, "tokens of a request, tokens", None, sum(load.mean_tokens))
    return [*made, *_printed_choice(), *_ranks()]


def _printed_choice() -> list[Row]:
    """The example's two candidates for a residual of 0.80, and all printed ones for its 6.4 requests/s."""
    load, every = LOADS[2], candidates()
    prices = PRICES_USD_PER_H | {"1xA800-PCIe": EXAMPLE["A800"][1]}
    single = {
        name: (every[name], EXAMPLE[gpu][0]) for name, gpu in (("<A800-PCIe>", "A800"), ("<H20>", "H20"))
    }
    combos = {
        f"<H800, {n} H20>": (combo_of(f"<H800, {n} H20>", "H800", "H20", n), rate)
        for n, (rate, _) in TABLE_3.items()
    }
    note = (
        "its example has CO-LP take the A800; over all goodputs that it prints, combos cost half as much again for a "
        "request as single GPUs, so only MCE-LP takes one; unless they are of unlike workloads: by its own CE a "
        "request has 390 tokens in the example, and in Table 3 twice that, half of LongWriter's"
    )
    made = Rows("Printed goodputs, programs", note)
    for rate, offered in ((0.8, single), (6.4, {**single, **combos})):
        factory = factory_of(load, rate, offered, prices)
        for name in PROGRAMS:
            item = deploy(factory, name)
            made.add(f"{rate:g} requests/s, {name}: {item.text}", "rent, USD/h", None, item.usd_per_h)
    return made


def ranking() -> list[tuple[str, str]]:
    """All pairs by equation 15 with Table 1 and LongWriter's lengths, the most cost-efficient first."""
    model, sides = CauchyModel.from_model(models.model(MODEL)), {}
    for gpu in GPUS:
        sides[gpu] = ComboSide(node_of(gpu).gpu, 1, PRICES_USD_PER_H[f"1x{gpu}"])
    worth = {
        (a, b): ce(model, BATCH, *LOADS[2].mean_tokens, sides[a], sides[b]) for a, b in product(GPUS, GPUS)
    }
    return sorted(worth, key=lambda pair: -worth[pair])


def _ranks() -> list[Row]:
    order = ranking()
    made = Rows(
        "Ranking for LongWriter",
        "equation 15 adds FLOP/s per USD of the one and bytes/s per USD of the other, so with its Table 1 "
        "<H800, H20> is first for any lengths; the paper's list has it last of four, so it is not by this alone",
    )
    for place, (a, b) in enumerate(RANKED, 1):
        made.add(f"<{a}, {b}>", "place by equation 15 of nine pairs, place", place, order.index((a, b)) + 1)
    return made

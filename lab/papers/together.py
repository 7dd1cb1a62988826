"""`auto` beside each paper's own strategy, on the settings of all five papers: what one planner over all saves.

A setting is a demand and what is on offer. A strategy that serves more is better; of those that serve as much, the
one that costs less. What the papers leave open was filled in before anything was run: CAUCHY's three workloads at the
6.4 requests/s of its example and at 2.5 and 5 times as many, one, four and sixteen pairs of CRONUS's GPUs at 80 % of
its throughput each, PrfaaS's case at three rates. CRONUS, THUNDERSERVE and PrfaaS themselves measure how much given
machines serve: so their machines are also asked for three or four times as much, which is more than they can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path

from papers import cauchy, coral_settings, cronus
from potluck.catalog import models, named_workloads, nodes, prices
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.template_factory import grow, solve_over
from potluck.rehearse.queueing_margins import scaled

SINGLES = ("cauchy", "cronus", "coral", "prfaas", "thunderserve")
EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S, LARGE_GAP = 120.0, 0.05
"""CPU time that no solve here needs, and how near to the best is near enough with many models: so the time that a
machine takes changes no plan.
"""
MOST = "the most of "  # So the names of settings begin in which more is asked for than can be served.
MANY = 3  # Models.
BEYOND, BEYOND_CASE = 3.0, 4.0
EQUAL = 1e-4
CASE = """models:
  - model: prfaas-1t-hybrid
    slo: {{ttft_ms: 60000, tpot_ms: 40}}
    traffic: {{rate_per_s: {rate}, input: {{mean: 27486, cv: 1.0}}, output: 1024}}
fleet:
  regions:
    - {{name: far, nodes: [{{node: 8xH200, available: 4, price_usd_per_h: 20}}]}}
    - {{name: near, nodes: [{{node: 8xH20, available: {near}, price_usd_per_h: 10}}]}}
links:
  - {{from: far, to: near, gbps: 100, rtt_ms: 5}}
  - {{from: near, to: far, gbps: 100, rtt_ms: 5}}
"""
"""PrfaaS's case study; by its gain at equal cost an H200 is twice an H20."""


@dataclass(frozen=True, slots=True)
class Answer:
    usd_per_h: float
    fraction: float
    served_per_s: float = 0.0
    gap: float = 1.0  # By what share of its cost a plan of the same columns might be cheaper.

    def beats(self, other: Answer) -> bool:
        if abs(self.fraction - other.fraction) > EQUAL:
            return self.fraction > other.fraction
        return self.usd_per_h < other.usd_per_h * (1 - EQUAL)


@dataclass(frozen=True, slots=True)
class Compared:
    """What every strategy makes of a setting."""

    paper: str
    setting: str
    answers: Mapping[str, Answer]
    problem: PlanningProblem
    plans: Mapping[str, Plan]

    @property
    def best(self) -> str:
        """The best of the strategies but `auto`."""
        names = [name for name in self.answers if name != "auto"]
        return next(a for a in names if not any(self.answers[b].beats(self.answers[a]) for b in names))

    @property
    def name(self) -> str:
        return self.setting.removeprefix(MOST)

    @property
    def most(self) -> bool:
        return self.setting.startswith(MOST)

    def no_worse(self, than: str) -> bool:
        return not self.answers[than].beats(self.answers["auto"])

    def better(self, than: str) -> bool:
        return self.answers["auto"].beats(self.answers[than])


def one_model(
    model: str,
    slo: Slo,
    rate_per_s: float,
    lengths: tuple[float, float],
    nodes_usd: Mapping[str, tuple[float, int]],
) -> PlanningProblem:
    traffic = Traffic("m", rate_per_s, (LengthBin(round(lengths[0]), round(lengths[1]), 1.0),))
    offers = tuple(NodeOffer(node, usd, count) for node, (usd, count) in nodes_usd.items())
    asks = (model_demand("m", models.model(model), slo, traffic),)
    types = tuple(nodes.node_type(node) for node in nodes_usd)
    return PlanningProblem(asks, (Region("cluster", offers),), types, codecs=CODECS)


def settings(folder: Path, quick: bool) -> Iterator[tuple[str, str, PlanningProblem]]:
    """(paper, setting, problem); `folder` is for specs that are written on the way."""
    cluster = {node: (usd, 8) for node, usd in cauchy.PRICES_USD_PER_H.items() if node.startswith("1x")}
    for load in cauchy.LOADS:
        lengths = named_workloads.workload(load.name).lengths
        means = (lengths.prompt.mean_tokens, lengths.output.mean_tokens)
        for rate in (6.4, 16.0, 32.0)[: 1 if quick else 3]:
            yield (
                "CAUCHY",
                f"{load.name}, {rate:g}/s",
                one_model(cauchy.MODEL, load.slo, rate, means, cluster),
            )
    for one in cronus.SETTINGS:
        usd = {
            node: prices.price_usd_per_h(node).price_usd_per_h
            for node in (f"1x{cronus.HIGH}", f"1x{one.low}")
        }
        for pairs in (1, 4, 16)[: 1 if quick else 3]:
            rate = 0.8 * pairs * one.published_per_s[cronus.CRONUS]
            there = {node: (price, pairs) for node, price in usd.items()}
            made = one_model(one.model, Slo(3.0, 0.1), rate, cronus.MEAN_TOKENS, there)
            yield "CRONUS", f"{pairs} x {one.name}, {rate:.1f}/s", made
            if not quick:
                yield "CRONUS", f"{MOST}{pairs} x {one.name}", times(made, BEYOND)
    for name in ("core",) if quick else ("core", "extended"):
        yield "CORAL", name, coral_settings.problem(name)
        if quick:
            continue
        for label, heavy in (("large", coral_settings.LARGE), ("small", coral_settings.SMALL)):
            rates = coral_settings.heavy_rates_per_s(name, heavy[name])
            yield "CORAL", f"{name}, {label}-heavy", coral_settings.problem(name, rates)
    pool = (EXAMPLES / "pool.yaml").read_text("utf-8")
    loads = {
        "conversation, 10/s": pool,
        "coding, 10/s": pool.replace("1155", "2000").replace("output: 211", "output: 28"),
    }
    cases = {f"case study, {rate:g}/s": CASE.format(rate=rate, near=12) for rate in (1.0, 2.0, 3.0)}
    kimi = (EXAMPLES / "papers" / "prfaas.yaml").read_text("utf-8")
    cases |= {"Kimi Linear, 6/s": kimi, f"{MOST}the case study": CASE.format(rate=3.0, near=8)}
    cases[f"{MOST}Kimi Linear's"] = kimi
    loads |= {f"{MOST}{name.split(',')[0]}": text for name, text in loads.items()}
    for paper, specs in (("THUNDERSERVE", loads), ("PrfaaS", cases)):
        for name, text in list(specs.items())[: 1 if quick else None]:
            path = folder / "spec.yaml"
            path.write_text(text, "utf-8")
            planning_problem = load_problem(read_spec(path), 0.8, None, (), 0.0)
            beyond = BEYOND_CASE if paper == "PrfaaS" else BEYOND
            yield paper, name, times(planning_problem, beyond) if name.startswith(MOST) else planning_problem


def times(problem: PlanningProblem, factor: float) -> PlanningProblem:
    return scaled(problem, {demand.name: factor for demand in problem.demands})


def compare_all(problems: Iterable[tuple[str, str, PlanningProblem]]) -> list[Compared]:
    made = []
    for paper, name, planning_problem in problems:
        # Of the papers one alone hands KV over in fewer bits.
        answers, factory, plans = {}, TemplateFactory(planning_problem), dict[str, Plan]()
        exact = TemplateFactory(replace(planning_problem, codecs=planning_problem.codecs[:1]))
        many = len(planning_problem.demands) > MANY
        limits = SolveSettings(time_limit_s=LIMIT_S, gap_target=LARGE_GAP if many else EQUAL)
        for strategy in (*SINGLES, "auto"):
            if strategy == "thunderserve" and paper != "THUNDERSERVE":
                continue  # It divides machines that one has; elsewhere they are to be chosen.
            if strategy == "auto":  # It tries all others itself, for a part of its time each.
                limits = replace(
                    limits, start_plans=tuple(plan for plan in plans.values() if plan.deployments)
                )
            made_in = factory if strategy in ("thunderserve", "auto") else exact
            plan = plans[strategy] = STRATEGIES[strategy](made_in, limits).plan
            served_per_s = plan.fraction * sum(demand.rate_per_s for demand in planning_problem.demands)
            answers[strategy] = Answer(plan.cost_usd_per_h, plan.fraction, served_per_s, plan.gap)
        one = Compared(paper, name, answers, planning_problem, plans)
        if planning_problem.pool is None and not many and not one.most and not one.better(one.best):
            answers["auto"] = replace(answers["auto"], gap=proven_gap(factory, plans["auto"]))
        made.append(one)
    return made


def proven_gap(factory: TemplateFactory, plan: Plan) -> float:
    """By what share of its cost any plan might be cheaper, of all pipelines that there are: also of those that
    nobody has timed yet, as far as they might undercut it.
    """
    limits = SolveSettings(time_limit_s=LIMIT_S, gap_target=EQUAL, start_plans=(plan,))
    kinds = (factory.homogeneous, factory.combos, factory.gpu_combos, factory.pairs, factory.aggregated)
    others = {
        demand.name: list(
            {t.name: t for kind in (*kinds, factory.also_decoding) for t in kind(demand)}.values()
        )
        for demand in factory.problem.demands
    }
    grown = grow(factory, limits, others, plan.cost_usd_per_h)
    templates = {
        demand.name: [*others[demand.name], *factory.pipelines(demand)] for demand in factory.problem.demands
    }
    found = solve_over(factory, limits, "auto", templates).allocation
    return max(0.0, 1.0 - found.lower_bound_usd_per_h / plan.cost_usd_per_h) if grown.complete else 1.0


MECHANISMS = """\
| mechanism | `cauchy` | `cronus` | `coral` | `prfaas` | `thunderserve` | `auto` |
|---|---|---|---|---|---|---|
| one node serves requests whole | yes | where it has no pair | no | no | no | yes |
| prefill and decode apart, on any two kinds of nodes | in combos of 1:1 to 2:6 | no | yes | yes | in groups | yes |
| a prompt's prefill divided over two nodes | no | yes | no | no | no | yes |
| one replica over unlike nodes | no | no | yes | no | yes | yes |
| prefill in another region | no | no | yes | yes | no | yes |
| KV handed over in 8 or 4 bits | no | no | no | no | yes | yes |
| a replica that serves requests whole and decodes for others | no | no | no | no | no | yes |"""


def page(found: list[Compared], command: str, simulated: str = "") -> str:
    """What is paid for a given demand, what given machines serve, and why `auto` is not better where it is not.

    `simulated` is the section on what became of it in simulation.
    """
    given, most = [one for one in found if not one.most], [one for one in found if one.most]
    wins, more = (sum(one.better(one.best) for one in part) for part in (given, most))
    own = sum(one.better(one.paper.lower()) for one in found)
    tied = [one for one in given if not one.better(one.best)]
    closed = sum(one.answers["auto"].gap < EQUAL for one in tied)
    worse = [f"{one.paper}, {one.setting}" for one in found if not one.no_worse(one.best)]
    parts = [
        "# All five together",
        f"Made by `{command}`: nothing below is written by hand.",
        "`auto` plans over the columns of all five papers at once. Here it stands beside each paper's own strategy "
        "on the settings of all five, planned on averages, at list or printed prices, to the least cost, or within "
        f"{LARGE_GAP:.0%} of it with more than {MANY} models; `auto` begins from what the others found. What each "
        "may do is what its paper prints:",
        MECHANISMS,
        f"**Of {len(found)} settings `auto` is no worse than the best single strategy on {len(found) - len(worse)}, "
        f"better than the best on {wins + more}, and better than the strategy of the paper that the setting is from "
        f"on {own}.** For a given demand it costs less than the best on {wins} of {len(given)}; of given machines, "
        f"asked for more than they can, it serves more on {more} of {len(most)}.",
        f"On {closed} of the {len(tied)} where it costs the same the setting is closed: the integer program's lower "
        "bound over all columns, pipelines that nobody has timed included, equals the cost (`proven_gap`; last "
        "column: by how much a plan might still be cheaper), or all machines are paid for anyhow. "
        "So no planner over these columns costs strictly less on "
        f"more than {len(given) - closed} of {len(given)}; half would be {(len(given) + 1) // 2}. Few nodes are "
        "enough there, and the next cheaper ones do not do. Which single strategy is best depends on the setting:",
        "\n".join(_summary(found)),
        "## A demand is given",
        "USD an hour of each; in brackets the share of the demand that is served, where that is not all of it; bold "
        "is the best of the single ones: it serves most, then costs least. All machines of a pool are paid for.",
        "\n".join(_rows(given)),
    ]
    if most:
        parts += [
            "## The machines are given",
            "Requests a second that the machines serve within the objective, when more are asked for.",
            "\n".join(_rows(most)),
        ]
    parts += [simulated] if simulated else []
    return "\n\n".join([*parts, *([f"Worse on: {'; '.join(worse)}."] if worse else [])]) + "\n"


def _rows(found: list[Compared]) -> list[str]:
    last = "serves more" if found and found[0].most else "at most cheaper"
    heads = ("paper", "setting", *SINGLES, "auto", "auto over best", last)
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for one in found:
        auto, best = one.answers["auto"], one.answers[one.best]
        ratio = auto.served_per_s / best.served_per_s if one.most else auto.usd_per_h / best.usd_per_h
        end = ("yes" if one.better(one.best) else "no") if one.most else f"{auto.gap:.1%}"
        cells = [one.paper, one.name, *(_cell(one, each) for each in (*SINGLES, "auto")), f"{ratio:.3f}", end]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _cell(one: Compared, name: str) -> str:
    answer = one.answers.get(name)
    if answer is None:
        return ""
    text = f"{answer.served_per_s:.2f}" if one.most else f"{answer.usd_per_h:,.2f}"
    if not one.most and answer.fraction < 1 - EQUAL:
        text += f" ({answer.fraction:.0%})"
    return f"**{text}**" if name == one.best else text


def _summary(found: list[Compared]) -> list[str]:
    """How each strategy fares beside `auto` over all settings that it is for."""
    rows = [
        "| strategy | settings | as good as `auto` | serves less | costs more, on average where it serves as much |"
    ]
    rows.append("|---|---|---|---|---|")
    for name in SINGLES:
        mine = [(one.answers[name], one.answers["auto"]) for one in found if name in one.answers]
        less = [pair for pair in mine if pair[0].fraction < pair[1].fraction - EQUAL]
        rest = [pair for pair in mine if pair not in less]
        ratios = [log(theirs.usd_per_h / ours.usd_per_h) for theirs, ours in rest]
        more = exp(sum(ratios) / len(ratios)) - 1 if ratios else 0.0
        alike = sum(not ours.beats(theirs) for theirs, ours in mine)
        rows.append(f"| `{name}` | {len(mine)} | {alike} | {len(less)} | {more:.1%} |")
    return rows

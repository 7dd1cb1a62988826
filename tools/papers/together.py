"""`auto` beside each paper's own strategy, on the settings of all five papers: what one planner over all saves.

A setting is a demand and what is on offer. A strategy that serves more is better; of those that serve as much, the
one that costs less. What the papers leave open was filled in before anything was run: CAUCHY's three workloads at the
6.4 requests/s of its example and at 2.5 and 5 times as many, one, four and sixteen pairs of CRONUS's GPUs at 80 % of
its throughput each, PrfaaS's case at three rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

from papers import cauchy, coral_settings, cronus
from papers.rows import Said, quiet
from potluck.catalog import models, named_workloads, nodes, prices
from potluck.cli.common.inputs import load_problem, read_spec
from potluck.core.values.plan import Plan
from potluck.core.values.types import LengthBin, NodeOffer, Region, Slo, Traffic
from potluck.plan.problem import CODECS, PlanningProblem, model_demand
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory

SINGLES = ("cauchy", "cronus", "coral", "prfaas", "thunderserve")
EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S, LIMIT_LARGE_S = 10.0, 12.0
COUNT = 33  # Settings, for a progress line.
EQUAL = 1e-4
CASE = """models:
  - model: prfaas-1t-hybrid
    slo: {{ttft_ms: 60000, tpot_ms: 40}}
    traffic: {{rate_per_s: {rate}, input: {{mean: 27486, cv: 1.0}}, output: 1024}}
fleet:
  regions:
    - {{name: far, nodes: [{{node: 8xH200, available: 4, price_usd_per_h: 20}}]}}
    - {{name: near, nodes: [{{node: 8xH20, available: 12, price_usd_per_h: 10}}]}}
links:
  - {{from: far, to: near, gbps: 100, rtt_ms: 5}}
  - {{from: near, to: far, gbps: 100, rtt_ms: 5}}
"""
"""PrfaaS's case study; by its gain at equal cost an H200 is twice an H20."""


@dataclass(frozen=True, slots=True)
class Answer:
    usd_per_h: float
    fraction: float

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

    @property
    def best(self) -> str:
        """The best of the strategies but `auto`."""
        names = [name for name in self.answers if name != "auto"]
        return next(a for a in names if not any(self.answers[b].beats(self.answers[a]) for b in names))

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
    cases = {f"case study, {rate:g}/s": CASE.format(rate=rate) for rate in (1.0, 2.0, 3.0)}
    cases["Kimi Linear, 6/s"] = (EXAMPLES / "papers" / "prfaas.yaml").read_text("utf-8")
    for paper, specs in (("THUNDERSERVE", loads), ("PrfaaS", cases)):
        for name, text in list(specs.items())[: 1 if quick else None]:
            path = folder / "spec.yaml"
            path.write_text(text, "utf-8")
            yield paper, name, load_problem(read_spec(path), 0.8, None, (), 0.0)


def compare(folder: Path, quick: bool, said: Said = quiet) -> list[Compared]:
    return compare_all(settings(folder, quick), said)


def compare_all(problems: Iterable[tuple[str, str, PlanningProblem]], said: Said = quiet) -> list[Compared]:
    made = []
    for paper, name, asked in problems:
        said(f"together: {paper}, {name}")
        answers, factory = {}, TemplateFactory(asked)
        found: tuple[Plan, ...] = ()
        limit_s = LIMIT_LARGE_S if len(asked.asks) > 3 else LIMIT_S
        for strategy in (*SINGLES, "auto"):
            if strategy == "thunderserve" and paper != "THUNDERSERVE":
                continue  # It divides machines that one has; elsewhere they are to be chosen.
            # `auto` tries all others itself, for a part of its time each; here it has what they found in theirs.
            limits = SolveSettings(time_limit_s=limit_s, starts=found if strategy == "auto" else ())
            plan = STRATEGIES[strategy](factory, limits).plan
            answers[strategy] = Answer(plan.cost_usd_per_h, plan.fraction)
            found += (plan,) if plan.deployments else ()
        made.append(Compared(paper, name, answers))
    return made


def page(found: list[Compared], command: str) -> str:
    """Costs, and the share served in brackets where it is not all; the best single strategy is bold."""

    def cell(one: Compared, name: str) -> str:
        answer = one.answers.get(name)
        if answer is None:
            return ""
        text = f"{answer.usd_per_h:,.2f}" + (
            "" if answer.fraction > 1 - EQUAL else f" ({answer.fraction:.0%})"
        )
        return f"**{text}**" if name == one.best else text

    own = [(one, one.paper.lower()) for one in found]
    lines = [
        "# All five together",
        f"Made by `{command}`: nothing below is written by hand.",
        "`auto` plans over the columns of all five papers at once. Here it stands beside each paper's own strategy "
        "on the settings of all five, planned on averages, at list or printed prices, within 10 or 12 s each; `auto` "
        "begins from what the others found.",
        f"**Of {len(found)} settings `auto` is no worse than the best single strategy on "
        f"{sum(one.no_worse(one.best) for one in found)}, better than the best on "
        f"{sum(one.better(one.best) for one in found)}, and better than the strategy of the paper that the setting "
        f"is from on {sum(one.better(name) for one, name in own)}.** Where few nodes are enough, the best are the "
        "same for everybody. Which single strategy is best depends on the setting:",
        "\n".join(_summary(found)),
        "USD an hour of each; in brackets the share of the demand that is served, where that is not all of it; bold "
        "is the best of the single ones: it serves most, then costs least. All machines of a pool are paid for.",
    ]
    heads = ("paper", "setting", *SINGLES, "auto", "auto over best")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for one in found:
        ratio = (
            one.answers["auto"].usd_per_h / one.answers[one.best].usd_per_h
            if one.answers[one.best].usd_per_h
            else 1.0
        )
        cells = [one.paper, one.setting, *(cell(one, name) for name in (*SINGLES, "auto")), f"{ratio:.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    worse = [f"{one.paper}, {one.setting}" for one in found if not one.no_worse(one.best)]
    notes = [f"Worse on: {'; '.join(worse)}."] if worse else []
    return "\n\n".join([*lines, "\n".join(rows), *notes]) + "\n"


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

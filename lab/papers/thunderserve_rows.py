"""THUNDERSERVE's rows and plots, all of them."""

from __future__ import annotations

from papers import thunderserve as base
from papers import thunderserve_deadlines, thunderserve_planned, thunderserve_split
from papers.rows import ProgressReporter, Reproduction, quiet


def reproduce(quick: bool, report_progress: ProgressReporter = quiet) -> Reproduction:
    names = list(base.WORK)[1:] if quick else list(base.WORK)
    report_progress("THUNDERSERVE, the cloud beside 8 A100")
    made = base.throughputs(names, quick)
    made += [] if quick else thunderserve_planned.throughputs(names)
    report_progress("THUNDERSERVE, convergence")
    figure, plots = base.convergence(list(base.SIZES)[:1] if quick else list(base.SIZES))
    made += figure
    for name in names:
        report_progress(f"THUNDERSERVE, 4 of 32 GPUs lost, {name}")
        made += base.losing_a_node(name, quick)
    report_progress("THUNDERSERVE, ratios and ablations")
    sweep, drawn = base.ratios(names)
    made += [*sweep, *base.ablations(names)]
    report_progress("THUNDERSERVE, Tables 5 and 8")
    made += [*base.table_5(), *base.by_its_own_times(), *thunderserve_split.table_5(base.answer_tokens())]
    report_progress("THUNDERSERVE, deadlines")
    rates = thunderserve_deadlines.RATES_PER_S[: 1 if quick else None]
    tries = thunderserve_deadlines.QUICK_TRIES if quick else thunderserve_deadlines.TRIES
    made += thunderserve_deadlines.figures(names, rates, tries)
    return Reproduction("THUNDERSERVE", tuple(made), (*plots, *drawn))

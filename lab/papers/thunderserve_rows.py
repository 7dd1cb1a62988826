"""THUNDERSERVE's rows and plots, all of them."""

from __future__ import annotations

from papers import thunderserve as base
from papers import thunderserve_deadlines, thunderserve_planned, thunderserve_split
from papers.rows import Reproduction, Said, quiet


def reproduce(quick: bool, said: Said = quiet) -> Reproduction:
    names = list(base.WORK)[1:] if quick else list(base.WORK)
    said("THUNDERSERVE, the cloud beside 8 A100")
    made = base.throughputs(names, quick)
    made += [] if quick else thunderserve_planned.throughputs(names)
    said("THUNDERSERVE, convergence")
    figure, plots = base.convergence(list(base.SIZES)[:1] if quick else list(base.SIZES))
    made += figure
    for name in names:
        said(f"THUNDERSERVE, 4 of 32 GPUs lost, {name}")
        made += base.losing_a_node(name, quick)
    said("THUNDERSERVE, ratios and ablations")
    sweep, drawn = base.ratios(names)
    made += [*sweep, *base.ablations(names)]
    said("THUNDERSERVE, Tables 5 and 8")
    made += [*base.table_5(), *base.by_its_own_times(), *thunderserve_split.table_5(base.answer_tokens())]
    said("THUNDERSERVE, deadlines")
    rates = thunderserve_deadlines.RATES_PER_S[: 1 if quick else None]
    tries = thunderserve_deadlines.QUICK_TRIES if quick else thunderserve_deadlines.TRIES
    made += thunderserve_deadlines.figures(names, rates, tries)
    return Reproduction("THUNDERSERVE", tuple(made), (*plots, *drawn))

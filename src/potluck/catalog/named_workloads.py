"""Named workloads: lengths and arrivals that papers and public traces describe, to simulate and plan with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from potluck.catalog.figure_sources import (
    CatalogNames,
    EntryFacts,
    FigureSource,
    SourcedFigure,
    entry_source,
    load_toml,
)
from potluck.core.values.length_laws import Fixed, Independent, Law, LogNormal, Quantiles, lognormal_from_mean

SIDES = ("input", "output")


@dataclass(frozen=True, slots=True)
class NamedWorkload:
    """Requests of one kind. The lengths of prompts and answers are independent."""

    name: str
    about: str
    lengths: Independent
    gap_cv: float  # Coefficient of variation of the gaps between arrivals: 1 is Poisson, 0 a clock.
    rate_per_s: float | None = None  # What the source ran, where it says so.
    prefix_hit_share: float = 0.0  # Share of prompt tokens that an endless cache would hold.


_names = CatalogNames("workload", "workloads.toml")
_entries, names, known, canonical = _names.entries, _names.all, _names.spellings, _names.canonical
"""Names in the order of the file; every spelling that is accepted; and the name that a spelling stands for."""


@lru_cache(maxsize=256)
def workload(name: str) -> NamedWorkload:
    """The workload of that name or alias; an unknown one is an error that suggests the nearest."""
    key = canonical(name)
    entry = _entries()[key]
    rate = entry.get("rate_per_s")
    return NamedWorkload(
        key,
        entry["about"],
        Independent(_law(entry, "input"), _law(entry, "output")),
        float(entry["gap_cv"]),
        None if rate is None else float(rate),
        float(entry.get("prefix_hit_share", 0.0)),
    )


def facts(name: str) -> EntryFacts:
    key = canonical(name)
    entry = _entries()[key]
    made = workload(key)
    shown: list[tuple[str, object]] = [("about", entry["about"])]
    for side, law in zip(SIDES, (made.lengths.prompt, made.lengths.output), strict=True):
        shown += [(f"mean_{side}_tokens", round(law.mean_tokens, 1)), (f"{side}_law", describe(law))]
    fields = ("gap_cv", "rate_per_s", "prefix_hit_share")
    shown += [(field, entry[field]) for field in fields if field in entry]
    own = entry_source(entry, "about")
    figures = [SourcedFigure(field, value, _shape_source(entry, field) or own) for field, value in shown]
    return EntryFacts(key, tuple(entry["aliases"]), tuple(figures), assumed=tuple(entry.get("assumed", ())))


def _shape_source(entry: dict[str, Any], field: str) -> FigureSource | None:
    """Lengths that were taken from another entry have that one's source."""
    side = next((side for side in SIDES if field.endswith((f"{side}_law", f"mean_{side}_tokens"))), None)
    if "like" not in entry or side is None or (field.startswith("mean") and "mean" in entry.get(side, {})):
        return None
    return entry_source(_entries()[entry["like"]], "about")


def describe(lengths: Law) -> str:
    if isinstance(lengths, Fixed):
        return f"fixed {lengths.tokens:g}"
    if isinstance(lengths, LogNormal):
        bounds = f"[{lengths.low_tokens:g}, {lengths.high_tokens:g}]"
        return f"lognormal({lengths.mu:.3g}, {lengths.sigma:.3g}) on {bounds}"
    return f"{len(lengths.points)} quantiles of a trace, {lengths.points[0][1]:.0f} to {lengths.points[-1][1]:.0f}"


def _law(entry: dict[str, Any], side: str) -> Law:
    written: dict[str, Any] = entry.get(side, {})
    if "like" in entry:
        written = _entries()[entry["like"]][side] | written
    if "tokens" in written:
        return Fixed(float(written["tokens"]))
    if "mu" in written:
        bounds = (float(written["min"]), float(written["max"]))
        return LogNormal(float(written["mu"]), float(written["sigma"]), *bounds)
    mean = float(written["mean"])
    if "cv" in written:
        return _lognormal(mean, float(written["cv"]), float(written.get("max", inf)))
    levels = [float(level) for level in load_toml("workloads.toml")["levels"]]
    raw = Quantiles(tuple(zip(levels, map(float, written["quantiles"]), strict=True)))
    stretch = mean / raw.mean_tokens
    return Quantiles(tuple((level, max(1.0, tokens * stretch)) for level, tokens in raw.points))


def _lognormal(mean: float, cv: float, most: float) -> LogNormal:
    """The width of the uncut log-normal with this cv, moved so that the mean holds after the cut at 1 and `most`."""
    mu, sigma = lognormal_from_mean(mean, cv)
    low, high = mu - 4 * sigma, mu + sigma
    for _ in range(100):
        middle = (low + high) / 2
        if LogNormal(middle, sigma, 1.0, most).mean_tokens < mean:
            low = middle
        else:
            high = middle
    return LogNormal(high, sigma, 1.0, most)

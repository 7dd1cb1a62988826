"""Which classes a model's requests are of, and where its users are: shares of its traffic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from potluck.core.errors import did_you_mean
from potluck.core.state.policy import Policy
from potluck.spec.schema import ModelIn, OriginIn
from potluck.spec.spec_problems import SpecProblems, shown
from potluck.spec.spec_values import ModelSpec

Distances = tuple[tuple[str, float], ...]
"""Region to seconds, there and back."""
WHOLE = 1e-6


def resolve_origins(
    written: Sequence[OriginIn], regions: Sequence[str], problems: SpecProblems
) -> tuple[tuple[str, Distances], ...]:
    """Every place with its distance to every region."""
    found: dict[str, Distances] = {}
    for origin in written:
        if origin.name in found:
            problems.add((*origin.at, "name"), f"duplicate origin {shown(origin.name)}; keep one")
        for region in origin.rtt_ms:
            if regions and region not in regions:
                problem = f"unknown region {shown(region)}{did_you_mean(region, regions)}"
                problems.add((*origin.at, "rtt_ms", region), problem)
        missing = [region for region in regions if region not in origin.rtt_ms]
        if missing:
            problems.add((*origin.at, "rtt_ms"), f"says nothing of {shown(missing[0])}; add it")
        found[origin.name] = tuple((region, ms / 1000) for region, ms in origin.rtt_ms.items())
    return tuple(found.items())


def with_shares(
    written: Sequence[ModelIn],
    models: list[ModelSpec],
    policy: Policy,
    origins: Mapping[str, Distances],
    problems: SpecProblems,
) -> list[ModelSpec]:
    """Models whose traffic knows its classes and origins."""
    classes = [each.name for each in policy.classes]
    for entry in written:
        at = entry.traffic.at
        _check(entry.traffic.classes, classes, "class", (*at, "classes"), problems)
        _check(entry.traffic.origins, origins, "origin", (*at, "origins"), problems)
        total = sum(entry.traffic.origins.values())
        if entry.traffic.origins and abs(total - 1) > WHOLE:
            problems.add((*at, "origins"), f"shares must add up to 1, not {total:g}")
        if sum(entry.traffic.classes.values()) > 1 + WHOLE:
            problems.add((*at, "classes"), "shares must not add up to more than 1")
    if problems.found or len(models) != len(written):
        return models
    return [
        replace(
            model,
            traffic=replace(
                model.traffic,
                classes=tuple(entry.traffic.classes.items()),
                origins=tuple(entry.traffic.origins.items()),
            ),
        )
        for entry, model in zip(written, models, strict=True)
    ]


def _check(
    named: Collection[str],
    known: Collection[str],
    what: str,
    at: tuple[str | int, ...],
    problems: SpecProblems,
) -> None:
    for name in named:
        if name not in known:
            problems.add((*at, name), f"unknown {what} {shown(name)}{did_you_mean(name, known)}")

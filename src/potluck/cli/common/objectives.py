"""`--slo-scale`: a spec with all its objectives so many times as long, as papers measure how strict one can be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from potluck.core.errors import InputError

if TYPE_CHECKING:
    from potluck.spec.values import Spec

scale_option = click.option(
    "--slo-scale",
    type=float,
    default=1.0,
    show_default=True,
    help="All objectives (TTFT, TPOT, E2E) times this.",
)


def scaled(spec: Spec, factor: float) -> Spec:
    """Models' objectives, and those that classes have of their own; a class's factor goes on top."""
    if not 0 < factor < float("inf"):
        raise InputError("--slo-scale", f"must be positive, is {factor:g}")
    if factor == 1.0:
        return spec
    classes = tuple(
        each if each.slo is None else replace(each, slo=each.slo.scaled(factor))
        for each in spec.policy.classes
    )
    return replace(
        spec,
        models=tuple(replace(model, slo=model.slo.scaled(factor)) for model in spec.models),
        policy=replace(spec.policy, classes=classes),
    )

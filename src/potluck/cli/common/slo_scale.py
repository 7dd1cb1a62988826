"""Objectives on the command line.

`--slo-scale`: a spec with all its objectives so many times as long, as papers measure how strict one can be.
`--slo`: one that is written there, in a spec's words: `ttft=2s,tpot=50ms,attainment=0.95`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.types import Slo

if TYPE_CHECKING:
    from potluck.spec.spec_values import Spec

UNSAID_S = 1e9
"""An objective that nothing misses."""
TIMES, SHARES = ("ttft", "tpot", "e2e"), ("attainment", "share")
_TIME = re.compile(r"(?P<figure>\d+(\.\d*)?|\.\d+)(?P<unit>ms|s)\Z")
_SHARE = re.compile(r"(?P<figure>\d+(\.\d*)?|\.\d+)(?P<percent>%?)\Z")
slo_option = click.option(
    "--slo",
    "slo_text",
    metavar="ttft=2s,tpot=50ms,attainment=0.95",
    help="A promise, of TTFT, TPOT or E2E for a share of requests (0.9 unless told): exit code 3 when it is missed.",
)
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


def written_slo(text: str, option: str = "--slo") -> Slo:
    """The objective that somebody wrote on a command line; what it does not name is not promised."""
    said: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise InputError(
                option, f"{part.strip()!r} is not NAME=VALUE, such as ttft=2s or attainment=0.95"
            )
        if name not in (*TIMES, *SHARES):
            raise UnknownNameError(option, name, (*TIMES, *SHARES))
        name = SHARES[0] if name in SHARES else name
        if name in said:
            raise InputError(option, f"{name} stands there twice")
        said[name] = _share(value, name, option) if name in SHARES else _time_s(value, name, option)
    if not any(name in said for name in TIMES):
        raise InputError(option, "must have one of ttft, tpot, e2e, such as ttft=2s")
    ttft_s, tpot_s = (said.get(name, UNSAID_S) for name in ("ttft", "tpot"))
    return Slo(ttft_s, tpot_s, said.get(SHARES[0], Slo(1.0, 1.0).attainment), said.get("e2e"))


def _time_s(value: str, name: str, option: str) -> float:
    match = _TIME.match(value)
    if match is None or not float(match["figure"]) > 0:
        raise InputError(option, f"{name}={value} must be a time with its unit, such as 2s or 50ms")
    return float(match["figure"]) / (1000 if match["unit"] == "ms" else 1)


def _share(value: str, name: str, option: str) -> float:
    match = _SHARE.match(value)
    share = -1.0 if match is None else float(match["figure"]) / (100 if match["percent"] else 1)
    if not 0 < share <= 1:
        raise InputError(option, f"{name}={value} must be above 0 and at most 1, such as 0.95 or 95%")
    return share

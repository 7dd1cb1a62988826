"""Random fleets and rules for the driver from hell, and what it knows of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import brain_builders as build

from potluck.core.state.actions import Run
from potluck.core.state.events import AttemptFailed, RequestFinished
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Balance, Policy, Scaling
from potluck.core.values.plan import Plan
from potluck.core.values.service import RequestClass, with_built_in
from potluck.core.values.types import Request, Slo

REGIONS = ("near", "far", "east")
TEMPLATES = (
    build.template("plain", ("mixed", "mixed"), closed=(4.0, 1.0)),
    build.template("combo", ("prefill", "decode", "decode"), "combo", closed=(2.0, 2.0)),
    build.template("pair", ("prefill", "mixed"), "pair", closed=(2.0, 2.0)),
    build.template("one", closed=(2.0, 2.0)),
    build.template("p", ("prefill",), prefill=(2.0, 2.0), model="f"),
    build.template("d", ("decode", "decode"), decode=(2.0, 2.0), model="f"),
)
BALANCES: tuple[Balance, ...] = ("learned", "goodput", "round-robin", "token", "least-work", "fixed")
SCALINGS: tuple[Scaling, ...] = ("none", "none", "cauchy", "flips", "replan")


class Broken(AssertionError):
    """The Brain did what it must never do."""


@dataclass(slots=True)
class Job:
    """What the driver knows of a request."""

    request: Request
    attempt: int = -1
    """The last one it was asked to run."""
    run: Run | None = None
    """That, while it runs."""
    done: int = 0
    first: bool = False
    streamed: int = 0
    """Tokens that the user has."""
    fate: str = ""
    last: RequestFinished | AttemptFailed | None = None
    """How the last attempt ended, to be told again when asked."""


def facts(chance: Random) -> FleetFacts:
    slo = chance.choice((None, None, Slo(2.0, 0.1)))
    known = build.facts(TEMPLATES, batch=chance.choice((2, 8)), longest={"plain": 5000})
    models = {name: replace(each, slo=slo) for name, each in known.models.items()}
    places = {(each.name, i): (f"node/{i // 2}",) for each in TEMPLATES for i in range(len(each.replicas))}
    return replace(known, models=models, places=places)


def policy(chance: Random) -> Policy:
    return Policy(
        balance=chance.choice(BALANCES),
        opportunistic=chance.random() < 0.7,
        split=chance.random() < 0.7,
        split_overflow=chance.random() < 0.5,
        low_decodes=chance.random() < 0.5,
        scaling=chance.choice(SCALINGS),
        retries=chance.choice((0, 1, 2)),
        max_wait_s=chance.choice((2.0, 10.0)),
        grace_s=chance.choice((2.0, 20.0)),
        classes=with_built_in((RequestClass("hasty", stops=True),)),
        hedge=chance.choice((0.0, 1.0, 3.0)),
    )


def plan(chance: Random) -> Plan:
    """Some copies of some templates in some regions, with the shares and flows that fit them."""
    templates = [each for each in TEMPLATES[:4] if chance.random() < 0.6] or [TEMPLATES[3]]
    places = {(each.name, chance.choice(REGIONS)): chance.choice((1, 1, 2, 3)) for each in templates}
    shares = {(name, region, "closed"): (1.0, 0.5) for name, region in places}
    flows: dict[tuple[str, str, str], tuple[float, float]] = {}
    if chance.random() < 0.6:
        templates += TEMPLATES[4:]
        source, target = chance.choice(REGIONS), chance.choice(REGIONS)
        places |= {("p", source): 2, ("d", target): 1}
        shares |= {("p", source, "prefill"): (1.0, 1.0), ("d", target, "decode"): (1.0, 1.0)}
        flows[("f", source, target)] = (1.0, 1.0)
    return build.plan(templates, places, shares, flows)  # type: ignore[arg-type]

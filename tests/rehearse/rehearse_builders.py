"""Small problems and trials that tests of the rehearsal share."""

from __future__ import annotations

from potluck.catalog import models, nodes
from potluck.core.brain.policy import Policy
from potluck.core.values.types import LengthBin, Offer, Region, Slo, Traffic
from potluck.plan.problem import Problem, ask
from potluck.plan.strategies import STRATEGIES, Settings, Workshop
from potluck.rehearse.evidence import Trial
from potluck.rehearse.sources import made_up
from potluck.sim.settings import Settings as Running
from potluck.worlds.scene import Scene

OFFERS = {"1xL40S": (1.9, 20), "1xA10G": (1.0, 20), "1xL4": (0.7, 20)}
LENGTHS = (LengthBin(300, 60, 0.6), LengthBin(1200, 80, 0.4))
SETTINGS = Settings(time_limit_s=5.0)
melange = STRATEGIES["melange"]
"""Aggregated replicas only: quick to plan, quick to simulate."""


def a_traffic(name: str = "chat", rate_per_s: float = 8.0) -> Traffic:
    return Traffic(name, rate_per_s, LENGTHS)


def a_problem(*traffic: Traffic, offers: dict[str, tuple[float, int]] | None = None) -> Problem:
    asks = tuple(
        ask(each.model, models.model("Llama-3.1-8B"), Slo(1.0, 0.06), each)
        for each in traffic or (a_traffic(),)
    )
    chosen = offers or OFFERS
    types = tuple(nodes.node_type(name) for name in chosen)
    region = Region("here", tuple(Offer(nodes.canonical(n), *terms) for n, terms in chosen.items()))
    return Problem(asks, (region,), types)


def a_trial(problem: Problem, traffic: tuple[Traffic, ...], cv: float = 3.0, requests: int = 400) -> Trial:
    plan = melange(Workshop(problem), SETTINGS).plan
    world = Scene(
        plan,
        {each.name: each.model for each in problem.asks},
        problem.by_name,
        problem.regions,
        (),
        {each.name: each.slo for each in problem.asks},
        {each.model: (each.mean_input_tokens, each.mean_output_tokens) for each in traffic},
    )
    return Trial(world, made_up(traffic, cv, requests), Policy(admission=False), Running())

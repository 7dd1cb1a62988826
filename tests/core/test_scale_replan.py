"""CORAL's periodic re-allocation, and selection of the scaling rule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from scale_builders import fleet_of, observed, plan_of, template, traffic

from potluck.core.errors import InputError
from potluck.core.scaling.autoscaler import scaler_of
from potluck.core.scaling.cauchy_scaling import CauchyScaling
from potluck.core.scaling.prfaas_scaling import PrfaasScaling
from potluck.core.scaling.replan import PeriodicReplan
from potluck.core.scaling.role_shift import ShiftFlips
from potluck.core.scaling.roles import WithCopyRoles
from potluck.core.scaling.rule import MIN_FINISHED_FOR_LENGTHS, AskReplan, NoScaling, ScaleDecision
from potluck.core.scaling.traffic_window import ModelTraffic, TrafficWindow
from potluck.core.state.events import ReplicaStatus
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan, Prediction
from potluck.core.values.types import Request

POLICY = Policy(scaling="replan")


def plan(rate: float = 10.0) -> Plan:
    bare = plan_of((template("small", 10.0), template("other", 1.0, model="o")), {("small", "east"): 2})
    return replace(bare, predictions=(Prediction("m", rate, 12.0, 0.1, 0.1, "measured"),))


def replan_requests(
    rule: PeriodicReplan, from_s: int, to_s: int, *seen: ModelTraffic, there: Plan | None = None
) -> list[tuple[int, ScaleDecision]]:
    there = there or plan()
    fleet = fleet_of(there)
    ticks = [float(at_s) for at_s in range(from_s, to_s, 10)]
    return [
        (int(at_s), item)
        for at_s in ticks
        for item in rule.on_tick(at_s, observed(at_s, *seen), fleet, there)
    ]


def test_replan_rule_asks_every_interval_while_rates_move_and_names_every_model() -> None:
    rule = PeriodicReplan(POLICY)
    quiet = traffic(0.0, model="o")
    made = replan_requests(rule, 0, 1000, traffic(20.0), quiet)
    assert [at_s for at_s, _ in made] == [360]
    item = made[0][1]
    assert isinstance(item, AskReplan)
    rates = dict(item.rates_per_s)
    assert 20.0 * 1.04 < rates["m"] < 20.0 * 1.2
    assert 0 < rates["o"] < 0.1  # a model nobody asks for keeps a copy
    assert "requests for m rose from 10 to 20 a second" in item.reason
    assert [at_s for at_s, _ in replan_requests(rule, 1000, 1500, traffic(30.0), quiet)] == [1080]


def test_replan_rule_skips_unchanged_rates_until_the_long_window_ends() -> None:
    rule = PeriodicReplan(POLICY)
    made = replan_requests(rule, 0, 4000, traffic(10.2))
    assert [at_s for at_s, _ in made] == [1800, 3600]
    assert "prices and nodes" in made[0][1][-1]
    rule = PeriodicReplan(POLICY)
    replan_requests(rule, 0, 370, traffic(10.2))
    assert "no rate moved" in rule.why()
    replan_requests(rule, 370, 380, traffic(10.2))
    assert "looks again in 350 s" in rule.why()


def test_replan_rule_counts_missing_copies_and_queued_requests() -> None:
    there = plan()
    fleet = fleet_of(there)
    fleet.remove(next(iter(fleet.views)))
    rule = PeriodicReplan(POLICY)
    rule.on_tick(0.0, observed(0.0), fleet, there)
    (item,) = rule.on_tick(360.0, observed(360.0, traffic(10.0)), fleet, there)
    assert "1 copies of the plan are not there" in item.reason
    for view in fleet.views.values():
        view.status = ReplicaStatus(3600, 0, 0, 0, 0, 1, 0.0)
    rule = PeriodicReplan(POLICY)
    rule.on_tick(0.0, observed(0.0), fleet, there)
    (more,) = rule.on_tick(360.0, observed(360.0, traffic(10.0)), fleet, there)
    assert isinstance(more, AskReplan)
    assert isinstance(item, AskReplan)
    assert more.rates_per_s[0][1] == pytest.approx(item.rates_per_s[0][1] + 10.0)


def test_replan_rule_asks_for_changed_lengths_beyond_their_noise() -> None:
    rule = PeriodicReplan(POLICY)
    assert replan_requests(rule, 0, 370, traffic(10.0, prompt=1000, output=100)) == [], (
        "lengths that are seen first"
    )
    noisy = traffic(10.0, prompt=1300, prompt_error_tokens=150.0)
    assert replan_requests(rule, 370, 730, noisy) == [], "within three deviations"
    few = traffic(10.0, prompt=3000, finished=MIN_FINISHED_FOR_LENGTHS - 1)
    assert replan_requests(rule, 730, 1090, few) == [], "of too few answers"
    ((_, item),) = replan_requests(rule, 1090, 1450, traffic(10.0, prompt=1000, output=30))
    assert isinstance(item, AskReplan)
    assert item.reason == "answers of m fell from 100 to 30 tokens"
    assert replan_requests(rule, 1450, 1810, traffic(10.0, prompt=1000, output=30)) == [], "asked for already"


def test_replan_rule_does_not_scale_down_before_the_first_requests() -> None:
    rule = PeriodicReplan(Policy(scaling="replan", replan_s=10.0))
    nobody = traffic(0.0)
    assert replan_requests(rule, 0, 600, nobody) == []
    assert replan_requests(rule, 600, 700, traffic(1.0)) == [], "a window that is mostly of before"
    assert replan_requests(rule, 700, 900, traffic(1.0)) != []


@pytest.mark.parametrize("rate", [0.3, 5.0])
def test_replan_rule_ignores_noise_of_the_rate(rate: float) -> None:
    chance, made = random.Random(3), 0
    there = plan(rate)
    fleet, rule, window = fleet_of(there), PeriodicReplan(POLICY), TrafficWindow()
    next_s = 0.0
    for tick in range(960):
        at_s = tick * 30.0
        while next_s < at_s:
            window.arrived(next_s, Request("r", "m", next_s, 10, 1))
            next_s += chance.expovariate(rate)
        for item in rule.on_tick(at_s, window.observed(at_s), fleet, there):
            made += "moved" in item.reason
    assert made <= 2


def test_policy_selects_the_scaling_rule_by_name() -> None:
    facts = FleetFacts(models={}, replicas={})
    rules: dict[str, type] = {
        "none": NoScaling,
        "cauchy": CauchyScaling,
        "flips": ShiftFlips,
        "prfaas": PrfaasScaling,
        "replan": PeriodicReplan,
    }
    for name, kind in rules.items():
        rule = scaler_of(Policy(scaling=name), facts)
        assert rule.why()
        whole = rule.rule if isinstance(rule, WithCopyRoles) else rule
        assert type(whole) is kind
        assert isinstance(rule, WithCopyRoles) == (name in ("cauchy", "flips"))
    there = plan()
    assert NoScaling().on_tick(0.0, observed(0.0, traffic(99.0)), fleet_of(there), there) == ()
    for wrong in ({"headroom": 0.0}, {"headroom": 1.1}, {"dip": -0.1}, {"dip": 1.1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Policy(**wrong)

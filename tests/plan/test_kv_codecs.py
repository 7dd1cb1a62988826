"""KV is transferred in fp16 unless the spec's `kv_codecs` allows a lossy codec."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_problems import a_demand, a_problem, pool_problem
from search_pools import random_pool

from potluck.cli.common.inputs import load_problem
from potluck.core.values.kv import lossy_crossings
from potluck.core.values.plan import Plan
from potluck.core.values.types import Link, Slo
from potluck.plan.problem import CODECS, PlanningProblem
from potluck.plan.strategies import STRATEGIES, SolveSettings, TemplateFactory
from potluck.plan.strategies.pool_strategy import is_searchable
from potluck.plan.verify import verify
from potluck.rehearse.queueing_margins import scaled
from potluck.spec.load_spec import load_spec, parse_spec

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SHIPPED = [
    Path(str(resources.files(package) / "data" / name))
    for package, name in (
        ("potluck.cli", "demo.yaml"),
        ("demo", "day.yaml"),
        ("potluck.spec", "example.yaml"),
    )
]
SPEC = """\
models:
  - {model: Llama-3.1-8B, slo: {ttft_ms: 1000, tpot_ms: 50}, traffic: {rate_per_s: 1, input: 900, output: 200}}
fleet: {regions: [{name: home, nodes: [{node: 1xL4, available: 2, price_usd_per_h: 0.8}]}]}
"""
QUICK = SolveSettings(time_limit_s=10.0)


def plan_with(problem: PlanningProblem, strategy: str = "auto") -> Plan:
    return STRATEGIES[strategy](TemplateFactory(problem), QUICK).plan


@pytest.mark.parametrize(
    ("written", "codecs"),
    [
        ("", ("fp16",)),
        ("kv_codecs: []", ("fp16",)),
        ("kv_codecs: raw", ("fp16",)),
        ("kv_codecs: [int4, raw]", ("fp16", "int4")),
        ("kv_codecs: int8", ("fp16", "int8")),
        ("kv_codecs: [raw, int8, int4]", CODECS),
    ],
)
def test_spec_lists_allowed_kv_codecs_and_raw_is_always_allowed(
    written: str, codecs: tuple[str, ...]
) -> None:
    spec = parse_spec((SPEC + written).encode())
    assert spec.kv_codecs == codecs
    assert load_problem(spec, 0.8, None, (), 0.0).codecs == codecs


@pytest.mark.parametrize("written", ["[fp8]", "[raw, int2]", "[int8, int8]", "3", "{raw: true}", "null"])
def test_unknown_kv_codec_is_refused_with_its_line(written: str) -> None:
    with pytest.raises(Exception, match=r":4: kv_codecs") as result:
        parse_spec((SPEC + f"kv_codecs: {written}").encode(), file="potluck.yaml")
    assert "Traceback" not in str(result.value)


@pytest.mark.slow
@pytest.mark.parametrize("path", [*EXAMPLES, *SHIPPED], ids=lambda path: path.stem)
def test_shipped_specs_are_planned_lossless_unless_they_allow_a_codec(path: Path) -> None:
    problem = load_problem(load_spec(path), 0.8, None, (), 0.0)
    allowed = "kv_codecs" in path.read_text()
    assert (problem.codecs != ("fp16",)) is allowed
    assert allowed == (path.stem == "pool")
    if not allowed:
        assert lossy_crossings(plan_with(problem)) == ()


@st.composite
def thin_link_problems(draw: st.DrawFn) -> PlanningProblem:
    """Prompts long and links thin enough that fewer bits would save nodes."""
    ask = a_demand(
        rate_per_s=draw(st.floats(1.0, 20.0)),
        slo=Slo(draw(st.sampled_from((0.8, 2.0, 6.0))), 0.06),
        lengths=((draw(st.integers(500, 8000)), 150, 1.0),),
    )
    count = st.integers(1, 8)
    offers = {
        "site": {"1xH100": (3.0, draw(count)), "1xA10G": (0.9, draw(count))},
        "home": {"1xL4": (0.5, draw(count)), "1xL40S": (1.0, draw(count))},
    }
    gbps = draw(st.sampled_from((0.5, 2.0, 8.0, 20.0, 100.0)))
    return a_problem(
        ask, offers=offers, links=(Link("site", "home", gbps, 0.02), Link("home", "site", gbps, 0.02))
    )


@settings(max_examples=8, deadline=None)
@given(thin_link_problems(), st.sampled_from(sorted(set(STRATEGIES) - {"thunderserve", "hexgen"})))
def test_plan_has_no_lossy_transfer_unless_the_spec_allows_it(
    problem: PlanningProblem, strategy: str
) -> None:
    plan = plan_with(problem, strategy)
    assert lossy_crossings(plan) == ()
    assert verify(problem, plan) == ()


def test_verify_refuses_a_lossy_plan_when_the_spec_allows_none() -> None:
    """One that serves more in fewer bits, on the demo's fleet with a link of 2 Gb/s and a fifth more requests."""
    exact = load_problem(load_spec(SHIPPED[0]), 0.8, None, (), 0.0)
    exact = scaled(exact, {demand.name: 1.2 for demand in exact.demands})
    exact = replace(exact, links=tuple(replace(link, gbps=2.0) for link in exact.links))
    free = replace(exact, codecs=CODECS)
    plan = plan_with(free)
    assert {lossy_crossing.codec for lossy_crossing in lossy_crossings(plan)} == {"int8"}
    assert verify(free, plan) == ()
    assert any("is not in the spec's kv_codecs" in item for item in verify(exact, plan))
    whole = plan_with(exact)
    assert lossy_crossings(whole) == ()
    assert whole.fraction < plan.fraction


def test_pool_groups_transfer_kv_in_fp16_unless_int4_is_allowed() -> None:
    pool = random_pool(np.random.default_rng(3), 8, ("L4", "A10", "L40S"))
    free = pool_problem(pool, a_demand(rate_per_s=2.0, slo=Slo(5.0, 0.2)))
    exact = replace(free, codecs=CODECS[:1])
    assert is_searchable(exact)
    assert {t.codec for t in plan_with(free, "thunderserve").templates} == {"int4"}
    assert {t.codec for t in plan_with(exact, "thunderserve").templates} == {"fp16"}

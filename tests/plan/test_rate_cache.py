"""Cached rates: equal to timed ones, keyed by all inputs, ignored when damaged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_problems import a_demand, a_problem

from potluck.core.state.facts import ObservedSpeed
from potluck.core.values.layout import single
from potluck.core.values.plan import Template
from potluck.plan.current_problem import observed
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import TemplateFactory
from potluck.plan.timing import rate_cache as books_module
from potluck.plan.timing.rate_cache import RateCaches, load, memory_rate_cache, save, trim
from potluck.plan.timing.replica_rates import replica_capacity


def timed_templates(problem: PlanningProblem, folder: Path) -> list[Template]:
    factory = TemplateFactory(problem, rate_caches=RateCaches(folder))
    demand = problem.demands[0]
    return [*factory.homogeneous(demand), *factory.pairs(demand), *factory.gpu_combos(demand)]


@pytest.fixture
def problem() -> PlanningProblem:
    return a_problem(a_demand())


def test_cached_rates_equal_timed_rates_and_are_not_timed_again(
    problem: PlanningProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = timed_templates(problem, tmp_path)
    assert first

    def never(*_: object, **__: object) -> None:
        raise AssertionError("timed although it is kept")

    monkeypatch.setattr(books_module, "layout_timer", never)
    busier = replace(problem, demands=(scaled_demand(problem.demands[0], 3.0),))
    assert timed_templates(problem, tmp_path) == first
    assert {t.name for t in timed_templates(busier, tmp_path)} == {t.name for t in first}, (
        "rates have no part in it"
    )


def scaled_demand(model_demand: ModelDemand, factor: float) -> ModelDemand:
    demands = tuple(replace(bucket, rate_per_s=bucket.rate_per_s * factor) for bucket in model_demand.buckets)
    return replace(model_demand, buckets=demands)


def test_capacity_of_several_replicas_equals_that_of_replicas_timed_together(
    problem: PlanningProblem,
) -> None:
    demand, node = problem.demands[0], problem.offered[0]
    layout = single(node.name, 1, demand.model.layer_count)
    for role in ("prefill", "decode", "mixed"):
        direct = replica_capacity(demand, layout, problem.by_name, role, problem.headroom, 3)
        known = memory_rate_cache(demand).replica(problem, demand, layout, role).times(3).capacity
        for capacity, other_capacity in zip(direct, known, strict=True):
            assert other_capacity.prefill_per_s == pytest.approx(capacity.prefill_per_s)
            assert other_capacity.decode_per_s == pytest.approx(capacity.decode_per_s)
            assert other_capacity.closed_per_s == pytest.approx(capacity.closed_per_s)
            assert (other_capacity.ttft_s, other_capacity.tpot_s) == (capacity.ttft_s, capacity.tpot_s)


def test_rate_cache_key_changes_with_every_input_of_the_timing(problem: PlanningProblem) -> None:
    model_demand, opened = problem.demands[0], RateCaches(None)
    demand = model_demand.buckets[0]
    longer = replace(
        model_demand,
        buckets=(replace(demand, input_tokens=demand.input_tokens + 1), *model_demand.buckets[1:]),
    )
    stricter = replace(model_demand, slo=replace(model_demand.slo, tpot_s=model_demand.slo.tpot_s / 2))
    other = [
        opened.of(problem, model_demand),
        opened.of(problem, longer),
        opened.of(problem, stricter),
        opened.of(problem, replace(model_demand, sure=0.9)),
        opened.of(replace(problem, headroom=0.7), model_demand),
        opened.of(replace(problem, nodes=problem.nodes[:-1]), model_demand),
        opened.of(problem, replace(model_demand, model=replace(model_demand.model, weight_bits=8.0))),
    ]
    assert len({item.key for item in other}) == len(other)
    assert opened.of(problem, replace(scaled_demand(model_demand, 2.0), name="another")) is other[0]


@pytest.mark.parametrize("harm", ["cut", "shape", "names", "nan", "foreign"])
def test_damaged_rate_cache_file_is_ignored_and_rewritten(
    problem: PlanningProblem, tmp_path: Path, harm: str
) -> None:
    demand = problem.demands[0]
    layout = single(problem.offered[0].name, 1, demand.model.layer_count)
    first = RateCaches(tmp_path)
    known = first.of(problem, demand).replica(problem, demand, layout, "mixed")
    first.keep()
    (path,) = tmp_path.iterdir()
    stored = load(tmp_path, path.stem)
    assert stored is not None
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif harm == "foreign":
        path.write_text("not an archive")
    else:
        bad = {
            "shape": {"figures": stored["figures"][:, :, :4]},
            "names": {"names": np.array([255, 254], np.uint8)},
            "nan": {"figures": stored["figures"] * np.nan},
        }[harm]
        save(tmp_path, path.stem, stored | bad)
    again = RateCaches(tmp_path)
    assert not again.of(problem, demand).known
    assert again.of(problem, demand).replica(problem, demand, layout, "mixed") == known
    again.keep()
    assert RateCaches(tmp_path).of(problem, demand).known == again.of(problem, demand).known


def test_rate_cache_folder_is_trimmed_to_the_most_recently_used_files(tmp_path: Path) -> None:
    for place in range(6):
        save(tmp_path, f"{place}", {"x": np.zeros(1000)})
        os.utime(tmp_path / f"{place}.npz", (place, place))
    assert load(tmp_path, "0") is not None  # used just now
    trim(tmp_path, 4 * (tmp_path / "0.npz").stat().st_size)
    assert {path.stem for path in tmp_path.iterdir()} == {"0", "4", "5"}
    trim(tmp_path / "none")


def test_observed_speeds_have_a_rate_cache_of_their_own(tmp_path: Path) -> None:
    problem = a_problem(a_demand(), offers={"east": {"1xL4": (0.8, 8)}})
    slower = observed(problem, (ObservedSpeed(problem.demands[0].name, "1xL4", 1, 1.5),), "2031-01-01")
    assert slower.demands[0].profiles
    rate_caches = RateCaches(tmp_path)
    mine = rate_caches.of(slower, slower.demands[0])
    assert mine is rate_caches.of(slower, slower.demands[0])
    assert mine is not rate_caches.of(problem, problem.demands[0])

"""Rates that are kept: the same as timed anew, named by all they follow from, never trusted when damaged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_problems import a_problem, an_ask

from potluck.core.state.facts import ObservedSpeed
from potluck.core.values.layout import single
from potluck.core.values.plan import Template
from potluck.plan.current_problem import observed
from potluck.plan.problem import ModelDemand, PlanningProblem
from potluck.plan.strategies.template_factory import TemplateFactory
from potluck.plan.timing import rate_cache as books_module
from potluck.plan.timing.rate_cache import RateCaches, load, save, trim, unwritten
from potluck.plan.timing.replica_rates import replica_capacity


def made(problem: PlanningProblem, folder: Path) -> list[Template]:
    factory = TemplateFactory(problem, books=RateCaches(folder))
    ask = problem.asks[0]
    return [*factory.homogeneous(ask), *factory.pairs(ask), *factory.gpu_combos(ask)]


@pytest.fixture
def problem() -> PlanningProblem:
    return a_problem(an_ask())


def test_what_is_kept_is_what_is_timed(
    problem: PlanningProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(problem, tmp_path)
    assert first

    def never(*_: object, **__: object) -> None:
        raise AssertionError("timed although it is kept")

    monkeypatch.setattr(books_module, "layout_timer", never)
    busier = replace(problem, asks=(times(problem.asks[0], 3.0),))
    assert made(problem, tmp_path) == first
    assert {t.name for t in made(busier, tmp_path)} == {t.name for t in first}, "rates have no part in it"


def times(ask: ModelDemand, factor: float) -> ModelDemand:
    demands = tuple(replace(demand, rate_per_s=demand.rate_per_s * factor) for demand in ask.demands)
    return replace(ask, demands=demands)


def test_several_of_one_do_as_much_as_are_timed_together(problem: PlanningProblem) -> None:
    ask, node = problem.asks[0], problem.offered[0]
    layout = single(node.name, 1, ask.model.layer_count)
    for role in ("prefill", "decode", "mixed"):
        direct = replica_capacity(ask, layout, problem.by_name, role, problem.headroom, 3)
        known = unwritten(ask).replica(problem, ask, layout, role).times(3).capacity
        for one, other in zip(direct, known, strict=True):
            assert other.prefill_per_s == pytest.approx(one.prefill_per_s)
            assert other.decode_per_s == pytest.approx(one.decode_per_s)
            assert other.closed_per_s == pytest.approx(one.closed_per_s)
            assert (other.ttft_s, other.tpot_s) == (one.ttft_s, one.tpot_s)


def test_what_times_follow_from_has_another_book(problem: PlanningProblem) -> None:
    ask, opened = problem.asks[0], RateCaches(None)
    demand = ask.demands[0]
    longer = replace(ask, demands=(replace(demand, input_tokens=demand.input_tokens + 1), *ask.demands[1:]))
    stricter = replace(ask, slo=replace(ask.slo, tpot_s=ask.slo.tpot_s / 2))
    other = [
        opened.of(problem, ask),
        opened.of(problem, longer),
        opened.of(problem, stricter),
        opened.of(problem, replace(ask, sure=0.9)),
        opened.of(replace(problem, headroom=0.7), ask),
        opened.of(replace(problem, nodes=problem.nodes[:-1]), ask),
        opened.of(problem, replace(ask, model=replace(ask.model, weight_bits=8.0))),
    ]
    assert len({item.key for item in other}) == len(other)
    assert opened.of(problem, replace(times(ask, 2.0), name="another")) is other[0]


@pytest.mark.parametrize("harm", ["cut", "shape", "names", "nan", "foreign"])
def test_a_damaged_book_is_written_anew(problem: PlanningProblem, tmp_path: Path, harm: str) -> None:
    ask = problem.asks[0]
    layout = single(problem.offered[0].name, 1, ask.model.layer_count)
    first = RateCaches(tmp_path)
    known = first.of(problem, ask).replica(problem, ask, layout, "mixed")
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
    assert not again.of(problem, ask).known
    assert again.of(problem, ask).replica(problem, ask, layout, "mixed") == known
    again.keep()
    assert RateCaches(tmp_path).of(problem, ask).known == again.of(problem, ask).known


def test_a_folder_keeps_what_was_used_last(tmp_path: Path) -> None:
    for place in range(6):
        save(tmp_path, f"{place}", {"x": np.zeros(1000)})
        os.utime(tmp_path / f"{place}.npz", (place, place))
    assert load(tmp_path, "0") is not None  # used just now
    trim(tmp_path, 4 * (tmp_path / "0.npz").stat().st_size)
    assert {path.stem for path in tmp_path.iterdir()} == {"0", "4", "5"}
    trim(tmp_path / "none")


def test_speeds_that_were_seen_live_have_books_of_their_own(tmp_path: Path) -> None:
    problem = a_problem(an_ask(), offers={"east": {"1xL4": (0.8, 8)}})
    slower = observed(problem, (ObservedSpeed(problem.asks[0].name, "1xL4", 1, 1.5),), "2031-01-01")
    assert slower.asks[0].profiles
    books = RateCaches(tmp_path)
    mine = books.of(slower, slower.asks[0])
    assert mine is books.of(slower, slower.asks[0])
    assert mine is not books.of(problem, problem.asks[0])

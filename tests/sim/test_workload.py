"""Workloads: arrivals and lengths follow their laws, traces keep what they should, the same seed gives the same."""

from __future__ import annotations

import io
from dataclasses import replace
from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sim_fleets import MODEL, closed_plan, combo, load, mixed, problem

from potluck.core.errors import InputError
from potluck.core.state.events import Event, RequestArrived, RequestCancelled, RequestFinished
from potluck.core.state.facts import FleetFacts, ModelFacts
from potluck.core.state.policy import Policy
from potluck.core.values.length_laws import (
    Binned,
    Fixed,
    Independent,
    Law,
    LogNormal,
    Quantiles,
    lognormal_from_mean,
    lognormal_from_quantiles,
)
from potluck.core.values.types import LengthBin, Request, Traffic
from potluck.runtime.brain_log import header
from potluck.runtime.log_lines import line
from potluck.sim.load import arrivals
from potluck.sim.load.arrivals import draw, draw_law
from potluck.sim.load.workload import (
    PrefixBlocks,
    RequestLabels,
    Workload,
    at_rate,
    first,
    from_log,
    merge,
    of_traffic,
    synthetic,
    with_prefixes,
    workload,
)
from potluck.sim.run import simulate
from potluck.sim.world.faults import FaultRates, Faults

MANY = 200_000


CHAT = Independent(LogNormal(*lognormal_from_mean(1000, 1.0)), Fixed(100))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def blocks_of(workload: Workload, i: int) -> tuple[int, ...]:
    return () if workload.blocks is None else workload.blocks.of(i)


def gap_cv(times: NDArray[np.float64]) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gamma_arrivals_have_the_requested_rate_and_variation(cv: float) -> None:
    times = arrivals.gamma(rng(), 20.0, cv, MANY)
    # The mean of n gaps has a standard error of cv / sqrt(n): five of them.
    assert len(times) / times[-1] == pytest.approx(20.0, rel=5 * cv / MANY**0.5 + 1e-9)
    assert gap_cv(times) == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_poisson_arrival_counts_have_unit_dispersion() -> None:
    counts = np.bincount((arrivals.gamma(rng(), 20.0, 1.0, MANY) // 5.0).astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=5 * (2 / len(counts)) ** 0.5)


@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.integers(0, 99),
)
def test_rate_curve_arrivals_stay_within_their_steps(rates: list[float], cv: float, seed: int) -> None:
    times = arrivals.curve(rng(seed), rates, 60.0, cv)
    assert (np.diff(times) >= 0).all()
    counts = (
        np.zeros(len(rates))
        if not len(times)
        else np.bincount((times // 60).astype(int), minlength=len(rates))
    )
    assert len(counts) == len(rates)
    for count, rate in zip(counts, rates, strict=True):
        mean = rate * 60
        assert abs(count - mean) <= 8 * max(cv, 0.2) * (mean + 9) ** 0.5
        assert rate > 0 or count == 0


def test_stretched_trace_has_its_rate_and_keeps_its_pattern() -> None:
    times = arrivals.gamma(rng(), 3.0, 2.0, 5000) + 1e6
    scaled = arrivals.stretched(times, 12.0)
    assert (len(scaled) - 1) / (scaled[-1] - scaled[0]) == pytest.approx(12.0)
    assert scaled[0] == 0
    assert gap_cv(scaled) == pytest.approx(gap_cv(times), rel=1e-5)


@pytest.mark.parametrize("rate", [0.7, 3.0, 4.0, 10.0])
def test_superposed_trace_repeats_requests_in_proportion_to_the_rate(rate: float) -> None:
    times = arrivals.gamma(rng(1), 3.0, 2.0, 20_000)
    own = (len(times) - 1) / (times[-1] - times[0])
    chosen, when = arrivals.superposed(rng(2), times, rate)
    factor = rate / own
    often = np.bincount(chosen, minlength=len(times))
    assert often.min() >= int(factor)
    assert often.max() <= int(factor) + 1
    assert often.mean() == pytest.approx(factor, abs=5 * 0.5 / len(times) ** 0.5)
    assert (np.diff(when) >= 0).all()
    assert when[-1] <= (times[-1] - times[0]) * len(times) / (len(times) - 1)


def test_superposing_a_trace_smooths_it_and_stretching_does_not() -> None:
    times = arrivals.gamma(rng(1), 2.0, 5.0, 20_000)
    assert gap_cv(arrivals.stretched(times, 40.0)) == pytest.approx(gap_cv(times))
    assert gap_cv(arrivals.superposed(rng(), times, 40.0)[1]) < 0.7 * gap_cv(times)


def test_short_trace_is_repeated_at_its_own_rate() -> None:
    times = np.array([5.0, 6.0, 8.0])
    chosen, when = arrivals.repeated(times, 7)
    assert chosen.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert when.tolist() == [0, 1, 3, 4.5, 5.5, 7.5, 9]
    assert arrivals.repeated(times, 2)[1].tolist() == [0, 1]


LAWS: list[Law] = [
    Fixed(37.0),
    Fixed(2.25),
    LogNormal(*lognormal_from_mean(300, 1.2)),
    LogNormal(*lognormal_from_quantiles(200, 3000), 1, 4000),
    LogNormal(9.9, 1.0, 128, 131072),
    LogNormal(0.0, 1.0, 8, 20),
    Quantiles(((0.0, 5.0), (0.5, 5.0), (0.9, 100.0), (1.0, 1000.0))),
]


@pytest.mark.parametrize("law", LAWS)
def test_drawn_lengths_have_the_mean_of_their_distribution(law: Law) -> None:
    drawn = draw_law(rng(), law, MANY)
    error = drawn.std() / MANY**0.5 + 1e-9
    assert drawn.mean() == pytest.approx(law.mean_tokens, abs=5 * error)
    assert drawn.min() >= 1


@pytest.mark.parametrize("law", [law for law in LAWS if isinstance(law, LogNormal)])
def test_truncated_lognormal_mean_equals_a_numeric_sum(law: LogNormal) -> None:
    z = np.linspace(-9, 9, 2_000_001)
    x, density = np.exp(law.mu + law.sigma * z), np.exp(-z * z / 2)
    inside = (x >= law.low_tokens) & (x <= law.high_tokens)
    assert law.mean_tokens == pytest.approx((x * density)[inside].sum() / density[inside].sum(), rel=1e-3)


def test_drawn_lengths_stay_within_bounds_of_small_probability() -> None:
    log_normal = LogNormal(0.0, 1.0, 30, 60)
    assert log_normal.mass < 1e-3
    drawn = draw_law(rng(), log_normal, 2_000)
    assert drawn.min() >= 30
    assert drawn.max() <= 61  # rounded up at random
    with pytest.raises(InputError, match="holds almost none"):
        LogNormal(0.0, 1.0, 1e6, 1e7)


def test_drawn_lengths_reproduce_the_quantiles() -> None:
    law = Quantiles(((0.0, 10.0), (0.5, 100.0), (0.99, 500.0), (1.0, 9000.0)))
    drawn = draw_law(rng(), law, MANY)
    for level, tokens in law.points:
        error = (level * (1 - level) / MANY) ** 0.5
        assert (drawn <= tokens).mean() == pytest.approx(level, abs=5 * error + 1 / 180)


def test_binned_lengths_keep_prompt_and_output_together() -> None:
    bins = Binned((LengthBin(100, 7, 0.25), LengthBin(900, 3, 0.75)))
    prompt, output = draw(rng(), bins, MANY)
    assert set(zip(prompt.tolist(), output.tolist(), strict=True)) == {(100, 7), (900, 3)}
    assert (prompt == 900).mean() == pytest.approx(0.75, abs=0.01)


def test_workload_is_the_same_for_the_same_seed_and_parts_are_independent() -> None:
    one, same, other = (synthetic("m", CHAT, 5, 1000, seed) for seed in (1, 1, 2))
    assert (one.arrival_s == same.arrival_s).all()
    assert (one.prompt_tokens == same.prompt_tokens).all()
    assert (one.prompt_tokens != other.prompt_tokens).any()
    assert (one.prompt_tokens == synthetic("m", CHAT, 5, 1000, 1, cv=4.0).prompt_tokens).all()
    fixed = synthetic("m", Independent(CHAT.prompt, Fixed(3)), 5, 1000, 1)
    assert (one.prompt_tokens == fixed.prompt_tokens).all()
    assert (one.arrival_s == fixed.arrival_s).all()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=20), st.data())
def test_prefix_blocks_follow_their_requests(blocks: list[list[int]], data: st.DataObject) -> None:
    starts = np.cumsum([0, *map(len, blocks)])
    held = PrefixBlocks(starts, np.array([b for one in blocks for b in one], dtype=np.int64))
    chosen = np.array(data.draw(st.lists(st.integers(0, len(blocks) - 1), max_size=30)), dtype=np.int64)
    taken = held.take(chosen)
    assert [list(taken.of(i)) for i in range(len(chosen))] == [blocks[i] for i in chosen]


def small(model: str, times: list[float], blocks: bool) -> Workload:
    count = len(times)
    tokens = np.arange(1, count + 1) * 600
    made = workload(model, np.array(times), tokens, tokens)
    return with_prefixes(made, 0.5, 0) if blocks and count else made


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.floats(0, 9), max_size=6), st.booleans()), max_size=5
    )
)
def test_merged_workload_keeps_every_request_with_its_attributes(
    parts: list[tuple[str, list[float], bool]],
) -> None:
    made = [small(name, sorted(times), blocks) for name, times, blocks in parts]
    if not any(map(len, made)):
        with pytest.raises(InputError, match="no requests"):
            merge(made)
        return

    def rows(one: Workload) -> list[tuple[object, ...]]:
        columns = (one.arrival_s, one.prompt_tokens, one.output_tokens, one.priority)
        return [
            (one.models[one.model[i]], *(column[i].item() for column in columns), blocks_of(one, i))
            for i in range(len(one))
        ]

    both = merge(made)
    # A stable sort by time of the rows, one part after another.
    expected = sorted((row for one in made for row in rows(one)), key=lambda row: row[1])  # type: ignore[arg-type, return-value]
    assert rows(both) == expected


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_shared_prefixes_save_the_requested_share_of_tokens(share: float) -> None:
    workload = with_prefixes(
        synthetic("m", Independent(LogNormal(8.5, 0.8), Fixed(1)), 1, 4000, 3), share, 1, groups=10
    )
    assert workload.blocks is not None
    seen: set[int] = set()
    hit = 0
    for i in range(len(workload)):
        blocks = blocks_of(workload, i)
        assert len(blocks) == -(-int(workload.prompt_tokens[i]) // 512)
        known = next((k for k, block in enumerate(blocks) if block not in seen), len(blocks))
        hit += min(known * 512, int(workload.prompt_tokens[i]))
        seen.update(blocks)
    assert hit / workload.prompt_tokens.sum() == pytest.approx(share, abs=0.03)


def test_planned_traffic_becomes_requests_at_the_rate_of_each_model() -> None:
    bins = (LengthBin(100, 10, 0.5), LengthBin(300, 30, 0.5))
    traffic = [Traffic("a", 30.0, bins), Traffic("b", 10.0, bins, 0.5), Traffic("idle", 0.0, bins)]
    workload = of_traffic(traffic, 40_000, seed=4)
    assert workload.models == ("a", "b")
    assert len(workload) == 40_000
    assert np.bincount(workload.model).tolist() == [30_000, 10_000]
    assert workload.rate_per_s == pytest.approx(40.0, rel=0.03)
    assert workload.blocks is not None
    with pytest.raises(InputError, match="rate_per_s above 0"):
        of_traffic([Traffic("a", 0.0, bins)], 10, 0)


def test_workload_is_rescaled_in_rate_and_repeated_in_length() -> None:
    workload = with_prefixes(synthetic("m", CHAT, 5, 500, 1), 0.3, 1)
    faster = at_rate(workload, 50.0)
    assert faster.rate_per_s == pytest.approx(50.0)
    assert (faster.prompt_tokens == workload.prompt_tokens).all()
    more = at_rate(workload, 12.5, "superpose", seed=2)
    assert len(more) == pytest.approx(1250, rel=0.1)
    assert {blocks_of(more, i) for i in range(len(more))} <= {
        blocks_of(workload, i) for i in range(len(workload))
    }
    longer = first(workload, 1200)
    assert (longer.prompt_tokens[500:1000] == workload.prompt_tokens).all()
    assert blocks_of(longer, 700) == blocks_of(workload, 200)
    assert longer.rate_per_s == pytest.approx(workload.rate_per_s or 0, rel=0.05)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_invalid_arrival_rates_are_refused(bad: float) -> None:
    with pytest.raises(InputError, match="must be positive"):
        arrivals.gamma(rng(), bad, 1.0, 3)
    with pytest.raises(InputError, match="must be positive"):
        arrivals.stretched(np.array([0.0, 1.0]), bad)
    with pytest.raises(InputError, match="one moment"):
        arrivals.superposed(rng(), np.array([3.0, 3.0]), 1.0)
    with pytest.raises(InputError, match="cv"):
        arrivals.gamma(rng(), 1.0, -1.0, 3)


def test_lognormal_is_fitted_from_quantiles_or_mean_and_cv() -> None:
    mu, sigma = lognormal_from_quantiles(100, 1000)
    assert LogNormal(mu, sigma).mean_tokens == pytest.approx(100 * np.exp(sigma**2 / 2), rel=1e-3)
    mu, sigma = lognormal_from_mean(500, 0.5)
    assert LogNormal(mu, sigma).mean_tokens == pytest.approx(500, rel=1e-9)
    assert sigma == pytest.approx(log(1.25) ** 0.5)


def test_planned_traffic_has_its_planned_prefix_hit_share() -> None:
    lengths = (LengthBin(400, 10, 0.5), LengthBin(6000, 10, 0.5))
    workload = of_traffic([Traffic("chat", 2.0, lengths, prefix_hit_share=0.4)], 2000, seed=3)
    assert workload.blocks is not None
    seen: set[int] = set()
    hit = 0
    for i in range(len(workload)):
        blocks = workload.blocks.of(i)
        hit += next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
    assert hit * workload.blocks.tokens / workload.prompt_tokens.sum() == pytest.approx(
        0.4, abs=0.03
    )  # whole blocks
    # A cache that holds the last few prompts is enough.
    recent: list[tuple[int, ...]] = []
    kept = 0
    for i in range(len(workload)):
        blocks, known = workload.blocks.of(i), {block for row in recent for block in row}
        kept += next((place for place, block in enumerate(blocks) if block not in known), len(blocks))
        recent = [*recent[-7:], blocks]
    assert kept >= 0.95 * hit


def test_even_lengths_have_exact_planned_counts_in_random_order() -> None:
    bins = (LengthBin(100, 7, 0.125), LengthBin(900, 3, 0.875))
    for seed in range(5):
        prompts, _ = draw(np.random.default_rng(seed), Binned(bins, even=True), 400)
        assert np.unique(prompts, return_counts=True)[1].tolist() == [50, 350]
        assert (prompts[:50] == 900).any()
    by_chance = {int((draw(np.random.default_rng(s), Binned(bins), 400)[0] == 100).sum()) for s in range(5)}
    assert len(by_chance) > 1


def simulated_log(work: Workload, policy: Policy | None = None, faults: Faults | None = None) -> list[str]:
    out = io.StringIO()
    plan = closed_plan((combo(1, 2), "east", 1), (mixed(), "west", 1))
    simulate(problem(plan), work, policy, log=out, faults=faults)
    return out.getvalue().splitlines(keepends=True)


def test_simulation_log_reproduces_its_workload() -> None:
    rng = np.random.default_rng(3)
    work = load(80, 6.0, blocks=3)
    labels = RequestLabels(
        ("default", "acme"),
        rng.integers(0, 2, 80).astype(np.int32),
        ("standard", "batch"),
        rng.integers(0, 2, 80).astype(np.int32),
        np.where(rng.random(80) < 0.5, np.inf, rng.uniform(20, 90, 80)),
        exact=rng.random(80) < 0.5,
        grammar=rng.random(80) < 0.5,
    )
    work = replace(work, labels=labels, priority=rng.integers(0, 3, 80).astype(np.int32))
    lines = simulated_log(work, faults=Faults(random=FaultRates(*[300.0] * 6)))
    result = from_log(lines)
    again = result.workload
    assert result.answered > 40
    assert again.models == work.models
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "priority"):
        assert (getattr(again, name) == getattr(work, name)).all(), name
    assert again.blocks is not None
    assert work.blocks is not None
    assert again.blocks.tokens == work.blocks.tokens
    assert (again.blocks.starts == work.blocks.starts).all()
    assert (again.blocks.ids == work.blocks.ids).all()
    assert again.labels is not None
    arrivals = work.arrival_s.tolist()
    assert again.labels.rows(0, 80, arrivals) == labels.rows(0, 80, arrivals)
    assert simulated_log(again, faults=Faults(random=FaultRates(*[300.0] * 6))) == lines


def live_log(*told: tuple[float, Event], zero_utc_s: float | None = 1e9, block_tokens: int = 16) -> list[str]:
    facts = FleetFacts({MODEL: ModelFacts(1.0, block_tokens=block_tokens)}, {})
    return [header(facts, Policy(), "run", zero_utc_s), *(line(at_s, event, []) for at_s, event in told)]


def arrival_event(id: str, at_s: float, blocks: tuple[int, ...] = ()) -> tuple[float, Event]:
    return at_s, RequestArrived(Request(id, MODEL, at_s, 40, 500, blocks=blocks))


def test_workload_of_a_live_log_uses_actual_output_lengths_where_known() -> None:
    wide = (2**127 + 1, 2**127 + 2)
    first = live_log(
        arrival_event("a", 1.0, wide),
        arrival_event("b", 2.0),
        arrival_event("c", 2.5),
        (3.0, RequestFinished("a", 1, 7)),
        (3.5, RequestCancelled("b")),
        (4.0, RequestFinished("elsewhere", 1, 9)),
    )
    # Started again 100 s later: the same ids are other requests.
    second = live_log(
        arrival_event("a", 0.5, (wide[0], 9)), (2.0, RequestFinished("a", 2, 0)), zero_utc_s=1e9 + 100
    )
    result = from_log([*first, '[5.0,["Finis', *second])
    assert (result.runs, result.answered, result.cuts) == (2, 2, (8,))
    assert result.workload.arrival_s.tolist() == [1.0, 2.0, 2.5, 100.5]
    assert result.workload.output_tokens.tolist() == [7, 500, 500, 1]
    assert result.workload.labels is None
    assert result.workload.blocks is not None
    blocks = [result.workload.blocks.of(i) for i in range(4)]
    assert blocks[0][0] == blocks[3][0]
    assert len({*blocks[0], *blocks[3]}) == 3


def test_log_runs_without_usable_clocks_are_placed_one_after_another() -> None:
    for zero_utc_s in (None, 1e9 - 50):
        lines = [
            *live_log(arrival_event("a", 1.0), arrival_event("b", 9.0)),
            *live_log(arrival_event("a", 1.0), zero_utc_s=zero_utc_s),
        ]
        assert from_log(lines).workload.arrival_s.tolist() == [1.0, 9.0, 10.0]


def test_log_that_holds_no_workload_is_refused() -> None:
    with pytest.raises(InputError, match="has no requests"):
        from_log(live_log())
    two = [
        *live_log(arrival_event("a", 1.0, (1, 2))),
        *live_log(arrival_event("b", 1.0, (3,)), block_tokens=64),
    ]
    with pytest.raises(InputError, match="block_tokens"):
        from_log(two)

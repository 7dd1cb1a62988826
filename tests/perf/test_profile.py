"""The profile provider: files, interpolation, range and speed."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import FormatError, InputError
from potluck.perf.linear_fit import absolute_errors
from potluck.perf.step_timer import StepTimer, steps
from potluck.perf.timers.profile import (
    Profile,
    ProfilePoint,
    ProfileTimer,
    profile_from_json,
    profile_to_json,
)

DATA = Path(os.environ.get("POTLUCK_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))


def roofline_s(new, cached, decodes, context):
    """Roughly Llama-3.1-8B on an A100: what binds per part, a launch floor, attention and KV reads."""
    tokens = new + decodes
    dense = np.maximum(16e9 / 1.7e12, tokens * 16e9 / 250e12)
    attention = new * (cached + new / 2) * 1.05e6 / 150e12
    return 0.002 + dense + attention + (context + cached) * 131072 / 1.5e12 + decodes * 3e-6


def grid(noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    chunks = [(0, 0)] + [(n, c) for n in (32, 128, 512, 2048) for c in (0, 512, 2048, 8192)]
    decodes = [(0, 0)] + [(d, d * item) for d in (1, 8, 32, 128) for item in (128, 1024, 8192)]
    points = []
    for new, cached in chunks:
        for count, context in decodes:
            if new + count:
                seconds = float(roofline_s(new, cached, count, context) * np.exp(noise * rng.normal()))
                points.append(ProfilePoint(new, cached, count, context, seconds, 5))
    return tuple(points)


def profile(points):
    return Profile("A100", "Llama-3.1-8B", 1, "vllm", {"vllm": "0.11"}, "2026-01-31", points)


PROFILE = profile(grid())
TIMER = ProfileTimer(PROFILE)


def columns(points):
    rows = [(p.chunk_new, p.chunk_cached, p.decodes, p.decode_context) for p in points]
    return tuple(np.array(column, dtype=float) for column in zip(*rows, strict=True))


def scattered(count, seed):
    """Steps of all three kinds between the grid's points."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, count)
    new = np.where(kind != 1, np.exp(rng.uniform(np.log(32), np.log(2048), count)).round(), 0)
    cached = np.where(kind != 1, np.exp(rng.uniform(0, np.log(8192), count)).round(), 0)
    decodes = np.where(kind != 0, np.exp(rng.uniform(0, np.log(128), count)).round(), 0)
    return new, cached, decodes, decodes * np.exp(rng.uniform(np.log(128), np.log(8192), count)).round()


def test_profile_survives_its_file():
    assert profile_from_json(profile_to_json(PROFILE)) == PROFILE


def test_profile_timer_is_a_step_timer_of_measured_confidence():
    timer: StepTimer = TIMER
    assert timer.confidence == "measured"
    assert timer.step_s(steps(512)).shape == (1,)
    assert timer.step_s(steps())[0] == 0


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_profile_reproduces_measured_steps_to_a_thousandth(noise):
    points = grid(noise)
    answers = ProfileTimer(profile(points)).step_s(steps(*columns(points)))
    assert answers == pytest.approx([point.seconds for point in points], rel=1e-3)


def test_repeated_profile_steps_count_as_their_mean():
    first = PROFILE.points[40]
    twice = replace(first, seconds=first.seconds * 1.2, repeats=15)
    timer = ProfileTimer(profile((*PROFILE.points, twice)))
    assert timer.step_s(steps(*columns([first]))) == pytest.approx([first.seconds * 1.15], rel=1e-3)


@pytest.mark.parametrize(("noise", "median", "p95"), [(0.0, 0.02, 0.08), (0.03, 0.035, 0.12)])
def test_profile_predicts_held_out_steps_of_a_noisy_roofline(noise, median, p95):
    where = scattered(4000, 7)
    errors = absolute_errors(roofline_s(*where), ProfileTimer(profile(grid(noise))).step_s(steps(*where)))
    assert np.median(errors) < median
    assert np.quantile(errors, 0.95) < p95


def test_profile_extrapolates_beyond_its_range():
    far = steps([16384, 0, 2048], [0, 0, 60000], [0, 512, 0], [0, 512 * 8192, 0])
    truth = roofline_s(
        *(
            np.array(c, dtype=float)
            for c in ([16384, 0, 2048], [0, 0, 60000], [0, 512, 0], [0, 512 * 8192, 0])
        )
    )
    assert TIMER.step_s(far) == pytest.approx(truth, rel=0.15)


def test_profiled_step_with_several_chunks_takes_as_long_as_one_with_a_single_chunk():
    one, two = TIMER.step_s(steps([[512, 0], [256, 256]], [[1024, 0], [1024, 1024]]))
    assert two == pytest.approx(one, rel=0.1)


@settings(deadline=None)
@given(
    new=st.integers(0, 100_000),
    cached=st.integers(0, 10**6),
    decodes=st.integers(0, 10_000),
    each=st.integers(1, 10**6),
)
def test_profiled_step_time_is_positive_and_finite(new, cached, decodes, each):
    seconds = TIMER.step_s(steps(new, cached, decodes, decodes * each))[0]
    assert np.isfinite(seconds)
    assert (seconds > 0) == (new + decodes > 0)


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(32, 2000), st.integers(1, 128), st.integers(128, 4000))
def test_profiled_step_with_twice_the_work_is_hardly_ever_faster(which, new, decodes, each):
    """The correction may bend the fit, which is monotone, by no more than the noise that it follows."""
    base = [new, each, decodes, decodes * each]
    more = [value * 2 if index == which else value for index, value in enumerate(base)]
    if which == 2:
        more[3] = more[2] * each
    before, after = TIMER.step_s(
        steps(*(np.array(pair, dtype=float) for pair in zip(base, more, strict=True)))
    )
    assert after > before * 0.95


def test_profile_times_100000_steps_within_two_seconds():
    batch = steps(*scattered(100_000, 3))
    TIMER.step_s(steps(512))
    start = time.process_time()
    TIMER.step_s(batch)
    # Process time counts all threads and a shared machine is slow: it usually takes a quarter of one.
    assert time.process_time() - start < 2.0


def _edited(change):
    document = json.loads(profile_to_json(PROFILE))
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["value"]["points"][0].update(secnds=1.0), "secnds: unknown key; did you mean 'seconds'"),
        (lambda d: d["value"]["points"][3].update(seconds=-1.0), r"points\[3\]: seconds: must be positive"),
        (lambda d: d["value"]["points"][0].update(chunk_new=1.5), "chunk_new: must be an integer"),
        (lambda d: d["value"].pop("gpu"), "value.gpu: is missing"),
        (lambda d: d["value"].update(date="yesterday"), "date: must be like"),
        (lambda d: d["value"].update(tp=0), "tp: must be at least 1"),
        (lambda d: d["value"].update(points=d["value"]["points"][:3]), "3 are too few"),
        (lambda d: d.update(version=2), "version: is 2"),
        (lambda d: d.update(format="potluck.plan"), "expected 'potluck.profile'"),
    ],
)
def test_invalid_profile_file_is_refused_in_one_line(change, problem):
    with pytest.raises(FormatError, match=problem) as caught:
        profile_from_json(_edited(change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "field"), [ ((-1, 0, 1, 1, 0.1), "chunk_new"), ((0, 0, 0, 0, 0.1), "chunk_new"),
    ((0, 5, 1, 1, 0.1), "chunk_cached"), ((5, 0, 0, 9, 0.1), "decode_context"), ((5, 0, 0, 0, 0.0), "seconds"),
    ((5, 0, 0, 0, float("nan")), "seconds"), ((5, 0, 0, 0, 0.1, 0), "repeats"), ],
)  # fmt: skip
def test_invalid_profile_point_is_refused_by_field(values, field):
    with pytest.raises(InputError, match=field):
        ProfilePoint(*values)


def test_profile_with_too_few_different_steps_is_refused():
    with pytest.raises(InputError, match="1 different steps are too few"):
        ProfileTimer(profile((PROFILE.points[0],) * 20))


@pytest.mark.skipif(
    not (DATA / "measured").is_dir(), reason="measured data is not here; point POTLUCK_DATA at it"
)
def test_profile_predicts_held_out_steps_of_a_measured_rtx_4090():
    """Steps put together from measured operators of Llama-3.1-8B: a tenth of them predicts the rest."""
    import pandas as pd

    name = "llmservingsim_rtx4090_llama31_8b_{}.parquet"
    attention = pd.read_parquet(DATA / "measured" / name.format("attention"))
    dense = pd.read_parquet(DATA / "measured" / name.format("dense"))
    attention = attention[attention.prefill_chunk + attention.n_decode <= 2048]
    new, cached, decodes, item, attention_us = (attention[c].to_numpy(float) for c in attention.columns)
    layers = dict.fromkeys(("act_fn", "down_proj", "gate_up_proj", "o_proj", "qkv_proj", "rotary_emb"), 32)
    total_us = 32 * attention_us
    for layer, count in (layers | {"layernorm": 64, "final_layernorm": 1, "embedding": 1}).items():
        curve = dense[dense.layer == layer].sort_values("tokens")
        total_us = total_us + count * np.interp(new + decodes, curve.tokens, curve.time_us)
    known = np.random.default_rng(0).random(len(new)) < 0.1
    where = (new, cached, decodes, decodes * item)
    points = zip(*(part[known].astype(int) for part in where), (total_us[known] * 1e-6), strict=True)
    timer = ProfileTimer(profile(tuple(ProfilePoint(*map(int, row), float(s)) for *row, s in points)))
    errors = absolute_errors(total_us[~known] * 1e-6, timer.step_s(steps(*(part[~known] for part in where))))
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.95) < 0.17

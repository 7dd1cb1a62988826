"""A model's traffic: distributions or a trace become bins of lengths, a rate and a prefix-hit share."""

from __future__ import annotations

from math import exp
from pathlib import Path

from potluck.core.errors import InputError
from potluck.core.values.length_laws import lognormal_from_mean, lognormal_from_quantiles
from potluck.core.values.types import LengthBin, Traffic
from potluck.spec import binning
from potluck.spec.schema import LengthsIn, TrafficIn
from potluck.spec.spec_problems import Loc, SpecProblems
from potluck.spec.traces import Trace, load_trace

TAIL_SIGMAS = 9.0
"""Where an unbounded lognormal is cut: beyond it lies less than a float's last digit."""
MIN_SIGMA = 1e-6
"""Narrower than this is one length."""
MAX_SIGMA = 4.0


def resolve_traffic(
    written: TrafficIn, model: str, folder: Path, problems: SpecProblems
) -> tuple[Traffic | None, str]:
    """The traffic, and in words where its lengths came from; None when something is wrong with it."""
    if written.trace is not None:
        return _from_trace(written, written.trace, model, folder, problems)
    assert written.input is not None
    assert written.output is not None
    inputs = _groups(written.input, binning.INPUT_GROUPS, (*written.at, "input"), problems)
    outputs = _groups(written.output, binning.OUTPUT_GROUPS, (*written.at, "output"), problems)
    if inputs is None or outputs is None:
        return None, ""
    bins = binning.product_bins(inputs, outputs)
    words = f"{describe(written.input)} in, {describe(written.output)} out"
    rate_per_s = max(written.rate_by_hour or [0.0]) if written.rate_per_s is None else written.rate_per_s
    return Traffic(model, rate_per_s, bins, written.prefix_hit_share or 0.0), words


def _from_trace(
    written: TrafficIn, trace_path: str, model: str, folder: Path, problems: SpecProblems
) -> tuple[Traffic | None, str]:
    loc = (*written.at, "trace")
    try:
        trace = load_trace(folder / trace_path)
        bins: tuple[LengthBin, ...] = binning.joint_bins(trace.input_tokens, trace.output_tokens)
    except (OSError, ValueError) as error:
        problems.add(loc, f"cannot be read: {getattr(error, 'strerror', None) or error}")
        return None, ""
    except InputError as error:
        problems.add(loc, str(error))
        return None, ""
    rate_per_s = trace.rate_per_s if written.rate_per_s is None else written.rate_per_s
    if written.rate_per_s is None and written.rate_by_hour:
        rate_per_s = max(written.rate_by_hour)
    if rate_per_s is None:
        problems.add(loc, "all its requests come at one moment, so it has no rate; add rate_per_s")
        return None, ""
    share = written.prefix_hit_share
    if share is None:
        share = trace.prefix_hit_share or 0.0
    return Traffic(model, rate_per_s, bins, share), _trace_words(trace, Path(trace_path).name)


def _trace_words(trace: Trace, name: str) -> str:
    words = f"{trace.format_name} trace {name}, {len(trace):,} requests"
    if trace.empty_outputs:
        words += f" ({trace.empty_outputs:,} without output counted as one token)"
    if trace.format_name == "sharegpt":
        words += ", token counts estimated where not given"
    return words


def _groups(written: LengthsIn, groups: int, loc: Loc, problems: SpecProblems) -> list[binning.Group] | None:
    try:
        return cut(written, groups)
    except InputError as error:
        problems.add(loc, str(error))
        return None


def cut(written: LengthsIn, groups: int) -> list[binning.Group]:
    """A written distribution as (share, mean tokens) groups."""
    if written.values is not None:
        weights = written.weights or [1.0] * len(written.values)
        return binning.cut_values(written.values, weights, groups)
    if written.uniform is not None:
        low, high = written.uniform
        return [(1.0, low)] if low == high else binning.cut_law(binning.uniform(low, high), groups)
    if written.lognormal is not None:
        law = written.lognormal
        return binning.cut_law(binning.lognormal(law.mu, law.sigma, law.min, law.max), groups)
    if written.p50 is not None and written.p99 is not None:
        middle = written.p50
        mu, sigma = lognormal_from_quantiles(written.p50, written.p99)
    else:
        assert written.mean is not None
        middle = written.mean
        mu, sigma = lognormal_from_mean(written.mean, written.cv or 0.0)
    if sigma < MIN_SIGMA:
        return [(1.0, middle)]
    if sigma > MAX_SIGMA:
        raise InputError("", "p99 is over 10,000 times p50; check the two")
    low, high = exp(mu - TAIL_SIGMAS * sigma), exp(mu + (TAIL_SIGMAS + sigma) * sigma)
    return binning.cut_law(binning.lognormal(mu, sigma, low, high), groups)


def describe(written: LengthsIn) -> str:
    """A distribution in a few words."""
    if written.values is not None:
        return f"{len(written.values)} values"
    if written.uniform is not None:
        return f"uniform {written.uniform[0]:g}-{written.uniform[1]:g}"
    if written.lognormal is not None:
        law = written.lognormal
        return f"lognormal({law.mu:g}, {law.sigma:g}) on [{law.min:g}, {law.max:g}]"
    if written.p50 is not None:
        return f"lognormal p50 {written.p50:g} p99 {written.p99:g}"
    return (
        f"fixed {written.mean:g}" if not written.cv else f"lognormal mean {written.mean:g} cv {written.cv:g}"
    )

"""Wiring for commands that need requests: a catalog name or a trace file becomes a workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.types import DEFAULT_CLASS, DEFAULT_TENANT
from potluck.sim.load import arrivals
from potluck.sim.load.workload import (
    PrefixBlocks,
    Scaling,
    Workload,
    at_rate,
    first,
    named_labels,
    synthetic,
    with_prefixes,
    workload,
)

if TYPE_CHECKING:
    from potluck.spec.traces import Trace


DEFAULT_REQUESTS = 10_000


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """How the requests are wanted. None leaves it to the source."""

    rate_per_s: float | None = None
    requests: int | None = None
    seed: int = 0
    gap_cv: float | None = None  # For made-up arrivals; a trace with times keeps its own pattern.
    how: Scaling = "stretch"


def is_file(what: str) -> bool:
    """Whether a name means a trace: a file that is there, or something spelt like one."""
    return Path(what).is_file() or what.endswith((".csv", ".jsonl", ".json", ".gz")) or "/" in what


def load(what: str, model: str, workload_options: WorkloadOptions) -> Workload:
    if is_file(what):
        from potluck.spec.traces import load_trace

        return of_trace(load_trace(Path(what), blocks=True), model, workload_options)
    try:
        return of_name(what, model, workload_options)
    except UnknownNameError as error:
        raise InputError("workload", f"{error.problem} (or give a trace file)") from error


def of_name(name: str, model: str, workload_options: WorkloadOptions) -> Workload:
    from potluck.catalog import named_workloads

    named = named_workloads.workload(name)
    rate_per_s = workload_options.rate_per_s if workload_options.rate_per_s is not None else named.rate_per_s
    if rate_per_s is None:
        raise InputError("--rate", f"is needed: the source of workload {named.name!r} gives none")
    cv = named.gap_cv if workload_options.gap_cv is None else workload_options.gap_cv
    count = workload_options.requests or DEFAULT_REQUESTS
    workload = synthetic(model, named.lengths, rate_per_s, count, workload_options.seed, cv)
    if named.prefix_hit_share > 0:
        workload = with_prefixes(workload, named.prefix_hit_share, workload_options.seed)
    return workload


def of_trace(trace: Trace, model: str, workload_options: WorkloadOptions) -> Workload:
    """A trace's requests, at its own times or scaled; a trace without times gets made-up arrivals."""
    blocks = None
    if trace.block_starts is not None and trace.block_ids is not None:
        blocks = PrefixBlocks(trace.block_starts, trace.block_ids)
    prompt, output = trace.input_tokens.astype(np.int64), trace.output_tokens.astype(np.int64)
    timed = trace.span_s > 0
    if timed:
        times = trace.time_s - trace.time_s[0]
    else:
        if workload_options.rate_per_s is None:
            raise InputError("--rate", "is needed: all requests of the trace come at one moment")
        cv = 1.0 if workload_options.gap_cv is None else workload_options.gap_cv
        times = arrivals.gamma(
            np.random.default_rng(workload_options.seed), workload_options.rate_per_s, cv, len(trace)
        )
    made = workload(model, times, prompt, output, blocks=blocks)
    tenants = None if trace.tenants is None else [name or DEFAULT_TENANT for name in trace.tenants]
    classes = None if trace.classes is None else [name or DEFAULT_CLASS for name in trace.classes]
    made = replace(made, labels=named_labels(tenants, classes, trace.wait_s, len(made)))
    if timed and workload_options.rate_per_s is not None:
        made = at_rate(made, workload_options.rate_per_s, workload_options.how, workload_options.seed)
    return made if workload_options.requests is None else first(made, workload_options.requests)


def to_trace(workload: Workload, format_name: str = "made", start_s: float = 0.0) -> Trace:
    from potluck.spec.traces import Trace

    who = workload.labels
    return Trace(
        format_name,
        workload.arrival_s + start_s,
        workload.prompt_tokens.astype(np.float64),
        workload.output_tokens.astype(np.float64),
        prefix_hit_share=None,
        empty_outputs=0,
        block_starts=None if workload.blocks is None else workload.blocks.starts,
        block_ids=None if workload.blocks is None else workload.blocks.ids,
        tenants=None if who is None else tuple(who.tenants[place] for place in who.tenant.tolist()),
        classes=None if who is None else tuple(who.classes[place] for place in who.request_class.tolist()),
        wait_s=None if who is None else who.wait_s,
    )

"""What CRONUS's pairs are made of: how busy each GPU of a disaggregated pair is (its Table 3), the two linear
predictors of its balancer (4.4, Figure 3), and two guesses at what Table 2 does not say.

Table 3 divides a pair's throughput by what each instance could do alone: the prefill instance with prompts and no
answers, the decode instance with prefills that cost nothing (here: so many prefill replicas that it never waits).

Guesses, made after seeing Table 2: a pipeline that works on one batch at a time, with 15 ms more of host time a step;
2 GiB less of memory for KV on the A10. They count in no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from papers import cronus, fleets
from papers.cronus import HIGH_LOW, LOW_HIGH, OLD_HOST, PP, RequestLengthList, Setting
from papers.rows import Line, Plot, Row, Rows
from potluck.catalog import models
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Template
from potluck.core.values.types import NodeType
from potluck.perf.linear_fit import ChunkedIterationPredictor, PartialPrefillPredictor
from potluck.perf.step_timer import steps
from potluck.perf.timers.engine_host import EngineHost
from potluck.perf.timers.roofline import roofline
from potluck.runtime.resolved_plan import EngineSetup
from potluck.sim.load.workload import workload
from potluck.sim.run import simulate
from potluck.sim.sim_settings import SimSettings

TABLE_3 = {
    "A100+A10 LLaMA3-8B": ((0.11, 0.97), (0.99, 0.32)),
    "A100+A10 Qwen2-7B": ((0.28, 1.01), (1.04, 0.25)),
    "A100+A30 LLaMA3-8B": ((0.25, 0.96), (0.98, 0.47)),
    "A100+A30 Qwen2-7B": ((0.54, 1.00), (0.99, 0.38)),
}
"""High-Low, Low-High: of the prefill and of the decode instance."""
FEEDERS = 6  # Prefill replicas that never keep a decode instance waiting.
FITS = {"A30": (0.993, 0.074), "A100-80": (0.990, 0.008)}  # R2, mean absolute percentage error.
PROMPTS, CONTEXTS = range(128, 8193, 128), range(0, 8192, 512)
DECODES, EACH = (8, 16, 32, 64), (256, 1024, 4096)  # Beside a chunk, with so many tokens of context each.
DECODE_CONTEXTS = (0.0, 20_000.0, 60_000.0, 120_000.0)
PP_HOST = EngineHost(OLD_HOST.fixed_s + 0.015, OLD_HOST.sequence_s)
LESS_GB = 2 * 1.073741824


def table_3(settings: Sequence[Setting], requests: RequestLengthList) -> list[Row]:
    note = (
        "the low-end GPU is full and the high-end one is not, as in the paper; an old host, as in Table 2 above; the "
        "A10, which was never measured, is too fast here, and so its partner is used more"
    )
    made = Rows("Table 3", note)
    for setting in settings:
        high_node_type, low_node_type = (
            fleets.node(gpu, cronus.NETWORK_GBPS) for gpu in (cronus.HIGH, setting.low)
        )
        for approach, stated, (first, second) in zip(
            (HIGH_LOW, LOW_HIGH),
            TABLE_3[setting.name],
            ((high_node_type, low_node_type), (low_node_type, high_node_type)),
            strict=True,
        ):
            whole = cronus.throughput_per_s(setting, approach, requests, OLD_HOST)
            alone = (_prefills_per_s(setting, first, requests), _decodes_per_s(setting, second, requests))
            for phase, theirs, most in zip(("prefill", "decode"), stated, alone, strict=True):
                made.add(
                    f"{setting.name}, {approach}", f"use of the {phase} GPU, share", theirs, whole / most
                )
    return made


def _prefills_per_s(setting: Setting, where: NodeType, requests: RequestLengthList) -> float:
    template = fleets.template("alone", "homogeneous", [("mixed", fleets.alone(where, setting.model))])
    engines = {("alone", 0): EngineSetup(cronus.WHOLE_TOKENS, 1, OLD_HOST)}
    short = RequestLengthList(requests.prompt_tokens, np.ones_like(requests.output_tokens), requests.source)
    return _per_s(setting, [where], template, engines, short)


def _decodes_per_s(setting: Setting, where: NodeType, requests: RequestLengthList) -> float:
    feeder = fleets.node(cronus.HIGH, cronus.NETWORK_GBPS)
    fed, last = fleets.alone(feeder, setting.model), fleets.alone(where, setting.model)
    both = fleets.template("fed", "combo", [*(("prefill", fed) for _ in range(FEEDERS)), ("decode", last)])
    engines = {("fed", place): EngineSetup(cronus.WHOLE_TOKENS, 1, OLD_HOST) for place in range(FEEDERS)}
    engines["fed", FEEDERS] = EngineSetup(cronus.CHUNK_TOKENS, cronus.SLOTS, OLD_HOST)
    return _per_s(setting, [feeder, where], both, engines, requests)


def _per_s(
    setting: Setting,
    where: Sequence[NodeType],
    template: Template,
    engines: dict[tuple[str, int], EngineSetup],
    requests: RequestLengthList,
) -> float:
    """All requests at once, over the time until the last is answered."""
    load = workload(fleets.MODEL, np.zeros(len(requests)), requests.prompt_tokens, requests.output_tokens)
    problem = fleets.problem(setting.model, where, [(template, 1)], engines, cronus.MEAN_TOKENS)
    policy = Policy(admission=False, balance="goodput", opportunistic=False, max_wait_s=inf)
    return len(requests) / simulate(problem, load, policy, settings=SimSettings(overlap=False)).end_s


def predictors() -> tuple[list[Row], tuple[Plot, ...]]:
    """Fits by plain least squares, as in the paper, over times of the performance model."""
    model = models.model("Llama-3.1-8B")
    low, high = (roofline(model, fleets.node(gpu, cronus.NETWORK_GBPS), 1) for gpu in FITS)
    prompts = np.asarray(PROMPTS, dtype=np.float64)
    partial = PartialPrefillPredictor.fit(np.column_stack([prompts, low.step_s(steps(chunk_new=prompts))]))
    grid = np.meshgrid(*(np.asarray(axis, dtype=np.float64) for axis in (CONTEXTS, DECODES, EACH)))
    context, count, each = (axis.ravel() for axis in grid)
    times = high.step_s(steps(cronus.CHUNK_TOKENS - count, context, count, count * each))
    chunked = ChunkedIterationPredictor.fit(np.column_stack([context, count * each, times]))
    found = {"A30": (partial.r2, partial.mape), "A100-80": (chunked.r2, chunked.mape)}
    made = Rows(
        "Figure 3 and the predictors",
        (
            "to times of the performance model, which has no noise to fit, with today's host; with the old "
            "one, whose time grows with sequences, the second fit is worse than printed"
        ),
    )
    for (gpu, (r2, mape)), what in zip(FITS.items(), ("partial prefill", "chunked iteration"), strict=True):
        made.add(f"{what}, LLaMA3-8B, {gpu}", "fit, R2", r2, found[gpu][0])
        made.add(f"{what}, LLaMA3-8B, {gpu}", "mean absolute error, share", mape, found[gpu][1])
    contexts, lines = np.asarray(CONTEXTS, dtype=np.float64), []
    for decodes in DECODE_CONTEXTS:
        beside = decodes / cronus.MEAN_TOKENS[0]
        taken = steps(cronus.CHUNK_TOKENS - beside, contexts, np.full(len(contexts), beside), decodes)
        taken_ms = tuple((high.step_s(taken) * 1e3).tolist())
        lines.append(Line(f"{decodes:,.0f} tokens of answers' contexts", tuple(contexts.tolist()), taken_ms))
    plot = Plot(
        "Figure 3 and the predictors", "context of the prompt, tokens", "ms a chunk of 512", tuple(lines)
    )
    return made, (plot,)


def guesses(settings: Sequence[Setting], requests: RequestLengthList) -> list[Row]:
    made = Rows("Table 2, guesses", "chosen after seeing the rows above; count in no target")
    for setting in settings:
        ours = cronus.throughput_per_s(setting, cronus.SERIAL_PP, requests, PP_HOST)
        where = f"{setting.name}, {PP}, one batch at a time, old host and 15 ms a step"
        made.add(where, "max throughput, requests/s", setting.published_per_s[PP], ours)
        if setting.low == "A10":
            ours = cronus.throughput_per_s(replace(setting, less_gb=LESS_GB), HIGH_LOW, requests)
            where = f"{setting.name}, {HIGH_LOW}, 2 GiB less of memory, fitted host"
            made.add(where, "max throughput, requests/s", setting.published_per_s[HIGH_LOW], ours)
    return made

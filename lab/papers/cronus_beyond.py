"""Beyond CRONUS: a pair whose low-end GPU may keep decodes, and whose high-end GPU may take prompts whole.

The paper names the limit in its section 6: once decoding on the high-end GPU is the bottleneck, splitting prompts
cannot help. The Brain's two answers (`core/routing/split.py`) are switched on and off under overloads: *prompts*,
with the lengths of Azure's conversation trace, *flood*, half as many again of these, and *answers*, with those of
LongWriter. Both engines run chunks, KV leaves layer by layer, and the host takes as long as today's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from papers import cronus, fleets
from papers.rows import Row, Rows
from potluck.catalog import named_workloads
from potluck.core.state.policy import Policy
from potluck.perf.timers.engine_host import DEFAULT_HOST
from potluck.runtime.resolved_plan import EngineSetup
from potluck.sim.load.arrivals import draw
from potluck.sim.load.workload import workload
from potluck.sim.results.metrics import summarise
from potluck.sim.run import simulate

REQUESTS = 3000
OVERLOADS = {"prompts": ("azure-conv", 9.0), "flood": ("azure-conv", 13.5), "answers": ("longwriter", 4.5)}
"""Lengths, and requests per second: more than the pair can serve."""


@dataclass(frozen=True, slots=True)
class Outcome:
    per_s: float  # Requests over the time until the last is answered.
    ttft_p90_s: float
    kept: int  # Requests that ran on one GPU alone.


def run(setting: cronus.Setting, overload: str, policy: Policy, seed: int = 0) -> Outcome:
    name, rate_per_s = OVERLOADS[overload]
    rng = np.random.default_rng(seed)
    prompts, outputs = draw(rng, named_workloads.workload(name).lengths, REQUESTS)
    when_s = np.cumsum(rng.exponential(1.0 / rate_per_s, REQUESTS))
    high_node_type, low_node_type = (
        fleets.node(gpu, cronus.NETWORK_GBPS) for gpu in (cronus.HIGH, setting.low)
    )
    on_high, on_low = (fleets.alone(node, setting.model) for node in (high_node_type, low_node_type))
    pair = fleets.template("pair", "pair", [("prefill", on_low), ("mixed", on_high)])
    engines = {
        ("pair", 0): EngineSetup(cronus.LOW_CHUNK_TOKENS, cronus.SLOTS, DEFAULT_HOST),
        ("pair", 1): EngineSetup(cronus.CHUNK_TOKENS, cronus.SLOTS, DEFAULT_HOST),
    }
    means = float(prompts.mean()), float(outputs.mean())
    problem = fleets.problem(setting.model, (high_node_type, low_node_type), [(pair, 1)], engines, means)
    result = simulate(problem, workload(fleets.MODEL, when_s, prompts, outputs), policy)
    total_summary = summarise(result).total
    assert total_summary.ttft_s is not None
    records = result.records
    kept = int((records.prefill_replica == records.decode_replica).sum())
    return Outcome(REQUESTS / result.end_s, total_summary.ttft_s.p90, kept)


def limitation(quick: bool, seed: int = 0) -> list[Row]:
    """On A100+A30 with Llama; quick: long answers alone, without and with both rules."""
    made = Rows(
        "Its limitation (section 6)", "not run in the paper; today's host; both of ours are on by default"
    )
    setting, rules = cronus.SETTINGS[2], policies()
    names = ("paper", "both") if quick else tuple(rules)
    for overload in ("answers",) if quick else OVERLOADS:
        for name in names:
            found = run(setting, overload, rules[name], seed)
            made.add(f"{setting.name}, {overload}, {name}", "throughput, requests/s", None, found.per_s)
            made.add(f"{setting.name}, {overload}, {name}", "TTFT p90, s", None, found.ttft_p90_s)
    return made


def policies() -> dict[str, Policy]:
    """The paper's rule, with each of ours, and with both."""
    return {
        name: Policy(
            admission=False,
            balance="goodput",
            opportunistic=False,
            split_overflow=overflow,
            low_decodes=keeps,
            max_wait_s=inf,
        )
        for name, overflow, keeps in (
            ("paper", False, False),
            ("overflow", True, False),
            ("low_decodes", False, True),
            ("both", True, True),
        )
    }

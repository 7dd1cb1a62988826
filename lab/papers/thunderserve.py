"""THUNDERSERVE: its cloud of 32 GPUs beside 8 A100, the search, a loss of 4 GPUs, ablations, Tables 3, 5, 8.

Times are data-sheet figures (its Table 1) at fixed shares (`PeakCosts`), as its own search has them. The bandwidth
matrix has no numbers: links are 10 to 40 Gbps at random. HexGen-like: no phases apart, on the cloud. DistServe-like:
phases apart, on one server of 8 A100. vLLM-like: four replicas of two A100. Throughput is what the search says of its
best state if any number of requests came (TTFT within 3 s, TPOT 0.2 s), in closed form, not a run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from papers.peak_costs import PeakCosts
from papers.rows import Line, Plot, Row, Rows
from potluck.catalog import models, nodes
from potluck.catalog.figure_sources import load_toml
from potluck.core.errors import CapacityError
from potluck.core.values.types import NodeType, Role, Slo
from potluck.perf.memory import weight_bytes
from potluck.perf.startup import startup_s
from potluck.perf.step_timer import steps
from potluck.plan.search import tabu
from potluck.plan.search.deduce import deducer
from potluck.plan.search.evaluate import GpuGroup, PoolEvaluator
from potluck.plan.search.workload import Pool, PoolNode, PoolWorkload

SEED = 1
CLOUD = (("A6000", 4), ("A6000", 4), ("A5000", 4), ("A5000", 4), ("A40", 8), ("3090Ti", 4), ("3090Ti", 4))
IN_HOUSE = (("A100", 8),)
SIZES = {16: (0, 2, 5, 6), 24: (0, 2, 4, 5, 6), 32: tuple(range(7))}  # GPUs to machines of the cloud.
WORK = {"coding": (2000, 28), "conversation": (1155, 211)}
"""Mean lengths of the Azure traces; coding's 2,048 would leave LLaMA-30B's context no room to answer."""
RATE_PER_S, ANY_PER_S = 12.0, 200.0
SLO = Slo(3.0, 0.2)
PAPER: tuple[Role, ...] = ("prefill", "decode")
ALL: tuple[Role, ...] = ("prefill", "decode", "mixed")
MIXED: tuple[Role, ...] = ("mixed",)
SMALL_GROUP = 4  # GPUs of its own groups, at most.
USD_PER_H = {"cloud": 13.542, "in-house": 14.024}
FIGURE_9 = {"coding": {"HexGen": 1.5, "DistServe": 1.5}, "conversation": {"HexGen": 1.3, "DistServe": 2.1}}
TABLE_3 = {"coding": (8, 4), "conversation": (4, 8)}  # Prefill and decode replicas.
CONVERGED_S = {16: 21.0, 24: 36.0, 32: 54.0}
TABLE_4_S = {"full": (54.0, 103.0), "light": (13.0, 0.0)}  # Rescheduling, reloading.
RATIOS = {"coding": 5, "conversation": 3}  # Prefill replicas of eight that do best (Figure 14).
TABLE_5 = {
    "unsplit": (0.884, 1.689, 1610.0),
    "40 Gbps": (0.698, 1.126, 3292.0),
    "5 Gbps": (0.964, 1.846, 2196.0),
}
"""Prefill and decode of one request in seconds, tokens a second."""
TABLE_8 = {"fp16": (0.584, 2450.0), "int4": (0.133, 3292.0)}  # KV of one request, tokens a second.
PROMPT_TOKENS = 1024


def node(gpu: str, count: int) -> NodeType:
    row = load_toml("gpus.toml")["paper"]["thunderserve"][gpu]
    base = nodes.node_type(f"{count}x{row['gpu']}")
    stated = {name: row[name] for name in ("fp16_tflops", "bandwidth_gb_per_s", "memory_gb")}
    return replace(base, gpu=replace(base.gpu, **stated))


def pool_of(machines: Sequence[NodeType], gbps: np.ndarray) -> Pool:
    members = tuple(PoolNode(f"node{i}", kind, kind.gpus) for i, kind in enumerate(machines))
    links = tuple(map(tuple, np.minimum(gbps, gbps.T).tolist()))
    return Pool(members, links, ((1e-4,) * len(members),) * len(members))


def cloud(copies: int = 1, machines: Sequence[tuple[str, int]] = CLOUD) -> Pool:
    """THUNDERSERVE 5.1, once or several times, with unlike links."""
    kinds = [node(gpu, count) for _ in range(copies) for gpu, count in machines]
    return pool_of(kinds, np.random.default_rng(SEED).uniform(10.0, 40.0, (len(kinds), len(kinds))))


def work(name: str, rate_per_s: float = RATE_PER_S) -> PoolWorkload:
    return PoolWorkload(models.model("LLaMA-30B"), SLO, *WORK[name], rate_per_s, "int4")


def settings(phases: tuple[Role, ...], **more: Any) -> tabu.SearchSettings:
    """Limits count CPU time, so that a busy machine searches as far as an idle one."""
    usual: dict[str, Any] = {"seed": SEED, "timing": PeakCosts(), "clock": time.process_time}
    return tabu.SearchSettings(phases, **usual | more)


def timed(pool: Pool, wanted: PoolWorkload, chosen: tabu.SearchSettings) -> tuple[tabu.SearchResult, float]:
    start_s = time.process_time()
    result = tabu.search(pool, wanted, chosen)
    return result, time.process_time() - start_s


def throughputs(names: Sequence[str], quick: bool) -> list[Row]:
    """Figure 9 and Table 3; budgets are the sums of its Table 1."""
    listed = load_toml("gpus.toml")["paper"]["thunderserve"]
    budget = Rows("Budget", "the sum of its Table 1; the cloud's printed total does not come out of it")
    for label, machines in (("cloud", CLOUD), ("in-house", IN_HOUSE)):
        usd = sum(listed[gpu]["price_usd_per_h"] * count for gpu, count in machines)
        budget.add(label, "rent, USD/h", USD_PER_H[label], usd)
    house = cloud(1, IN_HOUSE)
    made = Rows(
        "Figure 9",
        "in closed form; unsplit replicas compute prompts in steps of answers, as engines do",
    )
    plans = Rows("Table 3", "groups of at most four GPUs, as its own are")
    for name in names:
        wanted = work(name, ANY_PER_S)
        found = {
            "ThunderServe": tabu.search(cloud(), wanted, settings(PAPER)),
            "HexGen": tabu.search(cloud(), wanted, settings(MIXED)),
            "DistServe": tabu.search(house, wanted, settings(PAPER)),
            "vLLM": tabu.search(house, wanted, settings(MIXED, max_group_gpus=2)),
        }
        if not quick:
            found["with a third phase"] = tabu.search(cloud(), wanted, settings(ALL))
        rates = {label: result.score.goodput_per_s for label, result in found.items()}
        for label, rate in rates.items():
            made.add(f"{name}, {label}", "throughput, requests/s", None, rate)
        for label in list(rates)[1:]:
            ours, theirs = rates["ThunderServe"] / rates[label], FIGURE_9[name].get(label)
            made.add(f"{name}, ThunderServe over {label}", "throughput, times", theirs, ours)
        small = tabu.search(cloud(), work(name), settings(PAPER, max_group_gpus=SMALL_GROUP))
        phases = [group.phase for group in small.state.groups]
        for phase, label in enumerate(PAPER):
            plans.add(name, f"{label} replicas, replicas", TABLE_3[name][phase], phases.count(phase))
    return [*budget, *made, *plans]


def convergence(sizes: Sequence[int]) -> tuple[list[Row], tuple[Plot, ...]]:
    """Figure 10: from nothing to no better state."""
    made, lines = Rows("Figure 10", "one core; which machines its smaller clusters have is not printed"), []
    for size in sizes:
        machines = [CLOUD[place] for place in SIZES[size]]
        found, took_s = timed(cloud(1, machines), work("conversation"), settings(PAPER))
        made.add(f"{size} GPUs", "until it converges, CPU-s", CONVERGED_S[size], took_s)
        lines.append(Line(f"{size} GPUs", *(tuple(axis) for axis in zip(*found.trace, strict=True))))
    return made, (Plot("Figure 10", "CPU-s", "attainment", tuple(lines)),)


def losing_a_node(name: str, quick: bool) -> list[Row]:
    """Figure 11 and Table 4: a machine of four A6000 goes; as it is, roles alone anew, all anew."""
    pool, wanted, times = cloud(), work(name), Rows("Table 4")
    made = Rows("Figure 11", "drawn, not printed: light is close to full and above none")
    sizes = {"groups of at most 4 GPUs": SMALL_GROUP} | ({} if quick else {"groups of any size": None})
    for label, most in sizes.items():
        chosen = settings(PAPER, max_group_gpus=most)
        previous_result = tabu.search(pool, wanted, chosen)
        survivors = tabu.groups_left(pool, previous_result, {"node0": 4})
        start_s = time.process_time()
        light = _kept(survivors, previous_result, wanted, chosen)
        light_s = time.process_time() - start_s
        none = _kept(survivors, previous_result, wanted, replace(chosen, limits=tabu.SearchLimits(steps=0)))
        full, full_s = timed(survivors.pool, wanted, chosen)
        kept = (previous_result.score.attainment, none, light, full.score.attainment)
        for what, ours in zip(("before", "none", "light", "full"), kept, strict=True):
            made.add(f"{name}, {label}", f"attainment, {what}, share", None, ours)
        if most is not None:
            times.add(f"{name}, full", "rescheduling, CPU-s", TABLE_4_S["full"][0], full_s)
            loading_s = startup_s(weight_bytes(wanted.model)).load_s
            times.add(f"{name}, full", "reloading, s", TABLE_4_S["full"][1], loading_s)
            times.add(f"{name}, light", "rescheduling, CPU-s", TABLE_4_S["light"][0], light_s)
    return [*made, *times]


def _kept(
    survivors: tabu.PoolSurvivors,
    previous_result: tabu.SearchResult,
    wanted: PoolWorkload,
    chosen: tabu.SearchSettings,
) -> float:
    """What is attained with the groups that are left; nothing where the only one of a phase is gone."""
    try:
        return tabu.reschedule(survivors, previous_result, wanted, chosen).score.attainment
    except CapacityError:
        return 0.0


def evaluator_of(pool: Pool, wanted: PoolWorkload) -> PoolEvaluator:
    return PoolEvaluator(deducer(pool, wanted, PeakCosts()))


def ratios(names: Sequence[str]) -> tuple[list[Row], tuple[Plot, ...]]:
    """Figures 6 and 14: four, six and eight replicas of two A5000, so many of them for prompts."""
    note = (
        "Llama-2-13B for LLaMA-13B, 40 Gbps between them; as in the paper more prefill replicas for coding than for "
        "conversation, and a wrong ratio loses more than half"
    )
    made, plots = Rows("Figures 6 and 14", note), []
    for name in names:
        wanted, lines = replace(work(name, ANY_PER_S), model=models.model("Llama-2-13B")), []
        for replicas in (4, 6, 8):
            judged = evaluator_of(
                pool_of([node("A5000", 2)] * replicas, np.full((replicas, replicas), 40.0)), wanted
            )
            rates = {}
            for count in range(1, replicas):
                groups = tuple(GpuGroup(((place, 2),), int(place >= count)) for place in range(replicas))
                rates[count] = judged.score(groups).goodput_per_s
            best = max(rates, key=lambda count: rates[count])
            stated = RATIOS[name] if replicas == 8 else None
            made.add(name, f"best prefill replicas of {replicas}, replicas", stated, best)
            worst = min(rates.values()) / rates[best]
            made.add(name, f"worst ratio over the best of {replicas}, share", None, worst)
            shares = tuple(count / replicas for count in rates)
            lines.append(Line(f"{2 * replicas} GPUs", shares, tuple(rates.values())))
        plots.append(
            Plot(f"Figures 6 and 14, {name}", "share of prefill replicas", "requests/s", tuple(lines))
        )
    return made, tuple(plots)


def ablations(names: Sequence[str]) -> list[Row]:
    """Figure 12: the plan with KV in sixteen bits, and then with requests dispatched at random."""
    why = (
        "throughput within the objective; the paper tells of 1.3 times a request's overhead, then of 4 times"
    )
    made = Rows("Figure 12", why)
    for name in names:
        wanted, pool = work(name, ANY_PER_S), cloud()
        found = tabu.search(pool, wanted, settings(PAPER, max_group_gpus=SMALL_GROUP))
        groups = found.state.groups
        raw = replace(wanted, codec="fp16")
        plain = evaluator_of(pool, raw).score(groups).goodput_per_s
        chance = _at_random(pool, raw, groups, {p: c.rate_per_s for p, c in enumerate(found.configurations)})
        for label, theirs, ours in (
            ("compression", 1.3, plain),
            ("both that and orchestration", 5.2, chance),
        ):
            lost = found.score.goodput_per_s / max(ours, 1e-9)
            made.add(f"{name}, without {label}", "throughput lost, times", theirs, lost)
    return made


def _at_random(
    pool: Pool, wanted: PoolWorkload, groups: Sequence[GpuGroup], rates: Mapping[int, float]
) -> float:
    """Any prefill replica, any decode replica: the slowest of each phase says how many requests come through."""
    attained = evaluator_of(pool, wanted).attained(tuple(groups))
    slowest = []
    for phase in (0, 1):
        mine = [rate for place, rate in rates.items() if groups[place].phase == phase]
        slowest.append(min(mine) * len(mine))
    return wanted.headroom * min(slowest) * float(np.mean(list(attained.values())))


def answer_tokens() -> int:
    """One request of Table 5 decodes for 1126 ms on the 3090Ti: so many tokens."""
    model = models.model("LLaMA-30B")
    one = steps(decodes=np.ones(1), decode_context=np.full(1, float(PROMPT_TOKENS)))
    layer_s, rest_s = PeakCosts().parts(model, node("3090Ti", 4), 4, one)
    return round(TABLE_5["40 Gbps"][1] / float(layer_s[0] * model.layer_count + rest_s[0]))


def table_5() -> list[Row]:
    """4 A40 and 4 3090Ti, prompts of 1,024 tokens."""
    model, output, rates = models.model("LLaMA-30B"), answer_tokens(), dict[str, float]()
    for gbps in (40.0, 5.0):
        pool = pool_of([node("A40", 4), node("3090Ti", 4)], np.full((2, 2), gbps))
        wanted = PoolWorkload(model, Slo(10.0, 0.2), PROMPT_TOKENS, output, ANY_PER_S, "int4")
        rates[f"{gbps:g} Gbps"] = tabu.search(pool, wanted, settings(PAPER)).score.goodput_per_s
        rates["unsplit"] = tabu.search(pool, wanted, settings(MIXED, max_group_gpus=4)).score.goodput_per_s
        if gbps == 40.0:
            raw = tabu.search(pool, replace(wanted, codec="fp16"), settings(PAPER)).score.goodput_per_s
    note = f"answers of {output} tokens; unsplit replicas compute prompts in the steps of answers here, see below"
    made, compressed, tokens = Rows("Table 5", note), Rows("Table 8"), PROMPT_TOKENS + output
    for label, (_, _, theirs) in TABLE_5.items():
        made.add(label, "throughput, tokens/s", theirs, rates[label] * tokens)
    for label in ("40 Gbps", "5 Gbps"):
        theirs, ours = TABLE_5[label][2] / TABLE_5["unsplit"][2], rates[label] / rates["unsplit"]
        made.add(f"{label} over unsplit", "throughput, times", theirs, ours)
    theirs = TABLE_8["int4"][1] / TABLE_8["fp16"][1]
    compressed.add("int4 over fp16", "throughput, times", theirs, rates["40 Gbps"] / raw)
    bits = replace(wanted, codec="fp16").kv_bytes_per_layer * model.layer_count * 8
    compressed.add("fp16, 40 Gbps", "KV of one request, s", TABLE_8["fp16"][0], bits / 40e9)
    return [*made, *compressed]


def by_its_own_times() -> list[Row]:
    """Table 5 from its own latencies: how much splitting can gain at most, whatever the batches.

    The unsplit row is the mean of two replicas; the 40 Gbps row has one phase of each. So 4 A40 take 698 and 2252 ms,
    4 3090Ti 1070 and 1126 ms. If batches divide prefill by a and decode by b, alike on all, unsplit replicas do
    sum_i 1 / (a p_i + b d_i) requests a second, split ones min(1 / (a p), 1 / (b d)); the ratio is largest where
    a p = b d, unless the phases also disturb each other, or prompts share steps with answers, which is for unsplit.
    """
    (mean_p, mean_d, base), (a40_p, ti_d, _) = TABLE_5["unsplit"], TABLE_5["40 Gbps"]
    replicas = ((a40_p, 2 * mean_d - ti_d), (2 * mean_p - a40_p, ti_d))
    note = "largest possible gain of splitting by its own times of one request, the phases taking turns on a replica"
    made = Rows("Table 5, by its own times", note)
    for label in ("40 Gbps", "5 Gbps"):
        prefill_s, decode_s, theirs = TABLE_5[label]
        weight = prefill_s / decode_s
        unsplit = sum(1 / (p + weight * d) for p, d in replicas)
        ours = 1 / prefill_s / unsplit
        made.add(f"{label} over unsplit", "throughput, times", theirs / base, ours)
    return made

"""CAUCHY's KV on the move (its 4.7, Figure 11), and phases on unlike GPUs (2.3, Figure 2).

Figure 11: KV of 256 to 2,048 tokens from an H800 to an H20, over 1 to 16 connections while the prompt is computed,
against one bulk transfer over one connection after it. What one connection carries is taken from one printed figure,
the 625 ms of 2,048 tokens; the card has the 25 Gbps that its 85 ms come to. All other figures follow from the
transfer model; `wire` is how long the bytes take, `after the prefill` what a request waits for them.

Figure 2: two GPUs of each of two types, prompts on the one and answers on the other, or a pair of each type.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from papers import fleets
from papers.cauchy import (
    LOADS,
    MODEL,
    NETWORK_GBPS,
    Effort,
    combo_of,
    goodput_per_s,
    node_of,
    problem_of,
    table3_policy,
)
from papers.cronus import OLD_HOST
from papers.rows import Line, Plot, Row, Rows
from potluck.catalog import models
from potluck.core.values.layout import Layout
from potluck.core.values.types import Role
from potluck.perf.memory import kv_bytes
from potluck.perf.phases import prefill_s
from potluck.perf.timers.roofline import roofline
from potluck.perf.transfer import AlphaBeta, alpha_beta

TOKENS, DEGREES = (256, 512, 1024, 2048), (1, 2, 4, 8, 16)
BULK_S, BEST_S, BEST_DEGREE, RATIOS = 0.625, 0.085, 8, (3.4, 7.4)
"""2,048 tokens in one transfer and by eight pipelines; how many times faster that is, over lengths."""
RTT_S = 2e-4  # Between racks; hardly counts.
TYPES = (("H800", "H20"), ("H800", "A800-PCIe"), ("A800-PCIe", "H20"))
ABOVE = 0.05  # "Over 5 %" more tokens per USD, H800 with H20.


def link(connections: int) -> AlphaBeta:
    one_bytes_per_s = float(kv_bytes(models.model(MODEL), TOKENS[-1])) / BULK_S
    return alpha_beta(NETWORK_GBPS, RTT_S, connections, window_bytes=one_bytes_per_s * RTT_S)


def migration_s(tokens: int, degree: int) -> tuple[float, float]:
    """On the wire, and after the end of the prefill."""
    model, way = models.model(MODEL), link(degree)
    wire_s = float(way.stream_s(kv_bytes(model, tokens)))
    prompt_s = float(prefill_s(roofline(model, node_of("H800"), 1), tokens)[0])
    # Two machines in a row: what is left of a layer when the prompt ends, and what the wire was behind before.
    layer_s, behind_s = wire_s / model.layer_count, max(0.0, wire_s - prompt_s) / model.layer_count
    return wire_s, layer_s + (model.layer_count - 1) * behind_s + way.alpha_s


def bulk_s(tokens: int) -> float:
    return float(link(1).time_s(kv_bytes(models.model(MODEL), tokens)))


def figure_11() -> tuple[list[Row], tuple[Plot, ...]]:
    note = (
        "16 pipelines are as fast as 8 here: the card is full with 8, and threads cost nothing in the model"
    )
    made = Rows("Figure 11", note)
    after = {(tokens, degree): migration_s(tokens, degree) for tokens, degree in product(TOKENS, DEGREES)}
    for tokens in TOKENS:
        stated = BULK_S if tokens == TOKENS[-1] else None
        made.add(f"{tokens} tokens, synchronous", "latency, s", stated, bulk_s(tokens))
        for degree in DEGREES:
            stated = BEST_S if (tokens, degree) == (TOKENS[-1], BEST_DEGREE) else None
            made.add(
                f"{tokens} tokens, degree {degree}",
                "latency on the wire, s",
                stated,
                after[tokens, degree][0],
            )
            made.add(
                f"{tokens} tokens, degree {degree}",
                "latency after the prefill, s",
                None,
                after[tokens, degree][1],
            )
    gains = [bulk_s(tokens) / after[tokens, BEST_DEGREE][0] for tokens in TOKENS]
    for label, theirs, ours in (("least", RATIOS[0], min(gains)), ("most", RATIOS[1], max(gains))):
        made.add(f"degree {BEST_DEGREE} over synchronous, {label}", "on the wire, times", theirs, ours)
    xs = tuple(map(float, DEGREES))
    lines = [
        Line(f"{tokens} tokens", xs, tuple(after[tokens, d][1] * 1e3 for d in DEGREES)) for tokens in TOKENS
    ]
    return made, (Plot("Figure 11", "pipelines", "ms after the prefill", tuple(lines)),)


def figure_2(types: Sequence[tuple[str, str]], effort: Effort) -> list[Row]:
    load, policy = LOADS[1], table3_policy(False)
    note = (
        "at the highest rate that keeps the objective; both cost the same, so it is tokens per USD too. Here an H800 "
        "decodes far more within 30 ms than an H20 or A800, so giving both H800 to prompts loses; between A800 and "
        "H20 the paper's order holds"
    )
    made = Rows("Figure 2", note)
    for a, b in types:
        first_layout, second_layout = (fleets.alone(node_of(gpu), MODEL) for gpu in (a, b))
        parts: list[tuple[Role, Layout]] = [("prefill", first_layout), ("prefill", first_layout)]
        parts += [("decode", second_layout), ("decode", second_layout)]
        unlike = [(fleets.template("unlike", "combo", parts), 1)]
        pairs = [(gpu, combo_of(gpu, gpu, gpu)) for gpu in (a, b)]
        alone = {
            g: goodput_per_s(problem_of(load, [(t, 1)], OLD_HOST), load, policy, effort) for g, t in pairs
        }
        together = goodput_per_s(problem_of(load, unlike, OLD_HOST), load, policy, effort)
        stated = ABOVE if (a, b) == TYPES[0] else None
        made.add(f"2 {a} -> 2 {b}", "goodput, requests/s", None, together)
        made.add(f"{a} -> {a} and {b} -> {b}", "goodput, requests/s", None, sum(alone.values()))
        made.add(
            f"{a} and {b}",
            "tokens per USD, unlike against alike, change",
            stated,
            together / sum(alone.values()) - 1.0,
        )
    return made

"""The page of accuracy that `make site` adds, from the stored errors and the catalog."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from potluck.cli.engine.own_runs import METRIC_WORDS

if TYPE_CHECKING:
    from accuracy_study.serving import RunScore, RunStudy
    from accuracy_study.study import Score

HEAD = """# How accurate the performance model is

This page is made by `make site`; the figures were computed by `python lab/accuracy.py --data FOLDER --calibrate`
from measurements that others published (aiconfigurator, Vidur and a fork of it, LLMServingSim, Helix). Errors are
absolute percentage errors on rows the fit has not seen.

- *calibrated*: half of a GPU's rows were fitted, the other half predicted.
- *GPU left out*: nothing of that GPU, nor of a sibling with the same chip, was seen; its data sheet and the
  other GPUs' measurements had to do. A GPU of the catalog that has the chip of a measured one (H200, GB200) is better
  off than these: it has that one's figures and surfaces.
- *model left out*: one model's rows predicted from the others' (only Vidur measured several on one GPU).

Prefill-size is 256 new tokens or more in a chunk, decode-size at most 64. The GEMM rows are those with at
least 1024 on both sides, as in models' projections; `any GEMM` has every shape, down to 32 x 32.

What was chosen with these errors in view: these cuts between kinds of work, the form of the formulas, the share of
the softmax that does not hide (0.6, tried against others by the left-out errors), the rule for an architecture that
nobody measured (the median share, taken after an H100 left out had shown the ceiling to be worse), and the grid of
the residual surfaces (by the calibrated errors). The fits never saw the rows; these choices did, so a GPU that is
truly new may do somewhat worse than the table says.
"""
PUBLISHED_GBPS = {  # PrfaaS Table 3: KV throughput on 8 H200 at 1K, 8K, 32K, 128K tokens
    "Kimi-Linear-48B-A3B": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B-A17B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B-A22B": (4.12, 22.42, 33.35, 21.50),
}
LENGTHS = (1024, 8192, 32768, 131072)
TARGETS = {"calibrated": 0.06, "GPU left out": 0.15}
KIND_TARGETS = {
    "FP8 GEMM": {"calibrated": 0.08, "GPU left out": 0.20},
    "experts": {"calibrated": 0.12, "GPU left out": 0.25},
    "latent module": {"calibrated": 0.12, "GPU left out": 0.25},
    "windowed attention": {"calibrated": 0.12, "GPU left out": 0.25},
    "all-reduce": {"calibrated": 0.15, "GPU left out": 0.20},
}


def report(scores: tuple[Score, ...]) -> str:
    """The whole page."""
    from accuracy_study.scores import stored_runs

    parts = [HEAD, LEVELS, runs_section(stored_runs()), _summary(scores), _misses(scores)]
    for question in ("calibrated", "GPU left out", "model left out"):
        rows = [s for s in scores if s.question == question]
        parts.append(f"## {question[0].upper()}{question[1:]}\n\n{_table(rows)}")
    parts += [_published(), _confidence(), own_section()]
    return "\n".join(parts)


def _summary(scores: tuple[Score, ...]) -> str:
    plain = ("prefill GEMM", "prefill attention", "decode GEMM", "decode attention")
    lines = [
        "## Operators in short\n",
        "The median over all (GPU, harness) pairs of each pair's median error, and the worst pair.\n",
        "| work | calibrated | target | worst | GPU left out | target | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in (*plain, *KIND_TARGETS):
        cells = []
        for question, target in KIND_TARGETS.get(kind, TARGETS).items():
            result = [s for s in scores if s.question == question and s.kind == kind and not s.group]
            worst = max(result, key=lambda s: s.median)
            middle = _percent(median(s.median for s in result))
            cells.append(f"{middle} | {target * 100:.0f} % | {_percent(worst.median)} ({worst.gpu})")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _misses(scores: tuple[Score, ...]) -> str:
    """Every pair that misses its target, named."""
    lines = [
        "Pairs that miss their target:\n",
        "| question | work | GPU | measured by | median |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.question} | {f'{s.kind} ({s.group})' if s.group else s.kind} | {s.gpu} | {s.harness} "
        f"| {_percent(s.median)} |"
        for s in scores
        if s.kind not in ("any GEMM", "all-to-all")
        and s.median > KIND_TARGETS.get(s.kind, TARGETS).get(s.question, 1e9)
    ]
    return "\n".join(lines) + "\n" + WHY


WHY = """
Why they miss:

- *L40S, calibrated.* Its large GEMMs run into the power limit, and neighbouring shapes differ by up to 50 % for no
  reason of shape (32768 x 65536: 113 ms at k = 7168, 127 ms at the smaller k = 6144). Gradient-boosted trees on top
  of an earlier formula reached 8.6 % over all its prefill shapes in a trial. Its attention rows were taken with a
  warm cache, and the boundary where the cache stops helping is steep.
- *A100, decode attention (aiconfigurator, vLLM 0.14).* Times jump from 13 to 19 µs between one and two requests,
  and the share of bandwidth is below what Vidur measured on the same GPU; other GPUs cannot tell.
- *A30, prefill attention left out.* A Vidur fork measured it; its kernels behave like Vidur's own, which on the
  A100 are 2.4 times slower than vLLM's at 3,000 tokens. No other GPU has them, and the two treat the mask apart.
- *A30, decode GEMM.* 21 rows, timed with launches from Python.
- *H100, prefill attention.* It alone runs FlashAttention-3, so nothing in the data can foretell it; and one formula
  has to serve heads of 64 to 256.

- *Experts.* The A100's table is of an older vLLM without tuned kernels for it, a third slower than the others would
  say, at one token as at thousands: the fit gives its kernels 0.47 of the arithmetic, those of the others 0.70.
  Tried for it, and kept where the three GPUs' errors fell: tiles that wait for the L2 cache (28.5 to 27.4 %, kept),
  experts' share of the arithmetic carried over as it is, not as a ratio to products that run into the power
  limit (27.8, kept; both together as in the table), weights read again for every row of tiles (29.7), one tile height
  for a whole launch (28.1 to 28.3), the rate of shared memory (no change). On the H100, experts with per-tensor FP8
  were timed in a kernel that takes six times as long as reading their weights (the publisher of the tables calls it
  implausible): those rows are not read, and per-tensor experts are taken for block-wise ones there. Making rows small
  between experts' two products costs no kernel of its own (on three GPUs that term only made errors larger).
  4-bit experts run other kernels on each of the GPUs.
- *B200, left out.* Its attention, latent attention and experts are kernels that run on no other GPU, so nothing is
  carried from it, and little to it. Of its rows those were left out that are no measure of serving: layers with two
  matrices, a preview build, DeepSeek's 256 experts in 8 and 4 bits (routed to half of them, they would need more
  bandwidth than there is), per-tensor products of one row.
- *Block-wise FP8 GEMM.* DeepGEMM on H100 and B200 and Triton on the L40S are different kernels. vLLM's rows are timed
  with their launch from Python (60 to 340 µs, which CUDA graphs do not have): those below 3.5 such launches were left
  out of fit and score. On the B200 small ones are TensorRT-LLM's and SGLang's, which differ by two (9 and 19 µs).

- *Windowed attention.* A window of 128 tokens in nearly all rows. Its tiles go over the window and their own rows
  (which alone took an H100 left out from 33 to 22 %, and an L40S from 21 to 24 %). Fitted, with a surface of its
  own, its median error goes from 10 to 8 % (H100) and from 16 to 9 % (L40S) beside plain attention's figures;
  elsewhere those hold.

FP8, experts, latent modules and windowed attention were measured on three GPUs (bf16 experts on four, NVFP4 on
one): a GPU left out is predicted from one or two others, so these medians say little of another architecture.
Figures of `fp8`, `int8` and 4-bit products on GPUs without such units (weights only), of linear attention and of
data-parallel experts' dispatch have no measurements. Nor has tensor parallelism on RTX 4090: its rows are of one GPU
(`decode step` below), and between several each is taken to send through the host's memory over its own lanes, at the
share that NCCL reaches between RTX PRO 6000. All-reduce is vLLM's in CUDA graphs over NVSwitch (three machines), PCIe
with peer access (one; left out, Vidur's boards with NVLink pairs stand for it) and PCIe on a shared way (one, which
nothing can be left out of). Chosen with these errors in view: an SM's time to make a row of inputs small, the shares
of experts' tiles, what an SM gets from the L2 cache, how unlike a router's experts are, the features of the surfaces
of experts (the expert-parallel degree) and of windowed attention.

How a harness shifts its figures is learnt only from GPUs that two harnesses measured (A100 and H100).

Whole steps (`step with prefill`, `decode step`) are sums of measured operators of Llama-3.1-8B on an RTX 4090, most
of them prefill chunks beside decodes, without the engine's own overhead. In the calibrated rows the fit has seen
prefills and decodes alone and the dense operators, but no mixed launch.
"""


def _table(rows: Iterable[Score]) -> str:
    lines = [
        "| work | GPU | measured by | model | rows | median | 9 in 10 within |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in rows:
        cells = (s.kind, s.gpu, s.harness, s.group or "-", f"{s.rows:,}", _percent(s.median), _percent(s.p90))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _published() -> str:
    """Published prefill times of whole models, which nothing here was fitted to."""
    from potluck.catalog import models, nodes
    from potluck.perf.memory import kv_bytes
    from potluck.perf.phases import prefill_s
    from potluck.perf.timers.roofline import roofline

    lines = [
        "## Models that nothing was fitted to\n",
        "PrfaaS (its Table 3) gives the KV throughput of six large models on 8 H200 under SGLang; with the",
        "KV bytes of their architectures that is a prefill time. All have mixture-of-experts layers, most",
        "have latent or linear attention; experts and latent attention were measured on other GPUs, linear",
        "attention nowhere. Seconds, published / ours:\n",
        "| model | 1K | 8K | 32K | 128K |",
        "|---|---|---|---|---|",
    ]
    node, lengths = nodes.node_type("8xH200"), np.asarray(LENGTHS, np.float64)
    for name, gbps in PUBLISHED_GBPS.items():
        model = models.model(name)
        ours = prefill_s(roofline(model, node, 8), lengths)
        theirs = kv_bytes(model, lengths) * 8 / (np.asarray(gbps) * 1e9)
        cells = (f"{t:.2f} / {o:.2f}" for t, o in zip(theirs, ours, strict=True))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "The published times hold about 0.35 s that do not depend on length, which is the serving stack and",
        "not the GPUs. From 32K to 128K tokens ours grow more slowly than published: for such models take",
        "our prefill times as a lower bound until the engine is profiled.\n",
    ]
    return "\n".join(lines)


def _confidence() -> str:
    """What stands behind every GPU of the catalog."""
    from potluck.catalog import gpus
    from potluck.perf.operators.calibration import bundled, curves_for

    lines = [
        "## What stands behind each GPU\n",
        "Shares are of the data sheet: of the matrix rate for large GEMMs, of memory bandwidth for decode",
        "attention.\n",
        "| GPU | confidence | compute share | bandwidth share | from |",
        "|---|---|---|---|---|",
    ]
    for name in gpus.names():
        curves = curves_for(gpus.gpu(name), bundled())
        shares = f"{float(curves.gemm.compute):.2f} | {float(curves.decode.bandwidth):.2f}"
        lines.append(f"| {name} | {curves.confidence} | {shares} | {curves.basis} |")
    power = bundled().power
    energies = ", ".join(f"{family} {watts:.2f}" for family, watts in power.watts_per_tflops.items())
    lines += [
        "",
        f"Compute shares follow a power limit: a soft minimum of {power.ceiling:.2f} and of the board's",
        f"watts over the energy of its matrix units, fitted as watts per TFLOP/s: {energies}.\n",
    ]
    return "\n".join(lines)


# Whole serving runs and error bars.

RUN_TARGETS = {
    ("rate", "dense"): 0.10,
    ("rate", "experts"): 0.15,
    ("tpot", "dense"): 0.15,
    ("tpot", "experts"): 0.15,
    ("ttft", "dense"): 0.25,
    ("ttft", "experts"): 0.25,
}
BIAS = 0.08
LEVELS = """## Three levels

| level | what is put beside what | where |
|---|---|---|
| operator | one product, one attention, one all-reduce | from *Calibrated* on |
| step | sums of measured operators (RTX 4090) | `step with prefill`, `decode step` |
| serving run | what a client saw: throughput, TTFT, TPOT | *Whole serving runs* |

A figure that Potluck prints has a bar from errors at its own level. Rates, prices, TTFT and TPOT take theirs
from serving runs of the same kind of model, format and tensor-parallel degree, as far as 60 runs of 12
configurations were measured there; else of any degree, any format, any kind. Runs exist for H100 alone, so on
another GPU the spread of operators' errors comes on top, of a mixture's experts' errors: its own where its operators
were measured, that of GPUs left out where they were carried over, twice that where nothing of its kind was measured.
Bars of first tokens count each run twice, once as if nobody had seen its version of the engine: what a server adds
before a first token differs by ten from engine to engine. `measured` is
said only where every part was: products in that format, attention, experts in theirs, and the all-reduce over
that link.
"""
RUNS = """## Whole serving runs

{runs} runs on H100 that others published (aiconfigurator): six models, three engines, 16, 8 and 4 bits, one
to eight GPUs, always a fixed number of requests of one length under way. Throughput is concurrency / (TTFT +
(osl - 1) TPOT). Seven figures for each version of an engine and kind of model were fitted (below), all else comes
from operators. Configurations were dealt into two halves; each run is predicted with what the half without it was
fitted to.
"""
WORSE = """What is worse than its label, in these runs:

- *First tokens of TensorRT-LLM with Llama-3.1-8B*: a third off. Its runs seem to have as many slots as requests
  and to free them late; no column says so, and nothing was fitted for it.
- *gpt-oss-120b at 512 requests (vLLM 0.11)*: TTFT of minutes and TPOT as if eight ran: an engine's own limit.
- *Runs with 4,000 in and 1,000 out*: up to 2.4 times faster or slower than predicted; other clients, few of
  them.
- *Memory nearly full* (Qwen3-32B in 16 bits on one H100, SGLang): 2 to 3 times slower; what an engine keeps
  free of its memory is not known, and with little left each request counts.
- Runs of prefill and decode apart, over two nodes, or with data-parallel attention ({left_out} rows) were left
  out.
"""


OWN = """## Your own runs

`potluck calibrate --score FILE` puts predictions beside serving runs that you measured, one
row each (CSV, JSON, JSON lines, Parquet; `.gz` too), and says how many lie within their bars and whether plans for
that hardware promise too much. It exits with 0 where bars hold (60 % of runs or more within those of 80 %), 1
where they do not, 2 where the file cannot be read; `--json` for scripts. Columns may have any of these names, in
any case, times with `_ms` or `_s` at their end; rows without a concurrency or a measured time, over several nodes,
or with prefill elsewhere are left out and counted. A format that is not modelled is an error that names it; one that
nobody measured on any GPU is named beside the scores.

| what | columns |
|---|---|
"""


def own_section() -> str:
    """How to score a table of one's own."""
    from potluck.cli.engine.run_tables import COLUMNS

    message = {fact: names for fact, names in COLUMNS.items() if fact != "source"}
    rows = (f"| {fact} | {', '.join(f'`{name}`' for name in names)} |" for fact, names in message.items())
    return OWN + "\n".join(rows) + "\n"


def runs_section(study: RunStudy) -> str:
    """Scores by kind and degree, what was fitted, and how often bars hold."""
    total = sum(s.runs for s in study.scores if s.metric == "rate" and not s.engine and s.kind)
    parts = [RUNS.format(runs=total), _by_kind(study.scores), _by_degree(study.scores), _held(study)]
    parts += [WORSE.format(left_out=study.left_out), _fitted(study), _all(study.scores)]
    return "\n".join(parts)


def _by_kind(scores: Iterable[RunScore]) -> str:
    lines = [
        "| figure | models | runs | median | target | bias | 9 in 10 within |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in scores:
        if s.kind and not s.engine:
            target = _percent(RUN_TARGETS[s.metric, s.kind])
            cells = (
                METRIC_WORDS[s.metric],
                s.kind,
                f"{s.runs}",
                _percent(s.median),
                target,
                _signed(s.bias),
                _percent(s.p90),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _by_degree(scores: Iterable[RunScore]) -> str:
    lines = [
        f"Bias of what is predicted, by tensor-parallel degree (target for throughput ±{BIAS:.0%}):\n",
        "| degree | runs | throughput | TTFT | TPOT |",
        "|---|---|---|---|---|",
    ]
    result = [s for s in scores if not s.kind]
    for tp in sorted({s.tp for s in result}):
        mine = {s.metric: s for s in result if s.tp == tp}
        biases = " | ".join(_signed(mine[metric].bias) for metric in ("rate", "ttft", "tpot"))
        lines.append(f"| {tp} | {mine['rate'].runs} | {biases} |")
    return "\n".join(lines) + "\n"


def _held(study: RunStudy) -> str:
    lines = [
        "Bars of 80 % from four fifths of the configurations, tried on the other fifth, hold so many runs:\n",
        "| figure | all | dense | experts |",
        "|---|---|---|---|",
    ]
    for metric, words in METRIC_WORDS.items():
        cells = (study.coverage.get(key, 0.0) for key in (metric, f"{metric}, dense", f"{metric}, experts"))
        lines.append(f"| {words} | {' | '.join(_percent(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _fitted(study: RunStudy) -> str:
    lines = [
        "What was fitted, to all runs of each version, and what is taken for one that nobody saw. The host's part",
        "and what a request takes outside the engine go into estimates and plans (vLLM's); the rest is the client's:",
        "which share of requests comes in one burst, and how many prompts the others find before them.\n",
        "| engine | models | runs | host, a step | a sequence | launching a layer | burst | ahead | a request |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for item in study.engines:
        host, client = item.host, item.client
        times = f"{host.fixed_s * 1e3:.2f} ms | {host.sequence_s * 1e6:.0f} µs | {host.launch_s * 1e3:.2f} ms"
        sent = f"{client.burst:.2f} | {client.ahead:.1f} | {client.request_s * 1e3:.0f} ms"
        lines.append(
            f"| {item.engine} {item.version or 'else'} | {item.kind} | {item.runs} | {times} | {sent} |"
        )
    return "\n".join(lines) + "\n"


def _all(scores: Iterable[RunScore]) -> str:
    lines = [
        "By engine, format and degree (median error, bias):\n",
        "| models | engine | bits | degree | runs | throughput | TTFT | TPOT |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, int, int], dict[str, RunScore]] = {}
    for s in scores:
        if s.engine:
            groups.setdefault((s.kind, s.engine, s.bits, s.tp), {})[s.metric] = s
    for (kind, engine, bits, tp), mine in groups.items():
        cells = " | ".join(
            f"{_percent(mine[m].median)}, {_signed(mine[m].bias)}" if m in mine else "-" for m in METRIC_WORDS
        )
        lines.append(f"| {kind} | {engine} | {bits} | {tp} | {mine['rate'].runs} | {cells} |")
    return "\n".join(lines) + "\n"


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"


def _signed(value: float) -> str:
    return f"{value * 100:+.1f} %"

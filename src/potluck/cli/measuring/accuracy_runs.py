"""The part of docs/accuracy.md that tells of whole serving runs and of error bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from potluck.cli.measuring.run_tables import METRIC_WORDS

if TYPE_CHECKING:
    from accuracy.serving import RunScore, RunStudy

TARGETS = {
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
another GPU the spread of operators' errors comes on top: its own where its operators were measured, that of
GPUs left out where they were carried over, twice that where nothing of its kind was measured. `measured` is
said only where every part was: products in that format, attention, experts in theirs, and the all-reduce over
that link.
"""
RUNS = """## Whole serving runs

{runs} runs on H100 that others published (aiconfigurator): six models, three engines, 16, 8 and 4 bits, one
to eight GPUs, always a fixed number of requests of one length under way. Throughput is concurrency / (TTFT +
(osl - 1) TPOT). Six figures for each version of an engine and kind of model were fitted (below), all else comes
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

`potluck accuracy --score FILE` puts predictions beside serving runs that you measured, one row each (CSV, JSON, JSON
lines, Parquet; `.gz` too), and says how many lie within their bars and whether plans for that hardware promise
too much. It exits with 0 where bars hold (60 % of runs or more within those of 80 %), 1 where they do not, 2 where
the file cannot be read; `--json` for scripts. Columns may have any of these names, in any case, times with `_ms` or
`_s` at their end; rows without a concurrency or a measured time, over several nodes, or with prefill elsewhere are
left out and counted.

| what | columns |
|---|---|
"""


def own_section() -> str:
    """How to score a table of one's own."""
    from accuracy.runs import COLUMNS

    told = {fact: names for fact, names in COLUMNS.items() if fact != "source"}
    rows = (f"| {fact} | {', '.join(f'`{name}`' for name in names)} |" for fact, names in told.items())
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
            target = _percent(TARGETS[s.metric, s.kind])
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
    found = [s for s in scores if not s.kind]
    for tp in sorted({s.tp for s in found}):
        mine = {s.metric: s for s in found if s.tp == tp}
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
        "What was fitted, to all runs of each version. The host's part goes into every estimate and plan (vLLM's",
        "newest); the client's is of the benchmark alone: which share of requests comes in one burst, how many",
        "prompts the others find before them, and what a request takes outside the engine.\n",
        "| engine | models | runs | host, a step | a sequence | launching a layer | burst | ahead | a request |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in study.engines:
        host, client = each.host, each.client
        times = f"{host.fixed_s * 1e3:.2f} ms | {host.sequence_s * 1e6:.0f} µs | {host.launch_s * 1e3:.2f} ms"
        sent = f"{client.burst:.2f} | {client.ahead:.1f} | {client.request_s * 1e3:.0f} ms"
        lines.append(f"| {each.engine} {each.version} | {each.kind} | {each.runs} | {times} | {sent} |")
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

"""PrfaaS's rows: how fast models make KV (Tables 3 and 5, equation 2), and its case study (Table 6, Figure 5).

Times of the tables are the performance model's, on 8 H200. The paper's hardly fall below 0.35 s, whatever the model,
so part of a prompt's time was not spent on the GPU; it is fitted to one cell (`fitted_host_s`).

The case study is the throughput model of `prfaas_model.py` on what the paper measured. It prints prefill times of
H200 only. Those of H20 follow from two throughputs in Table 6: nine instances at the mean length give 2.11/s,
three at the mean below the threshold 1.64; with T_H20 = a + b T_H200 these two fix the curve. Decode as well: five
instances give 3.91. These three figures return by construction; all others do not.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from papers import prfaas_case, prfaas_model
from papers.prfaas_model import Curve, Lengths, Operating, Site, operating, optimum
from papers.rows import Line, Plot, ProgressReporter, Reproduction, Row, Rows, quiet
from potluck.catalog import models, nodes, prices
from potluck.perf.memory import kv_bytes
from potluck.perf.phases import prefill_s
from potluck.perf.timers.roofline import roofline

MODEL, GPUS = "prfaas-1t-hybrid", 8
LENGTHS = (1024, 8192, 32768, 131072)
KV_GBPS = {
    "Kimi-Linear-48B-A3B": (1.19, 2.29, 3.87, 4.88),
    "MiMo-V2-Flash": (0.82, 2.85, 4.66, 4.71),
    "Qwen3.5-397B-A17B": (4.13, 6.28, 8.25, 7.47),
    "Ring-2.5-1T": (7.27, 4.47, 2.59, 1.46),
    "MiniMax-M2.5": (4.94, 32.87, 59.93, 47.82),
    "Qwen3-235B-A22B": (4.12, 22.42, 33.35, 21.50),
}
FITTED_ON = ("Qwen3-235B-A22B", 1024)
EGRESS_GBPS = (
    ("MiniMax-M2.5", 512, 32768, 3800.0),
    ("Qwen3-235B-A22B", 512, 32768, 2100.0),
    ("Ring-2.5-1T", 512, 32768, 170.0),
    ("Ring-2.5-1T", 512, 131072, 100.0),
    ("Ring-2.5-1T", 10_000, 131072, 1800.0),
)
"""(model, GPUs, tokens of a prompt, published); the last but one is printed as "below"."""
THRESHOLD, GBPS = 19_400, 100.0
REMOTE, LOCAL, HOME = 4, 8, 12  # Instances: of H200, of H20 beside them, of H20 alone.
EQUAL_COST = 0.15
FIGURES = {
    "threshold_tokens": "threshold, tokens",
    "prefill": "N_p, instances",
    "decode": "N_d, instances",
    "ttft_mean_s": "mean TTFT, s",
    "ttft_p90_s": "P90 TTFT, s",
    "theta_remote": "Θ prfaas, requests/s",
    "theta_prefill": "Θ pd-p, requests/s",
    "theta_decode": "Θ pd-d, requests/s",
    "rate_per_s": "Λ max, requests/s",
    "remote_share": "sent away, share",
    "long_tokens": "mean length sent away, tokens",
    "egress_gbps": "egress, Gbps",
}
TABLE_6 = (
    dict(zip(FIGURES, (19_400, 3, 5, 2.22, 3.51, 1.61, 1.64, 3.91, 3.24, 0.496, 44_000, 13.0), strict=True)),
    {
        "prefill": 9,
        "decode": 3,
        "ttft_mean_s": 4.44,
        "ttft_p90_s": 9.73,
        "theta_decode": 2.35,
        "rate_per_s": 2.11,
    },
    {"decode": 8, "ttft_mean_s": 1.74, "ttft_p90_s": 3.51, "theta_decode": 6.25, "rate_per_s": 2.45},
)
"""The columns of `case_study`."""
BUILT = {("PrfaaS-PD", "theta_prefill"), ("PrfaaS-PD", "theta_decode"), ("homogeneous", "rate_per_s")}


@cache
def case_lengths() -> Lengths:
    return prfaas_model.truncated_lognormal(9.90, 1.00, 128, 128 * 1024)


def case_site(remote: int = REMOTE, local: int = LOCAL, gbps: float = GBPS) -> Site:
    """Its clusters as the throughput model wants them."""
    printed, lengths = models.published(MODEL), case_lengths()
    prefill, mib = printed["prefill_8xh200_s"], printed["kv_mib"]
    h200 = Curve(tuple(map(float, prefill)), tuple(prefill.values()))
    kv = Curve(tuple(map(float, mib)), tuple(size * 2**20 for size in mib.values()))
    mean = float((lengths.tokens * lengths.share).sum())
    short = float(lengths.tokens[lengths.tokens <= THRESHOLD].mean())
    h20 = prfaas_model.local_from_remote(h200, ((short, 3 / 1.64), (mean, 9 / 2.11)))
    return Site(remote, local, gbps, h200, h20, kv, 5 / 3.91)


def case_study() -> dict[str, Operating]:
    """The three columns of Table 6."""
    return {
        "PrfaaS-PD": optimum(case_site(), case_lengths()),
        "homogeneous": optimum(case_site(0, HOME), case_lengths()),
        "naive": operating(case_site(), case_lengths(), 0.0, 0),
    }


@cache
def kv_gbps(model: str, host_s: float = 0.0) -> tuple[float, ...]:
    """What 8 H200 make of prompts of `LENGTHS`, one at a time."""
    known = models.model(model)
    took_s = prefill_s(roofline(known, nodes.node_type("8xH200"), GPUS), np.array(LENGTHS)) + host_s
    return tuple((kv_bytes(known, np.array(LENGTHS, float)) * 8e-9 / took_s).tolist())


def fitted_host_s() -> float:
    """Seconds of a prompt beside the GPU's that give the published figure of one cell."""
    (name, tokens), place = FITTED_ON, LENGTHS.index(FITTED_ON[1])
    bits = float(kv_bytes(models.model(name), float(tokens))) * 8e-9
    return bits / KV_GBPS[name][place] - bits / kv_gbps(name)[place]


def reproduce(quick: bool, seed: int, report_progress: ProgressReporter = quiet) -> Reproduction:
    report_progress("PrfaaS, KV throughput of models")
    made = [*_kv_rows(), *_egress_rows()]
    report_progress("PrfaaS, the case study")
    made += _case_rows(case_study())
    sites = {name: case_site(*counts) for name, counts in prfaas_case.SITES.items()}
    made += prfaas_case.rows(
        sites, case_lengths(), case_study(), 150.0 if quick else 1200.0, seed, report_progress
    )
    return Reproduction("PrfaaS", tuple(made), _searches())


def _kv_rows() -> list[Row]:
    host_s = fitted_host_s()
    note = "the paper's times include some 0.3 s that no GPU works; without them short prompts make KV faster"
    fitted = f"{host_s:.2f} s of each prompt are the host's, fitted to {FITTED_ON[0]} at 1K"
    plain, hosted, sizes = (
        Rows("Table 3", note),
        Rows("Table 3, with host time", fitted),
        Rows("Table 5", fitted),
    )
    for made, extra_s in ((plain, 0.0), (hosted, host_s)):
        for name, published in KV_GBPS.items():
            for tokens, theirs, ours in zip(LENGTHS, published, kv_gbps(name, extra_s), strict=True):
                made.add(f"{name}, {tokens // 1024}K", "KV throughput, Gbps", theirs, ours)
    dense, hybrid = "MiniMax-M2.5", "MiMo-V2-Flash"
    ours = kv_gbps(dense, host_s)[2] / kv_gbps(hybrid, host_s)[2]
    hosted.add("32K", f"{dense} over {hybrid}, times", KV_GBPS[dense][2] / KV_GBPS[hybrid][2], ours)
    printed, known = models.published(MODEL), models.model(MODEL)
    took_s = prefill_s(roofline(known, nodes.node_type("8xH200"), GPUS), np.array(LENGTHS))
    for tokens, gpu_s in zip(LENGTHS, took_s.tolist(), strict=True):
        where, size = f"{tokens // 1024}K", float(kv_bytes(known, float(tokens)))
        stated = {key: printed[key][str(tokens)] for key in ("kv_mib", "prefill_8xh200_s", "kv_gbps")}
        sizes.add(where, "KV size, MiB", stated["kv_mib"], size / 2**20)
        sizes.add(where, "prefill, s", stated["prefill_8xh200_s"], gpu_s)
        sizes.add(where, "prefill with host time, s", stated["prefill_8xh200_s"], gpu_s + host_s)
        gbps = size * 8e-9 / (gpu_s + host_s)
        sizes.add(where, "KV throughput with host time, Gbps", stated["kv_gbps"], gbps)
    return [*plain, *hosted, *sizes]


def _egress_rows() -> list[Row]:
    made, host_s = Rows("Equation 2"), fitted_host_s()
    for name, gpus, tokens, theirs in EGRESS_GBPS:
        place, what = LENGTHS.index(tokens), f"{name}, {gpus} GPUs, {tokens // 1024}K"
        made.add(what, "egress by its Table 3, Gbps", theirs, gpus / GPUS * KV_GBPS[name][place])
        made.add(
            what, "egress by ours with host time, Gbps", theirs, gpus / GPUS * kv_gbps(name, host_s)[place]
        )
    return made


def _case_rows(found: dict[str, Operating]) -> list[Row]:
    best, home, naive = found.values()
    usd = {name: prices.price_usd_per_h(name).price_usd_per_h for name in ("8xH200", "8xH20")}
    spent = (REMOTE * usd["8xH200"] + LOCAL * usd["8xH20"]) / (HOME * usd["8xH20"])
    equal = f"8 H200 at {usd['8xH200']:.2f}, 8 H20 at {usd['8xH20']:.2f} USD/h in the catalog; it prints no prices"
    built = "fixes the H20's times: returns by construction"
    made = Rows("Table 6")
    for (name, result), published in zip(found.items(), TABLE_6, strict=True):
        for key, theirs in published.items():
            note = built if (name, key) in BUILT else ""
            made.add(name, FIGURES[key], theirs, float(getattr(result, key)), note)
    made.add("PrfaaS-PD over homogeneous", "Λ max, times", 1.54, best.rate_per_s / home.rate_per_s)
    made.add("naive over homogeneous", "Λ max, times", 1.16, naive.rate_per_s / home.rate_per_s)
    ours = best.rate_per_s / home.rate_per_s / spent
    made.add("PrfaaS-PD over homogeneous", "at equal cost, times", 1 + EQUAL_COST, ours, equal)
    return made


def _searches() -> tuple[Plot, ...]:
    """Figure 5: one variable at its optimum, the other gone through."""
    site, lengths, best = case_site(), case_lengths(), case_study()["PrfaaS-PD"]
    splits = tuple(operating(site, lengths, best.threshold_tokens, n).rate_per_s for n in range(1, LOCAL))
    cuts = tuple(np.geomspace(2_000, 100_000, 60).tolist())
    tried = [operating(site, lengths, cut, best.prefill) for cut in cuts]
    far = tuple(item.theta_remote / max(item.remote_share, 1e-9) for item in tried)
    near = tuple(item.theta_prefill / max(1 - item.remote_share, 1e-9) for item in tried)
    most = 2.0 * best.rate_per_s
    shown = [
        tuple(min(rate, most) for rate in rates) for rates in (far, near, tuple(t.rate_per_s for t in tried))
    ]
    names = ("Θ prfaas / p", "Θ pd-p / (1 - p)", "Λ max")
    curves = tuple(Line(name, cuts, rates) for name, rates in zip(names, shown, strict=True))
    first = Line("Λ max", tuple(map(float, range(1, LOCAL))), splits)
    return (
        Plot("Figure 5a", "N_p of eight instances of H20", "requests/s", (first,)),
        Plot("Figure 5b", "threshold, tokens", "requests/s", curves),
    )

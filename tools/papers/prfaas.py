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

from papers import prfaas_case
from papers.prfaas_model import (
    Curve,
    Lengths,
    Operating,
    Site,
    local_from_remote,
    operating,
    optimum,
    truncated_lognormal,
)
from papers.rows import Line, Plot, Reproduction, Row, Said, quiet
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


@cache
def case_lengths() -> Lengths:
    return truncated_lognormal(9.90, 1.00, 128, 128 * 1024)


def case_site(remote: int = REMOTE, local: int = LOCAL, gbps: float = GBPS) -> Site:
    """Its clusters as the throughput model wants them."""
    printed, lengths = models.published(MODEL), case_lengths()
    prefill, mib = printed["prefill_8xh200_s"], printed["kv_mib"]
    h200 = Curve(tuple(map(float, prefill)), tuple(prefill.values()))
    kv = Curve(tuple(map(float, mib)), tuple(size * 2**20 for size in mib.values()))
    mean = float((lengths.tokens * lengths.share).sum())
    short = float(lengths.tokens[lengths.tokens <= THRESHOLD].mean())
    h20 = local_from_remote(h200, ((short, 3 / 1.64), (mean, 9 / 2.11)))
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


def reproduce(quick: bool, seed: int, said: Said = quiet) -> Reproduction:
    said("PrfaaS, KV throughput of models")
    made = [*_kv_rows(), *_egress_rows()]
    said("PrfaaS, the case study")
    made += _case_rows(case_study())
    sites = {name: case_site(*counts) for name, counts in prfaas_case.SITES.items()}
    made += prfaas_case.rows(sites, case_lengths(), case_study(), 150.0 if quick else 1200.0, seed, said)
    return Reproduction("PrfaaS", tuple(made), _searches())


def _kv_rows() -> list[Row]:
    made, host_s = [], fitted_host_s()
    note = "the paper's times include some 0.4 s that no GPU works; without them short prompts make KV faster"
    fitted = f"{host_s:.2f} s of each prompt are the host's, fitted to {FITTED_ON[0]} at 1K"
    for title, extra_s, why in (("Table 3", 0.0, note), ("Table 3, with host time", host_s, fitted)):
        for name, published in KV_GBPS.items():
            for tokens, theirs, ours in zip(LENGTHS, published, kv_gbps(name, extra_s), strict=True):
                made.append(
                    Row(title, f"{name}, {tokens // 1024}K", "KV throughput", "Gbps", theirs, ours, why)
                )
    ratio = KV_GBPS["MiniMax-M2.5"][2] / KV_GBPS["MiMo-V2-Flash"][2]
    ours = kv_gbps("MiniMax-M2.5", host_s)[2] / kv_gbps("MiMo-V2-Flash", host_s)[2]
    made.append(
        Row("Table 3, with host time", "32K", "MiniMax-M2.5 over MiMo-V2-Flash", "times", ratio, ours, fitted)
    )
    printed, known = models.published(MODEL), models.model(MODEL)
    took_s = prefill_s(roofline(known, nodes.node_type("8xH200"), GPUS), np.array(LENGTHS))
    for place, tokens in enumerate(LENGTHS):
        where, size = f"{tokens // 1024}K", float(kv_bytes(known, float(tokens)))
        stated = {key: printed[key][str(tokens)] for key in ("kv_mib", "prefill_8xh200_s", "kv_gbps")}
        made.append(Row("Table 5", where, "KV size", "MiB", stated["kv_mib"], size / 2**20))
        for label, extra_s in (("", 0.0), (" with host time", host_s)):
            ours = float(took_s[place]) + extra_s
            made.append(Row("Table 5", where, f"prefill{label}", "s", stated["prefill_8xh200_s"], ours))
            made.append(
                Row("Table 5", where, f"KV throughput{label}", "Gbps", stated["kv_gbps"], size * 8e-9 / ours)
            )
    return made


def _egress_rows() -> list[Row]:
    made = []
    for name, gpus, tokens, theirs in EGRESS_GBPS:
        place, what = LENGTHS.index(tokens), f"{name}, {gpus} GPUs, {tokens // 1024}K"
        for label, rates in (
            ("by its Table 3", KV_GBPS[name]),
            ("by ours with host time", kv_gbps(name, fitted_host_s())),
        ):
            ours = gpus / GPUS * rates[place]
            made.append(Row("Equation 2", what, f"egress {label}", "Gbps", theirs, ours))
    return made


def _case_rows(found: dict[str, Operating]) -> list[Row]:
    best, home, naive = found.values()
    usd = {name: prices.price_usd_per_h(name).price_usd_per_h for name in ("8xH200", "8xH20")}
    spent = (REMOTE * usd["8xH200"] + LOCAL * usd["8xH20"]) / (HOME * usd["8xH20"])
    equal = f"8 H200 at {usd['8xH200']:.2f}, 8 H20 at {usd['8xH20']:.2f} USD/h in the catalog; it prints no prices"
    built = "fixes the H20's times: returns by construction"
    figures = (
        (
            "PrfaaS-PD",
            "threshold",
            "tokens",
            19_400.0,
            best.threshold_tokens,
            "the curves meet flat: 3 % of the rate is 15 % of t",
        ),
        ("PrfaaS-PD", "N_p", "instances", 3.0, best.prefill, ""),
        ("PrfaaS-PD", "N_d", "instances", 5.0, best.decode, ""),
        ("PrfaaS-PD", "mean TTFT", "s", 2.22, best.ttft_mean_s, ""),
        ("PrfaaS-PD", "P90 TTFT", "s", 3.51, best.ttft_p90_s, ""),
        ("PrfaaS-PD", "Θ prfaas", "requests/s", 1.61, best.theta_remote, ""),
        ("PrfaaS-PD", "Θ pd-p", "requests/s", 1.64, best.theta_prefill, built),
        ("PrfaaS-PD", "Θ pd-d", "requests/s", 3.91, best.theta_decode, built),
        ("PrfaaS-PD", "Λ max", "requests/s", 3.24, best.rate_per_s, ""),
        ("PrfaaS-PD", "sent away", "share", 0.496, best.remote_share, ""),
        ("PrfaaS-PD", "mean length sent away", "tokens", 44_000.0, best.long_tokens, ""),
        ("PrfaaS-PD", "egress", "Gbps", 13.0, best.egress_gbps, ""),
        ("homogeneous", "N_p", "instances", 9.0, home.prefill, ""),
        ("homogeneous", "mean TTFT", "s", 4.44, home.ttft_mean_s, ""),
        ("homogeneous", "P90 TTFT", "s", 9.73, home.ttft_p90_s, ""),
        ("homogeneous", "Λ max", "requests/s", 2.11, home.rate_per_s, built),
        ("homogeneous", "Θ pd-d", "requests/s", 2.35, home.theta_decode, ""),
        ("naive", "mean TTFT", "s", 1.74, naive.ttft_mean_s, ""),
        ("naive", "P90 TTFT", "s", 3.51, naive.ttft_p90_s, ""),
        ("naive", "Θ pd-d", "requests/s", 6.25, naive.theta_decode, ""),
        ("naive", "Λ max", "requests/s", 2.45, naive.rate_per_s, ""),
        ("PrfaaS-PD over homogeneous", "Λ max", "times", 1.54, best.rate_per_s / home.rate_per_s, ""),
        ("naive over homogeneous", "Λ max", "times", 1.16, naive.rate_per_s / home.rate_per_s, ""),
        (
            "PrfaaS-PD over homogeneous",
            "at equal cost",
            "times",
            1 + EQUAL_COST,
            best.rate_per_s / home.rate_per_s / spent,
            equal,
        ),
    )
    return [Row("Table 6", *figure) for figure in figures]


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

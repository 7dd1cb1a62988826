"""Collectives that others measured: read, fitted per link, and scored on links that the fit has not seen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from accuracy_study.measured import AIC_GPUS, Strings, read_table
from potluck.core.values.types import Interconnect
from potluck.perf.operators.calibration import CollectivePath, NodeNetwork
from potluck.perf.operators.network import all_reduce_s, all_to_all_s
from potluck.perf.step_timer import Floats

LINKS = {  # what joins the GPUs of the measured machines; rates as the makers print them, one direction, per GPU
    "H100-SXM": Interconnect("nvswitch", 450.0, 0.0),
    "A100-80": Interconnect("nvswitch", 300.0, 0.0),
    "B200": Interconnect("nvswitch", 900.0, 0.0),
    "L40S": Interconnect("pcie", 32.0, 0.0, domain=2),
    "RTX-PRO-6000": Interconnect("pcie", 63.0, 0.0),
}
VIDUR_PCIE = {"a100_pairwise_nvlink": 32.0, "h100_pairwise_nvlink": 64.0}
"""Boards with NVLink pairs, whose four GPUs talk over PCIe with peer access."""
START = np.log([4e-6, 3e-7, 0.7])


@dataclass(frozen=True, slots=True)
class Collectives:
    """Measured collectives of one kind on one machine; an entry of each array is one measurement."""

    gpu: str
    op: str
    """all_reduce (the engine's own, in CUDA graphs), library (NCCL's), or all_to_all."""
    ranks: Floats
    size_bytes: Floats
    seconds: Floats

    def where(self, mask: np.ndarray) -> Collectives:
        return replace(
            self, ranks=self.ranks[mask], size_bytes=self.size_bytes[mask], seconds=self.seconds[mask]
        )


def read_collectives(folder: Path) -> list[Collectives]:
    """All-reduce as vLLM does it in a graph, and NCCL's all-to-all; sizes in the tables count bf16 elements."""
    collectives = []
    for name, gpu in (AIC_GPUS | {"rtx_pro_6000": "RTX-PRO-6000"}).items():
        table = read_table(folder, f"aic_{name}_allreduce")
        graph = np.asarray(table["backend"], str) == "vllm_graph"
        collectives.append(_collectives(gpu, "all_reduce", table, graph))
        table = read_table(folder, f"aic_{name}_nccl")
        half = np.asarray(table["nccl_dtype"], str) == "half"
        for op, called in (("all_to_all", "alltoall"), ("library", "all_reduce")):
            collectives.append(_collectives(gpu, op, table, half & (_names(table, "op_name") == called)))
    return collectives


def _names(table: dict[str, np.ndarray], column: str) -> Strings:
    return np.asarray(table[column], str)


def _collectives(gpu: str, op: str, table: dict[str, np.ndarray], mask: np.ndarray) -> Collectives:
    values = (np.asarray(table[c], np.float64)[mask] for c in ("num_gpus", "message_size", "latency"))
    ranks, elements, milliseconds = values
    return Collectives(gpu, op, ranks, 2.0 * elements, milliseconds * 1e-3)


def predict(rows: Collectives, interconnect: Interconnect, networks: tuple[NodeNetwork, ...]) -> Floats:
    """Seconds of every measurement by the formulas, over a link."""
    function = all_to_all_s if rows.op == "all_to_all" else all_reduce_s
    seconds = np.empty(len(rows.seconds))
    for ranks in np.unique(rows.ranks):
        mask = rows.ranks == ranks
        seconds[mask] = function(rows.size_bytes[mask], int(ranks), interconnect, networks)
    return seconds


def fit_networks(folder: Path, rows: list[Collectives]) -> tuple[NodeNetwork, ...]:
    """Fit every measured machine; of a PCIe machine both the pair and the way through its host."""
    by_gpu: dict[str, dict[str, Collectives]] = {}
    for part in rows:
        by_gpu.setdefault(part.gpu, {})[part.op] = part
    node_networks: list[NodeNetwork] = []
    for gpu, parts in by_gpu.items():
        reduce, shuffle, interconnect = parts["all_reduce"], parts["all_to_all"], LINKS[gpu]
        if interconnect.kind == "nvswitch":
            node_networks.append(
                _fit("nvswitch", interconnect, reduce, shuffle, ("library", "direct", "split"))
            )
            continue
        if interconnect.domain is None:
            node_networks.append(_fit("pcie", interconnect, reduce, shuffle, ("library", "direct")))
            # NCCL's rate there is what GPUs without peer access reach over their own lanes, too.
            node_networks.append(_fit("lanes", interconnect, parts["library"], shuffle, ("library",)))
            continue
        pair, more = (reduce.where(reduce.ranks == 2), reduce.where(reduce.ranks > 2))
        host = _fit("host", interconnect, more, shuffle.where(shuffle.ranks > 2), ("library",))
        node_networks.append(host)
        start = _fit("pcie", interconnect, pair, shuffle.where(shuffle.ranks == 2), ("library", "direct"))
        node_networks += [
            _with_peers(folder, cluster, rate, start, host) for cluster, rate in VIDUR_PCIE.items()
        ]
    return tuple(node_networks)


def _fit(
    kind: str, interconnect: Interconnect, reduce: Collectives, shuffle: Collectives, ways: tuple[str, ...]
) -> NodeNetwork:
    """Least squares on logarithms, all ways of a link at once: which one a row takes follows from its size."""
    from scipy.optimize import least_squares

    def network(x: Floats) -> NodeNetwork:
        values = np.exp(np.asarray(x).reshape(-1, 3))
        named = {
            name: CollectivePath(*map(float, row))
            for name, row in zip((*ways, "shuffle"), values, strict=True)
        }
        return NodeNetwork(kind, interconnect.gb_per_s, **named)

    joined = replace(interconnect, domain={"host": interconnect.domain, "lanes": 1}.get(kind))

    def residuals(x: Floats) -> Floats:
        guess = (network(x),)
        parts = [np.log(predict(part, joined, guess) / part.seconds) for part in (reduce, shuffle)]
        # A weak pull to the start: not every figure shows in every machine's rows.
        return np.concatenate([*parts, 0.02 * (x - start)])

    start = np.tile(START, len(ways) + 1)
    best = network(least_squares(residuals, start, loss="soft_l1", f_scale=0.1, x_scale=0.3).x)
    rounded = {name: _rounded(getattr(best, name)) for name in (*ways, "shuffle")}
    return NodeNetwork(kind, interconnect.gb_per_s, **rounded)


def _with_peers(folder: Path, cluster: str, rate: float, pair: NodeNetwork, host: NodeNetwork) -> NodeNetwork:
    """PCIe with peer access: rates of four GPUs as Vidur measured them, starts as on the measured host."""
    table = read_table(folder, "vidur_network")
    seconds = np.asarray(table["time_stats.all_reduce.median"], float) * 1e-3
    size, workers = (np.asarray(table[name], float) for name in ("size", "num_workers"))
    mask = (_names(table, "op") == "all_reduce") & (_names(table, "cluster") == cluster) & (workers == 4)
    mask &= np.isfinite(seconds) & (size >= 8 << 20)
    share = float(np.median(2.0 * 3.0 / 4.0 * size[mask] / seconds[mask])) / (rate * 1e9)
    library = CollectivePath(host.library.fixed_s, host.library.step_s, round(share, 4))
    shuffle = CollectivePath(host.shuffle.fixed_s, host.shuffle.step_s, round(share, 4))
    return NodeNetwork("pcie", rate, library, shuffle, pair.direct)


def _rounded(path: CollectivePath) -> CollectivePath:
    return CollectivePath(*(float(f"{value:.3g}") for value in (path.fixed_s, path.step_s, path.share)))

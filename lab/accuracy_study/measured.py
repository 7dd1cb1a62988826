"""Reads measurements that others published, as rows per operator.

The folder holds Parquet tables from aiconfigurator, Vidur, a Vidur fork and LLMServingSim. They differ in
columns, units and in *how* they measured: the harness. The same A100 runs prefill attention 2.5 times
slower in Vidur's kernels than in current vLLM, so a row keeps its harness, and fits allow for it.

pyarrow is imported inside the functions: only calibrating needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.perf.step_timer import Floats

Operator = str
"""gemm, prefill, decode or stream; `measured_formats` has more."""
Strings = NDArray[np.str_]
Table = Mapping[str, Floats]

AIC_GPUS = {"a100_sxm": "A100-80", "b200_sxm": "B200", "h100_sxm": "H100-SXM", "l40s": "L40S"}
AIC_WARM = {"B200", "H100-SXM", "L40S"}
"""Tables of vLLM 0.24: short contexts and small weights stayed in L2 between repetitions."""
VIDUR_GPUS = {"a100": "A100-80", "a40": "A40", "h100": "H100-SXM"}
VIDUR_MODELS = {  # hidden, query heads, KV heads, head size, intermediate
    "Llama-2-7b-hf": (4096, 32, 32, 128, 11008),
    "Llama-2-70b-hf": (8192, 64, 8, 128, 28672),
    "Meta-Llama-3-8B": (4096, 32, 8, 128, 14336),
}
QWEN2_7B = (3584, 28, 4, 128, 18944)
LLAMA31_8B = (4096, 32, 8, 128, 14336)


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of one operator; every array has one entry per measurement."""

    operator: Operator
    gpu: Strings
    harness: Strings
    group: Strings
    """What a check may leave out together besides a GPU: the model, where the rows belong to one."""
    columns: dict[str, Floats]
    seconds: Floats
    warm: Floats
    """Share of L2 in which the benchmark kept its data."""
    work: Floats
    """Tokens (gemm, prefill) or bytes (decode, stream): tells large from small."""

    def __len__(self) -> int:
        return len(self.seconds)

    def half(self) -> NDArray[np.bool_]:
        """About half of the rows of every (GPU, harness)."""
        seen = np.zeros(len(self), bool)
        for gpu, harness in sorted({*zip(self.gpu, self.harness, strict=True)}):
            mask = (self.gpu == gpu) & (self.harness == harness)
            seen[mask] = half(f"{self.operator} {gpu} {harness}", int(mask.sum()))
        return seen

    def where(self, mask: NDArray[np.bool_]) -> Measurements:
        return replace(
            self,
            gpu=self.gpu[mask],
            harness=self.harness[mask],
            group=self.group[mask],
            columns={name: column[mask] for name, column in self.columns.items()},
            seconds=self.seconds[mask],
            warm=self.warm[mask],
            work=self.work[mask],
        )


def half(name: str, count: int) -> NDArray[np.bool_]:
    """About half of so many rows, by chance, but the same whatever else is measured."""
    chosen: NDArray[np.bool_] = np.random.default_rng(crc32(name.encode())).random(count) < 0.5
    return chosen


def read_all(folder: Path) -> dict[Operator, Measurements]:
    """Every operator's rows; a missing file is an error that names it."""
    parts: dict[Operator, list[Measurements]] = {"gemm": [], "prefill": [], "decode": [], "stream": []}
    for rows in (*_aiconfigurator(folder), *_vidur(folder), *_vidur_fork(folder), *_llmservingsim(folder)):
        parts[rows.operator].append(rows)
    return {operator: valid(joined(rows)) for operator, rows in parts.items()}


def read_table(folder: Path, name: str) -> dict[str, NDArray[np.generic]]:
    """One Parquet table as arrays."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise InputError("measurements", "need pyarrow: pip install 'potluck[measure]'") from error
    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise InputError("data", f"{name}.parquet is not in the folder of measurements")
    table = parquet.read_table(path)
    return {column: table[column].to_numpy(zero_copy_only=False) for column in table.column_names}


def _floats(table: Mapping[str, NDArray[np.generic]], name: str) -> Floats:
    return np.asarray(table[name], dtype=np.float64)


def rows_of(
    operator: Operator,
    gpu: str,
    harness: str,
    seconds: Floats,
    work: Floats,
    columns: dict[str, Floats | float],
    *,
    group: str = "",
    warm: float = 0.0,
) -> Measurements:
    """Rows of one operator on one GPU; a figure instead of a column holds for all of them."""
    size = len(seconds)
    full = {name: np.broadcast_to(np.asarray(value, np.float64), size) for name, value in columns.items()}
    return Measurements(
        operator,
        np.full(size, gpu),
        np.full(size, harness),
        np.full(size, group),
        full,
        seconds,
        np.full(size, warm),
        np.asarray(work, np.float64),
    )


def _gemm(gpu: str, harness: str, m: Floats, n: float, k: float, seconds: Floats, group: str) -> Measurements:
    return rows_of("gemm", gpu, harness, seconds, m, {"m": m, "n": n, "k": k}, group=group)


def _aiconfigurator(folder: Path) -> list[Measurements]:
    parts = []
    for name, gpu in AIC_GPUS.items():
        warm = float(gpu in AIC_WARM)
        table = _products(folder, name)
        shape: dict[str, Floats | float] = {axis: _floats(table, axis) for axis in "mnk"}
        seconds = _floats(table, "latency") * 1e-3
        # The benchmark cycles through six copies of the weights.
        tokens = _floats(table, "m")
        parts.append(rows_of("gemm", gpu, "aiconfigurator", seconds, tokens, shape, warm=warm / 6))
        parts.append(
            _aic_attention(read_table(folder, f"aic_{name}_context_attention_perf"), gpu, warm, True)
        )
        generation = read_table(folder, f"aic_{name}_generation_attention_perf")
        parts.append(_aic_attention(generation, gpu, warm, False))
    return parts


def _products(folder: Path, name: str) -> dict[str, NDArray[np.generic]]:
    """A GPU's 16-bit products: a table of their own, or those among all formats, of which as many are taken."""
    own, every = (f"aic_{name}_gemm_{ending}" for ending in ("perf", "all_dtypes"))
    if (folder / f"{own}.parquet").is_file() or not (folder / f"{every}.parquet").is_file():
        return read_table(folder, own)
    table = read_table(folder, every)
    plain = np.flatnonzero(np.asarray(table["gemm_dtype"], str) == "bfloat16")
    chosen = np.random.default_rng(0).choice(plain, min(12_000, len(plain)), replace=False)
    return {column: values[chosen] for column, values in table.items()}


def _aic_attention(
    table: dict[str, NDArray[np.generic]], gpu: str, warm: float, prefill: bool
) -> Measurements:
    batch, length = _floats(table, "batch_size"), _floats(table, "isl") + _floats(table, "step")
    window = _floats(table, "window_size") if "window_size" in table else np.zeros(len(batch))
    heads, kv_heads = _floats(table, "num_heads"), _floats(table, "num_key_value_heads")
    columns: dict[str, Floats | float] = {
        "requests": batch,
        "new": length if prefill else 1.0,
        "cached": 0.0 if prefill else length,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": _floats(table, "head_dim"),
    }
    seconds = _floats(table, "latency") * 1e-3
    moved = 4.0 * batch * length * kv_heads * _floats(table, "head_dim")
    operator: Operator = "prefill" if prefill else "decode"
    work = length if prefill else moved
    rows = rows_of(operator, gpu, "aiconfigurator", seconds, work, columns, warm=0.9 * warm)
    # Windowed rows, heads of 512 and prompts of one token run other kernels; the formula is for the plain ones.
    mask = (window == 0) & (rows.columns["head_dim"] <= 256)
    return rows.where(mask & (length > 1) if prefill else mask)


def _projections(
    table: Mapping[str, NDArray[np.generic]],
    mask: NDArray[np.bool_],
    model: tuple[int, int, int, int, int],
    tp: int,
    gpu: str,
    harness: str,
    group: str,
) -> list[Measurements]:
    """Vidur's four projections and its element-wise operators, for one model and tensor-parallel degree."""
    hidden, heads, kv_heads, head_dim, inner = model
    qkv = (heads // tp + 2 * max(kv_heads // tp, 1)) * head_dim
    shapes = {
        "attn_pre_proj": (qkv, hidden),
        "attn_post_proj": (hidden, heads * head_dim // tp),
        "mlp_up_proj": (2 * inner // tp, hidden),
        "mlp_down_proj": (hidden, inner // tp),
    }
    tokens = _floats(table, "num_tokens")[mask]
    parts = []
    for name, (n, k) in shapes.items():
        seconds = _floats(table, f"time_stats.{name}.median")[mask] * 1e-3
        parts.append(_gemm(gpu, harness, tokens, n, k, seconds, group))
    streams = {"input_layernorm": 2 * hidden, "mlp_act": 3 * inner // tp, "add": 3 * hidden}
    for name, elements in streams.items():
        seconds = _floats(table, f"time_stats.{name}.median")[mask] * 1e-3
        moved = 2.0 * tokens * elements
        parts.append(rows_of("stream", gpu, harness, seconds, moved, {"moved": moved}, group=group))
    return parts


def _vidur(folder: Path) -> list[Measurements]:
    table = read_table(folder, "vidur_mlp_medians")
    parts: list[Measurements] = []
    gpus, models = np.asarray(table["gpu"], str), np.asarray(table["model"], str)
    degrees = _floats(table, "num_tensor_parallel_workers")
    for key, gpu in VIDUR_GPUS.items():
        for name, model in VIDUR_MODELS.items():
            for tp in (1, 2, 4, 8):
                mask = (gpus == key) & (models == name) & (degrees == tp)
                if mask.any():
                    parts += _projections(table, mask, model, tp, gpu, "vidur", name)
    attention = read_table(folder, "vidur_a100_attention")
    # Llama-2-70B heads over two tensor-parallel workers.
    return parts + _vidur_attention(attention, "A100-80", 32, 4, "Llama-2-70b-hf")


def _vidur_attention(
    table: Mapping[str, NDArray[np.generic]], gpu: str, heads: int, kv_heads: int, group: str
) -> list[Measurements]:
    prefill = np.asarray(table["is_prefill"], bool)
    batch, cached = _floats(table, "batch_size"), _floats(table, "kv_cache_size")
    new = np.where(prefill, _floats(table, "prefill_chunk_size"), 1.0)
    parts = []
    kinds: tuple[tuple[Operator, NDArray[np.bool_]], ...] = (("prefill", prefill), ("decode", ~prefill))
    for operator, mask in kinds:
        seconds = _floats(table, f"time_stats.attn_{operator}.median")[mask] * 1e-3
        columns: dict[str, Floats | float] = {
            "requests": batch[mask],
            "new": new[mask],
            "cached": cached[mask],
            "heads": float(heads),
            "kv_heads": float(kv_heads),
            "head_dim": 128.0,
        }
        moved = 4.0 * batch[mask] * cached[mask] * kv_heads * 128.0
        work = new[mask] if operator == "prefill" else moved
        parts.append(rows_of(operator, gpu, "vidur", seconds, work, columns, group=group))
    return parts


def _vidur_fork(folder: Path) -> list[Measurements]:
    table = read_table(folder, "vidurfork_a30_qwen2_7b_mlp")
    everything = np.ones(len(table["num_tokens"]), bool)
    parts = _projections(table, everything, QWEN2_7B, 1, "A30", "vidur-fork", "Qwen2-7B")
    attention = read_table(folder, "vidurfork_a30_qwen2_7b_attention")
    # Its attention kernels behave like Vidur's (no gain from the causal mask), so they share a harness.
    return parts + _vidur_attention(attention, "A30", 28, 4, "Qwen2-7B")


def _llmservingsim(folder: Path) -> list[Measurements]:
    gpu, harness, group = "RTX4090", "llmservingsim", "Llama-3.1-8B"
    table = read_table(folder, "llmservingsim_rtx4090_llama31_8b_dense")
    hidden, heads, kv_heads, head_dim, inner = LLAMA31_8B
    layers, tokens = np.asarray(table["layer"], str), _floats(table, "tokens")
    seconds = _floats(table, "time_us") * 1e-6
    shapes = {
        "qkv_proj": ((heads + 2 * kv_heads) * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }
    parts = []
    for name, (n, k) in shapes.items():
        mask = layers == name
        parts.append(_gemm(gpu, harness, tokens[mask], n, k, seconds[mask], group))
    for name, elements in {"layernorm": 4 * hidden, "act_fn": 3 * inner}.items():
        mask = layers == name
        moved = 2.0 * tokens[mask] * elements
        parts.append(rows_of("stream", gpu, harness, seconds[mask], moved, {"moved": moved}, group=group))
    return parts + _mixed_attention(folder, gpu, harness, group)


def _mixed_attention(folder: Path, gpu: str, harness: str, group: str) -> list[Measurements]:
    table = read_table(folder, "llmservingsim_rtx4090_llama31_8b_attention")
    _, heads, kv_heads, head_dim, _ = LLAMA31_8B
    chunk, count = _floats(table, "prefill_chunk"), _floats(table, "n_decode")
    seconds = _floats(table, "time_us") * 1e-6
    shape: dict[str, Floats | float] = {
        "heads": float(heads),
        "kv_heads": float(kv_heads),
        "head_dim": float(head_dim),
    }
    alone = count == 0
    cached = _floats(table, "kv_prefill")[alone]
    prefill = {"requests": 1.0, "new": chunk[alone], "cached": cached, **shape}
    decodes = (chunk == 0) & (count > 0)
    context = _floats(table, "kv_decode")[decodes]
    decode = {"requests": count[decodes], "new": 1.0, "cached": context, **shape}
    moved = 4.0 * count[decodes] * context * kv_heads * head_dim
    return [
        rows_of("prefill", gpu, harness, seconds[alone], chunk[alone], prefill, group=group),
        rows_of("decode", gpu, harness, seconds[decodes], moved, decode, group=group),
    ]


def joined(parts: list[Measurements]) -> Measurements:
    """Rows of one operator, one part after the other."""
    first = parts[0]
    return replace(
        first,
        gpu=np.concatenate([part.gpu for part in parts]),
        harness=np.concatenate([part.harness for part in parts]),
        group=np.concatenate([part.group for part in parts]),
        columns={key: np.concatenate([part.columns[key] for part in parts]) for key in first.columns},
        seconds=np.concatenate([part.seconds for part in parts]),
        warm=np.concatenate([part.warm for part in parts]),
        work=np.concatenate([part.work for part in parts]),
    )


def valid(rows: Measurements) -> Measurements:
    """Without rows that hold no time, or no work."""
    return rows.where(np.isfinite(rows.seconds) & (rows.seconds > 0) & (rows.work > 0))

"""Disk cache of pipeline libraries, so that planning again loads them in milliseconds.

Stage rates and libraries have one file each, named by a hash of everything they depend on (`timing/rate_cache.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from json import dumps
from pathlib import Path

import numpy as np

from potluck.core.codec import encode
from potluck.core.values.engine_abilities import UNLIMITED, EngineKind
from potluck.core.values.model import Model
from potluck.core.values.types import NodeType, Slo
from potluck.perf.operators.calibration import Calibration
from potluck.perf.timers.pipeline_timer import ORDER
from potluck.plan.templates.pipeline import (
    MAX_NODES,
    MEMORY_RATIO,
    PipelineLibrary,
    memory_limit,
    multisets,
    pipeline_library,
)
from potluck.plan.timing.rate_cache import Arrays, default_folder, load, name_of, save, sources
from potluck.plan.timing.stage_rates import BucketRule, StageRates, largest_tp, stage_rates

SOURCE_PACKAGES = ("potluck.perf", "potluck.plan.timing", "potluck.plan.templates")
"""Packages whose source code determines the cached values."""


def pipeline_libraries(
    model: Model,
    nodes: Sequence[NodeType],
    slo: Slo,
    input_tokens: int,
    output_tokens: int,
    *,
    max_nodes: int = MAX_NODES,
    memory_ratio: float = MEMORY_RATIO,
    calibration: Calibration | None = None,
    rule: BucketRule | None = None,
    folder: Path | None = None,
    sure: float = 0.5,
    engine: EngineKind = UNLIMITED,
) -> tuple[PipelineLibrary, PipelineLibrary]:
    """(prefill library, decode library) of a model, from the disk cache where possible.

    `folder` defaults to `default_folder()`.
    """
    cache_folder = default_folder() if folder is None else folder
    rates = cached_stage_rates(
        model,
        nodes,
        slo,
        input_tokens,
        output_tokens,
        max_nodes,
        calibration=calibration,
        rule=rule,
        folder=cache_folder,
        sure=sure,
        most_tp=engine.most_tensor,
    )
    alone = not engine.shared_stages
    prefill, decode = (
        cached_library(r, max_nodes, memory_ratio, alone=alone, folder=cache_folder) for r in rates
    )
    return prefill, decode


def cached_stage_rates(
    model: Model,
    nodes: Sequence[NodeType],
    slo: Slo,
    input_tokens: int,
    output_tokens: int,
    max_stages: int,
    *,
    calibration: Calibration | None = None,
    rule: BucketRule | None = None,
    folder: Path | None,
    sure: float = 0.5,
    most_tp: int | None = None,
) -> tuple[StageRates, StageRates]:
    """`stage_rates`, from the disk cache where possible."""
    parameters = dumps(encode((slo, input_tokens, output_tokens, max_stages, rule, sure, most_tp))).encode()
    calibration_text = b"" if calibration is None else dumps(encode(calibration)).encode()
    source_hash = b"".join(map(sources, SOURCE_PACKAGES))
    key = name_of(b"stage rates", _text(model, tuple(nodes)), parameters, calibration_text, source_hash)
    shape = (max_stages, len(nodes), model.layer_count)
    stored = load(folder, key)
    if stored is not None and _are_rates(stored, shape):
        tps = tuple(largest_tp(model, node, most_tp) for node in nodes)
        confidences = tuple(ORDER[int(i)] for i in stored["confidences"])
        shared = (model, tuple(nodes), tps, confidences)
        return (
            StageRates(*shared, "prefill", slo.ttft_s, input_tokens, output_tokens, stored["prefill"]),
            StageRates(*shared, "decode", slo.tpot_s, input_tokens, output_tokens, stored["decode"]),
        )
    lengths = (input_tokens, output_tokens)
    rates = stage_rates(
        model,
        nodes,
        slo,
        *lengths,
        max_stages=max_stages,
        calibration=calibration,
        rule=rule,
        sure=sure,
        most_tp=most_tp,
    )
    order = np.array([ORDER.index(confidence) for confidence in rates[0].confidences], np.int64)
    save(folder, key, {"prefill": rates[0].units, "decode": rates[1].units, "confidences": order})
    return rates


@lru_cache(maxsize=64)
def _text(model: Model, nodes: tuple[NodeType, ...]) -> bytes:
    return dumps(encode((model, nodes))).encode()


def cached_library(
    rates: StageRates,
    max_nodes: int = MAX_NODES,
    memory_ratio: float = MEMORY_RATIO,
    *,
    prune: bool = True,
    alone: bool = False,
    folder: Path | None,
) -> PipelineLibrary:
    """`pipeline_library`, from the disk cache where possible."""
    key = library_key(rates, max_nodes, memory_ratio, prune=prune, alone=alone)
    stored = load(folder, key)
    if stored is not None and _is_library(stored, multisets(len(rates.nodes), max_nodes).count):
        return PipelineLibrary(
            rates,
            max_nodes,
            memory_ratio,
            stored["ids"],
            stored["units"],
            stored["stages"],
            int(stored["valid"][0]),
        )
    library = pipeline_library(
        rates, max_nodes=max_nodes, memory_ratio=memory_ratio, prune=prune, alone=alone
    )
    valid = np.array([library.valid], np.int64)
    save(folder, key, {"ids": library.ids, "units": library.units, "stages": library.stages, "valid": valid})
    return library


def library_key(
    rates: StageRates, max_nodes: int, memory_ratio: float, *, prune: bool, alone: bool = False
) -> str:
    """Cache key of a library."""
    node_bytes, most_bytes = memory_limit(rates, memory_ratio)
    numbers = np.array([*rates.units.shape, max_nodes, most_bytes, int(prune), int(alone)], np.int64)
    source_hash = sources(SOURCE_PACKAGES[-1])
    return name_of(b"library", numbers.tobytes(), rates.units.tobytes(), node_bytes.tobytes(), source_hash)


def _are_rates(stored: Arrays, shape: tuple[int, int, int]) -> bool:
    """Whether stored arrays are stage rates of this shape; damaged files are not."""
    if set(stored) != {"prefill", "decode", "confidences"}:
        return False
    tables = stored["prefill"], stored["decode"]
    confidences = stored["confidences"]
    return (
        all(table.shape == shape and table.dtype == np.int64 for table in tables)
        and confidences.shape == shape[1:2]
        and confidences.dtype == np.int64
        and bool(((confidences >= 0) & (confidences < len(ORDER))).all())
    )


def _is_library(stored: Arrays, count: int) -> bool:
    """Whether stored arrays are a library over this many multisets; damaged files are not."""
    dtypes = {"ids": np.int64, "units": np.int64, "stages": np.uint8, "valid": np.int64}
    if {name: array.dtype for name, array in stored.items()} != dtypes:
        return False
    ids = stored["ids"]
    same_shape = ids.ndim == 1 and ids.shape == stored["units"].shape == stored["stages"].shape
    return same_shape and stored["valid"].shape == (1,) and bool(((ids > 0) & (ids < count)).all())

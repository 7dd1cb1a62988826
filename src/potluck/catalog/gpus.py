"""GPUs by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from potluck.catalog.figure_sources import (
    CatalogNames,
    EntryFacts,
    FigureSource,
    SourcedFigure,
    entry_source,
    load_toml,
    source,
)
from potluck.core.values.types import Gpu

RATES = (
    "fp16_tflops",
    "fp8_tflops",
    "fp4_tflops",
    "memory_gb",
    "bandwidth_gb_per_s",
    "tdp_w",
    "l2_mb",
    "boost_ghz",
    "compute_capability",
)
TRAITS = ("sm_count", "architecture", "bf16")
FIGURES = RATES + TRAITS


_names = CatalogNames("gpu", "gpus.toml")
_entries, names, known, canonical = _names.entries, _names.all, _names.spellings, _names.canonical
"""Names in the order of the file; every spelling that is accepted; and the name that a spelling stands for."""


@lru_cache(maxsize=256)
def gpu(name: str) -> Gpu:
    """The GPU of that name or alias; an unknown one is an error that suggests the nearest."""
    key = canonical(name)
    entry = _entries()[key]
    figures: dict[str, Any] = {field: float(entry[field]) for field in RATES if field in entry}
    figures.update({field: entry[field] for field in TRAITS if field in entry})
    return Gpu(name=key, **figures)


def facts(name: str) -> EntryFacts:
    key = canonical(name)
    entry = _entries()[key]
    figures = tuple(
        SourcedFigure(field, entry[field], entry_source(entry, field)) for field in FIGURES if field in entry
    )
    label = node_label(gpu(key))
    if label.value:
        figures = (*figures, SourcedFigure("node_label", f"{label.key}: {label.value}", label.source))
    return EntryFacts(key, tuple(entry.get("aliases", ())), figures, entry.get("doubt"))


AMD = ("cdna", "rdna")  # How its architectures begin; all others of the catalog are NVIDIA's.


@dataclass(frozen=True, slots=True)
class GpuNodeLabel:
    """By which label nodes of a Kubernetes cluster say that they have a GPU, and what pods ask for."""

    key: str
    value: str  # Empty where nobody wrote down what the label says.
    resource: str
    source: FigureSource


def node_label(gpu: Gpu) -> GpuNodeLabel:
    maker = "amd" if gpu.architecture.startswith(AMD) else "nvidia"
    entry = load_toml("gpus.toml")["kubernetes"][maker]
    value = entry["products"].get(gpu.name, "")
    return GpuNodeLabel(entry["label"], value, entry["resource"], source(entry["source"]))

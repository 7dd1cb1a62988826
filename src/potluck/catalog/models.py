"""Models by name: `models.toml` describes a stack in a few lines, this expands it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from potluck.catalog.figure_sources import (
    CatalogNames,
    EntryFacts,
    SourcedFigure,
    entry_source,
    source,
)
from potluck.core.errors import FormatError
from potluck.core.values.model import (
    Attention,
    DenseFfn,
    Ffn,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    Model,
    MoeFfn,
)

COUNTS = ("hidden", "vocab", "max_context_tokens", "tied_embeddings")
BITS = ("weight_bits", "expert_bits", "kv_bits")
FORMATS = ("weight_format", "expert_format")

_RUN = re.compile(r"(?:(\d+) )?([a-z_]+)/([a-z_]+)")


_names = CatalogNames("model", "models.toml")
_entries, names, known, canonical = _names.entries, _names.all, _names.spellings, _names.canonical
"""Names in the order of the file; every spelling that is accepted; and the name that a spelling stands for."""


@lru_cache(maxsize=256)
def model(name: str) -> Model:
    """The model of that name or alias; an unknown one is an error that suggests the nearest."""
    key = canonical(name)
    entry = _entries()[key]
    attentions = {label: _attention(spec) for label, spec in entry["attention"].items()}
    ffns = {label: _ffn(spec) for label, spec in entry["ffn"].items()}
    stack = _expand(key, entry["layers"])
    layers = tuple(Layer(attentions[attention], ffns[ffn]) for attention, ffn in stack)
    scalars: dict[str, Any] = {field: entry[field] for field in COUNTS if field in entry}
    scalars.update({field: float(entry[field]) for field in BITS if field in entry})
    scalars.update({field: entry[field] for field in FORMATS if field in entry})
    return Model(name=key, layers=layers, **scalars)


def facts(name: str) -> EntryFacts:
    """Every figure of a model with its source; the stack in the compact form of the file."""
    key = canonical(name)
    entry = _entries()[key]
    built = model(key)
    assumed = tuple(entry.get("assumed", ()))
    figures = [_figure(entry, field, getattr(built, field), assumed) for field in COUNTS + BITS]
    figures.append(_figure(entry, "layers", layer_text(entry["layers"]), assumed))
    for part in ("attention", "ffn"):
        for label, spec in entry[part].items():
            figures.append(_figure(entry, f"{part}.{label}", spec, assumed))
    published = entry.get("published", {})
    for field, value in published.items():
        figures.append(SourcedFigure(f"published.{field}", value, entry_source(entry, "published")))
    return EntryFacts(key, tuple(entry["aliases"]), tuple(figures), entry.get("doubt"), assumed)


def published(name: str) -> dict[str, Any]:
    """What others state about a model's totals, for checks against what the architecture gives."""
    return dict(_entries()[canonical(name)].get("published", {}))


def layer_text(runs: list[Any]) -> str:
    """`15 x (3 delta/moe, full/moe)`: the stack as a person reads it."""
    parts = (run if isinstance(run, str) else f"{run['repeat']} x ({layer_text(run['of'])})" for run in runs)
    return ", ".join(parts)


def _figure(entry: dict[str, Any], field: str, value: object, assumed: tuple[str, ...]) -> SourcedFigure:
    guessed = any(name == field or name.startswith((f"{field}.", f"{field}:")) for name in assumed)
    origin = entry_source(entry, field)
    if field in assumed:
        origin = source("assumed")
    elif field == "kv_bits" and field not in entry:
        origin = source("engine-default")  # no checkpoint says how its cache is kept
    return SourcedFigure(field, value, origin, guessed)


def _expand(model_name: str, runs: list[Any]) -> list[tuple[str, str]]:
    stack: list[tuple[str, str]] = []
    for run in runs:
        if isinstance(run, dict):
            stack.extend(_expand(model_name, run["of"]) * run["repeat"])
            continue
        match = _RUN.fullmatch(run)
        if match is None:
            raise FormatError(f"models.toml: {model_name}", f"{run!r} is not 'COUNT ATTENTION/FFN'")
        stack.extend([(match.group(2), match.group(3))] * int(match.group(1) or 1))
    return stack


def _attention(spec: dict[str, Any]) -> Attention:
    figures = {field: value for field, value in spec.items() if field != "kind"}
    kind = spec["kind"]
    if kind == "full":
        return FullAttention(**{"v_head_dim": spec["head_dim"], **figures})
    if kind == "mla":
        return LatentAttention(**figures)
    return LinearAttention(kind=kind, **figures)


def _ffn(spec: dict[str, Any]) -> Ffn:
    figures = {field: value for field, value in spec.items() if field != "kind"}
    return DenseFfn(**figures) if spec["kind"] == "dense" else MoeFfn(**figures)

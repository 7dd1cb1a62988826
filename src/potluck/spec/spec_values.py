"""What a spec means: frozen values with every name, price and length distribution resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from potluck.core.errors import UnknownNameError
from potluck.core.state.policy import Policy
from potluck.core.values.kv import LOSSLESS
from potluck.core.values.layout import Pool
from potluck.core.values.model import Format, Model, in_format
from potluck.core.values.service import NO_TERMS, ModelTerms
from potluck.core.values.types import Codec, EngineName, Link, NodeType, Region, Slo, Traffic

T = TypeVar("T")
SHIPPED = "shipped"


@dataclass(frozen=True, slots=True)
class WeightsLocation:
    """Where weights lie, and how fast one machine reads them from there; None: as is usual for such a place."""

    place: Literal["directory", "cache", "store"]
    """A directory of each machine or of a file server; a cache on each machine; an object store that is mounted."""
    path: str | None = None
    gb_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve, what its users were promised, and what they send."""

    name: str
    """The name requests use: the alias of the spec, else the model's own."""
    model: Model
    slo: Slo
    traffic: Traffic
    lengths_from: str = ""
    """Where the lengths came from, for display: a distribution in words or a trace."""
    trace: Path | None = None
    """The recorded requests, where the spec names some."""
    files: str | None = None
    """Where its tokenizer lies: a directory, or SHIPPED for the model that comes with the engine."""
    idle_s: float | None = None
    """After so long without a request its copies go; None: they stay."""
    weights: WeightsLocation | None = None
    """Where its weights lie; None: nobody said."""
    rates_by_hour: tuple[float, ...] = ()
    """Requests a second in equal parts of a day, from midnight, where they are written."""
    terms: ModelTerms = NO_TERMS
    """What is asked of its plan beside that."""
    formats: tuple[Format, ...] = ()
    """Which its weights may be planned in; `model` is in the first of them. Empty: as the checkpoint has them."""
    stored: Format = "bf16"
    """In which format the checkpoint has most of them."""
    config: Path | None = None
    """The directory or config.json that `model` was read from; None: the catalog's."""


@dataclass(frozen=True, slots=True)
class PriceNote:
    region: str
    node: str
    source: str


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole `potluck.yaml`."""

    models: tuple[ModelSpec, ...]
    regions: tuple[Region, ...]
    node_types: tuple[NodeType, ...]
    """Every node type that some region offers, once."""
    links: tuple[Link, ...]
    """Directed; a link written with `between` is two of them."""
    budget_usd_per_h: float | None = None
    price_notes: tuple[PriceNote, ...] = ()
    notes: tuple[str, ...] = ()
    """What was assumed because the spec and the catalog leave it open."""
    pool: Pool | None = None
    """The machines by name, where they are written; the regions then follow from it."""
    policy: Policy = Policy()
    """The rules at run time, with tenants and classes."""
    origins: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    """Where users may be, and how far each region is from there, in seconds and back."""
    kv_codecs: tuple[Codec, ...] = (LOSSLESS,)
    """In which KV may cross between replicas, the most exact first: as it is, and lossy ones that are allowed."""
    engine: EngineName = "vllm"
    """The kind of engines that serve."""
    complexity_share: float = 0.0
    """Of its rent, what each further moving part of a copy counts for where plans are compared."""
    max_group_gpus: int | None = None  # Of a pool, that serve together.

    def model(self, name: str) -> ModelSpec:
        return _named("model", name, {model.name: model for model in self.models})

    def in_formats(self, formats: Sequence[tuple[str, Format]]) -> Spec:
        """The spec whose models' weights are in these formats, as a plan has them; others stay as they are."""
        chosen = dict(formats)
        models = tuple(
            replace(model_spec, model=in_format(model_spec.model, chosen[model_spec.name]))
            if model_spec.name in chosen
            else model_spec
            for model_spec in self.models
        )
        return replace(self, models=models)

    def region(self, name: str) -> Region:
        return _named("region", name, {region.name: region for region in self.regions})

    def node_type(self, name: str) -> NodeType:
        return _named("node", name, {node.name: node for node in self.node_types})

    def link(self, source: str, target: str) -> Link | None:
        """The link from one region to another; None when there is none."""
        return next((k for k in self.links if (k.source, k.target) == (source, target)), None)

    def price_source(self, region: str, node: str) -> str:
        sources = (note.source for note in self.price_notes if (note.region, note.node) == (region, node))
        return next(sources, "")


def _named(field: str, name: str, known: dict[str, T]) -> T:
    if name not in known:
        raise UnknownNameError(field, name, known)
    return known[name]

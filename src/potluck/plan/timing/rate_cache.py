"""Cache of timed rates of layouts, kept on disk for the next plan.

Every layout is timed once, as a single replica; rates of several replicas are derived from that. A cache file is
named by a hash of all inputs of the timing (`header`): model, node types, SLO, lengths, and the code and data that
time them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib import resources
from io import BytesIO
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from potluck import __version__
from potluck.core.codec import encode
from potluck.core.values.layout import Layout
from potluck.core.values.plan import BucketCapacity, Confidence, Template
from potluck.core.values.service import NO_TERMS
from potluck.core.values.types import Role
from potluck.perf.timers.engine_host import own_cluster
from potluck.perf.timers.pipeline_timer import ORDER
from potluck.plan.problem import BucketDemand, ModelDemand, PlanningProblem
from potluck.plan.timing.replica_rates import fits, layout_timer, replica_capacity

FILE_FORMAT = 2
MAX_FOLDER_BYTES = 256 << 20
COMPILED_SUFFIXES = (".so", ".pyd")  # Compiled from sources that are hashed anyway.
Arrays = dict[str, NDArray[Any]]


def default_folder() -> Path | None:
    """`$XDG_CACHE_HOME/potluck` or `~/.cache/potluck`; None without a home directory."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        return Path(chosen) / "potluck"
    try:
        return Path.home() / ".cache" / "potluck"
    except RuntimeError:
        return None


def load(folder: Path | None, key: str) -> Arrays | None:
    """The arrays of a file; None when it is missing or damaged."""
    if folder is None:
        return None
    path = folder / f"{key}.npz"
    try:
        stored = np.load(BytesIO(path.read_bytes()), allow_pickle=False)
        arrays = {name: stored[name] for name in stored.files} if isinstance(stored, NpzFile) else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    with suppress(OSError):
        os.utime(path)  # For `trim`, which removes the least recently used files.
    return arrays


def save(folder: Path | None, key: str, arrays: Arrays) -> bool:
    """Write a file atomically; False where that fails."""
    if folder is None:
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary_path = tempfile.mkstemp(suffix=".tmp", dir=folder)
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(temporary_path, folder / f"{key}.npz")
    except OSError:
        Path(temporary_path).unlink(missing_ok=True)
        return False
    if key.endswith("00"):  # For one file in 256, as listing the folder takes longer than many writes.
        trim(folder)
    return True


def trim(folder: Path, most_bytes: int = MAX_FOLDER_BYTES) -> None:
    """Remove the least recently used files until the folder is small enough."""
    try:
        files = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.name.endswith(".npz")]
    except OSError:
        return
    size = sum(stat.st_size for stat, _ in files)
    if size <= most_bytes:
        return
    for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
        with suppress(OSError):
            os.unlink(path)
        size -= stat.st_size
        if size <= most_bytes * 3 // 4:
            return


@lru_cache(maxsize=16)
def sources(package: str) -> bytes:
    """Hash of a package's files, data included, so that results of changed code get another name."""
    digest = hashlib.sha256()
    for entry in sorted(_files(resources.files(package)), key=lambda each: each.name):
        digest.update(entry.name.encode() + b"\0" + hashlib.sha256(entry.read_bytes()).digest())
    return digest.digest()


def _files(folder: Any) -> Iterable[Any]:
    """All files of a package but compiled ones."""
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _files(entry)
        elif not entry.name.endswith(COMPILED_SUFFIXES):
            yield entry


def name_of(*parts: bytes) -> str:
    """File name for results that depend on these parts and on the current versions."""
    digest = hashlib.sha256(f"{FILE_FORMAT} {__version__} {np.__version__} {own_cluster()}".encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]


SOURCE_PACKAGES = ("potluck.core", "potluck.perf", "potluck.plan.timing", "potluck.plan.templates")
"""Packages whose code and data determine the cached rates."""
MAX_LAYOUTS = 20_000  # Layouts kept in a file; larger files take long to read.
FIGURES_PER_BUCKET = 5
T = TypeVar("T")


class RatedLayout(NamedTuple):
    """Rates by bucket, with their confidence."""

    capacity: tuple[BucketCapacity, ...]
    confidence: Confidence

    def times(self, copies: int) -> RatedLayout:
        """The rates of this many equal replicas."""
        if copies == 1:
            return self
        bucket_capacities = tuple(
            replace(
                c,
                prefill_per_s=c.prefill_per_s * copies,
                decode_per_s=c.decode_per_s * copies,
                closed_per_s=c.closed_per_s * copies,
            )
            for c in self.capacity
        )
        return RatedLayout(bucket_capacities, self.confidence)


@dataclass(slots=True, eq=False)
class RateCache:
    """Timed rates of one model's layouts, by name."""

    buckets: int
    key: str
    folder: Path | None
    known: dict[str, RatedLayout] = field(default_factory=dict)
    written: int = 0  # Number of rates on disk.
    derived: dict[Hashable, Any] = field(default_factory=dict)
    """Other results that depend on the same inputs only, shared by all plans of the model."""

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The derived result of this key, made on first use."""
        if key not in self.derived:
            self.derived[key] = make()
        return cast(T, self.derived[key])

    def once_of(self, kind: Hashable, template: Template, make: Callable[[], T]) -> T:
        """The derived result of a template, keyed by identity, as comparing templates takes longer."""
        return self.once((kind, id(template)), lambda: (template, make()))[1]

    def rated(self, name: str, time: Callable[[], RatedLayout]) -> RatedLayout:
        """The rates of this name, timed on first use."""
        rated_layout = self.known.get(name)
        if rated_layout is None:
            rated_layout = self.known[name] = time()
        return rated_layout

    def replica(
        self, problem: PlanningProblem, demand: ModelDemand, layout: Layout, role: Role
    ) -> RatedLayout:
        """Rates of one replica in one role; zero where the model does not fit."""
        text = layout_text(layout)

        def time() -> RatedLayout:
            if not fits(demand, layout, problem.by_name):
                return nothing(self.buckets)
            make = partial(layout_timer, demand, layout, problem.by_name)
            # The roles of a node share its timer; timers of pipelines are too many to keep.
            timer = self.once(("timer", text), make) if len(layout.stages) == 1 else make()
            capacity = replica_capacity(demand, layout, problem.by_name, role, problem.headroom, timer=timer)
            return RatedLayout(capacity, timer.confidence)

        return self.rated(f"{role} {text}", time)

    def keep(self) -> None:
        """Write new rates to disk."""
        if len(self.known) > self.written:
            self.written = len(self.known)
            save(self.folder, self.key, _arrays(self.known))


@dataclass(slots=True, eq=False)
class RateCaches:
    """The rate caches of all models, opened on first use."""

    folder: Path | None = field(default_factory=default_folder)
    opened: dict[tuple[object, ...], RateCache] = field(default_factory=dict)

    def of(self, problem: PlanningProblem, demand: ModelDemand) -> RateCache:
        """The rate cache of a model."""
        inputs = (_timeless(demand), problem.nodes, problem.headroom)
        # Profiles are not hashable, so their header is the key.
        cache_key: tuple[object, ...] = (header(*inputs),) if demand.profiles else inputs
        if cache_key not in self.opened:
            key = header(*inputs)
            stored_rates = _known(load(self.folder, key), len(demand.buckets))
            self.opened[cache_key] = RateCache(
                len(demand.buckets), key, self.folder, stored_rates, len(stored_rates)
            )
        return self.opened[cache_key]

    def keep(self) -> None:
        for rate_cache in self.opened.values():
            rate_cache.keep()


def memory_rate_cache(demand: ModelDemand) -> RateCache:
    """An empty rate cache without a file, for timing anew."""
    return RateCache(len(demand.buckets), "", None)


def header(demand: ModelDemand, nodes: tuple[object, ...], headroom: float) -> str:
    """Name of the cache file for these inputs."""
    given = dumps(encode((demand, nodes, headroom))).encode()
    return name_of(b"book", given, *map(sources, SOURCE_PACKAGES))


def nothing(buckets: int) -> RatedLayout:
    """Zero rates for this many buckets."""
    return RatedLayout(tuple(BucketCapacity(b, 0.0, 0.0, 0.0, 0.0, 0.0) for b in range(buckets)), ORDER[0])


def layout_text(layout: Layout) -> str:
    """A text that is unique for a layout."""
    return " > ".join(
        f"{stage.layers}: "
        + ", ".join(f"{each.node} tp{each.tp} {each.ep} {each.machine}".strip() for each in stage.nodes)
        for stage in layout.stages
    )


def _timeless(demand: ModelDemand) -> ModelDemand:
    """The demand without the fields that do not affect timing: names, rates, terms, classes, origins."""
    return replace(
        demand, name="", terms=NO_TERMS, classes=(), origins=(), buckets=tuple(map(_lengths, demand.buckets))
    )


def _lengths(demand: BucketDemand) -> BucketDemand:
    return replace(demand, model="", rate_per_s=0.0, firm=False)


def _arrays(known: dict[str, RatedLayout]) -> Arrays:
    kept = list(known.items())[:MAX_LAYOUTS]
    figures = [
        [(c.prefill_per_s, c.decode_per_s, c.closed_per_s, c.ttft_s, c.tpot_s) for c in rated_layout.capacity]
        for _, rated_layout in kept
    ]
    return {
        "names": np.frombuffer("\n".join(name for name, _ in kept).encode(), np.uint8),
        "figures": np.array(figures, np.float64),
        "confidences": np.array([ORDER.index(rated_layout.confidence) for _, rated_layout in kept], np.int64),
    }


def _known(stored: Arrays | None, buckets: int) -> dict[str, RatedLayout]:
    """The rates in a file's arrays; empty where they do not have this format."""
    dtypes = {"names": np.uint8, "figures": np.float64, "confidences": np.int64}
    if stored is None or {name: array.dtype for name, array in stored.items()} != dtypes:
        return {}
    try:
        names = stored["names"].tobytes().decode().split("\n")
    except UnicodeDecodeError:
        return {}
    figures, order = stored["figures"], stored["confidences"]
    has_shape = figures.shape == (len(names), buckets, FIGURES_PER_BUCKET) and order.shape == (len(names),)
    if not (has_shape and np.isfinite(figures).all() and ((order >= 0) & (order < len(ORDER))).all()):
        return {}
    return {
        name: RatedLayout(
            tuple(BucketCapacity(b, *row) for b, row in enumerate(rows)), ORDER[confidence_index]
        )
        for name, rows, confidence_index in zip(names, figures.tolist(), order.tolist(), strict=True)
    }

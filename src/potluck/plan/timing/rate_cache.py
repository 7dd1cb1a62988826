"""What layouts were timed to do for a model: looked up where it is known, kept on disk for the next plan.

Every layout is timed once, by itself; what several do together is worked out from that. A cache is named by all that
times follow from (`header`): model, node types, objective, lengths, and the code and data that time them.
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

FORMAT = 2
MOST_BYTES = 256 << 20
BUILT = (".so", ".pyd")  # Compiled from sources that are there too.
Arrays = dict[str, NDArray[Any]]


def default_folder() -> Path | None:
    """`$XDG_CACHE_HOME/potluck` or `~/.cache/potluck`; None where there is no such place."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):
        return Path(chosen) / "potluck"
    try:
        return Path.home() / ".cache" / "potluck"
    except RuntimeError:
        return None


def load(folder: Path | None, key: str) -> Arrays | None:
    """The arrays of a file; None when it is not there or not whole."""
    if folder is None:
        return None
    path = folder / f"{key}.npz"
    try:
        stored = np.load(BytesIO(path.read_bytes()), allow_pickle=False)
        arrays = {name: stored[name] for name in stored.files} if isinstance(stored, NpzFile) else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    with suppress(OSError):
        os.utime(path)  # used just now
    return arrays


def save(folder: Path | None, key: str, arrays: Arrays) -> bool:
    """Write a file as a whole or not at all; False where that is not possible."""
    if folder is None:
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(suffix=".tmp", dir=folder)
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(aside, folder / f"{key}.npz")
    except OSError:
        Path(aside).unlink(missing_ok=True)
        return False
    if key.endswith("00"):  # one file in 256: to look at all of them takes longer than to write many
        trim(folder)
    return True


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Remove what was not used for longest, until the rest is small enough."""
    try:
        there = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.name.endswith(".npz")]
    except OSError:
        return
    size = sum(element.st_size for element, _ in there)
    if size <= most_bytes:
        return
    for item, path in sorted(there, key=lambda one: one[0].st_mtime):
        with suppress(OSError):
            os.unlink(path)
        size -= item.st_size
        if size <= most_bytes * 3 // 4:
            return


@lru_cache(maxsize=16)
def sources(package: str) -> bytes:
    """A hash of a package's own files, data included: a change of code gives results of another name."""
    digest = hashlib.sha256()
    for entry in sorted(_files(resources.files(package)), key=lambda each: each.name):
        digest.update(entry.name.encode() + b"\0" + hashlib.sha256(entry.read_bytes()).digest())
    return digest.digest()


def _files(folder: Any) -> Iterable[Any]:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _files(entry)
        elif not entry.name.endswith(BUILT):
            yield entry


def name_of(*parts: bytes) -> str:
    """What follows from these parts, by these versions, is kept under this name."""
    digest = hashlib.sha256(f"{FORMAT} {__version__} {np.__version__} {own_cluster()}".encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:40]


CODE = ("potluck.core", "potluck.perf", "potluck.plan.timing", "potluck.plan.templates")
"""What is kept follows from this code, data of `perf` included."""
MOST = 20_000  # Layouts of a book that are kept; one of so many is no longer quick to read.
FIGURES = 5
T = TypeVar("T")


class RatedLayout(NamedTuple):
    """What something does for each bucket, and how well that is known."""

    capacity: tuple[BucketCapacity, ...]
    confidence: Confidence

    def times(self, copies: int) -> RatedLayout:
        """So many of it beside each other."""
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
    buckets: int
    key: str
    folder: Path | None
    known: dict[str, RatedLayout] = field(default_factory=dict)
    written: int = 0  # How many of these are on disk.
    worked: dict[Hashable, Any] = field(default_factory=dict)
    """What else was worked out from all that rates follow from, so that no plan of the same works it out again."""

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was worked out under this key, or is now."""
        if key not in self.worked:
            self.worked[key] = make()
        return cast(T, self.worked[key])

    def once_of(self, kind: Hashable, template: Template, make: Callable[[], T]) -> T:
        """The same of one template, told from others by being it: comparing all of it would take longer."""
        return self.once((kind, id(template)), lambda: (template, make()))[1]

    def rated(self, name: str, time: Callable[[], RatedLayout]) -> RatedLayout:
        """What is known by this name; timed where nothing is."""
        rated_layout = self.known.get(name)
        if rated_layout is None:
            rated_layout = self.known[name] = time()
        return rated_layout

    def replica(
        self, problem: PlanningProblem, demand: ModelDemand, layout: Layout, role: Role
    ) -> RatedLayout:
        """One replica in one role; it does nothing where it does not fit."""

        text = layout_text(layout)

        def time() -> RatedLayout:
            if not fits(demand, layout, problem.by_name):
                return nothing(self.buckets)
            make = partial(layout_timer, demand, layout, problem.by_name)
            # Roles of a node share its timer; pipelines are too many to keep theirs.
            timer = self.once(("timer", text), make) if len(layout.stages) == 1 else make()
            capacity = replica_capacity(demand, layout, problem.by_name, role, problem.headroom, timer=timer)
            return RatedLayout(capacity, timer.confidence)

        return self.rated(f"{role} {text}", time)

    def keep(self) -> None:
        if len(self.known) > self.written:
            self.written = len(self.known)
            save(self.folder, self.key, _arrays(self.known))


@dataclass(slots=True, eq=False)
class RateCaches:
    """The books of all models that were asked about, opened when they are needed."""

    folder: Path | None = field(default_factory=default_folder)
    opened: dict[tuple[object, ...], RateCache] = field(default_factory=dict)

    def of(self, problem: PlanningProblem, demand: ModelDemand) -> RateCache:
        asked = (_timeless(demand), problem.nodes, problem.headroom)
        # Profiles, an owner's or of speeds seen live, cannot be keys themselves; their header can.
        place: tuple[object, ...] = (header(*asked),) if demand.profiles else asked
        if place not in self.opened:
            key = header(*asked)
            known = _known(load(self.folder, key), len(demand.buckets))
            self.opened[place] = RateCache(len(demand.buckets), key, self.folder, known, len(known))
        return self.opened[place]

    def keep(self) -> None:
        for rate_cache in self.opened.values():
            rate_cache.keep()


def unwritten(demand: ModelDemand) -> RateCache:
    """An empty book of nobody else's, for whoever times anew."""
    return RateCache(len(demand.buckets), "", None)


def header(demand: ModelDemand, nodes: tuple[object, ...], headroom: float) -> str:
    """A name for all rates that follow from this."""
    given = dumps(encode((demand, nodes, headroom))).encode()
    return name_of(b"book", given, *map(sources, CODE))


def nothing(buckets: int) -> RatedLayout:
    return RatedLayout(tuple(BucketCapacity(b, 0.0, 0.0, 0.0, 0.0, 0.0) for b in range(buckets)), ORDER[0])


def layout_text(layout: Layout) -> str:
    return " > ".join(
        f"{stage.layers}: "
        + ", ".join(f"{each.node} tp{each.tp} {each.ep} {each.machine}".strip() for each in stage.nodes)
        for stage in layout.stages
    )


def _timeless(demand: ModelDemand) -> ModelDemand:
    """Without what times do not follow from: names, how much is asked, where it may run, who asks."""
    return replace(
        demand, name="", terms=NO_TERMS, classes=(), origins=(), buckets=tuple(map(_lengths, demand.buckets))
    )


def _lengths(demand: BucketDemand) -> BucketDemand:
    return replace(demand, model="", rate_per_s=0.0, firm=False)


def _arrays(known: dict[str, RatedLayout]) -> Arrays:
    kept = list(known.items())[:MOST]
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
    """What a file says; nothing where it is not such a file."""
    kinds = {"names": np.uint8, "figures": np.float64, "confidences": np.int64}
    if stored is None or {name: array.dtype for name, array in stored.items()} != kinds:
        return {}
    try:
        names = stored["names"].tobytes().decode().split("\n")
    except UnicodeDecodeError:
        return {}
    figures, order = stored["figures"], stored["confidences"]
    fine = figures.shape == (len(names), buckets, FIGURES) and order.shape == (len(names),)
    if not (fine and np.isfinite(figures).all() and ((order >= 0) & (order < len(ORDER))).all()):
        return {}
    return {
        name: RatedLayout(tuple(BucketCapacity(b, *row) for b, row in enumerate(rows)), ORDER[place])
        for name, rows, place in zip(names, figures.tolist(), order.tolist(), strict=True)
    }

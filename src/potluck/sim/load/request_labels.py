"""Who sends the requests of a workload, of which class they are and when nobody waits any more, as columns.

A workload without labels has one tenant, one class and no deadlines, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.values.types import DEFAULT_CLASS, DEFAULT_TENANT

Floats = NDArray[np.float64]
Places = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RequestLabels:
    """`tenant[i]` is a place in `tenants`, `request_class[i]` one in `classes`."""

    tenants: tuple[str, ...]
    tenant: Places
    classes: tuple[str, ...]
    request_class: Places
    wait_s: Floats
    """From a request's arrival to its deadline; infinite: it has none."""
    origins: tuple[str, ...] = ("",)
    """Where users are; empty: nobody said."""
    origin: Places | None = None
    """Places in `origins`; None: the first for all."""
    exact: NDArray[np.bool_] | None = None
    """Whose KV must cross as it is; None: nobody's."""

    def __post_init__(self) -> None:
        for name, places, names in (
            ("tenant", self.tenant, self.tenants),
            ("request_class", self.request_class, self.classes),
        ):
            if len(places) and not (places.min() >= 0 and places.max() < len(names)):
                raise InputError(f"workload: {name}", f"must be a place in the {len(names)} names")
        if len(self.wait_s) and not (self.wait_s > 0).all():
            raise InputError("workload: wait_s", "must be positive")

    def __len__(self) -> int:
        return len(self.tenant)

    def take(self, chosen: NDArray[np.integer]) -> RequestLabels:
        return RequestLabels(
            self.tenants,
            self.tenant[chosen],
            self.classes,
            self.request_class[chosen],
            self.wait_s[chosen],
            self.origins,
            None if self.origin is None else self.origin[chosen],
            None if self.exact is None else self.exact[chosen],
        )

    @property
    def from_origin(self) -> Places:
        """Of every request."""
        return np.zeros(len(self), dtype=np.int32) if self.origin is None else self.origin

    def rows(
        self, first: int, last: int, arrival_s: list[float]
    ) -> tuple[list[str], list[str], list[float | None], list[bool]]:
        """Tenant, class, deadline, and whether it must be exact, of requests [first, last), which arrive then."""
        rows = slice(first, last)
        waits = self.wait_s[rows].tolist()
        return (
            [self.tenants[place] for place in self.tenant[rows].tolist()],
            [self.classes[place] for place in self.request_class[rows].tolist()],
            [
                at_s + wait_s if wait_s < np.inf else None
                for at_s, wait_s in zip(arrival_s, waits, strict=False)
            ],
            [False] * len(waits) if self.exact is None else self.exact[rows].tolist(),
        )


def same(
    count: int, tenant: str = DEFAULT_TENANT, request_class: str = DEFAULT_CLASS, wait_s: float = np.inf
) -> RequestLabels:
    """The same for all."""
    places = np.zeros(count, dtype=np.int32)
    return RequestLabels((tenant,), places, (request_class,), places, np.full(count, wait_s))


def drawn(
    numbers: np.random.Generator,
    count: int,
    classes: Sequence[tuple[str, float]],
    origins: Sequence[tuple[str, float]],
) -> RequestLabels | None:
    """Classes and origins as often as their shares say, by chance; None where there are none."""
    if not classes and not origins:
        return None
    left = 1.0 - sum(share for _, share in classes)
    kinds = [*classes, *([(DEFAULT_CLASS, left)] if left > 1e-6 else [])]
    found = []
    for shares in (kinds, list(origins) or [("", 1.0)]):
        weight = np.array([share for _, share in shares])
        found.append(numbers.choice(len(shares), size=count, p=weight / weight.sum()).astype(np.int32))
    none = np.zeros(count, dtype=np.int32)
    return RequestLabels(
        (DEFAULT_TENANT,),
        none,
        tuple(name for name, _ in kinds),
        found[0],
        np.full(count, np.inf),
        tuple(name for name, _ in origins) or ("",),
        found[1],
    )


def named(
    tenants: Sequence[str] | None, classes: Sequence[str] | None, wait_s: Floats | None, count: int
) -> RequestLabels | None:
    """Of names and times row by row, where a trace has them; None when it has none of it."""
    if tenants is None and classes is None and wait_s is None:
        return None
    who, tenant = _places(tenants if tenants is not None else [DEFAULT_TENANT] * count)
    what, request_class = _places(classes if classes is not None else [DEFAULT_CLASS] * count)
    return RequestLabels(
        who, tenant, what, request_class, wait_s if wait_s is not None else np.full(count, np.inf)
    )


def joined(parts: Sequence[RequestLabels | None], counts: Sequence[int]) -> RequestLabels | None:
    """One after another; equal names are one. None when nobody has any."""
    if all(part is None for part in parts):
        return None
    whole = [part if part is not None else same(count) for part, count in zip(parts, counts, strict=True)]
    tenants = tuple(dict.fromkeys(name for part in whole for name in part.tenants))
    classes = tuple(dict.fromkeys(name for part in whole for name in part.classes))
    origins = tuple(dict.fromkeys(name for part in whole for name in part.origins))
    return RequestLabels(
        tenants,
        np.concatenate([_moved(part.tenants, tenants)[part.tenant] for part in whole]),
        classes,
        np.concatenate([_moved(part.classes, classes)[part.request_class] for part in whole]),
        np.concatenate([part.wait_s for part in whole]),
        origins,
        np.concatenate([_moved(part.origins, origins)[part.from_origin] for part in whole]),
        np.concatenate([np.zeros(len(each), bool) if each.exact is None else each.exact for each in whole]),
    )


def _places(names: Sequence[str]) -> tuple[tuple[str, ...], Places]:
    known = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return tuple(known), np.array([known[name] for name in names], dtype=np.int32)


def _moved(old: tuple[str, ...], new: tuple[str, ...]) -> Places:
    return np.array([new.index(name) for name in old], dtype=np.int32)

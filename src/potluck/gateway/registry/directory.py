"""The replicas that can be reached now, and what all engines of a model can do: as workers know them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from potluck.gateway.values import Endpoint


class ReplicaDirectory:
    """`_codec`: how KV crosses between two regions, by model, as the plan has it: raw, int8 or int4."""

    def __init__(self, codec: Callable[[str, str, str], str]) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self.find: Callable[[str], Endpoint | None] = self._endpoints.get
        self._codec = codec
        self._by_segments: frozenset[str] = frozenset()
        self._own: frozenset[str] = frozenset()
        self._adapters: dict[str, str] = {}

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(self._endpoints.values())

    def region_of(self, replica: str) -> str:
        endpoint = self._endpoints.get(replica)
        return "" if endpoint is None else endpoint.region

    def refresh(self) -> None:
        self._by_segments = frozenset(
            endpoint.model for endpoint in self._endpoints.values() if endpoint.kind == "segments"
        )
        self._own, self._adapters = abilities_of(self._endpoints.values())

    def segments(self, model: str) -> bool:
        """Whether engines can be reached that run segments of this model's requests, and so need their tokens."""
        return model in self._by_segments

    def owns(self, model: str) -> bool:
        """Whether all of its engines take clients' own requests (`Endpoint.own`)."""
        return model in self._own

    def adapters(self) -> Mapping[str, str]:
        """Adapters (LoRA) that all engines of a model have loaded, and the model of each."""
        return self._adapters

    def codec(self, source: Endpoint, target: Endpoint) -> str:
        if source.unit and source.unit == target.unit:
            return source.codec
        return self._codec(source.model, source.region, target.region)


def abilities_of(endpoints: Iterable[Endpoint]) -> tuple[frozenset[str], dict[str, str]]:
    """Models all of whose engines take clients' own requests; adapters that all engines of a model have."""
    by_model: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_model.setdefault(endpoint.model, []).append(endpoint)
    own = frozenset(model for model, result in by_model.items() if all(item.own for item in result))
    adapters = {
        name: model
        for model, result in by_model.items()
        for name in frozenset.intersection(*(frozenset(item.adapters) for item in result))
        if name not in by_model
    }
    return own, adapters

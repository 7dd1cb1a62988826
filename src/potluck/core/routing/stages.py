"""Inside a pipeline replica: which node of each stage takes a request (CORAL 5.1).

A stage's nodes hold the same layers and may be of unlike types. One node per stage is chosen by weighted round
robin, weighted by what each was expected to do when the replica was laid out; the stages choose independently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from potluck.core.errors import InputError
from potluck.core.routing.weighted import Turns
from potluck.core.values.layout import Layout


def node_speeds(layout: Layout, gpu_speed: Mapping[str, float]) -> tuple[tuple[float, ...], ...]:
    """Speeds of every stage's nodes when a node's is that of its GPU (by node type) times those it shards over."""
    return tuple(tuple(gpu_speed[node.node] * node.tp for node in stage.nodes) for stage in layout.stages)


class StageTurns:
    """One replica's stages. `pick` is its only mutator."""

    __slots__ = ("_turns",)

    def __init__(self, layout: Layout, speeds: Sequence[Sequence[float]]) -> None:
        if len(speeds) != len(layout.stages):
            raise InputError("stages: speeds", f"are for {len(speeds)} stages, not {len(layout.stages)}")
        self._turns: list[Turns[int]] = []
        for place, (stage, each) in enumerate(zip(layout.stages, speeds, strict=True)):
            if len(each) != len(stage.nodes) or not all(speed > 0 for speed in each):
                raise InputError(f"stages: speeds of stage {place}", "need one positive number per node")
            turns: Turns[int] = Turns()
            for node, speed in enumerate(each):
                turns.set(node, speed)
            self._turns.append(turns)

    def pick(self) -> tuple[int, ...]:
        """The next request's node in each stage, as places in `stage.nodes`."""
        return tuple(turns.pick() or 0 for turns in self._turns)

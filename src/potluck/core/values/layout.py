"""How one replica lies on nodes: a pipeline of stages, data-parallel nodes within a stage.

A stage holds consecutive layers. Its nodes may be of unlike types: each holds all the stage's layers,
shards them over `tp` of its own GPUs, and takes a share of the requests (CORAL 3). Tensor parallelism
is therefore a property of a node in a stage, not of the stage: unlike nodes have unlike GPU counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from potluck.core.errors import InputError

Ep = Literal["none", "tp", "dp"]
"""Where a mixture's experts are. none: each sharded over all GPUs, like everything else. Else each is whole on one
GPU (expert parallelism), with attention tensor parallel (tp) or data parallel (dp) over the same GPUs: with `dp` each
has all of attention and the KV of its own requests, and tokens travel to their experts and back."""


@dataclass(frozen=True, slots=True)
class StageNode:
    """One node of a stage, over how many of its GPUs it shards the layers, and how their experts lie."""

    node: str
    tp: int
    """GPUs that it takes; with `ep` they share attention or requests, and the experts."""
    machine: str = ""
    """Which machine, where that matters."""
    ep: Ep = "none"

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise InputError(f"{self.node}: tp", f"must be at least 1, is {self.tp}")
        if self.ep not in get_args(Ep):
            raise InputError(f"{self.node}: ep", f"must be one of {', '.join(get_args(Ep))}, is {self.ep!r}")
        if self.ep != "none" and self.tp == 1:
            raise InputError(f"{self.node}: ep", "experts are spread over several GPUs; one has them all")


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers, and the nodes that share the work on them."""

    layers: int
    nodes: tuple[StageNode, ...]

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise InputError("stage: layers", f"must be at least 1, is {self.layers}")
        if not self.nodes:
            raise InputError("stage: nodes", "a stage needs at least one node")


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole replica."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise InputError("layout: stages", "a layout needs at least one stage")

    @property
    def layer_count(self) -> int:
        return sum(stage.layers for stage in self.stages)

    @property
    def node_counts(self) -> dict[str, int]:
        """How many nodes of each type the replica takes; a named machine is one, however many stages it holds."""
        counts: dict[str, int] = {}
        named: set[tuple[str, str]] = set()
        for stage in self.stages:
            for node in stage.nodes:
                if node.machine and (node.node, node.machine) in named:
                    continue
                named.add((node.node, node.machine))
                counts[node.node] = counts.get(node.node, 0) + 1
        return counts

    @property
    def machines(self) -> dict[str, int]:
        """GPUs it takes of each machine that it names."""
        gpus: dict[str, int] = {}
        for stage in self.stages:
            for node in stage.nodes:
                if node.machine:
                    gpus[node.machine] = gpus.get(node.machine, 0) + node.tp
        return gpus

    @property
    def owners(self) -> tuple[str, ...]:
        """The machine of every layer, by name; of nodes that share a stage the first."""
        return tuple(stage.nodes[0].machine for stage in self.stages for _ in range(stage.layers))


def layers_between(first: Layout, second: Layout) -> dict[tuple[str, str], int]:
    """How many layers' KV goes from which machine to which when one replica hands over to another."""
    layers: dict[tuple[str, str], int] = {}
    for ends in zip(first.owners, second.owners, strict=True):
        layers[ends] = layers.get(ends, 0) + 1
    return layers


def single(node: str, tp: int, layers: int, ep: Ep = "none") -> Layout:
    """The plainest layout: one node holds the whole model."""
    return Layout((Stage(layers, (StageNode(node, tp, ep=ep),)),))

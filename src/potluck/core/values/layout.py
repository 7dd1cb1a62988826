"""How one replica lies on nodes: a pipeline of stages, data-parallel nodes within a stage.

A stage holds consecutive layers. Its nodes may be of unlike types: each holds all the stage's layers,
shards them over `tp` of its own GPUs, and takes a share of the requests (CORAL 3). Tensor parallelism
is therefore a property of a node in a stage, not of the stage: unlike nodes have unlike GPU counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.errors import InputError


@dataclass(frozen=True, slots=True)
class StageNode:
    """One node of a stage, and over how many of its GPUs it shards the layers."""

    node: str
    tp: int
    machine: str = ""
    """Which machine, where that matters."""

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise InputError(f"{self.node}: tp", f"must be at least 1, is {self.tp}")


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


def single(node: str, tp: int, layers: int) -> Layout:
    """The plainest layout: one node holds the whole model."""
    return Layout((Stage(layers, (StageNode(node, tp),)),))

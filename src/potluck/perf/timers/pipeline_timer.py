"""Step times of a whole layout: stages one after another, data-parallel nodes side by side.

A step's latency is the sum over stages of the slowest node in each, plus the hand-overs between them. A
pipeline works on as many batches as it has stages, so its rate is set by the slowest stage; nodes within a
stage add their rates (CORAL 4.2).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.layout import RTT_S, Layout, Stage, StageNode
from potluck.core.values.model import Model
from potluck.core.values.plan import Confidence
from potluck.core.values.types import NodeType
from potluck.perf.kv_capacity import max_requests, require_fit, stage_memory
from potluck.perf.operators.calibration import Calibration
from potluck.perf.operators.network import Hop, handover_s, hop_between, hop_inside
from potluck.perf.step_timer import Floats, StepBatch, steps
from potluck.perf.timers.engine_host import DEFAULT_HOST, NO_HOST, EngineHost
from potluck.perf.timers.roofline import RooflineTimer, roofline

ORDER: tuple[Confidence, ...] = ("measured", "transferred", "assumed")


@dataclass(frozen=True, slots=True)
class PipelineTimer:
    """A StepTimer for a layout. Build it with `pipeline`."""

    model: Model
    stages: tuple[tuple[RooflineTimer, ...], ...]
    hops: tuple[tuple[float, float], ...] = ()
    """(seconds, seconds per byte) from each stage to the next and from the last to the first, where the machines
    are known; else the slower network card counts."""
    host: EngineHost = DEFAULT_HOST
    """Time between steps that no GPU covers, at every node."""

    @property
    def confidence(self) -> Confidence:
        """That of its least known part."""
        return max((timer.confidence for stage in self.stages for timer in stage), key=ORDER.index)

    @property
    def least_s(self) -> float:
        """The shortest step with a chunk: its launches, stage after stage."""
        return self.host.launch_s * sum(stage[0].layers for stage in self.stages)

    @property
    def least_interval_s(self) -> float:
        """The same between two steps that follow each other."""
        return max(self.host.launch_s * stage[0].layers / len(stage) for stage in self.stages)

    @property
    def unlaunched(self) -> PipelineTimer:
        """The same without that least, so that steps add up."""
        return replace(self, host=replace(self.host, launch_s=0.0))

    def step_s(self, batch: StepBatch) -> Floats:
        """Latency of a step through all stages."""
        return self._whole_s(batch, self._stages_s(batch))

    def interval_s(self, batch: StepBatch) -> Floats:
        """Time between two steps that follow each other: the slowest stage, its nodes sharing the work."""
        return self._apart_s(batch, self._stages_s(batch))

    def both_s(self, batch: StepBatch) -> tuple[Floats, Floats]:
        """`step_s` and `interval_s`, whose stages are timed once."""
        stages_s = self._stages_s(batch)
        return self._whole_s(batch, stages_s), self._apart_s(batch, stages_s)

    def _whole_s(self, batch: StepBatch, stages_s: list[Floats]) -> Floats:
        compute = sum((stage_s.max(axis=0) for stage_s in stages_s), np.zeros(len(batch)))
        layers = sum(stage[0].layers for stage in self.stages)
        return self.host.whole_s(compute + self._handovers_s(batch), batch, layers)

    def _apart_s(self, batch: StepBatch, stages_s: list[Floats]) -> Floats:
        shared = []
        for stage, stage_s in zip(self.stages, stages_s, strict=True):
            # Every node's own engine spends its time between steps.
            each_s = [self.host.whole_s(node_s, batch, stage[0].layers) for node_s in stage_s]
            shared.append(1.0 / (1.0 / np.maximum(each_s, 1e-12)).sum(axis=0))
        size = batch.tokens * self.model.hidden * 2.0
        shared += [size * s_per_byte for _, s_per_byte in self.hops[:-1]]
        return np.where(batch.tokens > 0, np.max(shared, axis=0), 0.0)

    def _stages_s(self, batch: StepBatch) -> list[Floats]:
        timers = {id(timer): timer for stage in self.stages for timer in stage}
        known: dict[Hashable, Floats] = {}  # stages of the same GPUs have layers of the same attention
        times = {which: timer.step_s(batch, known) for which, timer in timers.items()}
        return [np.stack([times[id(timer)] for timer in stage]) for stage in self.stages]

    def _handovers_s(self, batch: StepBatch) -> Floats:
        size = batch.tokens * self.model.hidden * 2.0
        total = np.zeros(len(batch))
        if self.hops:
            *onward, (back_s, back_s_per_byte) = self.hops
            for fixed_s, s_per_byte in onward:
                total = total + fixed_s + size * s_per_byte
            return total + back_s + batch.sequences * 8.0 * back_s_per_byte
        for first, second in zip(self.stages, self.stages[1:], strict=False):
            pairs = [handover_s(size, a.node, b.node) for a in first for b in second]
            total = total + np.max(pairs, axis=0)
        if len(self.stages) > 1:  # the sampled tokens go back to the first stage
            total = total + handover_s(batch.sequences * 8.0, self.stages[-1][0].node, self.stages[0][0].node)
        return total


@dataclass(frozen=True, slots=True)
class PipelineRounds:
    """A pipeline as one engine sees it: as many batches take turns as it has nodes, and a step is a round of all.

    A round of decodes takes as long as one batch through all stages, or as its batches one after another at the
    slowest stage. Steps without decodes are prompts, each one of many: the time between two.
    """

    timer: PipelineTimer

    @property
    def confidence(self) -> Confidence:
        return self.timer.confidence

    @property
    def lanes(self) -> int:
        return sum(map(len, self.timer.stages))

    def step_s(self, batch: StepBatch) -> Floats:
        used = np.clip(np.ceil(batch.decodes), 1.0, float(self.lanes))
        part = steps(decodes=batch.decodes / used, decode_context=batch.decode_context / used)
        step_s, interval_s = self.timer.both_s(part)
        rounds = np.maximum(step_s, used * interval_s)
        return np.where(batch.decodes > 0, rounds, self.timer.interval_s(batch))


def pipeline(
    model: Model,
    layout: Layout,
    nodes: Mapping[str, NodeType],
    calibration: Calibration | None = None,
    hops: tuple[tuple[float, float], ...] = (),
    host: EngineHost = DEFAULT_HOST,
    sure: float = 0.5,
) -> PipelineTimer:
    """A timer for a layout; an unknown node or a layer too many is an error."""
    made: dict[tuple[object, ...], RooflineTimer] = {}

    def timer(stage_node: StageNode, layers: range) -> RooflineTimer:
        """One for all nodes that have the same layers on as many of the same GPUs."""
        alike = tuple(map(id, model.layers[layers.start : layers.stop]))
        key = (stage_node.node, stage_node.tp, stage_node.ep, alike, layers.stop == model.layer_count)
        if key not in made:
            made[key] = roofline(
                model,
                _node(nodes, stage_node.node),
                stage_node.tp,
                layers=layers,
                calibration=calibration,
                host=NO_HOST,
                ep=stage_node.ep,
                sure=sure,
            )
        return made[key]

    stages = tuple(
        tuple(timer(stage_node, layers) for stage_node in stage.nodes)
        for stage, layers in stage_layers(model, layout)
    )
    return PipelineTimer(model, stages, hops, host)


def layout_hops(
    layout: Layout, nodes: Mapping[str, NodeType], machine_gbps: Mapping[tuple[str, str], tuple[float, float]]
) -> tuple[Hop, ...]:
    """From each stage to the next and back to the first, over the links between machines that the layout names.

    `machine_gbps` has (gbps, round trip in s) between two of them; else the smaller of their cards counts. Empty
    where machines have no names.
    """
    ends = [stage.nodes[0] for stage in layout.stages if len(stage.nodes) == 1 and stage.nodes[0].machine]
    if len(ends) < len(layout.stages) or len(ends) == 1:
        return ()
    hops = []
    for first, second in (*pairwise(ends), (ends[-1], ends[0])):
        here, there = _node(nodes, first.node), _node(nodes, second.node)
        if first.machine == second.machine:
            hops.append(hop_inside(here))
            continue
        cards = (min(here.network_gbps, there.network_gbps), RTT_S)
        hops.append(hop_between(*machine_gbps.get((first.machine, second.machine), cards)))
    return tuple(hops)


def stage_layers(model: Model, layout: Layout) -> list[tuple[Stage, range]]:
    """Each stage with the layers it holds."""
    if layout.layer_count != model.layer_count:
        raise InputError(
            "layout: stages", f"hold {layout.layer_count} layers, {model.name} has {model.layer_count}"
        )
    result, start = [], 0
    for stage in layout.stages:
        result.append((stage, range(start, start + stage.layers)))
        start += stage.layers
    return result


def layout_requests(model: Model, layout: Layout, nodes: Mapping[str, NodeType], tokens: float) -> int:
    """Requests of so many tokens whose KV fits; the tightest stage decides, its nodes add up."""
    least = 1 << 30
    for stage, layers in stage_layers(model, layout):
        total = 0
        for stage_node in stage.nodes:
            node = _node(nodes, stage_node.node)
            memory = stage_memory(model, node, stage_node.tp, layers, ep=stage_node.ep)
            require_fit(model, memory, node, stage_node.tp)
            total += max_requests(model, memory, stage_node.tp, tokens, layers, stage_node.ep)
        least = min(least, total)
    return least


def _node(nodes: Mapping[str, NodeType], name: str) -> NodeType:
    if name not in nodes:
        raise UnknownNameError("layout: node", name, nodes)
    return nodes[name]

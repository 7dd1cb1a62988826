"""Other executors than one process at its own pace: `--emulate A10:llama-3.1-8b` and `--stages 3,5x2`.

A10:llama-3.1-8b@fp8      one GPU, with weights in another format
2xL40S:qwen3-32b:1        one of a node's two GPUs
A10,L4+L4:llama-3.1-8b    a pipeline: its first stage on an A10, the second shared by two L4
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.cli.engine.listening import secret_in
from potluck.core.codec import decode
from potluck.core.errors import FormatError, InputError
from potluck.core.values.layout import EmulatedReplica, Layout, Stage, StageNode
from potluck.core.values.model import Model, format_named, in_format
from potluck.core.values.types import NodeType

if TYPE_CHECKING:
    from potluck.engine.compute.executor import Executor, RunnerSize
    from potluck.engine.compute.local_executor import LocalExecutor
    from potluck.engine.mock.mock_engine import MockModel
    from potluck.engine.model.checkpoint import WeightSource
    from potluck.engine.model.config import EngineModelConfig
    from potluck.engine.pipeline.launch import PipelineStage
    from potluck.engine.pipeline.pipeline_messages import EmulatedGpu
    from potluck.engine.serve import MakeExecutor


@dataclass(frozen=True, slots=True)
class Emulation:
    """The nodes of each stage (mostly one of each), and the model that they act as if they ran."""

    nodes: tuple[tuple[NodeType, ...], ...]
    model: Model
    tp: int | None
    speed_up: float = 1.0

    def pace(self, executor: LocalExecutor) -> LocalExecutor:
        """An executor in this process takes the node's time from now on."""
        from potluck.engine.compute.emulated import EmulatedNic, StepPacer
        from potluck.perf.timers.roofline import roofline
        from potluck.perf.transfer import alpha_beta

        node = self._only
        executor.pacer = StepPacer(roofline(self.model, node, self._tp(node)), self.speed_up)
        layers, link = executor.config.model.layer_count, alpha_beta(node.network_gbps)
        executor.nic = EmulatedNic(self.model, layers, link, self.speed_up)
        return executor

    def blocks(self) -> int:
        """KV blocks that the node would have room for; of a pipeline's nodes the one with the fewest."""
        from potluck.engine.compute.emulated import emulated_blocks

        many = self.model.layer_count
        if len(self.nodes) == 1:
            return min(emulated_blocks(self.model, node, self._tp(node)) for node in self.nodes[0])
        share = -(-many // len(self.nodes))
        layers = [
            range(first, min(many, first + share)) for first in range(0, share * len(self.nodes), share)
        ]
        return min(
            emulated_blocks(self.model, node, self._tp(node), part)
            for part, stage in zip(layers, self.nodes, strict=True)
            for node in stage
        )

    def stages(self, stages: Sequence[PipelineStage]) -> tuple[PipelineStage, ...]:
        """Each worker acts as its node with the large model's share of layers, and gets requests by its speed."""
        nodes = self.nodes * len(stages) if len(self.nodes) == 1 else self.nodes
        if len(nodes) != len(stages):
            raise InputError("emulate", f"names {len(nodes)} stages, the pipeline has {len(stages)}")
        few, many = sum(stage.layers for stage in stages), self.model.layer_count
        emulated, first, before = [], 0, tuple[NodeType, ...]()
        for place, stage in enumerate(stages):
            kinds = nodes[place] * len(stage.places) if len(nodes[place]) == 1 else nodes[place]
            if len(kinds) != len(stage.places):
                given = f"names {len(kinds)} nodes for stage {place}, which has {len(stage.places)}"
                raise InputError("emulate", given)
            last = first + stage.layers
            layers = range(first * many // few, last * many // few)
            likes = [self._like(node, layers, before) for node in kinds]
            places = tuple(
                replace(worker_place, emulate=like, weight=speed)
                for worker_place, (like, speed) in zip(stage.places, likes, strict=True)
            )
            emulated.append(replace(stage, places=places))
            first, before = last, nodes[place]
        return tuple(emulated)

    def _like(self, node: NodeType, layers: range, before: Sequence[NodeType]) -> tuple[EmulatedGpu, float]:
        from potluck.engine.pipeline.pipeline_messages import EmulatedGpu
        from potluck.perf.operators.network import handover_s
        from potluck.perf.phases import decode_step_s
        from potluck.perf.timers.engine_host import NO_HOST
        from potluck.perf.timers.roofline import roofline

        token_bytes = self.model.hidden * 2.0
        hops = [handover_s([0.0, token_bytes], source_node_type, node) for source_node_type in before]
        fixed = max((float(hop[0]) for hop in hops), default=0.0)
        value = max((float(hop[1] - hop[0]) for hop in hops), default=0.0)
        tp = self._tp(node)
        like = EmulatedGpu(
            self.model, node, tp, layers.start, layers.stop, self.speed_up, hop_s=fixed, hop_s_per_token=value
        )
        timer = roofline(self.model, node, tp, layers=layers, host=NO_HOST)
        return like, 1.0 / float(decode_step_s(timer, 16, 1024)[0])

    def layout(self) -> Layout:
        """Layers as even as they can be, where nothing is said of them."""
        many, count = self.model.layer_count, len(self.nodes)
        if count > many:
            raise InputError("emulate", f"names {count} stages, {self.model.name} has {many} layers")
        return Layout(
            tuple(
                Stage(
                    many * (place + 1) // count - many * place // count,
                    tuple(StageNode(node.name, self._tp(node)) for node in stage),
                )
                for place, stage in enumerate(self.nodes)
            )
        )

    @property
    def _only(self) -> NodeType:
        if len(self.nodes) != 1 or len(self.nodes[0]) != 1:
            raise InputError("emulate", "names several nodes, which only a pipeline (--stages) can act as")
        return self.nodes[0][0]

    def _tp(self, node: NodeType) -> int:
        return node.gpus if self.tp is None else self.tp


@dataclass(frozen=True, slots=True)
class LayoutEmulation:
    """A whole layout, pipelines among them, that one process acts as: a step is a round through all stages."""

    replica: MockModel

    def pace(self, executor: LocalExecutor) -> LocalExecutor:
        from potluck.engine.compute.emulated import EmulatedNic, StepPacer
        from potluck.engine.mock.mock_engine import lasting

        model, speed_up = self.replica.model, self.replica.speed_up
        executor.pacer = StepPacer(None, speed_up, lasts_s=lasting(self.replica.timer()))
        layers = executor.config.model.layer_count
        executor.nic = EmulatedNic(model, layers, self.replica.card(), speed_up)
        return executor

    def blocks(self) -> int:
        return self.replica.blocks()

    def stages(self, stages: Sequence[PipelineStage]) -> tuple[PipelineStage, ...]:
        raise InputError("--stages", f"a layout as JSON is one process, not {len(stages)} stages of its own")


def emulation(text: str, speed_up: float = 1.0) -> Emulation | LayoutEmulation:
    """What `--emulate` says; an unknown GPU or model is answered with the nearest one."""
    from potluck.catalog import models, nodes
    from potluck.perf.timers.roofline import check_tp

    if text.startswith("{"):
        return LayoutEmulation(mock_model(text, speed_up))
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(part.strip() for part in parts):
        raise InputError("emulate", f"{text!r} is not like A10:llama-3.1-8b or 2xL40S:qwen3-32b:2")
    if len(parts) == 3 and not (parts[2].isdecimal() and len(parts[2]) < 4):
        raise InputError("emulate", f"{parts[2]!r} is not a number of GPUs")
    if not 0 < speed_up < float("inf"):
        raise InputError("speed-up", f"must be positive, is {speed_up}")
    stages = [stage.split("+") for stage in parts[0].split(",")]
    named = tuple(tuple(nodes.node_type(name.strip()) for name in stage) for stage in stages)
    name, _, weights = parts[1].strip().partition("@")
    model = models.model(name)
    if weights:
        model = in_format(model, format_named(weights, "emulate"))
    result = Emulation(named, model, int(parts[2]) if len(parts) == 3 else None, speed_up)
    for node in (item for stage in named for item in stage):
        check_tp(result.model, node, result._tp(node))
    return result


def mock_model(text: str, speed_up: float = 1.0, mean_output_tokens: int = 0) -> MockModel:
    """What `--emulate` says to a mock engine: as above, or a controller's `EmulatedReplica` as JSON."""
    from potluck.engine.mock.mock_engine import MockModel

    if not text.startswith("{"):
        like = emulation(text, speed_up)
        assert isinstance(like, Emulation)
        kinds = tuple({node.name: node for stage in like.nodes for node in stage}.values())
        return MockModel(
            like.model, like.layout(), kinds, speed_up=speed_up, mean_output_tokens=mean_output_tokens
        )
    from potluck.catalog import models, nodes
    from potluck.perf.timers.pipeline_timer import layout_hops

    try:
        body = decode(EmulatedReplica, json.loads(text), "--emulate")
    except ValueError as error:
        raise FormatError("--emulate", f"is not JSON ({error})") from error
    named = {stage_node.node for stage in body.layout.stages for stage_node in stage.nodes}
    node_types = {name: nodes.node_type(name) for name in sorted(named)}
    gbps = {(source, target): (rate, rtt_s) for source, target, rate, rtt_s in body.links}
    model = models.model(body.model)
    return MockModel(
        model if body.weights is None else in_format(model, body.weights),
        body.layout,
        tuple(node_types.values()),
        layout_hops(body.layout, node_types, gbps),
        speed_up,
        mean_output_tokens,
    )


def executor_maker(
    options: Mapping[str, Any], directory: Path, tls: tuple[Path, Path, Path] | None = None
) -> MakeExecutor:
    """What makes an engine's executor, as the flags say. An emulated GPU also says how much KV there is room for."""
    from potluck.engine.pipeline.launch import launch, parse_stages
    from potluck.engine.pipeline.pipeline_connection import TlsPair
    from potluck.engine.serve import local_executor

    like = None if options["emulate"] is None else emulation(options["emulate"], options["speed_up"])
    parts = None if options["stages"] is None else parse_stages(options["stages"])
    secret, seed = _secret(options["secret_file"], parts), options["random_weights"]
    secure = None if tls is None else TlsPair.of(*tls)

    def make(config: EngineModelConfig, source: WeightSource, size: RunnerSize, device: str) -> Executor:
        if like is not None and options["kv_blocks"] is None:
            size = replace(size, blocks=like.blocks())
        if parts is None:
            executor = local_executor(config, source, size, device)
            return executor if like is None else like.pace(executor)
        return launch(
            config,
            parts if like is None else like.stages(parts),
            size,
            directory=str(directory.resolve()) if seed is None else None,
            seed=seed or 0,
            secret=secret,
            tls=secure,
            threads=options["threads"] or 0,
            device=device,
        )

    return make


def _secret(file: Path | None, stages: Sequence[PipelineStage] | None) -> bytes | None:
    """The secret that workers elsewhere were started with; those that are started here get one of their own."""
    if file is not None:
        return secret_in(file, "--secret-file")
    if any(place.address for stage in stages or () for place in stage.places):
        raise InputError("--secret-file", "is needed for workers that run elsewhere")
    return None

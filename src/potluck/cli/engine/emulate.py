"""What `--emulate` says: which GPUs and model an engine takes its pace, room for KV and network from.

A10:llama-3.1-8b@fp8      one GPU, with weights in another format
2xL40S:qwen3-32b:1        one of a node's two GPUs
A10,L4+L4:llama-3.1-8b    a pipeline of two stages, the second on two nodes: one process, a step is a round
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

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
    from potluck.engine.serve import MakeExecutor


def mock_model(text: str, speed_up: float = 1.0, mean_output_tokens: int = 0) -> MockModel:
    """The replica that `--emulate` names, as above or as a controller's `EmulatedReplica` in JSON.

    An unknown GPU or model is answered with the nearest one.
    """
    if not 0 < speed_up < float("inf"):
        raise InputError("speed-up", f"must be positive, is {speed_up}")
    replica = _from_json(text) if text.startswith("{") else _from_names(text)
    return replace(replica, speed_up=speed_up, mean_output_tokens=mean_output_tokens)


def _from_names(text: str) -> MockModel:
    from potluck.catalog import models, nodes
    from potluck.engine.mock.mock_engine import MockModel
    from potluck.perf.timers.roofline import check_tp

    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(part.strip() for part in parts):
        raise InputError("emulate", f"{text!r} is not like A10:llama-3.1-8b or 2xL40S:qwen3-32b:2")
    if len(parts) == 3 and not (parts[2].isdecimal() and len(parts[2]) < 4):
        raise InputError("emulate", f"{parts[2]!r} is not a number of GPUs")
    stage_names = [stage.split("+") for stage in parts[0].split(",")]
    stages = [[nodes.node_type(name.strip()) for name in stage] for stage in stage_names]
    name, _, weights = parts[1].strip().partition("@")
    model = models.model(name)
    if weights:
        model = in_format(model, format_named(weights, "emulate"))
    layout = _even_layout(model, stages, int(parts[2]) if len(parts) == 3 else None)
    node_types = {node.name: node for stage in stages for node in stage}
    for stage_node in (stage_node for stage in layout.stages for stage_node in stage.nodes):
        check_tp(model, node_types[stage_node.node], stage_node.tp)
    return MockModel(model, layout, tuple(node_types.values()))


def _even_layout(model: Model, stages: list[list[NodeType]], tp: int | None) -> Layout:
    """The model's layers spread over the stages as evenly as possible; `tp` None: all GPUs of each node."""
    layers, count = model.layer_count, len(stages)
    if count > layers:
        raise InputError("emulate", f"names {count} stages, {model.name} has {layers} layers")
    bounds = [layers * stage // count for stage in range(count + 1)]
    return Layout(
        tuple(
            Stage(
                bounds[index + 1] - bounds[index],
                tuple(StageNode(node.name, node.gpus if tp is None else tp) for node in nodes),
            )
            for index, nodes in enumerate(stages)
        )
    )


def _from_json(text: str) -> MockModel:
    from potluck.catalog import models, nodes
    from potluck.engine.mock.mock_engine import MockModel
    from potluck.perf.timers.pipeline_timer import layout_hops

    try:
        replica = decode(EmulatedReplica, json.loads(text), "--emulate")
    except ValueError as error:
        raise FormatError("--emulate", f"is not JSON ({error})") from error
    names = {stage_node.node for stage in replica.layout.stages for stage_node in stage.nodes}
    node_types = {name: nodes.node_type(name) for name in sorted(names)}
    gbps = {(source, target): (rate, rtt_s) for source, target, rate, rtt_s in replica.links}
    model = models.model(replica.model)
    return MockModel(
        model if replica.weights is None else in_format(model, replica.weights),
        replica.layout,
        tuple(node_types.values()),
        layout_hops(replica.layout, node_types, gbps),
    )


def executor_maker(emulate: str | None, speed_up: float, kv_blocks: int | None) -> MakeExecutor:
    """A function that makes an engine's executor, at the pace of `emulate` and with its room for KV where given.

    `kv_blocks`, if given, goes before the emulated GPU's own number.
    """
    from potluck.engine.serve import local_executor

    replica = None if emulate is None else mock_model(emulate, speed_up)

    def make(config: EngineModelConfig, source: WeightSource, size: RunnerSize, device: str) -> Executor:
        if replica is None:
            return local_executor(config, source, size, device)
        if kv_blocks is None:
            size = replace(size, blocks=replica.blocks())
        return paced_executor(local_executor(config, source, size, device), replica)

    return make


def paced_executor(executor: LocalExecutor, replica: MockModel) -> LocalExecutor:
    """The executor, whose steps and KV transfers take as long as the replica's from now on."""
    from potluck.engine.compute.emulated import EmulatedNic, StepPacer
    from potluck.engine.mock.mock_engine import lasting

    executor.pacer = StepPacer(None, replica.speed_up, lasts_s=lasting(replica.timer()))
    layers = executor.config.model.layer_count
    executor.nic = EmulatedNic(replica.model, layers, replica.card(), replica.speed_up)
    return executor

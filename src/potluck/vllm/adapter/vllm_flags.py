"""The command that starts vLLM. Values in, words out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from potluck.core.errors import InputError
from potluck.core.values.layout import Layout

SEQUENCES = "--max-num-seqs"
USUAL_RUNNING = 256
"""vLLM's own choice, or less than that."""


@dataclass(frozen=True, slots=True)
class GpuShape:
    """How a model lies on this machine's GPUs."""

    tensor: int = 1
    stages: tuple[int, ...] = ()
    """Layers of each stage of a pipeline; none: all in one."""
    experts: bool = False
    """Whether each expert of a mixture is whole on one GPU."""

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise InputError("--tensor-parallel", f"must be at least 1, is {self.tensor}")
        if any(layers < 1 for layers in self.stages):
            raise InputError("--stages", "every stage needs a layer")

    @property
    def workers(self) -> int:
        return self.tensor * max(1, len(self.stages))


def shape_of(layout: Layout) -> GpuShape:
    """Of a planned replica; vLLM shards every stage alike, over GPUs of one node each."""
    wide = {node.tp for stage in layout.stages for node in stage.nodes}
    if len(wide) != 1:
        raise InputError(
            "layout", f"has stages of unlike tensor parallelism ({sorted(wide)}); vLLM needs one"
        )
    if any(len(stage.nodes) != 1 for stage in layout.stages):
        raise InputError("layout", "has a stage of several nodes; vLLM needs one node per stage")
    stages = tuple(stage.layers for stage in layout.stages)
    spread = {node.ep for stage in layout.stages for node in stage.nodes}
    if len(spread) != 1 or "dp" in spread:
        raise InputError("layout", "has experts that are not spread over tensor parallel GPUs alike (tp)")
    return GpuShape(wide.pop(), stages if len(stages) > 1 else (), "tp" in spread)


@dataclass(frozen=True, slots=True)
class VllmSettings:
    model: str
    name: str
    python: str
    """Of the environment that vLLM is installed in."""
    shape: GpuShape = GpuShape()
    token_budget: int | None = None
    """Of one step."""
    max_running: int | None = None
    max_tokens: int | None = None
    block_tokens: int | None = None
    memory_share: float | None = None
    """Of each GPU's memory."""
    kv_host: str = "127.0.0.1"
    kv_port: int = 0
    kv_tls: tuple[Path, ...] = ()
    """Certificate, key and authority for KV; none: it crosses in clear."""
    any_version: bool = False
    more: tuple[str, ...] = ()
    """Further flags of vLLM's, as they are."""

    @property
    def running(self) -> int:
        """Requests at once, as far as it was said."""
        words = " ".join(self.more).replace("=", " ").split()
        said = words[words.index(SEQUENCES) + 1 :][:1] if SEQUENCES in words else []
        return self.max_running or (int(said[0]) if said and said[0].isdigit() else USUAL_RUNNING)


def command(settings: VllmSettings, port: int, channel: Path) -> list[str]:
    shape = settings.shape
    found = [
        *(settings.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", settings.model, "--served-model-name", settings.name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--kv-transfer-config", json.dumps(transfer(settings, channel))),
        "--enable-prompt-tokens-details",
        # It is asked what it makes of a chat's messages before it gets KV for them.
        "--enable-scale-out",
        # The connector takes them: nothing else has to listen.
        *("--kv-events-config", json.dumps({"enable_kv_cache_events": True, "publisher": "null"})),
        # It is asked for its metrics twice a second.
        "--disable-uvicorn-access-log",
    ]
    options: list[tuple[str, object]] = [
        ("--tensor-parallel-size", shape.tensor if shape.tensor > 1 else None),
        ("--pipeline-parallel-size", len(shape.stages) or None),
        ("--max-num-batched-tokens", settings.token_budget),
        (SEQUENCES, settings.max_running),
        ("--max-model-len", settings.max_tokens),
        ("--block-size", settings.block_tokens),
        ("--gpu-memory-utilization", settings.memory_share),
    ]
    if shape.experts:
        found.append("--enable-expert-parallel")
    for flag, value in options:
        if value is not None:
            found += [flag, str(value)]
    return [*found, *settings.more]


def transfer(settings: VllmSettings, channel: Path) -> dict[str, object]:
    extra: dict[str, object] = {
        "host": settings.kv_host,
        "port": settings.kv_port,
        "channel": str(channel),
    }
    if settings.kv_tls:
        extra["tls"] = [str(each.absolute()) for each in settings.kv_tls]
    if settings.any_version:
        extra["any_version"] = True
    return {
        "kv_connector": "PotluckConnector",
        "kv_connector_module_path": "potluck.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def environment(settings: VllmSettings) -> dict[str, str]:
    """What is set beside what there is."""
    found = {"VLLM_NO_USAGE_STATS": "1"}
    if settings.shape.stages:
        found["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, settings.shape.stages))
    return found

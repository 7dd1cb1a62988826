"""From what an engine is to the command that starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from potluck.control.control_values import EngineSpec
from potluck.core.codec import encode
from potluck.core.errors import InputError
from potluck.core.values.engine_abilities import ENGINES, limits_of_layout
from potluck.core.values.layout import EmulatedReplica
from potluck.core.values.model import FORMAT_BITS, Format

EngineStyle = str
"""`emulated`: the shipped model at the pace of the planned GPUs; `mock`: tokens made up at that pace; `gpu`: a
model's own weights on the GPUs of this machine; `vllm`: the same in stock vLLM."""
STYLES = ("emulated", "mock", "gpu", "vllm")
MachineLinks = tuple[tuple[str, str, float, float], ...]
"""(from machine, to machine, gbps, round trip in s), where a pool names its machines."""

VLLM_MAKES: Final[dict[Format, str]] = {
    "fp8": "fp8_per_tensor",
    "fp8_block": "fp8_per_block",
    "mxfp4": "mxfp4",
}
"""Formats that vLLM makes of all 16-bit weights as it loads, by its names (docs: features/quantization/online); of
int8 and NVFP4 it makes experts alone."""


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The format that a plan has a model's weights in, and the one that most of its checkpoint is in."""

    planned: Format
    stored: Format

    @property
    def as_stored(self) -> bool:
        return self.planned == self.stored or FORMAT_BITS[self.planned] == FORMAT_BITS[self.stored] == 16


@dataclass(frozen=True, slots=True)
class EngineCommands:
    style: EngineStyle = "emulated"
    files: tuple[tuple[str, Path], ...] = ()
    """Model to its directory; without one, the shipped model acts as it."""
    catalog_names: tuple[tuple[str, str], ...] = ()
    """The plan's name of a model to the one it has in the catalog."""
    max_running: int = 32
    host: str = "127.0.0.1"
    tls: tuple[str, str, str] | None = None
    """Certificate, key and authority, as they are called where engines run: for the gateway, KV and stages alike."""
    chips: tuple[tuple[str, str], ...] = ()
    """Of this machine's GPUs the node type that each is, and its id."""
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By a GPU's id, what an engine on it is started with, where that is not the id itself."""
    gpus: tuple[tuple[str, str], ...] = ()
    """Of node types with several GPUs, as vLLM uses them: what one of those is as a node type."""
    flags: Callable[[EngineSpec], tuple[str, ...]] = lambda engine_spec: ()
    """Further flags of an engine on them: how much fits, say."""
    device: str = "cuda"
    links: MachineLinks = ()
    python: str = sys.executable
    """Of the environment that vLLM is in."""
    more: tuple[str, ...] = ()
    weights: Mapping[str, WeightFormats] = field(default_factory=dict)
    """Model to the format that the plan has its weights in, where it says so."""

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise InputError("--engine", f"must be one of {', '.join(STYLES)}, is {self.style!r}")
        for model, weights in self.weights.items():  # what cannot be is said before anything is started
            if self.style == "vllm":
                vllm_formats(model, weights)
            elif self.style == "gpu":
                as_stored(model, weights)

    def chips_for(self, engine_spec: EngineSpec) -> tuple[str, ...]:
        """The kind of each GPU that an engine gets, in the order of its workers; none where it finds them itself."""
        if self.style == "gpu":
            return (only_gpu_of(engine_spec),)
        if self.style != "vllm" or not self.chips:
            return ()
        kinds = dict(self.gpus)
        return tuple(kinds.get(node.node, node.node) for node in engine_spec.nodes for _ in range(node.tp))

    def workers(self, engine_spec: EngineSpec) -> int:
        """Processes of an engine that take a port for KV each."""
        return sum(node.tp for node in engine_spec.nodes) if self.style == "vllm" else 1

    def gateway_words(self) -> tuple[str, ...]:
        files = (f"--files={name}={path}" for name, path in self.files)
        return (*files, "--mock") if self.style == "mock" else tuple(files)

    def command(self, engine_spec: EngineSpec, port: int | str, kv_port: int | str) -> list[str]:
        """What to run for an engine at these ports, or words that stand for them."""
        name = dict(self.catalog_names).get(engine_spec.model, engine_spec.model)
        kind = "vllm" if self.style == "vllm" else "serve"
        command = [
            *(sys.executable, "-m", "potluck.cli.main", "engine", kind, "--json"),
            *("--host", self.host, "--port", str(port), "--kv-port", str(kv_port)),
            *("--name", engine_spec.model),
        ]
        if self.tls is not None:
            command += ["--tls", *self.tls[:2], "--kv-tls", *self.tls]
        folder = dict(self.files).get(engine_spec.model)
        if folder is not None:
            command += ["--model", str(folder)]
        if self.style == "vllm":
            budget = ["--token-budget", str(engine_spec.step_tokens)] if engine_spec.step_tokens else []
            formats = vllm_formats(engine_spec.model, self.weights.get(engine_spec.model))
            own = (*formats, *self.flags(engine_spec), *self.more)  # of two alike vLLM takes the last
            return [*command, *parallel_of(engine_spec), *budget, "--python", self.python, "--", *own]
        if self.style == "gpu":
            only_gpu_of(engine_spec)
            return [*command, "--device", self.device, *self.flags(engine_spec)]
        weights = self.weights.get(engine_spec.model)
        planned = None if weights is None else weights.planned
        command += ["--emulate", emulate_text(engine_spec, name, self.links, planned)]
        if engine_spec.step_tokens:
            command += ["--token-budget", str(engine_spec.step_tokens)]
        if self.style == "mock":
            return [*command, "--mock", *self.flags(engine_spec)]
        return [*command, "--max-running", str(self.max_running)]


class DeferredCommands:
    """EngineCommands of this machine that are made when the first engine is to be started."""

    def __init__(self, style: EngineStyle, make: Callable[[], EngineCommands]) -> None:
        self._make = make
        self.style, self.host = style, EngineCommands().host

    @property
    def chips(self) -> tuple[tuple[str, str], ...]:
        return self._make().chips

    @property
    def variables(self) -> Mapping[str, Mapping[str, str]]:
        return self._make().variables

    def chips_for(self, engine_spec: EngineSpec) -> tuple[str, ...]:
        return self._make().chips_for(engine_spec)

    def workers(self, engine_spec: EngineSpec) -> int:
        return self._make().workers(engine_spec)

    def command(self, engine_spec: EngineSpec, port: int | str, kv_port: int | str) -> list[str]:
        return self._make().command(engine_spec, port, kv_port)


def only_gpu_of(engine_spec: EngineSpec) -> str:
    """The node type of the one GPU that an embedded engine computes on; InputError for any other layout."""
    limit = next(limits_of_layout(engine_spec.layout, ENGINES["embedded"]), None)
    if limit is not None:
        what = f"needs {limit.what}, which {ENGINES['embedded'].title} does not do"
        raise InputError("layout", f"{what}; plan with {limit.fix}" if limit.fix else what)
    return engine_spec.nodes[0].node


def parallel_of(engine_spec: EngineSpec) -> tuple[str, ...]:
    """The flags of a layout for vLLM, which shards every stage alike and has one node for each."""
    stages = engine_spec.layout.stages
    wide, spread = {node.tp for node in engine_spec.nodes}, {node.ep for node in engine_spec.nodes}
    if len(wide) != 1 or any(len(stage.nodes) != 1 for stage in stages):
        raise InputError("layout", "vLLM needs one node per stage, and the same tensor parallelism in all")
    if "dp" in spread or len(spread) != 1:
        line = "vLLM with KV hand-overs spreads experts over tensor parallel GPUs (tp) or not at all"
        raise InputError("layout", line)
    texts: tuple[str, ...] = ("--tensor-parallel", str(wide.pop()))
    if "tp" in spread:
        texts = (*texts, "--expert-parallel")
    return texts if len(stages) == 1 else (*texts, "--stages", ",".join(str(item.layers) for item in stages))


def with_node(words: Sequence[str], engine_spec: EngineSpec, rank: int, master: str) -> list[str]:
    """The command of one machine of a vLLM whose stages are on several; `master` is where they meet, on the first."""
    at = words.index("--json") + 1
    flags = ("--nodes", str(len(engine_spec.nodes)), "--node-rank", str(rank), "--master", master)
    return [*words[:at], *flags, *words[at:]]


def vllm_formats(model: str, weights: WeightFormats | None) -> tuple[str, ...]:
    """vLLM's own flags for weights in the planned format, where it makes that of the checkpoint as it loads."""
    if weights is None or weights.as_stored:
        return ()
    if weights.planned not in VLLM_MAKES or FORMAT_BITS[weights.stored] != 16:
        raise InputError(
            f"model {model}: precision",
            f"vLLM makes no {weights.planned} of a checkpoint in {weights.stored};"
            " have one that is stored so, and name its directory as the model",
        )
    return ("--quantization", VLLM_MAKES[weights.planned])


def as_stored(model: str, weights: WeightFormats | None) -> None:
    """Refuse formats other than the checkpoint's: this engine computes with weights as they are stored."""
    if weights is not None and not weights.as_stored:
        raise InputError(
            f"model {model}: precision",
            f"this engine makes no {weights.planned} of a checkpoint in {weights.stored}; vLLM may",
        )


def emulate_text(
    engine_spec: EngineSpec, model: str, links: MachineLinks = (), weights: Format | None = None
) -> str:
    """What `--emulate` says of a layout: a line for one node, else all of it as JSON."""
    only = engine_spec.nodes[0]
    if len(engine_spec.nodes) == 1 and only.ep == "none":
        return f"{only.node}:{model}@{weights}:{only.tp}" if weights else f"{only.node}:{model}:{only.tp}"
    mine = engine_spec.layout.machines
    inside = tuple(link for link in links if link[0] in mine and link[1] in mine)
    return json.dumps(
        encode(EmulatedReplica(model, engine_spec.layout, inside, weights)), separators=(",", ":")
    )

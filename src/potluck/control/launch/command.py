"""From what an engine is to the command that starts it, on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from potluck.control.values import Make
from potluck.core.codec import encode
from potluck.core.errors import InputError
from potluck.core.values.likeness import Likeness

EngineStyle = str
"""`emulated`: the shipped model at the pace of the planned GPUs; `pretended`: tokens made up at that pace; `gpu`: a
model's own weights on the GPUs of this machine."""
STYLES = ("emulated", "pretended", "gpu")


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """How engines of this machine are made."""

    style: EngineStyle = "emulated"
    files: tuple[tuple[str, Path], ...] = ()
    """Model to its directory; without one, the shipped model acts as it."""
    catalog_names: tuple[tuple[str, str], ...] = ()
    """The plan's name of a model to the one it has in the catalog."""
    max_running: int = 32
    host: str = "127.0.0.1"
    chips: tuple[tuple[str, str], ...] = ()
    """Of this machine's GPUs the node type that each is, and its id."""
    flags: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Node type to further flags of an engine on one."""
    device: str = "cuda"
    links: tuple[tuple[str, str, float, float], ...] = ()
    """(from machine, to machine, gbps, round trip in s), where a pool names its machines."""

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise InputError("--engine", f"must be one of {', '.join(STYLES)}, is {self.style!r}")

    def command(self, make: Make, port: int, kv_port: int) -> list[str]:
        """What to run for an engine at these ports."""
        name = dict(self.catalog_names).get(make.model, make.model)
        command = [
            *(sys.executable, "-m", "potluck.cli.main", "engine", "serve", "--json"),
            *("--host", self.host, "--port", str(port), "--kv-port", str(kv_port)),
            *("--name", make.model),
        ]
        folder = dict(self.files).get(make.model)
        if folder is not None:
            command += ["--model", str(folder)]
        if self.style == "gpu":
            return [*command, "--device", self.device, *dict(self.flags).get(only_node(make), ())]
        command += ["--emulate", emulate_text(make, name, self.links)]
        if make.step_tokens:
            command += ["--token-budget", str(make.step_tokens)]
        if self.style == "pretended":
            return [*command, "--pretend"]
        if len(make.layout.stages) > 1:
            raise InputError("layout", "a pipeline of several nodes can only be pretended on one machine")
        return [*command, "--max-running", str(self.max_running)]


def only_node(make: Make) -> str:
    """The node type of an engine on one GPU."""
    nodes = [node for stage in make.layout.stages for node in stage.nodes]
    if len(nodes) != 1 or nodes[0].tp != 1:
        raise InputError("layout", "an engine of this machine has one GPU; plan with nodes of one GPU each")
    return nodes[0].node


def emulate_text(make: Make, model: str, links: tuple[tuple[str, str, float, float], ...] = ()) -> str:
    """What `--emulate` says of a layout: a line for one node, else all of it as JSON."""
    stages = make.layout.stages
    if len(stages) == 1 and len(stages[0].nodes) == 1:
        only = stages[0].nodes[0]
        return f"{only.node}:{model}:{only.tp}"
    mine = make.layout.machines
    inside = tuple(each for each in links if each[0] in mine and each[1] in mine)
    return json.dumps(encode(Likeness(model, make.layout, inside)), separators=(",", ":"))

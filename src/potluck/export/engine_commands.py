"""The commands of a plan's engines, workers and gateway, and the gateway's list of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import yaml

from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import (
    WeightFormats,
    as_stored,
    parallel_of,
    stages_of,
    vllm_formats,
)
from potluck.core.errors import InputError
from potluck.export.placement import STAGE_PORT, EnginePlacement, PlacedPlan, RentedMachine

Style = Literal["vllm", "embedded"]
EVERYWHERE = "0.0.0.0"
"""What clients reach a gateway by, and the gateway an engine whose address nobody knows beforehand."""
KEY_FILE = "/etc/potluck/engine.key"
HostOf = Callable[[RentedMachine], str]
"""Under which name or address a box is reached."""


@dataclass(frozen=True, slots=True)
class CommandOptions:
    """What commands are made with."""

    style: Style
    folders: Mapping[str, str]
    """Model to its directory on every machine."""
    key_file: str = KEY_FILE
    """What engines ask of whoever wants something of them; empty: it is in $POTLUCK_API_KEY."""
    secret_file: str = "/etc/potluck/pipeline.secret"
    """Of pipelines over several machines."""
    weights: Mapping[str, WeightFormats] = field(default_factory=dict)
    """Model to the format that the plan has its weights in, where it says so."""

    def engine(self, placement: EnginePlacement, listen: str, host_of: HostOf) -> list[str]:
        """Of one engine, on its first box; `listen` is the address by which others reach it."""
        make = EngineSpec(placement.model, placement.layout, placement.region)
        kind = "vllm" if self.style == "vllm" else "serve"
        words = [
            *("potluck", "engine", kind, "--model", self.folders[placement.model], "--name", placement.model),
            *(
                "--host",
                listen,
                "--port",
                str(placement.port),
                "--kv-port",
                str(placement.kv_port),
                "--role",
                placement.role,
            ),
            *(("--api-key-file", self.key_file) if self.key_file else ()),
        ]
        if self.style == "vllm":
            if not placement.alone:
                raise InputError(
                    f"template {placement.template}",
                    "is a pipeline over several machines: those run with --engine embedded, or plan without them",
                )
            own = vllm_formats(placement.model, self.weights.get(placement.model))
            return [*words, *parallel_of(make), *(("--", *own) if own else ())]
        as_stored(placement.model, self.weights.get(placement.model))
        words += ["--device", "cuda"]
        if placement.alone:
            return [*words, *stages_of(make)]
        stages_of(make)  # refuses what the engine cannot do
        return [*words, "--stages", self.elsewhere(placement, host_of), "--secret-file", self.secret_file]

    def gateway(self, folder: str, keys: str) -> list[str]:
        """Of the gateway, whose files lie in `folder`; it reads the models' tokenizers."""
        files = [f"--files={name}={path}" for name, path in self.folders.items()]
        listed = [f"{folder}{name}" for name in ("plan.json", "potluck.yaml", "engines.yaml")]
        words = ["potluck", "serve", listed[0], listed[1], "--engines", listed[2], *files]
        return [*words, "--host", EVERYWHERE, "--keys", keys]

    def elsewhere(self, placement: EnginePlacement, host_of: HostOf) -> str:
        """`--stages` of a pipeline whose workers run on their own: all of them, the engine's machine's too."""
        parts = []
        for number, stage in enumerate(placement.layout.stages):
            workers = [each for each in placement.footings if each.stage == number]
            at = "+".join(f"{host_of(each.box)}:{stage_port(placement)}" for each in workers)
            parts.append(f"{stage.layers}@{at}")
        return ",".join(parts)

    def worker(self, placement: EnginePlacement, listen: str) -> list[str]:
        """Of a stage's worker, which reads the secret from its standard input."""
        at = f"{listen}:{stage_port(placement)}"
        return ["python3", "-m", "potluck.engine.pipeline", "--listen", at, "--stay"]


def stage_port(placement: EnginePlacement) -> int:
    return STAGE_PORT + placement.port % 100


def roster(fleet: PlacedPlan, url_of: Callable[[EnginePlacement], str], key_file: str) -> str:
    """The gateway's list of engines."""
    engines = [
        {
            "url": url_of(placement),
            "template": placement.template,
            "index": placement.index,
            "region": placement.region,
            "key_file": key_file,
        }
        for placement in fleet.placements
    ]
    return yaml.safe_dump({"engines": engines}, sort_keys=False, width=120)


def visible(placement: EnginePlacement, box: RentedMachine) -> str:
    """CUDA_VISIBLE_DEVICES of what runs on a box for an engine."""
    return ",".join(str(gpu) for each in placement.footings if each.box == box for gpu in each.gpus)

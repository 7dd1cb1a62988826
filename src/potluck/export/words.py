"""The commands of a plan's engines, workers and gateway, and the gateway's list of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import yaml

from potluck.control.launch.command import Weights, as_stored, parallel_of, stages_of, vllm_formats
from potluck.control.values import Make
from potluck.core.errors import InputError
from potluck.export.seats import STAGE_PORT, Box, Roomed, Seat

Style = Literal["vllm", "embedded"]
EVERYWHERE = "0.0.0.0"
"""What clients reach a gateway by, and the gateway an engine whose address nobody knows beforehand."""
KEY_FILE = "/etc/potluck/engine.key"
HostOf = Callable[[Box], str]
"""Under which name or address a box is reached."""


@dataclass(frozen=True, slots=True)
class Wording:
    """What commands are made with."""

    style: Style
    folders: Mapping[str, str]
    """Model to its directory on every machine."""
    key_file: str = KEY_FILE
    """What engines ask of whoever wants something of them; empty: it is in $POTLUCK_API_KEY."""
    secret_file: str = "/etc/potluck/pipeline.secret"
    """Of pipelines over several machines."""
    weights: Mapping[str, Weights] = field(default_factory=dict)
    """Model to the format that the plan has its weights in, where it says so."""

    def engine(self, seat: Seat, listen: str, host_of: HostOf) -> list[str]:
        """Of one engine, on its first box; `listen` is the address by which others reach it."""
        make = Make(seat.model, seat.layout, seat.region)
        kind = "vllm" if self.style == "vllm" else "serve"
        words = [
            *("potluck", "engine", kind, "--model", self.folders[seat.model], "--name", seat.model),
            *(
                "--host",
                listen,
                "--port",
                str(seat.port),
                "--kv-port",
                str(seat.kv_port),
                "--role",
                seat.role,
            ),
            *(("--api-key-file", self.key_file) if self.key_file else ()),
        ]
        if self.style == "vllm":
            if not seat.alone:
                raise InputError(
                    f"template {seat.template}",
                    "is a pipeline over several machines: those run with --engine embedded, or plan without them",
                )
            own = vllm_formats(seat.model, self.weights.get(seat.model))
            return [*words, *parallel_of(make), *(("--", *own) if own else ())]
        as_stored(seat.model, self.weights.get(seat.model))
        words += ["--device", "cuda"]
        if seat.alone:
            return [*words, *stages_of(make)]
        stages_of(make)  # refuses what the engine cannot do
        return [*words, "--stages", self.elsewhere(seat, host_of), "--secret-file", self.secret_file]

    def gateway(self, folder: str, keys: str) -> list[str]:
        """Of the gateway, whose files lie in `folder`; it reads the models' tokenizers."""
        files = [f"--files={name}={path}" for name, path in self.folders.items()]
        listed = [f"{folder}{name}" for name in ("plan.json", "potluck.yaml", "engines.yaml")]
        words = ["potluck", "serve", listed[0], listed[1], "--engines", listed[2], *files]
        return [*words, "--host", EVERYWHERE, "--keys", keys]

    def elsewhere(self, seat: Seat, host_of: HostOf) -> str:
        """`--stages` of a pipeline whose workers run on their own: all of them, the engine's machine's too."""
        parts = []
        for number, stage in enumerate(seat.layout.stages):
            workers = [each for each in seat.footings if each.stage == number]
            at = "+".join(f"{host_of(each.box)}:{stage_port(seat)}" for each in workers)
            parts.append(f"{stage.layers}@{at}")
        return ",".join(parts)

    def worker(self, seat: Seat, listen: str) -> list[str]:
        """Of a stage's worker, which reads the secret from its standard input."""
        at = f"{listen}:{stage_port(seat)}"
        return ["python3", "-m", "potluck.engine.pipeline", "--listen", at, "--stay"]


def stage_port(seat: Seat) -> int:
    return STAGE_PORT + seat.port % 100


def roster(fleet: Roomed, url_of: Callable[[Seat], str], key_file: str) -> str:
    """The gateway's list of engines."""
    engines = [
        {
            "url": url_of(seat),
            "template": seat.template,
            "index": seat.index,
            "region": seat.region,
            "key_file": key_file,
        }
        for seat in fleet.seats
    ]
    return yaml.safe_dump({"engines": engines}, sort_keys=False, width=120)


def visible(seat: Seat, box: Box) -> str:
    """CUDA_VISIBLE_DEVICES of what runs on a box for an engine."""
    return ",".join(str(gpu) for each in seat.footings if each.box == box for gpu in each.gpus)

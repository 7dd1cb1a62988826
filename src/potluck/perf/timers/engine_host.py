"""What an engine's host takes of a step while no GPU works: scheduling, sampling, detokenising, launching.

    seconds = fixed + per sequence x sequences of the step

and a step with a prompt's chunk, which is not recorded in a CUDA graph, lasts at least as long as it takes to launch
its layers. All three are facts of an engine and its version: old ones took about 0.1 ms a sequence, today's overlap
most of it with the GPU. Besides, a server adds to each first token what it takes to read the request and to begin the
answer: 11 to 19 ms with vLLM, a tenth of a second with TensorRT-LLM 1.0 and SGLang 0.5. Those of three engines were
fitted to whole serving runs on H100 (`lab/accuracy_study`); vLLM's are the default. `potluck calibrate` fits them to
runs of one's own (`OwnCluster`), for every command; `potluck profile` measures the steps themselves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from potluck.core.codec import loads
from potluck.core.errors import InputError, PotluckError
from potluck.perf import shipped
from potluck.perf.step_timer import Floats, StepBatch

FORMAT, OWN_FORMAT = "potluck.engines", "potluck.cluster"


@dataclass(frozen=True, slots=True)
class EngineHost:
    """The host's part of a step."""

    fixed_s: float
    sequence_s: float = 0.0
    launch_s: float = 0.0
    """Of one layer of a step that holds a chunk of a prompt: the least that it takes."""
    request_s: float = 0.0
    """Of a request, outside of steps and before its first token: HTTP, tokenising, queueing, detokenising."""

    @property
    def launching(self) -> EngineHost:
        """What of it grows with the layers of a stage: the rest is spent once a step."""
        return EngineHost(0.0, 0.0, self.launch_s)

    def step_s(self, batch: StepBatch) -> Floats:
        """What comes on top of the GPU's time."""
        taken: Floats = self.fixed_s + self.sequence_s * batch.sequences
        return taken

    def whole_s(self, gpu_s: Floats, batch: StepBatch, layers: int) -> Floats:
        """A step of so many layers, of which the GPU works so long; nothing where nobody has a token."""
        sequences = batch.sequences
        total = gpu_s + self.fixed_s + self.sequence_s * sequences
        if self.launch_s > 0:
            np.maximum(total, (sequences > batch.decodes) * (self.launch_s * layers), out=total)
        idle = sequences == 0
        if idle.any():
            total[idle] = 0.0
        return total


NO_HOST = EngineHost(0.0)


@dataclass(frozen=True, slots=True)
class BenchClient:
    """How a benchmark's requests come."""

    burst: float
    """Share of requests that find the prompts of all others before them."""
    ahead: float
    """Prompts that the others find."""
    request_s: float
    """What a request takes before and after the engine."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    """What was fitted to the runs of one version of an engine; an empty one is any that nobody saw."""

    engine: str
    version: str
    kind: Literal["dense", "experts"]
    runs: int
    host: EngineHost
    client: BenchClient
    experts: float = 1.0
    """How many times as long as vLLM's, which were measured, its routed experts take; on GPUs with such kernels."""


@lru_cache(maxsize=1)
def engines() -> tuple[EngineFit, ...]:
    """All that were fitted."""
    return loads(tuple[EngineFit, ...], shipped("engines.json"), format_name=FORMAT, version=1)


def hosts() -> dict[str, EngineHost]:
    """By engine: of a version that nobody saw."""
    unseen = (item for item in engines() if item.kind == "dense" and not item.version)
    return {item.engine: replace(item.host, request_s=item.client.request_s) for item in unseen}


@dataclass(frozen=True, slots=True)
class OwnCluster:
    """What was fitted to runs of one's own, in place of what ships."""

    host: EngineHost
    links: dict[str, float] = field(default_factory=dict)
    """By kind of `NodeNetwork`: how many times as long as measured elsewhere collectives take."""
    runs: int = 0
    experts: float = 1.0
    """How many times as long as measured elsewhere routed experts take."""


def own_path() -> Path | None:
    """`$XDG_CONFIG_HOME/potluck/cluster.json` or `~/.config/potluck/cluster.json`; None without a home."""
    chosen = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        folder = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".config"
    except RuntimeError:
        return None
    return folder / "potluck" / "cluster.json"


@lru_cache(maxsize=1)
def own_cluster() -> OwnCluster | None:
    """What `potluck calibrate` kept; None where it did not."""
    path = own_path()
    if path is None or not path.is_file():
        return None
    try:
        return loads(OwnCluster, path.read_text(encoding="utf-8"), format_name=OWN_FORMAT, version=1)
    except (PotluckError, OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"is not what `potluck calibrate` writes ({error}); remove it") from error


def usual_host() -> EngineHost:
    cluster = own_cluster()
    return hosts()["vllm"] if cluster is None else cluster.host


DEFAULT_HOST = usual_host()

"""What must be alike at both ends of a hand-over, and which vLLM this was tried with.

The fingerprint (`kv/handles.py`) is of the model with its weights, the format of its cache, and which part of it
a worker has. Sizes and orders of blocks are no part of it: what crosses does not depend on them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from potluck.core.errors import InputError
from potluck.kv.handles import IDLE_KEYS, directory_mark, fingerprint_of
from potluck.vllm import TESTED
from potluck.vllm.vllm_blocks import VllmLayer

LAYER = re.compile(r"\.(\d+)\.")


def check_version(found: str, *, anyway: bool = False) -> str:
    """A line of warning, or nothing; InputError for a vLLM that this was not tried with."""
    if found.split("+")[0] in TESTED:
        return ""
    line = f"this connector was tried with {', '.join(TESTED)}, not with {found}"
    if not anyway:
        raise InputError("vLLM", f'{line}; to try, set "any_version": true in kv_connector_extra_config')
    return line


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Which part of a model a worker has."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def rank(self) -> int:
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def size(self) -> int:
        return self.stages * self.tensor_size


def mark_of(model: str, revision: str | None, config: Mapping[str, object], overrides: object) -> str:
    """A model's directory in short, as every engine has it; of one that is not a directory, its name and settings.

    `overrides`: what vLLM was told to read otherwise than the configuration says.
    """
    directory = Path(model)
    if directory.is_dir():
        mark = directory_mark(directory)
        return _digest([mark, overrides]) if overrides else mark
    kept = {key: value for key, value in config.items() if key not in IDLE_KEYS}
    return _digest([model, revision or "main", kept])


def fingerprint(
    mark: str, share: ModelShard, layers: Mapping[int, VllmLayer], *, all_of_windows: bool = False
) -> str:
    """Of one worker. `all_of_windows`: vLLM keeps them as if they were none, so more crosses."""
    dtypes = sorted({layer.shape.dtype for layer in layers.values()})
    said = []
    if share.size > 1:
        said.append(f"tensor {share.tensor_rank + 1}/{share.tensor_size}")
        said.append(f"stage {share.stage + 1}/{share.stages}")
    if share.stages > 1:
        said.append(f"layers {min(layers)}-{max(layers)}")
    if all_of_windows:
        said.append("with all of its windows")
    return fingerprint_of(mark, "-".join(dtypes), " ".join(said))


def _digest(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


def layer_of(name: str) -> int:
    """The number in a layer's name, such as model.layers.3.self_attn.attn."""
    found = LAYER.findall(f"{name}.")
    if len(found) != 1:
        raise InputError("vLLM", f"has a layer {name!r}, in whose name there is not one number")
    return int(found[0])

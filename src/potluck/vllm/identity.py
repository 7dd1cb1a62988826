"""What must be alike at both ends of a hand-over, and which vLLM this was tried with.

The fingerprint is of the model with its weights, the format of its cache, and which part of it a worker has. Weights
are known by their files' names, sizes and samples of their bytes: to read them all would double the time to start.
Sizes and orders of blocks are no part of it: what crosses does not depend on them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from potluck.core.errors import InputError
from potluck.vllm.blocks import Blocks

TESTED = ("0.32.0",)
SAMPLES = 8
SAMPLE_BYTES = 1 << 14
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
class Share:
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


def weights_of(model: str, revision: str | None) -> str:
    """A model's directory in short; of one that is not a directory, its name."""
    directory = Path(model)
    if not directory.is_dir():
        return f"{model}@{revision or 'main'}"
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        if file.suffix in (".safetensors", ".bin", ".pt", ".gguf") and file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as source:
                for place in range(SAMPLES):
                    source.seek(max(0, size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                    digest.update(source.read(SAMPLE_BYTES))
    return digest.hexdigest()


def fingerprint(
    config: Mapping[str, object], weights: str, share: Share, layers: Mapping[int, Blocks]
) -> str:
    kept = {
        key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")
    }
    shapes = {
        layer: [blocks.shape.part, blocks.shape.heads, blocks.shape.width, blocks.shape.dtype]
        for layer, blocks in sorted(layers.items())
    }
    text = json.dumps([kept, weights, asdict(share), shapes], sort_keys=True, default=str)
    return f"vllm-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def layer_of(name: str) -> int:
    """The number in a layer's name, such as model.layers.3.self_attn.attn."""
    found = LAYER.findall(f"{name}.")
    if len(found) != 1:
        raise InputError("vLLM", f"has a layer {name!r}, in whose name there is not one number")
    return int(found[0])

"""What a model with its weights is called, so that caches of different ones never mix, whichever engine made them.

    3f2a...-float32                            all of a model, its cache in float32
    3f2a...-float32 tensor 1/2 stage 1/1       one worker's part of it

What stands before the space is the model: handles are bound to it, names of prefixes begin with it. A part must be
the same at both ends of a hand-over, and whoever asks for another is told which.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from potluck.core.errors import InputError

SAMPLES, SAMPLE_BYTES = 64, 4096
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
"""The first of these that there are files of."""
IDLE_KEYS = ("_name_or_path", "transformers_version")
"""Of a config.json: they say nothing of the model."""


def directory_mark(folder: Path) -> str:
    """Of config.json, and of samples spread over all weights: to read tens of gigabytes would take minutes."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        kept = {key: value for key, value in config.items() if key not in IDLE_KEYS}
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
        for path in _weights(folder):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as stream:
                for sample in range(SAMPLES):
                    stream.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
                    digest.update(stream.read(SAMPLE_BYTES))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except (ValueError, AttributeError) as error:
        raise InputError(str(path), "is not a JSON object") from error
    return digest.hexdigest()[:32]


def _weights(folder: Path) -> list[Path]:
    for suffix in WEIGHTS:
        if found := sorted(folder.glob(f"*{suffix}")):
            return found
    return []


def fingerprint_of(mark: str, dtype: str, part: str = "") -> str:
    return f"{mark}-{dtype} {part}".rstrip()


def model_in(fingerprint: str) -> str:
    return fingerprint.partition(" ")[0]


def part_in(fingerprint: str) -> str:
    return fingerprint.partition(" ")[2] or "whole"

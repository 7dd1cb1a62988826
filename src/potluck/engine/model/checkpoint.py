"""Tensors by name: from safetensors files, from a seed, or from memory.

Every layer asks a source for what it needs, by the name that Hugging Face gives it and with the shape that it must
have, and for nothing else: so a stage of a pipeline reads only its own layers, and a file that is cut short, damaged
or of another model is found out while loading, with one line that names the tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from potluck.core.codec import encode
from potluck.core.errors import FormatError, InputError
from potluck.engine.model.config import EngineModelConfig, read_config, write_config
from potluck.engine.model.fp8 import FP8, SUFFIXES, brought_back
from potluck.engine.model.fp8_scales import read_quantised
from potluck.kv.handles import directory_mark

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightSource(Protocol):
    """Where weights come from."""

    @property
    def fingerprint(self) -> str:
        """Text that differs when the weights do."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, *shape: int) -> Tensor: ...


class SafetensorsSource:
    """A Hugging Face directory: one safetensors file, or several with an index. Files are mapped, not read."""

    def __init__(self, directory: str | Path) -> None:
        self._folder = Path(directory)
        self._file_of = self._names()
        self._open: dict[str, Any] = {}
        self._blocks: list[tuple[int, int] | None] = []
        """Of scales: read from the configuration when first needed."""

    def _names(self) -> dict[str, str]:
        index = self._folder / INDEX
        if not index.is_file():
            return dict.fromkeys(self._reader(ONE_FILE).keys(), ONE_FILE)
        try:
            names: object = json.loads(index.read_text("utf-8")).get("weight_map")
        except (OSError, ValueError, AttributeError) as error:
            raise FormatError(str(index), f"is not an index of weights ({_line(error)})") from error
        if not isinstance(names, dict) or not all(_plain(file) for file in names.values()):
            raise FormatError(str(index), "weight_map must name a file in the same directory for each tensor")
        return {str(name): str(file) for name, file in names.items()}

    def _reader(self, file: str) -> Any:
        path = self._folder / file
        if not path.is_file():
            raise InputError(str(path), "is missing; a model's directory holds its weights as safetensors")
        try:
            return safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise FormatError(str(path), f"is not a whole safetensors file ({_line(error)})") from error

    @property
    def fingerprint(self) -> str:
        return directory_mark(self._folder)

    def describes(self, config: EngineModelConfig) -> bool:
        """Whether the configuration is that of the directory, and nothing else must be said of it."""
        return read_config(self._folder, config.model) == config

    def has(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int) -> Tensor:
        tensor, where = self._read(name)
        if tensor.dtype in FP8:
            scales = [name + suffix for suffix in SUFFIXES if self.has(name + suffix)]
            if not scales:
                raise FormatError(
                    where, f"{name} is {tensor.dtype}, and there is no {name}_scale to go with it"
                )
            tensor = brought_back(tensor, self._read(scales[0])[0], self._block(), name, where)
        return checked(tensor, name, shape, where)

    def _block(self) -> tuple[int, int] | None:
        if not self._blocks:
            found = read_quantised(self._folder)
            self._blocks = [None if found is None else found.block]
        return self._blocks[0]

    def _read(self, name: str) -> tuple[Tensor, str]:
        """A tensor as it is stored, and where that is."""
        file = self._file_of.get(name)
        if file is None:
            raise FormatError(str(self._folder), f"has no tensor {name}; is config.json of another model?")
        if file not in self._open:
            self._open[file] = self._reader(file)
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, RuntimeError, KeyError) as error:
            raise FormatError(str(self._folder / file), f"{name} cannot be read ({_line(error)})") from error
        return tensor, str(self._folder / file)


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Random weights; each tensor depends on the seed and its name alone, whoever asks for it and when."""

    seed: int
    spread: float = 0.5
    """Standard deviation times the square root of a matrix's inner width: near 1 keeps activations alive."""

    @property
    def fingerprint(self) -> str:
        return f"seed {self.seed} {self.spread!r}"

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> Tensor:
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        values = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "A_log", "dt_bias")):  # norms near 1; decays of every pace
            return values * 0.1 if name.endswith("A_log") else 1 + values * 0.1
        if name.endswith(("bias",)):
            return values * 0.1
        if name.endswith("embed_tokens.weight"):
            return values
        return values * float(self.spread * 2 / shape[-1] ** 0.5)


@dataclass(frozen=True, slots=True)
class InMemorySource:
    """Tensors at hand, such as those that were just trained."""

    tensors: Mapping[str, Tensor]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self.tensors:
            raise FormatError("weights", f"have no tensor {name}")
        return checked(self.tensors[name].detach(), name, shape, "weights")


def checked(tensor: Tensor, name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """The tensor, if it has the shape that the configuration asks for and holds numbers."""
    if tuple(tensor.shape) != shape:
        raise FormatError(where, f"{name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
    if not tensor.is_floating_point():
        raise FormatError(where, f"{name} is {tensor.dtype}; quantised weights cannot be run")
    if not bool(torch.isfinite(tensor).all()):
        raise FormatError(where, f"{name} has values that are not finite; the file is damaged")
    return tensor


def fingerprint(config: EngineModelConfig, source: WeightSource) -> str:
    """Names a model with its weights: caches of different ones never mix. That of a directory is the same for all
    engines that run it."""
    if isinstance(source, SafetensorsSource) and source.describes(config):
        return source.fingerprint
    text = json.dumps(encode(config), sort_keys=True) + source.fingerprint
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def save(directory: str | Path, config: EngineModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """A directory of our own kind, which `read_config` and `SafetensorsSource` read."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    write_config(directory, config)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        Path(directory, ONE_FILE),
    )


def _plain(file: object) -> bool:
    """A bare file name, so that an index cannot point outside its directory."""
    return isinstance(file, str) and Path(file).name == file and file not in ("", "..")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]

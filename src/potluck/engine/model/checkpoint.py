"""Tensors by name: from safetensors files, or from a seed.

Every layer asks a source for what it needs, by the name that Hugging Face gives it and with the shape that it must
have, and for nothing else: so a file that is cut short, damaged or of another model is found out while loading, with
one line that names the tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from potluck.core.codec import encode
from potluck.core.errors import FormatError, InputError
from potluck.core.values.model import DenseFfn, FullAttention, Model
from potluck.engine.model.config import EngineModelConfig, read_config, read_quantised, write_config
from potluck.kv.handles import directory_mark

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FUSED = ("phi3",)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SUFFIXES = ("_scale_inv", "_scale")


class WeightSource(Protocol):
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
            quantised = read_quantised(self._folder)
            self._blocks = [None if quantised is None else quantised.block]
        return self._blocks[0]

    def _read(self, name: str) -> tuple[Tensor, str]:
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


def checked(tensor: Tensor, name: str, shape: tuple[int, ...], where: str) -> Tensor:
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


def brought_back(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None, name: str, where: str
) -> Tensor:
    """The numbers that 8-bit floats stand for, in float32."""
    scale = scale.float()
    if not bool(torch.isfinite(scale).all()):
        raise FormatError(where, f"the scale of {name} is not finite; the file is damaged")
    if scale.numel() == 1:
        return weight.float() * scale.reshape(())
    rows = weight.shape[0]
    if scale.numel() == rows and scale.shape[0] == rows:
        return weight.float() * scale.reshape(rows, *[1] * (weight.dim() - 1))
    if weight.dim() == 2 and scale.dim() == 2:
        high, wide = block or (-(-rows // scale.shape[0]), -(-weight.shape[1] // scale.shape[1]))
        expected = (-(-rows // high), -(-weight.shape[1] // wide))
        if tuple(scale.shape) == expected and (block is not None or _even(weight, scale)):
            whole = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, : weight.shape[1]]
            return weight.float() * whole
    raise FormatError(
        where, f"the scale of {name} has shape {list(scale.shape)}, which does not fit {list(weight.shape)}"
    )


def _even(weight: Tensor, scale: Tensor) -> bool:
    return weight.shape[0] % scale.shape[0] == 0 and weight.shape[1] % scale.shape[1] == 0


@dataclass(frozen=True, slots=True)
class SplitSource:
    """A source whose files have `qkv_proj` and `gate_up_proj` each in one tensor (Phi-3): cuts the rows out."""

    whole: WeightSource
    model: Model

    @property
    def fingerprint(self) -> str:
        return self.whole.fingerprint

    def has(self, name: str) -> bool:
        part = self._part(name)
        return self.whole.has(name if part is None else part[0])

    def take(self, name: str, *shape: int) -> Tensor:
        part = self._part(name)
        if part is None:
            return self.whole.take(name, *shape)
        fused, sizes, place = part
        tensor = self.whole.take(fused, sum(sizes), *shape[1:])
        first = sum(sizes[:place])
        return tensor[first : first + sizes[place]]

    def _part(self, name: str) -> tuple[str, tuple[int, ...], int] | None:
        """(the tensor with all of them, rows of each, which of them it is)"""
        words = name.split(".")  # model.layers.3.self_attn.q_proj.weight
        if len(words) != 6 or words[1] != "layers":
            return None
        layer, kind = self.model.layers[int(words[2])], words[4]
        if isinstance(layer.attention, FullAttention) and kind in ("q_proj", "k_proj", "v_proj"):
            heads, kv_heads, dim = layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim
            sizes: tuple[int, ...] = (heads * dim, kv_heads * dim, kv_heads * dim)
            return name.replace(kind, "qkv_proj"), sizes, "qkv".index(kind[0])
        if isinstance(layer.ffn, DenseFfn) and kind in ("gate_proj", "up_proj"):
            sizes = (layer.ffn.intermediate,) * 2
            return name.replace(kind, "gate_up_proj"), sizes, ("gate_proj", "up_proj").index(kind)
        return None


def parted(source: WeightSource, config: EngineModelConfig) -> WeightSource:
    return SplitSource(source, config.model) if config.family in FUSED else source


@dataclass(frozen=True, slots=True)
class LayerLoader:
    """What layers are built with: a source of tensors, a prefix, and where the tensors shall live."""

    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""
    norm_plus_one: bool = False

    def under(self, name: str) -> LayerLoader:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.source.has(self.prefix + name)

    def take(self, name: str, *shape: int) -> Tensor:
        return self.source.take(self.prefix + name, *shape).to(self.device, self.dtype)

    def norm(self, name: str, size: int) -> Tensor:
        """A norm's weight, which some models store as the difference from 1."""
        weight = self.take(name, size)
        return weight + 1 if self.norm_plus_one else weight

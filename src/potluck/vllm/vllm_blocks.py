"""How a layer's keys and values lie in vLLM's blocks, and how they cross: tokens x 2 x heads x width, in their order.

What crosses says nothing of blocks, so sender and receiver may have blocks of unlike sizes and orders, and codecs see
keys and values as they are. vLLM has a layer as (blocks, heads, tokens of a block, content), whatever the strides.

`PlainBlocks`: content is a token's key and then its value (GPUs), or one latent.
`PackedBlocks`: a head's block is all its keys and then all its values, in an order that suits the processor's
instructions (CPUs). Which order that is, is found out: numbers are written by vLLM's own function, and then looked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.core.values.kv_layout import KvLayout, heads_of
from potluck.kv.assembly import first_needed
from potluck.kv.codec_layout import ITEM_BYTES, Part

if TYPE_CHECKING:
    from torch import Tensor
import hashlib
import json
import math
import re
from pathlib import Path

from potluck.core.values.vllm_version import VLLM_VERSION
from potluck.kv.handles import IDLE_KEYS, directory_mark

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Keys and values (tokens, heads, width) into a cache (blocks, heads, tokens, content) at slots."""
DIGIT, SMALL_DIGIT = 128, 4  # Numbers below this are exact in every format; in every one of 8 bits.
Scales = tuple[float, float]  # What numbers of 8 bits are multiplied by to be keys, and values.
ONE: Scales = (1.0, 1.0)
TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's KV: what a token of it is."""

    part: Part
    heads: int
    width: int
    dtype: str
    block_tokens: int

    def of(self, tokens: int, heads: int | None = None) -> tuple[int, ...]:
        heads = self.heads if heads is None else heads
        return (tokens, 2, heads, self.width) if self.part == "kv" else (tokens, heads, self.width)

    @property
    def token_bytes(self) -> int:
        return (2 if self.part == "kv" else 1) * self.heads * self.width * ITEM_BYTES[self.dtype]


Table = tuple[int, ...]  # A request's blocks, in the order of its tokens.
Tables = Sequence[Sequence[int]]
"""Of one request: its blocks, one list for each group of layers that vLLM gives blocks to together."""


class LayerBlocks(Protocol):
    """One layer's blocks."""

    shape: LayerShape
    device: torch.device

    def read(self, table: Table, first: int, stop: int) -> Tensor:
        """Tokens [first, stop) of a request whose blocks are these; a new tensor, on the blocks' device."""

    def write(self, table: Table, first: int, values: Tensor, head: int = 0) -> None:
        """Tokens from `first` on; of keys and values, some heads from `head` on."""


NO_BLOCK = 0  # Stands where vLLM has given a block back, or never took one: a window has passed it.


@dataclass(frozen=True, slots=True)
class VllmLayer:
    """A layer's blocks, and which of a request's tables they are in."""

    blocks: LayerBlocks
    group: int = 0
    window: int | None = None  # Tokens that a query sees; None: all.
    keeps_all: bool = False  # Whether vLLM keeps those before the window too.
    head: int = 0  # The first of its KV heads, as the model counts them.
    scales: Scales = ONE

    @property
    def shape(self) -> LayerShape:
        return self.blocks.shape

    def first(self, start: int, stop: int, *, whole: bool = False) -> int:
        """The first token behind `start` that crosses in a hand-over up to `stop`; `whole`: windows or not."""
        return first_needed(start, stop, None if whole else self.window)

    def read(self, tables: Tables, first: int, stop: int) -> Tensor:
        return self.blocks.read(self._table(tables, first, stop), first, stop)

    def read_into(self, out: Tensor, tables: Tables, first: int, stop: int) -> None:
        """As `read`, without a tensor of its own where blocks can be read so."""
        gather, table = getattr(self.blocks, "gather", None), self._table(tables, first, stop)
        if gather is None or not gather(table, first, stop, out):
            out.copy_(self.blocks.read(table, first, stop))

    def write(self, tables: Tables, first: int, values: Tensor, head: int | None = None) -> None:
        """`head`: the first of the values' heads, as the model counts them."""
        place = 0 if head is None else head - self.head
        self.blocks.write(self._table(tables, first, first + len(values)), first, values, place)

    @property
    def windowed(self) -> bool:
        """Whether vLLM keeps some of the latest tokens alone."""
        return self.window is not None and not self.keeps_all and self.shape.part != "memory"

    def _table(self, tables: Tables, first: int, stop: int) -> Table:
        table, size = tables[self.group], self.shape.block_tokens
        if self.shape.part == "memory":
            return tuple(table)
        used = table[first // size : -(-stop // size)]
        if len(used) * size < stop - first // size * size or NO_BLOCK in used:
            raise InputError("vLLM", f"holds no blocks for all of the tokens [{first}, {stop})")
        return tuple(table)


@lru_cache(maxsize=64)
def slots(table: Table, first: int, stop: int, size: int, pinned: bool) -> Tensor:
    """Each token's block and its place in that, 2 x tokens. All layers ask for the same, one after the other."""
    places = torch.arange(first, stop)
    result = torch.stack((torch.tensor(table, dtype=torch.long)[places // size], places % size))
    return result.pin_memory() if pinned else result


def scaled(values: Tensor, scales: Scales, *, down: bool = False) -> Tensor:
    """Keys and values (tokens, 2, heads, width), multiplied, or divided."""
    if scales == ONE or values.dim() != 4:
        return values
    factors = torch.tensor(scales, device=values.device).view(1, 2, 1, 1)
    return values.float() / factors if down else values.float() * factors


class PlainBlocks:
    def __init__(self, cache: Tensor, part: Part, dtype: str = "", scales: Scales = ONE) -> None:
        _, heads, tokens, content = cache.shape
        width = content // 2 if part == "kv" else content
        self.shape = LayerShape(part, heads, width, dtype or format_of(cache), tokens)
        self._dtype = TORCH[self.shape.dtype]
        # Numbers of 8 bits are only moved: few operations know them.
        self._cache = cache.view(torch.uint8) if self._dtype.itemsize == 1 else cache
        self.device, self._scales = cache.device, scales
        self._gathers = cache.is_cuda and part == "kv" and cache.stride(3) == 1

    def read(self, table: Table, first: int, stop: int) -> Tensor:
        if self._gathers:
            out = torch.empty(self.shape.of(stop - first), dtype=self._dtype, device=self.device)
            self.gather(table, first, stop, out)
            return out
        blocks, places = self._slots(table, first, stop)
        tensor = self._cache[blocks, :, places]
        return self._split(tensor).contiguous().view(self._dtype)

    def gather(self, table: Table, first: int, stop: int, out: Tensor) -> bool:
        """Read into `out`, in one go; whether that is possible."""
        if self._gathers:
            from potluck.kv import gpu_kernels

            gpu_kernels.gather(self._cache, *self._slots(table, first, stop), out.view(self._cache.dtype))
        return self._gathers

    def write(self, table: Table, first: int, values: Tensor, head: int = 0) -> None:
        blocks, places = self._slots(table, first, first + len(values))
        values = values.to(self.device)
        if values.dtype != self._dtype:
            values = scaled(values, self._scales, down=True).to(self._dtype)
        if self.shape.part == "kv":
            values = values.permute(0, 2, 1, 3).reshape(len(values), values.shape[2], -1)
        stop = head + values.shape[1]
        self._cache[blocks, head:stop, places] = values.view(self._cache.dtype)

    def _split(self, tensor: Tensor) -> Tensor:
        if self.shape.part != "kv":
            return tensor
        return tensor.view(len(tensor), self.shape.heads, 2, self.shape.width).permute(0, 2, 1, 3)

    def _slots(self, table: Table, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Launched and not waited for: whoever computes calls this between two layers."""
        tensor = slots(table, first, stop, self.shape.block_tokens, self.device.type == "cuda")
        blocks, places = tensor.to(self.device, non_blocking=True)
        return blocks, places


class PackedBlocks:
    def __init__(self, cache: Tensor, write: Write, dtype: str = "", scales: Scales = ONE) -> None:
        self._scales = scales
        blocks, heads, tokens, content = cache.shape
        self.shape = LayerShape("kv", heads, content // 2, dtype or format_of(cache), tokens)
        self._cache, self._write, self.device = cache, write, cache.device
        self._halves = cache.view(blocks, heads, 2, tokens * content // 2)
        self._order = order(cache, write, dtype, scales)

    def read(self, table: Table, first: int, stop: int) -> Tensor:
        shape, size = self.shape, self.shape.block_tokens
        used = torch.tensor(table[first // size : -(-stop // size)], dtype=torch.long)
        halves = self._halves[used]
        tensors = [halves[:, :, half, self._order[half]] for half in (0, 1)]
        result = torch.stack(tensors, 1).view(len(used), 2, shape.heads, size, shape.width)
        result = result.permute(0, 3, 1, 2, 4).reshape(len(used) * size, 2, shape.heads, shape.width)
        skipped = first // size * size
        return result[first - skipped : stop - skipped].contiguous().view(TORCH[self.shape.dtype])

    def write(self, table: Table, first: int, values: Tensor, head: int = 0) -> None:
        blocks, places = slots(table, first, first + len(values), self.shape.block_tokens, False)
        at = blocks * self.shape.block_tokens + places
        if self._cache.dtype.itemsize == 1:  # vLLM's own function makes them, out of larger ones
            values = scaled(values.float(), self._scales if values.dtype.itemsize == 1 else ONE)
        else:
            values = values.to(self._cache.dtype)
        cache = self._cache[:, head : head + values.shape[2]]
        self._write(values[:, 0].contiguous(), values[:, 1].contiguous(), cache, at)


Sections = tuple[int, tuple[int, ...]]
"""The dimension of a state by which tensor parallelism cuts it, and the parts of that dimension that are cut each."""


def state_sections(kind: str, shapes: Sequence[Sequence[int]], dim_first: bool) -> tuple[Sections, ...]:
    """Of each of a layer's states, without blocks; none where it is not known. `kind`: vLLM's mamba_type.

    What a convolution sees is several projections beside each other, each cut by itself.
    """
    channels = 0 if dim_first else 1
    if kind == "LINEAR":
        return tuple((0, (shape[0],)) for shape in shapes)
    if kind == "SHORT_CONV" and len(shapes) == 1:
        return ((channels, (shapes[0][channels],)),)
    if kind == "MAMBA1" and len(shapes) == 2:
        return ((channels, (shapes[0][channels],)), (0, (shapes[1][0],)))
    if kind in ("MAMBA2", "GDN_ATTN") and len(shapes) == 2:
        own = shapes[1][0] * shapes[1][1]
        shared, odd = divmod(shapes[0][channels] - own, 2)
        if odd or shared <= 0 or shared % shapes[1][2]:
            return ()
        parts = (own, shared, shared) if kind == "MAMBA2" else (shared, shared, own)
        return ((channels, parts), (0, (shapes[1][0],)))
    return ()


def state_heads(kind: str, shapes: Sequence[Sequence[int]], sections: Sequence[Sections], heads: int) -> int:
    """`heads` where states can be cut into as many parts that need nothing of each other, else 1."""
    whole = [size for _, sizes in sections for size in sizes]
    if kind in ("MAMBA2", "GDN_ATTN") and sections:
        # The heads of the memory, and the groups of them that share a projection.
        whole += [shapes[1][0], sections[0][1][1] // shapes[1][2]]
    return heads if whole and all(size % heads == 0 for size in whole) else 1


class StateBlocks:
    """What a recurrent layer has instead of keys and values: a state of all tokens so far, in several tensors. It
    crosses as the bytes that it is, head by head, as if it were the last token's."""

    def __init__(
        self,
        states: Sequence[Tensor],
        kept: str = "none",
        block_tokens: int = 1,
        ahead: int = 0,
        cut: tuple[int, tuple[Sections, ...]] = (1, ()),
    ) -> None:
        """`kept`: vLLM's mamba_cache_mode; `ahead`: blocks behind the one in use, for tokens that are guessed;
        `cut`: KV heads that it is cut like, and where."""
        self._states, self._kept, self._block_tokens, self._ahead = states, kept, block_tokens, ahead
        heads, sections = cut
        self._sections = sections or tuple((0, (state.shape[1],)) for state in states)
        width = sum(state[0].nbytes for state in states) // heads
        self.shape, self.device = LayerShape("memory", heads, width, "uint8", 1), states[0].device

    def read(self, table: Table, first: int, stop: int) -> Tensor:
        rows = [
            part.reshape(self.shape.heads, -1).contiguous().view(torch.uint8)
            for part in self._parts(self._block(table, stop))
        ]
        return torch.cat(rows, dim=1).view(self.shape.of(1))

    def write(self, table: Table, first: int, values: Tensor, head: int = 0) -> None:
        rows, count = values.to(self.device)[0], values.shape[1]
        for part in self._parts(self._block(table, first + 1)):
            wide = part.shape[0] // self.shape.heads
            target = part[head * wide : (head + count) * wide]
            size = target.numel() * target.element_size() // count
            target.copy_(rows[:, :size].clone().view(-1).view(part.dtype).view(target.shape))  # aligned
            rows = rows[:, size:]

    def _parts(self, block: int) -> Iterator[Tensor]:
        """The parts of a block's states, each with what is cut as its first dimension."""
        for state, (dimension, sizes) in zip(self._states, self._sections, strict=True):
            yield from state[block].movedim(dimension, 0).split(sizes)

    def _block(self, table: Table, tokens: int) -> int:
        """The block with the state after so many tokens."""
        place = (tokens - 1) // self._block_tokens if self._kept == "all" else len(table) - 1
        if self._kept != "all":
            place -= min(self._ahead, len(table) - 1)
        if not 0 <= place < len(table) or table[place] == NO_BLOCK:
            raise InputError("vLLM", f"holds no state after {tokens} tokens")
        return table[place]


def order(cache: Tensor, write: Write, dtype: str = "", scales: Scales = ONE) -> tuple[Tensor, Tensor]:
    """Where a block's keys, and its values, are found, token by token: two lists of places in half a head's block."""
    _, heads, tokens, content = cache.shape
    width = content // 2
    number = torch.arange(tokens * width).view(tokens, 1, width).expand(tokens, heads, width)
    tensor = torch.zeros(2, tokens * width, dtype=torch.long)
    read_as = TORCH[dtype] if dtype else cache.dtype
    base, as_written = (SMALL_DIGIT, torch.float32) if read_as.itemsize == 1 else (DIGIT, cache.dtype)
    digits = 1
    while digits < tokens * width:
        trial = torch.zeros(2, heads, tokens, content, dtype=cache.dtype)
        digit = (number // digits % base).to(as_written).contiguous()
        keys, values = (digit * scale for scale in scales)
        write(keys, values, trial, torch.arange(tokens, 2 * tokens))
        tensor += trial[1].view(read_as).view(heads, 2, -1)[-1].float().round().long() * digits
        digits *= base
    if not all(torch.equal(half.sort().values, torch.arange(tokens * width)) for half in tensor):
        raise InputError("vLLM", "lays out its blocks in a way that this connector cannot follow")
    return tensor[0].argsort(), tensor[1].argsort()


def format_of(cache: Tensor) -> str:
    name = str(cache.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise InputError("--kv-cache-dtype", f"{name} cannot be handed over; {', '.join(ITEM_BYTES)} can")
    return name


Keeps = Literal["window", "state"]
FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
WINDOWED = frozenset({"SlidingWindowSpec"})
RECURRENT = frozenset({"MambaSpec"})
EXACT = frozenset({"auto", "float16", "bfloat16", "float32", "half", "float"})
EIGHT_BITS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""vLLM's names for caches of 8 bits; they lie in memory as bytes."""


def check_caches(kv_cache_config: Any, cache_dtype: str) -> frozenset[Keeps]:
    """InputError for what cannot be handed over; what some layers keep in place of every token."""
    if cache_dtype not in EXACT and cache_dtype not in EIGHT_BITS:
        raise InputError(
            "--kv-cache-dtype",
            f"{cache_dtype} cannot be handed over; {', '.join(sorted(EXACT | EIGHT_BITS.keys()))} can",
        )
    kinds = {type(spec).__name__ for _, _, spec in _specs(kv_cache_config)}
    unknown = sorted(kinds - FULL - WINDOWED - RECURRENT)
    if unknown:
        raise InputError(
            "model",
            f"has caches of {', '.join(unknown)}; only models whose layers all have full attention, latents, a "
            "sliding window or a recurrent state can be handed over by this connector",
        )
    keeps: dict[Keeps, frozenset[str]] = {"window": WINDOWED, "state": RECURRENT}
    return frozenset(name for name, specs in keeps.items() if kinds & specs)


def layers_of(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, config: Any, share: ModelShard
) -> dict[int, VllmLayer]:
    """By their numbers in the model."""
    context = config.compilation_config.static_forward_context
    dtype = EIGHT_BITS.get(str(config.cache_config.cache_dtype), "")
    if dtype and getattr(config.cache_config, "calculate_kv_scales", False):
        raise InputError("--calculate-kv-scales", "makes scales that no other engine knows; leave it out")
    specs = {name: (group, spec) for group, name, spec in _specs(kv_cache_config)}
    layers: dict[int, VllmLayer] = {}
    for name, cache in kv_caches.items():
        number = layer_of(name)
        if number in layers:
            raise InputError("vLLM", f"has two caches for layer {number}; that cannot be handed over")
        if name not in specs:
            raise InputError("vLLM", f"has a cache of {name}, which is in none of its groups")
        group, spec = specs[name]
        if type(spec).__name__ in RECURRENT:
            state = _state(cache, spec, share.heads // share.tensor_size)
            head = share.tensor_rank * state.shape.heads if state.shape.heads > 1 else share.tensor_rank
            layers[number] = VllmLayer(state, group, LAST, head=head)
            continue
        window = getattr(spec, "sliding_window", None)
        latent = config.model_config.use_mla
        scales = _scales(context[name]) if dtype else ONE
        if latent and scales != ONE:
            raise InputError("--kv-cache-dtype", "latents of 8 bits with scales cannot be handed over")
        blocks = _blocks(cache, int(spec.block_size), context[name], (dtype, scales), latent=latent)
        first, stop = (0, 1) if latent else heads_of(share.heads, share.tensor_size, share.tensor_rank)
        if not latent and stop - first != blocks.shape.heads:
            raise InputError(
                "vLLM", f"has {blocks.shape.heads} KV heads in layer {number}, expected {stop - first}"
            )
        keeps_all = bool(window) and type(spec).__name__ not in WINDOWED
        layers[number] = VllmLayer(blocks, group, int(window) if window else None, keeps_all, first, scales)
    return layers


def _specs(kv_cache_config: Any) -> Iterator[tuple[int, str, Any]]:
    """(group, layer, what is kept of it)"""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    for number, group in enumerate(groups):
        item = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            yield number, name, group.kv_cache_spec if item is None else item[name]


LAST = 2  # A window in which a query sees the token before it: of a state, what is there after that one.


def _state(cache: Any, spec: Any, heads: int) -> StateBlocks:
    """`heads`: KV heads of this worker; none where several workers have the same."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    states = list(cache) if isinstance(cache, list | tuple) else _unpacked(cache, spec)
    kept, ahead = str(spec.mamba_cache_mode), int(spec.num_speculative_blocks)
    kind, shapes = str(spec.mamba_type.name), [state.shape[1:] for state in states]
    sections = state_sections(kind, shapes, is_conv_state_dim_first())
    cut = (state_heads(kind, shapes, sections, max(1, heads)), sections)
    return StateBlocks(states, kept, int(spec.block_size), ahead, cut)


def _unpacked(cache: Tensor, spec: Any) -> list[Tensor]:
    """The states of blocks that vLLM has as rows of bytes, one behind the other; one that it has as it is."""
    if [tuple(cache.shape[1:])] == [tuple(shape) for shape in spec.shapes]:
        return [cache]
    rows, states = cache.view(len(cache), -1).view(torch.uint8), []
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        states.append(rows[:, :size].view(dtype).view(len(cache), *shape))
        rows = rows[:, size:]
    return states


def _scales(layer: Any) -> Scales:
    return float(getattr(layer, "_k_scale_float", 1.0)), float(getattr(layer, "_v_scale_float", 1.0))


def _blocks(
    cache: Tensor, block_tokens: int, layer: Any, kept_as: tuple[str, Scales], *, latent: bool
) -> LayerBlocks:
    if cache.dim() != 4 or cache.shape[2] != block_tokens:
        raise InputError(
            "vLLM",
            f"has blocks of shape {list(cache.shape)}, expected blocks x heads x {block_tokens} tokens x content",
        )
    isa = getattr(layer, "isa", None)
    if isa is None:
        return PlainBlocks(cache, "latent" if latent else "kv", *kept_as)
    from vllm import _custom_ops as ops

    kind = str(getattr(layer, "kv_cache_dtype", "auto"))

    def write(keys: Tensor, values: Tensor, into: Tensor, slots: Tensor) -> None:
        blocks, heads, tokens, _ = into.shape
        halves = into.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, *kept_as[1], kind)

    return PackedBlocks(cache, write, *kept_as)


LAYER = re.compile(r"\.(\d+)\.")


def check_version(text: str, *, anyway: bool = False) -> str:
    """A line of warning, or nothing; InputError for a release of vLLM other than VLLM_VERSION."""
    if text.split("+")[0] == VLLM_VERSION:
        return ""
    line = f"this connector was tested with {VLLM_VERSION}, not with {text}"
    if not anyway:
        raise InputError("vLLM", f'{line}; to try, set "any_version": true in kv_connector_extra_config')
    return line


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Which part of a model a worker has."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    stages: tuple[int, ...] = ()  # Layers of each.
    heads: int = 1  # KV heads of the whole model; 1 where it has latents.
    states: bool = False  # Whether some of the model's layers are recurrent, here or on another stage.

    @property
    def rank(self) -> int:
        return self.stage * self.tensor_size + self.tensor_rank

    @property
    def layout(self) -> KvLayout:
        return KvLayout(self.tensor_size, self.stages if len(self.stages) > 1 else ())


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


def _digest(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


def layer_of(name: str) -> int:
    """The number in a layer's name, such as model.layers.3.self_attn.attn."""
    result = LAYER.findall(f"{name}.")
    if len(result) != 1:
        raise InputError("vLLM", f"has a layer {name!r}, in whose name there is not one number")
    return int(result[0])

"""A step of a batch: tokens or hidden states in, hidden states or logits out.

A runner has a range of a model's layers, their cache, and the tables that say what lies where; it knows nothing of
requests. `DecodeGraphs` replays decode steps as CUDA graphs; `LocalExecutor` is a runner as the loop sees it.

    row = runner.tables.open()
    runner.tables.grow(row, len(prompt))
    logits = runner.step([SequenceWork(row, 0, prompt)])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import DenseFfn, LatentAttention, LinearAttention, Model
from potluck.engine.compute.batch_layout import (
    BatchLayout,
    GroupStep,
    KeyLocations,
    check,
    lay_out,
    linear_step,
)
from potluck.engine.compute.executor import RunnerSize, SequenceWork
from potluck.engine.memory.block_tables import BlockTables
from potluck.engine.memory.kv_cache import LayerCaches, groups_of
from potluck.engine.model.checkpoint import LayerLoader, WeightSource, fingerprint, parted
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.stack import OnLayer, Stack
from potluck.engine.numbers.exact import exactness


class Runner:
    """Layers [first, last) of a model, ready to run. All its state is in `tables` and `cache`."""

    def __init__(
        self,
        config: EngineModelConfig,
        source: WeightSource,
        size: RunnerSize,
        *,
        first: int = 0,
        last: int | None = None,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        model = config.model
        last = model.layer_count if last is None else last
        self.device = torch.device(device)
        # A CPU has no fast arithmetic in 16 bits to speak of, and float32 is what exact.py is about.
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else getattr(torch, config.dtype))
        self.config = config
        self.fingerprint = fingerprint(config, source)
        latent = any(isinstance(layer.attention, LatentAttention) for layer in model.layers[first:last])
        self.exact = exactness(self.device, self.dtype, latent=latent)
        if size.max_tokens > model.max_context_tokens:
            raise InputError(
                "max_tokens", f"{size.max_tokens} is more than the model's {model.max_context_tokens}"
            )
        with torch.inference_mode():
            load = LayerLoader(
                parted(source, config), self.device, self.dtype, norm_plus_one=config.norm_plus_one
            )
            self.stack = Stack(config, load, first, last)
            self.tables = BlockTables(groups_of(model, first, last, size), size.rows, size.max_tokens)
            self.cache = LayerCaches(model, first, last, self.tables, self.device, self.dtype)
        kernels = {
            p.attention.conv_kernel
            for p in model.layers[first:last]
            if isinstance(p.attention, LinearAttention)
        }
        if len(kernels) > 1:
            raise InputError("conv_kernel", "linear layers with different convolutions cannot be run")
        self._taps = kernels.pop() if kernels else 0
        self._graphs = None
        if self.device.type == "cuda" and recordable(model, first, last):
            self._graphs = DecodeGraphs(self.stack, self.cache, self.tables, self._taps, self.device)

    @torch.inference_mode()
    def step(
        self, works: Sequence[SequenceWork], hidden: Tensor | None = None, on_layer: OnLayer | None = None
    ) -> Tensor:
        """The first stage of a pipeline takes tokens, the others `hidden`, the states [tokens, hidden] that the stage
        before returned for the same works; there a work's tokens are only counted. The last stage returns logits
        [rows asked for, vocabulary], work by work; the others hidden states."""
        vocab = self.config.model.vocab
        for work in works if self.stack.embeds else ():
            if min(work.tokens, default=0) < 0 or max(work.tokens, default=0) >= vocab:
                unknown = next(token for token in work.tokens if not 0 <= token < vocab)
                raise InputError("tokens", f"{unknown} is not in the vocabulary of {vocab}")
        if self._graphs is not None and hidden is None and on_layer is None and self._graphs.takes(works):
            check(works, self.tables)
            logits = self._graphs.run(works)
            for work in works:
                self.tables.advance(work.row, work.start + 1)
                self.tables.trim(work.row)
            return logits
        step = lay_out(works, self.tables, self._taps, self.cache.pieces, self.device, self.dtype)
        x = self._enter(step, hidden)
        if self._taps and step.begins:
            self.cache.clear_states(step.begins)
        for work in works:
            self.tables.advance(work.row, work.start + len(work.tokens))
        x = self.stack(x, step, self.cache, on_layer)
        for work in works:
            self.tables.trim(work.row)
        if not self.stack.has_head:
            return x if step.unpacking is None else x.index_select(0, step.unpacking)
        return self.stack.logits(x)

    def _enter(self, step: BatchLayout, hidden: Tensor | None) -> Tensor:
        if not self.stack.embeds:
            expected = (len(step.tokens), self.config.model.hidden)
            if hidden is None or tuple(hidden.shape) != expected:
                raise InputError(
                    "hidden", f"a later stage takes the states of the one before, {list(expected)}"
                )
            hidden = hidden.to(self.device, self.dtype)
            return hidden if step.packing is None else hidden.index_select(0, step.packing)
        if hidden is not None:
            raise InputError("hidden", "the first stage takes tokens")
        return self.stack.embed(step.tokens)


COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences for which a step is recorded, when it is first needed."""


def recordable(model: Model, first: int, last: int) -> bool:
    """Whether a step of the layers [first, last) always launches the same."""
    return (first, last) == (0, model.layer_count) and all(
        isinstance(layer.ffn, DenseFfn) and not isinstance(layer.attention, LatentAttention)
        for layer in model.layers
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a step of `count` sequences is told, as parts of one tensor."""

    all: Tensor
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    slots: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]

    @classmethod
    def of(cls, count: int, widths: Sequence[int], **how: Any) -> _Numbers:
        """`widths` are the blocks of a row, for each group."""
        whole = torch.zeros(count * (3 + sum(1 + width for width in widths)), dtype=torch.int64, **how)
        sizes = [count] * (3 + len(widths)) + [count * width for width in widths]
        tokens, positions, rows, *rest = torch.split(whole, sizes)
        slots, tables = tuple(rest[: len(widths)]), tuple(rest[len(widths) :])
        return cls(whole, tokens, positions, rows, slots, tuple(table.view(count, -1) for table in tables))


@dataclass(frozen=True, slots=True)
class _Recorded:
    host: _Numbers
    device: _Numbers
    step: BatchLayout
    logits: Tensor
    graph: torch.cuda.CUDAGraph | None


class DecodeGraphs:
    """Decode steps of a runner as CUDA graphs: recorded once for each number of sequences, then replayed.

    A graph's tensors stay where they are, so a step's numbers are copied into them in one go; sequences are filled up
    to the next recorded number by repeating the last one, to no effect. Without a GPU the same steps are run as they
    are, to check by.
    """

    def __init__(
        self, stack: Stack, cache: LayerCaches, tables: BlockTables, taps: int, device: torch.device
    ) -> None:
        self._stack, self._cache, self._tables = stack, cache, tables
        self._taps, self._device = taps, device
        self._recorded: dict[int, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.most = min(COUNTS[-1], tables.rows)

    def takes(self, works: Sequence[SequenceWork]) -> bool:
        return len(works) <= self.most and all(
            len(work.tokens) == 1 and work.start and work.logits == "last" for work in works
        )

    def run(self, works: Sequence[SequenceWork]) -> Tensor:
        """Logits, work by work; good until the next call. The works are checked already."""
        count = next(count for count in COUNTS if count >= len(works))
        recorded = self._recorded.get(count) or self._record(count, works)
        self._fill(recorded, works)
        if recorded.graph is None:
            return self._compute(recorded.step)[: len(works)]
        recorded.graph.replay()
        return recorded.logits[: len(works)]

    def _fill(self, recorded: _Recorded, works: Sequence[SequenceWork]) -> None:
        host = recorded.host
        spare = [works[-1]] * (len(host.tokens) - len(works))
        whole = [*works, *spare]
        rows, positions = np.array([work.row for work in whole]), np.array([work.start for work in whole])
        host.tokens.numpy()[:] = [work.tokens[0] for work in whole]
        host.positions.numpy()[:] = positions
        host.rows.numpy()[:] = rows
        blocks, places = np.divmod(positions, BLOCK_TOKENS)
        for group, (slots, own) in enumerate(zip(host.slots, host.tables, strict=True)):
            table = self._tables.table(group)
            slots.numpy()[:] = table[rows, blocks] * BLOCK_TOKENS + places
            own.numpy()[:] = table[rows]
        recorded.device.all.copy_(host.all, non_blocking=True)

    def _record(self, count: int, works: Sequence[SequenceWork]) -> _Recorded:
        gpu = self._device.type == "cuda"
        widths = [self._tables.table(group).shape[1] for group in range(len(self._tables.groups))]
        host = _Numbers.of(count, widths, pin_memory=gpu)
        device = _Numbers.of(count, widths, device=self._device)
        nothing, none = np.empty(0, np.int64), np.empty((0, 0), np.int64)
        step = BatchLayout(
            order=list(range(count)),
            tokens=device.tokens,
            positions=device.positions,
            groups=tuple(
                GroupStep(slots, (), nothing, none, KeyLocations(table, device.positions, group.window))
                for slots, table, group in zip(device.slots, device.tables, self._tables.groups, strict=True)
            ),
            linear=linear_step(device.rows, [1] * count, self._taps) if self._taps else None,
            wanted=None,
            begins=[],
            packing=None,
            unpacking=None,
            rows=nothing,
            places=nothing,
        )
        recorded = _Recorded(host, device, step, torch.empty(0), None)
        if gpu:
            recorded = self._capture(recorded, works)
        self._recorded[count] = recorded
        return recorded

    def _capture(self, recorded: _Recorded, works: Sequence[SequenceWork]) -> _Recorded:
        """Run the step once (what is compiled at first use must not be recorded), take its effect on states back,
        then record it."""
        self._fill(recorded, works)
        before = [(kept.conv.clone(), kept.memory.clone()) for kept in self._cache.states]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(recorded.step)
        torch.cuda.current_stream().wait_stream(stream)
        for kept, (conv, memory) in zip(self._cache.states, before, strict=True):
            kept.conv.copy_(conv)
            kept.memory.copy_(memory)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._compute(recorded.step)
        return replace(recorded, logits=logits, graph=graph)

    def _compute(self, step: BatchLayout) -> Tensor:
        return self._stack.logits(self._stack(self._stack.embed(step.tokens), step, self._cache, None))

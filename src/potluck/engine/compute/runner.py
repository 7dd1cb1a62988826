"""A step of a batch: tokens or hidden states in, hidden states or logits out.

A runner has a range of a model's layers, their cache, and the tables that say what lies where. Whoever drives it
(the engine's loop, with `core.replica.batch`) opens a row per sequence, grows it before each step, says what to
compute, and closes it. The runner knows nothing of requests.

    row = runner.tables.open()
    runner.tables.grow(row, len(prompt))
    logits = runner.step([Work(row, 0, prompt)])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.core.values.model import LatentAttention, LinearAttention
from potluck.engine.compute.batch_layout import BatchLayout, check, lay_out
from potluck.engine.compute.graphs import DecodeGraphs, recordable
from potluck.engine.compute.work import RunnerSize, SequenceWork
from potluck.engine.memory.block_tables import BlockTables
from potluck.engine.memory.kv_cache import LayerCaches, groups_of
from potluck.engine.model.checkpoint import WeightSource, fingerprint
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.fused_projections import parted
from potluck.engine.model.loading import LayerLoader
from potluck.engine.model.stack import OnLayer, Stack
from potluck.engine.numbers.row_padding import exactness
from potluck.kv.handles import fingerprint_of

__all__ = ["Runner", "RunnerSize", "SequenceWork"]


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
        name = str(self.dtype).removeprefix("torch.")
        self.fingerprint = fingerprint_of(fingerprint(config, source), name)
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
            groups = groups_of(
                model, first, last, blocks=size.blocks, rows=size.rows, max_chunk_tokens=size.max_chunk_tokens
            )
            self.tables = BlockTables(groups, size.rows, size.max_tokens)
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
        """Compute all works at once.

        The first stage of a pipeline takes tokens, the others `hidden`, the states [tokens, hidden] that the stage
        before returned for the same works in the same order; there a work's tokens are only counted. The last stage
        returns logits [rows asked for, vocabulary], work by work; the others hidden states.
        """
        vocab = self.config.model.vocab
        for work in works:
            if self.stack.embeds and not (
                min(work.tokens, default=0) >= 0 and max(work.tokens, default=0) < vocab
            ):
                raise InputError(
                    "tokens", f"{_stranger(work.tokens, vocab)} is not in the vocabulary of {vocab}"
                )
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


def _stranger(tokens: Sequence[int], vocab: int) -> int:
    return next(token for token in tokens if not 0 <= token < vocab)

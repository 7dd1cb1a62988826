"""A step of a batch: tokens in, logits out.

A runner has a model's layers, their cache, and the tables that say what lies where; it has no notion of requests.
`StepGraphs` replays small steps as CUDA graphs; `LocalExecutor` is a runner as the loop sees it.

    row = runner.tables.open()
    runner.tables.grow(row, len(prompt))
    logits = runner.step([SequenceWork(row, 0, prompt)])
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import InputError
from potluck.core.values.model import DenseFfn, LatentAttention, LinearAttention, Model
from potluck.engine.compute.batch_layout import (
    NOTHING,
    BatchLayout,
    PackedTokens,
    StepRoom,
    check,
    followed,
    joined,
    known,
    lay_out,
    linear_step,
    told,
    views_of,
    wanted_tokens,
)
from potluck.engine.compute.executor import RunnerSize, SequenceWork, last_drawn
from potluck.engine.memory.block_tables import BlockTables
from potluck.engine.memory.kv_cache import LayerCaches, groups_of
from potluck.engine.memory.pinned import PIECES, PinnedPool
from potluck.engine.model.checkpoint import LayerLoader, WeightSource, fingerprint, parted
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.model.stack import OnLayer, Stack
from potluck.engine.numbers import TILE_TOKENS
from potluck.engine.numbers.exact import exactness


class Runner:
    """A model, ready to run. All its state is in `tables` and `cache`."""

    def __init__(
        self,
        config: EngineModelConfig,
        source: WeightSource,
        size: RunnerSize,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        model = config.model
        self.device = torch.device(device)
        # A CPU has no fast arithmetic in 16 bits to speak of, and float32 is what exact.py is about.
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else getattr(torch, config.dtype))
        self.config = config
        self.fingerprint = fingerprint(config, source)
        latent = any(isinstance(layer.attention, LatentAttention) for layer in model.layers)
        self.exact = exactness(self.device, self.dtype, latent=latent)
        if size.max_tokens > model.max_context_tokens:
            raise InputError(
                "max_tokens", f"{size.max_tokens} is more than the model's {model.max_context_tokens}"
            )
        with torch.inference_mode():
            load = LayerLoader(
                parted(source, config), self.device, self.dtype, norm_plus_one=config.norm_plus_one
            )
            self.stack = Stack(config, load)
            self.tables = BlockTables(groups_of(model, size), size.rows, size.max_tokens)
            self.cache = LayerCaches(model, self.tables, self.device, self.dtype)
        kernels = {
            layer.attention.conv_kernel
            for layer in model.layers
            if isinstance(layer.attention, LinearAttention)
        }
        if len(kernels) > 1:
            raise InputError("conv_kernel", "linear layers with different convolutions cannot be run")
        self._taps = kernels.pop() if kernels else 0
        self.copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """For what goes to the host beside steps."""
        pieces = PIECES if self.copies else 0
        self.leaving, self.arriving = PinnedPool(pieces), PinnedPool(pieces)
        self._graphs = None
        if self.device.type == "cuda" and recordable(model):
            self._graphs = StepGraphs(self.stack, self.cache, self._taps)

    @torch.inference_mode()
    def step(self, works: Sequence[SequenceWork], on_layer: OnLayer | None = None) -> Tensor:
        """Compute the works; logits [rows asked for, vocabulary], work by work."""
        if self.device.index:
            torch.cuda.set_device(self.device)  # where kernels are launched, of this thread
        check(works, self.tables)
        self._check_tokens(works)
        if self._graphs is not None and on_layer is None and self._graphs.takes(works):
            logits = self._graphs.run(works)
            for work in works:
                self.tables.advance(work.row, work.start + len(work.tokens))
                self.tables.trim(work.row)
            return logits
        batch_layout = lay_out(works, self.cache, self._taps)
        x = self.stack.embed(known(batch_layout.tokens, self.cache))
        if self._taps and batch_layout.begins:
            self.cache.clear_states(batch_layout.begins)
        for work in works:
            self.tables.advance(work.row, work.start + len(work.tokens))
        x = self.stack(x, batch_layout, self.cache, on_layer)
        for work in works:
            self.tables.trim(work.row)
        return self.stack.logits(x)

    def replays(self, works: Sequence[SequenceWork]) -> bool:
        """Whether a step is one launch, in which nobody hears of layers."""
        return self._graphs is not None and self._graphs.takes(works)

    def recorded(self, chunk_tokens: int) -> list[tuple[int, int]]:
        """Steps that are recorded: how many single tokens, and how many tokens of a chunk of at most so many."""
        counts = [count for count in COUNTS if self._graphs is not None and count <= self._graphs.most]
        most = 0 if self._taps else min(MOST_TOKENS, chunk_tokens)
        sizes = range(most // SOME_TOKENS * SOME_TOKENS, 0, -SOME_TOKENS)
        chunks = [
            (count - 1, size - count + 1) for size in sizes for count in reversed(counts) if count < size
        ]
        return [(count, 0) for count in reversed(counts)] + chunks

    def _check_tokens(self, works: Sequence[SequenceWork]) -> None:
        vocab = self.config.model.vocab
        for work in works:
            low, high = min(work.tokens), max(work.tokens)
            if high >= vocab or (low < 0 and (low, high) != (last_drawn(work.row),) * 2):
                raise InputError("tokens", f"{min(low, 0) or high} is not in the vocabulary of {vocab}")


COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of sequences for which a step is recorded, when it is first needed."""
MOST_TOKENS, SOME_TOKENS, SOME_TILES = 1024, 64, 8
"""Of a recorded step with chunks: at most, and what they are rounded up to. Larger ones keep a GPU busy for longer
than it takes to launch them."""


def recordable(model: Model) -> bool:
    """Whether steps of a model launch the same kernels each time."""
    return all(
        isinstance(layer.ffn, DenseFfn) and not isinstance(layer.attention, LatentAttention)
        for layer in model.layers
    )


class StepGraphs:
    """Steps of a runner as CUDA graphs: recorded once for each shape, then replayed.

    A graph's tensors stay where they are, so a step's numbers are copied into them in one go, and all graphs write
    their logits to one place. Decode steps are filled up to the next recorded number of sequences by repeating the
    last one, to no effect; steps with chunks by tokens that nobody looks at, which linear layers could not tell from
    others. Without a GPU the same steps are run as they are, to check by.
    """

    def __init__(self, stack: Stack, cache: LayerCaches, taps: int) -> None:
        self._stack, self._cache, self._taps, self._device = stack, cache, taps, cache.device
        self._recorded: dict[StepRoom, tuple[BatchLayout, torch.cuda.CUDAGraph | None]] = {}
        tables = cache.tables
        self.most = min(COUNTS[-1], tables.rows)
        self._sequences = next(count for count in COUNTS if count >= self.most)
        groups = range(len(tables.groups))
        of_tokens = (2 + len(groups)) * (MOST_TOKENS + self._sequences) + 3 * (self._sequences + SOME_TILES)
        of_sequences = 4 + sum(2 + tables.table(group).shape[1] for group in groups)
        size = of_tokens + (self._sequences + 1) * of_sequences
        self._numbers = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._logits = torch.empty(0)
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def takes(self, works: Sequence[SequenceWork]) -> bool:
        if len(works) > self.most:
            return False
        if all(len(work.tokens) == 1 for work in works):
            return all(work.start and work.logits == "last" for work in works)
        few = sum(len(work.tokens) for work in works) <= MOST_TOKENS
        return few and not self._taps and all(work.logits != "all" for work in works)

    def run(self, works: Sequence[SequenceWork]) -> Tensor:
        """Logits, work by work; good until the next call. The works are checked already."""
        room, wanted, count = self._room(works), NOTHING, len(works)
        if room.tiles:
            order = sorted(range(count), key=lambda i: len(works[i].tokens) > 1)
            packed = PackedTokens.of([works[i] for i in order])
            wanted = wanted_tokens(works, order, packed.firsts)
            count = len(wanted)
        else:
            packed = PackedTokens.of([*works, *[works[-1]] * (room.works - count)])
        arrays = told(packed, self._cache.tables, wanted, room)
        whole = joined(arrays, self._device)
        self._numbers[: len(whole)].copy_(whole, non_blocking=True)
        if room not in self._recorded:
            batch_layout = self._step(room, arrays)
            self._recorded[room] = (
                batch_layout,
                self._record(batch_layout) if self._device.type == "cuda" else None,
            )
        batch_layout, graph = self._recorded[room]
        if graph is None:
            self._compute(batch_layout)
        else:
            graph.replay()
        return self._logits[:count]

    @staticmethod
    def _room(works: Sequence[SequenceWork]) -> StepRoom:
        count = next(count for count in COUNTS if count >= len(works))
        sizes = [len(work.tokens) for work in works]
        tiles = sum(-(-size // TILE_TOKENS) for size in sizes if size > 1)
        if not tiles:
            return StepRoom(count, count, 0)
        tokens = -(-sum(sizes) // SOME_TOKENS) * SOME_TOKENS
        return StepRoom(tokens, count, -(-tiles // SOME_TILES) * SOME_TILES)

    def _step(self, room: StepRoom, arrays: list[np.ndarray]) -> BatchLayout:
        views = views_of(self._numbers, arrays)
        views[-1] = self._numbers[views[-1].storage_offset() :]  # as many as there may be
        return BatchLayout(
            tokens=views[0],
            positions=views[1],
            groups=tuple(followed(views, self._cache.tables, room.works)),
            linear=linear_step(views[2], [1] * room.works, self._taps) if self._taps else None,
            wanted=views[3] if room.tiles else None,
            begins=[],
            rows=NOTHING,
            places=NOTHING,
        )

    def _record(self, batch_layout: BatchLayout) -> torch.cuda.CUDAGraph:
        """Run the step once (what is compiled at first use must not be recorded), take its effect on states back,
        then record it."""
        before = [
            (linear_states.conv.clone(), linear_states.memory.clone()) for linear_states in self._cache.states
        ]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(batch_layout)
        torch.cuda.current_stream().wait_stream(stream)
        for linear_states, (conv, memory) in zip(self._cache.states, before, strict=True):
            linear_states.conv.copy_(conv)
            linear_states.memory.copy_(memory)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._compute(batch_layout)
        return graph

    def _compute(self, batch_layout: BatchLayout) -> None:
        logits = self._stack.logits(
            self._stack(
                self._stack.embed(known(batch_layout.tokens, self._cache)), batch_layout, self._cache, None
            )
        )
        if not len(self._logits):
            self._logits = logits.new_empty(self._sequences, logits.shape[1])
        self._logits[: len(logits)] = logits

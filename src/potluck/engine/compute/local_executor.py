"""One process with the whole model: the executor that most engines run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.emulated import EmulatedNic, StepPacer
from potluck.engine.compute.executor import Executor, IncomingCache, RunnerSize, StepInputs
from potluck.engine.compute.handover import IncomingHandover, RowSlots, pack, read_out
from potluck.engine.compute.runner import Runner
from potluck.engine.compute.sample import draw, sent
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.codec_layout import Codec


class LocalExecutor(Executor):
    """A whole model in this process; with a pacer its steps last as long as those of the emulated GPU."""

    def __init__(
        self, runner: Runner, size: RunnerSize, pacer: StepPacer | None = None, nic: EmulatedNic | None = None
    ) -> None:
        self.runner, self.size, self.pacer = runner, size, pacer
        self._arrivals: dict[int, IncomingHandover] = {}
        self.nic = nic
        """For whoever sends its chunks over a network."""
        self.config, self.fingerprint, self.exact = runner.config, runner.fingerprint, runner.exact
        self.shapes = (*Executor.shapes, *runner.recorded(size.max_chunk_tokens))
        self.kv_dtype = str(runner.dtype).removeprefix("torch.")

    @property
    def ordered(self) -> bool:  # type: ignore[override]
        """A GPU's work is queued and goes on while the host makes the next step; a CPU has nothing to gain."""
        return self.runner.device.type == "cuda" and self.pacer is None

    def open(self) -> int:
        return self.runner.tables.open()

    def close(self, row: int) -> None:
        if (arrival := self._arrivals.pop(row, None)) is not None:
            arrival.end()
        self.runner.tables.close(row)

    def held(self, row: int) -> int:
        return self.runner.tables.lengths[row]

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        self.runner.tables.grow(row, tokens, since)

    def check(self) -> None:
        self.runner.tables.check()

    def begin(self, step: StepInputs) -> Callable[[], list[SampledToken]]:
        on_layer, pacer, draws = None, self.pacer, step.draws
        leaving: list[tuple[int, Callable[[], tuple[KvChunk, ...]]]] = []
        if step.exports and step.deliver is not None:
            send, layers = step.deliver, self.config.model.layer_count
            slots = {item.row: RowSlots(self.runner, item.row) for item in step.exports}

            def on_layer(layer: int) -> None:
                for item in step.exports:
                    chunks = read_out(slots[item.row], layer, item.start, item.stop, item.end, item.codec)
                    leaving.append((item.row, chunks))
                if pacer is not None:  # not before that part of the step would be done
                    pacer.reach((layer + 1) / layers)
                if not self.ordered:
                    deliver()

            def deliver() -> None:
                """Layer by layer; on a GPU while the step is awaited, and the next one is queued already."""
                for row, chunks in leaving:
                    if layer_chunks := chunks():
                        send(row, layer_chunks)
                leaving.clear()

        if pacer is not None:
            pacer.begin(step.works)
        logits = self.runner.step(step.works, on_layer=on_layer)
        land: Callable[[], list[SampledToken]] = list
        if draws:
            ways, places = [each.way for each in draws], [each.position for each in draws]
            tokens, land = draw(logits, ways, places, [each.edit for each in draws])
            if self.ordered:
                rows = [work.row for work in step.works if work.logits == "last"]
                with torch.inference_mode():
                    self.runner.cache.drawn.index_copy_(0, sent(rows, self.runner.device), tokens)
        if pacer is not None:
            pacer.end()
        if not leaving:
            return land

        def landed() -> list[SampledToken]:
            deliver()
            return land()

        return landed

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        return pack(self.runner, row, layer, start, stop)

    def exports(self, row: int, start: int, stop: int, codec: Codec = "raw") -> Iterator[tuple[KvChunk, ...]]:
        slots, layers = RowSlots(self.runner, row), range(self.config.model.layer_count)
        begun = [read_out(slots, layer, start, stop, None, codec) for layer in layers]
        return (chunks() for chunks in begun)

    def arrival(self, row: int, about: KvManifest, tokens: Sequence[int]) -> IncomingCache:
        self._arrivals[row] = arrival = IncomingHandover(self.runner, row, about, tokens)
        return arrival

    def notes(self) -> Mapping[str, float]:
        return {} if self.pacer is None else self.pacer.notes()

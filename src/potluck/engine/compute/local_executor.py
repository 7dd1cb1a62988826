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
        largest = min(size.max_chunk_tokens, size.max_tokens)
        # Kernels that only large steps have: to compile one takes seconds.
        launched = [(0, largest)] if runner.copies is not None and largest > 1 else []
        self.shapes = (*Executor.shapes, *launched, *runner.recorded(size.max_chunk_tokens))
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
        send, layers = step.deliver, range(self.config.model.layer_count)
        exports = step.exports if send is not None else ()
        slots = {item.row: RowSlots(self.runner, item.row) for item in exports}

        def read(some: Sequence[int]) -> None:
            for item in exports:
                parts = read_out(slots[item.row], some, item.start, item.stop, item.end, item.codec)
                leaving.extend((item.row, chunks) for chunks in parts)

        def deliver() -> None:
            """Layer by layer; on a GPU while the step is awaited, and the next one is queued already."""
            for row, chunks in leaving:
                if send is not None:
                    send(row, chunks())
            leaving.clear()

        # To launch a small step layer by layer takes longer than the step.
        behind = self.ordered and self.runner.replays(step.works)
        if exports and not behind:

            def on_layer(layer: int) -> None:
                read([layer])
                if pacer is not None:  # not before that part of the step would be done
                    pacer.reach((layer + 1) / len(layers))
                if not self.ordered:
                    deliver()

        if pacer is not None:
            pacer.begin(step.works)
        logits = self.runner.step(step.works, on_layer=on_layer)
        if behind:
            read(layers)
        land: Callable[[], list[SampledToken]] = list
        if draws:
            ways, places = [each.way for each in draws], [each.position for each in draws]
            tokens, land = draw(logits, ways, places, [each.edit for each in draws])
            if self.ordered:
                rows = [work.row for work in step.works if work.logits == "last"]
                with torch.inference_mode():
                    self.runner.cache.drawn.index_copy_(0, sent(rows, self.runner.device), tokens)
        elif self.runner.copies is not None:
            land = _done()
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
        begun = read_out(slots, layers, start, stop, None, codec)
        return (chunks() for chunks in begun)

    def arrival(self, row: int, manifest: KvManifest, tokens: Sequence[int]) -> IncomingCache:
        self._arrivals[row] = arrival = IncomingHandover(self.runner, row, manifest, tokens)
        return arrival

    def notes(self) -> Mapping[str, float]:
        return {} if self.pacer is None else self.pacer.notes()


def _done() -> Callable[[], list[SampledToken]]:
    """Waits for what was launched until now: a step that draws nothing is over when it was computed, not when it was
    queued."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def land() -> list[SampledToken]:
        done.synchronize()
        return []

    return land

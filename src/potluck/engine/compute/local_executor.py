"""A whole model in this process, as the loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.executor import CacheExport, Deliver, IncomingCache, TokenDraw
from potluck.engine.compute.runner import Runner
from potluck.engine.compute.sample import sample
from potluck.engine.compute.work import RunnerSize, SequenceWork
from potluck.engine.memory.handover import IncomingHandover, pack
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers.exactness import Exactness
from potluck.kv.chunks import KvChunk, KvManifest


class LocalExecutor:
    """A whole model in this process."""

    microbatches = 1

    def __init__(self, runner: Runner, size: RunnerSize) -> None:
        self._runner = runner
        self.size = size

    @property
    def config(self) -> EngineModelConfig:
        return self._runner.config

    @property
    def fingerprint(self) -> str:
        return self._runner.fingerprint

    @property
    def exact(self) -> Exactness:
        return self._runner.exact

    def open(self) -> int:
        return self._runner.tables.open()

    def close(self, row: int) -> None:
        self._runner.tables.close(row)

    def held(self, row: int) -> int:
        return self._runner.tables.lengths[row]

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        self._runner.tables.grow(row, tokens, since)

    def step(
        self,
        works: Sequence[SequenceWork],
        draws: Sequence[TokenDraw],
        exports: Sequence[CacheExport] = (),
        deliver: Deliver | None = None,
    ) -> list[SampledToken]:
        on_layer = None
        if exports and deliver is not None:
            send = deliver

            def on_layer(layer: int) -> None:
                for item in exports:
                    parcels = pack(self._runner, item.row, layer, item.start, item.stop, item.end)
                    if parcels:
                        send(item.row, parcels)

        logits = self._runner.step(works, on_layer=on_layer)
        if not draws:
            return []
        ways, places = [draw.way for draw in draws], [draw.position for draw in draws]
        return sample(logits, ways, places, [draw.edit for draw in draws])

    def begin(
        self,
        works: Sequence[SequenceWork],
        draws: Sequence[TokenDraw],
        exports: Sequence[CacheExport] = (),
        deliver: Deliver | None = None,
    ) -> Callable[[], list[SampledToken]]:
        found = self.step(works, draws, exports, deliver)
        return lambda: found

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        return pack(self._runner, row, layer, start, stop)

    def arrival(self, row: int, about: KvManifest, tokens: Sequence[int]) -> IncomingCache:
        return IncomingHandover(self._runner, row, about, tokens)

    def check(self) -> None:
        self._runner.tables.check()

    def health(self) -> str:
        return ""

    def degraded(self) -> str:
        return ""

    def notes(self) -> Mapping[str, float]:
        return {}

    def shutdown(self) -> None:
        """Nothing to stop."""

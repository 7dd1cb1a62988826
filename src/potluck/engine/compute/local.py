"""A whole model in this process, as the loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from potluck.core.values.sampling import Choice
from potluck.engine.compute.executor import Deliver, Draw, Export, Incoming
from potluck.engine.compute.runner import Runner
from potluck.engine.compute.sample import sample
from potluck.engine.compute.work import Size, Work
from potluck.engine.memory.handover import Arrival, pack
from potluck.engine.model.config import Config
from potluck.engine.numbers.exactness import Exactness
from potluck.kv.parcels import Manifest, Parcel


class LocalExecutor:
    """A whole model in this process."""

    lanes = 1

    def __init__(self, runner: Runner, size: Size) -> None:
        self._runner = runner
        self.size = size

    @property
    def config(self) -> Config:
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
        works: Sequence[Work],
        draws: Sequence[Draw],
        exports: Sequence[Export] = (),
        deliver: Deliver | None = None,
    ) -> list[Choice]:
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
        works: Sequence[Work],
        draws: Sequence[Draw],
        exports: Sequence[Export] = (),
        deliver: Deliver | None = None,
    ) -> Callable[[], list[Choice]]:
        found = self.step(works, draws, exports, deliver)
        return lambda: found

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[Parcel, ...]:
        return pack(self._runner, row, layer, start, stop)

    def arrival(self, row: int, about: Manifest, tokens: Sequence[int]) -> Incoming:
        return Arrival(self._runner, row, about, tokens)

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

"""Engines that pretend: executors, loops without a clock, services at a made-up GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from face_kit import NAME, TRIAL
from loop_kit import Desk

from potluck.catalog import models, nodes
from potluck.core.replica.batch import Limits
from potluck.core.values.model import Model
from potluck.engine.compute.paced import Clock
from potluck.engine.compute.work import Size
from potluck.engine.face.service import FaceLimits, Service
from potluck.engine.loop.loop import Loop
from potluck.engine.model.config import Config
from potluck.engine.pretend.cargo import Cargo
from potluck.engine.pretend.engine import LAYER, on_node, pretend
from potluck.engine.pretend.executor import PretendExecutor
from potluck.engine.pretend.lasting import Lasting
from potluck.engine.pretend.prefixes import PretendPrefixes
from potluck.engine.pretend.words import Words
from potluck.engine.serve import Settings
from potluck.engine.shipped import shipped_model
from potluck.perf.timers.roofline import roofline

LLAMA = models.model("llama-3.1-8b")
HYBRID = models.model("Kimi-Linear-48B-A3B")
WINDOWED = models.model("GPT-OSS-20B")
A100 = nodes.node_type("A100")
VOCAB = 500
WORDS = Words(VOCAB, tuple(range(3, VOCAB)), 2)
TIMER = roofline(LLAMA, A100, 1)
FAST = 50.0
"""So many times as fast as the GPU, where a test has to wait for it."""


def executor(
    size: Size, model: Model = LLAMA, words: Words = WORDS, clock: Clock | None = None, fingerprint: str = "f"
) -> PretendExecutor:
    config = Config(Model("p", 1, words.vocab, (LAYER,) * Cargo(model).layers, 1 << 17))
    more = {} if clock is None else {"clock": clock}
    return PretendExecutor(config, size, words, Lasting(TIMER), fingerprint=fingerprint, **more)


class PretendDesk(Desk):
    """A loop that pretends, without a thread or a clock."""

    def __init__(
        self,
        model: Model = LLAMA,
        *,
        blocks: int = 1000,
        chunk: int | None = None,
        budget: int = 512,
        most_blocks: int | None = 0,
        words: Words = WORDS,
        lease_s: float = 60.0,
    ) -> None:
        made = executor(Size(24, blocks, 1 << 16, 512), model, words)
        super().__init__(made.config, executor=made, blocks=blocks)
        self.pretended = made
        self.spare = PretendPrefixes(made, Cargo(model), most_blocks)
        limits = Limits(blocks, max(budget, 18), 18, chunk)
        self.loop = Loop(
            made, limits, self._hear, prefixes=self.spare, lease_s=lease_s, awaits=False, join=made.join
        )


def pretend_service(limits: FaceLimits | None = None, *, mean_output: int = 0, **fields: Any) -> Service:
    settings = Settings(**{"max_running": 8, **fields})
    what = replace(on_node(LLAMA, A100, 1, FAST), mean_output_tokens=mean_output)
    return pretend(shipped_model(), what, settings, name=NAME, limits=limits, kv=TRIAL)

"""Engines that pretend: executors, loops without a clock, services at a made-up GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loop_helpers import LoopHarness
from server_helpers import NAME, TRIAL

from potluck.catalog import models, nodes
from potluck.core.replica.batch import BatchLimits
from potluck.core.values.layout import single
from potluck.core.values.model import Model
from potluck.engine import shipped_model
from potluck.engine.compute.emulated import Clock
from potluck.engine.compute.executor import RunnerSize
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.mock.mock_engine import LAYER, MockModel, StepDurations, mock_engine
from potluck.engine.mock.mock_executor import MockExecutor, Vocabulary
from potluck.engine.mock.mock_transfer import KvSizes, MockPrefixCache
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.serve import EngineSettings
from potluck.engine.server.engine_service import EngineService
from potluck.engine.server.http_connection import RequestLimits
from potluck.perf.timers.roofline import roofline

LLAMA = models.model("llama-3.1-8b")
HYBRID = models.model("Kimi-Linear-48B-A3B")
WINDOWED = models.model("GPT-OSS-20B")
A100 = nodes.node_type("A100")
VOCAB = 500
WORDS = Vocabulary(VOCAB, tuple(range(3, VOCAB)), 2)
TIMER = roofline(LLAMA, A100, 1)
FAST = 50.0  # So many times as fast as the GPU, where a test has to wait for it.
LLAMA_ON_A100 = MockModel(LLAMA, single(A100.name, 1, LLAMA.layer_count), (A100,), speed_up=FAST)


def executor(
    size: RunnerSize,
    model: Model = LLAMA,
    words: Vocabulary = WORDS,
    clock: Clock | None = None,
    fingerprint: str = "f",
) -> MockExecutor:
    config = EngineModelConfig(Model("p", 1, words.vocab, (LAYER,) * KvSizes(model).layers, 1 << 17))
    more = {} if clock is None else {"clock": clock}
    return MockExecutor(config, size, words, StepDurations(TIMER), fingerprint=fingerprint, **more)


class MockLoopHarness(LoopHarness):
    def __init__(
        self,
        model: Model = LLAMA,
        *,
        blocks: int = 1000,
        chunk: int | None = None,
        budget: int = 512,
        most_blocks: int | None = 0,
        words: Vocabulary = WORDS,
        lease_s: float = 60.0,
    ) -> None:
        made = executor(RunnerSize(24, blocks, 1 << 16, 512), model, words)
        super().__init__(made.config, executor=made, blocks=blocks)
        self.pretended = made
        self.spare = MockPrefixCache(made, KvSizes(model), most_blocks)
        limits = BatchLimits(blocks, max(budget, 18), 18, chunk)
        self.loop = EngineLoop(
            made,
            limits,
            self._hear,
            prefixes=self.spare,
            lease_s=lease_s,
            await_steps=False,
            join_step=made.join,
        )


def mock_service(
    limits: RequestLimits | None = None, *, mean_output: int = 0, **fields: Any
) -> EngineService:
    settings = EngineSettings(**{"max_running": 8, **fields})
    what = replace(LLAMA_ON_A100, mean_output_tokens=mean_output)
    return mock_engine(shipped_model(), what, settings, name=NAME, limits=limits, kv=TRIAL)

"""A loop without a thread, and ways to run jobs through it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from engine_models import KINDS, VOCAB, prompt

from potluck.core.replica.batch import BatchLimits
from potluck.engine.compute.executor import Executor, RunnerSize
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.jobs import Event, Job, JobEnded, LayerSent, OutputToken, RowReady
from potluck.engine.memory.prefix_cache import PrefixCache
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig
from potluck.kv.chunks import KvChunk, KvManifest, token_hash

__all__ = ["KINDS", "VOCAB", "LoopHarness", "harness", "prompt", "reference_answer"]


class LoopHarness:
    def __init__(
        self,
        config: EngineModelConfig,
        *,
        rows: int = 24,
        max_running: int = 18,
        blocks: int = 1000,
        max_tokens: int = 1024,
        budget: int = 512,
        chunk: int | None = None,
        prefix_bytes: int = 0,
        lease_s: float = 60.0,
        executor: Executor | None = None,
        await_steps: bool = True,
    ) -> None:
        size = RunnerSize(rows, blocks, max_tokens, 512)
        self.executor = executor or LocalExecutor(Runner(config, RandomSource(7), size), size)
        limits = BatchLimits(blocks, max(budget, max_running), max_running, chunk)
        self.prefixes = PrefixCache(config, prefix_bytes, self.executor.fingerprint)
        self.said: dict[int, list[Event]] = {}
        self.loop = EngineLoop(
            self.executor,
            limits,
            self._hear,
            prefixes=self.prefixes,
            lease_s=lease_s,
            await_steps=await_steps,
        )
        self.now_s = 0.0
        self.have: dict[int, int] = {}
        self._keys = 0

    def _hear(self, events: list[tuple[int, Event]]) -> None:
        for key, event in events:
            self.said.setdefault(key, []).append(event)

    def submit(self, tokens: Sequence[int], output: int = 0, **fields: object) -> int:
        self._keys += 1
        job = Job(self._keys, tuple(tokens), output_tokens=output, **fields)  # type: ignore[arg-type]
        self.have[self._keys] = self.loop.submit(job, self.now_s)
        return self._keys

    def turn(self) -> bool:
        self.now_s += 0.01
        return self.loop.turn(self.now_s)

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.turn():
                break
        else:
            raise AssertionError("it never ends")
        if self.loop.idle:
            self.loop.check()

    def tokens(self, key: int) -> list[int]:
        return [event.choice.token for event in self.said[key] if isinstance(event, OutputToken)]

    def end(self, key: int) -> JobEnded:
        ends = [job_ended for job_ended in self.said[key] if isinstance(job_ended, JobEnded)]
        assert len(ends) == 1, f"{len(ends)} ends"
        assert self.said[key][-1] is ends[0]
        return ends[0]

    def chunks(self, key: int) -> list[KvChunk]:
        return [p for event in self.said[key] if isinstance(event, LayerSent) for p in event.chunks]

    def answer(self, tokens: Sequence[int], output: int, **fields: object) -> list[int]:
        key = self.submit(tokens, output, **fields)
        self.run()
        assert self.end(key).reason in ("length", "stop")
        return self.tokens(key)


def harness(kind: str, **fields: int) -> LoopHarness:
    return LoopHarness(KINDS[kind], **fields)  # type: ignore[arg-type]


def manifest(engine: LoopHarness, key: int, tokens: Sequence[int], stop: int) -> KvManifest:
    """Of the cache that a job waits for; the last token of a prompt is always computed."""
    stop = min(stop, len(tokens) - 1)
    return KvManifest(engine.executor.fingerprint, engine.have[key], stop, token_hash(tokens[:stop]))


@cache
def reference_answer(kind: str, length: int, output: int, seed: int = 0) -> list[int]:
    """What a prompt is answered with where nothing else runs, the same for all who ask."""
    return harness(kind).answer(prompt(length, seed), output)


def transfer_kv(
    sender: LoopHarness,
    source: int,
    receiver: LoopHarness,
    target: int,
    *,
    late: bool = False,
    turns: int = 0,
) -> None:
    """The cache that `source` hands on, to `target`. `late`: the receiver comes when the work is done, or after so
    many `turns`."""
    have = receiver.have[target]
    if late:
        sender.run()
    for _ in range(turns):
        sender.turn()
    manifest: KvManifest = sender.loop.attach(source, have, sender.now_s)
    sender.run()
    if receiver.loop.expect(target, manifest) is None:
        receiver.turn()
        assert receiver.loop.expect(target, manifest) is not None
    assert any(isinstance(event, RowReady) for event in receiver.said[target])
    for chunk in sender.chunks(source):
        receiver.loop.accept(target, chunk)
    receiver.loop.arrived(target)
    receiver.run()

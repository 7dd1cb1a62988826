"""A plain loop that generates with any executor, and models to run on it."""

from __future__ import annotations

from collections.abc import Sequence

from engine_models import DENSE, FULL, LATENT, LINEAR, MOE, SHORT, prompt, stack

from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.executor import Executor, RunnerSize, SequenceWork, TokenDraw
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig

SEED = 7
SIZE = RunnerSize(12, 400, 512, 256)
HYBRID = stack((LINEAR, DENSE), (FULL, MOE), (SHORT, DENSE), (LATENT, DENSE), (FULL, DENSE))
PLAIN = stack((FULL, DENSE), (FULL, DENSE), (FULL, DENSE), tied=True)
PROMPTS = [prompt(length, seed) for seed, length in enumerate((5, 40, 130, 77, 1))]
GREEDY = Sampling()


def local(config: EngineModelConfig) -> LocalExecutor:
    return LocalExecutor(Runner(config, RandomSource(SEED), SIZE), SIZE)


class Loop:
    """Sequences on an executor, all stepped together."""

    def __init__(
        self,
        executor: Executor,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling = GREEDY,
        most: int = 200,
    ) -> None:
        self.executor, self.way = executor, sampling
        self.rows = [executor.open() for _ in prompts]
        self.tokens = [list(item) for item in prompts]
        self.said: list[list[SampledToken]] = [[] for _ in prompts]
        for row in self.rows:
            executor.grow(row, most)

    def step(self, chunk: int, only: Sequence[int] | None = None) -> None:
        works, draws, drawn = [], [], []
        for index in range(len(self.rows)) if only is None else only:
            row, tokens = self.rows[index], self.tokens[index]
            held = self.executor.held(row)
            part = tokens[held : held + chunk]
            last = held + len(part) == len(tokens)
            works.append(SequenceWork(row, held, part, "last" if last else "none"))
            if last:
                draws.append(TokenDraw(self.way, len(tokens)))
                drawn.append(index)
        for index, sampled_token in zip(drawn, self.executor.step(works, draws), strict=True):
            self.said[index].append(sampled_token)
            self.tokens[index].append(sampled_token.token)

    def close(self) -> None:
        for row in self.rows:
            self.executor.close(row)


def generate(
    executor: Executor,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    count: int = 6,
    chunk: int = 64,
    sampling: Sampling = GREEDY,
) -> list[list[SampledToken]]:
    """`count` tokens behind each prompt; all start together, shorter prompts go on while longer ones are read."""
    loop = Loop(executor, prompts, sampling)
    while any(len(text) < count for text in loop.said):
        loop.step(chunk)
    loop.close()
    return [text[:count] for text in loop.said]

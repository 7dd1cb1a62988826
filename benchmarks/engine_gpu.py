"""The engine on a GPU: decode steps recorded as CUDA graphs against the same steps launched one by one.

For the models that ship and for one of a billion random parameters, 1, 8 and 32 sequences: the share of greedy tokens
that recorded steps choose like launched ones after the same history (in float32 all must agree), and milliseconds per
step of either, the median of many, by wall clock with the device waited for, since a graph saves the host's time.
"""

from __future__ import annotations

import json
import statistics
import time

import torch

from parts.common import WORDS, skip
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.engine.compute.executor import RunnerSize, SequenceWork
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import RandomSource, SafetensorsSource, WeightSource
from potluck.engine.model.config import EngineModelConfig, RopeConfig, read_config

SHIPPED_LAYER = Layer(FullAttention(4, 2, 64, 64), DenseFfn(704))
SHIPPED = Model("words", 256, 4096, (SHIPPED_LAYER,) * 6, 2048, tied_embeddings=True)
LARGE_LAYER = Layer(FullAttention(32, 8, 64, 64), DenseFfn(8192))
LARGE = Model("large", 2048, 32000, (LARGE_LAYER,) * 16, 4096, tied_embeddings=True)


class Shared:
    """Random weights that are drawn once for each shape: a model of this size takes long to fill otherwise."""

    fingerprint = "shared"

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if shape not in self._known:
            self._known[shape] = RandomSource(3).take("any", *shape)
        return self._known[shape]


Said = list[list[int]]


def steps(
    engine: Runner, count: int, prompt: int, decode: int, history: Said | None = None
) -> tuple[Said, list[float]]:
    """Greedy tokens of `count` sequences, each behind those of `history` if given; seconds per decode step."""
    chance = torch.Generator().manual_seed(count)
    rows, tokens = [], []
    for _ in range(count):
        row = engine.tables.open()
        engine.tables.grow(row, prompt + decode)
        given = torch.randint(1, 4000, (prompt,), generator=chance).tolist()
        tokens.append([int(engine.step([SequenceWork(row, 0, given)])[-1].argmax())])
        rows.append(row)
    took = []
    for place in range(decode - 1):
        behind = history or tokens
        works = [
            SequenceWork(row, engine.tables.lengths[row], message[place : place + 1])
            for row, message in zip(rows, behind, strict=True)
        ]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        chosen = engine.step(works).argmax(-1).tolist()
        took.append(time.perf_counter() - begin)
        for text, token in zip(tokens, chosen, strict=True):
            text.append(token)
    for row in rows:
        engine.tables.close(row)
    return tokens, took[5:]


def compare(
    config: EngineModelConfig, source: WeightSource, dtype: torch.dtype, prompt: int, decode: int
) -> dict[str, float]:
    engine = Runner(config, source, RunnerSize(40, 40 * 32, 2048), device="cuda", dtype=dtype)
    graphs, figures = engine._graphs, {}
    assert graphs is not None
    for count in (1, 8, 32):
        steps(engine, count, prompt, 8)  # records
        engine._graphs = None
        expected, slow = steps(engine, count, prompt, decode)
        engine._graphs = graphs
        text, fast = steps(engine, count, prompt, decode, expected)
        same = sum(a == b for pair in zip(text, expected, strict=True) for a, b in zip(*pair, strict=True))
        figures[f"same_tokens_{count}"] = same / (count * decode)
        figures[f"recorded_ms_{count}"] = 1e3 * statistics.median(fast)
        figures[f"launched_ms_{count}"] = 1e3 * statistics.median(slow)
        figures[f"speed_ratio_{count}"] = statistics.median(slow) / statistics.median(fast)
    del engine, graphs
    torch.cuda.empty_cache()
    return figures


def main() -> None:
    if not torch.cuda.is_available():
        skip("engine_gpu", "there is no CUDA device")
    rope, hybrid = RopeConfig(theta=10000.0), WORDS.with_name("words-hybrid")
    shipped = EngineModelConfig(SHIPPED, rope=rope, norm_eps=1e-6)
    words = SafetensorsSource(WORDS)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "words float32": compare(shipped, words, torch.float32, 150, 60),
        "words bfloat16": compare(shipped, words, torch.bfloat16, 150, 60),
        "words-hybrid float32": compare(
            read_config(hybrid, None), SafetensorsSource(hybrid), torch.float32, 150, 40
        ),
        "large bfloat16": compare(EngineModelConfig(LARGE, rope=rope), Shared(), torch.bfloat16, 300, 60),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

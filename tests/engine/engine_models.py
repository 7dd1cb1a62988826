"""Small models with random weights, one for each kind of layer, and ways to run them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from potluck.core.values.model import (
    Attention,
    DenseFfn,
    FullAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    Model,
    MoeFfn,
)
from potluck.engine.compute.executor import RunnerSize, SequenceWork
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig, ExpertRouting, RopeConfig
from potluck.engine.numbers.exact import exactness

VOCAB = 200
WINDOW = 24
DENSE = DenseFfn(96)
MOE = MoeFfn(8, 2, 32, shared_intermediate=32)
SIGMOID_MOE = MoeFfn(8, 2, 32, shared_intermediate=32, router_bias=True)
FULL = FullAttention(4, 2, 16, 16)
FANCY = FullAttention(4, 2, 16, 16, bias=True, output_bias=True, qk_norm="head", output_gate=True)
SHORT = FullAttention(4, 2, 16, 16, window=WINDOW)
LONG = FullAttention(4, 1, 16, 16, window=290)
LATENT = LatentAttention(4, 16, 12, 8, 20, q_lora_rank=24)
PLAIN_LATENT = LatentAttention(4, 16, 12, 8, 20)
LINEAR = LinearAttention("gated_delta", 2, 4, 16, 24, conv_kernel=4)


def stack(*layers: tuple[Attention, DenseFfn | MoeFfn], tied: bool = False) -> EngineModelConfig:
    model = Model("small", 64, VOCAB, tuple(Layer(*layer) for layer in layers), 2048, tied_embeddings=tied)
    sigmoid = any(layer[1] == SIGMOID_MOE for layer in layers)
    routing = ExpertRouting("sigmoid", True, 1.3, 4, 2) if sigmoid else ExpertRouting()
    return EngineModelConfig(model, rope=RopeConfig(theta=5000.0), routing=routing)


KINDS: dict[str, EngineModelConfig] = {
    "full": stack((FULL, DENSE), (FULL, DENSE), tied=True),
    "full-fancy": stack((FANCY, DENSE), (FANCY, MOE)),
    "window": stack((SHORT, DENSE), (SHORT, DENSE)),
    "long-window": stack((LONG, DENSE), (FULL, DENSE)),
    "latent": stack((LATENT, DENSE), (PLAIN_LATENT, SIGMOID_MOE)),
    "linear": stack((LINEAR, DENSE), (LINEAR, DENSE)),
    "hybrid": stack((LINEAR, DENSE), (FULL, MOE), (SHORT, DENSE), (LATENT, DENSE)),
}


def runner(config: EngineModelConfig, **size: int) -> Runner:
    values = {"rows": 20, "blocks": 1200, "max_tokens": 1024, **size}
    return Runner(config, RandomSource(7), RunnerSize(**values))


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(length)]


def open_row(engine: Runner, tokens: int) -> int:
    row = engine.tables.open()
    engine.tables.grow(row, tokens)
    return row


def logits_of(engine: Runner, row: int, tokens: Sequence[int], sizes: Iterable[int]) -> Tensor:
    """Logits of all tokens, computed behind what the row holds, in chunks of the given sizes."""
    result, first, start = [], 0, engine.tables.lengths[row]
    for size in sizes:
        chunk = list(tokens[first : first + size])
        result.append(engine.step([SequenceWork(row, start + first, chunk, "all")]))
        first += len(chunk)
        if first == len(tokens):
            break
    return torch.cat(result)


def greedy_tokens(engine: Runner, row: int, logits: Tensor, count: int) -> list[int]:
    """Tokens that follow, the likeliest each time."""
    result = [int(logits[-1].argmax())]
    for _ in range(count - 1):
        length = engine.tables.lengths[row]
        engine.tables.grow(row, length + 1)
        result.append(int(engine.step([SequenceWork(row, length, result[-1:])])[-1].argmax()))
    return result


EXACT = exactness(torch.device("cpu"), torch.float32, latent=True).holds  # What an engine would say here.


def equal_logits(one: Tensor, two: Tensor) -> bool:
    """Bit for bit where the machine's matrix library allows it, else up to rounding."""
    if EXACT:
        return torch.equal(one, two)
    return torch.allclose(one, two, atol=1e-4, rtol=1e-4)

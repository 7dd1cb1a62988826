"""The engine on a GPU, as bare steps: a model of Llama-3.1-8B's shape in bfloat16, against what the card can do.

    python benchmarks/engine_gpu.py [--quick] [--json] [--layers 32]

Random weights and caches. Ceilings are measured in the same run, before and after the steps, and the better one
counts: a product of 8192 x 8192 matrices, and a copy of 4 GiB (bytes read and written). A step's time is the median
by wall clock from the call to its end on the device, so the host's work is in it. Its floor is the larger of its
operations over the rate of products and its bytes (weights, and keys and values that are read, once each) over the
bandwidth of the copy; a share is floor over time. Prefills are bound by the one, decodes by the other.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from parts import common
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.engine.compute.executor import RunnerSize, SequenceWork
from potluck.engine.compute.runner import Runner
from potluck.engine.memory.kv_cache import Pages
from potluck.engine.model.config import EngineModelConfig, RopeConfig

ATTENTION, FFN = FullAttention(32, 8, 128, 128), DenseFfn(14336)
HIDDEN, VOCAB, CONTEXT, DECODES, CHUNK = 4096, 128256, 1024, 64, 448
PREFILLS, BATCHES = (512, 2048, 4096, 8192), (1, 8, 64, 256)
TARGETS = {
    **{f"prefill_{tokens}": (">=", 0.7) for tokens in PREFILLS[1:]},
    **{f"decode_{batch}": (">=", 0.7) for batch in (1, 64)},
    f"mixed_{DECODES}_{CHUNK}": (">=", 0.6),
}


@dataclass(frozen=True)
class Ceilings:
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Work:
    """What a step must do at least."""

    flops: float
    bytes: float

    def floor_s(self, ceilings: Ceilings) -> float:
        return max(self.flops / ceilings.flops_per_s, self.bytes / ceilings.bytes_per_s)


class Drawn:
    """Random weights, drawn on the device."""

    fingerprint = "drawn"

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device="cuda", dtype=torch.bfloat16)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


def median_s(call: Callable[[], object], repeats: int, warm: int = 3) -> float:
    """Of calls that are each waited for."""
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    took_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - begin_s)
    return statistics.median(took_s)


def measure_ceilings() -> Ceilings:
    one, two = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    product_s = median_s(lambda: one @ two, 20)
    source = torch.randint(0, 100, (1 << 29,), device="cuda")
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), 20)
    return Ceilings(2 * 8192**3 / product_s, 2 * source.nbytes / copy_s)


def work_of(layers: int, spans: Sequence[tuple[int, int]]) -> Work:
    """Of a step of (position, tokens) of each sequence that asks for its last logits."""
    part, tokens, wanted = ATTENTION, sum(count for _, count in spans), len(spans)
    qkv = HIDDEN * (part.heads + 2 * part.kv_heads) * part.head_dim
    rest = HIDDEN * part.heads * part.head_dim + 3 * HIDDEN * FFN.intermediate
    # The last layer's other products are made for those tokens only whose logits are asked for.
    products = tokens * (layers * qkv + (layers - 1) * rest) + wanted * (rest + HIDDEN * VOCAB)
    seen = sum(count * start + count * (count + 1) // 2 for start, count in spans)
    kept = sum(start + count for start, count in spans)
    weights = layers * (qkv + rest) + HIDDEN * VOCAB
    return Work(
        2 * products + layers * 4 * seen * part.heads * part.head_dim,
        2 * (weights + layers * 2 * kept * part.kv_heads * part.head_dim),
    )


class Bench:
    def __init__(self, layers: int) -> None:
        model = Model("8B", HIDDEN, VOCAB, (Layer(ATTENTION, FFN),) * layers, 16384)
        rows = max(BATCHES) + 1
        blocks = (rows * (CONTEXT + 32) + max(PREFILLS)) // 16
        size = RunnerSize(rows, blocks, 16384, max_chunk_tokens=max(PREFILLS))
        config = EngineModelConfig(model, rope=RopeConfig(theta=500000.0))
        self._layers, self._said = layers, [7 * place % VOCAB for place in range(max(PREFILLS))]
        self._engine = Runner(config, Drawn(), size, device="cuda", dtype=torch.bfloat16)
        for kept in self._engine.cache.layers:
            assert isinstance(kept, Pages)
            with torch.inference_mode():
                kept.entries.normal_()

    def time(self, spans: Sequence[tuple[int, int]], repeats: int) -> tuple[float, Work]:
        """Seconds of a step of (position, tokens) of each sequence, again and again."""
        tables = self._engine.tables
        rows = [tables.open() for _ in spans]
        for row, (start, count) in zip(rows, spans, strict=True):
            tables.grow(row, start + count)

        def step() -> None:
            for row, (start, _) in zip(rows, spans, strict=True):
                tables.advance(row, start)
            self._engine.step(works)

        works = [
            SequenceWork(row, start, self._said[:count])
            for row, (start, count) in zip(rows, spans, strict=True)
        ]
        took_s = median_s(step, repeats)
        for row in rows:
            tables.close(row)
        return took_s, work_of(self._layers, spans)


def measure(layers: int, quick: bool) -> dict[str, float]:
    before, bench = measure_ceilings(), Bench(layers)
    repeats = 10 if quick else 30
    cases = {f"prefill_{tokens}": [(0, tokens)] for tokens in PREFILLS}
    cases |= {f"decode_{batch}": [(CONTEXT, 1)] * batch for batch in BATCHES}
    cases[f"mixed_{DECODES}_{CHUNK}"] = [(CONTEXT, 1)] * DECODES + [(0, CHUNK)]
    took = {name: bench.time(spans, repeats) for name, spans in cases.items()}
    after = measure_ceilings()
    rate = max(before.flops_per_s, after.flops_per_s)
    ceilings = Ceilings(rate, max(before.bytes_per_s, after.bytes_per_s))
    figures = {"layers": layers, "product_tflops": rate / 1e12, "copy_tb_per_s": ceilings.bytes_per_s / 1e12}
    for name, (seconds, work) in took.items():
        figures[name] = work.floor_s(ceilings) / seconds
        figures[f"{name}_ms"] = 1e3 * seconds
        figures[f"{name}_floor_ms"] = 1e3 * work.floor_s(ceilings)
    return figures


def main() -> None:
    if not torch.cuda.is_available():
        common.skip("engine_gpu", "there is no CUDA device")
    options = common.options(quick=False, json=False, layers=32)
    figures = measure(8 if options.quick else options.layers, options.quick)
    report = {
        "name": "engine_gpu",
        "figures": figures,
        "targets": {name: list(target) for name, target in TARGETS.items()},
        "met": all(common.holds(figures[name], target) for name, target in TARGETS.items()),
        "context": {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            **common.context((), quick=options.quick),
        },
    }
    sys.stdout.write(
        (json.dumps(report, indent=1) if options.json else common.as_table(report, TARGETS)) + "\n"
    )


if __name__ == "__main__":
    main()

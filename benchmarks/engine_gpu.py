"""The engine on a GPU, as bare steps: a model of Llama-3.1-8B's shape in bfloat16, against what the card can do.

    python benchmarks/engine_gpu.py [--quick] [--json] [--layers 32]

Random weights and caches. Ceilings are measured in the same run, before and after the steps, and the better one
counts: a product of 8192 x 8192 matrices (a second of them without a break is slower: the card is short of power),
and a copy of 4 GiB (bytes read and written). A step's time is the median by wall clock from the call to its end on
the device, so the host's work is in it. Its floor is the larger of its operations over the rate of products and its
bytes (weights, keys and values that are read, once each) over the bandwidth of the copy; a share is floor over time.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from parts import common
from potluck.core.replica.batch import BatchLimits
from potluck.core.values.model import DenseFfn, FullAttention, Layer, Model
from potluck.engine.compute.executor import RunnerSize, SequenceWork
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.jobs import Job
from potluck.engine.memory.kv_cache import Pages
from potluck.engine.model.config import EngineModelConfig, RopeConfig
from potluck.engine.serve import warm_up

PART, FFN = FullAttention(32, 8, 128, 128), DenseFfn(14336)
HIDDEN, VOCAB, CONTEXT, DECODES, CHUNK = 4096, 128256, 1024, 64, 448
PREFILLS, BATCHES = (512, 2048, 4096, 8192), (1, 8, 64, 256)
TARGETS = {
    **{f"prefill_{tokens}": (">=", 0.7) for tokens in PREFILLS[1:]},
    **{f"decode_{batch}": (">=", 0.7) for batch in (1, 64)},
    f"mixed_{DECODES}_{CHUNK}": (">=", 0.6),
    "saturated": (">=", 0.8),
}
SIDE = 8192
Spans = Sequence[tuple[int, int]]  # (position, tokens) of each sequence of a step.


class Drawn:
    """Random weights, drawn on the device."""

    fingerprint = "drawn"

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device="cuda", dtype=torch.bfloat16)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Of calls that are each waited for, after a few others."""
    took_s = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - begin_s)
    return statistics.median(took_s[3:])


def ceilings() -> tuple[float, float, float]:
    """Operations a second, in a short run and in a long one; bytes a second."""
    one, two = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    source = torch.randint(0, 100, (1 << 29,), device="cuda")
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), 20)
    product_s = median_s(lambda: one @ two, 20)
    long_s = median_s(lambda: [one @ two for _ in range(600)], 1) / 600
    return 2 * SIDE**3 / product_s, 2 * SIDE**3 / long_s, 2 * source.nbytes / copy_s


def work_of(layers: int, spans: Spans) -> tuple[float, float]:
    """Operations and bytes of a step that gives each sequence's last logits."""
    tokens, wanted = sum(count for _, count in spans), len(spans)
    qkv = HIDDEN * (PART.heads + 2 * PART.kv_heads) * PART.head_dim
    rest = HIDDEN * PART.heads * PART.head_dim + 3 * HIDDEN * FFN.intermediate
    # The last layer's other products are made for those tokens only whose logits are asked for.
    products = tokens * (layers * qkv + (layers - 1) * rest) + wanted * (rest + HIDDEN * VOCAB)
    seen = sum(count * start + count * (count + 1) // 2 for start, count in spans)
    kept = sum(start + count for start, count in spans)
    numbers = layers * (qkv + rest + 2 * kept * PART.kv_heads * PART.head_dim) + HIDDEN * VOCAB
    return 2 * products + layers * 4 * seen * PART.heads * PART.head_dim, 2 * numbers


def start(layers: int) -> LocalExecutor:
    model = Model("8B", HIDDEN, VOCAB, (Layer(PART, FFN),) * layers, 16384)
    rows = max(BATCHES) + 2
    blocks = (rows * (CONTEXT + 32) + max(PREFILLS)) // 16
    size = RunnerSize(rows, blocks, 16384, max_chunk_tokens=max(PREFILLS))
    config = EngineModelConfig(model, rope=RopeConfig(theta=500000.0))
    engine = Runner(config, Drawn(), size, device="cuda", dtype=torch.bfloat16)
    for pages in engine.cache.layers:
        assert isinstance(pages, Pages)
        with torch.inference_mode():
            pages.entries.normal_()
    return LocalExecutor(engine, size)


def step_s(engine: Runner, spans: Spans, repeats: int) -> float:
    """Seconds of a step, made again and again."""
    tables, works = engine.tables, []
    for first, count in spans:
        works.append(SequenceWork(tables.open(), first, [7 * place % VOCAB for place in range(count)]))
        tables.grow(works[-1].row, first + count)

    def step() -> None:
        for work in works:
            tables.advance(work.row, work.start)
        engine.step(works)

    took_s = median_s(step, repeats)
    for work in works:
        tables.close(work.row)
    return took_s


def measure(layers: int, repeats: int) -> dict[str, float]:
    before, executor = ceilings(), start(layers)
    cases: dict[str, Spans] = {f"prefill_{tokens}": [(0, tokens)] for tokens in PREFILLS}
    cases |= {f"decode_{batch}": [(CONTEXT, 1)] * batch for batch in BATCHES}
    cases[f"mixed_{DECODES}_{CHUNK}"] = [(CONTEXT, 1)] * DECODES + [(0, CHUNK)]
    took = {name: step_s(executor.runner, spans, repeats) for name, spans in cases.items()}
    rate, long_rate, bandwidth = (max(pair) for pair in zip(before, ceilings(), strict=True))
    known = {"product_tflops": rate, "product_long_tflops": long_rate, "copy_tb_per_s": bandwidth}
    figures = {"layers": layers} | {name: value / 1e12 for name, value in known.items()} | saturated(executor)
    for name, seconds in took.items():
        flops, moved = work_of(layers, cases[name])
        floor_s = max(flops / rate, moved / bandwidth)
        figures |= {name: floor_s / seconds, f"{name}_ms": 1e3 * seconds, f"{name}_floor_ms": 1e3 * floor_s}
    return figures


def saturated(executor: LocalExecutor) -> dict[str, float]:
    """Twice as many requests as fit, through the loop: tokens a second, and the share of what the same steps allow,
    each by itself (every eighth of them is made again)."""
    warm_up(executor)
    outputs = [128 + 53 * key % 128 for key in range(2 * max(BATCHES))]
    spans, begin = list[Spans](), executor.begin
    executor.begin = lambda step: (  # type: ignore[method-assign]
        spans.append([(work.start, len(work.tokens)) for work in step.works]) or begin(step)  # type: ignore[func-returns-value]
    )
    loop = EngineLoop(executor, BatchLimits(executor.size.blocks, 1024, max(BATCHES)), lambda events: None)
    for key, output in enumerate(outputs):
        prompt = tuple((key + 7 * place) % VOCAB for place in range(128 + 37 * key % 256))
        loop.submit(Job(key, prompt, output_tokens=output), 0.0)
    begin_s = time.perf_counter()
    while loop.turn(time.perf_counter(), time.perf_counter):
        pass
    took_s = time.perf_counter() - begin_s
    bare_s = sum(step_s(executor.runner, each, 1) for each in spans[::8]) * len(spans) / len(spans[::8])
    figures = {"saturated": bare_s / took_s, "saturated_tokens_per_s": sum(outputs) / took_s}
    return figures | {"saturated_step_ms": 1e3 * took_s / len(spans), "saturated_steps": len(spans)}


def main() -> None:
    if not torch.cuda.is_available():
        common.skip("engine_gpu", "there is no CUDA device")
    asked = common.options(quick=False, json=False, layers=32)
    figures = measure(*((8, 10) if asked.quick else (asked.layers, 30)))
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    about |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    common.show(
        "engine_gpu", figures, TARGETS, {**about, **common.context((), quick=asked.quick)}, asked.json
    )


if __name__ == "__main__":
    main()

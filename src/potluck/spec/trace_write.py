"""Writes traces in the formats that `traces.py` reads, so that other tools can use them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from typing import Literal, get_args

from potluck.core.errors import InputError
from potluck.spec.traces import Trace

Format = Literal["azure", "mooncake", "burstgpt"]
FORMATS: tuple[Format, ...] = get_args(Format)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_S = (datetime(9999, 12, 31, tzinfo=UTC) - _EPOCH).total_seconds()


def format_of(path: Path) -> Format:
    """What a file's name asks for: Mooncake for JSON lines, Azure for CSV."""
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return "mooncake"
    if name.endswith(".csv"):
        return "azure"
    raise InputError("--out", f"{path.name} ends in neither .csv nor .jsonl; give --to")


def write_trace(trace: Trace, path: Path, format_name: Format) -> None:
    """Write it, gzipped where the name ends in .gz.

    Times keep microseconds; what a format cannot hold is left out.
    """
    lines = {"azure": _azure, "mooncake": _mooncake, "burstgpt": _burstgpt}[format_name](trace)
    try:
        # A fixed time in the gzip header: the same trace gives the same bytes.
        with path.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                    packed.writelines(line.encode() for line in lines)
            else:
                raw.writelines(line.encode() for line in lines)
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror or error}") from error


def _azure(trace: Trace) -> Iterator[str]:
    if not 0 <= trace.time_s[0] <= trace.time_s[-1] <= _LAST_S:
        raise InputError("time", "is outside of the years 1970 to 9999, which azure's format cannot hold")
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for time_s, prompt, output in _rows(trace):
        moment = _EPOCH + timedelta(microseconds=round(time_s * 1e6))
        yield f"{moment:%Y-%m-%d %H:%M:%S.%f},{prompt},{output}\n"


def _burstgpt(trace: Trace) -> Iterator[str]:
    yield "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    first_s = float(trace.time_s[0])
    for time_s, prompt, output in _rows(trace):
        yield f"{_plain(time_s - first_s, 6)},unknown,{prompt},{output},{prompt + output},API log\n"


def _mooncake(trace: Trace) -> Iterator[str]:
    first_s = float(trace.time_s[0])
    starts, ids = trace.block_starts, trace.block_ids
    for i, (time_s, prompt, output) in enumerate(_rows(trace)):
        row: dict[str, object] = {
            "timestamp": _plain((time_s - first_s) * 1e3, 3),
            "input_length": prompt,
            "output_length": output,
            "hash_ids": [],
        }
        if starts is not None and ids is not None:
            row["hash_ids"] = ids[starts[i] : starts[i + 1]].tolist()
        if trace.tenants is not None and trace.tenants[i]:
            row["tenant"] = trace.tenants[i]
        if trace.classes is not None and trace.classes[i]:
            row["class"] = trace.classes[i]
        if trace.wait_s is not None and trace.wait_s[i] < inf:
            row["deadline_ms"] = _plain(float(trace.wait_s[i]) * 1e3, 3)
        yield json.dumps(row) + "\n"


def _rows(trace: Trace) -> Iterator[tuple[float, int, int]]:
    tokens = (trace.input_tokens.astype(int).tolist(), trace.output_tokens.astype(int).tolist())
    yield from zip(trace.time_s.tolist(), *tokens, strict=True)


def _plain(value: float, digits: int) -> float:
    """Rounded, and without a `.0`."""
    rounded = round(value, digits)
    return int(rounded) if rounded.is_integer() else rounded

"""Request traces as files: Azure and BurstGPT CSV, Mooncake JSON lines, each plain or gzipped.

The format is told by the header. Files are streamed line by line; a line that cannot be read is an error
with its number, only blank lines are passed over. A request without output tokens (BurstGPT logs
failed ones so) still cost a prefill: it counts as one token, and how many there were is told.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError, did_you_mean
from potluck.spec.problems import shown

BLOCK_TOKENS = 512
"""Tokens that one of Mooncake's hash ids stands for."""
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_REQUESTS = 20_000_000
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. `blocks` are its prefix block ids, where the trace has them."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace, summed up as planning needs it."""

    format_name: str
    input_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    span_s: float
    prefix_hit_share: float | None
    """Share of prompt tokens that an infinite cache would have held; None without block ids."""
    empty_outputs: int
    """Requests without output, counted as one token each."""

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate over the gaps; None when all requests came at one moment."""
        return (len(self) - 1) / self.span_s if self.span_s > 0 else None


@dataclass(frozen=True, slots=True)
class _CsvFormat:
    """A CSV dialect: the columns that hold time, input and output, and how its times read."""

    name: str
    columns: tuple[str, str, str]
    time_s: Callable[[str], float]


def _clock_s(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


CSV_FORMATS = (
    _CsvFormat("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _clock_s),
    _CsvFormat("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), float),
)


def load_trace(path: Path) -> Trace:
    """Read a whole trace."""
    inputs, outputs = array("d"), array("d")
    first, last, empty, hit = float("inf"), float("-inf"), 0, 0
    seen: set[int] = set()
    format_name, requests = open_trace(path)
    for request in requests:
        inputs.append(request.input_tokens)
        outputs.append(max(request.output_tokens, 1))
        empty += request.output_tokens == 0
        first, last = min(first, request.time_s), max(last, request.time_s)
        hit += hit_tokens(request, seen)
        seen.update(request.blocks)
        if len(inputs) > MAX_REQUESTS:
            raise InputError(path.name, f"has more than {MAX_REQUESTS:,} requests; cut it")
    if not inputs:
        raise InputError(path.name, "has no requests")
    x = np.array(inputs, dtype=np.float64)
    share = float(hit / x.sum()) if seen else None
    return Trace(format_name, x, np.array(outputs, dtype=np.float64), last - first, share, empty)


def hit_tokens(request: TraceRequest, seen: set[int]) -> int:
    """Prompt tokens in the leading blocks that were seen before; the last block may be part full."""
    blocks = 0
    while blocks < len(request.blocks) and request.blocks[blocks] in seen:
        blocks += 1
    return min(blocks * BLOCK_TOKENS, request.input_tokens)


def open_trace(path: Path) -> tuple[str, Iterator[TraceRequest]]:
    """The format's name and the requests, one by one."""
    if not path.is_file():
        raise InputError(path.name, "is not a file" if path.exists() else "does not exist")
    with _lines(path) as lines:
        header = next(lines, "").lstrip("\ufeff").strip()
    if header.startswith("{"):
        return "mooncake", _read_mooncake(path)
    try:
        names = next(csv.reader([header]), [])
    except csv.Error as error:
        raise InputError(f"{path.name}:1", f"is no known trace: {error}") from error
    chosen = next((known for known in CSV_FORMATS if set(known.columns) <= {n.strip() for n in names}), None)
    if chosen is None:
        raise InputError(f"{path.name}:1", _unknown_header(names))
    return chosen.name, _read_csv(path, chosen)


def _unknown_header(names: list[str]) -> str:
    if not any(names):
        return "is empty"
    for known in CSV_FORMATS:
        missing = [column for column in known.columns if column not in names]
        if len(missing) < len(known.columns):
            return f"column {missing[0]!r} is missing{did_you_mean(missing[0], names)} ({known.name} trace)"
    wanted = "; ".join(",".join(known.columns) for known in CSV_FORMATS)
    return f"is no known trace: want CSV columns {wanted}; or Mooncake JSON lines; found {shown(names[0])}"


def _read_csv(path: Path, known: _CsvFormat) -> Iterator[TraceRequest]:
    with _lines(path) as lines:
        reader = csv.reader(lines)
        header = [name.strip() for name in next(reader)]
        header[0] = header[0].lstrip("\ufeff")
        at = [header.index(column) for column in known.columns]
        try:
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(f"has {len(row)} columns, the header has {len(header)}")
                yield TraceRequest(
                    _time(known.columns[0], row[at[0]], known.time_s),
                    _tokens(known.columns[1], _whole(row[at[1]]), least=1),
                    _tokens(known.columns[2], _whole(row[at[2]]), least=0),
                )
        except (ValueError, csv.Error) as error:
            raise InputError(f"{path.name}:{reader.line_num}", str(error)) from error


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    with _lines(path) as lines:
        number = 0
        try:
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("is not a JSON object")
                for key in ("timestamp", "input_length", "output_length"):
                    if key not in row:
                        raise ValueError(f"{key!r} is missing{did_you_mean(key, row)}")
                blocks = row.get("hash_ids", [])
                if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
                    raise ValueError("hash_ids must be a list of whole numbers")
                yield TraceRequest(
                    _time("timestamp", row["timestamp"], _milliseconds),
                    _tokens("input_length", row["input_length"], least=1),
                    _tokens("output_length", row["output_length"], least=0),
                    tuple(blocks),
                )
        except (ValueError, RecursionError) as error:
            reason = "is not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            raise InputError(f"{path.name}:{max(number, 1)}", reason) from error


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a plain or gzipped file; trouble of the disk or the compression is an InputError."""
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as stream:
            yield _decoded(stream, path.name)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(path.name, f"cannot be read: {reason}") from error


def _decoded(stream: IO[bytes] | gzip.GzipFile, name: str) -> Iterator[str]:
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise InputError(f"{name}:{number}", f"is longer than {MAX_LINE_BYTES >> 20} MiB")
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{name}:{number}", "is not UTF-8 text") from error


def _milliseconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    return value / 1000.0


def _time(column: str, value: Any, read: Callable[[Any], float]) -> float:
    try:
        seconds = read(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{column} must be a time, is {shown(value)}") from error
    if not abs(seconds) < 1e15:
        raise ValueError(f"{column} must be a time, is {shown(value)}")
    return seconds


def _whole(text: str) -> object:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def _tokens(column: str, value: object, least: int) -> int:
    if type(value) is not int:
        raise ValueError(f"{column} must be a whole number, is {shown(value)}")
    if not least <= value <= MAX_TOKENS:
        raise ValueError(f"{column} must be between {least} and {MAX_TOKENS:,}, is {shown(value)}")
    return value

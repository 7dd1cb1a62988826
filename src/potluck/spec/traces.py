"""Request traces as files: Azure and BurstGPT CSV, Mooncake JSON lines, ShareGPT JSON, each plain or gzipped.

The format is told by the start. Files are streamed line by line (ShareGPT's excepted, which has no lines); a
line that cannot be read, or whose time lies before the one above, is an error with its number; only blank lines
are passed over. A request without output tokens (BurstGPT logs failed ones so) still cost a prefill: it
counts as one token, and how many there were is told.
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
from math import inf
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError, did_you_mean
from potluck.spec.sharegpt import read_sharegpt
from potluck.spec.spec_problems import shown
from potluck.spec.trace_rows import TraceRequest, label, time_of, tokens, wait_of, whole

LABELS = ("Tenant", "Class", "Deadline ms")
"""Columns that any CSV trace may have beside its own: the deadline counts from the request's time."""
BLOCK_TOKENS = 512
"""Tokens that one of Mooncake's hash ids stands for."""
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_REQUESTS = 20_000_000
MAX_TEXT_BYTES = 4 * 1024**3
"""A file without lines is read as a whole, up to this."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A whole trace as columns, in order of time."""

    format_name: str
    time_s: NDArray[np.float64]
    """As the file counts it; all 0 in a format without times."""
    input_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    prefix_hit_share: float | None
    """Share of prompt tokens that an infinite cache would have held; None without block ids."""
    empty_outputs: int
    """Requests without output, counted as one token each."""
    passed_over: int = 0
    """ShareGPT conversations without a question and its answer."""
    block_starts: NDArray[np.int64] | None = None
    """Request i has the prefix blocks block_ids[block_starts[i]:block_starts[i + 1]]; only where asked for."""
    block_ids: NDArray[np.int64] | None = None
    tenants: tuple[str, ...] | None = None
    """Who sent each request, and of which class it is, where the trace says so; empty: it does not."""
    classes: tuple[str, ...] | None = None
    wait_s: NDArray[np.float64] | None = None
    """From a request's time to its deadline; infinite without one."""

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def span_s(self) -> float:
        return float(self.time_s[-1] - self.time_s[0])

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


def load_trace(path: Path, *, blocks: bool = False) -> Trace:
    """Read a whole trace, and its prefix blocks where they are wanted."""
    times, inputs, outputs = array("d"), array("d"), array("d")
    ids, starts = array("q"), array("q", [0])
    names: dict[str, str] = {}
    tenants: list[str] = []
    classes: list[str] = []
    waits = array("d")
    empty, hit, passed_over = 0, 0, 0
    seen: set[int] = set()
    format_name, requests = open_trace(path)
    for request in requests:
        if request is None:
            passed_over += 1
            continue
        times.append(request.time_s)
        inputs.append(request.input_tokens)
        outputs.append(max(request.output_tokens, 1))
        empty += request.output_tokens == 0
        hit += hit_tokens(request, seen)
        seen.update(request.blocks)
        if blocks:
            ids.extend(request.blocks)
            starts.append(len(ids))
        tenants.append(names.setdefault(request.tenant, request.tenant))
        classes.append(names.setdefault(request.request_class, request.request_class))
        waits.append(request.wait_s)
        if len(inputs) > MAX_REQUESTS:
            raise InputError(path.name, f"has more than {MAX_REQUESTS:,} requests; cut it")
    if not inputs:
        raise InputError(path.name, "has no requests")
    x = np.array(inputs, dtype=np.float64)
    held = blocks and bool(ids)
    return Trace(
        format_name,
        np.array(times, dtype=np.float64),
        x,
        np.array(outputs, dtype=np.float64),
        float(hit / x.sum()) if seen else None,
        empty,
        passed_over,
        np.array(starts, dtype=np.int64) if held else None,
        np.array(ids, dtype=np.int64) if held else None,
        tuple(tenants) if any(tenants) else None,
        tuple(classes) if any(classes) else None,
        np.array(waits, dtype=np.float64) if min(waits) < inf else None,
    )


def hit_tokens(request: TraceRequest, seen: set[int]) -> int:
    """Prompt tokens in the leading blocks that were seen before; the last block may be part full."""
    blocks = 0
    while blocks < len(request.blocks) and request.blocks[blocks] in seen:
        blocks += 1
    return min(blocks * BLOCK_TOKENS, request.input_tokens)


def open_trace(path: Path) -> tuple[str, Iterator[TraceRequest | None]]:
    """The format's name and the requests, one by one; None for a row that holds none and is no error."""
    if not path.is_file():
        raise InputError(path.name, "is not a file" if path.exists() else "does not exist")
    with _opened(path) as stream:
        start = stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        return "sharegpt", read_sharegpt(_text(path), path.name)
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
    wanted += "; or Mooncake JSON lines; or ShareGPT JSON"
    return f"is no known trace: want CSV columns {wanted}; found {shown(names[0])}"


def _read_csv(path: Path, known: _CsvFormat) -> Iterator[TraceRequest]:
    with _lines(path) as lines:
        reader = csv.reader(lines)
        header = [name.strip() for name in next(reader)]
        header[0] = header[0].lstrip("\ufeff")
        at = [header.index(column) for column in known.columns]
        who, what, wait = (header.index(name) if name in header else -1 for name in LABELS)
        last_s = -inf
        try:
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(f"has {len(row)} columns, the header has {len(header)}")
                last_s = time_of(known.columns[0], row[at[0]], known.time_s, last_s)
                yield TraceRequest(
                    last_s,
                    tokens(known.columns[1], whole(row[at[1]]), least=1),
                    tokens(known.columns[2], whole(row[at[2]]), least=0),
                    (),
                    label(LABELS[0], row[who]) if who >= 0 else "",
                    label(LABELS[1], row[what]) if what >= 0 else "",
                    wait_of(LABELS[2], whole(row[wait])) if wait >= 0 else inf,
                )
        except (ValueError, csv.Error) as error:
            raise InputError(f"{path.name}:{reader.line_num}", str(error)) from error


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    with _lines(path) as lines:
        number, last_s = 0, -inf
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
                if not isinstance(blocks, list) or not all(
                    type(b) is int and b.bit_length() < 64 for b in blocks
                ):
                    raise ValueError("hash_ids must be a list of whole numbers of at most 63 bits")
                last_s = time_of("timestamp", row["timestamp"], _milliseconds, last_s)
                yield TraceRequest(
                    last_s,
                    tokens("input_length", row["input_length"], least=1),
                    tokens("output_length", row["output_length"], least=0),
                    tuple(blocks),
                    label("tenant", row.get("tenant")),
                    label("class", row.get("class")),
                    wait_of("deadline_ms", row.get("deadline_ms")),
                )
        except (ValueError, RecursionError) as error:
            reason = "is not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            raise InputError(f"{path.name}:{max(number, 1)}", reason) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """A plain or gzipped file; trouble of the disk or the compression is an InputError."""
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(path.name, f"cannot be read: {reason}") from error


@contextmanager
def _lines(path: Path) -> Iterator[Iterator[str]]:
    with _opened(path) as stream:
        yield _decoded(stream, path.name)


def _text(path: Path) -> str:
    """The whole file."""
    with _opened(path) as stream:
        raw = stream.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise InputError(path.name, f"is larger than {MAX_TEXT_BYTES >> 30} GiB; cut it")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path.name}:{line}", "is not UTF-8 text") from error


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

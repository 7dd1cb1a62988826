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
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError, did_you_mean
from potluck.spec.spec_problems import shown

WINDOW_S = 60.0
DAY_S = 86_400.0
LEVELS = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class LengthSpread:
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Rates and burstiness are None where the trace has no times, or fewer than two windows of them."""

    format_name: str
    requests: int
    span_s: float
    rate_per_s: float | None
    gap_cv: float | None
    """Standard deviation over mean of the gaps: 1 is Poisson."""
    window_cv: float | None
    """The same of the counts in whole windows of WINDOW_S."""
    window_peak_to_mean: float | None
    dispersion: float | None
    """Variance over mean of those counts: 1 is Poisson at any rate."""
    input_tokens: LengthSpread
    output_tokens: LengthSpread
    prefix_hit_share: float | None
    empty_outputs: int
    passed_over: int


def trace_stats(trace: Trace) -> TraceStats:
    gaps = np.diff(trace.time_s)
    counts = window_counts(trace.time_s, WINDOW_S)
    mean = float(counts.mean()) if len(counts) >= 2 else 0.0
    return TraceStats(
        trace.format_name,
        len(trace),
        trace.span_s,
        trace.rate_per_s,
        float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None,
        float(counts.std() / mean) if mean else None,
        float(counts.max() / mean) if mean else None,
        float(counts.var() / mean) if mean else None,
        _spread(trace.input_tokens),
        _spread(trace.output_tokens),
        trace.prefix_hit_share,
        trace.empty_outputs,
        trace.passed_over,
    )


def window_counts(time_s: NDArray[np.float64], window_s: float) -> NDArray[np.int64]:
    """Requests in each whole window from the first request on; the last, partial one is left out."""
    since_s = time_s - time_s[0]
    whole = int(since_s[-1] // window_s)
    inside = since_s[since_s < whole * window_s]
    return np.bincount((inside // window_s).astype(np.int64), minlength=whole)


def _spread(tokens: NDArray[np.float64]) -> LengthSpread:
    p50, p90, p99 = (float(value) for value in np.quantile(tokens, LEVELS))
    return LengthSpread(float(tokens.mean()), p50, p90, p99, float(tokens.max()))


def rates_by_hour(trace: Trace, parts: int = 24) -> tuple[float, ...]:
    """Requests a second in equal parts of the day, by the hours the trace covers; empty when it covers too few.

    Times of a trace that has dates are hours of the day (UTC); others count from midnight. Parts that it does not
    reach have the least rate seen.
    """
    part_s = DAY_S / parts
    if trace.span_s < 2 * part_s:
        return ()
    start_s = float(trace.time_s[0]) if trace.time_s[0] > DAY_S * 365 else 0.0
    times = trace.time_s if start_s else trace.time_s - float(trace.time_s[0])
    place = (np.floor(times / part_s) % parts).astype(np.int64)
    counts = np.bincount(place, minlength=parts).astype(np.float64)
    first, last = float(times[0]), float(times[-1])
    edges = np.arange(np.floor(first / part_s), np.floor(last / part_s) + 1)
    held_s = np.zeros(parts)
    for edge in edges:
        held_s[int(edge) % parts] += min((edge + 1) * part_s, last) - max(edge * part_s, first)
    seen = held_s > part_s / 4
    rates = counts[seen] / held_s[seen]
    result = np.full(parts, rates.min())
    result[seen] = rates
    return tuple(result.tolist())


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
    chosen = next(
        (csv_format for csv_format in CSV_FORMATS if set(csv_format.columns) <= {n.strip() for n in names}),
        None,
    )
    if chosen is None:
        raise InputError(f"{path.name}:1", _unknown_header(names))
    return chosen.name, _read_csv(path, chosen)


def _unknown_header(names: list[str]) -> str:
    if not any(names):
        return "is empty"
    for csv_format in CSV_FORMATS:
        missing = [column for column in csv_format.columns if column not in names]
        if len(missing) < len(csv_format.columns):
            return (
                f"column {missing[0]!r} is missing{did_you_mean(missing[0], names)} ({csv_format.name} trace)"
            )
    wanted = "; ".join(",".join(csv_format.columns) for csv_format in CSV_FORMATS)
    wanted += "; or Mooncake JSON lines; or ShareGPT JSON"
    return f"is no known trace: want CSV columns {wanted}; found {shown(names[0])}"


def _read_csv(path: Path, csv_format: _CsvFormat) -> Iterator[TraceRequest]:
    with _lines(path) as lines:
        reader = csv.reader(lines)
        header = [name.strip() for name in next(reader)]
        header[0] = header[0].lstrip("\ufeff")
        at = [header.index(column) for column in csv_format.columns]
        who, what, wait = (header.index(name) if name in header else -1 for name in LABELS)
        last_s = -inf
        try:
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise ValueError(f"has {len(row)} columns, the header has {len(header)}")
                last_s = time_of(csv_format.columns[0], row[at[0]], csv_format.time_s, last_s)
                yield TraceRequest(
                    last_s,
                    tokens(csv_format.columns[1], whole(row[at[1]]), least=1),
                    tokens(csv_format.columns[2], whole(row[at[2]]), least=0),
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


MAX_TOKENS = 10_000_000
MOST_LABEL = 200


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. `blocks` are its prefix block ids, where the trace has them."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""
    """Who sent it and of which class it is, where the trace says so."""
    request_class: str = ""
    wait_s: float = inf
    """How long anybody waits for its answer."""


def label(column: str, value: object) -> str:
    """A tenant's or a class's name; nothing is none."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MOST_LABEL or not value.isprintable():
        raise ValueError(f"{column} must be a name of at most {MOST_LABEL} characters, is {shown(value)}")
    return value.strip()


def wait_of(column: str, value: object) -> float:
    """Milliseconds from the arrival to the deadline; nothing is none."""
    if value is None or value == "":
        return inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise ValueError(f"{column} must be a positive number of milliseconds, is {shown(value)}")
    return value / 1000.0


def time_of(column: str, value: Any, read: Callable[[Any], float], last_s: float) -> float:
    """A time in seconds that does not lie before the one of the line above."""
    try:
        seconds = read(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{column} must be a time, is {shown(value)}") from error
    if not abs(seconds) < 1e15:
        raise ValueError(f"{column} must be a time, is {shown(value)}")
    if seconds < last_s:
        raise ValueError(f"{column} goes back by {last_s - seconds:g} s; sort the file by time")
    return seconds


def whole(text: str) -> object:
    """A number as CSV writers spell whole ones, `12` or `12.0`; anything else as it stands."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def tokens(column: str, value: object, least: int) -> int:
    if type(value) is not int:
        raise ValueError(f"{column} must be a whole number, is {shown(value)}")
    if not least <= value <= MAX_TOKENS:
        raise ValueError(f"{column} must be between {least} and {MAX_TOKENS:,}, is {shown(value)}")
    return value


BYTES_PER_TOKEN = 4
PROMPT_FROM = frozenset({"human", "user"})
ANSWER_FROM = frozenset({"gpt", "chatgpt", "assistant", "bing", "bard"})


def read_sharegpt(text: str, name: str) -> Iterator[TraceRequest | None]:
    """The requests one by one, all at time 0; None for a conversation that has none.

        [{"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}]

    A conversation gives one request: its first human turn is the prompt and the answer to it the output, as serving
    benchmarks do. Conversations without such a pair are passed over and counted. A turn may carry its length
    as `tokens`; otherwise it is estimated as one token per 4 bytes of UTF-8, which is about right for English prose
    (GPT-like vocabularies) and for Chinese, and wrong by a third or so for code. Say so where the result is shown.
    """
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}", f"is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise InputError(name, "is nested too deeply") from error
    for number, entry in enumerate(entries, 1):
        try:
            yield _request(entry)
        except ValueError as error:
            raise InputError(f"{name}: conversation {number}", str(error)) from error


def _request(entry: object) -> TraceRequest | None:
    if not isinstance(entry, dict):
        raise ValueError("is not a JSON object")
    if "conversations" not in entry:
        raise ValueError(f"'conversations' is missing{did_you_mean('conversations', entry)}")
    turns = entry["conversations"]
    if not isinstance(turns, list):
        raise ValueError(f"conversations must be a list, is {shown(turns)}")
    sides = [_side(turn) for turn in turns]
    for index in range(len(sides) - 1):
        if sides[index] in PROMPT_FROM:
            if sides[index + 1] not in ANSWER_FROM:
                return None
            prompt, answer = _length(turns[index]), _length(turns[index + 1])
            return TraceRequest(0.0, prompt, answer) if prompt else None
    return None


def _side(turn: object) -> str:
    if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
        raise ValueError("every turn must be an object with 'from'")
    return str(turn["from"])


def _length(turn: dict[str, object]) -> int:
    if "tokens" in turn:
        return tokens("tokens", turn["tokens"], least=0)
    value = turn.get("value")
    if not isinstance(value, str):
        raise ValueError(f"a turn needs 'value' or 'tokens', value is {shown(value)}")
    estimate = -(-len(value.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
    return min(estimate, MAX_TOKENS)

"""What the processes of a pipeline say to each other, over `pipeline_connection.py`.

Every message is a frozen value; what is large (tokens, states, caches) lies in the frame's body, whose layout the
message tells. The driver numbers what it asks, and answers bear the number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.core.codec import decode, encode
from potluck.core.errors import CapacityError, FormatError, InputError, PotluckError
from potluck.core.values.model import Model
from potluck.core.values.sampling import Drawing, SampledToken
from potluck.core.values.types import NodeType
from potluck.engine.compute.executor import RunnerSize, SequenceWork
from potluck.engine.compute.logit_edits import LogitEdit
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.pipeline.pipeline_connection import LinkError
from potluck.kv.chunks import KvChunk, KvManifest
from potluck.kv.codec_layout import Part

OPEN, CLOSE, GROW, BACK = 0, 1, 2, 3
LOGITS = ("none", "last", "all")
OP_NUMBERS, WORK_NUMBERS, EXPORT_NUMBERS = 4, 7, 4
NOBODY = -1


@dataclass(frozen=True, slots=True)
class EmulatedGpu:
    """The GPU that a worker acts as, the layers of the large model that it acts as if it had, and how much faster.
    States from the stage before take `hop_s` and `hop_s_per_token` longer, at speed-up 1."""

    model: Model
    node: NodeType
    tp: int
    first: int
    last: int
    speed_up: float = 1.0
    hop_s: float = 0.0
    hop_s_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What all workers have in common. Weights are read from a directory, or made from a seed."""

    config: EngineModelConfig
    size: RunnerSize
    directory: str | None
    seed: int
    threads: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """Become worker `place` of stage `stage`, with the layers [first, last)."""

    call: int
    stage: int
    place: int
    first: int
    last: int
    device: str
    settings: WorkerSettings
    emulate: EmulatedGpu | None = None


@dataclass(frozen=True, slots=True)
class ConnectStage:
    """Connect to the workers of the next stage; no host: to none in that place, which is lost."""

    call: int
    addresses: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ReconnectStage:
    call: int
    place: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Open, close and grow rows, or set them back to fewer tokens. Body: [ops, 4] of (what, row, tokens, since).
    Not answered."""

    ops: int


@dataclass(frozen=True, slots=True)
class EditSize:
    """A `LogitEdit` without its arrays, which lie in the body; `way` is its place among the ways."""

    way: int
    tokens: int
    allowed_bytes: int


@dataclass(frozen=True, slots=True)
class StepCommand:
    """A micro-batch. Body: [works, 7] of (row, start, tokens, logits, worker before, worker behind, position of the
    token to draw), then [exports, 4] of (work, start, stop, end of the hand-over), then for the first stage the
    tokens, and for the last one the arrays of `edits`. `ways` are for the works that ask for their last logits."""

    call: int
    works: int
    exports: int = 0
    ways: tuple[Drawing, ...] = ()
    edits: tuple[EditSize, ...] = ()


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states from one worker to one of the next stage, or word that there will be none."""

    step: int
    dtype: str
    rows: int
    failed: str = ""


@dataclass(frozen=True, slots=True)
class PackRow:
    call: int
    row: int
    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BeginHandover:
    """A hand-over begins. Body: the tokens."""

    call: int
    row: int
    about: KvManifest


@dataclass(frozen=True, slots=True)
class LayerPartHeader:
    """A chunk without its data, which lies in the body."""

    layer: int
    part: Part
    first: int
    stop: int
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class AcceptPart:
    call: int
    row: int
    label: LayerPartHeader


@dataclass(frozen=True, slots=True)
class FinishHandover:
    call: int
    row: int
    whole: bool


@dataclass(frozen=True, slots=True)
class CheckWorker:
    call: int


@dataclass(frozen=True, slots=True)
class StopWorker:
    call: int


_Handovers = PackRow | BeginHandover | AcceptPart | FinishHandover
Command = (
    WorkerInit
    | ConnectStage
    | ReconnectStage
    | RowChanges
    | StepCommand
    | _Handovers
    | CheckWorker
    | StopWorker
)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    call: int
    fingerprint: str
    dtype: str
    exact: bool
    products: str


@dataclass(frozen=True, slots=True)
class CommandDone:
    call: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A micro-batch is through this worker. Body, from the last stage: the tokens drawn."""

    call: int
    busy_from_s: float
    """On the clock of the worker's machine, as `busy_to_s`: to see how far stages work at once."""
    busy_to_s: float
    late: bool = False
    """Slower than the GPU that it acts as."""
    choices: tuple[SampledToken, ...] = ()
    """The same tokens with their probabilities, where somebody asked for them."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer's part of the cache. While a step runs, `work` says whose; the step's own answer comes later."""

    call: int
    labels: tuple[LayerPartHeader, ...]
    work: int = NOBODY


@dataclass(frozen=True, slots=True)
class WorkerChecked:
    call: int
    free_rows: int
    free_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommandFailed:
    call: int
    kind: str
    field: str
    problem: str


Answer = WorkerReady | CommandDone | StepDone | LayerParts | WorkerChecked | CommandFailed


def to_bytes(message: object) -> bytes:
    return json.dumps(encode(message), separators=(",", ":"), allow_nan=False).encode()


def read_command(head: bytes) -> Command:
    return decode(Command, _json(head), "command")  # type: ignore[arg-type]


def read_answer(head: bytes) -> Answer:
    return decode(Answer, _json(head), "answer")  # type: ignore[arg-type]


def read_states(head: bytes) -> HiddenStates:
    return decode(HiddenStates, _json(head), "states")


def _json(head: bytes) -> Any:
    try:
        return json.loads(head)
    except (ValueError, RecursionError) as error:
        raise FormatError("message", "is not JSON") from error


def numbers(values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def read_numbers(body: bytearray | memoryview, *shape: int) -> np.ndarray:
    size = int(np.prod(shape)) * 4
    if len(body) != size:
        raise FormatError("message", f"has a body of {len(body)} bytes, expected {size}")
    return np.frombuffer(body, dtype="<i4").reshape(shape)


def edit_bytes(edit: LogitEdit) -> bytes:
    floats = (np.asarray(array, "<f4").tobytes() for array in (edit.bias, edit.repetition, edit.penalty))
    return b"".join((numbers(edit.tokens), *floats, edit.allowed))


def read_edits(sizes: Sequence[EditSize], ways: int, body: memoryview) -> list[LogitEdit | None]:
    edits: list[LogitEdit | None] = [None] * ways
    for size in sizes:
        if not 0 <= size.way < ways or size.tokens < 0 or size.allowed_bytes < 0:
            raise FormatError("edits", "are of no way, or of no size")
        end = size.tokens * 16
        arrays = np.frombuffer(body[:end], "<f4").reshape(4, size.tokens).copy()
        tokens, bias, repetition, penalty = arrays
        allowed = bytes(body[end : end + size.allowed_bytes])
        edits[size.way] = LogitEdit(tokens.view("<i4"), bias, repetition, penalty, allowed)
        body = body[end + size.allowed_bytes :]
    if body:
        raise FormatError("edits", f"leave {len(body)} bytes of the message")
    return edits


def label_of(chunk: KvChunk) -> LayerPartHeader:
    size = memoryview(chunk.data).nbytes
    return LayerPartHeader(chunk.layer, chunk.part, chunk.first, chunk.stop, chunk.dtype, chunk.shape, size)


def chunk_of(header: LayerPartHeader, data: bytes | memoryview) -> KvChunk:
    return KvChunk(header.layer, header.part, header.first, header.stop, header.dtype, header.shape, data)


def chunks_of(message: LayerParts, body: bytearray) -> tuple[KvChunk, ...]:
    kv_chunks, begin, view = [], 0, memoryview(body)
    for header in message.labels:
        if header.size < 0 or begin + header.size > len(body):
            raise FormatError("chunks", "are longer than the message")
        kv_chunks.append(chunk_of(header, view[begin : begin + header.size]))
        begin += header.size
    return tuple(kv_chunks)


def work_row(work: SequenceWork, row: int, before: int, behind: int, position: int) -> tuple[int, ...]:
    return (row, work.start, len(work.tokens), LOGITS.index(work.logits), before, behind, position)


def failure(call: int, error: Exception) -> CommandFailed:
    """An error as it crosses: its kind and its text, nothing of the process that it comes from."""
    if isinstance(error, InputError):
        kind = "format" if isinstance(error, FormatError) else "input"
        return CommandFailed(call, kind, error.field, error.problem)
    if isinstance(error, CapacityError | LinkError):
        return CommandFailed(call, "capacity" if isinstance(error, CapacityError) else "link", "", str(error))
    text = " ".join(str(error).split())[:300]
    text = text if isinstance(error, PotluckError) else f"{type(error).__name__}: {text}"
    return CommandFailed(call, "internal", "", text)


def error_of(failed: CommandFailed) -> PotluckError:
    if failed.kind in ("input", "format"):
        kind = FormatError if failed.kind == "format" else InputError
        return kind(failed.field, failed.problem)
    kinds = {"capacity": CapacityError, "link": LinkError}
    return kinds.get(failed.kind, PotluckError)(failed.problem)

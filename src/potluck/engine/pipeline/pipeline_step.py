"""One step of a pipeline under way: what was sent to whom, what has come back, what is awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from potluck.core.errors import FormatError, InputError
from potluck.core.values.sampling import Drawing, SampledToken, Sampling
from potluck.engine.compute.batch_layout import check
from potluck.engine.compute.executor import SequenceWork, StepInputs, TokenDraw
from potluck.engine.compute.logit_edits import LogitEdit
from potluck.engine.pipeline import pipeline_messages as msg
from potluck.engine.pipeline.remote_worker import RemoteWorker
from potluck.kv.chunks import KvChunk


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step cannot be completed, since a worker is gone; or, with its `call`, a micro-batch failed."""

    call: int
    why: str


class PipelineStep:
    def __init__(self, step: StepInputs, began_s: float) -> None:
        self.works, self.began_s = step.works, began_s
        self.failed: StepFailed | None = None
        self.awaited: dict[tuple[int, RemoteWorker], list[StepPart]] = {}
        """By micro-batch and worker, the earliest stage first: who has not answered yet, for what."""
        self.busy_s = 0.0
        self.late = 0
        self._deliver = step.deliver
        asking = [index for index, work in enumerate(step.works) if work.logits == "last"]
        self._draws = dict(zip(asking, step.draws, strict=True))
        self._exports = {item.row: item for item in step.exports} if step.deliver is not None else {}
        self._found: dict[int, SampledToken] = {}
        self._waiting: dict[int, dict[int, tuple[KvChunk, ...]]] = {}
        self._next_layer: dict[int, int] = {}
        self._begun: set[int] = set()
        self._posted: list[tuple[int, RemoteWorker, list[StepPart]]] = []

    def post(
        self,
        call: int,
        remote: RemoteWorker,
        pieces: list[StepPart],
        rows: list[int],
        stage: int,
        stages: int,
    ) -> None:
        """Send a worker its part of a micro-batch, and count it as done in its tables."""
        table = [
            msg.work_row(
                piece.part,
                row,
                piece.path[stage - 1] if stage else msg.NOBODY,
                piece.path[stage + 1] if stage + 1 < stages else msg.NOBODY,
                self._draws[piece.work].position if piece.part.logits == "last" else 0,
            )
            for piece, row in zip(pieces, rows, strict=True)
        ]
        exports = [
            (place, export.start, export.stop, export.end)
            for place, piece in enumerate(pieces)
            if piece.last and (export := self._exports.get(piece.part.row)) is not None
        ]
        drawn = [self._draws[piece.work] for piece in pieces if piece.part.logits == "last"]
        ways: tuple[Drawing, ...] = ()
        edits: dict[int, LogitEdit] = {}
        if stage + 1 == stages:
            ways = tuple(_plain(draw.way) for draw in drawn)
            edits = {place: draw.edit for place, draw in enumerate(drawn) if draw.edit is not None}
        sizes = tuple(
            msg.EditSize(place, len(edit.tokens), len(edit.allowed)) for place, edit in edits.items()
        )
        tokens = [token for piece in pieces for token in piece.part.tokens] if not stage else []
        command = msg.StepCommand(call, len(table), len(exports), ways, sizes)
        self.awaited[call, remote] = pieces
        self._posted.append((call, remote, pieces))
        changes = map(msg.edit_bytes, edits.values())
        remote.post(command, [msg.numbers(table), msg.numbers(exports), msg.numbers(tokens), *changes])
        for piece, row in zip(pieces, rows, strict=True):
            remote.tables.advance(row, piece.part.start + len(piece.part.tokens))
        for row in rows:
            remote.tables.trim(row)

    def hear(self, source: RemoteWorker, answer: msg.Answer, body: bytearray) -> bool:
        pieces = self.awaited.get((answer.call, source))
        if pieces is None:
            return False
        if isinstance(answer, msg.LayerParts):
            if not 0 <= answer.work < len(pieces):
                raise FormatError("chunks", f"are of work {answer.work}, there are {len(pieces)}")
            self._hand_out(pieces[answer.work].part.row, msg.chunks_of(answer, body))
            return True
        if not isinstance(answer, msg.StepDone):
            return False
        del self.awaited[answer.call, source]
        self.busy_s += answer.busy_to_s - answer.busy_from_s
        self.late += answer.late
        if body:
            self._keep([piece.work for piece in pieces if piece.part.logits == "last"], answer, body)
        return True

    def _hand_out(self, row: int, chunks: tuple[KvChunk, ...]) -> None:
        """A later stage's may be heard before an earlier one's. Order only matters at the end of a hand-over, which
        the last layer's chunks are taken for."""
        if not chunks or self._deliver is None:
            return
        if not self._exports[row].last:
            self._begun.add(row)
            self._deliver(row, chunks)
            return
        waiting = self._waiting.setdefault(row, {})
        waiting[chunks[0].layer] = chunks
        while (layer := self._next_layer.get(row, 0)) in waiting:
            self._next_layer[row] = layer + 1
            self._deliver(row, waiting.pop(layer))

    @property
    def begun_exports(self) -> set[int]:
        """Rows of which some layers have gone out: they cannot be computed again."""
        return self._begun | set(self._next_layer)

    def _keep(self, works: list[int], answer: msg.StepDone, body: bytearray) -> None:
        choices = answer.choices or tuple(
            SampledToken(int(token)) for token in msg.read_numbers(body, len(works))
        )
        for work, choice in zip(works, choices, strict=True):
            self._found[work] = choice

    def choices(self) -> list[SampledToken]:
        return [self._found[work] for work in self._draws]

    def fail(self, call: int, why: str) -> None:
        """It cannot be completed; the first reason counts."""
        self.failed = self.failed or StepFailed(call, why)

    def involves(self, remote: RemoteWorker) -> bool:
        return any(remote_worker is remote for _, remote_worker, _ in self._posted)

    def rows_of(self, call: int) -> set[int]:
        return {piece.part.row for number, _, pieces in self._posted if number == call for piece in pieces}


def _plain(way: Sampling) -> Drawing:
    """Greedy is greedy, whatever else is said but what may not be drawn; biases and all that have become edits."""
    if way.temperature == 0:
        return Drawing(logprobs=way.logprobs, barred=way.barred, barred_before=way.barred_before)
    return Drawing(
        way.temperature,
        way.top_k,
        way.top_p,
        way.min_p,
        way.seed,
        way.logprobs,
        way.barred,
        way.barred_before,
    )


def must_be_sound(
    works: Sequence[SequenceWork],
    draws: Sequence[TokenDraw],
    vocab: int,
    workers: Callable[[int], Sequence[tuple[RemoteWorker, int]]],
) -> None:
    """What a worker would refuse is refused here, before anything has changed."""
    if not works or len({work.row for work in works}) != len(works):
        raise InputError("step", "must have one work for each of some rows")
    for work in works:
        strange = next((token for token in work.tokens if not 0 <= token < vocab), None)
        if strange is not None:
            raise InputError("tokens", f"{strange} is not in the vocabulary of {vocab}")
        for remote, local in workers(work.row):
            check([replace(work, row=local)], remote.tables)
    if any(work.logits == "all" for work in works):
        raise InputError("logits", "of all tokens are not brought back from a pipeline")
    if len(draws) != sum(work.logits == "last" for work in works):
        raise InputError("draws", "must be one for each work that asks for its last logits")


LEAST_TOKENS = 32  # A chunk is not cut into pieces smaller than this: each costs a pass over the weights.

Path = tuple[int, ...]  # A request's worker in each stage.


@dataclass(frozen=True, slots=True)
class StepPart:
    """A work, or a part of one; `work` is its place in the step."""

    work: int
    path: Path
    part: SequenceWork
    last: bool


def cut(
    works: Sequence[SequenceWork], paths: Sequence[Path], batches: int, worth: int
) -> list[list[StepPart]]:
    """At most `batches` micro-batches of about as many tokens each, `worth` or more, in the order to run them in."""
    total = sum(len(work.tokens) for work in works)
    batches = max(1, min(batches, total // worth))
    goal = max(1, -(-total // batches))
    order = sorted(range(len(works)), key=lambda i: paths[i])
    result: list[list[StepPart]] = [[]]
    room = goal
    for index in order:
        left = works[index]
        while True:
            if room <= 0 and len(result) < batches:
                result.append([])
                room = goal
            size, take = len(left.tokens), max(room, LEAST_TOKENS)
            if len(result) == batches or size - take < LEAST_TOKENS:
                result[-1].append(StepPart(index, paths[index], left, True))
                room -= size
                break
            head = replace(left, tokens=left.tokens[:take], logits="none")
            result[-1].append(StepPart(index, paths[index], head, False))
            left = replace(left, start=left.start + take, tokens=left.tokens[take:])
            room = 0
    return [batch for batch in result if batch]

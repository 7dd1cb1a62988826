"""PipelineExecutor: the workers of a pipeline as one executor for the engine's loop.

A step may be begun before the last one has ended, as long as no row is in both: so that all stages have work while a
batch of decodes goes round.

The loop's thread is the only caller; each worker has a thread that reads its answers into one inbox. When a worker is
gone, the rows that it had are lost and everybody else's go on: they are set back to where they were before the step,
which is possible while every layer keeps everything. Where windows were trimmed or states have moved on, all rows
of the step are lost with it.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from potluck.core.errors import CapacityError, FormatError, InputError, PotluckError
from potluck.core.routing.round_robin import WeightedRoundRobin
from potluck.core.values.model import LinearAttention
from potluck.core.values.sampling import Drawing, SampledToken, Sampling
from potluck.engine.compute.batch_layout import check
from potluck.engine.compute.executor import (
    Executor,
    IncomingCache,
    RunnerSize,
    SequenceWork,
    StepInputs,
    TokenDraw,
    WorkerLost,
)
from potluck.engine.compute.handover import ranges
from potluck.engine.compute.logit_edits import LogitEdit
from potluck.engine.memory.kv_cache import windows_of
from potluck.engine.model.config import EngineModelConfig
from potluck.engine.numbers import Exactness
from potluck.engine.pipeline import pipeline_messages as msg
from potluck.engine.pipeline.pipeline_connection import Bytes
from potluck.engine.pipeline.remote_worker import Event, Reach, RemoteWorker, WorkerRejoin, WorkerReturned
from potluck.kv.assembly import MissingParts
from potluck.kv.chunks import KvChunk, KvManifest


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

    def hear(self, source_worker: RemoteWorker, step_done: msg.Answer, body: bytearray) -> bool:
        pieces = self.awaited.get((step_done.call, source_worker))
        if pieces is None:
            return False
        if isinstance(step_done, msg.LayerParts):
            if not 0 <= step_done.work < len(pieces):
                raise FormatError("chunks", f"are of work {step_done.work}, there are {len(pieces)}")
            self._hand_out(pieces[step_done.work].part.row, msg.chunks_of(step_done, body))
            return True
        if not isinstance(step_done, msg.StepDone):
            return False
        del self.awaited[step_done.call, source_worker]
        self.busy_s += step_done.busy_to_s - step_done.busy_from_s
        self.late += step_done.late
        if body:
            self._keep([piece.work for piece in pieces if piece.part.logits == "last"], step_done, body)
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

    def _keep(self, works: list[int], step_done: msg.StepDone, body: bytearray) -> None:
        choices = step_done.choices or tuple(
            SampledToken(int(token)) for token in msg.read_numbers(body, len(works))
        )
        for work, sampled_token in zip(works, choices, strict=True):
            self._found[work] = sampled_token

    def choices(self) -> list[SampledToken]:
        return [self._found[work] for work in self._draws]

    def fail(self, call: int, why: str) -> None:
        """It cannot be completed; the first reason counts."""
        self.failed = self.failed or StepFailed(call, why)

    def involves(self, remote: RemoteWorker) -> bool:
        return any(remote_worker is remote for _, remote_worker, _ in self._posted)

    def rows_of(self, call: int) -> set[int]:
        return {piece.part.row for number, _, pieces in self._posted if number == call for piece in pieces}


def _plain(sampling: Sampling) -> Drawing:
    """Greedy is greedy, whatever else is said but what may not be drawn; biases and all that have become edits."""
    if sampling.temperature == 0:
        return Drawing(
            logprobs=sampling.logprobs, barred=sampling.barred, barred_before=sampling.barred_before
        )
    return Drawing(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.logprobs,
        sampling.barred,
        sampling.barred_before,
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


LAST_WORD_S = 2.0  # A worker that misses another's states may say so before the other one's end is noticed.


@dataclass(frozen=True, slots=True)
class _PipelineRow:
    path: Path
    remotes: tuple[RemoteWorker, ...]
    """Its workers, also those that are lost and have a successor in their place."""
    locals: tuple[int, ...]
    """Its row at each of them."""


class PipelineExecutor(Executor):
    def __init__(
        self,
        config: EngineModelConfig,
        fingerprint: str,
        size: RunnerSize,
        stages: Sequence[list[RemoteWorker]],
        weights: Sequence[Sequence[float]],
        inbox: queue.SimpleQueue[Event],
        *,
        layers: Sequence[range],
        wait_s: float,
        batches: int,
        worth_tokens: int,
        microbatches: int = 1,
        exact: Exactness,
        kv_dtype: str,
        reach: Reach | None = None,
    ) -> None:
        """`reach` makes a worker in the place of one that is lost; without it none comes back."""
        self.config, self.fingerprint, self.size = config, fingerprint, size
        self.microbatches, self.exact, self.kv_dtype = microbatches, exact, kv_dtype
        self._stages, self._inbox, self._wait_s, self._batches = stages, inbox, wait_s, batches
        self._layers, self._worth = layers, worth_tokens
        self._weights = weights
        self._rejoining = None if reach is None else WorkerRejoin(reach, inbox)
        self._back: list[tuple[RemoteWorker, WorkerReturned]] = []
        self._flying: list[PipelineStep] = []
        self._calls = itertools.count(1)
        self._answers: dict[int, tuple[msg.Answer, bytearray] | None] = {}
        self._rows: dict[int, _PipelineRow] = {}
        self._free = list(range(size.rows - 1, -1, -1))
        self._turns: list[WeightedRoundRobin[int]] = []
        for shares in weights:
            turns: WeightedRoundRobin[int] = WeightedRoundRobin()
            for place, weight in enumerate(shares):
                turns.set(place, weight)
            self._turns.append(turns)
        model = config.model
        linear = any(isinstance(layer.attention, LinearAttention) for layer in model.layers)
        self._can_go_back = not linear and windows_of(model, 0, model.layer_count) == (None,)
        self._busy_s = self._span_s = 0.0
        self._steps = self._micro_batches = self._late = 0

    # Rows.

    def open(self) -> int:
        """A row, with a worker of each stage by weighted round robin."""
        self._look()
        if not self._free:
            raise CapacityError(f"all {self.size.rows} rows are taken")
        path = []
        for stage, turns in zip(self._stages, self._turns, strict=True):
            place = turns.pick()
            if place is None:
                raise CapacityError(
                    f"no worker is left: {next(remote_worker.lost for remote_worker in stage)}"
                )
            path.append(place)
        row = self._free.pop()
        remotes = tuple(stage[place] for stage, place in zip(self._stages, path, strict=True))
        self._rows[row] = _PipelineRow(tuple(path), remotes, tuple(remote.open() for remote in remotes))
        return row

    def close(self, row: int) -> None:
        for remote, local in self.workers(row):
            remote.close(local)
        del self._rows[row]
        self._free.append(row)

    def held(self, row: int) -> int:
        remote, local = self.workers(row)[0]
        return remote.tables.lengths[local]

    def grow(self, row: int, tokens: int, since: int = 0) -> None:
        workers = self.workers(row)
        if not all(remote.tables.can_grow(local, tokens, since) for remote, local in workers):
            raise CapacityError(f"no room for {tokens} tokens")
        for remote, local in workers:
            remote.grow(local, tokens, since)

    def workers(self, row: int) -> list[tuple[RemoteWorker, int]]:
        """A row's workers, stage by stage, each with the row's number there."""
        if row not in self._rows:
            raise InputError(f"row {row}", "is not open")
        entry = self._rows[row]
        return list(zip(entry.remotes, entry.locals, strict=True))

    # Steps.

    def begin(self, step: StepInputs) -> Callable[[], list[SampledToken]]:
        self._look()
        works = step.works
        must_be_sound(works, step.draws, self.config.model.vocab, self.workers)
        gone = [work.row for work in works if self._lost_of(work.row)]
        if gone:
            raise WorkerLost(self._rows_lost(), self._lost_of(gone[0]) or "")
        pipeline_step = PipelineStep(step, time.monotonic())
        self._flying.append(pipeline_step)
        paths = [self._rows[work.row].path for work in works]
        for batch in cut(works, paths, self._batches, self._worth):
            self._post(pipeline_step, batch)
        return partial(self._collect, pipeline_step)

    def _collect(self, step: PipelineStep) -> list[SampledToken]:
        """The end of a step; deliveries of others under way are made meanwhile, too."""
        deadline = time.monotonic() + self._wait_s
        while step.awaited and step.failed is None:
            if self._next(deadline, next(iter(step.awaited))[1]):
                deadline = time.monotonic() + self._wait_s
        self._flying.remove(step)
        if step.failed is not None:
            raise self._settle(step.works, step, step.failed)
        self._span_s += time.monotonic() - step.began_s
        self._busy_s += step.busy_s
        self._late += step.late
        self._steps += 1
        return step.choices()

    def _post(self, step: PipelineStep, batch: list[StepPart]) -> None:
        call = next(self._calls)
        self._micro_batches += 1
        for stage, remotes in enumerate(self._stages):
            for remote in remotes:
                pieces = [piece for piece in batch if piece.path[stage] == remote.place]
                if pieces:
                    rows = [self._rows[piece.part.row].locals[stage] for piece in pieces]
                    step.post(call, remote, pieces, rows, stage, len(self._stages))

    def _blame(self, source_worker: RemoteWorker, command_failed: msg.CommandFailed) -> str:
        """Who is gone: a worker that misses states says so, perhaps before the other one's end is noticed."""
        deadline = time.monotonic() + LAST_WORD_S
        while True:
            try:
                remote, text, body = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                remote, text, body = source_worker, command_failed.problem, bytearray()
            self._hear((remote, text, body))
            if isinstance(text, str):
                return remote.lost or text

    def _settle(self, works: Sequence[SequenceWork], step: PipelineStep, failure: StepFailed) -> WorkerLost:
        """After a step that failed: which rows are lost; the others are as they were before."""
        lost = set(self._rows_lost()) | step.begun_exports
        if not self._can_go_back:
            lost |= {work.row for work in works}
        elif failure.call:
            lost |= step.rows_of(failure.call)
        for work in works:
            for remote, local in self.workers(work.row):
                if work.row not in lost:
                    remote.set_back(local, work.start)
        return WorkerLost(sorted(lost), failure.why)

    # Hand-over.

    def export(self, row: int, layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
        remote, local = self.workers(row)[self.stage_of(layer)]
        answer, body = self.ask(row, remote, lambda call: msg.PackRow(call, local, layer, start, stop))
        assert isinstance(answer, msg.LayerParts)
        return msg.chunks_of(answer, body)

    def arrival(self, row: int, manifest: KvManifest, tokens: Sequence[int]) -> PipelineHandover:
        return PipelineHandover(self, row, manifest, tokens)

    def stage_of(self, layer: int) -> int:
        for stage, layers in enumerate(self._layers):
            if layer in layers:
                return stage
        raise InputError("layer", f"{layer} is not one of the model's {self.config.model.layer_count}")

    # State.

    def check(self) -> None:
        self._look()
        for remote in self._remotes:
            if remote.lost is not None:
                continue
            remote.tables.check()
            try:
                answer, _ = self.ask(None, remote, msg.CheckWorker)
            except WorkerLost:
                continue  # noticed, and said by `health`
            assert isinstance(answer, msg.WorkerChecked)
            tables = remote.tables
            blocks = tuple(tables.free_blocks(group) for group in range(len(tables.groups)))
            if (answer.free_rows, answer.free_blocks) != (tables.free_rows, blocks):
                raise AssertionError(
                    f"{remote.name} has {answer.free_rows} rows and {answer.free_blocks} blocks free, "
                    f"the driver thinks {tables.free_rows} and {blocks}"
                )

    def health(self) -> str:
        """A stage without workers ends it all; while each has one, the others' requests go to those."""
        for place, stage in enumerate(self._stages):
            gone = [remote_worker.gone for remote_worker in stage]
            if all(gone) and not (self._rejoining is not None and self._rejoining.awaited(place)):
                return f"stage {place} has no worker left: {gone[-1]}"
        return ""

    def degraded(self) -> str:
        gone = [text for remote in self._remotes if (text := remote.gone)]
        if not gone or self.health():
            return ""
        return f"{len(gone)} of {len(self._remotes)} workers are lost; {gone[0]}"

    def notes(self) -> Mapping[str, float]:
        return {
            "pipeline_stages": float(len(self._stages)),
            "pipeline_workers": float(len(self._remotes)),
            "pipeline_workers_lost": float(sum(remote.gone is not None for remote in self._remotes)),
            "pipeline_micro_batches_per_step": self._micro_batches / max(1, self._steps),
            "pipeline_workers_busy": self._busy_s / self._span_s if self._span_s else 0.0,
            "emulated_late_micro_batches": float(self._late),
        }

    def shutdown(self) -> None:
        if self._rejoining is not None:
            self._rejoining.close()
        for remote in self._remotes:
            remote.stop()

    # Talking to workers.

    @property
    def _remotes(self) -> list[RemoteWorker]:
        return [remote for stage in self._stages for remote in stage]

    def ask(
        self,
        row: int | None,
        remote: RemoteWorker,
        command: Callable[[int], msg.Command],
        bodies: Sequence[Bytes] = (),
    ) -> tuple[msg.Answer, bytearray]:
        """One question and its answer. What the worker found wrong is raised here."""
        call = next(self._calls)
        self._answers[call] = None
        remote.post(command(call), bodies)
        deadline = time.monotonic() + self._wait_s
        while remote.lost is None and (answer := self._answers[call]) is None:
            self._next(deadline, remote)
        answer = self._answers.pop(call)
        if answer is None:
            raise WorkerLost(() if row is None else (row,), remote.lost or "")
        if isinstance(answer[0], msg.CommandFailed):
            raise msg.error_of(answer[0])
        return answer

    def _next(self, deadline_s: float, awaited_worker: RemoteWorker) -> bool:
        """Hear one event; whether anybody waited for it. When none comes in time, the awaited worker is to blame."""
        try:
            event = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            event = (awaited_worker, f"did not answer for {self._wait_s:g} s", bytearray())
        return self._hear(event)

    def _look(self) -> None:
        while not self._inbox.empty():
            self._hear(self._inbox.get())
        while self._back:
            self._take_in(*self._back.pop(0))

    def _take_in(self, remote: RemoteWorker, at: WorkerReturned) -> None:
        """A worker is there again: those of the stage before send it states, and new rows may go to it."""
        before = self._stages[remote.stage - 1] if remote.stage else []
        if self._rejoining is not None:
            self._rejoining.taken_in(remote.stage)
        self._stages[remote.stage][remote.place] = remote
        for remote_worker in before:
            if remote_worker.lost is None and remote.lost is None:
                with suppress(WorkerLost):  # it will connect by itself when it comes back
                    self.ask(
                        None,
                        remote_worker,
                        lambda call: msg.ReconnectStage(call, remote.place, at.host, at.port),
                    )
        if remote.lost is None:
            self._turns[remote.stage].set(remote.place, self._weights[remote.stage][remote.place])

    def _hear(self, event: Event) -> bool:
        """The one place where what workers say has consequences."""
        remote, command_failed, body = event
        if isinstance(command_failed, WorkerReturned):
            self._back.append((remote, command_failed))
            return True
        if isinstance(command_failed, str):
            if remote.lost is None:
                remote.lose(command_failed)
                self._turns[remote.stage].set(remote.place, 0.0)
                if self._rejoining is not None:
                    self._rejoining.miss(remote)
            for step in self._flying:
                if step.involves(remote):
                    step.fail(0, remote.lost or command_failed)
            return True
        if command_failed.call in self._answers:
            self._answers[command_failed.call] = command_failed, body
            return True
        for step in self._flying:
            if (
                isinstance(command_failed, msg.CommandFailed)
                and (command_failed.call, remote) in step.awaited
            ):
                if step.failed is None and command_failed.kind == "link":
                    step.fail(0, self._blame(remote, command_failed))
                else:
                    step.fail(command_failed.call, f"{remote.name}: {msg.error_of(command_failed)}")
                return True
            if step.hear(remote, command_failed, body):
                return True
        return False

    def _lost_of(self, row: int) -> str | None:
        return next((remote.lost for remote, _ in self.workers(row) if remote.lost), None)

    def _rows_lost(self) -> list[int]:
        return [row for row in self._rows if self._lost_of(row)]


class PipelineHandover(IncomingCache):
    """A hand-over into a pipeline: each layer's chunks go to the worker that has the layer, which checks them."""

    def __init__(
        self, driver: PipelineExecutor, row: int, manifest: KvManifest, tokens: Sequence[int]
    ) -> None:
        self._driver, self._row, self._about = driver, row, manifest
        self._workers = driver.workers(row)
        self._missing = MissingParts(ranges(driver.config.model, manifest.start, manifest.stop))
        begun: list[tuple[RemoteWorker, int]] = []
        try:
            for remote, local in self._workers:
                begin = partial(msg.BeginHandover, row=local, about=manifest)
                driver.ask(row, remote, begin, [msg.numbers(tokens)])
                remote.tables.grow(local, manifest.stop, since=manifest.stop)
                begun.append((remote, local))
        except PotluckError:
            for remote, local in begun:
                if remote.lost is None:
                    driver.ask(row, remote, partial(msg.FinishHandover, row=local, whole=False))
            raise

    def accept(self, chunk: KvChunk) -> None:
        layers = self._driver.config.model.layer_count
        if not 0 <= chunk.layer < layers:
            raise FormatError(f"hand-over: layer {chunk.layer}", f"is not one of the model's {layers}")
        remote, local = self._workers[self._driver.stage_of(chunk.layer)]
        accept = partial(msg.AcceptPart, row=local, label=msg.label_of(chunk))
        self._driver.ask(self._row, remote, accept, [chunk.data])
        self._missing.take(chunk)

    def finish(self) -> None:
        self._missing.must_be_whole()
        for remote, local in self._workers:
            self._driver.ask(self._row, remote, partial(msg.FinishHandover, row=local, whole=True))
            remote.tables.advance(local, self._about.stop)
            remote.tables.trim(local)

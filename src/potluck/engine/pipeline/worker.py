"""A worker of a pipeline: some layers of a model.

The driver says which layers it has and who is next, and from then on one thread does what the driver says, in that
order; other threads only read from sockets (`serving.py`). It logs nothing and keeps no files.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.engine.compute.emulated import StepPacer
from potluck.engine.compute.runner import Runner, RunnerSize, SequenceWork
from potluck.engine.compute.sample import sample
from potluck.engine.memory.handover import IncomingHandover, pack
from potluck.engine.model.checkpoint import RandomSource, SafetensorsSource
from potluck.engine.pipeline.pipeline_connection import Bytes, LinkError, PipelineConnection, TlsPair, connect
from potluck.engine.pipeline.pipeline_messages import (
    BACK,
    CLOSE,
    EXPORT_NUMBERS,
    GROW,
    LOGITS,
    NOBODY,
    OP_NUMBERS,
    OPEN,
    WORK_NUMBERS,
    AcceptPart,
    Answer,
    BeginHandover,
    CheckWorker,
    Command,
    CommandDone,
    ConnectStage,
    FinishHandover,
    HiddenStates,
    LayerParts,
    PackRow,
    ReconnectStage,
    RowChanges,
    StepCommand,
    StepDone,
    WorkerChecked,
    WorkerInit,
    WorkerReady,
    failure,
    label_of,
    numbers,
    parcel_of,
    read_command,
    read_edits,
    read_numbers,
    to_bytes,
)
from potluck.engine.pipeline.stage_inputs import ArrivedStates, StageInputs
from potluck.perf.timers.engine_host import NO_HOST
from potluck.perf.timers.roofline import roofline

Received = tuple[Command, bytearray]


class PipelineWorker:
    """All that a worker does once the driver has connected. Only `run`'s thread calls the runner."""

    def __init__(
        self, secret: bytes, driver: PipelineConnection, inputs: StageInputs, tls: TlsPair | None = None
    ) -> None:
        self._secret, self._driver, self._inputs, self._tls = secret, driver, inputs, tls
        self._runner: Runner | None = None
        self._setup: WorkerInit | None = None
        self._pacer: StepPacer | None = None
        self._next: list[PipelineConnection | None] = []
        self._arrivals: dict[int, IncomingHandover] = {}
        self._out_of_step: Exception | None = None
        self._commands: queue.SimpleQueue[Received | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Until the driver says stop or is gone."""
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._obey()
        finally:
            for link in (self._driver, *self._next):
                if link is not None:
                    link.close()

    def _obey(self) -> None:
        while (received := self._commands.get()) is not None:
            command, body = received
            if isinstance(command, RowChanges):
                self._rows(command, body)
                continue
            try:
                if self._out_of_step is not None:
                    raise self._out_of_step
                answer, data = self._do(command, body)
            except Exception as error:
                answer, data = failure(command.call, error), ()
            self._driver.send(to_bytes(answer), data)

    def _read(self) -> None:
        """The driver's commands, until its connection ends."""
        try:
            while True:
                head, body = self._driver.receive()
                command = read_command(head)
                if not isinstance(
                    command,
                    RowChanges
                    | StepCommand
                    | PackRow
                    | BeginHandover
                    | AcceptPart
                    | FinishHandover
                    | CheckWorker
                    | WorkerInit
                    | ConnectStage
                    | ReconnectStage,
                ):
                    break
                self._commands.put((command, body))
        except PotluckError:
            self._driver.close()
        self._commands.put(None)

    def _do(self, command: Command, body: bytearray) -> tuple[Answer, Sequence[Bytes]]:
        if isinstance(command, WorkerInit):
            return self._set_up(command), ()
        if isinstance(command, ConnectStage | ReconnectStage):
            return self._connect(command), ()
        if isinstance(command, StepCommand):
            return self._step(command, body)
        if isinstance(command, PackRow):
            parcels = pack(self._ready, command.row, command.layer, command.start, command.stop)
            labels = tuple(label_of(parcel) for parcel in parcels)
            return LayerParts(command.call, labels), [parcel.data for parcel in parcels]
        if isinstance(command, BeginHandover):
            tokens = read_numbers(body, len(body) // 4).tolist()
            self._arrivals[command.row] = IncomingHandover(self._ready, command.row, command.about, tokens)
        elif isinstance(command, AcceptPart):
            self._arrival(command.row).accept(parcel_of(command.label, memoryview(body)))
        elif isinstance(command, FinishHandover):
            arrival = self._arrival(command.row)
            if command.whole:
                arrival.finish()
            del self._arrivals[command.row]
        elif isinstance(command, CheckWorker):
            return self._check(command), ()
        else:
            raise FormatError("command", f"{type(command).__name__} is not expected here")
        return CommandDone(command.call), ()

    @property
    def _ready(self) -> Runner:
        if self._runner is None:
            raise InputError("worker", "has not been set up yet")
        return self._runner

    def _arrival(self, row: int) -> IncomingHandover:
        if row not in self._arrivals:
            raise InputError(f"row {row}", "expects no hand-over")
        return self._arrivals[row]

    def _set_up(self, setup: WorkerInit) -> WorkerReady:
        if setup.threads:
            torch.set_num_threads(setup.threads)
        source = RandomSource(setup.seed) if setup.directory is None else SafetensorsSource(setup.directory)
        size = RunnerSize(setup.rows, setup.blocks, setup.max_tokens, setup.max_chunk_tokens)
        self._runner = Runner(
            setup.config, source, size, first=setup.first, last=setup.last, device=setup.device
        )
        self._setup = setup
        if setup.emulate is not None:
            like = setup.emulate
            # What the host does between steps is the driver's, and real.
            timer = roofline(
                like.model, like.node, like.tp, layers=range(like.first, like.last), host=NO_HOST
            )
            self._pacer = StepPacer(timer, like.speed_up, host_s=0.0)
            self._inputs.hop_s = like.hop_s / like.speed_up
            self._inputs.hop_s_per_row = like.hop_s_per_token / like.speed_up
        exact, dtype = self._runner.exact, str(self._runner.dtype).removeprefix("torch.")
        return WorkerReady(setup.call, self._runner.fingerprint, dtype, exact.holds, exact.products)

    def _connect(self, command: ConnectStage | ReconnectStage) -> CommandDone:
        if isinstance(command, ReconnectStage):
            before, self._next[command.place] = self._next[command.place], None
            if before is not None:
                before.close()
            self._next[command.place] = self._behind(command.place, command.host, command.port)
            return CommandDone(command.call)
        for place, address in enumerate(zip(command.hosts, command.ports, strict=True)):
            self._next.append(self._behind(place, *address) if address[0] else None)
        return CommandDone(command.call)

    def _behind(self, place: int, host: str, port: int) -> PipelineConnection:
        if self._setup is None:
            raise InputError("worker", "has not been set up yet")
        who, name = f"{self._setup.place}", f"stage {self._setup.stage + 1} worker {place}"
        return connect((host, port), self._secret, who, name, self._tls)

    def _rows(self, command: RowChanges, body: bytearray) -> None:
        """Changes that the driver has made to its copy of the tables already, and must succeed here too."""
        try:
            tables = self._ready.tables
            for what, row, tokens, since in read_numbers(body, command.ops, OP_NUMBERS).tolist():
                if what == OPEN:
                    if tables.open() != row:
                        raise InputError(f"row {row}", "is not the one that this worker would open")
                elif what == CLOSE:
                    self._arrivals.pop(row, None)
                    tables.close(row)
                elif what == GROW:
                    tables.grow(row, tokens, since)
                elif what == BACK:
                    tables.advance(row, min(tokens, tables.lengths[row]))
                else:
                    raise FormatError("rows", f"{what} is not known")
        except Exception as error:
            self._out_of_step = error

    def _check(self, command: CheckWorker) -> WorkerChecked:
        tables = self._ready.tables
        tables.check()
        blocks = tuple(tables.free_blocks(group) for group in range(len(tables.groups)))
        return WorkerChecked(command.call, tables.free_rows, blocks)

    def _step(self, command: StepCommand, body: bytearray) -> tuple[Answer, Sequence[Bytes]]:
        part = _Part(command, body, self._ready.stack.embeds)
        try:
            return self._compute(part)
        except Exception as error:
            # Those behind wait for states that will not come.
            text = failure(command.call, error).problem
            self._pass_on(part, lambda _: (HiddenStates(command.call, "", 0, text), ()))
            raise

    def _compute(self, part: _Part) -> tuple[Answer, Sequence[Bytes]]:
        runner, command = self._ready, part.command
        hidden = None if runner.stack.embeds else self._hidden(part)
        began = time.monotonic()
        if self._pacer is not None:
            self._pacer.begin(part.works)
        out = runner.step(part.works, hidden, self._exporter(part) if part.exports else None)
        choices = []
        if runner.stack.has_head and command.ways:
            choices = sample(out, command.ways, part.positions, part.edits)
        late = self._pacer.end() if self._pacer is not None else False
        ended = time.monotonic()
        if not runner.stack.has_head:
            name = str(out.dtype).removeprefix("torch.")

            def states(works: list[int]) -> tuple[HiddenStates, Sequence[Bytes]]:
                chosen = out if len(works) == len(part.works) else out[part.places(works)]
                raw = chosen.cpu().contiguous().view(torch.uint8).numpy()
                return HiddenStates(command.call, name, len(chosen)), [memoryview(raw.data).cast("B")]

            self._pass_on(part, states)
        wanted = tuple(choices) if any(way.logprobs is not None for way in command.ways) else ()
        answer = StepDone(command.call, began, ended, late, wanted)
        return answer, [numbers([choice.token for choice in choices])]

    def _hidden(self, part: _Part) -> Tensor:
        """The states of all works, in their order, from whoever has computed them."""
        assert self._setup is not None
        runner, self_call = self._ready, part.command.call
        width = runner.config.model.hidden
        found: Tensor | None = None
        for sender in sorted(set(part.before)):
            works = [work for work, before in enumerate(part.before) if before == sender]
            states = _tensor(self._inputs.take(self_call, sender, self._setup.wait_s), width)
            if len(works) == len(part.works):
                found = states
                break
            places = part.places(works)
            if len(states) != len(places):
                raise FormatError("states", f"are {len(states)}, expected {len(places)}")
            if found is None:
                found = torch.empty(part.tokens, width, dtype=states.dtype)
            found[places] = states
        self._inputs.forget_before(self_call)
        assert found is not None
        return found

    def _pass_on(
        self, part: _Part, states: Callable[[list[int]], tuple[HiddenStates, Sequence[Bytes]]]
    ) -> None:
        for target in sorted(set(part.behind) - {NOBODY}):
            works = [work for work, behind in enumerate(part.behind) if behind == target]
            message, data = states(works)
            link = self._next[target]
            try:
                if link is not None:
                    link.send(to_bytes(message), data)
            except LinkError:
                # The driver sees that it is gone, too; others may be served.
                link.close()  # type: ignore[union-attr]

    def _exporter(self, part: _Part) -> Callable[[int], None]:
        runner, layers = self._ready, self._ready.stack.last - self._ready.stack.first

        def export(layer: int) -> None:
            if self._pacer is not None:
                self._pacer.reach((layer - runner.stack.first + 1) / layers)
            for work, start, stop, whole in part.exports:
                parcels = pack(runner, part.works[work].row, layer, start, stop, whole)
                if not parcels:
                    continue
                labels = tuple(label_of(parcel) for parcel in parcels)
                message = LayerParts(part.command.call, labels, work)
                self._driver.send(to_bytes(message), [parcel.data for parcel in parcels])

        return export


class _Part:
    """This worker's part of a micro-batch, unpacked."""

    def __init__(self, command: StepCommand, body: bytearray, first_stage: bool) -> None:
        view = memoryview(body)
        split = command.works * WORK_NUMBERS * 4
        rest = split + command.exports * EXPORT_NUMBERS * 4
        table = read_numbers(view[:split], command.works, WORK_NUMBERS)
        self.command = command
        self.sizes: list[int] = table[:, 2].tolist()
        self.tokens = sum(self.sizes)
        self.before: list[int] = table[:, 4].tolist()
        self.behind: list[int] = table[:, 5].tolist()
        self.positions = [row[6] for row in table.tolist() if LOGITS[row[3]] == "last"]
        exports = read_numbers(view[split:rest], command.exports, EXPORT_NUMBERS)
        self.exports: list[list[int]] = exports.tolist()
        behind = rest + self.tokens * 4 * first_stage
        tokens = [0] * self.tokens
        if first_stage:
            tokens = read_numbers(view[rest:behind], self.tokens).tolist()
        self.edits = read_edits(command.edits, len(command.ways), view[behind:])
        self._firsts = np.concatenate(([0], np.cumsum(self.sizes)))
        self.works = [
            SequenceWork(row, start, tokens[first : first + size], LOGITS[logits])  # type: ignore[arg-type]
            for (row, start, size, logits, *_), first in zip(
                table.tolist(), self._firsts.tolist(), strict=False
            )
        ]

    def places(self, works: list[int]) -> Tensor:
        """Where the tokens of some works lie among those of all."""
        spans = [np.arange(self._firsts[work], self._firsts[work + 1]) for work in works]
        return torch.from_numpy(np.concatenate(spans))


def _tensor(states: ArrivedStates, width: int) -> Tensor:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(states.dtype)
    if dtype is None or len(states.data) != states.rows * width * dtype.itemsize:
        raise FormatError("states", f"of {len(states.data)} bytes are not {states.rows} rows of {width}")
    return torch.frombuffer(states.data, dtype=dtype).view(states.rows, width)

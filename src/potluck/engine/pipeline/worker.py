"""A worker of a pipeline: some layers of a model. It logs nothing and keeps no files.

It begins with nothing but a port. A driver that knows the secret makes a worker of it: says which layers it has and
who is next, and from then on one thread does what the driver says, in that order; other threads only read from
sockets. Workers of the stage before send it states. A worker that stays then waits for the next driver.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.engine.compute.emulated import StepPacer
from potluck.engine.compute.executor import SequenceWork
from potluck.engine.compute.handover import IncomingHandover, pack
from potluck.engine.compute.runner import Runner
from potluck.engine.compute.sample import sample
from potluck.engine.model.checkpoint import RandomSource, SafetensorsSource
from potluck.engine.pipeline import pipeline_messages as msg
from potluck.engine.pipeline.pipeline_connection import (
    Bytes,
    LinkError,
    PipelineConnection,
    TlsPair,
    connect,
    welcome,
)
from potluck.perf.timers.engine_host import NO_HOST
from potluck.perf.timers.roofline import roofline

DRIVER = "driver"
FIRST_CONTACT_S = 120.0  # A worker that does not stay gives up when no driver has come by then.
BUSY_S = 5.0  # How long a second driver waits for the first one to end before it is turned away.
MOST_GREETINGS = 32
"""Connections at a time that have not proved anything yet; each is given up after seconds."""


class WorkerListener:
    """Listens; sorts connections into drivers and senders of states."""

    def __init__(self, listener: socket.socket, secret: bytes, tls: TlsPair | None = None) -> None:
        self.drivers: queue.SimpleQueue[PipelineConnection] = queue.SimpleQueue()
        self.inputs = StageInputs()
        self.free = threading.Semaphore(1)  # Whether no driver is being served.
        self._listener, self._secret, self._tls = listener, secret, tls
        self._greeting = threading.Semaphore(MOST_GREETINGS)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            self._greeting.acquire()
            threading.Thread(target=self._greet, args=(sock, str(address[0])), daemon=True).start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        try:
            connection, who = welcome(sock, self._secret, peer, self._tls)
        except LinkError:
            return
        finally:
            self._greeting.release()
        if who == DRIVER:
            if self.free.acquire(timeout=BUSY_S):
                self.drivers.put(connection)
            else:
                connection.close()
        elif who.isdecimal() and len(who) < 6:
            read_into(self.inputs, connection, int(who))
        else:
            connection.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def read_into(inputs: StageInputs, connection: PipelineConnection, sender: int) -> None:
    """What one worker of the stage before sends, until it ends."""
    number = inputs.join(sender)
    try:
        while True:
            head, body = connection.receive()
            inputs.put(sender, msg.read_states(head), body)
    except PotluckError as error:
        connection.close()
        inputs.lose(sender, f"a worker of the stage before is gone ({error})", number)


def serve(listener: socket.socket, secret: bytes, stay: bool = False, tls: TlsPair | None = None) -> None:
    door = WorkerListener(listener, secret, tls)
    try:
        while True:
            driver_connection = door.drivers.get(timeout=None if stay else FIRST_CONTACT_S)
            door.inputs = StageInputs()
            with contextlib.suppress(LinkError):  # the driver is gone: nobody is left to tell
                PipelineWorker(secret, driver_connection, door.inputs, tls).run()
            door.free.release()
            if not stay:
                return
    except queue.Empty:
        return
    finally:
        door.close()


Received = tuple[msg.Command, bytearray]


class PipelineWorker:
    """All that a worker does once the driver has connected. Only `run`'s thread calls the runner."""

    def __init__(
        self,
        secret: bytes,
        driver_connection: PipelineConnection,
        inputs: StageInputs,
        tls: TlsPair | None = None,
    ) -> None:
        self._secret, self._driver, self._inputs, self._tls = secret, driver_connection, inputs, tls
        self._runner: Runner | None = None
        self._setup: msg.WorkerInit | None = None
        self._pacer: StepPacer | None = None
        self._next: list[PipelineConnection | None] = []
        self._arrivals: dict[int, IncomingHandover] = {}
        self._out_of_step: Exception | None = None
        self._commands: queue.SimpleQueue[Received | None] = queue.SimpleQueue()

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._obey()
        finally:
            for connection in (self._driver, *self._next):
                if connection is not None:
                    connection.close()

    def _obey(self) -> None:
        while (received := self._commands.get()) is not None:
            command, body = received
            if isinstance(command, msg.RowChanges):
                self._rows(command, body)
                continue
            try:
                if self._out_of_step is not None:
                    raise self._out_of_step
                answer, data = self._do(command, body)
            except Exception as error:
                answer, data = msg.failure(command.call, error), ()
            self._driver.send(msg.to_bytes(answer), data)

    def _read(self) -> None:
        try:
            while True:
                head, body = self._driver.receive()
                command = msg.read_command(head)
                if isinstance(command, msg.StopWorker):
                    break
                self._commands.put((command, body))
        except PotluckError:
            self._driver.close()
        self._commands.put(None)

    def _do(self, command: msg.Command, body: bytearray) -> tuple[msg.Answer, Sequence[Bytes]]:
        if isinstance(command, msg.WorkerInit):
            return self._set_up(command), ()
        if isinstance(command, msg.ConnectStage | msg.ReconnectStage):
            return self._connect(command), ()
        if isinstance(command, msg.StepCommand):
            return self._step(command, body)
        if isinstance(command, msg.PackRow):
            chunks = pack(self._ready, command.row, command.layer, command.start, command.stop)
            labels = tuple(msg.label_of(chunk) for chunk in chunks)
            return msg.LayerParts(command.call, labels), [chunk.data for chunk in chunks]
        if isinstance(command, msg.BeginHandover):
            tokens = msg.read_numbers(body, len(body) // 4).tolist()
            self._arrivals[command.row] = IncomingHandover(self._ready, command.row, command.about, tokens)
        elif isinstance(command, msg.AcceptPart):
            self._arrival(command.row).accept(msg.chunk_of(command.label, memoryview(body)))
        elif isinstance(command, msg.FinishHandover):
            arrival = self._arrival(command.row)
            if command.whole:
                arrival.finish()
            del self._arrivals[command.row]
        elif isinstance(command, msg.CheckWorker):
            return self._check(command), ()
        else:
            raise FormatError("command", f"{type(command).__name__} is not expected here")
        return msg.CommandDone(command.call), ()

    @property
    def _ready(self) -> Runner:
        if self._runner is None:
            raise InputError("worker", "has not been set up yet")
        return self._runner

    def _arrival(self, row: int) -> IncomingHandover:
        if row not in self._arrivals:
            raise InputError(f"row {row}", "expects no hand-over")
        return self._arrivals[row]

    def _set_up(self, worker_init: msg.WorkerInit) -> msg.WorkerReady:
        settings, self._setup = worker_init.settings, worker_init
        if settings.threads:
            torch.set_num_threads(settings.threads)
        folder, size = settings.directory, settings.size
        source = RandomSource(settings.seed) if folder is None else SafetensorsSource(folder)
        self._runner = Runner(
            settings.config,
            source,
            size,
            first=worker_init.first,
            last=worker_init.last,
            device=worker_init.device,
        )
        if worker_init.emulate is not None:
            like = worker_init.emulate
            # What the host does between steps is the driver's, and real.
            timer = roofline(
                like.model, like.node, like.tp, layers=range(like.first, like.last), host=NO_HOST
            )
            self._pacer = StepPacer(timer, like.speed_up, host_s=0.0)
            self._inputs.hop_s = like.hop_s / like.speed_up
            self._inputs.hop_s_per_row = like.hop_s_per_token / like.speed_up
        exact, dtype = self._runner.exact, str(self._runner.dtype).removeprefix("torch.")
        return msg.WorkerReady(worker_init.call, self._runner.fingerprint, dtype, exact.holds, exact.products)

    def _connect(self, command: msg.ConnectStage | msg.ReconnectStage) -> msg.CommandDone:
        if isinstance(command, msg.ReconnectStage):
            before, self._next[command.place] = self._next[command.place], None
            if before is not None:
                before.close()
            self._next[command.place] = self._behind(command.place, command.host, command.port)
            return msg.CommandDone(command.call)
        for place, address in enumerate(command.addresses):
            self._next.append(self._behind(place, *address) if address[0] else None)
        return msg.CommandDone(command.call)

    def _behind(self, place: int, host: str, port: int) -> PipelineConnection:
        if self._setup is None:
            raise InputError("worker", "has not been set up yet")
        who, name = f"{self._setup.place}", f"stage {self._setup.stage + 1} worker {place}"
        return connect((host, port), self._secret, who, name, self._tls)

    def _rows(self, command: msg.RowChanges, body: bytearray) -> None:
        """Changes that the driver has made to its copy of the tables already, and must succeed here too."""
        try:
            tables = self._ready.tables
            for what, row, tokens, since in msg.read_numbers(body, command.ops, msg.OP_NUMBERS).tolist():
                if what == msg.OPEN:
                    if tables.open() != row:
                        raise InputError(f"row {row}", "is not the one that this worker would open")
                elif what == msg.CLOSE:
                    self._arrivals.pop(row, None)
                    tables.close(row)
                elif what == msg.GROW:
                    tables.grow(row, tokens, since)
                elif what == msg.BACK:
                    tables.advance(row, min(tokens, tables.lengths[row]))
                else:
                    raise FormatError("rows", f"{what} is not known")
        except Exception as error:
            self._out_of_step = error

    def _check(self, command: msg.CheckWorker) -> msg.WorkerChecked:
        tables = self._ready.tables
        tables.check()
        blocks = tuple(tables.free_blocks(group) for group in range(len(tables.groups)))
        return msg.WorkerChecked(command.call, tables.free_rows, blocks)

    def _step(self, command: msg.StepCommand, body: bytearray) -> tuple[msg.Answer, Sequence[Bytes]]:
        part = _Part(command, body, self._ready.stack.embeds)
        try:
            return self._compute(part)
        except Exception as error:
            # Those behind wait for states that will not come.
            text = msg.failure(command.call, error).problem
            self._pass_on(part, lambda _: (msg.HiddenStates(command.call, "", 0, text), ()))
            raise

    def _compute(self, part: _Part) -> tuple[msg.Answer, Sequence[Bytes]]:
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

            def states(works: list[int]) -> tuple[msg.HiddenStates, Sequence[Bytes]]:
                chosen = out if len(works) == len(part.works) else out[part.places(works)]
                raw = chosen.cpu().contiguous().view(torch.uint8).numpy()
                return msg.HiddenStates(command.call, name, len(chosen)), [memoryview(raw.data).cast("B")]

            self._pass_on(part, states)
        wanted = tuple(choices) if any(way.logprobs is not None for way in command.ways) else ()
        step_done = msg.StepDone(command.call, began, ended, late, wanted)
        return step_done, [msg.numbers([sampled_token.token for sampled_token in choices])]

    def _hidden(self, part: _Part) -> Tensor:
        """The states of all works, in their order, from whoever has computed them."""
        assert self._setup is not None
        runner, self_call = self._ready, part.command.call
        width = runner.config.model.hidden
        tensor: Tensor | None = None
        for sender in sorted(set(part.before)):
            works = [work for work, before in enumerate(part.before) if before == sender]
            states = _tensor(*self._inputs.take(self_call, sender, self._setup.settings.wait_s), width)
            if len(works) == len(part.works):
                tensor = states
                break
            places = part.places(works)
            if len(states) != len(places):
                raise FormatError("states", f"are {len(states)}, expected {len(places)}")
            if tensor is None:
                tensor = torch.empty(part.tokens, width, dtype=states.dtype)
            tensor[places] = states
        self._inputs.forget_before(self_call)
        assert tensor is not None
        return tensor

    def _pass_on(
        self, part: _Part, states: Callable[[list[int]], tuple[msg.HiddenStates, Sequence[Bytes]]]
    ) -> None:
        for target in sorted(set(part.behind) - {msg.NOBODY}):
            works = [work for work, behind in enumerate(part.behind) if behind == target]
            message, data = states(works)
            connection = self._next[target]
            try:
                if connection is not None:
                    connection.send(msg.to_bytes(message), data)
            except LinkError:
                # The driver sees that it is gone, too; others may be served.
                connection.close()  # type: ignore[union-attr]

    def _exporter(self, part: _Part) -> Callable[[int], None]:
        runner, layers = self._ready, self._ready.stack.last - self._ready.stack.first

        def export(layer: int) -> None:
            if self._pacer is not None:
                self._pacer.reach((layer - runner.stack.first + 1) / layers)
            for work, start, stop, whole in part.exports:
                chunks = pack(runner, part.works[work].row, layer, start, stop, whole)
                if not chunks:
                    continue
                labels = tuple(msg.label_of(chunk) for chunk in chunks)
                message = msg.LayerParts(part.command.call, labels, work)
                self._driver.send(msg.to_bytes(message), [chunk.data for chunk in chunks])

        return export


class _Part:
    def __init__(self, command: msg.StepCommand, body: bytearray, first_stage: bool) -> None:
        view = memoryview(body)
        split = command.works * msg.WORK_NUMBERS * 4
        rest = split + command.exports * msg.EXPORT_NUMBERS * 4
        table = msg.read_numbers(view[:split], command.works, msg.WORK_NUMBERS)
        self.command = command
        self.sizes: list[int] = table[:, 2].tolist()
        self.tokens = sum(self.sizes)
        self.before: list[int] = table[:, 4].tolist()
        self.behind: list[int] = table[:, 5].tolist()
        self.positions = [row[6] for row in table.tolist() if msg.LOGITS[row[3]] == "last"]
        exports = msg.read_numbers(view[split:rest], command.exports, msg.EXPORT_NUMBERS)
        self.exports: list[list[int]] = exports.tolist()
        behind = rest + self.tokens * 4 * first_stage
        tokens = [0] * self.tokens
        if first_stage:
            tokens = msg.read_numbers(view[rest:behind], self.tokens).tolist()
        self.edits = msg.read_edits(command.edits, len(command.ways), view[behind:])
        self._firsts = np.concatenate(([0], np.cumsum(self.sizes)))
        self.works = [
            SequenceWork(row, start, tokens[first : first + size], msg.LOGITS[logits])  # type: ignore[arg-type]
            for (row, start, size, logits, *_), first in zip(
                table.tolist(), self._firsts.tolist(), strict=False
            )
        ]

    def places(self, works: list[int]) -> Tensor:
        """Where the tokens of some works lie among those of all."""
        spans = [np.arange(self._firsts[work], self._firsts[work + 1]) for work in works]
        return torch.from_numpy(np.concatenate(spans))


def _tensor(states: msg.HiddenStates, data: bytearray, width: int) -> Tensor:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(states.dtype)
    if dtype is None or len(data) != states.rows * width * dtype.itemsize:
        raise FormatError("states", f"of {len(data)} bytes are not {states.rows} rows of {width}")
    return torch.frombuffer(data, dtype=dtype).view(states.rows, width)


class StageInputs:
    """Filled by the threads that read, emptied by the one that computes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], tuple[msg.HiddenStates, bytearray, float]] = {}
        """With the time before which a slower network, which is emulated, would not have brought them."""
        self.hop_s = self.hop_s_per_row = 0.0
        self._lost: dict[int, str] = {}
        self._joined: dict[int, int] = {}
        """How often each sender has connected: one that comes back ends what its last connection was."""

    def join(self, sender: int) -> int:
        """A worker of the stage before has connected; the number of its connection."""
        with self._changed:
            self._lost.pop(sender, None)
            self._joined[sender] = self._joined.get(sender, 0) + 1
            return self._joined[sender]

    def put(self, sender: int, states: msg.HiddenStates, data: bytearray) -> None:
        due = self._clock() + self.hop_s + self.hop_s_per_row * states.rows
        with self._changed:
            self._arrived[states.step, sender] = states, data, due
            self._changed.notify_all()

    def lose(self, sender: int, why: str, number: int) -> None:
        """Nothing more will come over one of a worker's connections."""
        with self._changed:
            if self._joined.get(sender, 0) == number:
                self._lost[sender] = why
                self._changed.notify_all()

    def take(self, step: int, sender: int, within_s: float) -> tuple[msg.HiddenStates, bytearray]:
        """What a worker sent for a step; an error when it said that there is none, is gone, or is late."""
        deadline = self._clock() + within_s
        with self._changed:
            while (step, sender) not in self._arrived:
                if sender in self._lost:
                    raise LinkError(self._lost[sender])
                left = deadline - self._clock()
                if left <= 0:
                    raise LinkError(f"the stage before sent nothing for {within_s:g} s")
                self._changed.wait(left)
            states, data, due = self._arrived.pop((step, sender))
        if states.failed:
            raise LinkError(states.failed)
        while (early := due - self._clock()) > 0:
            time.sleep(early)
        return states, data

    def forget_before(self, step: int) -> None:
        """Steps are taken in order: what is left of earlier ones, nobody will ask for."""
        with self._changed:
            for key in [key for key in self._arrived if key[0] < step]:
                del self._arrived[key]

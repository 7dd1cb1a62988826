"""Compiles a client's JSON schema once in a process that the kernel bounds, before the engine compiles it itself.

    engine ── tokenizer, then a socket for each schema ──▶ trial server ── fork ──▶ trial: compile, first masks
       ▲                                                                                   │
       └───── "begun", then "ok" and its memory, or why not, or the end: it was killed ────┘

The compiler (llguidance) has limits of its own on most of what it makes, but not on all: some schemas of a few
hundred bytes take minutes or all memory. Its result cannot leave the process that made it, so that a schema is
compiled twice: on trial, and then in the engine, where it takes what it took on trial. A trial takes about 10 ms.

The trial server is a process of its own, which has the tokenizer but no torch and no CUDA: so it can fork, and a
trial that is killed costs neither the tokenizer's loading nor the trials of other schemas. Memory (RLIMIT_AS, beyond
what the server has), processor time (RLIMIT_CPU) and time (SIGALRM) are watched by the kernel: a trial needs no
other process to end it. The server ends when the engine closes its socket, also by dying.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from potluck.core.errors import PotluckError

TRIAL_TOKENS = 16
"""Output tokens whose masks are computed on trial: what a pattern costs shows only inside of its text."""
SERVER_START_S = 120.0
LONGEST_MESSAGE_BYTES = 256 << 20
READY, BEGUN, OK = b"ready", b"begun", b"ok"
LENGTH = struct.Struct("=Q")


class TrialServerLost(PotluckError):
    """The trial server could not be started, or ended; not the fault of a schema."""


class TrialFailed(PotluckError):
    """The schema cannot be compiled; the message says why."""


class TrialKilled(TrialFailed):
    """The schema was not compiled within the limits; on a machine that is less busy it may be."""


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """What llguidance must know of a model's tokenizer."""

    description: str
    """As JSON of Hugging Face's tokenizers."""
    vocab: int
    end: int

    def load(self, library: Any) -> Any:
        return library.LLTokenizer(
            self.description,
            n_vocab=self.vocab,
            eos_token=self.end,
            slices=library.LLTokenizer.json_slices(),
        )


@dataclass(frozen=True, slots=True)
class TrialLimits:
    memory_bytes: int = 128 << 20
    """Beyond what the tokenizer takes."""
    cpu_s: int = 3
    wall_s: int = 20
    """However busy the machine is."""

    def __str__(self) -> str:
        mib = self.memory_bytes >> 20
        return f"{mib} MiB of memory, {self.cpu_s} s of processor time or {self.wall_s} s"


STYLE: dict[str, object] = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": r",\x20?",
    "key_separator": r":\x20?",
    "coerce_one_of": True,
    "lenient": False,
}
"""One line, with a blank behind commas and colons or none: weak models would go on with blanks for ever. What a
schema says of these (`x-guidance`) does not count."""
LIMITS: dict[str, object] = {
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "verbose_errors": False,
}
"""Some milliseconds for a token and some 40 MB, at the very most."""


def compile_schema(library: Any, tokenizer: Any, schema: str) -> Any:
    """A matcher of llguidance; TrialFailed where it cannot compile the schema."""
    try:
        grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides=STYLE)
    except ValueError as error:
        raise TrialFailed(f"the schema cannot be used ({one_line(str(error))})") from error
    limits = library.LLParserLimits(**LIMITS)
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise TrialFailed(f"the schema cannot be used ({one_line(matcher.get_error())})")
    return matcher


def one_line(text: str) -> str:
    return " ".join(text.split())[:200] or "it is at its end"


class GrammarTrials:
    """The engine's side; `check` may be called from several threads."""

    def __init__(self, tokenizer: GrammarTokenizer, limits: TrialLimits | None = None) -> None:
        self._tokenizer, self._limits = tokenizer, limits or TrialLimits()
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._finish: weakref.finalize[Any, Any] | None = None

    def check(self, schema: str) -> int:
        """The memory in bytes of a schema that compiles within the limits; TrialFailed says why one does not."""
        begun, answer = self._tried(schema)
        if not begun:  # The server ended with the schema on its way, or could not fork.
            begun, answer = self._tried(schema)
        if not begun:
            raise TrialServerLost("the process that compiles schemas does not answer")
        if answer is None:
            raise TrialKilled(f"the schema needs more than {self._limits} to compile; make it smaller")
        verdict, _, size_bytes = answer.partition(b" ")
        if verdict != OK:
            raise TrialFailed(answer.decode("utf-8", "replace"))
        return int(size_bytes)

    def _tried(self, schema: str) -> tuple[bool, bytes | None]:
        """Whether a trial began, and its answer; None where it was killed."""
        begun, answer = False, None
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            # Beyond the trial's own limit, which ends it: for a machine that is too busy to deliver signals.
            ours.settimeout(2.0 * self._limits.wall_s)
            with suppress(OSError):
                _send(ours, schema.encode())
                begun = _receive(ours) == BEGUN
                answer = _receive(ours) if begun else None
        return begun, answer

    def close(self) -> None:
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        return None if self._server is None else self._server[0].pid

    def _hand_over(self, theirs: socket.socket) -> None:
        """One that ended is replaced by another, once."""
        with self._lock:
            for last in (False, True):
                try:
                    if self._server is None:
                        self._server = self._start()
                        self._finish = weakref.finalize(self, _end_server, *self._server)
                    socket.send_fds(self._server[1], [b"t"], [theirs.fileno()])
                    return
                except OSError as error:
                    self._end()
                    if last:
                        line = f"the process that compiles schemas cannot be reached ({error})"
                        raise TrialServerLost(line) from error

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                command = [sys.executable, "-m", "potluck.engine.compute.grammar_trial"]
                process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
                )
            ours.settimeout(SERVER_START_S)
            _send(ours, json.dumps([asdict(self._tokenizer), asdict(self._limits)]).encode())
            answer = _receive(ours)
            if answer != READY:
                why = "it ended" if answer is None else answer.decode("utf-8", "replace")
                raise TrialServerLost(f"the process that compiles schemas did not start ({why})")
            ours.settimeout(None)
        except BaseException:
            ours.close()
            if process is not None:
                process.kill()
                process.wait()
            raise
        return process, ours

    def _end(self) -> None:
        self._server = None
        if self._finish is not None:
            self._finish()


def _end_server(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _send(wire: socket.socket, data: bytes) -> None:
    wire.sendall(LENGTH.pack(len(data)) + data)


def _receive(wire: socket.socket) -> bytes | None:
    """None where the other side ended before all of it was there."""
    head = _exactly(wire, LENGTH.size)
    if head is None:
        return None
    size: int = LENGTH.unpack(head)[0]
    return _exactly(wire, size) if size <= LONGEST_MESSAGE_BYTES else None


def _exactly(wire: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        data = wire.recv(min(size - len(parts), 1 << 20))
        if not data:
            return None
        parts += data
    return bytes(parts)


# The trial server.


def serve() -> None:
    """Forks a trial for each socket that comes, until the engine closes its own."""
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Trials that ended need nobody to wait for them.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = _receive(control)
    if asked is None:
        return
    try:
        library: Any = importlib.import_module("llguidance")
        tokenizer_fields, limit_fields = json.loads(asked)
        tokenizer, limits = GrammarTokenizer(**tokenizer_fields).load(library), TrialLimits(**limit_fields)
    except Exception as error:  # llguidance raises bare ones
        _send(control, one_line(str(error)).encode())
        return
    _send(control, READY)
    while True:
        mark, files, _, _ = socket.recv_fds(control, 1, 1)
        if not mark:
            return
        with socket.socket(fileno=files[0]) as wire:
            try:
                child = os.fork()
            except OSError:  # The engine sees the end of the socket.
                continue
            if child == 0:
                try:
                    control.close()
                    _try(wire, library, tokenizer, limits)
                finally:
                    os._exit(0)


def _try(wire: socket.socket, library: Any, tokenizer: Any, limits: TrialLimits) -> None:
    os.close(2)  # A compiler that runs out of memory prints where; the engine's log need not have that.
    os.open(os.devnull, os.O_WRONLY)
    signal.alarm(limits.wall_s)
    _send(wire, BEGUN)
    schema = _receive(wire)
    if schema is None:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    before = memory_bytes()
    if before is not None:
        most_bytes = before[0] + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    try:
        matcher = compile_schema(library, tokenizer, schema.decode())
        _compute_masks(matcher)
        after = memory_bytes()
        answer = OK + b" %d" % (max(0, after[1] - before[1]) if after and before else 0)
    except TrialFailed as error:
        answer = str(error).encode()
    with suppress(OSError):
        _send(wire, answer)


def _compute_masks(matcher: Any) -> None:
    """As an output would need them whose every token is the last of those that are possible."""
    for _ in range(TRIAL_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise TrialFailed(f"the schema cannot be used ({one_line(matcher.get_error())})")
        token = int.from_bytes(mask, "little").bit_length() - 1
        if token < 0:
            raise TrialFailed("the schema cannot be used (no token fits it)")
        if matcher.is_stopped() or not matcher.consume_token(token):
            return


def memory_bytes() -> tuple[int, int] | None:
    """The address space and the resident memory of this process; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = file.read().split()
        return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


if __name__ == "__main__":
    serve()

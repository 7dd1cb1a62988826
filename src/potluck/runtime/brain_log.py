"""The Brain's log: every event and the actions that it caused, for replays (`replay.py`).

The log has JSON lines, the same from a simulation and from a live gateway. A header has the facts and the policy;
each other line is `[time, event, actions]` (`log_lines.py`). `begins` in a header is `run` for a new Brain, whose
time starts at 0; `facts` for additional facts from here on; `state` for a piece of a live log with a checkpoint of
the Brain, which can be read without the pieces before it. So a restarted gateway appends to the same file, and old
pieces can be deleted. The header of a live log has the wall clock at time 0.

A log contains no prompts or answers, only numbers of tokens and hashes of blocks.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import chain
from math import inf
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal, Protocol

from potluck.core.codec import encode
from potluck.core.errors import FormatError, InputError
from potluck.core.state.actions import Action
from potluck.core.state.events import Event, PlanReceived
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.runtime.log_lines import dumps, line

PLAIN = frozenset({int, float, str, bool, type(None)})
CORE = "potluck.core."


class NotPlain(TypeError):
    """The Brain holds a value that a checkpoint cannot contain, such as a closure or a file."""


def checkpoint(root: object) -> dict[str, Any]:
    """A JSON representation of `root`, from which `restored` rebuilds it.

    Each reachable object is written once and referred to by number, so that shared objects stay shared. Only values,
    classes, functions and methods of `core` and plain containers are written or rebuilt: reading a log runs no code
    from it.

        a value     a number, a text, true, false, null; else a list: ["tuple", ...], ["frozenset", ...],
                    ["made", class, ...] a named tuple, ["enum", class, name], ["core", name] a class or function,
                    ["method", value, name], ["ref", number]
        a thing     ["dict" | "list" | "set", values], ["deque", most, values], ["object", class, {attribute: value}]
    """
    writer = _Writer()
    value = writer.value(root)
    return {"root": value, "things": [writer.thing(item) for item in writer.found]}  # `found` grows meanwhile


class _Writer:
    def __init__(self) -> None:
        self.found: list[object] = []
        self._numbers: dict[int, int] = {}
        self._attributes: dict[type[Any], tuple[str, ...]] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is tuple or kind is frozenset:
            return [kind.__name__, *self._values(value)]
        if isinstance(value, Enum):
            return ["enum", _name(kind), value.name]
        if isinstance(value, tuple):
            return ["made", _name(kind), *self._values(value)]
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, ModuleType) and callable(value):
            return ["method", self.value(owner), value.__name__]
        if isinstance(value, type) or hasattr(value, "__qualname__"):
            return ["core", _name(value)]
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.found)
            self.found.append(value)
        return ["ref", number]

    def _values(self, values: Iterable[Any]) -> list[Any]:
        return [item if type(item) in PLAIN else self.value(item) for item in values]

    def thing(self, thing: Any) -> list[Any]:
        kind = type(thing)
        if kind is dict:
            return ["dict", self._values(chain.from_iterable(thing.items()))]
        if kind is list or kind is set:
            return [kind.__name__, self._values(thing)]
        if kind is deque:
            return ["deque", thing.maxlen, self._values(thing)]
        if kind not in self._attributes:
            self._attributes[kind] = _attributes(kind)
        names = [*self._attributes[kind], *getattr(thing, "__dict__", ())]
        values = {name: self.value(getattr(thing, name)) for name in names if hasattr(thing, name)}
        return ["object", _name(kind), values]


def _attributes(kind: type[Any]) -> tuple[str, ...]:
    """Names of the attributes in slots; compiled classes list them in `__mypyc_attrs__`."""
    result: dict[str, None] = {}
    for item in kind.__mro__:
        slots = item.__dict__.get("__slots__", ())
        for name in (*((slots,) if isinstance(slots, str) else slots), *getattr(item, "__mypyc_attrs__", ())):
            private = name.startswith("__") and not name.endswith("__")
            result[f"_{item.__name__.lstrip('_')}{name}" if private else name] = None
    return tuple(name for name in result if name not in ("__dict__", "__weakref__"))


def _name(what: Any) -> str:
    module, name = getattr(what, "__module__", None) or "", what.__qualname__
    if not module.startswith(CORE) or "<" in name:
        raise NotPlain(f"{module}.{name} cannot be written down")
    return f"{module}:{name}"


def restored(data: Any, where: str) -> Any:
    try:
        return _Reader(data["things"]).read(data["root"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ImportError) as error:
        raise FormatError(f"{where}: state", f"cannot be read ({error})") from error


class _Reader:
    def __init__(self, things: list[Any]) -> None:
        self._written = things
        self._things = [_empty(thing) for thing in things]

    def read(self, root: Any) -> Any:
        """Fill objects before dicts and sets: keys are hashed by their attributes."""
        for thing, (kind, *rest) in zip(self._things, self._written, strict=True):
            if kind == "object":
                for name, value in rest[1].items():
                    object.__setattr__(thing, name, self._value(value))
        for thing, (kind, *rest) in zip(self._things, self._written, strict=True):
            if kind == "dict":
                values = [self._value(item) for item in rest[0]]
                thing.update(zip(values[::2], values[1::2], strict=True))
            elif kind == "set":
                thing.update(map(self._value, rest[0]))
            elif kind != "object":
                thing.extend(map(self._value, rest[-1]))
        return self._value(root)

    def _value(self, value: Any) -> Any:
        if type(value) is not list:
            return value
        kind, *rest = value
        match kind:
            case "ref":
                return self._things[rest[0]]
            case "tuple" | "frozenset":
                return (tuple if kind == "tuple" else frozenset)([self._value(item) for item in rest])
            case "made":
                return tuple.__new__(_found(rest[0]), [self._value(item) for item in rest[1:]])
            case "enum":
                return _found(rest[0])[rest[1]]
            case "core":
                return _found(rest[0])
            case "method":
                return getattr(self._value(rest[0]), rest[1])
        raise ValueError(f"has a {kind!r}")


def _empty(written: list[Any]) -> Any:
    match written:
        case ["object", name, _]:
            kind = _found(name)
            if hasattr(kind, "__mypyc_attrs__"):
                raise ValueError("compiled classes cannot be made: replay it with the package as source")
            return kind.__new__(kind)
        case ["deque", most, _]:
            return deque(maxlen=most)
        case [("dict" | "list" | "set") as name, _]:
            return {"dict": dict, "list": list, "set": set}[name]()
    raise ValueError(f"has a thing of no known kind: {str(written)[:60]}")


@cache
def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    if not module.startswith(CORE):
        raise ValueError(f"names {name}, which is not of the core")
    result: Any = import_module(module)
    for part in path.split("."):
        result = getattr(result, part)
    if getattr(result, "__module__", None) != module:
        raise ValueError(f"names {name}, which is not of the core")
    return result


FORMAT, VERSION = "potluck.log", 5
FLUSH_S = 1.0  # Period of flushes of a live log: a killed gateway loses at most this much of it.
STATE_S = 900.0
"""Least time between two checkpoints; the gateway's event loop waits while one is made."""

Begins = Literal["run", "facts", "state"]


class Decider(Protocol):
    """The Brain, or a substitute in tests."""

    def on(self, at_s: float, event: Event) -> list[Action]: ...


class LoggedBrain:
    """A Brain whose events and actions are logged.

    `zero_utc_s` is the wall clock at time 0 of a live log, `flush_s` the period of flushes to the operating system.
    When writing fails, the log ends and `trouble` has the reason; serving continues.
    """

    def __init__(
        self,
        brain: Decider,
        out: IO[str] | LogFiles,
        facts: FleetFacts,
        policy: Policy,
        *,
        zero_utc_s: float | None = None,
        flush_s: float = inf,
    ) -> None:
        self._brain, self._on = brain, brain.on
        self._out, self._facts, self._policy = out, facts, policy
        self._zero_utc_s = zero_utc_s
        self._flush_s = flush_s
        self._flushed_s = self._state_s = 0.0
        self._known = -1
        self._body: dict[str, Any] = {}
        self.trouble = ""  # Why logging has stopped; empty while it works.

    def on(self, at_s: float, event: Event) -> list[Action]:
        if len(self._facts.replicas) != self._known or type(event) is PlanReceived:
            self._head()
        answer = self._on(at_s, event)
        if not self.trouble:
            try:
                self._out.write(line(at_s, event, answer))
                if at_s - self._flushed_s >= self._flush_s:
                    self._flushed_s = at_s
                    self._out.flush()
                if isinstance(self._out, LogFiles) and self._out.full and self._out.cut():
                    self._begin_piece(at_s)
            except OSError as error:
                self._failed(error)
        return answer

    def _begin_piece(self, at_s: float) -> None:
        begins: Begins = "facts"
        state = None
        if at_s - self._state_s >= STATE_S:
            with suppress(NotPlain):
                state = checkpoint((self._brain, self._facts))
                begins, self._state_s = "state", at_s
        self._out.write(header(self._facts, self._policy, begins, self._zero_utc_s, state))

    def close(self) -> None:
        try:
            self._out.close()
        except OSError as error:
            self._failed(error)

    def _head(self) -> None:
        """Write a header if the facts have changed since the last one."""
        body = facts_body(self._facts)
        if body == self._body:
            return
        begins: Begins = "facts" if self._body else "run"
        self._known, self._body = len(self._facts.replicas), body
        if not self.trouble:
            try:
                self._out.write(header(self._facts, self._policy, begins, self._zero_utc_s))
            except OSError as error:
                self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.trouble = self.trouble or f"the log ends here: {error.strerror or error}"


def header(
    facts: FleetFacts,
    policy: Policy,
    begins: Begins = "run",
    zero_utc_s: float | None = None,
    state: object = None,
) -> str:
    start = {"format": FORMAT, "version": VERSION, "begins": begins, "zero_utc_s": zero_utc_s}
    has = {} if state is None else {"state": state}
    return dumps(start | {"policy": encode(policy)} | facts_body(facts) | has) + "\n"


def facts_body(facts: FleetFacts) -> dict[str, Any]:
    return {
        "models": {name: encode(model) for name, model in facts.models.items()},
        "replicas": [[*key, encode(replica)] for key, replica in facts.replicas.items()],
        "splits": {name: encode(split) for name, split in facts.splits.items()},
        "links": [[*ends, gbps] for ends, gbps in facts.links_gbps.items()],
        "regions": [encode(region) for region in facts.regions],
        "history": {name: list(rates) for name, rates in facts.history.items()},
        "places": [[*key, list(place)] for key, place in facts.places.items()],
        "zones": dict(facts.zones),
        "groups": {name: encode(group) for name, group in facts.groups.items()},
    }


NAME = "brain.log"  # In a service's state folder.
PIECE_BYTES = 64_000_000
MOST_BYTES = 1_000_000_000  # Of all packed pieces.
BUFFER_BYTES = 1 << 18
CHUNK_BYTES = 1 << 20
DIGITS = 6
PACKED = ".gz"
LEVEL = 6


class LogFiles:
    """Appends to a log in pieces. While one process takes over from another both append, and no piece is cut.

        brain.log               the current piece
        brain.log.000007        a complete piece, to be packed
        brain.log.000007.gz     a packed piece; the oldest is deleted when the total is over `most_bytes`

    A thread packs pieces, so that the writer does not wait. A piece is replaced by its packed form atomically: a
    crash leaves one of them, and the next start of the log packs the rest.
    """

    def __init__(self, path: Path, piece_bytes: int = PIECE_BYTES, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._piece_bytes, self._most_bytes = path, piece_bytes, most_bytes
        self._packing: threading.Thread | None = None
        try:
            self._out = _open(path)
            self._size = path.stat().st_size
        except OSError as error:
            raise InputError(f"log {path}", error.strerror or "cannot be written") from error
        self._cut_at = piece_bytes
        self._pack()

    @property
    def full(self) -> bool:
        return self._size >= self._cut_at

    def write(self, text: str) -> int:
        self._size += len(text)
        return self._out.write(text)

    def flush(self) -> None:
        self._out.flush()

    def cut(self) -> bool:
        """Begin another piece, unless another process writes to this one."""
        self._out.flush()
        own = self._out.fileno()
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(own, fcntl.LOCK_SH)
            self._cut_at = self._size + self._piece_bytes
            return False
        if self._path.stat().st_ino == os.fstat(own).st_ino:  # else somebody else has cut it off
            self._path.rename(self._path.with_name(f"{self._path.name}.{self._next():0{DIGITS}}"))
        before, self._out = self._out, _open(self._path)
        before.close()
        self._size, self._cut_at = self._path.stat().st_size, self._piece_bytes
        self._pack()
        return True

    def close(self) -> None:
        self._out.close()
        if self._packing is not None:
            self._packing.join()

    def _next(self) -> int:
        return max((_number(piece) for piece in pieces_of(self._path)[:-1]), default=0) + 1

    def _pack(self) -> None:
        before = self._packing

        def work() -> None:
            if before is not None:
                before.join()
            with suppress(OSError):  # the disk is full, say: it is packed with the next piece
                pack(self._path, self._most_bytes)

        self._packing = threading.Thread(target=work, name="pack-log", daemon=True)
        self._packing.start()


def _open(path: Path) -> IO[str]:
    """For its owner's eyes; what a killed writer left of a line gets its end."""
    opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    fcntl.flock(opened, fcntl.LOCK_SH)
    size = os.fstat(opened).st_size
    out = os.fdopen(opened, "a", buffering=BUFFER_BYTES, encoding="ascii", newline="\n")
    if size and os.pread(opened, 1, size - 1) != b"\n":
        out.write("\n")  # with what comes next: there may be no room now
    return out


def pieces_of(path: Path) -> list[Path]:
    """All that there is of a log, oldest first; where a piece is there packed and not, it is taken packed."""
    paths = {_number(item): item for item in sorted(path.parent.glob(f"{path.name}.*")) if _number(item)}
    return [*(paths[number] for number in sorted(paths)), *([path] if path.exists() else [])]


def _number(piece: Path) -> int:
    digits = piece.name.removesuffix(PACKED).rpartition(".")[2]
    return int(digits) if len(digits) >= DIGITS and digits.isdecimal() else 0


def pack(path: Path, most_bytes: int) -> None:
    """Pack what was cut off, and let the oldest go where that is too much."""
    for plain in sorted(path.parent.glob(f"{path.name}.*[0-9]")):
        if _number(plain):
            packed = plain.with_name(plain.name + PACKED)
            half = packed.with_name(f"{packed.name}.part")
            with plain.open("rb") as source, _private(half) as target, gzip.open(target, "wb", LEVEL) as out:
                shutil.copyfileobj(source, out, CHUNK_BYTES)
            half.rename(packed)
            plain.unlink()
    kept = [piece for piece in pieces_of(path) if piece.suffix == PACKED]
    size = sum(item.stat().st_size for item in kept)
    for oldest in kept:
        if size <= most_bytes:
            break
        size -= oldest.stat().st_size
        oldest.unlink()


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")

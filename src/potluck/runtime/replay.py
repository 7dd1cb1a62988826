"""A log read back, and fed to a fresh Brain: the same policy in both worlds must ask for the same."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, dropwhile
from pathlib import Path
from typing import IO, Any, NamedTuple, cast, get_args

from potluck.core.codec import decode
from potluck.core.errors import FormatError, InputError
from potluck.core.state.actions import Action
from potluck.core.state.events import Event
from potluck.core.state.facts import FleetFacts, GroupFacts, ModelFacts, ReplicaFacts, SplitFacts
from potluck.core.state.policy import Policy
from potluck.core.values.types import Region
from potluck.runtime.brain_log import FORMAT, NAME, VERSION, Begins, Decider, pieces_of, restored
from potluck.runtime.log_lines import kind_of, read_line, written

MOST_LETTERS = 64 << 20  # Of a line; those that begin a run have all its facts.


class LogHead(NamedTuple):
    """What begins here: a run, a piece of one, or only that more is known."""

    begins: Begins
    facts: FleetFacts
    policy: Policy
    zero_utc_s: float | None  # The wall clock at the run's time 0, in UTC seconds; None in a simulation.
    state: Any = None  # The Brain and its facts at the beginning of a piece, as `checkpoint` wrote them.


class LogEntry(NamedTuple):
    line: int
    at_s: float
    event: Event
    actions: list[Action]


class LogReader:
    """The lines of a log, one file or several in order.

    A writer that was killed may leave half a line, the last one or one before a new run: it is passed over, and
    `cuts` has its number. With `wanted` only events of these names are read, the others passed over unread.
    """

    def __init__(self, lines: Iterable[str], wanted: Collection[str] | None = None) -> None:
        self._lines = lines
        self._wanted = wanted
        self.cuts: list[int] = []

    def __iter__(self) -> Iterator[LogHead | LogEntry]:
        half: FormatError | None = None
        begun, number = False, 0
        for number, text in enumerate(self._lines, 1):
            place = f"log: line {number}"
            if not begun and half is None and not text.startswith("{"):
                raise FormatError(place, f"is not the beginning of a {FORMAT}")
            if half is None and self._unwanted(text):
                continue
            try:
                head = _read_header(text, place) if text.startswith("{") else None
                log_entry = LogEntry(number, *read_line(text, place)) if head is None else None
            except FormatError as error:
                if not isinstance(error.__cause__, json.JSONDecodeError):
                    raise half or error from None
                if half is not None:  # cut off twice, each time before a new run
                    self.cuts.append(number - 1)
                half = half or error
                continue
            new_run = head is not None and head.begins != "facts"
            if half is not None:
                if not new_run:
                    raise half
                self.cuts.append(number - 1)
                half = None
            if not begun and not new_run:
                raise FormatError(place, "goes on with a run; name the file that it begins in first")
            begun = True
            yield cast(LogHead | LogEntry, head or log_entry)
        if not begun:
            raise half or FormatError("log", "is empty")
        if half is not None:
            self.cuts.append(number)

    def _unwanted(self, text: str) -> bool:
        """Only of lines that look whole."""
        wanted = self._wanted
        return wanted is not None and text.endswith("]]\n") and kind_of(text) not in wanted


@dataclass(frozen=True, slots=True)
class ReplayResult:
    events: int
    actions: int
    runs: int
    difference: str  # The first line at which the Brain asked for something else; empty when none.
    cuts: tuple[int, ...] = ()  # Numbers of lines that were cut off in writing, and passed over.
    since_s: float = 0.0  # When its first run's part begins that is there; what was before it was dropped.


def replay(
    lines: Iterable[str],
    brain: Callable[[FleetFacts, Policy], Decider],
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Feed a log to a fresh Brain and compare; each of its runs gets one of its own."""
    reader = LogReader(lines)
    events = asked = runs = 0
    since_s: float | None = None
    decider: Decider | None = None
    facts = FleetFacts({}, {})
    for entry in reader:
        if isinstance(entry, LogHead):
            if entry.begins == "run":
                facts, runs = entry.facts, runs + 1
                decider = brain(facts, entry.policy)
                since_s = since_s or 0.0
            elif entry.begins == "state" and decider is None:
                decider, facts = restored(entry.state, "log")
                runs = 1
            else:
                _grow(facts, entry.facts)
            continue
        assert decider is not None
        since_s = entry.at_s if since_s is None else since_s
        answer = decider.on(entry.at_s, entry.event)
        events += 1
        asked += len(answer)
        if progress is not None and events % 1000 == 0:
            progress(events)
        if (answer or entry.actions) and written(answer) != written(entry.actions):
            where = f"line {entry.line}: {type(entry.event).__name__} at {entry.at_s:g} s"
            difference = f"{where}: {_short(answer)} instead of {_short(entry.actions)}"
            return ReplayResult(events, asked, runs, difference, tuple(reader.cuts), since_s)
    return ReplayResult(events, asked, runs, "", tuple(reader.cuts), since_s or 0.0)


def read(lines: Iterable[str]) -> Iterator[tuple[float, Event, list[Action]]]:
    for entry in LogReader(lines):
        if isinstance(entry, LogEntry):
            yield entry.at_s, entry.event, entry.actions


@contextmanager
def log_lines(paths: Iterable[Path]) -> Iterator[Iterator[str]]:
    """The lines of these files, one after another; those that end in `.gz` are unpacked.

    A folder stands for the pieces of the log in it; where the first of them were dropped, from where it can be read.
    """
    with ExitStack() as stack:
        paths, field = tuple(paths), "log"
        try:
            yield chain.from_iterable(
                _readable(path, stack) if path.is_dir() else _lines(stack.enter_context(_open(path)), path)
                for path in paths
            )
        except OSError as error:
            raise InputError(_named(paths), error.strerror or str(error)) from error
        except InputError as error:
            first, _, rest = error.field.partition(": ")
            if first != field:
                raise
            raise InputError(": ".join(filter(None, (_named(paths), rest))), error.problem) from error


def _named(paths: Sequence[Path]) -> str:
    """A log by its first file; whoever reads its lines knows no name."""
    return f"{paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _readable(folder: Path, stack: ExitStack) -> Iterator[str]:
    """The lines of a folder's log, from the first header that needs none before it."""
    pieces = pieces_of(folder / NAME)
    if not pieces:
        raise InputError(str(folder), f"has no {NAME}; name the files of the log")
    lines = chain.from_iterable(_lines(stack.enter_context(_open(path)), path) for path in pieces)
    return dropwhile(lambda text: not text.startswith("{") or '"begins":"facts"' in text[:100], lines)


def _open(path: Path) -> IO[str]:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "rt", encoding="utf-8")
        return path.open(encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read") from error


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    try:
        while line := file.readline(MOST_LETTERS + 1):
            if len(line) > MOST_LETTERS:
                raise InputError(str(path), f"is not a log (a line is longer than {MOST_LETTERS >> 20} MiB)")
            yield line
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise InputError(str(path), f"is not a log ({error})") from error


def _grow(facts: FleetFacts, more: FleetFacts) -> None:
    """What is known now is known from here on; the Brain holds the same mappings."""
    for name in ("models", "replicas", "splits", "places", "zones", "groups"):
        getattr(facts, name).update(getattr(more, name))


def _read_header(text: str, where: str) -> LogHead:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(where, f"is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(where, f"is not the beginning of a {FORMAT}")
    version = data.get("version")
    if version != VERSION:
        why = f"is {version}, this release reads {VERSION}: replay it with the release that wrote it"
        raise FormatError("log: version", why)
    try:
        facts = FleetFacts(
            {name: decode(ModelFacts, datum, f"models.{name}") for name, datum in data["models"].items()},
            {(name, place): decode(ReplicaFacts, item, "replicas") for name, place, item in data["replicas"]},
            {name: decode(SplitFacts, datum, f"splits.{name}") for name, datum in data["splits"].items()},
            {(source, target): gbps for source, target, gbps in data["links"]},
            tuple(decode(Region, datum, "regions") for datum in data["regions"]),
            {name: tuple(datum) for name, datum in data["history"].items()},
            {(name, index): tuple(item) for name, index, item in data["places"]},
            {name: str(zone) for name, zone in data.get("zones", {}).items()},
            {name: decode(GroupFacts, datum, "groups") for name, datum in data.get("groups", {}).items()},
        )
        begins, zero_utc_s = data["begins"], data["zero_utc_s"]
        if begins not in get_args(Begins):
            raise FormatError(f"{where}: begins", f"must be one of {', '.join(get_args(Begins))}")
        if zero_utc_s is not None:
            zero_utc_s = decode(float, zero_utc_s, f"{where}: zero_utc_s")
        if begins == "state" and "state" not in data:
            raise FormatError(f"{where}: state", "is missing")
        policy = decode(Policy, data["policy"], "policy")
        return LogHead(cast(Any, begins), facts, policy, zero_utc_s, data.get("state"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(where, f"lacks or garbles {error}") from error


def _short(answer: list[Action]) -> str:
    text = written(answer)
    return text if len(text) <= 120 else f"{text[:117]}..."

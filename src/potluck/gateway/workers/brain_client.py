"""What a worker has of the Brain: a line to it, who can be reached, and where to say what happens."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii as text_of
from typing import cast

from potluck.core.errors import PotluckError
from potluck.core.state import events
from potluck.core.state.actions import Action, Run
from potluck.core.state.events import Event
from potluck.core.values.route import Route, aggregated
from potluck.core.values.types import Request
from potluck.gateway.admin.counters import Counters
from potluck.gateway.admin.usage import UsageFile
from potluck.gateway.registry.engine_client import Wire
from potluck.gateway.registry.registry import PLAIN, ReplicaDirectory
from potluck.gateway.values import Address, Endpoint, RequestOutcome
from potluck.runtime.log_lines import blocks_of, line, names, read_line, request_flags

MOST_BYTES = 64_000_000  # Of a line that has not ended, or of what the other side has not read.
MOST_KEPT = 100_000
LAZY_S = 0.005

log = logging.getLogger(__name__)


class WorkerChannel(asyncio.Protocol):
    """One end of the wire. When it is cut it may be connected again: lines whose kind is in `kept` wait."""

    def __init__(
        self, heard: Callable[[str, str], None], gone: Callable[[], None], kept: frozenset[str] = frozenset()
    ) -> None:
        self._heard, self._gone, self._kept = heard, gone, kept
        self._out: list[str] = []
        self._soon = False
        self._lazy: asyncio.TimerHandle | None = None
        self._held = b""
        self._wire: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def send(self, kind: str, text: str) -> None:
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self.flush)
        self._out.append(f"{kind}{text}\n")

    def later(self, kind: str, text: str) -> None:
        """Something that nobody waits for: it goes with what is next, and in its place in the order."""
        if self._lazy is None and not self._soon:
            self._lazy = self._loop.call_later(LAZY_S, self.flush)
        self._out.append(f"{kind}{text}\n")

    def flush(self) -> None:
        out, self._out = self._out, []
        self._soon = False
        if self._lazy is not None:
            self._lazy.cancel()
            self._lazy = None
        if self._wire is None or self._wire.is_closing():
            self._out = [line for line in out if line[0] in self._kept][-MOST_KEPT:]
            return
        if not out:
            return
        self._wire.write("".join(out).encode())
        if self._wire.get_write_buffer_size() > MOST_BYTES:
            log.error("a worker or the Brain reads nothing any more")
            self._wire.abort()

    def close(self) -> None:
        self.flush()
        if self._wire is not None:
            self._wire.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._wire.set_write_buffer_limits(MOST_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wire, self._held = None, b""
        self._gone()

    @property
    def connected(self) -> bool:
        return self._wire is not None

    def data_received(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
        data, _, self._held = data.rpartition(b"\n")
        try:
            for text in data.decode().split("\n") if data else ():
                self._heard(text[:1], text[1:])
            if len(self._held) > MOST_BYTES:
                raise ValueError("a line without an end")
        except (PotluckError, ValueError, KeyError, TypeError, IndexError):
            log.exception("what came from the other side cannot be read")
            assert self._wire is not None
            self._wire.abort()


Act = Callable[[Sequence[Action]], None]
Wires = dict[tuple[str, str, str], Wire]

PATIENT = (events.FirstToken, events.SegmentComputed, events.SegmentDone, events.RequestFinished)
"""What the Brain learns from, and may learn a few milliseconds later."""
EVENT, ACTIONS, ENDPOINTS, REASONS, GONE = "e", "a", "d", "r", "g"
START, READY, HELLO, CLOSE = "s", "l", "h", "c"
COUNTS, USED = "t", "u"
LASTING = frozenset({COUNTS, USED})  # What another Brain is told if one dies before it can be.


# What every request brings (that it came, that it is sent to one replica, that it ended) is a mark and a list of its
# fields; all else is as the log has it, where the Brain's own clock counts.

ARRIVED, FINISHED, RUN = "A", "F", "R"


def event_text(event: Event) -> str:
    if type(event) is events.RequestArrived:
        r = event.request
        deadline_s = "null" if r.deadline_s is None else repr(r.deadline_s)
        return (
            f"A[{text_of(r.id)},{text_of(r.model)},{r.arrival_s!r},{r.prompt_tokens},{r.max_output_tokens},"
            f'{r.priority},{deadline_s},"{names(r.blocks)}",{text_of(r.tenant)},{text_of(r.request_class)}'
            f"{request_flags(r)}]"
        )
    if type(event) is events.RequestFinished:
        return f"F[{text_of(event.request)},{event.attempt},{event.output_tokens}]"
    return line(0.0, event, ())[:-1]


def event_of(text: str) -> Event:
    mark = text[:1]
    if mark == ARRIVED:
        fields = json.loads(text[1:])
        fields[7] = blocks_of(fields[7]) if fields[7] else ()
        return events.RequestArrived(Request(*fields))
    if mark == FINISHED:
        return events.RequestFinished(*json.loads(text[1:]))
    return read_line(text, "worker")[1]


def actions_text(actions: Sequence[Action]) -> str:
    run = actions[0] if len(actions) == 1 else None
    if type(run) is Run and len(run.route.segments) == 1:
        return (
            f"R[{text_of(run.request)},{text_of(run.route.segments[0].replica)},{run.attempt},"
            f"{run.prompt_tokens},{run.streamed_tokens},{run.weight!r}{',true' if run.yields else ''}]"
        )
    return line(0.0, events.Tick(), actions)[:-1]


def actions_of(text: str) -> list[Action]:
    if text[:1] == RUN:
        request, replica, *rest = json.loads(text[1:])
        return [Run(request, _alone(replica), *rest)]
    return read_line(text, "brain")[2]


@lru_cache(maxsize=4096)
def _alone(replica: str) -> Route:
    return aggregated(replica)


def endpoints_text(endpoints: Iterable[Endpoint], wires: Wires) -> str:
    lines = [_said_of(endpoint) for endpoint in endpoints]
    return json.dumps({"endpoints": lines, "wires": [[*key, *wire] for key, wire in wires.items()]})


def _said_of(endpoint: Endpoint) -> dict[str, object]:
    return {field.name: getattr(endpoint, field.name) for field in fields(endpoint)}


class RemoteDirectory(ReplicaDirectory):
    def __init__(self) -> None:
        super().__init__(lambda *key: self._wires.get(key, PLAIN))
        self._wires: Wires = {}

    def learn(self, text: str) -> None:
        data = json.loads(text)
        self._wires = {(item[0], item[1], item[2]): (item[3], item[4]) for item in data["wires"]}
        self._endpoints.clear()
        for datum in data["endpoints"]:
            address, adapters = Address(*datum.pop("address")), tuple(datum.pop("adapters"))
            endpoint = Endpoint(address=address, adapters=adapters, **datum)
            self._endpoints[endpoint.replica] = endpoint
        self.refresh()

    def named(self, endpoint: Endpoint) -> str | None:
        """Its name now: another Brain may have given it another."""
        for item in self._endpoints.values():
            same_server = (item.address, item.path_prefix) == (endpoint.address, endpoint.path_prefix)
            if same_server and item.model == endpoint.model and item.fingerprint == endpoint.fingerprint:
                return item.replica
        return None


class RemoteBrainClient:
    """A Brain can die: until another is `joined` nothing is told; of `untold` requests it has not heard yet."""

    __slots__ = ("_channel", "act", "joined", "start_s", "untold", "waiting")

    def __init__(self, channel: WorkerChannel, start_s: float, act: Act) -> None:
        self._channel, self.start_s, self.act = channel, start_s, act
        self.joined = True
        self.untold: set[str] = set()
        self.waiting: Callable[[], None] = lambda: None

    def tell(self, event: Event) -> None:
        if not self.joined:
            return
        if self.untold and getattr(event, "request", None) in self.untold:
            if isinstance(event, events.RequestFinished | events.RequestCancelled):
                self.untold.discard(event.request)
            else:
                self.waiting()
            return
        if isinstance(event, PATIENT):
            self._channel.later(EVENT, event_text(event))
        else:
            self._channel.send(EVENT, event_text(event))

    def now_s(self) -> float:
        return time.monotonic() - self.start_s


class WorkerMeter(Counters):
    """Its counts are added to the Brain's process's now and then; how answers went that hears one by one. Records of
    use it writes itself, as that process may die."""

    def __init__(
        self, channel: WorkerChannel, region_of: Callable[[str], str], usage: UsageFile | None = None
    ) -> None:
        super().__init__(
            region_of,
            record=None if usage is None else lambda told: usage.record(told, time.monotonic()),
            told=lambda told: channel.later(USED, json.dumps(told)),
        )
        self._channel, self._usage = channel, usage
        self._sent = ""

    def flush(self) -> None:
        taken = self.take()
        if self._usage is not None:
            self._usage.look()
            taken["usage"] = (self._usage.notice, self._usage.lost)
        text = json.dumps(taken)
        if text != self._sent:
            self._sent = text
            self._channel.later(COUNTS, text)

    def renew(self) -> None:
        """Another Brain has to hear how many are open, although nothing changed."""
        self._sent = ""


class WorkerMeterReceiver:
    """In the Brain's process: one worker's counts and news, said to the meter that has all of them."""

    def __init__(self, counters: Counters) -> None:
        self._meter = counters
        self._open = 0

    def heard(self, kind: str, text: str) -> bool:
        """False: it is about something else."""
        counters = self._meter
        if kind not in (COUNTS, USED):
            return False
        value = json.loads(text)
        if kind == COUNTS:
            counters.add(value)
            self._has_open(int(value["open"]))
            if "usage" in value:
                problem, lost = value["usage"]
                counters.usage_notes[self] = (problem, lost)
        elif kind == USED and counters.told is not None:
            counters.told(RequestOutcome(*value))
        return True

    def gone(self) -> None:
        self._has_open(0)
        self._meter.usage_notes.pop(self, None)

    def _has_open(self, now: int) -> None:
        self._meter.open += now - self._open
        self._open = now

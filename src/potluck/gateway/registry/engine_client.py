"""One engine as the registry knows it, and the calls that are made to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from potluck.api.http import parse_object
from potluck.core.errors import FormatError, PotluckError
from potluck.core.state.events import CacheReported, ReplicaReported, ReplicaSilent, ReplicaStatus
from potluck.core.values.kv_layout import kv_address
from potluck.gateway.http.connection_pool import ConnectionPool, fetch
from potluck.gateway.registry.engine_list import EngineEntry
from potluck.gateway.registry.server_probe import Listing, ServerProbes

LEAST_S, MOST_S, FACTOR, KEEP = 0.7, 2.0, 3.0, 0.95


class ResponseTimes(NamedTuple):
    longest_s: float = MOST_S / FACTOR

    @property
    def limit_s(self) -> float:
        return min(MOST_S, max(LEAST_S, FACTOR * self.longest_s))

    def heard(self, took_s: float) -> ResponseTimes:
        """One that stood still counts as little more than what was borne before, so that the next is noticed."""
        return ResponseTimes(max(KEEP * self.longest_s, min(took_s, self.limit_s / 2)))


LONGEST_NAME = 500
MOST_ADAPTERS = 1024
KINDS = ("added", "removed", "marked", "unmarked")
EVERYWHERE = ("0.0.0.0", "[::]", "::")
FIRST_KV_VERSION = 2
NOT_PROBED = "has not been probed yet"
COUNTS = ("waiting", "running", "todo_tokens", "context_tokens", "free_blocks", "total_blocks")
LINK_NUMBERS = ("moved_bytes", "goodput_bytes_per_s", "queue_bytes", "retransmits")
Wire = tuple[str, int]
"""How KV crosses between two regions as the plan has it: raw, int8 or int4, and over so many connections."""
STATES = ("ready", "draining", "drained", "failed")


@dataclass(frozen=True, slots=True)
class LinkCounters:
    peer: str
    moved_bytes: float
    goodput_bytes_per_s: float
    queue_bytes: float
    retransmits: float = 0.0


@dataclass(frozen=True, slots=True)
class StatusReport:
    model: str
    fingerprint: str
    role: str
    state: str
    kv: str
    uptime_s: float
    status: ReplicaStatus
    links: tuple[LinkCounters, ...]
    problem: str
    own: bool = False
    adapters: tuple[str, ...] = ()
    version: str = ""
    kv_version: int = 0
    max_running: int = 0
    predicted_s: float = 0.0
    """Of one that acts as a GPU: how long all its steps should have taken since it started ..."""
    took_s: float = 0.0
    """... and how long they took."""
    prompt_tokens: int = -1  # Of all prompts so far; negative: it does not say.


def read_status(body: bytes, host: str = "") -> StatusReport:
    data: dict[str, Any] = parse_object(body)
    counts = [_whole(data, name) for name in COUNTS]  # Of one that is idle, the last step says nothing.
    status = ReplicaStatus._make([*counts, _number(data, "step_mean_s") if any(counts[:2]) else 0.0])
    state = _text(data, "state")
    if state not in STATES:
        raise FormatError("status: state", f"is none of {', '.join(STATES)}")
    links = data.get("links", [])
    if not isinstance(links, list):
        raise FormatError("status: links", "must be a list")
    notes = data.get("notes")
    notes = notes if isinstance(notes, dict) else {}
    return StatusReport(
        _text(data, "model"),
        _text(data, "fingerprint"),
        _text(data, "role"),
        state,
        _reached(_text(data, "kv"), host),
        _number(data, "uptime_s"),
        status,
        tuple(_link(link) for link in links if isinstance(link, dict)),
        _text(data, "problem")[:200],
        data.get("own") is True,
        _words(data, "adapters"),
        _text(data, "version"),
        _whole(data, "kv_version") if "kv_version" in data else FIRST_KV_VERSION,
        _whole(data, "max_running"),
        _number(notes, "emulated_predicted_s"),
        _number(notes, "emulated_took_s"),
        _whole(data, "prompt_tokens") if "prompt_tokens" in data else -1,
    )


@lru_cache(maxsize=4096)
def _reached(kv: str, host: str) -> str:
    """With the engine's own address for those stages that listen everywhere."""
    if not kv:
        return kv
    address = kv_address(kv)
    stages = [(host if host and there in EVERYWHERE else there, port) for there, port in address.stages]
    return str(replace(address, stages=tuple(stages)))


def _link(data: dict[str, Any]) -> LinkCounters:
    return LinkCounters(_text(data, "peer"), *(_number(data, name) for name in LINK_NUMBERS))


def read_cache(replica: str, body: bytes) -> tuple[int, tuple[CacheReported, ...]]:
    data: dict[str, Any] = parse_object(body)
    epoch, reports = data.get("epoch"), data.get("reports")
    if type(epoch) is not int or not isinstance(reports, list):
        raise FormatError("cache", "has no epoch or no reports")
    made = []
    for report in reports:
        if not isinstance(report, dict) or type(report.get("sequence")) is not int:
            raise FormatError("cache: reports", "one has no sequence")
        added, removed, marked, unmarked = (_names(report, kind) for kind in KINDS)
        whole = report.get("whole") is True
        made.append(CacheReported(replica, report["sequence"], added, removed, marked, unmarked, 1, whole))
    return epoch, tuple(made)


def _names(data: dict[str, Any], kind: str) -> tuple[int, ...]:
    given = data.get(kind, [])
    try:
        return tuple(int(name, 16) for name in given)
    except (TypeError, ValueError) as error:
        raise FormatError(f"cache: {kind}", "must be a list of hexadecimal names") from error


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        raise FormatError(f"status: {name}", "must be text")
    return value


def _words(data: dict[str, Any], name: str) -> tuple[str, ...]:
    datum = data.get(name, [])
    if not isinstance(datum, list) or len(datum) > MOST_ADAPTERS:
        raise FormatError(f"status: {name}", f"must be a list of at most {MOST_ADAPTERS} names")
    return tuple(sorted(item for item in datum if isinstance(item, str) and 0 < len(item) <= LONGEST_NAME))


def _number(data: dict[str, Any], name: str) -> float:
    value = data.get(name, 0)
    if type(value) not in (int, float) or not 0 <= value < inf:
        raise FormatError(f"status: {name}", "must be a number that is not negative")
    return float(value)


def _whole(data: dict[str, Any], name: str) -> int:
    return int(_number(data, name))


ASK_S = 2.0


class EngineNoAnswer(PotluckError): ...


@dataclass(slots=True, eq=False)
class EngineRecord:
    entry: EngineEntry
    up: bool = False
    said: StatusReport | None = None
    heard_s: float = 0.0
    asked_s: float = 0.0
    replica: str = ""
    """Which one it is at present; empty: none."""
    note: str = ""
    """Why it is none, in one line."""
    models: Listing = None
    """Of a server of OpenAI's API: what it listed last; None: nothing yet, or it has no list."""
    cache_epoch: int | None = None
    cache_after: int = 0
    cached: tuple[float, int] = (0.0, -1)  # When its cache was asked for; its `prompt_tokens` then.
    peers: frozenset[str] | None = None
    """Whom it has been told of; None: nobody yet, or it may not have heard it."""
    peers_call: tuple[frozenset[str], asyncio.Task[None]] | None = None
    """Whom it is being told of, or was told of last."""
    drained: bool = False
    drained_elsewhere: bool = False
    watching: asyncio.Task[None] | None = None
    answers: ResponseTimes = ResponseTimes()
    waited_s: float = 0.0
    waiting: asyncio.TimerHandle | None = None
    told: tuple[float, ReplicaReported | ReplicaSilent | None] = (0.0, None)
    """When the Brain was last told how it fares, and what."""
    rtt_s: float = 0.0  # To it and back, as the kernel last measured it.
    least_rtt_s: float = inf
    crawls_until_s: float = -inf
    links: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Peer to (bytes moved, seconds busy) when last looked at."""
    resent: dict[str, float] = field(default_factory=dict)
    """Segments of TCP sent again, by receiver."""

    def __post_init__(self) -> None:
        self.note = self.note or f"{self.entry.url} {NOT_PROBED}"


class EngineClient:
    def __init__(self, connection_pool: ConnectionPool) -> None:
        self._outgoing = connection_pool
        self._servers = ServerProbes(connection_pool)

    def connected(self, engine: EngineRecord) -> bool:
        return self._outgoing.connected(engine.entry.address)

    def rtt_s(self, engine: EngineRecord) -> float:
        return self._outgoing.rtt_s(engine.entry.address)

    async def ask(
        self, engine: EngineRecord, method: bytes, path: bytes, body: object = None, within_s: float = ASK_S
    ) -> bytes:
        """The body of one answer. Whatever is not a 2xx raises EngineNoAnswer with one line."""
        entry = engine.entry
        path = entry.path_prefix.encode() + path
        headers = [(b"authorization", b"Bearer " + entry.key.encode())] if entry.key else []
        data = b"" if body is None else json.dumps(body).encode()
        try:
            status, message = await fetch(
                self._outgoing, entry.address, method, path, data, headers=headers, within_s=within_s
            )
        except (PotluckError, OSError) as error:
            raise EngineNoAnswer(" ".join(str(error).split())[:200]) from error
        if not 200 <= status < 300:
            text = " ".join(message[:200].decode("utf-8", "replace").split())
            raise EngineNoAnswer(f"{path.decode()} was answered with {status}: {text}")
        return message

    async def status(self, engine: EngineRecord) -> StatusReport:
        return read_status(await self.ask(engine, b"GET", b"/status"), engine.entry.address.host)

    async def listed_models(self, engine: EngineRecord, *, fresh: bool) -> Listing:
        """Of a server of OpenAI's API that is usable; raises ServerUnusable with the reason."""
        return await self._servers.of(engine.entry).look(fresh=fresh)

    async def served_model(self, engine: EngineRecord) -> str:
        data = json.loads(await self.ask(engine, b"GET", b"/v1/models"))
        try:
            return str(data["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineNoAnswer("/v1/models names no model") from error

    async def cache(self, engine: EngineRecord) -> tuple[CacheReported, ...]:
        query = b""
        if engine.cache_epoch is not None:
            query = f"?epoch={engine.cache_epoch}&after={engine.cache_after}".encode()
        replica = engine.replica
        engine.cache_epoch, reports = read_cache(replica, await self.ask(engine, b"GET", b"/cache" + query))
        if reports:
            engine.cache_after = reports[-1].sequence
        return reports

    async def role(self, engine: EngineRecord, role: str) -> None:
        await self.ask(engine, b"POST", b"/role", {"role": role})

    async def drain(self, engine: EngineRecord, *, resume: bool) -> None:
        await self.ask(engine, b"POST", b"/drain", {"resume": resume})

    async def peers(self, engine: EngineRecord, addresses: Iterable[str]) -> None:
        await self.ask(engine, b"PUT", b"/peers", {"peers": sorted(addresses)})

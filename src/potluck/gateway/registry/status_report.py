"""What engines say about themselves, read: never trusted to be well-formed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from typing import Any

from potluck.core.errors import FormatError
from potluck.core.state.events import CacheReported, ReplicaStatus

LONGEST_NAME = 500
MOST_ADAPTERS = 1024
KINDS = ("added", "removed", "marked", "unmarked")
EVERYWHERE = ("0.0.0.0", "[::]", "::")
FIRST_KV_VERSION = 2
"""Of engines that do not say which: the last one that could not."""
STATES = ("ready", "degraded", "draining", "drained", "failed")


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """All that an engine fetched from, or sent to, one other, since it started."""

    peer: str
    moved_bytes: float
    goodput_bytes_per_s: float
    queue_bytes: float
    retransmits: float = 0.0
    """Segments of TCP that it sent again."""


@dataclass(frozen=True, slots=True)
class StatusReport:
    """What `GET /status` answered."""

    model: str
    fingerprint: str
    role: str
    state: str
    kv: str
    uptime_s: float
    max_tokens: int
    block_tokens: int
    status: ReplicaStatus
    links: tuple[LinkCounters, ...]
    problem: str
    own: bool = False
    """Whether it takes clients' own requests."""
    adapters: tuple[str, ...] = ()
    version: str = ""
    kv_version: int = 0
    """Of the format in which caches cross."""
    predicted_s: float = 0.0
    """Of one that acts as a GPU: how long all its steps should have taken since it started ..."""
    took_s: float = 0.0
    """... and how long they took."""


def read_status(body: bytes, host: str = "") -> StatusReport:
    """What an engine says of itself; `host` is where it was asked."""
    data = _object(body)
    idle = not _number(data, "running") and not _number(data, "waiting")
    status = ReplicaStatus(
        _whole(data, "waiting"),
        _whole(data, "running"),
        _whole(data, "todo_tokens"),
        _whole(data, "context_tokens"),
        _whole(data, "free_blocks"),
        _whole(data, "total_blocks"),
        0.0 if idle else _number(data, "step_mean_s"),
    )
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
        _whole(data, "max_tokens"),
        _whole(data, "block_tokens"),
        status,
        tuple(_link(each) for each in links if isinstance(each, dict)),
        _text(data, "problem")[:200],
        data.get("own") is True,
        _words(data, "adapters"),
        _text(data, "version"),
        _whole(data, "kv_version") if "kv_version" in data else FIRST_KV_VERSION,
        _number(notes, "emulated_predicted_s"),
        _number(notes, "emulated_took_s"),
    )


def _reached(kv: str, host: str) -> str:
    """An engine that listens on all its addresses does not know by which of them others reach it."""
    listens, _, port = kv.rpartition(":")
    return f"{host}:{port}" if host and listens in EVERYWHERE else kv


def _link(data: dict[str, Any]) -> LinkCounters:
    return LinkCounters(
        _text(data, "peer"),
        _number(data, "moved_bytes"),
        _number(data, "goodput_bytes_per_s"),
        _number(data, "queue_bytes"),
        _number(data, "retransmits") if "retransmits" in data else 0.0,
    )


def read_cache(replica: str, body: bytes) -> tuple[int, tuple[CacheReported, ...]]:
    """(the engine's epoch, its reports) of `GET /cache`."""
    data = _object(body)
    epoch, reports = data.get("epoch"), data.get("reports")
    if type(epoch) is not int or not isinstance(reports, list):
        raise FormatError("cache", "has no epoch or no reports")
    found = []
    for each in reports:
        if not isinstance(each, dict) or type(each.get("sequence")) is not int:
            raise FormatError("cache: reports", "one has no sequence")
        added, removed, marked, unmarked = (_names(each, kind) for kind in KINDS)
        whole = each.get("whole") is True
        found.append(CacheReported(replica, each["sequence"], added, removed, marked, unmarked, 1, whole))
    return epoch, tuple(found)


def _names(data: dict[str, Any], kind: str) -> tuple[int, ...]:
    given = data.get(kind, [])
    try:
        return tuple(int(name, 16) for name in given)
    except (TypeError, ValueError) as error:
        raise FormatError(f"cache: {kind}", "must be a list of hexadecimal names") from error


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FormatError("answer", "is not JSON") from error
    if not isinstance(data, dict):
        raise FormatError("answer", "must be a JSON object")
    return data


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        raise FormatError(f"status: {name}", "must be text")
    return value


def _words(data: dict[str, Any], name: str) -> tuple[str, ...]:
    found = data.get(name, [])
    if not isinstance(found, list) or len(found) > MOST_ADAPTERS:
        raise FormatError(f"status: {name}", f"must be a list of at most {MOST_ADAPTERS} names")
    return tuple(sorted(each for each in found if isinstance(each, str) and 0 < len(each) <= LONGEST_NAME))


def _number(data: dict[str, Any], name: str) -> float:
    value = data.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise FormatError(f"status: {name}", "must be a number that is not negative")
    return float(value)


def _whole(data: dict[str, Any], name: str) -> int:
    return int(_number(data, name))

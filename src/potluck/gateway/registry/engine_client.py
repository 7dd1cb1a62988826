"""One engine as the keeper knows it, and the calls that are made to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from potluck.core.errors import PotluckError
from potluck.core.state.events import CacheReported, ReplicaReported
from potluck.gateway.fleet.response_times import ResponseTimes
from potluck.gateway.http.fetch import fetch
from potluck.gateway.interfaces import EngineConnections
from potluck.gateway.registry.engine_list import EngineEntry
from potluck.gateway.registry.status_report import StatusReport, read_cache, read_status

ASK_S = 2.0
"""An engine that does not answer a plain question within this is as good as gone."""
MOST_BYTES = 64_000_000
"""Of one answer; a cache that holds a million prefixes says so in half of that."""
MOVE_S = 30.0


class EngineNoAnswer(PotluckError):
    """An engine that was asked something did not answer, or with something else."""


@dataclass(slots=True, eq=False)
class EngineRecord:
    """Written by the keeper alone."""

    entry: EngineEntry
    up: bool = False
    said: StatusReport | None = None
    heard_s: float = 0.0
    """When it last answered."""
    replica: str = ""
    """Which one it is at present; empty: none."""
    note: str = "was not heard of yet"
    """Why it is none, in one line."""
    cache_epoch: int | None = None
    cache_after: int = 0
    peers: frozenset[str] | None = None
    """Those it was told of last."""
    drained: bool = False
    """Whether it was told to take nothing new."""
    drained_elsewhere: bool = False
    """Whether somebody else told it so: another gateway, or a person."""
    watching: asyncio.Task[None] | None = None
    answers: ResponseTimes = ResponseTimes()
    waited_s: float = 0.0
    """How long it was waited for since it last answered."""
    told: tuple[float, ReplicaReported | None] = (0.0, None)
    """When the Brain was last told how it fares, and what."""
    links: dict[str, tuple[float, float]] = field(default_factory=dict)
    resent: dict[str, float] = field(default_factory=dict)
    """Segments of TCP sent again, by receiver."""
    """Peer to (bytes moved, seconds busy) when last looked at."""


class EngineClient:
    """Makes the calls; knows no state."""

    def __init__(self, outgoing: EngineConnections) -> None:
        self._outgoing = outgoing

    async def ask(
        self, engine: EngineRecord, method: bytes, path: bytes, body: object = None, within_s: float = ASK_S
    ) -> bytes:
        """The body of one answer. Whatever is not a 2xx raises EngineNoAnswer with one line."""
        entry = engine.entry
        headers = [(b"authorization", b"Bearer " + entry.key.encode())] if entry.key else []
        data = b"" if body is None else json.dumps(body).encode()
        try:
            status, _, said = await fetch(
                self._outgoing,
                entry.address,
                method,
                path,
                data,
                headers=headers,
                within_s=within_s,
                most_bytes=MOST_BYTES,
            )
        except (PotluckError, OSError) as error:
            raise EngineNoAnswer(" ".join(str(error).split())[:200]) from error
        if not 200 <= status < 300:
            text = " ".join(said[:200].decode("utf-8", "replace").split())
            raise EngineNoAnswer(f"{path.decode()} was answered with {status}: {text}")
        return said

    async def status(self, engine: EngineRecord) -> StatusReport:
        return read_status(await self.ask(engine, b"GET", b"/status"), engine.entry.address.host)

    async def served_model(self, engine: EngineRecord) -> str:
        """What a server of plain OpenAI calls its first model."""
        data = json.loads(await self.ask(engine, b"GET", b"/v1/models"))
        try:
            return str(data["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineNoAnswer("/v1/models names no model") from error

    async def cache(self, engine: EngineRecord) -> tuple[CacheReported, ...]:
        """Reports of its prefix cache since the last ones; the engine's place in them is moved on."""
        query = b""
        if engine.cache_epoch is not None:
            query = f"?epoch={engine.cache_epoch}&after={engine.cache_after}".encode()
        replica = engine.replica
        found = await self.ask(engine, b"GET", b"/cache" + query)
        epoch, reports = read_cache(replica, found)
        engine.cache_epoch = epoch
        if reports:
            engine.cache_after = reports[-1].sequence
        return reports

    async def role(self, engine: EngineRecord, role: str) -> None:
        await self.ask(engine, b"POST", b"/role", {"role": role})

    async def drain(self, engine: EngineRecord, *, resume: bool) -> None:
        await self.ask(engine, b"POST", b"/drain", {"resume": resume})

    async def peers(self, engine: EngineRecord, addresses: Iterable[str]) -> None:
        await self.ask(engine, b"PUT", b"/peers", {"peers": sorted(addresses)})

    async def grants(self, engine: EngineRecord, given: list[dict[str, object]], lasts_s: float) -> None:
        await self.ask(engine, b"PUT", b"/grants", {"grants": given, "lasts_s": lasts_s})

    async def move(
        self, source: EngineRecord, target: EngineRecord, request: str, names: list[str], codec: str
    ) -> None:
        """Have a cached prefix copied from one engine to another."""
        body = {"request": request, "blocks": names, "codec": codec}
        lent = json.loads(await self.ask(source, b"POST", b"/prefixes/lend", body, MOVE_S))
        if source.said is None:
            raise EngineNoAnswer("the source is gone")
        asked = {
            "request": request,
            "blocks": names,
            "source": {"kv": source.said.kv, "handle": str(lent.get("handle"))},
        }
        await self.ask(target, b"POST", b"/prefixes/fetch", asked, MOVE_S)

"""A replica over several machines: its nodes start, fail and end together.

The first node has vLLM's scheduler and the HTTP side, and listens at `--master`. On every other node vLLM's workers
run alone; whoever looks after them stays connected to the first, with lines of JSON:

    node                                                       first node
      ◀─────────── {"challenge": C} ────────────────────────────
      ──── {"node": 1, "proof": P, "challenge": D, "alike": {...}} ────▶    or {"refused": why, "final": ...}
      ◀─────────── {"start": PORT, "proof": Q} ─────────────────    when all are here: where vLLM's processes meet
      ──── {"worker": 2, ...}, {"gave": ...}, {"took": ...} ────▶    what connectors tell an adapter, as they tell it
      ◀─────────── {"peers": [...]} ────────────────────────────
      ──── {"leave": why} ──────────────────────────────────────▶    it is asked to end: the first drains
      ◀─────────── {"end": why} ────────────────────────────────    empty: all is done; else what failed

Either says {} every second, and is gone when nothing is heard of it for ten: a cable that is pulled out tells nobody.
Proofs are made of the engines' key; with `--kv-tls` both sides also show a certificate.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import signal
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from potluck.core.errors import InputError
from potluck.kv.peer_connections import client_context
from potluck.vllm.adapter.vllm_process import GRACE_S, NodePlace, VllmProcess, VllmSettings, free_port
from potluck.vllm.adapter_channel import ConnectorSocket

ALIVE_S, GONE_S = 1.0, 10.0
RETRY_S = 0.5
LONGEST_LINE = 1 << 20
OWN_OF_EACH = frozenset({"--gpu-memory-utilization", "--kv-cache-memory-bytes"})
"""Flags of vLLM's in which machines may differ: unlike GPUs have unlike room."""

Json = dict[str, Any]


def must_be_alike(settings: VllmSettings) -> Json:
    """What all nodes of a replica must have been started with; a model may lie elsewhere on each."""
    shape = settings.shape
    words = " ".join(settings.more).replace("=", " ").split()
    flags = [
        word
        for place, word in enumerate(words)
        if word not in OWN_OF_EACH and (not place or words[place - 1] not in OWN_OF_EACH)
    ]
    return {
        "--nodes": settings.place.nodes,
        "--name": settings.name,
        "--tensor-parallel": shape.tensor,
        "--stages": list(shape.stages),
        "--expert-parallel": shape.experts,
        "--token-budget": settings.token_budget,
        "--max-running": settings.max_running,
        "--max-tokens": settings.max_tokens,
        "flags behind --": flags,
    }


def difference(ours: Mapping[str, object], theirs: object) -> str:
    """The first thing in which a node differs from the first one; empty where there is none."""
    told = theirs if isinstance(theirs, dict) else {}
    for field, value in ours.items():
        if told.get(field) != value:
            return f"{field} is {told.get(field)} there, {value} on the first node"
    return ""


def proof(key: str, challenge: object, rank: int) -> str:
    return hmac.new(key.encode(), f"{challenge} {rank}".encode(), hashlib.sha256).hexdigest()


class NodeConnection:
    """Lines to and from one other node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._telling = asyncio.create_task(self._stay_alive())

    def tell(self, line: Mapping[str, object]) -> None:
        self.writer.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    async def next(self) -> Json:
        """The next line that says something; ConnectionError when the other side is gone."""
        while True:
            try:
                async with asyncio.timeout(GONE_S):
                    text = await self._reader.readline()
            except TimeoutError:
                raise ConnectionError(f"was not heard of for {GONE_S:g} s") from None
            except (OSError, ValueError) as error:
                raise ConnectionError(f"cannot be understood ({error})") from error
            if not text:
                raise ConnectionError("is gone")
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if not isinstance(line, dict):
                raise ConnectionError("says what is no line of JSON")
            if line:
                return line

    async def lines(self) -> AsyncIterator[Json]:
        while True:
            yield await self.next()

    async def close(self) -> None:
        self._telling.cancel()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ALIVE_S):
                await self.writer.drain()
        self.writer.close()

    async def _stay_alive(self) -> None:
        while not self.writer.is_closing():
            self.tell({})
            await asyncio.sleep(ALIVE_S)


class NodeGroup:
    """The first node's side."""

    def __init__(
        self,
        settings: VllmSettings,
        key: str | None,
        tls: ssl.SSLContext | None,
        heard: Callable[[Json, asyncio.StreamWriter], None],
    ) -> None:
        self._place, self._alike = settings.place, must_be_alike(settings)
        self._key, self._tls, self._heard = key or "", tls, heard
        self._server: asyncio.Server | None = None
        self._nodes: dict[int, tuple[NodeConnection, str]] = {}
        """Those that came, with what they asked for as a proof."""
        self._talks: set[asyncio.Task[None]] = set()
        self._came = asyncio.Event()
        self._started = False
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """What went wrong on another node."""
        self.leaving = asyncio.Event()  # One of them is asked to end.

    async def open(self, host: str) -> None:
        port = self._place.master[1]
        try:
            self._server = await asyncio.start_server(
                self._talk, host, port, limit=LONGEST_LINE, ssl=self._tls
            )
        except OSError as error:
            raise InputError(
                "--master", f"{host}:{port} cannot be used ({error.strerror or error})"
            ) from error

    async def assembled(self, within_s: float) -> int:
        """Once all nodes are here, the port where vLLM's processes meet."""
        wanted = self._place.nodes - 1
        try:
            async with asyncio.timeout(within_s):
                while len(self._nodes) < wanted:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            absent = sorted(set(range(1, wanted + 1)) - self._nodes.keys())
            line = f"of {self._place.nodes} did not come within {within_s:g} s: --node-rank {absent[0]}"
            raise InputError("--nodes", line) from None
        self._started = True
        port = free_port("")
        for rank, (connection, challenge) in self._nodes.items():
            connection.tell({"start": port, "proof": proof(self._key, challenge, rank)})
        return port

    async def close(self, why: str) -> None:
        """All others are told to end; `why` is empty where nothing failed."""
        if self._server is not None:
            self._server.close()
        for connection, _ in list(self._nodes.values()):
            connection.tell({"end": why})
            await connection.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        connection, rank = NodeConnection(reader, writer), 0
        try:
            challenge = secrets.token_hex(16)
            connection.tell({"challenge": challenge})
            line = await connection.next()
            why, final = self._objection(line, challenge)
            if why:
                connection.tell({"refused": why, "final": final})
                return
            rank = int(line["node"])
            self._nodes[rank] = connection, str(line.get("challenge"))
            self._came.set()
            async for line in connection.lines():
                self._say(rank, line, writer)
        except (ConnectionError, ValueError, KeyError, TypeError) as error:
            self._lose(rank, str(error))
        except asyncio.CancelledError:
            pass  # all is over
        finally:
            if rank and self._nodes.get(rank, (None,))[0] is connection:
                del self._nodes[rank]
            await connection.close()
            self._talks.discard(task)

    def _objection(self, line: Json, challenge: str) -> tuple[str, bool]:
        """Why a node may not join, and whether that stays so."""
        rank = line.get("node")
        if not isinstance(rank, int) or not 1 <= rank < self._place.nodes:
            return f"--node-rank: must be 1 to {self._place.nodes - 1}", True
        if not hmac.compare_digest(str(line.get("proof")), proof(self._key, challenge, rank)):
            return "--api-key-file: all nodes of a replica need the same key", True
        if unlike := difference(self._alike, line.get("alike")):
            return unlike, True
        if self._started or rank in self._nodes:
            return "the nodes before it have not ended yet", False
        return "", False

    def _say(self, rank: int, line: Json, writer: asyncio.StreamWriter) -> None:
        if "leave" in line:
            self.leaving.set()
        elif "failed" in line:
            self._lose(rank, str(line["failed"]))
        else:
            self._heard(line, writer)

    def _lose(self, rank: int, why: str) -> None:
        if rank and self._started and not self.failed.done():
            self.failed.set_result(f"node {rank} {why}")


async def join(
    settings: VllmSettings, key: str | None, tls: ssl.SSLContext | None, within_s: float
) -> tuple[NodeConnection, int]:
    """Connected to the first node, and the port where vLLM's processes meet. It may not be there yet, or have to end
    the replica that was before."""
    place, loop = settings.place, asyncio.get_running_loop()
    until_s, why = loop.time() + within_s, "is not there"
    while loop.time() < until_s:
        try:
            async with asyncio.timeout_at(until_s):
                return await _joined(place, must_be_alike(settings), key or "", tls)
        except ssl.SSLCertVerificationError as error:
            raise InputError(
                "--kv-tls", f"the first node shows what cannot be trusted ({error.reason})"
            ) from error
        except OSError as error:  # among them that it is too late
            why = str(error) or why
        await asyncio.sleep(RETRY_S)
    host, port = place.master
    raise InputError("--master", f"{host}:{port} did not start the replica within {within_s:g} s ({why})")


async def _joined(
    place: NodePlace, alike: Json, key: str, tls: ssl.SSLContext | None
) -> tuple[NodeConnection, int]:
    host, port = place.master
    async with asyncio.timeout(GONE_S):
        reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE, ssl=tls)
    connection = NodeConnection(reader, writer)
    try:
        asked = (await connection.next()).get("challenge")
        mine = secrets.token_hex(16)
        connection.tell(
            {"node": place.rank, "proof": proof(key, asked, place.rank), "challenge": mine, "alike": alike}
        )
        line = await connection.next()
        if "refused" in line and line.get("final"):
            raise InputError("--master", f"{host}:{port} refused this node: {line['refused']}")
        right = proof(key, mine, place.rank)
        if "start" not in line or not hmac.compare_digest(str(line.get("proof")), right):
            raise ConnectionError(str(line.get("refused") or "has not the same key"))
        return connection, int(line["start"])
    except BaseException:
        await connection.close()
        raise


class ConnectorRelay:
    """In an adapter's place: passes on what this node's connectors say, and what they are told."""

    def __init__(self, connection: NodeConnection) -> None:
        self._connection = connection
        self._writers: set[asyncio.StreamWriter] = set()
        self._peers = b""

    def heard(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        if writer not in self._writers:
            self._writers.add(writer)
            writer.write(self._peers)
        self._connection.writer.write(line)

    def tell(self, line: dict[str, object]) -> None:
        self._peers = json.dumps(line).encode() + b"\n"
        for writer in self._writers:
            writer.write(self._peers)


async def serve_workers(
    settings: VllmSettings, *, key: str | None, start_s: float, ready: Callable[[], None], drain_s: float
) -> None:
    """Until the first node ends; InputError when it fails, or these workers do."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    ending = asyncio.ensure_future(stop.wait())
    tls = client_context(*settings.kv_tls) if settings.kv_tls else None
    joining = asyncio.ensure_future(join(settings, key, tls, start_s))
    await asyncio.wait([joining, ending], return_when=asyncio.FIRST_COMPLETED)
    if not joining.done():
        joining.cancel()
        return
    connection, meeting_port = await joining
    with tempfile.TemporaryDirectory(prefix="potluck-vllm-") as folder:
        relay, channel = ConnectorRelay(connection), Path(folder) / "channel"
        connectors = ConnectorSocket(channel, relay.heard)
        vllm_process = VllmProcess(settings, channel)
        hearing = asyncio.ensure_future(_hear(connection, relay))
        failed = True
        try:
            await connectors.open()
            await vllm_process.start(meeting_port)
            ready()
            await _until_one_ends(vllm_process, connection, hearing, ending, drain_s)
            failed = False
        finally:
            hearing.cancel()
            await connection.close()
            await vllm_process.end(at_once=failed)
            await connectors.close()


async def _hear(connection: NodeConnection, relay: ConnectorRelay) -> str:
    """Why the first node ends the replica; empty where it is done."""
    async for line in connection.lines():
        if "end" in line:
            return str(line["end"])
        if "peers" in line:
            relay.tell(line)
    raise AssertionError("lines never end")


async def _until_one_ends(
    vllm_process: VllmProcess,
    connection: NodeConnection,
    hearing: asyncio.Future[str],
    ending: asyncio.Future[Any],
    drain_s: float,
) -> None:
    watching: asyncio.Future[Any] = asyncio.ensure_future(vllm_process.wait())
    ends: list[asyncio.Future[Any]] = [watching, hearing]
    try:
        await asyncio.wait([*ends, ending], return_when=asyncio.FIRST_COMPLETED)
        if ending.done() and not (watching.done() or hearing.done()):
            connection.tell({"leave": "it was asked to end"})
            within_s = drain_s + GRACE_S
            await asyncio.wait(ends, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        elif watching.done() and not hearing.done():
            # The first may have ended it, and says so in a moment.
            await asyncio.wait([hearing], timeout=1.0)
    finally:
        watching.cancel()
    if hearing.done():
        try:
            why = hearing.result()
        except ConnectionError as error:
            why = f"it {error}"
        if why:
            raise InputError("--master", f"the first node ended this replica: {why}")
    elif vllm_process.gone and not ending.done():
        why = vllm_process.last_words()
        with suppress(OSError):
            connection.tell({"failed": f"failed: {why}"})
        raise InputError("vLLM", f"ended: {why}")

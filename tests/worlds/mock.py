"""The mock engine that ships, in a world: its HTTP, its loop and its KV transport, with their threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from potluck.catalog import models, nodes
from potluck.core.values.layout import single
from potluck.core.values.sampling import Sampling
from potluck.engine.mock import mock_executor
from potluck.engine.mock.mock_engine import MockModel, mock_engine, words_of
from potluck.engine.mock.mock_executor import EMPTY_HISTORY, MockExecutor, Vocabulary, after
from potluck.engine.serve import EngineSettings
from potluck.engine.server import segment_routes
from potluck.engine.server.engine_app import open_server
from potluck.engine.server.http_connection import HttpConnection
from potluck.engine.server.kv_connector import KvConnector, KvSettings
from potluck.kv.kv_sender import OutgoingTransfer, SenderLimits
from potluck.kv.peer_connections import LinkLimits
from worlds import sockets, virtual
from worlds.engines import END, HTTP, KV, Engine
from worlds.loop import WorldLoop
from worlds.virtual import Process

LLAMA = models.model("Llama-3.1-8B")
NODE = nodes.node_type(nodes.canonical("1xA10"))
MODEL = MockModel(LLAMA, single(NODE.name, 1, LLAMA.layer_count), (NODE,), mean_output_tokens=60)
STEP_S = 0.03  # Of this model on this GPU, about.
PIECE_BYTES = 4096
LASTING = ("kv-accept", "kv-out-")  # Threads that are there as long as the engine, or as an idle connection.


@functools.cache
def words() -> Vocabulary:
    from worlds.world import card

    return words_of(folder(), card().text, MODEL)[0]


@functools.cache
def folder() -> Path:
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="world-model-"))
    (made / "config.json").write_text(f'{{"eos_token_id": {END}}}')
    return made


def right_answer(prompt: Sequence[int], most: int, least: int) -> list[int]:
    sampling = Sampling(temperature=0.0, barred=(END,) if least else (), barred_before=len(prompt) + least)
    history, tokens = after(EMPTY_HISTORY, prompt), list[int]()
    while len(tokens) < most and END not in tokens:
        tokens.append(words().draw(history, sampling, len(prompt) + len(tokens)).token)
        history = after(history, tokens[-1:])
    return tokens


class MockEngine(Engine):
    """The same to faults and rules as one that is made up. It does not lie, and refuses only for lack of room."""

    def __init__(
        self, loop: WorldLoop, process: Process, role: str, fingerprint: str, token_s: float
    ) -> None:
        from worlds.world import card

        process.engine = self  # type: ignore[attr-defined]
        # Its KV crosses as bytes, or only as a word for them.
        what = replace(MODEL, speed_up=STEP_S / token_s, bytes_per_real=1000.0 * (loop.switches == 0.05))
        if fingerprint != "f":
            what = replace(what, model=replace(LLAMA, name=fingerprint))
        kv = KvSettings(
            process.host.name,
            KV,
            sender=SenderLimits(piece_bytes=PIECE_BYTES),
            links=LinkLimits(piece_bytes=PIECE_BYTES),
        )
        make = functools.partial(mock_engine, name="m", kv=kv, tokenizer=card().text)
        self.service = process.run(lambda: make(folder(), what, EngineSettings()))
        self._limits, self._halted = self.service.limits, False
        driver = self.service.driver
        self._look = driver._run_turns
        driver._run_turns = self._looked
        super().__init__(loop, process, role, fingerprint, token_s)

    async def _listen(self) -> None:
        self.process.remains.append(await open_server(self.service, self.name, HTTP))

    def _looked(self) -> None:
        if self.stuck:
            self._halted = True
        else:
            self._look()

    def unstick(self) -> None:
        self.stuck = False
        if self._halted and self.alive:
            self._halted = False
            self.process.run(self._look)

    @property
    def running(self) -> dict[str, int]:  # type: ignore[override]
        """What is left of requests and hand-overs."""
        connector, service = self.service.kv_connector, self.service
        left = {"requests": service.open_requests, "channels": service.hub.open}
        left["threads"] = sum(not item.name.startswith(LASTING) for item in self.process.threads)
        if connector is not None:
            left |= {"transfers": connector.sender.transfers, "held": connector.sender.held_bytes}
            left |= {"received": connector.links.buffers.out_bytes, "outgoing": len(connector._outgoing)}
        return {name: count for name, count in left.items() if count}

    @running.setter
    def running(self, _: object) -> None: ...

    def _pace(self, times: float) -> None:
        self.service.change_pace(times)

    def _refuse(self, share: float) -> None:
        self.service.limits = replace(self._limits, open_requests=0) if share else self._limits

    role = property(lambda self: self.service.role, lambda self, role: setattr(self.service, "role", role))  # type: ignore[assignment]
    draining = property(lambda self: self.service.draining, lambda self, _: None)  # type: ignore[assignment]
    slow = property(None, _pace)  # type: ignore[assignment]
    refuses = property(None, _refuse)  # type: ignore[assignment]


def _engine() -> MockEngine | None:
    return getattr(virtual.running(), "engine", None)


def _around(where: Any, name: str, call: Callable[..., Any]) -> None:
    """Let `call` be asked in place of a function, with that function first."""
    real = getattr(where, name)
    if not hasattr(real, "around"):
        wrapped: Any = lambda *given: call(real, *given)  # noqa: E731
        wrapped.around = real
        setattr(where, name, wrapped)


def _segment_of(real: Any, body: dict[str, Any]) -> Any:
    if (engine := _engine()) is not None:
        engine.loop.told("segment", engine.name, str(body["request"]))
        engine.salted(body)
    return real(body)


def _data_received(real: Any, self: HttpConnection, data: bytes) -> None:
    if (engine := _engine()) is None or not engine.mute:
        real(self, data)


def _finish(real: Any, self: OutgoingTransfer) -> None:
    if (engine := _engine()) is not None and engine.forgets:
        engine.loop.told("kv lost", engine.name, "")
        self.fail("its KV is lost")
    else:
        real(self)


def _part(real: Any, self: MockExecutor, *given: Any) -> Any:
    chunks = real(self, *given)
    if (engine := _engine()) is not None and engine.wrong_kv:
        engine.loop.told("kv wrong", engine.name, "")
        return tuple(
            mock_executor.chunk_of(7, chunk.layer, chunk.first, chunk.stop, mock_executor.since_of(chunk))
            for chunk in chunks
        )
    return chunks


async def _fetch(real: Any, self: KvConnector, *given: Any) -> Any:
    engine, said = _engine(), "cancelled"
    try:
        result = await real(self, *given)
        said = f"{result.chunks} chunks, {result.lost_connections} connections lost"
        return result
    except Exception as error:
        said = f"{type(error).__name__} {error}"
        raise
    finally:
        if engine is not None:
            engine.loop.told("kv", engine.name, said)


def install() -> None:
    sockets.install()
    _around(segment_routes, "segment_of", _segment_of)
    _around(HttpConnection, "data_received", _data_received)
    _around(OutgoingTransfer, "finish", _finish)
    _around(MockExecutor, "_part", _part)
    _around(KvConnector, "fetch", _fetch)

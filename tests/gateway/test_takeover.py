"""Ports handed from one gateway to the next without a refused connection."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from host_bed import make_certificates

from potluck.api.http import server_tls
from potluck.core.errors import InputError
from potluck.gateway.http.limits import HttpLimits
from potluck.gateway.http.server import ClientListener, Exchange, open_port
from potluck.gateway.http.takeover import SocketHandover, take_over

Work = Callable[[], Awaitable[None]]


def run_in_loop(work: Work) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


HANDSHAKE_S = 3.0


async def gateway(
    name: bytes,
    taken: list | None = None,  # type: ignore[type-arg]
    tls: ssl.SSLContext | None = None,
) -> ClientListener:
    def answer(exchange: Exchange) -> None:
        exchange.reply(200, name, [(b"content-type", b"text/plain")])

    limits = HttpLimits(head_s=HANDSHAKE_S)
    return await open_port(answer, "127.0.0.1", 0, taken=taken or (), tls=tls, limits=limits)


async def request_answer(listener: ClientListener) -> bytes:
    host, number = listener.sockets[0].getsockname()[:2]
    reader, writer = await asyncio.open_connection(host, number)
    writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
    received = await reader.read()
    writer.close()
    return received.rpartition(b"\r\n\r\n")[2]


def test_no_connection_is_refused_during_a_gateway_takeover(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, handed = tmp_path / "gateway.sock", asyncio.Event()
        assert await asyncio.to_thread(take_over, path) is None, "there is none before the first"
        old = await gateway(b"old")
        first = SocketHandover(path, old.sockets, (), handed.set, lambda: ["10.0.0.5"])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        taken = await asyncio.to_thread(take_over, path)
        assert taken is not None
        assert taken.cordons == ("10.0.0.5",), "what operators told the one before"
        assert await request_answer(old) == b"old"
        address = old.sockets[0].getsockname()
        new = await gateway(b"new", taken.clients)
        second = SocketHandover(path, new.sockets, (), handed.clear)
        taken.serving()
        await handed.wait()
        assert (first.handed, second.handed) == (True, False)
        first.close()
        waiting = [asyncio.ensure_future(request_answer(new)) for _ in range(20)]
        await old.close(1.0)
        assert set(await asyncio.gather(*waiting)) <= {b"old", b"new"}
        assert new.sockets[0].getsockname() == address
        assert await request_answer(new) == b"new"
        assert path.exists(), "it is the successor's by now"
        second.close()
        assert not path.exists()
        await new.close(1.0)

    run_in_loop(scenario)


KEPT = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


def test_old_connection_gets_its_last_answer_with_connection_close() -> None:
    async def scenario() -> None:
        listener = await gateway(b"old")
        address = listener.sockets[0].getsockname()[:2]
        silent, one = await asyncio.open_connection(*address)
        kept, two = await asyncio.open_connection(*address)
        two.write(KEPT)
        assert b"connection: close" not in await kept.readuntil(b"old")
        while len(listener) < 2:
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(listener.close(60.0, gently=True))
        await asyncio.sleep(0)
        with pytest.raises(OSError):
            await asyncio.open_connection(*address)
        for reader, writer in ((silent, one), (kept, two)):
            writer.write(KEPT)
            received = await reader.read()
            assert received.endswith(b"old")
            assert b"connection: close" in received
            writer.close()
        await closing

    run_in_loop(scenario)


def test_tls_handshake_during_port_closing_is_answered(tmp_path: Path) -> None:
    """Of such a connection nobody is told before it is made."""
    authority = make_certificates(tmp_path, ["127.0.0.1"])

    async def scenario() -> None:
        listener = await gateway(
            b"old", tls=server_tls(tmp_path / "127.0.0.1.pem", tmp_path / "127.0.0.1.key")
        )
        plain = socket.create_connection(listener.sockets[0].getsockname()[:2])
        await asyncio.sleep(0.05)  # it is accepted, and says nothing yet
        closing = asyncio.create_task(listener.close(60.0, gently=True))
        await asyncio.sleep(0)
        trusting = ssl.create_default_context(cafile=str(authority))
        reader, writer = await asyncio.open_connection(sock=plain, ssl=trusting, server_hostname="127.0.0.1")
        writer.write(KEPT)
        assert (await reader.read()).endswith(b"old")
        writer.close()
        await closing

    run_in_loop(scenario)


def test_successor_that_dies_before_serving_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        path, handed = tmp_path / "gateway.sock", asyncio.Event()
        old = await gateway(b"old")
        handover = SocketHandover(path, old.sockets, (), handed.set)
        for _ in range(2):
            taken = await asyncio.to_thread(take_over, path)
            assert taken is not None
            for client in taken.clients:
                client.close()
            taken.link.close()
        await asyncio.sleep(0.05)
        assert not handed.is_set()
        assert await request_answer(old) == b"old"
        handover.close()
        await old.close(1.0)

    run_in_loop(scenario)


def test_invalid_takeover_socket_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(InputError, match="--takeover: .* cannot be made"):
            SocketHandover(tmp_path / "not there" / "gateway.sock", (), (), lambda: None)

    run_in_loop(scenario)
    (tmp_path / "plain").write_text("a file")
    if os.geteuid() == 0:  # others may not be allowed to connect at all
        assert take_over(tmp_path / "plain") is None

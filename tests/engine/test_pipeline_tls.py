"""Stages under TLS: the same frames and tokens, and nobody without a certificate of the fleet's gets in."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from host_bed import make_certificates
from pipeline_workers import PLAIN, SECRET, generate, local, pipeline

from potluck.engine.pipeline import __main__ as worker
from potluck.engine.pipeline import pipeline_connection
from potluck.engine.pipeline.pipeline_connection import (
    LinkError,
    PipelineConnection,
    TlsPair,
    connect,
    welcome,
)
from potluck.engine.pipeline.worker_listener import serve

HOST = "127.0.0.1"


def secure(folder: Path, host: str = HOST) -> TlsPair:
    folder.mkdir()
    authority = make_certificates(folder, [host])
    return TlsPair.of(folder / f"{host}.pem", folder / f"{host}.key", authority)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TlsPair:
    return secure(tmp_path_factory.mktemp("ours") / "tls")


def met(
    connects: TlsPair | None, listens: TlsPair | None, host: str = HOST
) -> list[PipelineConnection | LinkError]:
    """What connector and listener make of each other."""
    listener = socket.create_server((HOST, 0))
    found: list[PipelineConnection | LinkError] = []

    def listen() -> None:
        sock, _ = listener.accept()
        try:
            found.append(welcome(sock, SECRET, "somebody", listens)[0])
        except LinkError as error:
            found.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        mine: PipelineConnection | LinkError = connect(
            (host, listener.getsockname()[1]), SECRET, "me", "them", connects
        )
    except LinkError as error:
        mine = error
    thread.join()
    listener.close()
    return [mine, *found]


def test_large_frames_cross_both_ways_at_once(ours: TlsPair) -> None:
    """The state of TLS is one for both ways, and threads share it."""
    left, right = met(ours, ours)
    assert isinstance(left, PipelineConnection)
    assert isinstance(right, PipelineConnection)
    bodies = [bytes([place]) * (1 << 20) for place in range(1, 9)]
    got: dict[str, list[bytes]] = {"left": [], "right": []}

    def send(link: PipelineConnection) -> None:
        for body in bodies:
            link.send(b"head", [body[:9], memoryview(body)[9:]])

    def hear(name: str, link: PipelineConnection) -> None:
        got[name] = [bytes(link.receive(30.0)[1]) for _ in bodies]

    threads = [threading.Thread(target=send, args=(link,)) for link in (left, right)]
    threads += [threading.Thread(target=hear, args=each) for each in (("left", left), ("right", right))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60.0)
    assert got == {"left": bodies, "right": bodies}
    left.close()
    with pytest.raises(LinkError):
        right.receive(30.0)
    right.close()


def test_nobody_comes_in_without_tls_or_with_another_authoritys(
    ours: TlsPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_connection, "GREETING_S", 1.0)
    strangers = secure(tmp_path / "strangers")
    for connects, listens in ((ours, strangers), (strangers, ours), (ours, None), (None, ours)):
        found = met(connects, listens)
        assert all(isinstance(each, LinkError) for each in found)
    assert "TLS was not agreed on" in str(met(ours, None)[0])


def test_a_certificate_is_for_the_host_that_was_asked_for(ours: TlsPair) -> None:
    found = met(ours, ours, "localhost")
    assert "TLS was not agreed on" in str(found[0])


def test_a_pipeline_says_the_same_under_tls(ours: TlsPair, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = standing(3, ours)
    executor = pipeline(PLAIN, "1,2x2", addresses, tls=ours)
    assert generate(executor) == generate(local(PLAIN))
    executor.check()
    executor.shutdown()
    monkeypatch.setattr(pipeline_connection, "GREETING_S", 0.5)
    with pytest.raises(LinkError):
        pipeline(PLAIN, "1,2x2", addresses)


def standing(count: int, tls: TlsPair) -> Sequence[tuple[str, int]]:
    listeners = [socket.create_server((HOST, 0)) for _ in range(count)]
    for each in listeners:
        threading.Thread(target=serve, args=(each, SECRET, True, tls), daemon=True).start()
    return [(HOST, each.getsockname()[1]) for each in listeners]


def test_a_worker_says_its_port_first_and_then_that_it_is_heard_in_clear(
    ours: TlsPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever started it may read both from one file."""
    monkeypatch.setattr(worker, "serve", lambda listener, *_: listener.close())

    def said(*words: str) -> list[str]:
        out = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr("sys.argv", ["worker", *words])
            patch.setattr("sys.stdin", io.StringIO(SECRET.decode() + "\n"))
            patch.setattr("sys.stdout", out)
            patch.setattr("sys.stderr", out)
            worker.main()
        return out.getvalue().splitlines()

    port, warning = said("--listen", "127.0.0.2:0")
    assert port.isdecimal()
    assert "127.0.0.2 is served in clear" in warning
    assert len(said("--listen", "127.0.0.1:0")) == 1
    (refused,) = said("--listen", "127.0.0.2:0", "--tls", "a", "b", str(tmp_path))
    assert refused.startswith("worker: tls: cannot use a, b")

"""Frames between processes: what goes in comes out, and whatever is wrong is one error, soon."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from host_bed import make_certificates
from hypothesis import given
from hypothesis import strategies as st
from pipeline_workers import PLAIN, SECRET, generate, local, pipeline

from potluck.core.errors import FormatError, PotluckError
from potluck.core.values.sampling import Drawing
from potluck.engine.pipeline import __main__ as worker
from potluck.engine.pipeline import pipeline_connection
from potluck.engine.pipeline.pipeline_connection import (
    HEADER,
    MAGIC,
    LinkError,
    PipelineConnection,
    TlsPair,
    connect,
    welcome,
)
from potluck.engine.pipeline.pipeline_messages import (
    CommandFailed,
    HiddenStates,
    LayerPartHeader,
    LayerParts,
    StepCommand,
    chunks_of,
    error_of,
    failure,
    read_answer,
    read_command,
    to_bytes,
)
from potluck.engine.pipeline.worker import StageInputs, serve

Pair = tuple[PipelineConnection, PipelineConnection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = socket.socketpair()
    left, right = PipelineConnection(one, "left"), PipelineConnection(two, "right")
    yield left, right, one
    left.close()
    right.close()


@given(st.binary(max_size=300), st.lists(st.binary(max_size=3000), max_size=5))
def test_frames_come_out_as_they_went_in(head: bytes, bodies: list[bytes]) -> None:
    one, two = socket.socketpair()
    left, right = PipelineConnection(one, "left"), PipelineConnection(two, "right")
    left.send(head, bodies)
    left.send(b"next")
    assert right.receive(1.0) == (head, bytearray(b"".join(bodies)))
    assert right.receive(1.0) == (b"next", bytearray())
    left.close()
    right.close()


def test_a_frame_larger_than_the_buffers(pair: Pair) -> None:
    left, right, _ = pair
    body = bytes(range(256)) * 40_000
    sender = threading.Thread(target=left.send, args=(b"large", [body[:7], memoryview(body)[7:]]))
    sender.start()
    assert right.receive(5.0) == (b"large", bytearray(body))
    sender.join()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak"),
        (HEADER.pack(MAGIC, pipeline_connection.MOST_HEAD_BYTES + 1, 0), "too large"),
        (HEADER.pack(MAGIC, 0, pipeline_connection.MOST_BODY_BYTES + 1), "too large"),
        (HEADER.pack(MAGIC, 0, 1 << 63), "too large"),
    ],
)
def test_strange_bytes_are_refused_before_anything_is_read(raw: bytes, says: str, pair: Pair) -> None:
    _, right, one = pair
    one.sendall(raw)
    with pytest.raises(LinkError, match=says):
        right.receive(1.0)


def test_a_frame_that_is_cut_short_or_never_comes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, one = pair
    with pytest.raises(LinkError, match="in time"):
        right.receive(0.05)
    monkeypatch.setattr(pipeline_connection, "FRAME_S", 0.05)
    one.sendall(HEADER.pack(MAGIC, 10, 0) + b"half")
    with pytest.raises(LinkError, match="in time"):
        right.receive(1.0)
    left.close()
    with pytest.raises(LinkError, match="closed"):
        right.receive(1.0)


def test_a_peer_that_does_not_read_stops_no_sender(pair: Pair) -> None:
    left, _, _ = pair
    with pytest.raises(LinkError, match="in time"):
        left.send(b"", [bytes(1 << 24)], within_s=0.1)


def test_closing_wakes_whoever_waits(pair: Pair) -> None:
    left, _, _ = pair
    caught: list[Exception] = []

    def wait() -> None:
        try:
            left.receive()
        except LinkError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    left.close()
    waiter.join(5.0)
    assert len(caught) == 1


def greet(theirs: bytes, ours: bytes) -> tuple[str | Exception, str | Exception]:
    listener = socket.create_server(("127.0.0.1", 0))
    results: list[str | Exception] = ["", ""]

    def listen() -> None:
        sock, _ = listener.accept()
        try:
            connection, who = welcome(sock, ours, "somebody")
            results[1] = who
            connection.close()
        except LinkError as error:
            results[1] = error

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        connect(listener.getsockname(), theirs, "me", "them").close()
    except LinkError as error:
        results[0] = error
    thread.join(5.0)
    listener.close()
    return results[0], results[1]


def test_both_must_know_the_secret() -> None:
    assert greet(SECRET, SECRET) == ("", "me")
    connector, listener = greet(SECRET, b"another secret..")
    assert isinstance(connector, LinkError)
    assert isinstance(listener, LinkError)
    assert "secret" in str(listener)


def test_a_listener_that_does_not_know_the_secret_is_found_out() -> None:
    """It can neither prove anything, nor learn the secret from what it is sent."""
    one, two = socket.socketpair()
    fake = PipelineConnection(two, "fake")
    fake.send(b"", [bytes(32)])
    fake.send(b"", [bytes(32)])
    original = socket.create_connection
    try:
        socket.create_connection = lambda *_, **__: one  # type: ignore[assignment]
        with pytest.raises(LinkError, match="does not know"):
            connect(("x", 1), SECRET, "me", "them")
    finally:
        socket.create_connection = original
    head, body = fake.receive(1.0)
    assert SECRET not in head + body
    assert len(body) == 64
    fake.close()


def test_messages_survive_and_others_are_refused() -> None:
    message = StepCommand(3, 2, 1, (Drawing(0.5, seed=9), Drawing(logprobs=2)))
    assert read_command(to_bytes(message)) == message
    for head in (
        b"",
        b"{",
        b"[]",
        b'{"type": "Nonsense"}',
        b'{"type": "Check", "call": 1, "more": 2}',
        b"[" * 9999,
    ):
        with pytest.raises(FormatError):
            read_command(head)
    with pytest.raises(FormatError):
        read_answer(to_bytes(message))


def test_errors_cross_with_their_kind_and_text() -> None:
    for error in (FormatError("a", "b"), LinkError("gone"), PotluckError("other")):
        crossed = error_of(read_answer(to_bytes(failure(1, error))))  # type: ignore[arg-type]
        assert (type(crossed), str(crossed)) == (type(error), str(error))
    odd = error_of(failure(1, ZeroDivisionError("by\nzero")))
    assert str(odd) == "ZeroDivisionError: by zero"
    assert isinstance(failure(1, odd), CommandFailed)


def test_chunks_that_claim_more_than_there_is() -> None:
    header = LayerPartHeader(0, "kv", 0, 1, "float32", (1,), 8)
    for size in (9, -1):
        bad = LayerPartHeader(0, "kv", 0, 1, "float32", (1,), size)
        with pytest.raises(FormatError):
            chunks_of(LayerParts(1, (bad,)), bytearray(8))
    assert chunks_of(LayerParts(1, (header,)), bytearray(8))[0].data == bytes(8)


def test_states_are_awaited_until_they_come_or_cannot() -> None:
    inputs = StageInputs()
    inputs.put(0, HiddenStates(1, "float32", 1), bytearray(4))
    inputs.put(0, HiddenStates(2, "", 0, "it broke"), bytearray())
    assert inputs.take(1, 0, 1.0)[0].rows == 1
    with pytest.raises(LinkError, match="it broke"):
        inputs.take(2, 0, 1.0)
    with pytest.raises(LinkError, match="nothing for"):
        inputs.take(3, 0, 0.01)
    number = inputs.join(0)
    assert inputs.join(0) == number + 1
    inputs.lose(0, "of the connection before", number)
    with pytest.raises(LinkError, match="nothing for"):
        inputs.take(3, 0, 0.01)
    inputs.lose(0, "gone for good", number + 1)
    with pytest.raises(LinkError, match="gone for good"):
        inputs.take(3, 0, 60.0)
    inputs.put(1, HiddenStates(3, "float32", 1), bytearray(4))
    inputs.forget_before(4)
    with pytest.raises(LinkError, match="nothing for"):
        inputs.take(3, 1, 0.0)


HOST = "127.0.0.1"


def secure(folder: Path, host: str = HOST) -> TlsPair:
    folder.mkdir()
    return TlsPair.of(folder / f"{host}.pem", folder / f"{host}.key", make_certificates(folder, [host]))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TlsPair:
    return secure(tmp_path_factory.mktemp("ours") / "tls")


def met(
    connects: TlsPair | None, listens: TlsPair | None, host: str = HOST
) -> list[PipelineConnection | LinkError]:
    listener = socket.create_server((HOST, 0))
    result: list[PipelineConnection | LinkError] = []

    def listen() -> None:
        sock, _ = listener.accept()
        try:
            result.append(welcome(sock, SECRET, "somebody", listens)[0])
        except LinkError as error:
            result.append(error)

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
    return [mine, *result]


def test_large_frames_cross_both_ways_at_once(ours: TlsPair) -> None:
    """The state of TLS is one for both ways, and threads share it."""
    left, right = met(ours, ours)
    assert isinstance(left, PipelineConnection)
    assert isinstance(right, PipelineConnection)
    bodies = [bytes([place]) * (1 << 20) for place in range(1, 9)]
    got: dict[str, list[bytes]] = {"left": [], "right": []}

    def send(connection: PipelineConnection) -> None:
        for body in bodies:
            connection.send(b"head", [body[:9], memoryview(body)[9:]])

    def hear(name: str, connection: PipelineConnection) -> None:
        got[name] = [bytes(connection.receive(30.0)[1]) for _ in bodies]

    threads = [threading.Thread(target=send, args=(connection,)) for connection in (left, right)]
    threads += [threading.Thread(target=hear, args=entry) for entry in (("left", left), ("right", right))]
    for thread in threads:
        thread.start()
    for item in threads:
        item.join(60.0)
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
        result = met(connects, listens)
        assert all(isinstance(item, LinkError) for item in result)
    assert "TLS was not agreed on" in str(met(ours, None)[0])


def test_a_certificate_is_for_the_host_that_was_asked_for(ours: TlsPair) -> None:
    assert "TLS was not agreed on" in str(met(ours, ours, "localhost")[0])


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
    for listener in listeners:
        threading.Thread(target=serve, args=(listener, SECRET, True, tls), daemon=True).start()
    return [(HOST, item.getsockname()[1]) for item in listeners]


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

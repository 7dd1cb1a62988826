"""Two releases whose frames differ: both sides find out at once, and say which."""

from __future__ import annotations

import socket
import threading

import pytest
from kv_kit import BOUND, ends

from potluck.core.errors import FormatError
from potluck.kv.frames import PREFIX, VERSION, HandleRefused, Hello, OtherVersion, frame, read_prefix
from potluck.kv.handles import new_handle

PLACE = 4
"""Of the version in a frame."""


def aged(raw: bytes) -> bytes:
    """The same of another version."""
    return raw[:PLACE] + bytes([VERSION + 7]) + raw[PLACE + 1 :]


def test_a_sender_answers_in_its_own_version() -> None:
    hello = frame(Hello(bytes(16), BOUND, new_handle(), 0, 1 << 17, 4096, 100))
    with ends() as pair, socket.create_connection(pair.address, timeout=5.0) as connection:
        connection.sendall(aged(hello))
        said = connection.recv(1 << 16)
    prefix = read_prefix(said[: PREFIX.size])
    assert said == frame(HandleRefused())
    assert prefix.kind


def test_a_receiver_gives_up_soon_and_names_both() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    came: list[bytes] = []

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                came.append(connection.recv(1 << 16))
                connection.sendall(aged(frame(HandleRefused())))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with ends() as pair:
        pair.address = listener.getsockname()
        pair.links.allow({pair.address})
        with pytest.raises(FormatError, match=f"version {VERSION + 7}, this side reads {VERSION}"):
            pair.fetch(new_handle(), degree=1)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
    assert len(came) == 2, "what is said twice is meant; no use to try again"


def test_only_another_version_is_hopeless() -> None:
    assert issubclass(OtherVersion, FormatError)
    with pytest.raises(FormatError) as told:
        read_prefix(b"HTTP" + bytes(PREFIX.size - 4))
    assert not isinstance(told.value, OtherVersion)

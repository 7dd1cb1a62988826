"""A relay between two engines that damages the KV that crosses, with or without a checksum that fits."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace

from potluck.kv.checksum import sums
from potluck.kv.frames import PREFIX, ChunkPiece, frame, read_head, read_prefix


class Relay:
    """Listens on a port of its own, and passes on what goes to and from another."""

    def __init__(self, port: int, *, fitting: bool) -> None:
        self._port, self._fitting = port, fitting
        self.damaged = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def kv(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        for item in self._open:
            with suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                receiver = self._listener.accept()[0]
                sender = socket.create_connection(("127.0.0.1", self._port))
                self._open += [receiver, sender]
                threading.Thread(target=self._pass, args=(receiver, sender), daemon=True).start()
                threading.Thread(target=self._damage, args=(sender, receiver), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _damage(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source.makefile("rb") as stream:
            while len(raw := stream.read(PREFIX.size)) == PREFIX.size:
                prefix = read_prefix(raw)
                head, data = stream.read(prefix.head_bytes), bytearray(stream.read(prefix.data_bytes))
                message = read_head(raw, prefix, head)
                if isinstance(message, ChunkPiece) and data:
                    self.damaged += 1
                    data[3::4] = bytes(datum ^ 0x80 for datum in data[3::4])  # the signs of its float32
                    if self._fitting:
                        raw, head = frame(replace(message, sums=sums(data))), b""
                target.sendall(raw + head + data)
            target.shutdown(socket.SHUT_WR)

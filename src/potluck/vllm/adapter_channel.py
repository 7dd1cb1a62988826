"""Lines of JSON between a connector and the adapter that started its vLLM, over a local socket.

What is told of every step is gathered for a moment, and written in one line. Whoever has no adapter has no channel:
then nothing is told, and peers are those of the configuration.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MOST_LINES = 10_000
"""That wait to be written; more are left out: the adapter is gone, or stands still."""

MOST_GATHERED, AT_ONCE = 10_000, 64
GATHER_S = 0.1
"""How long what is told soon may wait for more of its kind."""

Heard = Callable[[dict[str, object]], None]


class AdapterChannel:
    def __init__(self, path: str | None, heard: Heard | None = None) -> None:
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_LINES)
        self._gathered: deque[tuple[str, object]] = deque()
        self._due = False
        """Whether the writer knows that something was gathered."""
        self._socket: socket.socket | None = None
        if path is None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        threading.Thread(target=self._write, name="potluck-tell", daemon=True).start()
        if heard is not None:
            threading.Thread(target=self._read, args=(heard,), name="potluck-hear", daemon=True).start()

    def tell(self, line: dict[str, object]) -> None:
        """Returns at once, from any thread."""
        if self._socket is not None:
            with suppress(queue.Full):
                self._lines.put_nowait(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def soon(self, kind: str, value: object) -> None:
        """One of many, which are written together as a list; for one thread."""
        if self._socket is None or len(self._gathered) >= MOST_GATHERED:
            return
        self._gathered.append((kind, value))
        if not self._due:
            self._due = True
            with suppress(queue.Full):
                self._lines.put_nowait(b"")

    def close(self) -> None:
        if self._socket is not None:
            with suppress(queue.Full):
                self._lines.put_nowait(None)

    def _write(self) -> None:
        assert self._socket is not None
        until_s: float | None = None
        try:
            while True:
                try:
                    left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
                    line = self._lines.get(timeout=left_s)
                except queue.Empty:
                    until_s, self._due = None, False
                    self._socket.sendall(self._together())
                    continue
                if line is None:
                    self._socket.sendall(self._together())
                    return
                if line:
                    self._socket.sendall(line)
                elif until_s is None:
                    until_s = time.monotonic() + GATHER_S
        except OSError:
            pass  # The adapter is gone, and ends this process in a moment.
        finally:
            self._socket.close()

    def _together(self) -> bytes:
        """All that was gathered, in lines that are not too long."""
        lines = []
        while self._gathered:
            found: dict[str, list[object]] = {}
            for _ in range(min(AT_ONCE, len(self._gathered))):
                kind, value = self._gathered.popleft()
                found.setdefault(kind, []).append(value)
            lines.append(json.dumps(found, separators=(",", ":")).encode() + b"\n")
        return b"".join(lines)

    def _read(self, heard: Heard) -> None:
        assert self._socket is not None
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    heard(json.loads(line))
        except (OSError, ValueError):
            pass

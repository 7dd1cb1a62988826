"""Lines of JSON between a connector and the adapter that started its vLLM, over a local socket.

Whoever has no adapter has no channel: then nothing is told, and peers are those of the configuration.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

MOST_LINES = 10_000
"""That wait to be written; more are left out: the adapter is gone, or stands still."""

Heard = Callable[[dict[str, object]], None]


class Channel:
    def __init__(self, path: str | None, heard: Heard | None = None) -> None:
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_LINES)
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

    def close(self) -> None:
        if self._socket is not None:
            with suppress(queue.Full):
                self._lines.put_nowait(None)

    def _write(self) -> None:
        assert self._socket is not None
        try:
            while (line := self._lines.get()) is not None:
                self._socket.sendall(line)
        except OSError:
            pass  # The adapter is gone, and ends this process in a moment.
        finally:
            self._socket.close()

    def _read(self, heard: Heard) -> None:
        assert self._socket is not None
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    heard(json.loads(line))
        except (OSError, ValueError):
            pass

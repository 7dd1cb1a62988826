"""The socket at which the connectors of this machine's vLLM say what they do, a line at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LONGEST_LINE = 1 << 24


class ConnectorSocket:
    def __init__(self, path: Path, heard: Callable[[bytes, asyncio.StreamWriter], None]) -> None:
        """`heard` gets a line, and what leads to the connector that wrote it; a ValueError ends its connection."""
        self._path, self._heard = path, heard
        self._server: asyncio.Server | None = None
        self._readers: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._read, str(self._path), limit=LONGEST_LINE)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        with suppress(OSError):
            self._path.unlink()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            while line := await reader.readline():
                self._heard(line, writer)
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # vLLM is gone; whoever watches its process knows.
        finally:
            self._readers.discard(task)
            writer.close()

"""What the connector inside vLLM tells its adapter: a socket of lines, and what vLLM says of its prefix cache.

vLLM's scheduler gathers events where it was started with them:

    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "null"}'

They are taken here when a step is planned, and given back where vLLM asks connectors for events: whoever else
listens to vLLM's own publisher hears them all the same.
"""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from potluck.core.replica.blocks import CacheChanges, as_bytes, chain_root, names_behind
from potluck.core.state.facts import BLOCK_TOKENS

HIDDEN = "potluck hides:"  # How the salt begins of what nobody else may use.

MOST_LINES = 10_000  # That wait to be written; more are left out: the adapter is gone, or stands still.

MOST_GATHERED, AT_ONCE = 10_000, 64
GATHER_S = 0.2
"""How long what is told soon may wait for more of its kind; a thread that wakes up takes time from vLLM."""

Heard = Callable[[dict[str, object]], None]


class AdapterChannel:
    def __init__(self, path: str | None, heard: Heard | None = None) -> None:
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_LINES)
        self._gathered: deque[tuple[str, object]] = deque()
        self._due = False  # Whether the writer knows that something was gathered.
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
                    # As long as there is something each time, nobody has to say so.
                    self._due = bool(self._gathered)
                    self._due = self._due or bool(self._gathered)  # which may have come in between
                    until_s = time.monotonic() + GATHER_S if self._due else None
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
            result: dict[str, list[object]] = {}
            for _ in range(min(AT_ONCE, len(self._gathered))):
                kind, value = self._gathered.popleft()
                result.setdefault(kind, []).append(value)
            lines.append(json.dumps(result, separators=(",", ":")).encode() + b"\n")
        return b"".join(lines)

    def _read(self, heard: Heard) -> None:
        assert self._socket is not None
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    heard(json.loads(line))
        except (OSError, ValueError):
            pass


def full_group(kv_cache_config: Any) -> int | None:
    """The first group of layers that keep every token: what it holds is what can be found again."""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    for number, group in enumerate(groups):
        if not getattr(group.kv_cache_spec, "sliding_window", None):
            return number
    return None


def line_of(event: Any, group: int | None) -> tuple[object, ...] | None:
    """("+", hashes, parent, tokens, size, salt), ("-", hashes) or ("0",); None for what is of no use to others."""
    kind = type(event).__name__
    if kind == "AllBlocksCleared":
        return ("0",)
    if group is None or event.group_idx not in (None, group):
        return None
    hashes = [_text(block_hash) for block_hash in event.block_hashes]
    if kind == "BlockRemoved":
        return ("-", hashes)
    if kind != "BlockStored" or event.lora_name is not None:
        return None
    keys = event.extra_keys or [None] * len(hashes)
    first = keys[0] if keys and event.parent_block_hash is None else None
    salt = first[0] if first is not None and len(first) == 1 else None
    if any(keys[1:]) or (keys and keys[0] and not isinstance(salt, str)) or str(salt).startswith(HIDDEN):
        return None  # pictures and the like, or KV that came in fewer bits
    parent = None if event.parent_block_hash is None else _text(event.parent_block_hash)
    return ("+", hashes, parent, list(event.token_ids), event.block_size, salt or "")


def _text(name: Any) -> str:
    return name.hex() if isinstance(name, bytes) else str(name)


class HeldBlocks:
    """Changed by whoever hears vLLM."""

    def __init__(self, model: str = "") -> None:
        self.model = model  # What names begin with: its fingerprint.
        self._names: dict[str, tuple[int, ...]] = {}  # vLLM's hash to ours.
        self._copies: dict[str, int] = {}
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}  # Since `changes`, net.

    def __len__(self) -> int:
        return len(self._names)

    def stored(
        self, hashes: Sequence[str], parent: str | None, tokens: Sequence[int], size: int, salt: str = ""
    ) -> None:
        """Blocks of `size` tokens came, one behind the other, the first behind `parent` or where a prompt begins."""
        if size < 1 or size % BLOCK_TOKENS or size * len(hashes) != len(tokens):
            return  # not of whole blocks of ours: nobody could name them
        if parent is None:
            before = chain_root(self.model, salt)
        elif parent in self._names:
            before = as_bytes(self._names[parent][-1])
        else:
            return  # what it follows was not told of
        for place, key in enumerate(hashes):
            known = self._names.get(key)
            if known is None:
                known = names_behind(before, tokens[place * size : (place + 1) * size])
                self._names[key] = known
                for name in known:
                    self._came(name)
            self._copies[key] = self._copies.get(key, 0) + 1
            before = as_bytes(known[-1])

    def removed(self, keys: Iterable[str]) -> None:
        for key in keys:
            left = self._copies.get(key, 0) - 1
            if left > 0:
                self._copies[key] = left
            elif left == 0:
                del self._copies[key]
                self._gone(self._names.pop(key))

    def cleared(self) -> None:
        for names in self._names.values():
            self._gone(names)
        self._names.clear()
        self._copies.clear()

    def changes(self) -> CacheChanges:
        cache_changes = CacheChanges(tuple(self._added), tuple(self._removed))
        self._added, self._removed = {}, {}
        return cache_changes

    def everything(self) -> CacheChanges:
        return CacheChanges(tuple(name for names in self._names.values() for name in names))

    def _came(self, name: int) -> None:
        if name in self._removed:
            del self._removed[name]
        else:
            self._added[name] = None

    def _gone(self, names: Iterable[int]) -> None:
        for name in names:
            if name in self._added:
                del self._added[name]
            else:
                self._removed[name] = None


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

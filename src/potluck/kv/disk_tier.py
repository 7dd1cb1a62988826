"""Blocks and checkpoints in files: what memory has no room for, and what outlives the process.

One file each, written beside its place and then renamed, so a crash leaves either all of it or none that counts. A
file that is not what it should be (cut, changed, of another version or name) is a miss and is removed. Files are
bounded by their bytes together, the least recently used go first. A disk that fails makes the cache smaller, never
the engine: errors are counted.

    8 magic, 2 version, 2 kind (0 block, 1 checkpoint), 4 tokens of rest, 8 bytes of data, 16 digest of what follows,
    16 name, 8 per token of rest, data                                                          all little-endian
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from potluck.core.errors import InputError
from potluck.core.replica.blocks import Checkpoint, Name

MAGIC = b"PLKVFILE"
VERSION = 1
HEADER = struct.Struct("<8sHHIQ16s")
NAME_BYTES = 16
MOST_REST_TOKENS = 1 << 24

Pieces = Sequence[bytes | bytearray | memoryview]


class DiskTier:
    """Files by name, least recently used first. One process at a time has a folder."""

    def __init__(self, folder: Path, capacity_bytes: int, namespace: str = "") -> None:
        if capacity_bytes < 0:
            raise InputError("disk cache", "cannot have a size below zero")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.failures = 0  # Files that could not be written, or were not as they should be.
        self._folder = folder / blake2b(namespace.encode(), digest_size=8).hexdigest()
        self._sizes: dict[Name, int] = {}
        self._rests: dict[int, list[Checkpoint]] = {}
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._scan()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: Name) -> bool:
        return name in self._sizes

    def behind(self, after: int) -> Sequence[Checkpoint]:
        return self._rests.get(after, ())

    def put(self, name: Name, pieces: Pieces) -> None:
        if name in self._sizes:
            self._sizes[name] = self._sizes.pop(name)
            return
        head = _head(name)
        length = sum(memoryview(piece).nbytes for piece in pieces)
        size = HEADER.size + len(head) + length
        if size > self.capacity_bytes:
            return
        while self.used_bytes + size > self.capacity_bytes:
            self.forget(next(iter(self._sizes)))
        digest = blake2b(head, digest_size=16)
        for piece in pieces:
            digest.update(piece)
        kind, rest = (1, len(name.rest)) if isinstance(name, Checkpoint) else (0, 0)
        header = HEADER.pack(MAGIC, VERSION, kind, rest, length, digest.digest())
        path = self._path(name)
        try:
            with open(path.with_suffix(".tmp"), "wb", opener=_private) as file:
                file.writelines([header, head, *pieces])
            os.replace(path.with_suffix(".tmp"), path)
        except OSError:
            self.failures += 1
            path.with_suffix(".tmp").unlink(missing_ok=True)
            return
        self._note(name, size)

    def get(self, name: Name) -> memoryview | None:
        """The data, or None when there is none, or none that is sound."""
        if name not in self._sizes:
            return None
        path = self._path(name)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            content = b""
        start = HEADER.size + len(_head(name))
        if _name_in(content, len(content)) != name or not _sound(content):
            self.failures += 1
            self.forget(name)
            return None
        self._sizes[name] = self._sizes.pop(name)
        return memoryview(content)[start:]

    def forget(self, name: Name) -> None:
        size = self._sizes.pop(name, None)
        if size is None:
            return
        self.used_bytes -= size
        if isinstance(name, Checkpoint):
            left = [checkpoint for checkpoint in self._rests[name.after] if checkpoint != name]
            if left:
                self._rests[name.after] = left
            else:
                del self._rests[name.after]
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError:
            self.failures += 1

    def _note(self, name: Name, size: int) -> None:
        self._sizes[name] = size
        self.used_bytes += size
        if isinstance(name, Checkpoint):
            self._rests.setdefault(name.after, []).append(name)

    def _path(self, name: Name) -> Path:
        kind = b"c" if isinstance(name, Checkpoint) else b"b"
        return self._folder / f"{blake2b(kind + _head(name), digest_size=16).hexdigest()}.kv"

    def _scan(self) -> None:
        """What earlier processes left, as far as heads can tell; data is checked when it is read."""
        result = []
        for path in self._folder.iterdir():
            try:
                status = path.stat()
                with path.open("rb") as file:
                    start = file.read(HEADER.size + NAME_BYTES)
                    rest = _rest_tokens(start)
                    name = _name_in(start + file.read(8 * rest), status.st_size)
            except OSError:
                self.failures += 1
                continue
            if name is None or path != self._path(name):
                path.unlink(missing_ok=True)
                continue
            result.append((status.st_mtime_ns, path.name, name, status.st_size))
        for _, _, name, size in sorted(result, key=lambda item: item[:2]):
            self._note(name, size)
        while self.used_bytes > self.capacity_bytes:
            self.forget(next(iter(self._sizes)))


def _head(name: Name) -> bytes:
    block = name.after if isinstance(name, Checkpoint) else name
    if not 0 <= block < 1 << (8 * NAME_BYTES):
        raise InputError("block name", f"{block} does not have {NAME_BYTES} bytes")
    rest = name.rest if isinstance(name, Checkpoint) else ()
    return block.to_bytes(NAME_BYTES, "little") + struct.pack(f"<{len(rest)}q", *rest)


def _rest_tokens(content: bytes) -> int:
    """How many tokens of rest a file says that it has; 0 when it makes no sense."""
    if len(content) < HEADER.size:
        return 0
    rest: int = HEADER.unpack_from(content)[3]
    return rest if rest <= MOST_REST_TOKENS else 0


def _name_in(content: bytes, size: int) -> Name | None:
    """The name in a file of so many bytes whose beginning this is, if it is one of ours."""
    if len(content) < HEADER.size + NAME_BYTES:
        return None
    magic, version, kind, rest, length, _ = HEADER.unpack_from(content)
    start = HEADER.size + NAME_BYTES
    if (magic, version) != (MAGIC, VERSION) or kind > 1 or (rest and not kind) or rest > MOST_REST_TOKENS:
        return None
    if size != start + 8 * rest + length or len(content) < start + 8 * rest:
        return None
    block = int.from_bytes(content[HEADER.size : start], "little")
    return Checkpoint(block, struct.unpack_from(f"<{rest}q", content, start)) if kind else block


def _sound(content: bytes) -> bool:
    digest: bytes = HEADER.unpack_from(content)[5]
    return blake2b(memoryview(content)[HEADER.size :], digest_size=16).digest() == digest


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

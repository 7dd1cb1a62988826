"""Handles: who holds one may fetch the cache of one request, once, for a while.

A handle is made up by whoever plans the route. It is bound to the request, the model with its weights and the tokens.
The first fetch that comes with it claims it for its own session, whose connections may come and go; nobody else can.
Kept are only hashes, compared in constant time. Whatever is wrong with a handle, it is simply not found: unknown,
expired, used up and bound to something else look the same and take the same time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from potluck.core.errors import InputError

SAMPLES, SAMPLE_BYTES = 64, 4096
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")  # The first of these that there are files of.
IDLE_KEYS = ("_name_or_path", "transformers_version")  # Of a config.json: they say nothing of the model.


def directory_mark(folder: Path) -> str:
    """Of config.json, and of samples spread over all weights: to read tens of gigabytes would take minutes."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        kept = {key: value for key, value in config.items() if key not in IDLE_KEYS}
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
        for path in _weights(folder):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as stream:
                for sample in range(SAMPLES):
                    stream.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
                    digest.update(stream.read(SAMPLE_BYTES))
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except (ValueError, AttributeError) as error:
        raise InputError(str(path), "is not a JSON object") from error
    return digest.hexdigest()[:32]


def _weights(folder: Path) -> list[Path]:
    for suffix in WEIGHTS:
        if paths := sorted(folder.glob(f"*{suffix}")):
            return paths
    return []


HANDLE = re.compile(r"[A-Za-z0-9_-]{32,128}")
SESSION_BYTES = 16

T = TypeVar("T")


def new_handle() -> str:
    return secrets.token_urlsafe(32)


def new_session() -> bytes:
    return secrets.token_bytes(SESSION_BYTES)


def checked_handle(handle: str) -> str:
    if not HANDLE.fullmatch(handle):
        raise InputError("handle", "must be 32 to 128 letters, digits, - and _")
    return handle


def bound_to(request: str, fingerprint: str, token_hash: str) -> bytes:
    return hashlib.sha256(f"{len(request)} {request} {fingerprint} {token_hash}".encode()).digest()


@dataclass(slots=True)
class _Held(Generic[T]):
    digest: bytes
    bound: bytes
    value: T
    expires_s: float
    session: bytes | None = None


class TransferHandles(Generic[T]):
    """What can be fetched; its caller sees to it that one thread at a time is in here."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Held[T]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def offer(self, handle: str, bound: bytes, value: T, expires_s: float) -> None:
        digest = _digest(checked_handle(handle))
        if digest in self._held:
            raise InputError("handle", "is in use")
        self._held[digest] = _Held(digest, bound, value, expires_s)

    def withdraw(self, handle: str) -> None:
        self._held.pop(_digest(handle), None)

    def claim(self, handle: str, bound: bytes, session: bytes, now_s: float) -> T | None:
        """What a handle stands for, if this session may have it."""
        digest = _digest(handle)
        held = self._held.get(digest)
        if held is None:
            return None
        same = hmac.compare_digest(held.digest, digest) & hmac.compare_digest(held.bound, bound)
        mine = held.session is None or hmac.compare_digest(held.session, session)
        if not (same & mine) or held.expires_s <= now_s:
            return None
        held.session = session
        return held.value


def _digest(handle: str) -> bytes:
    return hashlib.sha256(handle.encode()).digest()

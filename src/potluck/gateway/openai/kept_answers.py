"""Answers of requests that name themselves, kept in files for whoever asks again (docs/decisions/0023).

What is written to a client is written to a file as well, with the tokens that it is made of. A file outlives the
process that writes it, and all of a gateway's processes see it. Its writer has a lock on it, which ends with the
process. So whoever finds one knows: it is whole, somebody is writing it, or its writer died and it can be continued.

A file is a row of frames: a letter, a length, bytes. One that was cut off in the middle ends before it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from potluck.api.http_errors import HttpRefusal, random_word
from potluck.core.values.sampling import SampledToken

KEPT_S = 60.0
"""From an answer's end, or its writer's, until it is forgotten."""
SWEEP_S = 60.0
"""How often files are looked for that dead processes left."""
MOST_ANSWER_BYTES = 8_000_000
MOST_BYTES = 64_000_000
"""Of all that this process has written and not forgotten; beyond it the oldest go first."""
LONGEST_KEY = 255
RACES = 8

META, TOKENS, HEAD, DATA, END, FAILED = b"M", b"T", b"H", b"D", b"E", b"F"
"""What is known of it; tokens; how the answer begins; a part of it; its end; the end of one that is not kept."""
_FRAME = struct.Struct(">cI")

log = logging.getLogger(__name__)
Frame = tuple[bytes, bytes]


def frames_of(data: bytes, start: int = 0) -> tuple[list[Frame], int]:
    """Those that are whole, and where the next one begins."""
    found, at = [], start
    while at + _FRAME.size <= len(data):
        kind, size = _FRAME.unpack_from(data, at)
        stop = at + _FRAME.size + size
        if stop > len(data):
            break
        found.append((kind, data[at + _FRAME.size : stop]))
        at = stop
    return found, at


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """What a writer that died had of an answer."""

    word: str
    """Its name, and that of its record of use."""
    created_s: float
    seed: int | None
    tokens: tuple[tuple[SampledToken, ...], ...]
    """As they came."""


@dataclass(frozen=True, slots=True)
class RepeatKey:
    """A request by its own name."""

    name: str
    digest: str
    """Of what is asked."""
    lasting: bool
    """Whether it is computed to its end although its client left."""


def asked_of(
    tenant: str, key: bytes | None, request: str | None, path: bytes, body: bytes
) -> RepeatKey | None:
    """By its Idempotency-Key, or by its x-request-id together with what it asks for; None where it has neither."""
    digest = sha256(path + b"\0" + body).hexdigest()
    if key:
        if len(key) > LONGEST_KEY:
            raise HttpRefusal(
                400, f"Idempotency-Key must have at most {LONGEST_KEY} characters", "invalid_key"
            )
        own = [tenant.encode(), b"key", key]
    elif request is not None:
        own = [tenant.encode(), b"id", request.encode(), digest.encode()]
    else:
        return None
    return RepeatKey(sha256(b"\0".join(own)).hexdigest()[:48], digest, bool(key))


class KeptAnswer:
    """An answer that this process writes down. Should the disk refuse it, nothing is kept and all else goes on."""

    def __init__(self, repeats: KeptAnswers, path: Path, file: int, had: PartialAnswer | None) -> None:
        self._repeats, self._path, self._file, self.had = repeats, path, file, had
        self.size = 0
        self.open = True

    def add(self, *frames: Frame) -> None:
        if not self.open:
            return
        data = b"".join(_FRAME.pack(kind, len(payload)) + payload for kind, payload in frames)
        self.size += len(data)
        try:
            if self.size > MOST_ANSWER_BYTES or os.write(self._file, data) < len(data):
                self.forget()
        except OSError as error:
            log.warning("an answer cannot be kept: %s", error.strerror or error)
            self.forget()

    def end(self) -> None:
        """All of it is there."""
        self.add((END, b""))
        if self.open:
            self.open = False
            os.close(self._file)
            self._repeats.ended(self._path, self.size)

    def forget(self) -> None:
        """Whoever asks again is answered anew."""
        if self.open:
            self.open = False
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)


class AnswerReader:
    """An answer that was written down, or is being so by somebody else; read as it grows."""

    def __init__(self, file: int) -> None:
        self._file, self._at, self._rest = file, 0, b""

    def more(self) -> list[Frame]:
        data = os.pread(self._file, MOST_ANSWER_BYTES, self._at)
        self._at += len(data)
        self._rest += data
        found, stop = frames_of(self._rest)
        self._rest = self._rest[stop:]
        return found

    @property
    def forsaken(self) -> bool:
        """Nothing more will come of it: it was given up, or its writer died."""
        return not os.fstat(self._file).st_nlink or _locked(self._file)

    def close(self) -> None:
        os.close(self._file)


class KeptAnswers:
    """A directory of such answers, for nobody else's eyes."""

    def __init__(self, folder: Path, later: Callable[[float, Callable[[], None]], object]) -> None:
        """`later` is the event loop's `call_later`."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self.later = folder, later
        self._ended: deque[tuple[float, Path, int]] = deque()
        self._bytes = 0
        self._sweep()

    def claim(self, asked: RepeatKey) -> KeptAnswer | AnswerReader | None:
        """To be written by us, afresh or from where another died; or to be read. None where neither can be."""
        path = self._folder / asked.name
        try:
            for _ in range(RACES):
                try:
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    kept = self._fresh(path, asked)
                    if kept is not None:
                        return kept
                    continue
                found = self._found(path, file, asked)
                if found is not None:
                    return found
        except OSError as error:
            log.warning("answers cannot be kept: %s", error.strerror or error)
        return None

    def _found(self, path: Path, file: int, asked: RepeatKey) -> KeptAnswer | AnswerReader | None:
        """None: it is gone by now."""
        keep = False
        try:
            stat = os.fstat(file)
            frames, _ = frames_of(os.pread(file, stat.st_size, 0))
            over = bool(frames) and frames[-1][0] in (END, FAILED)
            mine = over or _locked(file)
            if mine and time.time() - stat.st_mtime > KEPT_S:
                path.unlink(missing_ok=True)
                return None
            meta = _meta(frames)
            if meta.get("digest") != asked.digest:
                line = "this Idempotency-Key was used for another request; use a new one for each"
                raise HttpRefusal(422, line, "idempotency_key_reused")
            if over or not mine:
                keep = True
                return AnswerReader(file)
            if not stat.st_nlink or not os.fstat(file).st_nlink:
                return None
            return self._fresh(path, asked, _had(meta, frames), instead=True)
        finally:
            if not keep:
                os.close(file)

    def _fresh(
        self, path: Path, asked: RepeatKey, had: PartialAnswer | None = None, *, instead: bool = False
    ) -> KeptAnswer | None:
        """A file of ours, with the lock on it before anybody sees it. None: another was first."""
        made = self._folder / f".{random_word()}"
        file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        kept = KeptAnswer(self, path, file, had)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            kept.add((META, json.dumps({"digest": asked.digest}).encode()))
            if had is not None:
                kept.add(*((TOKENS, tokens_text(each)) for each in had.tokens))
            if not kept.open:  # the disk is full
                made.unlink()
            elif instead:
                os.rename(made, path)
            else:
                os.link(made, path)
                made.unlink()
        except FileExistsError:
            made.unlink()
            os.close(file)
            return None
        return kept

    def ended(self, path: Path, size: int) -> None:
        self._ended.append((time.monotonic() + KEPT_S, path, size))
        self._bytes += size
        while self._ended and (self._bytes > MOST_BYTES or self._ended[0][0] < time.monotonic()):
            _, oldest, bytes_ = self._ended.popleft()
            self._bytes -= bytes_
            with contextlib.suppress(OSError):
                oldest.unlink()

    def _sweep(self) -> None:
        """Also what processes left that died."""
        self.later(SWEEP_S, self._sweep)
        with contextlib.suppress(OSError), os.scandir(self._folder) as found:
            for each in found:
                with contextlib.suppress(OSError):
                    if time.time() - each.stat().st_mtime > KEPT_S:
                        self._remove(each.path)

    @staticmethod
    def _remove(path: str) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _locked(file):  # else it is being written, slowly
                os.unlink(path)
        finally:
            os.close(file)


def tokens_text(choices: Sequence[SampledToken]) -> bytes:
    return json.dumps([[each.token, each.logprob, each.top] for each in choices]).encode()


def _meta(frames: Sequence[Frame]) -> dict[str, object]:
    meta: dict[str, object] = {}
    for kind, payload in frames:
        if kind == META:
            meta |= json.loads(payload)
    return meta


def _had(meta: dict[str, object], frames: Sequence[Frame]) -> PartialAnswer | None:
    """None where it cannot be gone on with: it is answered anew."""
    word, created_s, seed = meta.get("word"), meta.get("created_s"), meta.get("seed")
    if not isinstance(word, str) or not isinstance(created_s, float):
        return None
    told = [json.loads(payload) for kind, payload in frames if kind == TOKENS]
    tokens = (
        tuple(SampledToken(token, logprob, tuple(map(tuple, top))) for token, logprob, top in each)
        for each in told
    )
    return PartialAnswer(word, created_s, seed if isinstance(seed, int) else None, tuple(tokens))


def _locked(file: int) -> bool:
    """Whether nobody else has the lock, and we have it from now on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

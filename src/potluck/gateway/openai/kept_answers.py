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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from potluck.api.http import HttpRefusal, random_word
from potluck.core.values.sampling import SampledToken
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.http.server import STREAM_HEADERS, Exchange
from potluck.gateway.values import AnswerSink, ChoiceRequest

KEPT_S = 60.0
SWEEP_S = 60.0
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
    result, at = [], start
    while at + _FRAME.size <= len(data):
        kind, size = _FRAME.unpack_from(data, at)
        stop = at + _FRAME.size + size
        if stop > len(data):
            break
        result.append((kind, data[at + _FRAME.size : stop]))
        at = stop
    return result, at


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    word: str
    created_s: float
    seed: int | None
    tokens: tuple[tuple[SampledToken, ...], ...]


@dataclass(frozen=True, slots=True)
class RepeatKey:
    name: str
    digest: str
    lasting: bool


def digest_of(path: bytes, body: bytes) -> str:
    """Of what a request asks for. Takes 20 ms for 8 MB, without the interpreter's lock."""
    hashed = sha256(path + b"\0")
    hashed.update(body)
    return hashed.hexdigest()


def repeat_key_of(
    tenant: str, key: bytes | None, request: str | None, path: bytes, body: bytes, digest: str | None = None
) -> RepeatKey | None:
    """By its Idempotency-Key, or by its x-request-id together with what it asks for; None where it has neither.
    `digest` where that was computed already."""
    digest = digest_of(path, body) if digest is None else digest
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

    def __init__(
        self, kept_answers: KeptAnswers, path: Path, file: int, partial_answer: PartialAnswer | None
    ) -> None:
        self._repeats, self._path, self._file, self.had = kept_answers, path, file, partial_answer
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
        self.add((END, b""))
        if self.open:
            self.open = False
            os.close(self._file)
            self._repeats.ended(self._path, self.size)

    def forget(self) -> None:
        if self.open:
            self.open = False
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)


class AnswerReader:
    def __init__(self, file: int) -> None:
        self._file, self._at, self._rest = file, 0, b""

    def more(self) -> list[Frame]:
        data = os.pread(self._file, MOST_ANSWER_BYTES, self._at)
        self._at += len(data)
        self._rest += data
        frames, stop = frames_of(self._rest)
        self._rest = self._rest[stop:]
        return frames

    @property
    def forsaken(self) -> bool:
        """Nothing more will come of it: it was given up, or its writer died."""
        return not os.fstat(self._file).st_nlink or _locked(self._file)

    def close(self) -> None:
        os.close(self._file)


class KeptAnswers:
    def __init__(self, folder: Path, later: Callable[[float, Callable[[], None]], object]) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self.later = folder, later
        self._ended: deque[tuple[float, Path, int]] = deque()
        self._bytes = 0
        self._sweep()

    def claim(self, repeat_key: RepeatKey) -> KeptAnswer | AnswerReader | None:
        """To be written by us, afresh or from where another died; or to be read. None where neither can be."""
        path = self._folder / repeat_key.name
        try:
            for _ in range(RACES):
                try:
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    kept = self._fresh(path, repeat_key)
                    if kept is not None:
                        return kept
                    continue
                kept_answer = self._found(path, file, repeat_key)
                if kept_answer is not None:
                    return kept_answer
        except OSError as error:
            log.warning("answers cannot be kept: %s", error.strerror or error)
        return None

    def _found(self, path: Path, file: int, repeat_key: RepeatKey) -> KeptAnswer | AnswerReader | None:
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
            if meta.get("digest") != repeat_key.digest:
                line = "this Idempotency-Key was used for another request; use a new one for each"
                raise HttpRefusal(422, line, "idempotency_key_reused")
            if over or not mine:
                keep = True
                return AnswerReader(file)
            if not stat.st_nlink or not os.fstat(file).st_nlink:
                return None
            return self._fresh(path, repeat_key, _had(meta, frames), instead=True)
        finally:
            if not keep:
                os.close(file)

    def _fresh(
        self,
        path: Path,
        repeat_key: RepeatKey,
        partial_answer: PartialAnswer | None = None,
        *,
        instead: bool = False,
    ) -> KeptAnswer | None:
        """A file of ours, with the lock on it before anybody sees it. None: another was first."""
        made = self._folder / f".{random_word()}"
        file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        kept = KeptAnswer(self, path, file, partial_answer)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            kept.add((META, json.dumps({"digest": repeat_key.digest}).encode()))
            if partial_answer is not None:
                kept.add(*((TOKENS, tokens_text(token)) for token in partial_answer.tokens))
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
        self.later(SWEEP_S, self._sweep)
        with contextlib.suppress(OSError), os.scandir(self._folder) as scandir_iterator:
            for dir_entry in scandir_iterator:
                with contextlib.suppress(OSError):
                    if time.time() - dir_entry.stat().st_mtime > KEPT_S:
                        self._remove(dir_entry.path)

    @staticmethod
    def _remove(path: str) -> None:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _locked(file):  # else it is being written, slowly
                os.unlink(path)
        finally:
            os.close(file)


def tokens_text(choices: Sequence[SampledToken]) -> bytes:
    return json.dumps(
        [[sampled_token.token, sampled_token.logprob, sampled_token.top] for sampled_token in choices]
    ).encode()


def _meta(frames: Sequence[Frame]) -> dict[str, object]:
    meta: dict[str, object] = {}
    for kind, payload in frames:
        if kind == META:
            meta |= json.loads(payload)
    return meta


def _had(meta: dict[str, object], frames: Sequence[Frame]) -> PartialAnswer | None:
    word, created_s, seed = meta.get("word"), meta.get("created_s"), meta.get("seed")
    if not isinstance(word, str) or not isinstance(created_s, float):
        return None
    decoded = [json.loads(payload) for kind, payload in frames if kind == TOKENS]
    tokens = (
        tuple(SampledToken(token, logprob, tuple(map(tuple, top))) for token, logprob, top in item)
        for item in decoded
    )
    return PartialAnswer(word, created_s, seed if isinstance(seed, int) else None, tuple(tokens))


def _locked(file: int) -> bool:
    """Whether nobody else has the lock, and we have it from now on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


REPLAYED = (b"x-potluck-replayed", b"1")  # This was computed before, or the beginning of it was.
POLL_S = 0.02  # How often more of an answer is looked for that another process writes.
LOOKS = 10  # So often nothing may come before it is asked whether its writer lives.
Again = Callable[[Exchange], None]
OWN = b"x-request-id"


class AnswerRecording:
    """The `Exchange` of whoever asks first: all goes to the client, and into the file."""

    def __init__(self, exchange: Exchange, kept: KeptAnswer, *, lasting: bool) -> None:
        self.method, self.path, self.query = exchange.method, exchange.path, exchange.query
        self.headers, self.body = exchange.headers, exchange.body
        self.peer, self.came_s = exchange.peer, exchange.came_s
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[bool], None] | None = None
        self._exchange, self._kept, self._lasting = exchange, kept, lasting
        self._failed = False
        self._continued = False
        exchange.on_gone, exchange.on_room = self._gone, self._room

    def spoil(self) -> None:
        self._failed = True

    def reply(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), lines: bytes = b""
    ) -> None:
        headers = self._said(headers)
        self._failed = self._failed or status >= 300
        self._kept.add(_head(status, headers, whole=True), (DATA, body))
        self._over()
        self._exchange.reply(status, body, headers, lines)

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), lines: bytes = b"") -> None:
        headers = self._said(headers)
        self._failed = self._failed or status >= 300
        self._kept.add(_head(status, headers, whole=False))
        self._exchange.begin(status, headers, lines)

    def write(self, data: bytes) -> None:
        self._kept.add((DATA, data))
        self._exchange.write(data)

    def end(self) -> None:
        self._over()
        self._exchange.end()

    def drop(self) -> None:
        self._kept.forget()
        self._exchange.drop()

    def _said(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [*headers, REPLAYED] if self._continued else list(headers)

    def _over(self) -> None:
        if self._failed:
            self._kept.add((FAILED, b""))
            self._kept.forget()
        else:
            self._kept.end()

    def _gone(self) -> None:
        """The client left: with a key of its own it will ask again, and the answer is computed to its end."""
        if self._lasting:
            self._room(True)
            return
        if self.on_gone is not None:
            self.on_gone()
        self._kept.forget()

    def _room(self, there: bool) -> None:
        if self.on_room is not None:
            self.on_room(there)

    def begins(
        self, asks: list[ChoiceRequest], word: str, created_s: float
    ) -> tuple[list[ChoiceRequest], str, float]:
        one = asks[0] if len(asks) == 1 and asks[0].prompt and asks[0].vocab and not asks[0].own else None
        partial_answer = self._kept.had
        if partial_answer is not None:
            word, created_s = partial_answer.word, partial_answer.created_s
            if one is not None and partial_answer.seed is not None:
                asks = [one._replace(sampling=replace(one.sampling, seed=partial_answer.seed))]
        seed = None if one is None else asks[0].sampling.seed
        self._kept.add(
            (META, json.dumps({"word": word, "created_s": float(created_s), "seed": seed}).encode())
        )
        return asks, word, created_s

    def drive(self, dispatcher: Dispatcher, choice_request: ChoiceRequest, answer: AnswerSink) -> None:
        partial_answer = self._kept.had
        tokens = () if partial_answer is None or partial_answer.seed is None else partial_answer.tokens
        self._continued = bool(tokens)
        for sampled_tokens in tokens:
            if answer.tokens(sampled_tokens):
                return  # a stop string was all that was missing
        taped = _RecordedBody(answer, self._kept)
        if tokens:
            dispatcher.resume(
                choice_request, taped, [sampled_token.token for item in tokens for sampled_token in item]
            )
        else:
            dispatcher.begin(choice_request, taped)


class _RecordedBody:
    """An `AnswerSink` whose tokens are kept before they are told."""

    def __init__(self, answer: AnswerSink, kept: KeptAnswer) -> None:
        self._answer, self._kept = answer, kept
        self.finished, self.refused = answer.finished, answer.refused
        self.relay_begin, self.relay = answer.relay_begin, answer.relay
        self.relay_end, self.relay_whole = answer.relay_end, answer.relay_whole

    def tokens(self, choices: Sequence[SampledToken]) -> bool:
        self._kept.add((TOKENS, tokens_text(choices)))
        return self._answer.tokens(choices)


class AnswerFollower:
    """Whoever asks again: reads the file, and what is still being written to it."""

    def __init__(
        self,
        exchange: Exchange,
        answer_reader: AnswerReader,
        request: str,
        kept_answers: KeptAnswers,
        again: Again,
    ) -> None:
        self._exchange, self._seen, self._request = exchange, answer_reader, request
        self._later, self._again = kept_answers.later, again
        self._head: tuple[int, list[tuple[bytes, bytes]], bool] | None = None
        self._body: list[bytes] = []
        self._idle = 0
        self._over = self._full = False
        exchange.on_gone, exchange.on_room = self._close, self._room

    def look(self) -> None:
        if self._over or self._full:
            return
        self._idle = 0 if self._read() else self._idle + 1
        if self._over:
            return
        if self._idle % LOOKS == LOOKS - 1 and self._seen.forsaken:
            self._read()  # its end may have come just before
            if not self._over:
                self._forsaken()
            return
        self._later(POLL_S, self.look)

    def _read(self) -> bool:
        frames = self._seen.more()
        for kind, payload in frames:
            self._pass_on(kind, payload)
        return bool(frames)

    def _pass_on(self, kind: bytes, payload: bytes) -> None:
        if kind == HEAD:
            status, whole, text = json.loads(payload)
            pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in text]
            pairs += [(OWN, self._request.encode())]
            pairs += [] if REPLAYED in pairs else [REPLAYED]
            self._head = (status, pairs, whole)
            if not whole:
                self._exchange.begin(status, pairs, STREAM_HEADERS)
        elif kind == DATA:
            assert self._head is not None
            if self._head[2]:
                self._body.append(payload)
            else:
                self._exchange.write(payload)
        elif kind in (END, FAILED) and self._head is not None:
            status, pairs, whole = self._head
            self._close()
            if whole:
                self._exchange.reply(status, b"".join(self._body), pairs)
            else:
                self._exchange.end()

    def _forsaken(self) -> None:
        begun = self._head is not None and not self._head[2]
        self._close()
        if begun:  # it ends in the middle, as the first one's answer did
            self._exchange.drop()
        else:
            self._again(self._exchange)

    def _room(self, there: bool) -> None:
        self._full = not there
        if there:
            self._later(0.0, self.look)

    def _close(self) -> None:
        if not self._over:
            self._over = True
            self._exchange.on_gone = self._exchange.on_room = None
            self._seen.close()


def meet(
    kept_answers: KeptAnswers,
    exchange: Exchange,
    tenant: str,
    request: str,
    again: Again,
    digest: str | None = None,
) -> Exchange | None:
    """Where the answer to a request is to be written; None where it is read from what was kept."""
    own = exchange.headers.get(OWN) == request.encode()
    key = exchange.headers.get(b"idempotency-key")
    repeat_key = repeat_key_of(tenant, key, request if own else None, exchange.path, exchange.body, digest)
    kept_answer = None if repeat_key is None else kept_answers.claim(repeat_key)
    if repeat_key is None or kept_answer is None:
        return exchange
    if isinstance(kept_answer, KeptAnswer):
        return AnswerRecording(exchange, kept_answer, lasting=repeat_key.lasting)
    AnswerFollower(exchange, kept_answer, request, kept_answers, again).look()
    return None


def _head(status: int, headers: Iterable[tuple[bytes, bytes]], *, whole: bool) -> Frame:
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name != OWN]
    return HEAD, json.dumps([status, whole, pairs]).encode()

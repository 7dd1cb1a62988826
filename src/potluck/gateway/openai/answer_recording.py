"""A request that names itself: its answer is kept while it is written, and whoever asks again reads what was kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from potluck.core.values.sampling import SampledToken
from potluck.gateway.interfaces import AnswerSink, ChoiceRequest, Exchange, RequestDispatcher
from potluck.gateway.openai.kept_answers import (
    DATA,
    END,
    FAILED,
    HEAD,
    META,
    TOKENS,
    AnswerReader,
    Frame,
    KeptAnswer,
    KeptAnswers,
    asked_of,
    tokens_text,
)
from potluck.gateway.openai.replies import AS_IT_COMES

REPLAYED = (b"x-potluck-replayed", b"1")
"""This was computed before, or the beginning of it was."""
POLL_S = 0.02
"""How often more of an answer is looked for that another process writes."""
LOOKS = 10
"""So often nothing may come before it is asked whether its writer lives."""
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
        """What comes is no answer to be kept."""
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

    # What the driver is asked for.

    def begins(
        self, asks: list[ChoiceRequest], word: str, created_s: float
    ) -> tuple[list[ChoiceRequest], str, float]:
        """With the name, the time and the chance of one that died, if it can be continued."""
        one = asks[0] if len(asks) == 1 and asks[0].prompt and asks[0].vocab and not asks[0].own else None
        had = self._kept.had
        if had is not None:
            word, created_s = had.word, had.created_s
            if one is not None and had.seed is not None:
                asks = [one._replace(sampling=replace(one.sampling, seed=had.seed))]
        seed = None if one is None else asks[0].sampling.seed
        self._kept.add(
            (META, json.dumps({"word": word, "created_s": float(created_s), "seed": seed}).encode())
        )
        return asks, word, created_s

    def drive(self, driver: RequestDispatcher, asked: ChoiceRequest, answer: AnswerSink) -> None:
        """Have it answered, from where it was."""
        had = self._kept.had
        tokens = () if had is None or had.seed is None else had.tokens
        self._continued = bool(tokens)
        for each in tokens:
            if answer.tokens(each):
                return  # a stop string was all that was missing
        taped = _RecordedBody(answer, self._kept)
        if tokens:
            driver.resume(asked, taped, [choice.token for each in tokens for choice in each])
        else:
            driver.begin(asked, taped)


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
        self, exchange: Exchange, seen: AnswerReader, request: str, repeats: KeptAnswers, again: Again
    ) -> None:
        """`request` is its own id; `again` asks anew, where nothing comes of what it reads."""
        self._exchange, self._seen, self._request = exchange, seen, request
        self._later, self._again = repeats.later, again
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
        """Whether there was more."""
        frames = self._seen.more()
        for kind, payload in frames:
            self._pass_on(kind, payload)
        return bool(frames)

    def _pass_on(self, kind: bytes, payload: bytes) -> None:
        if kind == HEAD:
            status, whole, said = json.loads(payload)
            pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in said]
            pairs += [(OWN, self._request.encode())]
            pairs += [] if REPLAYED in pairs else [REPLAYED]
            self._head = (status, pairs, whole)
            if not whole:
                self._exchange.begin(status, pairs, AS_IT_COMES)
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
    repeats: KeptAnswers, exchange: Exchange, tenant: str, request: str, again: Again
) -> Exchange | None:
    """Where the answer to a request is to be written; None where it is read from what was kept."""
    own = exchange.headers.get(OWN) == request.encode()
    key = exchange.headers.get(b"idempotency-key")
    asked = asked_of(tenant, key, request if own else None, exchange.path, exchange.body)
    found = None if asked is None else repeats.claim(asked)
    if asked is None or found is None:
        return exchange
    if isinstance(found, KeptAnswer):
        return AnswerRecording(exchange, found, lasting=asked.lasting)
    AnswerFollower(exchange, found, request, repeats, again).look()
    return None


def _head(status: int, headers: Iterable[tuple[bytes, bytes]], *, whole: bool) -> Frame:
    said = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name != OWN]
    return HEAD, json.dumps([status, whole, said]).encode()

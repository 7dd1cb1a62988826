"""One attempt over plain OpenAI: the client's body goes out, the server's bytes come back as they are.

A stream is passed on event by event, whole ones only. Where the server tells tokens beside its text (`token_ids` of
an endpoint) these are taken out and kept: an answer that breaks off goes on at another server from exactly there.
Where it does not, an answer is sent again whole while nothing of it was passed on, and ends with an error otherwise.
What is not streamed is passed on when all of it is there, so it can be sent again at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.core.errors import FormatError
from potluck.core.state.actions import Run
from potluck.core.state.events import FailureKind
from potluck.gateway.dispatch.relay_bytes import ABORTED, ANOTHER, DONE, ERROR, EventRewriter, PROMPT_IDS, SHOWS, TOKEN_IDS, continuation, forwarded, ids_of
from potluck.gateway.dispatch.attempt import JSON, DispatchContext
from potluck.gateway.dispatch.silence import RECENT, AwaitingReply
from potluck.gateway.interfaces import Call, Endpoint, Headers

if TYPE_CHECKING:
    from potluck.gateway.dispatch.active_request import ActiveRequest
    from potluck.gateway.dispatch.hedge import HedgeAttempt

SILENCE_S = 600.0
"""An answer that is not streamed says nothing until all of it is there."""
MOST_BYTES = 64 << 20
"""Of an answer that is not streamed, and of one event."""
CLIENTS_FAULT = frozenset(range(400, 500)) - {401, 403, 404, 408, 429}
"""Answers that go to the client as they are; with the others it is the server that is not as it should be."""
KINDS: dict[int, FailureKind] = {408: "timeout", 429: "memory", 504: "timeout"}
COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
IDS_WANTED = b'"return_token_ids":true'
EVENT_END, PART, USAGE = b"\n\n", b"data: ", b'"usage":{'


class RelayedStream:
    """What the client has of an answer that servers write: the same over all attempts."""

    begun = False
    first = b""
    """Its first event, whose name all others bear."""
    prompt_ids: Sequence[int] = ()
    knows_ids = False
    """Whether the tokens of all that was passed on are known."""
    events = 0


class RelayAttempt(AwaitingReply):
    """From its `Run` to its end, its failure, or until it is given up."""

    _call: Call | None = None
    _endpoint: Endpoint | None = None
    _over = False
    _began_s = 0.0
    _status = 0
    _kind = b""
    _streams = False
    _held = b""
    """Of an event that has begun."""
    _size = 0
    _usage = b""
    _asks_ids = False
    _flat = False
    """Whether what comes is passed on as it is: nothing of it is to be kept or written anew."""
    _ended = False
    """Whether the stream said that it is whole."""
    _rewriter: EventRewriter | None = None

    def __init__(
        self, active: ActiveRequest | HedgeAttempt, run: Run, means: DispatchContext, stream: RelayedStream
    ) -> None:
        self.tokens = run.prompt_tokens
        self._ride, self._means, self._stream = active, means, stream
        self._now_s = means.now_s
        self._relay = active.answer.relay
        self._pieces: list[bytes] = []
        """Of an answer that is not streamed."""
        self._pending: list[int] = []
        """Tokens whose text the server still holds back."""

    def start(self, endpoints: Sequence[Endpoint]) -> None:
        endpoint = self._endpoint = endpoints[-1]
        asked, stream = self._ride.asked, self._stream
        served = endpoint.served_model or endpoint.model
        salt = asked.salt if endpoint.cache_salt else ""
        path, body = asked.path, b""
        if stream.begun:
            made = None
            if endpoint.token_ids:
                tokens = [*stream.prompt_ids, *self._ride.output]
                most, streamed = asked.max_output_tokens, len(self._ride.output)
                made = continuation(
                    asked.body, asked.path == CHAT, served, tokens, most, streamed, salt
                )
            if made is None:
                self._ride.broken("replica", endpoint.replica, "cannot go on with what another began")
                return
            self._rewriter = self._namesake()
            path, body = COMPLETIONS, made
        else:
            extra, body = b"", asked.body
            # Where the client wants them itself, it sees them too.
            if endpoint.token_ids and asked.stream and b"return_token_ids" not in body:
                self._asks_ids, extra = True, IDS_WANTED
            if extra or salt or served != asked.model:
                body = forwarded(body, asked.model, served, extra, salt)
        self._began_s = now_s = self._now_s()
        self._means.watch.join(self, endpoint.replica, now_s)
        if asked.stream:
            self.owes = True
        headers: tuple[tuple[bytes, bytes], ...] = (JSON, (b"x-request-id", asked.id.encode()))
        if endpoint.key:
            headers += ((b"authorization", b"Bearer " + endpoint.key.encode()),)
        call = self._means.outgoing.send(
            endpoint.address, b"POST", path, body, self, headers=headers, silence_s=SILENCE_S
        )
        if self._over:
            call.cancel()
        else:
            self._call = call

    def stop(self) -> None:
        self._over = True
        self._means.watch.leave(self)
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def pause(self) -> None:
        if self._call is not None:
            self._call.pause()
            self.rest()

    def resume(self) -> None:
        if self._call is not None:
            self._call.resume()
            if self._ride.asked.stream:
                self.expect(self._now_s())

    # What the server says.

    def head(self, status: int, headers: Headers) -> None:
        if self._over:
            return
        self._status, self._kind = status, headers.get(b"content-type", b"application/json")
        self._streams = status == 200 and b"event-stream" in self._kind
        if self._stream.begun and not self._streams and status == 200:
            self._lied("answers a stream with something else")

    def data(self, data: bytes) -> None:
        if self._over:
            return
        if not self._streams:
            self._size += len(data)
            if self._size > MOST_BYTES:
                self._lied("an answer without an end")
            else:
                self._pieces.append(data)
            return
        now_s, pulse = self._now_s(), self.pulse
        if pulse is not None:  # `hear`, written out
            pulse.heard_s = now_s
            if self.flows and self.owes:
                pulse.gap_s += (now_s - self.heard_s - pulse.gap_s) / RECENT
        self.heard_s = now_s
        if self._held or not data.endswith(EVENT_END):
            data = self._whole_events(data)
        if not data or self._over:
            return
        if ERROR in data or ABORTED in data:
            self._fail("replica", "broke its answer off")
            return
        if not self._flat:
            self._events(data)
            return
        stream = self._stream  # Most of what comes: the end of `_events`, written out.
        stream.events += data.count(PART)
        if DONE in data:
            self._ended = True
            stream.events -= 1
        if USAGE in data:
            self._usage = data
        self._relay(data)

    def _whole_events(self, data: bytes) -> bytes:
        """Those that are whole now."""
        data, mark, self._held = (self._held + data).rpartition(EVENT_END)
        if len(self._held) > MOST_BYTES:
            self._lied("an event without an end")
        return data + mark

    def done(self) -> None:
        self._call = None
        if self._over:
            return
        if self._streams:
            if self._ended:
                self._ride.relayed(self._length(self._usage))
            else:
                self._fail("replica", "ended its answer before its end")
            return
        body = b"".join(self._pieces)
        if self._status == 200:
            if ABORTED in body or b'"completion_tokens":0' in body:
                self._fail("replica", "gave up an answer, and said that all is well")
                return
            tokens = self._length(body)
            self._ride.relayed_whole(self._kind, body, tokens)
        elif self._status in CLIENTS_FAULT and not self._stream.begun:
            self._leave()
            self._ride.turned_down(self._status, self._kind, body)
        else:
            self._fail(KINDS.get(self._status, "replica"), f"answered {self._status}")

    def lost(self, why: str) -> None:
        self._call = None
        if not self._over:
            self._fail("replica", why)

    def stalled(self, kind: FailureKind) -> None:
        self._fail(kind, "says nothing any more")

    def undelivered(self) -> None:
        """It hands nothing on."""

    # A stream.

    def _events(self, data: bytes) -> None:
        """Whole events: passed on as they are, or without the tokens that only we asked for, or written anew."""
        if not self.flows:
            self.computed(self.heard_s)
            self.flows = True
        stream = self._stream
        if not stream.begun:
            self._begin(data)
        knows = stream.knows_ids
        if self._rewriter is not None:
            try:
                data = b"".join(map(self._rewritten, data.split(EVENT_END)[:-1]))
            except (FormatError, KeyError, TypeError, ValueError):
                self._fail("replica", "wrote what is no part of an answer")
                return
        elif knows:
            data = b"".join(map(self._noted, data.split(EVENT_END)[:-1]))
        count = data.count(PART)
        stream.events += count
        if DONE in data:
            self._ended = True
            stream.events -= 1
        if USAGE in data:
            self._usage = data
        self._relay(data)
        if count and not self._over:
            self._ride.first_token()
            self._flat = self._rewriter is None and not stream.knows_ids

    def _begin(self, data: bytes) -> None:
        self._ride.leads()
        stream = self._stream
        stream.begun = True
        stream.first = data.split(EVENT_END, 1)[0]
        found = PROMPT_IDS.search(stream.first) if self._asks_ids else None
        if found is not None and found[1]:
            stream.prompt_ids, stream.knows_ids = ids_of(found[1]), True
            stream.first = TOKEN_IDS.sub(b"", PROMPT_IDS.sub(b"", stream.first))
        self._ride.answer.relay_begin(200, self._kind)

    def _noted(self, event: bytes) -> bytes:
        """An event without its tokens, which are kept."""
        self._note(event)
        return TOKEN_IDS.sub(b"", PROMPT_IDS.sub(b"", event)) + EVENT_END

    def _note(self, event: bytes) -> None:
        """The tokens of an event count once their text is shown."""
        if ANOTHER.search(event):
            self._stream.knows_ids = False
        found = TOKEN_IDS.search(event)
        if found is not None:
            self._pending += ids_of(found[1])
        if self._pending and SHOWS.search(event):
            self._ride.output += self._pending
            self._pending = []

    def _rewritten(self, event: bytes) -> bytes:
        assert self._rewriter is not None
        self._note(event)
        return self._rewriter.event(event + EVENT_END)

    def _namesake(self) -> EventRewriter:
        """Whoever writes in the name of the server that began."""
        stream, active = self._stream, self._ride
        chat = active.asked.path == CHAT
        return EventRewriter(stream.first, chat, len(stream.prompt_ids), len(active.output))

    # Its end.

    def _length(self, said: bytes) -> int:
        """All of it is there; how long it was is told by the usage, or by how many parts it had."""
        stream, asked = self._stream, self._ride.asked
        found = said.rfind(b'"completion_tokens":')
        tokens = 0
        if found >= 0:
            digits = said[found + 20 : found + 32].lstrip().split(b",")[0].split(b"}")[0]
            tokens = int(digits) if digits.isdigit() else 0
        if not tokens:
            tokens = len(self._ride.output) or max(stream.events - (asked.path == CHAT), 1)
        self._count(tokens)
        self._over = True
        self._means.watch.leave(self)
        return tokens if tokens < asked.max_output_tokens else asked.max_output_tokens

    def _count(self, tokens: int, problem: str = "") -> None:
        meter, endpoint = self._means.meter, self._endpoint
        if meter is not None and endpoint is not None and self.pulse is not None:
            now_s = self._now_s()
            meter.segment(self._ride.asked, endpoint.replica, self._began_s, now_s, tokens, problem)

    def _leave(self) -> None:
        self._over = True
        self._means.watch.leave(self)

    def _lied(self, why: str) -> None:
        self._fail("replica", f"lied: {why}")

    def _fail(self, kind: FailureKind, why: str) -> None:
        self._count(len(self._ride.output), why)
        self.stop()
        endpoint, stream = self._endpoint, self._stream
        assert endpoint is not None
        if stream.begun and not stream.knows_ids:
            self._ride.broken(kind, endpoint.replica, why)
        elif stream.begun and len(self._ride.output) >= self._ride.asked.max_output_tokens:
            self._relay(self._namesake().closing(self._ride.asked.body))
            self._ride.relayed(len(self._ride.output))
        else:
            self._ride.failed(kind, endpoint.replica, why)

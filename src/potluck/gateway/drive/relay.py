"""One attempt over plain OpenAI: the client's body goes out, the server's bytes come back as they are.

A stream is passed on event by event, whole ones only. Where the server tells tokens beside its text (`token_ids` of
an endpoint) these are taken out and kept: an answer that breaks off goes on at another server from exactly there.
Where it does not, an answer is sent again whole while nothing of it was passed on, and ends with an error otherwise.
What is not streamed is passed on when all of it is there, so it can be sent again at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.core.brain.actions import Run
from potluck.core.brain.events import FailureKind
from potluck.core.errors import FormatError
from potluck.gateway.drive import rewrite
from potluck.gateway.drive.patience import Debtor
from potluck.gateway.drive.trip import JSON, Means
from potluck.gateway.parts import Call, Endpoint, Headers

if TYPE_CHECKING:
    from potluck.gateway.drive.ride import Ride

SILENCE_S = 600.0
"""An answer that is not streamed says nothing until all of it is there."""
MOST_BYTES = 64 << 20
"""Of an answer that is not streamed, and of one event."""
CLIENTS_FAULT = frozenset(range(400, 500)) - {401, 403, 404, 408, 429}
"""Answers that go to the client as they are; with the others it is the server that is not as it should be."""
KINDS: dict[int, FailureKind] = {408: "timeout", 429: "memory", 504: "timeout"}
COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
IDS_WANTED = b'"return_token_ids":true'
EVENT_END = b"\n\n"


class Stream:
    """What the client has of an answer that servers write: the same over all attempts."""

    def __init__(self) -> None:
        self.begun = False
        self.first = b""
        """Its first event, whose name all others bear."""
        self.prompt_ids: list[int] = []
        self.knows_ids = False
        """Whether the tokens of all that was passed on are known."""
        self.events = 0


class Relay(Debtor):
    """From its `Run` to its end, its failure, or until it is given up."""

    def __init__(self, ride: Ride, run: Run, means: Means, stream: Stream) -> None:
        super().__init__(run.prompt_tokens)
        self._ride, self._run, self._means, self._stream = ride, run, means, stream
        self._call: Call | None = None
        self._endpoint: Endpoint | None = None
        self._over = False
        self._began_s = 0.0
        self._status = 0
        self._kind = b""
        self._streams = False
        self._held = b""
        """Of an event that has begun; of an answer that is not streamed, all of it."""
        self._pieces: list[bytes] = []
        self._size = 0
        self._pending: list[int] = []
        """Tokens whose text the server still holds back."""
        self._usage = b""
        self._asks_ids = False
        self._ended = False
        """Whether the stream said that it is whole."""
        self._rewriter: rewrite.Rewriter | None = None

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
                made = rewrite.continuation(
                    asked.body, asked.path == CHAT, served, tokens, most, streamed, salt
                )
            if made is None:
                self._ride.broken("replica", endpoint.replica, "cannot go on with what another began")
                return
            self._rewriter = self._namesake()
            path, body = COMPLETIONS, made
        else:
            theirs = b"return_token_ids" in asked.body  # The client's own: then it sees them too.
            self._asks_ids = endpoint.token_ids and asked.stream and not theirs
            extra = IDS_WANTED if self._asks_ids else b""
            body = rewrite.forwarded(asked.body, asked.model, served, extra, salt)
        self._began_s = self._means.now_s()
        self._means.watch.join(self, endpoint.replica)
        if asked.stream:
            self.expect(self._means.now_s())
        headers = [JSON, (b"x-request-id", asked.id.encode())]
        if endpoint.key:
            headers.append((b"authorization", b"Bearer " + endpoint.key.encode()))
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
                self.expect(self._means.now_s())

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
        self.hear(self._means.now_s())
        if self._held:
            data = self._held + data
        if data.endswith(EVENT_END):
            self._held = b""
        else:
            data, mark, self._held = data.rpartition(EVENT_END)
            data += mark
            if len(self._held) > MOST_BYTES:
                self._lied("an event without an end")
        if data and not self._over:
            self._events(data)

    def done(self) -> None:
        self._call = None
        if self._over:
            return
        if self._streams:
            if self._ended:
                self._finish(self._usage)
            else:
                self._fail("replica", "ended its answer before its end")
            return
        body = b"".join(self._pieces)
        if self._status == 200:
            if rewrite.ABORTED in body or b'"completion_tokens":0' in body:
                self._fail("replica", "gave up an answer, and said that all is well")
                return
            self._pass_on(body)
            self._ride.first_token()
            self._finish(body)
        elif self._status in CLIENTS_FAULT and not self._stream.begun:
            self._pass_on(body)
            self._leave()
            self._ride.turned_down()
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
        if rewrite.ERROR in data or rewrite.ABORTED in data:
            self._fail("replica", "broke its answer off")
            return
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
        count = data.count(b"data: ")
        stream.events += count
        if rewrite.DONE in data:
            self._ended = True
            stream.events -= 1
        if b'"usage":{' in data:
            self._usage = data
        self._ride.relay(data)
        if count and not self._over:
            self._ride.first_token()

    def _begin(self, data: bytes) -> None:
        stream = self._stream
        stream.begun = True
        stream.first = data.split(EVENT_END, 1)[0]
        found = rewrite.PROMPT_IDS.search(stream.first) if self._asks_ids else None
        if found is not None and found[1]:
            stream.prompt_ids, stream.knows_ids = rewrite.ids_of(found[1]), True
            stream.first = rewrite.TOKEN_IDS.sub(b"", rewrite.PROMPT_IDS.sub(b"", stream.first))
        self._ride.relay_begin(200, self._kind)

    def _noted(self, event: bytes) -> bytes:
        """An event without its tokens, which are kept."""
        self._note(event)
        return rewrite.TOKEN_IDS.sub(b"", rewrite.PROMPT_IDS.sub(b"", event)) + EVENT_END

    def _note(self, event: bytes) -> None:
        """The tokens of an event count once their text is shown."""
        if rewrite.ANOTHER.search(event):
            self._stream.knows_ids = False
        found = rewrite.TOKEN_IDS.search(event)
        if found is not None:
            self._pending += rewrite.ids_of(found[1])
        if self._pending and rewrite.SHOWS.search(event):
            self._ride.output += self._pending
            self._pending = []

    def _rewritten(self, event: bytes) -> bytes:
        assert self._rewriter is not None
        self._note(event)
        return self._rewriter.event(event + EVENT_END)

    def _namesake(self) -> rewrite.Rewriter:
        """Whoever writes in the name of the server that began."""
        stream, ride = self._stream, self._ride
        chat = ride.asked.path == CHAT
        return rewrite.Rewriter(stream.first, chat, len(stream.prompt_ids), len(ride.output))

    # Its end.

    def _finish(self, said: bytes) -> None:
        """All of it is passed on; how long it was is told by the usage, or by how many parts it had."""
        stream, asked = self._stream, self._ride.asked
        found = said.rfind(b'"completion_tokens":')
        tokens = 0
        if found >= 0:
            digits = said[found + 20 : found + 32].lstrip().split(b",")[0].split(b"}")[0]
            tokens = int(digits) if digits.isdigit() else 0
        if not tokens:
            tokens = len(self._ride.output) or max(stream.events - (asked.path == CHAT), 1)
        self._count(tokens)
        self._leave()
        self._ride.relayed(min(tokens, asked.max_output_tokens))

    def _pass_on(self, body: bytes) -> None:
        self._ride.relay_begin(self._status, self._kind)
        if not self._over:
            self._ride.relay(body)

    def _count(self, tokens: int, problem: str = "") -> None:
        meter, endpoint = self._means.meter, self._endpoint
        if meter is not None and endpoint is not None and self.pulse is not None:
            now_s = self._means.now_s()
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
            self._ride.relay(self._namesake().closing(self._ride.asked.body))
            self._ride.relayed(len(self._ride.output))
        else:
            self._ride.failed(kind, endpoint.replica, why)

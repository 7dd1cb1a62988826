"""One attempt over plain OpenAI: the client's body goes out, the server's bytes come back as they are.

A stream is passed on event by event, whole ones only. Where the server tells tokens beside its text (`token_ids` of
an endpoint) these are taken out and kept: an answer that breaks off goes on at another server from exactly there.
Where it does not, an answer is sent again whole while nothing of it was passed on, and ends with an error otherwise.
What is not streamed is passed on when all of it is there, so it can be sent again at any time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from potluck.core.errors import FormatError
from potluck.core.state.actions import Run
from potluck.core.state.events import FailureKind
from potluck.gateway.dispatch.active_request import (
    RECENT,
    ActiveRequest,
    AwaitingReply,
    DispatchContext,
    RelayedStream,
    RunningAttempt,
)
from potluck.gateway.http.connection_pool import EngineCall
from potluck.gateway.http.parser import Headers
from potluck.gateway.values import Endpoint, RewrittenBody

MODEL = re.compile(rb'"model"\s*:')
MODEL_NAME = re.compile(rb'"model"\s*:\s*"((?:[^"\\]|\\.)*)"')
PROMPT_IDS = re.compile(rb',"prompt_token_ids":(?:null|\[([\d,]*)\])')
TOKEN_IDS = re.compile(rb',"token_ids":(?:null|\[([\d,]*)\])')
SHOWS = re.compile(rb'"(?:content|text)":"[^"]')
"""An event with text: whatever the server held back before it is shown now."""
ANOTHER = re.compile(rb'"index":[1-9]')
ERROR, ABORTED = b'data: {"error"', b'"finish_reason":"abort"'
DONE = b"data: [DONE]"

CARRIED = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "repetition_penalty",
    "skip_special_tokens", "spaces_between_special_tokens", "stream_options", "priority", "user", "logit_bias",
    "allowed_token_ids", "bad_words", "include_stop_str_in_output",
)  # fmt: skip
"""What a completion understands as a chat does, and depends on no token before."""
STRANGE = (
    "stop", "tools", "tool_choice", "functions", "function_call", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "presence_penalty", "frequency_penalty",
    "echo", "suffix", "use_beam_search", "prompt_logprobs", "logits_processors", "audio", "modalities",
    "continue_final_message", "reasoning_effort",
)  # fmt: skip
"""What depends on how the answer began, or holds text back, so that it cannot go on from its tokens."""


def forwarded(body: bytes, model: str, served: str, extra: bytes = b"", salt: str = "") -> bytes:
    """A client's body for a server that calls the model otherwise; `extra` fields and a `salt` are put in."""
    rewritten = isinstance(body, RewrittenBody)
    if salt:
        if isinstance(body, RewrittenBody):
            body = body[: body.before_salt] + b"}"
        elif b"cache_salt" in body:
            asked = {name: value for name, value in json.loads(body).items() if name != "cache_salt"}
            body = json.dumps(asked, separators=(",", ":")).encode()
        text = b'"cache_salt":' + json.dumps(salt).encode()
        extra = extra + b"," + text if extra else text
    if served and served != model:
        result = MODEL_NAME.search(body)
        if rewritten and result is not None:
            body = body[: result.start(1)] + json.dumps(served)[1:-1].encode() + body[result.end(1) :]
        elif result is None or len(MODEL.findall(body)) > 1:
            body = json.dumps({**json.loads(body), "model": served}, separators=(",", ":")).encode()
        else:
            body = body[: result.start(1)] + json.dumps(served)[1:-1].encode() + body[result.end(1) :]
    if extra:
        body = body.rstrip()[:-1] + b"," + extra + b"}"
    return body


def ids_of(text: bytes | None) -> list[int]:
    return [int(part) for part in text.split(b",")] if text else []


def continuation(
    body: bytes, chat: bool, served: str, tokens: Sequence[int], most: int, streamed: int, salt: str
) -> bytes | None:
    asked: dict[str, Any] = json.loads(body)
    if any(asked.get(name) not in (None, [], {}, 0, False, "", "none", "auto") for name in STRANGE):
        return None
    if asked.get("n") not in (None, 1) or asked.get("best_of") not in (None, 1):
        return None
    made = {name: asked[name] for name in CARRIED if asked.get(name) is not None}
    made |= {
        "model": served,
        "prompt": list(tokens),
        "max_tokens": most - streamed,
        "min_tokens": max(0, (asked.get("min_tokens") or 0) - streamed),
        "stream": True,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    if salt:
        made["cache_salt"] = salt
    if chat and asked.get("logprobs"):
        made["logprobs"] = asked.get("top_logprobs") or 0
    elif not chat and asked.get("logprobs") is not None:
        made["logprobs"] = asked["logprobs"]
    return json.dumps(made, separators=(",", ":")).encode()


class EventRewriter:
    def __init__(
        self, first: bytes, chat: bool, prompt_tokens: int, before_tokens: int, top_logprobs: int = 0
    ) -> None:
        event = event_of(first)
        self._head: dict[str, Any] = {
            name: event[name] for name in ("id", "object", "created", "model") if name in event
        }
        self._chat = chat
        self._prompt_tokens, self._before = prompt_tokens, before_tokens
        self._top_logprobs = top_logprobs

    def event(self, event: bytes) -> bytes:
        if event.startswith(DONE):
            return event
        text = event_of(event)
        choices = [self._choice(item) for item in text.get("choices", [])]
        made: dict[str, Any] = {**self._head, "choices": choices}
        if "usage" in text:
            made["usage"] = self._usage(text["usage"])
        return b"data: " + json.dumps(made, separators=(",", ":")).encode() + b"\n\n"

    def closing(self, body: bytes) -> bytes:
        last: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        chunks = [{**self._head, "choices": [self._choice(last)]}]
        options = json.loads(body).get("stream_options") or {}
        if options.get("include_usage"):
            chunks.append({**self._head, "choices": [], "usage": self._usage({"completion_tokens": 0})})
        events = [b"data: " + json.dumps(item, separators=(",", ":")).encode() + b"\n\n" for item in chunks]
        return b"".join(events) + DONE + b"\n\n"

    def _choice(self, said: dict[str, Any]) -> dict[str, Any]:
        made = {name: value for name, value in said.items() if name not in ("token_ids", "prompt_token_ids")}
        if self._chat:
            text = made.pop("text", "")
            made["delta"] = {"content": text} if text else {}
            if made.get("logprobs"):
                made["logprobs"] = _chat_logs(made["logprobs"], self._top_logprobs)
        return made

    def _usage(self, said: dict[str, Any] | None) -> dict[str, Any] | None:
        """Of the whole answer: what was told before counts as output, not as prompt."""
        if said is None:
            return None
        output = int(said.get("completion_tokens") or 0) + self._before
        total = self._prompt_tokens + output
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": output, "total_tokens": total}
        return {**said, **counts}


def event_of(event: bytes) -> dict[str, Any]:
    text = event.strip()
    try:
        body = json.loads(text[5:]) if text.startswith(b"data:") else None
    except (ValueError, RecursionError) as error:
        raise FormatError("answer", "an event is not JSON") from error
    if not isinstance(body, dict) or not isinstance(body.get("choices", []), list):
        raise FormatError("answer", "an event is no part of an answer")
    return body


def _chat_logs(logs: dict[str, Any], count: int) -> dict[str, Any]:
    """A completion's log probabilities as a chat's: with `count` entries a token, as vLLM's own chats have.

    A completion lists the sampled token beside the `count` most likely ones.
    """

    def one(token: str, logprob: float | None) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    tops = logs.get("top_logprobs") or [None] * len(logs["tokens"])
    content = [
        {**one(token, logprob), "top_logprobs": [one(*pair) for pair in list((top or {}).items())[:count]]}
        for token, logprob, top in zip(logs["tokens"], logs["token_logprobs"], tops, strict=True)
    ]
    return {"content": content}


MOST_BYTES = 64 << 20  # Of an answer that is not streamed, and of one event.
CLIENTS_FAULT = frozenset(range(400, 500)) - {401, 403, 404, 408, 429}
"""Answers that go to the client as they are; with the others it is the server that is not as it should be."""
KINDS: dict[int, FailureKind] = {408: "timeout", 429: "memory", 504: "timeout"}
JSON = (b"content-type", b"application/json")
COMPLETIONS, CHAT = b"/v1/completions", b"/v1/chat/completions"
IDS_WANTED = b'"return_token_ids":true'
EVENT_END, PART, USAGE = b"\n\n", b"data: ", b'"usage":{'


class RelayAttempt(RunningAttempt, AwaitingReply):
    _call: EngineCall | None = None
    _over = False
    _began_s = 0.0
    _status = 0
    _kind = b""
    _streams = False
    _held = b""
    _size = 0
    _usage = b""
    _asks_ids = False
    _flat = False
    _ended = False
    _rewriter: EventRewriter | None = None

    def __init__(
        self,
        request: ActiveRequest,
        run: Run,
        endpoints: Sequence[Endpoint],
        context: DispatchContext,
        stream: RelayedStream,
    ) -> None:
        self.tokens = run.prompt_tokens
        self._request, self.run, self.endpoints, self._context = request, run, endpoints, context
        self.stream, self._endpoint = stream, endpoints[-1]
        self._now_s = context.now_s
        self._relay = request.answer.relay
        self._pieces: list[bytes] = []
        self._pending: list[int] = []  # Tokens whose text the server still holds back.

    def start(self) -> None:
        endpoint = self._endpoint
        asked, stream = self._request.asked, self.stream
        served = endpoint.served_model or endpoint.model
        salt = asked.salt if endpoint.cache_salt else ""
        path, body = asked.path, b""
        if stream.begun:
            made = None
            if endpoint.token_ids:
                tokens = [*stream.prompt_ids, *self._request.output]
                most, streamed = asked.max_output_tokens, len(self._request.output)
                made = continuation(asked.body, asked.path == CHAT, served, tokens, most, streamed, salt)
            if made is None:
                self._request.broken("replica", endpoint.replica, "cannot go on with what another began")
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
        self._context.watch.join(self, endpoint.replica, now_s)
        if asked.stream:
            self.owes = True
        headers: tuple[tuple[bytes, bytes], ...] = (JSON, (b"x-request-id", asked.id.encode()))
        if endpoint.key:
            headers += ((b"authorization", b"Bearer " + endpoint.key.encode()),)
        path = endpoint.path_prefix.encode() + path
        call = self._context.pool.send(endpoint.address, b"POST", path, body, self, headers=headers)
        if self._over:
            call.cancel()
        else:
            self._call = call

    def stop(self) -> None:
        self._over = True
        self._context.watch.leave(self)
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def pause(self) -> None:
        if self._call is not None:
            self._call.pause()
            self.rest(paused=True)

    def resume(self) -> None:
        if self._call is not None:
            self._call.resume()
            self.paused = False
            self.heard_s = self._now_s()
            if self._request.asked.stream:
                self.expect(self._now_s())

    # What the server says.

    def head(self, status: int, headers: Headers) -> None:
        if self._over:
            return
        self._status, self._kind = status, headers.get(b"content-type", b"application/json")
        self._streams = status == 200 and b"event-stream" in self._kind
        if self.stream.begun and not self._streams and status == 200:
            self._lied("answers a stream with something else")

    def data(self, data: bytes) -> None:
        if self._over:
            return
        if not self._streams:
            self._size += len(data)
            self.heard_s = self._now_s()
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
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> int:
        """How many events it was."""
        count = data.count(PART)
        self.stream.events += count
        if DONE in data:
            self._ended = True
            self.stream.events -= 1
        if USAGE in data:
            self._usage = data
        self._relay(data)
        return count

    def _whole_events(self, data: bytes) -> bytes:
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
                self._request.relayed(self._length(self._usage))
            else:
                self._fail("replica", "ended its answer before its end")
            return
        body = b"".join(self._pieces)
        if self._status == 200:
            if ABORTED in body or b'"completion_tokens":0' in body:
                self._fail("replica", "gave up an answer, and said that all is well")
                return
            tokens = self._length(body)
            self._request.relayed_whole(self._kind, body, tokens)
        elif self._status in CLIENTS_FAULT and not self.stream.begun:
            self._leave()
            self._request.turned_down(self._status, self._kind, body)
        else:
            kind = KINDS.get(self._status, "replica")
            self._fail(kind, f"answered {self._status}", rejected=self._status < 500)

    def lost(self, why: str) -> None:
        sent = self._call is None or self._call.sent
        self._call = None
        if not self._over:
            self._fail("replica", why, rejected=not sent)

    def stalled(self, kind: FailureKind) -> None:
        self._fail(kind, "says nothing any more")

    def undelivered(self) -> None:
        """It hands nothing on."""

    def _events(self, data: bytes) -> None:
        if not self.flows:
            self.computed(self.heard_s)
            self.flows = True
        stream = self.stream
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
        if self._pass_on(data) and not self._over:
            self._request.first_token()
            self._flat = self._rewriter is None and not stream.knows_ids

    def _begin(self, data: bytes) -> None:
        stream = self.stream
        stream.begun = True
        stream.first = data.split(EVENT_END, 1)[0]
        result = PROMPT_IDS.search(stream.first) if self._asks_ids else None
        if result is not None and result[1]:
            stream.prompt_ids, stream.knows_ids = ids_of(result[1]), True
            stream.first = TOKEN_IDS.sub(b"", PROMPT_IDS.sub(b"", stream.first))
        self._request.answer.relay_begin(200, self._kind)

    def _noted(self, event: bytes) -> bytes:
        self._note(event)
        return TOKEN_IDS.sub(b"", PROMPT_IDS.sub(b"", event)) + EVENT_END

    def _note(self, event: bytes) -> None:
        """The tokens of an event count once their text is shown."""
        if ANOTHER.search(event):
            self.stream.knows_ids = False
        result = TOKEN_IDS.search(event)
        if result is not None:
            self._pending += ids_of(result[1])
        if self._pending and SHOWS.search(event):
            self._request.output += self._pending
            self._pending = []

    def _rewritten(self, event: bytes) -> bytes:
        assert self._rewriter is not None
        self._note(event)
        return self._rewriter.event(event + EVENT_END)

    def _namesake(self) -> EventRewriter:
        stream, request = self.stream, self._request
        chat = request.asked.path == CHAT
        top_logprobs = (json.loads(request.asked.body).get("top_logprobs") or 0) if chat else 0
        return EventRewriter(stream.first, chat, len(stream.prompt_ids), len(request.output), top_logprobs)

    def _length(self, said: bytes) -> int:
        stream, asked = self.stream, self._request.asked
        number = said.rfind(b'"completion_tokens":')
        tokens = 0
        if number >= 0:
            digits = said[number + 20 : number + 32].lstrip().split(b",")[0].split(b"}")[0]
            tokens = int(digits) if digits.isdigit() else 0
        if not tokens:
            tokens = len(self._request.output) or max(stream.events - (asked.path == CHAT), 1)
        self._count(tokens)
        self._over = True
        self._context.watch.leave(self)
        return tokens if tokens < asked.max_output_tokens else asked.max_output_tokens

    def _count(self, output_tokens: int, problem: str = "") -> None:
        if self.pulse is not None:
            took_s = self._now_s() - self._began_s
            # An engine that failed before its first token may have computed nothing.
            prompt_tokens = self.tokens if self.flows or not problem else 0
            self._context.meter.segment(self._endpoint.replica, took_s, prompt_tokens, output_tokens, problem)

    def _leave(self) -> None:
        self._over = True
        self._context.watch.leave(self)

    def _lied(self, why: str) -> None:
        self._fail("replica", f"lied: {why}")

    def _fail(self, kind: FailureKind, why: str, rejected: bool = False) -> None:
        self._count(len(self._request.output), why)
        self.stop()
        endpoint, stream = self._endpoint, self.stream
        if stream.begun and not stream.knows_ids:
            self._request.broken(kind, endpoint.replica, why)
        elif stream.begun and len(self._request.output) >= self._request.asked.max_output_tokens:
            self._relay(self._namesake().closing(self._request.asked.body))
            self._request.relayed(len(self._request.output))
        else:
            self._request.failed(kind, endpoint.replica, why, rejected=rejected)

"""The client handler with fake exchanges and a scripted dispatcher."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from potluck.api.tokenizer import ModelTokenizer
from potluck.core.state.actions import Refuse
from potluck.core.values.sampling import SampledToken
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.openai.handler import ClientHandler
from potluck.gateway.openai.requests import ModelCard
from potluck.gateway.values import AnswerSink, ChoiceRequest, RequestOutcome

NAME, SERVER = "tiny", "elsewhere"
LETTERS = [chr(code) for code in range(0x20, 0x7F)] + [chr(code) for code in range(0xC0, 0x17F)]
END = 200  # A token that ends answers.


def letter_tokenizer() -> ModelTokenizer:
    """Token n is the n-th letter."""
    tokenizer = Tokenizer(BPE(vocab={letter: place for place, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = Fuse()
    return ModelTokenizer(tokenizer)


def letter_tokens(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def sampled_letters(text: str) -> list[SampledToken]:
    return [SampledToken(token) for token in letter_tokens(text)]


CARDS = {
    NAME: ModelCard(NAME, 512, letter_tokenizer(), ends=frozenset({END}), vocab=len(LETTERS)),
    SERVER: ModelCard(SERVER, 512, None, plain=True),
}


class FakeExchange:
    def __init__(
        self,
        path: str = "/v1/completions",
        body: object = b"",
        method: str = "POST",
        query: str = "",
        **headers: str,
    ) -> None:
        self.method, self.path, self.query = method.encode(), path.encode(), query.encode()
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = {
            b"host": b"127.0.0.1:8000",
            **{name.replace("_", "-").encode(): value.encode() for name, value in headers.items()},
        }
        self.peer, self.came_s = "127.0.0.1", 0.0
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[bool], None] | None = None
        self.status: int | None = None
        self.sent: dict[str, str] = {}
        self.data = b""
        self.over = self.dropped = self.streamed = False

    def reply(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), lines: bytes = b""
    ) -> None:
        assert self.status is None, "answered twice"
        self._head(status, headers, lines)
        self.data, self.over = body, True

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), lines: bytes = b"") -> None:
        assert self.status is None, "answered twice"
        self._head(status, headers, lines)
        self.streamed = True

    def write(self, data: bytes) -> None:
        assert self.streamed
        assert not self.over
        self.data += data

    def end(self) -> None:
        assert self.streamed
        assert not self.over
        self.over = True

    def drop(self) -> None:
        self.over = self.dropped = True

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]], lines: bytes) -> None:
        self.status = status
        self.sent = {name.decode(): value.decode() for name, value in headers}
        assert lines.endswith(b"\r\n") or not lines
        for line in lines.decode().split("\r\n")[:-1]:
            name, _, value = line.partition(": ")
            assert name not in self.sent
            self.sent[name] = value

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        text = self.data.decode()
        assert text.endswith("data: [DONE]\n\n")
        return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n")[:-2]]


class FakeDriver(Dispatcher):
    """Keeps what is asked; answers at once by `script`, where there is one."""

    def __init__(self, script: Callable[[ChoiceRequest, AnswerSink], None] | None = None) -> None:
        self.asked: list[ChoiceRequest] = []
        self.answers: dict[str, AnswerSink] = {}
        self.cancelled: list[str] = []
        self.resumed: list[list[int]] = []
        self.rooms: list[tuple[str, bool]] = []
        self._script = script
        self._fingerprints = {NAME: "weights"}

    def begin(self, asked: ChoiceRequest, answer: AnswerSink) -> None:
        self.asked.append(asked)
        self.answers[asked.id] = answer
        if self._script is not None:
            self._script(asked, answer)

    def resume(self, asked: ChoiceRequest, answer: AnswerSink, output: Sequence[int]) -> None:
        self.resumed.append(list(output))
        self.begin(asked, answer)

    def cancel(self, request: str) -> None:
        self.cancelled.append(request)

    def room(self, request: str, there: bool) -> None:
        self.rooms.append((request, there))

    @property
    def answer(self) -> AnswerSink:
        return self.answers[self.asked[-1].id]


class FakeMeter(Counters):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[RequestOutcome] = []
        self.seen_s: list[float] = []
        self.turned: list[tuple[int, str]] = []
        self.replays = 0

    def answered(self, told: RequestOutcome) -> None:
        self.told.append(told)

    def gaps(self, model: str) -> Callable[[float], None]:
        return self.seen_s.append

    def turned_away(self, status: int, code: str) -> None:
        self.turned.append((status, code))

    def replayed(self) -> None:
        self.replays += 1


class HandlerHarness:
    def __init__(
        self, script: Callable[[ChoiceRequest, AnswerSink], None] | None = None, **fields: Any
    ) -> None:
        self.now_s = 0.0
        self.driver, self.meter = FakeDriver(script), FakeMeter()
        self.door = ClientHandler(
            fields.pop("cards", CARDS),
            self.driver,
            self.meter,
            clock=lambda: self.now_s,
            calendar=lambda: 1e9 + self.now_s,
            **fields,
        )

    def ask(self, path: str = "/v1/completions", body: object = b"", **fields: Any) -> FakeExchange:
        exchange = FakeExchange(path, body, **fields)
        exchange.came_s = self.now_s
        self.door(exchange)
        return exchange

    def complete(
        self, prompt: object = "Hello", headers: dict[str, str] | None = None, **fields: Any
    ) -> FakeExchange:
        return self.ask("/v1/completions", {"model": NAME, "prompt": prompt, **fields}, **(headers or {}))

    def chat(self, text: str = "Hello", headers: dict[str, str] | None = None, **fields: Any) -> FakeExchange:
        message = [{"role": "user", "content": text}]
        return self.ask(
            "/v1/chat/completions", {"model": NAME, "messages": message, **fields}, **(headers or {})
        )


def answering_with(
    text: str, reason: str = "length", cached: int = 0
) -> Callable[[ChoiceRequest, AnswerSink], None]:
    """A driver that answers so, token by token."""

    def script(asked: ChoiceRequest, answer: AnswerSink) -> None:
        for sampled_token in sampled_letters(text):
            if answer.tokens([sampled_token]):
                return
        answer.finished(reason, cached)  # type: ignore[arg-type]

    return script


def refusing_with(
    reason: str, detail: str = "no", after_s: float | None = None
) -> Callable[[ChoiceRequest, AnswerSink], None]:
    return lambda asked, answer: answer.refused(Refuse(asked.id, reason, detail, after_s))  # type: ignore[arg-type]

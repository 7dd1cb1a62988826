"""Large and costly bodies: work on the event loop and in threads."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from openai_helpers import CARDS, NAME, SERVER, FakeExchange, HandlerHarness, answering_with, letter_tokenizer

from potluck.api import large_json, openai_requests
from potluck.api.http import HttpRefusal
from potluck.api.large_json import INLINE_BODY_BYTES
from potluck.api.openai_requests import LOGIT_BIAS_MAX, chat_of, completion_of, schema_of
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.errors import InputError
from potluck.core.replica.blocks import BlockNamer
from potluck.gateway.dispatch.relay_attempt import forwarded
from potluck.gateway.dispatch.segment_attempt import tokens_json
from potluck.gateway.http.limits import HttpLimits
from potluck.gateway.http.parser import CHUNKS_PER_READ_MAX, RequestReader
from potluck.gateway.http.server import ClientConnection, ClientListener, Exchange
from potluck.gateway.openai import handler as module
from potluck.gateway.openai import requests as gateway_requests
from potluck.gateway.openai.kept_answers import KeptAnswers
from potluck.gateway.openai.requests import ENGINES, ModelCard, validate_plain, with_model_first
from potluck.gateway.values import RewrittenBody

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from parts.abusive_bodies import AbusiveBody, abusive_bodies

sys.path.pop(0)
SIZE, VALUES = 200_000, 4_000
"""The corpus and the limit on values, both a fraction of what they are, so that tests are quick."""
LARGE_CARDS = CARDS | {"large": ModelCard("large", 1 << 20, letter_tokenizer(), vocab=300)}


class AwaitedExchange(FakeExchange):
    """Tells when its answer is over."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.ended = asyncio.Event()

    def reply(self, *args: Any, **fields: Any) -> None:
        super().reply(*args, **fields)
        self.ended.set()

    def end(self) -> None:
        super().end()
        self.ended.set()


def answer_of(scene: HandlerHarness, path: str, body: object, **headers: str) -> FakeExchange:
    """A request and its answer, with an event loop for what is done in threads."""

    async def run() -> FakeExchange:
        exchange = AwaitedExchange(path, body, **headers)
        scene.door(exchange)
        await exchange.ended.wait()
        return exchange

    return asyncio.run(run())


@pytest.fixture
def costly_steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The costly steps of a request, and the names of the threads that did them."""
    seen: dict[str, set[str]] = {}

    def spy(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def spied(*args: Any, **fields: Any) -> Any:
            seen.setdefault(name, set()).add(threading.current_thread().name.rpartition("_")[0])
            return function(*args, **fields)

        monkeypatch.setattr(owner, name, spied)

    for owner, names in (
        (module, ("parse_object", "read_large_object", "validate", "validate_plain", "with_model_first")),
        (module, ("understand", "digest_of")),
        (gateway_requests.ValidatedRequest, ("tokenised",)),
        (gateway_requests.Submission, ("asks",)),
    ):
        for name in names:
            spy(owner, name)
    return seen


@pytest.fixture
def window_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each piece that the reader of large bodies gives to a parser in C, which holds the lock."""
    sizes = [0]
    parsed = large_json._WindowReader._parsed

    def spied(self: Any, piece: bytes) -> object:
        sizes[0] = max(sizes[0], len(piece))
        return parsed(self, piece)

    monkeypatch.setattr(large_json._WindowReader, "_parsed", spied)
    return sizes


@pytest.mark.parametrize("model", ["large", NAME, SERVER])
def test_abusive_body_is_read_in_small_pieces_off_the_event_loop(
    model: str, costly_steps: dict[str, set[str]], window_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_json, "VALUES_MAX", VALUES)
    scene = HandlerHarness(answering_with("a"), cards=LARGE_CARDS)
    wrong: list[str] = []
    for abusive in _large_bodies(model):
        reply = answer_of(scene, abusive.path, abusive.body)
        assert reply.status is not None
        refused = 400 <= reply.status < 500
        if abusive.refused and model != SERVER and not refused:
            wrong.append(f"{abusive.name} {reply.status}")
        if not refused and reply.status != 200:
            wrong.append(f"{abusive.name} {reply.status}")
        if refused:
            assert len(reply.data) < 6_000, abusive.name
    assert wrong == []
    assert "parse_object" not in costly_steps
    plain = {"asks"} if model == SERVER else set()  # Without a tokenizer there is nothing to do.
    assert {name: threads for name, threads in costly_steps.items() if name not in plain} == {
        name: {"tokens"} for name in costly_steps if name not in plain
    }
    assert 0 < window_sizes[0] <= large_json.WINDOW_BYTES + 2


def _large_bodies(model: str) -> Iterator[AbusiveBody]:
    """Those that are large; long legal texts only where the model's context is too small for them."""
    for abusive in abusive_bodies(model, SIZE):
        if len(abusive.body) > INLINE_BODY_BYTES and (abusive.refused or model != "large"):
            yield abusive


def test_small_body_is_read_in_one_step(costly_steps: dict[str, set[str]]) -> None:
    scene = HandlerHarness(answering_with("a"))
    assert scene.complete("x").status == 200
    assert scene.chat("x").status == 200
    assert set(costly_steps) == {"parse_object", "validate", "tokenised", "asks"}
    assert set.union(*costly_steps.values()) == {""}, "no thread but the caller's"


def test_legal_large_prompt_is_answered_like_a_small_one() -> None:
    text, tokens = "a" * 200_000, [7] * 100_000
    scene = HandlerHarness(answering_with("b"), cards=LARGE_CARDS)
    for prompt, count in ((text, 200_000), (tokens, 100_000), ([text, text], 200_000)):
        body = {"model": "large", "prompt": prompt, "max_tokens": 3}
        reply = answer_of(scene, "/v1/completions", body)
        assert reply.status == 200, reply.data
        assert len(scene.driver.asked[-1].prompt) == count
    assert list(scene.driver.asked[-3].prompt) == tokens
    chat = {"model": "large", "messages": [{"role": "user", "content": text}], "stream": True}
    assert (
        answer_of(scene, "/v1/chat/completions", chat).events[-1]["choices"][0]["finish_reason"] == "length"
    )


def test_large_body_of_a_client_that_left_is_not_processed(costly_steps: dict[str, set[str]]) -> None:
    async def run() -> None:
        scene = HandlerHarness(answering_with("a"), cards=LARGE_CARDS)
        exchange = AwaitedExchange("/v1/completions", {"model": "large", "prompt": "a" * 100_000})
        scene.door(exchange)
        assert exchange.on_gone is not None
        exchange.on_gone()
        assert [told.status for told in scene.meter.told] == [499]
        while scene.door._counting.waiting_chars:
            await asyncio.sleep(0)
        assert exchange.status is None

    asyncio.run(run())
    assert set(costly_steps) <= {"read_large_object"}


def test_queued_large_bodies_are_bounded_and_health_is_answered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING_CHARS", 1_000_000)

    async def run() -> None:
        scene = HandlerHarness(answering_with("a"), cards=LARGE_CARDS)
        body = json.dumps({"model": "large", "prompt": "a" * 200_000, "max_tokens": 1}).encode()
        exchanges = [AwaitedExchange("/v1/completions", body) for _ in range(100)]
        for exchange in exchanges:
            scene.door(exchange)
        assert [exchange.status for exchange in exchanges] == [None] * 4 + [429] * 96
        assert scene.ask("/health", method="GET").status == 200
        for exchange in exchanges:
            await exchange.ended.wait()
        assert {exchange.status for exchange in exchanges[:4]} == {200}

    asyncio.run(run())


def test_repeated_large_body_is_recognised_off_the_event_loop(
    tmp_path: Path, costly_steps: dict[str, set[str]]
) -> None:
    scene = HandlerHarness(
        answering_with("a"),
        cards=LARGE_CARDS,
        kept_answers=KeptAnswers(tmp_path, lambda after_s, call: after_s or call()),
    )
    body = {"model": "large", "prompt": "a" * 100_000, "max_tokens": 1}
    first, again = (
        answer_of(scene, "/v1/completions", body, idempotency_key="one", x_request_id=name) for name in "ab"
    )
    assert (first.status, again.status) == (200, 200)
    assert again.data == first.data
    assert again.sent["x-potluck-replayed"] == "1"
    assert len(scene.driver.asked) == 1
    assert costly_steps["digest_of"] == {"tokens"}
    other = answer_of(scene, "/v1/completions", {**body, "max_tokens": 2}, idempotency_key="one")
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_key_reused")


class UnreadList(list[Any]):
    """A list whose length may be asked for, and nothing else."""

    def __iter__(self) -> Any:
        raise AssertionError("its entries were read")


class UnreadObject(dict[str, Any]):
    def __iter__(self) -> Any:
        raise AssertionError("its entries were read")

    items = keys = values = __iter__


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        (
            "logit_bias",
            UnreadObject.fromkeys(map(str, range(LOGIT_BIAS_MAX + 1)), 1),
            "1024 entries, got 1025",
        ),
        ("stop", UnreadList(["a"] * 17), "16 strings, got 17"),
        ("stop_token_ids", UnreadList([1] * 257), "256 entries, got 257"),
    ],
)
def test_field_with_too_many_entries_is_refused_before_they_are_read(
    name: str, value: Any, limit: str
) -> None:
    for read, content in (
        (completion_of, {"prompt": "x"}),
        (chat_of, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        with pytest.raises(InputError, match=f"{name}: at most {limit}"):
            read({"model": "m", **content, name: value}, ENGINES)


def test_fields_of_the_largest_allowed_sizes_are_read() -> None:
    bias = {str(token): 1 for token in range(LOGIT_BIAS_MAX)}
    body = {"model": "m", "prompt": "x", "logit_bias": bias, "stop": ["a"] * 16, "stop_token_ids": [1] * 256}
    completion_request = completion_of(body, ENGINES)[0]
    assert (
        len(completion_request.logit_bias),
        len(completion_request.stop),
        len(completion_request.stop_token_ids),
    ) == (LOGIT_BIAS_MAX, 16, 256)


def test_body_with_too_many_fields_is_refused_by_their_number() -> None:
    body = {"model": NAME, "prompt": "x", **{f"k{number}": None for number in range(128)}}
    for read in (lambda: completion_of(body, ENGINES), lambda: validate_plain(CARDS[SERVER], body, False)):
        with pytest.raises(InputError, match="body: at most 128 fields, got 1"):
            read()


def test_schema_size_is_measured_before_it_is_serialised(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(schema: object) -> dict[str, object]:
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    assert schema_of(given({"enum": ["a" * 60_000]}))
    monkeypatch.setattr(openai_requests.json, "dumps", lambda *args, **fields: pytest.fail("written as text"))
    for schema in ({"enum": ["a" * 70_000]}, {"k" * 70_000: 1}, {"enum": [[]] * 70_000}):
        with pytest.raises(InputError, match="at most 65536 are taken|more than 20000 values"):
            schema_of(given(schema))


def test_too_many_choices_for_a_large_body_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_requests, "COPIES_BYTES_MAX", 200_000)
    scene = HandlerHarness(answering_with("a"), cards=LARGE_CARDS)
    body = {"model": "large", "prompt": "a" * 50_000, "n": 4}
    reply = answer_of(scene, "/v1/completions", body)
    assert (reply.status, reply.json["error"]["param"]) == (400, "n")
    assert answer_of(scene, "/v1/completions", {**body, "n": 3}).status == 200


@pytest.mark.parametrize("chat", [False, True])
def test_copies_of_a_large_body_are_written_in_short_steps(
    chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_requests, "compact", lambda body: pytest.fail("written in one call"))
    scene = HandlerHarness(answering_with("a"), cards=LARGE_CARDS)
    body: dict[str, Any] = {"model": "large", "n": 3, "max_tokens": 1, "seed": 4}
    body |= (
        {"messages": [{"role": "user", "content": "\u00e9" * 50_000}]} if chat else {"prompt": [7] * 50_000}
    )
    path = "/v1/chat/completions" if chat else "/v1/completions"
    assert answer_of(scene, path, body).status == 200
    for place, asked in enumerate(scene.driver.asked):
        assert json.loads(asked.body) == {**body, "n": 1, "seed": 4 + (place << 32)}


def test_rendered_chat_beyond_the_context_is_refused_before_tokenisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = letter_tokenizer()
    card = ModelCard("short", 100, text, vocab=300)
    monkeypatch.setattr(ModelTokenizer, "chat", lambda self, messages, **more: "a" * (card.most_chars + 1))
    monkeypatch.setattr(ModelTokenizer, "encode", lambda self, text, **more: pytest.fail("tokenised"))
    scene = HandlerHarness(answering_with("a"), cards={"short": card})
    reply = scene.ask(
        "/v1/chat/completions", {"model": "short", "messages": [{"role": "user", "content": "a"}]}
    )
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")


def test_large_body_for_another_model_name_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = (
        b' {"cache_salt" : "mine", "metadata": {"model": "x"}, "model": "a", "prompt":"cache_salt",'
        b' "model" : "served \\u00e9" }'
    )
    members = large_json.read_large_object(raw).members
    body = with_model_first(raw, members, "served é")
    read = json.loads(raw)
    assert json.loads(body) == read
    monkeypatch.setattr(
        "potluck.gateway.dispatch.relay_attempt.json.loads", lambda text: pytest.fail("parsed again")
    )
    renamed = forwarded(body, "served é", "inner", b'"x":1', salt="ours")
    plain = forwarded(body, "served é", "inner")
    monkeypatch.undo()
    assert json.loads(renamed) == {**read, "model": "inner", "cache_salt": "ours", "x": 1}
    assert renamed.count(b'"cache_salt"') == 2, "the prompt's and ours"
    assert json.loads(plain) == {**read, "model": "inner"}
    alone = with_model_first(b'{"model":"a"}', {"model": (1, 12)}, "a")
    assert forwarded(alone, "a", "b", salt="s") == b'{"model":"b","cache_salt":"s"}'


def test_large_body_for_a_plain_server_is_forwarded_rewritten() -> None:
    scene = HandlerHarness(answering_with("a"), cards={SERVER: ModelCard(SERVER, 1 << 20, None, plain=True)})
    body = {"prompt": "a" * 40_000, "top_k": 1, "cache_salt": "s", "model": SERVER}
    answer_of(scene, "/v1/completions", body)
    asked = scene.driver.asked[0]
    assert isinstance(asked.body, RewrittenBody)
    assert json.loads(asked.body) == body
    assert asked.body.startswith(b'{"model":"%b",' % SERVER.encode())


def test_long_prompt_is_prepared_for_dispatch_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_requests, "SLICE_TOKENS", 1_000)
    card = ModelCard(NAME, 1 << 20, letter_tokenizer(), vocab=300)
    scene = HandlerHarness(answering_with("a"), cards={NAME: card})
    prompts = [[number % 200 for number in range(20_000)], [7] * 9_000, [1, 2]]
    body = {"model": NAME, "prompt": prompts, "n": 2, "max_tokens": 1, "seed": 1}
    assert answer_of(scene, "/v1/completions", body).status == 200
    for place, asked in enumerate(scene.driver.asked):
        prompt = prompts[place // 2]
        assert list(asked.prompt) == prompt
        if len(prompt) < gateway_requests.PREPARED_TOKENS:
            assert asked.prepared is None
            continue
        assert asked.prepared is not None
        assert asked.prepared.blocks == BlockNamer().names(prompt, "weights", asked.salt)
        assert asked.prepared is scene.driver.asked[place // 2 * 2].prepared, "once for all its answers"
        monkeypatch.setattr(BlockNamer, "names", lambda *given: pytest.fail("named in the loop"))
        scene.driver._namer = BlockNamer()
        assert scene.driver._blocks(asked) == asked.prepared.blocks
        scene.driver._fingerprints[NAME] = "other weights"
        with pytest.raises(pytest.fail.Exception):
            scene.driver._blocks(asked)
        scene.driver._fingerprints[NAME] = "weights"
        monkeypatch.undo()
        for output in ([], [5, 6]):
            assert tokens_json(asked, output) == tokens_json(asked._replace(prepared=None), output)


class SinkTransport:
    """The transport of a connection, kept in memory."""

    def __init__(self) -> None:
        self.written = b""
        self.paused = False

    def write(self, data: bytes) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None: ...


def test_pipelined_requests_are_answered_over_several_event_loop_turns() -> None:
    async def run() -> None:
        paths: list[bytes] = []

        def handle(exchange: Exchange) -> None:
            paths.append(exchange.path)
            exchange.reply(200, b"")

        connection = ClientConnection(ClientListener(handle, HttpLimits()))
        transport = SinkTransport()
        connection.connection_made(cast(asyncio.Transport, transport))
        requests = [b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % number for number in range(3_000)]
        connection.data_received(b"".join(requests))
        assert 0 < len(paths) <= 40, "the rest waits for the next turn"
        seen = len(paths)
        connection.data_received(b"")
        assert len(paths) == seen, "nor does more data bring it forward"
        assert transport.paused, "no more is read meanwhile"
        turns = 0
        while len(paths) < len(requests):
            await asyncio.sleep(0)
            assert len(paths) - seen <= 40
            seen, turns = len(paths), turns + 1
        assert paths == [b"/%d" % number for number in range(3_000)]
        assert turns >= 3_000 // 40
        await asyncio.sleep(0)
        assert not transport.paused
        connection.data_received(b"GET /last HTTP/1.1\r\nhost: a\r\n\r\n")
        assert paths[-1] == b"/last"

    asyncio.run(run())


def test_body_behind_pipelined_requests_is_read_to_its_end() -> None:
    """Reading is paused while earlier requests are answered, and must go on for the body that is not whole."""

    async def run() -> None:
        bodies: list[int] = []

        def handle(exchange: Exchange) -> None:
            bodies.append(len(exchange.body))
            exchange.reply(200, b"")

        connection = ClientConnection(ClientListener(handle, HttpLimits()))
        transport = SinkTransport()
        connection.connection_made(cast(asyncio.Transport, transport))
        small = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 100
        connection.data_received(small + b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 300000\r\n\r\n")
        connection.data_received(b"x" * 200_000)
        while len(bodies) < 100 or transport.paused:
            await asyncio.sleep(0)
        connection.data_received(b"x" * 100_000)
        assert bodies[-1] == 300_000

    asyncio.run(run())


def test_body_with_too_many_tiny_chunks_at_once_is_refused() -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    reader = RequestReader(HttpLimits())
    reader.feed(head + b"1\r\nx\r\n" * CHUNKS_PER_READ_MAX)
    assert reader.take() is None
    reader.feed(b"1\r\ny\r\n" * 10 + b"0\r\n\r\n")
    request = reader.take()
    assert request is not None
    assert request.body == b"x" * CHUNKS_PER_READ_MAX + b"y" * 10
    reader = RequestReader(HttpLimits())
    reader.feed(head + b"1\r\nx\r\n" * (CHUNKS_PER_READ_MAX + 1))
    with pytest.raises(HttpRefusal, match="more than 4096 chunks at once"):
        reader.take()

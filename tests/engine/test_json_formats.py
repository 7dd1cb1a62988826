"""JSON, penalties and biases over HTTP, with the model that ships: kept, and the same whatever way they take."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from typing import Any

import jsonschema
import pytest
from engine_models import EXACT
from mock_helpers import LLAMA_ON_A100
from server_helpers import TRIAL, Client, engine_client, make_service, tokens_in

from potluck.api.json_schema_limits import JSON_SCHEMA_MAX_BYTES
from potluck.api.openai_requests import ANY_OBJECT
from potluck.api.tokenizer import ModelTokenizer
from potluck.catalog.huggingface import read_model
from potluck.engine import shipped_model
from potluck.engine.compute.logit_edits import Grammars, JsonGuide, UnfitFormat
from potluck.engine.mock.mock_engine import mock_engine
from potluck.engine.serve import EngineSettings, assemble, local_executor
from potluck.engine.server.engine_service import EngineService
from potluck.kv.handles import new_handle

pytest.importorskip("llguidance")
WORDS = shipped_model()
TEXT = ModelTokenizer.read(WORDS)
assert TEXT is not None
TOKENS = TEXT.encode("The captain of the ship said to the king: the night is long, and the king")
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["whale", "ship", None]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy penalties": {"frequency_penalty": 1.9, "repetition_penalty": 1.3, "logprobs": 2},
    "json": {"temperature": 1.0, "seed": 2, "json_schema": json.dumps(ENTRY), "logprobs": 1},
    "all of it": {
        "temperature": 0.8,
        "seed": 3,
        "top_p": 0.95,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        "logit_bias": [[25, -2.0], [300, 3.0], [301, -100.0]],
        "json_schema": json.dumps(ENTRY),
    },
}


def words_service(make: Any = local_executor, **fields: Any) -> EngineService:
    settings = EngineSettings(**{"max_running": 8, "max_tokens": 512, "threads": 1, **fields})
    return assemble(WORDS, read_model(WORDS), settings, name="tiny", kv=TRIAL, make=make)


def formatted(schema: object, **more: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    return {"model": "tiny", "prompt": "The king said", "max_tokens": 150, "response_format": form, **more}


def random_schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = chance.choice(["integer", "enum", "string", "boolean", "array", "object"][: 6 if depth else 4])
    if kind == "integer":
        least = chance.randrange(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + chance.randrange(1, 900)}
    if kind == "enum":
        return {"enum": chance.sample(["king", "sea", 7, True, None, "é", 'a"b', {"x": 1}], 3)}
    if kind == "string":
        return {"type": "string", "maxLength": chance.randrange(1, 12)}
    if kind == "array":
        most = chance.randrange(1, 4)
        return {"type": "array", "items": random_schema(chance, depth - 1), "minItems": 1, "maxItems": most}
    if kind == "object":
        names = chance.sample(["a", "b c", "longer name", "ü"], chance.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(chance, depth - 1) for name in names},
            "required": names[: chance.randrange(len(names) + 1)],
            "additionalProperties": False,
        }
    return {"type": kind}


async def test_answers_are_valid_under_random_schemas() -> None:
    chance = random.Random(5)
    schemas = [random_schema(chance) for _ in range(30)]

    async with engine_client(words_service()) as one:
        bodies = [
            formatted(schema, seed=place, temperature=(0, 0.7, 1.3)[place % 3], stream=place % 2 == 0)
            for place, schema in enumerate(schemas)
        ]
        result = await asyncio.gather(*(one.post("/v1/completions", body) for body in bodies))
        whole = 0
        for schema, (status, reply) in zip(schemas, result, strict=True):
            assert status == 200, (schema, reply)
            text, finish = text_and_finish(reply)
            if finish == "stop":
                whole += 1
                jsonschema.validate(json.loads(text), schema)
            else:
                assert finish == "length"
        assert whole > 24
        await one.until_idle()


def text_and_finish(reply: Any) -> tuple[str, str]:
    parts = reply if isinstance(reply, list) else [reply]
    choices = [choice for part in parts for choice in part["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


async def test_json_answer_ends_when_complete_or_at_max_tokens() -> None:
    async with engine_client(words_service()) as one:
        body = formatted(ENTRY, temperature=0)
        _, reply = await one.post("/v1/completions", body)
        text, finish = text_and_finish(reply)
        jsonschema.validate(json.loads(text), ENTRY)
        # The token that ends it counts, as in every answer, and is not shown.
        assert finish == "stop"
        for most in (1, 4):
            _, cut = await one.post("/v1/completions", {**body, "max_tokens": most})
            assert text_and_finish(cut)[1] == "length"
            assert text.startswith(text_and_finish(cut)[0])
        chat = {key: value for key, value in body.items() if key != "prompt"}
        chat |= {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}}
        _, reply = await one.post("/v1/chat/completions", {**chat, "n": 3, "seed": 1, "temperature": 1})
        texts = [choice["message"]["content"] for choice in reply["choices"]]
        assert len(set(texts)) == 3
        assert all(item.startswith("{") for item in texts)


@pytest.mark.slow
@pytest.mark.skipif(not EXACT, reason="needs products that are exact")
@pytest.mark.parametrize("name", WAYS)
async def test_json_answer_is_the_same_over_every_route_and_resumption(name: str) -> None:
    """Whole; handed over at several cuts; continued behind every token; beside other requests."""
    way, output = WAYS[name], 14

    first, second = words_service(), words_service(prefix_cache_bytes=0)
    async with engine_client(first) as one, engine_client(second) as two:

        def rest(so_far: list[int]) -> dict[str, Any]:
            asked = {"tokens": TOKENS + so_far, "sampling": way, "max_tokens": output - len(so_far)}
            return asked | ({"generated": len(so_far)} if so_far else {})

        _, lines = await one.segment(**rest([]))
        whole, tokens = token_lines(lines), tokens_in(lines)
        assert len(whole) > 8
        again = await asyncio.gather(*(engine.segment(**rest([])) for engine in (two, one, one)))
        assert all(token_lines(item) == whole for _, item in again)
        for k in range(1, len(tokens)):
            _, lines = await (one, two)[k % 2].segment(**rest(tokens[:k]))
            assert token_lines(lines) == whole[k:], k
        for k, cut in ((0, 5), (0, len(TOKENS)), (6, len(TOKENS) + 3)):
            assert await answer_over_two_engines(one, two, rest(tokens[:k]), cut) == whole[k:]
        wrong = {**rest(tokens[:6]), "generated": 0}
        if "json_schema" in way:  # what counts output must know what it is
            _, lines = await two.segment(**wrong)
            assert token_lines(lines) != whole[6:]


def token_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "token" in line]


async def answer_over_two_engines(
    one: Client, two: Client, asked: dict[str, Any], cut: int
) -> list[dict[str, Any]]:
    """Computed up to the cut by one, and from there by two."""
    source = {"kv": one.kv, "handle": new_handle()}
    first = one.segment(asked["tokens"], stop=cut, handle=source["handle"])
    _, (_, lines) = await asyncio.gather(first, two.segment(**asked, start=cut, source=source))
    return token_lines(lines)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (formatted({"type": "strange"}), "response_format: the schema cannot be used (Invalid type: strange)"),
    (formatted({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
    (formatted({"not": {}, "x-guidance": {"lenient": True}}), 'Unimplemented keys: ["not"]'),
    (formatted({"type": "integer", "minimum": 3, "maximum": 1}), "minimum (3) is greater than maximum (1)"),
    (formatted({"$ref": "http://example.com/schema"}), "references are not fetched"),
    (formatted({"type": "string", "pattern": "(a"}), "unclosed group"),
    (formatted("a text"), "response_format.json_schema.schema: must be an object"),
    (formatted({"description": "x" * JSON_SCHEMA_MAX_BYTES}), f"at most {JSON_SCHEMA_MAX_BYTES} are taken"),
    (formatted({}, min_tokens=3), "min_tokens: cannot be kept"),
    (formatted({}, ignore_eos=True), "ignore_eos: cannot be kept"),
    (
        {**formatted({}), "response_format": {"type": "json_object", "schema": {}}},
        "has nothing beside its type",
    ),
    (
        {
            **formatted({}),
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "loose": 1}},
        },
        "unknown key loose",
    ),
    (
        {
            **formatted({}),
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}},
        },
        "response_format.json_schema.name: must be text",
    ),
]


async def test_unsupported_format_is_refused_by_field() -> None:
    async with engine_client(words_service()) as one:
        for body, says in REFUSED:
            for stream in (False, True):
                status, reply = await one.post("/v1/completions", {**body, "stream": stream})
                assert status == 400, reply
                assert says in reply["error"]["message"], reply
                assert "\n" not in reply["error"]["message"]
        for way, says in (
            ({"json_schema": '{"type": "strange"}'}, "Invalid type"),
            ({"json_schema": "{"}, "the schema cannot be used"),
            ({"logit_bias": [[99_999, 1]]}, "logit_bias: token 99999"),
        ):
            status, reply = await one.segment(TOKENS, sampling=way, max_tokens=4)
            assert (status, says in reply["error"]["message"]) == (400, True), reply
        status, reply = await one.segment(TOKENS, max_tokens=4, generated=len(TOKENS))
        assert (status, reply["error"]["param"]) == (400, "generated")
        await one.until_idle()


async def test_engine_without_llguidance_or_tokenizer_refuses_formats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async with engine_client(words_service()) as one:
        status, reply = await one.post("/v1/completions", formatted({}))
        assert (status, reply["error"]["param"]) == (400, "response_format")
        assert "pip install 'potluck[engine]'" in reply["error"]["message"]
        assert (await one.post("/v1/completions", {"model": "tiny", "prompt": "a"}))[0] == 200
    async with engine_client(make_service(text=False)) as one:
        status, reply = await one.post("/v1/completions", {**formatted({}), "prompt": [1, 2]})
        assert (status, "has not a tokenizer" in reply["error"]["message"]) == (400, True)


async def test_grammar_is_compiled_once_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []
    compile_ = Grammars._compile

    def watched(self: Grammars, schema: str) -> JsonGuide:
        where.append(threading.current_thread().name)
        return compile_(self, schema)

    monkeypatch.setattr(Grammars, "_compile", watched)

    async with engine_client(words_service()) as one:
        for _ in range(2):
            assert (await one.post("/v1/completions", formatted(ENTRY, n=3)))[0] == 200
    assert len(where) == 1
    assert where[0].startswith("grammars")


async def test_grammar_failure_during_generation_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = JsonGuide.allowed

    def sick(self: JsonGuide) -> bytes:
        if fails.pop(0):
            raise UnfitFormat("too complex")
        return allowed(self)

    fails = [True, False, False, True]
    monkeypatch.setattr(JsonGuide, "allowed", sick)
    async with engine_client(words_service()) as one:
        other = asyncio.ensure_future(one.segment(TOKENS, max_tokens=12))
        status, reply = await one.segment(TOKENS, sampling=WAYS["json"], max_tokens=9)
        assert (status, reply["error"]["code"]) == (400, "unsupported_value")
        status, lines = await one.segment(TOKENS, sampling=WAYS["json"], max_tokens=9)
        assert (status, lines[-1]["ended"], lines[-1]["code"]) == (200, "error", "unsupported_value")
        assert len(tokens_in(lines)) == 2
        assert len(tokens_in((await other)[1])) == 12
        await one.until_idle()


async def test_mock_engine_answers_follow_a_json_schema() -> None:
    schema = {"type": "array", "items": {"enum": ["sea", "king", 7]}, "minItems": 2, "maxItems": 3}
    service = mock_engine(WORDS, LLAMA_ON_A100, EngineSettings(), name="tiny", kv=TRIAL)

    async with engine_client(service) as one:
        for place in range(5):
            body = formatted(schema, seed=place, presence_penalty=1)
            status, reply = await one.post("/v1/completions", body)
            assert (status, text_and_finish(reply)[1]) == (200, "stop"), reply
            jsonschema.validate(json.loads(text_and_finish(reply)[0]), schema)


def test_grammar_allows_every_end_token_after_a_complete_value() -> None:
    guide = Grammars(TEXT, TEXT.vocab, frozenset({0, 300})).compiled(ANY_OBJECT)
    guide.consume(TEXT.encode("{}"))
    bits = int.from_bytes(guide.allowed(), "little")
    assert [token for token in range(TEXT.vocab) if bits >> token & 1] == [0, 300]


def test_grammar_with_tokens_after_its_end_token_is_unfit() -> None:
    guide = Grammars(TEXT, TEXT.vocab, frozenset({0, 300})).compiled(ANY_OBJECT)
    guide.consume([*TEXT.encode("{}"), 300])
    guide.consume(TEXT.encode("king"))
    with pytest.raises(UnfitFormat, match="cannot go on"):
        guide.allowed()

"""JSON schemas that are expensive to compile: refused or bounded, and the engine and other requests go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_helpers import LLAMA_ON_A100
from server_helpers import TRIAL, engine_client

from potluck.api.http import HttpRefusal
from potluck.api.json_schema_limits import check_json_schema
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.errors import InputError
from potluck.engine import shipped_model
from potluck.engine.compute import grammar_trial, logit_edits
from potluck.engine.compute.grammar_trial import (
    GrammarTokenizer,
    GrammarTrials,
    TrialFailed,
    TrialKilled,
    TrialLimits,
    TrialServerLost,
    memory_bytes,
)
from potluck.engine.compute.logit_edits import Grammars, UnfitFormat
from potluck.engine.mock.mock_engine import mock_engine
from potluck.engine.serve import EngineSettings
from potluck.engine.server.engine_service import EngineService

pytest.importorskip("llguidance")
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's limits")
WORDS = shipped_model()
TEXT = ModelTokenizer.read(WORDS)
assert TEXT is not None
ENDS = frozenset({0})
TRIAL_MAX_MEMORY_BYTES = TrialLimits().memory_bytes
HUGE = 1_000_000_000
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
INTERSECTED = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{20 + n}}}$"} for n in range(30)]}
"""Within the limits of the API, and minutes of work for the compiler."""
UNLIMITED = {"type": "array", "items": {"type": "null"}, "minItems": HUGE}


def service() -> EngineService:
    return mock_engine(WORDS, LLAMA_ON_A100, EngineSettings(), name="tiny", kv=TRIAL)


def formatted(schema: object, **more: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"model": "tiny", "prompt": "The king", "max_tokens": 20, "response_format": form, **more}


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TEXT, TEXT.vocab, ENDS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    described = {**json.loads(TEXT.described()), "truncation": None, "padding": None}
    made = GrammarTrials(GrammarTokenizer(json.dumps(described), TEXT.vocab, 0), TrialLimits(cpu_s=1))
    yield made
    made.close()


def nested_properties(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


ATTACKS: dict[str, dict[str, Any]] = {
    "minItems": UNLIMITED,
    "maxItems": {"type": "array", "items": {"type": "null"}, "maxItems": HUGE},
    "maxLength": {"type": "string", "maxLength": HUGE},
    "minLength": {"type": "string", "minLength": HUGE},
    "nested properties": nested_properties(90),
    "pattern": {"type": "string", "pattern": "^a{1000000}$"},
    "nested pattern": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    "reference to itself": {"$ref": "#"},
    "references in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "many counts": {"anyOf": [{"type": "array", "minItems": 9_000 + n} for n in range(700)]},
    "multipleOf": {"type": "integer", "multipleOf": 1_000_003},
    "intersection": INTERSECTED,
}


@pytest.mark.slow
async def test_expensive_schemas_do_not_affect_the_engine_or_other_requests() -> None:
    async with engine_client(service()) as one:
        assert (await one.post("/v1/completions", formatted(GOOD)))[0] == 200
        before = memory_bytes()
        assert before is not None
        for name, schema in ATTACKS.items():
            calls = [
                one.post("/v1/completions", formatted(schema)),
                one.post("/v1/completions", formatted(GOOD)),
            ]
            (status, reply), (other, _) = await asyncio.gather(*calls)
            assert (status, other) == (400, 200), (name, reply)
            assert "\n" not in reply["error"]["message"]
            assert reply["error"]["message"].startswith("response_format"), (name, reply)
            sampling = {"json_schema": json.dumps(schema)}
            status, reply = await one.segment([1, 2, 3], sampling=sampling, max_tokens=4)
            assert status == 400, (name, reply)
        after = memory_bytes()
        assert after is not None
        assert after[1] - before[1] < 2 * TRIAL_MAX_MEMORY_BYTES
        assert (await one.post("/v1/completions", formatted(GOOD)))[0] == 200
        await one.until_idle()


def test_recursive_schema_is_compiled(grammars: Grammars) -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    guide = grammars.compiled(json.dumps(tree))
    guide.consume(TEXT.encode('{"kids": ['))
    assert any(guide.allowed())


def test_schema_trial_beyond_memory_or_time_is_killed_alone(trials: GrammarTrials) -> None:
    assert trials.check(json.dumps(GOOD)) < TRIAL_MAX_MEMORY_BYTES
    server = trials.pid
    for schema in (UNLIMITED, INTERSECTED):  # memory, then processor time
        with pytest.raises(TrialKilled, match="needs more than 128 MiB of memory, 1 s of processor time"):
            trials.check(json.dumps(schema))
    with pytest.raises(TrialFailed, match=r"the schema cannot be used \(Invalid type: strange\)"):
        trials.check('{"type":"strange"}')
    with pytest.raises(TrialFailed, match="the schema cannot be used"):
        trials.check("{")
    trials.check(json.dumps(GOOD))
    assert trials.pid == server, "the server of trials lives on, with its tokenizer"


def test_dead_trial_server_is_restarted(trials: GrammarTrials) -> None:
    trials.check(json.dumps(GOOD))
    before = trials.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    trials.check(json.dumps(GOOD))
    assert trials.pid not in (None, before)
    after = trials.pid
    assert after is not None
    trials.close()
    assert not Path(f"/proc/{after}").exists()
    trials.check(json.dumps(GOOD))


def test_trial_server_that_cannot_start_gives_503_not_400(
    monkeypatch: pytest.MonkeyPatch, grammars: Grammars
) -> None:
    monkeypatch.setattr(grammar_trial.sys, "executable", "/nowhere/python")
    with pytest.raises(HttpRefusal) as caught:
        grammars.compiled(json.dumps(GOOD))
    assert (caught.value.status, caught.value.code) == (503, "try_again")
    monkeypatch.undo()
    grammars.compiled(json.dumps(GOOD))
    broken = GrammarTrials(GrammarTokenizer("{}", 10, 0))
    with pytest.raises(TrialServerLost, match="did not start"):
        broken.check("{}")


def test_refused_schema_is_not_compiled_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    check, now_s = GrammarTrials.check, [100.0]

    def counted(self: GrammarTrials, schema: str) -> int:
        tried.append(schema)
        if "killed" in schema:
            raise TrialKilled("the schema needs more")
        return check(self, schema)

    monkeypatch.setattr(GrammarTrials, "check", counted)
    monkeypatch.setattr(logit_edits.time, "monotonic", lambda: now_s[0])
    for schema in ('{"type":"strange"}', '{"title":"killed"}'):
        for _ in range(3):
            with pytest.raises(UnfitFormat):
                grammars.compiled(schema)
    assert len(tried) == 2
    now_s[0] += logit_edits.KILLED_KEPT_S
    for schema in ('{"type":"strange"}', '{"title":"killed"}'):
        with pytest.raises(UnfitFormat):
            grammars.compiled(schema)
    assert tried[2:] == ['{"title":"killed"}'], "the machine may have been too busy for it"


async def test_waiting_schemas_are_bounded_and_compiled_ones_do_not_wait(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_edits, "GRAMMARS_MAX_WAITING", 3)
    await grammars.guide(json.dumps(GOOD))
    assert grammars.trials is not None
    server = grammars.trials.pid
    assert server is not None
    os.kill(server, signal.SIGSTOP)  # No trial begins.
    try:
        waiting = [asyncio.ensure_future(grammars.guide(f'{{"title":"{n}"}}')) for n in range(3)]
        again = asyncio.ensure_future(grammars.guide('{"title":"0"}'))
        await asyncio.sleep(0)
        assert await grammars.guide(json.dumps(GOOD)) is not None
        with pytest.raises(HttpRefusal) as caught:
            await grammars.guide('{"title":"3"}')
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        waiting[0].cancel()  # Its client left; another waits for the same schema.
    finally:
        os.kill(server, signal.SIGCONT)
    assert await again is not None
    assert all([await item for item in waiting[1:]])


def test_compiled_grammars_are_bounded_in_memory(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_edits, "GRAMMARS_MAX_KEPT_BYTES", 1)
    for n in range(3):
        grammars.compiled(f'{{"title":"{n}"}}')
        assert len(grammars._known) == 1


LEAVES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 10**6),
            "maxLength": st.integers(0, 10**6),
            "pattern": st.sampled_from(
                ["^a{5000}$", "(ab|c){40}", "^.*a.{12}$", "\\w{1,3000}", "(", "[a-z]+"]
            ),
            "format": st.sampled_from(["date", "email", "uuid", "strange"]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            "minimum": st.integers(-(10**30), 10**30),
            "maximum": st.integers(-(10**30), 10**30),
            "multipleOf": st.sampled_from([0.01, 3, 7919, 50021, 10**7, 10**9 + 7]),
        },
    ),
    st.fixed_dictionaries({"enum": st.lists(st.integers() | st.text(max_size=5), max_size=50)}),
    st.just({"$ref": "#"}),
    st.just({"$ref": "#/properties/a"}),
)
COUNTS = st.integers(0, 12_000)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={"minItems": COUNTS, "maxItems": COUNTS, "prefixItems": st.lists(inner, max_size=3)},
        ),
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
            },
            optional={"required": st.just(["a"]), "additionalProperties": inner | st.booleans()},
        ),
        st.fixed_dictionaries({}, optional={"allOf": st.lists(inner, min_size=1, max_size=4)}),
        st.fixed_dictionaries({}, optional={"anyOf": st.lists(inner, min_size=1, max_size=4)}),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(SCHEMAS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_schema_within_limits_is_compiled_or_refused_in_bounded_memory(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    try:
        check_json_schema(schema, "f")
    except InputError:
        return
    before = memory_bytes()
    with suppress(UnfitFormat):  # which is answered with 400
        assert any(PROPERTY_GRAMMARS.compiled(text).allowed())
    after = memory_bytes()
    assert before is not None
    assert after is not None
    assert after[1] - before[1] < 2 * TRIAL_MAX_MEMORY_BYTES


PROPERTY_GRAMMARS = Grammars(TEXT, TEXT.vocab, ENDS)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    PROPERTY_GRAMMARS.close()

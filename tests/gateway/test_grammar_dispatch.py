"""Requests with a grammar: refused early, and not retried when suspected of a crash."""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dispatch_helpers import (
    Clock,
    DispatchHarness,
    FakeBrainLine,
    FakeEngines,
    RecordedAnswer,
    choice_request,
    dispatcher_of,
    plan_of,
)
from openai_helpers import NAME, SERVER, HandlerHarness, sampled_letters

from potluck.core.state import events
from potluck.core.state.actions import Refuse
from potluck.core.state.policy import Policy
from potluck.core.values.route import aggregated
from potluck.core.values.sampling import Sampling
from potluck.engine import shipped_model
from potluck.gateway.openai.handler import INLINE_GRAMMAR_BYTES, TokenizerPool

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
BOMB = {"type": "array", "items": {"type": "null"}, "minItems": 1_000_000_000}
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}}


def json_schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


class InlinePool(TokenizerPool):
    """Counts what would go to a thread, and does it at once."""

    apart = 0

    def __init__(self) -> None:
        super().__init__()
        self.postponed: list[Callable[[], None]] = []

    def soon(self, then: Callable[[], None]) -> None:
        self.postponed.append(then)

    def do(self, chars: int, task: Any, then: Any) -> None:
        self.apart += 1
        try:
            result = task()
        except Exception as error:
            result = error
        then(result)


@pytest.mark.parametrize("model", [NAME, SERVER])
@pytest.mark.parametrize("stream", [False, True])
def test_schema_beyond_the_limits_is_refused_before_any_engine(model: str, stream: bool) -> None:
    scene = HandlerHarness()
    for body in (
        {"response_format": json_schema_format(BOMB)},
        {"response_format": json_schema_format({"properties": {"a": {"pattern": "(a{1000}){1000}"}}})},
        {"response_format": json_schema_format({"$ref": "#"})},
    ):
        result = scene.ask("/v1/completions", {"model": model, "prompt": "x", "stream": stream, **body})
        error = result.json["error"]
        assert result.status == 400
        assert error["message"].startswith("response_format.json_schema.schema")
        assert "\n" not in error["message"]
    assert scene.driver.asked == []
    assert scene.door.open == 0


def test_grammar_fields_of_plain_servers_are_checked() -> None:
    scene = HandlerHarness()
    for body in (
        {"structured_outputs": {"json": BOMB}},
        {"guided_regex": "a{1000000}"},
        {"tools": [{"function": {"name": "f", "parameters": BOMB}}], "tool_choice": "required"},
        {"response_format": {"type": "json_object", "schema": BOMB}},
        {"response_format": {"type": "json", "value": BOMB}},
        {"response_format": {"type": "regex", "value": "a{1000000}"}},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": "a{1000000}"}},
        {"guided_whitespace_pattern": "a{1000000}"},
        {"json_schema": BOMB},
        {"json_schema": json.dumps(BOMB)},
        {"regex": "a{1000000}"},
        {"ebnf": 'root ::= "a"{1000000}'},
        {"grammar": 'root ::= "a"{1000000}'},
    ):
        result = scene.ask(
            "/v1/chat/completions", {"model": SERVER, "messages": [{"role": "user", "content": "x"}], **body}
        )
        assert result.status == 400
    assert scene.driver.asked == []


def test_requests_that_compile_a_grammar_are_marked() -> None:
    scene = HandlerHarness()
    for model in (NAME, SERVER):
        for body in (
            {},
            {"response_format": {"type": "json_object"}},
            {"response_format": json_schema_format(GOOD)},
        ):
            scene.ask("/v1/completions", {"model": model, "prompt": "x", **body})
    assert [one.grammar for one in scene.driver.asked] == [False, False, True] * 2


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object", "schema": GOOD}},
        {"response_format": {"type": "regex", "value": "a+"}},
        {"json_schema": GOOD},
        {"regex": "a+"},
        {"ebnf": 'root ::= "a"'},
        {"grammar": 'root ::= "a"'},
    ],
)
def test_grammar_fields_of_any_engine_mark_a_relayed_request_as_using_a_grammar(body: dict[str, Any]) -> None:
    scene = HandlerHarness()
    scene.ask("/v1/completions", {"model": SERVER, "prompt": "x", **body})
    assert [one.grammar for one in scene.driver.asked] == [True]


@pytest.mark.parametrize("how", ["token", "end", "refusal", "client left"])
@pytest.mark.parametrize("several", [{"n": 3}, {"prompt": ["x", "y", "z"]}])
def test_choices_with_one_grammar_start_once_the_first_has_output(several: dict[str, Any], how: str) -> None:
    pool = InlinePool()
    scene = HandlerHarness(tokenizer_pool=pool)
    body = {
        "model": NAME,
        "prompt": "x",
        "max_tokens": 5,
        "response_format": json_schema_format(GOOD),
        **several,
    }
    reply = scene.ask("/v1/completions", body)
    (first,) = scene.driver.answers.values()
    if how == "token":
        first.tokens(sampled_letters("a"))
        first.tokens(sampled_letters("b"))
    elif how == "end":
        first.finished("stop", 0)
    elif how == "refusal":
        first.refused(Refuse("r", "grammar", ""))
    assert len(scene.driver.asked) == 1, "the loop has other work first"
    if how == "client left":
        first.tokens(sampled_letters("a"))
        assert reply.on_gone is not None
        reply.on_gone()
    for then in pool.postponed:
        then()
    if how in ("refusal", "client left"):
        assert len(scene.driver.asked) == 1
        return
    for answer in scene.driver.answers.values():
        answer.finished("stop", 0)
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]
    assert scene.door.open == 0


@pytest.mark.parametrize("good", [False, True])
def test_large_schema_is_checked_off_the_event_loop(good: bool) -> None:
    schema = {**(GOOD if good else BOMB), "description": "x" * INLINE_GRAMMAR_BYTES}
    pool = InlinePool()
    scene = HandlerHarness(tokenizer_pool=pool)
    result = scene.complete("x", response_format=json_schema_format(schema))
    assert pool.apart == 1 + good  # the prompt is tokenised by the same threads
    assert (result.status, len(scene.driver.asked)) == (None if good else 400, int(good))


@pytest.mark.parametrize("how", ["dies", "cannot be reached", "drains", "dies later"])
def test_request_with_grammar_is_retried_only_if_the_grammar_is_not_suspected(how: str) -> None:
    clock, fleet = Clock(), FakeEngines()
    desk = FakeBrainLine(clock, fleet, plan_of([["mixed"]] * 3), Policy())
    dispatcher = dispatcher_of(desk, fleet, clock)
    what = choice_request(sampling=Sampling(json_schema=json.dumps(GOOD)), grammar=True)
    heard, other = RecordedAnswer(what), RecordedAnswer(choice_request("other"))
    dispatcher.begin(what, heard)
    dispatcher.begin(other.asked, other)
    (call,) = [item for item in fleet.sent if item.body["request"] == "r"]
    if how == "dies later":
        call.step(2)
    call.sent = how != "cannot be reached"
    if how == "drains":
        call.refuse(503, "draining")
    else:
        fleet.kill(call.replica)
    attempts = [item for item in fleet.sent if item.body["request"] == "r"]
    if how == "dies":
        assert len(attempts) == 1
        assert heard.refusal is not None
        assert heard.refusal.reason == "grammar"
        (failed,) = [
            item for item in desk.told if isinstance(item, events.AttemptFailed) and item.request == "r"
        ]
        assert not failed.rejected
    else:
        assert len(attempts) == 2
        assert attempts[0].replica != attempts[1].replica
    while fleet.step_all():
        pass
    other.assert_right()
    if how != "dies":
        heard.assert_right()


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
def test_request_with_grammar_that_lost_its_engine_without_a_brain_is_not_retried(
    grammar: bool, tokens: int
) -> None:
    stage = DispatchHarness("x")
    heard = stage.begin(
        choice_request(sampling=Sampling(json_schema=json.dumps(GOOD)), grammar=grammar), aggregated("x")
    )
    if tokens:
        stage.call("x").step(tokens)
    stage.fleet.kill("x")
    event = stage.dispatcher.whereabouts("r", lambda each: None)
    if grammar and not tokens:
        assert event == events.RequestCancelled("r")
        assert heard.refusal is not None
        assert heard.refusal.reason == "grammar"
        assert stage.dispatcher.names() == []
    else:
        assert isinstance(event, events.RequestAdopted)
        assert heard.refusal is None


DYING = """
import os, signal, sys
from potluck.cli.main import main
from potluck.engine.compute.logit_edits import Grammars

guide = Grammars.guide

async def deadly(self, schema):
    if "deadly" in schema:
        os.kill(os.getpid(), signal.SIGKILL)
    return await guide(self, schema)

Grammars.guide = deadly
sys.exit(main())
"""


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_grammar_that_crashes_its_engine_costs_one_engine_and_no_other_request(
    tmp_path: Path, stream: bool
) -> None:
    from live_fleet import LiveFleet, Process
    from live_plans import MODEL, WHOLE, write_plans

    pytest.importorskip("llguidance")

    class DyingFleet(LiveFleet):
        def _engine_process(self, like: str, model: str, name: str) -> Process:
            process = super()._engine_process(like, model, name)
            assert process.arguments[1:3] == ["-m", "potluck.cli.main"]
            process.arguments[1:3] = ["-c", DYING]
            return process

    plan, spec = write_plans(tmp_path, [*WHOLE] * 3)
    words = {"model": MODEL, "prompt": "The captain of the ship said", "max_tokens": 200, "temperature": 0}
    deadly = {
        **words,
        "stream": stream,
        "response_format": json_schema_format({**GOOD, "description": "deadly"}),
        "n": 3,
    }
    gateway = ("--files", f"{MODEL}={shipped_model()}")
    with DyingFleet(plan, spec, gateway=gateway) as fleet, ThreadPoolExecutor(6) as pool:
        running = [pool.submit(post, fleet.url, {**words, "seed": n}) for n in range(6)]
        status, reply = post(fleet.url, deadly)
        assert (status, reply["error"]["code"]) == (422, "grammar_lost_engine"), reply
        assert "not sent to another engine" in reply["error"]["message"]
        assert [future.result()[0] for future in running] == [200] * 6
        dead = []
        for process in fleet.engines:
            assert process.popen is not None
            if process.popen.poll() is not None:
                dead.append(process.popen.returncode)
        assert dead == [-signal.SIGKILL]
        status, reply = post(fleet.url, {**words, "response_format": json_schema_format(GOOD), "n": 3})
        assert (status, len(reply["choices"])) == (200, 3)

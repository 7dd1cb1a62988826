"""Pass-through requests: one complete answer over any number of retries."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dispatch_helpers import DispatchHarness, choice_request
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.state.events import AttemptFailed, FirstToken, RequestCancelled, RequestFinished
from potluck.core.values.route import aggregated, handed_over
from potluck.gateway.dispatch.passthrough_events import ChoiceSoFar, DifferentAnswer, MergedEvents
from potluck.gateway.values import ChoiceRequest, TokenCounts

BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
END = {"ended": "stop", "prompt_tokens": 20, "cached_tokens": 4}


def own_request(stream: bool = True, **more: Any) -> ChoiceRequest:
    body = json.dumps({**BODY, "stream": stream, **more}, separators=(",", ":")).encode()
    return choice_request(own=True, path=b"/v1/chat/completions", body=body, stream=stream)


def stream_event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return {
        "id": "theirs",
        "created": 7,
        "model": "x",
        "object": "chat.completion.chunk",
        "choices": [choice],
    }


def tool_call_delta(name: str = "", arguments: str = "", id: str = "c1") -> dict[str, Any]:
    function = ({"name": name} if name else {}) | ({"arguments": arguments} if arguments else {})
    first = {"id": id, "type": "function"} if name else {}
    return {"tool_calls": [{"index": 0, **first, "function": function}]}


def collected_answer(data: bytes) -> tuple[ChoiceSoFar, list[dict[str, Any]]]:
    events = [part for part in data.decode().split("\n\n") if part]
    result = [json.loads(entry.removeprefix("data: ")) for entry in events if entry != "data: [DONE]"]
    whole = ChoiceSoFar()
    for item in result:
        for choice in item["choices"]:
            whole.add(choice)
    return whole, result


def passthrough_harness(*names: str) -> DispatchHarness:
    made = DispatchHarness()
    for name in names:
        made.fleet.add(name, own=True)
    return made


def test_engine_gets_the_client_body_and_the_client_gets_engine_events() -> None:
    there = passthrough_harness("x")
    heard = there.begin(own_request(), aggregated("x"))
    asked_for = there.call("x")
    assert asked_for.body["own"] == {"path": "/v1/chat/completions", "body": {**BODY, "stream": True}}
    assert asked_for.body["tokens"] == list(heard.asked.prompt)
    asked_for.write(
        {"said": stream_event({"role": "assistant", "content": ""})},
        {"token": 5},
        {"said": stream_event(tool_call_delta("look"))},
    )
    asked_for.write(
        {"token": 6},
        {"token": 7},
        {"said": stream_event(tool_call_delta(arguments='{"n": 1}'), "tool_calls")},
    )
    asked_for.write({**END, "output_tokens": 3})
    asked_for.end()
    whole, events = collected_answer(heard.relayed)
    assert {(item["id"], item["model"]) for item in events} == {("chatcmpl-r", "m")}
    assert (whole.texts["call 0"], whole.facts["name 0"]) == ('{"n": 1}', "look")
    assert heard.relayed.endswith(b"data: [DONE]\n\n")
    assert heard.counts == TokenCounts(20, 3, 4)
    assert there.news == [FirstToken("r", 0), RequestFinished("r", 0, 3)]
    there.assert_idle()


def test_unstreamed_engine_answer_is_relayed_at_once() -> None:
    there = passthrough_harness("x")
    heard = there.begin(own_request(stream=False), aggregated("x"))
    for count in range(60):
        there.clock.pass_s(5)
        there.call("x").write({"steps": count})
    choices = [{"message": {"content": "hi"}}]
    reply = {"id": "theirs", "model": "x", "choices": choices, "kv_transfer_params": {"a": 1}}
    there.call("x").write({"token": 5}, {"said": reply}, {**END, "output_tokens": 1})
    there.call("x").end()
    assert json.loads(heard.relayed) == {"id": "chatcmpl-r", "model": "m", "choices": choices}
    assert heard.counts == TokenCounts(20, 1, 4)
    assert there.news == [RequestFinished("r", 0, 1)], "nobody knows when it began"


def test_retried_passthrough_answer_streams_only_the_rest() -> None:
    there = passthrough_harness("x", "y")
    heard = there.begin(own_request(), aggregated("x"))
    there.call("x").write(
        {"token": 5},
        {"said": stream_event({"role": "assistant"})},
        {"said": stream_event(tool_call_delta("look", '{"n', "c1"))},
    )
    there.call("x").lose()
    assert there.news[-1] == AttemptFailed("r", 0, "replica", "x", 0), (
        "for the Brain, nothing is there to go on from"
    )
    there.again(heard.asked, aggregated("y"), 1, 0)
    again = there.call("y")
    assert again.body["tokens"] == list(heard.asked.prompt)
    again.write(
        {"token": 5},
        {"said": stream_event({"role": "assistant"})},
        {"said": stream_event(tool_call_delta("look", '{"', "c2"))},
    )
    again.write(
        {"token": 6},
        {"said": stream_event(tool_call_delta(arguments='n": 1}'), "tool_calls")},
        {**END, "output_tokens": 2},
    )
    again.end()
    whole, events = collected_answer(heard.relayed)
    assert whole.texts["call 0"] == '{"n": 1}'
    assert [item["choices"][0]["delta"]["tool_calls"][0].get("id") for item in events[1:]] == ["c1", None]
    assert there.news[-1] == RequestFinished("r", 1, 2)


def test_retried_passthrough_answer_that_differs_is_refused() -> None:
    there = passthrough_harness("x", "y")
    heard = there.begin(own_request(), aggregated("x"))
    there.call("x").write({"token": 5}, {"said": stream_event({"content": "a plan"})})
    there.call("x").lose()
    there.again(heard.asked, aggregated("y"), 1, 0)
    there.call("y").write({"token": 5}, {"said": stream_event({"content": "another"})})
    assert heard.refusal is not None
    assert "otherwise" in heard.refusal.detail
    assert there.news[-1] == RequestCancelled("r")
    there.assert_idle()


def test_engine_prompt_that_differs_replaces_the_gateway_prompt() -> None:
    there = passthrough_harness("p", "d")
    heard = there.begin(own_request(), handed_over("p", "d", 20))
    there.call("d").write({"prompt": [1, 2, 3, 4]}, {"ended": "error", **_counts(), "code": "other_prompt"})
    assert there.news[-1] == AttemptFailed("r", 0, "timeout", "", 0), "nobody is to blame"
    assert there.call("p").cancelled
    there.again(heard.asked, handed_over("p", "d", 20), 1, 0)
    assert [there.call(name).body["tokens"] for name in "pd"] == [[1, 2, 3, 4]] * 2
    assert "own" not in there.call("p").body


def test_engine_400_reaches_the_client_and_cancels_the_request() -> None:
    there = passthrough_harness("x")
    heard = there.begin(own_request(), aggregated("x"))
    there.call("x").refuse(400)
    assert (heard.status, json.loads(heard.relayed)["error"]["message"]) == (400, "no")
    assert there.news == [RequestCancelled("r")]


def test_stalled_engine_is_detected_for_unstreamed_answers() -> None:
    there = passthrough_harness("x")
    there.begin(own_request(stream=False), aggregated("x"))
    there.call("x").write({"steps": 1})
    there.clock.pass_s(200)
    assert there.news[-1] == AttemptFailed("r", 0, "replica", "x", 0)


def test_late_engine_refusal_reaches_the_client() -> None:
    there = passthrough_harness("x")
    heard = there.begin(own_request(stream=False), aggregated("x"))
    there.call("x").write({"steps": 1}, {"refused": {"error": {"message": "no such grammar"}}})
    there.call("x").write({"ended": "error", **_counts(), "code": None})
    assert (heard.status, json.loads(heard.relayed)["error"]["message"]) == (400, "no such grammar")


def test_engines_without_passthrough_get_no_passthrough_requests() -> None:
    there = DispatchHarness("x")
    there.begin(own_request(), aggregated("x"))
    assert not there.fleet.sent
    assert there.news == [AttemptFailed("r", 0, "replica", "x", 0)]


@pytest.mark.parametrize("line", [{**END, "output_tokens": 2}, {"nothing": 1}, {**END, "output_tokens": 0}])
def test_inconsistent_end_line_fails_the_attempt(line: dict[str, object]) -> None:
    there = passthrough_harness("x")
    there.begin(own_request(), aggregated("x"))
    there.call("x").write({"token": 5}, line)
    assert there.news[-1] == AttemptFailed("r", 0, "replica", "x", 0)


def _counts() -> dict[str, int]:
    return {"prompt_tokens": 20, "cached_tokens": 0, "output_tokens": 0}


ANSWERS = st.tuples(
    st.text(max_size=12),
    st.lists(st.tuples(st.text(min_size=1, max_size=5), st.text(max_size=9)), max_size=3),
)
CUTS = st.lists(st.integers(1, 4), min_size=1, max_size=8)


def _events(answer: tuple[str, list[tuple[str, str]]], cuts: list[int], name: str) -> list[dict[str, Any]]:
    """An answer said in pieces that are cut somewhere."""
    content, calls = answer
    made = [stream_event({"role": "assistant", "content": ""})]
    made += [stream_event({"content": piece}) for piece in _cut(content, cuts)]
    for place, (called, arguments) in enumerate(calls):
        first = {"index": place, "id": f"{name}{place}", "type": "function", "function": {"name": called}}
        made.append(stream_event({"tool_calls": [first]}))
        made += [
            stream_event({"tool_calls": [{"index": place, "function": {"arguments": piece}}]})
            for piece in _cut(arguments, cuts)
        ]
    return [*made, stream_event({}, "tool_calls" if calls else "stop")]


def _cut(text: str, cuts: list[int]) -> list[str]:
    cut, place = [], 0
    while text:
        size = cuts[place % len(cuts)]
        cut.append(text[:size])
        text, place = text[size:], place + 1
    return cut


@given(ANSWERS, st.lists(st.tuples(CUTS, st.integers(0, 20)), min_size=1, max_size=4))
def test_passthrough_answer_with_any_number_of_retries_is_complete_once(
    answer: tuple[str, list[tuple[str, str]]], attempts: list[tuple[list[int], int]]
) -> None:
    retold, data = MergedEvents("chatcmpl-1", "m", usage=False), b""
    for place, (cuts, upto) in enumerate(attempts):
        retold.again()
        message = _events(answer, cuts, f"attempt {place} ")
        last = place + 1 == len(attempts)
        data += b"".join(map(retold.event, message if last else message[:upto]))
    whole, events = collected_answer(data)
    expected = ChoiceSoFar()
    for item in _events(answer, [1], ""):
        expected.add(item["choices"][0])
    for facts in (whole.facts, expected.facts):
        for name in [name for name in facts if name.startswith("id ")]:
            facts.pop(name)
    assert {name: text for name, text in whole.texts.items() if text} == {
        name: text for name, text in expected.texts.items() if text
    }
    assert whole.facts == expected.facts
    assert sum(bool(entry["choices"][0]["finish_reason"]) for entry in events) == 1


def test_difference_between_retried_answers_is_detected_in_any_field() -> None:
    for first, second in (
        ({"content": "ab"}, {"content": "ac"}),
        (tool_call_delta("look"), tool_call_delta("see")),
        (tool_call_delta("look", "12"), tool_call_delta("look", "13")),
    ):
        retold = MergedEvents("n", "m", usage=False)
        retold.event(stream_event(first))
        retold.again()
        with pytest.raises(DifferentAnswer):
            retold.event(stream_event(second))


def test_usage_is_sent_only_to_clients_that_asked_for_it() -> None:
    last = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3}}
    assert MergedEvents("n", "m", usage=False).event(last) == b""
    assert b'"prompt_tokens":3' in MergedEvents("n", "m", usage=True).event(last)

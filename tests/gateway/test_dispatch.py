"""Two attempts at once, over engines that only exist here: one answer, one end, and nobody who still works on it."""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_helpers import (
    LIES,
    Clock,
    DispatchHarness,
    FakeBrainLine,
    FakeEngines,
    RecordedAnswer,
    choice_request,
    dispatcher_of,
    plan_of,
    right_answer,
)
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.state.actions import Run
from potluck.core.state.events import (
    AttemptFailed,
    Event,
    FailureKind,
    FirstToken,
    RequestAdopted,
    RequestArrived,
)
from potluck.core.state.policy import Policy
from potluck.core.values.route import Route, Segment, aggregated, handed_over
from potluck.core.values.types import Request
from potluck.gateway.dispatch.active_request import HANDOVER_S, LEAST_FIRST_S, MOST_FIRST_S, MOST_S
from potluck.gateway.values import Endpoint


def test_exact_request_uses_no_codec_in_every_attempt() -> None:
    stage = DispatchHarness("a", "b", "c", "d", far=("a", "c"))
    stage.fleet.codecs = {("far", "near"): "int8", ("near", "near"): "int4", ("near", "far"): "int4"}
    what = choice_request(exact=True)
    stage.begin(what, Route((Segment("a", 0, 5), Segment("b", 5, 12), Segment("c", 12, None))))
    stage.again(what, handed_over("b", "a", 12), 1, 0)
    arrived = stage.line.told[0]
    assert isinstance(arrived, RequestArrived)
    assert arrived.request.exact
    assert [call.replica for call in stage.fleet.sent] == ["a", "b", "c", "b", "a"]
    assert not [call.replica for call in stage.fleet.sent if "codec" in call.body]


SPLIT = Route((Segment("a", 0, 5), Segment("b", 5, 12), Segment("c", 12, None)))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("after", [aggregated("d"), handed_over("d", "c", 12), SPLIT])
@pytest.mark.parametrize("before", [aggregated("a"), handed_over("a", "b", 12), SPLIT])
def test_cache_salt_is_the_same_in_every_segment_and_attempt_of_a_request(
    before: Route, after: Route, own: bool
) -> None:
    stage = DispatchHarness()
    for replica in "abcd":
        stage.fleet.add(replica, own=own)
    body = {"own": True, "path": b"/v1/completions", "body": b'{"model":"m"}'} if own else {}
    what = choice_request(salt="of-a-tenant", tenant="t", **body)
    stage.begin(what, before)
    for replica in "abcd":
        stage.fleet.kill(replica)
    stage.again(what, after, 1, 0)
    assert len(stage.fleet.sent) == len(before.segments) + len(after.segments)
    assert [call.body["salt"] for call in stage.fleet.sent] == ["of-a-tenant"] * len(stage.fleet.sent)
    assert {call.body["tenant"] for call in stage.fleet.sent} == {"t"}


def test_cache_salt_is_the_same_after_streamed_tokens_and_several_failures() -> None:
    stage = DispatchHarness("a", "b", "c")
    what = choice_request(salt="of-a-tenant", most=30, ends=())
    heard = stage.begin(what, aggregated("a"))
    for attempt, (failing, following) in enumerate((("a", "b"), ("b", "c"), ("c", "a")), 1):
        stage.call(failing).step(3)
        stage.fleet.kill(failing)
        stage.again(what, aggregated(following), attempt, len(heard.received))
    stage.run_to_end()
    heard.assert_right()
    assert [call.body["salt"] for call in stage.fleet.sent] == ["of-a-tenant"] * 4


def test_cache_salt_is_sent_for_a_request_resumed_from_another_process() -> None:
    stage = DispatchHarness("a")
    what = choice_request(salt="of-a-tenant", most=30, ends=())
    stage.dispatcher.resume(what, RecordedAnswer(what), right_answer(what)[:4])
    stage.again(what, aggregated("a"), 1, 4)
    assert stage.call("a").body["salt"] == "of-a-tenant"


def test_engine_whose_answers_all_stall_fails_all_its_requests() -> None:
    stage = DispatchHarness("x")
    heards = [
        stage.begin(choice_request(name, most=30, ends=()), aggregated("x")) for name in ("a", "b", "c")
    ]
    for _ in range(10):
        stage.clock.pass_s(0.02)
        stage.fleet.step_all()
    stage.clock.pass_s(MOST_S + 1)
    failed = [item for item in stage.news if isinstance(item, AttemptFailed)]
    assert {(item.request, item.kind, item.where) for item in failed} == {
        (name, "replica", "x") for name in ("a", "b", "c")
    }
    assert [len(heard.received) for heard in heards] == [item.streamed_tokens for item in failed]


def test_stalled_answer_fails_alone_while_others_of_its_engine_progress() -> None:
    stage = DispatchHarness("x")
    stage.begin(choice_request("a", most=9999, ends=()), aggregated("x"))
    stage.begin(choice_request("b", most=9999, ends=()), aggregated("x"))
    flowing, still = stage.fleet.sent
    still.step()
    for _ in range(400):
        stage.clock.pass_s(0.4)
        flowing.step()
    failed = [item for item in stage.news if isinstance(item, AttemptFailed)]
    assert failed == [AttemptFailed("b", 0, "timeout", "x", 1)]
    assert flowing.live


def test_long_prefill_is_awaited_up_to_a_limit() -> None:
    stage = DispatchHarness("x")
    stage.begin(choice_request(), aggregated("x"))
    stage.clock.pass_s(LEAST_FIRST_S - 1)
    assert stage.news == []
    stage.clock.pass_s(MOST_FIRST_S)
    assert stage.news == [AttemptFailed("r", 0, "replica", "x", 0)]


def test_silent_engine_that_left_the_directory_fails_its_requests() -> None:
    stage = DispatchHarness("x", "y")
    stage.begin(choice_request("a", most=99, ends=()), aggregated("x"))
    stage.begin(choice_request("b", most=99, ends=()), aggregated("y"))
    del stage.fleet.endpoints["x"], stage.fleet.endpoints["y"]
    for _ in range(20):
        stage.clock.pass_s(0.2)
        stage.call("y").step()  # Said to be gone, but it streams: nobody loses anything.
    assert [item for item in stage.news if isinstance(item, AttemptFailed)] == [
        AttemptFailed("a", 0, "replica", "x", 0)
    ]


def test_engine_reported_silent_fails_requests_whose_answers_do_not_progress() -> None:
    """Long before its own limits: a prompt that is computed says nothing for a long time."""
    stage = DispatchHarness("x", "y")
    stage.begin(choice_request("a", most=99, ends=()), aggregated("x"))
    stage.begin(choice_request("b", most=99, ends=()), aggregated("y"))
    for _ in range(20):
        stage.clock.pass_s(0.05)
        stage.call("y").step()
    for replica in ("x", "y"):
        stage.dispatcher.gone(replica)
    assert stage.clock.now_s() < LEAST_FIRST_S
    assert [item for item in stage.news if isinstance(item, AttemptFailed)] == [
        AttemptFailed("a", 0, "replica", "x", 0)
    ]


@pytest.mark.parametrize(
    ("steps", "silent", "kind", "where"),
    [(0, "p", "replica", "p"), (1, "p", "replica", "p"), (2, "", "transfer", "d"), (3, "d", "replica", "d")],
)
def test_stall_before_the_first_token_is_attributed_to_its_cause(
    steps: int, silent: str, kind: FailureKind, where: str
) -> None:
    stage = DispatchHarness("p", "d")
    stage.begin(choice_request(), handed_over("p", "d", 10))
    for _ in range(steps):
        stage.call("p").step()
    stage.clock.pass_s(max(MOST_FIRST_S, HANDOVER_S) + 1)
    assert [item for item in stage.news if isinstance(item, AttemptFailed)] == [
        AttemptFailed("r", 0, kind, where, 0)
    ]


def test_stall_of_the_gateway_process_is_not_attributed_to_engines() -> None:
    stage = DispatchHarness("x")
    heard = stage.begin(choice_request(), aggregated("x"))
    stage.call("x").step()
    stage.clock.now += 100.0  # Timers could not fire.
    stage.clock.pass_s(0.3)
    assert stage.news == [FirstToken("r", 0)]
    stage.run_to_end()
    heard.assert_right()


def known_request(name: str = "r") -> Request:
    what = choice_request(name, 20, 12)
    return Request(name, "m", 0.0, what.prompt_tokens, what.max_output_tokens)


def renamed_replica(endpoint: Endpoint) -> str | None:
    return f"new-{endpoint.replica}"


def adoption_event(stage: DispatchHarness, name: str = "r") -> Event | None:
    return stage.dispatcher.whereabouts(name, renamed_replica)


def test_unsent_request_is_reported_to_a_new_brain_as_arrived() -> None:
    stage = DispatchHarness("x")
    stage.dispatcher.begin(choice_request("r", 20, 12), RecordedAnswer(choice_request("r", 20, 12)))
    event = adoption_event(stage)
    assert isinstance(event, RequestArrived)
    assert event.request == known_request()


def test_running_request_is_reported_to_a_new_brain_with_its_route() -> None:
    stage = DispatchHarness("x", "y")
    heard = stage.begin(choice_request("r", 20, 12), handed_over("x", "y", 20))
    assert adoption_event(stage) == RequestAdopted(
        known_request(), 0, 0, handed_over("new-x", "new-y", 20), 0, False
    )
    while not heard.received:
        stage.fleet.step_all()
    event = adoption_event(stage)
    assert isinstance(event, RequestAdopted)
    assert (event.route, event.first) == (handed_over("new-x", "new-y", 20), True)
    assert stage.dispatcher.whereabouts("r", lambda each: None) is None, "nobody knows it yet"
    stage.run_to_end()
    assert stage.dispatcher.names() == []
    heard.assert_right()


def test_failed_request_is_reported_to_a_new_brain_with_its_streamed_tokens() -> None:
    stage = DispatchHarness("x", "y")
    heard = stage.begin(choice_request("r", 20, 12, ends=()), aggregated("x"))
    while len(heard.received) < 3:
        stage.fleet.step_all()
    streamed = len(heard.received)
    stage.fleet.kill("x")
    assert stage.dispatcher.whereabouts("r", lambda each: None) == RequestAdopted(
        known_request(), 0, streamed, None
    )
    stage.dispatcher.act([Run("r", aggregated("y"), 1, 20 + streamed, streamed)])
    event = adoption_event(stage)
    assert isinstance(event, RequestAdopted)
    assert (event.attempt, event.streamed_tokens, event.first) == (1, streamed, False)
    stage.run_to_end()
    heard.assert_right()


FLEETS: dict[str, list[list[Any]]] = {
    "whole": [["mixed"]] * 4,
    "combos": [["prefill", "decode", "decode"], ["prefill", "decode"]],
    "both": [["mixed"], ["prefill", "decode"], ["mixed"]],
}
LIE = sorted(LIES)
STATUS = [
    (503, "draining"),
    (409, "role"),
    (424, "hand_over"),
    (502, "hand_over"),
    (403, "not_a_peer"),
    (500, None),
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["step"] * 8
            + ["wait", "kill", "lie", "refuse", "cut", "late", "double", "stop", "part", "gone", "pause"]
        ),
        st.integers(0, 1000),
        st.integers(1, 5),
    ),
    max_size=60,
)
TROUBLES = 6  # At most so many, so that no request is sent more often than the Brain allows.


@pytest.mark.parametrize("fleet_name", FLEETS)
@given(steps=STEPS, requests=st.integers(1, 5), most=st.integers(1, 15))
def test_every_request_gets_its_exact_answer_despite_failures(
    fleet_name: str, steps: list[tuple[str, int, int]], requests: int, most: int
) -> None:
    clock, fleet = Clock(), FakeEngines()
    brain_loop = FakeBrainLine(clock, fleet, plan_of(FLEETS[fleet_name]), Policy(retries=99))
    dispatcher = dispatcher_of(brain_loop, fleet, clock)
    heards = []
    for number in range(requests):
        heard = RecordedAnswer(choice_request(f"r{number}", 20 + number, most, min_tokens=number % 2))
        heards.append(heard)
        dispatcher.begin(heard.asked, heard)
    left = TROUBLES
    for what, pick, lines in steps:
        clock.pass_s(0.01)
        calls = list(fleet.calls)
        if not calls:
            brain_loop.tick(0.5)
            continue
        call = calls[pick % len(calls)]
        if what == "step":
            call.step(lines)
        elif what == "wait":
            brain_loop.tick(0.5)
        elif what == "pause":
            dispatcher.room(call.body["request"], lines > 2)
        elif left > 0:
            left -= 1
            if what == "kill":
                fleet.kill(call.replica)
            elif what == "lie":
                call.write_raw(LIES[LIE[pick % len(LIE)]]) if call.place else call.end()
            elif what == "refuse":
                call.refuse(*STATUS[pick % len(STATUS)]) if not call.place else call.lose()
            elif what == "cut":
                call.write_raw(b'{"token":')
                call.end()
            elif what == "late":  # It was given up, and does not know yet.
                dispatcher.room(call.body["request"], True)
                call.lose()
                call.listener.data(b'{"token":3}\n')
                call.listener.done()
            elif what == "double" and call.output:
                call.write_raw(b'{"handle":"x"}\n')
            elif what == "stop":
                left -= 2  # nobody else is heard of meanwhile either: each of these costs several attempts
                fleet.stopped.add(call.replica)
                for _ in range(16):
                    brain_loop.tick(2.0)
                fleet.stopped.clear()
            elif what == "gone":
                fleet.kill(call.replica)
                endpoint = fleet.endpoints.pop(call.replica)
                brain_loop.tick(1.5)
                fleet.endpoints[call.replica] = endpoint
            else:
                call.write_raw(b'{"tok')
                call.end()
    for heard in heards:
        dispatcher.room(heard.asked.id, True)
    for _ in range(200):
        while fleet.step_all(3):
            pass
        if not len(dispatcher):
            break
        brain_loop.tick()
    for heard in heards:
        heard.assert_right()
    assert dispatcher.sizes() == {"open": 0, "watched": 0, "news": 0}
    assert brain_loop.brain.requests == {}
    assert not any(view.open_requests for view in brain_loop.brain.fleet.views.values())
    assert not fleet.calls
    attempts = [(item.request, item.attempt) for item in brain_loop.told if isinstance(item, AttemptFailed)]
    assert len(set(attempts)) == len(attempts), "an attempt fails once"

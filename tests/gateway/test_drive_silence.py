"""Engines that stop talking: how long that is borne, and whom it is put down to."""

from __future__ import annotations

import pytest
from drive_kit import asked
from drive_stage import Stage

from potluck.core.state.events import AttemptFailed, FailureKind, FirstToken
from potluck.core.values.route import aggregated, handed_over
from potluck.gateway.dispatch.silence import HANDOVER_S, LEAST_FIRST_S, MOST_FIRST_S, MOST_S


def test_an_engine_whose_answers_all_stop_is_dead_for_all_of_them() -> None:
    stage = Stage("x")
    heards = [stage.begin(asked(name, most=30, ends=()), aggregated("x")) for name in ("a", "b", "c")]
    for _ in range(10):
        stage.clock.pass_s(0.02)
        stage.fleet.step_all()
    stage.clock.pass_s(MOST_S + 1)
    failed = [each for each in stage.news if isinstance(each, AttemptFailed)]
    assert {(each.request, each.kind, each.where) for each in failed} == {
        (name, "replica", "x") for name in ("a", "b", "c")
    }
    assert [len(each.tokens_) for each in heards] == [each.streamed_tokens for each in failed]


def test_one_answer_that_stands_still_while_others_go_on_fails_alone() -> None:
    stage = Stage("x")
    stage.begin(asked("a", most=9999, ends=()), aggregated("x"))
    stage.begin(asked("b", most=9999, ends=()), aggregated("x"))
    flowing, still = stage.fleet.sent
    still.step()
    for _ in range(400):
        stage.clock.pass_s(0.4)
        flowing.step()
    failed = [each for each in stage.news if isinstance(each, AttemptFailed)]
    assert failed == [AttemptFailed("b", 0, "timeout", "x", 1)]
    assert flowing.live


def test_a_long_prompt_is_waited_for_and_an_engine_that_is_silent_for_ever_is_not() -> None:
    stage = Stage("x")
    stage.begin(asked(), aggregated("x"))
    stage.clock.pass_s(LEAST_FIRST_S - 1)
    assert stage.news == []
    stage.clock.pass_s(MOST_FIRST_S)
    assert stage.news == [AttemptFailed("r", 0, "replica", "x", 0)]


def test_one_that_left_the_directory_and_says_nothing_is_dead() -> None:
    stage = Stage("x", "y")
    stage.begin(asked("a", most=99, ends=()), aggregated("x"))
    stage.begin(asked("b", most=99, ends=()), aggregated("y"))
    del stage.fleet.endpoints["x"], stage.fleet.endpoints["y"]
    for _ in range(20):
        stage.clock.pass_s(0.2)
        stage.call("y").step()  # Said to be gone, but it streams: nobody loses anything.
    assert [each for each in stage.news if isinstance(each, AttemptFailed)] == [
        AttemptFailed("a", 0, "replica", "x", 0)
    ]


def test_one_that_is_said_to_be_silent_fails_its_requests_unless_its_answers_flow() -> None:
    """Long before its own limits: a prompt that is computed says nothing for a long time."""
    stage = Stage("x", "y")
    stage.begin(asked("a", most=99, ends=()), aggregated("x"))
    stage.begin(asked("b", most=99, ends=()), aggregated("y"))
    for _ in range(20):
        stage.clock.pass_s(0.05)
        stage.call("y").step()
    for replica in ("x", "y"):
        stage.dispatcher.gone(replica)
    assert stage.clock.now_s() < LEAST_FIRST_S
    assert [each for each in stage.news if isinstance(each, AttemptFailed)] == [
        AttemptFailed("a", 0, "replica", "x", 0)
    ]


@pytest.mark.parametrize(
    ("steps", "silent", "kind", "where"),
    [(0, "p", "replica", "p"), (1, "p", "replica", "p"), (2, "", "transfer", "d"), (3, "d", "replica", "d")],
)
def test_a_stall_on_the_way_to_the_first_token_is_put_down_to_whom_it_hangs_on(
    steps: int, silent: str, kind: FailureKind, where: str
) -> None:
    stage = Stage("p", "d")
    stage.begin(asked(), handed_over("p", "d", 10))
    for _ in range(steps):
        stage.call("p").step()
    stage.clock.pass_s(max(MOST_FIRST_S, HANDOVER_S) + 1)
    assert [each for each in stage.news if isinstance(each, AttemptFailed)] == [
        AttemptFailed("r", 0, kind, where, 0)
    ]


def test_time_in_which_this_process_stood_still_is_not_held_against_engines() -> None:
    stage = Stage("x")
    heard = stage.begin(asked(), aggregated("x"))
    stage.call("x").step()
    stage.clock.now += 100.0  # Timers could not fire.
    stage.clock.pass_s(0.3)
    assert stage.news == [FirstToken("r", 0)]
    stage.to_end()
    heard.is_right()

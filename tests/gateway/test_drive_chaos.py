"""Whatever engines do, at whatever point: every request gets exactly its right answer, and nothing is left over.

A real Brain decides; engines draw each token from the history, so that one token repeated, lost or taken from an
attempt that is over makes the answer a wrong one.
"""

from __future__ import annotations

from typing import Any

import pytest
from drive_kit import Clock, Desk, Fleet, Heard, asked, driver, plan_of
from drive_stage import LIES
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.state.events import AttemptFailed
from potluck.core.state.policy import Policy

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
TROUBLES = 6
"""At most so many, so that no request is sent more often than the Brain allows."""


@pytest.mark.parametrize("fleet_name", FLEETS)
@given(steps=STEPS, requests=st.integers(1, 5), most=st.integers(1, 15), hedge=st.sampled_from([0.0, 2.0]))
def test_every_request_gets_its_right_answer(
    fleet_name: str, steps: list[tuple[str, int, int]], requests: int, most: int, hedge: float
) -> None:
    clock, fleet = Clock(), Fleet()
    brain_loop = Desk(clock, fleet, plan_of(FLEETS[fleet_name]), Policy(retries=99, hedge=hedge))
    dispatcher = driver(brain_loop, fleet, clock)
    heards = []
    for number in range(requests):
        heard = Heard(asked(f"r{number}", 20 + number, most, min_tokens=number % 2))
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
        heard.is_right()
    assert dispatcher.sizes() == {"open": 0, "watched": 0, "news": 0}
    assert brain_loop.brain.requests == {}
    assert brain_loop.brain.sizes()["twins"] == 0
    assert not any(view.open_requests for view in brain_loop.brain.fleet.views.values())
    assert not fleet.calls
    attempts = [(each.request, each.attempt) for each in brain_loop.told if isinstance(each, AttemptFailed)]
    assert len(set(attempts)) == len(attempts), "an attempt fails once"

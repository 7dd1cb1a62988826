"""Penalties and formats on their way to engines: what goes on elsewhere, and what no engine can do."""

from __future__ import annotations

import json

import pytest
from drive_kit import asked
from drive_stage import Stage

from potluck.api.segments import UNSUPPORTED
from potluck.core.state.events import AttemptFailed, RequestCancelled
from potluck.core.values.route import aggregated, handed_over
from potluck.core.values.sampling import Sampling


def test_whoever_goes_on_is_told_what_was_output_and_how_it_is_drawn() -> None:
    stage = Stage("x", "y")
    way = Sampling(0.5, seed=3, presence_penalty=1.0, logit_bias=((4, -2.0),), json_schema="{}")
    heard = stage.begin(what := asked(sampling=way), aggregated("x"))
    said = {
        "temperature": 0.5,
        "seed": 3,
        "presence_penalty": 1.0,
        "logit_bias": [[4, -2.0]],
        "json_schema": "{}",
    }
    body = stage.call("x").body
    assert (body["sampling"], "generated" in body) == (said, False)
    stage.call("x").step(3)
    stage.fleet.kill("x")
    stage.again(what, aggregated("y"), 1, 3)
    body = stage.call("y").body
    assert (body["sampling"], body["generated"]) == (said, 3)
    assert body["tokens"] == [*what.prompt, *heard.tokens_]
    stage.to_end()
    heard.is_right()


@pytest.mark.parametrize("handed", [False, True])
def test_what_no_engine_can_do_is_the_clients_to_know_and_nobodys_fault(handed: bool) -> None:
    stage = Stage("x", "y")
    route = handed_over("x", "y", 20) if handed else aggregated("y")
    heard = stage.begin(asked(sampling=Sampling(json_schema="{}")), route)
    stage.call("y").refuse(400, UNSUPPORTED)
    assert (heard.status, json.loads(heard.relayed)["error"]["code"]) == (400, UNSUPPORTED)
    assert stage.turns == [RequestCancelled("r")]
    stage.at_rest()


@pytest.mark.parametrize("streamed", [0, 2])
def test_a_grammar_that_fails_on_the_way_ends_the_answer_alone(streamed: int) -> None:
    stage = Stage("x")
    heard = stage.begin(asked(sampling=Sampling(json_schema="{}")), aggregated("x"))
    if streamed:
        stage.call("x").step(streamed)
    counts = {"prompt_tokens": 20, "cached_tokens": 0, "output_tokens": streamed}
    stage.call("x").write({"ended": "error", "code": UNSUPPORTED, "problem": "too complex", **counts})
    if streamed:
        assert heard.refusal is not None
        assert heard.refusal.reason == "lost"
    else:
        assert heard.status == 400
        assert json.loads(heard.relayed)["error"]["param"] == "response_format"
    assert not any(isinstance(each, AttemptFailed) for each in stage.news)

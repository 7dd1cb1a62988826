"""Nothing is left of requests that are over, but for how they ended."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
from drive_kit import asked
from drive_stage import Stage

from potluck.core.values.route import Route, Segment
from potluck.gateway.dispatch.segment_attempt import SegmentAttempt


@pytest.mark.parametrize("end", ["answered", "cancelled", "failed"])
def test_what_is_over_is_gone_without_the_collector_of_garbage(end: str) -> None:
    """Prompt and answer would wait there for thousands of others."""
    stage = Stage("a", "b")
    what = asked()
    heard = stage.begin(what, Route((Segment("a", 0, 5), Segment("b", 5, None))))
    trips = [each for each in gc.get_objects() if type(each) is SegmentAttempt]
    here = [ref(each) for each in trips if each._request.asked is what]
    del trips
    assert len(here) == 1
    gc.disable()
    try:
        if end == "answered":
            stage.to_end()
            heard.is_right()
        elif end == "cancelled":
            stage.dispatcher.cancel(what.id)
        else:
            stage.fleet.kill("b")
            stage.dispatcher.cancel(what.id)
        stage.at_rest()
        stage.fleet.sent.clear()
        assert here[0]() is None
    finally:
        gc.enable()

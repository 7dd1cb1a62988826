"""What engines say: read strictly, and put together into how links fare."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import PotluckError
from potluck.core.state.events import CacheReported, LinkReported
from potluck.gateway.registry.engine_client import read_cache, read_status
from potluck.gateway.registry.health import LinkTraffic, link_reports

REPORT = {
    "model": "m",
    "fingerprint": "f",
    "role": "mixed",
    "state": "ready",
    "waiting": 2,
    "running": 3,
    "context_tokens": 100,
    "todo_tokens": 50,
    "free_blocks": 7,
    "total_blocks": 9,
    "block_tokens": 16,
    "max_tokens": 4096,
    "step_mean_s": 0.02,
    "uptime_s": 5.0,
    "kv": "127.0.0.1:9",
    "links": [{"peer": "127.0.0.1:8", "moved_bytes": 10, "goodput_bytes_per_s": 5.0, "queue_bytes": 0}],
}


def test_a_status_is_what_the_brain_is_told() -> None:
    said = read_status(json.dumps(REPORT).encode())
    assert tuple(said.status) == (2, 3, 50, 100, 7, 9, 0.02)
    assert said.links[0].peer == "127.0.0.1:8"
    idle = read_status(json.dumps({**REPORT, "waiting": 0, "running": 0}).encode())
    assert idle.status.step_s == 0.0


@pytest.mark.parametrize(
    "change",
    [{"running": -1}, {"running": "3"}, {"running": True}, {"state": "fine"}, {"model": 3}, {"links": 3}],
)
def test_a_status_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(PotluckError):
        read_status(json.dumps({**REPORT, **change}).encode())


KEYS = st.sampled_from(["epoch", "reports", "sequence", "added", "state", "links"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_only_ever_refused(body: bytes) -> None:
    for read in (read_status, lambda raw: read_cache("a", raw)):
        with suppress(PotluckError):
            read(body)


def test_cache_reports_keep_their_numbers_and_names() -> None:
    body = {
        "epoch": 77,
        "reports": [{"sequence": 4, "whole": True, "added": [f"{1 << 100:032x}"], "removed": []}],
    }
    epoch, reports = read_cache("a", json.dumps(body).encode())
    assert epoch == 77
    assert reports == (CacheReported("a", 4, (1 << 100,), epoch=1, whole=True),)


def test_a_link_is_slow_only_where_bytes_wait_for_it() -> None:
    planned = {("e", "w"): 8.0, ("w", "e"): 8.0}
    waiting = {
        ("e", "w"): LinkTraffic(1e8, 1.0, queued_bytes=5e8),
        ("w", "e"): LinkTraffic(1e8, 1.0, queued_bytes=5e7),
    }
    slow, idle = link_reports(waiting, planned, 1.0)
    assert slow == LinkReported("e", "w", 0.1, 5e8, pytest.approx(0.8))
    assert idle.gbps == 8.0
    quiet = link_reports({}, planned, 1.0)
    assert all(each.utilisation == 0 and each.gbps == 8.0 for each in quiet)

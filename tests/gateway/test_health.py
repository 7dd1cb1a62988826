"""Engine health, link reports and cache reports from engine status."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import FormatError, PotluckError
from potluck.core.state.events import (
    CacheReported,
    LinkReported,
    ReplicaReported,
    ReplicaSilent,
    ReplicaStatus,
)
from potluck.gateway.registry.engine_client import (
    LEAST_S,
    MOST_S,
    EngineRecord,
    LinkCounters,
    ResponseTimes,
    StatusReport,
    read_cache,
    read_status,
)
from potluck.gateway.registry.engine_list import EngineEntry
from potluck.gateway.registry.health import (
    AGAIN_S,
    CRAWLS_S,
    FLOWS_S,
    IDLE_S,
    POLL_S,
    SAME_S,
    SILENT_S,
    WINDOW_S,
    EmulationLag,
    HealthChecker,
    LinkTraffic,
    caches_differ,
    crawls,
    link_reports,
    next_question_s,
    restarted,
    slow_lines,
)
from potluck.gateway.values import Address, Endpoint

SAID = StatusReport("m", "f", "mixed", "ready", "", 1.0, ReplicaStatus(0, 0, 0, 0, 1, 1, 0.0), (), "")


def _health_checker() -> tuple[HealthChecker, EngineRecord, list[tuple[Any, ...]]]:
    ends = {
        name: Endpoint(name, "m", region, Address("h", port), kv=f"h:{port}")
        for name, region, port in (("a", "east", 1), ("b", "west", 2))
    }
    receiver = EngineRecord(EngineEntry("http://h:2"), up=True, replica="b", heard_s=1e12)
    registry = SimpleNamespace(
        endpoints=tuple(ends.values()), engines=(receiver,), find=ends.get, codec=lambda *names: "int4"
    )
    watch = HealthChecker(
        registry, lambda event: None, caches=False, planned_gbps={("east", "west"): 8.0}, views={}
    )  # type: ignore[arg-type]
    moved: list[tuple[Any, ...]] = []
    watch.moved = lambda *what: moved.append(what)
    return watch, receiver, moved


def test_received_kv_bytes_are_counted_once_per_replica_and_link() -> None:
    watch, receiver, moved = _health_checker()
    receiver.said = replace(
        SAID, links=(LinkCounters("h:1", 1e6, 5e5, 0.0), LinkCounters("elsewhere:9", 0, 0, 70.0))
    )
    passed = watch._passed()["east", "west"]
    assert (passed.moved_bytes, passed.busy_s) == (1e6, 2.0)
    assert watch._passed() == {}, "nothing more came"
    receiver.said = replace(SAID, links=(LinkCounters("h:1", 3e6, 5e5, 0.0),))
    watch._passed()
    assert moved == [("a", "b", "int4", 1_000_000, 2.0), ("a", "b", "int4", 2_000_000, 4.0)]


def test_queued_bytes_of_a_sender_count_for_every_link_from_its_region() -> None:
    watch, engine, _ = _health_checker()
    engine.replica = "a"
    engine.said = replace(SAID, links=(LinkCounters("h:55", 0, 0, 70.0),))
    assert watch._passed()["east", "west"].queued_bytes == 70.0


def test_retransmitted_segments_are_reported_as_a_share() -> None:
    watch, engine, _ = _health_checker()
    engine.replica = "a"
    for total, expected in ((0.0, 0.0), (40.0, 40.0), (40.0, 0.0), (100.0, 60.0), (3.0, 0.0)):
        engine.said = replace(SAID, links=(LinkCounters("h:55", 0, 0, 0.0, total),))
        assert watch._passed()["east", "west"].resent_segments == expected
    sent = LinkTraffic(99 * 1448.0, 0.5, 0.0, 1.0)
    for gbps, lost in (
        (0.008, 0.01),
        (8.0, 0.0),
    ):  # of a wide link's second it is next to nothing, and says nothing
        (report,) = link_reports({("east", "west"): sent}, {("east", "west"): gbps}, 1.0)
        assert report.lost_share == pytest.approx(lost)


def test_counters_of_a_restarted_engine_start_from_zero() -> None:
    watch, receiver, moved = _health_checker()
    for total in (3e6, 1e6, 2e6):
        receiver.said = replace(SAID, links=(LinkCounters("h:1", total, 1e6, 0.0),))
        watch._passed()
    assert [what[3] for what in moved] == [3_000_000, 1_000_000]


def test_repeated_roster_does_not_trigger_link_reports() -> None:
    """A controller tells it twice a second: what crossed in such a moment would make any link seem full."""
    watch, engine, _ = _health_checker()
    message: list[object] = []
    watch._tell = message.append

    async def run() -> None:
        watch.meet()
        watch.meet()
        assert not message
        watch.look()
        assert engine.watching is not None
        engine.watching.cancel()

    asyncio.run(run())
    assert len(message) == 1, "a look at a tick does"


@pytest.mark.parametrize(
    ("rtt_s", "least_s", "others_s", "slow"),
    [
        (0.4, 1e-4, [2e-4], True),
        (0.4, 1e-4, [0.3, 2e-4], True),
        (0.4, 1e-4, [0.3], False),  # theirs are long, too: it is no line of its own
        (0.4, 1e-4, [], False),  # nobody else could do its work
        (0.4, 0.15, [2e-4], False),  # it is far away
        (0.1, 1e-4, [2e-4], False),
    ],
)
def test_connection_is_slow_only_when_its_rtt_exceeds_that_of_others(
    rtt_s: float, least_s: float, others_s: list[float], slow: bool
) -> None:
    assert crawls(rtt_s, least_s, others_s) == slow


@pytest.mark.parametrize(("role", "leaves"), [("mixed", False), ("mixed", True), ("decode", False)])
def test_engine_behind_a_slow_connection_is_avoided_for_a_while(
    role: str, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def status(engine: EngineRecord) -> StatusReport:
        return SAID

    watch, engine, _ = _health_checker()
    now_s, told, rtts_s = [100.0], list[object](), iter((2e-4, 0.4, 2e-4, 2e-4, 2e-4))
    monkeypatch.setattr("potluck.gateway.registry.health.time.monotonic", lambda: now_s[0])
    other = EngineRecord(EngineEntry("http://h:1"), replica="a", rtt_s=2e-4)
    watch._registry.engines = (engine, other)  # type: ignore[misc]
    watch._registry.caller = SimpleNamespace(status=status, rtt_s=lambda _: next(rtts_s))  # type: ignore[assignment]
    watch._registry.heard = lambda engine: None  # type: ignore[method-assign]
    member = SimpleNamespace(model="m", region="east")
    watch._views = {"b": SimpleNamespace(role="mixed", member=member, serves=True, doubted=False)}  # type: ignore[dict-item]
    watch._views |= {"a": SimpleNamespace(role=role, member=member, serves=True, doubted=False)}  # type: ignore[dict-item,operator]
    watch._tell = told.append
    for step_s in (SAME_S, SAME_S, CRAWLS_S / 2, CRAWLS_S / 2, 0.0):
        asyncio.run(watch._ask(engine))
        now_s[0] += step_s
        watch._views["b"].serves = len(told) < 2  # type: ignore[misc]
        watch._views["a"].serves = not (leaves and len(told) > 1)  # type: ignore[misc]
    fine, after = ReplicaReported("b", SAID.status), 3 if leaves else 1
    assert told == ([fine, ReplicaSilent("b", CRAWLS_S)] + [fine] * after if role == "mixed" else [fine] * 5)


def test_engine_slower_than_its_limit_is_silent_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time is steps that passed here, not seconds of a clock: whoever is slow himself waits for longer."""
    monkeypatch.setattr("potluck.gateway.registry.health.WAIT_S", 1e-3)
    watch, engine, _ = _health_checker()
    silent: list[float] = []
    message: list[object] = []
    answer = asyncio.Event()

    def hear(each: EngineRecord) -> None:
        silent.append(each.waited_s)
        if len(silent) == 3:
            answer.set()

    async def status(engine: EngineRecord) -> StatusReport:
        await answer.wait()
        return SAID

    watch._registry.caller = SimpleNamespace(status=status, rtt_s=lambda _: 0.0)  # type: ignore[assignment]
    watch._registry.silent = hear  # type: ignore[method-assign]
    watch._registry.heard = lambda engine: None  # type: ignore[method-assign]
    watch._tell = message.append
    engine.answers = ResponseTimes(1e-9)
    engine.told = (1e12, ReplicaReported("b", SAID.status))
    asyncio.run(watch._ask(engine))
    assert silent == pytest.approx([LEAST_S, LEAST_S + AGAIN_S, LEAST_S + 2 * AGAIN_S], abs=5e-3)
    assert engine.waited_s == 0.0
    assert message == [ReplicaReported("b", SAID.status)], "that it answers again is news, whatever it says"
    asyncio.run(watch._ask(engine))
    assert len(silent) == 3


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_next_status_query_time_depends_on_the_last_sign_of_life(
    answered_s: float, streamed_s: float
) -> None:
    """So that one which dies with requests is noticed no later than were it always asked every POLL_S."""
    assert next_question_s("suspected", answered_s, streamed_s) == answered_s + POLL_S
    busy_s = next_question_s("busy", answered_s, streamed_s)
    assert answered_s + POLL_S <= busy_s <= answered_s + FLOWS_S
    assert busy_s <= max(answered_s, streamed_s) + POLL_S
    assert next_question_s("idle", answered_s, streamed_s) == answered_s + IDLE_S
    assert IDLE_S + LEAST_S < SILENT_S, "one that is idle gets no request when it was silent for so long"


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        ({}, "idle"),
        ({"open_requests": 1}, "busy"),
        ({"running": 1}, "busy"),  # another gateway's
        ({"connected": False}, "busy"),  # it died, perhaps
        ({"doubted": True}, "suspected"),
        ({"asked_s": 2e12}, "suspected"),  # and did not answer
        ({"up": False}, "suspected"),
        ({"replica": ""}, "suspected"),
        ({"links": (LinkCounters("h:1", 1, 1, 0.0),)}, "suspected"),
    ],
)
def test_engine_condition_follows_its_requests_connection_and_failures(
    change: dict[str, Any], condition: str
) -> None:
    watch, engine, _ = _health_checker()
    view = SimpleNamespace(open_requests=0, doubted=False)
    watch._views, connected = {"b": view}, change.get("connected", True)  # type: ignore[dict-item]
    watch._registry.caller = SimpleNamespace(connected=lambda engine: connected)  # type: ignore[assignment]
    running = SAID.status._replace(running=change.get("running", 0))
    engine.said = replace(SAID, status=running, links=change.get("links", ()))
    for name, value in change.items():
        for target in (view, engine):
            if hasattr(target, name):
                setattr(target, name, value)
    assert watch._condition(engine) == condition


def test_idle_engine_is_queried_again_once_it_has_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.gateway.registry.health.POLL_S", 1e-3)
    watch, engine, _ = _health_checker()
    view, asked = SimpleNamespace(open_requests=0, doubted=False), asyncio.Event()
    watch._views = {"b": view}  # type: ignore[dict-item]
    watch._registry.caller = SimpleNamespace(connected=lambda engine: True)  # type: ignore[assignment]

    async def ask(each: EngineRecord) -> None:
        each.heard_s = 1e12
        asked.set()

    async def run() -> None:
        watch._ask = ask  # type: ignore[method-assign]
        watch.meet()
        await asked.wait()
        asked.clear()
        for _ in range(20):
            await asyncio.sleep(1e-3)
        assert not asked.is_set()
        view.open_requests = 1
        await asyncio.wait_for(asked.wait(), 60)
        assert engine.watching is not None
        engine.watching.cancel()

    monkeypatch.setattr("potluck.gateway.registry.health.IDLE_S", 1e9)
    asyncio.run(run())


def test_engine_restart_between_queries_is_detected_by_its_uptime() -> None:
    """A world's seed 60010: the gateway stood still for longer than the engine had run before."""
    assert restarted(-0.1, 0.5)
    assert not restarted(0.5, 0.5)
    assert not restarted(0.4, 2.0), "an answer that was on its way for long"
    assert restarted(0.2, 4.2), "4 s have passed, and it is hardly older"
    assert not restarted(4.0, 4.2)


def test_cache_report_is_requested_after_new_prefills_and_periodically() -> None:
    engine = EngineRecord(EngineEntry("http://h:2"), said=replace(SAID, prompt_tokens=7), cache_epoch=1)
    assert caches_differ(engine, 0.0), "it was never asked"
    engine.cached = 10.0, 7
    assert not caches_differ(engine, 10.0)
    assert caches_differ(engine, 10.0 + SAME_S), "what answers add, and what others sent there"
    engine.said = replace(SAID, prompt_tokens=8)
    assert caches_differ(engine, 10.0)
    engine.cached, engine.said = (10.0, -1), SAID
    assert caches_differ(engine, 10.0), "one that does not say is asked each time"
    engine.cached, engine.said, engine.cache_epoch = (10.0, 7), replace(SAID, prompt_tokens=7), None
    assert caches_differ(engine, 10.0), "the Brain lacks a report"


def test_response_time_limit_of_an_engine_is_learned_from_its_answers() -> None:
    new = ResponseTimes()
    assert new.limit_s == MOST_S, "of one that is new nothing is known"
    quick = new
    for _ in range(200):
        quick = quick.heard(0.01)
    assert quick.limit_s == LEAST_S
    froze = quick.heard(30.0)
    assert LEAST_S < froze.limit_s <= 2 * LEAST_S, "one that was stopped once is not waited for much longer"
    busy = quick
    for _ in range(8):
        busy = busy.heard(1.5)
    assert busy.limit_s == MOST_S, "one that is slow now is given time after a few answers"
    for _ in range(200):
        busy = busy.heard(0.01)
    assert busy.limit_s == LEAST_S


def test_slow_machine_is_reported_and_a_fast_one_is_not() -> None:
    late = EmulationLag()
    assert slow_lines(late.slowdown) == []
    late.told("a", 5.0, 500.0)
    assert late.slowdown is None, "what an engine did before it was asked is its warming up"
    late.told("a", 6.0, 504.0)
    late.told("b", 0.0, 0.0)
    late.told("b", 1.0, 2.0)
    assert late.slowdown == pytest.approx(3.0), "4 s and 2 s of what should have been 2 s"
    assert slow_lines(late.slowdown) == [
        "this machine computes 3.0 times slower than the GPUs it stands for: "
        "latencies are the CPU's, not the plan's"
    ]
    for second in range(7, 7 + 20 * int(WINDOW_S)):
        late.told("a", float(second), 504.0 + second - 6.0)
    assert late.slowdown == pytest.approx(1.0, abs=0.01), "it keeps up by now"
    assert slow_lines(late.slowdown) == []
    late.told("a", 1.0, 9.0)
    late.told("a", 2.0, 10.0)
    assert late.slowdown == pytest.approx(1.0, abs=0.01), "an engine that was restarted counts from there"


def test_engines_without_emulation_report_no_slowdown() -> None:
    status = read_status(b'{"state": "ready"}')
    assert (status.predicted_s, status.took_s) == (0.0, 0.0)
    late = EmulationLag()
    for _ in range(3):
        late.told("a", status.predicted_s, status.took_s)
    assert late.slowdown is None
    with pytest.raises(FormatError, match="emulated_took_s"):
        read_status(b'{"state": "ready", "notes": {"emulated_took_s": "long"}}')


def test_health_watch_sums_the_emulation_times_of_engines() -> None:
    answers = iter((1.0, 2.0, 3.0))

    async def status(_: EngineRecord) -> StatusReport:
        seconds = next(answers)
        notes = {"emulated_predicted_s": seconds, "emulated_took_s": 2.5 * seconds}
        return read_status(json.dumps({"state": "ready", "notes": notes}).encode())

    registry = SimpleNamespace(caller=SimpleNamespace(status=status), heard=lambda engine: None)
    watch = HealthChecker(registry, lambda event: None, caches=False, planned_gbps={}, views={})  # type: ignore[arg-type]
    engine = EngineRecord(EngineEntry("http://h:2"))
    for _ in range(3):
        asyncio.run(watch._ask(engine))
    assert watch.lateness.slowdown == pytest.approx(2.5)


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


def test_engine_status_is_converted_to_a_replica_status() -> None:
    text = read_status(json.dumps(REPORT).encode())
    assert tuple(text.status) == (2, 3, 50, 100, 7, 9, 0.02)
    assert text.links[0].peer == "127.0.0.1:8"
    assert read_status(json.dumps({**REPORT, "waiting": 0, "running": 0}).encode()).status.step_s == 0.0


def test_wildcard_stage_addresses_are_replaced_by_the_engine_host() -> None:
    def kv(text: str, host: str) -> str:
        return read_status(json.dumps({**REPORT, "kv": text}).encode(), host).kv

    assert kv("0.0.0.0:9000,0.0.0.0:9001?layers=3,1", "pod") == "pod:9000,pod:9001?layers=3,1"
    assert kv("[::]:9000?tensor=2", "pod") == "pod:9000?tensor=2"
    assert kv("10.0.0.5:9000,0.0.0.0:9000?tensor=2&layers=3,1", "10.0.0.6") == (
        "10.0.0.5:9000,10.0.0.6:9000?tensor=2&layers=3,1"
    )
    assert kv("0.0.0.0:9000", "") == "0.0.0.0:9000"
    assert kv("", "pod") == ""


@pytest.mark.parametrize(
    "change",
    [
        {"running": -1},
        {"running": "3"},
        {"running": True},
        {"state": "fine"},
        {"model": 3},
        {"links": 3},
        {"kv": "?"},
    ],
)
def test_invalid_engine_status_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(PotluckError):
        read_status(json.dumps({**REPORT, **change}).encode())


KEYS = st.sampled_from(["epoch", "reports", "sequence", "added", "state", "links"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_status_bytes_raise_only_project_errors(body: bytes) -> None:
    for read in (read_status, lambda raw: read_cache("a", raw)):
        with suppress(PotluckError):
            read(body)


def test_cache_reports_keep_their_sequence_and_block_names() -> None:
    body = {
        "epoch": 77,
        "reports": [{"sequence": 4, "whole": True, "added": [f"{1 << 100:032x}"], "removed": []}],
    }
    epoch, reports = read_cache("a", json.dumps(body).encode())
    assert epoch == 77
    assert reports == (CacheReported("a", 4, (1 << 100,), epoch=1, whole=True),)


def test_link_is_reported_slow_only_with_queued_bytes() -> None:
    planned = {("e", "w"): 8.0, ("w", "e"): 8.0}
    waiting = {
        ("e", "w"): LinkTraffic(1e8, 1.0, queued_bytes=5e8),
        ("w", "e"): LinkTraffic(1e8, 1.0, queued_bytes=5e7),
    }
    slow, idle = link_reports(waiting, planned, 1.0)
    assert slow == LinkReported("e", "w", 0.1, 5e8, pytest.approx(0.8))
    assert idle.gbps == 8.0
    quiet = link_reports({}, planned, 1.0)
    assert all(item.utilisation == 0 and item.gbps == 8.0 for item in quiet)


def test_reason_of_an_engine_that_was_not_probed_yet_names_it() -> None:
    assert EngineRecord(EngineEntry("http://h:2")).note == "http://h:2 has not been probed yet"

"""`make demo`, a short day: every act shows its answer, no request is lost, nothing stays. And its pure parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from demo.acts import LAB, SHOP, ActEvidence, FleetLook, LoggedDecision, ReplicaLook, chosen, the_day
from demo.command import told
from demo.play import ActOutcome
from demo.traffic import RequestCounts, SentRequest, counted

from potluck.core.values.types import Slo
from potluck.loadgen.load_client import TimedRequest

WITHIN_S = 900.0
NONE = {SHOP: RequestCounts(), LAB: RequestCounts()}


def standing(name: str, role: str = "prefill", state: str = "ready", node: str = "1xL4") -> ReplicaLook:
    return ReplicaLook(name, role, state, "near", f"words: {role} {node} tp1", "http://127.0.0.1:1", 0)


def look(
    *replicas: ReplicaLook, usd: float = 2.0, threshold: float = 1000.0, moved: int = 0, crossed: float = 0.0
) -> FleetLook:
    return FleetLook(0.0, replicas, usd, threshold, 1000.0, crossed, moved, 0)


def seen(
    before: FleetLook,
    now: FleetLook,
    *decided: tuple[str, str],
    victim: str = "",
    why: str = "why",
    near_usd: float = 0.0,
) -> ActEvidence:
    lines = tuple(LoggedDecision(at + 1, kind, what, why) for at, (kind, what) in enumerate(decided))
    return ActEvidence(before, now, lines, NONE, NONE, victim, near_usd)


ACTS = {act.name: act for act in the_day()}


def test_an_answer_shows_only_where_the_service_said_and_did_it() -> None:
    one, two = look(standing("a")), look(standing("a"), standing("b"), usd=3.0)
    assert not ACTS["burst"].shown(seen(one, two)), "more replicas, and no plan that says why"
    assert not ACTS["burst"].shown(seen(one, one, ("plan", "p"))), "a plan, and no replica yet"
    assert ACTS["burst"].shown(seen(one, two, ("plan", "p")))
    assert "1 more replica serves, for $1.00 an hour more" in ACTS["burst"].result(
        seen(one, two, ("plan", "p"))
    )


def test_a_shift_is_answered_by_a_plan_for_the_lengths_and_by_what_is_done_for_it() -> None:
    act, one, lengths = ACTS["shift"], look(standing("a")), "answers of words fell from 60 to 10 tokens"
    assert act.shown(seen(one, one, ("plan", "p"), ("recast", "r"), why=lengths))
    assert not act.shown(seen(one, one, ("plan", "p"), why=lengths)), "nothing was done for it yet"
    assert not act.shown(seen(one, one, ("recast", "r"), ("plan", "p"), why=lengths)), "that was before it"
    assert not act.shown(
        seen(one, one, ("plan", "p"), ("recast", "r"), why="requests for words fell from 8 to 4 a second")
    )
    flipped = look(standing("a", "decode"), usd=1.5)
    assert (
        act.result(seen(one, flipped)).split(". ")[1]
        == "1 replica changed roles without loading weights again"
    )
    assert act.result(seen(one, look(usd=2.5))).endswith("lengths. It costs $2.50 an hour instead of $2.00.")
    same = act.result(seen(one, one, ("recast", "r")))
    assert same.endswith("lengths. It costs $2.00 an hour, as before."), "another template, the old role"


def test_only_what_was_saved_is_told_as_saved() -> None:
    same, cheap, dear = look(usd=2.0), look(usd=1.5), look(usd=2.5)
    for name, before, now, saved in (
        ("cheaper", same, cheap, 0.5),
        ("shift", same, cheap, 0.5),
        ("shift", same, dear, -0.5),
        ("burst", same, cheap, 0.0),
        ("killed", same, cheap, 0.0),
        ("steady", same, same, 0.0),
    ):
        assert ACTS[name].saved_usd_per_h(seen(before, now)) == pytest.approx(saved), name
    assert ACTS["steady"].saved_usd_per_h(seen(same, same, near_usd=3.0)) == pytest.approx(1.0)


def test_the_morning_tells_what_the_other_region_saves() -> None:
    act, asked = ACTS["steady"], {SHOP: RequestCounts(20, 20), LAB: RequestCounts(20, 20)}
    there = replace(seen(look(), look(crossed=3e9), near_usd=3.0), by_tenant=asked)
    assert act.shown(there)
    assert not act.shown(replace(there, by_tenant=NONE)), "nobody was answered yet"
    assert not act.shown(replace(there, now=look())), "nothing crossed"
    assert "3.0 GB so far. The fleet costs $2.00 an hour instead of $3.00" in act.result(there)
    assert "instead" not in act.result(replace(there, near_usd_per_h=2.0)), "it saved nothing"


def test_a_dead_node_is_answered_after_its_own_loss() -> None:
    before, act = look(standing("a"), standing("b")), ACTS["killed"]
    assert not act.shown(seen(before, before, ("lost", "b is lost"), ("ready", "b is ready"), victim="a"))
    assert not act.shown(seen(before, before, ("ready", "b is ready"), ("lost", "a is lost"), victim="a"))
    assert act.shown(seen(before, before, ("lost", "a is lost"), ("ready", "a is ready"), victim="a"))
    after = replace(before, moved=3)
    assert "3 attempts went on at another replica; no requests were lost" in act.result(
        seen(before, after, victim="a")
    )


def test_a_thin_link_a_flood_and_a_sale() -> None:
    before, thin = look(standing("a")), ACTS["thin"]
    now = look(standing("a"), threshold=1100.0)
    assert thin.shown(
        seen(before, now, ("remark", "only prompts of words beyond 1300 tokens go over far->near now"))
    )
    assert not thin.shown(
        seen(before, now, ("remark", "only prompts of words beyond 1100 tokens go over far->near now"))
    )
    assert not thin.shown(
        seen(before, now, ("remark", "only prompts of words beyond 1300 tokens go over x->y now"))
    )
    lines = [
        f"only prompts of words beyond {tokens} tokens go over far->near now"
        for tokens in (1100, 1300, 1700, 1200)
    ]
    moving = seen(before, now, *(("remark", line) for line in lines))
    assert "beyond 1300 tokens" in chosen(thin, moving), "not the last, when the link was clear again"
    assert "beyond 1,300 tokens" in thin.result(moving)
    pace = ("remark", "a takes 2.0 times as long as planned")
    assert not thin.shown(seen(before, now, pace)), "that is about something else"
    assert not thin.moment(seen(before, look(standing("a"), threshold=0.0))), (
        "nothing could be kept from crossing"
    )
    far = replace(standing("a"), region="far")
    assert thin.moment(seen(before, look(far)))
    assert not thin.moment(seen(before, look(far, threshold=2000.0))), "it is kept from crossing already"
    moved = look(standing("b", node="1xA10"), usd=1.0)
    assert ACTS["cheaper"].shown(seen(before, moved, ("plan", "p")))
    assert not ACTS["cheaper"].shown(seen(before, look(usd=1.0), ("plan", "p"))), (
        "cheaper, but not by what is cheap"
    )


def test_a_flood_is_answered_where_who_keeps_to_its_share_is_served() -> None:
    act, there = ACTS["flood"], look(standing("a"))
    earlier = {SHOP: RequestCounts(20, 20, ttft_s=0.8), LAB: RequestCounts(20, 20)}
    mine = RequestCounts(20, 19, refused=1, ttft_s=0.9)
    fair = replace(
        seen(there, there),
        earlier=earlier,
        by_tenant={SHOP: mine, LAB: RequestCounts(90, 9, 71, no="its turn would come after 9 s")},
    )
    assert act.moment(fair)
    assert not act.moment(replace(fair, earlier=NONE)), "nobody knows how long answers took before"
    assert not act.moment(replace(fair, now=look(standing("a", state="starting"))))
    assert act.shown(fair)
    assert chosen(act, fair) == "lab is told: its turn would come after 9 s"
    told_of = act.result(fair)
    assert "shop had 95% of its 20 requests answered, 19 of 20 begun within 0.9 s (0.8 s before)" in told_of
    assert "lab had 21% of 90 answered" in told_of
    for mine, flood in (
        (RequestCounts(20, 1, 19), RequestCounts(90, 9, 71)),
        (RequestCounts(20, 20), RequestCounts(90, 90)),
    ):
        assert not act.shown(replace(fair, by_tenant={SHOP: mine, LAB: flood}))
    assert not act.shown(
        replace(fair, by_tenant={SHOP: RequestCounts(3, 3), LAB: RequestCounts(90, 9, 71)})
    ), "too few to tell"


def test_what_was_chosen_is_told_in_the_services_own_words() -> None:
    text = seen(look(), look(), ("plan", "first"), ("plan", "second"), ("replan", "asked"), ("start", "x"))
    assert chosen(ACTS["burst"], text) == "second (why); asked (why)"


def test_requests_are_answered_told_no_or_lost() -> None:
    whole = TimedRequest(0.0, "m", [1], 2, first_s=0.1, last_s=0.2, ended=True, status=200, done_s=0.2)
    late = TimedRequest(0.0, "m", [1], 2, first_s=5.0, last_s=5.1, ended=True, status=200, done_s=5.1)
    no = TimedRequest(
        0.0, "m", [1], 2, status=429, problem='{"error": {"message": "overloaded"}}', done_s=0.1
    )
    cut = TimedRequest(0.0, "m", [1], 2, status=200, problem="cut off", done_s=0.1)
    result = counted([SentRequest("a", SHOP, item) for item in (whole, late, no, cut)], Slo(3.0, 0.2))
    lost = "status 200 after 0 pieces of text: cut off"
    assert result == RequestCounts(4, 1, 1, 1, ttft_s=5.0, no="overloaded", why_lost=lost)
    assert (result.answered, result.answered_share, result.attained) == (2, 0.5, 0.25)


@pytest.mark.parametrize(("shown", "lost", "code"), [(True, 0, 0), (False, 0, 1), (True, 1, 1)])
def test_only_a_whole_day_without_a_lost_request_ends_well(
    shown: bool, lost: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [
        (
            ActOutcome(act, shown, "chosen", "result", 0.0, 1.0, 0, (1, 2), (1.0, 2.0)),
            RequestCounts(10, 9, lost=lost),
        )
        for act in the_day()
    ]
    assert told(outcomes, as_json=True) == code
    assert json.loads(capsys.readouterr().out)["lost"] == lost * len(outcomes)
    assert told(outcomes[:-1], as_json=False) == 1, "a day that was cut short"


@pytest.mark.slow
def test_a_short_day_shows_every_answer_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo", "--seconds", "12", "--json"]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(done.stdout)
    rows = {row["act"]: row for row in body["acts"]}
    assert list(rows) == list(ACTS)
    assert body["lost"] == 0
    for row in rows.values():
        assert row["shown"]
        assert row["requests"] > 0
        assert row["chosen"], "what was decided, and why"
        assert row["result"]
    assert rows["steady"]["saved_usd_per_h"] > 0
    assert rows["burst"]["saved_usd_per_h"] == 0
    assert rows["burst"]["replicas"][1] > rows["burst"]["replicas"][0]
    assert "is adopted instead of $" in rows["burst"]["chosen"]
    assert "is lost" in rows["killed"]["chosen"]
    assert "go over far->near" in rows["thin"]["chosen"]
    assert rows["flood"]["refused"] > 0
    assert rows["cheaper"]["usd_per_h"][1] < rows["cheaper"]["usd_per_h"][0]
    assert list(tmp_path.iterdir()) == []
    assert not _with_mark(str(tmp_path)), "no process of it is left"


def _with_mark(mark: str) -> list[str]:
    """Processes whose command line names a folder."""
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in (line := path.read_bytes().decode(errors="replace")):
                result.append(line)
        except OSError:
            continue
    return result

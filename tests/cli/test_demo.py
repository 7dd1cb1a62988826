"""`make demo`, shortened: every act is shown, no request is lost, no process is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from demo.acts import (
    LAB,
    RATE_PER_S,
    SHOP,
    Act,
    ActEvidence,
    FleetLook,
    LoggedDecision,
    ReplicaLook,
    chosen,
    not_shown,
    the_day,
)
from demo.command import told
from demo.play import ActOutcome, Player
from demo.traffic import (
    DemoLoad,
    DemoTraffic,
    Phase,
    RequestCounts,
    SentRequest,
    attainment_text,
    counted,
    ended_first,
    limited,
)

from potluck.core.values.types import Slo
from potluck.loadgen.load_client import TimedRequest

WITHIN_S = 900.0
NONE = {SHOP: RequestCounts(), LAB: RequestCounts()}


def replica_look(name: str, role: str = "prefill", state: str = "ready", node: str = "1xL4") -> ReplicaLook:
    return ReplicaLook(name, role, state, "near", f"words: {role} {node} tp1", "http://127.0.0.1:1", 0)


def fleet_look(
    *replicas: ReplicaLook, usd: float = 2.0, threshold: float = 1000.0, moved: int = 0, crossed: float = 0.0
) -> FleetLook:
    return FleetLook(0.0, replicas, usd, threshold, 1000.0, crossed, moved, 0)


def act_evidence(
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


def test_burst_act_is_shown_only_after_a_plan_and_a_new_replica() -> None:
    one, two = fleet_look(replica_look("a")), fleet_look(replica_look("a"), replica_look("b"), usd=3.0)
    assert not ACTS["burst"].shown(act_evidence(one, two)), "more replicas, and no plan that says why"
    assert not ACTS["burst"].shown(act_evidence(one, one, ("plan", "p"))), "a plan, and no replica yet"
    assert ACTS["burst"].shown(act_evidence(one, two, ("plan", "p")))
    assert "1 more replica serves, for $1.00 an hour more" in ACTS["burst"].result(
        act_evidence(one, two, ("plan", "p"))
    )


def test_shift_act_is_shown_only_after_a_plan_for_the_new_lengths_and_its_changes() -> None:
    act, one, lengths = (
        ACTS["shift"],
        fleet_look(replica_look("a")),
        "answers of words fell from 60 to 10 tokens",
    )
    assert act.shown(act_evidence(one, one, ("plan", "p"), ("recast", "r"), why=lengths))
    assert not act.shown(act_evidence(one, one, ("plan", "p"), why=lengths)), "nothing was done for it yet"
    assert not act.shown(act_evidence(one, one, ("recast", "r"), ("plan", "p"), why=lengths)), (
        "that was before it"
    )
    assert not act.shown(
        act_evidence(
            one, one, ("plan", "p"), ("recast", "r"), why="requests for words fell from 8 to 4 a second"
        )
    )
    flipped = fleet_look(replica_look("a", "decode"), usd=1.5)
    assert (
        act.result(act_evidence(one, flipped)).split(". ")[1]
        == "1 replica changed roles without loading weights again."
    )
    settled, cheaper = as_planned(one), as_planned(fleet_look(replica_look("a"), usd=1.5))
    assert act.result(act_evidence(settled, cheaper)).endswith(
        "lengths. It costs $1.50 an hour instead of $2.00."
    )
    assert act.saved_usd_per_h(act_evidence(settled, cheaper)) == 0.5
    for before, now in ((settled, as_planned(cheaper, pending=True)), (one, cheaper)):
        assert act.result(act_evidence(before, now)).endswith("for these lengths."), (
            "no price between two plans"
        )
        assert act.saved_usd_per_h(act_evidence(before, now)) == 0.0
    same = act.result(act_evidence(settled, settled, ("recast", "r")))
    assert same.endswith("lengths. It costs $2.00 an hour, as before."), "another template, the old role"


def test_saved_cost_is_reported_only_for_acts_that_save() -> None:
    same, cheap, dear = fleet_look(usd=2.0), fleet_look(usd=1.5), fleet_look(usd=2.5)
    for name, before, now, saved in (
        ("cheaper", same, cheap, 0.5),
        ("shift", same, cheap, 0.5),
        ("shift", same, dear, -0.5),
        ("burst", same, cheap, 0.0),
        ("killed", same, cheap, 0.0),
        ("steady", same, same, 0.0),
    ):
        assert ACTS[name].saved_usd_per_h(act_evidence(before, now)) == pytest.approx(saved), name
    assert ACTS["steady"].saved_usd_per_h(act_evidence(same, same, near_usd=3.0)) == pytest.approx(1.0)


def test_steady_act_reports_the_saving_by_the_other_region() -> None:
    act, asked = ACTS["steady"], {SHOP: RequestCounts(20, 20), LAB: RequestCounts(20, 20)}
    there = replace(act_evidence(fleet_look(), fleet_look(crossed=3e9), near_usd=3.0), by_tenant=asked)
    assert act.shown(there)
    assert not act.shown(replace(there, by_tenant=NONE)), "nobody was answered yet"
    assert not act.shown(replace(there, now=fleet_look())), "nothing crossed"
    assert "3.0 GB so far. The fleet costs $2.00 an hour instead of $3.00" in act.result(there)
    assert "instead" not in act.result(replace(there, near_usd_per_h=2.0)), "it saved nothing"


def test_killed_act_is_shown_after_the_loss_and_replacement_of_its_own_node() -> None:
    before, act = fleet_look(replica_look("a"), replica_look("b")), ACTS["killed"]
    assert not act.shown(
        act_evidence(before, before, ("lost", "b is lost"), ("ready", "b is ready"), victim="a")
    )
    assert not act.shown(
        act_evidence(before, before, ("ready", "b is ready"), ("lost", "a is lost"), victim="a")
    )
    assert act.shown(act_evidence(before, before, ("lost", "a is lost"), ("ready", "a is ready"), victim="a"))
    after = replace(before, moved=3)
    assert "3 attempts went on at another replica; no requests were lost" in act.result(
        act_evidence(before, after, victim="a")
    )


def as_planned(look: FleetLook, pending: bool = False) -> FleetLook:
    """The same fleet, as the plan in force has it."""
    copies = {(replica.template, replica.region, replica.unit) for replica in look.replicas}
    counts = Counter((template, region) for template, region, _ in copies)
    return replace(look, planned_copies=counts, replan_pending=pending)


def test_fleet_is_settled_only_once_its_plan_is_carried_out() -> None:
    one, other = replica_look("a"), replica_look("b", state="starting", node="1xA10")
    assert as_planned(fleet_look(one)).settled
    assert not as_planned(fleet_look(one), pending=True).settled, "another plan is on its way"
    assert not as_planned(fleet_look(one, other)).settled, "a replica of the plan starts"
    draining = fleet_look(one, replica_look("b", state="draining", node="1xA10"))
    assert not replace(as_planned(fleet_look(one)), replicas=draining.replicas).settled, (
        "an old replica is still paid for"
    )
    assert not replace(fleet_look(one), planned_copies={}).settled
    pair = fleet_look(*(replace(replica_look(name), unit="u1") for name in ("a", "b")))
    assert as_planned(pair).planned_copies == {(one.template, "near"): 1}, "two replicas of one copy"
    assert as_planned(pair).settled


def test_cheaper_act_is_shown_only_for_a_settled_fleet_with_clearly_lower_cost() -> None:
    act, before = ACTS["cheaper"], fleet_look(replica_look("a"), usd=5.2)
    cheap = replica_look("b", node="1xA10")
    after = as_planned(fleet_look(cheap, usd=3.0))
    assert act.shown(act_evidence(before, after, ("plan", "p")))
    assert not act.shown(act_evidence(before, after)), "no plan was adopted"
    assert not act.shown(
        act_evidence(before, as_planned(fleet_look(replica_look("a"), usd=3.0)), ("plan", "p"))
    ), "without the cheap GPU"
    assert not act.shown(act_evidence(before, as_planned(fleet_look(cheap, usd=5.1)), ("plan", "p"))), (
        "borderline"
    )
    dearer = as_planned(fleet_look(replica_look("a"), cheap, usd=6.7))
    assert not act.shown(act_evidence(before, dearer, ("plan", "p"))), "the flood's demand was planned for"
    in_between = replace(after, planned_copies={(cheap.template, "near"): 2})
    assert not act.shown(act_evidence(before, in_between, ("plan", "p"))), "the plan is not carried out yet"
    text = not_shown(act_evidence(before, dearer, ("plan", "p")))
    assert "costs $6.70 an hour; it cost $5.20 before" in text
    assert "still changing" in not_shown(act_evidence(before, in_between, ("plan", "p")))


def test_cheaper_act_starts_once_the_flood_has_left_the_window_and_its_fleet_is_settled() -> None:
    act, calm = ACTS["cheaper"], as_planned(fleet_look(replica_look("a")))
    waiting = replace(act_evidence(calm, calm), window_s=14.0, waited_s=13.9)
    assert not act.moment(waiting), "the window still has requests of the flood"
    assert act.moment(replace(waiting, waited_s=14.0))
    assert not act.moment(replace(waiting, waited_s=20.0, now=as_planned(calm, pending=True)))
    assert act.earlier, "the usual traffic is sent meanwhile"


def sent_request(done: bool, status: int = 200, ttft_s: float = 0.1, phase: Phase = "during") -> SentRequest:
    request = TimedRequest(0.0, "m", [1], 2, status=status, ended=True)
    if done and status == 200:
        request.first_s, request.last_s = ttft_s, ttft_s + 0.1
    if done:
        request.done_s = ttft_s + 0.1
    return SentRequest("burst", SHOP, request, phase)


def test_evidence_excludes_requests_that_overtook_an_open_one() -> None:
    """Those that end early are the fast and the refused ones, so their share misleads."""
    slow = [sent_request(False) for _ in range(60)]
    fast = [sent_request(True) for _ in range(20)]
    assert ended_first([*fast[:5], *slow, *fast[5:]]) == fast[:5]
    assert ended_first([]) == []


class StagedPlayer(Player):
    """A player whose burst shows at once, and whose slow requests end only after the act is over."""

    __slots__ = ("notes",)

    def _seen(self, act: Act, before: FleetLook, victim: str = "") -> ActEvidence:
        now = fleet_look(replica_look("a"), replica_look("b"), usd=3.0)
        return act_evidence(before, now, ("plan", "p"))

    def _moment(self, act: Act) -> FleetLook:
        return fleet_look(replica_look("a"))


def test_burst_attainment_is_the_same_on_page_terminal_and_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """19 of 20 requests end late, after the act's answer has shown."""
    notes: list[tuple[str, str, str]] = []
    printed: list[str] = []
    traffic = DemoTraffic("", "m", {})
    asked: list[tuple[str, str, float]] = []

    def ask(act: str, loads: tuple[DemoLoad, ...], phase: Phase = "during") -> None:
        asked.append((act, phase, sum(load.rate_per_s for load in loads)))
        if phase == "during":
            traffic.sent += [sent_request(True), *(sent_request(False) for _ in range(19))]
        else:
            for request in traffic.sent:
                if not request.has_ended:
                    request.shot.first_s, request.shot.last_s, request.shot.done_s = 9.0, 9.1, 9.1
            traffic.sent.append(sent_request(True, phase="after"))

    client: Any = SimpleNamespace(note=lambda *note: notes.append(note))
    controls: Any = SimpleNamespace(client=client)
    staged: Any = SimpleNamespace(ask=ask, of=traffic.of, sent=traffic.sent)
    player = StagedPlayer(controls, staged, Slo(5.0, 0.08), 0.0, printed.append, lambda: False)
    outcome = player._one(ACTS["burst"])
    player.outcomes.append(outcome)
    words = "SLO attainment 5% of 20 requests."
    assert notes[-1][1] == words
    assert printed[-1].splitlines()[0].endswith(words)
    assert attainment_text(outcome.counts) == words
    assert told(player.outcomes, player.day_counts(), as_json=False) == 1, "a day that was cut short"
    lines = capsys.readouterr().out
    assert "5%" in lines
    assert "21 requests, 1 of them between acts, 0 lost" in lines
    assert told(player.outcomes, player.day_counts(), as_json=True) == 1
    (row,) = json.loads(capsys.readouterr().out)["acts"]
    assert (row["in_time"], row["requests"]) == (1, 20)
    assert asked == [("burst", "during", 8.0), ("burst", "after", 4.0)], "no faster than usual while they end"


def test_traffic_between_acts_keeps_its_mix_and_is_no_faster_than_usual() -> None:
    flood = ACTS["flood"].asks
    calm = limited(flood, RATE_PER_S)
    assert sum(load.rate_per_s for load in calm) == pytest.approx(RATE_PER_S)
    assert calm[1].rate_per_s / calm[0].rate_per_s == pytest.approx(flood[1].rate_per_s / flood[0].rate_per_s)
    assert limited(calm, RATE_PER_S) == calm
    assert limited((), RATE_PER_S) == ()


def test_thin_link_act_is_shown_only_when_the_threshold_rises() -> None:
    before, thin = fleet_look(replica_look("a")), ACTS["thin"]
    now = fleet_look(replica_look("a"), threshold=1100.0)
    assert thin.shown(
        act_evidence(
            before, now, ("remark", "only prompts of words beyond 1300 tokens go over far->near now")
        )
    )
    assert not thin.shown(
        act_evidence(
            before, now, ("remark", "only prompts of words beyond 1100 tokens go over far->near now")
        )
    )
    assert not thin.shown(
        act_evidence(before, now, ("remark", "only prompts of words beyond 1300 tokens go over x->y now"))
    )
    lines = [
        f"only prompts of words beyond {tokens} tokens go over far->near now"
        for tokens in (1100, 1300, 1700, 1200)
    ]
    moving = act_evidence(before, now, *(("remark", line) for line in lines))
    assert "beyond 1300 tokens" in chosen(thin, moving), "not the last, when the link was clear again"
    assert "beyond 1,300 tokens" in thin.result(moving)
    pace = ("remark", "a takes 2.0 times as long as planned")
    assert not thin.shown(act_evidence(before, now, pace)), "that is about something else"
    assert not thin.moment(act_evidence(before, fleet_look(replica_look("a"), threshold=0.0))), (
        "nothing could be kept from crossing"
    )
    far = replace(replica_look("a"), region="far")
    assert thin.moment(act_evidence(before, fleet_look(far)))
    assert not thin.moment(act_evidence(before, fleet_look(far, threshold=2000.0))), (
        "it is kept from crossing already"
    )
    raised = fleet_look(replica_look("a"), threshold=1090.0)
    line = ("remark", "only prompts of words beyond 1194 tokens go over far->near now")
    assert thin.shown(act_evidence(raised, now, line)), (
        "clear beside the plan, although the act began a little above it"
    )


def test_flood_act_is_shown_when_the_other_tenant_is_served_in_time() -> None:
    act, there = ACTS["flood"], fleet_look(replica_look("a"))
    earlier = {SHOP: RequestCounts(20, 20, ttft_s=0.8), LAB: RequestCounts(20, 20)}
    mine = RequestCounts(20, 19, refused=1, ttft_s=0.9)
    fair = replace(
        act_evidence(there, there),
        earlier=earlier,
        by_tenant={SHOP: mine, LAB: RequestCounts(90, 9, 71, no="its turn would come after 9 s")},
    )
    assert act.moment(fair)
    assert not act.moment(replace(fair, earlier=NONE)), "nobody knows how long answers took before"
    assert not act.moment(replace(fair, now=fleet_look(replica_look("a", state="starting"))))
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


def test_act_decision_is_reported_in_the_words_of_the_service() -> None:
    text = act_evidence(
        fleet_look(), fleet_look(), ("plan", "first"), ("plan", "second"), ("replan", "asked"), ("start", "x")
    )
    assert chosen(ACTS["burst"], text) == "second (why); asked (why)"


def test_demo_requests_are_counted_as_answered_refused_or_lost() -> None:
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
def test_demo_exits_with_0_only_after_all_acts_without_a_lost_request(
    shown: bool, lost: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = RequestCounts(10, 9)
    outcomes = [
        ActOutcome(act, shown, "chosen", "result", 0.0, 1.0, 0, (1, 2), (1.0, 2.0), counts)
        for act in the_day()
    ]
    day_counts = RequestCounts(90, 70, lost=lost)
    assert told(outcomes, day_counts, as_json=True) == code, "also one that was lost between acts"
    body = json.loads(capsys.readouterr().out)
    assert (body["lost"], body["requests"]) == (lost, 90)
    assert told(outcomes[:-1], day_counts, as_json=False) == 1, "a day that was cut short"


@pytest.mark.slow
def test_short_demo_shows_every_act_and_leaves_no_processes(tmp_path: Path) -> None:
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
    assert not _processes_with_mark(str(tmp_path)), "no process of it is left"


def _processes_with_mark(mark: str) -> list[str]:
    """Processes whose command line names a folder."""
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in (line := path.read_bytes().decode(errors="replace")):
                result.append(line)
        except OSError:
            continue
    return result

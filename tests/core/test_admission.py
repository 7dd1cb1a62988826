"""Admission: bounded work at replicas, fair queues, early refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate
from math import isfinite
from random import Random

import pytest
from brain_builders import World, assert_idle, facts, plan, request, template, world
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.admission.admission import ServiceRate
from potluck.core.admission.queue import RequestQueue
from potluck.core.routing.capacity import AHEAD, AHEAD_APART
from potluck.core.state.actions import Action, Refuse, Run
from potluck.core.state.events import RequestCancelled, Tick
from potluck.core.state.facts import FleetFacts
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import QueuePosition, RequestState
from potluck.core.values.plan import Plan, Template
from potluck.core.values.service import RequestClass, Tenant, with_built_in
from potluck.core.values.types import Request, Slo

SLO = Slo(2.0, 0.06)
PROMPT_S = 1e-4  # Seconds of a prompt token, as `brain_builders.facts` says.


def facts_with_slo(templates: tuple[Template, ...], batch: int = 8) -> FleetFacts:
    known = facts(templates, batch=batch)
    models = {name: replace(model, slo=SLO) for name, model in known.models.items()}
    replicas = {key: replace(replica, decode_first_s=0.01) for key, replica in known.replicas.items()}
    return replace(known, models=models, replicas=replicas)


def equal_replicas_plan(count: int) -> Plan:
    one = template("one", closed=(5.0, 5.0))
    return plan([one], {("one", "near"): count}, {("one", "near", "closed"): (5.0, 5.0)})


def disaggregated_plan() -> Plan:
    """Prefill and decode in pools of their own."""
    first = template("p", ["prefill"], prefill=(5.0, 5.0))
    second = template("d", ["decode"], decode=(5.0, 5.0))
    rates = {("p", "near", "prefill"): (5.0, 5.0), ("d", "near", "decode"): (5.0, 5.0)}
    counts = {("p", "near"): 2, ("d", "near"): 2}
    return plan([first, second], counts, rates, {("m", "near", "near"): (5.0, 5.0)})  # type: ignore[arg-type]


def grouped_plan(kind: str) -> Plan:
    roles = ("prefill", "decode") if kind == "combo" else ("prefill", "mixed")
    one = template(kind, roles, kind, closed=(5.0, 5.0))  # type: ignore[arg-type]
    return plan([one], {(kind, "near"): 2}, {(kind, "near", "closed"): (5.0, 5.0)})


WAITS_FOR_PAIR = re.compile(
    r"it would wait up to ([\d.]+) s for its turn; of the ([\d.]+) s to its first token "
    r"at most ([\d.]+) s may pass in waiting"
)
FLEETS = {
    "alike": equal_replicas_plan(3),
    "apart": disaggregated_plan(),
    "combo": grouped_plan("combo"),
    "pair": grouped_plan("pair"),
}


def admission_world(fleet: Plan, policy: Policy | None = None) -> World:
    return world(fleet, policy or Policy(), facts_with_slo(fleet.templates))


def tenant_request(
    name: str, at_s: float = 0.0, tenant: str = "default", kind: str = "standard", **more: int
) -> Request:
    return request(name, at_s=at_s, **more)._replace(tenant=tenant, request_class=kind)


def refusals(actions: list[Action]) -> list[Refuse]:
    return [action for action in actions if isinstance(action, Refuse)]


@pytest.mark.parametrize("name", FLEETS)
def test_admission_bounds_queued_prefill_at_replicas_and_refuses_the_rest_with_retry_after(name: str) -> None:
    """The rest waits, or is refused at once with a time to try again."""
    there = admission_world(FLEETS[name])
    message = [
        refusal for number in range(400) for refusal in refusals(there.arrive(tenant_request(str(number))))
    ]
    assert message
    assert all(item.reason == "overloaded" for item in message)
    assert all(item.retry_after_s is not None and 0 < item.retry_after_s < 3600 for item in message)
    compared = [WAITS_FOR_PAIR.fullmatch(item.detail) for item in message if "would wait" in item.detail]
    assert compared
    for result in compared:
        assert result is not None
        wait_s, objective_s, most_s = map(float, result.groups())
        assert objective_s == SLO.ttft_s
        assert most_s < objective_s
        assert wait_s >= most_s, "what is compared is what is said"
    waiting = [req for req in there.brain.requests.values() if req.position is not None]
    assert waiting
    for view in there.brain.fleet.views.values():
        ahead = AHEAD_APART if view.role == "prefill" else AHEAD
        assert view.open_prefill_tokens * PROMPT_S <= ahead * SLO.ttft_s + 1000 * PROMPT_S
    while there.jobs:
        there.finish(next(iter(there.jobs)))
    assert set(there.ended) == set(there.requests)
    assert_idle(there.brain)
    assert not there.brain.admission.queues


def test_admission_uses_limits_stricter_than_the_objective() -> None:
    """Limits that are tighter than the objective let fewer in."""
    fleet, sent = equal_replicas_plan(1), []
    known = facts_with_slo(fleet.templates)
    for limits in (None, SLO.scaled(0.5)):
        models = {name: replace(model, limits=limits) for name, model in known.models.items()}
        there = world(fleet, Policy(), replace(known, models=models))
        for number in range(200):
            there.arrive(tenant_request(str(number)))
        sent.append(len(there.jobs))
    assert 0 < sent[1] < sent[0]


def test_all_requests_are_dispatched_without_an_objective_or_admission() -> None:
    fleet = equal_replicas_plan(1)
    for there in (world(fleet), admission_world(fleet, Policy(admission=False))):
        for number in range(200):
            there.arrive(tenant_request(str(number)))
        assert len(there.jobs) == 200


@given(st.lists(st.integers(1, 900), max_size=8), st.sampled_from(sorted(FLEETS)))
@settings(max_examples=15, deadline=None)
def test_admission_does_not_change_routing_under_light_load(prompts: list[int], name: str) -> None:
    both = [admission_world(FLEETS[name], Policy(admission=on)) for on in (True, False)]
    for number, prompt in enumerate(prompts):
        new = tenant_request(str(number), prompt=prompt)
        assert both[0].arrive(new) == both[1].arrive(new)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "advance", "advance", "cancel", "tick"]),
        st.integers(0, 30),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["standard", "batch", "interactive"]),
        st.sampled_from([10, 1000, 9000]),
    ),
    max_size=60,
)


def run_random_events(there: World, steps: list[tuple[str, int, str, str, int]]) -> None:
    for number, (what, pick, tenant, kind, prompt) in enumerate(steps):
        there.now_s = 0.01 * number
        if what == "arrive":
            there.arrive(tenant_request(str(number), there.now_s, tenant, kind, prompt=prompt))
        elif what == "advance" and there.jobs:
            there.advance(sorted(there.jobs)[pick % len(there.jobs)])
        elif what == "cancel" and there.brain.requests:
            name = sorted(there.brain.requests)[pick % len(there.brain.requests)]
            there.ended[name] = "cancelled"
            there.tell(RequestCancelled(name))
            there.jobs.pop(name, None)
        elif what == "tick":
            there.tell(Tick())
        backlogs = there.brain.admission.queues
        waiting = [req for req in there.brain.requests.values() if req.position is not None]
        assert sum(backlog.count for backlog in backlogs.values()) == len(waiting)
        assert all(backlog.count for backlog in backlogs.values())
        if waiting and there.brain.table.models["m"].weights.flows == ():
            # Work conserving: nobody waits while a replica that does whole requests has nothing to do.
            singles = [view for view in there.brain.fleet.views.values() if view.member.kind == "homogeneous"]
            assert all(view.open_requests for view in singles)


@given(STEPS, st.sampled_from(sorted(FLEETS)))
@settings(max_examples=30, deadline=None)
def test_no_request_waits_while_a_replica_is_idle_and_every_request_ends(
    steps: list[tuple[str, int, str, str, int]], name: str
) -> None:
    there, again = (admission_world(FLEETS[name]) for _ in range(2))
    run_random_events(there, steps)
    run_random_events(again, steps)
    assert there.log == again.log
    for _ in range(700):
        there.now_s += 1.0
        there.tell(Tick())
        for job in list(there.jobs):
            if job in there.jobs:
                there.finish(job)
        if not there.brain.requests:
            break
    assert set(there.ended) == set(there.requests)
    assert_idle(there.brain)
    for _, _, actions in there.log:
        for refusal in refusals(list(actions)):
            assert refusal.retry_after_s is None or (
                isfinite(refusal.retry_after_s) and refusal.retry_after_s > 0
            )


def test_queued_request_is_dispatched_when_a_prefill_or_an_answer_ends() -> None:
    there = admission_world(equal_replicas_plan(1))
    for number in range(60):
        there.arrive(tenant_request(str(number)))
    waiting = len(there.brain.admission.queues["m"].positions())
    assert waiting
    sent = [item for name in list(there.jobs) for item in there.advance(name) if isinstance(item, Run)]
    sent += [item for name in list(there.jobs) for item in there.advance(name) if isinstance(item, Run)]
    assert sent
    assert int(sent[0].request) == min(int(item.request) for item in sent)


@pytest.mark.parametrize(("each", "spread"), [(100.0, False), (1500.0, False), (1500.0, True)])
def test_predicted_wait_is_an_upper_bound_for_96_percent_of_requests(each: float, spread: bool) -> None:
    """Requests that leave at random moments, against the wait foretold; and that is not far from the mean."""
    chance = Random(5)
    works = [chance.expovariate(1.0 / each) if spread else each for _ in range(4000)]
    times_s = list(accumulate(chance.expovariate(10_000.0 / each) for _ in works))
    rate, late, foretold_s, mean_s = ServiceRate(10_000.0), 0, 0.0, 0.0
    rate.start(0.0)
    for place, (now_s, work) in enumerate(zip(times_s[:-20], works, strict=False)):
        rate.count_departure(now_s, work)
        behind = chance.randint(1, 20)
        wait_s = rate.wait_s(now_s, sum(works[place + 1 : place + 1 + behind]))
        late += times_s[place + behind] - now_s > wait_s
        foretold_s += wait_s
        mean_s += behind * each / 10_000.0
    assert late <= 0.04 * len(works)  # half of them, if it were the mean
    assert foretold_s <= 3.0 * mean_s


def test_queued_request_is_refused_at_its_objective_deadline_or_maximum_wait() -> None:
    classes = with_built_in(
        (RequestClass("patient", late=True), RequestClass("batch", late=True, max_wait_s=5.0))
    )
    there = admission_world(equal_replicas_plan(1), Policy(classes=classes, max_wait_s=60.0))
    for number in range(40):
        there.arrive(tenant_request(f"x{number}"))
    late = [
        tenant_request("objective"),
        tenant_request("patient", kind="patient"),
        tenant_request("batch", kind="batch"),
    ]
    late.append(tenant_request("deadline", kind="patient")._replace(deadline_s=2.5))
    for item in late:
        there.arrive(item)
    ends: dict[str, tuple[float, str]] = {}
    for second in range(1, 70):
        there.now_s = float(second)
        for refusal in refusals(there.tell(Tick())):
            ends[refusal.request] = (there.now_s, refusal.reason)
    assert ends["deadline"] == (3.0, "deadline")
    assert ends["batch"] == (5.0, "overloaded")
    assert ends["patient"] == (60.0, "overloaded")
    assert "objective" not in there.brain.requests


def test_full_queue_refuses_the_lowest_request_class_first() -> None:
    there = admission_world(equal_replicas_plan(1), Policy(queue_requests=4))
    number = 0
    while "m" not in there.brain.admission.queues:
        there.arrive(tenant_request(f"x{number}"))
        number += 1
    for extra in range(3):
        there.arrive(tenant_request(f"batch{extra}", kind="batch"))
    message = refusals(there.arrive(tenant_request("now", kind="interactive")))
    assert [item.request for item in message] == ["batch2"]
    head = there.brain.admission.queues["m"].head()
    assert head is not None
    assert head.request.request.id == "now"


def test_running_request_is_aborted_at_its_deadline_if_its_class_stops() -> None:
    classes = with_built_in((RequestClass("strict", stops=True),))
    there = admission_world(equal_replicas_plan(1), Policy(classes=classes))
    for name, kind in (("a", "strict"), ("b", "standard")):
        there.arrive(tenant_request(name, kind=kind)._replace(deadline_s=1.5))
    there.now_s = 2.0
    message = refusals(there.tell(Tick()))
    assert [(item.request, item.reason) for item in message] == [("a", "deadline")]
    assert list(there.brain.requests) == ["b"]


def test_unknown_request_class_is_refused_by_name() -> None:
    message = refusals(admission_world(equal_replicas_plan(1)).arrive(tenant_request("a", kind="urgent")))
    assert message[0].reason == "unknown_class"
    assert "'urgent'" in message[0].detail
    assert "interactive, standard, batch" in message[0].detail


def test_flooding_tenant_does_not_delay_the_request_of_another_tenant() -> None:
    """Long prompts of one: another's short one is sent at once, away from them, and they get something too."""
    there = admission_world(equal_replicas_plan(3))
    for number in range(12):
        there.arrive(tenant_request(f"other{number}", tenant="other", prompt=500))
    sent = 0
    for number in range(60):
        there.now_s = number * 0.1
        message = there.arrive(tenant_request(f"flood{number}", there.now_s, "flooder", prompt=9000))
        sent += sum(isinstance(item, Run) for item in message)
    assert 0 < sent < 60
    long = {job.run.route.segments[0].replica for name, job in there.jobs.items() if name.startswith("flood")}
    assert len(long) < 3
    message = there.arrive(tenant_request("last", there.now_s, "other", prompt=500))
    assert isinstance(message[0], Run)
    assert message[0].route.segments[0].replica not in long


def test_run_action_carries_the_tenant_weight() -> None:
    there = admission_world(equal_replicas_plan(1), Policy(tenants=(Tenant("gold", 4.0),)))
    runs = [there.arrive(tenant_request(name, tenant=name))[0] for name in ("gold", "iron")]
    assert [run.weight for run in runs if isinstance(run, Run)] == [4.0, 1.0]


# The fair line: shares by weight, bounds, order within a tenant, classes that matter more first.

KIND = (0, 0)


def request_state(name: int, tenant: str, priority: int = 0) -> RequestState:
    return RequestState(Request(str(name), "m", 0.0, 10, 10, priority, None, (), tenant))


def take_head(backlog: RequestQueue) -> QueuePosition:
    position = backlog.head()
    assert position is not None
    backlog.take(position)
    return position


WORKS = st.lists(st.floats(1.0, 500.0), min_size=1, max_size=12)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(0.25, 4.0), WORKS), min_size=2, max_size=4)
)
def test_queue_shares_work_between_waiting_tenants_by_weight(
    tenants: dict[str, tuple[float, list[float]]],
) -> None:
    """Of two tenants that both wait, work over weight differs by no more than one request of each."""
    weights = {name: weight for name, (weight, _) in tenants.items()}
    backlog, count = RequestQueue(weights), 0
    for name, (_, works) in tenants.items():
        for work in works:
            backlog.add(0.0, request_state(count, name), 1, KIND, work)
            count += 1
    had = dict.fromkeys(tenants, 0.0)
    left = {name: list(works) for name, (_, works) in tenants.items()}
    while all(left.values()):
        position = take_head(backlog)
        had[position.tenant] += position.work / weights[position.tenant]
        left[position.tenant].remove(position.work)
        slack = {name: max(works) / weights[name] for name, (_, works) in tenants.items()}
        for one in tenants:
            for other in tenants:
                if left[one] and left[other]:
                    assert had[one] - had[other] <= slack[one] + slack[other] + 1e-6


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 2)), max_size=30))
def test_queue_orders_requests_by_class_then_priority_then_arrival(asked: list[tuple[str, int, int]]) -> None:
    """What matters more goes first; within a tenant higher priority, then earlier arrival. Nothing is left over."""
    backlog = RequestQueue({})
    for number, (tenant, level, priority) in enumerate(asked):
        backlog.add(0.0, request_state(number, tenant, priority), level, KIND, 1.0)
    assert backlog.count == len(asked) == len(backlog.positions())
    seen: list[tuple[str, int, int, int]] = []
    while backlog.count:
        position = take_head(backlog)
        number = int(position.request.request.id)
        seen.append((position.tenant, -position.level, -position.request.request.priority, number))
    assert [level for _, level, _, _ in seen] == sorted(level for _, level, _, _ in seen)
    for tenant in "ab":
        own = [item[1:] for item in seen if item[0] == tenant]
        assert own == sorted(own)
    assert backlog.head() is None


def test_blocked_request_does_not_block_others_in_the_queue() -> None:
    backlog = RequestQueue({})
    first = backlog.add(0.0, request_state(0, "a"), 1, (1, 0), 1.0)
    second = backlog.add(0.0, request_state(1, "a"), 1, KIND, 1.0)
    assert backlog.head() is first
    backlog.blocked.add(("a", (1, 0)))
    assert backlog.head() is second
    backlog.blocked.add(("a", KIND))
    assert backlog.head() is None


def test_queue_tries_untried_requests_before_blocked_ones() -> None:
    backlog = RequestQueue({})
    places = {
        name: backlog.add(0.0, request_state(number, name), 1, KIND, 1.0) for number, name in enumerate("abc")
    }
    assert backlog.head() is places["a"]
    backlog.blocked.add(("a", KIND))
    backlog.has_untried = True  # enough were tried in vain
    backlog.unblock()
    for name in "bc":
        assert backlog.head() is places[name]
        backlog.blocked.add((name, KIND))
    assert backlog.head() is None
    backlog.unblock()
    assert take_head(backlog) is places["a"]


def test_blocked_request_kind_does_not_block_another_kind_of_the_same_tenant() -> None:
    backlog = RequestQueue({})
    backlog.add(0.0, request_state(0, "a"), 1, KIND, 1.0)
    backlog.blocked.add(("a", KIND))
    assert backlog.head() is None
    other = backlog.add(0.0, request_state(1, "a"), 1, (1, 0), 1.0)
    assert take_head(backlog) is other
    assert backlog.head() is None
    backlog.unblock()
    assert backlog.head() is not None


def test_work_ahead_of_a_new_request_is_its_tenants_plus_the_fair_share_of_others() -> None:
    backlog = RequestQueue({"b": 2.0})
    for number in range(10):
        backlog.add(0.0, request_state(number, "b"), 1, KIND, 100.0)
    assert backlog.work_ahead("a", 1) == 0.0
    backlog.add(0.0, request_state(10, "a"), 1, KIND, 30.0)
    assert backlog.work_ahead("a", 1) == 30.0 + 60.0
    assert backlog.work_ahead("b", 1) == 1000.0 + 30.0
    assert backlog.work_ahead("a", 0) == 1030.0
    assert backlog.work_ahead("a", 2) == 0.0


def test_removed_request_is_not_returned_by_the_queue() -> None:
    backlog = RequestQueue({})
    places = [backlog.add(0.0, request_state(number, "a"), 1, KIND, 1.0) for number in range(3)]
    backlog.remove(places[0])
    assert backlog.head() is places[1]
    assert backlog.tenant_count("a") == 2
    least = backlog.least_important("a")
    assert least is places[2]

"""The fair line: shares by weight, bounds, order within a tenant, classes that matter more first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.admission.queue import RequestQueue
from potluck.core.state.request_state import QueuePosition, RequestState
from potluck.core.values.types import Request

KIND = (0, 0)


def flight(name: int, tenant: str, priority: int = 0) -> RequestState:
    return RequestState(Request(str(name), "m", 0.0, 10, 10, priority, None, (), tenant))


def taken(backlog: RequestQueue) -> QueuePosition:
    place = backlog.head()
    assert place is not None
    backlog.take(place)
    return place


WORKS = st.lists(st.floats(1.0, 500.0), min_size=1, max_size=12)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(0.25, 4.0), WORKS), min_size=2, max_size=4)
)
def test_while_all_wait_none_gets_less_than_its_share(tenants: dict[str, tuple[float, list[float]]]) -> None:
    """Of two tenants that both wait, work over weight differs by no more than one request of each."""
    weights = {name: weight for name, (weight, _) in tenants.items()}
    backlog, count = RequestQueue(weights), 0
    for name, (_, works) in tenants.items():
        for work in works:
            backlog.add(0.0, flight(count, name), 1, KIND, work)
            count += 1
    had = dict.fromkeys(tenants, 0.0)
    left = {name: list(works) for name, (_, works) in tenants.items()}
    while all(left.values()):
        place = taken(backlog)
        had[place.tenant] += place.work / weights[place.tenant]
        left[place.tenant].remove(place.work)
        slack = {name: max(works) / weights[name] for name, (_, works) in tenants.items()}
        for one in tenants:
            for other in tenants:
                if left[one] and left[other]:
                    assert had[one] - had[other] <= slack[one] + slack[other] + 1e-6


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 2)), max_size=30))
def test_all_leave_in_order(asked: list[tuple[str, int, int]]) -> None:
    """What matters more goes first; within a tenant higher priority, then earlier arrival. Nothing is left over."""
    backlog = RequestQueue({})
    for number, (tenant, level, priority) in enumerate(asked):
        backlog.add(0.0, flight(number, tenant, priority), level, KIND, 1.0)
    assert backlog.count == len(asked) == len(backlog.places())
    seen: list[tuple[str, int, int, int]] = []
    while backlog.count:
        place = taken(backlog)
        number = int(place.req.request.id)
        seen.append((place.tenant, -place.level, -place.req.request.priority, number))
    assert [level for _, level, _, _ in seen] == sorted(level for _, level, _, _ in seen)
    for tenant in "ab":
        own = [each[1:] for each in seen if each[0] == tenant]
        assert own == sorted(own)
    assert backlog.head() is None


def test_who_is_stuck_stands_in_nobodys_way() -> None:
    backlog = RequestQueue({})
    first = backlog.add(0.0, flight(0, "a"), 1, (1, 0), 1.0)
    second = backlog.add(0.0, flight(1, "a"), 1, KIND, 1.0)
    assert backlog.head() is first
    backlog.stuck.add(("a", (1, 0)))
    assert backlog.head() is second
    backlog.stuck.add(("a", KIND))
    assert backlog.head() is None


def test_those_not_tried_yet_come_before_those_that_found_no_room() -> None:
    backlog = RequestQueue({})
    places = {name: backlog.add(0.0, flight(number, name), 1, KIND, 1.0) for number, name in enumerate("abc")}
    assert backlog.head() is places["a"]
    backlog.stuck.add(("a", KIND))
    backlog.cut = True  # enough were tried in vain
    backlog.again()
    for name in "bc":
        assert backlog.head() is places[name]
        backlog.stuck.add((name, KIND))
    assert backlog.head() is None
    backlog.again()
    assert taken(backlog) is places["a"]


def test_one_that_stands_aside_may_come_with_another_kind() -> None:
    backlog = RequestQueue({})
    backlog.add(0.0, flight(0, "a"), 1, KIND, 1.0)
    backlog.stuck.add(("a", KIND))
    assert backlog.head() is None
    other = backlog.add(0.0, flight(1, "a"), 1, (1, 0), 1.0)
    assert taken(backlog) is other
    assert backlog.head() is None
    backlog.again()
    assert backlog.head() is not None


def test_a_newcomer_waits_for_its_own_and_for_as_much_of_others_as_is_their_due() -> None:
    backlog = RequestQueue({"b": 2.0})
    for number in range(10):
        backlog.add(0.0, flight(number, "b"), 1, KIND, 100.0)
    assert backlog.ahead("a", 1) == 0.0
    backlog.add(0.0, flight(10, "a"), 1, KIND, 30.0)
    assert backlog.ahead("a", 1) == 30.0 + 60.0
    assert backlog.ahead("b", 1) == 1000.0 + 30.0
    assert backlog.ahead("a", 0) == 1030.0
    assert backlog.ahead("a", 2) == 0.0


def test_one_that_leaves_is_not_met_again() -> None:
    backlog = RequestQueue({})
    places = [backlog.add(0.0, flight(number, "a"), 1, KIND, 1.0) for number in range(3)]
    backlog.remove(places[0])
    assert backlog.head() is places[1]
    assert backlog.tenant_count("a") == 2
    least = backlog.least("a")
    assert least is places[2]

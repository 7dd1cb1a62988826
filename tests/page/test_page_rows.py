"""What the page's rows are made of, without a gateway: requests that are followed, rates that fade."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from potluck.core.state.actions import Refuse
from potluck.core.state.events import LinkReported, RequestArrived, RequestFinished
from potluck.core.values.types import Request
from potluck.gateway.page.snapshot import MOST_FLOW_GROUPS, FleetSnapshot, KvFlows, Rates, flow_groups
from potluck.gateway.page.stream import (
    LATEST,
    MOST_REFUSAL_DETAILS,
    MOST_REFUSAL_GROUPS,
    NEW_PER_S,
    POINT_S,
    WINDOW_S,
    PageHistory,
    Waterfall,
)
from potluck.gateway.values import RequestOutcome

MODEL = "chat"


def test_unwatched_page_follows_a_bounded_number_of_requests() -> None:
    fall = Waterfall(0.0)

    def ends(name: str, at_s: float) -> None:
        fall(at_s, RequestArrived(Request(name, MODEL, at_s, 10, 1)), [])
        fall(at_s, RequestFinished(name, 0, 1), [])

    for at in range(1000):
        ends(f"a{at}", 5.0 + at * 1e-6)
    assert len(fall.latest()) == NEW_PER_S
    assert fall.changed() == {}, "which nobody reads"
    for second in range(6, 20):
        for at in range(NEW_PER_S):
            ends(f"b{second}-{at}", second)
    assert len(fall.latest()) == LATEST
    assert "b19-0" in fall.latest()
    fall.watched(True)
    ends("c", 30.0)
    assert list(fall.changed()) == ["c"]
    assert fall.changed() == {}


def test_page_rates_decay_over_their_window() -> None:
    rates: Rates[str] = Rates(4.0, 0.01)
    rates.look(1e9)
    rates.add("a", 8.0)
    assert rates.look(1.0) == {"a": 2.0}
    later = [rates.look(1.0).get("a", 0.0) for _ in range(30)]
    assert later == sorted(later, reverse=True)
    assert later[0] == 1.5
    assert later[-1] == 0.0


def test_link_utilization_on_the_page_decays_without_traffic() -> None:
    def links(used: float) -> tuple[LinkReported, ...]:
        return (LinkReported("east", "west", used, 0.0, 10.0),)

    core: Any = SimpleNamespace(
        links_gbps={}, plan=SimpleNamespace(wires=()), watch=SimpleNamespace(links=links(0.8))
    )
    sight = FleetSnapshot(core, KvFlows())
    assert sight._links(1e9)["east > west"]["used"] == 0.8
    core.watch.links = links(0.0)
    later = [sight._links(0.5)["east > west"]["used"] for _ in range(40)]
    assert later == sorted(later, reverse=True)
    assert 0.4 < float(str(later[0])) < 0.8, "a moment without transfers is not an idle link"
    assert later[-1] == 0.0


def outcome(
    kind: str = "stop",
    *,
    tenant: str = "shop",
    model: str = MODEL,
    ttft_s: float = 0.1,
    request_class: str = "a",
) -> RequestOutcome:
    first_s = ttft_s if kind == "stop" else None
    status = 200 if kind == "stop" else 429
    return RequestOutcome(
        "r", "", tenant, model, request_class, kind, status, 100, 0, 10, 0.0, first_s, ttft_s + 0.9, True
    )


def test_plot_point_percentile_covers_exactly_its_window() -> None:
    history, models = PageHistory({}), {"models": {MODEL: {"usd_per_h": 1.0}}}
    for ttft_s in [5.0] * 3 + [0.1] * 7:
        history.told(outcome(ttft_s=ttft_s))
    history.look(0.0, models)
    points_in_window = int(WINDOW_S / POINT_S)
    for at in range(1, points_in_window + 1):
        history.told(outcome(ttft_s=0.2))
        history.look(at * POINT_S, models)
    p90_s = history.columns()["models"][MODEL]["ttft_p90_s"]
    assert p90_s == [5.0] * points_in_window + [0.2], "3 of 10 to 3 of 16 were slow, then none"


def test_last_minute_percentile_is_of_its_requests() -> None:
    history, models = PageHistory({}), {"models": {MODEL: {"usd_per_h": 1.0}}}
    for _ in range(99):
        history.told(outcome(ttft_s=0.1))
    history.look(0.0, models)
    history.told(outcome(ttft_s=9.0))
    history.look(POINT_S, models)
    assert history.last_min.models[MODEL]["ttft_p90_s"] == 0.1, "1 of 100 was slow"


def test_refusals_of_same_model_tenant_and_reason_are_one_row_with_count() -> None:
    history = PageHistory({}, {(MODEL, "lab", "a", "overloaded"): "it would wait up to 9 s"})
    for _ in range(40):
        history.told(outcome("overloaded", tenant="lab"))
    history.told(outcome("deadline", tenant="lab"))
    history.told(outcome("overloaded", tenant="shop"))
    history.told(outcome("limited", model=""))  # refused before its model was read
    history.told(outcome("cancelled"))
    history.told(outcome("stop"))
    point = history.look(0.0, {"models": {MODEL: {}}})
    rows = {(row["model"], row["tenant"], row["reason"]): row for row in history.last_min.refusals.values()}
    assert {key: row["count"] for key, row in rows.items()} == {
        (MODEL, "lab", "overloaded"): 40,
        (MODEL, "lab", "deadline"): 1,
        (MODEL, "shop", "overloaded"): 1,
        ("", "shop", "limited"): 1,
    }
    assert rows[MODEL, "lab", "overloaded"]["why"] == "it would wait up to 9 s"
    assert point["models"][MODEL]["refused_per_s"] == 42 / POINT_S, "who left was not refused"
    for at in range(1, 40):
        history.look(at * POINT_S, {"models": {MODEL: {}}})
    assert history.last_min.refusals == {}


def test_refusal_groups_beyond_the_limit_are_one_row() -> None:
    history = PageHistory({})
    for at in range(MOST_REFUSAL_GROUPS + 5):
        for _ in range(at + 1):
            history.told(outcome("overloaded", tenant=f"t{at}"))
    history.look(0.0, {"models": {MODEL: {}}})
    rows = history.last_min.refusals
    assert len(rows) == MOST_REFUSAL_GROUPS
    assert rows["other"]["count"] == 1 + 2 + 3 + 4 + 5 + 6
    assert sum(row["count"] for row in rows.values()) == sum(range(1, MOST_REFUSAL_GROUPS + 6))


def test_refusal_details_of_unfollowed_requests_are_kept_and_bounded() -> None:
    fall = Waterfall(0.0)
    for at in range(MOST_REFUSAL_DETAILS + 50):
        request = Request(f"r{at}", MODEL, 5.0, 10, 1, tenant=f"t{at}")
        fall(5.0, RequestArrived(request), [Refuse(request.id, "overloaded", f"detail {at}")])
    assert len(fall.latest()) == NEW_PER_S, "the others are not followed"
    assert len(fall.refusal_details) == MOST_REFUSAL_DETAILS
    last = MOST_REFUSAL_DETAILS + 49
    assert fall.refusal_details[MODEL, f"t{last}", "standard", "overloaded"] == f"detail {last}"


def replica_rows(count: int) -> dict[str, dict[str, Any]]:
    return {
        f"{role}{at}": {"gpu": gpu, "role": role, "region": f"region{at % 4}"}
        for at in range(count // 2)
        for role, gpu in (("prefill", "1xH100"), ("decode", "1xL40S"))
    }


def test_kv_flows_are_summed_by_gpu_role_and_region_of_both_ends() -> None:
    replicas = replica_rows(8)
    rates = {
        ("prefill0", "decode0", "raw"): 1e6,
        ("prefill0", "decode0", "int8"): 1e6,
        ("gone@x#1/0", "decode0", "raw"): 5e5,
    }
    assert flow_groups(rates, replicas) == {
        "1xH100 prefill region0 > 1xL40S decode region0": {
            "source": "1xH100 prefill region0",
            "target": "1xL40S decode region0",
            "pairs": 1,
            "mbit_per_s": 16.0,
        },
        "gone x > 1xL40S decode region0": {
            "source": "gone x",
            "target": "1xL40S decode region0",
            "pairs": 1,
            "mbit_per_s": 4.0,
        },
    }


def test_kv_flow_groups_of_200_replicas_are_few_and_add_up() -> None:
    replicas = replica_rows(200)
    rates = {
        (source, target, "raw"): 1e6 * (1 + int(source[7:]) % 4)
        for source in replicas
        for target in replicas
        if source.startswith("prefill") and target.startswith("decode")
    }
    rows = flow_groups(rates, replicas)
    assert len(rows) == MOST_FLOW_GROUPS
    assert sum(row["pairs"] for row in rows.values()) == len(rates)
    total_mbit_per_s = sum(rates.values()) * 8e-6
    assert abs(sum(row["mbit_per_s"] for row in rows.values()) / total_mbit_per_s - 1.0) < 0.05
    assert list(rows)[-1] == "other"
    assert flow_groups({}, replicas) == {}

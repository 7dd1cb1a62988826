"""Metrics that add up across processes, and the admin port."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from potluck.cli.fleet.keys import keys
from potluck.core.errors import InputError
from potluck.core.state.actions import Run
from potluck.core.values.route import Route, Segment, aggregated, handed_over
from potluck.gateway.admin import families
from potluck.gateway.admin.app import AdminContext, build_admin
from potluck.gateway.admin.counters import MOST_SERIES, Counters
from potluck.gateway.admin.families import FAMILIES
from potluck.gateway.admin.metrics import GatewayMetrics
from potluck.gateway.admin.operations import Json, Operations, QueueView, ReplicaView
from potluck.gateway.openai.keys import KeyRing
from potluck.gateway.values import RequestOutcome

TOLD = RequestOutcome("req-1", "ann", "co", "m", "standard", "stop", 200, 100, 60, 11, 10.0, 10.5, 12.5, True)


class Fleet(Operations):
    def __init__(self) -> None:
        self.put: list[Json] = []

    def replicas(self) -> list[ReplicaView]:
        return [ReplicaView("r1", "m", "ready", 3, 1, 0.5, 0.2), ReplicaView("r2", "m", "lost")]

    def queues(self) -> list[QueueView]:
        return [QueueView("m", "co", 4, 2), QueueView("m", "other", 1, 1)]

    def usd_per_h(self) -> dict[str, float]:
        return {"m": 3.6}

    def snapshot(self) -> Json:
        return {"fleet": ["r1", "r2"]}

    def fleet(self) -> Json:
        return {"engines": []}

    def wanted(self) -> Json:
        return {}

    def decisions(self, after: int) -> Json:
        return {}

    def set_fleet(self, body: Json) -> Json:
        if "engines" not in body:
            raise InputError("engines", "is missing")
        self.put.append(body)
        return {"added": 1}


def values(text: bytes) -> dict[str, float]:
    lines = [line for line in text.decode().splitlines() if line and not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_metrics_have_vllm_compatible_names_and_values() -> None:
    now_s = [0.0]
    counters = Counters()
    metrics = GatewayMetrics(counters, Fleet(), lambda: {families.KEYS: 7.0}, clock=lambda: now_s[0])
    metrics.look()
    counters.came()
    counters.gaps("m")(0.03)
    counters.answered(TOLD)
    counters.turned_away(401, "invalid_api_key")
    now_s[0] = 10.0
    metrics.look()
    result = values(metrics.text())
    assert result['vllm:time_to_first_token_seconds_bucket{le="0.5",model_name="m"}'] == 1
    assert result['vllm:time_to_first_token_seconds_bucket{le="0.25",model_name="m"}'] == 0
    assert result['vllm:time_to_first_token_seconds_sum{model_name="m"}'] == 0.5
    assert result['vllm:inter_token_latency_seconds_count{model_name="m"}'] == 1
    assert result['vllm:request_time_per_output_token_seconds_sum{model_name="m"}'] == 0.2
    assert result['vllm:e2e_request_latency_seconds_sum{model_name="m"}'] == 2.5
    assert result['vllm:prompt_tokens_total{model_name="m"}'] == 100
    assert result['vllm:generation_tokens_total{model_name="m"}'] == 11
    assert result['vllm:prefix_cache_hits_total{model_name="m"}'] == 60
    assert result['vllm:num_requests_waiting{model_name="m"}'] == 5
    assert result['vllm:num_requests_running{model_name="m"}'] == 3
    assert result['potluck_replicas{model="m",state="lost"}'] == 1
    assert result['potluck_usd_per_hour{model="m"}'] == 3.6
    assert result['potluck_usd_per_million_tokens{model="m"}'] == pytest.approx(3.6 / 360 / 111 * 1e6)
    assert result['potluck_requests_total{class="standard",model="m",outcome="stop"}'] == 1
    assert result['potluck_turned_away_total{code="invalid_api_key",status="401"}'] == 1
    assert result["potluck_keys"] == 7
    assert result["potluck_open_requests"] == 0
    counters.answered(TOLD._replace(choices=2, output_tokens=22))
    assert counters.seen(families.TPOT)["m",].total == pytest.approx(0.4), "each of two had 11"


SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
OUTSIDE = {"process_cpu_seconds_total"}
NAMES = re.compile(r"\b(?:vllm:|potluck_|process_)\w+")


def test_grafana_dashboard_uses_only_existing_metrics() -> None:
    text = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text("utf-8")
    there = {f.name + suffix: f for f in FAMILIES.values() for suffix in SUFFIXES[f.kind]}
    shown: set[str] = set()
    for panel in json.loads(text)["panels"]:
        for target in panel["targets"]:
            names = set(NAMES.findall(target["expr"])) - OUTSIDE
            assert names <= there.keys(), panel["title"]
            shown |= {there[name].name for name in names}
            known_labels = {label for name in names for label in there[name].labels}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known_labels, panel["title"]
    assert "vllm:request_success" in FAMILIES.keys() - shown
    assert len(shown) > 25


def run(route: Route, attempt: int = 0, prompt: int = 10) -> Run:
    return Run("a1", route, attempt, prompt, 0)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("in_place", run(aggregated("a"))),
        ("prefill_decode", run(handed_over("a", "b", 10))),
        ("split", run(handed_over("a", "b", 4))),
        ("remote", run(handed_over("a", "far", 10))),
        ("recovered", run(handed_over("a", "b", 4), attempt=1)),
        ("split", run(Route((Segment("a", 0, 3), Segment("b", 3, 6), Segment("b", 6, None))))),
    ],
)
def test_route_kind_is_counted_by_its_segments(kind: str, told: Run) -> None:
    counters = Counters(region_of=lambda replica: "west" if replica == "far" else "east")
    counters.routed("m", told)
    assert counters.counted(families.ROUTES) == {("m", kind): 1}
    assert counters.counted(families.RETRIES) == ({("m",): 1} if told.attempt else {})


def test_metric_label_values_are_bounded() -> None:
    counters = Counters()
    for number in range(MOST_SERIES + 50):
        counters.answered(TOLD._replace(tenant=f"t{number}"))
    assert len(counters.counted(families.TENANT_REQUESTS)) == MOST_SERIES + 1
    assert sum(counters.counted(families.TENANT_REQUESTS).values()) == MOST_SERIES + 50
    assert len(counters.seen(families.TENANT_TTFT)) == MOST_SERIES + 1


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["stop", "lost"]), st.floats(0, 9)), max_size=20)
)
def test_counters_of_several_processes_add_up(told: list[tuple[int, str, float]]) -> None:
    workers, together, main = [Counters(), Counters(), Counters()], Counters(), Counters()
    for place, (worker, outcome, took_s) in enumerate(told):
        one = TOLD._replace(outcome=outcome, first_s=10.0 + took_s)
        for counters in (workers[worker], together):
            counters.answered(one)
            counters.gaps("m")(took_s)
        if place % 3 == 0:
            main.add(json.loads(json.dumps(workers[worker].take())))
    for worker in workers:
        main.add(worker.take())
        assert worker.take()["counts"] == []
    for family in FAMILIES.values():
        assert main.counted(family) == together.counted(family)
        for labels, histogram in together.seen(family).items():
            if any(histogram.counts):
                assert main.seen(family)[labels].counts == histogram.counts
                assert main.seen(family)[labels].total == pytest.approx(histogram.total)


@asynccontextmanager
async def admin_client(key: str | None = None) -> AsyncIterator[tuple[ClientSession, Fleet, Counters]]:
    fleet, counters = Fleet(), Counters()
    built = build_admin(
        AdminContext(GatewayMetrics(counters, fleet), fleet, lambda: {"keys": {"problem": ""}}, key)
    )
    async with TestServer(built) as server, ClientSession(server.make_url("")) as session:
        yield session, fleet, counters


def run_async(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_admin_port_serves_metrics_and_snapshot() -> None:
    async def scenario() -> None:
        async with admin_client() as (session, fleet, counters):
            counters.answered(TOLD)
            async with session.get("/metrics") as reply:
                assert b"vllm:time_to_first_token_seconds" in await reply.read()
            async with session.get("/snapshot") as reply:
                shown = await reply.json()
                assert shown["fleet"] == ["r1", "r2"]
                assert shown["keys"] == {"problem": ""}
                assert shown["counters"]["potluck_requests"][0]["value"] == 1
            async with session.put("/fleet", json={"engines": []}) as reply:
                assert (reply.status, await reply.json()) == (200, {"added": 1})
            assert fleet.put == [{"engines": []}]
            for body in (b"{}", b"nonsense"):
                async with session.put("/fleet", data=body) as reply:
                    assert reply.status == 400
                    assert "error" in await reply.json()
            async with session.get("/wanted") as reply:
                assert await reply.json() == {}
            async with session.get("/nothing") as reply:
                assert reply.status == 404
                assert reply.headers["x-request-id"]
            async with session.put("/plan", json={}, headers={"Origin": "http://evil"}) as reply:
                assert reply.status == 403

    run_async(scenario)


def test_admin_port_refuses_header_names_with_white_space_at_once() -> None:
    async def scenario() -> None:
        async with admin_client() as (session, fleet, *_):
            at = session._base_url
            assert at is not None
            for name in (b"TE\t", b"TE ", b"Transfer-Encoding\t", b"Content-Length "):
                reader, writer = await asyncio.open_connection(at.host, at.port)
                writer.write(b"PUT /fleet HTTP/1.1\r\nHost: 127.0.0.1\r\n" + name + b": chunked\r\n")
                assert b" 400 " in (await reader.read()).split(b"\r\n")[0]  # and is closed
                writer.close()
            assert fleet.put == []

    run_async(scenario)


def test_admin_port_has_its_own_key() -> None:
    async def scenario() -> None:
        async with admin_client("k" * 20) as (session, *_):
            for headers, status in (({}, 401), ({"Authorization": "Bearer x"}, 401)):
                async with session.get("/metrics", headers=headers) as reply:
                    assert reply.status == status
            async with session.get("/health") as reply:
                assert reply.status == 200
            async with session.get("/metrics", headers={"Authorization": "Bearer " + "k" * 20}) as reply:
                assert reply.status == 200

    run_async(scenario)


def test_request_outcomes_segments_and_kv_bytes_are_counted() -> None:
    request_outcomes: list[RequestOutcome] = []
    counters = Counters(told=request_outcomes.append)
    counters.routed("m", run(handed_over("a", "b", 4)))
    counters.segment("a", 1.0, 30, 4)
    counters.segment("a", 1.0, 20, 0)
    counters.failed("b", "replica")
    counters.moved("a", "b", "int8", 1000, 0.5)
    counters.decided("start r3", "the queue grows")
    counters.answered(TOLD)
    assert request_outcomes == [TOLD]
    assert counters.counted(families.KV_BYTES) == {("a", "b", "int8"): 1000}
    assert counters.counted(families.SEGMENT_TOKENS) == {("a", "prompt"): 50, ("a", "output"): 4}


def test_keys_new_command_makes_a_key_that_authenticates(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    made: Any = CliRunner().invoke(keys, ["new", "ann", "--tenant", "co"])
    assert made.exit_code == 0, made.output
    key = made.stderr.split("only now:")[1].split()[0]
    path.write_text(made.stdout)
    assert KeyRing(path, 0.0, lambda: 0.0).who(b"Bearer " + key.encode(), 0.0).tenant == "co"
    assert key not in path.read_text()
    shown: Any = CliRunner().invoke(keys, ["new", "bob", "--json"])
    assert json.loads(shown.stdout)["name"] == "bob"

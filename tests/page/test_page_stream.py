"""The page's stream and history without a browser: deltas that add up, bounds that hold, doors that stay shut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession
from hypothesis import given
from hypothesis import strategies as st
from page_fleets import MODEL
from page_stage import KEY, Stage, stage

from potluck.core.values.types import Slo
from potluck.gateway.page import stream as showing
from potluck.gateway.page.routes import files
from potluck.gateway.page.snapshot import notices
from potluck.gateway.page.stream import (
    FRAME_S,
    FRAMES,
    POINT_S,
    POINTS,
    PageHistory,
    PageReader,
    changes,
    quantile,
)
from potluck.gateway.values import GatewaySettings, RequestOutcome

rows = st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 2)))
tables = st.dictionaries(st.sampled_from(["one", "two"]), rows)


def applied(before: Any, changed: Any, gone: Any) -> Any:
    """As the page does it."""
    after = {table: {name: dict(row) for name, row in mine.items()} for table, mine in before.items()}
    for table, names in gone.items():
        for name in names:
            del after[table][name]
    for table, mine in changed.items():
        for name, row in mine.items():
            after.setdefault(table, {}).setdefault(name, {}).update(row)
    return after


@given(tables, tables)
def test_applied_page_changes_give_the_new_state(before: Any, after: Any) -> None:
    """Of tables that stay; a row keeps its fields for life, as the sight's do."""
    after = {**{table: {} for table in before}, **after}
    for table, mine in after.items():
        for name, row in mine.items():
            mine[name] = {**before.get(table, {}).get(name, {}), **row}
    changed, gone = changes(before, after)
    result = applied(before, changed, gone)
    assert {table: mine for table, mine in result.items() if mine} == {t: m for t, m in after.items() if m}
    assert changes(after, after) == ({}, {})


def request_outcome(
    model: str, came_s: float, ttft_s: float, tpot_s: float, tokens: int = 11, tenant: str = "co"
) -> RequestOutcome:
    end_s = came_s + ttft_s + tpot_s * (tokens - 1)
    return RequestOutcome(
        "r", "", tenant, model, "standard", "stop", 200, 100, 0, tokens, came_s, came_s + ttft_s, end_s, True
    )


@given(st.lists(st.floats(0.0, 100.0), min_size=1), st.sampled_from([0.5, 0.9]))
def test_page_quantile_is_the_smallest_value_with_enough_below(values: list[float], share: float) -> None:
    result = quantile(sorted(values), share)
    rounded = sorted(round(value, 5) for value in values)
    assert result == next(item for at, item in enumerate(rounded, 1) if at >= share * len(rounded) - 1e-9), (
        "by counting"
    )


def test_page_history_counts_attainment_and_drops_old_points() -> None:
    hour = PageHistory({"m": Slo(1.0, 0.1)})
    models = {"models": {"m": {"usd_per_h": 3.6}}}
    for item in (
        request_outcome("m", 0.0, 0.5, 0.05),
        request_outcome("m", 0.0, 2.0, 0.05),
        request_outcome("m", 0.0, 0.5, 0.2),
    ):
        hour.told(item)
    hour.look(0.0, models)
    figures = hour.columns()["models"]["m"]
    assert figures["ended_per_s"] == [3 / POINT_S]
    assert figures["in_time_per_s"] == [0.5], "one was late to begin, one late with its tokens"
    assert hour.last_min.models["m"]["classes"] == {"standard": (3, 1)}
    assert figures["ttft_p90_s"] == [2.0]
    assert figures["prompt_tokens_per_s"] == [300 / POINT_S]
    assert figures["output_tokens_per_s"] == [33 / POINT_S]
    assert figures["usd_per_mtok"] == [pytest.approx(3.6 * POINT_S / 3600 / 333 * 1e6, abs=1e-3)]
    assert hour.last_min.prompt_tokens == {"co": 300}
    assert hour.last_min.output_tokens == {"co": 33}
    for at in range(1, POINTS + 50):
        hour.look(at * POINT_S, models)
    result = hour.columns()
    assert len(result["at_s"]) == POINTS
    assert result["at_s"][0] == 50 * POINT_S
    assert hour.last_min.prompt_tokens == hour.last_min.output_tokens == {}
    assert hour.last_min.models["m"]["requests"] == 0
    assert len(hour._frames) <= FRAMES
    at_s, then = hour.frame(1000.0) or (0.0, {})
    assert at_s <= 1000.0 < at_s + FRAME_S
    assert then == models


def run_on_stage(what: Callable[[Stage, str, ClientSession], Awaitable[Any]], key: str | None = KEY) -> Any:
    async def run() -> Any:
        async with stage(key=key) as (made, url), ClientSession() as client:
            return await what(made, url, client)

    return asyncio.run(run())


def test_all_watchers_get_the_same_bytes_and_none_are_built_unwatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_of: list[str] = []
    real = showing.message
    monkeypatch.setattr(showing, "message", lambda kind, what: made_of.append(kind) or real(kind, what))

    async def run(made: Stage, url: str, client: ClientSession) -> None:
        page_stream = made.operators.page.show
        await asyncio.sleep(2.5 * showing.TICK_S)
        assert made_of == []
        one, other = page_stream.watch(), page_stream.watch()
        assert one is not None
        assert other is not None
        assert body(await one.next(1.0))["tables"] == page_stream._before
        assert body(await other.next(1.0))["tables"] == page_stream._before
        made.send(300, 4)
        news = await one.next(5.0), await other.next(5.0)
        assert news[0] == news[1]
        assert made_of.count("news") == news[0].count(b"event: news"), "once a tick, however many watch"
        page_stream.leave(one)
        page_stream.leave(other)
        before = len(made_of)
        await asyncio.sleep(2.5 * showing.TICK_S)
        assert len(made_of) == before

    run_on_stage(run)


def body(said: bytes) -> Any:
    return json.loads(said.split(b"\n\n")[0].split(b"data: ")[1])


def test_slow_page_reader_gets_the_whole_state_again() -> None:
    async def run() -> None:
        page_reader = PageReader()
        for at in range(showing.MOST_MESSAGES + 1):
            page_reader.put(b"%d" % at)
        assert page_reader.late
        page_reader.again(b"all")
        assert not page_reader.late
        assert await page_reader.next(1.0) == b"all"

    asyncio.run(run())


def test_request_row_has_its_times_in_order() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> Any:
        page_reader = made.operators.page.show.watch()
        assert page_reader is not None
        name = made.send(1500, 12)
        while name in made.open_requests:
            await asyncio.sleep(0.02)
        async with client.get(f"{url}/request", params={"id": name}) as answer:
            return await answer.json()

    row = run_on_stage(run)
    assert (row["state"], row["model"], row["output_tokens"]) == ("done", MODEL, 12)
    (attempt,) = row["attempts"]
    times = [attempt["sent_s"]]
    for segment in attempt["segments"][:-1]:
        times += [segment["computed_s"], segment["handed_s"]]
    times += [attempt["first_s"], row["ended_s"]]
    assert times == sorted(times)
    assert row["first_s"] == attempt["first_s"]


async def first_message(client: ClientSession, url: str) -> Any:
    async with client.get(f"{url}/live") as answer:
        return body(await answer.content.readuntil(b"\n\n"))


def test_first_page_message_has_earlier_requests() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> Any:
        names = [made.send(200, 4) for _ in range(3)]
        while made.open_requests:
            await asyncio.sleep(0.02)
        return names, (await first_message(client, url))["requests"]

    names, requests = run_on_stage(run)
    assert list(requests) == names
    assert all(row["state"] == "done" for row in requests.values())


@pytest.mark.parametrize(
    ("note", "said"),
    [(None, showing.STOPPED), (("The demo is over.", "Bye."), ("The demo is over.", "Bye."))],
)
def test_stopping_gateway_ends_the_page_stream_with_a_bye_event(
    note: tuple[str, str] | None, said: tuple[str, str]
) -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> Any:
        async with client.get(f"{url}/live") as answer:
            await answer.content.readuntil(b"\n\n")
            if note is not None:
                async with client.post(
                    f"{url}/note",
                    json={"what": note[0], "why": note[1], "kind": "end"},
                    headers={"Authorization": f"Bearer {KEY}"},
                ) as told_of:
                    assert told_of.status == 200
            await made.operators.close()
            return (await answer.content.read()).strip().split(b"\n\n")[-1]

    last = run_on_stage(run)
    assert last.startswith(b"event: bye\n")
    assert body(last + b"\n\n") == {"what": said[0], "why": said[1]}


def test_gateway_with_a_successor_sends_no_bye_event() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> bytes:
        async with client.get(f"{url}/live") as answer:
            await answer.content.readuntil(b"\n\n")
            await made.operators.close(followed=True)
            return await answer.content.read()

    with pytest.raises(ClientError):  # the stream breaks off, and the page asks again
        run_on_stage(run)


def test_page_stream_has_notices_and_token_rates() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> Any:
        made.operators.page.show._tables(0.0)  # what was made before the first look counts for nothing
        made.send(300, 40)
        while made.open_requests:
            await asyncio.sleep(0.02)
        return (await first_message(client, url))["tables"]

    result = run_on_stage(run)
    assert result["plan"]["now"]["notices"] == []
    for kind in ("prompt", "output"):
        rates = {name: row[f"{kind}_tokens_per_s"] for name, row in result["replicas"].items()}
        assert sum(rates.values()) > 0, kind
        assert all("tokens_per_s" not in row for row in result["replicas"].values()), "a sum of both kinds"
    core: Any = None
    assert any("Mock engines" in line for line in notices(core, GatewaySettings(mock_engines=True)))


def test_local_page_can_be_read_without_a_key_but_orders_need_it() -> None:
    async def asked(client: ClientSession, method: str, url: str, **headers: str) -> int:
        async with client.request(
            method, url, data=b"{}" if method != "GET" else None, headers=headers
        ) as answer:
            return answer.status

    async def run(made: Stage, url: str, client: ClientSession) -> None:
        with_key = {"Authorization": f"Bearer {KEY}"}
        for path in ("/", "/page/main.js", "/history", "/moment?at=1e12"):
            assert await asked(client, "GET", url + path) in (200, 404)
        for path in ("/snapshot", "/metrics", "/fleet", "/wanted", "/decisions"):
            assert await asked(client, "GET", url + path) == 401, path
        for path in ("/drain", "/cordon", "/uncordon", "/flip", "/kill", "/note"):
            assert await asked(client, "POST", url + path) == 401, path
            assert await asked(client, "POST", url + path, Authorization="Bearer wrong") == 401
            assert await asked(client, "POST", url + path, **with_key) == 400, "a wrong body, let in"
        assert await asked(client, "GET", url + "/history", Authorization="Bearer wrong") == 401
        assert await asked(client, "GET", url + "/history", Host="evil.example") == 403, (
            "a name made to point here"
        )
        assert await asked(client, "GET", url + "/history", Host="evil.example", **with_key) == 200
        assert await asked(client, "POST", url + "/chat", Origin="http://evil.example") == 403
        assert await asked(client, "GET", url + "/page/..%2fshow.py") == 404

    run_on_stage(run)


def test_reading_the_page_from_outside_needs_the_key() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> None:
        object.__setattr__(made.operators._context, "near", False)
        async with client.get(f"{url}/history") as answer:
            assert answer.status == 401
        async with client.get(f"{url}/history", headers={"Authorization": f"Bearer {KEY}"}) as answer:
            assert answer.status == 200
        async with client.get(f"{url}/", headers={"Host": "gateway.example"}) as answer:
            assert answer.status == 200, "the page itself has no secrets"

    run_on_stage(run)


def test_orders_are_refused_without_an_admin_key() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> tuple[int, str]:
        async with client.post(f"{url}/kill", json={"replica": "x"}) as answer:
            return answer.status, (await answer.json())["error"]["code"]

    assert run_on_stage(run, key=None) == (403, "no_admin_key")


def test_page_files_have_a_strict_policy_and_nothing_inline() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> dict[str, str]:
        async with client.get(f"{url}/") as answer:
            return dict(answer.headers)

    policy = run_on_stage(run)["Content-Security-Policy"]
    for item in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"):
        assert item in policy.split("; ")
    assert "unsafe" not in policy
    page = files()["index.html"].body.decode()
    assert "style=" not in page
    assert "<style" not in page
    assert page.count("<script") == page.count('<script type="module" src=')
    for name, file in files().items():
        text = file.body.decode()
        assert "innerHTML" not in text, name
        assert "http:" not in text.replace("http://www.w3.org/", ""), name
        assert "https:" not in text, name


def test_kill_order_is_refused_for_an_engine_started_elsewhere() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> None:
        (name, *_) = made.core.brain.fleet.views
        headers = {"Authorization": f"Bearer {KEY}"}
        await asyncio.sleep(0.3)
        async with client.post(f"{url}/kill", json={"replica": name}, headers=headers) as answer:
            assert answer.status == 200
        assert made.operations.wanted()["kill"] in ([name], [])
        while name in made.core.brain.fleet.views:
            await asyncio.sleep(0.05)
        assert made.operations.wanted()["kill"] == [], "it is gone, so nothing is left to kill"
        (name, *_) = made.core.brain.fleet.views
        made.core.asked_s = -100.0
        for task in made._tasks:
            task.cancel()
        await asyncio.sleep(0)
        made.core.asked_s = -100.0
        async with client.post(f"{url}/kill", json={"replica": name}, headers=headers) as answer:
            assert answer.status == 400
            assert "no controller" in (await answer.json())["error"]["message"]

    run_on_stage(run)


def test_playground_sends_the_client_key() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> tuple[str, str]:
        from aiohttp import web

        seen: list[str] = []

        async def hears(request: web.Request) -> web.Response:
            seen.append(request.headers.get("Authorization", ""))
            return web.json_response({"error": {"message": "no"}}, status=401, headers={"Retry-After": "3"})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", hears)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.operators.page.chat.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        headers = {"X-Potluck-Client-Key": "sk-1", "Authorization": f"Bearer {KEY}"}
        async with client.post(f"{url}/chat", json={}, headers=headers) as answer:
            result = seen[0], str(answer.status) + answer.headers["Retry-After"]
        await runner.cleanup()
        return result

    assert run_on_stage(run) == ("Bearer sk-1", "4013"), "the operators' key goes nowhere"


def test_slow_emulation_machine_is_reported_on_the_page() -> None:
    async def run(made: Stage, url: str, client: ClientSession) -> tuple[Any, list[str]]:
        late = made.core.watch.lateness
        late.told("engine", 0.0, 0.0)
        late.told("engine", 10.0, 42.0)
        async with client.get(f"{url}/snapshot", headers={"Authorization": f"Bearer {KEY}"}) as answer:
            message = await answer.json()
        settings: Any = SimpleNamespace(mock_engines=False)
        return message, [*notices(made.core, settings)]

    text, shown = run_on_stage(run)
    assert text["slowdown"] == pytest.approx(4.2)
    assert shown[0] == text["notices"][0]
    assert shown[0].startswith("this machine computes 4.2 times slower than the GPUs it stands for")

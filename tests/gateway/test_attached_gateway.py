"""A gateway over attached servers, with real sockets and stub servers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession
from stub_servers import HTML, Answers, StubServer, llama_cpp, ollama, vllm

from potluck.cli.up.attach import attachment_of, planned, probe_all, write_roster
from potluck.core.state.policy import Policy
from potluck.gateway.registry import server_probe
from potluck.gateway.registry.engine_list import EngineListFile, read_engines
from potluck.gateway.serve import cards_of, serve
from potluck.gateway.values import GatewaySettings, ListenAddresses
from potluck.gateway.workers.supervisor import make_post
from potluck.gateway.workers.worker import WorkerContext
from potluck.runtime.attached_plan import resolved_attached

GIVE_UP_S = 60.0


@pytest.fixture
def start_server() -> Iterator[Callable[..., StubServer]]:
    servers: list[StubServer] = []

    def start_one(answers: Answers, **options: Any) -> StubServer:
        servers.append(StubServer(answers, **options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def _list_models_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "MODELS_REFRESH_S", 0.0)


class Client:
    def __init__(self, session: ClientSession, url: str, admin: str) -> None:
        self._session, self.url, self._admin = session, url, admin

    async def chat(self, model: str, text: str = "hi", **fields: Any) -> tuple[int, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": text}], **fields}
        async with self._session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> Any:
        async with self._session.get(f"{self.url}{path}") as answer:
            return await answer.json()

    async def operators(self, path: str) -> str:
        async with self._session.get(f"{self._admin}{path}") as answer:
            return await answer.text()

    async def snapshot(self) -> Any:
        return json.loads(await self.operators("/snapshot"))

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        """The first snapshot of which it holds."""
        async with asyncio.timeout(GIVE_UP_S):
            while not condition(snapshot := await self.snapshot()):
                await asyncio.sleep(0.05)
        return snapshot


@asynccontextmanager
async def gateway(folder: Path, *lines: str) -> AsyncIterator[Client]:
    """Over a servers file with these entries, as `potluck up --attach` starts it."""
    file, roster = folder / "given.yaml", folder / "roster.yaml"
    file.write_text("engines:\n" + "".join(f"  - {{{line}}}\n" for line in lines))
    entries = read_engines(file.read_text(), file.name, folder)
    attachment = attachment_of(await asyncio.to_thread(probe_all, entries))
    plan = planned(attachment)
    write_roster(roster, attachment, file)
    settings = GatewaySettings(ListenAddresses(port=0, admin_port=0), engines=roster, attached=True)
    resolved = resolved_attached(plan, {})
    context = WorkerContext(
        settings, Policy(max_wait_s=1.0), cards_of(resolved, settings, EngineListFile(roster).entries)
    )
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    process = await make_post(settings.places)
    task = asyncio.create_task(serve(resolved, context, lambda *at: ready.set_result(at), process))
    try:
        await asyncio.wait((ready, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        async with ClientSession() as session:
            yield Client(session, *ready.result())
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        process.close()


def run(folder: Path, lines: tuple[str, ...], body: Callable[[Client], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with gateway(folder, *lines) as client:
            await body(client)

    asyncio.run(whole())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_models_of_different_server_kinds_are_served(
    tmp_path: Path, start_server: Callable[..., StubServer]
) -> None:
    servers = (
        start_server(vllm("a", 4096)),
        start_server(ollama("b", "c")),
        start_server(llama_cpp("d"), prefix="/x", key="secret"),
    )
    (tmp_path / "key").write_text("secret\n")
    lines = (
        f"url: '{servers[0].url}'",
        f"url: '{servers[1].url}'",
        f"url: '{servers[2].url}/v1', key_file: key",
    )

    async def body(client: Client) -> None:
        for model, server in zip("abcd", (servers[0], servers[1], servers[1], servers[2]), strict=True):
            status, answer = await client.chat(model)
            assert status == 200, answer
            assert answer["choices"][0]["message"]["content"] == f"{server.url} as {model}"
        listed = {item["id"]: item.get("max_model_len") for item in (await client.get("/v1/models"))["data"]}
        assert listed == {"a": 4096, "b": None, "c": None, "d": None}
        assert "/x/v1/chat/completions" in servers[2].asked
        roster = (tmp_path / "roster.yaml").read_text()
        assert "secret" not in roster + await client.operators("/snapshot")

    run(tmp_path, lines, body)


def test_request_is_refused_at_once_with_the_reason_of_each_server(
    tmp_path: Path, start_server: Callable[..., StubServer]
) -> None:
    page, port = start_server({"/health": (200, HTML), "/v1/models": (200, HTML)}), free_port()
    lines = (
        f"url: '{start_server(vllm('a')).url}'",
        f"url: '{page.url}', model: b",
        f"url: 'http://127.0.0.1:{port}', model: b",
    )

    async def body(client: Client) -> None:
        status, answer = await client.chat("b")
        assert (status, answer["error"]["code"]) == (503, "no_capacity")
        for reason in (f"{page.url}/v1/models is a web page", f"http://127.0.0.1:{port} cannot be reached"):
            assert reason in answer["error"]["message"]
        assert (await client.chat("a"))[0] == 200
        snapshot = await client.snapshot()
        assert snapshot["models"]["a"]["ready"]
        assert not snapshot["models"]["b"]["ready"]
        assert len(snapshot["notices"]) == 2
        rows = json.loads(await client.operators("/history"))
        assert rows["format"] == "potluck.page"

    run(tmp_path, lines, body)


def test_server_that_comes_up_later_is_used_and_one_that_stops_is_reported(
    tmp_path: Path, start_server: Callable[..., StubServer]
) -> None:
    port = free_port()

    async def body(client: Client) -> None:
        assert (await client.chat("m"))[0] == 503
        server = start_server(vllm("m"), port=port)
        await client.until(lambda snapshot: snapshot["models"]["m"]["ready"])
        assert (await client.chat("m"))[0] == 200
        server.close()
        snapshot = await client.until(lambda snapshot: not snapshot["models"]["m"]["ready"])
        assert f"http://127.0.0.1:{port}" in snapshot["models"]["m"]["why"]
        status, answer = await client.chat("m")
        assert (status, answer["error"]["code"]) == (503, "no_capacity")

    run(tmp_path, (f"url: 'http://127.0.0.1:{port}', model: m",), body)


def test_server_that_changed_its_model_is_not_used(
    tmp_path: Path, start_server: Callable[..., StubServer]
) -> None:
    server = start_server(vllm("m"))

    async def body(client: Client) -> None:
        assert (await client.chat("m"))[0] == 200
        server.answers |= vllm("other")
        snapshot = await client.until(lambda snapshot: not snapshot["models"]["m"]["ready"])
        assert "does not list model 'm'; it lists other" in snapshot["models"]["m"]["why"]
        assert (await client.chat("m"))[0] == 503

    run(tmp_path, (f"url: '{server.url}'",), body)


def test_request_beyond_the_server_context_is_refused_before_it_is_sent(
    tmp_path: Path, start_server: Callable[..., StubServer]
) -> None:
    server = start_server(vllm("m", 100))

    async def body(client: Client) -> None:
        for text, fields in (("word " * 2000, {}), ("word " * 300, {}), ("hi", {"max_tokens": 101})):
            status, answer = await client.chat("m", text, **fields)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert not any(path.endswith("completions") for path in server.asked)
        assert (await client.chat("m", "hi", max_tokens=50))[0] == 200
        assert (await client.chat("m", "hi"))[0] == 200

    run(tmp_path, (f"url: '{server.url}'",), body)


def test_request_goes_to_a_server_whose_context_fits_it(
    tmp_path: Path, start_server: Callable[..., StubServer]
) -> None:
    short, long, unknown = (
        start_server(vllm("m", 200)),
        start_server(vllm("m", 2000)),
        start_server(llama_cpp("n")),
    )

    async def body(client: Client) -> None:
        for _ in range(4):
            assert (await client.chat("m", "word " * 300))[0] == 200
        assert "/v1/chat/completions" not in short.asked
        for _ in range(8):
            assert (await client.chat("m", "hi"))[0] == 200
        assert "/v1/chat/completions" in short.asked, "without a limit of its own a request may go to each"
        assert (await client.chat("n", "word " * 50_000))[0] == 200, (
            "its limit is unknown: the server decides"
        )

    run(tmp_path, tuple(f"url: '{server.url}'" for server in (short, long, unknown)), body)


def test_attached_servers_have_no_hardware_and_no_price(
    tmp_path: Path, start_server: Callable[..., StubServer]
) -> None:
    server = start_server(vllm("m"))

    async def body(client: Client) -> None:
        assert (await client.chat("m"))[0] == 200
        snapshot = await client.snapshot()
        assert snapshot["plan"]["cost_usd_per_h"] is None
        assert snapshot["models"]["m"]["usd_per_h"] is None
        assert snapshot["models"]["m"]["slo"] is None
        assert [replica["pace"] for replica in snapshot["replicas"]] == [None]
        assert [region["offers"] for region in snapshot["regions"]] == [[]]
        metrics = await client.operators("/metrics")
        assert "potluck_usd_per_hour{" not in metrics
        assert "potluck_usd_per_million_tokens{" not in metrics
        page = await client.operators("/moment?at=9999999999")
        for text in (json.dumps(snapshot), metrics, page):
            assert "L40S" not in text
            assert "Llama" not in text

    run(tmp_path, (f"url: '{server.url}'",), body)


def test_roster_names_key_files_and_holds_no_key(
    tmp_path: Path, start_server: Callable[..., StubServer]
) -> None:
    server = start_server(vllm("m"), key="secret")
    (tmp_path / "k").write_text("secret")
    file = tmp_path / "servers.yaml"
    file.write_text(f"engines: [{{url: '{server.url}', key_file: k}}]")
    entries = read_engines(file.read_text(), file.name, tmp_path)
    (tmp_path / "state").mkdir()
    write_roster(tmp_path / "state" / "roster.yaml", attachment_of(probe_all(entries)), file)
    text = (tmp_path / "state" / "roster.yaml").read_text()
    assert "secret" not in text
    (written,) = yaml.safe_load(text)["engines"]
    assert written["key_file"] == str(tmp_path / "k")
    (entry,) = read_engines(text, "roster.yaml", tmp_path / "state")
    assert (entry.key, entry.model, entry.max_model_len, entry.token_ids) == ("secret", "m", 4096, True)

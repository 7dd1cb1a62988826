"""Probes of attached servers over real sockets: health paths, models and problems."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from stub_servers import HTML, Answers, StubServer, listing, lite_llm, llama_cpp, ollama, sglang, vllm

from potluck.core.errors import InputError
from potluck.gateway.http.connection_pool import ConnectionPool
from potluck.gateway.registry import server_probe
from potluck.gateway.registry.engine_list import EngineEntry, read_engines
from potluck.gateway.registry.server_probe import (
    ListedModel,
    Listing,
    ServerProbes,
    ServerUnusable,
    served_name,
)

NOT_FOUND = (404, b'{"detail":"Not Found"}')
MODELS = (200, listing({"id": "m"}))


@pytest.fixture
def start_server() -> Iterator[Callable[..., StubServer]]:
    servers: list[StubServer] = []

    def start_one(answers: Answers, **options: Any) -> StubServer:
        servers.append(StubServer(answers, **options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def probe(*entries: EngineEntry, times: int = 1) -> list[Listing]:
    """What probes of these entries found, `times` after each other."""

    async def run() -> list[Listing]:
        pool = ConnectionPool()
        probes = ServerProbes(pool)
        try:
            return [await probes.of(entry).look() for _ in range(times) for entry in entries]
        finally:
            await pool.close()

    return asyncio.run(run())


def entry_of(server: StubServer, **fields: Any) -> EngineEntry:
    return EngineEntry(server.url, "openai", **fields)


@pytest.fixture
def probe_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "SHARED_PROBE_MAX_AGE_S", 0.0)


@pytest.mark.parametrize(
    ("answers", "models"),
    [
        (vllm("m", 8192), [ListedModel("m", 8192, "m", "vllm")]),
        (sglang("m", 4096), [ListedModel("m", 4096, "", "sglang")]),
        (llama_cpp("m"), [ListedModel("m", 0, "", "llamacpp")]),
        (
            ollama("m:latest", "n"),
            [ListedModel("m:latest", 0, "", "library"), ListedModel("n", 0, "", "library")],
        ),
        ({"/v1/models": (200, listing({"id": "m", "context_window": 131072}))}, [ListedModel("m", 131072)]),
        ({"/v1/models": (200, listing({"id": "m", "max_model_len": -5}))}, [ListedModel("m")]),
        ({"/v1/models": (200, listing({"id": "m"}, {"id": "m"}, {"id": 7}, {}))}, [ListedModel("m")]),
    ],
)
def test_models_of_each_kind_of_server_are_listed(
    start_server: Callable[..., StubServer], answers: Answers, models: list[ListedModel]
) -> None:
    assert probe(entry_of(start_server(answers))) == [tuple(models)]


@pytest.mark.usefixtures("probe_each_time")
@pytest.mark.parametrize("status", [404, 405, 501, 401, 400, 307])
def test_models_path_is_polled_where_there_is_no_health_path(
    start_server: Callable[..., StubServer], status: int
) -> None:
    server = start_server({"/health": (status, b""), "/v1/models": MODELS})
    probe(entry_of(server), times=3)
    assert server.asked == ["/health", "/v1/models", "/v1/models", "/v1/models"]


@pytest.mark.usefixtures("probe_each_time")
def test_health_path_is_polled_and_models_are_listed_occasionally(
    start_server: Callable[..., StubServer],
) -> None:
    server = start_server(vllm("m"))
    probe(entry_of(server), times=3)
    assert server.asked == ["/health", "/v1/models", "/health", "/health"]


@pytest.mark.usefixtures("probe_each_time")
def test_health_path_that_queries_all_models_is_not_polled(start_server: Callable[..., StubServer]) -> None:
    server = start_server(lite_llm("a", "b"))
    probe(entry_of(server), times=3)
    assert server.asked.count("/health") == 1


@pytest.mark.usefixtures("probe_each_time")
def test_configured_health_path_is_used_instead(start_server: Callable[..., StubServer]) -> None:
    server = start_server({"/ping": (200, b""), "/health": (500, b""), "/v1/models": MODELS})
    probe(entry_of(server, health="/ping"), times=2)
    assert server.asked == ["/ping", "/v1/models", "/ping"]
    del server.answers["/ping"]
    with pytest.raises(ServerUnusable, match=r"/ping was answered with 404; .*`health:`"):
        probe(entry_of(server, health="/ping"))


@pytest.mark.usefixtures("probe_each_time")
def test_rate_limit_on_the_models_path_is_no_failure(start_server: Callable[..., StubServer]) -> None:
    server = start_server(ollama("m"))

    async def run() -> tuple[Listing, Listing]:
        pool = ConnectionPool()
        server_probe = ServerProbes(pool).of(entry_of(server))
        try:
            first = await server_probe.look()
            server.answers["/v1/models"] = (429, b"")
            return first, await server_probe.look()
        finally:
            await pool.close()

    before, after = asyncio.run(run())
    assert before == after


def test_healthy_server_without_a_health_path_is_polled_rarely(
    start_server: Callable[..., StubServer],
) -> None:
    server = start_server(ollama("m"))

    async def run() -> None:
        pool = ConnectionPool()
        server_probe = ServerProbes(pool).of(entry_of(server))
        for _ in range(3):
            await server_probe.look(fresh=False)
        await pool.close()

    asyncio.run(run())
    assert server.asked == ["/health", "/v1/models"]


def test_server_without_a_model_list_needs_a_model_name(start_server: Callable[..., StubServer]) -> None:
    server = start_server({"/health": (200, b"")})
    assert probe(entry_of(server)) == [None]
    assert served_name(entry_of(server, model="m"), None) == "m"
    with pytest.raises(ServerUnusable, match="set `model:`"):
        served_name(entry_of(server), None)


def test_path_prefix_precedes_every_path(start_server: Callable[..., StubServer]) -> None:
    server = start_server(vllm("m"), prefix="/team/llm")
    for url in (server.url, f"{server.url}/", f"{server.url}/v1", f"{server.url}/v1/"):
        (entry,) = read_engines(f"engines: [{{url: '{url}'}}]", "servers.yaml")
        assert (entry.kind, entry.path_prefix) == ("openai", "/team/llm")
        probe(entry)
    assert set(server.asked) == {"/team/llm/health", "/team/llm/v1/models"}


@pytest.mark.usefixtures("probe_each_time")
def test_changed_models_are_detected(
    start_server: Callable[..., StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_probe, "MODELS_REFRESH_S", 0.0)
    server = start_server(vllm("m"))

    async def run() -> list[Listing]:
        pool = ConnectionPool()
        server_probes = ServerProbes(pool)
        first = await server_probes.of(entry_of(server)).look()
        server.answers |= vllm("other", 512)
        try:
            return [first, await server_probes.of(entry_of(server)).look()]
        finally:
            await pool.close()

    before, after = asyncio.run(run())
    assert before is not None
    assert after is not None
    assert [model.id for model in (*before, *after)] == ["m", "other"]


def test_entries_of_one_server_share_its_probes(start_server: Callable[..., StubServer]) -> None:
    server = start_server(ollama("a", "b"))
    probe(entry_of(server, model="a"), entry_of(server, model="b"))
    assert server.asked.count("/v1/models") == 1


@pytest.mark.parametrize(
    ("answers", "reason", "definite"),
    [
        (
            {"/health": (503, b'{"error":{"message":"Loading model"}}')},
            "answered with 503: Loading model",
            False,
        ),
        ({"/health": (500, b"oops")}, "answered with 500; see the server's log", False),
        ({}, "neither /health nor /v1/models; correct its url", True),
        ({"/health": (200, HTML), "/v1/models": (200, HTML)}, "is a web page", True),
        ({"/v1/models": (200, b"{not json")}, "is not JSON", True),
        ({"/v1/models": (200, b"[" * 5000)}, "is not JSON", True),
        ({"/v1/models": (200, b"[]")}, "has no list `data`", True),
        ({"/v1/models": (200, b'{"data": {}}')}, "has no list `data`", True),
        ({"/v1/models": (200, b'{"data": []}')}, "lists no models; load one", True),
        ({"/v1/models": (429, b"")}, "/v1/models was answered with 429", False),
        ({"/v1/models": (402, b"")}, "/v1/models was answered with 402", True),
        ({"/v1/models": (500, b"")}, "/v1/models was answered with 500", False),
        ({"/v1/models": (301, b"")}, "/v1/models was answered with 301; correct its url", True),
    ],
)
def test_unusable_server_reason_names_server_and_fix(
    start_server: Callable[..., StubServer], answers: Answers, reason: str, definite: bool
) -> None:
    server = start_server(answers)
    with pytest.raises(ServerUnusable) as error:
        probe(entry_of(server))
    assert reason in str(error.value)
    assert str(error.value).startswith(server.url)
    assert error.value.definite is definite


def test_reason_of_a_refused_connection_names_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ServerUnusable, match=rf"{url} cannot be reached \(connection refused\); start it"):
        probe(EngineEntry(url, "openai"))


def test_reason_of_a_refused_key_does_not_show_the_key(start_server: Callable[..., StubServer]) -> None:
    server = start_server(vllm("m"), key="right-key")
    with pytest.raises(
        ServerUnusable, match=r"401: the server asks for a key; set `key_file:` or `key_env:`"
    ):
        probe(entry_of(server))
    with pytest.raises(ServerUnusable, match="does not accept the key") as error:
        probe(entry_of(server, key="wrong-key"))
    assert "wrong-key" not in str(error.value)
    assert probe(entry_of(server, key="right-key")) != [None]


def test_server_with_a_model_list_beyond_the_size_limit_is_unusable(
    start_server: Callable[..., StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_probe, "PROBE_MAX_BYTES", 1000)
    server = start_server({"/v1/models": (200, listing(*({"id": f"m{n}"} for n in range(100))))})
    with pytest.raises(ServerUnusable, match="larger than 1000 bytes"):
        probe(entry_of(server))


def test_server_that_never_answers_is_reported_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "PROBE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            ServerUnusable, match=r"/v1/models does not answer \(did not answer within 0.05 s\)"
        ):
            probe(EngineEntry(url, "openai"))


def test_answer_that_is_not_http_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            with suppress(OSError):
                for _ in range(2):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1000)
                        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerUnusable, match="does not speak HTTP"):
            probe(EngineEntry(url, "openai"))
        thread.join()


@pytest.mark.parametrize(
    ("fields", "names", "served"),
    [
        ({"model": "a"}, ["a", "b"], "a"),
        ({"model": "mine"}, ["org/long-name"], "org/long-name"),
        ({"model": "mine", "served_model": "b"}, ["a", "b"], "b"),
        ({"model": "llama3"}, ["llama3:latest", "b"], "llama3:latest"),
    ],
)
def test_served_name_is_the_listed_one(fields: dict[str, str], names: list[str], served: str) -> None:
    models = tuple(map(ListedModel, names))
    assert served_name(EngineEntry("http://h:1", "openai", **fields), models) == served  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"model": "x"}, {"model": "m", "served_model": "x"}])
def test_model_that_is_not_listed_is_reported_with_listed_ones(fields: dict[str, str]) -> None:
    models = tuple(ListedModel(f"m{n}") for n in range(7))
    with pytest.raises(
        ServerUnusable, match="does not list model 'x'; it lists m0, m1, m2, m3, m4 and 2 more"
    ):
        served_name(EngineEntry("http://h:1", "openai", **fields), models)  # type: ignore[arg-type]


def test_servers_file_lists_a_server_once_per_model() -> None:
    text = "engines: [{url: 'http://h:1', model: a}, {url: 'http://h:1', model: b}, {url: 'http://h:2'}]"
    entries = read_engines(text, "servers.yaml")
    assert [(entry.kind, entry.name) for entry in entries] == [
        ("openai", "http://h:1#a"),
        ("openai", "http://h:1#b"),
        ("segments", "http://h:2"),
    ]
    with pytest.raises(InputError, match="is there twice"):
        read_engines(
            "engines: [{url: 'http://h:1', model: a}, {url: 'http://h:1', model: a}]", "servers.yaml"
        )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("url: 'http://u:secret@h:1'", "must hold no user or password"),
        ("url: 'http://h:1/a b'", "must end behind the port or a path"),
        ("url: 'http://h:1?x=1'", "must end behind the port or a path"),
        ("url: 'http://h:1', health: ping", "health"),
        ("url: 'http://h:1', kind: segments, health: /ping", "health"),
        ("url: 'http://h:1', max_model_len: -1", "max_model_len"),
        ("url: 'http://h:1', key_env: POTLUCK_NO_SUCH_KEY", "POTLUCK_NO_SUCH_KEY is not set"),
        ("url: 'http://h:1', key_env: HOME, key_file: k", "key_env"),
    ],
)
def test_servers_file_problem_is_reported_with_its_field(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(InputError) as error:
        read_engines(f"engines: [{{{line}}}]", "servers.yaml", tmp_path)
    assert problem in str(error.value)
    assert "secret" not in str(error.value)


def test_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_KEY", " from-env\n")
    (entry,) = read_engines("engines: [{url: 'https://h', key_env: MY_KEY}]", "servers.yaml", tmp_path)
    assert entry.key == "from-env"
    assert "from-env" not in repr(entry)

"""Requests that a page of somebody else makes a browser send, and the name that every answer carries."""

from __future__ import annotations

import asyncio

import pytest
from face_kit import NAME, face, make_service, played

from potluck.api.http import HttpRefusal, ServedNames, check_origin

HERE = ServedNames(loopback=True)
OPEN = ServedNames(loopback=False, names=frozenset({"gpu7"}))
KEYED = ServedNames(loopback=False, keyed=True)
NAMED = ServedNames(loopback=True, names=frozenset({"llm.example"}))

FINE = [
    (HERE, "POST", {"Host": "127.0.0.1:8000"}),
    (HERE, "POST", {"Host": "LocalHost:9"}),
    (HERE, "POST", {"Host": "localhost."}),
    (HERE, "POST", {"Host": "[::1]:8000", "Origin": "http://[::1]:8000"}),
    (HERE, "POST", {"Host": "127.9.9.9"}),
    (HERE, "POST", {}),
    (
        HERE,
        "POST",
        {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
    ),
    (HERE, "POST", {"Host": "localhost:8000", "Sec-Fetch-Site": "none"}),
    (
        HERE,
        "GET",
        {"Host": "localhost:8000", "Origin": "https://example.org", "Sec-Fetch-Site": "cross-site"},
    ),
    (NAMED, "POST", {"Host": "llm.example", "Origin": "https://llm.example"}),
    (NAMED, "POST", {"Host": "127.0.0.1:8000", "Origin": "https://llm.example"}),
    (OPEN, "POST", {"Host": "engine-3.cluster.local:8000"}),
    (OPEN, "POST", {"Host": "10.0.0.5:8000", "Origin": "http://10.0.0.5:8000"}),
    (OPEN, "POST", {"Host": "gpu7:8000", "Origin": "http://gpu7:8000"}),
    (KEYED, "POST", {"Host": "llm.example", "Origin": "https://llm.example"}),
]
NOT = [
    # A form or a script of another page, also one on another port of this machine.
    (HERE, "POST", {"Host": "localhost:8000", "Origin": "https://example.org"}, "cross_origin"),
    (HERE, "POST", {"Host": "localhost:8000", "Origin": "http://localhost:3000"}, "cross_origin"),
    (HERE, "POST", {"Host": "localhost:8000", "Origin": "null"}, "cross_origin"),
    (HERE, "POST", {"Host": "localhost:8000", "Origin": ""}, "cross_origin"),
    (HERE, "PUT", {"Host": "localhost:8000", "Sec-Fetch-Site": "cross-site"}, "cross_origin"),
    (HERE, "POST", {"Host": "localhost:8000", "Sec-Fetch-Site": "same-site"}, "cross_origin"),
    (KEYED, "POST", {"Host": "llm.example", "Origin": "https://example.org"}, "cross_origin"),
    # A name of theirs that was made to point here; the browser takes the answer for theirs.
    (HERE, "GET", {"Host": "rebound.example:8000"}, "wrong_host"),
    (HERE, "POST", {"Host": "rebound.example:8000", "Origin": "http://rebound.example:8000"}, "wrong_host"),
    (HERE, "GET", {"Host": "localhost.rebound.example"}, "wrong_host"),
    (HERE, "GET", {"Host": "10.0.0.5:8000"}, "wrong_host"),
    (OPEN, "POST", {"Host": "rebound.example", "Origin": "http://rebound.example"}, "wrong_host"),
    (HERE, "GET", {"Host": ""}, "wrong_host"),
    (HERE, "GET", {"Host": "localhost:x"}, "wrong_host"),
    (HERE, "GET", {"Host": "[localhost"}, "wrong_host"),
    (HERE, "GET", {"Host": "a@localhost"}, "wrong_host"),
    (HERE, "GET", {"Host": "localhost/x"}, "wrong_host"),
]


@pytest.mark.parametrize(("served", "method", "headers"), FINE)
def test_clients_and_the_engines_own_page_pass(
    served: ServedNames, method: str, headers: dict[str, str]
) -> None:
    check_origin(method, headers, served)


@pytest.mark.parametrize(("served", "method", "headers", "code"), NOT)
def test_pages_of_others_do_not(served: ServedNames, method: str, headers: dict[str, str], code: str) -> None:
    with pytest.raises(HttpRefusal) as caught:
        check_origin(method, headers, served)
    assert (caught.value.status, caught.value.code) == (403, code)


def test_no_page_drains_an_engine_and_every_answer_has_a_name() -> None:
    async def scenario() -> None:
        async with face(make_service("full")) as one:
            form = {"Origin": "https://example.org", "Content-Type": "text/plain"}
            for method, path in (
                ("POST", "/drain"),
                ("POST", "/role"),
                ("PUT", "/peers"),
                ("POST", "/segments"),
            ):
                async with one.session.request(method, one.url + path, data=b"{}", headers=form) as reply:
                    assert reply.status == 403
                    assert (await reply.json())["error"]["code"] == "cross_origin"
            rebound = {"Host": "rebound.example"}
            async with one.session.get(one.url + "/status", headers=rebound) as reply:
                assert reply.status == 403
            assert not one.service.draining
            page = {"Origin": one.url, "Content-Type": "text/plain"}
            body = f'{{"model": "{NAME}", "prompt": "abc"}}'.encode()
            async with one.session.post(one.url + "/v1/completions", data=body, headers=page) as reply:
                assert reply.status == 200
            # Names of requests: the client's if it is one, else ours; on errors as well.
            seen = set()
            for path, given, kept in (
                ("/health", "abc-1:2", True),
                ("/nowhere", "abc", True),
                ("/health", "a b", False),
                ("/health", "x" * 129, False),
                ("/status", "", False),
            ):
                async with one.session.get(one.url + path, headers={"X-Request-Id": given}) as reply:
                    said = reply.headers["x-request-id"]
                    assert (said == given) == kept
                    seen.add(said)
            assert len(seen) == 5
            async with one.session.get(one.url + "/v1/models/" + NAME) as reply:
                assert (await reply.json())["id"] == NAME
            status, wrong = await one.get("/v1/models/meta/llama")
            assert (status, wrong["error"]["code"]) == (404, "model_not_found")
            host, port = one.url.removeprefix("http://").split(":")
            begun = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
            for wrong_bytes in (
                b"GARBAGE\r\n\r\n",
                begun + b"TE\t: chunked\r\n",  # refused before the head is whole
                begun + b"TE : chunked\r\n",
                begun + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
                begun + b"Content-Length : 4\r\n\r\nabcd",
                begun + b"X: a\r\n folded\r\n",
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(wrong_bytes)
                head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
                assert b" 400 " in head.split(b"\r\n")[0]
                assert b"x-request-id: req-" in head
                assert rest.startswith(b'{"error": {"message": "the request cannot be read as HTTP')
                writer.close()

    played(scenario)

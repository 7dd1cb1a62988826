"""Tenants' salts reach the prefix caches of plain servers that take them, and no server that may refuse them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from drive_kit import Call, asked
from drive_stage import Stage

from potluck.core.errors import FormatError
from potluck.core.values.route import aggregated
from potluck.gateway.dispatch import relay_attempt
from potluck.gateway.registry.engine_list import read_roster
from potluck.gateway.values import ChoiceRequest

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
KNOWN = {"model", "messages", "prompt", "stream", "max_tokens", "min_tokens", "add_special_tokens"}
SALT_SSE = {b"content-type": b"text/event-stream"}
JSON = {b"content-type": b"application/json"}
REPLY = b'{"choices":[{"text":"there"}],"usage":{"completion_tokens":2}}'


def salted(salt: str, stream: bool = False, **fields: Any) -> ChoiceRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, **fields}
    return asked("r", 5, 7, path=CHAT, body=json.dumps(body).encode(), stream=stream, salt=salt)


def strict(call: Call, *more: str) -> int:
    """A server that refuses what it does not know, and names that come twice; its status."""
    pairs: list[tuple[str, Any]] = json.loads(call.raw, object_pairs_hook=list)
    names = [name for name, _ in pairs]
    fine = len(set(names)) == len(names) and {*names} <= KNOWN.union(more)
    call.listener.head(200 if fine else 422, JSON)
    call.write_raw(REPLY if fine else b'{"error":{"message":"extra fields are not permitted"}}')
    call.end()
    return 200 if fine else 422


@pytest.mark.parametrize("fields", [{}, {"cache_salt": "mine"}, {"metadata": {"cache_salt": "x"}}])
def test_a_server_that_takes_salts_gets_the_tenants_own_and_once(fields: dict[str, Any]) -> None:
    stage = Stage()
    stage.fleet.add("x", kind="openai", served_model="theirs", cache_salt=True)
    heard = stage.begin(salted("of-a-tenant", **fields), aggregated("x"))
    body = stage.call("x").body
    assert body["cache_salt"] == "of-a-tenant"
    assert body["model"] == "theirs"
    assert body.get("metadata") == fields.get("metadata")
    assert strict(stage.call("x"), "cache_salt", "metadata") == heard.status == 200
    assert heard.relayed == REPLY


def test_a_server_that_may_refuse_it_gets_none() -> None:
    stage = Stage()
    stage.fleet.add("x", kind="openai", served_model="m")
    what = salted("of-a-tenant")
    heard = stage.begin(what, aggregated("x"))
    assert stage.call("x").raw == what.body, "bodies go on as they came"
    assert strict(stage.call("x")) == heard.status == 200
    # Nor is anything invented where tenants share: no keys, no salt.
    stage = Stage()
    stage.fleet.add("x", kind="openai", served_model="m", cache_salt=True)
    what = salted("")
    stage.begin(what, aggregated("x"))
    assert stage.call("x").raw == what.body


@pytest.mark.parametrize("takes", [True, False])
def test_what_goes_on_elsewhere_keeps_its_salt(takes: bool) -> None:
    stage = Stage()
    for each in ("x", "y"):
        stage.fleet.add(each, kind="openai", served_model="m", token_ids=True, cache_salt=takes)
    what = salted("of-a-tenant", stream=True)
    stage.begin(what, aggregated("x"))
    first = stage.call("x")
    assert first.body.get("cache_salt") == ("of-a-tenant" if takes else None)
    first.listener.head(200, SALT_SSE)
    said = {"id": "1", "choices": [{"index": 0, "delta": {"content": "It"}, "token_ids": [100]}]}
    raw = json.dumps({**said, "prompt_token_ids": [1, 2]}, separators=(",", ":")).encode()
    first.write_raw(b"data: " + raw + b"\n\n")
    first.lose()
    stage.again(what, aggregated("y"), 1, 1)
    other = stage.call("y")
    assert (other.path, other.body["prompt"]) == (COMPLETIONS, [1, 2, 100])
    assert other.body.get("cache_salt") == ("of-a-tenant" if takes else None)


def test_a_salt_joins_what_else_is_added() -> None:
    made = relay_attempt.forwarded(b'{"model":"m","cache_salt":"own"}', "m", "n", b'"more":1', 'a"b')
    assert json.loads(made) == {"model": "n", "more": 1, "cache_salt": 'a"b'}


def test_the_roster_says_who_takes_salts() -> None:
    def flags(said: str) -> tuple[bool, bool]:
        (found,) = read_roster(f'engines: [{{url: "http://h:1", kind: openai{said}}}]', "engines.yaml")
        return found.token_ids, found.cache_salt

    assert flags("") == (False, False)
    assert flags(", cache_salt: true") == (False, True)
    assert flags(", token_ids: true") == (True, True), "it is vLLM's, which takes both"
    assert flags(", token_ids: true, cache_salt: false") == (True, False)
    with pytest.raises(FormatError, match="cache_salt"):
        flags(", cache_salt: yes please")

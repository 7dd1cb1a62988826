"""Bodies made to hold up a server: as large as is allowed, and costly to parse, check or tokenise.

Used by `gateway_abuse.py`, which starts this file as its client, and by tests, which ask for smaller ones.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

BODY_BYTES = 8_000_000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class AbusiveBody(NamedTuple):
    name: str
    path: str
    body: bytes
    refused: bool = True
    """Whether it must be refused with 4xx; the others are legal where the model's context is large enough."""


def _field(model: str, name: str, value: bytes) -> bytes:
    return b'{"model":%b,"prompt":"a","max_tokens":1,"%b":%b}' % (
        json.dumps(model).encode(),
        name.encode(),
        value,
    )


def _chat(model: str, messages: bytes) -> bytes:
    return b'{"model":%b,"max_tokens":1,"messages":%b}' % (json.dumps(model).encode(), messages)


def _prompt(model: str, prompt: bytes) -> bytes:
    return b'{"model":%b,"max_tokens":1,"prompt":%b}' % (json.dumps(model).encode(), prompt)


def _many(item: bytes | Callable[[int], bytes], size: int, begin: bytes = b"[", end: bytes = b"]") -> bytes:
    """A list or an object of about so many bytes."""
    make = item if callable(item) else None
    length = len(item) if isinstance(item, bytes) else len(item(size // 10))
    count = max(1, size // (length + 1))
    items = [make(number) for number in range(count)] if make else [item] * count  # type: ignore[list-item]
    return begin + b",".join(items) + end


def abusive_bodies(model: str, size: int = BODY_BYTES) -> Iterator[AbusiveBody]:
    """One after the other, so that only one is held at a time."""
    size -= 500
    text = b"lorem ipsum dolor sit amet, "

    def field(name: str, value: bytes) -> AbusiveBody:
        return AbusiveBody(name, COMPLETION, _field(model, name, value))

    yield field("logit_bias", _many(lambda number: b'"%d":1' % number, size, b"{", b"}"))
    yield field("stop", _many(b'"a"', size))
    yield field("stop_token_ids", _many(b"1", size))
    yield field("tools", _many(b'{"type":"function","function":{"name":"f"}}', size))
    yield field("metadata", _many(lambda number: b'"k%d":"v"' % number, size, b"{", b"}"))._replace(
        name="metadata of many keys"
    )
    schema = b'{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":%b}}}'
    yield field("response_format", schema % _many(b'"a"', size))
    yield field("response_format", schema % (b'["%b"]' % (b"\\n" * (size // 2))))._replace(
        name="response_format of one text"
    )
    yield field("max_tokens", b"9" * size)._replace(name="number of one digit after the other")
    yield field("max_tokens", _many(b"9" * 4000, size))._replace(name="many long numbers")
    yield field("temperature", b"0." + b"1" * size)._replace(name="fraction of many digits")
    yield field("n", b"9" * 4000)._replace(name="n of 4,000 digits")
    yield field("nested", b"[" * size)._replace(name="nesting, never closed")
    yield field("nested", _many(b"[]", size))._replace(name="many empty lists")
    yield field("nested", _many(b"[" * 90 + b"]" * 90, size))._replace(name="many deep lists")
    unknown = _many(lambda number: b'"k%d":1' % number, size, b'{"model":"%b",' % model.encode(), b"}")
    yield AbusiveBody("unknown keys", COMPLETION, unknown)
    yield AbusiveBody("one long key", COMPLETION, b'{"model":"a","%b":1}' % (b"k" * size))
    yield AbusiveBody("one key again and again", COMPLETION, _many(b'"k":1', size, b"{", b"}"))
    yield AbusiveBody("long model", COMPLETION, b'{"prompt":"a","model":"%b"}' % (b"m" * size))
    yield AbusiveBody("messages", CHAT, _chat(model, _many(b'{"role":"user","content":"a"}', size)))
    parts = _many(b'{"type":"text","text":"a"}', size, b'[{"role":"user","content":[', b"]}]")
    yield AbusiveBody("content parts", CHAT, _chat(model, parts))
    yield AbusiveBody("unknown role", CHAT, _chat(model, b'[{"role":"%b","content":"a"}]' % (b"r" * size)))
    odd = _many(lambda number: b'"k%d":1' % number, size, b'[{"role":"user","content":"a",', b"}]")
    yield AbusiveBody("keys of a message", CHAT, _chat(model, odd))
    yield AbusiveBody("prompts", COMPLETION, _prompt(model, _many(b'"a"', size)))
    yield AbusiveBody("prompts of one token", COMPLETION, _prompt(model, _many(b"[1]", size)))
    yield AbusiveBody("half a character", COMPLETION, _prompt(model, b'"%b\\ud800"' % (b"a" * size)))
    yield AbusiveBody("bytes that are no text", COMPLETION, _prompt(model, b'"%b"' % (b"\xff" * size)))
    yield AbusiveBody("text without an end", COMPLETION, _prompt(model, b'"' + b"\\\\" * (size // 2))[:-1])
    yield AbusiveBody("blanks", COMPLETION, b" " * size)
    yield AbusiveBody("not JSON", COMPLETION, b"x" * size)
    yield AbusiveBody("list", COMPLETION, _many(b"1", size))
    yield AbusiveBody("tokens and a text", COMPLETION, _prompt(model, _many(b"1", size)[:-1] + b',"a"]'))
    yield AbusiveBody("tokens below zero", COMPLETION, _prompt(model, _many(b"-1", size)))
    yield AbusiveBody("large tokens", COMPLETION, _prompt(model, _many(b"99999999999", size // 8)))
    # Legal ones: refused only where the model's context is too small for them.
    yield AbusiveBody("tokens", COMPLETION, _prompt(model, _many(b"1", size // 4)), False)
    yield AbusiveBody("text", COMPLETION, _prompt(model, b'"%b"' % (text * (size // len(text)))), False)
    yield AbusiveBody("text without blanks", COMPLETION, _prompt(model, b'"%b"' % (b"a" * size)), False)
    chinese = "漢".encode() * (size // 3)
    yield AbusiveBody("Chinese text", COMPLETION, _prompt(model, b'"%b"' % chinese), False)
    yield AbusiveBody("escapes", COMPLETION, _prompt(model, b'"%b"' % (b"\\u00e9" * (size // 6))), False)
    yield AbusiveBody("quotes", COMPLETION, _prompt(model, b'"%b"' % (b'\\"' * (size // 2))), False)
    lines = b"a line of text\\n" * (size // 16)
    yield AbusiveBody("chat of lines", CHAT, _chat(model, b'[{"role":"user","content":"%b"}]' % lines), False)
    turn = b'{"role":"user","content":"%b"},{"role":"assistant","content":"%b"}' % (text * 36, text * 36)
    yield AbusiveBody("chat of many turns", CHAT, _chat(model, _many(turn, size)), False)
    several = _prompt(model, b'"%b","n":64' % (b"a" * size))
    yield AbusiveBody("64 answers", COMPLETION, several, False)
    several = _prompt(model, _many(b"1", size // 4) + b',"n":7')
    yield AbusiveBody("7 answers to tokens", COMPLETION, several, False)


def posted(port: int, abusive: AbusiveBody) -> int:
    """The status of the answer to one body."""
    head = (
        f"POST {abusive.path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(abusive.body)}\r\n"
        f"connection: close\r\nidempotency-key: {hash(abusive.body)}\r\n\r\n"
    )
    return _status(port, head.encode(), abusive.body)


def _status(port: int, head: bytes, body: bytes = b"") -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        connection.sendall(head)
        connection.sendall(body)
        answer = connection.recv(65_536)
        while piece := connection.recv(65_536):
            answer += piece
    return int(answer[9:12] or b"0")


def crowd(port: int, chosen: list[AbusiveBody], count: int) -> tuple[list[int], float]:
    """Statuses of so many requests sent at once, and the longest that a health check of another process took."""
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda item=item: statuses.append(posted(port, item)))
        for item in (chosen[place % len(chosen)] for place in range(count))
    ]
    command = [sys.executable, __file__, "health", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as checker:
        assert checker.stdout is not None
        checker.stdout.readline()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        worst_s, _ = checker.communicate()
    return statuses, float(worst_s)


def check_health(port: int) -> None:
    """Health checks, one after the other until the input ends; prints how long the slowest took."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    print("ready", flush=True)
    worst_s = 0.0
    while not ended.wait(0.02):
        begin_s = time.perf_counter()
        _status(port, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        worst_s = max(worst_s, time.perf_counter() - begin_s)
    print(worst_s, flush=True)


def client(port: int, models: list[str], count: int) -> None:
    """One body after the other, each when a line says so; then a crowd. Reports are lines of JSON."""
    for model in models:
        for abusive in abusive_bodies(model):
            print(json.dumps({"model": model, "name": abusive.name, "refused": abusive.refused}), flush=True)
            sys.stdin.readline()
            print(json.dumps({"status": posted(port, abusive)}), flush=True)
    names = ("logit_bias", "messages", "text")
    chosen = [abusive for abusive in abusive_bodies(models[0]) if abusive.name in names]
    print(json.dumps({"crowd": count}), flush=True)
    sys.stdin.readline()
    statuses, worst_s = crowd(port, chosen, count)
    print(json.dumps({"statuses": statuses, "worst_health_check_s": worst_s}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "health":
        check_health(int(sys.argv[2]))
        raise SystemExit
    client(int(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]))

"""Several client processes: one Brain, shared limits, replaced workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from potluck.api.http import random_word
from potluck.core.state import events
from potluck.core.state.actions import Abort, Action, QueryAttempt, Refuse, Run
from potluck.core.state.policy import Policy
from potluck.core.values.route import aggregated, handed_over
from potluck.core.values.types import Request
from potluck.gateway.admin.counters import Counters
from potluck.gateway.admin.families import REQUESTS
from potluck.gateway.core import BrainLoop
from potluck.gateway.values import Address, Endpoint, GatewaySettings, ListenAddresses, RequestOutcome
from potluck.gateway.workers import brain_client
from potluck.gateway.workers.brain_client import (
    RemoteDirectory,
    WorkerChannel,
    WorkerMeter,
    WorkerMeterReceiver,
)
from potluck.gateway.workers.supervisor import BrainProcessContext, make_post, worker
from potluck.gateway.workers.worker import WorkerContext, model_card
from potluck.gateway.workers.worker_pool import WorkerPool

ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}]}'
KEY = "sk-one"


class EchoBrain:
    def __init__(self) -> None:
        self.requests: dict[str, object] = {}
        self.heard: list[events.Event] = []

    def on(self, at_s: float, event: events.Event) -> list[Action]:
        self.heard.append(event)
        if isinstance(event, events.RequestArrived):
            self.requests[event.request.id] = event
            return [Run(event.request.id, aggregated("a"), 0, event.request.prompt_tokens, 0)]
        if isinstance(event, events.RequestFinished | events.RequestCancelled | events.AttemptFailed):
            self.requests.pop(event.request, None)
        return []


def fake_center(mind: EchoBrain, port: int) -> Any:
    endpoint = Endpoint("a", "m", "here", Address("127.0.0.1", port), "openai", served_model="m")
    return SimpleNamespace(
        brain_loop=BrainLoop(mind, mind.requests),
        registry=SimpleNamespace(on_endpoints=[], on_gone=[], endpoints=(endpoint,)),
        replica_models=SimpleNamespace(codecs={}, resolved=SimpleNamespace(models={"m": None})),
        wire=lambda *key: ("raw", 2),
        lacking=lambda model: "",
        policy=Policy(),
    )


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers at once, but for a prompt that says to hang."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            if b"hang" not in body:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(ANSWER))
                writer.write(b"Content-Type: application/json\r\n\r\n" + ANSWER)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def ask(url: str, text: str) -> tuple[int, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )
    if text == "hang":
        return 0, writer
    line = await reader.readline()
    writer.close()
    return int(line.split()[1]) if line else 0, writer


async def wait_until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def run_supervised_workers(context: WorkerContext, post: BrainProcessContext) -> int:
    """A process that has so many workers forked, and again when they die, until it is killed; its number."""
    pid = os.fork()
    if pid:
        return pid
    children = [worker(context, post, place) for place in range(context.settings.places.workers)]
    while os.getppid() != 1:
        for child in children:
            child.look(time.monotonic())
        time.sleep(0.02)
    os._exit(0)


def workers_of(pid: int) -> dict[int, int]:
    result = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    text = {int(item): Path(f"/proc/{item}/cmdline").read_text().strip("\0").split() for item in result}
    return {
        int(words[1]): item for item, words in text.items() if words and words[0].endswith("worker_process")
    }


def test_workers_share_brain_and_limits_and_are_replaced_when_killed(tmp_path: Path) -> None:
    async def run(post: BrainProcessContext, supervisor: int) -> None:
        mind, counters = EchoBrain(), Counters()
        upstream = await asyncio.start_server(engine, "127.0.0.1", 0)
        core = fake_center(mind, upstream.sockets[0].getsockname()[1])
        pool = WorkerPool(core, counters, settings, post)
        url = await pool.start()
        try:
            assert [(await ask(url, "hello"))[0] for _ in range(30)] == [200] * 30
            arrived = [event for event in mind.heard if isinstance(event, events.RequestArrived)]
            assert len({event.request.id for event in arrived}) == 30
            await wait_until(lambda: sum(counters.counted(REQUESTS).values()) == 30)

            # Those that hang, wherever they are, are all that the key may have.
            open_ones = [await ask(url, "hang") for _ in range(24)]
            await wait_until(lambda: len(mind.requests) == 24)
            owners = {request: core.brain_loop._owners[request] for request in mind.requests}
            assert len(set(owners.values())) == 2  # both workers have some
            await asyncio.sleep(0.05)
            assert [(await ask(url, "hello"))[0] for _ in range(6)] == [429] * 6

            # One dies: its requests are cancelled, those of the other go on, and somebody takes its place. Meanwhile
            # its port is open: whoever comes there waits.
            slot = pool._slots[0]
            os.kill(workers_of(supervisor)[slot.place], signal.SIGKILL)
            waiting = [asyncio.create_task(ask(url, "hello")) for _ in range(10)]
            lost = {request for request, line in owners.items() if line is slot.line}
            await wait_until(
                lambda: set(mind.requests) >= set(owners) - lost and not set(mind.requests) & lost
            )
            assert {
                event.request for event in mind.heard if isinstance(event, events.RequestCancelled)
            } >= lost
            assert 0 not in [status for status, _ in await asyncio.gather(*waiting)], "nobody was cut off"
            await wait_until(lambda: len(pool._slots) == 2)
            await wait_until(lambda: len(pool._listening) == 2)
            await asyncio.sleep(0.3)
            assert [(await ask(url, "hello"))[0] for _ in range(10)] == [200] * 10
            for _, writer in open_ones:
                writer.close()
        finally:
            await pool.close(0.1)
            upstream.close()

    async def limited(post: BrainProcessContext, supervisor: int) -> None:
        async with asyncio.timeout(120):
            await run(post, supervisor)

    keys = tmp_path / "keys"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(json.dumps({"name": "one", "sha256": digest, "concurrent": 24}) + "\n")
    settings = GatewaySettings(ListenAddresses(port=0, admin_port=0, workers=2), keys=keys, drain_s=1.0)
    context = WorkerContext(settings, Policy(), (partial(model_card, "m", 4096, 0, True, None),))
    post = asyncio.run(make_post(settings.places))
    home = post.home
    assert home.stat().st_mode & 0o777 == 0o700
    supervisor = run_supervised_workers(context, post)
    try:
        uvloop.run(limited(post, supervisor))
    finally:
        family = [*workers_of(supervisor).values(), supervisor]
        os.kill(supervisor, signal.SIGSTOP)
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(supervisor, 0)
        post.close()
    assert not home.exists()


def test_forked_processes_generate_different_request_ids() -> None:
    """Names are drawn many at a time; a fork draws its own."""
    random_word()
    heard, say = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(say, random_word().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(say)
    with os.fdopen(heard) as file:
        assert file.read() not in {random_word() for _ in range(200)}


EVENTS: list[events.Event] = [
    events.RequestAdopted(Request("x", "m", 0.0, 10, 5), 2, 3, handed_over("a", "b", 7), 1, True),
    events.RequestAdopted(Request("x", "m", 0.0, 10, 5), 2, 3, None),
    events.RequestArrived(Request("x", "m", 1.5, 10, 5, 2, 9.25, (1, 2**64 - 1), 'a"\n', "batch")),
    events.RequestArrived(Request("x", "m", 1.5, 10, 5, exact=True)),
    events.RequestAdopted(Request("x", "m", 0.0, 10, 5, exact=True), 2, 3, None),
    events.FirstToken("x", 3),
    events.RequestFinished("x", 3, 7),
    events.AttemptFailed("x", 0, "replica", "a->b", 4),
    events.AttemptRunning("x", 1),
    events.RequestCancelled("x"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_between_processes_round_trip(event: events.Event) -> None:
    assert "\n" not in brain_client.event_text(event)
    assert brain_client.event_of(brain_client.event_text(event)) == event


def test_actions_and_endpoints_between_processes_round_trip() -> None:
    actions = [
        Run("x", aggregated("a"), 2, 10, 3, 0.5),
        Refuse("x", "overloaded", "a\nb", 1.5),
        Abort("x", ("a", "b")),
        QueryAttempt("x", 1),
    ]
    assert brain_client.actions_of(brain_client.actions_text(actions)) == actions
    for alone in (
        *actions,
        Run('"x"\n', aggregated("a\nb"), 0, 10, 0),
        Run("x", handed_over("a", "b", 7), 0, 10, 0),
        Run("x", aggregated("a"), 0, 10, 0, yields=True),
    ):
        assert "\n" not in brain_client.actions_text([alone])
        assert brain_client.actions_of(brain_client.actions_text([alone])) == [alone]
    endpoint = Endpoint(
        "a", "m", "here", Address("::1", 9, True), "segments", "h:1", "f", "s", key="k", token_ids=True
    )
    directory = RemoteDirectory()
    directory.learn(brain_client.endpoints_text([endpoint], {("m", "here", "there"): ("int4", 6)}))
    assert directory.find("a") == endpoint
    assert directory.find("b") is None
    there = replace(endpoint, replica="b", region="there")
    assert directory.codec(endpoint, there) == "int4"
    assert directory.codec(there, endpoint) == "raw"
    assert (directory.connections(endpoint, there), directory.connections(there, endpoint)) == (6, 2)
    mates = [replace(item, unit="u", codec="int8") for item in (endpoint, there)]
    assert directory.codec(*mates) == "int8", "inside a copy its own codec counts"


def test_counters_of_a_worker_are_added_once_and_removed_with_it() -> None:
    async def run() -> None:
        lines: list[tuple[str, str]] = []
        channel = cast(
            WorkerChannel, SimpleNamespace(later=lambda letter, text: lines.append((letter, text)))
        )
        used: list[RequestOutcome] = []
        hand = WorkerMeter(channel, lambda replica: "")
        counters = Counters(told=used.append)
        request_outcome = RequestOutcome("r", "k", "t", "m", "c", "stop", 200, 5, 0, 3, 1.0, 2.0, 3.0, True)
        hand.came()
        hand.came()
        hand.answered(request_outcome)
        hand.flush()
        heard = WorkerMeterReceiver(counters)
        for letter, text in lines:
            assert heard.heard(letter, text)
        assert not heard.heard("?", "")
        assert used == [request_outcome]
        assert counters.open == 1
        before = len(lines)
        hand.flush()
        for letter, text in lines[before:]:
            heard.heard(letter, text)
        assert sum(sum(count.values()) for count in counters._counts.values()) > 0
        counted = {name: dict(series) for name, series in counters._counts.items()}
        hand.flush()
        assert counted == {name: dict(series) for name, series in counters._counts.items()}
        heard.gone()
        assert counters.open == 0

    asyncio.run(run())

"""Run a service until it is stopped: where its state is, who else runs it, and what its first answers are."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from potluck.control.http_client import HttpClient
from potluck.core.errors import CapacityError, InputError, PotluckError

if TYPE_CHECKING:
    from potluck.control.controller import ControllerTurn
    from potluck.control.local_stack import LocalStack
    from potluck.control.state_store import StateStore
    from potluck.core.values.plan import Plan


QUESTION = "Hello"
CHECK_MAX_TOKENS = 40
ANSWER_S = 120.0
OWN_NAME = "potluck up --check"
STATE = Path.home() / ".local" / "state" / "potluck"


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    url: str
    models: tuple[str, ...]
    plan: Plan
    lines: tuple[str, ...]
    ready_s: float  # Since the command was given.
    keyed: bool = False  # Whether clients must show a key.
    page: str = ""  # Where operators look.
    key_file: str = ""  # What they need to change something.


def curl(served: ServiceSummary) -> str:
    """A command that streams an answer, in lines of 80 columns."""
    head, tail = json.dumps(body_of(served.models[0])).split(' "messages"')
    shown = '    -H "Authorization: Bearer $OPENAI_API_KEY" \\\n' if served.keyed else ""
    return (
        f"  curl -N {served.url}/v1/chat/completions \\\n{shown}"
        f"    -H 'Content-Type: application/json' -d '{head}\n    \"messages\"{tail}'"
    )


def body_of(model: str) -> dict[str, object]:
    return {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": CHECK_MAX_TOKENS,
    }


@contextmanager
def own_key(store: StateStore, folder: Path) -> Iterator[str]:
    from potluck.control.accounts import KeptKey, add_key, revoke_key
    from potluck.gateway.openai.keys import LOOK_S, new_key

    key, line = new_key(OWN_NAME)
    add_key(store, folder, KeptKey(json.loads(line)["sha256"], OWN_NAME, {"tenant": OWN_NAME}, time.time()))
    try:
        time.sleep(1.5 * LOOK_S)  # by then the gateway has read it
        yield key
    finally:
        revoke_key(store, folder, OWN_NAME, time.time())


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    model: str
    text: str
    ttft_s: float
    e2e_s: float


def ask(url: str, model: str, key: str = "") -> FirstAnswer:
    client = HttpClient(
        url, lambda: key, None, lambda error: CapacityError(f"{url} did not answer ({error})")
    )
    began_s, first_s, text = time.monotonic(), 0.0, ""
    with client.call("POST", "/v1/chat/completions", ANSWER_S, body_of(model)) as answer:
        if answer.status != 200:
            message = " ".join(answer.read(500).decode("utf-8", "replace").split())
            raise CapacityError(f"{model} answered with {answer.status}: {message}")
        for line in answer:
            piece = _piece(line)
            if piece and not text:
                first_s = time.monotonic() - began_s
            text += piece
    if not text:
        raise CapacityError(f"{model} answered with no text; `potluck logs gateway` may say why")
    return FirstAnswer(model, text, first_s, time.monotonic() - began_s)


def _piece(line: bytes) -> str:
    name, _, data = line.decode("utf-8", "replace").strip().partition(": ")
    if name != "data" or data == "[DONE]":
        return ""
    choices = json.loads(data).get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


class RunningShow(Protocol):
    """What is printed while a service runs, and when it stops."""

    stop: threading.Event

    @property
    def stack(self) -> LocalStack: ...

    @property
    def check(self) -> bool: ...

    @property
    def failed(self) -> str: ...

    def seen(self, turn: ControllerTurn) -> None: ...

    def quiet(self) -> None: ...


def run_stack(show: RunningShow, *, check_room: bool = True) -> None:
    """Run a service until a signal, or until the show stops it, and drain it.

    `check_room`: refuse a plan that this machine has no room for; one that is resumed has its room already."""
    stack, stop = show.stack, show.stop
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        if check_room:
            stack.must_have_room()
        try:
            stack.run(stop.is_set, show.seen)
        except PotluckError as error:
            show.quiet()
            if show.check:  # --check does not keep the service running
                with suppress(PotluckError):
                    stack.down()
            raise CapacityError(f"{error}\n{_kept(stack)}") from error
        show.quiet()
        click.echo("draining", err=True)
        made = stack.down()
        click.echo("stopped" + (f"; {made} processes had to be made to end" if made else ""), err=True)
        if show.failed:
            raise CapacityError(f"{show.failed}\nall was stopped; state and logs are kept in {stack.folder}")
    finally:
        with suppress(PotluckError):  # what went wrong first is what counts; a lease ends by itself
            stack.close()


def _kept(stack: LocalStack) -> str:
    """What is there after the controller could not go on, and how to go on with it."""
    running = stack.running()
    if not running:
        return f"nothing is left running; state and logs are kept in {stack.folder}"
    what = ", ".join(running)
    return f"on without a controller: {what}; `potluck up` takes over, `potluck down` stops all"


def require_unused_state(path: Path) -> None:
    """Refuse a state folder that another controller uses, before planning."""
    from potluck.control.service_view import ServiceView

    if (path / "state.db").is_file():
        with closing(ServiceView(path)) as service:
            if service.controller_lives:
                raise InputError("--state", f"{path}: another controller runs it; `potluck status` shows it")

"""What `potluck up` says: how far it is, what it serves, and the answer to one question."""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from potluck.cli.common.progress import progress
from potluck.cli.common.render import paragraph, unstyled
from potluck.core.errors import CapacityError
from potluck.core.figures import seconds
from potluck.core.values.lossy_hops import lossy_notices

if TYPE_CHECKING:
    from pathlib import Path

    from potluck.control.state_store import StateStore
    from potluck.core.values.plan import Plan

QUESTION = "Hello"
MOST_TOKENS = 40
ANSWER_S = 120.0
OWN_NAME = "potluck up --check"


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    """What there is to say of a service that is ready."""

    url: str
    models: tuple[str, ...]
    plan: Plan
    lines: tuple[str, ...]
    ready_s: float
    """Since the command was given."""
    keyed: bool = False
    """Whether clients must show a key."""
    page: str = ""
    """Where operators look."""
    key_file: str = ""
    """What they need to change something."""


@contextmanager
def startup(total: int) -> Iterator[Callable[[str], None]]:
    """Says what is being done: a bar on a terminal, else a line for each kind of thing."""
    with progress(total) as bar:
        yield bar if sys.stderr.isatty() and not unstyled() else _lines()


def _lines() -> Callable[[str], None]:
    last = ""

    def said(stage: str) -> None:
        nonlocal last
        kind = "planning" if " templates of " in stage else stage.partition(",")[0]
        if kind != last:
            last = kind
            click.echo(kind, err=True)

    return said


def show_ready(served: ServiceSummary) -> None:
    plan = served.plan
    cost = f"${plan.cost_usd_per_h:.2f}/h as planned"
    click.echo(f"Serving {', '.join(served.models)} at {served.url}")
    click.echo(f"ready after {seconds(served.ready_s)}; {cost}; Ctrl-C drains")
    for line in lossy_notices(plan):
        click.echo(line)
    for each in plan.deployments:
        click.echo(f"  {each.count} x {each.template} in {each.region}")
    for flow in sorted({(each.prefill_region, each.decode_region) for each in plan.flows}):
        if flow[0] != flow[1]:
            click.echo(f"  prompts computed in {flow[0]} are answered in {flow[1]}")
    for line in served.lines:
        paragraph(line, "  ")
    if served.page:
        click.echo(f"Watch it at {served.page}/")
        click.echo(f"  (orders there need the key in {served.key_file})")
    click.echo(f"Try it, or see `potluck top`, `status`, `bench` in another terminal:\n{curl(served)}")


def curl(served: ServiceSummary) -> str:
    """A command that streams an answer, in lines of 80 columns."""
    head, tail = json.dumps(body_of(served.models[0])).split(' "messages"')
    shown = '    -H "Authorization: Bearer $OPENAI_API_KEY" \\\n' if served.keyed else ""
    return (
        f"  curl -N {served.url}/v1/chat/completions \\\n{shown}"
        f"    -H 'Content-Type: application/json' -d '{head}\n    \"messages\"{tail}'"
    )


def ready_json(served: ServiceSummary) -> dict[str, object]:
    return {
        "url": served.url,
        "page": served.page,
        "models": list(served.models),
        "cost_usd_per_h": served.plan.cost_usd_per_h,
        "ready_s": round(served.ready_s, 2),
        "lines": list(served.lines),
        "notices": list(lossy_notices(served.plan)),
    }


def body_of(model: str) -> dict[str, object]:
    return {
        "model": model,
        "stream": True,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MOST_TOKENS,
    }


@contextmanager
def own_key(store: StateStore, folder: Path) -> Iterator[str]:
    """A key for one question of our own, which ends with it."""
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
    """What came back for one question."""

    model: str
    text: str
    ttft_s: float
    e2e_s: float


def ask(url: str, model: str, key: str = "") -> FirstAnswer:
    """One streamed answer; none at all is an error."""
    data = json.dumps(body_of(model)).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    began_s, first_s, text = time.monotonic(), 0.0, ""
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            for line in answer:
                found = _piece(line)
                if found and not text:
                    first_s = time.monotonic() - began_s
                text += found
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(500).decode("utf-8", "replace").split())
        raise CapacityError(f"{model} answered with {error.code}: {said}") from error
    except OSError as error:
        raise CapacityError(f"{url} did not answer ({error})") from error
    if not text:
        raise CapacityError(f"{model} answered with no text; `potluck logs gateway` may say why")
    return FirstAnswer(model, text, first_s, time.monotonic() - began_s)


def _piece(line: bytes) -> str:
    """The text of one event of a stream."""
    name, _, data = line.decode("utf-8", "replace").strip().partition(": ")
    if name != "data" or data == "[DONE]":
        return ""
    choices = json.loads(data).get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")


def show_answer(answer: FirstAnswer) -> None:
    click.echo(
        f"{answer.model}, asked {QUESTION!r}: first token after {seconds(answer.ttft_s)}, "
        f"all after {seconds(answer.e2e_s)}\n  {' '.join(answer.text.split())[:200]}"
    )

"""How long one client's request can hold up a gateway's event loop: 8 MB made to be costly, over real sockets.

For each body, over a connection of its own, two times of the loop's thread are taken between one turn of the loop
and the next: the CPU-seconds that it used, and the seconds that passed, in which a thread may have held the
interpreter's lock. The second depends on what else the machine does. A hundred such requests at once come last, with
health checks beside them; a turn of the loop then serves several clients.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import uvloop

import potluck.engine
from parts import abusive_bodies as corpus
from parts import common
from potluck.gateway.admin.counters import Counters
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.http.limits import calm
from potluck.gateway.http.server import open_port
from potluck.gateway.openai.handler import ClientHandler
from potluck.gateway.openai.kept_answers import KeptAnswers
from potluck.gateway.openai.requests import ModelCard, read_card
from potluck.gateway.values import AnswerSink, ChoiceRequest, RequestOutcome

STALL_S = 0.020
AT_ONCE = 100
CONTEXT_TOKENS = 1 << 20
MODEL_FILES = Path(potluck.engine.__file__).parent / "data" / "words"
CLIENT = Path(corpus.__file__)
TARGETS = {
    "worst_stall_cpu_s": ("<=", STALL_S),
    "wrong_answers": ("<=", 0.0),
}


class AnsweringDriver(Dispatcher):
    """Ends every answer at once: what is measured comes before an engine is asked."""

    def __init__(self) -> None:
        self.begun = 0
        self._fingerprints = {"large": "weights"}

    def begin(self, asked: ChoiceRequest, answer: AnswerSink) -> None:
        self.begun += 1
        answer.finished("stop", 0)

    def cancel(self, request: str) -> None: ...


class SilentCounters(Counters):
    def answered(self, told: RequestOutcome) -> None: ...


class LoopProbe:
    """The longest turn of the event loop since it was asked last: CPU-seconds of its thread, and all seconds."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._cpu_s, self._wall_s = time.thread_time(), time.perf_counter()
        self._worst = (0.0, 0.0)
        self._turn()

    def _turn(self) -> None:
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        self._worst = (max(self._worst[0], cpu_s - self._cpu_s), max(self._worst[1], wall_s - self._wall_s))
        self._cpu_s, self._wall_s = cpu_s, wall_s
        self._loop.call_later(0.001, self._turn)

    def taken(self) -> tuple[float, float]:
        worst, self._worst = self._worst, (0.0, 0.0)
        return worst


def cards() -> dict[str, ModelCard]:
    """A model of a large context, one of a small one, and one of plain OpenAI servers."""
    large = replace(read_card("large", MODEL_FILES), context_tokens=CONTEXT_TOKENS)
    plain = ModelCard("plain", CONTEXT_TOKENS, plain=True)
    return {"large": large, "small": replace(large, name="small", context_tokens=8192), "plain": plain}


async def measured(quick: bool, folder: Path) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    handler = ClientHandler(
        cards(), AnsweringDriver(), SilentCounters(), kept_answers=KeptAnswers(folder, loop.call_later)
    )
    listener = await open_port(handler, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    models = ("small",) if quick else ("small", "plain", "large")
    calm()
    probe = LoopProbe()
    figures = dict.fromkeys(("bodies", "wrong_answers", "worst_stall_cpu_s", "worst_stall_wall_s"), 0.0)
    command = [sys.executable, CLIENT, str(port), ",".join(models), str(AT_ONCE)]
    client = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdin is not None
    assert client.stdout is not None
    while "crowd" not in (announced := json.loads(await client.stdout.readline())):
        client.stdin.write(b"\n")
        await asyncio.sleep(0.005)
        probe.taken()
        status = json.loads(await client.stdout.readline())["status"]
        cpu_s, wall_s = probe.taken()
        model, name, refused = (announced[key] for key in ("model", "name", "refused"))
        wrong = not 200 <= status < 500 or (refused and model != "plain" and status < 400)
        common.say(f"  {model}, {name}: {status}, {1e3 * cpu_s:.1f} ms of CPU, {1e3 * wall_s:.1f} ms passed")
        figures["bodies"] += 1
        figures["wrong_answers"] += wrong
        figures["worst_stall_cpu_s"] = max(figures["worst_stall_cpu_s"], cpu_s)
        figures["worst_stall_wall_s"] = max(figures["worst_stall_wall_s"], wall_s)
    client.stdin.write(b"\n")
    report = json.loads(await client.stdout.readline())
    cpu_s, wall_s = probe.taken()
    await client.wait()
    handler.close()
    await listener.close(0.1)
    return figures | {
        "worst_turn_at_once_cpu_s": cpu_s,
        "worst_turn_at_once_wall_s": wall_s,
        "worst_health_check_s": report["worst_health_check_s"],
        "refused_at_once": float(sum(status >= 400 for status in report["statuses"])),
    }


def measure(quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(measured(quick, Path(folder) / "answers"))


if __name__ == "__main__":
    common.run("gateway_abuse", measure, TARGETS)

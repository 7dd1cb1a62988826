"""Whatever way a request takes, its answer is that of one engine asked directly.

    python benchmarks/gateway_same.py [--quick] [--json] [--only KIND]...

    in place    one engine does all
    P/D         the prompt on one engine, the answer on another
    split       a prompt's two parts on two engines, cut at random (tools/random_cuts.py)
    remote      the prompt in another region
    recovered   two of four engines (or one of two) are killed with SIGKILL while answers are under way

64 clients ask (`asks_of`) a gateway before engines that compute. Compared are text, reason to end, log probabilities
to the last bit, and usage; a refusal is a mismatch. With a lossy codec all is asked again with x-potluck-exact, which
must be exact. `taken` counts answers that ended on such a route (the gateway's log), `cuts` the places of cuts.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import ne
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from parts.common import POTLUCK, ROOT, WORDS, options, run, say

sys.path.insert(0, str(ROOT / "tools"))

from live_fleet import LiveFleet, Process, listening
from live_plans import COMBO, MODEL, PAIR, REMOTE, WHOLE, Unit, write_plans

from potluck.core.state.actions import Run, StartReplica
from potluck.core.state.events import RequestFinished
from potluck.core.values.types import Codec
from potluck.runtime.log_lines import read_line

DATA = WORDS.parent
MODELS = ("words", "words-hybrid")
STREAMS, SEED = 64, 1
WITHIN_S = 600.0
PATIENT = f"max_wait_s={WITHIN_S:g}"
Heard = Callable[[int], None]  # Hears of every piece of a stream.
Headers = Mapping[str, str]
EXACT: Headers = MappingProxyType({"x-potluck-exact": "1"})


SENTENCE = "the a of king river stone and ship night under every was came said"
TEXTS = (" the ", ", and ", "ing to", "er was", "ould", ".\n", "ness")
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Of log probabilities; compared token by token, so that it does not matter how they were cut into pieces."""
WORD = {"type": "string", "maxLength": 20}
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "words": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "words"],
    "additionalProperties": False,
}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]


def asks_of(count: int, output: int, seed: int) -> list[Ask]:
    chance = random.Random(seed)
    made = []
    for place in range(count):
        words = " ".join(chance.choices(SENTENCE.split(), k=chance.randrange(20, 220)))
        body: dict[str, Any] = {"model": MODEL, "max_tokens": chance.randrange(output // 2, output + 1)}
        if place % 2:
            body |= {"temperature": 0.9, "seed": place, "top_p": 0.95, "top_k": 200 if place % 3 else -1}
        else:
            body |= {"temperature": 0}
        if place % 4 < 2:
            body["ignore_eos"] = True
        if chance.random() < 0.5:
            body |= stops_of(chance)
        if chance.random() < 0.7:
            body |= STREAMED
        if chance.random() < 0.5:
            body |= edits_of(chance, body)
        if place % 11 == 3:
            body["n"] = 2
        chat = place % 4 == 2
        if chat:
            body["messages"] = [{"role": "user", "content": words}]
        elif place % 4 == 1:
            body["prompt"] = [chance.randrange(5, 4000) for _ in range(chance.randrange(30, 400))]
        else:
            body["prompt"] = words
        if place % 3 == 0:
            body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        made.append(Ask("/v1/chat/completions" if chat else "/v1/completions", body))
    return made


def stops_of(chance: random.Random) -> dict[str, Any]:
    """Pieces of words: most end an answer, many within a token, some across two."""
    stops = []
    for text in chance.choices(TEXTS, k=chance.randrange(1, 4)):
        start = chance.randrange(len(text))
        stops.append(text[start : start + chance.randrange(1, 4)])
    result: dict[str, Any] = {"stop": stops}
    if chance.random() < 0.3:
        result["min_tokens"] = 4
    if chance.random() < 0.2:
        result["include_stop_str_in_output"] = True
    return result


def edits_of(chance: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """What depends on how an answer began: after a recovery the next engine must count on."""
    kind = chance.randrange(3)
    if kind == 0:
        return {"presence_penalty": chance.uniform(-2, 2), "frequency_penalty": chance.uniform(-1, 2)}
    if kind == 1:
        biases = {str(chance.randrange(1, 4000)): chance.uniform(-5, 5) for _ in range(20)}
        return {"repetition_penalty": chance.uniform(0.8, 1.5), "logit_bias": biases}
    for name in ("min_tokens", "ignore_eos"):
        body.pop(name, None)
    if chance.random() < 0.3:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "entry", "schema": ENTRY}}}


def other_way(ask: Ask) -> Ask:
    """Streamed what is not, and the other way round: the answer must be the same."""
    body = {name: value for name, value in ask.body.items() if name not in STREAMED}
    return Ask(ask.path, body if ask.body.get("stream") else body | STREAMED)


@dataclass(frozen=True)
class Way:
    """A kind of route, and a plan over four engines (or two) that leads to it."""

    units: tuple[Unit, ...]
    flows: tuple[tuple[str, str], ...] = ()
    policy: tuple[str, ...] = ()
    program: tuple[str, ...] = ("-m", "potluck.cli.main")
    kill: tuple[int, ...] = ()  # Engines that are killed, one after another.


WAYS = {
    "in place": Way(tuple(WHOLE)),
    "P/D": Way(tuple(COMBO), policy=("opportunistic=false",)),
    "split": Way(
        tuple(PAIR),
        policy=("split_overflow=false", "low_decodes=false"),
        program=(str(ROOT / "tools" / "random_cuts.py"),),
    ),
    "remote": Way(tuple(REMOTE), flows=(("far", "near"),)),
    "recovered": Way((*WHOLE, *COMBO, *WHOLE), kill=(0, 2)),
}


@dataclass
class Choice:
    text: str = ""
    ended: str | None = None
    logs: list[Any] = field(default_factory=list)


@dataclass
class Said:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    problem: str = ""

    def add(self, data: dict[str, Any]) -> None:
        if "error" in data:
            self.problem = str(data["error"])[:200]
        for datum in data.get("choices", ()):
            choice = self.choices.setdefault(datum["index"], Choice())
            part = datum.get("delta") or datum.get("message") or datum
            choice.text += part.get("content") or part.get("text") or ""
            choice.ended = datum.get("finish_reason") or choice.ended
            if logs := datum.get("logprobs"):
                rows = zip(*(logs.get(name, ()) for name in COLUMNS), strict=True)
                choice.logs += logs.get("content", rows)
        if data.get("usage"):
            self.usage = data["usage"]["prompt_tokens"], data["usage"]["completion_tokens"]


async def all_said(
    url: str,
    asks: Sequence[Ask],
    at_once: int,
    heard: Heard = lambda pieces: None,
    headers: Headers = MappingProxyType({}),
) -> list[Said]:
    turns = asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=WITHIN_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def one(ask: Ask) -> Said:
            text = Said()
            try:
                async with turns, session.post(url + ask.path, json=ask.body, headers=headers) as answer:
                    if answer.content_type == "text/event-stream":
                        async for line in answer.content:
                            if line.startswith(b"data: {"):
                                text.add(json.loads(line[6:]))
                                heard(1)
                    else:
                        text.add(await answer.json())
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                text.problem = f"{type(error).__name__} {error}"
            return text

        return list(await asyncio.gather(*map(one, asks)))


class Killing:
    """Kills engines when so many pieces of answers came: in the middle of most of them."""

    def __init__(self, engines: Sequence[Process], expected: int) -> None:
        self._left, self._pieces = list(engines), 0
        self._after = [round(expected * (0.1 + 0.2 * place)) for place in range(len(engines))]

    def heard(self, pieces: int) -> None:
        self._pieces += pieces
        while self._left and self._pieces >= self._after[0]:
            self._after.pop(0)
            self._left.pop(0).send(signal.SIGKILL)


def start_engines(count: int, model: str, folder: Path, most: int) -> list[Process]:
    made = []
    for place in range(count):
        arguments = [*POTLUCK, "engine", "serve", "--json", "--port", "0"]
        arguments += ["--model", str(DATA / model), "--name", MODEL, "--max-running", str(most)]
        made.append(Process(arguments, folder / f"{model}-{place}.log"))
        made[-1].start()
    for process in made:
        listening(process)
    return made


def taken_of(log: Path) -> tuple[Counter[str], set[int]]:
    """On which kind of route each answer ended, and where prompts were cut."""
    regions: dict[str, str] = {}
    runs: dict[tuple[str, int], Run] = {}
    taken: Counter[str] = Counter()
    cuts: set[int] = set()
    for number, text in enumerate(log.read_text().splitlines()):
        if not text.startswith("["):
            continue
        _, event, actions = read_line(text, f"log:{number}")
        for action in actions:
            if isinstance(action, StartReplica):
                regions[action.member.id] = action.member.region
            elif isinstance(action, Run):
                runs[action.request, action.attempt] = action
        if isinstance(event, RequestFinished):
            run = runs[event.request, event.attempt]
            taken[kind_of(run, regions)] += 1
            cuts |= {segment.stop for segment in run.route.segments} - {None, run.prompt_tokens}
            if run.attempt:
                taken["recovered"] += 1
                taken["recovered within its answer"] += run.streamed_tokens > 0
    return taken, cuts


def kind_of(run: Run, regions: dict[str, str]) -> str:
    segments = run.route.segments
    if len(segments) == 1:
        return "in place"
    if len({regions[segment.replica] for segment in segments}) > 1:
        return "remote"
    return "P/D" if segments[-2].stop == run.prompt_tokens else "split"


def wait_for_all(fleet: LiveFleet) -> None:
    """Until every replica is ready, so that the first request finds all of them."""
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        with urllib.request.urlopen(f"{fleet.admin}/snapshot", timeout=10) as answer:
            states = [item["state"] for item in json.load(answer)["replicas"]]
        if states == ["ready"] * len(fleet.engine_list):
            return
        time.sleep(0.1)
    raise RuntimeError(f"not all replicas got ready: {states}")


def trial(
    kind: str, engines: Sequence[Process], model: str, asked: Sequence[tuple[Ask, Said]], codec: Codec
) -> dict[str, float]:
    """All of it at once over one kind of route; what was cached for another kind is under another salt."""
    asks, expected = map(list, zip(*asked, strict=True))
    lossy = codec != "fp16"
    way = WAYS[kind]
    units = _fitting(way.units * len(engines), len(engines))
    salted = [Ask(ask.path, {**ask.body, "cache_salt": f"{kind} {codec}"}) for ask in asks]
    bodies = [ask.body for ask in asks if ask.body.get("stream")]
    pieces = sum(body["max_tokens"] * body.get("n", 1) for body in bodies)  # where nothing ends early
    killing = Killing([engines[place] for place in way.kill if place < len(engines)], pieces)
    with tempfile.TemporaryDirectory() as folder:
        # Nobody is refused for being late, on however slow a machine.
        plan, spec = write_plans(Path(folder), units, way.flows, ttft_ms=1000 * int(WITHIN_S), codec=codec)
        log = Path(folder) / "log"
        rules = [part for item in (*way.policy, PATIENT) for part in ("--policy", item)]
        settings = ("--files", f"{MODEL}={DATA / model}", "--log", str(log), *rules)
        with LiveFleet(plan, spec, gateway=settings, over=engines, program=way.program) as fleet:
            wait_for_all(fleet)
            plain = asyncio.run(all_said(fleet.url, salted, len(asks))) if lossy else []
            began_s = time.monotonic()
            headers = EXACT if lossy else {}
            completed = asyncio.run(all_said(fleet.url, salted, len(asks), killing.heard, headers))
            took_s = time.monotonic() - began_s
        taken, cuts = taken_of(log)
    wrong = [place for place, text in enumerate(completed) if text != expected[place]]
    for place in wrong[:3]:
        say(f"{kind}: {asks[place].body}: {completed[place]} is not {expected[place]}")
    figures = {
        "requests": float(len(asks)),
        "answers": float(sum(len(text.choices) for text in expected)),
        "taken": float(taken[kind]),
        "mismatches": float(len(wrong)),
        "refused": float(sum(bool(text.problem) for text in completed)),
        "seconds": took_s,
    }
    if lossy:
        figures["lossy mismatches"] = float(sum(map(ne, plain, expected)))
    if kind == "split":
        figures |= {"cuts": len(cuts), "cuts_within_blocks": sum(cut % 16 != 0 for cut in cuts)}
    if kind == "recovered":
        figures["within_answers"] = taken["recovered within its answer"]
    called = f"{kind} in {codec}" if lossy else kind
    return {f"{called}: {name}": value for name, value in figures.items()}


def _fitting(units: tuple[Unit, ...], engines: int) -> tuple[Unit, ...]:
    """Those of them, in order, that there are engines for."""
    kept: list[Unit] = []
    for unit in units:
        if sum(len(roles) for _, roles, _ in kept) + len(unit[1]) <= engines:
            kept.append(unit)
    return tuple(kept)


def compared(
    model: str, kinds: Sequence[str], count: int, output: int, engines: int, seed: int, lossy: Codec = "fp16"
) -> dict[str, float]:
    """One model over all kinds of routes. The engines are the same for all: only the gateway is another. With a lossy
    codec, P/D is asked for in that one too."""
    asks = asks_of(count, output, seed)
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = start_engines(engines, model, folder, count)
        for process in started:
            stack.callback(process.end)
        alone = [other_way(ask) for ask in asks]
        expected = asyncio.run(all_said(str(started[0].said["url"]), alone, 1))
        problems = [text.problem for text in expected if text.problem]
        if problems:
            raise RuntimeError(f"the lone engine says {problems[0]}")
        trials: list[tuple[str, Codec]] = [(kind, "fp16") for kind in kinds]
        if lossy != "fp16":
            trials.insert(0, ("P/D", lossy))
        for kind, codec in trials:
            result = trial(kind, started, model, list(zip(asks, expected, strict=True)), codec)
            for name, value in result.items():
                say(f"{model}, {name}: {value:g}")
                figures[f"{model}, {name}"] = value
    return figures


def measure(quick: bool, kinds: Sequence[str]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for model in MODELS[:1] if quick else MODELS:
        figures |= compared(model, kinds, STREAMS, 16 if quick else 64, 2 if quick else 4, SEED)
    return figures


if __name__ == "__main__":
    kinds = options(only=tuple(WAYS)).only
    targets: dict[str, tuple[str, float]] = {}
    for model in MODELS:
        for kind in kinds:
            targets |= {f"{model}, {kind}: mismatches": ("<=", 0), f"{model}, {kind}: taken": (">=", 1)}
    run(
        "gateway_same",
        lambda quick: measure(quick, kinds),
        targets,
        seeds=(SEED,),
        quick_without="the second model, two engines, and three quarters of the answers' length",
    )

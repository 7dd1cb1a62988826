"""`potluck up --engine vllm` with four real vLLM processes: the official client, a flip and a kill under load.

Everything is compared with one plain vLLM. `up` itself runs where Potluck is installed (POTLUCK_PYTHON), vLLM here.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_plans import MODEL, write_plans
from vllm_kit import ENVIRONMENT, SOURCE, VOCAB, Instance, flags, make_lora, make_model, needs_vllm

PYTHON = os.environ.get("POTLUCK_PYTHON", "")
pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not PYTHON, reason="POTLUCK_PYTHON says nothing: make test-vllm"),
]
TOOL_FLAGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *(
        "--structured-outputs-config.backend=xgrammar",
        "--structured-outputs-config.disable_any_whitespace=true",
    ),
)
UNITS = [("homogeneous", (role,), "near") for role in ("prefill", "prefill", "decode", "decode")]
WITHIN_S = 420.0  # For machines that have much else to do.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "look"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def more_flags(folder: Path) -> list[str]:
    return [*TOOL_FLAGS, "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"lora={folder / 'lora'}"]


class PlainInstance(Instance):
    def _command(self, model: Path, block_tokens: int) -> list[str]:
        command = super()._command(model, block_tokens)
        return [*(MODEL if word == "tiny" else word for word in command), *more_flags(model.parent)]


@dataclass
class RunningService:
    state: Path
    url: str
    process: subprocess.Popen[str]

    def cli(self, *words: str) -> str:
        command = [PYTHON, "-m", "potluck.cli.main", *words, "--state", str(self.state)]
        done = subprocess.run(
            command, env=_environment(), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def replicas(self) -> dict[str, dict[str, Any]]:
        load = json.loads(self.cli("status", "--json"))["replicas"]
        return {str(item["replica"]): item for item in load}

    def until(self, what: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        until_s = time.monotonic() + WITHIN_S
        while True:
            result = self.replicas()
            if what(result):
                return result
            assert time.monotonic() < until_s, result
            time.sleep(1.0)

    def kill(self, engine: str) -> None:
        for folder in Path("/proc").iterdir():
            try:
                marked = f"POTLUCK_INSTANCE={engine}".encode() in (folder / "environ").read_bytes().split(
                    b"\0"
                )
                if folder.name.isdigit() and marked:
                    for child in (folder / "task" / folder.name / "children").read_text().split():
                        os.killpg(int(child), signal.SIGKILL)
            except OSError:
                continue


def _environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(SOURCE)}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningService, PlainInstance]]:
    folder = tmp_path_factory.mktemp("up")
    model = make_model(folder / "tiny")
    plan, spec = write_plans(folder, UNITS, [("near", "near")])
    spec.write_text(
        spec.read_text().replace(f"    name: {MODEL}\n", f"    name: {MODEL}\n    files: {model}\n")
    )
    state = folder / "state"
    make_lora(folder / "lora")
    more = shlex.join([*flags(), *more_flags(folder)])
    command = [
        *(PYTHON, "-m", "potluck.cli.main", "up", str(plan), str(spec), "--state", str(state), "--json"),
        *(
            "--engine",
            "vllm",
            "--vllm-python",
            sys.executable,
            f"--vllm-flags={more}",
            "--averages",
            "--port",
            "0",
        ),
    ]
    log = (folder / "up.log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment())
    plain = PlainInstance(model, folder / "plain.log", connector=False)
    watchdog = threading.Timer(3 * WITHIN_S, process.kill)
    watchdog.start()
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "up.log").read_text()[-3000:]
        up = RunningService(state, json.loads(line)["url"], process)
        up.until(lambda result: [item["state"] for item in result.values()].count("ready") == 4)
        yield up, plain.ready()  # type: ignore[misc]
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        log.close()
        plain.end()


def client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)


def chat(
    url: str, messages: list[dict[str, Any]], *, stream: bool, model: str = MODEL, **more: Any
) -> list[Any]:
    """What the official client makes of it: per choice its text, calls, reason, and how many log probabilities."""
    body = {"model": model, "messages": messages, "temperature": 0, **more}
    if not stream:
        with client(url) as asking:
            result = asking.chat.completions.create(**body)
        return [
            (
                item.message.content or "",
                [
                    (call.function.name, json.loads(call.function.arguments))
                    for call in item.message.tool_calls or []
                ],
                item.finish_reason,
                len(item.logprobs.content) if item.logprobs else 0,
            )
            for item in result.choices
        ]
    report: dict[int, list[Any]] = {}
    names = set()
    with client(url) as asking:
        events = list(asking.chat.completions.create(stream=True, **body))
    for event in events:
        names.add(event.id)
        for choice in event.choices:
            mine = report.setdefault(choice.index, ["", "", "", None, 0])
            mine[0] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                mine[1] += call.function.name or ""
                mine[2] += call.function.arguments or ""
            mine[3] = choice.finish_reason or mine[3]
            mine[4] += len(choice.logprobs.content) if choice.logprobs else 0
    assert len(names) == 1
    return [
        (text, [(name, json.loads(arguments))] if name else [], reason, logs)
        for text, name, arguments, reason, logs in report.values()
    ]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


HISTORY = [
    *said("Where is it?"),
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo", "n": 1}'}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "There."},
]  # fmt: skip
NO_BLANKS = {"logit_bias": {str(number): -100 for number in (3 + 9, 3 + 10, 3 + 13, 3 + 32)}}
"""A model of random weights would write blanks for ever, where a grammar lets it."""
ASKED: dict[str, dict[str, Any]] = {
    "a named tool": {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 100, **NO_BLANKS},
    "some tool": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 100, **NO_BLANKS},
    "a tool or not": {"tools": TOOLS, "max_tokens": 8},
    "a format": {"response_format": FORMAT, "max_tokens": 60},
    "log probabilities of a format": {
        "response_format": FORMAT,
        "max_tokens": 60,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 20},
    "several drawn": {"n": 2, "temperature": 0.9, "seed": 3, "frequency_penalty": 0.1, "max_tokens": 6},
    "a field of vLLM's": {"extra_body": {"structured_outputs": {"regex": "[ab]{6}"}}, "max_tokens": 20},
    "plain": {"max_tokens": 12},
}


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.vllm_all), True])
def test_openai_client_gets_the_features_of_vllm(
    service: tuple[RunningService, PlainInstance], stream: bool
) -> None:
    up, plain = service
    below = f"http://127.0.0.1:{plain.port}"
    for place, (what, more) in enumerate(ASKED.items()):
        for messages in (said(f"{place} " + "word " * 30), HISTORY):
            result = chat(up.url, messages, stream=stream, **more)
            if more.get("n", 1) == 1:
                assert result == chat(below, messages, stream=stream, **more), what
            else:
                assert len({text for text, *_ in result}) == 2, "each is drawn by itself"
    calls = chat(up.url, said("call"), stream=stream, **ASKED["a named tool"])[0][1]
    assert calls[0][0] == "look"
    assert set(calls[0][1]) == {"city", "n"}


@pytest.mark.vllm_all
def test_adapters_are_models_by_their_own_names(service: tuple[RunningService, PlainInstance]) -> None:
    up, plain = service
    with client(up.url) as asking:
        assert {item.id for item in asking.models.list()} == {MODEL, "lora"}
    below = f"http://127.0.0.1:{plain.port}"
    for place, more in enumerate(({"max_tokens": 12}, ASKED["a named tool"])):
        messages = said("word " * 40 + str(place))
        for name in ("lora", MODEL, "lora"):
            result = chat(up.url, messages, stream=False, model=name, **more)
            assert result == chat(below, messages, stream=False, model=name, **more)
    bare = [
        chat(up.url, said("word " * 20), stream=True, model=name, max_tokens=12) for name in ("lora", MODEL)
    ]
    assert bare[0] != bare[1], "it makes a difference"


@pytest.mark.vllm_all
def test_vllm_refusals_and_different_prompts_reach_the_client(
    service: tuple[RunningService, PlainInstance],
) -> None:
    from openai import BadRequestError

    up, plain = service
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="nonsense"):
            chat(up.url, said("hi"), stream=stream, response_format=wrong)
    # vLLM joins the parts of a message otherwise than we do.
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "one " * 20}, {"type": "text", "text": "two"}]}
    ]
    more = {"presence_penalty": 0.5, "max_tokens": 10}
    below = f"http://127.0.0.1:{plain.port}"
    assert chat(up.url, parts, stream=True, **more) == chat(below, parts, stream=True, **more)


@pytest.mark.vllm_all
def test_prefixes_cached_in_vllm_are_found_again_through_the_gateway(
    service: tuple[RunningService, PlainInstance],
) -> None:
    """vLLM tells of its blocks and the gateway asks for that, so prompts go where they were before, unless that one
    is busy; by chance, half of them would. Between two askings of one are all the others."""
    up, _ = service
    prompts = [random.Random(f"again {place}").choices(range(3, VOCAB), k=400) for place in range(16)]
    cached = []
    with client(up.url) as asking:
        for prompt in [*prompts, *prompts]:
            answer = asking.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=2)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert sum(tokens >= 384 for tokens in cached[len(prompts) :]) >= 12, str(cached)


def ask(url: str, place: int) -> object:
    """One of many requests: tokens mostly, every fourth with a tool, half of those streamed."""
    drawn = random.Random(place)
    if place % 4 == 3:
        messages = said("word " * drawn.randrange(5, 60) + str(place))
        return chat(url, messages, stream=place % 8 == 7, **ASKED["a named tool"])
    prompt = drawn.choices(range(3, VOCAB), k=drawn.randrange(40, 600))
    with client(url) as asking:
        result = asking.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=30, extra_body={"ignore_eos": True}
        )
    return result.choices[0].text


def test_kill_and_role_flip_under_load_change_no_answer(
    service: tuple[RunningService, PlainInstance],
) -> None:
    up, plain = service
    count = 48
    done = threading.Semaphore(0)

    def one(place: int) -> object:
        try:
            return ask(up.url, place)
        finally:
            done.release()

    before = up.replicas()
    victim = next(name for name, item in before.items() if item["role"] == "decode")
    flipped = next(name for name, item in before.items() if item["role"] == "prefill")
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(one, place) for place in range(count)]
        for _ in range(count // 6):
            done.acquire()
        up.kill(str(before[victim]["engine"]))  # in the middle of answers
        up.cli("fleet", "flip", flipped, "decode")
        outcome = [item.result(WITHIN_S) for item in asked]
    below = f"http://127.0.0.1:{plain.port}"
    with ThreadPoolExecutor(8) as threads:
        assert outcome == list(threads.map(lambda place: ask(below, place), range(count)))
    assert up.replicas()[flipped]["role"] == "decode"
    after = up.until(lambda now: [item["state"] for item in now.values()].count("ready") == 4)
    engines = {str(item["engine"]) for item in after.values()}
    assert str(before[victim]["engine"]) not in engines, "another took its place"
    assert len(engines) == 4
    again = range(count, count + 12)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda place: ask(up.url, place), again)) == list(
            threads.map(lambda place: ask(below, place), again)
        )

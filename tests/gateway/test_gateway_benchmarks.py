"""Small parts of the gateway's benchmarks, as tests: right answers by all ways, and few steps for a request."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import FrameType, ModuleType

import pytest
import uvloop

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_CALLS, MOST_CALLS_PER_TOKEN = 155, 8
"""Of Python functions, the benchmark's own few included; 137 and 5 when this was written."""
MAX_FILES = 26
"""Files of src/potluck that a relayed stream passes through: socket, parser, handler, Brain, dispatch,
engine and back."""


def benchmark(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


@pytest.fixture(scope="module")
def answer_benchmark() -> ModuleType:
    return benchmark("gateway_same")


@pytest.mark.slow
def test_answers_over_every_route_equal_those_of_a_single_engine(answer_benchmark: ModuleType) -> None:
    """Exact ones also where others are lossy. The same was asked before without asking for exactness: what came in
    four bits must not be found in a cache."""
    kinds = ("in place", "P/D", "split", "remote", "recovered")
    figures = answer_benchmark.compared("words", kinds, count=8, output=32, engines=2, seed=3, lossy="int4")
    for kind in (*kinds, "P/D in int4"):
        assert figures[f"words, {kind}: mismatches"] == 0, kind
        assert figures[f"words, {kind}: taken"] > 0, f"nothing went by {kind}"
    assert figures["words, P/D: taken"] == figures["words, split: taken"] == figures["words, split: answers"]
    assert figures["words, split: cuts_within_blocks"] > 0
    assert figures["words, P/D in int4: lossy mismatches"] > 0, "four bits changed nothing"


def test_answer_comparison_detects_any_difference(answer_benchmark: ModuleType) -> None:
    """Put together from pieces, however they are cut, and told apart by any part of it."""

    def said(*parts: dict[str, object]) -> object:
        made = answer_benchmark.Said()
        for part in parts:
            made.add(part)
        return made

    def piece(text: str, value: float, ended: str | None = None) -> dict[str, object]:
        at = "ab".find(text)
        logs = {
            "tokens": [text],
            "token_logprobs": [value],
            "top_logprobs": [{text: value}],
            "text_offset": [at],
        }
        return {"choices": [{"index": 0, "text": text, "logprobs": logs, "finish_reason": ended}]}

    both = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"a": -1.0}, {"b": -2.0}],
        "text_offset": [0, 1],
    }
    whole = {"choices": [{"index": 0, "text": "ab", "logprobs": both, "finish_reason": "length"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    right = said(whole, usage)
    assert said(piece("a", -1.0), piece("b", -2.0, "length"), usage) == right
    assert said(piece("a", -1.0), piece("b", -2.5, "length"), usage) != right
    assert said(piece("a", -1.0), piece("b", -2.0, "stop"), usage) != right
    assert said(piece("a", -1.0), piece("b", -2.0, "length")) != right
    assert said(piece("a", -1.0), piece("c", -2.0, "length"), usage) != right


@pytest.mark.slow
def test_answers_are_correct_when_one_engine_corrupts_and_another_is_killed() -> None:
    """One of three engines lies, another is killed, and started again."""
    kill = benchmark("gateway_kill")
    load = kill.Load(streams=24, over_s=2.0, prompt=60, output=40, every_s=1.0, most_strikes=1)
    figures = kill.trial("killed, lying", load, ("--mock",), seed=2, units=kill.WHOLE * 3)
    assert figures["wrong"] == 0
    assert figures["attempts_failed"] > 0, "nothing happened to anybody"


def test_function_calls_per_request_and_token_stay_below_their_limits() -> None:
    result = benchmark("gateway_path").measure(True)
    assert 50 < result["calls_per_request"] <= MOST_CALLS
    assert 2 < result["calls_per_token"] <= MOST_CALLS_PER_TOKEN


def test_relayed_request_passes_through_a_bounded_number_of_files(tmp_path: Path) -> None:
    path = benchmark("gateway_path")
    files: set[str] = set()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/src/potluck/" in frame.f_code.co_filename:
            files.add(frame.f_code.co_filename.partition("/src/potluck/")[2])

    async def walk() -> None:
        stage = path.Stage(tmp_path)
        await stage.start()
        requests = [path.clients.request(number, 4, True) for number in range(3)]
        for request in requests[:2]:  # What is done once is done.
            stage.streamed(request, 4)
        sys.setprofile(look)
        try:
            stage.streamed(requests[2], 4)
        finally:
            sys.setprofile(None)
        await stage.core.close()
        await stage.calls.close()

    path.proxies.prepare(tmp_path, list(range(20_001, 20_001 + path.ENGINES)), path.clients.KEY.decode())
    uvloop.run(walk())
    assert {"gateway/http/server.py", "gateway/dispatch/relay_attempt.py", "core/brain/brain.py"} <= files
    assert len(files) <= MAX_FILES, sorted(files)

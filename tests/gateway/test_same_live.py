"""Real processes of the shipped model behind a gateway: every way gives the answer of one engine asked directly.

A small part of benchmarks/gateway_same.py, which has all kinds of routes and 64 clients at once.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def same() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("gateway_same", ROOT / "benchmarks" / "gateway_same.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["gateway_same"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


def test_answers_are_those_of_a_lone_engine_whatever_way_they_took(same: ModuleType) -> None:
    kinds = ("in place", "P/D", "split", "remote", "recovered")
    figures = same.compared("words", kinds, count=10, output=24, engines=2, seed=3, repeats=2)
    for kind in kinds:
        assert figures[f"words, {kind}: mismatches"] == 0, kind
        assert figures[f"words, {kind}: taken"] > 0, f"nothing went by {kind}"
    assert figures["words, P/D: taken"] == figures["words, split: taken"] == figures["words, split: answers"]
    assert figures["words, split: cuts_within_blocks"] > 0


def test_exact_answers_are_those_of_a_lone_engine_where_others_are_lossy(same: ModuleType) -> None:
    """The same was asked before without asking for exactness: what came in four bits must not be found in a cache."""
    kinds = ("P/D", "recovered")
    figures = same.compared("words", kinds, count=8, output=32, engines=2, seed=3, codec="int4")
    for kind in kinds:
        assert figures[f"words, {kind}: mismatches"] == 0, kind
        assert figures[f"words, {kind}: taken"] > 0, f"nothing went by {kind}"
    assert sum(figures[f"words, {kind}: lossy mismatches"] for kind in kinds) > 0, "four bits changed nothing"


def test_an_answer_that_differs_is_found(same: ModuleType) -> None:
    """Put together from pieces, however they are cut, and told apart by any part of it."""

    def said(*parts: dict[str, object]) -> object:
        made = same.Said()
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

"""Long texts are tokenised in another process; its failure does not stop the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import potluck.engine
from potluck.api import tokenizer_process
from potluck.api.http import HttpRefusal
from potluck.api.tokenizer import PROCESS_CHARS, ModelTokenizer
from potluck.api.tokenizer_process import TokenizerProcess

FOLDER = Path(potluck.engine.__file__).parent / "data" / "words"


@pytest.fixture
def process() -> Iterator[TokenizerProcess]:
    made = TokenizerProcess(FOLDER / "tokenizer.json")
    yield made
    made.close()


def test_long_text_gets_the_same_tokens_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat é 漢 😀 sat on the mat; " * 10
    monkeypatch.setattr("potluck.api.tokenizer.PROCESS_CHARS", len(text) - 1)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    asked: list[str] = []
    encode = TokenizerProcess.encode

    def spied(self: TokenizerProcess, text: str, *, special: bool) -> list[int] | None:
        asked.append(text)
        return encode(self, text, special=special)

    monkeypatch.setattr(TokenizerProcess, "encode", spied)
    model = ModelTokenizer.read(FOLDER)
    assert model is not None
    try:
        for special in (False, True):
            assert (
                model.encode(text, special=special) == tokenizer.encode(text, add_special_tokens=special).ids
            )
        assert asked == [text, text]
        model.encode(text[:-1])
        assert asked == [text, text], "a shorter one is tokenised here"
    finally:
        model.close()
    assert PROCESS_CHARS > 10_000


def test_text_that_kills_the_tokenizer_process_is_refused_and_the_next_is_not(
    process: TokenizerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_process, "SLICE_TOKENS", 3)
    tokens = process.encode("the cat sat", special=False)
    assert process._child is not None
    process._child.kill()
    process._child.wait()
    with pytest.raises(HttpRefusal, match="could not be tokenised"):
        process.encode("the cat sat", special=False)
    assert process.encode("the cat sat", special=False) == tokens


def test_closed_tokenizer_process_does_not_restart(process: TokenizerProcess) -> None:
    process.close()
    with pytest.raises(HttpRefusal, match="shutting down"):
        process.encode("the cat sat", special=False)
    assert process._child is None

"""`potluck engine serve`: a second process takes over a request, and start-up errors are one line."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import ClientSession
from click.testing import CliRunner
from engine_models import KINDS, prompt
from face_kit import NAME, Client, face, letters, make_service, played, tokens_in
from loop_kit import desk

from potluck.cli.engine.engine import serve
from potluck.cli.engine.listening import api_key
from potluck.cli.main import run
from potluck.core.errors import InputError
from potluck.engine.model.checkpoint import RandomSource, save
from potluck.engine.model.config import write_config
from potluck.engine.model.reference import ReferenceModel
from potluck.kv.handles import new_handle

TOKENS, OUTPUT = prompt(90), 10


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine in a process of its own, with the same made-up weights as ours, and other chunks."""
    folder = tmp_path_factory.mktemp("engine") / NAME
    folder.mkdir()
    write_config(folder, KINDS["hybrid"])
    letters()._tokenizer.save(str(folder / "tokenizer.json"))
    options = ["--random-weights", "7", "--port", "0", "--max-tokens", "512", "--threads", "1", "--json"]
    options += ["--chunk-tokens", "7", "--prefix-cache-mb", "0", "--kv-from", "127.0.0.1"]
    command = [sys.executable, "-m", "potluck.cli.main", "engine", "serve", "--model", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield json.loads(line)["url"]
        process.terminate()
        assert process.wait(20) == 0


def test_a_request_crosses_between_two_processes_both_ways(address: str) -> None:
    expected = desk("hybrid").answer(TOKENS, OUTPUT)

    async def scenario() -> None:
        async with face(make_service(prefix_cache_bytes=0)) as here, ClientSession() as session:
            there = Client(here.service, session, address, None)
            there.kv = (await there.get("/status"))[1]["kv"]
            ways = [(here, there), (there, here)]
            cuts = (1, 2, 15, 16, 17, 31, 41, 64, 89, 90)
            for (sender, receiver), cut in itertools.product(ways, cuts):
                handle = new_handle()
                source = {"kv": sender.kv, "handle": handle}
                (a, sent), (b, got) = await asyncio.gather(
                    sender.segment(TOKENS, stop=cut, handle=handle),
                    receiver.segment(TOKENS, start=cut, max_tokens=OUTPUT, source=source),
                )
                assert (a, b) == (200, 200), (sent, got)
                assert tokens_in(got) == expected
            # One process cuts, the other goes on, the first ends; with others beside them.
            for first, second in ((20, 70), (16, 17), (3, 89)):
                one, two = new_handle(), new_handle()
                from_one, from_two = {"kv": here.kv, "handle": one}, {"kv": there.kv, "handle": two}
                *_, (status, lines) = await asyncio.gather(
                    *(here.segment(prompt(30, place), max_tokens=9) for place in range(4)),
                    *(there.segment(prompt(50, place), max_tokens=9) for place in range(4)),
                    here.segment(TOKENS, stop=first, handle=one),
                    there.segment(TOKENS, start=first, stop=second, source=from_one, handle=two),
                    here.segment(TOKENS, start=second, max_tokens=OUTPUT, source=from_two),
                )
                assert status == 200, lines
                assert tokens_in(lines) == expected
            _, status = await there.get("/status")
            assert (status["running"], status["waiting"]) == (0, 0)
            assert status["free_blocks"] == status["total_blocks"]

    played(scenario)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A whole model in files."""
    config = KINDS["full"]
    save(tmp_path / "m", config, ReferenceModel(config, RandomSource(1)).tensors())
    return tmp_path / "m"


@pytest.mark.parametrize("damage", ["cut", "header", "missing", "config", "json"])
def test_a_damaged_model_is_a_start_up_error_in_one_line(
    stored: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = stored / "model.safetensors"
    raw = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(raw[: len(raw) // 2])
    elif damage == "header":
        weights.write_bytes(b"\xff" * 50 + raw[50:])
    elif damage == "missing":
        weights.unlink()
    elif damage == "config":
        shutil.rmtree(stored)
    else:
        (stored / "config.json").write_text("{")
    assert run(["engine", "serve", "--model", str(stored), "--port", "0"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("potluck: error: ")
    assert len(shown.splitlines()) == 1


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POTLUCK_API_KEY", raising=False)
    assert api_key(None) is None
    monkeypatch.setenv("POTLUCK_API_KEY", "one")
    assert api_key(None) == "one"
    (tmp_path / "key").write_text("two\n")
    assert api_key(tmp_path / "key") == "two"
    (tmp_path / "key").write_text("\n")
    with pytest.raises(InputError, match="empty"):
        api_key(tmp_path / "key")
    with pytest.raises(InputError, match="cannot be read"):
        api_key(tmp_path / "none")
    assert "segments" in CliRunner().invoke(serve, ["--help"]).output

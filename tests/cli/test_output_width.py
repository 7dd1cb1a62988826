"""Command output fits 80 columns without truncation."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.cli.common.render import LEAST_WIDTH, table
from potluck.cli.main import run
from potluck.cli.planning.plan_show import ComparedStrategy, show_compared

SPEC = """\
models:
- model: Llama-3.1-8B
  name: a-chat-with-a-long-name
  slo: {ttft_ms: 2000, tpot_ms: 60}
  traffic: {rate_by_hour: [1, 4], input: 1000, output: 200}
- model: Qwen2-7B
  name: code
  slo: {ttft_ms: 2000, tpot_ms: 60}
  traffic: {rate_per_s: 1, input: 500, output: 20}
  redundancy: node
fleet:
  regions:
  - name: northern-europe-1
    nodes:
    - {node: 1xL40S, available: 4, price_usd_per_h: 1.9}
    - {node: 1xA10G, available: 4, price_usd_per_h: 1.0}
"""
QUICK = ["--strategy", "melange", "--time-limit", "3"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("wide")
    spec, plan = folder / "potluck.yaml", folder / "plan.json"
    spec.write_text(SPEC)
    assert run(["plan", str(spec), *QUICK, "--averages", "--no-explain", "--out", str(plan)]) == 0
    return str(plan), str(spec)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "SPEC", *QUICK, "--requests", "200"],
        ["simulate", "PLAN", "SPEC", "--requests", "300", "--rate", "60", "--slo-scan"],
        ["estimate", "--model", "Llama-3.1-8B", "--node", "2xL40S", "--input", "1024", "--output", "256"],
        ["schedule", "SPEC", *QUICK],
        ["replan", "PLAN", "SPEC", "--time-limit", "2", "--lose", "northern-europe-1:1xL40S=1"],
        ["check", "SPEC"],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_command_output_fits_80_columns(
    words: list[str],
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = [files[0] if word == "PLAN" else files[1] if word == "SPEC" else word for word in words]
    assert run(command) in (0, 3)
    out = capsys.readouterr().out
    assert out.strip()
    assert [line for line in out.splitlines() if len(line) > 80 and files[1] not in line] == []
    assert "…" not in out


def test_comparison_fits_80_columns_and_names_missed_objectives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        ComparedStrategy(name, 1234.5, 0.123, 1.0, 5.0, 12, 0.05, 12.3, broken, seen, 0.9, "chat", 3000)
        for name, seen, broken in (("thunderserve", 0.95, ()), ("auto", 0.42, ("too many nodes",)))
    ]
    show_compared(rows)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "42.0 % < 90.0 %" in out
    assert "share of 3,000 simulated requests" in out
    assert "the plan of auto failed verification: too many nodes." in out


WORDS = st.lists(st.text("abcdefgh-[", min_size=1, max_size=9), max_size=6).map(" ".join)
FIGURES = st.one_of(
    st.just("-"), st.integers(0, 10**9).map("{:,}".format), st.floats(0, 99).map("{:.1f} ms".format)
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(WORDS, WORDS, FIGURES, WORDS, FIGURES), min_size=1, max_size=4),
    st.integers(LEAST_WIDTH, 160),
)
def test_tables_are_folded_between_words_without_losing_text(rows: list[tuple[str, ...]], width: int) -> None:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setenv("COLUMNS", str(width))
        table("what was asked", ("a head", "words", "figures\nof one", "more words", "more figures"), rows)
    title, *lines = printed.getvalue().splitlines()
    assert title == "what was asked"
    assert all(len(line) <= width for line in lines)
    for row in rows:
        for cell in row:
            for word in cell.split():
                assert any(word in line for line in lines), word
        assert all(any(cell in line for line in lines) for cell in (row[2], row[4]))


def test_docs_show_the_figures_that_estimate_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Run the command that the page shows; every line that is quoted must be as it is printed."""
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text("utf-8")
    command, _, quoted, *_ = text[text.index("    potluck estimate") :].split("\n\n")
    assert run(command.split()[1:]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert quoted.startswith("    ")
    for line in quoted.splitlines():
        assert any(" ".join(line.split()).removesuffix("...").strip() in item for item in printed), line

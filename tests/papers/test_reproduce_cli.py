"""`lab/reproduce.py`: one JSON object with rows, and a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from papers.command import reproduce
from papers.rows import Reproduction, Row, inversions

from papers import cronus, cronus_rows
from potluck.cli.main import run

COLUMNS = {"experiment", "setting", "metric", "unit", "published", "ours", "note"}


def ask(*arguments: str) -> int:
    return run(arguments, reproduce, "lab/reproduce.py")


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """One setting and few requests: the same way through the code in a second."""
    measure = cronus_rows.measure

    def few(requests: cronus.RequestLengthList, report_progress: object, quick: bool) -> Reproduction:
        asked = requests.first(40)
        return Reproduction("CRONUS", cronus_rows.rows(measure(asked, settings=cronus.SETTINGS[:2]), asked))

    monkeypatch.setattr(cronus_rows, "reproduce", few)
    monkeypatch.setattr(cronus_rows, "CLAIMS", tuple(c for c in cronus_rows.CLAIMS if c[2] != "A30"))


@pytest.mark.usefixtures("shortened")
def test_reproduce_json_has_its_documented_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("cronus", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"paper", "rows"}
    assert document["paper"] == "CRONUS"
    assert all(set(row) == COLUMNS for row in document["rows"])
    assert any(row["published"] is None for row in document["rows"])
    assert {row["published"] for row in document["rows"]} >= {7.28, 8.29}


@pytest.mark.usefixtures("shortened")
def test_reproduce_table_shows_published_and_own_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("cronus") == 0
    shown = capsys.readouterr().out
    assert "CRONUS, Table 2" in shown
    assert "7.28" in shown
    assert "55.0%" in shown


def test_reproduce_refuses_an_unknown_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("nothing") == 2
    assert "cauchy" in capsys.readouterr().err


@pytest.mark.usefixtures("shortened")
def test_reproduce_reports_missing_trace_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert ask("cronus", "--json", "--data", str(tmp_path)) == 0
    assert f"lengths are made up, since {tmp_path} has no azure" in capsys.readouterr().err
    assert ask("cronus", "--data", str(tmp_path / "none")) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_reproduction_rows_are_plain_values() -> None:
    assert {*Row.__dataclass_fields__} == COLUMNS


FIGURES = st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 100.0), min_size=2)


def test_row_deviation_is_relative_to_the_published_figure() -> None:
    assert Row("t", "s", "m", "u", 4.0, 5.0).off == pytest.approx(0.25)
    assert Row("t", "s", "m", "u", None, 5.0).off is None


@given(FIGURES, st.floats(0.5, 2.0))
def test_scaled_figures_have_no_order_inversions(figures: dict[str, float], factor: float) -> None:
    assert inversions(figures, {name: value * factor for name, value in figures.items()}) == []


@given(FIGURES)
def test_negated_figures_invert_every_different_pair(figures: dict[str, float]) -> None:
    turned = {name: -value for name, value in figures.items()}
    values = list(figures.values())
    unlike = sum(a > b for a in values for b in values)
    assert len(inversions(figures, turned)) == unlike


def test_published_tie_within_the_tolerance_is_no_inversion() -> None:
    assert inversions({"a": 1.02, "b": 1.0}, {"a": 1.0, "b": 2.0}) == [("a", "b")]
    assert inversions({"a": 1.02, "b": 1.0}, {"a": 1.0, "b": 2.0}, tie=0.05) == []

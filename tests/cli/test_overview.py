"""`potluck overview`: what each node of a fleet could do for each model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from potluck.cli.main import run

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def test_overview_of_the_bundled_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["overview"]) == 0
    out = capsys.readouterr().out
    assert "chat" in out
    assert "$/M tokens" in out
    assert "One node type per model" in out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_overview_of_every_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["overview", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for rows in found.values():
        costs = [row["estimate"]["usd_per_million_tokens"] for row in rows if row["estimate"]]
        assert costs == sorted(costs)
        for row in rows:
            assert (row["estimate"] is None) == (row["problem"] is not None)
            if row["estimate"]:
                assert row["needed"] >= 1
                assert row["estimate"]["confidence"] in ("measured", "transferred", "assumed")


def test_a_model_that_fits_nowhere_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = tmp_path / "potluck.yaml"
    spec.write_text(
        "models:\n"
        "- model: DeepSeek-V3\n"
        "  slo: {ttft_ms: 1000, tpot_ms: 50}\n"
        "  traffic: {rate_per_s: 1, input: 1000, output: 100}\n"
        "fleet:\n"
        "  regions:\n"
        "  - name: home\n"
        "    nodes: [{node: 1xL4, available: 3, price_usd_per_h: 1}]\n"
    )
    assert run(["overview", str(spec)]) == 0
    out = capsys.readouterr().out
    assert "weights do not fit" in out
    assert "no single node type suffices" in out

"""Named workloads: their means are the published ones, and what is drawn from them has those means."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from potluck.catalog import named_workloads
from potluck.cli.planning.catalog import catalog
from potluck.core.errors import UnknownNameError
from potluck.core.values.length_laws import Fixed, LogNormal
from potluck.core.values.types import Traffic
from potluck.sim.load.draw_lengths import draw
from potluck.spec.named_lengths import length_bins

PUBLISHED = {
    "dailymail": (702, 42),
    "sharegpt": (290, 207),
    "longwriter": (337, 1330),
    "azure-conv": (1155, 211),
    "azure-code": (2048, 28),
    "conversation": (1155, 211),
    "coding": (2048, 28),
    "cronus": (1014, 247),
    "mooncake-conv": (12035, 343),
    "burstgpt": (352.45, 58.94),
}


@pytest.mark.parametrize(("name", "means"), PUBLISHED.items())
def test_means_are_the_published_ones(name: str, means: tuple[float, float]) -> None:
    lengths = named_workloads.workload(name).lengths
    assert lengths.prompt.mean_tokens == pytest.approx(means[0], rel=1e-3, abs=0.5)
    assert lengths.output.mean_tokens == pytest.approx(means[1], rel=1e-3, abs=0.5)


def test_prfaas_is_the_law_it_prints() -> None:
    lengths = named_workloads.workload("prfaas").lengths
    assert lengths.prompt == LogNormal(9.9, 1.0, 128, 131072)
    assert lengths.prompt.mean_tokens == pytest.approx(27_000, rel=0.03)
    assert lengths.output == Fixed(1024)


def test_medians_of_azure_are_those_that_thunderserve_prints() -> None:
    rng = np.random.default_rng(0)
    for name, median in (("coding", 13), ("conversation", 129)):
        prompt, output = draw(rng, named_workloads.workload(name).lengths, 100_000)
        assert np.median(output) == pytest.approx(median, rel=0.05)
        assert np.median(prompt) > 1000


@pytest.mark.parametrize("name", named_workloads.names())
def test_what_is_drawn_and_what_is_planned_have_the_same_means(name: str) -> None:
    lengths = named_workloads.workload(name).lengths
    prompt, output = draw(np.random.default_rng(1), lengths, 100_000)
    planned = Traffic("m", 1.0, length_bins(lengths))
    for drawn, law, mean in (
        (prompt, lengths.prompt, planned.mean_input_tokens),
        (output, lengths.output, planned.mean_output_tokens),
    ):
        error = drawn.std() / len(drawn) ** 0.5
        assert drawn.mean() == pytest.approx(law.mean_tokens, abs=5 * error + 1e-9)
        assert mean == pytest.approx(law.mean_tokens, rel=1e-9)


def test_names_and_aliases() -> None:
    assert named_workloads.canonical("Azure_Conversation") == "azure-conv"
    assert named_workloads.workload("ThunderServe coding").gap_cv == 1.0
    with pytest.raises(UnknownNameError, match="did you mean 'sharegpt'"):
        named_workloads.workload("shargpt")


def test_a_likeness_keeps_the_other_entrys_source() -> None:
    figures = {figure.field: figure for figure in named_workloads.facts("cronus").figures}
    assert figures["mean_input_tokens"].source.id == "cronus"
    assert figures["input_law"].source.id == "azure-llm-2023"
    assert named_workloads.facts("dailymail").assumed


def test_the_catalog_command() -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(catalog, ("workloads", *arguments), catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    table = run()
    assert all(name in table for name in named_workloads.names())
    assert [entry["name"] for entry in json.loads(run("--json"))] == list(named_workloads.names())
    assert "1014" in run("cronus")
    one = json.loads(run("coding", "--json"))
    assert one["figures"]["mean_output_tokens"]["value"] == 27.9

"""`potluck catalog`: tables a person reads and JSON a program reads, from the same facts."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from potluck.catalog import gpus, models, prices
from potluck.cli.planning.catalog import catalog
from potluck.core.errors import InputError, UnknownNameError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(catalog, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_catalog_lists_show_every_entry() -> None:
    table = run("gpus")
    assert all(name in table for name in gpus.names())
    table = run("models")
    assert all(name in table for name in models.names())
    table = run("prices")
    assert all(price.node in table for price in prices.prices())


def test_catalog_json_lists_every_entry_with_sources() -> None:
    assert [entry["name"] for entry in run_json("gpus")] == list(gpus.names())
    listed = {entry["name"]: entry for entry in run_json("models")}
    assert listed["Llama-3.1-8B"]["derived"]["kv_bytes_per_token"] == 131072
    for entry in listed.values():
        for figure in entry["figures"].values():
            assert figure["date"]
            assert figure["source"]


def test_catalog_gpu_page_shows_sources_and_doubt() -> None:
    text = run("gpus", "rtx-a6000")
    assert "154.8" in text
    assert "llm-analysis" in text
    assert "Doubt: ThunderServe prints 38.7" in text
    one = run_json("gpus", "a6000")
    assert one["figures"]["fp16_tflops"]["kind"] == "secondary"
    assert one["figures"]["sm_count"]["kind"] == "secondary"
    assert run_json("gpus", "a800")["figures"]["sm_count"]["kind"] == "recall"
    assert "have no data sheet as their source" in run("gpus")


def test_catalog_node_page_shows_its_links() -> None:
    assert "nvswitch" in run("nodes")
    one = run_json("nodes", "2xa40")
    assert one["figures"]["interconnect"]["value"] == "nvlink-bridge-ga102"
    assert "bridge" in one["doubt"]


def test_catalog_model_page_marks_assumed_fields() -> None:
    text = run("models", "ring-2.5-1t")
    assert "(assumed)" in text
    assert "Assumed: vocab" in text
    one = run_json("models", "inclusionAI/Ring-2.5-1T")
    assert one["figures"]["vocab"]["assumed"] is True
    assert one["figures"]["hidden"]["assumed"] is False
    assert one["derived"]["layers"] == 80


def test_catalog_prices_are_filtered_by_node_gpu_and_region() -> None:
    result = run_json("prices", "--node", "8xH100", "--region", "aws/us-east-1")
    assert [price["price_usd_per_h"] for price in result] == [55.04]
    result = run_json("prices", "--gpu", "l40s")
    assert {price["node"].split("x")[1] for price in result} == {"L40S"}
    assert "No price matches" in run("prices", "--node", "L20")


def test_catalog_loads_without_heavy_packages() -> None:
    """Short commands start often: neither pydantic, yaml, numpy nor rich may come with the data."""
    script = (
        "import sys; from potluck.catalog import gpus, huggingface, models, nodes, prices\n"
        "prices.price_usd_per_h('8xH100'); nodes.node_type('2xL40S'); models.model('Llama-3.1-8B')\n"
        "heavy = {'pydantic', 'yaml', 'numpy', 'rich', 'torch', 'click'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("gpus", "L40"), UnknownNameError),
        (("models", "nonsense"), UnknownNameError),
        (("prices", "--node", "9xL4"), InputError),
        (("prices", "--region", "mars"), UnknownNameError),
    ],
)
def test_unknown_catalog_names_raise_errors_for_the_main_command(
    arguments: tuple[str, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(*arguments)

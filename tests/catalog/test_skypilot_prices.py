"""SkyPilot's catalog as prices: accepted rows, rows left out, and plans that use the prices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog.prices import CALLED, COLUMNS, installed, read, read_all
from potluck.cli.main import run
from potluck.core.errors import FormatError, InputError

HEAD = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
A100_40 = "\"{'Gpus': [{'Name': 'A100', 'MemoryInfo': {'SizeInMiB': 40960}}]}\""
AWS = f"""{HEAD}
g6.xlarge,L4,1.0,4.0,16.0,,0.8048,0.30,us-east-1,us-east-1a
g6.xlarge,L4,1.0,4.0,16.0,,0.8048,0.50,us-east-1,us-east-1b
g6.xlarge,L4,1.0,4.0,16.0,,0.8048,0.40,us-east-1,us-east-1c
g6.2xlarge,L4,1.0,8.0,32.0,,0.9776,0.20,us-east-1,us-east-1a
g6.12xlarge,L4,4.0,48.0,192.0,,4.6016,,us-east-1,us-east-1a
g6f.large,L4,0.125,2.0,8.0,,0.202,0.10,us-east-1,us-east-1a
p4d.24xlarge,A100,8.0,96.0,1152.0,{A100_40},32.7726,9.8,us-west-2,us-west-2a
inf2.xlarge,Inferentia2,1.0,4.0,16.0,,0.7582,0.2,us-east-1,us-east-1a
inf2.xlarge,Inferentia2,1.0,4.0,16.0,,0.7582,0.2,us-east-1,us-east-1b
,T4,1.0,,,,0.35,0.11,us-central1,us-central1-a
x.large,L40S,1.0,4.0,16.0,,nan,0.6,us-east-1,us-east-1a
m5.large,,,2.0,8.0,,0.096,0.03,us-east-1,us-east-1a
"""
SPEC = """models:
  - model: llama-3.1-8b
    slo: {ttft_ms: 2000, tpot_ms: 100}
    traffic: {rate_per_s: 1, input: 200, output: 50}
fleet:
  regions:
    - name: us-east-1
      nodes:
        - {node: 1xL4, available: 8, price_usd_per_h: 9.0}
        - {node: {name: cheap, gpu: L4, count: 1}, available: 1, spot: true, price_usd_per_h: 9.0}
        - {node: 1xA10G, available: 4, price_usd_per_h: 50.0}
"""


@pytest.fixture
def aws(tmp_path: Path) -> Path:
    path = tmp_path / "v8" / "aws" / "vms.csv"
    path.parent.mkdir(parents=True)
    path.write_text(AWS, encoding="utf-8")
    return path


def test_skypilot_price_is_the_cheapest_machine_and_the_median_spot(aws: Path) -> None:
    result = {(price.node, price.region): price for price in read(aws).prices}
    assert result.keys() == {("1xL4", "us-east-1"), ("4xL4", "us-east-1"), ("8xA100-40", "us-west-2")}
    small = result["1xL4", "us-east-1"]
    assert (small.price_usd_per_h, small.spot_usd_per_h, small.instance_type) == (0.8048, 0.2, "g6.xlarge")
    assert (small.place, small.source, small.listed) == ("aws/us-east-1", "skypilot-aws", True)
    assert result["4xL4", "us-east-1"].spot_usd_per_h is None


def test_skypilot_rows_left_out_are_listed_with_the_reason(aws: Path) -> None:
    assert dict(read(aws).left_out) == {
        "L4: a part of a GPU": 1,
        "Inferentia2: unknown to the catalog": 2,
        "T4: a price of the GPU alone, without its machine": 1,
        "L40S: no price on demand": 1,
    }
    # A name that means another size than it says is no price of the other.
    aws.write_text(AWS.replace(",A100,", ",A100-80GB,"), encoding="utf-8")
    assert dict(read(aws).left_out)["A100-80GB: has 43 GB, the catalog's A100-80 80 GB"] == 1


@given(
    st.lists(st.tuples(st.sampled_from(["L4", "A100", "TPU", ""]), st.sampled_from(["1", "8", "0.5", "16"])))
)
def test_every_skypilot_accelerator_row_is_a_price_or_left_out(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("sky") / "gcp.csv"
    lines = [f"i{n},{name},{count},1,1,,{n + 1},,r{n},z" for n, (name, count) in enumerate(rows)]
    path.write_text("\n".join([HEAD, *lines]), encoding="utf-8")
    received = read(path)
    assert len(received.prices) + sum(count for _, count in received.left_out) == sum(
        bool(name) for name, _ in rows
    )
    assert all(price.cloud == "gcp" for price in received.prices)


def test_newest_installed_skypilot_catalog_is_read(aws: Path, tmp_path: Path) -> None:
    old = tmp_path / "v5" / "aws" / "vms.csv"
    old.parent.mkdir(parents=True)
    old.write_text("nothing", encoding="utf-8")
    gcp = tmp_path / "v8" / "gcp" / "vms.csv"
    gcp.parent.mkdir()
    gcp.write_text(AWS, encoding="utf-8")
    assert installed(tmp_path) == (aws, gcp)
    assert {price.cloud for price in read_all(installed(tmp_path)).prices} == {"aws", "gcp"}
    with pytest.raises(InputError, match="no catalog of SkyPilot"):
        installed(tmp_path / "v5")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (AWS.replace("SpotPrice", "Spot"), "has no column SpotPrice"),
        (AWS.replace("0.9776", "free"), "vms.csv line 5: Price: must be a number from 0, is 'free'"),
    ],
)
def test_file_that_is_no_skypilot_catalog_is_refused_in_one_line(aws: Path, text: str, says: str) -> None:
    aws.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=says):
        read(aws)
    assert len(COLUMNS) == 6
    assert CALLED["A100"] == "A100-40"


def test_skypilot_prices_become_market_offers_that_a_plan_uses(
    aws: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, market = tmp_path / "potluck.yaml", tmp_path / "market.yaml"
    spec.write_text(SPEC, encoding="utf-8")
    source = ["catalog", "prices", "--from", "skypilot", str(aws)]
    assert run([*source, "--spec", str(spec), "--out", str(market)]) == 0
    text = capsys.readouterr()
    assert "2 offers" in text.out
    assert "not listed, price unchanged: 1xA10G in us-east-1" in text.err
    assert run(["plan", str(spec), "--market", str(market), "--averages", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["plan"]["cost_usd_per_h"] == pytest.approx(0.2), "the spot price that is listed, not $9.00"
    assert run([*source, "--json", "--gpu", "L4"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["node"] for row in rows if "node" in row] == ["1xL4", "4xL4"]
    assert {"left_out": "Inferentia2: unknown to the catalog", "rows": 2} in rows
    assert run([*source, "--gpu", "L4"]) == 0
    assert "Inferentia2: unknown to the catalog (2 rows)" in capsys.readouterr().out
    assert run(["catalog", "prices", "--spec", str(spec)]) == 2
    assert run(["catalog", "prices", "--from", "skypilot", str(tmp_path / "none.csv")]) == 2

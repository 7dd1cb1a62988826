"""Hosts that say what they have, and ways between them measured by short transfers over links that are shaped."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from host_bed import Bed, missing
from live_fleet import Process

from potluck.cli.main import cli

SLOW, FAST = 20e6, 200e6
DRIVER = """#!/bin/sh
echo "0, GPU-1, $FAKE_GPU, $FAKE_MIB"
echo "1, GPU-2, $FAKE_GPU, $FAKE_MIB"
"""
GPUS = [("NVIDIA L4", 23034), ("NVIDIA A10", 23028), ("NVIDIA L4", 23034)]
MODEL = """models:
  - model: Llama-3.1-8B
    slo: {ttft_ms: 2000, tpot_ms: 100}
    traffic: {rate_per_s: 1, input: 400, output: 100}
"""


@pytest.fixture
def bed() -> Iterator[Bed]:
    why_not = missing()
    if why_not and os.environ.get("CI"):
        pytest.fail(f"must not be left out here: {why_not}")
    if why_not:
        pytest.skip(why_not)
    with Bed(3) as made:
        yield made


@pytest.mark.slow
def test_hosts_are_found_with_gpus_regions_and_links(bed: Bed, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(DRIVER)
    driver.chmod(0o755)
    key = tmp_path / "key"
    key.write_text("what agents ask for")
    agents = []
    try:
        for place, host in enumerate(bed.hosts):
            words = [
                "hosts",
                "serve",
                "--host",
                host.address,
                "--port",
                "0",
                "--json",
                "--key-file",
                str(key),
            ]
            words += ["--name", f"h{place}", "--region", "east" if place < 2 else "west"]
            name, mib = GPUS[place]
            env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAKE_GPU": name, "FAKE_MIB": str(mib)}
            command = host.inside([sys.executable, "-m", "potluck.cli.main", *words])
            agents.append(Process(command, tmp_path / f"{place}.log", env))
            agents[-1].start()
        urls = [str(item.hear()["url"]) for item in agents]
        bed.slow(bed.hosts[0], FAST)
        bed.slow(bed.hosts[1], SLOW)
        bed.slow(bed.hosts[2], FAST)
        out = tmp_path / "pool.yaml"
        result = CliRunner().invoke(
            cli, ["hosts", "find", *urls, "--key-file", str(key), "--out", str(out), "--json"]
        )
        assert result.exit_code == 0, result.output
        key.write_text("a guess")
        guessed = CliRunner().invoke(cli, ["hosts", "find", *urls, "--key-file", str(key)])
        assert "401" in str(guessed.exception)
    finally:
        for agent in agents:
            agent.end()
    document = json.loads(result.stdout)
    assert [item["gpus"] for item in document["hosts"]] == [["L4"] * 2, ["A10"] * 2, ["L4"] * 2]
    assert len(document["links"]) == 6
    for link in document["links"]:
        slow = "h1" in (link["from"], link["to"])
        expected = (SLOW if slow else FAST) / 1e9
        assert 0.5 * expected < link["gbps"] < 1.5 * expected, link
    pool = yaml.safe_load(out.read_text())["pool"]
    assert [item["node"] for item in pool["machines"]] == ["2xL4", "2xA10", "2xL4"]
    assert pool["gbps"][0][0] == 0
    assert pool["gbps"][0][2] > 3 * pool["gbps"][0][1]
    spec = tmp_path / "spec.yaml"
    spec.write_text(MODEL + out.read_text())
    checked = CliRunner().invoke(cli, ["check", str(spec)])
    assert checked.exit_code == 0, checked.output

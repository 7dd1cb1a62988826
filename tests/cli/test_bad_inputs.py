"""Invalid inputs: lines that name the field, exit code 2, and no file written."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.cli.main import run

SPEC = """\
models:
  - model: Llama-3.1-8B
    name: chat
    slo: {ttft_ms: 800, tpot_ms: 40, attainment: 0.9}
    traffic: {rate_per_s: 2, input: 500, output: 100}
fleet:
  regions:
    - name: home
      nodes:
        - {node: 1xL40S, available: 4, price_usd_per_h: 1.5}
    - name: away
      nodes:
        - {node: 1xL4, available: 4, price_usd_per_h: 0.8}
links:
  - {from: home, to: away, gbps: 10, rtt_ms: 18}
budget_usd_per_h: 250
"""
NUMBERS = {
    "ttft_ms": "800",
    "tpot_ms": "40",
    "attainment": "0.9",
    "rate_per_s": "2",
    "input": "500",
    "output": "100",
    "available": "4",
    "price_usd_per_h": "1.5",
    "gbps": "10",
    "rtt_ms": "18",
    "budget_usd_per_h": "250",
}
WRONG = ("-1", "many", "[1, 2]", ".nan", ".inf", "{a: 1}", '""', "1e999")
LENGTHS = ("input", "output")  # What may be a distribution or a file's column, too.
SPECS = [
    SPEC.replace(f"{field}: {value}", f"{field}: {wrong}", 1)
    for field, value in NUMBERS.items()
    for wrong in WRONG
] + [
    SPEC.replace(*change, 1)
    for change in (
        ("ttft_ms: 800", "ttft_ms: 0"),
        ("tpot_ms: 40", "tpot_ms: 0"),
        ("attainment: 0.9", "attainment: 1.5"),
        ("attainment: 0.9", "attainment: 0"),
        ("input: 500", "input: 0"),
        ("output: 100", "output: 0"),
        ("available: 4", "available: 1.5"),
        ("gbps: 10", "gbps: 0"),
        ("Llama-3.1-8B", "Llama-3.1-8Q"),
        ("model: Llama-3.1-8B", "mode: Llama-3.1-8B"),
        ("1xL40S", "1xL40Z"),
        ("1xL40S", "0xL40S"),
        ("1xL40S", "-1xL40S"),
        ("to: away", "to: nowhere"),
        ("to: away", "to: home"),
        ("name: away", "name: home"),
        ("slo:", "sol:"),
        ("traffic:", "trafic:"),
        ("fleet:", "fleets:"),
        ("models:", "model:"),
        ("links:", "link:"),
        ("  - model", "    model"),
        ("slo: {ttft_ms: 800, tpot_ms: 40, attainment: 0.9}", "slo: fast"),
        ("slo: {ttft_ms: 800, tpot_ms: 40, attainment: 0.9}", "slo: {ttft_ms: 800"),
        ("{rate_per_s: 2, input: 500, output: 100}", "{trace: none.csv}"),
        ("{rate_per_s: 2, input: 500, output: 100}", "{}"),
        ("{rate_per_s: 2, input: 500, output: 100}", "none"),
        ("available: 4", "available: 0"),
    )
]
TERMS = """\
origins:
  - {name: asia, rtt_ms: {home: 200, away: 30}}
models:
  - model: Llama-3.1-8B
    name: chat
    slo: {ttft_ms: 1000, tpot_ms: 50}
    traffic: {rate_by_hour: [1, 2], input: 500, output: 100, classes: {interactive: 0.3}, origins: {asia: 1.0}}
    priority: 2
    redundancy: {survive: node, share: 0.8}
    max_spot_share: 0.25
    precision: [bf16, fp8]
    limits:
      {no_regions: [away], no_nodes: [L4], residency: [home], max_gpu_kinds: 3, max_stages: 4, max_nodes: 5,
       min_copies: 6, max_copies: 7}
fleet:
  regions:
    - name: home
      head_usd_per_h: 0.4
      storage_usd_per_gb_month: 0.08
      nodes:
        - {node: 1xL40S, available: 9, price_usd_per_h: 1.5, reserved: 8, zone: b}
        - {node: 1xL40S, available: 9, price_usd_per_h: 0.6, spot: true, preemptions_per_h: 0.3}
    - name: away
      nodes:
        - {node: 1xL4, available: 4, price_usd_per_h: 0.8}
links:
  - {between: [home, away], gbps: 10, rtt_ms: 18, egress_usd_per_gb: 0.02}
"""
ASKED = [
    TERMS.replace(*change, 1)
    for change in (
        ("rtt_ms: {home: 200", "rtt_ms: {hom: 200"),
        ("{home: 200, away: 30}", "{home: -1}"),
        ("{home: 200, away: 30}", "far"),
        ("name: asia", "name: 3"),
        ("[1, 2]", "[]"),
        ("[1, 2]", "[1, -2]"),
        ("[1, 2]", "noon"),
        ("{interactive: 0.3}", "{hurried: 0.3}"),
        ("{interactive: 0.3}", "{interactive: 1.3}"),
        ("{interactive: 0.3}", "{interactive: -0.3}"),
        ("{interactive: 0.3}", "interactive"),
        ("origins: {asia: 1.0}", "origins: {mars: 1.0}"),
        ("origins: {asia: 1.0}", "origins: {asia: 0.4}"),
        ("priority: 2", "priority: high"),
        ("priority: 2", "priority: 1.5"),
        ("survive: node", "survive: rack"),
        ("share: 0.8", "share: 0"),
        ("share: 0.8", "share: 80"),
        ("{survive: node, share: 0.8}", "[node]"),
        ("{survive: node, share: 0.8}", "{share: 0.8}"),
        ("max_spot_share: 0.25", "max_spot_share: 25"),
        ("max_spot_share: 0.25", "max_spot_share: -0.1"),
        ("[bf16, fp8]", "[bf16, fp9]"),
        ("[bf16, fp8]", "[]"),
        ("[bf16, fp8]", "8"),
        ("no_regions: [away]", "no_regions: [awya]"),
        ("no_regions: [away]", "no_regions: [home, away]"),
        ("no_regions: [away]", "only_clouds: [aws]"),
        ("no_regions: [away]", "regions: [away]"),
        ("no_nodes: [L4]", "no_nodes: [L5]"),
        ("no_nodes: [L4]", "only_nodes: []"),
        ("residency: [home]", "residency: [moon]"),
        ("max_gpu_kinds: 3", "max_gpu_kinds: 0"),
        ("max_stages: 4", "max_stages: 0"),
        ("max_stages: 4", "max_stages: four"),
        ("max_nodes: 5", "max_nodes: 0.5"),
        ("min_copies: 6", "min_copies: -6"),
        ("min_copies: 6", "min_copies: 8"),
        ("max_copies: 7", "max_copies: 0"),
        ("head_usd_per_h: 0.4", "head_usd_per_h: -0.4"),
        ("storage_usd_per_gb_month: 0.08", "storage_usd_per_gb_month: cheap"),
        ("reserved: 8", "reserved: 10"),
        ("reserved: 8", "reserved: -1"),
        ("reserved: 8, zone: b", "reserved: 8, zone: b, preemptions_per_h: 1"),
        ("zone: b", "zone: [b]"),
        ("spot: true", "spot: sometimes"),
        ("spot: true", "spot: true, reserved: 1"),
        ("preemptions_per_h: 0.3", "preemptions_per_h: -0.3"),
        ("preemptions_per_h: 0.3", "preemptions_per_h: .nan"),
        ("egress_usd_per_gb: 0.02", "egress_usd_per_gb: -0.02"),
        ("egress_usd_per_gb: 0.02", "egress_usd_per_gb: free"),
    )
]
RAW = [
    "",
    "models",
    "[]",
    "models: []\nfleet: {regions: []}",
    "\t- x",
    "a: b: c",
    "models: &a [*a]",
    "{" * 300,
    "\x00",
]
COMMANDS = [
    ["plan", "SPEC", "--strategy", "best"],
    ["plan", "SPEC", "--time-limit", "0"],
    ["plan", "SPEC", "--time-limit", "-3"],
    ["plan", "SPEC", "--time-limit", "nan"],
    ["plan", "SPEC", "--time-limit", "soon"],
    ["plan", "SPEC", "--headroom", "0"],
    ["plan", "SPEC", "--headroom", "1.2"],
    ["plan", "SPEC", "--headroom", "x"],
    ["plan", "SPEC", "--what-if", "home:1xL40S"],
    ["plan", "SPEC", "--what-if", "nowhere:1xL40S=1"],
    ["plan", "SPEC", "--what-if", "home:1xH100=1"],
    ["plan", "SPEC", "--what-if", "home:1xL40S=-1"],
    ["plan", "SPEC", "--pin", "x"],
    ["plan", "SPEC", "--pin", "x@y=z"],
    ["plan", "SPEC", "--running", "none.json"],
    ["plan", "SPEC", "--running", "SPEC"],
    ["plan", "SPEC", "--out", "none/plan.json"],
    ["plan", "SPEC", "--out", "."],
    ["plan", "SPEC", "--out", "none/plan.json"],
    ["plan", "SPEC", "--profile", "none.json"],
    ["plan", "SPEC", "--requests", "3"],
    ["plan", "SPEC", "--seed", "-1"],
    ["plan", "SPEC", "--slo-scale", "0"],
    ["plan", "SPEC", "--slo-scale", "-1"],
    ["plan", "SPEC", "--nonsense"],
    ["plan", "SPEC", "SPEC"],
    ["plan", "none.yaml"],
    ["plan", "."],
    ["plam", "SPEC"],
    ["compare", "none.yaml"],
    ["compare", "SPEC", "--time-limit", "-1"],
    ["check", "none.yaml"],
    ["check", "."],
    ["estimate", "--model", "none", "--node", "1xL4", "--input", "10", "--output", "10"],
    ["estimate", "--model", "Llama-3.1-8B", "--node", "1xNone", "--input", "10", "--output", "10"],
    ["estimate", "--model", "Llama-3.1-8B", "--node", "1xL4", "--input", "0", "--output", "10"],
    ["estimate", "--model", "Llama-3.1-8B", "--node", "1xL4", "--input", "x", "--output", "10"],
    ["replan", "none.json", "SPEC"],
    ["replan", "SPEC", "SPEC"],
    ["simulate", "none.json", "SPEC"],
]


def assert_refused(arguments: list[str], capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    before = sorted(folder.iterdir())
    code = run(arguments)
    text = capsys.readouterr()
    assert code == 2, (arguments, text.err, text.out[:200])
    lines = text.err.strip().splitlines()
    assert lines
    assert all(line.startswith("potluck: error: ") for line in lines), text.err
    assert "Traceback" not in text.err
    assert sorted(folder.iterdir()) == before


BAD = [*SPECS, *ASKED, *RAW]


def test_bad_input_cases_are_numerous_and_their_base_spec_is_valid(tmp_path: Path) -> None:
    assert len(BAD) + len(COMMANDS) >= 150
    assert TERMS not in ASKED
    (tmp_path / "spec.yaml").write_text(TERMS, encoding="utf-8")
    assert run(["check", str(tmp_path / "spec.yaml")]) == 0


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_invalid_spec_is_refused_in_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text != SPEC
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    assert_refused(["plan", "spec.yaml"], capsys, tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_invalid_command_options_are_refused_in_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    assert_refused([item.replace("SPEC", "spec.yaml") for item in command], capsys, tmp_path)

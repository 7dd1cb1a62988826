"""`potluck estimate`: the table, the JSON, and one line for invalid input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from potluck.cli.main import run

GOOD = {"--model": "Llama-3.1-8B", "--node": "2xL40S", "--input": "1024", "--output": "256"}


def arguments(**changes: str | None) -> list[str]:
    """The good command with some options changed or, with None, left out."""
    options = GOOD | {f"--{key.replace('_', '-')}": value for key, value in changes.items()}
    return [
        "estimate",
        *(part for key, value in options.items() if value is not None for part in (key, value)),
    ]


def estimate_json(capsys: pytest.CaptureFixture[str], **changes: str | None) -> dict[str, object]:
    assert run([*arguments(**changes), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def refusal_line(capsys: pytest.CaptureFixture[str], **changes: str | None) -> str:
    """The one line on stderr of a command that must fail with exit code 2."""
    assert run(arguments(**changes)) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("potluck: error: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    assert "Traceback" not in error
    return error


def test_estimate_table_shows_times_memory_rates_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(price="2.5", tpot_ms="60")) == 0
    out = capsys.readouterr().out
    for words in (
        *("Llama-3.1-8B on 2xL40S", "1024 input / 256 output tokens", "prefill time", "decode step, batch 1"),
        *("KV memory", "batch per replica", "requests per second", "tokens per second"),
        *("cost per million tokens", "$2.50", "bottleneck", "TPOT objective", "confidence"),
        "L40S measured",
    ):
        assert words in out, words


def test_estimate_json_has_the_figures_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    result = estimate_json(capsys, price="2.5", tp="2")
    assert (result["model"], result["node"], result["tp"], result["replicas"]) == (
        "Llama-3.1-8B",
        "2xL40S",
        2,
        1,
    )
    assert (result["input_tokens"], result["output_tokens"]) == (1024, 256)
    assert (result["price_usd_per_h"], result["price_from"]) == (2.5, "given")
    for key in ("prefill_s", "decode_step_s", "max_batch", "requests_per_s", "usd_per_million_tokens"):
        assert float(str(result[key])) > 0, key
    assert result["prefill_bound"] == "compute"
    operating = result["operating"]
    assert isinstance(operating, dict)
    assert operating["limit"] in ("memory", "compute")
    assert result["confidence"] == "measured"
    bar = result["rate_bar"]
    assert isinstance(bar, dict)
    assert float(str(bar["low"])) < 1 < float(str(bar["high"]))


def test_estimate_accepts_other_spellings_of_nodes_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    plain = estimate_json(capsys, tp="2")
    assert estimate_json(capsys, node="L40S:2", tp=None, tensor_parallel_size="2") == plain
    assert (
        estimate_json(capsys, node="2 x l40s", input=None, isl="1024", output=None, osl="256", tp="2")
        == plain
    )


def test_estimate_takes_prices_from_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate_json(capsys)["price_from"] != "given"
    region = estimate_json(capsys, node="8xA100-80", region="aws/us-east-1")
    assert str(region["price_from"]).startswith("aws/us-east-1")
    assert float(str(region["price_usd_per_h"])) > 1


def test_estimate_without_a_price_omits_only_the_cost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.catalog.prices.prices", lambda: ())
    result = estimate_json(capsys)
    assert (result["price_usd_per_h"], result["usd_per_million_tokens"]) == (None, None)
    assert run(arguments()) == 0
    assert "unknown; set --price" in capsys.readouterr().out


def test_estimate_shows_its_confidence_and_error_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments(node="MI300X")) == 0
    out = capsys.readouterr().out
    assert "assumed" in out
    assert "80 % interval" in out
    assert "on MI300X assumed" in out
    assert run(arguments(node="A10G")) == 0
    out = capsys.readouterr().out
    assert "transferred" in out
    assert "carried over from A40" in out


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_estimate_shows_the_requested_role(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate_json(capsys, role=role)["role"] == role
    assert run(arguments(role=role)) == 0
    assert f", {role}" in capsys.readouterr().out


def test_estimate_of_an_unreachable_objective_exits_with_0_and_reports_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(arguments(tpot_ms="0.1")) == 0
    assert "cannot be met" in capsys.readouterr().out
    result = estimate_json(capsys, tpot_ms="0.1")
    assert (result["operating"], result["requests_per_s"]) == (None, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"price": "-1"}, "price: must"),
        ({"price": "nan"}, "price: must"),
        ({"price": "inf"}, "price: must"),
        ({"price": "cheap"}, "--price"),
        ({"node": "2xL41S"}, "node: '2xL41S': unknown GPU 'L41S'; did you mean 'L40S'?"),
        ({"node": "0xL40S"}, "node: '0xL40S' has 0 GPUs"),
        ({"node": "99xL40S"}, "node: '99xL40S' has 99 GPUs"),
        ({"node": ""}, "node:"),
        ({"tp": "4"}, "tp: 4 exceeds the 2 GPU(s) of node 2xL40S"),
        ({"tp": "0"}, "tp: must be at least 1, is 0"),
        ({"tp": "3", "node": "4xL40S"}, "tp: 3 does not divide the 32 attention heads"),
        ({"tp": "two"}, "--tp"),
        ({"model": "Llama-3.1-9B"}, "model: unknown 'Llama-3.1-9B'; did you mean 'Llama-3.1-8B'?"),
        ({"model": "./no/such/place"}, "no/such/place"),
        ({"input": "0"}, "input: must be at least 1 token, is 0"),
        ({"output": "-3"}, "output: must be at least 1 token, is -3"),
        ({"input": "1000000"}, "input: with the output exceeds the 131072 tokens"),
        ({"input": "1e3"}, "--input"),
        ({"input": None}, "--input"),
        ({"model": None}, "--model"),
        ({"ttft_ms": "0"}, "ttft-ms: must be positive, is 0"),
        ({"tpot_ms": "-5"}, "tpot-ms: must be positive, is -5"),
        ({"tpot_ms": "nan"}, "tpot-ms: must be positive"),
        ({"role": "both"}, "--role"),
        ({"region": "mars"}, "region: unknown 'mars'"),
        ({"model": "Llama-3-70B"}, "Llama-3-70B does not fit on 2xL40S"),
    ],
)
def test_estimate_refuses_invalid_input_with_the_field_in_one_line(
    changes: dict[str, str | None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal_line(capsys, **changes)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_estimate_accepts_a_config_json_as_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The directory or the file; the same architecture gives the catalog's figures."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    catalog = estimate_json(capsys)
    for model in (str(tmp_path), str(path)):
        result = estimate_json(capsys, model=model)
        for key in ("prefill_s", "decode_step_s", "max_batch", "weight_bytes"):
            assert result[key] == catalog[key], key


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_estimate_refuses_a_config_json_with_a_missing_field(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {key: value for key, value in CONFIG.items() if key != missing}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert missing in refusal_line(capsys, model=str(tmp_path))


def test_estimate_process_writes_json_to_stdout_and_errors_to_stderr() -> None:
    """stdout carries nothing but JSON, and errors go to stderr with exit code 2."""
    command = [sys.executable, "-m", "potluck.cli.main"]
    good = subprocess.run([*command, *arguments(), "--json"], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["node"] == "2xL40S"
    bad = subprocess.run([*command, *arguments(price="-1")], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)


def test_estimate_does_not_import_libraries_of_other_commands() -> None:
    code = (
        "import sys; before = set(sys.modules); from potluck.cli.main import run; run(sys.argv[1:]);"
        "bad = {'torch', 'highspy', 'pydantic', 'yaml', 'scipy', 'pyarrow', 'rich', 'importlib.resources',"
        " 'tempfile', 'potluck.perf.timers.profile'} & (set(sys.modules) - before);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_estimate_with_expert_parallelism_needs_a_mixture_of_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["estimate", "--node", "8xH100", "--tp", "8", "--input", "1000", "--output", "100", "--json"]
    assert run([*asked, "--model", "GPT-OSS-120B", "--ep", "tp"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ep"] == "tp"
    assert "expert parallelism" in document["basis"]
    assert run([*asked, "--model", "Llama-3.1-8B", "--ep", "tp"]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "0 experts" in text

"""`potluck up --model DIR` on a machine with GPUs: found, measured, planned, served, loaded, drained.

    PYTHONPATH=src python tools/check_up_gpu.py                      a Llama of about a billion random weights
    PYTHONPATH=src python tools/check_up_gpu.py --model DIR          a model of your own

Makes the checkpoint (with the shipped model's tokenizer), starts the service as a user would, sends it some load with
`potluck bench`, stops it with Ctrl-C, and prints one JSON object. Exits with 1 when a step fails. Without a GPU it
runs with --device cpu and a made-up `nvidia-smi` on the PATH.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from potluck.core.codec import encode
from potluck.engine.shipped_model import shipped_model
from potluck.perf.timers.profile import profile_from_json

READY_S, BENCH_S, END_S = 420.0, 120.0, 90.0


def checkpoint(folder: Path, layers: int, hidden: int) -> None:
    """A Llama with random weights; its tokens are those of the shipped model."""
    import torch
    from safetensors.torch import save_file

    shipped = shipped_model()
    config = json.loads((shipped / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 64),
        "num_key_value_heads": max(1, hidden // 256),
        "head_dim": 64,
        "max_position_embeddings": 8192,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(shipped / "tokenizer.json", folder)
    chance = torch.Generator().manual_seed(1)

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=chance) * 0.02).to(torch.bfloat16)

    wide, kv = 64 * config["num_attention_heads"], 64 * config["num_key_value_heads"]
    weights = {"model.embed_tokens.weight": made(config["vocab_size"], hidden)}
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}self_attn.q_proj.weight": made(wide, hidden),
            f"{at}self_attn.k_proj.weight": made(kv, hidden),
            f"{at}self_attn.v_proj.weight": made(kv, hidden),
            f"{at}self_attn.o_proj.weight": made(hidden, wide),
            f"{at}mlp.gate_proj.weight": made(4 * hidden, hidden),
            f"{at}mlp.up_proj.weight": made(4 * hidden, hidden),
            f"{at}mlp.down_proj.weight": made(hidden, 4 * hidden),
            f"{at}input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{at}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
    save_file(weights, str(folder / "model.safetensors"))


def served(model: Path, state: Path, device: str, more: list[str]) -> dict[str, object]:
    """What happened, from start to end."""
    command = [sys.executable, "-m", "potluck.cli.main", "up", "--model", str(model), "--json", "--port", "0"]
    command += ["--state", str(state), "--device", device, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(READY_S, process.kill)
    watchdog.start()
    line = process.stdout.readline()
    watchdog.cancel()
    if not line:
        process.kill()
        process.wait()
        return {"fine": False, "problem": "it did not become ready", "logs": _logs(state)}
    body = json.loads(line)
    result: dict[str, object] = {"ready": body, "loads": [_bench(body["url"], *load) for load in LOADS]}
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    result |= {"ended_with": code, "ended_after_s": round(time.monotonic() - began_s, 1)}
    answered = all(item.get("answered") == item.get("requests") for item in result["loads"])  # type: ignore
    return {"fine": code == 0 and answered, **result}


LOADS = (("--concurrency", "1", "--requests", "8"), ("--concurrency", "16", "--requests", "64"))


def _bench(url: str, *load: str) -> dict[str, object]:
    command = [sys.executable, "-m", "potluck.cli.main", "bench", url, *load, "--json"]
    command += ["--input", "400", "--output", "64", "--slo", "ttft=2s,tpot=100ms"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_S)
        document = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return {"load": load, "problem": str(error)[:300]}
    names = ("requests", "answered", "errors", "attainment", "ttft_s", "tpot_s", "output_tokens_per_s")
    return {"load": " ".join(load), **{name: document.get(name) for name in names}}


def measured(path: Path) -> list[dict[str, float]]:
    """The steps of a profile that have no context behind them."""
    points = profile_from_json(path.read_text()).points
    return [encode(point) for point in points if not point.chunk_cached][:40]


def _logs(state: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8", "replace")[-2000:] for path in (state / "logs").glob("*.log")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("more", nargs="*", help="further words for potluck up, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or Path(folder, "billion")
        if given.model is None:
            checkpoint(model, given.layers, given.hidden)
        state = Path(folder, "state")
        result = served(model, state, given.device, given.more)
        result["spec"] = (state / "spec.yaml").read_text() if (state / "spec.yaml").is_file() else ""
        result["profiles"] = {path.stem: measured(path) for path in (state / "profiles").glob("*.json")}
    print(json.dumps(result, indent=1))
    return 0 if result["fine"] else 1


if __name__ == "__main__":
    sys.exit(main())

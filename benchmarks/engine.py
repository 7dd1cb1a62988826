"""The embedded engine on a CPU: speed against transformers.generate, start, memory, and a soak (engine_soak.py).

    python benchmarks/engine.py [--quick] [--json] [--part speed|start|soak]...

Speed: N requests with the mean lengths of Azure's conversation trace of 2023, scaled down to the model's context,
greedy, one thread, CPU-seconds: the engine's loop, with continuous batching and its prefix cache, against
transformers.generate as one batch in float32 (`speed_ratio_N`), with unlike lengths, which generate must pad
(`..._ragged_N`), called for one request after the other (`..._looped_N`), in the weights' format (`..._bfloat16_N`).
transformers runs in a child process, since the engine's strict mode of the matrix library (exact.py) would slow it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parts import common, engine_soak

SEED = 11
QUICK_SPEED_S = 15.0  # CPU-seconds of a quick run: what would take it beyond that is left out.
TARGETS = {
    "speed": {"speed_ratio_1": (">=", 1.0), "speed_ratio_32": (">=", 4.0)},
    "start": {"start_to_first_token_s": ("<=", 6.0)},
    "soak": {"resident_mb": ("<=", 700.0), **engine_soak.TARGETS},
}


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    output: int


SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
PROMPTS = (181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142)
ANSWERS = (41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601)
"""Quantiles of the 19,366 requests in AzureLLMInferenceTrace_conv (Azure/AzurePublicDataset, CC BY 4.0)."""


def length(chance: random.Random, quantiles: Sequence[int], scale: int) -> int:
    share = chance.uniform(SHARES[0], SHARES[-1])
    return max(2, round(float(np.interp(share, SHARES, quantiles)) / scale))


def asks(count: int, vocab: int, quick: bool, *, even: bool = False) -> list[Ask]:
    """Requests with the trace's lengths, an eighth of them (quick) or a quarter; `even`: all at the mean."""
    chance = random.Random(SEED + count)
    scale = 8 if quick else 4
    lengths = [(length(chance, PROMPTS, scale), length(chance, ANSWERS, scale)) for _ in range(count)]
    if even:
        mean = (sum(pair[0] for pair in lengths) // count, sum(pair[1] for pair in lengths) // count)
        lengths = [mean] * count
    return [Ask(tuple(chance.randrange(1, vocab) for _ in range(p)), o) for p, o in lengths]


class Ours:
    """The engine's loop, laid out as served but without its thread: its CPU time is that of this process."""

    def __init__(self, directory: Path) -> None:
        import torch

        from potluck.cli.engine.engine import described
        from potluck.core.replica.batch import BatchLimits
        from potluck.engine.loop.engine_loop import EngineLoop
        from potluck.engine.memory.prefix_cache import PrefixCache
        from potluck.engine.model.checkpoint import SafetensorsSource
        from potluck.engine.model.config import read_config
        from potluck.engine.serve import EngineSettings, local_executor

        torch.set_num_threads(1)
        config, settings = read_config(directory, described(directory)), EngineSettings()
        executor = local_executor(config, SafetensorsSource(directory), settings.size(config.model), "cpu")
        limits = BatchLimits(executor.size.blocks, settings.token_budget, settings.max_running)
        prefixes = PrefixCache(config, settings.prefix_cache_bytes)
        self._loop = EngineLoop(executor, limits, lambda events: None, prefixes=prefixes)
        self._key = self._runs = 0
        self.vocab = config.model.vocab

    def cpu_s(self, wanted: Sequence[Ask]) -> float:
        from potluck.engine.loop.jobs import Job

        loop = self._loop
        self._runs += 1
        jobs = []
        for ask in wanted:
            self._key += 1
            # Other tokens each time, so that no run finds what the one before has left in the prefix cache.
            prompt = tuple((token + 7 * self._runs) % self.vocab for token in ask.prompt)
            jobs.append(Job(self._key, prompt, output_tokens=ask.output))
        before = loop.counters.output_tokens
        start = time.process_time()
        for job in jobs:
            loop.submit(job, 0.0)
        while loop.turn(0.0):
            pass
        spent = time.process_time() - start
        assert loop.counters.output_tokens - before == sum(ask.output for ask in wanted)
        loop.check()
        return spent


THEIRS = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()

def generate(prompts, output):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=output,
                             min_new_tokens=output, pad_token_id=0)
    assert out.shape[1] == width + output

generate([[1, 2, 3]], 4)
for line in sys.stdin:
    asked = json.loads(line)
    start = time.process_time()
    if asked["padded"]:
        generate(asked["prompts"], max(asked["outputs"]))
    else:
        for prompt, output in zip(asked["prompts"], asked["outputs"]):
            generate([prompt], output)
    print(json.dumps(time.process_time() - start), flush=True)
"""


class Theirs:
    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        environment = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", THEIRS, str(directory), dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def cpu_s(self, wanted: Sequence[Ask], *, padded: bool) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"prompts": [ask.prompt for ask in wanted], "outputs": [ask.output for ask in wanted]}
        self._process.stdin.write(json.dumps({**asked, "padded": padded}) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def speed(directory: Path, quick: bool) -> dict[str, float]:
    ours, theirs, budget = Ours(directory), Theirs(directory), common.Budget(quick, QUICK_SPEED_S)
    coarse = None if quick else Theirs(directory, "bfloat16")
    figures: dict[str, float] = {}
    ours.cpu_s(asks(2, ours.vocab, True))
    if quick:
        common.say("left out: bfloat16, looped, ragged; batches of 8")
    spent_s = 0.0
    for count in (1, 32) if quick else (1, 8, 32):
        # 32 at once take some ten times as long as one.
        if not budget.allows(f"speed at {count}", 10 * spent_s):
            continue
        alike, ragged = asks(count, ours.vocab, quick, even=True), asks(count, ours.vocab, quick)
        runs: dict[str, list[float]] = defaultdict(list)
        # In turns, so that a busy moment of the machine meets all.
        for _ in range(1 if quick else 4):
            runs["ours"].append(ours.cpu_s(alike))
            runs["theirs"].append(theirs.cpu_s(alike, padded=True))
            if coarse is not None:
                runs["bfloat16"].append(coarse.cpu_s(alike, padded=True))
            if coarse is not None and count > 1:
                runs["ragged"].append(ours.cpu_s(ragged))
                runs["padded"].append(theirs.cpu_s(ragged, padded=True))
        best = {name: min(run) for name, run in runs.items()}
        spent_s = best["ours"] + best["theirs"]
        budget.spend(best["theirs"])
        useful = sum(ask.output for ask in alike)
        figures[f"tokens_per_cpu_s_{count}"] = useful / best["ours"]
        figures[f"generate_tokens_per_cpu_s_{count}"] = useful / best["theirs"]
        figures[f"speed_ratio_{count}"] = best["theirs"] / best["ours"]
        if coarse is not None:
            figures[f"speed_ratio_bfloat16_{count}"] = best["bfloat16"] / best["ours"]
        if coarse is not None and count > 1:
            figures[f"speed_ratio_ragged_{count}"] = best["padded"] / best["ragged"]
            looped = theirs.cpu_s(ragged, padded=False)
            figures[f"speed_ratio_looped_{count}"] = looped / best["ragged"]
    for process in filter(None, (theirs, coarse)):
        process.close()
    return figures


@contextmanager
def engine_process(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*common.POTLUCK, "engine", "serve", "--model", str(directory)]
    command += ["--port", "0", "--json", "--kv-from", "127.0.0.1", *options]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            errors.seek(0)
            raise RuntimeError(f"the engine did not start: {errors.read()}")
        try:
            yield process, str(json.loads(line)["url"])
        finally:
            process.terminate()
            process.wait(30)


def start(directory: Path, repeats: int) -> dict[str, float]:
    """From nothing to the first token; the best of several starts, since the machine may be busy."""
    walls, cpus = [], []
    body = {"model": directory.resolve().name, "prompt": "The", "max_tokens": 1}
    for _ in range(repeats):
        begin = time.monotonic()
        with engine_process(directory) as (process, url):
            request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=60) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 1
            walls.append(time.monotonic() - begin)
            cpus.append(common.spent_cpu_s(process.pid))
    return {"start_to_first_token_s": min(walls), "start_cpu_s": min(cpus)}


def soak(directory: Path, quick: bool) -> dict[str, float]:
    """Few blocks, so that some are preempted; short leases, so that what nobody fetches is let go within the run."""
    with engine_process(directory, "--threads", "1", "--lease-s", "3", "--kv-blocks", "64") as (process, url):
        figures = engine_soak.soak(url, directory.resolve().name, 100 if quick else 10_000, SEED)
        figures["resident_mb"] = common.most_resident_mb(process.pid)
    return figures


PARTS: dict[str, Callable[[Path, bool], dict[str, float]]] = {
    "speed": speed,
    "start": lambda directory, quick: start(directory, 1 if quick else 3),
    "soak": soak,
}


if __name__ == "__main__":
    names = common.options(part=tuple(PARTS)).part

    def measure(quick: bool) -> dict[str, float]:
        figures: dict[str, float] = {}
        budget = common.Budget(quick)
        for name in names:
            if budget.allows(name):
                figures |= PARTS[name](common.WORDS, quick)
        return figures

    wanted = {name: target for part in names for name, target in TARGETS[part].items()}
    common.run("engine", measure, wanted, seeds=[SEED])

"""The embedded engine on a CPU: speed against transformers.generate, start, memory, and a soak.

    python benchmarks/engine.py [--quick] [--json]          POTLUCK_BENCH_MODEL=DIR for another model

Speed: N requests of unlike lengths, as a server gets them (those of Azure's conversation trace of 2023, scaled down
to the small model's context), greedy, one thread, useful tokens per CPU-second. The engine runs them in its loop,
with continuous batching and its prefix cache, as served. transformers.generate runs them left-padded in one batch
that lasts as long as its longest answer: `speed_ratio_N` is the ratio to that. Two more ratios put it into
perspective: `..._looped_N`, to generate called for one request after the other, and `..._even_N`, to the padded batch
when all requests have the same length, so that nothing is padded and no answer waits for another.

transformers runs in a child process of the same run, since the engine asks the matrix library for its strict mode
(see exact.py), which slows single rows down and must not slow the other side.

Start: from starting `potluck engine serve` to the first token over HTTP, seconds of wall clock, CPU-seconds beside
them, and the most memory that was resident. The soak is in engine_soak.py.
"""

from __future__ import annotations

import bisect
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import common
import engine_soak

SEED = 11
TARGETS = {
    "speed_ratio_1": (">=", 1.0),
    "speed_ratio_32": (">=", 4.0),
    "start_to_first_token_s": ("<=", 6.0),
    "resident_mb": ("<=", 700.0),
    **engine_soak.TARGETS,
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
    place = bisect.bisect(SHARES, share) - 1
    low, high = quantiles[place], quantiles[min(place + 1, len(quantiles) - 1)]
    part = (share - SHARES[place]) / (SHARES[min(place + 1, len(SHARES) - 1)] - SHARES[place] or 1)
    return max(2, round((low + part * (high - low)) / scale))


def asks(count: int, vocab: int, quick: bool, *, even: bool = False) -> list[Ask]:
    """Requests with the trace's lengths, an eighth of them (quick) or a quarter; `even`: all at the mean."""
    chance = random.Random(SEED + count)
    scale = 8 if quick else 4
    lengths = [(length(chance, PROMPTS, scale), length(chance, ANSWERS, scale)) for _ in range(count)]
    if even:
        mean = (sum(pair[0] for pair in lengths) // count, sum(pair[1] for pair in lengths) // count)
        lengths = [mean] * count
    return [Ask(tuple(chance.randrange(1, vocab) for _ in range(p)), o) for p, o in lengths]


def model_directory() -> Path:
    from potluck.engine.serve import shipped_model

    given = os.environ.get("POTLUCK_BENCH_MODEL")
    return Path(given) if given else shipped_model()


class Ours:
    """The engine's loop, laid out as served but without its thread: its CPU time is that of this process."""

    def __init__(self, directory: Path) -> None:
        import torch

        from potluck.cli.engine import described
        from potluck.core.batch import Limits
        from potluck.engine.checkpoint import Files
        from potluck.engine.config import read_config
        from potluck.engine.loop import Loop
        from potluck.engine.prefix import PrefixCache
        from potluck.engine.serve import Settings, local_executor

        torch.set_num_threads(1)
        config, settings = read_config(directory, described(directory)), Settings()
        executor = local_executor(config, Files(directory), settings.size(config.model), "cpu")
        limits = Limits(executor.size.blocks, settings.token_budget, settings.max_running)
        prefixes = PrefixCache(config, settings.prefix_cache_bytes)
        self._loop = Loop(executor, limits, lambda events: None, prefixes=prefixes)
        self._key = self._runs = 0
        self.vocab = config.model.vocab

    def cpu_s(self, wanted: Sequence[Ask]) -> float:
        """CPU-seconds to answer all, submitted at once."""
        from potluck.engine.requests import Job

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
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()

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
    """transformers in a process of its own."""

    def __init__(self, directory: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", THEIRS, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def cpu_s(self, wanted: Sequence[Ask], *, padded: bool) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        body = {
            "prompts": [ask.prompt for ask in wanted],
            "outputs": [ask.output for ask in wanted],
            "padded": padded,
        }
        self._process.stdin.write(json.dumps(body) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def speed(directory: Path, quick: bool) -> dict[str, float]:
    """Useful tokens per CPU-second, and the ratios."""
    ours, theirs = Ours(directory), Theirs(directory)
    repeats = 2 if quick else 3
    figures: dict[str, float] = {}
    ours.cpu_s(asks(2, ours.vocab, True))
    for count in (1, 8, 32):
        wanted, alike = asks(count, ours.vocab, quick), asks(count, ours.vocab, quick, even=True)
        useful = sum(ask.output for ask in wanted)
        mine, padded, even, even_padded = [], [], [], []
        # In turns, so that a busy moment of the machine meets all.
        for _ in range(repeats):
            mine.append(ours.cpu_s(wanted))
            padded.append(theirs.cpu_s(wanted, padded=True))
            if count > 1:
                even.append(ours.cpu_s(alike))
                even_padded.append(theirs.cpu_s(alike, padded=True))
        figures[f"tokens_per_cpu_s_{count}"] = useful / min(mine)
        figures[f"generate_tokens_per_cpu_s_{count}"] = useful / min(padded)
        figures[f"speed_ratio_{count}"] = min(padded) / min(mine)
        if count > 1:
            figures[f"speed_ratio_looped_{count}"] = theirs.cpu_s(wanted, padded=False) / min(mine)
            figures[f"speed_ratio_even_{count}"] = min(even_padded) / min(even)
    theirs.close()
    return figures


@contextmanager
def engine_process(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`potluck engine serve` and its address."""
    command = [sys.executable, "-m", "potluck.cli.main", "engine", "serve", "--model", str(directory)]
    command += ["--port", "0", "--json", *options]
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


def spent_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def most_resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1000
    raise RuntimeError("the kernel does not say how much is resident")


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
            cpus.append(spent_cpu_s(process.pid))
    return {"start_to_first_token_s": min(walls), "start_cpu_s": min(cpus)}


def measure(quick: bool) -> dict[str, float]:
    directory = model_directory()
    figures = speed(directory, quick) | start(directory, 1 if quick else 3)
    with engine_process(directory, "--threads", "1", "--lease-s", "3", "--kv-blocks", "64") as (
        process,
        url,
    ):
        figures |= engine_soak.soak(url, directory.resolve().name, 300 if quick else 10_000, SEED)
        figures["resident_mb"] = most_resident_mb(process.pid)
    return figures


if __name__ == "__main__":
    raise SystemExit(common.run("engine", measure, TARGETS, seeds=[SEED]))

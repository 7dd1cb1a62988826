"""A process that loads the engine once and forks engines: `python -m potluck.cli.engine.fork_server STYLE`.

With `warm` it only compiles ahead of first use. Once all is loaded it says {"ready": true, "cpu": what it takes
to compute here}; then it reads lines of JSON, {"arguments": ["engine", "serve", ...], "log": PATH}, and answers with
{"pid": N} or {"refused": WHY}. It ends when its input does; its engines go on.

Forking is only sound with one thread: torch has one here, CUDA is not touched, and with more threads it refuses.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from potluck.engine.compute.executor import Executor


BOTH = (
    "potluck.cli.engine.engine",
    "potluck.cli.engine.emulate",
    "potluck.catalog.models",
    "potluck.catalog.nodes",
)
MODULES = (
    *BOTH,
    "potluck.engine.compute.emulated",
    "potluck.engine.server.kv_connector",
    "potluck.engine.server.engine_service",
    "potluck.perf.timers.roofline",
)
"""What an engine imports when it starts, beside what is used here."""
MOCK_MODULES = (*BOTH, "potluck.engine.mock.mock_engine", "potluck.engine.serve", "potluck.perf.throughput")
"""The same for a mock: no torch, nothing that computes."""
PROMPT_TOKENS, SEQUENCES, TRIES = 64, 4, 3  # With which computing is measured.
ENGINE_TITLE = "potluck-engine"
"""What the system calls an engine that was forked; the fork server itself keeps the interpreter's name."""


def load(style: str = "emulated") -> dict[str, float]:
    """Everything that an engine of the shipped model needs, its machine code too; what computing takes of a CPU."""
    if style == "mock":
        load_mock()
        return {}
    import torch

    torch.set_num_threads(1)
    from potluck.cli.engine.engine import described
    from potluck.engine import shipped_model
    from potluck.engine.compute.executor import RunnerSize
    from potluck.engine.compute.local_executor import LocalExecutor
    from potluck.engine.compute.runner import Runner
    from potluck.engine.model.checkpoint import SafetensorsSource
    from potluck.engine.model.config import read_config
    from potluck.engine.serve import warm_up
    from potluck.kv import checksum

    for module in MODULES:
        import_module(module)
    checksum.load()
    directory = shipped_model()
    config = read_config(directory, described(directory))
    # Run once, so that what is made at the first step is made here.
    size = RunnerSize(SEQUENCES + 1, 8 * SEQUENCES, 2 * PROMPT_TOKENS, PROMPT_TOKENS)
    runner = Runner(config, SafetensorsSource(directory), size, device="cpu")
    executor = LocalExecutor(runner, size)
    warm_up(executor)
    cost = _cpu_cost(executor)
    gc.collect()
    gc.freeze()  # what is shared with the engines is not written to by collecting
    return cost


def _cpu_cost(executor: Executor) -> dict[str, float]:
    """CPU-seconds of a prompt token, of a step of answers, and of each sequence in it: the best of some tries."""
    from potluck.core.values.sampling import Sampling
    from potluck.engine.compute.executor import SequenceWork, TokenDraw

    def cost_s(works: list[SequenceWork], draws: list[TokenDraw]) -> float:
        began_s = time.process_time()
        executor.step(works, draws)
        return time.process_time() - began_s

    def answers_s(rows: list[int], start: int) -> float:
        return min(
            cost_s(
                [SequenceWork(row, place, [0]) for row in rows],
                [TokenDraw(Sampling(), place + 1)] * len(rows),
            )
            for place in range(start, start + TRIES)
        )

    rows = [executor.open() for _ in range(SEQUENCES)]
    for row in rows:
        executor.grow(row, PROMPT_TOKENS + 2 * TRIES)
    prompt_s = min(cost_s([SequenceWork(row, 0, [0] * PROMPT_TOKENS, "none")], []) for row in rows)
    together_s = answers_s(rows, PROMPT_TOKENS)
    alone_s = answers_s(rows[:1], PROMPT_TOKENS + TRIES)
    for row in rows:
        executor.close(row)
    sequence_s = max(0.0, together_s - alone_s) / (SEQUENCES - 1)
    step_s = max(0.0, alone_s - sequence_s)
    return {"prompt_token_s": prompt_s / PROMPT_TOKENS, "step_s": step_s, "sequence_s": sequence_s}


def load_mock() -> None:
    from potluck.api.tokenizer import ModelTokenizer
    from potluck.engine import shipped_model
    from potluck.kv import checksum

    for module in MOCK_MODULES:
        import_module(module)
    checksum.load()
    ModelTokenizer.read(shipped_model())
    gc.collect()
    gc.freeze()


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _forked(arguments: list[str], log: str) -> int:
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    code = 70
    try:
        os.setsid()
        Path("/proc/self/comm").write_text(ENGINE_TITLE)
        for item in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(item, signal.SIG_DFL)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from potluck.cli.main import run

        code = run(arguments)
        sys.stderr.flush()
    finally:
        os._exit(code)  # nothing of the nursery's is to be ended here


def _answer(line: str) -> dict[str, Any]:
    asked = json.loads(line)
    if _threads() > 1:
        return {"refused": f"{_threads()} threads run here"}
    try:
        return {"pid": _forked(list(asked["arguments"]), str(asked["log"]))}
    except OSError as error:
        return {"refused": error.strerror or str(error)}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system clears engines away that end
    answers = sys.stdout
    print(json.dumps({"ready": True, "cpu": load(*sys.argv[1:2])}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(line)), file=answers, flush=True)


def warm() -> None:
    """For installers: plan and rehearse the demo, and load the engine; what is compiled for it is kept on disk."""
    from potluck.cli.simulating.simulation import read_one_spec
    from potluck.cli.up.prepare import PlanChoices, prepared
    from potluck.cli.up.up import demo

    prepared((demo(),), read_one_spec((demo(),)), PlanChoices(30.0), lambda line: None)
    load()


if __name__ == "__main__":
    warm() if sys.argv[1:] == ["warm"] else main()

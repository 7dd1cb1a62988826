"""What the connector costs requests that hand nothing over: CPU-seconds of whole vLLM processes.

Four instances of a tiny model take turns with the same requests: two without a connector (by how much do like
processes differ?), one with a connector that does nothing, one with ours as an adapter starts it. A figure is the
median over rounds of a round's ratio to the first. The cost of a step does not grow with the model: the dearest case.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from parts.common import ROOT, run, skip, spent_cpu_s

sys.path.append(str(ROOT / "tests" / "vllm_engine"))
from vllm_kit import VOCAB, Instance, make_model

KINDS = ("none", "again", "nothing", "ours")
PLAIN = ("none", "again")
REQUESTS, AT_ONCE, PROMPT, OUTPUT = 24, 8, 96, 48
TARGETS = {"ours_over_none": ("<=", 1.02)}


def python() -> str | None:
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    made = ROOT / ".venv-vllm" / "bin" / "python"
    return str(made) if made.exists() else None


class Bare(Instance):
    def __init__(self, kind: str, model: Path, channel: Path, where: str) -> None:
        self._kind, self._channel = kind, channel
        super().__init__(model, model.parent / f"{kind}.log", connector=kind not in PLAIN, python=where)

    def _connected(self) -> list[str]:
        text: dict[str, object] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        if self._kind == "nothing":
            text |= {"kv_connector": "NothingConnector", "kv_connector_module_path": "parts.vllm_nothing"}
        else:
            text |= {"kv_connector": "PotluckConnector", "kv_connector_module_path": "potluck.vllm.connector"}
            text["kv_connector_extra_config"] = {"channel": str(self._channel)}
        connected = ["--kv-transfer-config", json.dumps(text)]
        if self._kind == "ours":
            events = {"enable_kv_cache_events": True, "publisher": "null"}
            connected += ["--kv-events-config", json.dumps(events)]
        return connected

    def spent_s(self) -> float:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return sum(_spent_s(pid) for pid in pids if _group(pid) == self._process.pid)


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _spent_s(pid: int) -> float:
    """To the nanosecond, where the kernel says so: its clock for the CPU time of another process."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return spent_cpu_s(pid)


@contextmanager
def listening(path: Path) -> Iterator[list[int]]:
    """In an adapter's place: reads all that connectors tell, and counts its bytes."""
    heard = [0]

    def read(talk: socket.socket) -> None:
        while data := talk.recv(1 << 16):
            heard[0] += len(data)

    def accept() -> None:
        while True:
            try:
                talk = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=read, args=(talk,), daemon=True).start()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=accept, daemon=True).start()
        yield heard
        listener.shutdown(socket.SHUT_RDWR)


def one_round(instance: Bare, seed: int) -> float:
    """CPU-seconds of some requests, in whose prompts nothing is shared."""
    drawn = random.Random(seed)
    prompts = [drawn.choices(range(3, VOCAB), k=PROMPT) for _ in range(REQUESTS)]
    before_s = instance.spent_s()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(lambda prompt: instance.ask(prompt, OUTPUT), prompts))
    return instance.spent_s() - before_s


def measure(quick: bool) -> dict[str, float]:
    where = python()
    assert where is not None
    paths = [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder, listening(Path(folder) / "channel") as heard:
        model = make_model(Path(folder) / "tiny")
        made = {kind: Bare(kind, model, Path(folder) / "channel", where) for kind in KINDS}
        try:
            for item in made.values():
                item.ready()
            return rounds(made, 4 if quick else 24) | {"told_bytes": float(heard[0])}
        finally:
            for entry in made.values():
                entry.end()


def rounds(made: dict[str, Bare], count: int) -> dict[str, float]:
    for kind in KINDS:
        one_round(made[kind], -1)
    spent_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(count):
        for place in range(len(KINDS)):  # in turn, so that none is always the first
            kind = KINDS[(seed + place) % len(KINDS)]
            spent_s[kind].append(one_round(made[kind], seed))

    def over(kind: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(spent_s[kind], spent_s[base], strict=True))

    figures = {f"{kind}_cpu_s": statistics.median(spent_s[kind]) for kind in KINDS}
    return figures | {
        "again_over_none": over("again", "none"),
        "nothing_over_none": over("nothing", "none"),
        "ours_over_nothing": over("ours", "nothing"),
        "ours_over_none": over("ours", "none"),
        "ours_over_none_total": sum(spent_s["ours"]) / sum(spent_s["none"]),
    }


if __name__ == "__main__":
    if python() is None:
        skip("vllm_overhead", "vLLM is not installed: make test-vllm")
    run("vllm_overhead", measure, TARGETS, seeds=range(24))

"""What the connector costs requests that hand nothing over: CPU-seconds of whole vLLM engines.

Four engines of a tiny model take turns with the same requests: two without a connector (by how much do like processes
differ?), one with a connector that does nothing, one with ours as an adapter starts it. Nothing else is in their
processes, no HTTP: the dearest case, as is a tiny model, since the cost of a step does not grow with it. A figure is
the median over rounds of a round's ratio to the first; `least_`: of the cheapest rounds, which others disturb least.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parts.common import ROOT, run, skip

sys.path.append(str(ROOT / "tests" / "vllm_engine"))
from vllm_kit import make_model

KINDS = ("none", "again", "nothing", "ours")
TARGETS = {"ours_over_none": ("<=", 1.02)}


def python() -> str | None:
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    made = ROOT / ".venv-vllm" / "bin" / "python"
    return str(made) if made.exists() else None


class RoundEngine:
    def __init__(self, kind: str, model: Path, channel: Path, where: str) -> None:
        self._log = model.parent / f"{kind}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [where, "-m", "parts.vllm_rounds", kind, str(model), str(channel)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def said(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready") or line[0].isdigit():
                return line
        raise RuntimeError(f"vLLM ended: {self._log.read_text()[-2000:]}")

    def round_s(self, seed: int) -> float:
        """CPU-seconds of some requests, in whose prompts nothing is shared."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        return float(json.loads(self.said()))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


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


def measure(quick: bool) -> dict[str, float]:
    where = python()
    assert where is not None
    paths = [str(ROOT / "benchmarks"), str(ROOT / "src"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder, listening(Path(folder) / "channel") as heard:
        model = make_model(Path(folder) / "tiny")
        made = {kind: RoundEngine(kind, model, Path(folder) / "channel", where) for kind in KINDS}
        try:
            for item in made.values():
                item.said()
            return rounds(made, 4 if quick else 24) | {"told_bytes": float(heard[0])}
        finally:
            for entry in made.values():
                entry.end()


def rounds(made: dict[str, RoundEngine], count: int) -> dict[str, float]:
    for kind in KINDS:
        made[kind].round_s(-1)
    spent_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(count):
        for place in range(len(KINDS)):  # in turn, so that none is always the first
            kind = KINDS[(seed + place) % len(KINDS)]
            spent_s[kind].append(made[kind].round_s(seed))

    def over(kind: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(spent_s[kind], spent_s[base], strict=True))

    figures = {f"{kind}_cpu_s": statistics.median(spent_s[kind]) for kind in KINDS}
    for kind in KINDS[1:]:
        figures[f"least_{kind}_over_none"] = min(spent_s[kind]) / min(spent_s["none"])
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

"""KV between two processes: against bare sockets, layer by layer against all at once, and over shaped links.

loopback     2,048 tokens of Llama 3.1 8B (256 MiB): our share of what bare sockets reach with the same number of
             connections, attaching, checksums and acknowledgement included; chunks are put once the receiver has
             attached, or lie ready (`..._ready_...`). Bare and ours by turns, medians of ratios.
migration    CAUCHY, Figure 11: from the end of the prefill until the receiver has everything. "Bulk" sends after
             the last layer, over one connection; the others send each layer as it is computed. A layer takes
             2.6 ms: 2 x 8e9 FLOP x 2,048 tokens / 32 layers at 400 TFLOP/s, about what an H800 reaches.
shaped       two hosts (`tools/host_bed.py`, needs root) with a token bucket between them: our share of the line.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parts import common, kv_peer
from potluck.kv.handles import new_handle

sys.path.insert(0, str(common.ROOT / "tools"))
import host_bed

DEGREES = (1, 2, 4, 8, 16)
LAYERS, TOKENS = 32, 2048
LAYER_S = 2 * 8e9 * TOKENS / LAYERS / 400e12
LINES = {"1gbps": 1e9, "100mbps": 1e8}
PUBLISHED_SPEEDUP = 625 / 85
TARGETS = {f"loopback_share_d{degree}": (">=", 0.8) for degree in DEGREES}
SHAPED_TARGETS = {f"line_share_{name}": (">=", 0.92) for name in LINES}


class Side:
    """A peer process, asked one thing at a time; `ask` and `answer` apart, so that both sides can be busy."""

    def __init__(self, prefix: Sequence[str], host: str, shared_memory: bool = False) -> None:
        self.host = host
        mode = "shared" if shared_memory else "network"
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(Path(kv_peer.__file__)), host, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a peer of the benchmark has died")
        return dict(json.loads(line))

    def do(self, do: str, **what: object) -> dict[str, Any]:
        self.ask(do, **what)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def sides(hosts: Sequence[host_bed.Host] = (), shared_memory: bool = False) -> Iterator[tuple[Side, Side]]:
    """Sender and receiver, on hosts of their own if given."""
    places = [(host.inside([]), host.address) for host in hosts] or [((), "127.0.0.1")] * 2
    made = [Side(prefix, address, shared_memory) for prefix, address in places]
    try:
        yield made[0], made[1]
    finally:
        for side in made:
            side.close()


def bare(sender: Side, receiver: Side, degree: int, size: int) -> tuple[float, float]:
    """Seconds, and CPU-seconds of both sides, for so many bytes over bare sockets that are connected and warm."""
    port = receiver.do("bare_listen")["port"]
    sender.ask("bare_connect", host=receiver.host, port=port, degree=degree)
    receiver.do("bare_accept", degree=degree)
    sender.answer()
    got: dict[str, Any] = {}
    sent_s = 0.0
    for count in (degree << 20, size):
        before_s = float(sender.do("port")["cpu_s"])
        sender.ask("bare_send", bytes=count)
        got = receiver.do("bare_receive", bytes=count)
        sent_s = float(sender.answer()["cpu_s"]) - before_s
    return float(got["wall_s"]), float(got["cpu_s"]) + sent_s


@dataclass(frozen=True, slots=True)
class Run:
    wall_s: float
    cpu_s: float  # Of both sides, from the offer on.
    left_s: float  # From the end of the last layer until all was there.


def ours(sender: Side, receiver: Side, degree: int, when: str, tokens: int = TOKENS) -> Run:
    handle = new_handle()
    port = sender.do("port")["port"]
    sender.do("offer", handle=handle, tokens=tokens, layers=LAYERS, when=when, layer_s=LAYER_S)
    before_s = float(sender.do("port")["cpu_s"])
    got = receiver.do("fetch", host=sender.host, port=port, handle=handle, degree=degree)
    sent = sender.do("sent")
    if got["bytes"] != kv_peer.layer_bytes(tokens) * LAYERS or sent["state"] != "fetched":
        raise RuntimeError(f"the cache did not come whole: {got}, {sent}")
    cpu_s = float(got["cpu_s"] + sent["cpu_s"]) - before_s
    return Run(float(got["wall_s"]), cpu_s, float(got["end_s"] - sent["computed_s"]))


def loopback(quick: bool) -> dict[str, float]:
    repeats = 3 if quick else 15
    size = kv_peer.layer_bytes(TOKENS) * LAYERS
    figures: dict[str, float] = {}
    with sides() as (sender, receiver):
        for degree in DEGREES:
            ours(sender, receiver, degree, "attached")
            plain, ready, attached = [], [], []
            for _ in range(repeats):
                plain.append(bare(sender, receiver, degree, size))
                ready.append(ours(sender, receiver, degree, "ready"))
                attached.append(ours(sender, receiver, degree, "attached"))
            walls = [wall_s for wall_s, _ in plain]
            figures[f"bare_gb_per_s_d{degree}"] = size / statistics.median(walls) / 1e9
            figures[f"ours_gb_per_s_d{degree}"] = size / statistics.median(run.wall_s for run in ready) / 1e9
            figures[f"loopback_share_ready_d{degree}"] = _ratio(walls, [run.wall_s for run in ready])
            figures[f"loopback_share_d{degree}"] = _ratio(walls, [run.wall_s for run in attached])
            cpu = [cpu_s for _, cpu_s in plain]
            figures[f"loopback_cpu_share_d{degree}"] = _ratio(cpu, [run.cpu_s for run in ready])
    with sides(shared_memory=True) as (sender, receiver):
        shared = [ours(sender, receiver, 2, "ready").wall_s for _ in range(repeats + 1)][1:]
        figures["shared_memory_gb_per_s_d2"] = size / statistics.median(shared) / 1e9
    return figures


def migration(quick: bool) -> dict[str, float]:
    repeats = 2 if quick else 9
    figures: dict[str, float] = {}
    with sides() as (sender, receiver):
        result: dict[int, list[float]] = {degree: [] for degree in (0, *DEGREES)}
        for _ in range(repeats + 1):
            result[0].append(ours(sender, receiver, 1, "bulk").left_s)
            for degree in DEGREES:
                result[degree].append(ours(sender, receiver, degree, "layers").left_s)
        figures["migration_bulk_ms"] = statistics.median(result[0][1:]) * 1e3
        for degree in DEGREES:
            figures[f"migration_d{degree}_ms"] = statistics.median(result[degree][1:]) * 1e3
            figures[f"migration_speedup_d{degree}"] = _ratio(result[0][1:], result[degree][1:])
    figures["migration_speedup_published"] = PUBLISHED_SPEEDUP
    return figures


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def lines(quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, bits_per_s in LINES.items():
        tokens = TOKENS if bits_per_s >= 1e9 else TOKENS // (16 if quick else 4)
        size = kv_peer.layer_bytes(tokens) * LAYERS
        with host_bed.Bed(2) as bed:
            for host in bed.hosts:
                bed.slow(host, bits_per_s, burst_bytes=128 << 10, latency_ms=50)
            with sides(bed.hosts) as (sender, receiver):
                ours(sender, receiver, 4, "attached", 16)
                walls, plain = [], []
                for _ in range(1 if quick else 3):
                    walls.append(ours(sender, receiver, 4, "attached", tokens).wall_s)
                    plain.append(bare(sender, receiver, 4, size)[0])
        figures[f"line_share_{name}"] = size * 8 / statistics.median(walls) / bits_per_s
        figures[f"bare_line_share_{name}"] = size * 8 / statistics.median(plain) / bits_per_s
    return figures


if __name__ == "__main__":
    why_not = host_bed.missing()
    if why_not:
        common.say(f"kv_transfer: links are not shaped: {why_not}")

    def measure(quick: bool) -> dict[str, float]:
        return loopback(quick) | migration(quick) | ({} if why_not else lines(quick))

    targets = TARGETS | ({} if why_not else SHAPED_TARGETS)
    if "--quick" in sys.argv:  # a few runs over loopback tell how busy the machine is, and little else
        targets = {name: target for name, target in targets.items() if not name.startswith("loopback_")}
    without = "most repeats, and so the targets of loopback; slow lines carry less"
    common.run("kv_transfer", measure, targets, seeds=(0,), quick_without=without)

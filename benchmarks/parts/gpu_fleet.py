"""Unlike shares of one GPU as a fleet: engines and the gateway of this project, as CRONUS's experiments need them.

A high-end and a low-end share (CUDA MPS) have the KV memory of the paper's cards; five placements are those of
`lab/papers/cronus.py`, `learned` is data parallel by our gateway, which goes by the speeds that it sees where the
paper's has turns, and `extended` is CRONUS with our rules beyond it. Weights are drawn at random and written
once, where all engines read them. Without a GPU the same runs with a tiny model: two processes on a CPU.
As a program this is the gateway of a placement.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path

import numpy as np
import torch
import uvloop
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from parts import weighted_turns
from parts.common import DATA, POTLUCK, ROOT, Targets, context, options, say, show
from potluck.api.http import parse_object
from potluck.catalog.huggingface import read_model
from potluck.core.state.policy import Policy
from potluck.core.values.layout import single
from potluck.core.values.plan import Template
from potluck.core.values.types import NodeType
from potluck.engine.gpu_share import mps_daemon, share_environment
from potluck.loadgen.load_client import TimedRequest, shoot, shots
from potluck.perf.timers.engine_host import DEFAULT_HOST
from potluck.perf.timers.profile import profile_from_json
from potluck.runtime.replica_models import total_blocks
from potluck.runtime.resolved_plan import ResolvedPlan

sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "lab"))
from live_fleet import Process, listening, wait_ready

from papers import cronus, fleets

PLACEMENTS = {
    "dp": cronus.DP,
    "high_low": cronus.HIGH_LOW,
    "low_high": cronus.LOW_HIGH,
    "cronus": cronus.CRONUS,
    "learned": cronus.DP,
    "extended": cronus.CRONUS,
}
KEPT = ("at_s", "sent_s", "first_s", "last_s", "max_tokens", "output_tokens")
WEIGHTS = {"high": 3, "low": 1}  # Turns of the paper's data parallel.
HIGH, LOW, ENGINES = "high", "low", "engines.yaml"
LOOK_S, START_S = 0.25, 30.0
BASE = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
BASE |= {"tie_word_embeddings": False, "max_position_embeddings": 8192}
SIZES = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
LLAMA_8B, TINY, TINY_LAYERS, POOL = (4096, 14336, 32, 8, 128256), (128, 256, 4, 2, 512), 4, 1 << 24


@dataclass(frozen=True, slots=True)
class Bed:
    """Where and with what all runs are made: `low` is the paper's low-end card, `tiny` an eighth of all on a CPU."""

    folder: Path
    low: str
    profiles: Path
    shares: Mapping[str, int]
    tiny: bool

    @property
    def scale(self) -> int:
        return 8 if self.tiny else 1

    @property
    def longest_tokens(self) -> int:
        return 8192 // self.scale

    def fewer(self, asked: argparse.Namespace) -> int:
        return 24 if self.tiny else min(asked.requests, 200 if asked.quick else 1000)

    def nodes(self) -> tuple[NodeType, NodeType]:
        """As the gateway and the simulator see them: the cards' memory, and profiles by these names."""
        kinds = (fleets.node(card, cronus.NETWORK_GBPS) for card in (cronus.HIGH, self.low))
        named = zip(kinds, (HIGH, LOW), strict=True)
        high_node_type, low_node_type = (
            replace(kind, name=name, gpu=replace(kind.gpu, name=name)) for kind, name in named
        )
        return high_node_type, low_node_type

    def resolved(self, placement: str) -> ResolvedPlan:
        """The placement as gateway and simulator read it, with the profiles that were measured."""
        nodes, model = self.nodes(), read_model(self.folder / "model")
        first, last = next(item.layers for item in cronus.SETTINGS if item.low == self.low)
        first = model.layer_count * first // (first + last)
        cut = (first, model.layer_count - first)
        fleet, engines = cronus.fleet_of(PLACEMENTS[placement], nodes, cut, DEFAULT_HOST, self.scale)
        mean = (cronus.MEAN_TOKENS[0] / self.scale, cronus.MEAN_TOKENS[1] / self.scale)
        problem = fleets.problem("Llama-3.1-8B", nodes, [(item, 1) for item in fleet], engines, mean)
        files = [self.profiles / f"{name}.json" for name in (HIGH, LOW)]
        profiles = tuple(profile_from_json(file.read_text("utf-8")) for file in files if file.is_file())
        return replace(problem, models={fleets.MODEL: model}, profiles={fleets.MODEL: profiles})

    def lengths(self, count: int, answers: float) -> list[tuple[int, int]]:
        """(prompt, answer) tokens: Azure's conversations as they came, or drawn by their lengths."""
        trace = DATA / cronus.TRACE
        taken = cronus.trace_requests(trace) if trace.is_file() else cronus.synthetic_requests(0)
        say(f"lengths: {taken.source}")
        most, scale = self.longest_tokens, self.scale
        prompts = np.clip(taken.prompt_tokens[:count] // scale, 2, most * 3 // 4).tolist()
        outputs = (
            np.clip(taken.output_tokens[:count] * answers // scale, 2, most // 4 - 16).astype(int).tolist()
        )
        return list(zip(prompts, outputs, strict=True))


def policy_of(placement: str) -> Policy:
    """The paper's, or ours."""
    policy, ours = cronus.policy_of(PLACEMENTS[placement]), placement == "extended"
    balance = "learned" if placement == "learned" else policy.balance
    return replace(policy, balance=balance, split_overflow=ours, low_decodes=ours)


def write_config(folder: Path, layers: int, tiny: bool) -> dict[str, int]:
    fields = dict(zip(SIZES, TINY if tiny else LLAMA_8B, strict=True))
    fields["num_hidden_layers"] = TINY_LAYERS if tiny else layers
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**BASE, **fields}))
    return fields


def write_model(folder: Path, layers: int, tiny: bool) -> None:
    """A directory of random weights: all are cut from one pool of numbers, since to draw billions takes minutes."""
    fields = write_config(folder, layers, tiny)
    count = fields["num_hidden_layers"]
    words = {f"w{number}": number for number in range(fields["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    hidden, wide = fields["hidden_size"], fields["intermediate_size"]
    kv = hidden // fields["num_attention_heads"] * fields["num_key_value_heads"]
    sizes: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qo"}
    sizes |= {f"self_attn.{part}_proj": (kv, hidden) for part in "kv"} | {"mlp.down_proj": (hidden, wide)}
    sizes |= {f"mlp.{part}_proj": (wide, hidden) for part in ("gate", "up")}
    sizes |= {f"{part}_layernorm": (hidden,) for part in ("input", "post_attention")}
    shapes = {f"model.layers.{n}.{name}.weight": size for n in range(count) for name, size in sizes.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (fields["vocab_size"], hidden))
    shapes["model.norm.weight"] = (hidden,)
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    drawn = {}
    for place, (name, shape) in enumerate(shapes.items()):
        count = prod(shape)
        values = pool.roll(7919 * place).repeat(-(-count // POOL))[:count].view(shape)
        drawn[name] = values * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones_like(values)
    save_file(drawn, folder / "model.safetensors")


@contextmanager
def bed(low: str, profiles: str, shares: Mapping[str, int], layers: int) -> Iterator[tuple[Bed, ShareFleet]]:
    """A folder with a model, and a fleet that can be placed; logs are shown where something fails."""
    tiny, memory = not torch.cuda.is_available(), "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="potluck-gpu-", dir=memory) as name:
        made = Bed(Path(name), low, Path(profiles or name), shares, tiny)
        made.profiles.mkdir(parents=True, exist_ok=True)
        write_model(made.folder / "model", layers, tiny)
        with nullcontext({}) if tiny else mps_daemon() as daemon:
            fleet = ShareFleet(made, daemon)
            try:
                yield made, fleet
            except BaseException:
                for log in sorted(made.folder.glob("*.log")):
                    say(f"{log.name}: {log.read_text()[-1500:]}")
                raise
            finally:
                fleet.close()


Seen = tuple[list[TimedRequest], dict[str, float]]


def figures_of(timed: Sequence[TimedRequest], busy_s: Mapping[str, float]) -> dict[str, float]:
    whole = [request for request in timed if request.ended]
    if not whole:
        raise SystemExit(f"nothing was answered: {timed[0].status} {timed[0].problem}")
    took_s = max(request.done_s for request in whole) - min(request.sent_s for request in whole)
    # Tokens that came in one event with another one came at once.
    gaps = [
        gap
        for request in whole
        for gap in (*request.gaps_s, *[0.0] * (request.output_tokens - request.pieces))
    ]
    return {
        "per_s": len(whole) / took_s,
        "ttft_p99_s": float(np.quantile([request.ttft_s for request in whole], 0.99)),
        "tbt_p99_s": float(np.quantile(gaps or [0.0], 0.99)),
        "lost": float(len(timed) - len(whole)),
        **{f"busy_{name}": spent_s / took_s for name, spent_s in busy_s.items()},
    }


class ShareFleet:
    """Engines and a gateway of one placement after another; engines that the next one has too stay."""

    def __init__(self, made: Bed, daemon: Mapping[str, str]) -> None:
        self._bed, self._daemon = made, daemon
        self.keep = ""
        self._engines: dict[tuple[str, ...], Process] = {}
        self._gateway: Process | None = None
        self.url, self._sides, self._placement = "", dict[str, str](), ""

    @contextmanager
    def placed(self, placement: str) -> Iterator[None]:
        try:
            self._start(placement)
            self._placement = placement
            yield
        finally:
            if self._gateway is not None:
                self._gateway.end()
                self._gateway = None

    def close(self, but: Set[tuple[str, ...]] = frozenset()) -> None:
        for key in set(self._engines) - but:
            self._engines.pop(key).end()

    def _variables(self, side: str) -> dict[str, str]:
        return {} if self._bed.tiny else share_environment(self._bed.shares[side], self._daemon)

    def measure(self, quick: bool) -> None:
        """`potluck profile` of each share where it is not there yet, side by side, as they are used."""
        made, model = self._bed, read_model(self._bed.folder / "model")
        budgets = {HIGH: cronus.CHUNK_TOKENS // made.scale, LOW: made.longest_tokens // 4}
        batches = {HIGH: cronus.SLOTS // made.scale, LOW: 32}
        longest, running = made.longest_tokens * 3 // (8 if quick and not made.tiny else 4), {}
        for node in (node for node in made.nodes() if not (made.profiles / f"{node.name}.json").is_file()):
            side = node.name
            room = total_blocks(model, single(side, 1, model.layer_count), {side: node}, 1.0)
            command = [
                *(
                    *POTLUCK,
                    "profile",
                    "--local",
                    "--device",
                    "cpu" if made.tiny else "cuda",
                    "--gpu",
                    side,
                    "--json",
                ),
                *("--model", str(made.folder / "model"), "--chunk-tokens", str(budgets[side])),
                *("--max-batch", str(batches[side]), "--max-tokens", str(longest)),
                *("--kv-blocks", str(min(room, 2 * batches[side] * made.longest_tokens // 16))),
                *("--out", str(made.profiles / f"{side}.json")),
                *(("--quick", "--repeats", "1") if quick else ("--repeats", "3")),
            ]
            with (made.folder / f"profile-{side}.log").open("w") as log:
                env = {**os.environ, **self._variables(side)}
                running[side] = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        for side, process in running.items():
            if process.wait():
                raise SystemExit(f"potluck profile, {side}: failed")
            say(" ".join((made.folder / f"profile-{side}.log").read_text().split()))

    def _start(self, placement: str) -> None:
        resolved = self._bed.resolved(placement)
        wanted: dict[tuple[str, ...], tuple[str, int]] = {}
        for template in resolved.plan.templates:
            for index, replica in enumerate(template.replicas):
                side = replica.layout.stages[0].nodes[0].node
                wanted[side, *self._words(resolved, template, index)] = template.name, index
        self.close(wanted.keys())
        for side, *words in (item for item in wanted if item not in self._engines):
            log = self._bed.folder / f"engine-{placement}-{side}.log"
            self._engines[side, *words] = process = Process(words, log, self._variables(side))
            process.start()
        entries, self._sides = [], {}
        for item, (name, index) in wanted.items():
            process = self._engines[item]
            url = self._sides[item[0]] = str(process.said["url"]) if process.said else listening(process)
            entries.append({"template": name, "index": index, "region": fleets.REGION, "url": url})
        engines = self._bed.folder / ENGINES
        engines.write_text(json.dumps({"engines": entries}))
        words = ("-m", "parts.gpu_fleet", engines.parent, self._bed.low, self._bed.profiles, placement)
        paths = os.pathsep.join((str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")))
        log = self._bed.folder / f"gateway-{placement}.log"
        self._gateway = Process([sys.executable, *map(str, words)], log, {"PYTHONPATH": paths})
        self._gateway.start()
        self.url = str(self._gateway.hear()["url"])
        wait_ready(self.url, self._gateway, START_S)

    def _words(self, resolved: ResolvedPlan, template: Template, index: int) -> tuple[str, ...]:
        replica, setup = template.replicas[index], resolved.engines[template.name, index]
        room = total_blocks(resolved.models[fleets.MODEL], replica.layout, resolved.nodes, 1.0)
        device = "cpu" if self._bed.tiny else "cuda"
        blocks = min(room, (setup.slots + 8) * self._bed.longest_tokens // 16)
        return (
            *(*POTLUCK, "engine", "serve", "--model", str(self._bed.folder / "model"), "--json"),
            *("--name", fleets.MODEL, "--port", "0", "--device", device, "--role", replica.role),
            *("--token-budget", str(setup.token_budget), "--max-running", str(setup.slots)),
            *("--max-tokens", str(self._bed.longest_tokens), "--kv-blocks", str(blocks)),
            *("--prefix-cache-mb", "0", "--deadline-s", "3600", "--lease-s", "3600"),
        )

    def run(self, lengths: Sequence[tuple[int, int]], rate_per_s: float = inf, seed: int = 0) -> Seen:
        """Requests and figures of them, all sent at once or at a fixed interval."""
        rows = ((place / rate_per_s, fleets.MODEL, *pair) for place, pair in enumerate(lengths))
        timed = list(shots(rows, seed=seed))
        over, busy = threading.Event(), dict.fromkeys(self._sides, 0.0)
        watch = threading.Thread(target=self._watch, args=(over, busy))
        watch.start()
        try:
            if self._placement == "dp":
                weights = [(self._sides[side], weight) for side, weight in WEIGHTS.items()]
                uvloop.run(weighted_turns.fire(weights, timed, 3600.0))
            else:
                shoot(self.url, timed, within_s=3600.0)
        finally:
            over.set()
            watch.join()
        if self.keep:
            times = [
                [*(getattr(request, name) for name in KEPT), len(request.prompt)]
                for request in timed
                if request.ended
            ]
            with open(self.keep, "a", encoding="utf-8") as file:
                kept = {"placement": self._placement, "rate_per_s": rate_per_s, "requests": times}
                file.write(json.dumps(kept) + "\n")
        return timed, figures_of(timed, busy)

    def _watch(self, over: threading.Event, busy: dict[str, float]) -> None:
        """Steps that were made since the last look, times how long the latest ones took."""
        before = {side: self._status(side)["steps"] for side in busy}
        while True:
            ended = over.wait(LOOK_S)
            for side in busy:
                status = self._status(side)
                busy[side] += (status["steps"] - before[side]) * status["step_mean_s"]
                before[side] = status["steps"]
            if ended:
                return

    def _status(self, side: str) -> dict[str, float]:
        return dict(json.load(urllib.request.urlopen(f"{self._sides[side]}/status", timeout=60)))


Measure = Callable[[argparse.Namespace, Bed, ShareFleet], dict[str, float]]


def run_benchmark(name: str, measure: Measure, targets: Targets, **more: object) -> None:
    """Options beside a benchmark's own, a fleet with profiles, and the report; targets are for GPUs."""
    known = {"quick": False, "json": False, "low": "A10", "high_share": 50, "low_share": 0, "layers": 32}
    asked = options(**known, profiles="", keep="", **more)
    shares = {HIGH: asked.high_share, LOW: asked.low_share or {"A30": 25}.get(asked.low, 12)}
    about = context((0, 1, 2), quick=asked.quick)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `finally`: engines end with it
    with bed(asked.low, asked.profiles, shares, asked.layers) as (made, fleet):
        fleet.keep = asked.keep
        fleet.measure(asked.quick)
        figures = measure(asked, made, fleet)
        for profile in made.resolved("dp").profiles[fleets.MODEL]:
            about[profile.gpu] = {**profile.versions, "date": profile.date}
    judged = {} if made.tiny else {key: target for key, target in targets.items() if key in figures}
    show(name, figures, judged, {**about, "low_end_card": made.low}, asked.json)


def gateway(folder: str, low: str, profiles: str, placement: str) -> None:
    from potluck.gateway.serve import serve_forever
    from potluck.gateway.values import GatewaySettings, ListenAddresses

    # As answers are read: where what it needs is missing, that is said before the first one.
    config = parse_object(Path(folder, "model", "config.json").read_bytes())
    made = Bed(Path(folder), low, Path(profiles), {}, tiny=config["hidden_size"] == TINY[0])
    files = {fleets.MODEL: made.folder / "model"}
    settings = GatewaySettings(ListenAddresses(port=0, admin_port=0), made.folder / ENGINES, files)

    def ready(url: str, admin: str) -> None:
        print(json.dumps({"url": url, "admin": admin}), flush=True)

    serve_forever(made.resolved(placement), policy_of(placement), settings, ready)


if __name__ == "__main__":
    gateway(*sys.argv[1:])

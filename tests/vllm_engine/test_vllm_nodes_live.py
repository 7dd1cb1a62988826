"""A pipeline of two vLLM nodes with uneven layers, each in a network namespace of its own.

Its answers are compared with one plain vLLM's; it is killed on one side, and comes back."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from host_bed import Bed, Host, missing
from vllm_kit import ENVIRONMENT, LAYERS, SOURCE, VOCAB, Instance, flags, make_model, needs_vllm

pytestmark = [needs_vllm, pytest.mark.skipif(bool(missing()), reason=missing() or "hosts can be made")]
WITHIN_S = 420.0
PORT, KV_PORT, MASTER_PORT = 8100, 9000, 7000
STAGES = (LAYERS - 1, 1)
OWN_SHARED_MEMORY = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
"""As machines have it: vLLM tells by it whether two processes are on one."""


FLAGS = [word for word in flags() if word not in ("--distributed-executor-backend", "uni", "--enforce-eager")]
FLAGS += ["--compilation-config", '{"mode": 2, "backend": "eager"}']
"""On a CPU, vLLM readies the later stages only where it compiles something."""


class Node:
    def __init__(self, model: Path, rank: int, hosts: tuple[Host, ...]) -> None:
        words = [
            *(sys.executable, "-m", "potluck.cli.main", "engine", "vllm", "--model", str(model), "--name", "tiny"),
            *("--stages", ",".join(map(str, STAGES)), "--nodes", str(len(hosts)), "--node-rank", str(rank)),
            *("--master", f"{hosts[0].address}:{MASTER_PORT}", "--host", hosts[rank].address),
            *("--port", str(PORT), "--kv-port", str(KV_PORT), "--kv-from", hosts[0].address),
            *("--", *FLAGS),
        ]  # fmt: skip
        self.log = model.parent / f"node-{rank}-{time.monotonic_ns()}.log"
        more = {"PYTHONPATH": str(SOURCE), "POTLUCK_API_KEY": "k", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                hosts[rank].inside([*OWN_SHARED_MEMORY, *words]),
                stdout=out, stderr=out, env=os.environ | ENVIRONMENT | more,
            )  # fmt: skip

    def ended(self) -> tuple[int, str]:
        return self.process.wait(WITHIN_S), self.log.read_text()

    def kill_vllm(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        os.killpg(int(children.split()[0]), signal.SIGKILL)


class Nodes:
    """One replica, started as a launcher does: again when it has ended."""

    def __init__(self, model: Path, bed: Bed) -> None:
        self._model, self._hosts = model, bed.hosts
        self.nodes: list[Node] = []

    def start(self) -> None:
        self.end()
        self.nodes = [Node(self._model, rank, self._hosts) for rank in range(len(self._hosts))]
        until_s = time.monotonic() + WITHIN_S
        while "Serving tiny" not in self.nodes[0].log.read_text():
            sound = all(node.process.poll() is None for node in self.nodes) and time.monotonic() < until_s
            assert sound, [node.log.read_text()[-3000:] for node in self.nodes]
            time.sleep(0.3)

    def end(self) -> None:
        for node in self.nodes:
            node.process.terminate()
        for node in self.nodes:
            node.ended()

    def call(self, path: str, body: object = None) -> dict[str, object]:
        result: dict[str, object] = json.loads(self._answer(path, body))
        return result

    def _answer(self, path: str, body: object) -> bytes:
        url = f"http://{self._hosts[0].address}:{PORT}{path}"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
            return bytes(answer.read())

    def segment(self, tokens: list[int], **more: object) -> list[dict[str, object]]:
        body = {"request": "s", "model": "tiny", "tokens": tokens, **more}
        return [json.loads(line) for line in self._answer("/segments", body).splitlines()]

    def ask(self, tokens: list[int]) -> list[int]:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 12, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True}
        result = self.call("/v1/completions", body | more)
        return list(result["choices"][0]["token_ids"])  # type: ignore[index]


class Decoder(Instance):
    """One that is whole, on this machine, and may fetch from the hosts."""

    def __init__(self, model: Path, bed: Bed) -> None:
        self._bed = bed
        super().__init__(model, model.parent / "decoder.log")

    def _connected(self) -> list[str]:
        flag, text = super()._connected()
        config = json.loads(text)
        fleet = [f"{host.address}:0" for host in self._bed.hosts]
        config["kv_connector_extra_config"] |= {"host": self._bed.address, "fleet": fleet}
        return [flag, json.dumps(config)]


Trio = tuple[Nodes, Instance, Decoder]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    model = make_model(tmp_path_factory.mktemp("nodes") / "tiny")
    with Bed(len(STAGES)) as bed:
        nodes, decoder = Nodes(model, bed), Decoder(model, bed)
        plain = Instance(model, model.parent / "plain.log", connector=False)
        try:
            nodes.start()
            decoder.ready()
            yield nodes, plain.ready(), decoder
        finally:
            nodes.end()
            for instance in (plain, decoder):
                instance.end()


def same(nodes: Nodes, plain: Instance, seed: int) -> None:
    """Alone and together, longer and shorter than a step."""
    drawn = random.Random(seed)
    prompts = [drawn.choices(range(3, VOCAB), k=count) for count in (5, 64, 300, 90, 17, 600)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(nodes.ask, prompts)) == list(threads.map(plain.ask, prompts))


def handed(pipeline: Nodes, decoder: Decoder, tokens: list[int], cut: int) -> list[int]:
    """The first tokens on the pipeline; the rest, and the answer, where all layers are."""
    handle = secrets.token_urlsafe(32)
    with ThreadPoolExecutor(1) as threads:
        giving = threads.submit(pipeline.segment, tokens, stop=cut, handle=handle)
        take = {"kv": pipeline.call("/status")["kv"], "handle": handle, "stop": cut}
        result = decoder.ask(tokens, moves={"request": "s", "take": take})
        assert giving.result()[-1]["ended"] == "handed_on"
    return result


def test_each_pipeline_stage_transfers_its_layers_to_one_decoder(trio: Trio) -> None:
    pipeline, plain, decoder = trio
    for length, cut in ((300, 299), (300, 171), (700, 64)):
        tokens = random.Random(f"{length} {cut}").choices(range(3, VOCAB), k=length)
        before = decoder.sources()
        assert handed(pipeline, decoder, tokens, cut) == plain.ask(tokens)
        gained = {kind: count - before[kind] for kind, count in decoder.sources().items()}
        assert (gained["external_kv_transfer"], gained["local_compute"]) == (cut, length - cut)


@pytest.mark.vllm_all
def test_two_vllm_nodes_answer_as_one_and_restart_together(trio: Trio) -> None:
    pipeline, plain, _ = trio
    same(pipeline, plain, 0)
    addresses = [host.address for host in pipeline._hosts]
    status = pipeline.call("/status")
    assert status["kv"] == f"{addresses[0]}:{KV_PORT},{addresses[1]}:{KV_PORT + 1}?layers=3,1"
    pipeline.nodes[1].kill_vllm()
    for node, words in zip(pipeline.nodes, ("node 1 failed", "signal 9 ended it"), strict=True):
        code, log = node.ended()
        assert (code, words in log) == (2, True), log[-3000:]
    pipeline.start()
    same(pipeline, plain, 1)

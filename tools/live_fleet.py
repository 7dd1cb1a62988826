"""A plan brought to life on this machine, for tests and benchmarks: mock engines and a gateway before them.

    with LiveFleet(plan_path, spec_path) as fleet:
        fleet.url, fleet.admin

Each replica of the plan is a process that acts as its GPUs (`engine serve --emulate ... --mock`). All processes
are ended, by their ids, when the block is left.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from potluck.cli.common.inputs import read_spec
from potluck.cli.engine.emulate import mock_model
from potluck.core.values.layout import Layout
from potluck.core.values.plan import Plan, plan_from_json
from potluck.runtime.replica_models import total_blocks

START_S = 60.0


def emulated(layout: Layout, model: str) -> str:
    """What `--emulate` says for a layout of one stage on one node."""
    if len(layout.stages) != 1 or len(layout.stages[0].nodes) != 1:
        raise ValueError("only single nodes can be mocked here")
    node = layout.stages[0].nodes[0]
    return f"{node.node}:{model}:{node.tp}"


@dataclass
class Process:
    """One that was started here, and what it says on its first line."""

    arguments: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[str] | None = None
    said: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        with self.log.open("a") as out:
            self.popen = subprocess.Popen(
                self.arguments,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={**os.environ, **self.env},
                start_new_session=True,
            )

    def hear(self) -> dict[str, Any]:
        assert self.popen is not None
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            tail = self.log.read_text()[-2000:]
            raise RuntimeError(f"{' '.join(self.arguments[:6])} ... ended: {tail}")
        self.said = json.loads(line)
        return self.said

    def send(self, number: signal.Signals) -> None:
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    def end(self, within_s: float = 10.0) -> None:
        if self.popen is None:
            return
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()


def listening(process: Process) -> str:
    """Where an engine listens; whoever is started again in its place listens there too."""
    url = str(process.hear()["url"])
    process.arguments[process.arguments.index("--port") + 1] = url.rsplit(":", 1)[1]
    return url


def wait_ready(url: str, gateway: Process, within_s: float = START_S) -> None:
    until_s = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError as error:
            if time.monotonic() > until_s:
                tail = gateway.log.read_text()[-2000:]
                raise RuntimeError(f"the gateway did not get ready ({error}): {tail}") from error
        time.sleep(0.1)


class LiveFleet:
    """Engines and a gateway; `engines` are in the order of the plan's deployments, copies and replicas."""

    def __init__(
        self,
        plan: Path,
        spec: Path,
        *,
        gateway: tuple[str, ...] = (),
        engine: tuple[str, ...] = ("--mock",),
        env: dict[str, str] | None = None,
        over: Sequence[Process] = (),
        program: tuple[str, ...] = ("-m", "potluck.cli.main"),
    ) -> None:
        """`over` are engines that somebody else started and ends; `program` is what the gateway is started with."""
        self.folder = Path(tempfile.mkdtemp(prefix="potluck-live-"))
        self._plan_path, self._spec_path = plan, spec
        self.plan: Plan = plan_from_json(plan.read_text("utf-8"))
        self._gateway, self._engine = gateway, engine
        self._models = {model.name: model for model in read_spec(spec).models}
        self._env = env or {}
        self._over, self._program = list(over), program
        self.engines: list[Process] = []
        self.engine_list: list[dict[str, object]] = []
        self.gateway: Process | None = None
        self._gone: list[Process] = []
        """Gateways that others took the place of."""
        self.url = self.admin = ""

        self.key = self.engine_key = ""
        """What clients show the gateway, and the gateway engines."""
        self.tls: ssl.SSLContext | None = None

    @property
    def urls(self) -> list[str]:
        return [self.url]

    def __enter__(self) -> Self:
        try:
            self._start_engines()
            self._start_gateway()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_engines(self) -> None:
        for deployment in self.plan.deployments:
            template = self.plan.template(deployment.template)
            for copy in range(deployment.count):
                for index, replica in enumerate(template.replicas):
                    if not self._over:
                        like = emulated(replica.layout, self._models[template.model].model.name)
                        name = f"{template.name}-{copy}-{index}"
                        self.engines.append(self._engine_process(like, template.model, name))
                        self.engines[-1].start()
                    entry = {"template": template.name, "index": index, "region": deployment.region}
                    self.engine_list.append(entry)
        for process, entry in zip(self._over or self.engines, self.engine_list, strict=True):
            entry["url"] = process.said["url"] if self._over else listening(process)

    def _engine_words(self, like: str, model: str) -> list[str]:
        words = ["engine", "serve", "--emulate", like, "--name", model, "--port", "0", "--json"]
        if "--mock" in self._engine:  # as much KV as the plan and the simulator reckon with
            mock, traffic = mock_model(like), self._models[model].traffic
            mean = traffic.mean_input_tokens + traffic.mean_output_tokens
            nodes = {node.name: node for node in mock.nodes}
            words += ["--kv-blocks", str(total_blocks(mock.model, mock.layout, nodes, mean))]
        return [*words, *self._engine]

    def _engine_process(self, like: str, model: str, name: str) -> Process:
        arguments = [sys.executable, "-m", "potluck.cli.main", *self._engine_words(like, model)]
        return Process(arguments, self.folder / f"{name.replace('/', '_')}.log", self._env)

    def _gateway_process(self) -> Process:
        engine_list = self.folder / "engines.yaml"
        engine_list.write_text(json.dumps({"engines": self.engine_list}))
        arguments = [
            *(sys.executable, *self._program, "serve", str(self._plan_path), str(self._spec_path)),
            *("--engines", str(engine_list), "--port", "0", "--admin-port", "0", "--json", *self._gateway),
        ]
        return Process(arguments, self.folder / "gateway.log", self._env)

    def _start_gateway(self) -> None:
        self.gateway = self._gateway_process()
        self.gateway.start()
        text = self.gateway.hear()
        self.url, self.admin = text["url"], text["admin"]
        self.wait_ready()

    def wait_ready(self, within_s: float = START_S) -> None:
        assert self.gateway is not None
        wait_ready(self.url, self.gateway, within_s)

    def restart(self, place: int) -> None:
        """Start an engine again that was killed; it listens at the same address."""
        self.engines[place].end()
        self.engines[place].start()
        self.engines[place].hear()

    def succeed(self) -> Process:
        """Start a gateway in the place of another (`--takeover`); returns the one before, which ends by itself."""
        before, after = self.gateway, self._gateway_process()
        assert before is not None
        for name, url in (("--port", self.url), ("--admin-port", self.admin)):
            after.arguments[after.arguments.index(name) + 1] = url.rsplit(":", 1)[1]
        after.start()
        self._gone.append(before)
        self.gateway = after
        after.hear()
        return before

    def close(self) -> None:
        every = ([self.gateway] if self.gateway else []) + self._gone + self.engines
        for process in every:
            process.send(signal.SIGCONT)
            process.send(signal.SIGTERM)
        for process in every:
            process.end()

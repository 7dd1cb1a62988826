"""A plan brought to life over several hosts (`host_bed.py`): an engine on each, gateways on others, TLS between them.

with HostsFleet(bed, plan, spec) as fleet:
    fleet.gateways[0].url, fleet.engine_hosts[2], fleet.ask(0, "/snapshot")
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from host_bed import Bed, Host, make_certificates
from live_fleet import LiveFleet, Process

from potluck.gateway.openai.keys import new_key

ODD = str(Path(__file__).parent / "odd_process.py")
ENGINE_KEY, ADMIN_KEY = "what engines ask for", "what operators show"


class Gateway:
    def __init__(self, process: Process, host: Host) -> None:
        self.process, self.host = process, host
        self.url = self.admin = ""

    def hear(self) -> None:
        text = self.process.hear()
        self.url, self.admin = text["url"], text["admin"]


class HostsFleet(LiveFleet):
    """The last hosts of the bed are the gateways'; the others have the plan's engines, in its order."""

    def __init__(
        self,
        bed: Bed,
        plan: Path,
        spec: Path,
        *,
        gateways: int = 1,
        engine: tuple[str, ...] = ("--mock",),
        gateway: tuple[str, ...] = (),
        limits: Mapping[str, object] | None = None,
        takeover: bool = False,
        odd: Mapping[int, Mapping[str, object]] | None = None,
    ) -> None:
        """`limits` are those of the clients' key; `odd` says of which engines release or clock are others; with
        `takeover` gateways hand their ports on."""
        super().__init__(plan, spec, engine=engine, gateway=gateway)
        self.bed = bed
        self.engine_hosts: Sequence[Host] = bed.hosts[: len(bed.hosts) - gateways]
        self._gateway_hosts = bed.hosts[len(bed.hosts) - gateways :]
        self.gateways: list[Gateway] = []
        self._takeover = takeover
        self._odd = dict(odd or {})
        self.authority = make_certificates(self.folder, [host.address for host in bed.hosts])
        self.engine_key = ENGINE_KEY
        self.tls: ssl.SSLContext = ssl.create_default_context(cafile=str(self.authority))
        (self.folder / "engine.key").write_text(ENGINE_KEY)
        (self.folder / "admin.key").write_text(ADMIN_KEY)
        self.key, line = new_key("tests", **(limits or {}))
        (self.folder / "keys.jsonl").write_text(line + "\n")
        (self.folder / "secret").write_text("salts of tenants, the same at all gateways")

    def _engine_process(self, like: str, model: str, name: str) -> Process:
        host = self.engine_hosts[len(self.engines)]
        words = self._engine_words(like, model)
        words += ["--host", host.address, "--api-key-file", str(self.folder / "engine.key")]
        words += ["--tls", *self._shown(host), "--kv-tls", *self._shown(host), str(self.authority)]
        log = self.folder / f"{name.replace('/', '_')}.log"
        return Process(host.inside([*self._program_of(len(self.engines)), *words]), log, self._env)

    def _shown(self, host: Host) -> tuple[str, str]:
        return str(self.folder / f"{host.address}.pem"), str(self.folder / f"{host.address}.key")

    def _program_of(self, place: int) -> list[str]:
        odd = self._odd.get(place)
        return [sys.executable, *((ODD, json.dumps(odd)) if odd else ("-m", "potluck.cli.main"))]

    def replace(self, place: int, odd: Mapping[str, object] | None = None) -> None:
        """Start an engine anew at its address, perhaps as another release."""
        process = self.engines[place]
        process.end()
        before = self.engine_hosts[place].inside(self._program_of(place))
        self._odd[place] = odd or {}
        now = self.engine_hosts[place].inside(self._program_of(place))
        process.arguments = now + process.arguments[len(before) :]
        process.start()
        process.hear()

    def _start_gateway(self) -> None:
        for entry in self.engine_list:
            entry["key_file"] = str(self.folder / "engine.key")
        for place in range(len(self._gateway_hosts)):
            self.gateways.append(self.gateway_process(place))
            self.gateways[-1].process.start()
        for gateway in self.gateways:
            gateway.hear()
        self.url, self.admin = self.gateways[0].url, self.gateways[0].admin
        self.until(lambda: all(self.serving(n) == len(self.engines) for n in range(len(self.gateways))))

    def gateway_process(self, place: int, port: int = 0, admin_port: int = 0) -> Gateway:
        host = self._gateway_hosts[place]
        made = self._gateway_process()
        for name, number in (("--port", port), ("--admin-port", admin_port)):
            made.arguments[made.arguments.index(name) + 1] = str(number)
        made.arguments += ["--host", host.address, "--keys", str(self.folder / "keys.jsonl")]
        made.arguments += ["--admin-host", host.address, "--admin-key-file", str(self.folder / "admin.key")]
        made.arguments += ["--tls", *self._shown(host), "--engine-ca", str(self.authority)]
        made.arguments += ["--secret-file", str(self.folder / "secret")]
        if self._takeover:
            made.arguments += ["--takeover", str(self.folder / f"gateway-{place}.sock")]
        made.arguments = host.inside(made.arguments)
        made.log = self.folder / f"gateway-{place}.log"
        return Gateway(made, host)

    @property
    def urls(self) -> list[str]:
        return [gateway.url for gateway in self.gateways]

    def succeed(self, place: int = 0) -> Process:
        """Start a gateway in the place of another; returns the one before, which ends by itself."""
        before = self.gateways[place]
        ports = (int(item.rsplit(":", 1)[1]) for item in (before.url, before.admin))
        self.gateways[place] = self.gateway_process(place, *ports)
        self.gateways[place].process.start()
        self.gateways[place].hear()
        self._gone.append(before.process)
        return before.process

    def ask(self, gateway: int, path: str, body: object = None, method: str | None = None) -> Any:
        return json.loads(self._said(gateway, path, body, method))

    def metrics(self, gateway: int) -> list[str]:
        return self._said(gateway, "/metrics").decode().splitlines()

    def _said(self, gateway: int, path: str, body: object = None, method: str | None = None) -> bytes:
        request = urllib.request.Request(
            f"{self.gateways[gateway].admin}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=10, context=self.tls) as answer:
            return bytes(answer.read())

    def serving(self, gateway: int = 0) -> int:
        """Engines that a gateway has and may send to."""
        replicas = self.ask(gateway, "/snapshot")["replicas"]
        return sum(replica["state"] == "ready" and replica["url"] is not None for replica in replicas)

    def until(self, holds: Callable[[], bool], within_s: float = 60.0) -> None:
        until_s = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > until_s:
                tails = [gateway.process.log.read_text()[-1500:] for gateway in self.gateways]
                raise RuntimeError(f"it did not come to that within {within_s:g} s: {tails}")
            time.sleep(0.1)

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.process.end()
        super().close()

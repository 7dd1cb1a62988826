"""Who stands between clients and engines, each on a core of its own, and what it spends. For `gateway.py`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

from parts.common import POTLUCK, ROOT

HERE = Path(__file__).parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
ROUTERS = Path(os.environ.get("POTLUCK_ROUTERS", Path.home() / ".cache" / "potluck" / "routers"))
"""A virtual environment with vllm-router and sglang-router; made where pip can fetch them."""

NGINX = """
worker_processes 1; daemon off; pid {home}/pid; error_log {home}/error.log crit;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_body_temp_path {home}/b; proxy_temp_path {home}/p; fastcgi_temp_path {home}/f;
  uwsgi_temp_path {home}/u; scgi_temp_path {home}/s; client_body_buffer_size 64k; keepalive_requests 1000000;
  upstream engines {{ {servers} keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def cores_apart() -> list[int]:
    """Cores that may be used, one of each physical core first: two threads of one would slow each other down."""
    allowed, first, second = sorted(os.sched_getaffinity(0)), [], []
    taken: set[str] = set()
    for core in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(core)
        (second if siblings in taken else first).append(core)
        taken.add(siblings)
    return first + second


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(entry.getsockname()[1]) for entry in taken]
    for item in taken:
        item.close()
    return ports


class Process:
    """One that runs on the cores it is given, with its children, and can be asked what it has spent."""

    def __init__(
        self, command: Sequence[str], cores: set[int], environment: dict[str, str] | None = None
    ) -> None:
        self.command = command
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        result, left = [], [self._process.pid]
        while left:
            result.append(left.pop())
            for text in _read(f"/proc/{result[-1]}/task/*/children"):
                left += map(int, text.split())
        return result

    def cpu_s(self) -> float:
        """User and system time so far, exact to the nanosecond where the kernel counts so."""
        spent = [text for pid in self.pids() for text in _read(f"/proc/{pid}/task/*/schedstat")]
        return sum(int(text.split()[0]) for text in spent) / 1e9

    def rss_bytes(self) -> int:
        pages = [text for pid in self.pids() for text in _read(f"/proc/{pid}/statm")]
        return sum(int(text.split()[1]) for text in pages) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        if self.alive:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def _read(pattern: str) -> Iterator[str]:
    """Files of processes and tasks, but those that have ended."""
    for name in glob(pattern):
        with suppress(OSError):
            yield Path(name).read_text()


def await_port(process: Process, port: int, within_s: float = 60.0, path: str = "/v1/models") -> None:
    until_s = time.monotonic() + within_s
    while process.alive and time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                if answer.status == 200:
                    return
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404):
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"not ready: {' '.join(process.command)}")


def settle(process: Process, within_s: float = 30.0) -> None:
    """Wait until it has done all that it does at its start: of several workers the first answers before the last."""
    until_s, before_s = time.monotonic() + within_s, process.cpu_s()
    while time.monotonic() < until_s:
        time.sleep(0.5)
        now_s = process.cpu_s()
        if now_s - before_s < 0.025:
            return
        before_s = now_s


def upstream(ports: Sequence[int], cores: set[int]) -> Process:
    made = Process([sys.executable, str(HERE / "gateway_upstream.py"), *map(str, ports)], cores)
    await_port(made, ports[0])
    return made


def relay(port: int, engines: Sequence[int], cores: set[int]) -> Process:
    return Process([sys.executable, str(HERE / "gateway_relay.py"), str(port), *map(str, engines)], cores)


def nginx(port: int, engines: Sequence[int], cores: set[int], home: Path) -> Process | None:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        return None
    servers = " ".join(f"server 127.0.0.1:{engine};" for engine in engines)
    (home / "nginx.conf").write_text(NGINX.format(home=home, port=port, servers=servers))
    return Process([program, "-p", str(home), "-c", str(home / "nginx.conf")], cores)


def program(name: str) -> Path | None:
    result = ROUTERS / "bin" / name
    if not result.exists():
        if not (ROUTERS / "bin" / "pip").exists():
            subprocess.run([sys.executable, "-m", "venv", str(ROUTERS)], capture_output=True, check=False)
        fetch = [str(ROUTERS / "bin" / "pip"), "install", "-q", "--retries", "1", "--timeout", "10", name]
        try:
            subprocess.run(fetch, capture_output=True, check=False, timeout=300)
        except (OSError, subprocess.TimeoutExpired):
            return None
    return result if result.exists() else None


def router(name: str, policy: str, port: int, engines: Sequence[int], cores: set[int]) -> Process | None:
    result = program(name)
    if result is None:
        return None
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    port_of_metrics = free_ports(1)[0]
    command = [str(result), *(["launch"] if name == "sglang-router" else [])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", policy]
    command += ["--prometheus-port", str(port_of_metrics), "--log-level", "error"]
    return Process(command, cores, {"RUST_LOG": "error"})


SPEC = """
models:
  - model: Llama-3.1-8B
    name: bench
    slo: {ttft_ms: 60000, tpot_ms: 2000}
    traffic: {rate_per_s: 400, input: 1000, output: 64}
fleet:
  regions:
    - name: here
      nodes: [{node: 1xH100, available: 16, price_usd_per_h: 2.0}]
"""
TOKENS = 8192


def prepare(home: Path, engines: Sequence[int], key: str) -> None:
    """What `potluck serve` reads: a plan, its engines, a key, and a tokenizer of a common kind."""
    (home / "spec.yaml").write_text(SPEC)
    out = str(home / "plan.json")
    command = [*POTLUCK, "plan", str(home / "spec.yaml"), "--strategy", "homo", "--averages", "--no-explain"]
    subprocess.run([*command, "--out", out], check=True, capture_output=True)
    entries = [{"url": f"http://127.0.0.1:{port}", "kind": "openai", "model": "bench"} for port in engines]
    (home / "engines.yaml").write_text(json.dumps({"engines": entries}))
    limits = {"requests_per_min": 1e9, "tokens_per_min": 1e12, "concurrent": 10_000}
    line = {"name": "bench", "sha256": hashlib.sha256(key.encode()).hexdigest(), **limits}
    (home / "keys.jsonl").write_text(json.dumps(line) + "\n")
    model = home / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 131072}')
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    tokenizer().save(str(model / "tokenizer.json"))


CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def tokenizer() -> Any:
    """Byte-level pairs, as most models have them, learnt from this project's own pages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([page.read_text("utf-8") for page in PAGES], trainer)
    return made


def gateway(port: int, cores: set[int], home: Path, *, tokens: bool, workers: int = 1) -> Process:
    command = [*POTLUCK, "serve", str(home / "plan.json"), str(home / "spec.yaml"), "--port", str(port)]
    command += [
        "--engines",
        str(home / "engines.yaml"),
        "--admin-port",
        "0",
        "--keys",
        str(home / "keys.jsonl"),
    ]
    command += ["--files", f"bench={home / 'model'}"] if tokens else []
    command += ["--workers", str(workers)] if workers > 1 else []
    return Process(command, cores)

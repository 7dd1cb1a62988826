"""A fake vLLM for tests of start and stop: its command line, HTTP server and connector lines.

Its nodes wait for each other at their rendezvous address and, like vLLM's, do not detect the loss of one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def command(folder: Path, version: str | None = None) -> str:
    """Path of a Python that has nothing but this module as its vLLM, by default of the tested release."""
    if version is None:
        from potluck.core.values.vllm_version import VLLM_VERSION  # This module also runs without Potluck.

        version = VLLM_VERSION
    path = folder / f"python-{version}"
    path.write_text(
        f'#!/bin/sh\nexport FAKE_VLLM_VERSION="{version}"\nexec {sys.executable} {__file__} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


class Api(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        models = {"data": [{"id": "m", "max_model_len": 99, "parent": None}]}
        self._answer(json.dumps(models).encode() if self.path == "/v1/models" else b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [9]:
            time.sleep(60)
        text = {"choices": [{"token_ids": [5, 6], "finish_reason": "length"}]}
        self._answer(b"data: " + json.dumps(text).encode() + b"\n\ndata: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def hear(channel: socket.socket) -> None:
    for line in channel.makefile():
        sys.stdout.write(f"heard {line}")
        sys.stdout.flush()


def main(words: list[str]) -> None:
    def value(flag: str, default: str = "") -> str:
        return words[words.index(flag) + 1] if flag in words else default

    extra = json.loads(value("--kv-transfer-config"))["kv_connector_extra_config"]
    nodes, node, tensor = (
        int(value(flag, "1")) for flag in ("--nnodes", "--node-rank", "--tensor-parallel-size")
    )
    stages = [int(text) for text in os.environ.get("VLLM_PP_LAYER_PARTITION", "4").split(",")]
    if nodes == 1:
        node = 0
    meeting = value("--master-addr"), int(value("--master-port", "0"))
    if nodes > 1 and not node:
        with socket.create_server(("", meeting[1])) as listener:
            channels = [listener.accept()[0] for _ in range(nodes - 1)]
    else:
        channels = [_reached(meeting)] if nodes > 1 else []
    for rank in range(tensor * len(stages) // nodes * node, tensor * len(stages) // nodes * (node + 1)):
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(extra["channel"])
        stage = rank // tensor
        line = {
            "worker": rank, "kv": [extra["host"], extra["port"] + rank], "fingerprint": "f", "token_bytes": 1,
            "tensor": [rank % tensor, tensor], "stage": [stage, len(stages)],
            "layers": [sum(stages[:stage]), sum(stages[: stage + 1])], "block_tokens": 16, "blocks": 9,
            "dtype": "float32", "version": os.environ["FAKE_VLLM_VERSION"],
        }  # fmt: skip
        channel.sendall(json.dumps(line).encode() + b"\n")
        threading.Thread(target=hear, args=(channel,), daemon=True).start()
        channels.append(channel)
    if words[1] == "potluck.vllm.headless":
        threading.Event().wait()
    ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Api).serve_forever()


def _reached(address: tuple[str, int]) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection(address, 10)
        except OSError:
            time.sleep(0.05)
    raise SystemExit("nobody is at the meeting")


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        sys.stdout.write(os.environ["FAKE_VLLM_VERSION"])
    else:
        main(sys.argv[1:])

"""Servers of OpenAI's API as others run them: small stubs of each kind, on real sockets."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = dict[str, tuple[int, bytes]]
"""What GET of a path is answered with: status and body."""
HTML = b"<!doctype html><html><body>Sign in</body></html>"


def listing(*models: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": list(models)}).encode()


def vllm(name: str, max_model_len: int = 4096) -> Answers:
    model = {"id": name, "object": "model", "owned_by": "vllm", "root": name, "max_model_len": max_model_len}
    return {"/health": (200, b""), "/v1/models": (200, listing(model))}


def sglang(name: str, max_model_len: int = 4096) -> Answers:
    model = {"id": name, "object": "model", "owned_by": "sglang", "max_model_len": max_model_len}
    return {"/health": (200, b""), "/v1/models": (200, listing(model))}


def llama_cpp(name: str) -> Answers:
    model = {"id": name, "object": "model", "owned_by": "llamacpp", "meta": {"n_ctx_train": 131072}}
    return {"/health": (200, b'{"status":"ok"}'), "/v1/models": (200, listing(model))}


def ollama(*names: str) -> Answers:
    return {"/v1/models": (200, listing(*({"id": name, "owned_by": "library"} for name in names)))}


def lite_llm(*names: str) -> Answers:
    health = b'{"healthy_endpoints": [], "unhealthy_endpoints": []}'
    return {"/health": (200, health), "/v1/models": (200, listing(*({"id": name} for name in names)))}


class StubServer:
    """Answers GET by `answers`, and completions with its own name. `port` 0: any."""

    def __init__(self, answers: Answers, *, key: str = "", prefix: str = "", port: int = 0) -> None:
        self.answers, self.key, self.prefix = answers, key, prefix
        self.asked: list[str] = []
        self.closed = False
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stub.asked.append(self.path)
                if self._allowed():
                    path = self.path.removeprefix(stub.prefix) if self.path.startswith(stub.prefix) else ""
                    self._reply(*stub.answers.get(path, (404, b'{"detail":"Not Found"}')))

            def do_POST(self) -> None:
                stub.asked.append(self.path)
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if not self._allowed():
                    return
                text = f"{stub.url} as {body['model']}"
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "text": text, "finish_reason": "stop"}
                prompt_tokens = max(1, len(str(body["messages"])) // 4)
                usage = {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": 2,
                    "total_tokens": prompt_tokens + 2,
                }
                if body.get("stream"):
                    chunk = {"id": "x", "object": "o", "choices": [{"index": 0, "delta": {"content": text}}]}
                    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
                    self._reply(200, events.encode(), "text/event-stream")
                    return
                answer = {
                    "id": "x",
                    "object": "o",
                    "model": body["model"],
                    "choices": [choice],
                    "usage": usage,
                }
                self._reply(200, json.dumps(answer).encode())

            def _allowed(self) -> bool:
                if stub.closed:
                    self.close_connection = True
                    return False
                if stub.key and self.headers.get("authorization") != f"Bearer {stub.key}":
                    self._reply(401, b'{"error":{"message":"invalid api key"}}')
                    return False
                return True

            def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def close(self) -> None:
        self.closed = True  # for connections that clients keep
        self._server.shutdown()
        self._server.server_close()

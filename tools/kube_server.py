"""A small server that speaks Kubernetes' API for pods, nodes and secrets, with a scheduler and a kubelet behind it.

What is posted is checked strictly against the published schemas (kubernetes-validate), versions grow, watches tell of
changes and grow too old, deletions have their grace. Pods run as processes of this machine, each at its own address
(127.0.0.0/8), on nodes that have labels and GPUs in name only. Admission, quotas, permissions, images: not here.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

from potluck.control.launchers.process import healthy

GPUS = "nvidia.com/gpu"
VERSION = "1.33"
TICK_S = 0.05
PATH = re.compile(r"/api/v1(?:/namespaces/[^/]+)?/(pods|nodes|secrets)(?:/([^/]+))?(/log)?")
Json = dict[str, Any]


class Refusal(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(message)


class Kube:
    """The state, behind one lock. `command` makes of a container's command what is run here."""

    def __init__(
        self, folder: Path, command: Callable[[list[str]], list[str]], first_ip: str = "127.80.0."
    ) -> None:
        self.folder, self._command, self._first_ip = folder, command, first_ip
        self.changed = threading.Condition()
        self.objects: dict[str, dict[str, Json]] = {"pods": {}, "nodes": {}, "secrets": {}}
        self.events: list[tuple[int, str, str, Json]] = []
        """(version, kind, what happened, the object)"""
        self.version, self.oldest = 100, 100
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.deaf: set[str] = set()
        """Nodes whose kubelet is gone: nothing is heard of their pods any more."""
        self.asked: list[tuple[str, str]] = []
        self.stopping = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(TICK_S,), daemon=True),
            threading.Thread(target=self._run, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def put(self, kind: str, happened: str, result: Json) -> Json:
        """With the lock held."""
        self.version += 1
        result["metadata"]["resourceVersion"] = str(self.version)
        name = result["metadata"]["name"]
        if happened == "DELETED":
            self.objects[kind].pop(name, None)
        else:
            self.objects[kind][name] = result
        self.events.append((self.version, kind, happened, json.loads(json.dumps(result))))
        self.changed.notify_all()
        return result

    def add_node(self, name: str, gpu: str, gpus: int, region: str) -> None:
        labels = {"nvidia.com/gpu.product": gpu, "topology.kubernetes.io/region": region}
        metadata = {"name": name, "labels": labels | {"kubernetes.io/hostname": name}}
        status = {"allocatable": {GPUS: str(gpus)}, "conditions": [{"type": "Ready", "status": "True"}]}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}
        kubernetes_validate.validate(node, VERSION, strict=True)
        with self.changed:
            self.put("nodes", "ADDED", node)

    def cordon(self, name: str) -> None:
        with self.changed:
            node = self.objects["nodes"][name]
            node["spec"]["unschedulable"] = True
            self.put("nodes", "MODIFIED", node)

    def lose(self, name: str) -> None:
        """A machine dies: its processes are gone, and nobody tells."""
        with self.changed:
            self.deaf.add(name)
            for pod in self._on(name):
                self._end(pod["metadata"]["name"])

    def _end(self, name: str) -> None:
        if process := self.processes.pop(name, None):
            process.kill()
            process.wait()

    def forget_history(self) -> None:
        """Whoever watches from before now is told that it is too old."""
        with self.changed:
            self.oldest = self.version
            self.events = []
            self.changed.notify_all()

    def _on(self, node: str) -> list[Json]:
        return [pod for pod in self.objects["pods"].values() if pod["spec"].get("nodeName") == node]

    def create(self, kind: str, body: Json) -> Json:
        try:
            kubernetes_validate.validate(body, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Refusal(422, "Invalid", str(error)) from error
        with self.changed:
            name = body["metadata"]["name"]
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name):
                raise Refusal(422, "Invalid", f"{name!r} is no name")
            if name in self.objects[kind]:
                raise Refusal(409, "AlreadyExists", f"{kind} {name!r} already exists")
            if kind == "pods":
                assert _secret(body) in self.objects["secrets"], "a pod without its secret never starts"
                body["status"] = {"phase": "Pending"}
            return self.put(kind, "ADDED", body)

    def delete(self, kind: str, name: str, grace_s: float | None) -> Json:
        with self.changed:
            result = self.objects[kind].get(name)
            if result is None:
                raise Refusal(404, "NotFound", f"{kind} {name!r} not found")
            if kind == "pods" and grace_s != 0 and result["spec"].get("nodeName"):
                result["metadata"].setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")
                if process := self.processes.get(name):
                    process.send_signal(signal.SIGTERM)
                return self.put(kind, "MODIFIED", result)
            self._end(name)
            return self.put(kind, "DELETED", result)

    def _run(self) -> None:
        while not self.stopping:
            with self.changed:
                for pod in list(self.objects["pods"].values()):
                    self._go_on(pod)
            time.sleep(TICK_S)

    def _go_on(self, pod: Json) -> None:
        name, status = pod["metadata"]["name"], pod["status"]
        node = pod["spec"].get("nodeName")
        if node in self.deaf or status["phase"] in ("Succeeded", "Failed"):
            return
        if node is None:
            if node := self._place(pod):
                pod["spec"]["nodeName"] = node
                self._start(pod)
                self.put("pods", "MODIFIED", pod)
            return
        process = self.processes[name]
        if process.poll() is not None:
            del self.processes[name]
            if "deletionTimestamp" in pod["metadata"]:
                self.put("pods", "DELETED", pod)
                return
            if pod["spec"]["restartPolicy"] == "Always":
                self._start(pod, status["podIP"])
            else:
                ended = {"exitCode": process.returncode, "reason": "Error"}
                pod["status"] = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}
            self.put("pods", "MODIFIED", pod)
        elif "conditions" not in status and _probed(pod, status["podIP"]):
            status["conditions"] = [{"type": "Ready", "status": "True"}]
            self.put("pods", "MODIFIED", pod)

    def _place(self, pod: Json) -> str | None:
        wanted = pod["spec"]["nodeSelector"]
        rules = []
        if affinity := pod["spec"].get("affinity"):
            terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            rules = terms["nodeSelectorTerms"][0]["matchExpressions"]
        for name, node in sorted(self.objects["nodes"].items()):
            labels = node["metadata"]["labels"]
            fits = all(labels.get(key) == value for key, value in wanted.items())
            allowed = all(labels[rule["key"]] not in rule["values"] for rule in rules)
            used = sum(_gpus(item) for item in self._on(name))
            room = int(node["status"]["allocatable"][GPUS]) - used >= _gpus(pod)
            if fits and allowed and room and not node["spec"].get("unschedulable"):
                return name
        return None

    def _start(self, pod: Json, ip: str = "") -> None:
        name = pod["metadata"]["name"]
        ip = ip or f"{self._first_ip}{len(self.events) % 200 + 10}"
        (container,) = pod["spec"]["containers"]
        secrets = self._files(pod)
        words = [word.replace("$(POD_IP)", ip) for word in container["command"]]
        command = self._command([word.replace("/etc/potluck", str(secrets)) for word in words])
        with (self.folder / f"{name}.log").open("wb") as log:
            env = {**os.environ, "POD_IP": ip}
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        pod["status"] = {"phase": "Running", "podIP": ip}

    def _files(self, pod: Json) -> Path:
        named = _secret(pod)
        folder = self.folder / named
        folder.mkdir(exist_ok=True)
        for name, text in self.objects["secrets"][named]["data"].items():
            (folder / name).write_bytes(base64.b64decode(text))
        return folder

    def close(self) -> None:
        self.stopping = True
        with self.changed:
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()
        for name in list(self.processes):
            self._end(name)


def _secret(pod: Json) -> str:
    return str(next(item["secret"]["secretName"] for item in pod["spec"]["volumes"] if "secret" in item))


def _gpus(pod: Json) -> int:
    return int(pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get(GPUS, 0))


def _probed(pod: Json, ip: str) -> bool:
    """Whether it is ready, as its probe asks: over HTTP, or by a connection; without one, it is."""
    (container,) = pod["spec"]["containers"]
    if "readinessProbe" not in container:
        return True
    (name, about), *_ = container["readinessProbe"].items()
    ports = {item["name"]: item["containerPort"] for item in container["ports"]}
    if name == "httpGet":
        return healthy(f"http://{ip}:{ports[about['port']]}", 0.2)
    try:
        socket.create_connection((ip, ports[about["port"]]), 0.2).close()
    except OSError:
        return False
    return True


def _handler(kube: Kube) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None: ...

        def _do(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            kube.asked.append((self.command, parts.path + ("?watch" if "watch" in query else "")))
            try:
                with suppress(BrokenPipeError, ConnectionResetError):
                    self._answer(parts.path, query)
            except Refusal as refusal:
                about = {"code": refusal.code, "reason": refusal.reason, "message": str(refusal)}
                self._say(refusal.code, {"kind": "Status", "status": "Failure", **about})

        do_GET = do_POST = do_DELETE = _do

        def _answer(self, path: str, query: dict[str, str]) -> None:
            match = PATH.fullmatch(path)
            if match is None:
                raise Refusal(404, "NotFound", f"the server could not find {path}")
            kind, name, log = match.groups()
            if log:
                self._write(200, (kube.folder / f"{name}.log").read_bytes(), "text/plain")
            elif self.command == "POST":
                size = int(self.headers["Content-Length"])
                self._say(201, kube.create(kind, json.loads(self.rfile.read(size))))
            elif self.command == "DELETE":
                grace = query.get("gracePeriodSeconds")
                self._say(200, kube.delete(kind, name or "", None if grace is None else float(grace)))
            elif "watch" in query:
                self._watch(kind, query)
            else:
                with kube.changed:
                    items = [item for item in kube.objects[kind].values() if _matches(item, query)]
                    self._say(200, {"metadata": {"resourceVersion": str(kube.version)}, "items": items})

        def _watch(self, kind: str, query: dict[str, str]) -> None:
            self.send_response(200)
            self.end_headers()
            after, until_s = int(query["resourceVersion"]), time.monotonic() + float(query["timeoutSeconds"])
            while time.monotonic() < until_s and not kube.stopping:
                with kube.changed:
                    if after < kube.oldest:
                        gone = {"kind": "Status", "code": 410, "reason": "Expired"}
                        self.wfile.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                        return
                    news = [event for event in kube.events if event[0] > after]
                    if not news:
                        kube.changed.wait(0.5)
                for version, which, happened, result in news:
                    after = version
                    if which == kind and _matches(result, query):
                        self.wfile.write(json.dumps({"type": happened, "object": result}).encode() + b"\n")
                self.wfile.flush()

        def _say(self, code: int, body: Json) -> None:
            self._write(code, json.dumps(body).encode(), "application/json")

        def _write(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _matches(item: Json, query: dict[str, str]) -> bool:
    name, _, value = query.get("labelSelector", "").partition("=")
    return not name or item["metadata"].get("labels", {}).get(name) == value


def potluck_itself(words: list[str]) -> list[str]:
    """The command of an image, on this machine: without the key that only a pod has."""
    if words[0] == "sh":  # a stage's worker
        return ["sh", "-c", words[2].replace("python3", sys.executable)]
    at = words.index("--api-key-file")
    return [sys.executable, "-m", "potluck.cli.main", *words[1:at], *words[at + 2 :]]

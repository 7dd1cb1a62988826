"""The API server of a Kubernetes cluster: the few calls that a launcher makes, over plain HTTP.

The `kubernetes` package would bring 30 MB and a class for each of a thousand kinds; five verbs on JSON are all that
is needed here. What it does beyond that (logging in with a cloud's own program) `kubectl proxy` does as well.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from potluck.control.http_client import HttpAnswer, HttpClient
from potluck.core.errors import InputError, PotluckError

REQUEST_TIMEOUT_S = 10.0
INSIDE = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_LINE_BYTES = 4_000_000
Json = dict[str, Any]


class ApiRefused(PotluckError):
    """The API server said no; `status` is its HTTP status."""

    def __init__(self, status: int, why: str) -> None:
        self.status = status
        super().__init__(why)


class ApiUnreachable(PotluckError):
    """The API server does not answer."""


class KubeApi:
    """One cluster. `token` is asked for at every call, since it is renewed in its file."""

    def __init__(
        self, url: str, token: Callable[[], str] = lambda: "", tls: ssl.SSLContext | None = None
    ) -> None:
        self._http = HttpClient(url, token, tls, self._away)

    def _away(self, error: Exception) -> ApiUnreachable:
        return ApiUnreachable(f"the API server at {self._http.url} does not answer ({error})")

    def ask(self, method: str, path: str, body: Json | None = None, **query: object) -> Json:
        with self._call(method, path, query, body) as answer:
            result = self._object(answer.read())
        return result if isinstance(result, dict) else {}

    def text(self, path: str, **query: object) -> str:
        """What a call answers with that is no object: a log."""
        with self._call("GET", path, query) as answer:
            return answer.read().decode("utf-8", "replace")

    def watch(self, path: str, within_s: float, **query: object) -> Iterator[Json]:
        """What changes, as it changes, until the server ends it or is silent for longer than it said."""
        asked = {**query, "watch": "true", "timeoutSeconds": int(within_s)}
        with self._call("GET", path, asked, timeout_s=within_s + REQUEST_TIMEOUT_S) as answer:
            while line := answer.readline(MAX_LINE_BYTES):
                yield self._object(line)

    def _object(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise self._away(error) from error

    @contextmanager
    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: Json | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Iterator[HttpAnswer]:
        words = urlencode({name: value for name, value in query.items() if value != ""})
        with self._http.call(method, f"{path}?{words}" if query else path, timeout_s, body) as answer:
            if answer.status >= 300:
                received = answer.read(MAX_LINE_BYTES)
                try:
                    why = str(json.loads(received)["message"])
                except (ValueError, KeyError, TypeError):
                    why = received[:200].decode("utf-8", "replace")
                line = f"Kubernetes refuses {method} {path}: {' '.join(why.split())[:300]}"
                raise ApiRefused(answer.status, line)
            yield answer


def connect(address: str) -> KubeApi:
    """`auto`: the cluster that this runs in, else kubectl's; or a file like kubectl's; or `kubectl proxy`'s URL."""
    if address.startswith(("http://", "https://")):
        return KubeApi(address)
    if address == "auto" and (INSIDE / "token").is_file():
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{item}", "") for item in ("HOST", "PORT"))
        tls = ssl.create_default_context(cafile=str(INSIDE / "ca.crt"))
        host = f"[{host}]" if ":" in host else host
        return KubeApi(f"https://{host}:{port}", lambda: (INSIDE / "token").read_text("utf-8").strip(), tls)
    path = Path(os.environ.get("KUBECONFIG", "").split(":")[0] or Path.home() / ".kube" / "config")
    if address != "auto":
        path = Path(address)
    return _configured(path)


def _configured(path: Path) -> KubeApi:
    try:
        text = yaml.safe_load(path.read_text("utf-8"))
        chosen = _named(text["contexts"], text["current-context"])["context"]
        cluster = _named(text["clusters"], chosen["cluster"])["cluster"]
        user = _named(text["users"], chosen["user"])["user"]
        url = str(cluster["server"])
    except OSError as error:
        raise InputError("--cluster", f"{path} cannot be read; name a kubeconfig, or a URL") from error
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, StopIteration) as error:
        raise InputError("--cluster", f"{path} is no kubeconfig with a current context") from error
    if "exec" in user or "auth-provider" in user:
        line = "its user logs in by a program; run `kubectl proxy`, and say --cluster http://127.0.0.1:8001"
        raise InputError("--cluster", line)
    tls = None
    if url.startswith("https://"):
        tls = ssl.create_default_context(cadata=_data(cluster, "certificate-authority") or None)
        if certificate := _data(user, "client-certificate"):
            _load(tls, certificate, _data(user, "client-key"))
    token = str(user.get("token", ""))
    return KubeApi(url, lambda: token, tls)


def _named(entries: list[Json], name: str) -> Json:
    return next(entry for entry in entries if entry["name"] == name)


def _data(entry: Json, name: str) -> str:
    """A file that is in the configuration, or that it names."""
    if f"{name}-data" in entry:
        return base64.b64decode(entry[f"{name}-data"]).decode()
    return Path(entry[name]).read_text("utf-8") if name in entry else ""


def _load(tls: ssl.SSLContext, certificate: str, key: str) -> None:
    """Python takes these from files only."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("certificate", "key")]
        for path, text in zip(paths, (certificate, key), strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(text)
        tls.load_cert_chain(str(paths[0]), str(paths[1]))


WATCH_S = 240.0
AGAIN_S = 1.0  # Before asking again a server that was away.


class ObjectCache:
    """Read from any thread."""

    def __init__(self, api: KubeApi, path: str, selector: str = "") -> None:
        self._api, self._path, self._selector = api, path, selector
        self._objects: dict[str, Json] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._synced = threading.Event()
        self.problem = ""
        threading.Thread(target=self._run, name=f"potluck-watch {path}", daemon=True).start()

    def now(self) -> dict[str, Json]:
        with self._lock:
            return dict(self._objects)

    def wait(self, within_s: float) -> bool:
        """Whether all was listed at least once."""
        return self._synced.wait(within_s)

    def put(self, made: Json) -> None:
        """What we have just been told of by another way; the watch tells of it later."""
        with self._lock:
            self._objects.setdefault(made["metadata"]["name"], made)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._follow(self._list())
            except (ApiUnreachable, ApiRefused) as error:
                self.problem = str(error)
                self._stop.wait(AGAIN_S)

    def _list(self) -> str:
        text = self._api.ask("GET", self._path, labelSelector=self._selector)
        with self._lock:
            self._objects = {item["metadata"]["name"]: item for item in text.get("items", ())}
        self.problem = ""
        self._synced.set()
        return str(text.get("metadata", {}).get("resourceVersion", ""))

    def _follow(self, version: str) -> None:
        """From one version on, for as long as the server goes along."""
        while not self._stop.is_set():
            began_s = time.monotonic()
            query = {
                "labelSelector": self._selector,
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
            }
            for event in self._api.watch(self._path, WATCH_S, **query):
                if event.get("type") == "ERROR":  # too old: list anew
                    return
                result = event["object"]
                version = str(result["metadata"].get("resourceVersion", version))
                self._apply(str(event["type"]), result)
                if self._stop.is_set():
                    return
            if time.monotonic() - began_s < AGAIN_S:
                self._stop.wait(AGAIN_S)

    def _apply(self, kind: str, result: Json) -> None:
        if kind == "BOOKMARK":
            return
        with self._lock:
            if kind == "DELETED":
                self._objects.pop(result["metadata"]["name"], None)
            else:
                self._objects[result["metadata"]["name"]] = result

    def close(self) -> None:
        self._stop.set()

"""Objects of one kind as they are now: listed once, then kept by a watch in a thread of its own.

So nobody asks the API server twice a second for all pods. A watch that ends, or that is too old for the server,
begins again with a list.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from potluck.control.launchers.kubernetes.kube_api import ApiRefused, ApiUnreachable, KubeApi

WATCH_S = 240.0
AGAIN_S = 1.0
"""Before asking again a server that was away."""
Json = dict[str, Any]


class ObjectCache:
    """Read from any thread."""

    def __init__(self, api: KubeApi, path: str, selector: str = "") -> None:
        self._api, self._path, self._selector = api, path, selector
        self._objects: dict[str, Json] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._synced = threading.Event()
        self.problem = ""
        """Why it may be out of date."""
        threading.Thread(target=self._run, name=f"potluck-watch {path}", daemon=True).start()

    def now(self) -> dict[str, Json]:
        """By name."""
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
        said = self._api.ask("GET", self._path, labelSelector=self._selector)
        with self._lock:
            self._objects = {each["metadata"]["name"]: each for each in said.get("items", ())}
        self.problem = ""
        self._synced.set()
        return str(said.get("metadata", {}).get("resourceVersion", ""))

    def _follow(self, version: str) -> None:
        """From one version on, for as long as the server goes along."""
        while not self._stop.is_set():
            began_s = time.monotonic()
            events = self._api.watch(
                self._path,
                WATCH_S,
                labelSelector=self._selector,
                resourceVersion=version,
                allowWatchBookmarks="true",
            )
            for event in events:
                if event.get("type") == "ERROR":  # too old: list anew
                    return
                found = event["object"]
                version = str(found["metadata"].get("resourceVersion", version))
                self._apply(str(event["type"]), found)
                if self._stop.is_set():
                    return
            if time.monotonic() - began_s < AGAIN_S:
                self._stop.wait(AGAIN_S)

    def _apply(self, kind: str, found: Json) -> None:
        if kind == "BOOKMARK":
            return
        with self._lock:
            if kind == "DELETED":
                self._objects.pop(found["metadata"]["name"], None)
            else:
                self._objects[found["metadata"]["name"]] = found

    def close(self) -> None:
        self._stop.set()

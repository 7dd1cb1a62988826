"""Probe a server of OpenAI's API that Potluck did not start: whether it is usable, what it lists, else the reason.

The health path is the configured one, else `/health`, else `/v1/models`: vLLM, SGLang, llama.cpp and TGI have the
first, Ollama and hosted APIs only the second. The path that answered is remembered for each server. Models are listed
again every MODELS_REFRESH_S, so that a server that was restarted with another model is noticed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from potluck.core.errors import PotluckError
from potluck.gateway.http.connection_pool import ConnectionPool, fetch
from potluck.gateway.registry.engine_list import MOST_ENGINES, EngineEntry

HEALTH_PATH, MODELS_PATH = "/health", "/v1/models"
PROBE_TIMEOUT_S = 5.0
PROBE_MAX_BYTES = 4 << 20
MODELS_REFRESH_S = 10.0
SHARED_PROBE_MAX_AGE_S = 0.25
LISTED_MAX_AGE_S = 5.0
"""A healthy server that has only /v1/models, as hosted APIs do, is asked no more often."""
LISTED_MODELS_MAX = 4096
MODEL_NAME_MAX_CHARS = 500
SHOWN_NAMES_MAX = 5
CONTEXT_MAX_TOKENS = 1_000_000_000
CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")
"""How servers call the longest prompt and answer together: vLLM and SGLang the first. llama.cpp's `n_ctx_train` is
the model's training context, not the server's limit."""
ABSENT = frozenset({404, 405, 501})
REFUSED_KEY = frozenset({401, 403})
TOO_MANY_REQUESTS = 429
COSTLY_HEALTH_FIELD = "healthy_endpoints"
"""LiteLLM's `/health` sends a request to every model behind it, so it must not be polled."""


class ServerUnusable(PotluckError):
    """One line: which server, what is wrong, what to do. `definite`: no later probe of the same server helps."""

    def __init__(self, message: str, *, definite: bool = True) -> None:
        super().__init__(message)
        self.definite = definite


@dataclass(frozen=True, slots=True)
class ListedModel:
    id: str
    max_model_len: int = 0
    """Longest prompt and answer together, in tokens; 0: the server does not tell."""
    root: str = ""
    """Where a vLLM server read the model from."""
    owned_by: str = ""


Listing = tuple[ListedModel, ...] | None
"""Models in the server's order; None: it has no /v1/models."""


class ServerProbe:
    """One server. Entries that name several of its models share its probes."""

    def __init__(self, pool: ConnectionPool, entry: EngineEntry) -> None:
        self._pool, self._entry = pool, entry
        self._health = entry.health or HEALTH_PATH
        self._answered = False  # Whether `_health` has worked before.
        self._models: Listing = None
        self._listed_s = self._probed_s = -inf
        self._task: asyncio.Task[Listing] | None = None

    async def look(self, *, fresh: bool = True) -> Listing:
        """The models listed now; raises ServerUnusable. Not `fresh`: a server without a health path is spared."""
        task = self._task
        spared = not fresh and self._health == MODELS_PATH
        max_age_s = LISTED_MAX_AGE_S if spared else SHARED_PROBE_MAX_AGE_S
        if task is None or (task.done() and time.monotonic() - self._probed_s >= max_age_s):
            task = self._task = asyncio.get_running_loop().create_task(self._timed())
        return await asyncio.shield(task)

    async def _timed(self) -> Listing:
        try:
            return await self._probe()
        finally:
            self._probed_s = time.monotonic()

    async def _probe(self) -> Listing:
        if self._health != MODELS_PATH:
            await self._ask_health()
        stale = time.monotonic() - self._listed_s >= MODELS_REFRESH_S
        if stale or self._health == MODELS_PATH:
            await self._list_models()
        return self._models

    async def _ask_health(self) -> None:
        try:
            status, body = await self._get(self._health)
        except ServerUnusable as error:
            if self._answered or self._entry.health or error.definite:
                raise
            self._health = (
                MODELS_PATH  # /health hangs or breaks off: LiteLLM's asks every model behind it first
            )
            return
        healthy = 200 <= status < 300
        if self._entry.health:
            if not healthy:
                raise self._bad_status(self._health, status, body)
        elif status >= 500 and status not in ABSENT:
            raise self._bad_status(self._health, status, body)
        elif not healthy or _is_html(body) or _is_costly(body):
            self._health = MODELS_PATH
        self._answered = True

    async def _list_models(self) -> None:
        only = self._health == MODELS_PATH
        try:
            status, body = await self._get(MODELS_PATH)
            if status in ABSENT and not only:
                self._models, self._listed_s = None, time.monotonic()
                return
            if status in ABSENT:
                if not self._entry.health:
                    self._health, self._answered = (
                        HEALTH_PATH,
                        False,
                    )  # another server may come up at this address
                raise ServerUnusable(
                    f"{self._url} has neither {HEALTH_PATH} nor {MODELS_PATH}; correct its url (a path prefix may "
                    "be missing), or set `health:` in the servers file",
                )
            if status == TOO_MANY_REQUESTS and self._models is not None:
                return
            if not 200 <= status < 300:
                raise self._bad_status(MODELS_PATH, status, body)
            self._models, self._listed_s = self._listing(body), time.monotonic()
        except ServerUnusable as error:
            if only or error.definite or self._models is None:
                raise

    async def _get(self, path: str) -> tuple[int, bytes]:
        entry = self._entry
        headers = [(b"accept", b"application/json")]
        if entry.key:
            headers.append((b"authorization", b"Bearer " + entry.key.encode()))
        try:
            return await fetch(
                self._pool,
                entry.address,
                b"GET",
                (entry.path_prefix + path).encode(),
                headers=headers,
                within_s=PROBE_TIMEOUT_S,
                most_bytes=PROBE_MAX_BYTES,
            )
        except (PotluckError, OSError, ValueError) as error:
            raise self._no_answer(path, " ".join(str(error).split())[:200]) from error

    def _no_answer(self, path: str, why: str) -> ServerUnusable:
        why = why.removeprefix(f"{self._entry.address.host}:{self._entry.address.port} ")
        if "certificate" in why:
            fix = "name the authority of its certificate with --engine-ca, or correct its url"
            return ServerUnusable(f"{self._url}: its certificate is not trusted ({why}); {fix}")
        if "cannot be reached" in why:
            return ServerUnusable(f"{self._url} {why}; start it, or correct its url")
        return ServerUnusable(
            f"{self._url}{path} does not answer ({why}); see the server's log", definite=False
        )

    def _bad_status(self, path: str, status: int, body: bytes) -> ServerUnusable:
        where = f"{self._url}{path} was answered with {status}"
        if status in REFUSED_KEY:
            fix = "does not accept the key" if self._entry.key else "asks for a key"
            return ServerUnusable(
                f"{where}: the server {fix}; set `key_file:` or `key_env:` in the servers file"
            )
        if status >= 500 or status == TOO_MANY_REQUESTS:
            text = message_in(body)
            why = f": {text}" if text else ""
            return ServerUnusable(f"{where}{why}; see the server's log", definite=False)
        return ServerUnusable(f"{where}; correct its url, or set `health:` in the servers file")

    def _listing(self, body: bytes) -> tuple[ListedModel, ...]:
        if _is_html(body):
            raise ServerUnusable(
                f"{self._url}{MODELS_PATH} is a web page, not a server of OpenAI's API; correct its url"
            )
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ServerUnusable(f"{self._url}{MODELS_PATH} is not JSON; correct its url") from error
        data = document.get("data") if isinstance(document, dict) else None
        if not isinstance(data, list):
            raise ServerUnusable(f"{self._url}{MODELS_PATH} has no list `data` of models; correct its url")
        models = tuple(model for item in data[:LISTED_MODELS_MAX] if (model := _listed(item)) is not None)
        if not models:
            raise ServerUnusable(f"{self._url}{MODELS_PATH} lists no models; load one in the server")
        return tuple({model.id: model for model in models}.values())

    @property
    def _url(self) -> str:
        return self._entry.base_url


def _listed(item: object) -> ListedModel | None:
    if not isinstance(item, dict):
        return None
    name = item.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= MODEL_NAME_MAX_CHARS or not name.isprintable():
        return None
    lengths = (item.get(field) for field in CONTEXT_FIELDS)
    longest = next((n for n in lengths if type(n) is int and 0 < n <= CONTEXT_MAX_TOKENS), 0)
    return ListedModel(name, longest, _short_text(item.get("root")), _short_text(item.get("owned_by")))


def _short_text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= 4096 else ""


def _is_html(body: bytes) -> bool:
    return body[:64].lstrip().startswith(b"<")


def _is_costly(body: bytes) -> bool:
    return COSTLY_HEALTH_FIELD.encode() in body[:4096]


def message_in(body: bytes) -> str:
    """The message of an error body, in one short line; empty where there is none."""
    try:
        document: Any = json.loads(body[:PROBE_MAX_BYTES])
    except (ValueError, RecursionError):
        return ""
    for name in ("error", "message", "detail", "status"):
        if isinstance(document, dict) and name in document:
            document = document[name]
    if isinstance(document, dict):
        document = document.get("message")
    text = " ".join(document.split())[:120] if isinstance(document, str) else ""
    return text if text.isprintable() else ""


class ServerProbes:
    """The probes of all servers, by what is asked of which with which key."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._probes: dict[tuple[str, str, str], ServerProbe] = {}

    def of(self, entry: EngineEntry) -> ServerProbe:
        key = (entry.base_url, entry.key, entry.health)
        if key not in self._probes:
            if len(self._probes) >= MOST_ENGINES:
                self._probes.clear()  # of servers that are listed no more, mostly
            self._probes[key] = ServerProbe(self._pool, entry)
        return self._probes[key]


def served_name(entry: EngineEntry, models: Listing) -> str:
    """How the server calls the entry's model; raises ServerUnusable with what it lists where that is not clear."""
    named = entry.served_model or entry.model
    if models is None:
        if named:
            return named
        raise ServerUnusable(
            f"{entry.base_url} has no {MODELS_PATH}; set `model:` for it in the servers file"
        )
    names = [model.id for model in models]
    if named in names:
        return named
    if not entry.served_model and len(names) == 1:
        return names[0]  # `model:` is what clients call it
    if not named:
        raise ServerUnusable(f"{entry.base_url} lists {listed_text(names)}; set `model:` in the servers file")
    if not entry.served_model and f"{named}:latest" in names:
        return f"{named}:latest"  # Ollama's name for a model without a tag
    raise ServerUnusable(f"{entry.base_url} does not list model {named!r}; it lists {listed_text(names)}")


def with_model(entry: EngineEntry, model: str) -> EngineEntry:
    """An entry that names its model: this one where it names none."""
    return entry if entry.model or entry.served_model else replace(entry, model=model)


def listed_text(names: Iterable[str]) -> str:
    shown = [name[:80] for name in names]
    more = len(shown) - SHOWN_NAMES_MAX
    return ", ".join(shown[:SHOWN_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")

"""Engines that run already: a list in a file, or one that a controller sends to the operators' port.

    engines:
      - {url: "http://10.0.0.5:8100", template: combo-a, index: 0, region: east}
      - {url: "http://10.0.0.6:8100", template: combo-a, index: 1, region: east, key_file: east.key}
      - {url: "http://10.0.0.9:8000", kind: openai, model: llama, cache_salt: true}
      - {url: "https://host/prefix/v1", model: qwen, served_model: Qwen/Qwen3-8B, key_env: HOST_KEY}

An entry may say for which replica of which template it was started. One that does not takes any place of its model
that nobody else fills. `kind: openai` is any server of OpenAI's API; it gets whole requests, may have a path in its
url, and may be listed several times, once for each of its models.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from potluck.core.codec import decode
from potluck.core.errors import FormatError, InputError, PotluckError
from potluck.core.values.plan import ReplicaSpec
from potluck.gateway.values import Address, EngineKind

MOST_ENGINES = 4096
MOST_BYTES = 64 << 20
PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)+")


@dataclass(frozen=True, slots=True)
class EngineEntry:
    url: str
    kind: EngineKind = "segments"
    model: str = ""
    template: str = ""
    index: int | None = None
    region: str = ""
    replica: str = ""
    served_model: str = ""
    token_ids: bool = False
    """Whether it can be asked for token ids with its text (vLLM's `return_token_ids`)."""
    cache_salt: bool = False
    """Whether it takes vLLM's `cache_salt`; where nothing is said, those with `token_ids` do."""
    key: str = field(default="", repr=False)
    health: str = ""
    """Path that is asked whether the server is healthy; empty: `/health`, else `/v1/models` (`server_probe`)."""
    max_model_len: int = 0
    """Longest prompt and answer together, in tokens; 0: as the server tells, if it does."""

    def __post_init__(self) -> None:
        if self.index is not None and self.index < 0:
            raise InputError("index", "must be a whole number from 0")
        if self.max_model_len < 0:
            raise InputError("max_model_len", "must be a number of tokens from 0")
        if self.health and (not PATH.fullmatch(self.health) or self.kind != "openai"):
            raise InputError("health", "must be a path such as /health, of an entry of kind openai")

    @property
    def address(self) -> Address:
        return address_of(self.url, "url")

    @property
    def path_prefix(self) -> str:
        """What stands before `/v1` in paths of this server."""
        return path_prefix_of(self.url)

    @property
    def base_url(self) -> str:
        return self.address.url + self.path_prefix

    @property
    def name(self) -> str:
        """Unique in a list: a server of several models is listed once for each."""
        model = self.served_model or self.model
        return f"{self.url}#{model}" if self.kind == "openai" and model else self.url

    def suits(self, replica_spec: ReplicaSpec) -> bool:
        if self.replica:
            return self.replica == replica_spec.id
        return (
            self.model in ("", replica_spec.model)
            and self.template in ("", replica_spec.template)
            and self.index in (None, replica_spec.index)
            and self.region in ("", replica_spec.region)
        )

    @property
    def precise(self) -> int:
        text = (self.model, self.template, self.region, "" if self.index is None else "index")
        return 8 * bool(self.replica) + sum(map(bool, text))


def read_engines(text: str, where: str, folder: Path | None = None) -> tuple[EngineEntry, ...]:
    """`folder` is where the files lie that it names; None: what is sent over a network may name none."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        line = " ".join(str(error).split())[:160]
        raise FormatError(where, f"is not YAML ({line})") from error
    return engines_in(data, where, folder)


def engines_in(data: object, where: str, folder: Path | None = None) -> tuple[EngineEntry, ...]:
    listed = data.get("engines") if isinstance(data, dict) else data
    if listed is None and isinstance(data, dict) and set(data) <= {"engines"}:
        return ()
    if not isinstance(listed, list) or (isinstance(data, dict) and set(data) != {"engines"}):
        raise FormatError(where, "must be a list under `engines:`")
    if len(listed) > MOST_ENGINES:
        raise InputError(where, f"at most {MOST_ENGINES} engines, got {len(listed)}")
    urls = Counter(str(item.get("url", "")).rstrip("/") for item in listed if isinstance(item, dict))
    entries = [_entry(item, f"{where}: engines[{place}]", folder, urls) for place, item in enumerate(listed)]
    for name, count in Counter(entry.name for entry in entries).items():
        if count > 1:
            raise InputError(where, f"{name} is there twice")
    return tuple(entries)


def _entry(data: object, where: str, folder: Path | None, urls: Counter[str]) -> EngineEntry:
    if not isinstance(data, dict):
        raise FormatError(where, "must be a mapping with a url")
    values = {str(name): value for name, value in data.items()}
    if "key" in values:
        raise InputError(f"{where}.key", "unknown; name a file that holds it as key_file")
    values["key"] = _key(values.pop("key_file", None), values.pop("key_env", None), where, folder)
    values["url"] = str(values.get("url", "")).rstrip("/")
    values.setdefault("cache_salt", values.get("token_ids", False))
    address_of(values["url"], f"{where}.url")
    has_path = bool(urlsplit(values["url"]).path)
    several_models = urls[values["url"]] > 1 and "model" in values
    if has_path or several_models or "health" in values:
        values.setdefault("kind", "openai")
    if has_path and values["kind"] != "openai":
        raise InputError(f"{where}.url", f"must end behind the port, is {values['url']!r}")
    return decode(EngineEntry, values, where)


def _key(file: object, variable: object, where: str, folder: Path | None) -> str:
    if variable is not None:
        if folder is None or file is not None or not isinstance(variable, str):
            raise InputError(f"{where}.key_env", "must name an environment variable, without a key_file")
        key = os.environ.get(variable, "").strip()
        if not key:
            raise InputError(f"{where}.key_env", f"${variable} is not set; export the server's key there")
        return _checked_key(key, f"{where}.key_env")
    if file is None:
        return ""
    if folder is None or not isinstance(file, str):
        raise InputError(f"{where}.key_file", "must be the name of a file, and only a file may name one")
    try:
        key = (folder / file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}.key_file", f"{file} cannot be read") from error
    return _checked_key(key, f"{where}.key_file")


def _checked_key(key: str, where: str) -> str:
    if not key.isascii() or not key.isprintable():
        raise InputError(where, "must hold a key of printable ASCII in one line")
    return key


@lru_cache(maxsize=MOST_ENGINES)
def address_of(url: str, where: str) -> Address:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(where, f"{url!r} is no address ({error})") from error
    if parts.username or parts.password:
        raise InputError(where, "must hold no user or password; set key_file or key_env")
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(where, f"must be like http://10.0.0.5:8100, is {url!r}")
    if parts.query or parts.fragment or (parts.path and not PATH.fullmatch(parts.path)):
        raise InputError(where, f"must end behind the port or a path, is {url!r}")
    tls = parts.scheme == "https"
    return Address(host, port or (443 if tls else 80), tls)


@lru_cache(maxsize=MOST_ENGINES)
def path_prefix_of(url: str) -> str:
    """The path of a base url without the `/v1` that clients of OpenAI's API write at its end."""
    return urlsplit(url).path.rstrip("/").removesuffix("/v1").rstrip("/")


def matched(
    wanted: Iterable[ReplicaSpec], free: Sequence[EngineEntry]
) -> list[tuple[ReplicaSpec, EngineEntry]]:
    """Who becomes which engine: those that say most about where they belong choose first."""
    left = sorted(free, key=lambda entry: -entry.precise)
    members = {replica_spec.id: replica_spec for replica_spec in wanted}
    result = []
    for entry in left:
        replica_spec = next(
            (replica_spec for replica_spec in members.values() if entry.suits(replica_spec)), None
        )
        if replica_spec is not None:
            result.append((replica_spec, entry))
            del members[replica_spec.id]
    return result


class EngineListFile:
    """A list in a file, read again when it has changed; a broken one leaves the entries read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._stamped()
        self.entries = self._read()
        self.problem = ""

    def changed(self) -> bool:
        stamp = self._stamped()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            entries = self._read()
        except PotluckError as error:
            self.problem = str(error)
            return False
        self.problem = ""
        before, self.entries = self.entries, entries
        return entries != before

    def _stamped(self) -> tuple[int, int, int] | None:
        try:
            result = self._path.stat()
        except OSError:
            return None
        return result.st_mtime_ns, result.st_size, result.st_ino

    def _read(self) -> tuple[EngineEntry, ...]:
        try:
            if self._path.stat().st_size > MOST_BYTES:
                raise InputError(str(self._path), f"is larger than {MOST_BYTES >> 20} MiB")
            text = self._path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(str(self._path), "cannot be read") from error
        return read_engines(text, self._path.name, self._path.parent)

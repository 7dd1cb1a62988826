"""The engines somebody started for us: a list in a file, or told on the admin side by whoever starts them.

    engines:
      - {url: "http://10.0.0.5:8100", template: combo-a, index: 0, region: east}
      - {url: "http://10.0.0.6:8100", template: combo-a, index: 1, region: east, key_file: east.key}
      - {url: "http://10.0.0.9:8000", kind: openai, model: llama, cache_salt: true}

An entry may say for which replica of which template it was started. One that does not takes any place of its model
that nobody else fills. `kind: openai` is any server of plain OpenAI; it gets whole requests.
"""

from __future__ import annotations

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

    def __post_init__(self) -> None:
        if self.index is not None and self.index < 0:
            raise InputError("index", "must be a whole number from 0")

    @property
    def address(self) -> Address:
        return address_of(self.url, "url")

    def suits(self, member: ReplicaSpec) -> bool:
        if self.replica:
            return self.replica == member.id
        return (
            self.model in ("", member.model)
            and self.template in ("", member.template)
            and self.index in (None, member.index)
            and self.region in ("", member.region)
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
    entries = [_entry(item, f"{where}: engines[{place}]", folder) for place, item in enumerate(listed)]
    urls = [entry.url for entry in entries]
    for url in urls:
        if urls.count(url) > 1:
            raise InputError(where, f"{url} is there twice")
    return tuple(entries)


def _entry(data: object, where: str, folder: Path | None) -> EngineEntry:
    if not isinstance(data, dict):
        raise FormatError(where, "must be a mapping with a url")
    values = {str(name): value for name, value in data.items()}
    if "key" in values:
        raise InputError(f"{where}.key", "unknown; name a file that holds it as key_file")
    values["key"] = _key(values.pop("key_file", None), where, folder)
    values["url"] = str(values.get("url", "")).rstrip("/")
    values.setdefault("cache_salt", values.get("token_ids", False))
    entry = decode(EngineEntry, values, where)
    address_of(entry.url, f"{where}.url")
    return entry


def _key(file: object, where: str, folder: Path | None) -> str:
    if file is None:
        return ""
    if folder is None or not isinstance(file, str):
        raise InputError(f"{where}.key_file", "must be the name of a file, and only a file may name one")
    try:
        return (folder / file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}.key_file", f"{file} cannot be read") from error


@lru_cache(maxsize=MOST_ENGINES)
def address_of(url: str, where: str) -> Address:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(where, f"{url!r} is no address ({error})") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(where, f"must be like http://10.0.0.5:8100, is {url!r}")
    if parts.path not in ("", "/") or parts.query or parts.username or parts.fragment:
        raise InputError(where, f"must end behind the port, is {url!r}")
    tls = parts.scheme == "https"
    return Address(host, port or (443 if tls else 80), tls)


def matched(
    wanted: Iterable[ReplicaSpec], free: Sequence[EngineEntry]
) -> list[tuple[ReplicaSpec, EngineEntry]]:
    """Who becomes which engine: those that say most about where they belong choose first."""
    left = sorted(free, key=lambda entry: -entry.precise)
    members = {member.id: member for member in wanted}
    result = []
    for entry in left:
        member = next((member for member in members.values() if entry.suits(member)), None)
        if member is not None:
            result.append((member, entry))
            del members[member.id]
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

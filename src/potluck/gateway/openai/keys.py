"""Who may ask: a file of keys, one JSON object per line, read again when it changes.

    {"name": "ann-laptop", "sha256": "9f86d0...", "tenant": "ann", "requests_per_min": 600, "tokens_per_min": 200000,
     "concurrent": 32, "classes": ["standard", "batch"], "expires": "2031-01-31"}

Only `name` and `sha256` must be there (each object on one line; lines that begin with # are skipped). The file holds
no key, only what a key's SHA-256 is: keys are long and random, so nothing can be learnt from it. To rotate a key, add
a line with the same name and the new hash, hand the new key out, and remove the old line: both count as one for
limits. A file that is broken changes nothing: the keys read last stay, and `problem` says why.

A file with nothing but {"open": true} asks for no key until it has one. One that has keys and {"open": "beside keys"}
asks for none either: whoever shows a key is known by it, all others are let in as well. Both only where others cannot
reach us.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from potluck.api.http_errors import HttpRefusal
from potluck.core.codec import decode
from potluck.core.errors import FormatError, InputError
from potluck.core.values.types import DEFAULT_TENANT
from potluck.gateway.openai.quota import KeyQuota, Quota
from potluck.gateway.openai.shared_quota import SharedUse

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How soon a change of the file is seen."""
MOST_BYTES = 32_000_000
LONGEST_KEY = 512
MOST_RECENT = 4096
BEARER = b"bearer "
OPEN = '{"open": true}'
OPEN_BESIDE = '{"open": "beside keys"}'


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as the file has it."""

    name: str
    sha256: str
    tenant: str = DEFAULT_TENANT
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    concurrent: int | None = None
    classes: tuple[str, ...] | None = None
    """Of requests; None: all."""
    expires: str | None = None
    """A day or a time, such as 2031-01-31 or 2031-01-31T12:00:00+01:00; without a zone it is UTC."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who asks."""

    name: str
    tenant: str
    allowance: KeyQuota
    classes: frozenset[str] | None = None
    expires_s: float | None = None
    """By the calendar."""
    digest: bytes = b""


def nobody(now_s: float) -> ApiKey:
    """Whoever asks where no key is asked for."""
    return ApiKey("", DEFAULT_TENANT, KeyQuota(Quota(), now_s))


class KeyRing:
    """The keys of a file. `clock` is the calendar's, for when keys expire; times given are monotonic."""

    def __init__(
        self,
        path: str | Path,
        now_s: float,
        clock: Callable[[], float],
        shared_use: SharedUse | None = None,
        *,
        may_open: bool = False,
        gateways: int = 1,
    ) -> None:
        """With a `slate`, limits hold across the workers that share it. `may_open`: only this machine reaches us.
        `gateways` on other machines share the clients: each grants its part of the limits."""
        self._gateways = gateways
        self._path, self._clock, self._slate, self._may_open = Path(path), clock, shared_use, may_open
        self._allowances: dict[str, KeyQuota] = {}
        self.open = False
        """Whether nobody must show a key."""
        self.problem = ""
        """Why the file as it is now is not used; empty when it is."""
        self._seen = self._stamp()
        self._next_look_s = now_s + LOOK_S
        self._by_digest = self._read(now_s)
        self._recent: dict[bytes | None, ApiKey] = {}
        """What was shown since the last look, so that it is hashed once a second."""

    def __len__(self) -> int:
        return len(self._by_digest)

    def opened(self, now_s: float) -> bool:
        """Whether nobody must show a key, now."""
        if now_s >= self._next_look_s:
            self.look(now_s)
        return self.open

    def shown(self, authorization: bytes | None, now_s: float) -> ApiKey | None:
        """Whose key a client shows where none is asked for; None: it is none that holds."""
        if authorization is None or not self._by_digest:
            return None
        try:
            return self.who(authorization, now_s)
        except HttpRefusal:
            return None

    def who(self, authorization: bytes | None, now_s: float) -> ApiKey:
        """Whose key a client shows; raises for none, an unknown or an old one."""
        if now_s >= self._next_look_s:
            self.look(now_s)
        found = self._recent.get(authorization) or self._find(authorization)
        if found.expires_s is not None and self._clock() >= found.expires_s:
            raise HttpRefusal(401, "this key has expired", "expired_api_key", "authorization")
        return found

    def _find(self, authorization: bytes | None) -> ApiKey:
        if authorization is None or authorization[:7].lower() != BEARER:
            raise HttpRefusal(
                401, "no key: send it as `Authorization: Bearer KEY`", "invalid_api_key", "authorization"
            )
        shown = authorization[7:].strip()
        digest = hashlib.sha256(shown[: LONGEST_KEY + 1]).digest()
        found = self._by_digest.get(digest)
        # The table finds by hash, which tells nothing of the key; whether it is the one is said in constant time.
        known = hmac.compare_digest(digest, found.digest if found is not None else bytes(32))
        if found is None or not known:
            raise HttpRefusal(401, "this key is not known", "invalid_api_key", "authorization")
        if len(self._recent) < MOST_RECENT:
            self._recent[authorization] = found
        return found

    def look(self, now_s: float) -> None:
        """Read the file again if it is another than it was."""
        self._next_look_s = now_s + LOOK_S
        self._recent = {}
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._by_digest = self._read(now_s)
        except InputError as error:
            self.problem = str(error)
            log.warning("the keys read last stay: %s", error)
            return
        self.problem = ""
        log.info("read %d keys", len(self._by_digest))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self, now_s: float) -> dict[bytes, ApiKey]:
        lines, opened = read_lines(self._path)
        if opened and not self._may_open:
            raise InputError(
                str(self._path),
                "lets clients in without a key, and others can reach this gateway; `potluck keys add` or `close`",
            )
        found: dict[bytes, ApiKey] = {}
        kept: dict[str, KeyRecord] = {}
        for line in lines:
            first = kept.setdefault(line.name, line)
            if replace(line, sha256=first.sha256, expires=first.expires) != first:
                where = f"{self._path}: {line.name}"
                raise InputError(
                    where, "is there twice and differs in more than sha256 and expires; make them agree"
                )
        for line in lines:  # Only now, since a file that is broken must change nothing.
            quota = Quota(line.requests_per_min, line.tokens_per_min, line.concurrent).shared(self._gateways)
            allowance = self._allowances.get(line.name)
            if allowance is None:
                row = None if self._slate is None else self._slate.row(line.name)
                allowance = self._allowances[line.name] = KeyQuota(quota, now_s, row)
            allowance.change(quota, now_s)
            digest = bytes.fromhex(line.sha256)
            classes = None if line.classes is None else frozenset(line.classes)
            found[digest] = ApiKey(line.name, line.tenant, allowance, classes, _expiry_s(line), digest)
        for name in self._allowances.keys() - kept.keys():
            del self._allowances[name]
        self.open = opened
        return found


def read_lines(path: Path) -> tuple[list[KeyRecord], bool]:
    """The file's keys, each checked, and whether none is asked for; raises for the first line that is wrong, never
    with what it holds."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(str(path), f"is larger than {MOST_BYTES} bytes")
        text = path.read_text("utf-8")
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise FormatError(str(path), "is not text") from error
    texts = [
        (line, f"{path}:{number}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if [line.strip() for line, _ in texts] == [OPEN]:
        return [], True
    lines = [_line(line, where) for line, where in texts if line.strip() != OPEN_BESIDE]
    if not lines:
        raise InputError(str(path), "has no key; `potluck keys new NAME` makes one")
    return lines, len(lines) < len(texts)


def _line(text: str, where: str) -> KeyRecord:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError(where, "is not a JSON object on one line") from None
    if not isinstance(found, dict) or "type" in found:
        raise FormatError(where, "is not a key: it must have name and sha256")
    try:
        line = decode(KeyRecord, found)
        Quota(line.requests_per_min, line.tokens_per_min, line.concurrent)
        _expiry_s(line)
    except InputError as error:
        raise InputError(f"{where}: {error.field}", error.problem) from None
    if not 1 <= len(line.name) <= 128 or not line.name.isprintable():
        raise InputError(f"{where}: name", "must have 1 to 128 characters that can be shown")
    if not 1 <= len(line.tenant) <= 128 or not line.tenant.isprintable():
        raise InputError(f"{where}: tenant", "must have 1 to 128 characters that can be shown")
    try:
        long_enough = len(bytes.fromhex(line.sha256)) == 32
    except ValueError:
        long_enough = False
    if not long_enough:
        raise InputError(f"{where}: sha256", "must be 64 hexadecimal digits: the SHA-256 of the key")
    return line


def _expiry_s(line: KeyRecord) -> float | None:
    return None if line.expires is None else read_expiry(line.expires)


def read_expiry(text: str) -> float:
    """A day or a time; without a zone it is UTC."""
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InputError("expires", "must be a day or a time, such as 2031-01-31") from None


def new_key(name: str, tenant: str | None = None, **more: object) -> tuple[str, str]:
    """A key, to be shown once, and its line for the file; `more` are its limits."""
    key = "pk-" + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    line = json.dumps({"name": name, "sha256": digest, "tenant": tenant or name, **more})
    _line(line, "key")
    return key, line

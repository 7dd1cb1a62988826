"""Who may ask: a file of keys, one JSON object per line, read again when it changes.

    {"name": "ann-laptop", "sha256": "9f86d0...", "tenant": "ann", "requests_per_min": 600, "tokens_per_min": 200000,
     "concurrent": 32, "classes": ["standard", "batch"], "expires": "2031-01-31"}

Only `name` and `sha256` must be there; each object is on one line, and lines that begin with # are skipped. To rotate
a key, add a line with the same name and the new hash, and remove the old one later: both count as one for limits. A
file that is broken changes nothing: the keys read last stay, and `problem` says why.

A file with nothing but {"open": true} asks for no key. One that has keys and {"open": "beside keys"} lets others in
as well. Both only where others cannot reach us.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import mmap
import os
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil, inf
from pathlib import Path
from typing import Literal, NamedTuple

from potluck.api.http import HttpRefusal
from potluck.core.codec import decode
from potluck.core.errors import CapacityError, FormatError, InputError
from potluck.core.values.types import DEFAULT_TENANT

ROWS = 16_384
NAME_BYTES = 16
NUMBERS = 5
"""Of one process and key: requests and tokens so far, open requests, tokens reserved for them, time of last use."""


class QuotaUse(NamedTuple):
    requests: float
    tokens: float
    open: float
    last_s: float = 0.0
    """When it was used last, by the monotonic clock that all processes of a machine share."""


class SharedKeyUse:
    __slots__ = ("_base", "_numbers", "_worker", "_workers")

    def __init__(self, numbers: memoryview[float], base: int, worker: int, workers: int) -> None:
        self._numbers, self._base, self._worker, self._workers = numbers, base, worker, workers
        # What an earlier process of this place had under way is gone, and so is what that had reserved.
        place = self._mine
        self._numbers[place + 1] -= self._numbers[place + 3]
        self._numbers[place + 2] = self._numbers[place + 3] = 0.0

    @property
    def _mine(self) -> int:
        return self._base + self._worker * NUMBERS

    def add(
        self, requests: float, tokens: float, open_now: int, reserved_now: float = 0.0, now_s: float = 0.0
    ) -> None:
        """`now_s` where requests or tokens are taken, 0 where they are given back."""
        place = self._mine
        self._numbers[place] += requests
        self._numbers[place + 1] += tokens
        self._numbers[place + 2] = open_now
        self._numbers[place + 3] = reserved_now
        if now_s:
            self._numbers[place + 4] = now_s

    def others(self) -> QuotaUse:
        requests = tokens = under_way = last_s = 0.0
        for worker in range(self._workers):
            if worker != self._worker:
                place = self._base + worker * NUMBERS
                requests += self._numbers[place]
                tokens += self._numbers[place + 1]
                under_way += self._numbers[place + 2]
                last_s = max(last_s, self._numbers[place + 4])
        return QuotaUse(requests, tokens, under_way, last_s)


class SharedUse:
    """The file. Whoever starts the workers makes it and removes it; every worker opens it with its own number."""

    def __init__(self, path: str | Path, worker: int, workers: int) -> None:
        if not 0 <= worker < workers:
            raise InputError("worker", f"must be 0 to {workers - 1}, is {worker}")
        self._worker, self._workers = worker, workers
        self._names_bytes = ROWS * NAME_BYTES
        size = self._names_bytes + ROWS * workers * NUMBERS * 8
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        self._numbers = memoryview(self._map)[self._names_bytes : size].cast("d")

    def row(self, name: str) -> SharedKeyUse:
        wanted = hashlib.sha256(name.encode()).digest()[:NAME_BYTES]
        first = int.from_bytes(wanted[:8], "big") % ROWS
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            for step in range(ROWS):
                place = (first + step) % ROWS
                at = place * NAME_BYTES
                there = self._map[at : at + NAME_BYTES]
                if there == bytes(NAME_BYTES):
                    self._map[at : at + NAME_BYTES] = wanted
                    there = wanted
                if there == wanted:
                    return SharedKeyUse(
                        self._numbers, place * self._workers * NUMBERS, self._worker, self._workers
                    )
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        raise CapacityError(f"limits are kept for at most {ROWS} keys")

    def close(self) -> None:
        self._numbers.release()
        self._map.close()
        os.close(self._file)


log = logging.getLogger(__name__)

LOOK_S = 1.0
MOST_BYTES = 32_000_000
LONGEST_KEY = 512
LONGEST_CLASS = 256
CLASSES_MAX = 64
MOST_RECENT = 4096
BEARER = b"bearer "
OPEN = '{"open": true}'
OPEN_BESIDE = '{"open": "beside keys"}'


@dataclass(frozen=True, slots=True)
class KeyRecord:
    name: str
    sha256: str
    tenant: str = DEFAULT_TENANT
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    concurrent: int | None = None
    classes: tuple[str, ...] | None = None
    """Allowed classes of requests; None: all. A request that names none gets the default class if that is allowed,
    else the first one of these."""
    expires: str | None = None
    """A day or a time, such as 2031-01-31 or 2031-01-31T12:00:00+01:00; without a zone it is UTC."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    tenant: str
    allowance: KeyQuota
    classes: tuple[str, ...] | None = None
    expires_s: float | None = None
    digest: bytes = b""


def nobody(now_s: float) -> ApiKey:
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
        """`may_open`: nobody else reaches us. So many `gateways` share the clients: each grants its part."""
        self._gateways = gateways
        self._path, self._clock, self._shared_use, self._may_open = Path(path), clock, shared_use, may_open
        self._allowances: dict[str, KeyQuota] = {}
        self.open = False
        self.problem = ""
        self._seen = self._stamp()
        self._next_look_s = now_s + LOOK_S
        self._by_digest = self._read(now_s)
        self._recent: dict[bytes | None, ApiKey] = {}
        """What was shown since the last look, so that it is hashed once a second."""

    def __len__(self) -> int:
        return len(self._by_digest)

    def opened(self, now_s: float) -> bool:
        if now_s >= self._next_look_s:
            self.look(now_s)
        return self.open

    def shown(self, authorization: bytes | None, now_s: float) -> ApiKey | None:
        if authorization is None or not self._by_digest:
            return None
        try:
            return self.who(authorization, now_s)
        except HttpRefusal:
            return None

    def who(self, authorization: bytes | None, now_s: float) -> ApiKey:
        if now_s >= self._next_look_s:
            self.look(now_s)
        api_key = self._recent.get(authorization) or self._find(authorization)
        if api_key.expires_s is not None and self._clock() >= api_key.expires_s:
            raise HttpRefusal(401, "this key has expired", "expired_api_key", "authorization")
        return api_key

    def _find(self, authorization: bytes | None) -> ApiKey:
        if authorization is None or authorization[:7].lower() != BEARER:
            raise HttpRefusal(
                401, "no key: send it as `Authorization: Bearer KEY`", "invalid_api_key", "authorization"
            )
        shown = authorization[7:].strip()
        digest = hashlib.sha256(shown[: LONGEST_KEY + 1]).digest()
        api_key = self._by_digest.get(digest)
        # The table finds by hash, which tells nothing of the key; whether it is the one is said in constant time.
        known = hmac.compare_digest(digest, api_key.digest if api_key is not None else bytes(32))
        if api_key is None or not known:
            raise HttpRefusal(401, "this key is not known", "invalid_api_key", "authorization")
        if len(self._recent) < MOST_RECENT:
            self._recent[authorization] = api_key
        return api_key

    def look(self, now_s: float) -> None:
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
            result = os.stat(self._path)
        except OSError:
            return None
        return result.st_mtime_ns, result.st_size, result.st_ino

    def _read(self, now_s: float) -> dict[bytes, ApiKey]:
        lines, opened = read_lines(self._path)
        if opened and not self._may_open:
            raise InputError(
                str(self._path),
                "lets clients in without a key, and others can reach this gateway; `potluck keys add` or `close`",
            )
        api_keys: dict[bytes, ApiKey] = {}
        kept: dict[str, KeyRecord] = {}
        for key_record in lines:
            first = kept.setdefault(key_record.name, key_record)
            if replace(key_record, sha256=first.sha256, expires=first.expires) != first:
                where = f"{self._path}: {key_record.name}"
                raise InputError(
                    where, "is there twice and differs in more than sha256 and expires; make them agree"
                )
        for key_record in lines:  # Only now, since a file that is broken must change nothing.
            quota = Quota(
                key_record.requests_per_min, key_record.tokens_per_min, key_record.concurrent
            ).shared(self._gateways)
            allowance = self._allowances.get(key_record.name)
            if allowance is None:
                shared_use = None if self._shared_use is None else self._shared_use.row(key_record.name)
                allowance = self._allowances[key_record.name] = KeyQuota(quota, now_s, shared_use)
            allowance.change(quota, now_s)
            digest = bytes.fromhex(key_record.sha256)
            api_keys[digest] = ApiKey(
                key_record.name,
                key_record.tenant,
                allowance,
                key_record.classes,
                _expiry_s(key_record),
                digest,
            )
        for name in self._allowances.keys() - kept.keys():
            del self._allowances[name]
        self.open = opened
        return api_keys


def read_lines(path: Path) -> tuple[list[KeyRecord], bool]:
    """The file's keys, and whether none is asked for; an error never tells what a line holds."""
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
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError(where, "is not a JSON object on one line") from None
    if not isinstance(document, dict) or "type" in document:
        raise FormatError(where, "is not a key: it must have name and sha256")
    try:
        key_record = decode(KeyRecord, document)
        Quota(key_record.requests_per_min, key_record.tokens_per_min, key_record.concurrent)
        _expiry_s(key_record)
    except InputError as error:
        raise InputError(f"{where}: {error.field}", error.problem) from None
    if not 1 <= len(key_record.name) <= 128 or not key_record.name.isprintable():
        raise InputError(f"{where}: name", "must have 1 to 128 characters that can be shown")
    if not 1 <= len(key_record.tenant) <= 128 or not key_record.tenant.isprintable():
        raise InputError(f"{where}: tenant", "must have 1 to 128 characters that can be shown")
    if key_record.classes is not None and not _are_class_names(key_record.classes):
        problem = (
            f"must be 1 to {CLASSES_MAX} different names of 1 to {LONGEST_CLASS} characters that can be shown"
        )
        raise InputError(f"{where}: classes", problem)
    try:
        long_enough = len(bytes.fromhex(key_record.sha256)) == 32
    except ValueError:
        long_enough = False
    if not long_enough:
        raise InputError(f"{where}: sha256", "must be 64 hexadecimal digits: the SHA-256 of the key")
    return key_record


def _are_class_names(names: tuple[str, ...]) -> bool:
    return (
        1 <= len(names) <= CLASSES_MAX
        and len(set(names)) == len(names)
        and all(1 <= len(name) <= LONGEST_CLASS and name.isprintable() for name in names)
    )


def _expiry_s(key_record: KeyRecord) -> float | None:
    return None if key_record.expires is None else read_expiry(key_record.expires)


def read_expiry(text: str) -> float:
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InputError("expires", "must be a day or a time, such as 2031-01-31") from None


def new_key(name: str, tenant: str | None = None, **more: object) -> tuple[str, str]:
    key = "pk-" + secrets.token_urlsafe(32)
    digest = hashlib.sha256(key.encode()).hexdigest()
    line = json.dumps({"name": name, "sha256": digest, "tenant": tenant or name, **more})
    _line(line, "key")
    return key, line


MINUTE_S = 60.0
REQUESTS_LEFT, TOKENS_LEFT = (
    b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%ds\r\n"
    % (name, name, name)
    for name in (b"requests", b"tokens")
)
ALL_LEFT = REQUESTS_LEFT + TOKENS_LEFT
Kind = Literal["requests", "tokens", "concurrent"]


@dataclass(frozen=True, slots=True)
class Quota:
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_min", "tokens_per_min", "concurrent"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e12:
                raise InputError(name, f"must be above 0, is {value}")

    def shared(self, among: int) -> Quota:
        requests, tokens, once = self.requests_per_min, self.tokens_per_min, self.concurrent
        return Quota(
            None if requests is None else requests / among,
            None if tokens is None else tokens / among,
            None if once is None else ceil(once / among),
        )


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    kind: Kind
    retry_after_s: float
    tokens: int = 0
    """That the request would have reserved, where its tokens are too many."""


class TokenBucket:
    """Holds a minute's worth and is refilled evenly."""

    __slots__ = ("_level", "_seen_s", "most", "rate_per_s")

    def __init__(self, per_min: float, now_s: float) -> None:
        self.most = max(per_min, 1.0)
        self.rate_per_s = per_min / MINUTE_S
        self._level, self._seen_s = self.most, now_s

    def level(self, now_s: float) -> float:
        if now_s > self._seen_s:
            self._level = min(self.most, self._level + (now_s - self._seen_s) * self.rate_per_s)
            self._seen_s = now_s
        return self._level

    def draw(self, amount: float, now_s: float) -> float:
        """Take so much, or nothing and say how long to wait; more than it ever holds waits until it is full."""
        level, most = self._level, self.most
        if now_s > self._seen_s:
            level += (now_s - self._seen_s) * self.rate_per_s
            self._level = level = level if level < most else most
            self._seen_s = now_s
        wanted = amount if amount < most else most
        if level < wanted:
            return (wanted - level) / self.rate_per_s
        self._level = level - amount
        return 0.0

    def left(self, now_s: float) -> tuple[float, float, int]:
        level = self._level if now_s == self._seen_s else self.level(now_s)
        return self.most, level if level > 0.0 else 0.0, ceil((self.most - level) / self.rate_per_s)

    def take(self, amount: float) -> None:
        """Take so much, or give it back where negative, whatever there is."""
        self._level = min(self.most, self._level - amount)


class ReservationBucket(TokenBucket):
    """A bucket from which requests reserve what they may use, and that gets back what they did not.

    Had the unused part of a reservation never been taken, the bucket would hold that much more now, less what would
    have overflowed: the part beyond the smallest room that the bucket has had since. So a reservation's refund is
    limited to that smallest room, less what other reservations were given back meanwhile.
    """

    __slots__ = ("_open", "_refunded", "_rooms", "_sequence")

    def __init__(self, per_min: float, now_s: float) -> None:
        super().__init__(per_min, now_s)
        self._sequence = 0
        self._open: dict[int, deque[int]] = {}
        """Sequence numbers of open reservations, by their tokens."""
        self._rooms: list[tuple[int, float]] = []
        """(last sequence number, smallest room since plus `_refunded`), both ascending: one entry holds for all
        reservations after the entry before."""
        self._refunded = 0.0

    def level(self, now_s: float) -> float:
        if now_s > self._seen_s:
            super().level(now_s)
            if self._rooms:
                self._note_room()
        return self._level

    def reserve(self, tokens: int, now_s: float) -> float:
        """As `draw`, of tokens that `settle` may give back in part."""
        level, most = self._level, self.most
        if now_s > self._seen_s:
            level += (now_s - self._seen_s) * self.rate_per_s
            self._level = level = level if level < most else most
            self._seen_s = now_s
            if self._rooms:
                self._note_room()
        wanted = tokens if tokens < most else most
        if level < wanted:
            return (wanted - level) / self.rate_per_s
        self._level = level = level - tokens
        self._sequence += 1
        if tokens in self._open:
            self._open[tokens].append(self._sequence)
        else:
            self._open[tokens] = deque((self._sequence,))
        self._rooms.append((self._sequence, most - level + self._refunded))
        return 0.0

    def settle(self, reserved: int, used: int) -> float:
        """End the oldest reservation of so many tokens; returns what it took beyond them, mostly negative."""
        sequence_numbers = self._open.get(reserved)
        if sequence_numbers is None:  # The key's limit has changed, and its bucket with it.
            return 0.0
        index = bisect_left(self._rooms, (sequence_numbers.popleft(),))
        room = self._rooms[index][1] - self._refunded
        if not sequence_numbers:
            del self._open[reserved]
            if not self._open:
                self._rooms, self._refunded = [], 0.0
        extra = float(used - reserved)
        if extra < 0.0:
            extra = 0.0 if room <= 0.0 else -room if extra < -room else extra
            self._refunded -= extra if self._rooms else 0.0
        self._level -= extra
        return extra

    def take(self, amount: float) -> None:
        before = self._level
        super().take(amount)
        if self._rooms and self._level > before:
            self._refunded += self._level - before

    def _note_room(self) -> None:
        """The bucket was refilled: lower the smallest rooms of open reservations to the room that is left."""
        room, last = self.most - self._level + self._refunded, 0
        while self._rooms and self._rooms[-1][1] >= room:
            last = max(last, self._rooms.pop()[0])
        if last:
            self._rooms.append((last, room))


class KeyQuota:
    """One key's use of its quota; with a `row`, other processes' use of it counts as well."""

    __slots__ = ("_heard", "_requests", "_reserved", "_row", "_tokens", "open", "quota")

    def __init__(self, quota: Quota, now_s: float, shared_use: SharedKeyUse | None = None) -> None:
        self._row = shared_use
        self._heard = QuotaUse(0.0, 0.0, 0.0) if shared_use is None else shared_use.others()
        self.open = 0
        self._reserved = 0.0
        self._requests: TokenBucket | None = None
        self._tokens: ReservationBucket | None = None
        self.quota = Quota()
        self.change(quota, now_s)

    def change(self, quota: Quota, now_s: float) -> None:
        if quota.requests_per_min != self.quota.requests_per_min:
            self._requests = (
                None if quota.requests_per_min is None else TokenBucket(quota.requests_per_min, now_s)
            )
        if quota.tokens_per_min != self.quota.tokens_per_min:
            self._tokens = (
                None if quota.tokens_per_min is None else ReservationBucket(quota.tokens_per_min, now_s)
            )
        self.quota = quota

    def enter(self, now_s: float) -> QuotaExceeded | None:
        most = self.quota.concurrent
        if self._row is not None:
            self._hear(self._row, now_s)
        if most is not None and self.open + self._heard.open >= most:
            return QuotaExceeded("concurrent", 1.0)
        if self._requests is not None:
            wait_s = self._requests.draw(1.0, now_s)
            if wait_s > 0:
                return QuotaExceeded("requests", wait_s)
        self.open += 1
        if self._row is not None:
            self._row.add(1.0, 0.0, self.open, self._reserved, now_s)
        return None

    def _hear(self, shared_use: SharedKeyUse, now_s: float) -> None:
        """Take what other processes used, as of their latest use: the buckets have been refilled since then.

        What they used before that is taken later than it was used, so that a limit is never exceeded.
        """
        before, self._heard = self._heard, shared_use.others()
        used_s = min(now_s, self._heard.last_s)
        if self._requests is not None:
            self._requests.level(used_s)
            self._requests.take(self._heard.requests - before.requests)
        if self._tokens is not None:
            self._tokens.level(used_s)
            self._tokens.take(self._heard.tokens - before.tokens)

    def reserve(self, tokens: int, now_s: float) -> QuotaExceeded | None:
        """Take all that an admitted request may use; `leave` gives back what it did not.

        A request that may use more than a minute's worth is admitted once the bucket is full, and its debt keeps
        others out until it is settled: one request at a time exceeds the limit, by no more than its own size.
        """
        if self._tokens is None:
            return None
        if self._row is not None:  # Others may have reserved while this request was tokenised.
            self._hear(self._row, now_s)
        wait_s = self._tokens.reserve(tokens, now_s) if tokens > 0 else 0.0
        if wait_s > 0:
            if self.open > 1 or self._heard.open > 0:
                wait_s = min(
                    wait_s, MINUTE_S
                )  # Reservations of open requests are settled before they are refilled.
            return QuotaExceeded("tokens", wait_s, tokens)
        self._reserved += tokens
        if self._row is not None:
            self._row.add(0.0, float(tokens), self.open, self._reserved, now_s)
        return None

    def leave(self, reserved: int, used: int) -> None:
        self.open -= 1
        self._reserved -= reserved
        extra = float(used - reserved)
        if self._tokens is not None and reserved > 0:
            if self._row is not None:  # The bucket may have been full at another process's latest use.
                self._hear(self._row, inf)
            extra = self._tokens.settle(reserved, used)
        elif self._tokens is not None:
            self._tokens.take(extra)
        if self._row is not None:
            self._row.add(0.0, extra, self.open, self._reserved)

    def headers(self, now_s: float) -> bytes:
        """OpenAI's headers, as lines of a head: what is left, and when all of it will be."""
        requests, tokens = self._requests, self._tokens
        if requests is None:
            return b"" if tokens is None else TOKENS_LEFT % tokens.left(now_s)
        message = requests.left(now_s)
        return REQUESTS_LEFT % message if tokens is None else ALL_LEFT % (message + tokens.left(now_s))

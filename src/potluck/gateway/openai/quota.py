"""How much one key may ask for: requests and tokens a minute, and requests at once. No clock of its own.

Each is a bucket that fills evenly and holds a minute's worth. Tokens are charged as expected when a request comes
and put right when it has ended, so that many at once cannot all use the same room; a bucket may then be in debt.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from potluck.core.errors import InputError
from potluck.gateway.openai.shared_quota import QuotaUse, SharedKeyUse

MINUTE_S = 60.0
EXPECTED_OUTPUT = 256
"""Tokens charged at first for an answer whose longest length the client does not say."""
REQUESTS_LEFT, TOKENS_LEFT = (
    b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%ds\r\n"
    % (name, name, name)
    for name in (b"requests", b"tokens")
)
ALL_LEFT = REQUESTS_LEFT + TOKENS_LEFT
Kind = Literal["requests", "tokens", "concurrent"]


@dataclass(frozen=True, slots=True)
class Quota:
    """What a key may use; None: as much as there is."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_per_min", "tokens_per_min", "concurrent"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e12:
                raise InputError(name, f"must be above 0, is {value}")

    def shared(self, among: int) -> Quota:
        """One part of so many equal ones; of requests at once everybody has at least one."""
        requests, tokens, once = self.requests_per_min, self.tokens_per_min, self.concurrent
        return Quota(
            None if requests is None else requests / among,
            None if tokens is None else tokens / among,
            None if once is None else ceil(once / among),
        )


@dataclass(frozen=True, slots=True)
class QuotaExceeded:
    """Nothing is left of one kind."""

    kind: Kind
    retry_after_s: float


class TokenBucket:
    """Fills by `rate_per_s` up to `most`."""

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
        """Take so much. Where it is not there nothing is taken: until when; more than it ever holds is waited for
        until it is full."""
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
        """How much it holds at most, how much is there, and in how many seconds it will be full."""
        level = self._level if now_s == self._seen_s else self.level(now_s)
        return self.most, level if level > 0.0 else 0.0, ceil((self.most - level) / self.rate_per_s)

    def take(self, amount: float) -> None:
        self._level = min(self.most, self._level - amount)


class KeyQuota:
    """One key's use of its quota; with a `row`, other processes' use of it counts as well."""

    __slots__ = ("_heard", "_requests", "_row", "_tokens", "open", "quota")

    def __init__(self, quota: Quota, now_s: float, row: SharedKeyUse | None = None) -> None:
        self._row = row
        self._heard = QuotaUse(0.0, 0.0, 0.0) if row is None else row.others()
        self.open = 0
        """Requests under way."""
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.quota = Quota()
        self.change(quota, now_s)

    def change(self, quota: Quota, now_s: float) -> None:
        """Other limits from now on; a bucket whose limit is the same keeps its level."""
        if quota.requests_per_min != self.quota.requests_per_min:
            self._requests = (
                None if quota.requests_per_min is None else TokenBucket(quota.requests_per_min, now_s)
            )
        if quota.tokens_per_min != self.quota.tokens_per_min:
            self._tokens = None if quota.tokens_per_min is None else TokenBucket(quota.tokens_per_min, now_s)
        self.quota = quota

    def enter(self, now_s: float) -> QuotaExceeded | None:
        """One more request, unless there is no room for it. `leave` ends it."""
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
            self._row.add(1.0, 0.0, self.open)
        return None

    def _hear(self, row: SharedKeyUse, now_s: float) -> None:
        """What other processes have taken since."""
        before, self._heard = self._heard, row.others()
        if self._requests is not None:
            self._requests.level(now_s)
            self._requests.take(self._heard.requests - before.requests)
        if self._tokens is not None:
            self._tokens.level(now_s)
            self._tokens.take(self._heard.tokens - before.tokens)

    def charge(self, tokens: int, now_s: float) -> QuotaExceeded | None:
        """Tokens that the request is expected to use."""
        if self._tokens is None:
            return None
        wait_s = self._tokens.draw(float(tokens), now_s)
        if wait_s > 0:
            return QuotaExceeded("tokens", wait_s)
        if self._row is not None:
            self._row.add(0.0, float(tokens), self.open)
        return None

    def leave(self, charged: int, used: int) -> None:
        """A request has ended: what was charged for it is put right."""
        self.open -= 1
        if used != charged and self._tokens is not None:
            self._tokens.take(float(used - charged))
        if self._row is not None:
            self._row.add(0.0, float(used - charged), self.open)

    def headers(self, now_s: float) -> bytes:
        """OpenAI's headers, as lines of a head: what is left, and when all of it will be."""
        requests, tokens = self._requests, self._tokens
        if requests is None:
            return b"" if tokens is None else TOKENS_LEFT % tokens.left(now_s)
        told = requests.left(now_s)
        return REQUESTS_LEFT % told if tokens is None else ALL_LEFT % (told + tokens.left(now_s))

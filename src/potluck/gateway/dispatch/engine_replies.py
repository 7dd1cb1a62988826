"""What an engine's errors mean: a kind that the Brain knows, and whose fault it is. A table, no I/O.

Blamed is the engine that said it (`self`), the one that should have sent a cache (`source`), or the one that should
have fetched it (`target`). Who blames another is not believed at once: that one may be heard to fail by itself.
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from potluck.core.errors import PotluckError
from potluck.core.state.events import FailureKind
from potluck.core.values.sampling import MOST_LOGPROBS, SampledToken

Blame = Literal["self", "source", "target"]


class EngineFault(NamedTuple):
    kind: FailureKind
    blame: Blame
    why: str
    rejected: bool = False
    """Whether the engine never began the request."""


def dead(why: str, rejected: bool = False) -> EngineFault:
    """It is gone, or is not what it was: nobody else should be sent there now."""
    return EngineFault("replica", "self", why, rejected)


REJECTIONS = frozenset({"draining", "failed", "overloaded"})
"""Codes of an engine that answers 503 before it begins a request; with others it may have begun."""


OF_CODE: dict[str, tuple[FailureKind, Blame]] = {
    "hand_over": ("transfer", "source"),
    "receiver_gone": ("transfer", "target"),
    "not_fetched": ("transfer", "target"),
    "context_length_exceeded": ("memory", "self"),
    "deadline": ("timeout", "self"),
}
"""What the codes of segments mean (docs/engine.md); all others (`try_again`, `role`, ...): it cannot be used now."""

OF_STATUS: dict[int, tuple[FailureKind, Blame]] = {
    400: ("memory", "self"),
    408: ("timeout", "self"),
    413: ("memory", "self"),
    422: ("transfer", "source"),
    424: ("transfer", "source"),
    429: ("memory", "self"),
    502: ("transfer", "source"),
    504: ("timeout", "self"),
}


def refused(status: int, code: object, has_source: bool) -> EngineFault:
    kind, blame = OF_STATUS.get(status, ("replica", "self"))
    if isinstance(code, str) and code in OF_CODE:
        kind, blame = OF_CODE[code]
    if blame == "source" and not has_source:
        kind, blame = "replica", "self"
    named = f"{status} {code}" if isinstance(code, str) else str(status)
    rejected = status < 500 or code in REJECTIONS
    return EngineFault(kind, blame, f"answered {named[:80]}", rejected)


def ended(code: object, has_source: bool, hands_on: bool) -> EngineFault:
    kind, blame = OF_CODE.get(code, ("replica", "self")) if isinstance(code, str) else ("replica", "self")
    if code == "hand_over" and hands_on:
        blame = "self"  # It could not send; a receiver that could not fetch says the same word.
    if blame == "source" and not has_source:
        kind, blame = "replica", "self"
    return EngineFault(kind, blame, f"ended with {str(code)[:80]}")


LONGEST_LINE = 1 << 16  # Bytes; a token with its log probabilities has 2,000 at most.
LARGEST_TOKEN = 1 << 31
TOKEN = b'{"token":'


class InvalidReply(PotluckError): ...


class LastLine(NamedTuple):
    reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    code: object


Said = SampledToken | LastLine | dict[str, object]


class LineReader:
    __slots__ = ("_longest", "_rest", "_vocab")

    def __init__(self, vocab: int = 0, longest: int = LONGEST_LINE) -> None:
        self._rest, self._longest = b"", longest
        self._vocab = vocab or LARGEST_TOKEN

    @property
    def cut_off(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Said | InvalidReply]:
        """What the lines that are whole now say, in order; nothing is read behind garbage."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        result: list[Said | InvalidReply] = []
        vocab = self._vocab
        for line in lines:
            if line[:9] == TOKEN and line[-1:] == b"}" and (number := line[9:-1]).isdigit():
                if len(number) < 11 and (token := int(number)) < vocab:
                    result.append(SampledToken(token))
                    continue
                return [*result, InvalidReply("a token outside of the vocabulary")]
            if not line:
                continue
            try:
                result.append(self._read(line))
            except (ValueError, RecursionError):
                return [*result, InvalidReply("a line that is not JSON")]
            except InvalidReply as error:
                return [*result, error]
        if len(self._rest) > self._longest:
            result.append(InvalidReply("a line without an end"))
        return result

    def _read(self, line: bytes) -> Said:
        if len(line) > self._longest:
            raise InvalidReply("a line that is too long")
        body = json.loads(line)
        if not isinstance(body, dict):
            raise InvalidReply("a line that is no object")
        if "token" in body:
            return self._choice(body)
        if "ended" in body:
            return _last(body)
        return body

    def _choice(self, said: dict[str, object]) -> SampledToken:
        token = self._token(said["token"])
        top = said.get("top", ())
        if not isinstance(top, list | tuple) or len(top) > MOST_LOGPROBS:
            raise InvalidReply("log probabilities that are none")
        pairs = []
        for pair in top:
            if not isinstance(pair, list) or len(pair) != 2:
                raise InvalidReply("log probabilities that are none")
            pairs.append((self._token(pair[0]), _number(pair[1])))
        logprob = said.get("logprob")
        return SampledToken(token, None if logprob is None else _number(logprob), tuple(pairs))

    def _token(self, value: object) -> int:
        if type(value) is not int or not 0 <= value < self._vocab:
            raise InvalidReply("a token outside of the vocabulary")
        return value


def _last(said: dict[str, object]) -> LastLine:
    reason = said["ended"]
    counts = [said.get(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")]
    if not isinstance(reason, str) or not all(type(count) is int and count >= 0 for count in counts):
        raise InvalidReply("a last line without its counts")
    prompt, cached, output = (count for count in counts if isinstance(count, int))
    return LastLine(reason, prompt, cached, output, said.get("code"))


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidReply("a log probability that is no number")
    return float(value)

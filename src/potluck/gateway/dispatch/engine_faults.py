"""What an engine's errors mean: a kind that the Brain knows, and whose fault it is. A table, no I/O.

Blamed is the engine that said it (`self`), the one that should have sent a cache (`source`), or the one that should
have fetched it (`target`). Who blames another is not believed at once: that one may be heard to fail by itself.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from potluck.core.state.events import FailureKind

Blame = Literal["self", "source", "target"]


class EngineFault(NamedTuple):
    kind: FailureKind
    blame: Blame
    why: str


def dead(why: str) -> EngineFault:
    """It is gone, or is not what it was: nobody else should be sent there now."""
    return EngineFault("replica", "self", why)


OF_CODE: dict[str, tuple[FailureKind, Blame]] = {
    "hand_over": ("transfer", "source"),
    "receiver_gone": ("transfer", "target"),
    "not_fetched": ("transfer", "target"),
    "not_a_peer": ("transfer", "self"),
    "context_length_exceeded": ("memory", "self"),
    "deadline": ("timeout", "self"),
}
"""What the face's codes mean (docs/engine.md); all others (`try_again`, `role`, ...): it cannot be used now."""

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
"""What a status means where the code says nothing."""


def refused(status: int, code: object, has_source: bool) -> EngineFault:
    """An answer that is no 200."""
    kind, blame = OF_STATUS.get(status, ("replica", "self"))
    if isinstance(code, str) and code in OF_CODE:
        kind, blame = OF_CODE[code]
    if blame == "source" and not has_source:
        kind, blame = "replica", "self"
    named = f"{status} {code}" if isinstance(code, str) else str(status)
    return EngineFault(kind, blame, f"answered {named[:80]}")


def ended(code: object, has_source: bool, hands_on: bool) -> EngineFault:
    """A last line that says `error` or `cancelled`."""
    kind, blame = OF_CODE.get(code, ("replica", "self")) if isinstance(code, str) else ("replica", "self")
    if code == "hand_over" and hands_on:
        blame = "self"  # It could not send; a receiver that could not fetch says the same word.
    if blame == "source" and not has_source:
        kind, blame = "replica", "self"
    return EngineFault(kind, blame, f"ended with {str(code)[:80]}")

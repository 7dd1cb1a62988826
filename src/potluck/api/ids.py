"""`x-request-id` on every answer: the client's own, or one made up, so that both sides speak of the same request."""

from __future__ import annotations

import os
import re
import secrets

HEADER = "x-request-id"
GOOD = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


WORD_CHARS = 24
_words: list[str] = []
os.register_at_fork(after_in_child=_words.clear)  # a process and its forks must not give the same ones


def random_word() -> str:
    """Nobody can guess it: 96 bits, drawn from the system many at a time, since each draw costs a call of it."""
    if not _words:
        drawn = secrets.token_hex(WORD_CHARS * 64)
        _words.extend(drawn[place : place + WORD_CHARS] for place in range(0, len(drawn), WORD_CHARS))
    return _words.pop()


def request_id(given: str | None) -> str:
    return given if given is not None and GOOD.fullmatch(given) else f"req-{random_word()}"

"""`x-request-id` on every answer: the client's own, or one made up, so that both sides speak of the same request."""

from __future__ import annotations

import re
import secrets

from multidict import CIMultiDictProxy

HEADER = "x-request-id"
GOOD = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(headers: CIMultiDictProxy[str] | None) -> str:
    given = None if headers is None else headers.get(HEADER)
    return given if given is not None and GOOD.fullmatch(given) else f"req-{secrets.token_hex(12)}"

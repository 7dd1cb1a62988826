"""`x-request-id` on every answer: the client's own, or one made up, so that both sides speak of the same request."""

from __future__ import annotations

import re
import secrets

HEADER = "x-request-id"
GOOD = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(given: str | None) -> str:
    return given if given is not None and GOOD.fullmatch(given) else f"req-{secrets.token_hex(12)}"

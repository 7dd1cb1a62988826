"""How much a client may send, and how long it may take."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from potluck.api.http import HttpRefusal

SHARE_OF_FILES = 0.45
"""Of the files that a process may have open: for clients, and as many for engines; a request may need both."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    line_bytes: int = 8_192
    head_bytes: int = 16_384
    fields: int = 100
    body_bytes: int = 8_000_000
    bodies_bytes: int = 256_000_000
    connections: int = 65_536
    head_s: float = 10.0
    """In which a request's line and headers must have come."""
    body_s: float = 30.0
    """In which its body must have come; a large one has a second more for every `body_bytes_per_s` that are there."""
    body_bytes_per_s: int = 32_768
    idle_s: float = 75.0
    stalled_s: float = 30.0
    linger_s: float = 5.0
    """How long the rest of what was refused is read and thrown away, so that the client sees the answer."""

    def body_refusal(self) -> HttpRefusal:
        return HttpRefusal(413, f"the body is larger than {self.body_bytes} bytes")


def calm() -> None:
    """Exclude all present objects from garbage collection, and collect less often than Python does by default.

    To be called when all lasting objects exist. Requests leave no reference cycles, so there is little to collect.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)

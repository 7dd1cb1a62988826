"""How much of a link each sender may use, so that together they do not overfill it (PrfaaS 3.3: smooth transfers).

Senders that each go as fast as TCP lets them fill the queue in front of a thin link until it drops what they send.
Those that keep to a grant do not: what is granted adds up to a little less than the link carries. By water-filling
nobody gets more than it wants while another one wants more than its even share; what nobody wants is dealt out evenly
on top. One that wants nothing keeps a part of its even share, so that it can begin before it is heard of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

GRANTED: Final = 0.9
"""Of a link's bandwidth: headers of packets take a part of it, and what no grant covers."""
KEPT: Final = 0.1
"""Of its even share, what a sender keeps that wants nothing."""
LOSSY: Final = 0.01
"""Share of segments sent again from which on a link is taken to carry less than it should."""
EASED: Final = 0.85
RECOVERED: Final = 0.05
LEAST: Final = 0.25


def grants(link_bytes_per_s: float, wants_bytes_per_s: Mapping[str, float]) -> dict[str, float]:
    """Bytes a second that each sender may put on a link; together GRANTED of its bandwidth."""
    left = GRANTED * link_bytes_per_s
    found: dict[str, float] = {}
    waiting = len(wants_bytes_per_s)
    least = KEPT * left / max(1, waiting)
    for sender, wanted in sorted(wants_bytes_per_s.items(), key=lambda each: (each[1], each[0])):
        found[sender] = min(max(least, wanted), left / waiting)
        left -= found[sender]
        waiting -= 1
    for sender in found:
        found[sender] += left / len(found)
    return found


def eased(share: float, lost: float) -> float:
    """Of a link's bandwidth, what is dealt out next: less while segments are lost, and slowly more again."""
    if lost > LOSSY:
        return max(LEAST, share * EASED)
    return min(1.0, share + RECOVERED)

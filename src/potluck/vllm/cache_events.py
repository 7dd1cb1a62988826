"""What vLLM says of its prefix cache, as lines for the adapter (`held.py` reads them there).

vLLM's scheduler gathers events where it was started with them:

    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "null"}'

They are taken here when a step is planned, and given back where vLLM asks connectors for events: whoever else
listens to vLLM's own publisher hears them all the same.
"""

from __future__ import annotations

from typing import Any

HIDDEN = "potluck hides:"
"""How the salt begins of what nobody else may use."""


def full_group(kv_cache_config: Any) -> int | None:
    """The first group of layers that keep every token: what it holds is what can be found again."""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    for number, group in enumerate(groups):
        if not getattr(group.kv_cache_spec, "sliding_window", None):
            return number
    return None


def line_of(event: Any, group: int | None) -> tuple[object, ...] | None:
    """("+", hashes, parent, tokens, size, salt), ("-", hashes) or ("0",); None for what is of no use to others."""
    kind = type(event).__name__
    if kind == "AllBlocksCleared":
        return ("0",)
    if group is None or event.group_idx not in (None, group):
        return None
    hashes = [_text(each) for each in event.block_hashes]
    if kind == "BlockRemoved":
        return ("-", hashes)
    if kind != "BlockStored" or event.lora_name is not None:
        return None
    keys = event.extra_keys or [None] * len(hashes)
    first = keys[0] if keys and event.parent_block_hash is None else None
    salt = first[0] if first is not None and len(first) == 1 else None
    if any(keys[1:]) or (keys and keys[0] and not isinstance(salt, str)) or str(salt).startswith(HIDDEN):
        return None  # pictures and the like, or KV that came in fewer bits
    parent = None if event.parent_block_hash is None else _text(event.parent_block_hash)
    return ("+", hashes, parent, list(event.token_ids), event.block_size, salt or "")


def _text(name: Any) -> str:
    return name.hex() if isinstance(name, bytes) else str(name)

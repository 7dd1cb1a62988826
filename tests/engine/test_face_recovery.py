"""A request that lost its engine goes on elsewhere, over its prompt and what was streamed: the same tokens follow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_models import EXACT, VOCAB, prompt
from face_kit import face, make_service, played, tokens_in

from potluck.kv.handles import new_handle

TOKENS, OUTPUT, LEAST = prompt(40), 24, 14
ENDS = list(range(0, VOCAB, 3))
"""So many that an answer ends soon once it may."""


def drawn(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "token" in line]


@pytest.mark.skipif(not EXACT, reason="needs products that are exact")
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("full-fancy", {"temperature": 1.1, "seed": 11, "logprobs": 2}),
        ("hybrid", {"temperature": 0.0, "logprobs": 3}),
        ("hybrid", {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": -5}),
    ],
)
def test_what_follows_is_what_would_have_followed(kind: str, way: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with face(make_service(kind)) as one, face(make_service(kind, prefix_cache_bytes=0)) as two:

            def rest(k: int, so_far: list[int]) -> dict[str, Any]:
                """What is left to ask for once k tokens are there."""
                left = {"max_tokens": OUTPUT - k, "min_tokens": max(0, LEAST - k)}
                return {"tokens": TOKENS + so_far[:k], "sampling": way, "end_tokens": ENDS, **left}

            _, lines = await one.segment(**rest(0, []))
            whole, last = drawn(lines), lines[-1]
            said = tokens_in(lines)
            assert len(said) >= LEAST
            assert not set(said[: LEAST - 1]) & set(ENDS)
            for k in (1, LEAST - 1, LEAST, len(said) - 1):
                if k >= len(said):
                    continue
                for engine in (one, two):
                    _, again = await engine.segment(**rest(k, said))
                    assert drawn(again) == whole[k:], k
                    assert again[-1]["ended"] == last["ended"]
            # The same over a hand-over, cut within what was streamed.
            asked, source = rest(6, said), {"kv": one.kv, "handle": new_handle()}
            cut = {"tokens": asked["tokens"], "stop": 43, "handle": source["handle"]}
            _, (_, again) = await asyncio.gather(
                one.segment(**cut), two.segment(**asked, start=43, source=source)
            )
            assert drawn(again) == whole[6:]

    played(scenario)

"""Tenants with a salt of their own neither share nor probe each other's prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from engine_models import prompt
from face_kit import NAME, face, make_service, played, tokens_in

from potluck.core.replica.blocks import block_hashes

TOKENS = prompt(70)


@pytest.mark.parametrize("kind", ["full-fancy", "hybrid"])
def test_same_tokens_share_under_the_same_salt_alone(kind: str) -> None:
    async def scenario() -> None:
        service = make_service(kind)
        async with face(service) as one:

            async def cached(**fields: object) -> int:
                status, lines = await one.segment(TOKENS, max_tokens=3, **fields)
                assert status == 200
                answers.append(tokens_in(lines))
                found: int = lines[-1]["cached_tokens"]
                return found

            async def completed(**fields: object) -> int:
                asked = {"model": NAME, "prompt": TOKENS, "max_tokens": 3, "temperature": 0, **fields}
                status, body = await one.post("/v1/completions", asked)
                assert status == 200
                found: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                return found

            answers: list[Any] = []
            assert await cached() == 0
            held = await cached()
            assert held >= 64
            assert await cached(salt="acme") == 0
            assert await cached(salt="acme") == held
            assert await cached(salt="Acme") == 0
            assert await completed(cache_salt="acme") == held
            assert await completed(cache_salt="other") == 0
            assert await cached(salt="other") == held
            assert await cached(salt="") == held
            assert all(answer == answers[0] for answer in answers)
            # Whoever keeps an index of it finds the blocks under the names that they have with the salt.
            _, report = await one.get("/cache")
            there = {int(name, 16) for each in report["reports"] for name in each["added"]}
            for salt in ("", "acme", "Acme", "other"):
                assert set(block_hashes(TOKENS, service.fingerprint, salt=salt)) <= there
            status, body = await one.segment(TOKENS, max_tokens=1, salt="x" * 201)
            assert status == 400
            assert "salt: must have at most 200" in body["error"]["message"]

    played(scenario)

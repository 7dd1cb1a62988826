"""The engine tells what its prefix cache holds, and an index that reads late, twice or never still ends up right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from face_kit import face, make_service, played, tokens_in
from loop_kit import prompt

from potluck.core.replica.blocks import block_hashes
from potluck.core.routing.prefix_index import PrefixIndex
from potluck.core.state.events import CacheReported
from potluck.kv import prefix_pool as feeds


def read(answer: dict[str, Any], replica: str) -> list[CacheReported]:
    """As a gateway reads it."""
    return [
        CacheReported(
            replica,
            report["sequence"],
            *(
                tuple(int(name, 16) for name in report[kind])
                for kind in ("added", "removed", "marked", "unmarked")
            ),
            answer["epoch"],
            report["whole"],
        )
        for report in answer["reports"]
    ]


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_an_index_follows_an_engine_s_cache(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MOST_REPORTS", 2)

    async def scenario() -> None:
        index, quick, seen = PrefixIndex(), PrefixIndex(), 0
        service = make_service(kind)
        async with face(service) as engine:
            for number in range(5):
                tokens = prompt(70 + 16 * number)
                status, lines = await engine.segment(tokens, max_tokens=2)
                assert status == 200
                assert len(tokens_in(lines)) == 2
                _, answer = await engine.get(f"/cache?epoch={service.feed.epoch}&after={seen}")
                for report in read(answer, "e"):
                    assert not quick.apply(report, "here")
                    seen = report.sequence
                whole = len(tokens) // 16
                hashes = block_hashes(tokens, service.fingerprint)
                exact = kind == "hybrid"
                assert quick.held_by("e", hashes, exact=exact) >= whole - 1
            # One who comes later than reports are kept, or knows another epoch, gets all at once.
            for query in ("", "?after=1", f"?epoch={service.feed.epoch}&after=1", "?epoch=1&after=3"):
                _, answer = await engine.get(f"/cache{query}")
                (report,) = read(answer, "e")
                assert report.whole
                assert not index.apply(report, "here")
            assert index.view() == quick.view()
            for query in ("?after=x", "?after=-1", "?since=3", "?epoch=" + "9" * 40):
                status, _ = await engine.get(f"/cache{query}")
                assert status == 400

    played(scenario)


def test_prefixes_survive_in_files(tmp_path: Path) -> None:
    async def scenario(expected: int) -> None:
        service = make_service("full", prefix_cache_dir=tmp_path)
        async with face(service) as engine:
            await engine.segment(prompt(20), max_tokens=1)
            _, lines = await engine.segment(prompt(90), max_tokens=2)
            assert lines[-1]["cached_tokens"] >= expected

    played(lambda: scenario(0))
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    played(lambda: scenario(64))

"""The lines of a segment's answer."""

from __future__ import annotations

import json

from aiohttp import web

from potluck.vllm.adapter.adapter_service import AdapterService
from potluck.vllm.adapter.vllm_requests import PromptPart

FINGERPRINT = "X-Potluck-Fingerprint"


class SegmentLines:
    """Lines of an answer; its status is only said with the first."""

    def __init__(self, request: web.Request, service: AdapterService) -> None:
        headers = {"Content-Type": "application/x-ndjson", FINGERPRINT: service.fingerprint}
        self._request, self._response = request, web.StreamResponse(headers=headers)

    async def say(self, *lines: dict[str, object]) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        text = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        await self._response.write(text)

    async def end(self, line: dict[str, object]) -> web.StreamResponse:
        await self.say(line)
        await self._response.write_eof()
        return self._response

    @property
    def begun(self) -> bool:
        return self._response.prepared


def end_of(reason: str | None, part: PromptPart, cached: int, told: int) -> dict[str, object]:
    own = max(0, min(cached - part.received, len(part.tokens))) if not part.hands_on else cached
    return {
        "ended": reason,
        "prompt_tokens": len(part.tokens),
        "cached_tokens": own,
        "output_tokens": told,
    }

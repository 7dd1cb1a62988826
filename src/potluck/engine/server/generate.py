"""One answer: the loop's tokens become text, and a stop string ends it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from potluck.api.text_stream import TextDelta, TextRules, TextStream
from potluck.core.values.sampling import SampledToken
from potluck.engine.loop.messages import Job, JobEnded, OutputToken
from potluck.engine.server.engine_service import EngineService
from potluck.engine.server.error_replies import ended


async def answer(service: EngineService, job: Job, shown: TextRules) -> AsyncGenerator[TextDelta]:
    """The answer to a job, as it comes. Leaving early cancels the job."""
    growth = TextStream(service.text, shown, job.ends)
    async with service.run(job) as channel:
        async for event in channel:
            if isinstance(event, OutputToken):
                if event.gap_s is not None:
                    service.metrics.gap(event.gap_s)
                delta = growth.feed(event.choice)
                if delta.finish is None:
                    yield delta
                    continue
                await service.hub.ask(lambda loop, now_s: loop.cancel(job.key, now_s, reason="stop"))
                end = await channel.end()
                yield TextDelta(delta.text, delta.choices, delta.finish, end.times.cached_tokens)
                return
            elif isinstance(event, JobEnded):
                if event.reason not in ("stop", "length"):
                    raise channel.failure or ended(event)
                yield growth.end(event.reason, event.times.cached_tokens)


async def whole_answer(service: EngineService, job: Job, shown: TextRules) -> TextDelta:
    """All of it at once."""
    texts: list[str] = []
    choices: list[SampledToken] = []
    finish, cached = None, 0
    async for delta in answer(service, job, shown):
        texts.append(delta.text)
        choices += delta.choices
        finish, cached = delta.finish or finish, max(cached, delta.cached_tokens)
    return TextDelta("".join(texts), tuple(choices), finish, cached)

"""One answer: the loop's tokens become text, and a stop string ends it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from potluck.api.growth import Delta, Growth, Shown
from potluck.core.values.sampling import Choice
from potluck.engine.face.errors import ended
from potluck.engine.face.service import Service
from potluck.engine.loop.requests import Ended, Job, Token


async def answer(service: Service, job: Job, shown: Shown) -> AsyncGenerator[Delta]:
    """The answer to a job, as it comes. Leaving early cancels the job."""
    growth = Growth(service.text, shown, job.ends)
    async with service.run(job) as channel:
        async for event in channel:
            if isinstance(event, Token):
                if event.gap_s is not None:
                    service.metrics.gap(event.gap_s)
                delta = growth.feed(event.choice)
                if delta.finish is None:
                    yield delta
                    continue
                await service.hub.ask(lambda loop, now_s: loop.cancel(job.key, now_s, reason="stop"))
                end = await channel.end()
                yield Delta(delta.text, delta.choices, delta.finish, end.times.cached_tokens)
                return
            elif isinstance(event, Ended):
                if event.reason not in ("stop", "length"):
                    raise channel.failure or ended(event)
                yield growth.end(event.reason, event.times.cached_tokens)


async def whole_answer(service: Service, job: Job, shown: Shown) -> Delta:
    """All of it at once."""
    texts: list[str] = []
    choices: list[Choice] = []
    finish, cached = None, 0
    async for delta in answer(service, job, shown):
        texts.append(delta.text)
        choices += delta.choices
        finish, cached = delta.finish or finish, max(cached, delta.cached_tokens)
    return Delta("".join(texts), tuple(choices), finish, cached)

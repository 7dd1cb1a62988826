"""One answer: the loop's tokens become text, and a stop string ends it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from potluck.api.stops import StopScanner
from potluck.engine.compute.sample import Choice
from potluck.engine.face.errors import ended
from potluck.engine.face.service import Service
from potluck.engine.loop.requests import Ended, Job, Token


@dataclass(frozen=True, slots=True)
class Delta:
    """More of an answer; the last one says why it ended."""

    text: str
    choices: tuple[Choice, ...] = ()
    finish: str | None = None
    cached_tokens: int = 0


async def answer(service: Service, job: Job, stops: Sequence[str]) -> AsyncGenerator[Delta]:
    """The answer to a job, as it comes. Leaving early cancels the job."""
    scanner = StopScanner(stops)
    decoding = None if service.text is None else service.text.stream()
    tokens = 0
    async with service.run(job) as channel:
        async for event in channel:
            if isinstance(event, Token):
                tokens += 1
                if event.gap_s is not None:
                    service.metrics.gap(event.gap_s)
                piece = "" if decoding is None else decoding.feed(event.choice.token)
                shown = scanner.feed(piece)
                if scanner.found is None:
                    yield Delta(shown, (event.choice,))
                    continue
                await service.hub.ask(lambda loop, now_s: loop.cancel(job.key, now_s, reason="stop"))
                end = await channel.end()
                yield Delta(shown, (event.choice,), "stop", end.times.cached_tokens)
                return
            elif isinstance(event, Ended):
                if event.reason not in ("stop", "length"):
                    raise channel.failure or ended(event)
                text = scanner.feed("" if decoding is None else decoding.rest())
                reason = "stop" if scanner.found is not None else event.reason
                yield Delta(text + scanner.rest(), (), reason, event.times.cached_tokens)


async def whole_answer(service: Service, job: Job, stops: Sequence[str]) -> Delta:
    """All of it at once."""
    texts: list[str] = []
    choices: list[Choice] = []
    finish, cached = None, 0
    async for delta in answer(service, job, stops):
        texts.append(delta.text)
        choices += delta.choices
        finish, cached = delta.finish or finish, max(cached, delta.cached_tokens)
    return Delta("".join(texts), tuple(choices), finish, cached)

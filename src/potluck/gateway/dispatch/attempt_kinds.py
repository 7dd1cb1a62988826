"""Which kind of attempt a route is for: a trip over engines' faces, or a relay over a server of plain OpenAI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from potluck.core.state.actions import Run
from potluck.gateway.dispatch.attempt import Attempt, DispatchContext
from potluck.gateway.dispatch.relay_attempt import RelayAttempt, RelayedStream
from potluck.gateway.interfaces import Endpoint

if TYPE_CHECKING:
    from potluck.gateway.dispatch.active_request import ActiveRequest
    from potluck.gateway.dispatch.hedge import HedgeAttempt


class RunningAttempt(Protocol):
    """An attempt under way."""

    def start(self, endpoints: Sequence[Endpoint]) -> None: ...

    def stop(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class CannotStart(NamedTuple):
    """Why an attempt cannot be begun."""

    where: str
    why: str


def attempt(
    rider: ActiveRequest | HedgeAttempt, run: Run, means: DispatchContext, stream: RelayedStream
) -> tuple[RunningAttempt, Sequence[Endpoint]] | CannotStart:
    """An attempt, and by whom it is carried out."""
    endpoints: list[Endpoint] = []
    faces = 0
    find, asked = means.directory.find, rider.asked
    for segment in run.route.segments:
        endpoint = find(segment.replica)
        if endpoint is None:
            return CannotStart(segment.replica, "cannot be reached")
        endpoints.append(endpoint)
        faces += endpoint.kind == "face"
    if faces:
        means.met(endpoints[-1])
    if faces == 0 and len(endpoints) == 1 and (stream.begun or not rider.output):
        return RelayAttempt(rider, run, means, stream), endpoints
    able = endpoints[-1].own or not asked.own
    if faces == len(endpoints) and asked.prompt and not stream.begun and able:
        return Attempt(rider, run, means), endpoints
    return CannotStart(run.route.decoder, "cannot do what the route asks of it")

"""Which kind of attempt a route is for: a trip over engines' faces, or a relay over a server of plain OpenAI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from potluck.core.brain.actions import Run
from potluck.gateway.drive.relay import Relay, Stream
from potluck.gateway.drive.trip import Means, Trip
from potluck.gateway.parts import Endpoint

if TYPE_CHECKING:
    from potluck.gateway.drive.ride import Ride
    from potluck.gateway.drive.second import Second


class Going(Protocol):
    """An attempt under way."""

    def start(self, endpoints: Sequence[Endpoint]) -> None: ...

    def stop(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Obstacle(NamedTuple):
    """Why an attempt cannot be begun."""

    where: str
    why: str


def attempt(
    rider: Ride | Second, run: Run, means: Means, stream: Stream
) -> tuple[Going, Sequence[Endpoint]] | Obstacle:
    """An attempt, and by whom it is carried out."""
    endpoints: list[Endpoint] = []
    faces = 0
    find, asked = means.directory.find, rider.asked
    for segment in run.route.segments:
        endpoint = find(segment.replica)
        if endpoint is None:
            return Obstacle(segment.replica, "cannot be reached")
        endpoints.append(endpoint)
        faces += endpoint.kind == "face"
    if faces:
        means.met(endpoints[-1])
    if faces == 0 and len(endpoints) == 1 and (stream.begun or not rider.output):
        return Relay(rider, run, means, stream), endpoints
    able = endpoints[-1].own or not asked.own
    if faces == len(endpoints) and asked.prompt and not stream.begun and able:
        return Trip(rider, run, means), endpoints
    return Obstacle(run.route.decoder, "cannot do what the route asks of it")

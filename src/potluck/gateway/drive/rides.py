"""All requests of a worker that are under way: the gateway's `Driver`.

The Brain hears of what happens in the order in which it happened, and its orders are carried out in theirs: what
carrying out one of them makes known at once is told when all of them are done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from potluck.core.brain.actions import Abandon, Action, Inquire, Refuse, Run, Twin
from potluck.core.brain.events import Arrived, Cancelled, Event, Finished
from potluck.core.values.types import Request
from potluck.gateway.drive.naming import Naming
from potluck.gateway.drive.patience import Watch
from potluck.gateway.drive.ride import Ride
from potluck.gateway.drive.trip import Means
from potluck.gateway.parts import Answer, Asked, Directory, Endpoint, Line, Meter, Outgoing

ENDED = 4096
"""How many that ended are remembered, in case the Brain asks after one."""


class Rides:
    """`now_s` is the event loop's clock and `later` its `call_later`."""

    def __init__(
        self,
        line: Line,
        directory: Directory,
        outgoing: Outgoing,
        now_s: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
        meter: Meter | None = None,
    ) -> None:
        self._line = line
        self._now_s = now_s
        self._naming = Naming()
        self._watch = Watch(directory, now_s, later)
        self._means = Means(outgoing, directory, self._watch, self._naming.met, now_s, later, meter)
        self._open: dict[str, Ride] = {}
        self._ended: OrderedDict[str, Event | None] = OrderedDict()
        self._acting = False
        self._news: list[Event] = []

    def __len__(self) -> int:
        return len(self._open)

    def sizes(self) -> dict[str, int]:
        """How much is kept; nothing when no request is open."""
        return {"open": len(self._open), "watched": len(self._watch), "news": len(self._news)}

    # The door.

    def begin(self, asked: Asked, answer: Answer) -> None:
        request = self._request(asked, self._line.now_s())
        self._open[asked.id] = Ride(asked, answer, self._means, self._tell, self._over)
        self._tell(Arrived(request))

    def resume(self, asked: Asked, answer: Answer, output: Sequence[int]) -> None:
        ride = Ride(asked, answer, self._means, self._tell, self._over)
        self._open[asked.id] = ride
        event = ride.resume(output, self._request(asked, self._line.now_s()))
        if event is not None:
            self._tell(event)

    def _request(self, asked: Asked, arrival_s: float) -> Request:
        deadline_s = asked.deadline_s
        if deadline_s is not None:
            deadline_s += self._line.now_s() - self._now_s()
        return Request(
            asked.id,
            asked.model,
            arrival_s,
            asked.prompt_tokens,
            asked.max_output_tokens,
            asked.priority,
            deadline_s,
            self._naming.names(asked) if asked.prompt else (),
            asked.tenant,
            asked.request_class,
            asked.exact,
        )

    def cancel(self, request: str) -> None:
        ride = self._open.get(request)
        if ride is not None:
            ride.cancel()

    def room(self, request: str, there: bool) -> None:
        ride = self._open.get(request)
        if ride is not None:
            ride.room(there)

    # The Brain.

    def act(self, actions: Sequence[Action]) -> None:
        outer, self._acting = self._acting, True
        try:
            for action in actions:
                if type(action) is Run:
                    ride = self._open.get(action.request)
                    if ride is not None:
                        ride.run(action)
                else:
                    self._do(action)
        finally:
            self._acting = outer
        while self._news and not self._acting:
            self._line.tell(self._news.pop(0))

    # Another Brain, in the place of one whose process is gone.

    def names(self) -> list[str]:
        """All that are open."""
        return list(self._open)

    def whereabouts(self, request: str, named: Callable[[Endpoint], str | None]) -> Event | None:
        """What it must be told of a request that came before it did. None: it does not know the replicas yet."""
        ride = self._open[request]
        return ride.whereabouts(named, self._request(ride.asked, 0.0))

    def gone(self, replica: str) -> None:
        self._watch.gone(replica)

    def _do(self, action: Action) -> None:
        """What is not to be run."""
        match action:
            case Refuse():
                ride = self._open.get(action.request)
                if ride is not None:
                    ride.refuse(action)
            case Twin():
                ride = self._open.get(action.request)
                if ride is not None:
                    ride.twin(action)
            case Abandon():
                ride = self._open.get(action.request)
                if ride is not None:
                    ride.abandon()
            case Inquire():
                self._inquire(action)
            case _:
                pass  # About the fleet, which is not ours.

    def _inquire(self, inquire: Inquire) -> None:
        """What is not open here has ended, and the Brain did not hear of it."""
        ride = self._open.get(inquire.request)
        if ride is not None:
            ride.inquire(inquire)
            return
        event = self._ended.get(inquire.request)
        if isinstance(event, Finished) and event.attempt == inquire.attempt:
            self._tell(event)
        else:
            self._tell(Cancelled(inquire.request))

    def _tell(self, event: Event) -> None:
        if self._acting:
            self._news.append(event)
        else:
            self._line.tell(event)

    def _over(self, ride: Ride, event: Event | None) -> None:
        name = ride.asked.id
        del self._open[name]
        self._ended[name] = event
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)

"""The desk: the one Brain, who tells it what, and who does what it asks.

Workers tell it of requests through their lines, the fleet's keeper tells it of replicas. What it asks of a request
goes back to the worker whose request it is; what it asks of the fleet goes to the keeper. As in the simulator, what
happens while its orders are carried out is told afterwards, in order.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from potluck.core.state.actions import Abort, Action, Hedge, QueryAttempt, Refuse, Run
from potluck.core.state.events import (
    AttemptFailed,
    Event,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
)
from potluck.runtime.decider import Decider

Act = Callable[[Sequence[Action]], None]
Watcher = Callable[[float, Event, Sequence[Action]], None]
"""Hears of everything that was told and asked for; must be quick and must not raise."""
_OF_REQUESTS = (Run, Hedge, Refuse, Abort, QueryAttempt)
_ENDINGS = (RequestFinished, AttemptFailed, RequestCancelled)


class BrainLoop:
    """Made once; used in one event loop."""

    def __init__(
        self,
        mind: Decider,
        open_flights: Mapping[str, object],
        *,
        tick_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_flights` are the mind's own: requests that it has not seen the end of."""
        self._mind = mind
        self._flights = open_flights
        self._clock = clock
        self.start_s = clock()
        self._tick_s = tick_s
        self._owners: dict[str, LocalBrainClient] = {}
        self._news: deque[tuple[float, Event, LocalBrainClient | None]] = deque()
        self._acting = False
        self._ticking: asyncio.TimerHandle | None = None
        self.manage: Act = _nobody
        """Who carries out what is asked of the fleet."""
        self.watchers: list[Watcher] = []
        self.at_ticks: list[Callable[[], None]] = []
        """Called after every tick: logs are flushed, say."""

    def now_s(self) -> float:
        return self._clock() - self.start_s

    def line(self, act: Act) -> LocalBrainClient:
        """A worker's line; `act` is its driver's."""
        return LocalBrainClient(self, act)

    def tell(self, event: Event, line: LocalBrainClient | None = None) -> None:
        """Let the Brain know, and have done what it asks."""
        at_s = self._clock() - self.start_s
        if self._acting:
            self._news.append((at_s, event, line))
            return
        self._acting = True
        try:
            while True:
                if line is not None and (type(event) is RequestArrived or type(event) is RequestAdopted):
                    self._owners[event.request.id] = line
                actions = self._mind.on(at_s, event)
                for watcher in self.watchers:
                    watcher(at_s, event, actions)
                if actions:
                    self._act(actions)
                if isinstance(event, _ENDINGS) and event.request not in self._flights:
                    self._owners.pop(event.request, None)
                if not self._news:
                    break
                at_s, event, line = self._news.popleft()
        finally:
            self._acting = False

    def _act(self, actions: Sequence[Action]) -> None:
        """Each to whom it concerns, in their order."""
        for action in actions:
            if not isinstance(action, _OF_REQUESTS):
                self.manage((action,))
                continue
            owner = self._owners.get(action.request)
            if owner is not None:
                owner.act((action,))
            if type(action) is Refuse:
                self._owners.pop(action.request, None)

    def lost(self, line: LocalBrainClient) -> None:
        """A worker is gone, and its clients with it."""
        for request in [request for request, owner in self._owners.items() if owner is line]:
            self.tell(RequestCancelled(request))
            self._owners.pop(request, None)

    # Time.

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tick from now on."""
        self._ticking = loop.call_later(self._tick_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = loop.call_later(self._tick_s, self._tick, loop)
        self.tell(Tick())
        for call in self.at_ticks:
            call()

    def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    @property
    def open_requests(self) -> int:
        return len(self._flights)


class LocalBrainClient:
    """The line of a worker in this process."""

    __slots__ = ("act", "now_s", "tell")

    def __init__(self, brain_loop: BrainLoop, act: Act) -> None:
        self.act = act
        self.now_s = brain_loop.now_s
        self.tell = partial(brain_loop.tell, line=self)


def _nobody(actions: Sequence[Action]) -> None:
    """Before the keeper is there: what is wanted is asked for again at the next plan."""

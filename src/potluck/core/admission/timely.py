"""Who would still be in time where: the last word before a request is refused, and the way of those who are late.

Replicas are sent what they begin soon (`room.py`), and the rest waits. That is too coarse where a prompt takes a good
part of the objective (COARSE, on average of late): one fills a replica, and whoever comes behind it could be in time.
So there, before a request is refused for want of room, it is asked for all targets when its prompt would be computed:

    in time   (prompts sent there and not computed + its own, less what is cached) x seconds per token x pace
              is no more than what is left of its TTFT objective, and room has no other objection

It goes where that is soonest. What is left of that question when there are several tenants is whose turn it is, so
then it is not asked.

A prompt that takes longer than the objective by itself is late wherever it goes, and so is whoever comes behind it.
It goes where the most prompts lie already, so that as many replicas as possible are left to those who can be in
time, and of replicas without any to the one with the fewest answers under way.
"""

from __future__ import annotations

from typing import Final

from potluck.core.admission.mixes import CLOSED
from potluck.core.admission.room import Room
from potluck.core.brain.fleet import View
from potluck.core.brain.flight import Flight
from potluck.core.routing.affinity import Affinity
from potluck.core.routing.balance import Chooser
from potluck.core.routing.speeds import Speeds
from potluck.core.routing.targets import Target
from potluck.core.values.types import Slo

COARSE: Final = 0.1
MOST_BEHIND: Final = 2.0
"""Objectives' worth of prompts behind which nobody is put for being late."""


class Timely:
    """Answers from the room, the caches and the counts on replicas; owns nothing."""

    def __init__(self, room: Room | None, affinity: Affinity, speeds: Speeds) -> None:
        self._room = room
        """None: there is always some, so nobody is late or refused."""
        self._affinity = affinity
        self._speeds = speeds

    def soonest(self, chooser: Chooser, flight: Flight, left_s: float) -> Target | None:
        """The replica that computes its prompt first, if that is in time; None as well between several tenants."""
        room = self._room
        slo = room.slo(flight.request.model) if room is not None else None
        if room is None or slo is None or room.several or left_s <= 0:
            return None
        best, least_s = None, left_s
        usual_tokens = self._speeds.prompt_tokens(flight.request.model)
        for target in chooser.members():
            view = target.view
            if view is None or view.facts is None:
                continue
            per_token_s = view.facts.prefill_s_per_token * view.pace
            if usual_tokens * per_token_s < COARSE * slo.ttft_s:
                continue
            tokens = view.open_prefill_tokens + self._own_tokens(view, flight)
            time_s = tokens * per_token_s
            if time_s <= least_s and room.answers(view, flight, slo, CLOSED):
                best, least_s = target, time_s
        return best

    def aside(self, chooser: Chooser, picked: View, flight: Flight) -> Target | None:
        """Where a prompt goes that is late anyway; None: it is not, or everybody has enough of them."""
        room = self._room
        slo = room.slo(flight.request.model) if room is not None else None
        if room is None or slo is None or room.several or not self._hopeless(picked, flight, slo):
            return None
        best, most_s, fewest = None, -1.0, 0
        for target in chooser.members():
            view = target.view
            if view is None or view.facts is None:
                continue
            behind_s = view.open_prefill_tokens * view.facts.prefill_s_per_token * view.pace
            if behind_s > MOST_BEHIND * slo.ttft_s or behind_s < most_s:
                continue
            if behind_s == most_s and view.open_requests >= fewest:
                continue
            if self._hopeless(view, flight, slo) and room.answers(view, flight, slo, CLOSED):
                best, most_s, fewest = target, behind_s, view.open_requests
        return best

    def _hopeless(self, view: View, flight: Flight, slo: Slo) -> bool:
        """Whether its prompt alone takes longer there than the objective."""
        facts = view.facts
        if facts is None:
            return False
        per_token_s = facts.prefill_s_per_token * view.pace
        if flight.prompt_tokens * per_token_s <= slo.ttft_s:
            return False
        return self._own_tokens(view, flight) * per_token_s > slo.ttft_s

    def _own_tokens(self, view: View, flight: Flight) -> int:
        """What it would compute of its prompt."""
        if not flight.request.blocks:
            return flight.prompt_tokens
        return max(1, flight.prompt_tokens - self._affinity.cached(view, flight))

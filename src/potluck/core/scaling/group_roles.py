"""New roles for the replicas of groups: THUNDERSERVE's lightweight rescheduling (its 3.4), with no weights loaded.

A choice of roles is worth what its best routing serves (`core/routing/group_sharing.py`): a transportation problem
over the rates of the replicas that serve, at the lengths now seen, within what the links between their machines carry
and KV that is there in time. Of all choices the best is found: all of them where they are few, else a tabu search
whose one move is another role for one replica, as the paper's with its other moves left out.

What links and times allow is never more than

    bound = min(sum of prefill rates, sum of decode rates) + sum of mixed rates

which costs nothing to know, so only choices whose bound beats the best so far are routed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from potluck.core.routing.group_sharing import GroupRates, MeanLengths, rated
from potluck.core.state.facts import FleetFacts
from potluck.core.values.types import Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
MOST_CHOICES = 6561
"""Three roles for eight replicas."""
STEPS, IDLE_STEPS, TABU = 60, 12, 6
ALIKE = 0.03
"""Choices that serve so much less than the best count as good: rates are not known better than that, while each flip
disturbs what is under way."""

Roles = dict[int, Role]
"""Place of a replica in its template to its role."""


class _Choices:
    """What choices of roles are worth, each routed once at most."""

    def __init__(self, facts: FleetFacts, template: str, places: Sequence[int], lengths: MeanLengths) -> None:
        self._facts = facts
        self._template = template
        self._lengths = lengths
        self._pace = GroupRates(facts, template, lengths)
        self._rates: dict[int, dict[Role, float]] = {
            place: {
                "prefill": self._pace.prefill(place),
                "decode": self._pace.decode(place),
                "mixed": self._pace.mixed(place),
            }
            for place in places
        }
        self.known: dict[tuple[Role, ...], float] = {}

    def bound(self, roles: Mapping[int, Role]) -> float:
        sums = dict.fromkeys(ROLES, 0.0)
        for place, role in roles.items():
            sums[role] += self._rates[place][role]
        return min(sums["prefill"], sums["decode"]) + sums["mixed"]

    def served(self, roles: Mapping[int, Role]) -> float:
        key = tuple(roles.values())
        found = self.known.get(key)
        if found is None:
            routed = rated(self._facts, self._template, roles, self._lengths, self._pace)
            found = self.known[key] = sum(rate for *_, rate in routed)
        return found


def best_roles(
    facts: FleetFacts, template: str, now: Mapping[int, Role], lengths: MeanLengths, gain: float
) -> tuple[Roles, float, float]:
    """(roles, what they serve, what the present ones do); the present roles when others serve no more by `gain`.

    Of choices that serve ALIKE the one with the fewest flips is taken.
    """
    choices = _Choices(facts, template, list(now), lengths)
    before = choices.served(now)
    few = len(ROLES) ** len(now) <= MOST_CHOICES
    best, most = _all(choices, now, before) if few else _tabu(choices, now, before)
    if most < before * (1.0 + gain) or most <= before:
        return dict(now), before, before
    near = _fewest(choices, now, best, max(before * (1.0 + gain), (1.0 - ALIKE) * most))
    return near, choices.served(near), before


def _all(choices: _Choices, now: Mapping[int, Role], before: float) -> tuple[Roles, float]:
    places = list(now)
    ranked = sorted(
        (
            (choices.bound(dict(zip(places, each, strict=True))), each)
            for each in product(ROLES, repeat=len(places))
        ),
        key=lambda pair: -pair[0],
    )
    best, most = dict(now), before
    for bound, each in ranked:
        if bound <= most * (1.0 - ALIKE):
            break
        roles = dict(zip(places, each, strict=True))
        served = choices.served(roles)
        if served > most:
            best, most = roles, served
    return best, most


def _tabu(choices: _Choices, now: Mapping[int, Role], before: float) -> tuple[Roles, float]:
    """The best neighbour at each step, also downhill; a replica that has just changed stays for a while."""
    best, most = dict(now), before
    here: Roles = dict(now)
    barred: dict[int, int] = {}
    idle = 0
    for step in range(STEPS):
        moves = [(place, role) for place in here for role in ROLES if role != here[place]]
        ranked = sorted(
            ((choices.bound({**here, place: role}), place, role) for place, role in moves), reverse=True
        )
        chosen, value = None, -1.0
        for bound, place, role in ranked:
            if bound <= value:
                break
            served = choices.served({**here, place: role})
            allowed = barred.get(place, -1) < step or served > most
            if allowed and served > value:
                chosen, value = (place, role), served
        if chosen is None:
            break
        here[chosen[0]] = chosen[1]
        barred[chosen[0]] = step + TABU
        idle += 1
        if value > most * (1 + 1e-9):
            best, most, idle = dict(here), value, 0
        if idle >= IDLE_STEPS:
            break
    return best, most


def _fewest(choices: _Choices, now: Mapping[int, Role], best: Roles, enough: float) -> Roles:
    """Of all choices that were looked at and serve enough, the one nearest to the present roles."""
    places, here = list(now), tuple(now.values())
    flips = [
        (sum(new != old for new, old in zip(each, here, strict=True)), -served, each)
        for each, served in choices.known.items()
        if served >= enough
    ]
    return dict(zip(places, min(flips)[2], strict=True)) if flips else best

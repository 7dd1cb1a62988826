"""Which replicas could change their role, and how fast each would be in either: what role flips are chosen from.

A flip keeps the weights, so any replica that only prefills or only decodes can take the other role; those of
combos and pairs are planned to work together and stay. Templates tell the capacity of the planned role alone, for
the planned lengths. After a shift both roles are needed at the lengths now seen, so the rates come from `Facts`:

    prefill = 1 / (fixed + per token x mean prompt)          decode = batch / (step x mean output)
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.core.brain.facts import Facts, ReplicaFacts
from potluck.core.brain.fleet import Fleet, View
from potluck.core.values.types import Role

FLIPPABLE = frozenset({"homogeneous", "pipeline", "group", "remote_prefill"})


@dataclass(frozen=True, slots=True)
class Flippable:
    """A ready replica, its present role and its rate in both, in requests a second."""

    replica: str
    region: str
    role: Role
    load: int
    prefill_per_s: float
    decode_per_s: float
    facts: ReplicaFacts

    def __post_init__(self) -> None:
        assert self.role != "mixed"


def prefill_per_s(facts: ReplicaFacts, prompt_tokens: float) -> float:
    seconds = facts.prefill_fixed_s + facts.prefill_s_per_token * prompt_tokens
    return 1.0 / seconds if seconds > 0 else 0.0


def decode_per_s(facts: ReplicaFacts, output_tokens: float) -> float:
    seconds = facts.decode_step_s * output_tokens
    return facts.decode_batch / seconds if seconds > 0 else 0.0


def flippable(
    fleet: Fleet, facts: Facts, model: str, prompt_tokens: float, output_tokens: float
) -> tuple[list[Flippable], list[str]]:
    """A model's replicas that prefill or decode alone and are ready; and the templates nobody timed."""
    found: list[Flippable] = []
    untimed: set[str] = set()
    for view in fleet.views.values():
        member = view.member
        if member.model != model or view.state != "ready" or view.role == "mixed":
            continue
        if member.kind not in FLIPPABLE:
            continue
        timed = facts.replicas.get((member.template, member.index))
        if timed is None:
            untimed.add(member.template)
            continue
        rates = (prefill_per_s(timed, prompt_tokens), decode_per_s(timed, output_tokens))
        if min(rates) <= 0:
            untimed.add(member.template)
            continue
        found.append(Flippable(member.id, member.region, view.role, _load(view), *rates, timed))
    return sorted(found, key=lambda each: each.replica), sorted(untimed)


def last_of_role(replicas: list[Flippable]) -> set[str]:
    """Replicas that are the only ones of their role in their region: without them KV would have to cross."""
    seen: dict[tuple[str, Role], list[str]] = {}
    for each in replicas:
        seen.setdefault((each.region, each.role), []).append(each.replica)
    return {names[0] for names in seen.values() if len(names) == 1}


def _load(view: View) -> int:
    return view.open_requests

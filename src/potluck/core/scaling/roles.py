"""Which replicas could change their role, and how fast each would be in either: what role flips are chosen from.

A flip keeps the weights, so any replica that only prefills or only decodes can take the other role; those of
combos and pairs are planned to work together and stay. Templates tell the capacity of the planned role alone, for
the planned lengths. After a shift both roles are needed at the lengths now seen, so the rates come from `FleetFacts`:

    prefill = 1 / (fixed + per token x mean prompt)          decode = batch / (step x mean output)

and neither is more than its network card carries of such prompts' KV: many that prefill for one that decodes are as
slow as that one's card.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.values.plan import Plan
from potluck.core.values.types import Codec, Role

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


def card_per_s(facts: ReplicaFacts, model: ModelFacts | None, prompt_tokens: float, codec: Codec) -> float:
    """Prompts whose KV its card carries; without bound where nothing is known of it."""
    size = 0.0 if model is None else model.wire_bytes(prompt_tokens, codec)
    return facts.card_gbps * 1e9 / 8 / size if facts.card_gbps > 0 and size > 0 else inf


def codec_of(plan: Plan | None, model: str) -> Codec:
    """In which KV goes between replicas that prefill or decode alone."""
    codecs = () if plan is None else [flow.codec for flow in plan.flows if flow.model == model]
    return codecs[0] if codecs else "fp16"


def flippable(
    fleet: FleetState,
    facts: FleetFacts,
    model: str,
    prompt_tokens: float,
    output_tokens: float,
    codec: Codec = "fp16",
) -> tuple[list[Flippable], list[str]]:
    """A model's replicas that prefill or decode alone and are ready; and the templates nobody timed."""
    found: list[Flippable] = []
    untimed: set[str] = set()
    for view in fleet.views.values():
        member = view.member
        if member.model != model or view.state != "ready" or view.role == "mixed" or member.standby:
            continue
        if member.kind not in FLIPPABLE:
            continue
        timed = facts.replicas.get((member.template, member.index))
        if timed is None:
            untimed.add(member.template)
            continue
        most = card_per_s(timed, facts.models.get(model), prompt_tokens, codec)
        rates = (
            min(most, prefill_per_s(timed, prompt_tokens)),
            min(most, decode_per_s(timed, output_tokens)),
        )
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


def _load(view: ReplicaState) -> int:
    return view.open_requests

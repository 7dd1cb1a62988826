"""The Brain's slow half: `traffic_window.py` watches, a rule says what is wanted, `reconcile.py` works towards it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from potluck.core.errors import UnknownNameError
from potluck.core.scaling import reconcile, rule
from potluck.core.scaling.cauchy_scaling import CauchyScaling
from potluck.core.scaling.copy_capacity import CopyKey, TemplateCapacity, template_capacities
from potluck.core.scaling.prfaas_scaling import PrfaasScaling
from potluck.core.scaling.replan import PeriodicReplan, PredictiveReplan
from potluck.core.scaling.role_shift import ShiftFlips
from potluck.core.scaling.roles import CopyRoles, WithCopyRoles
from potluck.core.scaling.traffic_window import ObservedTraffic, TrafficWindow
from potluck.core.state.actions import Action, FlipReplica, OperatorNote, Replan, SeenLengths, StartReplica
from potluck.core.state.facts import FleetFacts, ModelFacts
from potluck.core.state.fleet import FleetState, ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.state.request_state import RequestState
from potluck.core.values.plan import Plan, ReplicaSpec
from potluck.core.values.types import Region, Role


def _combos(policy: Policy, facts: FleetFacts) -> rule.Scaler:
    return WithCopyRoles(CauchyScaling(policy, facts.regions, facts.models), CopyRoles(policy, facts))


SCALERS: dict[str, Callable[[Policy, FleetFacts], rule.Scaler]] = {
    "none": lambda policy, facts: rule.NoScaling(),
    "cauchy": _combos,
    "flips": lambda policy, facts: WithCopyRoles(ShiftFlips(policy, facts), CopyRoles(policy, facts)),
    "prfaas": PrfaasScaling,
    "replan": lambda policy, facts: PeriodicReplan(policy),
    "ahead": PredictiveReplan,
}
"""Nobody; CAUCHY's Algorithm 1; THUNDERSERVE's role flips; PrfaaS's split and threshold; CORAL; that by forecast."""


def scaler_of(policy: Policy, facts: FleetFacts) -> rule.Scaler:
    if policy.scaling not in SCALERS:
        raise UnknownNameError("policy: scaling", policy.scaling, SCALERS)
    return SCALERS[policy.scaling](policy, facts)


class Autoscaler:
    """Wanted counts and the way there. Owned by the Brain, which tells it what happens."""

    def __init__(self, facts: FleetFacts, policy: Policy, fleet: FleetState) -> None:
        self._facts = facts
        self._policy = policy
        self._fleet = fleet
        self._regions = facts.regions
        self._available = rule.available_nodes(facts.regions)
        self._scaler = scaler_of(policy, facts)
        self.watches = policy.scaling != "none"
        self.window = TrafficWindow(policy.window_s, policy.global_window_s)
        self.plan: Plan | None = None
        self._wanted: dict[CopyKey, int] = {}
        self._sleep = ScaleToZero(facts.models)
        self.scale_to_zero = False
        self._known: dict[str, TemplateCapacity] = {}
        self._progress = reconcile.ReconcileState()
        self._due_s = inf
        self._version = -1  # The fleet's when it was last looked at.
        self.by_hand: dict[str, Role] = {}
        """Roles that a person gave: they stay, whatever plans and scaling say."""
        self._advised: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()

    def adopt(self, at_s: float, plan: Plan) -> tuple[Action, ...]:
        """From now on this plan: roles that change in place; what is to be started comes with the next step."""
        self.plan = plan
        self._wanted = reconcile.wanted_counts(plan, self._wanted)
        self._known.update(template_capacities(plan))
        self.scale_to_zero = self._sleep.any
        if self.watches:
            for model in sorted({template.model for template in plan.templates}):
                known = self._facts.models.get(model)
                self.window.watch(at_s, model, known.slo if known is not None else None)
        reassign = reconcile.reassignments(self._fleet, self._wanted, self._known, self.by_hand)
        settled = {item.member.id for item in reassign} | self.by_hand.keys()
        return (*reassign, *(flip for flip in reconcile.restored(self._fleet) if flip.replica not in settled))

    def market_changed(self, at_s: float, regions: tuple[Region, ...]) -> tuple[Action, ...]:
        self._regions, self._available = regions, rule.available_nodes(regions)
        self._scaler.market_changed(regions)
        return self.step(at_s)

    def ordered(self, replica: ReplicaState, role: Role) -> tuple[Action, ...]:
        """A person gives a replica a role; with the planned one it is the rules' again."""
        self.by_hand = {name: item for name, item in self.by_hand.items() if name in self._fleet.views}
        if role == replica.member.role:
            self.by_hand.pop(replica.member.id, None)
        else:
            self.by_hand[replica.member.id] = role
        return () if role == replica.role else (FlipReplica(replica.member.id, role),)

    def drained(self, at_s: float, replica: str) -> tuple[Action, ...]:
        self._progress = self._progress.drained(replica)
        return self.step(at_s)

    def tick(
        self, at_s: float, held: Mapping[str, int]
    ) -> tuple[tuple[Action, ...], tuple[rule.SetThreshold | rule.SetLengths, ...]]:
        """What to do now; thresholds and lengths come apart, as they are the router's."""
        if self.plan is None:
            return (), ()
        actions: list[Action] = []
        thresholds: list[rule.SetThreshold | rule.SetLengths] = []
        remarks, resized = self._sleep.tick(at_s, self._fleet, held)
        actions += remarks
        if self.watches:
            observed = self.window.observed(at_s, held)
            for decision in self._scaler.on_tick(at_s, observed, self._fleet, self.plan):
                if self._policy.advise and not isinstance(decision, rule.AskReplan):
                    actions += self._advice(decision)
                    continue
                match decision:
                    case rule.Resize(template, region, count):
                        if self._sleeps(template):
                            continue
                        resized |= self._wanted.get((template, region)) != count
                        self._wanted[template, region] = count
                    case rule.FlipRole(replica, role):
                        if replica in self._fleet.views and replica not in self.by_hand:
                            actions.append(FlipReplica(replica, role))
                    case rule.AskReplan(rates_per_s, reason):
                        actions.append(Replan(rates_per_s, reason, _lengths(observed)))
                    case rule.SetThreshold() | rule.SetLengths():
                        thresholds.append(decision)
        if resized or self._fleet.version != self._version or at_s >= self._due_s:
            actions += self.step(at_s)
        return tuple(actions), tuple(thresholds)

    def _advice(
        self, decision: rule.Resize | rule.FlipRole | rule.SetThreshold | rule.SetLengths
    ) -> list[Action]:
        match decision:
            case rule.Resize(template, region, count, reason):
                what = f"{count} of {template} in {region}"
            case rule.FlipRole(replica, role, reason):
                what = f"{replica} as {role}"
            case rule.SetThreshold(model, tokens, reason):
                what = f"prompts of {model} beyond {tokens} tokens elsewhere"
            case rule.SetLengths(model, prompt_tokens, output_tokens):
                what = f"groups of {model} shared for {prompt_tokens:.0f} and {output_tokens:.0f} tokens"
                reason = "lengths have shifted"
        if what in self._advised:
            return []
        self._advised = (*self._advised[-31:], what)
        return [OperatorNote(f"advice: {what}", reason)]

    def finished(self, at_s: float, request_state: RequestState, output_tokens: int) -> None:
        first_s = request_state.first_s if request_state.first_s >= 0 else at_s
        tpot_s = (at_s - first_s) / (output_tokens - 1) if output_tokens > 1 else 0.0
        request = request_state.request
        self.window.finished(at_s, request.model, output_tokens, first_s - request.arrival_s, tpot_s)

    def step(self, at_s: float) -> tuple[Action, ...]:
        wanted = {key: 0 if self._sleeps(key[0]) else count for key, count in self._wanted.items()}
        inputs = reconcile.ReconcileInputs(
            self._known, self._available, self._policy.grace_s, self._policy.dip
        )
        step = reconcile.reconcile(self._fleet, wanted, self._progress, at_s, inputs)
        self._progress, self._due_s, self.notes = step.progress, step.due_s, step.notes
        return tuple(
            StartReplica(self._placed(a.member)) if isinstance(a, StartReplica) else a for a in step.actions
        )

    def asked(self, at_s: float, model: str) -> None:
        self._sleep.asked(at_s, model)

    def _sleeps(self, template: str) -> bool:
        known = self._known.get(template)
        return known is not None and known.template.model in self._sleep.asleep

    def _placed(self, replica_spec: ReplicaSpec) -> ReplicaSpec:
        blueprint = self._known.get(replica_spec.template)
        named = (
            blueprint.template.replicas[replica_spec.index].layout.machines if blueprint is not None else {}
        )
        own = self._facts.places.get((replica_spec.template, replica_spec.index), ())
        zones = {self._facts.zones.get(machine, "") for machine in named}
        return replace(
            replica_spec,
            nodes=tuple(sorted(named)) or tuple(f"{replica_spec.unit}/{name}" for name in own),
            zone=zones.pop() if len(zones) == 1 else "",
        )

    def settled(self) -> None:
        """The Brain has carried out a step: this is the fleet that was looked at."""
        self._version = self._fleet.version

    def why(self) -> str:
        return self._scaler.why()


def _lengths(observed: ObservedTraffic) -> tuple[SeenLengths, ...]:
    """Of models of which enough was seen to plan by it."""
    return tuple(
        SeenLengths(
            traffic.model,
            traffic.mean_output_tokens,
            tuple((length.mean_tokens, float(length.count)) for length in traffic.lengths if length.count),
        )
        for traffic in observed.models
        if traffic.finished >= rule.MIN_FINISHED_FOR_LENGTHS and traffic.mean_output_tokens > 0
    )


class ScaleToZero:
    """State: when each model was last asked for or had something to do, and which sleep."""

    __slots__ = ("_active_s", "_models", "asleep")

    def __init__(self, models: Mapping[str, ModelFacts]) -> None:
        self._models = models
        self._active_s: dict[str, float] = {}
        self.asleep: set[str] = set()

    @property
    def any(self) -> bool:
        return any(model.idle_s is not None for model in self._models.values())

    def asked(self, at_s: float, model: str) -> None:
        self._active_s[model] = at_s

    def tick(self, at_s: float, fleet: FleetState, held: Mapping[str, int]) -> tuple[list[Action], bool]:
        """What to say of it, and whether another number of copies is wanted."""
        actions: list[Action] = []
        if not self.any:
            return actions, False
        busy = {replica.member.model for replica in fleet.views.values() if replica.open_requests}
        for model, facts in self._models.items():
            if facts.idle_s is None:
                continue
            if model in busy or held.get(model) or model not in self._active_s:
                self._active_s[model] = at_s
            idle_s = at_s - self._active_s[model]
            if model not in self.asleep and idle_s >= facts.idle_s:
                self.asleep.add(model)
                actions.append(OperatorNote(f"{model} sleeps", f"no request came for {idle_s:.0f} s"))
            elif model in self.asleep and idle_s < facts.idle_s:
                self.asleep.discard(model)
                actions.append(OperatorNote(f"{model} wakes", "a request came"))
        return actions, bool(actions)

"""Run a plan in simulation: one call from a plan and a workload to all that came of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import numpy as np

from potluck.core.brain.brain import Brain
from potluck.core.errors import CapacityError, UnknownNameError
from potluck.core.replica.sequences import BatchLimits
from potluck.core.routing.balance import balance_rule
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan
from potluck.core.values.types import Role
from potluck.runtime.brain_log import Decider, LoggedBrain
from potluck.runtime.replica_models import ReplicaModel, ReplicaModels
from potluck.runtime.resolved_plan import ResolvedPlan
from potluck.sim.links.link import SharedPipe
from potluck.sim.load.workload import Workload
from potluck.sim.results.records import ANSWERED, OPEN, LinkRecord, ReplicaRecord, SimResult, as_users_see
from potluck.sim.sim_engine import UPPER_S, SimEngine, replica_limits
from potluck.sim.sim_settings import SimSettings
from potluck.sim.step_table import StepTable, StepTimes, step_table
from potluck.sim.world.faults import Faults
from potluck.sim.world.sim_fleet import Make, Planner
from potluck.sim.world.sim_state import SimHandover, SimReplica
from potluck.sim.world.world import SimWorld

if TYPE_CHECKING:
    from potluck.sim.world.world import SimWorld

RELATIVE = 1e-6


def check(world: SimWorld) -> list[str]:
    """Everything that does not hold at the end of a run; empty when all does. `midway` holds at any time."""
    return [*midway(world), *_requests(world), *_idle(world)]


def midway(world: SimWorld) -> list[str]:
    """What holds at any time: no replica over its memory, no pipe with more or less than it was given."""
    texts = []
    for site in world.sites.values():
        replica = site.replica
        if not 0 <= replica.used_blocks <= replica.total_blocks:
            texts.append(f"{site.id} uses {replica.used_blocks} of {replica.total_blocks} blocks")
    for pipe in world.network.pipes:
        value = pipe.sent_bytes + pipe.open_bytes(world.now_s)
        if abs(value - pipe.served_bytes) > RELATIVE * max(value, 1.0):
            texts.append(f"{pipe.name} carried {pipe.served_bytes:.0f} bytes for {value:.0f} asked")
    return texts


def _requests(world: SimWorld) -> list[str]:
    ledger, load = world.ledger, world.workload
    records = ledger.records(load)
    requests = []
    still = int((records.outcome[: world.arrived] == OPEN).sum())
    if still != len(world.attempts.open):
        requests.append(f"{still} requests without an outcome, {len(world.attempts.open)} open")
    answered = records.outcome == ANSWERED
    short = answered & (records.streamed_tokens != records.output_tokens)
    if short.any():
        requests.append(
            f"{int(short.sum())} answers have not the tokens asked for, such as {np.flatnonzero(short)[:3]}"
        )
    with np.errstate(invalid="ignore"):
        disorder = answered & ~(
            (records.arrival_s <= records.first_token_s) & (records.first_token_s <= records.finish_s)
        )
        over = records.streamed_tokens > records.output_tokens
        early = (records.outcome != OPEN) & ~(records.finish_s >= records.arrival_s)
    for what, mask in (
        ("times out of order", disorder),
        ("too many tokens", over),
        ("ended too early", early),
    ):
        if mask.any():
            requests.append(f"{int(mask.sum())} requests with {what}, such as {np.flatnonzero(mask)[:3]}")
    unreasoned = (records.outcome == 2) & (records.reason == 0)
    if unreasoned.any():
        requests.append(f"{int(unreasoned.sum())} refusals without a reason")
    return requests


def _idle(world: SimWorld) -> list[str]:
    """With no request open, nothing may be left anywhere."""
    if world.attempts.open:
        return []
    idle = []
    for site in world.fleet.all_sites:
        left = len(site.attempts) + len(site.computing) + sum(not hand.over for hand in site.waiting)
        if left:
            idle.append(f"{site.id} still has {left} requests")
        if site.there and site.replica.used_blocks:
            idle.append(f"{site.id} still uses {site.replica.used_blocks} blocks")
    idle += [
        f"{pipe.name} still has {len(pipe)} transfers"
        for pipe in world.network.pipes
        if any(isinstance(world.handovers.what(key), SimHandover) for key in pipe.keys)
    ]
    return idle


MINDS = Callable[[ReplicaModels, Policy], Decider]


def simulate(
    resolved: ResolvedPlan,
    workload: Workload,
    policy: Policy | None = None,
    *,
    seed: int = 0,
    settings: SimSettings | None = None,
    faults: Faults | None = None,
    planner: Planner | None = None,
    log: IO[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    mind: MINDS | None = None,
) -> SimResult:
    """Serve a workload with a plan's fleet. The same arguments give the same result and the same log, byte by byte.

    `mind` replaces the Brain, for tests. A run whose books do not balance is an error of ours and raised as one.
    """
    with uncollected():
        world = build(
            resolved,
            workload,
            policy,
            settings=settings,
            planner=planner,
            log=log,
            progress=progress,
            mind=mind,
        )
        if faults is not None:
            world.external.plan(faults, seed, horizon_s(workload))
        world.run()
        wrong = check(world)
        if wrong:
            raise AssertionError(f"the simulation's books do not balance: {wrong[0]}")
        result = result_of(world, seed)
    return replace(
        result, classes={request_class.name: request_class for request_class in (policy or Policy()).classes}
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing here makes cycles by the million; looking for them all the time costs a tenth of a run.

    A world of thousands of replicas would be looked through when it is made, and when its results are.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def build(
    resolved: ResolvedPlan,
    workload: Workload,
    policy: Policy | None = None,
    *,
    settings: SimSettings | None = None,
    planner: Planner | None = None,
    log: IO[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    mind: MINDS | None = None,
) -> SimWorld:
    """The world before its first event."""
    policy = Policy() if policy is None else policy
    settings = SimSettings(tick_s=policy.tick_s) if settings is None else settings
    if settings.granted is None:
        settings = replace(settings, granted=policy.grants)
    for name in workload.models:
        if name not in resolved.models:
            raise UnknownNameError("workload: model", name, resolved.models)
    if not resolved.plan.deployments:
        raise CapacityError("the plan deploys nothing, so there is nothing to simulate")
    if settings.reports is None or settings.first_tokens is None:
        reads = reads_reports(resolved.plan, workload, policy)
        bounded = policy.admission and any(model in resolved.slos for model in workload.models)
        settings = replace(
            settings,
            reports=reads if settings.reports is None else settings.reports,
            first_tokens=reads
            or bounded
            or policy.hedge > 0
            or balance_rule(policy.balance).learns
            or log is not None
            or mind is not None
            if settings.first_tokens is None
            else settings.first_tokens,
        )
    replica_models = ReplicaModels(
        resolved, BLOCK_TOKENS if workload.blocks is None else workload.blocks.tokens
    )
    replica_models.learn(resolved.plan)
    thinks: Decider = Brain(replica_models.facts(), policy) if mind is None else mind(replica_models, policy)
    if log is not None:
        thinks = LoggedBrain(thinks, log, replica_models.facts(), policy)
    return SimWorld(
        replica_models, thinks, workload, settings, maker(settings.fast_forward), planner, progress
    )


def reads_reports(plan: Plan, workload: Workload, policy: Policy) -> bool:
    """Whether any decision looks at what replicas, links and caches report, and at when first tokens come.

    Replicas that all do the whole work are chosen by what was sent to them. What runs in place, how a prompt is
    split, length thresholds, prefix affinity and scaling need reports.
    """
    if policy.scaling != "none" or workload.blocks is not None or plan.flows:
        return True
    used = {deployment.template for deployment in plan.deployments if deployment.count}
    return any(
        replica.role != "mixed" for item in plan.templates if item.name in used for replica in item.replicas
    )


def maker(fast_forward: bool = True) -> Make:
    """Makes replicas; those of one kit share its step times and limits."""
    tables: dict[int, tuple[ReplicaModel, StepTimes, BatchLimits]] = {}

    def make(replica_model: ReplicaModel, role: Role) -> SimEngine:
        held = tables.get(id(replica_model))
        if held is None:
            table = (
                step_table(replica_model.timer)
                if replica_model.engine.pipelined
                else StepTable(replica_model.timer)
            )
            engine = replica_model.engine
            limits = replica_limits(
                table, replica_model.total_blocks, token_budget=engine.token_budget, max_running=engine.slots
            )
            held = tables[id(replica_model)] = (replica_model, table, limits)
        return SimEngine(held[1], held[2], fast_forward=fast_forward)

    return make


def horizon_s(workload: Workload) -> float:
    """How long faults by chance may come: as long as requests arrive."""
    return float(workload.arrival_s[-1]) if len(workload) else 0.0


def result_of(world: SimWorld, seed: int) -> SimResult:
    """Everything a finished run tells."""
    end_s = max(world.attempts.ended_s, horizon_s(world.workload))
    links = list(world.network.links.values())
    cards = [pipe for pipe in world.network.pipes if pipe.kind != "link"]
    counts = {
        "hand-overs that waited for room": world.handovers.waited,
        "reports lost": world.reports.lost,
        "plans asked for": world.replans,
        "second attempts": world.attempts.hedged,
    }
    replicas = tuple(_replica_record(site, end_s) for site in world.fleet.all_sites)
    return SimResult(
        as_users_see(world.ledger.records(world.workload), replicas, world.replica_models.resolved.rtt_s),
        dict(world.replica_models.resolved.slos),
        replicas,
        tuple(_link_record(world, pipe) for pipe in (*links, *cards)),
        end_s,
        tuple(world.costs.rates),
        world.sampler.samples(),
        tuple(world.external.noted),
        counts=counts,
        seed=seed,
        start_rates=tuple(world.costs.start_rates),
    )


def _replica_record(site: SimReplica, end_s: float) -> ReplicaRecord:
    member, replica = site.member, site.replica
    gaps = tuple([(UPPER_S[place], float(count)) for place, count in replica.gaps.filled()])
    return ReplicaRecord(
        member.id,
        member.unit,
        member.template,
        member.model,
        member.region,
        member.role,
        tuple(node for node, _ in site.replica_model.places),
        site.replica_model.gpus,
        tuple(site.changes),
        replica.busy_s(end_s),
        replica.computed_tokens,
        replica.decoded_tokens,
        site.peak_blocks,
        replica.total_blocks,
        gaps,
    )


def _link_record(world: SimWorld, pipe: SharedPipe) -> LinkRecord:
    if pipe.kind == "link":
        gbps = next(
            k.gbps
            for k in world.replica_models.resolved.links
            if (k.source, k.target) == (pipe.source, pipe.target)
        )
    else:
        gbps = pipe.rate_bytes_per_s * 8 / 1e9
    return LinkRecord(
        pipe.source,
        pipe.target or pipe.source,
        pipe.kind,
        gbps,
        pipe.sent_bytes,
        pipe.lost_bytes,
        pipe.transfers,
        pipe.busy_s,
    )

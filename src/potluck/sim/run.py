"""Run a plan in simulation: from a plan and a workload to a `SimResult`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, TypedDict, Unpack

import numpy as np

from potluck.core.brain.brain import Brain
from potluck.core.errors import CapacityError, UnknownNameError
from potluck.core.replica.batch import BatchLimits
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
from potluck.sim.results import records as recorded
from potluck.sim.results.records import ANSWERED, OPEN, REFUSED, SimResult
from potluck.sim.sim_engine import UPPER_S, SimEngine, replica_limits
from potluck.sim.sim_settings import SimSettings
from potluck.sim.step_table import StepTable, StepTimes, step_table
from potluck.sim.world.faults import Faults
from potluck.sim.world.sim_fleet import Make, Planner
from potluck.sim.world.sim_state import SimReplica
from potluck.sim.world.world import SimWorld

RELATIVE = 1e-6


def check(world: SimWorld) -> list[str]:
    """Violated invariants at the end of a run; those of `midway` hold at any time."""
    return [*midway(world), *_wrong_requests(world), *_left_over(world)]


def midway(world: SimWorld) -> list[str]:
    """Violated invariants of replicas' memory and pipes' bytes."""
    texts = []
    for sim_replica in world.replicas.values():
        sim_engine = sim_replica.replica
        if not 0 <= sim_engine.used_blocks <= sim_engine.total_blocks:
            texts.append(
                f"{sim_replica.id} uses {sim_engine.used_blocks} of {sim_engine.total_blocks} blocks"
            )
    for pipe in world.network.pipes:
        value = pipe.sent_bytes + pipe.open_bytes(world.now_s)
        if abs(value - pipe.served_bytes) > RELATIVE * max(value, 1.0):
            texts.append(f"{pipe.name} carried {pipe.served_bytes:.0f} bytes for {value:.0f} asked")
    return texts


def _wrong_requests(world: SimWorld) -> list[str]:
    records = world.ledger.records(world.workload)
    texts = []
    still = int((records.outcome[: world.arrived] == OPEN).sum())
    if still != len(world.attempts.open):
        texts.append(f"{still} requests without an outcome, {len(world.attempts.open)} open")
    answered, tokens = records.outcome == ANSWERED, records.streamed_tokens
    with np.errstate(invalid="ignore"):
        ordered = (records.arrival_s <= records.first_token_s) & (records.first_token_s <= records.finish_s)
        wrong = {
            "not the tokens asked for": answered & (tokens != records.output_tokens),
            "times out of order": answered & ~ordered,
            "too many tokens": tokens > records.output_tokens,
            "ended too early": (records.outcome != OPEN) & ~(records.finish_s >= records.arrival_s),
            "a refusal without a reason": (records.outcome == REFUSED) & (records.reason == 0),
        }
    return texts + [
        f"{int(mask.sum())} requests with {what}, such as {np.flatnonzero(mask)[:3]}"
        for what, mask in wrong.items()
        if mask.any()
    ]


def _left_over(world: SimWorld) -> list[str]:
    if world.attempts.open:
        return []
    texts = []
    for replica in world.fleet.all_replicas:
        left = (
            len(replica.attempts)
            + len(replica.computing)
            + sum(not handover.over for handover in replica.waiting)
        )
        if left:
            texts.append(f"{replica.id} still has {left} requests")
        if replica.exists and replica.replica.used_blocks:
            texts.append(f"{replica.id} still uses {replica.replica.used_blocks} blocks")
    return texts + [
        f"{pipe.name} still has {len(pipe)} transfers"
        for pipe in world.network.pipes
        if world.handovers.broken(pipe)
    ]


class WorldOptions(TypedDict, total=False):
    settings: SimSettings | None
    planner: Planner | None
    log: IO[str] | None
    progress: Callable[[int, int], None] | None
    mind: Callable[[ReplicaModels, Policy], Decider] | None  # Replaces the Brain, for tests.
    replica_models: ReplicaModels | None
    """Replica models of an earlier run of the same plan, to avoid timing its replicas again."""


def simulate(
    resolved: ResolvedPlan,
    workload: Workload,
    policy: Policy | None = None,
    *,
    seed: int = 0,
    faults: Faults | None = None,
    **options: Unpack[WorldOptions],
) -> SimResult:
    """Serve a workload with a plan's fleet. The same arguments give the same result and the same log, byte by byte.

    A run with violated invariants raises an AssertionError.
    """
    policy = policy or Policy()
    with uncollected():
        world = build(resolved, workload, policy, **options)
        if faults is not None:
            world.external.plan(faults, seed, workload.last_s)
        world.run()
        wrong = check(world)
        if wrong:
            raise AssertionError(f"the simulation's totals do not agree: {wrong[0]}")
        result = result_of(world, seed)
    return replace(result, classes={each.name: each for each in policy.classes})


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector, which costs a tenth of a run; the simulator creates few cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def build(
    resolved: ResolvedPlan, workload: Workload, policy: Policy | None = None, **options: Unpack[WorldOptions]
) -> SimWorld:
    policy = Policy() if policy is None else policy
    log, mind = options.get("log"), options.get("mind")
    settings = options.get("settings") or SimSettings(tick_s=policy.tick_s)
    for name in workload.models:
        if name not in resolved.models:
            raise UnknownNameError("workload: model", name, resolved.models)
    if not resolved.plan.deployments:
        raise CapacityError("the plan deploys nothing, so there is nothing to simulate")
    reads = reads_reports(resolved.plan, workload, policy)
    if settings.reports is None:
        settings = replace(settings, reports=reads)
    if settings.first_tokens is None:
        bounded = policy.admission and any(model in resolved.slos for model in workload.models)
        learns = balance_rule(policy.balance).learns
        heard = reads or bounded or learns or log is not None or mind is not None
        settings = replace(settings, first_tokens=heard)
    replica_models = options.get("replica_models") or replica_models_of(resolved, workload)
    thinks: Decider = Brain(replica_models.facts(), policy) if mind is None else mind(replica_models, policy)
    if log is not None:
        thinks = LoggedBrain(thinks, log, replica_models.facts(), policy)
    make, planner, progress = maker(settings.fast_forward), options.get("planner"), options.get("progress")
    return SimWorld(replica_models, thinks, workload, settings, make, planner, progress)


def replica_models_of(resolved: ResolvedPlan, workload: Workload) -> ReplicaModels:
    made = ReplicaModels(resolved, BLOCK_TOKENS if workload.blocks is None else workload.blocks.tokens)
    made.learn(resolved.plan)
    return made


def reads_reports(plan: Plan, workload: Workload, policy: Policy) -> bool:
    """Whether any rule reads reports of replicas, links and caches, or the times of first tokens.

    Mixed replicas without flows are chosen by the requests sent to them alone.
    """
    if policy.scaling != "none" or workload.blocks is not None or plan.flows:
        return True
    used = [plan.template(deployment.template) for deployment in plan.deployments if deployment.count]
    return any(replica.role != "mixed" for template in used for replica in template.replicas)


def maker(fast_forward: bool = True) -> Make:
    """A factory of engines; those of one model share step times and limits."""
    tables: dict[int, tuple[ReplicaModel, StepTimes, BatchLimits]] = {}

    def make(replica_model: ReplicaModel, role: Role) -> SimEngine:
        if id(replica_model) not in tables:
            engine = replica_model.engine
            table = (step_table if engine.pipelined else StepTable)(replica_model.timer)
            limits = replica_limits(
                table, replica_model.total_blocks, token_budget=engine.token_budget, max_running=engine.slots
            )
            tables[id(replica_model)] = (replica_model, table, limits)
        _, table, limits = tables[id(replica_model)]
        return SimEngine(table, limits, fast_forward=fast_forward)

    return make


def result_of(world: SimWorld, seed: int) -> SimResult:
    end_s = max(world.attempts.ended_s, world.workload.last_s)
    cards = [pipe for pipe in world.network.pipes if pipe.kind != "link"]
    counts = {
        "hand-overs that waited for room": world.handovers.waited,
        "reports lost": world.reports.lost,
        "plans asked for": world.replans,
    }
    sim_replicas = world.fleet.all_replicas
    replicas = tuple(_replica_record(replica, end_s) for replica in sim_replicas)
    added_s = [replica.replica_model.engine.host.request_s for replica in sim_replicas]
    rtt_s = world.replica_models.resolved.rtt_s
    return SimResult(
        recorded.as_users_see(world.ledger.records(world.workload), replicas, rtt_s, added_s),
        dict(world.replica_models.resolved.slos),
        replicas,
        tuple(_link_record(world, pipe) for pipe in (*world.network.links.values(), *cards)),
        end_s,
        tuple(world.costs.rates),
        world.sampler.samples(),
        tuple(world.external.noted),
        counts=counts,
        seed=seed,
        start_rates=tuple(world.costs.start_rates),
    )


def _replica_record(sim_replica: SimReplica, end_s: float) -> recorded.ReplicaRecord:
    replica_spec, sim_engine = sim_replica.member, sim_replica.replica
    return recorded.ReplicaRecord(
        replica_spec.id,
        replica_spec.unit,
        replica_spec.template,
        replica_spec.model,
        replica_spec.region,
        replica_spec.role,
        tuple(node for node, _ in sim_replica.replica_model.places),
        sim_replica.replica_model.gpus,
        tuple(sim_replica.changes),
        sim_engine.busy_s(end_s),
        sim_engine.computed_tokens,
        sim_engine.decoded_tokens,
        tuple([(UPPER_S[place], float(count)) for place, count in sim_engine.gaps.filled()]),
    )


def _link_record(world: SimWorld, pipe: SharedPipe) -> recorded.LinkRecord:
    gbps, egress_usd_per_gb = pipe.rate_bytes_per_s * 8 / 1e9, 0.0
    if pipe.kind == "link":
        link = world.network.specs[pipe.source, pipe.target]
        gbps, egress_usd_per_gb = link.gbps, link.egress_usd_per_gb
    ends = (pipe.source, pipe.target or pipe.source, pipe.kind)
    return recorded.LinkRecord(*ends, gbps, pipe.sent_bytes, pipe.busy_s, egress_usd_per_gb)

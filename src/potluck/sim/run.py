"""Run a plan in simulation: one call from a plan and a workload to all that came of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO

from potluck.core.brain.brain import Brain
from potluck.core.brain.facts import BLOCK_TOKENS
from potluck.core.brain.policy import Policy
from potluck.core.errors import CapacityError, UnknownNameError
from potluck.core.replica.batch import Limits
from potluck.core.values.plan import Plan
from potluck.core.values.types import Role
from potluck.sim.links.link import Pipe
from potluck.sim.load.workload import Workload
from potluck.sim.replicas.gaps import UPPER_S
from potluck.sim.replicas.replica import Replica, replica_limits
from potluck.sim.replicas.rounds import Table, step_table
from potluck.sim.replicas.steps import StepTable
from potluck.sim.results.distance import as_users_see
from potluck.sim.results.records import LinkRecord, ReplicaRecord, SimResult
from potluck.sim.settings import Settings
from potluck.sim.world.checks import check
from potluck.sim.world.faults import Faults
from potluck.sim.world.moment import Planner
from potluck.sim.world.state import Site
from potluck.sim.world.world import World
from potluck.sim.world.yard import Make
from potluck.worlds.kits import Kit, Kits
from potluck.worlds.log import Logged
from potluck.worlds.mind import Mind
from potluck.worlds.scene import Scene

MINDS = Callable[[Kits, Policy], Mind]


def simulate(
    scene: Scene,
    workload: Workload,
    policy: Policy | None = None,
    *,
    seed: int = 0,
    settings: Settings | None = None,
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
            scene, workload, policy, settings=settings, planner=planner, log=log, progress=progress, mind=mind
        )
        if faults is not None:
            world.outside.plan(faults, seed, horizon_s(workload))
        world.run()
        wrong = check(world)
        if wrong:
            raise AssertionError(f"the simulation's books do not balance: {wrong[0]}")
        result = result_of(world, seed)
    return replace(result, classes={each.name: each for each in (policy or Policy()).classes})


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
    scene: Scene,
    workload: Workload,
    policy: Policy | None = None,
    *,
    settings: Settings | None = None,
    planner: Planner | None = None,
    log: IO[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    mind: MINDS | None = None,
) -> World:
    """The world before its first event."""
    policy = Policy() if policy is None else policy
    settings = Settings(tick_s=policy.tick_s) if settings is None else settings
    if settings.granted is None:
        settings = replace(settings, granted=policy.grants)
    for name in workload.models:
        if name not in scene.models:
            raise UnknownNameError("workload: model", name, scene.models)
    if not scene.plan.deployments:
        raise CapacityError("the plan deploys nothing, so there is nothing to simulate")
    if settings.reports is None or settings.first_tokens is None:
        reads = reads_reports(scene.plan, workload, policy)
        bounded = policy.admission and any(model in scene.slos for model in workload.models)
        settings = replace(
            settings,
            reports=reads if settings.reports is None else settings.reports,
            first_tokens=reads
            or bounded
            or policy.hedge > 0
            or policy.balance == "learned"
            or log is not None
            or mind is not None
            if settings.first_tokens is None
            else settings.first_tokens,
        )
    kits = Kits(scene, BLOCK_TOKENS if workload.blocks is None else workload.blocks.tokens)
    kits.learn(scene.plan)
    thinks: Mind = Brain(kits.facts(), policy) if mind is None else mind(kits, policy)
    if log is not None:
        thinks = Logged(thinks, log, kits.facts(), policy)
    return World(kits, thinks, workload, settings, maker(settings.fast_forward), planner, progress)


def reads_reports(plan: Plan, workload: Workload, policy: Policy) -> bool:
    """Whether any decision looks at what replicas, links and caches report, and at when first tokens come.

    Replicas that all do the whole work are chosen by what was sent to them. What runs in place, how a prompt is
    split, length thresholds, prefix affinity and scaling need reports.
    """
    if policy.scaling != "none" or workload.blocks is not None or plan.flows:
        return True
    used = {deployment.template for deployment in plan.deployments if deployment.count}
    return any(
        replica.role != "mixed" for each in plan.templates if each.name in used for replica in each.replicas
    )


def maker(fast_forward: bool = True) -> Make:
    """Makes replicas; those of one kit share its step times and limits."""
    tables: dict[int, tuple[Kit, Table, Limits]] = {}

    def make(kit: Kit, role: Role) -> Replica:
        held = tables.get(id(kit))
        if held is None:
            table = step_table(kit.timer) if kit.engine.pipelined else StepTable(kit.timer)
            engine = kit.engine
            limits = replica_limits(
                table, kit.total_blocks, token_budget=engine.token_budget, max_running=engine.slots
            )
            held = tables[id(kit)] = (kit, table, limits)
        return Replica(held[1], held[2], fast_forward=fast_forward)

    return make


def horizon_s(workload: Workload) -> float:
    """How long faults by chance may come: as long as requests arrive."""
    return float(workload.arrival_s[-1]) if len(workload) else 0.0


def result_of(world: World, seed: int) -> SimResult:
    """Everything a finished run tells."""
    end_s = max(world.journeys.ended_s, horizon_s(world.workload))
    links = list(world.network.links.values())
    cards = [pipe for pipe in world.network.pipes if pipe.kind != "link"]
    counts = {
        "hand-overs that waited for room": world.handovers.waited,
        "reports lost": world.reports.lost,
        "plans asked for": world.replans,
        "second attempts": world.journeys.twinned,
    }
    replicas = tuple(_replica_record(site, end_s) for site in world.yard.all_sites)
    return SimResult(
        as_users_see(world.ledger.records(world.workload), replicas, world.kits.scene.rtt_s),
        dict(world.kits.scene.slos),
        replicas,
        tuple(_link_record(world, pipe) for pipe in (*links, *cards)),
        end_s,
        tuple(world.purse.rates),
        world.sampler.samples(),
        tuple(world.outside.noted),
        counts=counts,
        seed=seed,
        start_rates=tuple(world.purse.start_rates),
    )


def _replica_record(site: Site, end_s: float) -> ReplicaRecord:
    member, replica = site.member, site.replica
    gaps = tuple([(UPPER_S[place], float(count)) for place, count in replica.gaps.filled()])
    return ReplicaRecord(
        member.id,
        member.unit,
        member.template,
        member.model,
        member.region,
        member.role,
        tuple(node for node, _ in site.kit.places),
        site.kit.gpus,
        tuple(site.changes),
        replica.busy_s(end_s),
        replica.computed_tokens,
        replica.decoded_tokens,
        site.peak_blocks,
        replica.total_blocks,
        gaps,
    )


def _link_record(world: World, pipe: Pipe) -> LinkRecord:
    if pipe.kind == "link":
        gbps = next(
            k.gbps for k in world.kits.scene.links if (k.source, k.target) == (pipe.source, pipe.target)
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

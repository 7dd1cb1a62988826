"""Small plans and facts for tests of the Brain, and a world that carries out its actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from potluck.core.brain.brain import Brain
from potluck.core.state import actions as act
from potluck.core.state import events
from potluck.core.state.facts import FleetFacts, ModelFacts, ReplicaFacts, SplitFacts
from potluck.core.state.policy import Policy
from potluck.core.values import plan as plans
from potluck.core.values.layout import single
from potluck.core.values.types import Request, Role
from potluck.plan.assemble.columns import thresholds_of

Phase = Literal["closed", "prefill", "decode"]
SPLIT = SplitFacts(k_p=2.4e-4, b_p=0.004, k_ctxp=1.6e-6, k_ctxd=2.5e-7, b_c=0.032, chunk_tokens=512)
SHORT_TOKENS = 2000  # The longest prompt of the first of two buckets.


def template(
    name: str,
    roles: Sequence[Role] = ("mixed",),
    kind: plans.TemplateKind = "homogeneous",
    model: str = "m",
    closed: Sequence[float] = (),
    prefill: Sequence[float] = (),
    decode: Sequence[float] = (),
) -> plans.Template:
    size = max(len(closed), len(prefill), len(decode))
    rates = [list(item) + [0.0] * (size - len(item)) for item in (prefill, decode, closed)]
    capacity = tuple(plans.BucketCapacity(b, *(rate[b] for rate in rates), 0.1, 0.02) for b in range(size))
    replicas = tuple(plans.PlannedReplica(role, single("node", 1, 8)) for role in roles)
    return plans.Template(name, kind, model, (plans.NodeCount("node", 1),), replicas, capacity, "measured")


def plan(
    templates: Sequence[plans.Template],
    counts: dict[tuple[str, str], int],
    shares: dict[tuple[str, str, Phase], Sequence[float]],
    flows: dict[tuple[str, str, str], Sequence[float]] | None = None,
    longest: Sequence[int] = (SHORT_TOKENS, 100_000),
) -> plans.Plan:
    """Counts by (template, region), rates by (template, region, phase), flows by (model, from, to)."""
    models = dict.fromkeys(item.model for item in templates)
    made = plans.Plan(
        "test",
        tuple(templates),
        tuple(plans.Deployment(name, region, count) for (name, region), count in counts.items()),
        tuple(plans.LengthBucket(m, b, tokens, 1.0) for m in models for b, tokens in enumerate(longest)),
        tuple(
            plans.PlannedShare(t, r, b, p, x)
            for (t, r, p), rates in shares.items()
            for b, x in enumerate(rates)
            if x
        ),
        tuple(
            plans.PlannedFlow(m, b, s, d, x)
            for (m, s, d), rates in (flows or {}).items()
            for b, x in enumerate(rates)
            if x
        ),
        (),
        1.0,
        0.0,
    )
    return replace(made, thresholds=thresholds_of(made))


def facts(
    templates: Sequence[plans.Template],
    *,
    batch: int = 8,
    longest: dict[str, int] | None = None,
    exact: bool = False,
) -> FleetFacts:
    limits = longest or {}
    replicas = {
        (item.name, i): ReplicaFacts(1e-4, 1e-3, 0.02, batch, 20_000, limits.get(item.name, 200_000))
        for item in templates
        for i in range(len(item.replicas))
    }
    models = {item.model: ModelFacts(1e5, exact_prefix=exact) for item in templates}
    splits = {item.name: SPLIT for item in templates if item.kind == "pair"}
    return FleetFacts(models, replicas, splits, {("far", "near"): 10.0, ("near", "far"): 10.0})


def request(
    name: str,
    prompt: int = 1000,
    output: int = 100,
    model: str = "m",
    at_s: float = 0.0,
    deadline_s: float | None = None,
    blocks: tuple[int, ...] = (),
) -> Request:
    return Request(name, model, at_s, prompt, output, 0, deadline_s, blocks)


@dataclass
class Job:
    """A request that the world runs."""

    run: act.Run
    done: int = 0
    first: bool = False

    def needs(self, replica: str) -> bool:
        return any(segment.replica == replica for segment in self.run.route.segments[self.done :])


@dataclass
class World:
    """Carries out actions at once, but for time: the test says what happens next. Checks what it is asked."""

    brain: Brain
    jobs: dict[str, Job] = field(default_factory=dict)
    members: dict[str, plans.ReplicaSpec] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    dying: dict[str, plans.ReplicaSpec] = field(default_factory=dict)
    """Gone, and the Brain does not know yet: it may still send there, and that fails."""
    requests: dict[str, Request] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    log: list[tuple[float, events.Event, tuple[act.Action, ...]]] = field(default_factory=list)
    answers: bool = False  # Whether it says itself what is inquired after; else the test does.
    left: dict[str, int] = field(default_factory=dict)
    """Attempts that were abandoned, and how many tokens their users have."""
    now_s: float = 0.0

    def tell(self, event: events.Event) -> list[act.Action]:
        if isinstance(event, events.RequestArrived) and event.request.id not in self.requests:
            self.requests[event.request.id] = event.request
        actions = self.brain.on(self.now_s, event)
        self.log.append((self.now_s, event, tuple(actions)))
        for action in actions:
            self._do(action)
        return actions

    def _do(self, action: act.Action) -> None:
        match action:
            case act.Run():
                self._run(action)
            case act.Refuse(name, _, detail):
                assert detail
                self._end(name, "refused")
            case act.Abort(name, replicas):
                assert replicas
                assert set(replicas) <= self.members.keys() | self.dying.keys()
                job = self.jobs.pop(name, None)
                if job is not None:
                    self.left[name] = job.run.streamed_tokens + int(job.first)
            case act.QueryAttempt(name, attempt) if self.answers:
                if name in self.jobs:
                    assert self.jobs[name].run.attempt == attempt
                    self.tell(events.AttemptRunning(name, attempt))
                else:
                    self.tell(events.AttemptFailed(name, attempt, "timeout", "", self.left.pop(name)))
            case act.StartReplica(replica_spec):
                assert replica_spec.id not in self.members
                self.members[replica_spec.id] = replica_spec
            case act.DrainReplica(replica):
                assert replica in self.ready
                self.ready.discard(replica)
                self.draining.add(replica)
            case act.StopReplica(replica):
                self.lose(replica, tell=False)
            case act.FlipReplica(replica, _):
                assert replica in self.members

    def _run(self, run: act.Run) -> None:
        wanted = self.requests[run.request]
        assert run.request not in self.ended
        assert run.request not in self.jobs
        for segment in run.route.segments:
            assert segment.replica in self.ready | self.dying.keys(), "only ready replicas get work"
            assert (self.members | self.dying)[segment.replica].model == wanted.model
        assert run.prompt_tokens == wanted.prompt_tokens + run.streamed_tokens
        assert run.route.segments[-1].start <= run.prompt_tokens
        self.attempts[run.request] = self.attempts.get(run.request, 0) + 1
        assert run.attempt == self.attempts[run.request] - 1
        self.jobs[run.request] = Job(run)

    def _end(self, name: str, how: str) -> None:
        assert name not in self.ended, "a request ends once"
        self.ended[name] = how
        self.jobs.pop(name, None)

    # What may happen.

    def make_ready(self, replica: str, kv_version: int = 0, max_running: int = 0) -> list[act.Action]:
        self.ready.add(replica)
        return self.tell(events.ReplicaReady(replica, kv_version, max_running))

    def plan(self, new: plans.Plan, ready: bool = True) -> list[act.Action]:
        actions = self.tell(events.PlanReceived(new))
        if ready:
            self.all_ready()
        return actions

    def all_ready(self) -> None:
        for replica in [m for m in self.members if m not in self.ready and m not in self.draining]:
            self.make_ready(replica)

    def arrive(self, new: Request) -> list[act.Action]:
        return self.tell(events.RequestArrived(new))

    def advance(self, name: str) -> list[act.Action]:
        """The next thing on a request's way."""
        job = self.jobs[name]
        if job.done < len(job.run.route.segments) - 1:
            job.done += 1
            return self.tell(events.SegmentDone(name, job.run.attempt, job.done - 1))
        if not job.first:
            job.first = True
            return self.tell(events.FirstToken(name, job.run.attempt))
        self._end(name, "answered")
        return self.tell(events.RequestFinished(name, job.run.attempt, self.requests[name].max_output_tokens))

    def finish(self, name: str) -> None:
        while name in self.jobs:
            self.advance(name)

    def fail(self, name: str, kind: events.FailureKind, where: str, streamed: int = 0) -> list[act.Action]:
        attempt = self.jobs.pop(name).run.attempt
        return self.tell(events.AttemptFailed(name, attempt, kind, where, streamed))

    def lose(self, replica: str, tell: bool = True, late: bool = False) -> None:
        """A replica dies, or was stopped; its requests fail, before or after that is known."""
        self.dying[replica] = self.members.pop(replica)
        self.ready.discard(replica)
        self.draining.discard(replica)
        if tell and not late:
            self.tell(events.ReplicaLost(replica, "died"))
        if not (tell and late):
            del self.dying[replica]
        while broken := [name for name, job in self.jobs.items() if job.needs(replica)]:
            job = self.jobs[broken[0]]
            self.fail(broken[0], "replica", replica, job.run.streamed_tokens + int(job.first))
        if tell and late:
            self.tell(events.ReplicaLost(replica, "died"))
            self.dying.pop(replica, None)

    def drain_out(self, replica: str) -> None:
        while busy := [name for name, job in self.jobs.items() if job.needs(replica)]:
            self.finish(busy[0])
        self.tell(events.ReplicaDrained(replica))


def world(
    new: plans.Plan, policy: Policy | None = None, known: FleetFacts | None = None, ready: bool = True
) -> World:
    made = World(Brain(known or facts(new.templates), policy or Policy()))
    made.plan(new, ready)
    return made


def assert_idle(brain: Brain) -> None:
    """With nothing open, every count is back at nothing."""
    assert brain.requests == {}
    for replica in brain.fleet.views.values():
        assert (replica.open_requests, replica.open_prefill_tokens, replica.open_context_tokens) == (0, 0, 0)
        assert replica.yielding_tokens == 0
    assert brain.router.links.open_bytes == 0
    for target in (*brain.table.singles.values(), *brain.table.groups.values()):
        assert abs(target.load) < 1e-6
        assert target.in_low == 0
        assert not target.waiting

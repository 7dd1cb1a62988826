"""A driver from hell for the Brain: events come late, twice, out of order or not at all, over random fleets.

It keeps the truth itself: which replicas are up, where each attempt is, how many tokens reached each user. What it
promises the Brain is only what docs/policies.md asks of a driver: `RequestArrived`, `RequestCancelled`,
`ReplicaReady` and `ReplicaLost` arrive in the end, and an `QueryAttempt` is answered with the truth, though that
answer may get lost as well.

Whatever the Brain does is held against that: `Broken` is raised when a request ends twice or not at all, when work is
asked for on one that ended, when tokens would be repeated, or when a count does not return to nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

import brain_builders as build

from potluck.core.brain.brain import Brain
from potluck.core.brain.requests import MAX_RECENTLY_ENDED
from potluck.core.state import actions as act
from potluck.core.state import events as brain_events
from potluck.core.state.facts import FleetFacts
from potluck.core.state.fleet import ReplicaState
from potluck.core.state.policy import Policy
from potluck.core.values.plan import Plan, ReplicaSpec
from potluck.core.values.service import RequestClass, with_built_in
from potluck.core.values.types import Request, Slo

SURE = (
    brain_events.RequestArrived,
    brain_events.RequestCancelled,
    brain_events.ReplicaReady,
    brain_events.ReplicaLost,
    brain_events.PlanReceived,
    brain_events.Tick,
)
"""They may be late or doubled, but come."""
MODELS = (*("m",) * 12, *("f",) * 6, "other")
KINDS = ("interactive", "standard", "batch", "hasty", "none such")
LATE_MOST, REMEMBERED = 400, 4000
ROUND_EVENTS = 20_000
FATES = ("answered", "refused", "cancelled")


class Chaos:
    """One Brain and its driver."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.events = 0
        self.fates = dict.fromkeys(FATES, 0)
        self.asked = 0
        self._number = 0
        self.new_brain()

    def new_brain(self) -> None:
        """Another fleet under other rules."""
        chance = self.random
        self.now_s = 0.0
        self.brain = Brain(facts(chance), policy(chance))
        self.jobs: dict[str, Job] = {}
        self.recent: list[tuple[str, int]] = []
        """Some that ended, whose events may still be under way, and how many had come before they ended."""
        self.members: dict[str, ReplicaSpec] = {}
        self.up: set[str] = set()
        self.draining: set[str] = set()
        self.late: list[brain_events.Event] = []
        self.views: list[ReplicaState] = []
        self._news: deque[brain_events.Event] = deque()
        self.calm = False
        self.tell(brain_events.PlanReceived(plan(chance)))

    # Telling.

    def tell(self, event: brain_events.Event) -> None:
        """Now, later, twice or never."""
        dice = 1.0 if self.calm else self.random.random()
        if dice < 0.06 and len(self.late) < LATE_MOST:
            self.late.append(event)
            return
        if dice < 0.08 and not isinstance(event, SURE):
            return
        if dice < 0.14 and not isinstance(event, brain_events.PlanReceived) and len(self.late) < LATE_MOST:
            self.late.append(event)
        self._on(event)

    def _on(self, event: brain_events.Event) -> None:
        """What comes of carrying out actions is told when all of them are done."""
        self._news.append(event)
        if len(self._news) > 1:
            return
        while self._news:
            self.events += 1
            for action in self.brain.on(self.now_s, self._news[0]):
                self._do(action)
            self._news.popleft()

    def _do(self, action: act.Action) -> None:
        match action:
            case act.Run():
                self._run(action)
            case act.Refuse(name):
                job = self._open(name, action)
                self._end(job, "refused")
            case act.Abort(name):
                if name in self.jobs:
                    self.jobs[name].run = None
            case act.QueryAttempt(name, attempt):
                self._answer(name, attempt)
            case act.StartReplica(replica_spec):
                if replica_spec.id in self.members:
                    raise InvariantBroken(f"{replica_spec.id} was started twice")
                self.members[replica_spec.id] = replica_spec
                self.views.append(self.brain.fleet.views[replica_spec.id])
            case act.DrainReplica(replica):
                if replica in self.up:
                    self.draining.add(replica)
            case act.StopReplica(replica):
                self._down(replica)
            case act.FlipReplica(replica):
                if replica not in self.members and not self._unheard(replica):
                    raise InvariantBroken(f"{replica} is flipped and not there")

    def _unheard(self, replica: str) -> bool:
        """Whether the Brain knows that it is gone, or the letter that says so is still under way."""
        letters = (*self.late, *self._news)
        crossed = any(
            isinstance(letter, brain_events.ReplicaLost) and letter.replica == replica for letter in letters
        )
        return crossed or replica not in self.brain.fleet.views

    def _open(self, name: str, action: act.Action) -> Job:
        """A request that may still be answered; an action for any other is a mistake, but for crossed letters."""
        job = self.jobs.get(name)
        if job is None:
            raise InvariantBroken(f"{action} is about a request that ended")
        return job

    def _run(self, run: act.Run) -> None:
        job = self._open(run.request, run)
        if job.fate:  # the driver knows that it ended, the Brain does not yet: nothing to do
            return
        if run.attempt <= job.attempt:
            raise InvariantBroken(f"{run} is not a new attempt after {job.attempt}")
        if job.run is not None:
            raise InvariantBroken(f"{run}, but attempt {job.attempt} still runs")
        if (
            run.streamed_tokens != job.streamed
            or run.prompt_tokens != job.request.prompt_tokens + job.streamed
        ):
            raise InvariantBroken(f"{run}, but the user has {job.streamed} tokens")
        job.attempt, job.run, job.done, job.first = run.attempt, run, 0, False
        for segment in run.route.segments:
            if segment.replica not in self.up:
                self._fail(job, "replica", segment.replica)
                return

    def _answer(self, name: str, attempt: int) -> None:
        self.asked += 1
        job = self._open(name, act.QueryAttempt(name, attempt))
        if job.run is not None and job.attempt == attempt:
            self.tell(brain_events.AttemptRunning(name, attempt))
        elif job.last is not None and job.last.attempt == attempt:
            self.tell(job.last)
        elif job.fate != "cancelled":
            self.tell(brain_events.AttemptFailed(name, attempt, "timeout", "", job.streamed))

    def _fail(self, job: Job, kind: brain_events.FailureKind, where: str) -> None:
        job.run = None
        if job.streamed >= job.request.max_output_tokens:  # nothing is missing
            self._end(job, "answered")
        job.last = brain_events.AttemptFailed(job.request.id, job.attempt, kind, where, job.streamed)
        self.tell(job.last)

    def _end(self, job: Job, fate: str) -> None:
        """The driver lets go of it. The first fate is what the user saw."""
        job.run = None
        if not job.fate:
            job.fate, job.ended = fate, self._number
            self.fates[fate] += 1

    def _down(self, replica: str) -> None:
        self.members.pop(replica, None)
        self.up.discard(replica)
        self.draining.discard(replica)
        for job in list(self.jobs.values()):
            if job.run is not None and any(
                segment.replica == replica for segment in job.run.route.segments[job.done :]
            ):
                self._fail(job, "replica", replica)

    # What happens.

    def step(self) -> None:
        """One thing, by chance."""
        chance = self.random
        dice = chance.random()
        if dice < 0.22:
            if len(self.jobs) < 100:
                self._arrive()
        elif dice < 0.74:
            self._advance()
        elif dice < 0.82:
            if self.late:
                self._on(self.late.pop(chance.randrange(len(self.late))))
        elif dice < 0.88:
            self.now_s += chance.choice((0.1, 0.5, 1.0, 1.0, 3.0))
            self.tell(brain_events.Tick())
            self._sweep()
        elif dice < 0.92:
            self._trouble()
        else:
            self._fleet_news()

    def _arrive(self) -> None:
        chance = self.random
        if self.recent and chance.random() < 0.05:  # said again although it is long over
            name, ended = chance.choice(self.recent)
            if (
                self._number - ended < MAX_RECENTLY_ENDED // 2
            ):  # the Brain remembers only the last MAX_RECENTLY_ENDED
                self._on(brain_events.RequestArrived(build.request(name, at_s=self.now_s)))
            return
        self._number += 1
        wait_s = chance.choice((None, None, None, 0.5, 5.0))
        request = build.request(
            f"q{self._number}",
            chance.choice((1, 900, 2000, 4900, 30_000)),
            chance.choice((1, 10, 100)),
            chance.choice(MODELS),
            self.now_s,
            None if wait_s is None else self.now_s + wait_s,
        )._replace(tenant=chance.choice("xy"), request_class=chance.choice(KINDS))
        self.jobs[request.id] = Job(request)
        self.tell(brain_events.RequestArrived(request))

    def _any(self) -> Job:
        """One of the requests, mostly of the oldest."""
        return next(islice(self.jobs.values(), self.random.randrange(min(len(self.jobs), 40)), None))

    def _advance(self) -> None:
        if not self.jobs:
            return
        job = self._any()
        run = job.run
        if run is None:
            return
        name = job.request.id
        if job.done < len(run.route.segments) - 1:
            job.done += 1
            if self.random.random() < 0.3:  # late or not at all, as drivers may be
                self.tell(brain_events.SegmentComputed(name, job.attempt, job.done - 1))
            self.tell(brain_events.SegmentDone(name, job.attempt, job.done - 1))
        elif not job.first:
            job.first = True
            job.streamed += 1
            self.tell(brain_events.FirstToken(name, job.attempt))
        elif job.streamed + 5 < job.request.max_output_tokens and self.random.random() < 0.5:
            job.streamed += self.random.randrange(5)
        else:
            job.streamed = job.request.max_output_tokens
            self._end(job, "answered")
            job.last = brain_events.RequestFinished(name, job.attempt, job.streamed)
            self.tell(job.last)

    def _trouble(self) -> None:
        """A request fails, or its user goes away; a replica is lost, with or without a word of what ran there."""
        chance = self.random
        dice = chance.random()
        running = [job for job in self.jobs.values() if job.run is not None]
        if dice < 0.5 and running:
            job = chance.choice(running)
            assert job.run is not None
            kinds: tuple[brain_events.FailureKind, ...] = ("replica", "link", "transfer", "timeout", "memory")
            kind = chance.choice(kinds)
            replicas = [segment.replica for segment in job.run.route.segments]
            where = "far->near" if kind in ("link", "transfer") else chance.choice(replicas)
            self._fail(job, kind, where)
        elif dice < 0.75 and self.jobs:
            job = self._any()
            if not job.fate:
                self._end(job, "cancelled")
                self.tell(brain_events.RequestCancelled(job.request.id))
        elif self.members:
            count = 1 if chance.random() < 0.8 else len(self.members) // 2
            for replica in chance.sample(sorted(self.members), max(1, count)):
                self._down(replica)
                self.tell(brain_events.ReplicaLost(replica, "chance", chance.choice((0.0, 0.0, 30.0))))

    def _fleet_news(self) -> None:
        chance = self.random
        dice = chance.random()
        starting = [name for name in self.members if name not in self.up]
        if dice < 0.6 and starting:
            self.up.add(replica := chance.choice(starting))
            self.tell(brain_events.ReplicaReady(replica))
        elif dice < 0.65:
            self.tell(brain_events.PlanReceived(plan(chance)))
        elif dice < 0.75 and self.draining:
            replica = chance.choice(sorted(self.draining))
            self.tell(brain_events.ReplicaDrained(replica))
        elif dice < 0.9 and self.members:
            free = chance.randrange(20_000)
            status = brain_events.ReplicaStatus(
                chance.randrange(4), chance.randrange(4), 5000, 9000, free, 20_000, 0.02
            )
            self.tell(brain_events.ReplicaReported(chance.choice(list(self.members)), status))
        else:
            self.tell(
                brain_events.LinkReported("far", "near", chance.random(), 1e9, chance.choice((0.0, 10.0)))
            )

    # Checking.

    def _sweep(self) -> None:
        """Let go of those that ended on both sides."""
        requests = self.brain.requests
        waiting = {e.request.id for e in self.late if isinstance(e, brain_events.RequestArrived)}
        for name in [name for name, job in self.jobs.items() if job.fate and name not in requests]:
            if name not in waiting:
                self.recent.append((name, self.jobs[name].ended))
                del self.jobs[name]
        del self.recent[:-REMEMBERED]

    def settle(self) -> None:
        """No more chance: all letters arrive, time passes, and everything must come to its end."""
        self.calm = True
        while self.late:
            self._on(self.late.pop())
        for _ in range(400):
            for replica in [name for name in self.members if name not in self.up]:
                self.up.add(replica)
                self.tell(brain_events.ReplicaReady(replica))
            for _ in range(20):
                for job in list(self.jobs.values()):
                    if job.run is not None:
                        self._finish(job)
            self.now_s += 20.0
            self._on(brain_events.Tick())
            self._sweep()
            if not self.jobs and not self.brain.sizes()["inquiries"]:
                break
        self._at_rest()
        self.calm = False

    def _finish(self, job: Job) -> None:
        if (
            any(segment.replica not in self.up for segment in job.run.route.segments[job.done :])
            if job.run
            else False
        ):
            self._fail(job, "replica", "")
            return
        job.streamed = job.request.max_output_tokens
        self._end(job, "answered")
        job.last = brain_events.RequestFinished(job.request.id, job.attempt, job.streamed)
        self.tell(job.last)

    def _at_rest(self) -> None:
        brain = self.brain
        if self.jobs or brain.requests:
            left = sorted({*self.jobs, *brain.requests})[:5]
            raise InvariantBroken(
                f"{len(self.jobs)} and {len(brain.requests)} requests never end, such as {left}"
            )
        for replica in (*self.views, *brain.fleet.views.values()):
            counts = (replica.open_requests, replica.open_prefill_tokens, replica.open_context_tokens)
            if counts != (0, 0, 0):
                raise InvariantBroken(f"{replica.member.id} still counts {counts}")
        build.assert_idle(brain)
        sizes = brain.sizes()
        wrong = {
            name: size
            for name, size in sizes.items()
            if size > (2 * MAX_RECENTLY_ENDED if name == "ended" else 0)
        }
        if wrong:
            raise InvariantBroken(f"left over with nothing open: {wrong}")
        self.views = [replica for replica in self.views if not replica.gone]


def run_chaos(seed: int, events: int) -> Chaos:
    """So many events, over as many fleets as that takes; what breaks says where, so that it can be found again."""
    chaos = Chaos(seed)
    rounds = 0
    try:
        while chaos.events < events:
            stop = chaos.events + min(ROUND_EVENTS, events - chaos.events)
            while chaos.events < stop:
                chaos.step()
            chaos.settle()
            rounds += 1
            if rounds % 3 == 0:
                chaos.new_brain()
    except Exception as error:
        raise InvariantBroken(
            f"seed {seed}, event {chaos.events}: {type(error).__name__}: {error}"
        ) from error
    return chaos


# Random fleets and rules for the driver from hell, and what it knows of a request.

REGIONS = ("near", "far", "east")
TEMPLATES = (
    build.template("plain", ("mixed", "mixed"), closed=(4.0, 1.0)),
    build.template("combo", ("prefill", "decode", "decode"), "combo", closed=(2.0, 2.0)),
    build.template("pair", ("prefill", "mixed"), "pair", closed=(2.0, 2.0)),
    build.template("one", closed=(2.0, 2.0)),
    build.template("p", ("prefill",), prefill=(2.0, 2.0), model="f"),
    build.template("d", ("decode", "decode"), decode=(2.0, 2.0), model="f"),
)
BALANCES: tuple[str, ...] = ("learned", "goodput", "round-robin", "token", "fixed")
SCALINGS: tuple[str, ...] = ("none", "none", "cauchy", "flips", "replan")


class InvariantBroken(AssertionError):
    """The Brain did what it must never do."""


@dataclass(slots=True)
class Job:
    """What the driver knows of a request."""

    request: Request
    attempt: int = -1  # The last one it was asked to run.
    run: act.Run | None = None  # That, while it runs.
    done: int = 0
    first: bool = False
    streamed: int = 0  # Tokens that the user has.
    fate: str = ""
    ended: int = 0  # How many requests had come then.
    last: brain_events.RequestFinished | brain_events.AttemptFailed | None = None
    """How the last attempt ended, to be told again when asked."""


def facts(chance: Random) -> FleetFacts:
    slo = chance.choice((None, None, Slo(2.0, 0.1)))
    known = build.facts(TEMPLATES, batch=chance.choice((2, 8)), longest={"plain": 5000})
    models = {name: replace(model, slo=slo) for name, model in known.models.items()}
    sizes = {template.name: len(template.replicas) for template in TEMPLATES}
    places = {(name, i): (f"node/{i // 2}",) for name, count in sizes.items() for i in range(count)}
    return replace(known, models=models, places=places)


def policy(chance: Random) -> Policy:
    return Policy(
        balance=chance.choice(BALANCES),
        opportunistic=chance.random() < 0.7,
        split=chance.random() < 0.7,
        split_overflow=chance.random() < 0.5,
        low_decodes=chance.random() < 0.5,
        scaling=chance.choice(SCALINGS),
        retries=chance.choice((0, 1, 2)),
        max_wait_s=chance.choice((2.0, 10.0)),
        grace_s=chance.choice((2.0, 20.0)),
        classes=with_built_in((RequestClass("hasty", stops=True),)),
    )


def plan(chance: Random) -> Plan:
    """Some copies of some templates in some regions, with the shares and flows that fit them."""
    templates = [template for template in TEMPLATES[:4] if chance.random() < 0.6] or [TEMPLATES[3]]
    places = {(template.name, chance.choice(REGIONS)): chance.choice((1, 1, 2, 3)) for template in templates}
    shares = {(name, region, "closed"): (1.0, 0.5) for name, region in places}
    flows: dict[tuple[str, str, str], tuple[float, float]] = {}
    if chance.random() < 0.6:
        templates += TEMPLATES[4:]
        source, target = chance.choice(REGIONS), chance.choice(REGIONS)
        places |= {("p", source): 2, ("d", target): 1}
        shares |= {("p", source, "prefill"): (1.0, 1.0), ("d", target, "decode"): (1.0, 1.0)}
        flows[("f", source, target)] = (1.0, 1.0)
    return build.plan(templates, places, shares, flows)  # type: ignore[arg-type]

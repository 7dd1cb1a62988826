"""Random events in any order: every request ends once and all counts return to zero."""

from __future__ import annotations

import brain_builders as build
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from potluck.core.brain.brain import Brain
from potluck.core.brain.recovery import MAX_ATTEMPTS
from potluck.core.scaling.roles import FLIPPABLE
from potluck.core.state import events
from potluck.core.state.actions import ResyncCache, Run
from potluck.core.state.policy import Policy

TEMPLATES = (
    build.template("plain", ("mixed", "mixed"), closed=(4.0, 1.0)),
    build.template("combo", ("prefill", "decode", "decode"), "combo", closed=(2.0, 2.0)),
    build.template("pair", ("prefill", "mixed"), "pair", closed=(2.0, 2.0)),
    build.template("p", ("prefill",), prefill=(2.0, 2.0), model="f"),
    build.template("d", ("decode", "decode"), decode=(2.0, 2.0), model="f"),
    build.template("one", closed=(2.0, 2.0)),
)
FACTS = build.facts(TEMPLATES, batch=2, longest={"plain": 5000})
BIG = build.plan(
    TEMPLATES[:5],
    {
        ("plain", "near"): 1,
        ("combo", "near"): 1,
        ("pair", "near"): 1,
        ("p", "near"): 1,
        ("p", "far"): 1,
        ("d", "near"): 1,
    },
    {
        ("plain", "near", "closed"): (1.0, 0.2),
        ("combo", "near", "closed"): (0.5, 1.0),
        ("pair", "near", "closed"): (0.5, 1.0),
        ("p", "near", "prefill"): (1.0, 0.0),
        ("p", "far", "prefill"): (0.0, 1.0),
        ("d", "near", "decode"): (1.0, 1.0),
    },
    {("f", "near", "near"): (1.0, 0.0), ("f", "far", "near"): (0.0, 1.0)},
)
SMALL = build.plan(
    (TEMPLATES[0], TEMPLATES[3], TEMPLATES[4]),
    {("plain", "near"): 2, ("p", "near"): 1, ("d", "near"): 1},
    {
        ("plain", "near", "closed"): (1.0, 0.2),
        ("p", "near", "prefill"): (1.0, 0.0),
        ("d", "near", "decode"): (1.0, 1.0),
    },
    {("f", "near", "near"): (1.0, 1.0)},
)
PAIR = build.plan((TEMPLATES[2],), {("pair", "near"): 1}, {("pair", "near", "closed"): (1.0, 1.0)})
ONE = build.plan((TEMPLATES[5],), {("one", "near"): 1}, {("one", "near", "closed"): (1.0, 1.0)})
PLANS = {"big": BIG, "small": SMALL, "pair": PAIR, "one": ONE}
POLICIES = [
    Policy(max_wait_s=5.0, grace_s=2.0),
    Policy(max_wait_s=5.0, split_overflow=False, scaling="flips"),
    Policy(max_wait_s=5.0, balance="token", opportunistic=False),
    Policy(max_wait_s=5.0, balance="token", split=False, retries=0),
    Policy(max_wait_s=5.0, balance="fixed", retries=1, affinity=0.0),
    Policy(max_wait_s=5.0, balance="round-robin", adapt_threshold=False, low_decodes=False),
]


class BrainMachine(RuleBasedStateMachine):
    world: build.World

    @initialize(place=st.integers(0, len(POLICIES) - 1), first=st.sampled_from(["", *sorted(PLANS)]))
    def begin(self, place: int, first: str) -> None:
        self.policy = POLICIES[place]
        self.world = build.World(Brain(FACTS, self.policy), answers=True)
        self.number = 0
        self.caches: dict[str, tuple[frozenset[int], int]] = {}
        """Replica to (blocks held, reports made). A replica that comes back under its name goes on counting."""
        if first:
            self.world.plan(PLANS[first])

    def any_of(self, data: st.DataObject, names: object) -> str:
        return data.draw(st.sampled_from(sorted(names)))  # type: ignore[call-overload]

    @rule(new=st.sampled_from(sorted(PLANS)))
    def plan(self, new: str) -> None:
        self.world.plan(PLANS[new], ready=False)

    @rule(
        prompt=st.sampled_from([1, 900, 2000, 2001, 4900, 30_000, 300_000]),
        model=st.sampled_from(["m", "m", "f", "other"]),
        wait_s=st.sampled_from([None, None, 0.5, 0.0]),
        chain=st.integers(0, 3),
        count=st.integers(1, 8),
    )
    def arrive(self, prompt: int, model: str, wait_s: float | None, chain: int, count: int) -> None:
        blocks = tuple(chain * 100 + place for place in range(min(20, prompt // 16))) if chain else ()
        deadline_s = None if wait_s is None else self.world.now_s + wait_s
        for _ in range(count):
            self.number += 1
            name, now_s = f"q{self.number}", self.world.now_s
            views = self.world.brain.fleet.views
            for action in self.world.arrive(
                build.request(name, prompt, 10, model, now_s, deadline_s, blocks)
            ):
                segments = action.route.segments if isinstance(action, Run) else ()
                assert not any(views[segment.replica].cordoned for segment in segments)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def advance(self, data: st.DataObject, steps: int) -> None:
        name = self.any_of(data, self.world.jobs)
        for _ in range(steps):
            if name in self.world.jobs:
                self.world.advance(name)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), kind=st.sampled_from(["replica", "link", "transfer", "timeout", "memory"]))
    def fail(self, data: st.DataObject, kind: str) -> None:
        name = self.any_of(data, self.world.jobs)
        segments = self.world.jobs[name].run.route.segments
        where = data.draw(st.sampled_from([segment.replica for segment in segments]))
        if kind in ("link", "transfer") and self.world.jobs[name].done < len(segments) - 1:
            regions = [self.world.members[segment.replica].region for segment in segments]
            where = f"{regions[0]}->{regions[1]}"
        streamed = self.world.jobs[name].run.streamed_tokens + int(self.world.jobs[name].first)
        self.world.fail(name, kind, where, streamed)  # type: ignore[arg-type]

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = self.any_of(data, self.world.requests)
        if name not in self.world.ended:
            self.world.tell(events.RequestCancelled(name))
            assert name not in self.world.jobs, "work on it goes on"
            self.world.ended[name] = "cancelled"

    @precondition(lambda self: set(self.world.members) - self.world.ready - self.world.draining)
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        waiting = set(self.world.members) - self.world.ready - self.world.draining
        self.world.make_ready(self.any_of(data, waiting))

    @rule()
    def all_ready(self) -> None:
        self.world.all_ready()

    @precondition(lambda self: self.world.members)
    @rule(data=st.data(), late=st.booleans())
    def lose(self, data: st.DataObject, late: bool) -> None:
        self.world.lose(self.any_of(data, self.world.members), late=late)

    @precondition(lambda self: self.world.draining)
    @rule(data=st.data())
    def drained(self, data: st.DataObject) -> None:
        self.world.drain_out(self.any_of(data, self.world.draining))

    @precondition(lambda self: self.world.members)
    @rule(data=st.data(), what=st.sampled_from(["drain", "prefill", "decode", "cordon", "uncordon"]))
    def order(self, data: st.DataObject, what: str) -> None:
        """A person empties a replica, lets nothing new go there, or gives one that does one thing another role."""
        replica = self.any_of(data, self.world.members)
        view = self.world.brain.fleet.views[replica]
        if what in ("drain", "cordon", "uncordon") or (
            view.role != "mixed" and view.member.kind in FLIPPABLE
        ):
            self.world.tell(events.OperatorOrdered(replica, what))  # type: ignore[arg-type]

    @rule(passed_s=st.sampled_from([0.1, 1.0, 4.0]))
    def tick(self, passed_s: float) -> None:
        self.world.now_s += passed_s
        self.world.tell(events.Tick())

    @precondition(lambda self: self.world.members)
    @rule(data=st.data(), busy=st.booleans())
    def report(self, data: st.DataObject, busy: bool) -> None:
        figures = (3, 2, 5000, 9000, 10, 20_000, 0.02) if busy else (0, 0, 0, 0, 20_000, 20_000, 0.0)
        status = events.ReplicaStatus(*figures)
        self.world.tell(events.ReplicaReported(self.any_of(data, self.world.members), status))

    @rule(use=st.floats(0, 1), queued=st.sampled_from([0.0, 1e10]), gbps=st.sampled_from([0.0, 1.0, 10.0]))
    def link(self, use: float, queued: float, gbps: float) -> None:
        self.world.tell(events.LinkReported("far", "near", use, queued, gbps))

    @precondition(lambda self: self.world.members)
    @rule(
        data=st.data(),
        chain=st.integers(1, 3),
        depth=st.integers(1, 20),
        gone=st.booleans(),
        lost=st.sampled_from([False, False, False, True]),
    )
    def cached(self, data: st.DataObject, chain: int, depth: int, gone: bool, lost: bool) -> None:
        """A cache reports, or its report is lost; whoever is asked for all it holds says so at once."""
        blocks = tuple(chain * 100 + place for place in range(depth))
        replica = self.any_of(data, self.world.members)
        held, sequence = self.caches.get(replica, (frozenset(), 0))
        held = held - set(blocks) if gone else held | set(blocks)
        self.caches[replica] = held, sequence + 1
        if lost:
            return
        event = events.CacheReported(replica, sequence + 1, () if gone else blocks, blocks if gone else ())
        for action in self.world.tell(event):
            if isinstance(action, ResyncCache):
                assert action.replica == replica
                assert not self.world.tell(
                    events.CacheReported(replica, sequence + 1, tuple(sorted(held)), whole=True)
                )

    @rule(
        name=st.sampled_from(["q1", "q2", "nobody"]), replica=st.sampled_from(["nowhere", "plain@near#0/0"])
    )
    def nonsense(self, name: str, replica: str) -> None:
        """Late, repeated and unknown: none of it does anything."""
        if name not in self.world.jobs and name not in self.world.requests:
            for event in (
                events.SegmentDone(name, 0, 0),
                events.FirstToken(name, 0),
                events.RequestFinished(name, 0, 5),
                events.RequestCancelled("nobody"),
            ):
                assert self.world.tell(event) == []
        for attempt in (self.world.attempts.get(name, 0), -1):  # the next one and none
            assert self.world.tell(events.AttemptFailed(name, attempt, "replica", "elsewhere", 1)) == []
            assert self.world.tell(events.SegmentDone(name, attempt, 7)) == []
            assert self.world.tell(events.FirstToken(name, attempt)) == []
            assert self.world.tell(events.RequestFinished(name, attempt, 1)) == []
        for event in (
            events.ReplicaLost("nowhere", ""),
            events.ReplicaReady("nowhere"),
            events.ReplicaDrained("nowhere"),
        ):
            assert self.world.tell(event) == []
        if name in self.world.requests:
            assert self.world.tell(events.RequestArrived(self.world.requests[name])) == []
        assert (
            self.world.tell(events.ReplicaReported(replica, events.ReplicaStatus(0, 0, 0, 0, 1, 1, 0.0)))
            == []
        )

    @invariant()
    def counts_are_right(self) -> None:
        brain = self.world.brain
        open_ids = set(self.world.requests) - set(self.world.ended)
        assert set(brain.requests) == open_ids
        sent = {view.member.id: 0 for view in brain.fleet.views.values()}
        for job in self.world.jobs.values():
            for segment in job.run.route.segments[job.done :]:
                if segment.replica in sent:
                    sent[segment.replica] += 1
        for view in brain.fleet.views.values():
            assert view.open_requests == sent[view.member.id]
            assert view.open_prefill_tokens >= 0
            assert view.open_context_tokens >= 0
        assert all(count <= MAX_ATTEMPTS for count in self.world.attempts.values())
        assert all(req.failures <= self.policy.retries for req in brain.requests.values())

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.all_ready()
        while world.jobs:
            world.finish(next(iter(world.jobs)))
        world.now_s += 100.0
        world.tell(events.Tick())
        world.now_s += 100.0
        world.tell(events.Tick())
        while world.jobs:
            world.finish(next(iter(world.jobs)))
        assert set(world.ended) == set(world.requests)
        build.assert_idle(world.brain)
        again = Brain(FACTS, self.policy)
        for at_s, event, actions in world.log:
            assert tuple(again.on(at_s, event)) == actions, "the same events, the same actions"


TestEverything = BrainMachine.TestCase
TestEverything.settings = settings(max_examples=30, stateful_step_count=40, report_multiple_bugs=False)

"""Requests that require exact KV under plans with lossy transfers."""

from __future__ import annotations

from dataclasses import replace

import brain_builders as build
import pytest
from brain_chaos_driver import Chaos, InvariantBroken

from potluck.core.state.actions import Run
from potluck.core.state.events import Event, PlanReceived, RequestArrived
from potluck.core.values.kv import codecs_between, lossy_crossings, lossy_notices
from potluck.core.values.plan import Plan
from potluck.core.values.types import Codec

P = build.template("p", ("prefill",), prefill=(9.0,))
D = build.template("d", ("decode",), decode=(9.0,))
ACROSS = build.plan(
    (P, D),
    {("p", "far"): 1, ("d", "near"): 1},
    {("p", "far", "prefill"): (9.0,), ("d", "near", "decode"): (9.0,)},
    {("m", "far", "near"): (9.0,)},
    longest=(100_000,),
)


def in_codec(plan: Plan, codec: Codec) -> Plan:
    """The plan with all KV in a codec."""
    return replace(
        plan,
        templates=tuple(replace(template, codec=codec) for template in plan.templates),
        flows=tuple(replace(flow, codec=codec) for flow in plan.flows),
    )


class LossyChaos(Chaos):
    """The driver from hell under lossy plans; half of its requests must stay exact, and are looked at."""

    crossings = 0

    def tell(self, event: Event) -> None:
        if isinstance(event, PlanReceived):
            event = PlanReceived(in_codec(event.plan, self.random.choice(("int8", "int4"))))
        elif isinstance(event, RequestArrived) and event.request.id in self.jobs:
            request = event.request._replace(exact=int(event.request.id[1:]) % 2 == 0)
            self.jobs[request.id].request = request
            event = RequestArrived(request)
        super().tell(event)

    def _run(self, run: Run) -> None:
        links, req = self.brain.router.links, self.brain.requests.get(run.request)
        job = self.jobs.get(run.request)
        # Links are those of the attempt in lead: another may run beside it, or have taken its place already.
        if req is not None and job is not None and req.link and req.route == run.route:
            source, target = req.link.split("->")
            planned = links.codecs.get((job.request.model, source, target), "fp16")
            codec = "fp16" if job.request.exact else planned
            size_bytes = build.facts((P,)).models["m"].wire_bytes(req.prompt_tokens, codec)
            if links.codec(req, source, target) != codec:
                raise InvariantBroken(f"{run} crosses in {links.codec(req, source, target)}, not in {codec}")
            if links._in_flight[req.link][req] != pytest.approx(size_bytes):
                raise InvariantBroken(f"{run} is counted as if it crossed in another codec than {codec}")
            self.crossings += job.request.exact
        super()._run(run)


def test_exact_requests_never_use_a_lossy_transfer_and_some_are_transferred() -> None:
    result = 0
    for seed in range(6):
        chaos = LossyChaos(seed)
        while chaos.events < 1500:
            chaos.step()
        chaos.settle()
        result += chaos.crossings
    assert result > 0


def segment_counts(world: build.World, exact: bool, count: int, prompt: int) -> list[int]:
    result = []
    for _ in range(count):
        request = build.request(f"r{len(world.requests)}", prompt)._replace(exact=exact)
        (run,) = world.arrive(request)
        assert isinstance(run, Run), "an exact request is never refused while there is a way"
        result.append(len(run.route.segments))
    return result


def test_exact_request_crosses_a_link_only_while_that_is_faster_than_local_prefill() -> None:
    """Facts: 10 Gb/s, 100 kB a token: 4,000 tokens take 0.32 s whole, 0.09 s in four bits, and 0.4 s to compute."""
    plan = in_codec(ACROSS, "int4")
    lossy = segment_counts(build.world(plan), False, 6, 4000)
    exact = segment_counts(build.world(plan), True, 6, 4000)
    assert set(lossy) == {2}, "the link carries all of it in four bits"
    assert exact[0] == 2
    assert 1 in exact


def test_new_plan_replaces_the_link_codecs_of_the_previous_plan() -> None:
    world = build.world(in_codec(ACROSS, "int8"))
    assert world.brain.router.links.codecs == {("m", "far", "near"): "int8"}
    world.plan(build.plan((D,), {("d", "near"): 1}, {("d", "near", "closed"): (9.0,)}))
    assert world.brain.router.links.codecs == {}


def test_each_lossy_transfer_of_a_plan_is_noted_once() -> None:
    assert lossy_notices(ACROSS) == ()
    combo = build.template("c", ("prefill", "decode"), "combo", closed=(2.0,))
    alone = build.template("a", ("mixed", "mixed"), closed=(2.0,))
    plan = in_codec(replace(ACROSS, templates=(P, D, combo, alone)), "int8")
    twice = replace(plan, flows=plan.flows * 2, candidates=plan.templates[2:3])
    assert lossy_notices(twice) == (
        "KV of m crosses far → near in int8 (lossy: allowed by kv_codecs)",
        "KV of m crosses within c in int8 (lossy: allowed by kv_codecs)",
    )
    assert {lossy_crossing.codec for lossy_crossing in lossy_crossings(twice)} == {"int8"}
    assert codecs_between(plan) == {("m", "far", "near"): "int8"}

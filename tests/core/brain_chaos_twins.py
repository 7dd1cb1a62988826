"""Second attempts for the driver from hell: which of the two has a token or fails is decided at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brain_chaos_fleets import Broken

from potluck.core.state.actions import Hedge, Run
from potluck.core.state.events import AttemptFailed, FirstToken

if TYPE_CHECKING:
    from brain_chaos_driver import Chaos


def run_beside(chaos: Chaos, hedge: Hedge) -> None:
    job, run = chaos._open(hedge.request, hedge), Run(*hedge)
    if run.attempt <= job.attempt or run.streamed_tokens:
        raise Broken(f"{hedge} is no attempt beside {job.attempt}")
    if job.fate or job.streamed:  # the first one has a token, which the Brain has not heard
        return
    chaos.twins += 1
    if job.run is None:
        chaos._run(run)
        return
    there = {segment.replica for segment in run.route.segments}
    if not there.isdisjoint(segment.replica for segment in job.run.route.segments[job.done :]):
        raise Broken(f"{hedge} is where the first attempt is")
    dice, name = chaos.random.random(), job.request.id
    if dice < 0.3 or not there <= chaos.up:
        chaos.tell(AttemptFailed(name, run.attempt, "replica", run.route.decoder, 0))
        return
    before, job.attempt, job.run = job.attempt, run.attempt, run
    if dice < 0.6:
        job.done = 0
        chaos.tell(AttemptFailed(name, before, "replica", run.route.decoder, 0))
    else:
        job.done, job.first, job.streamed = len(run.route.segments) - 1, True, 1
        chaos.tell(FirstToken(name, run.attempt))

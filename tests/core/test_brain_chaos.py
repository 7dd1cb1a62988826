"""The Brain under late, doubled, missing and reordered events: a slice of benchmarks/brain_chaos.py."""

from __future__ import annotations

import brain_chaos_driver as driver
import pytest

from potluck.core.brain.requests import MAX_RECENTLY_ENDED
from potluck.core.state.actions import Refuse


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once_when_events_are_late_repeated_or_lost(seed: int) -> None:
    chaos = driver.run_chaos(seed, 4000)
    assert chaos.events >= 4000
    assert all(chaos.fates.values()), (
        "a trial in which nobody is answered, refused or cancelled shows nothing"
    )
    assert chaos.asked


def test_chaos_driver_repeats_only_events_the_brain_still_remembers() -> None:
    """A request repeated after MAX_RECENTLY_ENDED others would start anew, with a refusal of an ended request."""
    chaos = driver.Chaos(1)
    for _ in range(200):
        chaos.recent = [("long over", -MAX_RECENTLY_ENDED)]
        chaos._arrive()
    assert "long over" not in chaos.brain.requests


def test_chaos_driver_detects_violated_invariants() -> None:
    chaos = driver.Chaos(1)
    while not any(job.run for job in chaos.jobs.values()):
        chaos.step()
    job = next(job for job in chaos.jobs.values() if job.run is not None)
    run = job.run
    assert run is not None
    for wrong in (run, run._replace(attempt=job.attempt + 1)):
        with pytest.raises(driver.InvariantBroken):
            chaos._do(wrong)
    job.run = None
    with pytest.raises(driver.InvariantBroken, match="tokens"):
        chaos._do(run._replace(attempt=job.attempt + 1, streamed_tokens=job.streamed + 1))
    with pytest.raises(driver.InvariantBroken, match="ended"):
        chaos._do(Refuse("nobody", "lost", "never was"))

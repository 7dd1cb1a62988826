"""How a step is cut into micro-batches, so that the stages of a pipeline work at the same time.

While the second stage computes the first micro-batch, the first stage computes the second one. But each costs a pass
over the weights, whatever its size, so only many tokens are cut: prompts, hardly ever decodes (for those there are
several steps under way, see `driver.py`). Works that have the same workers stay together, since a worker's loss then
touches few others; a long chunk is cut, since it would keep all other stages waiting. Results do not depend on any of
this (`exact.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.engine.compute.work import SequenceWork

LEAST_TOKENS = 32
"""A chunk is not cut into pieces smaller than this: each costs a pass over the weights."""

Path = tuple[int, ...]
"""A request's worker in each stage."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """A work, or a part of one; `work` is its place in the step."""

    work: int
    path: Path
    part: SequenceWork
    last: bool
    """Whether it completes the work."""


def cut(
    works: Sequence[SequenceWork], paths: Sequence[Path], batches: int, worth: int
) -> list[list[StepPart]]:
    """At most `batches` micro-batches of about as many tokens each, `worth` or more, in the order to run them in."""
    total = sum(len(work.tokens) for work in works)
    batches = max(1, min(batches, total // worth))
    goal = max(1, -(-total // batches))
    order = sorted(range(len(works)), key=lambda i: paths[i])
    found: list[list[StepPart]] = [[]]
    room = goal
    for index in order:
        left = works[index]
        while True:
            if room <= 0 and len(found) < batches:
                found.append([])
                room = goal
            size, take = len(left.tokens), max(room, LEAST_TOKENS)
            if len(found) == batches or size - take < LEAST_TOKENS:
                found[-1].append(StepPart(index, paths[index], left, True))
                room -= size
                break
            head = replace(left, tokens=left.tokens[:take], logits="none")
            found[-1].append(StepPart(index, paths[index], head, False))
            left = replace(left, start=left.start + take, tokens=left.tokens[take:])
            room = 0
    return [batch for batch in found if batch]

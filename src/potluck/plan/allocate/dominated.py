"""Columns that another one makes needless: no more of any node, and no less of anything that it does.

Whatever plan has copies of such a column costs no more and serves no less with copies of the other in their place. So
they may not be started, and plans to begin from are told in the others. Where rows speak of copies (limits, losses)
that would not hold, so all columns stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from potluck.plan.allocate.program import ColumnKey, FlowProgram, Ints, ModelColumns


def without_needless(program: FlowProgram) -> tuple[FlowProgram, list[Ints]]:
    """The program in which needless columns may not be used, and for each model which column stands for which."""
    same = [np.arange(len(model.uses)) for model in program.models]
    if program.limits or program.helpers or program.guarded:
        return program, same
    kept = {key for key, _ in program.running} | {pin.key for pin in program.pins}
    models, stands = [], []
    for m, model in enumerate(program.models):
        stand = _stands(model, {key.template for key in kept if key.group == m})
        needed = stand == np.arange(len(stand))
        regions = len(program.fleet.regions)
        allowed = np.ones((len(stand), regions), bool) if model.allowed is None else model.allowed
        models.append(replace(model, allowed=allowed & needed[:, None]))
        stands.append(stand)
    return replace(program, models=tuple(models)), stands


def told_in(counts: Mapping[ColumnKey, int], stands: Sequence[Ints]) -> dict[ColumnKey, int]:
    """A plan with needless columns replaced by those that stand for them."""
    found: dict[ColumnKey, int] = {}
    for key, n in counts.items():
        other = key._replace(template=int(stands[key.group][key.template]))
        found[other] = found.get(other, 0) + n
    return found


def _stands(model: ModelColumns, kept: set[int]) -> Ints:
    """[templates]: the column that stands for each; itself where none makes it needless."""
    count = len(model.uses)
    none = np.full(count, np.inf)
    sends = none if model.sends_bits_per_s is None else model.sends_bits_per_s
    takes = none if model.takes_bits_per_s is None else model.takes_bits_per_s
    more = [model.prefill_per_s, model.decode_per_s, model.closed_per_s, sends[:, None], takes[:, None]]
    if model.allowed is not None:
        more.append(model.allowed.astype(np.float64))
    if model.fees_usd_per_h is not None:
        more.append(-model.fees_usd_per_h)
    does = np.concatenate(more, axis=1)
    stand = np.arange(count)
    needed = np.ones(count, bool)
    # Those with the fewest nodes and the most done come first: whatever makes a column needless is before it.
    order = np.lexsort(
        (np.arange(count), -np.nan_to_num(does, posinf=0.0).sum(axis=1), model.uses.sum(axis=1))
    )
    for place, j in enumerate(order.tolist()):
        before = order[:place][needed[order[:place]]]
        if j in kept or not len(before):
            continue
        better = (model.uses[before] <= model.uses[j]).all(axis=1) & (does[before] >= does[j]).all(axis=1)
        if better.any():
            stand[j], needed[j] = before[int(np.argmax(better))], False
    return stand

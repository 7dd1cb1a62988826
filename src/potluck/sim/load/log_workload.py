"""A log, live or simulated, as a workload: who asked for how much when, and how long the answers were.

A request that was answered is as long as its answer. One that was refused or cancelled, or was still on its way
where the log or its run ends, keeps the length that it asked for. Runs follow each other as they did by the wall
clock, where the log has it; else each begins where the one before it ended. Of a run whose beginning was dropped, the
first request that is left comes at time 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf, nextafter

import numpy as np

from potluck.core.errors import InputError
from potluck.core.state.events import RequestArrived, RequestFinished
from potluck.core.values.types import DEFAULT_CLASS, DEFAULT_TENANT, Request
from potluck.runtime.replay import LogHead, LogReader
from potluck.sim.load.workload import MOST_TOKENS, PrefixBlocks, RequestLabels, Workload, named_labels

WANTED = frozenset({"RequestArrived", "RequestFinished"})


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """What a log tells of its requests."""

    workload: Workload
    answered: int
    runs: int
    cuts: tuple[int, ...]
    """Numbers of lines that were cut off in writing, and passed over."""


@dataclass(slots=True)
class _Rows:
    """The requests so far, by the time of the first run."""

    requests: list[Request] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    answered: dict[int, int] = field(default_factory=dict)
    """Place of a request to the length of its answer."""
    block_tokens: dict[int, str] = field(default_factory=dict)
    """Tokens of a block to a model that has such."""


def from_log(lines: Iterable[str], progress: Callable[[int], None] | None = None) -> RecordedRequests:
    """The requests of a log, in order of arrival."""
    reader = LogReader(lines, WANTED)
    rows = _Rows()
    places: dict[str, int] = {}
    facts = None
    runs, shift_s, zero_utc_s, dropped = 0, 0.0, None, False
    for entry in reader:
        if isinstance(entry, LogHead):
            facts = entry.facts
            if entry.begins == "run" or runs == 0:
                dropped = entry.begins == "state"
                last_s = rows.arrival_s[-1] if rows.arrival_s else 0.0
                if runs == 0:
                    zero_utc_s = entry.zero_utc_s
                elif entry.zero_utc_s is None or zero_utc_s is None:
                    shift_s = last_s
                else:
                    # A wall clock may be put back; time may not.
                    shift_s = max(entry.zero_utc_s - zero_utc_s, last_s)
                runs += 1
                places = {}
            continue
        if isinstance(entry.event, RequestArrived):
            request = entry.event.request
            if dropped:
                dropped, shift_s = False, -request.arrival_s
                zero_utc_s = None if zero_utc_s is None else zero_utc_s + request.arrival_s
            place = places[request.id] = len(rows.requests)
            rows.requests.append(request)
            rows.arrival_s.append(request.arrival_s + shift_s)
            if request.blocks and facts is not None and request.model in facts.models:
                rows.block_tokens.setdefault(facts.models[request.model].block_tokens, request.model)
            if progress is not None and place % 1000 == 0:
                progress(place)
        elif isinstance(entry.event, RequestFinished) and entry.event.request in places:
            rows.answered[places[entry.event.request]] = entry.event.output_tokens
    if not rows.requests:
        raise InputError("log", "has no requests")
    return RecordedRequests(_workload(rows), len(rows.answered), runs, tuple(reader.cuts))


def _workload(rows: _Rows) -> Workload:
    found = rows.requests
    models = {name: place for place, name in enumerate(dict.fromkeys(each.model for each in found))}
    output = [max(1, rows.answered.get(i, each.max_output_tokens)) for i, each in enumerate(found)]
    prompt = [each.prompt_tokens for each in found]
    if max(max(prompt), max(output)) > MOST_TOKENS:
        raise InputError("log: tokens", f"must be at most {MOST_TOKENS:,}")
    if min(rows.arrival_s) < 0:
        raise InputError("log: arrival_s", "must not be negative")
    return Workload(
        tuple(models),
        np.maximum.accumulate(np.array(rows.arrival_s, dtype=np.float64)),
        np.array([models[each.model] for each in found], dtype=np.int32),
        np.array(prompt, dtype=np.int32),
        np.array(output, dtype=np.int32),
        np.array([each.priority for each in found], dtype=np.int32),
        _blocks(rows),
        _labels(rows),
    )


def _labels(rows: _Rows) -> RequestLabels | None:
    found = rows.requests
    plain = (DEFAULT_TENANT, DEFAULT_CLASS, None, False)
    if all((each.tenant, each.request_class, each.deadline_s, each.exact) == plain for each in found):
        return None
    waits = np.array([_wait_s(each) for each in found])
    named = named_labels(
        [each.tenant for each in found], [each.request_class for each in found], waits, len(found)
    )
    assert named is not None
    return replace(named, exact=np.array([each.exact for each in found]))


def _wait_s(request: Request) -> float:
    """What, added to the arrival, gives the deadline again, to the last bit where there is such a number."""
    deadline_s, arrival_s = request.deadline_s, request.arrival_s
    if deadline_s is None:
        return inf
    wait_s = deadline_s - arrival_s
    if wait_s <= 0:
        return 5e-324
    near = (wait_s, nextafter(wait_s, inf), nextafter(wait_s, 0.0))
    return next((each for each in near if arrival_s + each == deadline_s and each > 0), wait_s)


def _blocks(rows: _Rows) -> PrefixBlocks | None:
    if not any(each.blocks for each in rows.requests):
        return None
    if len(rows.block_tokens) != 1:
        said = ", ".join(f"{tokens} ({model})" for tokens, model in rows.block_tokens.items())
        raise InputError("log: block_tokens", f"must be the same for all models, are {said or 'not told'}")
    starts = np.array([0, *accumulate(len(each.blocks) for each in rows.requests)], dtype=np.int64)
    flat = [block for each in rows.requests for block in each.blocks]
    if max(flat) >= 2**63 or min(flat) < -(2**63):
        # Live names are wider than a column; which of them are equal is all that matters.
        known = {name: place for place, name in enumerate(dict.fromkeys(flat))}
        flat = [known[name] for name in flat]
    (tokens,) = rows.block_tokens
    return PrefixBlocks(starts, np.array(flat, dtype=np.int64), tokens)

"""A workload: every request of a run as columns, made ahead of it from a seed or a trace.

A million requests take 25 MB. Each part of a workload (arrivals, lengths, prefixes) draws from a stream of its own,
so that changing one leaves the others as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf, nextafter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from potluck.core.errors import InputError
from potluck.core.state.events import RequestArrived, RequestFinished
from potluck.core.values.length_laws import Binned, Lengths
from potluck.core.values.types import DEFAULT_CLASS, DEFAULT_TENANT, Request, Traffic
from potluck.runtime.replay import LogHead, LogReader
from potluck.sim.load import arrivals
from potluck.sim.load.arrivals import draw

Floats = NDArray[np.float64]
Places = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RequestLabels:
    """`tenant[i]` is a place in `tenants`, `request_class[i]` one in `classes`."""

    tenants: tuple[str, ...]
    tenant: Places
    classes: tuple[str, ...]
    request_class: Places
    wait_s: Floats  # From a request's arrival to its deadline; infinite: it has none.
    origins: tuple[str, ...] = ("",)  # Where users are; empty: nobody said.
    origin: Places | None = None  # Places in `origins`; None: the first for all.
    exact: NDArray[np.bool_] | None = None  # Whose KV must cross as it is; None: nobody's.
    grammar: NDArray[np.bool_] | None = None  # For which an engine compiles a grammar; None: for no request.

    def __len__(self) -> int:
        return len(self.tenant)

    def take(self, chosen: NDArray[np.integer]) -> RequestLabels:
        columns = ("tenant", "request_class", "wait_s", "origin", "exact", "grammar")
        taken = {name: getattr(self, name) for name in columns}
        return replace(self, **{name: each[chosen] for name, each in taken.items() if each is not None})

    @property
    def from_origin(self) -> Places:
        return np.zeros(len(self), dtype=np.int32) if self.origin is None else self.origin

    def rows(
        self, first: int, last: int, arrival_s: list[float]
    ) -> tuple[list[str], list[str], list[float | None], list[bool], list[bool]]:
        """Tenant, class, deadline, whether it must be exact, and whether it has a grammar, of requests [first, last),
        which arrive then."""
        rows = slice(first, last)
        waits = self.wait_s[rows].tolist()
        return (
            [self.tenants[place] for place in self.tenant[rows].tolist()],
            [self.classes[place] for place in self.request_class[rows].tolist()],
            [
                at_s + wait_s if wait_s < np.inf else None
                for at_s, wait_s in zip(arrival_s, waits, strict=False)
            ],
            [False] * len(waits) if self.exact is None else self.exact[rows].tolist(),
            [False] * len(waits) if self.grammar is None else self.grammar[rows].tolist(),
        )


def same_labels(
    count: int, tenant: str = DEFAULT_TENANT, request_class: str = DEFAULT_CLASS, wait_s: float = np.inf
) -> RequestLabels:
    places = np.zeros(count, dtype=np.int32)
    return RequestLabels((tenant,), places, (request_class,), places, np.full(count, wait_s))


def drawn_labels(
    numbers: np.random.Generator,
    count: int,
    classes: Sequence[tuple[str, float]],
    origins: Sequence[tuple[str, float]],
) -> RequestLabels | None:
    """Classes and origins as often as their shares say, by chance; None where there are none."""
    if not classes and not origins:
        return None
    left = 1.0 - sum(share for _, share in classes)
    kinds = [*classes, *([(DEFAULT_CLASS, left)] if left > 1e-6 else [])]
    arrays = []
    for shares in (kinds, list(origins) or [("", 1.0)]):
        weight = np.array([share for _, share in shares])
        arrays.append(numbers.choice(len(shares), size=count, p=weight / weight.sum()).astype(np.int32))
    return replace(
        same_labels(count),
        classes=tuple(name for name, _ in kinds),
        request_class=arrays[0],
        origins=tuple(name for name, _ in origins) or ("",),
        origin=arrays[1],
    )


def named_labels(
    tenants: Sequence[str] | None, classes: Sequence[str] | None, wait_s: Floats | None, count: int
) -> RequestLabels | None:
    """Of names and times row by row, where a trace has them; None when it has none of it."""
    if tenants is None and classes is None and wait_s is None:
        return None
    who, tenant = _places(tenants if tenants is not None else [DEFAULT_TENANT] * count)
    what, request_class = _places(classes if classes is not None else [DEFAULT_CLASS] * count)
    wait_s = np.full(count, np.inf) if wait_s is None else wait_s
    return RequestLabels(who, tenant, what, request_class, wait_s)


def joined_labels(parts: Sequence[RequestLabels | None], counts: Sequence[int]) -> RequestLabels | None:
    if all(part is None for part in parts):
        return None
    whole = [part or same_labels(count) for part, count in zip(parts, counts, strict=True)]
    tenants = tuple(dict.fromkeys(name for part in whole for name in part.tenants))
    classes = tuple(dict.fromkeys(name for part in whole for name in part.classes))
    origins = tuple(dict.fromkeys(name for part in whole for name in part.origins))
    return RequestLabels(
        tenants,
        np.concatenate([_moved(part.tenants, tenants)[part.tenant] for part in whole]),
        classes,
        np.concatenate([_moved(part.classes, classes)[part.request_class] for part in whole]),
        np.concatenate([part.wait_s for part in whole]),
        origins,
        np.concatenate([_moved(part.origins, origins)[part.from_origin] for part in whole]),
        np.concatenate([np.zeros(len(each), bool) if each.exact is None else each.exact for each in whole]),
        np.concatenate(
            [np.zeros(len(each), bool) if each.grammar is None else each.grammar for each in whole]
        ),
    )


def _places(names: Sequence[str]) -> tuple[tuple[str, ...], Places]:
    known = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return tuple(known), np.array([known[name] for name in names], dtype=np.int32)


def _moved(old: tuple[str, ...], new: tuple[str, ...]) -> Places:
    return np.array([new.index(name) for name in old], dtype=np.int32)


Ints = NDArray[np.int64]

Scaling = Literal["stretch", "superpose"]
"""How a trace comes to a rate: by its clock, or by leaving requests out and laying copies over each other."""

BLOCK_TOKENS = 512  # Tokens that a prefix block stands for, as in Mooncake's traces.
REQUESTS_PER_TEXT = 50  # Of traffic that was planned with a share of prefix hits.
MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBlocks:
    """The prefix blocks of all requests: request i has ids[starts[i]:starts[i + 1]].

    Ids are chained: equal ids mean equal prefixes up to and with that block.
    """

    starts: Ints
    ids: Ints
    tokens: int = BLOCK_TOKENS

    def of(self, i: int) -> tuple[int, ...]:
        return tuple(self.ids[self.starts[i] : self.starts[i + 1]].tolist())

    def rows(self, first: int, last: int) -> list[tuple[int, ...]]:
        starts = self.starts[first : last + 1].tolist()
        ids = self.ids[starts[0] : starts[-1]].tolist()
        return [tuple(ids[low - starts[0] : high - starts[0]]) for low, high in pairwise(starts)]

    def take(self, chosen: Ints) -> PrefixBlocks:
        counts = np.diff(self.starts)[chosen]
        starts = np.concatenate(([0], np.cumsum(counts)))
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        ids = self.ids[np.repeat(self.starts[:-1][chosen], counts) + within]
        return PrefixBlocks(starts, ids, self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival. `model[i]` is a place in `models`."""

    models: tuple[str, ...]
    arrival_s: Floats
    model: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    priority: NDArray[np.int32]
    blocks: PrefixBlocks | None = None
    labels: RequestLabels | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def last_s(self) -> float:
        return float(self.arrival_s[-1]) if len(self) else 0.0

    @property
    def span_s(self) -> float:
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def rate_per_s(self) -> float | None:
        """Mean rate over the gaps; None when all requests come at one moment."""
        return (len(self) - 1) / self.span_s if self.span_s > 0 else None

    def take(self, chosen: Ints) -> Workload:
        """The chosen requests; they must be in order of arrival."""
        return _at(self, chosen, self.arrival_s[chosen])


def workload(
    model: str,
    arrival_s: Floats,
    prompt_tokens: NDArray[np.integer],
    output_tokens: NDArray[np.integer],
    priority: int = 0,
    blocks: PrefixBlocks | None = None,
) -> Workload:
    count = len(arrival_s)
    if count and max(int(prompt_tokens.max()), int(output_tokens.max())) > MOST_TOKENS:
        raise InputError("workload: tokens", f"must be at most {MOST_TOKENS:,}")
    return Workload(
        (model,),
        np.ascontiguousarray(arrival_s, dtype=np.float64),
        np.zeros(count, dtype=np.int32),
        prompt_tokens.astype(np.int32),
        output_tokens.astype(np.int32),
        np.full(count, priority, dtype=np.int32),
        blocks,
    )


def synthetic(
    model: str,
    lengths: Lengths,
    rate_per_s: float,
    requests: int,
    seed: int,
    cv: float = 1.0,
    priority: int = 0,
) -> Workload:
    """Requests of one model: gaps gamma-distributed with this coefficient of variation (1: Poisson)."""
    times, sizes = np.random.default_rng(seed).spawn(2)
    prompt, output = draw(sizes, lengths, requests)
    return workload(model, arrivals.gamma(times, rate_per_s, cv, requests), prompt, output, priority)


def of_traffic(
    traffic: Sequence[Traffic], requests: int, seed: int, cv: float = 1.0, *, even: bool = False
) -> Workload:
    """The traffic that was planned for: every model at its rate, `requests` in all, for the same time.

    With `even` lengths are just as often as was planned for, in random order. A prefix-hit share becomes shared
    prefixes (`with_prefixes`); texts are in use one after the other, so a cache misses each at first only.
    """
    total_per_s = sum(one.rate_per_s for one in traffic)
    if not total_per_s > 0:
        raise InputError("traffic", "has no requests; give a model a rate_per_s above 0")
    parts = []
    for one, source in zip(traffic, np.random.SeedSequence(seed).spawn(len(traffic)), strict=True):
        count = round(requests * one.rate_per_s / total_per_s)
        if count == 0:
            continue
        numbers = np.random.default_rng(source)
        part_seed, prefix_seed = (int(number) for number in numbers.integers(2**63, size=2))
        part = synthetic(one.model, Binned(one.lengths, even), one.rate_per_s, count, part_seed, cv)
        if one.prefix_hit_share > 0:
            part = with_prefixes(part, one.prefix_hit_share, prefix_seed, run=REQUESTS_PER_TEXT)
        labels = drawn_labels(numbers, len(part), one.classes, one.origins)
        parts.append(part if labels is None else replace(part, labels=labels))
    return merge(parts)


def at_rate(workload: Workload, rate_per_s: float, how: Scaling = "stretch", seed: int = 0) -> Workload:
    """The same requests at another mean rate; `arrivals.stretched` and `superposed` say what that changes."""
    if how == "stretch":
        return replace(workload, arrival_s=arrivals.stretched(workload.arrival_s, rate_per_s))
    chosen, when = arrivals.superposed(np.random.default_rng(seed), workload.arrival_s, rate_per_s)
    return _at(workload, chosen, when)


def first(workload: Workload, requests: int) -> Workload:
    """The first requests, from time 0; when there are fewer, the same again and again."""
    return _at(workload, *arrivals.repeated(workload.arrival_s, requests))


def _at(workload: Workload, chosen: Ints, when: Floats) -> Workload:
    """The chosen requests, which may repeat, at other times."""
    columns = ("model", "prompt_tokens", "output_tokens", "priority")
    return replace(
        workload,
        arrival_s=when,
        blocks=None if workload.blocks is None else workload.blocks.take(chosen),
        labels=None if workload.labels is None else workload.labels.take(chosen),
        **{name: getattr(workload, name)[chosen] for name in columns},
    )


def labelled(
    workload: Workload, tenant: str = DEFAULT_TENANT, request_class: str = DEFAULT_CLASS, wait_s: float = inf
) -> Workload:
    """The same requests, all of one tenant and class; nobody waits for an answer longer than `wait_s`."""
    return replace(workload, labels=same_labels(len(workload), tenant, request_class, wait_s))


def merge(parts: Sequence[Workload]) -> Workload:
    """Several workloads on one clock; equal names are one model. Ties keep the order of the parts.

    Prefix ids of different models never meet, since caches belong to models.
    """
    parts = [part for part in parts if len(part)]
    if not parts:
        raise InputError("workload", "has no requests")
    models = tuple(dict.fromkeys(name for part in parts for name in part.models))
    arrival_s = np.concatenate([part.arrival_s for part in parts])
    order = np.argsort(arrival_s, kind="stable")
    blocks = _merge_blocks(parts)
    labels = joined_labels([part.labels for part in parts], [len(part) for part in parts])
    return Workload(
        models,
        arrival_s[order],
        np.concatenate([_moved(part.models, models)[part.model] for part in parts])[order],
        np.concatenate([part.prompt_tokens for part in parts])[order],
        np.concatenate([part.output_tokens for part in parts])[order],
        np.concatenate([part.priority for part in parts])[order],
        None if blocks is None else blocks.take(order),
        None if labels is None else labels.take(order),
    )


def _merge_blocks(parts: Sequence[Workload]) -> PrefixBlocks | None:
    held = [part.blocks for part in parts if part.blocks is not None]
    if not held:
        return None
    if len({blocks.tokens for blocks in held}) > 1:
        raise InputError("workload: blocks", "all parts must have blocks of the same size")
    counts, ids = [], []
    for part in parts:
        own = part.blocks
        counts.append(np.zeros(len(part), dtype=np.int64) if own is None else np.diff(own.starts))
        ids.append(np.zeros(0, dtype=np.int64) if own is None else own.ids)
    starts = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
    return PrefixBlocks(starts, np.concatenate(ids), held[0].tokens)


def with_prefixes(
    workload: Workload,
    hit_share: float,
    seed: int,
    groups: int = 100,
    block_tokens: int = BLOCK_TOKENS,
    run: int | None = None,
) -> Workload:
    """Let the first `hit_share` of every prompt be one of `groups` shared texts, drawn evenly.

    An endless cache then saves about that share of the prompt tokens once the groups are warm. With `run` there are
    as many texts as it takes, each shared by so many requests in a row, and so much more is shared that the share is
    saved with all that a cache finds for the first time. Shared blocks are rounded at random, without bias.
    """
    if not 0 <= hit_share < 1:
        raise InputError("prefixes: hit_share", f"must be at least 0 and below 1, is {hit_share}")
    numbers = np.random.default_rng(seed)
    prompt = workload.prompt_tokens.astype(np.int64)
    whole = -(-prompt // block_tokens)
    chance = numbers.random(len(workload))
    group = numbers.integers(groups, size=len(workload))
    part = hit_share
    if run is not None:
        group, groups = np.arange(len(workload)) // run, -(-len(workload) // run)
        part = _shared_part(prompt, run, hit_share)
    shared = np.floor(prompt * part / block_tokens + chance).astype(np.int64)
    shared = np.minimum(shared, prompt // block_tokens)
    starts = np.concatenate(([0], np.cumsum(whole)))
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], whole)
    longest = int(whole.max(initial=1))
    ids = np.where(
        within < np.repeat(shared, whole),
        np.repeat(group, whole) * longest + within,
        groups * longest + np.arange(starts[-1]),
    )
    return replace(workload, blocks=PrefixBlocks(starts, ids.astype(np.int64), block_tokens))


def _shared_part(prompt: Ints, run: int, hit_share: float) -> float:
    """How much of every prompt must be its run's text so that an endless cache saves `hit_share` of all tokens.

    A cache holds as much of a text as the longest prompt so far had of it; the first of a run finds nothing.
    """
    runs = -(-len(prompt) // run)
    flat = np.zeros(runs * run, dtype=np.int64)
    flat[: len(prompt)] = prompt
    rows = flat.reshape(runs, run)
    before = np.maximum.accumulate(rows, axis=1)[:, :-1]
    saved = np.minimum(rows[:, 1:], before).sum() / max(int(prompt.sum()), 1)
    return float(min(hit_share / max(saved, 1e-9), 1.0))


WANTED = frozenset({"RequestArrived", "RequestFinished"})


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    workload: Workload
    answered: int
    runs: int
    cuts: tuple[int, ...]  # Numbers of lines that were cut off in writing, and passed over.


@dataclass(slots=True)
class _Rows:
    """The requests so far, by the time of the first run."""

    requests: list[Request] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    answered: dict[int, int] = field(default_factory=dict)  # Place of a request to the length of its answer.
    block_tokens: dict[int, str] = field(default_factory=dict)  # Tokens of a block to a model that has such.


def from_log(lines: Iterable[str], progress: Callable[[int], None] | None = None) -> RecordedRequests:
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
    result = rows.requests
    models = {name: place for place, name in enumerate(dict.fromkeys(request.model for request in result))}
    output = [max(1, rows.answered.get(i, request.max_output_tokens)) for i, request in enumerate(result)]
    prompt = [request.prompt_tokens for request in result]
    if max(max(prompt), max(output)) > MOST_TOKENS:
        raise InputError("log: tokens", f"must be at most {MOST_TOKENS:,}")
    if min(rows.arrival_s) < 0:
        raise InputError("log: arrival_s", "must not be negative")
    return Workload(
        tuple(models),
        np.maximum.accumulate(np.array(rows.arrival_s, dtype=np.float64)),
        np.array([models[request.model] for request in result], dtype=np.int32),
        np.array(prompt, dtype=np.int32),
        np.array(output, dtype=np.int32),
        np.array([request.priority for request in result], dtype=np.int32),
        _blocks(rows),
        _labels(rows),
    )


def _labels(rows: _Rows) -> RequestLabels | None:
    result = rows.requests
    plain = (DEFAULT_TENANT, DEFAULT_CLASS, None, False, False)
    if all(
        (each.tenant, each.request_class, each.deadline_s, each.exact, each.grammar) == plain
        for each in result
    ):
        return None
    waits = np.array([_wait_s(request) for request in result])
    tenants, classes = [each.tenant for each in result], [each.request_class for each in result]
    named = named_labels(tenants, classes, waits, len(result))
    assert named is not None
    exact, grammar = ([getattr(each, name) for each in result] for name in ("exact", "grammar"))
    return replace(named, exact=np.array(exact), grammar=np.array(grammar))


def _wait_s(request: Request) -> float:
    """What, added to the arrival, gives the deadline again, to the last bit where there is such a number."""
    deadline_s, arrival_s = request.deadline_s, request.arrival_s
    if deadline_s is None:
        return inf
    wait_s = deadline_s - arrival_s
    if wait_s <= 0:
        return 5e-324
    near = (wait_s, nextafter(wait_s, inf), nextafter(wait_s, 0.0))
    return next((value for value in near if arrival_s + value == deadline_s and value > 0), wait_s)


def _blocks(rows: _Rows) -> PrefixBlocks | None:
    if not any(request.blocks for request in rows.requests):
        return None
    if len(rows.block_tokens) != 1:
        text = ", ".join(f"{tokens} ({model})" for tokens, model in rows.block_tokens.items())
        raise InputError("log: block_tokens", f"must be the same for all models, are {text or 'not told'}")
    starts = np.array([0, *accumulate(len(request.blocks) for request in rows.requests)], dtype=np.int64)
    flat = [block for request in rows.requests for block in request.blocks]
    if max(flat) >= 2**63 or min(flat) < -(2**63):
        # Live names are wider than a column; which of them are equal is all that matters.
        known = {name: place for place, name in enumerate(dict.fromkeys(flat))}
        flat = [known[name] for name in flat]
    (tokens,) = rows.block_tokens
    return PrefixBlocks(starts, np.array(flat, dtype=np.int64), tokens)

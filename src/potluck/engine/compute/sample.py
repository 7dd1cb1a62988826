"""From logits to tokens, for a whole batch at once.

Chance comes from (seed, position) alone: the same request asked again, on any machine, cut in any way, beside any
neighbours, draws the same numbers, and a replay after a failure gives the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.core.values.sampling import Drawing, SampledToken
from potluck.engine.compute.logit_edits import LogitEdit

FIRST_LOOK = 256
"""Tokens that are sorted at first: nearly always they hold all that top-p and min-p leave."""


COLDEST = 1e-5
"""Temperatures below this are greedy in all but name, and would lead beyond what a number can hold."""


def chance(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def sample(
    logits: Tensor, ways: Sequence[Drawing], positions: Sequence[int], edits: Sequence[LogitEdit | None] = ()
) -> list[SampledToken]:
    """One token for each row of `logits`; `positions` are the places that the tokens will take. `edits`: of each row,
    or none at all. Log probabilities are the model's own."""
    return draw(logits, ways, positions, edits)[1]()


@torch.inference_mode()
def draw(
    logits: Tensor, ways: Sequence[Drawing], positions: Sequence[int], edits: Sequence[LogitEdit | None]
) -> tuple[Tensor, Callable[[], list[SampledToken]]]:
    """The tokens where the logits are, and what waits for them. On a GPU nothing is waited for before that where all
    are the likeliest ones, or are drawn from all tokens, without edits or log probabilities."""
    tensor, logits = logits, _without_barred(_edited(logits, edits), ways, positions)
    # On a CPU numpy's argmax is ten times as fast as torch's.
    on_cpu = logits.device.type == "cpu"
    tokens = torch.from_numpy(logits.float().numpy().argmax(-1)) if on_cpu else logits.argmax(-1)
    drawn = [row for row, way in enumerate(ways) if way.temperature > 0]
    if drawn:
        chosen = [ways[row] for row in drawn]
        chances = [chance(ways[row].seed, positions[row]) for row in drawn]
        tokens.index_copy_(0, sent(drawn, logits.device), _draw(_rows(logits, drawn), chosen, chances))
    if any(way.logprobs is not None for way in ways):
        choices = _with_logprobs(tensor, ways, tokens)
        return tokens, lambda: choices
    if on_cpu:
        return tokens, lambda: list(map(SampledToken, tokens.tolist()))
    here = torch.empty(len(ways), dtype=torch.int64, pin_memory=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    here.copy_(tokens, non_blocking=True)
    ready.record()

    def wait() -> list[SampledToken]:
        ready.synchronize()
        return list(map(SampledToken, here.tolist()))

    return tokens, wait


def sent(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers for a device, which go there when it is their turn: nobody waits for what it computes."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _edited(logits: Tensor, edits: Sequence[LogitEdit | None]) -> Tensor:
    """The logits with biases, penalties and grammars; a copy only where there are any."""
    if not any(edit is not None for edit in edits):
        return logits
    logits = logits.float().clone()
    for row, edit in enumerate(edits):
        if edit is None:
            continue
        if len(edit.tokens):
            places, bias, repetition, penalty = (
                torch.from_numpy(array).to(logits.device)
                for array in (edit.tokens.astype("int64"), edit.bias, edit.repetition, edit.penalty)
            )
            value = logits[row, places] + bias
            logits[row, places] = torch.where(value > 0, value / repetition, value * repetition) - penalty
        if edit.allowed:
            allowed = torch.from_numpy(edit.allows(logits.shape[1])).to(logits.device)
            logits[row].masked_fill_(~allowed, -torch.inf)
    return logits


def _without_barred(logits: Tensor, ways: Sequence[Drawing], positions: Sequence[int]) -> Tensor:
    """The logits of what may be drawn; a copy only where something may not."""
    rows = [
        row
        for row, (way, place) in enumerate(zip(ways, positions, strict=True))
        if way.barred and place < way.barred_before
    ]
    if rows:
        logits = logits.clone()
        for row in rows:
            logits[row, list(ways[row].barred)] = -torch.inf
    return logits


def _draw(logits: Tensor, ways: Sequence[Drawing], chances: Sequence[float]) -> Tensor:
    """A token for each row. What a row draws from, in which order, depends on its own way alone: on the tokens that
    its cuts leave, in the order of the vocabulary."""
    warmth = [max(way.temperature, COLDEST) for way in ways]
    heat = sent(warmth, logits.device, torch.float64)
    probabilities = torch.softmax(logits.double() / heat[:, None], -1)
    tokens = torch.empty(len(ways), dtype=torch.int64, device=logits.device)
    whole = [row for row, way in enumerate(ways) if not way.cuts]
    if whole:
        places = _pick(_rows(probabilities, whole), [chances[row] for row in whole])
        tokens.index_copy_(0, sent(whole, logits.device), places)
    left = [row for row, way in enumerate(ways) if way.cuts]
    width = max([FIRST_LOOK, *(ways[row].top_k + 1 for row in left)])
    while left:
        # Rows for which so many are not enough come again, with everything.
        width = min(width, logits.shape[1])
        some = [ways[row] for row in left]
        likely, names = _in_order(*_rows(probabilities, left).topk(width, -1))
        kept, settled = _cut(likely, some)
        names, order = names.sort(-1)
        places = _pick(kept.gather(1, order), [chances[row] for row in left])
        tokens.index_copy_(0, sent(left, logits.device), names.gather(1, places[:, None])[:, 0])
        if width == logits.shape[1]:
            break
        left = [row for row, enough in zip(left, settled.tolist(), strict=True) if not enough]
        width = logits.shape[1]
    return tokens


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    return values if len(rows) == len(values) else values.index_select(0, sent(rows, values.device))


def _in_order(values: Tensor, names: Tensor) -> tuple[Tensor, Tensor]:
    """The largest first, those alike by name: `topk` leaves these in an order that changes with how many it takes."""
    names, order = names.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, names.gather(1, order)


def _cut(likely: Tensor, ways: Sequence[Drawing]) -> tuple[Tensor, Tensor]:
    """What the cuts leave of each row, likeliest first; and for which rows nothing beyond, nor anything that is as
    likely as the last one here, could be left too."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=likely.dtype, device=likely.device)[:, None]

    width = likely.shape[1]
    rank = torch.arange(width, device=likely.device)
    kept = likely.masked_fill(rank >= column([way.top_k or torch.inf for way in ways]), 0)
    sums = kept.cumsum(-1)
    whole = column([1.0 if way.top_k == 0 else 0.0 for way in ways])
    # A running sum is the same however many zeros follow; `sum` would add up in another order.
    total = torch.where(whole > 0, whole, sums[:, -1:])
    # The token that crosses the line is in. A line of 1 cuts nothing, whatever rounding says.
    line = column([way.top_p if way.top_p < 1 else torch.inf for way in ways]) * total
    floor = column([way.min_p for way in ways]) * likely[:, :1]
    kept = kept.masked_fill((sums - kept >= line) | (likely < floor), 0)
    return kept, ~((kept > 0) & (likely == likely[:, -1:])).any(-1)


def _pick(weights: Tensor, chances: Sequence[float]) -> Tensor:
    """The place in each row where the running sum passes the row's share."""
    sums = weights.cumsum(-1)
    goal = sent(chances, weights.device, weights.dtype)[:, None] * sums[:, -1:]
    place = (sums <= goal).sum(-1)
    # Rounding may point past the last weight that counts.
    last = weights.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(place, last)


def _likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best, names = _in_order(*values.topk(count, -1))
    crowded = (values >= best[:, -1:]).sum(-1) > count
    if crowded.any():
        # Some are as large as the last of these, and `topk` took any of them.
        ordered, order = values[crowded].sort(dim=-1, descending=True, stable=True)
        best[crowded], names[crowded] = ordered[:, :count], order[:, :count]
    return best, names


def _with_logprobs(logits: Tensor, ways: Sequence[Drawing], tokens: Tensor) -> list[SampledToken]:
    logs = torch.log_softmax(logits.float(), -1)
    own = logs.gather(1, tokens[:, None])[:, 0].tolist()
    values, places = _likeliest(logs, min(max(1, *(way.logprobs or 0 for way in ways)), logits.shape[1]))
    rows = zip(ways, tokens.tolist(), own, places.tolist(), values.tolist(), strict=True)
    return [
        SampledToken(token)
        if way.logprobs is None
        else SampledToken(
            token, logprob, tuple(zip(names[: way.logprobs], best[: way.logprobs], strict=True))
        )
        for way, token, logprob, names, best in rows
    ]

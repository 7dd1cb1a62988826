"""A second, plain telling of the allocation program: random instances, all of it in one HiGHS model, a checker.

It shares no code with the solver but the values: penalties are CORAL's auxiliary variables, every template is
in every region, nothing is scaled, and HiGHS runs without presolve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import highspy
import numpy as np

from potluck.plan.allocate.allocation import Allocation
from potluck.plan.allocate.program import (
    ColumnCount,
    ColumnKey,
    ColumnPin,
    DemandBucket,
    FlowProgram,
    LinkRow,
    ModelColumns,
    NodeSupply,
)

INF = float("inf")


@dataclass
class Text:
    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)

    def variable(self, cost: float = 0.0, upper: float = INF, whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, low: float, terms: list[tuple[float, int]], high: float) -> None:
        sums: dict[int, float] = {}
        for value, variable in terms:
            sums[variable] = sums.get(variable, 0.0) + value
        self.rows.append((low, high, {v: a for v, a in sums.items() if a}))

    def minimum(self) -> float | None:
        highs = highspy.Highs()
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("mip_rel_gap", 0.0),
            ("presolve", "off"),
        ):
            highs.setOptionValue(name, value)
        for cost, upper, whole in zip(self.cost, self.upper, self.whole, strict=True):
            highs.addCol(cost, 0.0, upper, 0, [], [])
            if whole:
                highs.changeColIntegrality(highs.getNumCol() - 1, highspy.HighsVarType.kInteger)
        for low, high, terms in self.rows:
            highs.addRow(low, high, len(terms), list(terms), list(terms.values()))
        highs.run()
        status = highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        assert status == highspy.HighsModelStatus.kOptimal, status
        return float(highs.getInfo().objective_function_value)


def reference(program: FlowProgram, *, fraction: bool = False) -> float | None:
    """The least cost, or with `fraction` the largest theta <= 1 (None: not even pins can be kept).

    Models in length order: the best of all programs in which each has another bucket up to which all stay.
    """
    if any(model.ordered for model in program.models):
        values = [reference(flow_program, fraction=fraction) for flow_program in _cut(program)]
        return (max if fraction else min)((v for v in values if v is not None), default=None)
    text = Text()
    money = 0.0 if fraction else 1.0
    theta = text.variable(-1.0 if fraction else 0.0, 1.0)
    if not fraction:
        text.row(1.0, [(1.0, theta)], 1.0)
    node_supply = program.fleet
    n: dict[ColumnKey, int] = {}
    running = dict(program.running)
    for g, group in enumerate(program.models):
        for t in range(len(group.uses)):
            for r in range(len(node_supply.regions)):
                price = float(node_supply.price_usd_per_h[r] @ group.uses[t])
                key = ColumnKey(g, t, r)
                allowed = group.allowed is None or group.allowed[t, r]
                parts = 0.0 if group.complexity_usd_per_h is None else float(group.complexity_usd_per_h[t, r])
                n[key] = text.variable(money * (price + parts), 50.0 if allowed else 0.0, whole=True)
                late = text.variable(money)
                weight = price * program.init_penalty
                text.row(-INF, [(weight, n[key]), (-1.0, late)], weight * running.get(key, 0))
    for r in range(len(node_supply.regions)):
        for c in range(len(node_supply.nodes)):
            terms = [
                (float(program.models[k.group].uses[k.template, c]), v) for k, v in n.items() if k.region == r
            ]
            text.row(-INF, terms, float(node_supply.available[r, c]))
    if program.budget_usd_per_h is not None:
        rent = [
            (float(node_supply.price_usd_per_h[k.region] @ program.models[k.group].uses[k.template]), v)
            for k, v in n.items()
        ]
        text.row(-INF, rent, program.budget_usd_per_h)
    for pin in program.pins:
        text.row(float(pin.copies), [(1.0, n[pin.key])], float(pin.copies) if pin.exactly else INF)
    _flow_rows(program, text, n, theta, money)
    value = text.minimum()
    return None if value is None else (-value if fraction else value)


def _cut(program: FlowProgram) -> Iterator[FlowProgram]:
    regions = range(len(program.fleet.regions))
    away = frozenset((a, b) for a in regions for b in regions if a != b)
    home = frozenset((a, a) for a in regions)
    for cuts in product(*(range(len(model.buckets)) for model in program.models)):
        models = []
        for model, cut in zip(program.models, cuts, strict=True):
            bars = [away if b < cut else home if b > cut else frozenset() for b in range(len(model.buckets))]
            both = zip(model.buckets, bars, strict=True)
            buckets = tuple(replace(bucket, barred=bucket.barred | bar) for bucket, bar in both)
            closed = np.where(np.arange(len(bars)) > cut, 0.0, model.closed_per_s)
            models.append(replace(model, buckets=buckets, closed_per_s=closed, ordered=False))
        yield replace(program, models=tuple(models))


def _flow_rows(program: FlowProgram, text: Text, n: dict[ColumnKey, int], theta: int, money: float) -> None:
    regions = range(len(program.fleet.regions))
    link_terms: list[list[tuple[float, int]]] = [[] for _ in program.links]
    busy: dict[ColumnKey, list[tuple[float, int]]] = {key: [] for key in n}
    sent: dict[ColumnKey, list[tuple[float, int]]] = {key: [] for key in n}
    taken: dict[ColumnKey, list[tuple[float, int]]] = {key: [] for key in n}
    for m, model in enumerate(program.models):
        for b, bucket in enumerate(model.buckets):
            out: list[list[tuple[float, int]]] = [[] for _ in regions]
            into: list[list[tuple[float, int]]] = [[] for _ in regions]
            met: list[tuple[float, int]] = [(-bucket.rate_per_s, theta)]
            for r in regions:
                for s in regions:
                    at = [i for i, link in enumerate(program.links) if (link.source, link.target) == (r, s)]
                    if (r != s and not at) or (r, s) in bucket.barred:
                        continue
                    usd = program.links[at[0]].egress_usd_per_gb * bucket.kv_bits / 8e9 * 3600 if at else 0.0
                    usd += bucket.crossing_usd_per_h if r != s else 0.0
                    f = text.variable(money * usd)
                    met.append((1.0, f))
                    out[r].append((-1.0, f))
                    into[s].append((-1.0, f))
                    if at:
                        link_terms[at[0]].append((bucket.kv_bits, f))
            for key in (key for key in n if key.group == m):
                x, z, w = (text.variable() for _ in range(3))
                busy[key] += [(1.0, x), (1.0, z), (1.0, w)]
                out[key.region].append((float(model.prefill_per_s[key.template, b]), x))
                into[key.region].append((float(model.decode_per_s[key.template, b]), z))
                met.append((float(model.closed_per_s[key.template, b]), w))
                gbits = bucket.kv_bits / 1e9
                sent[key].append((gbits * float(model.prefill_per_s[key.template, b]), x))
                taken[key].append((gbits * float(model.decode_per_s[key.template, b]), z))
            text.row(0.0, met, INF)
            for r in regions:
                text.row(0.0, out[r], INF)
                text.row(0.0, into[r], INF)
    for terms, link in zip(link_terms, program.links, strict=True):
        # In Gbit/s: the tolerance of HiGHS is absolute.
        text.row(-INF, [(value / 1e9, v) for value, v in terms], link.bits_per_s / 1e9)
    for key, terms in busy.items():
        text.row(-INF, [*terms, (-program.headroom, n[key])], 0.0)
        model = program.models[key.group]
        for cards, bits in ((model.sends_bits_per_s, sent[key]), (model.takes_bits_per_s, taken[key])):
            if cards is not None and np.isfinite(cards[key.template]):
                text.row(-INF, [*bits, (-float(cards[key.template]) / 1e9, n[key])], 0.0)


def check(program: FlowProgram, allocation: Allocation, fraction: float = 1.0) -> None:
    """Everything a plan must keep, counted from its own numbers."""
    node_supply, groups = program.fleet, program.models
    used = np.zeros(node_supply.available.shape)
    rent = cost = 0.0
    counts, running = dict(allocation.counts), dict(program.running)
    for key, count in counts.items():
        assert isinstance(count, int)
        assert count > 0
        price = float(node_supply.price_usd_per_h[key.region] @ groups[key.group].uses[key.template])
        used[key.region] += groups[key.group].uses[key.template] * float(count)
        rent += price * count
        cost += price * count + program.init_penalty * price * max(0, count - running.get(key, 0))
        parts = groups[key.group].complexity_usd_per_h
        cost += 0.0 if parts is None else float(parts[key.template, key.region]) * count
    assert (used <= node_supply.available).all()
    assert rent == approx(allocation.rent_usd_per_h)
    if program.budget_usd_per_h is not None:
        assert rent <= program.budget_usd_per_h * (1 + 1e-7) + 1e-7
    for pin in program.pins:
        have = counts.get(pin.key, 0)
        assert have == pin.copies if pin.exactly else have >= pin.copies
    cost += _check_flows(program, allocation, counts, fraction)
    assert cost == approx(allocation.cost_usd_per_h)


def _check_flows(
    program: FlowProgram, allocation: Allocation, counts: dict[ColumnKey, int], fraction: float
) -> float:
    egress = 0.0
    for key, count in counts.items():
        spent = sum(share.copies for share in allocation.shares if share.key == key)
        assert spent <= program.headroom * count * (1 + 1e-6) + 1e-6
        model = program.models[key.group]
        for phase, cards in (("prefill", model.sends_bits_per_s), ("decode", model.takes_bits_per_s)):
            mine = [s for s in allocation.shares if s.key == key and s.phase == phase]
            bits = sum(s.rate_per_s * model.buckets[s.bucket].kv_bits for s in mine)
            assert cards is None or bits <= cards[key.template] * count * (1 + 1e-6) + 1e-3
    assert {share.key for share in allocation.shares} <= set(counts)
    carried = [0.0] * len(program.links)
    for m, model in enumerate(program.models):
        tables = {"prefill": model.prefill_per_s, "decode": model.decode_per_s, "closed": model.closed_per_s}
        for b, bucket in enumerate(model.buckets):
            shares = [s for s in allocation.shares if s.key.group == m and s.bucket == b]
            flows = [f for f in allocation.flows if f.model == m and f.bucket == b]
            for s in shares:
                assert s.rate_per_s == approx(s.copies * tables[s.phase][s.key.template, b])
            inside = sum(s.rate_per_s for s in shares if s.phase == "closed")
            need = bucket.rate_per_s * fraction
            assert inside + sum(f.rate_per_s for f in flows) >= need * (1 - 1e-6) - 1e-9
            for r in range(len(program.fleet.regions)):
                for phase, end in (("prefill", "source"), ("decode", "target")):
                    can = sum(s.rate_per_s for s in shares if s.phase == phase and s.key.region == r)
                    asked = sum(f.rate_per_s for f in flows if getattr(f, end) == r)
                    assert can >= asked * (1 - 1e-6) - 1e-6 * bucket.rate_per_s
            for f in flows:
                if f.source != f.target:
                    at = [
                        i for i, k in enumerate(program.links) if (k.source, k.target) == (f.source, f.target)
                    ]
                    carried[at[0]] += f.rate_per_s * bucket.kv_bits
                    egress += f.rate_per_s * bucket.crossing_usd_per_h
                    egress += (
                        program.links[at[0]].egress_usd_per_gb * f.rate_per_s * bucket.kv_bits / 8e9 * 3600
                    )
    for bits, link in zip(carried, program.links, strict=True):
        assert bits <= link.bits_per_s * (1 + 1e-6)
    return egress


def approx(value: float) -> object:
    import pytest

    return pytest.approx(value, rel=1e-6, abs=1e-6)


def random_fleet(rng: np.random.Generator, most: int) -> NodeSupply:
    regions, types = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    return NodeSupply(
        tuple(f"region{r}" for r in range(regions)),
        tuple(f"{c + 1}xGPU" for c in range(types)),
        rng.uniform(0.5, 5.0, (regions, types)).round(2),
        rng.integers(0, most + 1, (regions, types)),
    )


def random_uses(rng: np.random.Generator, templates: int, types: int) -> np.ndarray:
    uses = rng.integers(0, 3, (templates, types)).astype(np.uint8)
    uses[np.arange(templates), rng.integers(0, types, templates)] += 1
    return uses


def closed(name: str, rate: float, uses: np.ndarray, per_s: np.ndarray) -> ModelColumns:
    """A model with one bucket, whose templates do both phases: CORAL's program, one row for each demand."""
    none = np.zeros((len(uses), 1))
    return ModelColumns(name, (DemandBucket(name, rate, 0.0),), uses, none, none, per_s[:, None])


def random_closed(seed: int, *, extras: bool = True) -> FlowProgram:
    """A small CORAL-like program; about one in four is infeasible."""
    rng = np.random.default_rng(seed)
    node_supply = random_fleet(rng, 12)
    models = []
    for m in range(int(rng.integers(1, 5))):
        uses = random_uses(rng, int(rng.integers(1, 7)), len(node_supply.nodes))
        worth = uses @ rng.uniform(1, 4, len(node_supply.nodes))
        models.append(
            closed(f"m{m}", float(rng.uniform(1, 15)), uses, worth * rng.uniform(0.6, 1.2, len(uses)))
        )
    sizes = [len(model.uses) for model in models]
    return FlowProgram(
        node_supply, tuple(models), **(random_extras(rng, node_supply, sizes) if extras else {})
    )


def random_flow(seed: int, *, extras: bool = True) -> FlowProgram:
    """A small general program with buckets, links, closed groups and egress."""
    rng = np.random.default_rng(seed)
    node_supply = random_fleet(rng, 14)
    models = []
    for m in range(int(rng.integers(1, 3))):
        buckets = tuple(
            DemandBucket(
                f"b{b}",
                float(rng.uniform(0, 5) * (rng.random() < 0.9)),
                float(rng.uniform(0, 2e9)),
                frozenset({(0, 1)}) if rng.random() < 0.2 else frozenset(),
            )
            for b in range(int(rng.integers(1, 4)))
        )
        uses = random_uses(rng, int(rng.integers(1, 6)), len(node_supply.nodes))
        size = (uses @ rng.uniform(1, 4, len(node_supply.nodes)))[:, None]
        tables = [size * rng.uniform(0.5, 2.0, (len(uses), len(buckets))) for _ in range(3)]
        kind = rng.integers(0, 4, len(uses))  # prefill, decode, both, closed
        tables[0][(kind == 1) | (kind == 3)] = 0
        tables[1][(kind == 0) | (kind == 3)] = 0
        tables[2][kind != 3] = 0
        tables[2] *= 0.5
        allowed = rng.random((len(uses), len(node_supply.regions))) < 0.9 if rng.random() < 0.3 else None
        models.append(ModelColumns(f"model{m}", buckets, uses, *tables, allowed=allowed))
    links = tuple(
        LinkRow(r, s, float(rng.uniform(1e8, 6e9)), float(rng.choice([0.0, 0.02])))
        for r in range(len(node_supply.regions))
        for s in range(len(node_supply.regions))
        if r != s and rng.random() < 0.6
    )
    sizes = [len(model.uses) for model in models]
    return FlowProgram(
        node_supply, tuple(models), links, **(random_extras(rng, node_supply, sizes) if extras else {})
    )


def random_cards(seed: int, *, extras: bool = True) -> FlowProgram:
    """A general program whose copies have network cards, many of them thin."""
    program, rng = random_flow(seed, extras=extras), np.random.default_rng(seed + 1_000_000)
    models = []
    for model in program.models:
        most = max(float((model.prefill_per_s + model.decode_per_s).max()), 1.0)
        size = most * max(bucket.kv_bits for bucket in model.buckets) + 1.0
        cards = [size * rng.uniform(0.05, 1.2, len(model.uses)) for _ in range(2)]
        cards[0][rng.random(len(model.uses)) < 0.2] = np.inf
        models.append(replace(model, sends_bits_per_s=cards[0], takes_bits_per_s=cards[1]))
    return replace(program, models=tuple(models))


def random_extras(rng: np.random.Generator, node_supply: NodeSupply, sizes: list[int]) -> dict[str, object]:
    keys = [
        ColumnKey(g, t, r)
        for g, size in enumerate(sizes)
        for t in range(size)
        for r in range(len(node_supply.regions))
    ]
    running = {keys[i]: int(rng.integers(1, 4)) for i in rng.integers(0, len(keys), int(rng.integers(0, 4)))}
    pins = {
        keys[i]: int(rng.integers(0, 3)) for i in rng.integers(0, len(keys), int(rng.integers(0, 3)) // 2)
    }
    return {
        "running": tuple(ColumnCount(key, count) for key, count in running.items()),
        "pins": tuple(ColumnPin(key, count, bool(rng.random() < 0.5)) for key, count in pins.items()),
        "init_penalty": float(rng.choice([0.0, 0.1, 0.5])),
        "headroom": float(rng.choice([1.0, 0.8])),
        "budget_usd_per_h": float(rng.uniform(10, 80)) if rng.random() < 0.25 else None,
    }

"""Pools in specs: derived regions and links, with line of every problem."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_texts import GOOD, only_problem, parsed_spec, problems_of

from potluck.catalog import nodes
from potluck.core.values.layout import PoolNode
from potluck.core.values.types import Link, NodeOffer
from potluck.spec import spec_hardware
from potluck.spec.load_spec import load_spec, parse_spec

EXAMPLE = Path(__file__).parents[2] / "examples" / "pool.yaml"
MODELS = GOOD.split("fleet:")[0]
POOL = (
    MODELS
    + """\
pool:
  machines:
    - {name: one, node: 2xL40S, price_usd_per_h: 3}
    - {name: two, node: 2xL40S, price_usd_per_h: 3}
    - {name: three, node: 1xL4, price_usd_per_h: 0.8, region: lab}
  gbps:
    - [0, 40, 5]
    - [20, 0, 10]
    - [8, 9, 0]
  rtt_ms: [[0, 0.1, 20], [0.1, 0, 30], [20, 30, 0]]
"""
)


def changed_pool(old: str, new: str) -> str:
    assert old in POOL
    return POOL.replace(old, new, 1)


def test_regions_and_links_are_derived_from_a_pool() -> None:
    spec = parsed_spec(POOL)
    assert spec.pool is not None
    assert [(n.name, n.region, n.gpus) for n in spec.pool.nodes] == [
        ("one", "pool", 2),
        ("two", "pool", 2),
        ("three", "lab", 1),
    ]
    assert spec.region("pool").offers == (NodeOffer("2xL40S", 3, 2),)
    assert spec.region("lab").offers == (NodeOffer("1xL4", 0.8, 1),)
    assert spec.pool.gbps[0][1:] == (40, 5)
    assert spec.pool.gbps[1][0] == 20  # the two directions may be unlike
    assert set(spec.links) == {Link("pool", "lab", 5, 0.03), Link("lab", "pool", 8, 0.03)}
    assert spec.price_source("pool", "2xL40S") == "spec"


def test_node_network_bandwidth_is_that_of_its_slowest_pool_link() -> None:
    spec = parsed_spec(POOL)
    assert spec.node_type("2xL40S").network_gbps == 20  # within its region only
    assert spec.node_type("1xL4").network_gbps == parsed_spec().node_type("1xL4").network_gbps  # alone there
    assert {node.type.network_gbps for node in spec.pool.nodes[:2]} == {20}  # type: ignore[union-attr]


def test_single_pool_bandwidth_applies_to_every_link_and_written_links_override_it() -> None:
    text = POOL.split("  gbps:")[0] + "  gbps: 25\n"
    spec = parsed_spec(text)
    assert spec.pool is not None
    assert {spec.pool.gbps[a][b] for a in range(3) for b in range(3) if a != b} == {25}
    assert {spec.pool.rtt_s[a][b] for a in range(3) for b in range(3) if a != b} == {1e-4}
    written = parsed_spec(text + "links:\n  - {from: pool, to: lab, gbps: 1, rtt_ms: 5}\n")
    assert written.links == (Link("pool", "lab", 1, 0.005),)


def test_omitted_pool_prices_come_from_the_catalog() -> None:
    spec = load_spec(EXAMPLE)
    assert spec.pool is not None
    assert spec.pool.gpus == 32
    assert all(node.price_usd_per_h > 0 for node in spec.pool.nodes)
    assert spec.price_source("pool", "8xA40").startswith("catalog: ")


def test_pool_machines_without_a_listed_price_cost_nothing() -> None:
    text = POOL.replace("three, node: 1xL4, price_usd_per_h: 0.8", "three, node: 1xMine")
    spec = parse_spec(
        text + "gpus: [{name: Mine, fp16_tflops: 80, memory_gb: 24, bandwidth_gb_per_s: 500}]\n"
    )
    assert spec.pool is not None
    assert spec.pool.nodes[2].price_usd_per_h == 0
    assert "1xMine: nobody lists a price, so it is taken as owned and costs nothing" in spec.notes


# fmt: off
BAD = [
    ("- [8, 9, 0]\n", "\n", "14: pool.gbps: must be one number, or 3 rows of 3"),
    ("[20, 0, 10]", "[20, 0]", "16: pool.gbps[1]: must be one number, or 3 rows of 3"),
    (
        "[20, 0, 10]",
        "7",
        "16: pool.gbps[1]: must be one number, or 3 rows of 3: a row and a column per machine; row 2 is 7",
    ),
    ("[20, 0, 10]", "[20, 0, 0]", "16: pool.gbps[1][2]: must be positive, is 0"),
    ("[20, 0, 10]", "[-20, 0, 1]", "16: pool.gbps[1][0]: must be positive, is -20"),
    ("[20, 0, 10]", "[.nan, 0, 1]", "16: pool.gbps[1][0]: must be a finite number"),
    ("[20, 0, 10]", "[fast, 0, 1]", "16: pool.gbps[1][0]: must be a number, is 'fast'"),
    ("[20, 0, 10]", "[1e9, 0, 1]", "16: pool.gbps[1][0]: must be at most 1e+06"),
    ("[0.1, 0, 30]", "[-1, 0, 30]", "18: pool.rtt_ms[1][0]: must not be negative, is -1"),
    ("node: 1xL4", "node: 1xL5", "13: pool.machines[2].node: '1xL5': unknown GPU 'L5'"),
    ("name: two", "name: one", "12: pool.machines[1].name: duplicate machine 'one'; give each its own name"),
    (", region: lab", ", region: lab, zone: ''", "13: pool.machines[2].zone: must not be empty"),
    (", region: lab", ", region: lab, zone: [a]", "13: pool.machines[2].zone: must be"),
    (", region: lab", ", region: lab, zoen: a", "13: pool.machines[2].zoen: unknown key; did you mean 'zone'?"),
    ("name: two, ", "", "12: pool.machines[1].name: is missing"),
    ("name: two", "nmae: two", "12: pool.machines[1].nmae: unknown key; did you mean 'name'?"),
    (
        "two, node: 2xL40S, price_usd_per_h: 3",
        "two, node: 2xL40S, price_usd_per_h: 4",
        "12: pool.machines[1].price_usd_per_h: 4 is not what 'one' costs, 3; machines of one type and region",
    ),
    ("price_usd_per_h: 3}", "price_usd_per_h: -3}", "11: pool.machines[0].price_usd_per_h: must not be negative"),
    (
        "pool:\n",
        "fleet: {regions: [{name: x, nodes: [{node: 1xL4, available: 1}]}]}\npool:\n",
        "10: pool: stands beside",
    ),
]
# fmt: on


@pytest.mark.parametrize(("old", "new", "says"), BAD)
def test_invalid_pool_is_refused_in_one_line(old: str, new: str, says: str) -> None:
    assert only_problem(changed_pool(old, new)).startswith(f"potluck.yaml:{says}")


def test_pool_machines_may_have_a_zone() -> None:
    spec = parsed_spec(changed_pool(", region: lab", ", region: lab, zone: rack 7"))
    assert spec.pool is not None
    assert [node.zone for node in spec.pool.nodes] == ["", "", "rack 7"]


def test_all_pool_problems_are_reported_together() -> None:
    text = (
        changed_pool("node: 1xL4", "node: 1xL5")
        .replace("[20, 0, 10]", "[0, 0, 10]")
        .replace("ttft_ms: 500", "ttft_ms: -1")
    )
    assert [problem.line for problem in problems_of(text)] == [4, 13, 16]


def test_empty_pool_or_missing_bandwidth_is_refused() -> None:
    assert "pool.machines: needs at least one entry" in only_problem(
        MODELS + "pool: {machines: [], gbps: 1}\n"
    )
    assert "pool.gbps: is missing" in only_problem(POOL.split("  gbps:")[0])
    assert "pool: must be a mapping" in only_problem(MODELS + "pool: 3\n")


KINDS = ("1xL4", "2xL4", "1xA10G", "2xL40S")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_pool_has_the_slowest_links_of_its_machines(
    count: int, regions: int, seed: int, uniform_gbps: bool, uniform_rtt: bool
) -> None:
    """Against every pair of machines looked at one by one."""
    chance = Random(seed)
    types = [chance.choice(KINDS) for _ in range(count)]
    places = [f"r{chance.randrange(regions)}" for _ in range(count)]
    gbps = [[chance.choice([5.0, 10.0, 25.0, 100.0]) for _ in range(count)] for _ in range(count)]
    rtt_ms = [[chance.choice([0.1, 2.0, 30.0]) for _ in range(count)] for _ in range(count)]
    gbps = [[25.0] * count] * count if uniform_gbps else gbps
    rtt_ms = [[2.0] * count] * count if uniform_rtt else rtt_ms
    machines = "".join(
        f"    - {{name: m{i}, node: {types[i]}, region: {places[i]}, price_usd_per_h: 1}}\n"
        for i in range(count)
    )
    written = f"  gbps: {25 if uniform_gbps else gbps}\n  rtt_ms: {2 if uniform_rtt else rtt_ms}\n"
    spec = parsed_spec(f"{MODELS}pool:\n  machines:\n{machines}{written}")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    near = {
        kind: [min(gbps[a][b], gbps[b][a]) for a, b in pairs if types[a] == kind and places[a] == places[b]]
        for kind in types
    }
    for kind in types:
        own = nodes.node_type(kind).network_gbps
        assert spec.node_type(nodes.canonical(kind)).network_gbps == min(near[kind], default=own)
    ends = {(places[a], places[b]) for a, b in pairs if places[a] != places[b]}
    links = {
        Link(
            *key,
            min(gbps[a][b] for a, b in pairs if (places[a], places[b]) == key),
            max(rtt_ms[a][b] for a, b in pairs if (places[a], places[b]) == key) / 1000,
        )
        for key in ends
    }
    assert set(spec.links) == links


class CountedRow(tuple[float, ...]):
    """A row of a matrix that counts how often one of its numbers is read."""

    reads = 0

    def __getitem__(self, place: object) -> float:  # type: ignore[override]
        CountedRow.reads += 1
        return super().__getitem__(place)  # type: ignore[index,return-value]


def test_slowest_pool_links_are_found_in_a_fixed_number_of_reads_per_pair() -> None:
    kinds = [nodes.node_type(kind) for kind in KINDS]
    for count in (20, 40, 80):
        machines = [PoolNode(f"m{i}", kinds[i % 4], kinds[i % 4].gpus) for i in range(count)]
        gbps = tuple(CountedRow([25.0] * count) for _ in range(count))
        CountedRow.reads = 0
        spec_hardware._on_slowest(machines, gbps)
        assert CountedRow.reads <= 2 * count * count
        CountedRow.reads = 0
        spec_hardware._on_slowest(machines, (gbps[0],) * count)
        assert CountedRow.reads <= 2 * count, "one number for every pair"

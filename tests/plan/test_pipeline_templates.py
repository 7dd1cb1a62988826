"""Pipeline templates against CORAL's integer program, brute force and a second search; pruning; layouts."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray
from papers.coral_placement import brute_force, integer_program

from potluck.catalog import models, nodes
from potluck.core.errors import InputError
from potluck.core.values.types import Slo
from potluck.plan.templates import pipeline
from potluck.plan.timing.stage_rates import StageRates, stage_rates

Ints = NDArray[np.int64]
ENDLESS = 1 << 60
INSTANCES = 400


def random_rates(rng: np.random.Generator, stages: int, kinds: int, layers: int) -> Ints:
    """Tables of many characters: falling with zeros at the end, noisy, arbitrary, with many ties."""
    character = rng.integers(4)  # 3 stays as it is: falling
    top = int(rng.choice([3, 20, 1000]))
    if character == 0:
        table = rng.integers(0, top + 1, (stages, kinds, layers))
    else:
        base = rng.integers(1, top + 1, (stages, kinds, 1)) * 4 / np.arange(1, layers + 1)
        table = base.astype(np.int64)
        if character == 1:
            table = (table * rng.uniform(0.7, 1.3, table.shape)).astype(np.int64)
        if character == 2:
            table = -np.sort(-rng.integers(0, top + 1, (stages, kinds, layers)), axis=2)
    most = rng.integers(0, layers + 1, (stages, kinds, 1))
    return np.where(np.arange(layers) < most, table, 0).astype(np.int64)


def instances(seed: int, count: int, most_layers: int = 7) -> list[tuple[Ints, int]]:
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        max_nodes, kinds, layers = (int(rng.integers(1, top + 1)) for top in (4, 3, most_layers))
        layers = max(layers, int(rng.integers(1, 5)))
        result.append((random_rates(rng, int(rng.integers(1, max_nodes + 1)), kinds, layers), max_nodes))
    return result


def all_optima(rates: Ints, max_nodes: int, *, prune: bool = False) -> tuple[Ints, NDArray[np.uint8]]:
    return pipeline.solve(rates, np.ones(rates.shape[1], np.int64), ENDLESS, max_nodes, prune=prune)


def increases(rates: Ints) -> bool:
    return bool((np.diff(rates, axis=2) > 0).any())


def test_every_multiset_optimum_equals_brute_force() -> None:
    compared, noisy = 0, 0
    for rates, max_nodes in instances(1, 2 * INSTANCES):
        units, stages = all_optima(rates, max_nodes)
        multisets = pipeline.multisets(rates.shape[1], max_nodes)
        noisy += increases(rates)
        for number in range(1, multisets.count):
            truth = brute_force(rates, multisets.types_of(number))
            assert units[number] == truth.units
            assert (stages[number] > 0) == (truth.units > 0)
            compared += 1
    assert compared > 3000
    assert noisy > 150


@pytest.mark.slow
def test_random_multiset_optima_equal_corals_integer_program() -> None:
    rng = np.random.default_rng(2)
    noisy = 0
    for rates, max_nodes in instances(3, INSTANCES // 2, most_layers=6):
        units, _ = all_optima(rates, max_nodes)
        multisets = pipeline.multisets(rates.shape[1], max_nodes)
        number = int(rng.integers(max(multisets.count // 2, 1), multisets.count))
        truth = integer_program(rates, multisets.types_of(number))
        assert truth.proven
        assert units[number] == truth.units
        noisy += increases(rates)
    assert noisy > 30


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_pipelines_of_many_layers_equal_the_second_search(noise: float) -> None:
    rng = np.random.default_rng(4)
    for layers in (40, 94, 128):
        base = rng.uniform(2e4, 2e6, (1, 5, 1)) / np.arange(1, layers + 1) * rng.uniform(0.9, 1, (6, 5, 1))
        table = base * rng.uniform(1 - noise, 1 + noise, base.shape)
        most = rng.integers(layers // 8, layers, (1, 5, 1))
        rates = np.where(np.arange(layers) < most, table, 0).astype(np.int64)
        assert increases(rates) == (noise > 0)
        units, stages = all_optima(rates, 6)
        multisets = pipeline.multisets(5, 6)
        for number in rng.integers(multisets.offsets[4], multisets.count, 12):
            result = pipeline.best_placement(rates, multisets.types_of(int(number)))
            assert units[number] == (result.units if result else 0)
            again = pipeline.best_placement(
                rates, multisets.types_of(int(number)), stages=int(stages[number])
            )
            assert again is None or again.units == units[number]


@pytest.mark.parametrize(("kinds", "max_nodes"), [(3, 7), (2, 8), (1, 8), (4, 5)])
def test_pipelines_of_other_node_counts_equal_the_second_search(kinds: int, max_nodes: int) -> None:
    rng = np.random.default_rng(9)
    multisets = pipeline.multisets(kinds, max_nodes)
    for layers in (3, 9, 20):
        rates = random_rates(rng, max_nodes, kinds, layers)
        units, _ = all_optima(rates, max_nodes)
        for number in {*rng.integers(1, multisets.count, 6).tolist(), multisets.count - 1}:
            result = pipeline.best_placement(rates, multisets.types_of(number))
            assert units[number] == (result.units if result else 0)


def splits(types: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    places = range(len(types))
    return {
        (tuple(types[i] for i in part), tuple(types[i] for i in places if i not in part))
        for size in range(1, len(types))
        for part in combinations(places, size)
    }


def test_pruning_drops_exactly_the_pipelines_that_a_split_replaces() -> None:
    dropped = kept = 0
    for rates, max_nodes in instances(5, 150):
        multisets = pipeline.multisets(rates.shape[1], max_nodes)
        exact, _ = all_optima(rates, max_nodes)
        units, stages = all_optima(rates, max_nodes, prune=True)
        apart_or_together: dict[tuple[int, ...], int] = {}
        for number in range(1, multisets.count):
            types = multisets.types_of(number)
            apart = max((sum(map(apart_or_together.__getitem__, two)) for two in splits(types)), default=0)
            apart_or_together[types] = max(apart, int(exact[number]))
            assert (stages[number] > 0) == (exact[number] > apart)
            assert units[number] == apart_or_together[types]
            dropped += exact[number] > 0 and not stages[number]
            kept += stages[number] > 0
    assert dropped > 100
    assert kept > 100


def test_pipelines_with_one_node_per_stage_equal_brute_force() -> None:
    kept = 0
    for rates, max_nodes in instances(11, INSTANCES):
        multisets = pipeline.multisets(rates.shape[1], max_nodes)
        units, stages = pipeline.solve(
            rates, np.ones(rates.shape[1], np.int64), ENDLESS, max_nodes, prune=True, alone=True
        )
        best: dict[tuple[int, ...], int] = {}
        for number in range(1, multisets.count):
            types = multisets.types_of(number)
            size, together = len(types), 0
            if size <= min(rates.shape[0], rates.shape[2]):
                together = pipeline.divide(rates[size - 1, list(types)])[0]
            apart = max((sum(map(best.__getitem__, two)) for two in splits(types)), default=0)
            best[types] = max(apart, together)
            assert units[number] == best[types]
            assert stages[number] == (size if together > apart else 0)
            kept += size > 1 and together > apart
    assert kept > 100


def test_pipelines_above_the_memory_limit_are_left_out_and_others_unchanged() -> None:
    rng = np.random.default_rng(6)
    for rates, max_nodes in instances(7, 60):
        node_bytes = rng.integers(1, 9, rates.shape[1])
        limit = int(rng.integers(1, 20))
        multisets = pipeline.multisets(rates.shape[1], max_nodes)
        every, _ = all_optima(rates, max_nodes)
        units, _ = pipeline.solve(rates, node_bytes, limit, max_nodes, prune=False)
        for number in range(multisets.count):
            within = sum(node_bytes[t] for t in multisets.types_of(number)) <= limit
            assert units[number] == (every[number] if within else 0)


def test_layer_division_equals_brute_force() -> None:
    rates = np.array([[9, 7, 1, 8], [5, 0, 6, 0]])
    assert pipeline.divide(rates) == (5, (3, 1)) or pipeline.divide(rates)[0] == 6
    assert pipeline.divide(np.array([[4, 3, 2]])) == (2, (3,))
    assert pipeline.divide(np.zeros((2, 3), np.int64))[0] == 0
    assert pipeline.divide(np.ones((4, 3), np.int64))[0] == 0  # more stages than layers


def test_partition_counts_equal_known_values() -> None:
    table = pipeline.partitions(6)
    assert [len(table.of(6, 0, s)) for s in range(1, 7)] == [1, 31, 90, 65, 15, 1]  # Stirling numbers
    assert [len(table.of(6, 31, s)) for s in range(1, 7)] == [1, 3, 3, 2, 1, 1]  # partitions of 6
    assert pipeline.pattern_of((0, 0, 3, 4, 4)) == 0b1001
    for masks in table.of(5, 0, 3):
        assert sum(int(m) for m in masks) == 31


@pytest.fixture(scope="module")
def both() -> tuple[StageRates, StageRates]:
    types = [nodes.node_type(name) for name in ("1xL4", "2xL40S", "1xA100-80", "4xA10G")]
    return stage_rates(models.model("Qwen3-32B"), types, Slo(1.6, 0.1), 768, 195, max_stages=4)


def test_library_placement_reaches_its_stated_throughput(both: tuple[StageRates, StageRates]) -> None:
    for rates in both:
        library = pipeline.pipeline_library(rates, max_nodes=4)
        assert 0 < len(library) <= library.valid
        index = {node.name: g for g, node in enumerate(rates.nodes)}
        for i in np.random.default_rng(8).integers(0, len(library), 20):
            layout = library.placement(int(i))
            assert layout.layer_count == rates.model.layer_count
            assert len(layout.stages) == library.stages[i]
            counts = {rates.nodes[g].name: int(c) for g, c in enumerate(library.counts[i]) if c}
            assert layout.node_counts == counts
            slowest = min(
                sum(rates.units[len(layout.stages) - 1, index[m.node], stage.layers - 1] for m in stage.nodes)
                for stage in layout.stages
            )
            assert slowest == library.units[i]


def test_pipeline_solver_refuses_invalid_tables() -> None:
    one = np.ones(1, np.int64)
    for rates, bytes_of in (
        (np.zeros((1, 1, 200), np.int64), one),
        (-np.ones((1, 1, 4), np.int64), one),
        (np.full((1, 1, 4), 1 << 46), one),
        (np.ones((1, 1, 4), np.int64), 0 * one),
    ):
        with pytest.raises(InputError):
            pipeline.solve(rates, bytes_of, 10, 2, prune=True)

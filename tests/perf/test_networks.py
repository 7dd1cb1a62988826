"""Collectives between the GPUs of a node: the regimes, and how far they are from what was measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from accuracy.scores import stored_scores
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import nodes
from potluck.core.errors import InputError
from potluck.core.values.types import Interconnect
from potluck.perf.operators.calibration import bundled
from potluck.perf.operators.network import OWN_MOST_BYTES, all_reduce_s, all_to_all_s

SWITCH = Interconnect("nvswitch", 450.0, 7e-6)
PEERS = Interconnect("pcie", 32.0, 24e-6)
PAIRS = Interconnect("pcie", 32.0, 24e-6, domain=2)
ALONE = Interconnect("pcie", 32.0, 24e-6, domain=1)
MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured"


def reduce_us(size_bytes: float, ranks: int, link: Interconnect) -> float:
    return float(all_reduce_s(size_bytes, ranks, link, bundled().networks)) * 1e6


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_small_sums_over_a_switch_take_a_few_microseconds(ranks: int) -> None:
    # Measured on H100: 4.2 to 5.6 µs up to 16 KiB, in a CUDA graph.
    assert 3.5 < reduce_us(256, ranks, SWITCH) < reduce_us(16384, ranks, SWITCH) < 7.0


def test_the_ways_of_a_switch_meet_without_a_fall() -> None:
    """From direct to split to library no size is much cheaper than a smaller one."""
    sizes = np.geomspace(256, 1 << 30, 400)
    for ranks in (2, 4, 8):
        times = all_reduce_s(sizes, ranks, SWITCH, bundled().networks)
        assert (times[1:] > 0.85 * times[:-1]).all()


def test_more_ranks_than_have_peer_access_share_the_way_through_the_host() -> None:
    size = 8 << 20
    pair, four, eight = (reduce_us(size, ranks, PAIRS) for ranks in (2, 4, 8))
    assert four == reduce_us(size, 4, ALONE)
    assert pair < reduce_us(size, 2, ALONE)
    # Each of n ranks sends 2 (n-1)/n of it through a way that all n share: 2 (n-1).
    assert eight / four == pytest.approx(7 / 3, rel=0.02)
    assert four > 4 * reduce_us(size, 4, PEERS)


def test_a_mesh_without_a_switch_is_left_to_the_library() -> None:
    mesh = Interconnect("nvlink", 300.0, 7e-6)
    assert reduce_us(1024, 4, mesh) > 2 * reduce_us(1024, 4, Interconnect("nvswitch", 300.0, 7e-6))
    assert reduce_us(1024, 2, mesh) == reduce_us(1024, 2, Interconnect("nvswitch", 300.0, 7e-6))


@given(st.sampled_from(["nvswitch", "pcie", "xgmi"]), st.sampled_from([2, 4, 8]), st.floats(1e3, 1e9))
def test_faster_links_and_smaller_sizes_never_take_longer(kind: str, ranks: int, size: float) -> None:
    slow, fast = (Interconnect(kind, rate, 1e-5) for rate in (440.0, 450.0))  # type: ignore[arg-type]
    networks = bundled().networks
    for function in (all_reduce_s, all_to_all_s):
        assert function(size, ranks, fast, networks) <= function(size, ranks, slow, networks)
    if size * 1.1 < OWN_MOST_BYTES / 40:
        assert all_reduce_s(size, ranks, slow, networks) <= all_reduce_s(size * 1.1, ranks, slow, networks)


def test_cards_that_cannot_read_each_other_are_marked_in_the_catalog() -> None:
    domains = {name: nodes.node_type(f"8x{name}").interconnect.domain for name in ("RTX4090", "L40S", "A40")}
    assert domains == {"RTX4090": 1, "L40S": 2, "A40": None}
    assert nodes.node_type("2xA40").interconnect.domain == 2
    assert [f.value for f in nodes.facts("8xL40S").figures if f.field == "domain"] == [2]
    with pytest.raises(InputError, match="domain"):
        Interconnect("pcie", 32.0, 0.0, domain=0)


def test_stored_errors_of_links_are_within_what_was_promised() -> None:
    """All-reduce over NVSwitch within 20 % from the other machine, PCIe within 15 % when calibrated."""
    found = {(s.question, s.gpu): s.median for s in stored_scores() if s.kind == "all-reduce"}
    assert all(found["GPU left out", gpu] <= 0.20 for gpu in ("A100-80", "H100-SXM"))
    assert found["calibrated", "L40S"] <= 0.15


@pytest.mark.skipif(not MEASURED.is_dir(), reason="needs the folder of measurements")
def test_bundled_networks_are_near_the_measured_collectives() -> None:
    from accuracy.networks import LINKS, predict, read_collectives

    for rows in read_collectives(MEASURED):
        if rows.op == "all_reduce":
            error = np.abs(predict(rows, LINKS[rows.gpu], bundled().networks) / rows.seconds - 1.0)
            assert float(np.median(error)) < 0.08, rows.gpu

"""Start-up times against the sums that the papers print."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.perf.startup import StartupCosts, startup_s

LLAMA_8B_BYTES = 8.03e9 * 2
LLAMA_70B_BYTES = 70.6e9 * 2


def test_startup_of_a_new_instance_takes_cauchys_90_seconds():
    assert startup_s(LLAMA_8B_BYTES).total_s == pytest.approx(90, rel=0.05)
    assert StartupCosts().drain_s == 30


def test_startup_of_a_large_model_takes_corals_several_minutes():
    assert 180 <= startup_s(LLAMA_70B_BYTES).total_s <= 600


def test_role_flip_has_no_startup_time():
    assert StartupCosts().role_flip_s == 0


def test_startup_parts_add_up_and_carry_their_confidence():
    time = startup_s(10e9, 2, StartupCosts(1, 2, 0.5, 25, 4, confidence="measured"))
    assert (time.provision_s, time.container_s, time.load_s, time.engine_init_s) == (1, 2, 10, 4)
    assert time.total_s == 17
    assert time.confidence == "measured"
    assert startup_s(1e9).confidence == "assumed"


def test_load_time_from_a_fast_disk_is_limited_by_pcie():
    assert startup_s(50e9, costs=StartupCosts(load_gb_per_s=100)).load_s == pytest.approx(2.0)


@given(weight_bytes=st.floats(0, 1e13), nodes=st.integers(1, 64))
def test_load_time_falls_with_nodes_and_grows_with_weights(weight_bytes, nodes):
    assert startup_s(weight_bytes, nodes + 1).total_s <= startup_s(weight_bytes, nodes).total_s
    assert startup_s(weight_bytes, nodes).total_s <= startup_s(weight_bytes * 1.5, nodes).total_s

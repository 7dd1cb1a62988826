"""KV transfer: alpha-beta, codecs, overlap with prefill."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import InputError
from potluck.core.values.types import Link
from potluck.kv.codec_layout import sizes
from potluck.perf.transfer import AlphaBeta, alpha_beta, codec_ratio, link_alpha_beta

seconds = st.floats(0, 100)
byte_counts = st.floats(0, 1e12)
rates = st.floats(0.01, 1000)
MIB = 2**20


def transfer_s(wire_bytes, gbps, rtt_s=0.0, **more):
    return alpha_beta(gbps, rtt_s, **more).time_s(wire_bytes)


def test_transfer_time_is_latency_plus_bytes_over_bandwidth():
    assert transfer_s(1.25e9, 10, 0.02, connections=64, efficiency=1.0) == pytest.approx(1.02)
    assert transfer_s(0.0, 10, 0.02) == 0.0


def test_transfer_time_accepts_arrays():
    times = transfer_s(np.array([[0.0, 1e9], [2e9, 4e9]]), 8, efficiency=1.0)
    assert times.tolist() == [[0.0, 1.0], [2.0, 4.0]]


def test_high_latency_link_needs_several_connections_for_full_bandwidth():
    one, eight = alpha_beta(100, 0.05, connections=1), alpha_beta(100, 0.05, connections=8)
    assert one.beta_bytes_per_s == pytest.approx(4 * MIB / 0.05)
    assert eight.beta_bytes_per_s == pytest.approx(8 * one.beta_bytes_per_s)
    assert alpha_beta(100, 0.05, 1, 1.0, window_bytes=None).beta_bytes_per_s == pytest.approx(12.5e9)
    assert alpha_beta(10, 0.0001, 1, 1.0).beta_bytes_per_s == pytest.approx(1.25e9)


def test_link_between_regions_has_latency_and_effective_bandwidth():
    pair = link_alpha_beta(Link("a", "b", 10, 0.01), connections=16, efficiency=0.9)
    assert pair == AlphaBeta(0.01, 1.125e9)
    assert pair.time_s(1.125e9) - pair.stream_s(1.125e9) == pytest.approx(0.01)


@given(a=byte_counts, b=byte_counts, gbps=rates, faster=st.floats(1, 100), rtt_s=st.floats(0, 1))
def test_transfer_time_grows_with_bytes_and_falls_with_bandwidth_and_connections(a, b, gbps, faster, rtt_s):
    few, many = sorted((a, b))
    assert transfer_s(few, gbps, rtt_s) <= transfer_s(many, gbps, rtt_s)
    assert transfer_s(many, gbps * faster, rtt_s) <= transfer_s(many, gbps, rtt_s) * (1 + 1e-12)
    assert transfer_s(many, gbps, rtt_s, connections=2) <= transfer_s(many, gbps, rtt_s, connections=1)


def test_codec_ratios_include_their_scales():
    assert codec_ratio("fp16") == 1.0
    assert codec_ratio("int4", latent=True) == 4 / 16 + 32 / (16 * 128)
    assert codec_ratio("int4") < codec_ratio("int8") < codec_ratio("fp16")


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("tokens", [256, 3000])
def test_codec_ratio_equals_the_encoded_size(codec, tokens):
    """By the sizes that sender and receiver agree on, for whole groups within 1 %."""
    kv, latent = ("kv", (tokens, 2, 8, 128)), ("latent", (tokens, 1, 576))
    for (part, shape), is_latent in ((kv, False), (latent, True)):
        raw = sizes(part, "bfloat16", shape, "raw").total_bytes
        reckoned = raw * codec_ratio(codec, latent=is_latent)
        assert sizes(part, "bfloat16", shape, codec).total_bytes == pytest.approx(reckoned, rel=0.01)


def test_codec_ratio_of_kv_stored_in_8_bits_never_exceeds_one():
    assert codec_ratio("int8", stored_bits=8) == 1.0
    assert codec_ratio("fp16", stored_bits=8) == 1.0
    assert codec_ratio("int4", stored_bits=8) == pytest.approx(0.546875)


def test_unknown_codec_is_refused():
    with pytest.raises(InputError, match="codec"):
        codec_ratio("int2")

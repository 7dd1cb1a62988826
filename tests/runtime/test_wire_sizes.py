"""One size of KV on the wire, whoever counts it: simulator, routing, scaler and planner."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import models
from potluck.core.routing.link_states import LinkStates
from potluck.core.scaling.prfaas_scaling import ClusterBalance, rate_per_s
from potluck.core.scaling.roles import Flippable
from potluck.core.scaling.traffic_window import LengthCount
from potluck.core.state.facts import FleetFacts, ReplicaFacts
from potluck.core.state.request_state import RequestState
from potluck.core.values.types import Codec, Request, Slo
from potluck.perf.delays.transfer import crossing_bytes, wire_bytes
from potluck.perf.sizes.memory import kv_bytes, state_bytes
from potluck.plan.problem import CODECS, BucketDemand, ModelDemand
from potluck.plan.search.workload import PoolWorkload
from potluck.plan.templates.pair import _wire_bits
from potluck.plan.timing.network_cards import wire_bits
from potluck.runtime.replica_models import _model_facts, kv_of

SOME = [models.model(name) for name in models.names()]
FAST = ReplicaFacts(1e-12, 0.0, 1e-9, 64, 10**9, 10**9)


def scaled_bytes(facts: object, tokens: int, codec: Codec) -> float:
    """What the scaler reckons one prompt puts on a link: the rate of a link that is the only limit."""
    local = (Flippable("d", "here", "decode", 0, 1e12, 1e12, FAST),)
    site = ClusterBalance(Counter({FAST: 1}), local, 1e3, facts, codec)  # type: ignore[arg-type]
    return 1e3 / rate_per_s(site, (LengthCount(tokens, tokens + 1, 1, tokens),), 0, [True])


@given(st.sampled_from(SOME), st.sampled_from(CODECS), st.integers(1, 130_000))
def test_everyone_counts_the_same_bytes(model, codec: Codec, tokens: int) -> None:
    sent = kv_of(model).wire_bytes(0, tokens, codec)
    held, state = kv_bytes(model, float(tokens)), state_bytes(model)
    assert float(wire_bytes(held - state, state, codec, stored_bits=model.kv_bits)) == pytest.approx(sent)
    assert crossing_bytes(model, held, codec) == pytest.approx(sent)
    facts = _model_facts(model, 16, None, None, 1.0)
    assert facts.wire_bytes(tokens, codec) == pytest.approx(sent)
    assert scaled_bytes(facts, tokens, codec) == pytest.approx(sent)
    links = LinkStates(FleetFacts({"m": facts}, {}))
    links.codecs["m", "a", "b"] = codec
    links.send(RequestState(Request("1", "m", 0.0, tokens, 1)), "a", "b", tokens)
    assert links.open_bytes == pytest.approx(sent)
    demand = BucketDemand(model.name, 0, tokens, tokens, 1, 0, 1.0, held)
    ask = ModelDemand(model.name, model, Slo(1.0, 1.0), (demand,))
    assert wire_bits(ask, codec)[0] / 8 == pytest.approx(sent)
    assert _wire_bits(ask, tokens, codec) / 8 == pytest.approx(sent)
    roomy = replace(model, max_context_tokens=200_000)
    work = PoolWorkload(roomy, Slo(1.0, 1.0), tokens, 1, 1.0, codec)
    assert work.kv_bytes_per_layer * model.layer_count == pytest.approx(sent)


@given(st.sampled_from(SOME), st.integers(1, 130_000))
def test_no_codec_makes_more_of_it_and_none_touches_the_state(model, tokens: int) -> None:
    sizes = [kv_of(model).wire_bytes(0, tokens, codec) for codec in CODECS]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= state_bytes(model)


def test_the_state_of_a_hybrid_model_is_not_quantised() -> None:
    hybrids = [model for model in SOME if state_bytes(model) > 0]
    assert hybrids
    for model in hybrids:
        whole, small = (kv_of(model).wire_bytes(0, 8192, codec) for codec in ("fp16", "int4"))
        ratio = small / whole
        assert ratio > 0.267
        assert scaled_bytes(_model_facts(model, 16, None, None, 1.0), 8192, "int4") == pytest.approx(small)

"""Estimates: figures that belong together agree, and the degree chosen is the best there is."""

from __future__ import annotations

import pytest

from potluck.catalog import models, nodes
from potluck.core.errors import CapacityError, InputError
from potluck.core.values.types import Role, Slo
from potluck.perf.estimate import Estimate, estimate
from potluck.perf.memory import kv_bytes, weight_bytes
from potluck.perf.phases import decode_step_s, prefill_s
from potluck.perf.timers.roofline import roofline

ROLES: list[Role] = ["mixed", "prefill", "decode"]


def run(
    model: str = "Llama-3.1-8B",
    node: str = "2xL40S",
    tokens_in: int = 1024,
    tokens_out: int = 256,
    tp: int | None = None,
    slo: Slo | None = None,
    price: float | None = None,
    role: Role = "mixed",
) -> Estimate:
    return estimate(
        models.model(model),
        nodes.node_type(node),
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        tp=tp,
        slo=slo,
        price_usd_per_h=price,
        role=role,
    )


def test_estimate_times_equal_the_step_timer() -> None:
    estimate, timer = run(tp=2), roofline(models.model("Llama-3.1-8B"), nodes.node_type("2xL40S"), 2)
    assert estimate.prefill_s == prefill_s(timer, 1024)[0]
    assert estimate.decode_step_s == decode_step_s(timer, 1, 1024 + 128)[0]
    assert (estimate.confidence, estimate.basis) == (timer.confidence, timer.basis)


@pytest.mark.parametrize("role", ROLES)
def test_estimate_rates_and_prices_agree(role: Role) -> None:
    completed = run(price=3.6, role=role, tp=1)
    assert completed.operating is not None
    rate = completed.requests_per_s
    assert (completed.replicas, rate) == (2, 2 * completed.operating.requests_per_s)
    made, read = (0 if role == "prefill" else 256), (0 if role == "decode" else 1024)
    assert completed.output_tokens_per_s == pytest.approx(rate * made)
    assert completed.total_tokens_per_s == pytest.approx(rate * (made + read))
    # 3.60 USD an hour are 0.001 USD a second.
    assert completed.usd_per_million_tokens == pytest.approx(1000 / completed.total_tokens_per_s)
    if role == "prefill":
        assert completed.usd_per_million_output_tokens is None
    else:
        assert completed.usd_per_million_output_tokens == pytest.approx(1000 / completed.output_tokens_per_s)


def test_estimate_cost_is_proportional_to_node_price_and_absent_without_one() -> None:
    cheap, dear, free, unknown = (run(price=price) for price in (1.0, 2.0, 0.0, None))
    assert dear.usd_per_million_tokens == pytest.approx(2 * (cheap.usd_per_million_tokens or 0))
    assert free.usd_per_million_tokens == 0.0
    assert unknown.usd_per_million_tokens is None
    assert unknown.requests_per_s == cheap.requests_per_s


def test_estimate_memory_adds_up() -> None:
    estimate, model = run(tp=1), models.model("Llama-3.1-8B")
    assert estimate.weight_bytes == weight_bytes(model)
    item = kv_bytes(model, 1280)
    assert estimate.max_batch * item <= estimate.kv_bytes < (estimate.max_batch + 1) * item


@pytest.mark.parametrize("slo", [None, Slo(0.5, 0.03), Slo(0.05, 1.0)])
@pytest.mark.parametrize("role", ROLES)
def test_estimated_tp_degree_serves_the_most_requests(slo: Slo | None, role: Role) -> None:
    best = run(node="4xL40S", slo=slo, role=role)
    rates = [run(node="4xL40S", tp=tp, slo=slo, role=role).requests_per_s for tp in (1, 2, 4)]
    assert best.requests_per_s == max(rates)


def test_model_too_large_for_one_gpu_uses_tensor_parallelism() -> None:
    assert run("Llama-3-70B", "4xH100-SXM").tp in (2, 4)
    with pytest.raises(CapacityError, match="tensor parallelism 1"):
        run("Llama-3-70B", "4xH100-SXM", tp=1)
    with pytest.raises(CapacityError, match="Llama-3-70B does not fit on 2xL4 with tensor parallelism 2"):
        run("Llama-3-70B", "2xL4")


def test_tp_degree_divides_the_heads_on_an_odd_number_of_gpus() -> None:
    """32 heads over three GPUs: only one at a time."""
    completed = run(node="3xL40S")
    assert (completed.tp, completed.replicas) == (1, 3)


def test_estimate_keeps_its_objective_or_reports_it_as_impossible() -> None:
    free, tight, none = run(), run(slo=Slo(1.0, 0.03)), run(slo=Slo(1.0, 1e-4))
    assert tight.operating is not None
    assert tight.operating.tpot_s <= 0.03
    assert 0 < tight.requests_per_s < free.requests_per_s
    assert "TPOT" in tight.binds
    assert (none.operating, none.requests_per_s, none.usd_per_million_tokens) == (None, 0.0, None)
    assert "cannot be met" in none.binds


@pytest.mark.parametrize("role", ROLES)
def test_estimate_without_room_for_one_request_names_kv_memory(role: Role) -> None:
    """The weights take 16 of an A10's 21.6 usable GB; 100,000 tokens would need 13 more."""
    completed = run(node="A10", tokens_in=100_000, role=role)
    assert (completed.max_batch, completed.operating, completed.requests_per_s) == (0, None, 0.0)
    assert completed.binds == "KV memory: not even one such request fits"


def test_estimate_names_compute_or_bandwidth_as_the_bound_of_a_step() -> None:
    """One decode reads 16 GB for 16 GFLOP; a prompt of 1,024 tokens does a thousand times the arithmetic."""
    completed = run(slo=Slo(10.0, 0.03))
    assert (completed.prefill_bound, completed.decode_bound) == ("compute", "bandwidth")
    assert run(tokens_in=1, tokens_out=100).prefill_bound == "bandwidth"


def test_estimate_error_bar_widens_as_confidence_falls() -> None:
    """Wider the less is known; none where an engine was measured."""
    spans = []
    for node in ("1xH100-SXM", "1xA100-80", "1xA10", "1xMI300X"):
        completed = run(node=node)
        assert completed.rate_bar is not None
        assert completed.rate_bar.low < 1 < completed.rate_bar.high
        spans.append(completed.rate_bar.high / completed.rate_bar.low)
    assert spans == sorted(spans)


@pytest.mark.parametrize(
    ("tokens_in", "tokens_out", "field", "words"),
    [
        (0, 10, "input", "is 0"),
        (10, 0, "output", "is 0"),
        (0, -5, "input", "is 0"),
        (10, -5, "output", "is -5"),
        (131_072, 1, "input", "131072 tokens Llama-3.1-8B takes"),
    ],
)
def test_estimate_refuses_invalid_lengths(tokens_in: int, tokens_out: int, field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        run(tokens_in=tokens_in, tokens_out=tokens_out)
    assert caught.value.field == field


def test_estimate_accepts_the_longest_request() -> None:
    assert run(node="8xH100-SXM", tokens_in=131_071, tokens_out=1).max_batch > 0

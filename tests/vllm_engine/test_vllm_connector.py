"""The class that vLLM loads, without a running vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

connector = pytest.importorskip(
    "potluck.vllm.connector", reason="vLLM is not installed here: make test-vllm", exc_type=ImportError
)


def test_connector_does_not_ask_vllm_for_piecewise_cuda_graphs() -> None:
    assert not connector.PotluckConnector.requires_piecewise_for_cudagraph({})


@pytest.mark.parametrize("reported", [[], ["model.layers.1.self_attn"]], ids=["none", "one"])
def test_connector_reads_layers_that_vllm_did_not_report_once_the_step_is_saved(reported: list[str]) -> None:
    """When vLLM replays a step from one CUDA graph, it does not call `save_kv_layer`."""
    calls: list[tuple[int, object]] = []
    loaded = connector.PotluckConnector.__new__(connector.PotluckConnector)
    loaded._sending = SimpleNamespace(read_layer=lambda layer, reads: calls.append((layer, reads)))
    loaded._layers, loaded._reads = dict.fromkeys(range(3)), ["blocks of a prompt"]
    for name in reported:
        loaded.save_kv_layer(name, None, None)
    loaded.wait_for_save()
    assert {layer for layer, _ in calls} == {0, 1, 2}
    assert all(reads == ["blocks of a prompt"] for _, reads in calls)

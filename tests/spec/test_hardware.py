"""GPUs and nodes of the spec's own, and prices from the catalog."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spec_texts import GOOD, changed_spec, only_problem, parsed_spec

from potluck.catalog import nodes, prices

OWN = "gpus:\n  - {name: MyGPU, fp16_tflops: 200, memory_gb: 48, bandwidth_gb_per_s: 1000, sm_count: 99}\n"


def test_custom_gpu_is_used_by_name_and_as_a_mapping() -> None:
    spec = parsed_spec(OWN + changed_spec("2xL40S", "2xMyGPU").replace("1xL4\n", "{gpu: MyGPU, count: 1}\n"))
    two, one = spec.node_types[:2]
    assert (two.name, two.gpus, one.name, one.gpus) == ("2xMyGPU", 2, "1xMyGPU", 1)
    assert two.gpu.sm_count == 99
    assert two.interconnect.kind == "pcie"
    assert one.interconnect.kind == "none"
    assert spec.notes == (
        "2xMyGPU: interconnect assumed PCIe, 25 GB/s per GPU",
        "2xMyGPU: network assumed 10 Gbps",
        "1xMyGPU: network assumed 10 Gbps",
    )


def test_misspelt_custom_gpu_is_refused_with_a_suggestion() -> None:
    assert "unknown GPU 'MyGPUU'; did you mean 'MyGPU'?" in only_problem(
        OWN + changed_spec("2xL40S", "2xMyGPUU")
    )


def test_custom_gpu_with_a_catalog_name_is_refused() -> None:
    text = only_problem(OWN.replace("MyGPU", "l40s") + GOOD)
    assert "potluck.yaml:2: gpus[0].name: 'L40S' is in the catalog; choose another name" in text
    assert "gpus[1].name: duplicate GPU 'MyGPU'" in only_problem(OWN + OWN.split("\n", 1)[1] + GOOD)


def test_node_takes_omitted_fields_from_the_catalog() -> None:
    spec = parsed_spec(changed_spec("2xL40S", "{gpu: l40s, count: 2, network_gbps: 7}"))
    listed = nodes.node_type("2xL40S")
    assert spec.node_types[0].name == "2xL40S"
    assert spec.node_types[0].interconnect == listed.interconnect
    assert spec.node_types[0].network_gbps == 7
    assert spec.notes == ()
    link = "{name: odd, gpu: L40S, count: 3, interconnect: {kind: nvlink, gb_per_s: 50, latency_us: 3}}"
    odd = parsed_spec(changed_spec("2xL40S", link)).node_type("odd")
    assert (odd.gpus, odd.interconnect.kind, odd.interconnect.gb_per_s) == (3, "nvlink", 50)
    assert odd.interconnect.latency_s == pytest.approx(3e-6)


def test_one_node_name_for_two_machines_is_refused() -> None:
    text = changed_spec("8xH100", "{name: 2xL40S, gpu: L40S, count: 2, network_gbps: 7}")
    assert "'2xL40S' means two different machines here; give this one its own name" in only_problem(text)


def test_omitted_prices_come_from_the_catalog() -> None:
    spec = parsed_spec(changed_spec("          price_usd_per_h: 3.5\n", ""))
    cheapest = prices.price_usd_per_h("2xL40S")
    assert spec.regions[0].offers[0].price_usd_per_h == cheapest.price_usd_per_h
    assert "the cheapest listed" in spec.price_source("east", "2xL40S")
    assert cheapest.date in spec.price_source("east", "2xL40S")


def test_catalog_region_gives_its_own_price() -> None:
    text = GOOD.replace("east", "us-east-1").replace("          price_usd_per_h: 0.8\n", "")
    known = prices.price_usd_per_h("1xL4", "us-east-1")
    for spec in (
        parsed_spec(text),
        parsed_spec(text.replace("name: us-east-1", "name: us-east-1\n      cloud: aws")),
    ):
        assert spec.regions[0].offers[1].price_usd_per_h == known.price_usd_per_h
        assert spec.price_source("us-east-1", "1xL4").startswith("catalog: aws/us-east-1 (")
        assert "cheapest" not in spec.price_source("us-east-1", "1xL4")
    spot = parsed_spec(text.replace("available: 2", "available: 2\n          spot: true"))
    assert spot.regions[0].offers[1].spot
    assert spot.regions[0].offers[1].price_usd_per_h < known.price_usd_per_h


def test_missing_price_unknown_to_the_catalog_is_refused() -> None:
    text = OWN + changed_spec("2xL40S", "2xMyGPU").replace("          price_usd_per_h: 3.5\n", "")
    message = only_problem(text)
    assert (
        "price_usd_per_h: is missing, and the catalog has no price for '2xMyGPU'; add it, 0 if you own it"
        in message
    )


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("written", ["tiny", "./tiny", "tiny/config.json"])
def test_model_folder_beside_the_spec_is_read(written: str, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    path = tmp_path / "tiny" / "config.json"
    path.write_text(json.dumps(CONFIG), "utf-8")
    text = changed_spec("model: Llama-3.1-8B\n    name: chat", f"model: {written}")
    assert parsed_spec(text, tmp_path).models[0].model.layer_count == 4
    path.write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "num_hidden_layers"}), "utf-8")
    message = only_problem(text, tmp_path)
    assert message.startswith("potluck.yaml:2: models[0].model: ")
    assert "num_hidden_layers" in message


def test_hugging_face_id_of_a_catalog_model_is_accepted() -> None:
    assert (
        parsed_spec(changed_spec("Llama-3.1-8B", "meta-llama/Llama-3.1-8B")).models[0].model.name
        == "Llama-3.1-8B"
    )

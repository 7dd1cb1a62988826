"""Every figure of the catalog has a source that exists and a date; names are unambiguous."""

from __future__ import annotations

import re

import pytest

from potluck.catalog import gpus, models, named_workloads, nodes, prices
from potluck.catalog.figure_sources import EntryFacts, load_toml, plain, sources
from potluck.core.errors import UnknownNameError

DATE = re.compile(r"\d{4}(-\d{2}(-\d{2})?)?")
KINDS = {"vendor", "secondary", "paper", "measured", "recall", "derived"}
ISSUE_GPUS = [
    "H800",
    "H100",
    "H200",
    "H20",
    "A800",
    "A100-40",
    "A100-80",
    "A10",
    "A10G",
    "A30",
    "A40",
    "A6000",
    "A5000",
    "L4",
    "L40S",
    "T4",
    "V100",
    "RTX3090Ti",
    "RTX4090",
    "MI210",
    "B200",
    "MI300X",
    "L20",
    "H100-PCIe",
    "A800-PCIe",
    "A100-80-PCIe",
    "V100-32",
]
ISSUE_MODELS = [
    "Llama-3.1-8B",
    "Llama-3-70B",
    "Llama-2-7B",
    "Llama-2-13B",
    "Llama-2-70B",
    "LLaMA-30B",
    "Qwen2-7B",
    "Qwen1.5-14B",
    "Qwen3-32B",
    "Qwen3-235B-A22B",
    "Phi-4",
    "GPT-OSS-20B",
    "GPT-OSS-120B",
    "Kimi-Linear-48B",
    "MiMo-V2-Flash",
    "Qwen3.5-397B",
    "Ring-2.5-1T",
    "MiniMax-M2.5",
    "DeepSeek-V3",
    "prfaas-1t-hybrid",
]


def _check(facts: EntryFacts) -> None:
    assert facts.figures
    for figure in facts.figures:
        assert figure.source.id in sources(), (facts.name, figure.field)
        assert figure.value is not None


def test_sources_are_dated_and_used() -> None:
    used = {price.source for price in prices.prices()}
    for facts in _all_facts():
        used |= {figure.source.id for figure in facts.figures}
    used |= {table["source"] for table in load_toml("gpus.toml")["paper"].values()}
    for key, source in sources().items():
        assert DATE.fullmatch(source.date), key
        assert source.kind in KINDS, key
        assert source.title
        assert key in used, f"source {key} is never used"


def _all_facts() -> list[EntryFacts]:
    found = [gpus.facts(name) for name in gpus.names()]
    found += [models.facts(name) for name in models.names()]
    found += [named_workloads.facts(name) for name in named_workloads.names()]
    return found + [nodes.facts(name) for name in nodes.names()]


def test_every_figure_has_a_known_source() -> None:
    for facts in _all_facts():
        _check(facts)


def test_source_overrides_name_real_fields() -> None:
    """A misspelt override would silently fall back to the entry's default source."""
    for name, entry in load_toml("gpus.toml")["gpu"].items():
        assert set(entry.get("sources", {})) <= set(entry), name
        assert set(entry) <= {*gpus.FIGURES, "aliases", "source", "sources", "doubt", "node"}, name
    for name, entry in load_toml("models.toml")["model"].items():
        assert set(entry.get("sources", {})) <= set(entry), name
    for name, entry in load_toml("nodes.toml")["link"].items():
        assert set(entry.get("sources", {})) <= set(entry), name


def test_every_price_has_a_dated_source() -> None:
    for price in prices.prices():
        assert price.source in sources()
        assert DATE.fullmatch(price.date)
        assert price.basis.startswith(("listed", "derived: "))
        assert price.price_usd_per_h > 0
        assert price.spot_usd_per_h is None or 0 < price.spot_usd_per_h <= price.price_usd_per_h
        assert nodes.canonical(price.node) == price.node


def test_no_two_entries_share_a_spelling() -> None:
    for module, file, table in ((gpus, "gpus.toml", "gpu"), (models, "models.toml", "model")):
        seen: dict[str, str] = {}
        for name, entry in load_toml(file)[table].items():
            for spelling in (name, *entry["aliases"]):
                assert seen.setdefault(plain(spelling), name) == name, spelling
                assert module.canonical(spelling) == name


@pytest.mark.parametrize("name", ISSUE_GPUS)
def test_gpus_of_the_papers_are_there(name: str) -> None:
    gpu = gpus.gpu(name)
    assert gpu.sm_count
    assert gpu.boost_ghz
    assert gpu.l2_mb
    assert gpu.tdp_w
    assert gpu.architecture in ["volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3"]


@pytest.mark.parametrize("name", ISSUE_MODELS)
def test_models_of_the_papers_are_there(name: str) -> None:
    assert models.model(name).layer_count > 0


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100", "H100-SXM"),
        ("A100", "A100-80"),
        ("rtx-4090", "RTX4090"),
        ("4090", "RTX4090"),
        ("RTX A6000", "A6000"),
        ("a100-80gb-pcie", "A100-80-PCIe"),
        ("V100", "V100-16"),
        ("H20-NVL", "H20"),
    ],
)
def test_gpu_aliases(spelling: str, name: str) -> None:
    assert gpus.canonical(spelling) == name
    assert gpus.gpu(spelling) is not None


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="gpu: unknown 'L40'; did you mean 'L40S'?"):
        gpus.gpu("L40")
    with pytest.raises(UnknownNameError, match="did you mean 'Llama-3.1-8B'?"):
        models.model("lama-3.1-8b")
    with pytest.raises(UnknownNameError, match="paper"):
        gpus.paper_gpus("cauchi")


def test_dense_rate_agrees_with_the_chip() -> None:
    """SMs x clock x matrix operations per clock: catches a figure with sparsity or of CUDA cores.

    Operations per SM and clock with FP32 accumulation: 1024 on Volta, Turing and the professional Ampere
    (GA102) and Ada boards, 2048 on GA100, 4096 on Hopper; half of 1024 on GeForce boards and the A10G.
    """
    per_clock = {"volta": 1024, "turing": 1024, "ampere": 1024, "ada": 1024, "hopper": 4096}
    half = {"A10G", "RTX3090Ti", "RTX4090"}
    big = {"A30", "A800-SXM", "A800-PCIe", "A100-80", "A100-40", "A100-80-PCIe", "A100-40-PCIe"}
    # A data sheet may use a lower clock than the one that is advertised (H20, L20: rates are capped).
    loose = {"H800": 0.15, "H100-SXM": 0.15, "H200": 0.15, "H100-PCIe": 0.15, "L20": 1.1, "H20": 4.0}
    for name in gpus.names():
        gpu = gpus.gpu(name)
        if gpu.architecture not in per_clock:
            continue
        rate = per_clock[gpu.architecture] * (0.5 if name in half else 2 if name in big else 1)
        assert gpu.sm_count is not None
        assert gpu.boost_ghz is not None
        expected = gpu.sm_count * gpu.boost_ghz * rate / 1e3
        assert expected / gpu.fp16_tflops == pytest.approx(1, abs=loose.get(name, 0.02)), name

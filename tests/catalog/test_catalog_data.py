"""Every figure of the catalog has a source that exists and a date; names are unambiguous."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from potluck.catalog import gpus, models, named_workloads, nodes, prices
from potluck.catalog.figure_sources import EntryFacts, load_toml, plain, sources
from potluck.cli.planning.catalog import catalog
from potluck.core.errors import InputError, PotluckError, UnknownNameError
from potluck.core.values.length_laws import Fixed, LogNormal
from potluck.sim.load.arrivals import draw

DATE = re.compile(r"\d{4}(-\d{2}(-\d{2})?)?")


KINDS = {"vendor", "secondary", "paper", "measured", "recall", "derived"}


def _check(facts: EntryFacts) -> None:
    assert facts.figures
    for figure in facts.figures:
        assert figure.source.id in sources(), (facts.name, figure.field)
        assert figure.value is not None


def test_catalog_sources_are_dated_and_used() -> None:
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
    result = [gpus.facts(name) for name in gpus.names()]
    result += [models.facts(name) for name in models.names()]
    result += [named_workloads.facts(name) for name in named_workloads.names()]
    return result + [nodes.facts(name) for name in nodes.names()]


def test_every_catalog_figure_has_a_known_source() -> None:
    for facts in _all_facts():
        _check(facts)


def test_source_overrides_name_existing_fields() -> None:
    """A misspelt override would silently fall back to the entry's default source."""
    for name, entry in load_toml("gpus.toml")["gpu"].items():
        assert set(entry.get("sources", {})) <= set(entry), name
        assert set(entry) <= {*gpus.FIGURES, "aliases", "source", "sources", "doubt", "node"}, name
    for name, entry in load_toml("models.toml")["model"].items():
        assert set(entry.get("sources", {})) <= set(entry), name
    for name, entry in load_toml("links.toml")["link"].items():
        assert set(entry.get("sources", {})) <= set(entry), name


def test_every_price_has_a_dated_source() -> None:
    for price in prices.prices():
        assert price.source in sources()
        assert DATE.fullmatch(price.date)
        assert price.basis.startswith(("listed", "derived: "))
        assert price.price_usd_per_h > 0
        assert price.spot_usd_per_h is None or 0 < price.spot_usd_per_h <= price.price_usd_per_h
        assert nodes.canonical(price.node) == price.node


def test_no_two_catalog_entries_share_a_spelling() -> None:
    for module, file, table in ((gpus, "gpus.toml", "gpu"), (models, "models.toml", "model")):
        seen: dict[str, str] = {}
        for name, entry in load_toml(file)[table].items():
            for spelling in (name, *entry["aliases"]):
                assert seen.setdefault(plain(spelling), name) == name, spelling
                assert module.canonical(spelling) == name


PAPERS = (
    "H800 H100 H200 H20 A800 A100-40 A100-80 A10 A10G A30 A40 A6000 A5000 L4 L40S T4 V100 RTX3090Ti MI210 "
)
PAPERS += "RTX4090 B200 MI300X L20 H100-PCIe A800-PCIe A100-80-PCIe V100-32"  # GPUs of the papers
SERVED = "Llama-3.1-8B Llama-3-70B Llama-2-7B Llama-2-13B Llama-2-70B LLaMA-30B Qwen2-7B Qwen1.5-14B Qwen3-32B Phi-4 "
SERVED += "Qwen3-235B-A22B GPT-OSS-20B GPT-OSS-120B Kimi-Linear-48B MiMo-V2-Flash Qwen3.5-397B Ring-2.5-1T "
SERVED += "DeepSeek-V3 MiniMax-M2.5 prfaas-1t-hybrid"


@pytest.mark.parametrize("name", SERVED.split())
def test_models_of_the_papers_are_in_the_catalog(name: str) -> None:
    assert models.model(name).layer_count > 0


@pytest.mark.parametrize("name", [*PAPERS.split(), *gpus.names()])
def test_every_gpu_has_the_fields_that_perf_needs(name: str) -> None:
    gpu = gpus.gpu(name)
    assert gpu.sm_count and gpu.boost_ghz and gpu.l2_mb and gpu.tdp_w  # noqa: PT018
    assert gpu.architecture in ["volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3"]


def test_gpu_aliases_resolve_to_catalog_names() -> None:
    known = {"H100": "H100-SXM", "A100": "A100-80", "RTX A6000": "A6000", "V100": "V100-16", "H20-NVL": "H20"}
    known |= {"rtx-4090": "RTX4090", "4090": "RTX4090", "a100-80gb-pcie": "A100-80-PCIe"}
    assert {spelling: gpus.canonical(spelling) for spelling in known} == known


def test_unknown_names_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="gpu: unknown 'L40'; did you mean 'L40S'?"):
        gpus.gpu("L40")
    with pytest.raises(UnknownNameError, match="did you mean 'Llama-3.1-8B'?"):
        models.model("lama-3.1-8b")


def test_dense_rate_agrees_with_sm_count_and_clock() -> None:
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


def rows(paper: str) -> dict[str, SimpleNamespace]:
    """A paper's GPU table as printed, by the names it uses."""
    table = load_toml("gpus.toml")["paper"][paper]
    return {key: SimpleNamespace(name=key, **row) for key, row in table.items() if isinstance(row, dict)}


CAUCHY, THUNDERSERVE = rows("cauchy"), rows("thunderserve")


def printed_as_in_table_1(per_usd: float) -> str:
    """As CAUCHY's Table 1 prints: thousands below a million, else millions with two decimals."""
    return f"{per_usd / 1e3:.0f}K" if per_usd < 999_500 else f"{per_usd / 1e6:.2f}M"


@pytest.mark.parametrize("name", CAUCHY)
def test_cauchy_table_1_ratios_follow_from_its_own_figures(name: str) -> None:
    row = CAUCHY[name]
    assert printed_as_in_table_1(row.fp16_tflops * 3600 / row.price_usd_per_h) == row.tflop_per_usd
    assert printed_as_in_table_1(row.bandwidth_gb_per_s * 3600 / row.price_usd_per_h) == row.gb_per_usd


@pytest.mark.parametrize("name", CAUCHY)
def test_cauchy_table_1_agrees_with_the_catalog(name: str) -> None:
    """The catalog agrees with all six rows to the printed digits (the RTX 4090's 165.2 prints as 862K)."""
    row, gpu = CAUCHY[name], gpus.gpu(name)
    assert gpu.name == row.gpu
    tflop_per_usd = gpu.fp16_tflops * 3600 / row.price_usd_per_h
    assert printed_as_in_table_1(tflop_per_usd) == ("862K" if name == "RTX4090" else row.tflop_per_usd)
    assert printed_as_in_table_1(gpu.bandwidth_gb_per_s * 3600 / row.price_usd_per_h) == row.gb_per_usd
    assert gpu.memory_gb == row.memory_gb


def test_cauchy_table_1_has_one_wrong_ratio() -> None:
    """165 / 1008 is 0.16; the table prints 0.21 for the RTX 4090, the ratio of the row above."""
    for name, row in CAUCHY.items():
        ratio = round(row.fp16_tflops / row.bandwidth_gb_per_s, 2)
        assert ratio == (0.16 if name == "RTX4090" else row.tflops_per_bandwidth)
    assert CAUCHY["RTX4090"].tflops_per_bandwidth == CAUCHY["A10"].tflops_per_bandwidth == 0.21


def test_thunderserve_figures_agree_unless_doubt_is_noted() -> None:
    assert {name: row.gpu for name, row in THUNDERSERVE.items()}["3090Ti"] == "RTX3090Ti"
    for row in THUNDERSERVE.values():
        gpu = gpus.gpu(row.gpu)
        agrees = gpu.fp16_tflops == row.fp16_tflops and gpu.bandwidth_gb_per_s == row.bandwidth_gb_per_s
        doubt = gpus.facts(row.gpu).doubt or ""
        assert agrees or "ThunderServe" in doubt, row.name
    # 8 x A100 at its price is the budget that section 5 states.
    assert 8 * THUNDERSERVE["A100"].price_usd_per_h == pytest.approx(14.024)
    # Its A6000 and A5000 rates are a quarter of the tensor-core rate: FP32 on CUDA cores.
    for name in ("A6000", "A5000"):
        assert gpus.gpu(name).fp16_tflops / THUNDERSERVE[name].fp16_tflops == pytest.approx(4, rel=0.01)


def test_every_listed_node_type_can_be_built() -> None:
    assert len(nodes.names()) == 4 * len(gpus.names())
    for name in nodes.names():
        node = nodes.node_type(name)
        assert node.name == name
        assert node.network_gbps > 0
        assert (node.interconnect.kind == "none") == (node.gpus == 1)


@pytest.mark.parametrize("spelling", ["2xL40S", "2xl40s", "L40S:2", " 2 x L40S ", "l40s-48gb:2", "2*L40S"])
def test_spellings_of_a_node_resolve_to_one_name(spelling: str) -> None:
    assert nodes.canonical(spelling) == "2xL40S"
    assert nodes.node_type(spelling) == nodes.node_type("2xL40S")


def test_gpu_name_alone_is_a_node_with_one_gpu() -> None:
    assert nodes.canonical("h100") == "1xH100-SXM"
    assert nodes.node_type("3xL4").gpus == 3


@pytest.mark.parametrize("count", [0, 9, 16, 10**30])
def test_node_with_an_invalid_gpu_count_is_refused(count: int) -> None:
    with pytest.raises(InputError, match="write 1 to 8"):
        nodes.node_type(f"{count}xL40S")


@pytest.mark.parametrize("name", ["", "x", "2x", "xL40S", "2xFOO", "L40S:2:2", "2xL40S:2", "-1xL4", "nodes"])
def test_malformed_node_names_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(InputError, match=r"^node: .*(write|did you mean)"):
        nodes.node_type(name)


def test_gpu_without_node_data_or_with_an_unknown_link_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"links.toml": nodes.load_toml("links.toml"), "gpus.toml": {"gpu": {"L4": {}}}}
    monkeypatch.setattr(nodes, "load_toml", files.get)
    with pytest.raises(InputError, match=r"L4 has no machines; gpus.toml needs \[gpu.L4.node\]"):
        nodes.node_type.__wrapped__("2xL4")
    files["gpus.toml"]["gpu"]["L4"]["node"] = {"link": "pcie9", "network_gbps": {"1": 10}}
    with pytest.raises(UnknownNameError, match="pcie9"):
        nodes.node_type.__wrapped__("2xL4")


@given(st.text(max_size=40))
def test_any_text_is_a_node_or_refused_in_one_line(name: str) -> None:
    try:
        node = nodes.node_type(name)
    except PotluckError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        return
    assert 1 <= node.gpus <= 8


def test_node_interconnects_follow_the_hardware() -> None:
    link = {name: nodes.node_type(name).interconnect for name in nodes.names()}
    assert (link["8xH100-SXM"].kind, link["8xH100-SXM"].gb_per_s) == ("nvswitch", 450)
    assert (link["8xA100-80"].kind, link["8xA100-80"].gb_per_s) == ("nvswitch", 300)
    assert link["8xH800"].gb_per_s == link["8xA800-SXM"].gb_per_s == 200
    assert link["8xB200"].gb_per_s == 900
    # Bridges join pairs only: four cards talk over PCIe.
    for name in ("A30", "A40", "A6000", "A5000", "RTX3090Ti", "A100-80-PCIe"):
        assert link[f"2x{name}"].kind == "nvlink"
        assert link[f"4x{name}"].kind == link[f"8x{name}"].kind == "pcie"
    for name in ("L4", "L40S", "A10", "A10G", "T4", "RTX4090", "L20"):
        assert {link[f"{count}x{name}"].kind for count in (2, 4, 8)} == {"pcie"}
    # Meshes without a switch: a pair has only the links between the two.
    assert link["2xMI300X"].gb_per_s == pytest.approx(64, rel=1e-3)
    assert link["2xV100-16"].gb_per_s == pytest.approx(50, rel=1e-3)


def test_listed_price_is_found_by_node_and_region() -> None:
    price = prices.price_usd_per_h("8xH100", "aws/us-east-1")
    assert (price.price_usd_per_h, price.instance_type, price.basis) == (55.04, "p5.48xlarge", "listed")
    assert prices.price_usd_per_h("8xH100", "aws:us-east-1") == price
    assert prices.price_usd_per_h("8xh100-sxm", "us-east-1") == price
    assert prices.price_usd_per_h("8xH100", "us-east-1", spot=True).price_usd_per_h == price.spot_usd_per_h
    assert prices.price_usd_per_h("L4", "gcp/us-central1").price_usd_per_h == pytest.approx(0.7068)


def test_price_of_an_unlisted_size_is_derived_and_marked() -> None:
    two = prices.price_usd_per_h("2xL40S", "us-east-2")
    four = prices.price_usd_per_h("4xL40S", "us-east-2")
    assert two.price_usd_per_h == pytest.approx(four.price_usd_per_h / 2, abs=1e-4)
    assert two.basis == "derived: per-GPU price of 4xL40S x2"
    three = prices.price_usd_per_h("3xL40S", "us-east-2")
    assert three.price_usd_per_h == pytest.approx(four.price_usd_per_h * 3 / 4)
    assert not three.listed


def test_node_price_is_the_cheapest_listed_one_and_a_papers_only_without_a_market() -> None:
    for node in {price.node for price in prices.prices()}:
        best = prices.price_usd_per_h(node)
        same = [price for price in prices.prices() if price.node == node]
        market = [price for price in same if not price.from_paper] or same
        listed = [price for price in market if price.listed] or market
        assert best.price_usd_per_h == min(price.price_usd_per_h for price in listed)
    assert prices.price_usd_per_h("H20").cloud == "paper-cauchy"  # listed nowhere else


def test_gpu_without_a_price_is_refused() -> None:
    priced = {nodes.parse(price.node)[1] for price in prices.prices()}
    assert len(priced) >= 30
    assert {"A800-SXM", "L20", "GB200", "MI325X"}.isdisjoint(priced)
    for name in gpus.names():
        if name in priced:
            assert prices.price_usd_per_h(f"8x{name}").price_usd_per_h > 0
        else:
            with pytest.raises(InputError, match=f"no price for 8x{name}; give price_usd_per_h"):
                prices.price_usd_per_h(f"8x{name}")


def test_unknown_region_and_missing_spot_price_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'us-east-1'"):
        prices.price_usd_per_h("L4", "us-est-1")
    with pytest.raises(InputError, match="no spot price for 1xRTX4090"):
        prices.price_usd_per_h("RTX4090", spot=True)
    assert prices.in_region("aws/ap-northeast-2")


def test_cauchy_paper_prices_are_in_the_catalog() -> None:
    rows = load_toml("gpus.toml")["paper"]["cauchy"].values()
    for row in (row for row in rows if isinstance(row, dict)):
        assert prices.price_usd_per_h(row["gpu"], "paper-cauchy").price_usd_per_h == row["price_usd_per_h"]


PUBLISHED = {
    "dailymail": (702, 42), "sharegpt": (290, 207), "longwriter": (337, 1330), "azure-conv": (1155, 211),
    "azure-code": (2048, 28), "conversation": (1155, 211), "coding": (2048, 28), "cronus": (1014, 247),
    "mooncake-conv": (12035, 343), "burstgpt": (352.45, 58.94),
}  # fmt: skip


@pytest.mark.parametrize(("name", "means"), PUBLISHED.items())
def test_workload_means_are_the_published_ones(name: str, means: tuple[float, float]) -> None:
    lengths = named_workloads.workload(name).lengths
    assert lengths.prompt.mean_tokens == pytest.approx(means[0], rel=1e-3, abs=0.5)
    assert lengths.output.mean_tokens == pytest.approx(means[1], rel=1e-3, abs=0.5)


def test_prfaas_workload_has_the_published_distribution() -> None:
    lengths = named_workloads.workload("prfaas").lengths
    assert lengths.prompt == LogNormal(9.9, 1.0, 128, 131072)
    assert lengths.prompt.mean_tokens == pytest.approx(27_000, rel=0.03)
    assert lengths.output == Fixed(1024)


def test_azure_output_medians_are_those_of_thunderserve() -> None:
    rng = np.random.default_rng(0)
    for name, median in (("coding", 13), ("conversation", 129)):
        prompt, output = draw(rng, named_workloads.workload(name).lengths, 100_000)
        assert np.median(output) == pytest.approx(median, rel=0.05)
        assert np.median(prompt) > 1000


@pytest.mark.parametrize("name", named_workloads.names())
def test_drawn_workload_lengths_have_the_distribution_mean(name: str) -> None:
    lengths = named_workloads.workload(name).lengths
    prompt, output = draw(np.random.default_rng(1), lengths, 100_000)
    for drawn, law in ((prompt, lengths.prompt), (output, lengths.output)):
        error = drawn.std() / len(drawn) ** 0.5
        assert drawn.mean() == pytest.approx(law.mean_tokens, abs=5 * error + 1e-9)


def test_workload_names_and_aliases_are_resolved() -> None:
    assert named_workloads.canonical("Azure_Conversation") == "azure-conv"
    assert named_workloads.workload("ThunderServe coding").gap_cv == 1.0
    with pytest.raises(UnknownNameError, match="did you mean 'sharegpt'"):
        named_workloads.workload("shargpt")


def test_derived_workload_keeps_the_source_of_its_base() -> None:
    figures = {figure.field: figure for figure in named_workloads.facts("cronus").figures}
    assert figures["mean_input_tokens"].source.id == "cronus"
    assert figures["input_law"].source.id == "azure-llm-2023"
    assert named_workloads.facts("dailymail").assumed


def test_catalog_workloads_command_lists_and_shows_entries() -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(catalog, ("workloads", *arguments), catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    table = run()
    assert all(name in table for name in named_workloads.names())
    assert [entry["name"] for entry in json.loads(run("--json"))] == list(named_workloads.names())
    assert "1014" in run("cronus")
    assert json.loads(run("coding", "--json"))["figures"]["mean_output_tokens"]["value"] == 27.9

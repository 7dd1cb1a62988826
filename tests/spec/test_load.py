"""From text to Spec, and every complaint with its line and field."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_texts import GOOD, changed, complaint, good, problems

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.values.types import Link
from potluck.spec.load_spec import MAX_PROBLEMS, known_keys, load_spec
from potluck.spec.spec_problems import SHOWN, SpecError
from potluck.spec.spec_values import WeightsLocation


def test_the_sound_spec() -> None:
    spec = good()
    chat = spec.models[0]
    assert (chat.name, chat.model.name) == ("chat", "Llama-3.1-8B")
    assert (chat.slo.ttft_s, chat.slo.tpot_s, chat.slo.attainment) == (0.5, 0.05, 0.9)
    assert chat.traffic.model == "chat"
    assert chat.traffic.rate_per_s == 4
    assert chat.traffic.mean_input_tokens == pytest.approx(1024, rel=1e-9)
    assert chat.traffic.mean_output_tokens == pytest.approx(200, rel=1e-9)
    assert [region.name for region in spec.regions] == ["east", "west"]
    assert [node.name for node in spec.node_types] == ["2xL40S", "1xL4", "8xH100-SXM"]
    assert spec.links == (Link("east", "west", 10, 0.06), Link("west", "east", 10, 0.06))
    assert spec.price_source("east", "2xL40S") == "spec"
    assert spec.budget_usd_per_h is None


def test_a_spec_is_looked_up_by_name() -> None:
    spec = good()
    assert spec.model("chat").name == "chat"
    assert spec.region("west").offers[0].node == "8xH100-SXM"
    assert spec.node_type("1xL4").gpus == 1
    assert spec.link("east", "east") is None
    with pytest.raises(UnknownNameError, match="did you mean 'west'"):
        spec.region("wets")


BAD: list[tuple[str, str, str]] = [
    ("ttft_ms: 500", "ttft_ms: -5", "4: models[0].slo.ttft_ms: must be positive, is -5"),
    ("ttft_ms: 500", "ttft_ms: 500, e2e_ms: 0", "4: models[0].slo.e2e_ms: must be positive, is 0"),
    ("ttft_ms: 500", "ttft_ms: 500, e2e: x", "4: models[0].slo.e2e: must be a number, is 'x'"),
    ("ttft_ms: 500", "ttft_ms: .nan", "4: models[0].slo.ttft_ms: must be a finite number"),
    ("ttft_ms: 500", "ttft_ms: .inf", "4: models[0].slo.ttft_ms: must be a finite number"),
    (
        "ttft_ms: 500",
        "ttft_ms: 1e12",
        "4: models[0].slo.ttft_ms: must be at most 3.6e+06, is 1000000000000.0",
    ),
    ("ttft_ms: 500", "ttft_ms: '500'", "4: models[0].slo.ttft_ms: must be a number, is '500'"),
    ("ttft_ms: 500", "ttft_ms: true", "4: models[0].slo.ttft_ms: must be a number, is true"),
    ("ttft_ms: 500", "ttft_ms: ", "4: models[0].slo.ttft_ms: must be a number, is empty"),
    ("ttft_ms: 500, ", "", "4: models[0].slo.ttft_ms: is missing"),
    ("ttft_ms", "ttft_sm", "4: models[0].slo.ttft_sm: unknown key; did you mean 'ttft_ms'?"),
    (
        "tpot_ms: 50}",
        "tpot_ms: 50, attainment: 1.5}",
        "4: models[0].slo.attainment: must be at most 1, is 1.5",
    ),
    ("slo: {ttft_ms: 500, tpot_ms: 50}", "slo: fast", "4: models[0].slo: must be a mapping, is 'fast'"),
    ("rate_per_s: 4", "rate_per_s: -4", "6: models[0].traffic.rate_per_s: must not be negative, is -4"),
    (
        "rate_per_s: 4\n",
        "rate_pers: 4\n",
        "6: models[0].traffic.rate_pers: unknown key; did you mean 'rate_per_s'?",
    ),
    ("      rate_per_s: 4\n", "", "5: models[0].traffic: needs rate_per_s; only a trace brings its own rate"),
    ("      input: 1024\n", "", "5: models[0].traffic: needs input lengths, or a trace"),
    ("input: 1024", "input: 0", "7: models[0].traffic.input.mean: must be at least 1, is 0"),
    ("input: 1024", "input: {p50: 9, p99: 3}", "7: models[0].traffic.input: p99 must not be below p50"),
    ("input: 1024", "input: {p50: 9}", "7: models[0].traffic.input: must be one of {mean}, {mean, cv}"),
    ("input: 1024", "input: {}", "7: models[0].traffic.input: must be one of {mean}"),
    ("input: 1024", "input: {mean: }", "7: models[0].traffic.input: has a key without a value"),
    ("input: 1024", "input: {uniform: [5, 2]}", "7: models[0].traffic.input: uniform must be [low, high]"),
    (
        "input: 1024",
        "input: {uniform: [5]}",
        "7: models[0].traffic.input.uniform: must have 2 entries, has 1",
    ),
    ("input: 1024", "input: {values: [5], weights: [1, 2]}", "7: models[0].traffic.input: 1 values need as"),
    (
        "input: 1024",
        "input: {values: [5], weights: [0]}",
        "7: models[0].traffic.input: weights must not all be",
    ),
    ("input: 1024", "input: {p50: 1, p99: 9000000}", "7: models[0].traffic.input: p99 is over 10,000 times"),
    (
        "input: 1024",
        "input: {lognormal: {mu: 1, sigma: 0.1, min: 100000, max: 200000}}",
        "7: models[0].traffic.input: [100000, 200000] holds almost none of lognormal(1, 0.1); widen it",
    ),
    (
        "model: Llama-3.1-8B",
        "model: Llama-3.1-8",
        "2: models[0].model: unknown model 'Llama-3.1-8'; did you mean",
    ),
    (
        "model: Llama-3.1-8B",
        "model: ./nowhere",
        "2: models[0].model: no file or directory './nowhere' beside",
    ),
    (
        "price_usd_per_h: 3.5",
        "price_usd_per_h: -1",
        "15: fleet.regions[0].nodes[0].price_usd_per_h: must not be",
    ),
    (
        "price_usd_per_h: 3.5",
        "price_usd_per_h: 4e9",
        "15: fleet.regions[0].nodes[0].price_usd_per_h: must be at",
    ),
    (
        "available: 4",
        "available: 1.5",
        "14: fleet.regions[0].nodes[0].available: must be a whole number, is 1.5",
    ),
    ("available: 4", "available: many", "14: fleet.regions[0].nodes[0].available: must be a whole number"),
    (
        "2xL40S",
        "2xL40Z",
        "13: fleet.regions[0].nodes[0].node: '2xL40Z': unknown GPU 'L40Z'; did you mean 'L40",
    ),
    ("2xL40S", "99xL40S", "13: fleet.regions[0].nodes[0].node: '99xL40S' has 99 GPUs; write 1 to 8"),
    (
        "2xL40S",
        "{gpu: L40Z, count: 2}",
        "13: fleet.regions[0].nodes[0].node.gpu: unknown GPU 'L40Z'; did you",
    ),
    ("2xL40S", "{gpu: L40S}", "13: fleet.regions[0].nodes[0].node.count: is missing"),
    (
        "2xL40S",
        "{gpu: L40S, cuont: 2, count: 1}",
        "13: fleet.regions[0].nodes[0].node.cuont: unknown key; did",
    ),
    ("2xL40S", "[L40S]", "13: fleet.regions[0].nodes[0].node: must be text, is a list"),
    (
        "2xL40S",
        "{gpu: L40S, count: 2, interconnect: {kind: rope, gb_per_s: 1}}",
        "13: fleet.regions[0].nodes[0].node.interconnect.kind: is 'rope', must be one of 'pcie'",
    ),
    ("1xL4", "2xL40S", "16: fleet.regions[0].nodes[1].node: duplicate node '2xL40S' in 'east'"),
    ("[east, west]", "[east, wset]", "23: links[0].between[1]: unknown region 'wset'; did you mean 'west'?"),
    ("[east, west]", "[east, east]", "23: links[0]: joins 'east' with itself; name two regions"),
    ("[east, west]", "[east]", "23: links[0].between: must have 2 entries, has 1"),
    (
        "between: [east, west]",
        "from: east",
        "23: links[0]: needs between: [a, b] for both directions, or from",
    ),
    (
        "between: [east, west]",
        "from: east, to: wst",
        "23: links[0].to: unknown region 'wst'; did you mean 'west",
    ),
    ("between: [east, west]", "from: 7, to: west", "23: links[0].from: must be text, is 7"),
    ("gbps: 10", "gbps: 0", "23: links[0].gbps: must be positive, is 0"),
    ("rtt_ms: 60", "rtt_ms: -1", "23: links[0].rtt_ms: must not be negative, is -1"),
    ("links:", "gpus: 7\nlinks:", "22: gpus: must be a list, is 7"),
    ("links:", "link:", "22: link: unknown key; did you mean 'links'?"),
    ("links:", "'li\\nks':", "unknown key; did you mean 'links'?"),
    ("links:", "budget_usd_per_h: 0\nlinks:", "22: budget_usd_per_h: must be positive, is 0"),
]


@pytest.mark.parametrize(("old", "new", "says"), BAD)
def test_bad_input_is_one_line_with_line_and_field(old: str, new: str, says: str) -> None:
    assert says in complaint(changed(old, new))


def test_all_problems_are_reported_together_in_the_order_of_the_file() -> None:
    text = changed("ttft_ms: 500", "ttft_ms: -5")
    text = text.replace("price_usd_per_h: 3.5", "price_usd_per_h: -1").replace("1xL4\n", "1xL5\n")
    text += "  - {from: wets, to: east, gbps: 1, rtt: 1}\n  - {from: wets, to: east, gbps: 1, rtt_ms: 1}\n"
    lines = [str(problem) for problem in problems(text)]
    assert [line.split(":")[1] for line in lines] == ["4", "15", "16", "24", "25"]
    assert "models[0].slo.ttft_ms: must be positive, is -5" in lines[0]
    assert "fleet.regions[0].nodes[1].node: '1xL5': unknown GPU" in lines[2]


def test_cutting_out_what_is_wrong_keeps_the_positions_of_the_rest() -> None:
    text = changed("available: 4", "available: -4").replace("8xH100", "8xH1OO")
    assert [problem.field for problem in problems(text)] == [
        "fleet.regions[0].nodes[0].available",
        "fleet.regions[1].nodes[0].node",
    ]


def test_a_long_list_of_problems_is_counted() -> None:
    text = GOOD + "".join(f"junk{i}: 1\n" for i in range(SHOWN + 10))
    with pytest.raises(SpecError) as caught:
        good(text)
    assert len(caught.value.problems) == SHOWN + 10
    assert str(caught.value).splitlines()[-1] == "potluck.yaml: and 10 more"


def test_a_file_of_something_else_is_refused_quickly() -> None:
    assert len(problems("models:\n" + "  - 1\n" * 50_000)) <= MAX_PROBLEMS
    links = GOOD + "  - {from: east, to: nowhere, gbps: 1, rtt_ms: 1}\n" * 5_000
    assert len(problems(links)) == 5_000
    assert "unknown key" in complaint(GOOD + "x" * 1_000 + ": 1\n")


def test_a_fleet_without_gpus() -> None:
    text = GOOD.replace("available: 4", "available: 0").replace("available: 2", "available: 0")
    text = text.replace("available: 1", "available: 0")
    assert complaint(text) == "potluck.yaml:9: fleet: fleet has no GPUs: available is 0 everywhere"


def test_missing_sections() -> None:
    found = [str(problem) for problem in problems("links: []\n")]
    assert found == ["potluck.yaml:1: models: is missing", "potluck.yaml:1: fleet: is missing"]
    assert "models: needs at least one entry" in complaint("models: []\nfleet:" + GOOD.split("fleet:")[1])


def test_duplicate_models_need_names() -> None:
    second = GOOD.split("fleet:")[0].removeprefix("models:\n")
    text = GOOD.replace("fleet:", second + "fleet:", 1)
    assert "10: models[1].name: duplicate model 'chat'; give each its own name" in complaint(text)
    assert len(good(text.replace("name: chat", "name: talk", 1)).models) == 2


def test_a_repeated_region_is_an_error() -> None:
    text = changed("name: west", "name: east").split("links:")[0]
    assert "19: fleet.regions[1].name: duplicate region 'east'; put its nodes together" in complaint(text)


def test_empty_lists() -> None:
    assert "fleet.regions: needs at least one entry" in complaint(
        GOOD.split("fleet:")[0] + "fleet: {regions: []}"
    )
    text = GOOD.split("    - name: west")[0] + "    - {name: west, nodes: []}\n"
    assert "19: fleet.regions[1].nodes: needs at least one entry" in complaint(text)


def test_a_repeated_link_is_an_error() -> None:
    text = GOOD + "  - {from: west, to: east, gbps: 1, rtt_ms: 1}\n"
    assert complaint(text) == "potluck.yaml:24: links[1]: duplicate link west -> east; keep one"


def test_synonyms() -> None:
    text = changed("{ttft_ms: 500, tpot_ms: 50}", "{ttft: 500, tpot: 50}")
    text = text.replace("input: 1024", "isl: 1024").replace("output: {", "osl: {")
    assert good(text).models == good().models
    text = changed("{ttft_ms: 500, tpot_ms: 50}", "{ttft: -500, tpot: 50}")
    assert complaint(text) == "potluck.yaml:4: models[0].slo.ttft: must be positive, is -500"
    both = changed("ttft_ms: 500", "ttft_ms: 500, ttft: 400")
    assert complaint(both).startswith("potluck.yaml:4: models[0].slo.ttft: ")


def test_known_keys_follow_lists_options_and_unions() -> None:
    assert {"ttft_ms", "ttft"} <= set(known_keys(("models", 0, "slo")))
    assert "lognormal" in known_keys(("models", 0, "traffic", "isl"))
    assert "count" in known_keys(("fleet", "regions", 0, "nodes", 1, "node"))
    assert set(known_keys(("links", 0))) == {"between", "from", "to", "gbps", "rtt_ms", "egress_usd_per_gb"}
    assert known_keys(("nowhere", 0)) == []


def test_a_models_files_lie_beside_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    for said, found in (("files: words", str(tmp_path / "words")), ("files: shipped", "shipped"), ("", None)):
        path.write_text(changed("    slo: ", f"    {said}\n    slo: "), "utf-8")
        assert load_spec(path).models[0].files == found


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(changed("ttft_ms: 500", "ttft_ms: -5"), "utf-8")
    with pytest.raises(InputError) as caught:
        load_spec(path)
    assert str(caught.value) == f"{path}:4: models[0].slo.ttft_ms: must be positive, is -5"
    with pytest.raises(SpecError, match="does not exist; `potluck init`"):
        load_spec(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="is a directory"):
        load_spec(tmp_path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec("a\0b")


def test_models_may_sleep_and_say_where_their_weights_lie(tmp_path: Path) -> None:
    path = tmp_path / "potluck.yaml"
    lines = "    idle_s: 600\n    weights: {place: store, path: /mnt/models, gb_per_s: 1.5}\n    slo: "
    path.write_text(changed("    slo: ", lines))
    (model, *_) = load_spec(path).models
    assert (model.idle_s, model.weights) == (600.0, WeightsLocation("store", "/mnt/models", 1.5))
    path.write_text(changed("    slo: ", "    weights: {place: attic}\n    slo: "))
    with pytest.raises(SpecError, match=r"weights\.place"):
        load_spec(path)

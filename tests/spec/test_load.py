"""Parsing of specs, with line and field of every problem."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from spec_texts import GOOD, changed_spec, only_problem, parsed_spec, problems_of

from potluck.core.errors import InputError, UnknownNameError
from potluck.core.state.policy import Policy
from potluck.core.values.service import PrefixSharing, Tenant
from potluck.core.values.types import Link, Slo
from potluck.spec import spec_problems
from potluck.spec.load_spec import MAX_PROBLEMS, known_keys, load_spec
from potluck.spec.schema import PolicyIn
from potluck.spec.spec_problems import SHOWN, SpecError, read_marked, scalar
from potluck.spec.spec_values import WeightsLocation


def test_valid_spec_is_parsed_with_every_field() -> None:
    spec = parsed_spec()
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


def test_spec_entries_are_found_by_name_with_suggestions() -> None:
    spec = parsed_spec()
    assert spec.model("chat").name == "chat"
    assert spec.region("west").offers[0].node == "8xH100-SXM"
    assert spec.node_type("1xL4").gpus == 1
    assert spec.link("east", "east") is None
    with pytest.raises(UnknownNameError, match="did you mean 'west'"):
        spec.region("wets")


# fmt: off
BAD: list[tuple[str, str, str]] = [
    ("ttft_ms: 500", "ttft_ms: -5", "4: models[0].slo.ttft_ms: must be positive, is -5"),
    ("ttft_ms: 500", "ttft_ms: 500, e2e_ms: 0", "4: models[0].slo.e2e_ms: must be positive, is 0"),
    ("ttft_ms: 500", "ttft_ms: 500, e2e: x", "4: models[0].slo.e2e: must be a number, is 'x'"),
    ("ttft_ms: 500", "ttft_ms: .nan", "4: models[0].slo.ttft_ms: must be a finite number"),
    ("ttft_ms: 500", "ttft_ms: .inf", "4: models[0].slo.ttft_ms: must be a finite number"),
    ("ttft_ms: 500", "ttft_ms: 1e12", "4: models[0].slo.ttft_ms: must be at most 3.6e+06, is 1000000000000.0"),
    ("ttft_ms: 500", "ttft_ms: '500'", "4: models[0].slo.ttft_ms: must be a number, is '500'"),
    ("ttft_ms: 500", "ttft_ms: true", "4: models[0].slo.ttft_ms: must be a number, is true"),
    ("ttft_ms: 500", "ttft_ms: ", "4: models[0].slo.ttft_ms: must be a number, is empty"),
    ("ttft_ms: 500, ", "", "4: models[0].slo.ttft_ms: is missing"),
    ("ttft_ms", "ttft_sm", "4: models[0].slo.ttft_sm: unknown key; did you mean 'ttft_ms'?"),
    ("tpot_ms: 50}", "tpot_ms: 50, attainment: 1.5}", "4: models[0].slo.attainment: must be at most 1, is 1.5"),
    ("slo: {ttft_ms: 500, tpot_ms: 50}", "slo: fast", "4: models[0].slo: must be a mapping, is 'fast'"),
    ("rate_per_s: 4", "rate_per_s: -4", "6: models[0].traffic.rate_per_s: must not be negative, is -4"),
    ("rate_per_s: 4\n", "rate_pers: 4\n", "6: models[0].traffic.rate_pers: unknown key; did you mean 'rate_per_s'?"),
    ("      rate_per_s: 4\n", "", "5: models[0].traffic: needs rate_per_s; only a trace brings its own rate"),
    ("      input: 1024\n", "", "5: models[0].traffic: needs input lengths, or a trace"),
    ("input: 1024", "input: 0", "7: models[0].traffic.input.mean: must be at least 1, is 0"),
    ("input: 1024", "input: {p50: 9, p99: 3}", "7: models[0].traffic.input: p99 must not be below p50"),
    ("input: 1024", "input: {p50: 9}", "7: models[0].traffic.input: must be one of {mean}, {mean, cv}"),
    ("input: 1024", "input: {}", "7: models[0].traffic.input: must be one of {mean}"),
    ("input: 1024", "input: {mean: }", "7: models[0].traffic.input: has a key without a value"),
    ("input: 1024", "input: {uniform: [5, 2]}", "7: models[0].traffic.input: uniform must be [low, high]"),
    ("input: 1024", "input: {uniform: [5]}", "7: models[0].traffic.input.uniform: must have 2 entries, has 1"),
    ("input: 1024", "input: {values: [5], weights: [1, 2]}", "7: models[0].traffic.input: 1 values need as"),
    ("input: 1024", "input: {values: [5], weights: [0]}", "7: models[0].traffic.input: weights must not all be"),
    ("input: 1024", "input: {p50: 1, p99: 9000000}", "7: models[0].traffic.input: p99 is over 10,000 times"),
    (
        "input: 1024",
        "input: {lognormal: {mu: 1, sigma: 0.1, min: 100000, max: 200000}}",
        "7: models[0].traffic.input: [100000, 200000] holds almost none of lognormal(1, 0.1); widen it",
    ),
    ("model: Llama-3.1-8B", "model: Llama-3.1-8", "2: models[0].model: unknown model 'Llama-3.1-8'; did you mean"),
    ("model: Llama-3.1-8B", "model: ./nowhere", "2: models[0].model: no file or directory './nowhere' beside"),
    ("price_usd_per_h: 3.5", "price_usd_per_h: -1", "15: fleet.regions[0].nodes[0].price_usd_per_h: must not be"),
    ("price_usd_per_h: 3.5", "price_usd_per_h: 4e9", "15: fleet.regions[0].nodes[0].price_usd_per_h: must be at"),
    ("available: 4", "available: 1.5", "14: fleet.regions[0].nodes[0].available: must be a whole number, is 1.5"),
    ("available: 4", "available: many", "14: fleet.regions[0].nodes[0].available: must be a whole number"),
    ("2xL40S", "2xL40Z", "13: fleet.regions[0].nodes[0].node: '2xL40Z': unknown GPU 'L40Z'; did you mean 'L40"),
    ("2xL40S", "99xL40S", "13: fleet.regions[0].nodes[0].node: '99xL40S' has 99 GPUs; write 1 to 8"),
    ("2xL40S", "{gpu: L40Z, count: 2}", "13: fleet.regions[0].nodes[0].node.gpu: unknown GPU 'L40Z'; did you"),
    ("2xL40S", "{gpu: L40S}", "13: fleet.regions[0].nodes[0].node.count: is missing"),
    ("2xL40S", "{gpu: L40S, cuont: 2, count: 1}", "13: fleet.regions[0].nodes[0].node.cuont: unknown key; did"),
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
    ("between: [east, west]", "from: east", "23: links[0]: needs between: [a, b] for both directions, or from"),
    ("between: [east, west]", "from: east, to: wst", "23: links[0].to: unknown region 'wst'; did you mean 'west"),
    ("between: [east, west]", "from: 7, to: west", "23: links[0].from: must be text, is 7"),
    ("gbps: 10", "gbps: 0", "23: links[0].gbps: must be positive, is 0"),
    ("rtt_ms: 60", "rtt_ms: -1", "23: links[0].rtt_ms: must not be negative, is -1"),
    ("links:", "gpus: 7\nlinks:", "22: gpus: must be a list, is 7"),
    ("links:", "link:", "22: link: unknown key; did you mean 'links'?"),
    ("links:", "'li\\nks':", "unknown key; did you mean 'links'?"),
    ("links:", "budget_usd_per_h: 0\nlinks:", "22: budget_usd_per_h: must be positive, is 0"),
]
# fmt: on


@pytest.mark.parametrize(("old", "new", "says"), BAD)
def test_invalid_spec_is_refused_in_one_line_with_line_and_field(old: str, new: str, says: str) -> None:
    assert says in only_problem(changed_spec(old, new))


def test_all_spec_problems_are_reported_in_file_order() -> None:
    text = changed_spec("ttft_ms: 500", "ttft_ms: -5")
    text = text.replace("price_usd_per_h: 3.5", "price_usd_per_h: -1").replace("1xL4\n", "1xL5\n")
    text += "  - {from: wets, to: east, gbps: 1, rtt: 1}\n  - {from: wets, to: east, gbps: 1, rtt_ms: 1}\n"
    lines = [str(problem) for problem in problems_of(text)]
    assert [line.split(":")[1] for line in lines] == ["4", "15", "16", "24", "25"]
    assert "models[0].slo.ttft_ms: must be positive, is -5" in lines[0]
    assert "fleet.regions[0].nodes[1].node: '1xL5': unknown GPU" in lines[2]


def test_problem_fields_have_the_list_indexes_of_the_file() -> None:
    text = changed_spec("available: 4", "available: -4").replace("8xH100", "8xH1OO")
    assert [problem.field for problem in problems_of(text)] == [
        "fleet.regions[0].nodes[0].available",
        "fleet.regions[1].nodes[0].node",
    ]


def test_long_list_of_problems_is_shortened_with_a_count() -> None:
    text = GOOD + "".join(f"junk{i}: 1\n" for i in range(SHOWN + 10))
    with pytest.raises(SpecError) as caught:
        parsed_spec(text)
    assert len(caught.value.problems) == SHOWN + 10
    assert str(caught.value).splitlines()[-1] == "potluck.yaml: and 10 more"


def test_unrelated_file_is_refused_quickly() -> None:
    assert len(problems_of("models:\n" + "  - 1\n" * 10_000)) <= MAX_PROBLEMS
    assert len(problems_of(GOOD + "  - {from: east, to: nowhere, gbps: 1, rtt_ms: 1}\n" * 1_000)) == 1_000
    assert "unknown key" in only_problem(GOOD + "x" * 1_000 + ": 1\n")


def test_fleet_without_gpus_is_refused() -> None:
    text = GOOD.replace("available: 4", "available: 0").replace("available: 2", "available: 0")
    text = text.replace("available: 1", "available: 0")
    assert only_problem(text) == "potluck.yaml:9: fleet: fleet has no GPUs: available is 0 everywhere"


def test_missing_spec_sections_are_refused() -> None:
    result = [str(problem) for problem in problems_of("links: []\n")]
    assert result == ["potluck.yaml:1: models: is missing", "potluck.yaml:1: fleet: is missing"]
    assert "models: needs at least one entry" in only_problem("models: []\nfleet:" + GOOD.split("fleet:")[1])


def test_duplicate_models_without_names_are_refused() -> None:
    text = GOOD.replace("fleet:", GOOD.split("fleet:")[0].removeprefix("models:\n") + "fleet:", 1)
    assert "10: models[1].name: duplicate model 'chat'; give each its own name" in only_problem(text)
    assert len(parsed_spec(text.replace("name: chat", "name: talk", 1)).models) == 2


def test_duplicate_region_is_refused() -> None:
    text = changed_spec("name: west", "name: east").split("links:")[0]
    assert "19: fleet.regions[1].name: duplicate region 'east'; put its nodes together" in only_problem(text)


def test_empty_spec_lists_are_refused() -> None:
    assert "fleet.regions: needs at least one entry" in only_problem(
        GOOD.split("fleet:")[0] + "fleet: {regions: []}"
    )
    text = GOOD.split("    - name: west")[0] + "    - {name: west, nodes: []}\n"
    assert "19: fleet.regions[1].nodes: needs at least one entry" in only_problem(text)


def test_duplicate_link_is_refused() -> None:
    text = GOOD + "  - {from: west, to: east, gbps: 1, rtt_ms: 1}\n"
    assert only_problem(text) == "potluck.yaml:24: links[1]: duplicate link west -> east; keep one"


def test_field_synonyms_are_accepted() -> None:
    text = changed_spec("{ttft_ms: 500, tpot_ms: 50}", "{ttft: 500, tpot: 50}")
    text = text.replace("input: 1024", "isl: 1024").replace("output: {", "osl: {")
    assert parsed_spec(text).models == parsed_spec().models
    text = changed_spec("{ttft_ms: 500, tpot_ms: 50}", "{ttft: -500, tpot: 50}")
    assert only_problem(text) == "potluck.yaml:4: models[0].slo.ttft: must be positive, is -500"
    both = changed_spec("ttft_ms: 500", "ttft_ms: 500, ttft: 400")
    assert only_problem(both).startswith("potluck.yaml:4: models[0].slo.ttft: ")


def test_known_keys_follow_lists_options_and_unions() -> None:
    assert {"ttft_ms", "ttft"} <= set(known_keys(("models", 0, "slo")))
    assert "lognormal" in known_keys(("models", 0, "traffic", "isl"))
    assert "count" in known_keys(("fleet", "regions", 0, "nodes", 1, "node"))
    assert set(known_keys(("links", 0))) == {"between", "from", "to", "gbps", "rtt_ms", "egress_usd_per_gb"}
    assert known_keys(("nowhere", 0)) == []


def test_model_files_are_resolved_relative_to_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    for text, result in (
        ("files: words", str(tmp_path / "words")),
        ("files: shipped", "shipped"),
        ("", None),
    ):
        path.write_text(changed_spec("    slo: ", f"    {text}\n    slo: "), "utf-8")
        assert load_spec(path).models[0].files == result


def test_unreadable_spec_files_are_refused_with_a_fix(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(changed_spec("ttft_ms: 500", "ttft_ms: -5"), "utf-8")
    with pytest.raises(InputError) as caught:
        load_spec(path)
    assert str(caught.value) == f"{path}:4: models[0].slo.ttft_ms: must be positive, is -5"
    with pytest.raises(SpecError, match="does not exist; `potluck init`"):
        load_spec(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="is a directory"):
        load_spec(tmp_path)
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec("a\0b")


def test_model_sleep_time_and_weights_location_are_read(tmp_path: Path) -> None:
    path = tmp_path / "potluck.yaml"
    lines = "    idle_s: 600\n    weights: {place: store, path: /mnt/models, gb_per_s: 1.5}\n    slo: "
    path.write_text(changed_spec("    slo: ", lines))
    (model, *_) = load_spec(path).models
    assert (model.idle_s, model.weights) == (600.0, WeightsLocation("store", "/mnt/models", 1.5))
    path.write_text(changed_spec("    slo: ", "    weights: {place: attic}\n    slo: "))
    with pytest.raises(SpecError, match=r"weights\.place"):
        load_spec(path)


def values(text: str) -> object:
    return read_marked(text.encode(), "f.yaml")[0]


def test_yaml_values_keep_their_line_numbers() -> None:
    text = "a: 1\nb:\n  - x\n  - {c: 2.5, d: [~, true]}\n"
    result, lines = read_marked(text.encode(), "f.yaml")
    assert result == {"a": 1, "b": ["x", {"c": 2.5, "d": [None, True]}]}
    assert lines.line_of(("a",)) == 1
    assert lines.line_of(("b", 0)) == 3
    assert lines.line_of(("b", 1, "d", 1)) == 4
    assert lines.line_of(("b", 1, "missing")) == 4
    assert lines.line_of(()) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("010", 10),
        ("1e3", 1000.0),
        ("-2.5e-1", -0.25),
        (".5", 0.5),
        ("1_000", 1000),
        ("TRUE", True),
        ("~", None),
        ("0x10", "0x10"),
        ("2026-01-01", "2026-01-01"),
        ("9" * 5000, float("inf")),
        (".inf", float("inf")),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert scalar(text) == value


def test_quoted_scalars_stay_text() -> None:
    assert values("a: '1'\nb: !!str 2\nc: \"true\"\n") == {"a": "1", "b": "2", "c": "true"}


def test_yaml_aliases_and_merges_are_resolved() -> None:
    text = "base: &b {x: 1, y: 2}\nm: {<<: *b, y: 3}\nn: *b\n"
    assert values(text) == {"base": {"x": 1, "y": 2}, "m": {"x": 1, "y": 3}, "n": {"x": 1, "y": 2}}


BROKEN = [
    ("", "potluck.yaml:1: is empty; `potluck init` writes an example to start from"),
    ("# only a comment\n", "potluck.yaml:1: is empty; `potluck init` writes an example to start from"),
    ("~", "potluck.yaml:1: is empty; `potluck init` writes an example to start from"),
    ("- a\n- b\n", "potluck.yaml:1: must be a mapping with models and fleet, is a list"),
    ("\n\nhello", "potluck.yaml:3: must be a mapping with models and fleet, is 'hello'"),
    ("a:\n\tb: 1\n", "potluck.yaml:2: is indented with a tab; YAML wants spaces"),
    ("a: 1\n--- \nb: 2\n", "potluck.yaml:2: must hold one YAML document, here a second one starts"),
    ("a: *nowhere\n", "potluck.yaml:1: alias *nowhere has no finished anchor &nowhere"),
    ("a: &a [*a]\n", "potluck.yaml:1: alias *a has no finished anchor &a"),
    (
        "a: !!python/object:os.system x\n",
        "potluck.yaml:1: tag 'tag:yaml.org,2002:python/object:os.system' is",
    ),
    ("a: !mine {b: 1}\n", "potluck.yaml:1: tag '!mine' is not allowed"),
    ("? [a, b]\n: 1\n", "potluck.yaml:1: a key must be a plain word"),
    ("a: {<<: 3}\n", "potluck.yaml:1: << must name a mapping"),
    ("a: [1, 2\n", "potluck.yaml:2: is not YAML: "),
    ("a: 'unfinished\n", "is not YAML: "),
    ("a: b: c\n", "potluck.yaml:1: is not YAML: mapping values are not allowed"),
]


@pytest.mark.parametrize(("text", "says"), BROKEN)
@pytest.mark.parametrize("loader", ["CSafeLoader", "SafeLoader"])
def test_broken_yaml_is_refused_in_one_line(
    text: str, says: str, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(yaml, loader):
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(spec_problems, "_LOADER", getattr(yaml, loader))
    assert says in only_problem(text)


def test_spec_with_non_utf8_bytes_is_refused_with_its_line() -> None:
    assert only_problem(b"a: 1\nb: \xff\n") == "potluck.yaml:2: is not UTF-8 text: byte 0xff"
    assert "potluck.yaml:2: " in only_problem(b"a: 1\nb: \x00\n")


def test_byte_order_mark_is_ignored() -> None:
    assert values("\ufeffa: 1\n") == {"a": 1}


def test_duplicate_keys_are_reported_beside_other_problems() -> None:
    text = changed_spec("    name: chat\n", "    name: chat\n    name: again\n") + "links: []\n"
    text = text.replace("ttft_ms: 500", "ttft_ms: -5")
    assert [str(problem) for problem in problems_of(text)] == [
        "potluck.yaml:4: duplicate key 'name', first given on line 3; keep one",
        "potluck.yaml:5: models[0].slo.ttft_ms: must be positive, is -5",
        "potluck.yaml:25: duplicate key 'links', first given on line 23; keep one",
    ]


def test_exponential_yaml_aliases_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "holds more than 200,000 values" in only_problem("\n".join(lines))


def test_chained_yaml_aliases_count_as_depth() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 600)]
    assert "is nested deeper than 40 levels" in only_problem("\n".join(lines))


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 50_000, "- " * 50_000, "a: " + "[" * 41])
def test_deeply_nested_yaml_is_refused(text: str) -> None:
    assert "nested deeper" in only_problem(text)


def test_oversized_spec_file_is_refused() -> None:
    assert only_problem(b"#" * (spec_problems.MAX_BYTES + 1)).startswith("potluck.yaml: is larger than 4 MiB")


def test_valid_spec_of_the_tests_has_the_expected_lines() -> None:
    assert GOOD.splitlines()[3].startswith("    slo")


SECTION = """\
policy:
  balance: token
  max_wait_s: 12
  admission: false
  tenants:
    - {name: search, weight: 3}
    - {name: chat}
  classes:
    - {name: nightly, matters: 0, factor: 100, late: true, fill: 0.5}
    - name: batch
      slo: {ttft_ms: 9000, tpot_ms: 300}
      stops: true
  shared_prefixes:
    - {tenants: [search, web], models: [chat]}
    - {tenants: [ops, it, ops]}
"""


def test_omitted_policy_is_the_default() -> None:
    assert parsed_spec().policy == Policy()


def test_every_policy_field_may_be_written() -> None:
    assert {*PolicyIn.model_fields} - {"at"} == {field.name for field in fields(Policy)}


def test_written_policy_fields_are_applied() -> None:
    policy = parsed_spec(GOOD + SECTION).policy
    assert (policy.balance, policy.max_wait_s, policy.admission) == ("token", 12, False)
    assert policy.tenants == (Tenant("search", 3), Tenant("chat"))
    classes = {item.name: item for item in policy.classes}
    assert list(classes) == ["interactive", "standard", "batch", "nightly"]
    assert classes["nightly"].late
    assert classes["batch"].slo == Slo(9.0, 0.3)
    assert classes["batch"].stops
    assert not classes["batch"].late
    assert policy.shared_prefixes == (
        PrefixSharing(("search", "web"), ("chat",)),
        PrefixSharing(("it", "ops")),
    )


def test_all_tenants_and_all_models_may_share_prefixes() -> None:
    everything = "policy: {shared_prefixes: [{tenants: all}]}\n"
    assert parsed_spec(GOOD + everything).policy.shared_prefixes == (PrefixSharing(),)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("weight: 3", "weight: 0", "policy.tenants[0].weight: must be positive, is 0"),
        (
            "name: chat}",
            "name: search}",
            "policy.tenants[1].name: duplicate name 'search' in tenants; keep one",
        ),
        ("balance: token", "balance: fastest", "policy.balance: is 'fastest', must be one of"),
        ("max_wait_s: 12", "max_wait_s: -1", "policy.max_wait_s: must not be negative, is -1"),
        ("max_wait_s", "max_weight_s", "policy.max_weight_s: unknown key; did you mean 'max_wait_s'"),
        ("fill: 0.5", "fill: 2", "policy.classes[0].fill: must be above 0 and at most 1, is 2.0"),
        ("late: true", "late: 1", "policy.classes[0].late: must be true or false, is 1"),
        (
            "models: [chat]",
            "models: [chap]",
            "policy.shared_prefixes[0].models[0]: unknown model 'chap'; did you mean 'chat'?",
        ),
        (
            "tenants: [search, web]",
            "tenants: [web, web]",
            "policy.shared_prefixes[0].tenants: must name two tenants or more that share, or say `all`",
        ),
        ("models: [chat]", "models: []", "policy.shared_prefixes[0].models: must name models, or say `all`"),
        ("stops: true", "stop: true", "policy.classes[1].stop: unknown key; did you mean 'stops'"),
    ],
)
def test_invalid_policy_field_is_refused_with_its_line(old: str, new: str, says: str) -> None:
    assert old in SECTION
    result = problems_of(GOOD + SECTION.replace(old, new, 1))
    line = next(i for i, text in enumerate((GOOD + SECTION).splitlines(), 1) if old in text)
    assert [f"potluck.yaml:{line}: {says}" in str(item) for item in result] == [True], [
        str(p) for p in result
    ]


def test_every_policy_field_exists_in_the_schema() -> None:
    assert {field.name for field in fields(Policy)} <= set(PolicyIn.model_fields)


def test_tenant_in_two_sharing_groups_of_one_model_is_refused() -> None:
    circles = "[{tenants: [a, b], models: [chat]}, {tenants: [b, c]}]"
    (result,) = problems_of(f"{GOOD}policy: {{shared_prefixes: {circles}}}\n")
    says = "policy.shared_prefixes: has two entries for the same tenant and model; make them one"
    assert says in str(result)

"""YAML with lines: what is refused, and on which line."""

from __future__ import annotations

import pytest
import yaml
from spec_texts import GOOD, changed, complaint, problems

from potluck.spec import yaml_lines
from potluck.spec.yaml_lines import read_marked, scalar


def values(text: str) -> object:
    return read_marked(text.encode(), "f.yaml")[0]


def test_values_and_lines() -> None:
    text = "a: 1\nb:\n  - x\n  - {c: 2.5, d: [~, true]}\n"
    found, lines = read_marked(text.encode(), "f.yaml")
    assert found == {"a": 1, "b": ["x", {"c": 2.5, "d": [None, True]}]}
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


def test_aliases_and_merges_are_understood() -> None:
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
def test_broken_yaml_is_one_line(text: str, says: str, loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(yaml, loader):
        pytest.skip("PyYAML was built without libyaml")
    monkeypatch.setattr(yaml_lines, "_LOADER", getattr(yaml, loader))
    assert says in complaint(text)


def test_bytes_that_are_no_text() -> None:
    assert complaint(b"a: 1\nb: \xff\n") == "potluck.yaml:2: is not UTF-8 text: byte 0xff"
    assert "potluck.yaml:2: " in complaint(b"a: 1\nb: \x00\n")


def test_a_byte_order_mark_is_fine() -> None:
    assert values("\ufeffa: 1\n") == {"a": 1}


def test_duplicate_keys_are_all_reported_beside_other_errors() -> None:
    text = changed("    name: chat\n", "    name: chat\n    name: again\n") + "links: []\n"
    text = text.replace("ttft_ms: 500", "ttft_ms: -5")
    assert [str(problem) for problem in problems(text)] == [
        "potluck.yaml:4: duplicate key 'name', first given on line 3; keep one",
        "potluck.yaml:5: models[0].slo.ttft_ms: must be positive, is -5",
        "potluck.yaml:25: duplicate key 'links', first given on line 23; keep one",
    ]


def test_a_bomb_of_aliases_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "holds more than 200,000 values" in complaint("\n".join(lines))


def test_a_chain_of_aliases_counts_as_depth() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 600)]
    assert "is nested deeper than 40 levels" in complaint("\n".join(lines))


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 50_000, "- " * 50_000, "a: " + "[" * 41])
def test_deep_nesting_is_refused(text: str) -> None:
    assert "nested deeper" in complaint(text)


def test_a_huge_file_is_refused() -> None:
    assert complaint(b"#" * (yaml_lines.MAX_BYTES + 1)).startswith("potluck.yaml: is larger than 4 MiB")


def test_the_sound_spec_has_the_lines_the_tests_count_on() -> None:
    assert GOOD.splitlines()[3].startswith("    slo")

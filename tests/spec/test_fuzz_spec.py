"""Whatever is written, the answer is a Spec or a PotluckError."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from spec_texts import GOOD

from potluck.core.errors import InputError
from potluck.spec.load_spec import parse_spec
from potluck.spec.spec_problems import SpecError
from potluck.spec.spec_values import Spec
from potluck.spec.traces import load_trace

KEYS = re.findall(
    r"\S+",
    "models model name slo ttft_ms tpot_ms ttft attainment traffic rate_per_s input output isl trace "
    "prefix_hit_share mean cv p50 p99 lognormal mu sigma min max uniform values weights fleet regions cloud "
    "nodes node gpu count interconnect kind gb_per_s network_gbps available price_usd_per_h spot links "
    "between from to gbps rtt_ms gpus fp16_tflops memory_gb bandwidth_gb_per_s budget_usd_per_h pool machines "
    "region << @at",
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.integers(-2, 100)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["Llama-3.1-8B", "2xL40S", "L40S", "east", "pcie", ".", "/", "..", "9xL4", "<name>"])
)
structures = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner)
    ),
    max_leaves=25,
)


def read(raw: bytes | str) -> None:
    """A Spec or a SpecError; any other exception fails the test."""
    try:
        assert isinstance(parse_spec(raw), Spec)
        return
    except SpecError as error:
        lines = [str(problem) for problem in error.problems]
    assert lines
    assert all(line.isprintable() for line in lines)


@given(st.binary(max_size=200))
@example(b"\xef\xbb\xbf")
@example(b"%YAML 9.9\n---\na: 1")
@example(b"%TAG ! x\n")
@example(b"a: &x\n  <<: [*x]")
@example(b"\xc2\x85: \xe2\x80\xa8")
def test_spec_of_any_bytes_is_parsed_or_refused(raw: bytes) -> None:
    read(raw)


@given(st.text(alphabet="ab:-[]{}&*!|>'\"%@#,?\t\n <.0", max_size=60))
def test_spec_of_any_yaml_like_text_is_parsed_or_refused(text: str) -> None:
    read(text)


@given(structures)
def test_spec_of_any_structure_is_parsed_or_refused(value: object) -> None:
    read(yaml.safe_dump(value))


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, ...]] = [here]
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in pairs:
        inner += places(child, (*here, key))
    return inner


POOL = "machines: [{name: a, node: 1xL4}, {name: b, node: 1xL4}], gbps: [[0, 1], [1, 0]], rtt_ms: [[0, 1], [1, 0]]"
POOLED = yaml.safe_load(GOOD.split("fleet:")[0] + f"pool: {{{POOL}}}\n")
BASE = yaml.safe_load(GOOD + "gpus:\n  - {name: G, fp16_tflops: 1, memory_gb: 9, bandwidth_gb_per_s: 9}\n")
PLACES = [place for place in places(BASE) if place]


@given(st.lists(st.tuples(st.sampled_from(places(POOLED)[1:]), structures), min_size=1, max_size=3))
@example([(("pool", "gbps", 0), {})])
def test_pool_spec_with_replaced_parts_is_parsed_or_refused(
    changes: list[tuple[tuple[Any, ...], object]],
) -> None:
    check_replaced(POOLED, changes)


@given(st.lists(st.tuples(st.sampled_from(PLACES), structures), min_size=1, max_size=3))
@example([(("fleet", "regions"), True)])
@example([(("fleet", "regions", 0, "nodes", 0, "node"), {"<name>": 1})])
@example([(("models", 0, "@at"), 1)])
@settings(max_examples=100)
def test_spec_with_replaced_parts_is_parsed_or_refused(changes: list[tuple[tuple[Any, ...], object]]) -> None:
    check_replaced(BASE, changes)


def check_replaced(base: Any, changes: list[tuple[tuple[Any, ...], object]]) -> None:
    spec = copy.deepcopy(base)
    for place, value in changes:
        parent = spec
        for key in place[:-1]:
            inner = parent[key] if isinstance(parent, dict) and key in parent else None
            if isinstance(parent, list) and isinstance(key, int) and key < len(parent):
                inner = parent[key]
            parent = inner
        if isinstance(parent, dict) or (isinstance(parent, list) and isinstance(place[-1], int)):
            if isinstance(parent, list) and place[-1] >= len(parent):
                continue
            parent[place[-1]] = value
    read(yaml.safe_dump(spec))


@given(
    st.binary(max_size=120) | st.text(alphabet='{}[]":,0123timeslonguph_-\n', max_size=120).map(str.encode)
)
@example(b'{"timestamp": 1e400, "input_length": 1, "output_length": 1}')
@example(b"TIMESTAMP,ContextTokens,GeneratedTokens\n9999-12-31T23:59:59-23:59,1,1")
@example(b"TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01,1,1")
@example(b'Timestamp,Request tokens,Response tokens\n1,"1\n1,1')
@example(b"\x1f\x8b")
def test_trace_of_any_bytes_is_read_or_refused(tmp_path_factory: Any, raw: bytes) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "fuzz.csv"
    for head in (b"", b"TIMESTAMP,ContextTokens,GeneratedTokens\n"):
        path.write_bytes(head + raw)
        try:
            load_trace(path)
            continue
        except InputError as error:
            message = str(error)
        assert message.startswith("fuzz.csv")

"""Values round-trip through JSON; anything else is refused with its path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

import core_strategies as build
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.codec import decode, dumps, encode, loads
from potluck.core.errors import FormatError
from potluck.core.values import layout, model, plan, route, types
from potluck.core.values.model import Layer
from potluck.core.values.plan import Plan, Prediction, plan_from_json, plan_to_json
from potluck.core.values.route import Route, Segment
from potluck.core.values.types import Gpu, Slo

Place = tuple[Any, ...]

SLO = '{"format": "slo", "version": 1, "value": {"ttft_s": 1, "tpot_s": %s}}'


def read_slo(text: str) -> Slo:
    return loads(Slo, text, format_name="slo", version=1)


def paths_in(data: object, here: Place = ()) -> Iterator[Place]:
    """Every place in a JSON value, the whole first."""
    yield here
    if isinstance(data, dict):
        for key, item in data.items():
            yield from paths_in(item, (*here, key))
    elif isinstance(data, list):
        for i, item in enumerate(data):
            yield from paths_in(item, (*here, i))


def value_at(data: Any, place: Place) -> Any:
    for step in place:
        data = data[step]
    return data


def with_value_at(data: Any, place: Place, value: object) -> Any:
    """A copy of `data` with `value` at `place`."""
    if not place:
        return value
    changed = copy.deepcopy(data)
    value_at(changed, place[:-1])[place[-1]] = value
    return changed


def spelled_path(place: Place) -> str:
    """The place as errors write it."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".")


def refusal(kind: type, data: object) -> str | None:
    """What decode says against `data`; None when it takes it. Any other exception is a failure."""
    try:
        decode(kind, data)
    except FormatError as error:
        return str(error)
    return None


def class_named(name: str) -> Any:
    return next(getattr(m, name) for m in (types, model, layout, plan, route) if hasattr(m, name))


@settings(max_examples=25)
@given(build.anything)
def test_any_value_survives_json(value: object) -> None:
    text = dumps(value, format_name="test", version=3)
    assert "\n" in text
    assert loads(type(value), text, format_name="test", version=3) == value


@settings(max_examples=25)
@given(build.plans)
def test_plan_survives_its_json_file(value: Plan) -> None:
    again = plan_from_json(plan_to_json(value))
    assert again == value
    assert plan_to_json(again) == plan_to_json(value)


@settings(max_examples=25)
@given(build.anything, st.data())
def test_unknown_key_is_refused_with_its_path_and_nearest_known_key(
    value: object, data: st.DataObject
) -> None:
    body = encode(value)
    objects = [place for place in paths_in(body) if isinstance(value_at(body, place), dict)]
    place = data.draw(st.sampled_from(objects))
    right = data.draw(st.sampled_from(sorted(set(value_at(body, place)) - {"type"})))
    wrong = right + right[-1]
    with pytest.raises(FormatError) as caught:
        decode(type(value), with_value_at(body, (*place, wrong), 1))
    assert caught.value.field == spelled_path((*place, wrong))
    assert caught.value.problem == f"unknown key; did you mean {right!r}?"


@settings(max_examples=25)
@given(build.anything, st.data())
def test_missing_key_is_refused_unless_it_has_a_default(value: object, data: st.DataObject) -> None:
    body = encode(value)
    objects = [place for place in paths_in(body) if isinstance(value_at(body, place), dict)]
    place = data.draw(st.sampled_from(objects))
    kind = class_named(value_at(body, place)["type"])
    field = data.draw(st.sampled_from(fields(kind)))
    changed = copy.deepcopy(body)
    del value_at(changed, place)[field.name]
    if field.default is MISSING:
        with pytest.raises(FormatError) as caught:
            decode(type(value), changed)
        assert caught.value.field == spelled_path((*place, field.name))
        assert caught.value.problem == "is missing"
    else:
        again = decode(type(value), changed)
        assert value_at(encode(again), place)[field.name] == (
            list(field.default) if isinstance(field.default, tuple) else field.default
        )


@settings(max_examples=25)
@given(build.anything, st.data())
def test_wrong_type_is_refused_with_its_path(value: object, data: st.DataObject) -> None:
    body = encode(value)
    place = data.draw(st.sampled_from([place for place in paths_in(body) if place[-1:] != ("type",)]))
    wrong: object = "text" if isinstance(value_at(body, place), list | dict) else [1]
    with pytest.raises(FormatError) as caught:
        decode(type(value), with_value_at(body, place, wrong))
    assert caught.value.field == spelled_path(place)
    assert "\n" not in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25)
@given(build.anything, json_values, st.data())
def test_any_json_value_is_decoded_or_refused_with_a_format_error(
    value: object, junk: object, data: st.DataObject
) -> None:
    body = encode(value)
    place = data.draw(st.sampled_from(list(paths_in(body))))
    text = refusal(type(value), with_value_at(body, place, junk))
    assert text is None or len(text.splitlines()) == 1


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_non_finite_numbers_are_refused(text: str) -> None:
    with pytest.raises(FormatError, match="not JSON|finite"):
        read_slo(SLO % text)


def test_nan_is_never_written_to_json() -> None:
    hollow = Plan(
        "s", (), (), (), (), (), (Prediction("m", float("nan"), 1.0, 1.0, 1.0, "measured"),), 1.0, 0.0
    )
    with pytest.raises(ValueError, match="JSON"):
        plan_to_json(hollow)


@pytest.mark.parametrize("shape", ["[%s]", '{"a":%s}'])
@pytest.mark.parametrize("depth", [900, 10_000, 200_000])
def test_deeply_nested_json_is_refused_with_a_format_error(shape: str, depth: int) -> None:
    left, right = shape.split("%s")
    deep = left * depth + "1" + right * depth
    for text in (deep, SLO % deep, f'{{"format": {deep}, "version": 1, "value": 1}}'):
        with pytest.raises(FormatError) as caught:
            read_slo(text)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("deep_key", ["type", "kind"])
def test_deeply_nested_type_name_is_refused_with_a_format_error(deep_key: str) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    linear = {"type": "LinearAttention", "kind": "kda"} | {deep_key: deep}
    with pytest.raises(FormatError, match=deep_key):
        decode(Layer, {"attention": linear, "ffn": None})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "file: is not JSON"),
        ("[]", "file: must be a JSON object, not a list"),
        ('{"format": "slo", "version": 1}', "value: is missing"),
        ('{"version": 1, "value": {}}', "format: is missing"),
        ('{"format": "slo", "value": {}}', "version: is missing"),
        ('{"format": "plan", "version": 1, "value": {}}', "format: is 'plan', expected 'slo'"),
        ('{"format": "slo", "version": 2, "value": {}}', "version: is 2, this release reads 1"),
        ('{"format": "slo", "version": true, "value": {}}', "version: is True, this release reads 1"),
        ('{"format": "slo", "version": 1.0, "value": {}}', "version: is 1.0, this release reads 1"),
        ('{"format": "slo", "versoin": 1}', "file.versoin: unknown key; did you mean 'version'?"),
        ('{"format": "slo", "format": "slo"}', "the key 'format' stands twice"),
        (SLO % '1, "ttft_s": 2', "the key 'ttft_s' stands twice"),
        (SLO % "-1", "value: slo: tpot_s: must be positive, is -1.0"),
        (SLO % "true", "value.tpot_s: must be a number, not true or false"),
        (SLO % '1, "a\\nb": 1', "value.'a\\\\nb': unknown key"),
    ],
)
def test_unreadable_file_content_is_refused_with_its_reason(text: str, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_slo(text)
    assert says.replace("\\\\", "\\") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plan_of_another_version_is_refused_with_both_versions() -> None:
    text = plan_to_json(Plan("s", (), (), (), (), (), (), 0.0, 0.0)).replace('"version": 1', '"version": 7')
    with pytest.raises(FormatError, match="version: is 7, this release reads 1"):
        plan_from_json(text)


def test_unknown_union_member_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(FormatError) as caught:
        decode(Layer, {"attention": {"type": "FullAtention"}, "ffn": {"type": "DenseFfn"}})
    assert str(caught.value) == "attention.type: unknown 'FullAtention'; did you mean 'FullAttention'?"


def test_union_without_a_type_is_refused_with_the_known_types() -> None:
    with pytest.raises(FormatError) as caught:
        decode(Layer, {"attention": {}, "ffn": {}})
    assert str(caught.value).startswith("attention.type: is missing; known are FullAttention, ")


def test_unknown_literal_is_refused_with_the_nearest_value() -> None:
    slow = {"model": "m", "bucket": 1, "prefill_region": "a", "decode_region": "b", "rate_per_s": 1}
    with pytest.raises(FormatError, match="codec: 'fp61' is not one of its values; did you mean 'fp16'?"):
        decode(plan.PlannedFlow, slow | {"codec": "fp61"})


@dataclass(frozen=True)
class Odd:
    """Shapes that core does not use yet, but the codec offers."""

    table: dict[str, int]
    pair: tuple[str, float]
    either: int | str
    one: Literal[1] = 1


def test_mappings_pairs_and_plain_unions_are_encoded_and_checked() -> None:
    odd = Odd({"a": 1}, ("x", 0.5), "y")
    assert decode(Odd, encode(odd)) == odd
    body = {"table": {"a": 1}, "pair": ["x", 1], "either": 2}
    assert decode(Odd, body) == Odd({"a": 1}, ("x", 1.0), 2)
    for key, bad, says in [
        ("table", {"a": "1"}, "table.a: must be an integer, not a string"),
        ("pair", ["x"], "pair: must have 2 items, not 1"),
        ("either", [], "either: does not accept a list"),
        ("one", True, "one: True is not one of its values"),
    ]:
        with pytest.raises(FormatError, match=says):
            decode(Odd, body | {key: bad})


def test_encode_refuses_values_that_are_not_plain() -> None:
    with pytest.raises(TypeError, match="cannot encode set"):
        encode({1})
    with pytest.raises(TypeError, match="cannot encode type"):
        encode(Gpu)


def test_type_key_is_ignored_where_only_one_class_is_possible() -> None:
    """Classes may have had other names in the release that wrote a file."""
    route = Route((Segment("a", 0, None),))
    body = encode(route)
    assert isinstance(body, dict)
    assert decode(Route, {**body, "type": "Path"}) == route

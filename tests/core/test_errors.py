"""The exception tree, and suggestions for unknown names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core import errors
from potluck.core.errors import (
    CapacityError,
    FormatError,
    InputError,
    PotluckError,
    UnknownNameError,
    did_you_mean,
)


def test_exceptions_derive_from_one_base_class() -> None:
    assert issubclass(InputError, PotluckError)
    assert issubclass(UnknownNameError, InputError)
    assert issubclass(FormatError, InputError)
    assert issubclass(CapacityError, PotluckError)
    assert not issubclass(CapacityError, InputError)


def test_input_error_keeps_field_and_problem() -> None:
    error = InputError("fleet.price", "must not be negative")
    assert (error.field, error.problem) == ("fleet.price", "must not be negative")
    assert str(error) == "fleet.price: must not be negative"
    assert str(InputError("", "nothing to do")) == "nothing to do"


def test_unknown_name_error_keeps_the_name_and_suggests_one() -> None:
    error = UnknownNameError("gpu", "H10O", ["H100", "A100-80"])
    assert error.name == "H10O"
    assert str(error) == "gpu: unknown 'H10O'; did you mean 'H100'?"


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("atainment", ["attainment", "ttft_s"], "; did you mean 'attainment'?"),
        ("h100", ["H100", "H200"], "; did you mean 'H100'?"),
        ("zzz", ["pcie", "nvlink"], "; known are nvlink, pcie"),
        ("zzz", ["b", "a", "b"], "; known are a, b"),
        ("zzz", [f"name{i}" for i in range(13)], ""),
        ("zzz", [], ""),
        ("", ["a"], "; known are a"),
    ],
)
def test_did_you_mean_suggests_the_nearest_or_lists_known_names(
    name: str, known: list[str], says: str
) -> None:
    assert did_you_mean(name, known) == says


@given(st.text(max_size=9), st.lists(st.text("abcde_", min_size=1, max_size=9), max_size=20))
def test_did_you_mean_suggests_only_known_names(name: str, known: list[str]) -> None:
    hint = did_you_mean(name, known)
    if "did you mean" in hint:
        assert hint.removeprefix("; did you mean '").removesuffix("'?") in known
    else:
        assert (hint == "") == (not known or len(set(known)) > 12)


@given(st.lists(st.text("abcde_", min_size=1, max_size=9), min_size=1, max_size=20), st.data())
def test_did_you_mean_ignores_case(known: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(known))
    assert did_you_mean(name.upper(), known) == f"; did you mean {name!r}?"


def test_unknown_name_of_megabytes_is_compared_and_shown_only_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def get_close_matches(name: str, *_: object, **fields: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr("difflib.get_close_matches", get_close_matches)
    error = errors.UnknownNameError("model", "m" * 1_000_000, ["tiny"])
    assert str(error) == f"model: unknown '{'m' * errors.COMPARED_CHARS}'; known are tiny"
    errors.did_you_mean("M" * 1_000_000, ["tiny"])
    assert compared == ["m" * errors.COMPARED_CHARS] * 2

"""What all engines of a model can do, as they say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from potluck.core.errors import FormatError
from potluck.gateway.registry.directory import abilities_of
from potluck.gateway.registry.engine_client import read_status
from potluck.gateway.values import Address, Endpoint

ONE = Endpoint("a", "m", "here", Address("h", 1), own=True, adapters=("x", "y"))


def test_only_what_all_of_a_model_can_do_counts() -> None:
    other = replace(ONE, replica="b", adapters=("y", "z"))
    assert abilities_of((ONE, other)) == (frozenset({"m"}), {"y": "m"})
    assert abilities_of((ONE, replace(other, own=False)))[0] == frozenset()
    elsewhere = replace(ONE, replica="c", model="y", own=False, adapters=())
    assert abilities_of((ONE, elsewhere)) == (frozenset({"m"}), {"x": "m"}), "a model is no adapter"
    assert abilities_of(()) == (frozenset(), {})


def test_engines_say_what_they_can() -> None:
    said = {"state": "ready", "own": True, "adapters": ["b", "a", 7]}
    found = read_status(json.dumps(said).encode())
    assert (found.own, found.adapters) == (True, ("a", "b"))
    assert not read_status(b'{"state": "ready", "own": "yes"}').own
    with pytest.raises(FormatError, match="adapters"):
        read_status(b'{"state": "ready", "adapters": "a"}')

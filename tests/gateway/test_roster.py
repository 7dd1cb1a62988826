"""The roster: what is written, what is refused, and who becomes whom."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import PotluckError
from potluck.core.values.replica_spec import ReplicaSpec
from potluck.gateway.registry.engine_list import EngineEntry, address_of, matched, read_roster
from potluck.gateway.values import Address


def _listed_member(
    name: str, template: str = "t", index: int = 0, region: str = "east", model: str = "m"
) -> ReplicaSpec:
    return ReplicaSpec(name, "u", template, index, "homogeneous", model, "mixed", region)


def _entry(place: int, **said: object) -> EngineEntry:
    return EngineEntry(f"http://h:{place}", Address("h", place), **said)  # type: ignore[arg-type]


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "east.key").write_text("secret\n")
    found = read_roster(
        """
        engines:
          - {url: "http://10.0.0.5:8100/", template: combo, index: 1, region: east, key_file: east.key}
          - {url: "https://[::1]", kind: openai, model: llama, served_model: meta/llama, token_ids: true}
        """,
        "engines.yaml",
        tmp_path,
    )
    first, second = found
    assert first.url == "http://10.0.0.5:8100"
    assert first.address == Address("10.0.0.5", 8100)
    assert (first.template, first.index, first.key) == ("combo", 1, "secret")
    assert "secret" not in repr(first)
    assert second.address == Address("::1", 443, True)
    assert second.token_ids


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engines: 3", "must be a list"),
        ("{", "is not YAML"),
        ("engines: [{url: 'ftp://h:1'}]", "url"),
        ("engines: [{url: 'http://h:1/v1'}]", "behind the port"),
        ("engines: [{url: 'http://u@h:1'}]", "behind the port"),
        ("engines: [{url: 'http://h:99999'}]", "no address"),
        ("engines: [{url: 'http://h:1', colour: red}]", "colour"),
        ("engines: [{url: 'http://h:1', index: -1}]", "index"),
        ("engines: [{url: 'http://h:1', index: true}]", "index"),
        ("engines: [{url: 'http://h:1', kind: vllm}]", "kind"),
        ("engines: [{url: 'http://h:1', model: 3}]", "model"),
        ("engines: [{url: 'http://h:1'}, {url: 'http://h:1'}]", "twice"),
        ("engines: [{url: 'http://h:1', key_file: /etc/passwd}]", "key_file"),
        ("engines: [7]", "mapping"),
        ("engines: [{}]", "url"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, said: str) -> None:
    with pytest.raises(PotluckError) as error:
        read_roster(text, "engines.yaml")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@given(st.text(max_size=80))
def test_nothing_else_is_ever_raised(text: str) -> None:
    with suppress(PotluckError):
        read_roster(text, "roster")


@given(st.text(max_size=40))
def test_any_url_is_an_address_or_refused(text: str) -> None:
    try:
        found = address_of(text, "url")
    except PotluckError:
        return
    assert found.host
    assert 0 <= found.port < 1 << 16


def test_those_that_say_most_choose_first() -> None:
    members = [_listed_member("a", index=0), _listed_member("b", index=1)]
    anybody, second = _entry(1), _entry(2, template="t", index=1)
    assert {(m.id, e.address.port) for m, e in matched(members, [anybody, second])} == {("b", 2), ("a", 1)}


def test_one_that_was_started_for_a_replica_is_that_one_or_none() -> None:
    members = [_listed_member("a"), _listed_member("b")]
    assert [m.id for m, _ in matched(members, [_entry(1, replica="b")])] == ["b"]
    assert matched(members, [_entry(1, replica="gone")]) == []


@given(
    st.lists(st.tuples(st.sampled_from("tu"), st.integers(0, 2), st.sampled_from(["e", "w"])), max_size=8),
    st.lists(
        st.tuples(
            st.sampled_from(["", "t", "u"]),
            st.sampled_from([None, 0, 1, 2]),
            st.sampled_from(["", "e", "w"]),
        ),
        max_size=8,
    ),
)
def test_each_is_used_once_and_suits(
    wanted: list[tuple[str, int, str]], there: list[tuple[str, int | None, str]]
) -> None:
    members = [_listed_member(str(place), *said) for place, said in enumerate(wanted)]
    entries = [_entry(p, template=t, index=i, region=r) for p, (t, i, r) in enumerate(there)]
    found = matched(members, entries)
    assert len({m.id for m, _ in found}) == len({e.url for _, e in found}) == len(found)
    assert all(entry.suits(member) for member, entry in found)
    free_members = [m for m in members if m.id not in {x.id for x, _ in found}]
    free_entries = [e for e in entries if e.url not in {x.url for _, x in found}]
    assert not any(e.suits(m) for m in free_members for e in free_entries)

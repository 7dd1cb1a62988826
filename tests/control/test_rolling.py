"""An upgrade copy by copy, read from snapshots."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

from potluck.cli.fleet.orders import upgrade
from potluck.control.manual_changes import UpgradeTurn, due, lacks, turns
from potluck.core.errors import PotluckError


class Fleet:
    """Copies of two templates, as a gateway's snapshot has them; each engine may be replaced or be away."""

    def __init__(self, copies: dict[str, int]) -> None:
        self.replicas: list[dict[str, Any]] = []
        self.engines: dict[str, dict[str, Any]] = {}
        for template, count in copies.items():
            for copy in range(count):
                for index in range(2):
                    self.put(
                        template, f"{template}#{copy}", index, f"http://{template}-{copy}-{index}", 1000.0
                    )
        self.asked: list[str] = []
        self.late = 0
        """Looks until a copy that was drained is replaced."""
        self.stuck = self.busy = False

    def put(self, template: str, unit: str, index: int, url: str, uptime_s: float) -> None:
        row = {"replica": f"{unit}/{index}", "unit": unit, "template": template, "index": index}
        self.replicas.append({**row, "region": "near", "state": "ready", "url": url})
        self.engines[url] = {"url": url, "up": True, "uptime_s": uptime_s}

    def snapshot(self) -> dict[str, Any]:
        if self.asked and not self.stuck:
            self.late -= 1
            if self.late == 0:
                unit = self.asked[-1].rpartition("/")[0]
                gone = [each for each in self.replicas if each["unit"] == unit]
                self.replicas = [each for each in self.replicas if each["unit"] != unit]
                for each in gone:
                    self.put(each["template"], f"{unit}'", each["index"], each["url"], 0.0)
        return {"replicas": list(self.replicas), "engines": list(self.engines.values())}

    def drain(self, replica: str) -> None:
        assert len(self.replicas) == len(self.engines), "only one copy at a time is away"
        if not self.asked and not self.busy:
            self.busy = True
            raise PotluckError("the gateway does not answer")
        self.asked.append(replica)
        self.late = 3


def test_every_copy_has_its_turn_and_the_next_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upgrade, "LOOK_S", 0.001)
    fleet = Fleet({"a": 1, "b": 3})
    upgrade._all(fleet, fleet.drain, 10.0, as_json=True)  # type: ignore[arg-type]
    *each, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert ([said["left"] for said in each], last) == ([3, 2, 1, 0], {"copies": 4}), (
        "a line per copy, and the sum"
    )
    assert fleet.asked == ["b#0/0", "b#1/0", "b#2/0", "a#0/0"]


def test_a_copy_that_does_not_come_back_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "LOOK_S", 0.001)
    fleet = Fleet({"a": 3})
    fleet.stuck = True
    with pytest.raises(click.exceptions.Exit):
        upgrade._all(fleet, fleet.drain, 0.05)  # type: ignore[arg-type]
    assert len(fleet.asked) == 1, "the others are left as they are"


def test_what_came_back_by_itself_is_not_replaced_again() -> None:
    fleet = Fleet({"a": 3})
    assert len(due(fleet.snapshot(), 60.0)) == 3
    for place in range(2):
        fleet.engines[f"http://a-1-{place}"]["uptime_s"] = 20.0
    assert [turn.replicas[0] for turn in due(fleet.snapshot(), 60.0)] == ["a#0/0", "a#2/0"]


def test_what_is_waited_for_is_named() -> None:
    before = Fleet({"a": 2}).snapshot()
    (turn, _) = turns(before)
    assert turn == UpgradeTurn(("a#0/0", "a#0/1"), ("http://a-0-0", "http://a-0-1"))
    assert lacks(before, before, turn, 5.0) == "a#0/0 still has requests"
    after = Fleet({"a": 2})
    after.replicas = after.replicas[2:]
    assert "http://a-0-0" in lacks(after.snapshot(), before, turn, 5.0)
    for url in turn.urls:
        after.engines[url]["uptime_s"] = 1.0
    assert lacks(after.snapshot(), before, turn, 5.0) == "1 of a in near are not ready"
    after.engines[turn.urls[0]]["up"] = False
    assert "http://a-0-0" in lacks(after.snapshot(), before, turn, 5.0)
    gone = Fleet({"a": 2})
    gone.replicas, gone.engines = gone.replicas[2:], dict(list(gone.engines.items())[2:])
    for index in range(2):
        gone.put("a", "a#9", index, f"http://elsewhere-{index}", 1.0)
    assert lacks(gone.snapshot(), before, turn, 5.0) == ""

"""SkyPilot's own parser takes what is exported for it. It brings much else, so it has an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from export_helpers import COMBO, fleet, wording

from potluck.export import skypilot

sky = pytest.importorskip("sky", reason="SkyPilot is not installed; `make test-sky` has it")


def test_tasks_say_what_the_plan_rents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_API_KEY", "x")
    result = fleet((COMBO, "us-east-1", 1))
    files = skypilot.files(result, wording(), skypilot.SkyOptions({}, "true"))
    rented = []
    for box in result.boxes:
        path = tmp_path / f"{box.name}.yaml"
        path.write_text(files[path.name])
        (resources,) = sky.Task.from_yaml(str(path)).resources
        assert str(resources.cloud).lower() == "aws"
        assert resources.region == "us-east-1"
        rented.append((resources.accelerators, resources.use_spot, resources.ports))
    assert rented == [
        ({"L40S": 4}, False, ["8100-8101", "9100-9101", "9116-9117"]),
        ({"L4": 1}, True, ["8100", "9100"]),
        ({"L4": 1}, True, ["8100", "9100"]),
    ]

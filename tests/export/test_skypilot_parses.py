"""SkyPilot's own parser takes what is exported for it. It brings much else, so it has an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from export_helpers import COMBO, RANKS, command_options, fleet

from potluck.export import skypilot
from potluck.export.placement import WeightsSource

sky = pytest.importorskip("sky", reason="SkyPilot is not installed; `make test-sky` has it")


def test_skypilot_parses_the_tasks_as_the_planned_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_API_KEY", "x")
    result = fleet((COMBO, "us-east-1", 1))
    files = skypilot.files(result, command_options(), skypilot.SkyOptions({}, "true"))
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


def test_skypilot_parses_pipeline_tasks_with_mounts_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POTLUCK_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "x")
    store = "https://bucket.s3.amazonaws.com/llama"
    for source, mounts in (("hf://org/name", None), (store, {"/models/documents": store})):
        options = skypilot.SkyOptions({}, "true", "/models", {"documents": WeightsSource(source)})
        for name, text in skypilot.files(fleet((RANKS, "us-east-1", 1)), command_options(), options).items():
            if name.endswith(".yaml"):
                (tmp_path / name).write_text(text)
                task = sky.Task.from_yaml(str(tmp_path / name))
                assert (task.file_mounts or None) == mounts
                assert set(task.envs.values()) == {""}
                assert ("hf download org/name" in task.setup) == (mounts is None)

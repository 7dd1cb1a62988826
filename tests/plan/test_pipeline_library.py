"""Pipeline libraries on disk: equal to built ones, keyed by all inputs, rebuilt when damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from potluck.catalog import models, nodes
from potluck.core.values.types import Slo
from potluck.perf.operators.calibration import bundled
from potluck.plan.templates import library
from potluck.plan.templates.library import cached_library, cached_stage_rates, library_key, pipeline_libraries
from potluck.plan.templates.pipeline import PipelineLibrary, pipeline_library
from potluck.plan.timing.rate_cache import default_folder
from potluck.plan.timing.stage_rates import StageRates, stage_rates

MODEL = models.model("Qwen3-32B")
NODES = tuple(nodes.node_type(name) for name in ("2xL40S", "1xA100-80", "4xA10G"))
SLO = Slo(1.6, 0.1)


@pytest.fixture(scope="module")
def rates() -> StageRates:
    return stage_rates(MODEL, NODES, SLO, 768, 195, max_stages=3)[1]


def same_library(a: PipelineLibrary, b: PipelineLibrary) -> bool:
    arrays = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("ids", "units", "stages"))
    return arrays and a.valid == b.valid and np.array_equal(a.rates.units, b.rates.units)


def fail_if_built(*_: object, **__: object) -> None:
    raise AssertionError("built although it is stored")


def test_cached_pipeline_library_equals_the_built_one_and_is_not_rebuilt(
    rates: StageRates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = cached_library(rates, 3, folder=tmp_path)
    assert len(built)
    assert same_library(built, pipeline_library(rates, max_nodes=3))
    monkeypatch.setattr(library, "pipeline_library", fail_if_built)
    loaded = cached_library(rates, 3, folder=tmp_path)
    assert same_library(built, loaded)
    assert loaded.placement(len(loaded) - 1) == built.placement(len(built) - 1)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_cached_libraries_keep_both_phases_and_their_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask() -> tuple[PipelineLibrary, PipelineLibrary]:
        return pipeline_libraries(MODEL, NODES, SLO, 768, 195, max_nodes=3, folder=tmp_path)

    built = ask()
    monkeypatch.setattr(library, "pipeline_library", fail_if_built)
    monkeypatch.setattr(library, "stage_rates", fail_if_built)
    loaded = ask()
    assert all(same_library(a, b) for a, b in zip(built, loaded, strict=True))
    assert [a.rates.tps for a in built] == [b.rates.tps for b in loaded]
    assert [a.rates.confidences for a in built] == [b.rates.confidences for b in loaded]
    assert built[0].placement(0) == loaded[0].placement(0)


def test_library_key_depends_on_every_input(rates: StageRates) -> None:
    changed = rates.units.copy()
    changed[0, 0, 0] += 1
    small = replace(NODES[0], gpu=replace(NODES[0].gpu, memory_gb=40.0))
    keys = {
        library_key(rates, 3, 12.0, prune=True),
        library_key(rates, 2, 12.0, prune=True),
        library_key(rates, 3, 11.0, prune=True),
        library_key(rates, 3, 12.0, prune=False),
        library_key(replace(rates, units=changed), 3, 12.0, prune=True),
        library_key(replace(rates, nodes=(small, *NODES[1:])), 3, 12.0, prune=True),
    }
    assert len(keys) == 6


def test_stage_rates_of_different_inputs_are_cached_in_separate_files(tmp_path: Path) -> None:
    fitted = bundled()
    asked = [
        cached_stage_rates(MODEL, NODES, SLO, 768, 195, 2, folder=tmp_path),
        cached_stage_rates(MODEL, NODES, SLO, 768, 196, 2, folder=tmp_path),
        cached_stage_rates(MODEL, NODES, Slo(1.6, 0.05), 768, 195, 2, folder=tmp_path),
        cached_stage_rates(MODEL, NODES[:2], SLO, 768, 195, 2, folder=tmp_path),
        cached_stage_rates(MODEL, NODES, SLO, 768, 195, 2, calibration=fitted, folder=tmp_path),
    ]
    assert len(list(tmp_path.iterdir())) == len(asked)


@pytest.mark.parametrize("cut", [0, 10, 0.5, 0.99])
def test_damaged_library_file_is_rebuilt(rates: StageRates, tmp_path: Path, cut: float) -> None:
    built = cached_library(rates, 3, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut if cut >= 1 else cut * len(whole))])
    assert same_library(built, cached_library(rates, 3, folder=tmp_path))
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 0xFF
    path.write_bytes(bytes(flipped))
    assert same_library(built, cached_library(rates, 3, folder=tmp_path))


def test_library_file_of_another_shape_is_rebuilt(rates: StageRates, tmp_path: Path) -> None:
    built = cached_library(rates, 3, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    for arrays in (
        {"ids": np.arange(3)},
        {"ids": built.ids, "units": built.units, "stages": built.stages[:-1], "valid": np.array([1])},
        {"ids": built.ids + 10**6, "units": built.units, "stages": built.stages, "valid": np.array([1])},
    ):
        np.savez(path, **arrays)
        assert same_library(built, cached_library(rates, 3, folder=tmp_path))
    np.savez(path, ids=np.array([{}], object))  # would need pickle
    assert same_library(built, cached_library(rates, 3, folder=tmp_path))
    with path.open("wb") as file:
        np.save(file, built.ids)  # one array, not an archive
    assert same_library(built, cached_library(rates, 3, folder=tmp_path))


def test_library_is_built_when_its_cache_folder_is_not_writable(rates: StageRates, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    expected = pipeline_library(rates, max_nodes=3)
    assert same_library(expected, cached_library(rates, 3, folder=occupied / "below"))
    assert same_library(expected, cached_library(rates, 3, folder=None))


def test_library_cache_folder_follows_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "potluck"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "potluck"

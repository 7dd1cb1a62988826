"""Tiny random checkpoints of the families that the engine runs, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from check_checkpoints import truth
from sample_models import SAMPLES, config_of

from potluck.catalog.huggingface import read_model
from potluck.engine.compute.executor import RunnerSize
from potluck.engine.compute.runner import Runner
from potluck.engine.model.checkpoint import SafetensorsSource
from potluck.engine.model.config import EngineModelConfig, read_config


def make(name: str, folder: Path) -> Any:
    """The transformers model of a sample, saved in `folder` with the config.json that transformers writes."""
    family, changes = SAMPLES[name]
    folder.mkdir(exist_ok=True)
    model = truth(config_of(family, changes), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**model.config.to_dict(), "model_type": family}))
    return model


def load(folder: Path, **values: Any) -> tuple[EngineModelConfig, Runner]:
    config = read_config(folder, read_model(folder))
    size = {"rows": 4, "blocks": 256, "max_tokens": 512, **values}
    return config, Runner(config, SafetensorsSource(folder), RunnerSize(**size))

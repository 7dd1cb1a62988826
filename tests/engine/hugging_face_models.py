"""Tiny random checkpoints of the families that the engine runs, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sample_models import SAMPLES, Values, config_of

from potluck.catalog.huggingface import read_model
from potluck.engine.compute.runner import Runner, Size
from potluck.engine.model.checkpoint import Files
from potluck.engine.model.config import Config, read_config

SAME_CODE = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers runs by another's code, from the model's own repository."""


def make(name: str, folder: Path, **changes: Any) -> Any:
    """The transformers model of a sample, saved in `folder`."""
    family, values = SAMPLES[name]
    return write(config_of(family, {**values, **changes}), folder)


def write(values: Values, folder: Path) -> Any:
    """The transformers model of such a config.json, saved in `folder`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    kind = values["model_type"]
    rest = {key: value for key, value in values.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(SAME_CODE.get(kind, kind), **rest)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            # What starts as a constant is given values that matter.
            if parameter_name.endswith(("norm.weight", "bias", "dt_bias", "A_log")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter_name.endswith("gate.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    if kind in SAME_CODE:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": kind}))
    return model


def load(folder: Path, **values: Any) -> tuple[Config, Runner]:
    """The engine's view of the same directory."""
    config = read_config(folder, read_model(folder))
    size = {"rows": 4, "blocks": 256, "max_tokens": 512, **values}
    return config, Runner(config, Files(folder), Size(**size))

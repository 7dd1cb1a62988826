"""The engines that `potluck engine serve` can be: one that computes, or some that pretend."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.cli.serving.engine.emulate import executor_maker, pretence
from potluck.core.errors import InputError
from potluck.core.values.model import Model

if TYPE_CHECKING:
    from potluck.api.model_files import GenerationConfig
    from potluck.engine.serve import EngineSettings
    from potluck.engine.server.engine_service import EngineService, RequestLimits
    from potluck.engine.server.kv_connector import KvSettings

MB = 1_000_000
PREFIX_CACHE_MB = 64
MAX_RUNNING, TOKEN_BUDGET = 32, 1024
"""Of engines that compute, where nothing is said."""
MOST_PRETENDED = 256
COMPUTED_ONLY = ("random_weights", "stages", "secret_file", "prefix_cache_dir", "threads")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What all engines have."""

    directory: Path
    name: str
    limits: RequestLimits
    kv: KvSettings
    generation: GenerationConfig | None


def computing(common: EngineOptions, options: dict[str, Any]) -> EngineService:
    """One that computes, as its flags say."""
    from potluck.engine.serve import assemble

    for flag, without in (("count", 1), ("mean_output", 0)):
        if options[flag] != without:
            raise InputError(f"--{flag.replace('_', '-')}", "is only for engines that --pretend")
    directory = common.directory
    files = common.kv.identity
    make = executor_maker(
        options["emulate"],
        options["speed_up"],
        options["stages"],
        options["secret_file"],
        tls=None if files is None else (files.certificate, files.key, files.authority),
        directory=directory,
        random_seed=options["random_weights"],
        threads=options["threads"],
        kv_blocks=options["kv_blocks"],
    )
    return assemble(
        directory,
        described(directory),
        _settings(options, MAX_RUNNING, TOKEN_BUDGET),
        name=common.name,
        random_seed=options["random_weights"],
        limits=common.limits,
        kv=common.kv,
        make=make,
        generation=common.generation,
    )


def pretending(common: EngineOptions, options: dict[str, Any]) -> list[EngineService]:
    """Those that pretend, in one process."""
    from potluck.api.tokenizer import ModelTokenizer
    from potluck.engine.mock.mock_engine import pretend
    from potluck.perf.serving.phases import CHUNK_TOKENS
    from potluck.perf.serving.throughput import MAX_BATCH

    if options["emulate"] is None:
        raise InputError("--pretend", "needs --emulate, such as A100:llama-3.1-8b: what to pretend to be")
    for flag in COMPUTED_ONLY:
        if options[flag] is not None:
            raise InputError(f"--{flag.replace('_', '-')}", "is not for engines that --pretend")
    count = options["count"]
    if not 1 <= count <= MOST_PRETENDED:
        raise InputError("--count", f"must be 1 to {MOST_PRETENDED}, is {count}")
    what = pretence(options["emulate"], options["speed_up"], options["mean_output"])
    given_mb = options["prefix_cache_mb"]
    # What the planner and the simulator count with, so that what is pretended is what was planned.
    # Rows cost nothing here, and what is planned with knows no bound on hand-overs.
    budget = options["token_budget"] or CHUNK_TOKENS
    options = {**options, "chunk_tokens": options["chunk_tokens"] or budget}
    options["token_budget"] = max(budget, options["max_running"] or MAX_BATCH)
    settings = replace(_settings(options, MAX_BATCH, CHUNK_TOKENS), handover_rows=2 * MAX_BATCH)
    text = ModelTokenizer.read(common.directory)
    return [
        pretend(
            common.directory,
            what,
            settings,
            name=common.name,
            limits=common.limits,
            kv=replace(common.kv, port=common.kv.port and common.kv.port + place),
            generation=common.generation,
            prefix_bytes=None if given_mb is None else given_mb * MB,
            text=text,
        )
        for place in range(count)
    ]


def _settings(options: dict[str, Any], max_running: int, token_budget: int) -> EngineSettings:
    """As the flags say; the two figures hold where they say nothing."""
    from potluck.engine.serve import EngineSettings

    given_mb = options["prefix_cache_mb"]
    names = "max_tokens kv_blocks chunk_tokens prefix_cache_dir device threads role"
    return EngineSettings(
        max_running=options["max_running"] or max_running,
        token_budget=options["token_budget"] or token_budget,
        prefix_cache_bytes=(PREFIX_CACHE_MB if given_mb is None else given_mb) * MB,
        prefix_cache_disk_bytes=options["prefix_cache_disk_mb"] * MB,
        **{name: options[name] for name in names.split()},
    )


def described(directory: Path) -> Model | None:
    """The core.Model of a Hugging Face directory; None for one of our own kind, which describes itself."""
    from potluck.catalog.huggingface import read_model

    try:
        own = json.loads((directory / "config.json").read_text("utf-8"))["model_type"] == "potluck"
    except (OSError, ValueError, KeyError, TypeError):
        own = False  # whoever reads the file next says what is wrong with it
    return None if own else read_model(directory)

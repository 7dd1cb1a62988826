"""A plan as commands for machines that one starts by hand: a script for each, and one for the gateway."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from potluck.export import placement
from potluck.export.placement import WeightsSource, pull_words, tokenizers_of

HEAD = """#!/usr/bin/env bash
# {what}
# Every machine needs potluck, {needs}.
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
"""


def files(
    fleet: placement.PlacedPlan,
    wording: placement.CommandOptions,
    addresses: Mapping[str, str],
    weights: Mapping[str, WeightsSource] | None = None,
) -> dict[str, str]:
    """File name to text; a box without an address is reached under its own name."""

    def host_of(box: placement.RentedMachine) -> str:
        return addresses.get(box.name, box.name)

    pulled = weights or {}
    texts = {f"{box.name}.sh": _box(fleet, box, wording, host_of, pulled) for box in fleet.boxes}
    texts["engines.yaml"] = placement.roster(
        fleet, lambda one: f"http://{host_of(one.box)}:{one.port}", wording.key_file
    )
    texts["gateway.sh"] = _gateway(wording, pulled)
    return texts


def _box(
    fleet: placement.PlacedPlan,
    box: placement.RentedMachine,
    wording: placement.CommandOptions,
    host_of: placement.HostOf,
    weights: Mapping[str, WeightsSource],
) -> str:
    what = f"{box.name}: {box.node.name} in {box.region}"
    there = (
        f"the models' directories, the key in {wording.key_file} and, for pipelines, {wording.secret_file}"
    )
    engines = "vLLM, " if wording.style == "vllm" else ""
    lines = [HEAD.format(what=what, needs=f"{engines}{there}")]
    started = wording.on(box, fleet.placements, host_of, host_of)
    models = dict.fromkeys(process.placement.model for process in started)
    lines += [
        line_of(pull_words(weights[model], wording.folders[model])) for model in models if model in weights
    ]
    lines += [process_line(process, wording) for process in started]
    return "\n".join([*lines, "wait -n", ""])


def process_line(process: placement.ExportedProcess, wording: placement.CommandOptions) -> str:
    """Of a process in a script that starts several beside each other."""
    gpus, secret = ",".join(map(str, process.gpus)), ""
    if process.reads_secret:
        secret = f" < {wording.secret_file}"
    return f"CUDA_VISIBLE_DEVICES={gpus} {line_of(process.words)}{secret} &"


def _gateway(wording: placement.CommandOptions, weights: Mapping[str, WeightsSource]) -> str:
    what = "The gateway: clients at port 8000, operators at port 8001 of this machine alone"
    keys = "keys.jsonl of `potluck keys new NAME >> keys.jsonl`"
    needs = f"the engines' key in {wording.key_file}, and {keys}"
    command = line_of(wording.gateway("", "keys.jsonl"))
    pulls = "".join(f"{line_of(words)}\n" for words in tokenizers_of(weights, wording.folders))
    return f'{HEAD.format(what=what, needs=needs)}{pulls}exec {command} "$@"\n'


def line_of(words: Sequence[str]) -> str:
    """Words for a shell, but for variables that it is to fill in."""
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)

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
    placed_plan: placement.PlacedPlan,
    command_options: placement.CommandOptions,
    addresses: Mapping[str, str],
    weights: Mapping[str, WeightsSource] | None = None,
) -> dict[str, str]:
    """File name to text; a box without an address is reached under its own name."""

    def host_of(machine: placement.RentedMachine) -> str:
        return addresses.get(machine.name, machine.name)

    pulled = weights or {}
    texts = {
        f"{machine.name}.sh": _box(placed_plan, machine, command_options, host_of, pulled)
        for machine in placed_plan.boxes
    }
    texts["engines.yaml"] = placement.roster(
        placed_plan, lambda one: f"http://{host_of(one.box)}:{one.port}", command_options.key_file
    )
    texts["gateway.sh"] = _gateway(command_options, pulled)
    return texts


def _box(
    placed_plan: placement.PlacedPlan,
    machine: placement.RentedMachine,
    command_options: placement.CommandOptions,
    host_of: placement.HostOf,
    weights: Mapping[str, WeightsSource],
) -> str:
    what = f"{machine.name}: {machine.node.name} in {machine.region}"
    there = f"the models' directories and the key in {command_options.key_file}"
    engines = "vLLM, " if command_options.style == "vllm" else ""
    lines = [HEAD.format(what=what, needs=f"{engines}{there}")]
    started = command_options.on(machine, placed_plan.placements, host_of, host_of)
    models = dict.fromkeys(process.placement.model for process in started)
    lines += [
        line_of(pull_words(weights[model], command_options.folders[model]))
        for model in models
        if model in weights
    ]
    lines += [process_line(process) for process in started]
    return "\n".join([*lines, "wait -n", ""])


def process_line(process: placement.ExportedProcess) -> str:
    """The line that starts a process in a script that starts several beside each other."""
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, process.gpus))} {line_of(process.words)} &"


def _gateway(command_options: placement.CommandOptions, weights: Mapping[str, WeightsSource]) -> str:
    what = "The gateway: clients at port 8000, operators at port 8001 of this machine alone"
    keys = "keys.jsonl of `potluck keys new NAME >> keys.jsonl`"
    needs = f"the engines' key in {command_options.key_file}, and {keys}"
    command = line_of(command_options.gateway("", "keys.jsonl"))
    pulls = "".join(f"{line_of(words)}\n" for words in tokenizers_of(weights, command_options.folders))
    return f'{HEAD.format(what=what, needs=needs)}{pulls}exec {command} "$@"\n'


def line_of(words: Sequence[str]) -> str:
    """Words for a shell, but for variables that it is to fill in."""
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)

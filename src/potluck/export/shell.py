"""A plan as commands for machines that one starts by hand: a script for each, and one for the gateway."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from potluck.export.placement import CommandOptions, HostOf, PlacedPlan, RentedMachine, roster, visible

HEAD = """#!/usr/bin/env bash
# {what}
# Every machine needs potluck, {needs}.
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
"""


def files(fleet: PlacedPlan, wording: CommandOptions, addresses: Mapping[str, str]) -> dict[str, str]:
    """File name to text; a box without an address is reached under its own name."""

    def host_of(box: RentedMachine) -> str:
        return addresses.get(box.name, box.name)

    texts = {f"{box.name}.sh": _box(fleet, box, wording, host_of) for box in fleet.boxes}
    texts["engines.yaml"] = roster(
        fleet, lambda one: f"http://{host_of(one.box)}:{one.port}", wording.key_file
    )
    texts["gateway.sh"] = _gateway(wording)
    return texts


def _box(fleet: PlacedPlan, box: RentedMachine, wording: CommandOptions, host_of: HostOf) -> str:
    what = f"{box.name}: {box.node.name} in {box.region}"
    needs = (
        f"the models' directories, the key in {wording.key_file} and, for pipelines, {wording.secret_file}"
    )
    lines = [HEAD.format(what=what, needs=needs)]
    for one in fleet.placements:
        workers = [] if one.alone else [footing for footing in one.footings if footing.box == box]
        for footing in workers:
            gpus, command = ",".join(map(str, footing.gpus)), _line(wording.worker(one, host_of(box)))
            lines.append(f"CUDA_VISIBLE_DEVICES={gpus} {command} < {wording.secret_file} &")
        if one.box == box:
            gpus, command = visible(one, box), _line(wording.engine(one, host_of(box), host_of))
            lines.append(f"CUDA_VISIBLE_DEVICES={gpus if one.alone else ''} {command} &")
    return "\n".join([*lines, "wait -n", ""])


def _gateway(wording: CommandOptions) -> str:
    what = "The gateway: clients at port 8000, operators at port 8001 of this machine alone"
    keys = "keys.jsonl of `potluck keys new NAME >> keys.jsonl`"
    needs = f"the engines' key in {wording.key_file}, and {keys}"
    command = _line(wording.gateway("", "keys.jsonl"))
    return f'{HEAD.format(what=what, needs=needs)}exec {command} "$@"\n'


def _line(words: list[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)

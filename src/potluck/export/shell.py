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
        fleet, lambda placement: f"http://{host_of(placement.box)}:{placement.port}", wording.key_file
    )
    texts["gateway.sh"] = _gateway(wording)
    return texts


def _box(fleet: PlacedPlan, box: RentedMachine, wording: CommandOptions, host_of: HostOf) -> str:
    what = f"{box.name}: {box.node.name} in {box.region}"
    needs = (
        f"the models' directories, the key in {wording.key_file} and, for pipelines, {wording.secret_file}"
    )
    lines = [HEAD.format(what=what, needs=needs)]
    for placement in fleet.placements:
        workers = (
            [footing for footing in placement.footings if footing.box == box] if not placement.alone else []
        )
        for machine_share in workers:
            gpus = ",".join(map(str, machine_share.gpus))
            command = _line(wording.worker(placement, host_of(box)))
            lines.append(f"CUDA_VISIBLE_DEVICES={gpus} {command} < {wording.secret_file} &")
        if placement.box == box:
            gpus = (
                f"CUDA_VISIBLE_DEVICES={visible(placement, box)} "
                if placement.alone
                else "CUDA_VISIBLE_DEVICES= "
            )
            lines.append(f"{gpus}{_line(wording.engine(placement, host_of(box), host_of))} &")
    return "\n".join([*lines, "wait -n", ""])


def _gateway(wording: CommandOptions) -> str:
    what = "The gateway: clients at port 8000, operators at port 8001 of this machine alone"
    needs = (
        f"the engines' key in {wording.key_file}, and keys.jsonl of `potluck keys new NAME --file keys.jsonl`"
    )
    command = _line(wording.gateway("", "keys.jsonl"))
    return f'{HEAD.format(what=what, needs=needs)}exec {command} "$@"\n'


def _line(words: list[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)

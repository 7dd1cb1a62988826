"""A plan as SkyPilot tasks: one for each machine, and a script that launches them and tells the gateway of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from potluck.core.errors import InputError
from potluck.export.placement import EVERYWHERE, CommandOptions, PlacedPlan, RentedMachine, roster, visible

GPU_NAMES = {
    "A100-40": "A100",
    "A100-80": "A100-80GB",
    "A100-80-PCIe": "A100-80GB",
    "A100-40-PCIe": "A100",
    "H100-SXM": "H100",
    "H100-PCIe": "H100",
    "A800-SXM": "A800",
    "RTX3090Ti": "RTX3090-Ti",
    "A6000": "RTXA6000",
    "A5000": "RTXA5000",
    "V100-16": "V100",
    "V100-32": "V100-32GB",
}
"""A GPU of the catalog to the name that SkyPilot has for it, where they differ."""


def files(fleet: PlacedPlan, wording: CommandOptions, infra: Mapping[str, str], setup: str) -> dict[str, str]:
    """File name to text; `infra` has each region as SkyPilot writes it, such as aws/us-east-2."""
    for placement in fleet.placements:
        if not placement.alone:
            raise InputError(
                f"template {placement.template}",
                "is a pipeline over several machines, whose addresses SkyPilot gives out late; export commands",
            )
    texts = {f"{box.name}.yaml": _task(fleet, box, wording, infra, setup) for box in fleet.boxes}
    texts["engines.yaml.in"] = roster(
        fleet, lambda one: f"http://@{one.box.name}@:{one.port}", "./engine.key"
    )
    texts["launch.sh"] = _launch(fleet, wording)
    return texts


def _task(
    fleet: PlacedPlan, box: RentedMachine, wording: CommandOptions, infra: Mapping[str, str], setup: str
) -> str:
    gpu = box.node.gpu.name
    placements = fleet.on(box)
    ports = sorted({port for placement in placements for port in (placement.port, placement.kv_port)})
    resources: dict[str, Any] = {"accelerators": f"{GPU_NAMES.get(gpu, gpu)}:{box.node.gpus}"}
    if box.region in infra:
        resources = {"infra": infra[box.region], **resources}
    if box.spot:
        resources["use_spot"] = True
    resources["ports"] = ports
    lines = ["set -euo pipefail"]
    for placement in placements:
        words = " ".join(wording.engine(placement, EVERYWHERE, lambda box: box.name))
        lines.append(f"CUDA_VISIBLE_DEVICES={visible(placement, box)} {words} &")
    task = {
        "name": box.name,
        "resources": resources,
        "num_nodes": 1,
        "secrets": {"POTLUCK_API_KEY": None},
        "setup": setup,
        "run": "\n".join([*lines, "wait -n"]) + "\n",
    }
    head = f"# {box.node.name} in {box.region}: {', '.join(placement.name for placement in placements)}\n"
    return head + yaml.dump(task, Dumper=_TaskDumper, sort_keys=False, width=120)


def _launch(fleet: PlacedPlan, wording: CommandOptions) -> str:
    names = " ".join(box.name for box in fleet.boxes)
    serve = " ".join(wording.gateway("", "keys.jsonl"))
    return f"""#!/usr/bin/env bash
# Rents what the plan says, then serves it from here, with the models' tokenizers and keys.jsonl that lie here.
# Ends nothing: `sky down {names}` does.
set -euo pipefail
: "${{POTLUCK_API_KEY:?the key that engines and gateway share}}"
for box in {names}; do sky launch --yes --detach-run --cluster "$box" --secret POTLUCK_API_KEY "$box.yaml" & done
wait
cp engines.yaml.in engines.yaml
for box in {names}; do sed -i "s/@$box@/$(sky status --ip "$box")/" engines.yaml; done
umask 077; printf %s "$POTLUCK_API_KEY" > engine.key
exec {serve} "$@"
"""


class _TaskDumper(yaml.SafeDumper):
    """Scripts as blocks of lines."""


_TaskDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)

"""Steps that exported files leave to the operator: one line each, with what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from potluck.core.values.vllm_version import VLLM_VERSION
from potluck.export.placement import CommandOptions, PlacedPlan
from potluck.export.skypilot import infra_of

SHOWN = 4


def listed(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    texts = list(names)
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more


def of_all(
    placed_plan: PlacedPlan,
    command_options: CommandOptions,
    weights: Collection[str],
    local: Mapping[str, Path] | None = None,
) -> list[str]:
    """Whatever the form: weights that are not pulled, spot machines, no TLS. `local` has models' folders here."""
    copied = {
        model: f"copy {path if path.is_dir() else path.parent} there, or "
        for model, path in (local or {}).items()
    }
    lines = [
        f"weights of {model}: must be in {folder} wherever it runs, its tokenizer where the gateway does"
        f" ({copied.get(model, '')}--weights {model}=hf://ORG/NAME pulls them)"
        for model, folder in command_options.folders.items()
        if model not in weights
    ]
    spot = [machine.name for machine in placed_plan.boxes if machine.spot]
    if spot:
        lines.append(
            f"spot machines ({listed(spot)}): preempted ones are not replaced"
            " (`potluck up` on a cluster does)"
        )
    lines.append(
        "TLS: engines, KV and gateway speak in clear (docs/deploy.md, TLS between hosts, has the flags)"
    )
    return lines


def of_machines(
    placed_plan: PlacedPlan, command_options: CommandOptions, addresses: Mapping[str, str]
) -> list[str]:
    """Commands and Compose."""
    lines = []
    unknown = [machine.name for machine in placed_plan.boxes if machine.name not in addresses]
    if unknown:
        lines.append(
            f"addresses of {listed(unknown)}: these names must lead to them on every machine (--address BOX=HOST)"
        )
    lines.append(f"secrets: put {command_options.key_file} on every machine (openssl rand -hex 32 makes one)")
    lines.append("clients' keys: make them where the gateway runs (potluck keys new NAME >> keys.jsonl)")
    return lines


def of_images(image: str, engine_image: str, style: str) -> list[str]:
    build = f"docker build -f deploy/Dockerfile -t {image} ."
    engines = f"docker build -f deploy/Dockerfile.vllm -t {engine_image} ."
    if style == "embedded":
        engines = f"docker build -f deploy/Dockerfile --build-arg EXTRAS=gateway,engine -t {engine_image} ."
    return [f"images: build them in Potluck's sources, and push them ({build} && {engines})"]


def of_cluster(
    namespace: str, secrets: Sequence[str], claim: str, regions: Collection[str], pulled: Collection[str]
) -> list[str]:
    files = " ".join(f"--from-file={name}" for name in secrets)
    lines = [f"secrets: make them (kubectl -n {namespace} create secret generic potluck {files})"]
    if claim and not pulled:
        lines.append(f"volume: the claim {claim} must be there, with the models, for many pods to read")
    if pulled:
        lines.append(
            f"gated models: the pull jobs read a token, where there is one (kubectl -n {namespace} create secret"
            " generic potluck-hub --from-literal=token=$HF_TOKEN)"
        )
        lines.append(f"volume: the claim {claim} needs a storage class whose volumes many pods may write")
    if len(regions) > 1:
        lines.append(
            f"regions: {listed(sorted(regions))} must be in one cluster, by topology.kubernetes.io/region of nodes"
        )
    return lines


def of_labels(unknown: Collection[str]) -> list[str]:
    return [
        f"label of {gpu}: unknown, its own name was taken (--gpu-label {gpu}=LABEL, as nodes say it)"
        for gpu in sorted(unknown)
    ]


def of_gateways(turned_off: str, gateways: int) -> list[str]:
    """Rules that change a fleet belong to one gateway."""
    if not turned_off:
        return []
    return [
        f"scaling: {turned_off} is off, as {gateways} gateways would each change the fleet (--gateways 1 keeps it)"
    ]


def of_sky(placed_plan: PlacedPlan, infra: Mapping[str, str], setup: str) -> list[str]:
    regions = dict.fromkeys(machine.region for machine in placed_plan.boxes)
    lines = [
        f"region {region}: no cloud calls one so, SkyPilot takes any (--infra {region}=CLOUD/REGION)"
        for region in regions
        if region not in infra and not infra_of(region)
    ]
    lines.append(
        f"software: machines install vLLM {VLLM_VERSION} if they need it, and Potluck by {setup!r} (--setup)"
    )
    lines.append(
        "keys: export POTLUCK_API_KEY, which engines ask for (openssl rand -hex 32), then ./launch.sh"
    )
    return lines

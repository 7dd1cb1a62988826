"""`potluck export`: a plan as files for whoever starts machines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
from click import argument, option

from potluck.cli.common.files import EXISTING, PATH, read_text
from potluck.cli.common.render import emit_json, table
from potluck.core.errors import InputError
from potluck.export.placement import KEY_FILE
from potluck.spec.spec_values import Spec

KINDS = ("commands", "compose", "kubernetes", "skypilot")


@click.command()
@argument("kind", metavar="KIND", type=click.Choice(KINDS))
@argument("plan", type=EXISTING)
@argument("spec", type=EXISTING)
@option("--out", type=PATH, required=True, help="A new or empty folder for the files.")
@option("--engine", "style", type=click.Choice(("vllm", "embedded")), default="vllm")
@option("--models", default="/models", help="Where models' directories lie on every machine.")
@option("--image", default="potluck", help="Container image with potluck and its engine.")
@option("--namespace", default="potluck", help="Of Kubernetes.")
@option("--address", "addresses", multiple=True, metavar="BOX=HOST", help="Where a machine is reached.")
@option("--infra", multiple=True, metavar="REGION=CLOUD/REGION", help="A region as SkyPilot calls it.")
@option("--gpu-label", "labels", multiple=True, metavar="GPU=LABEL", help="A GPU's label in Kubernetes.")
@option("--setup", default="pip install potluck[gateway]", help="How SkyPilot's machines get Potluck.")
@option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def export(
    kind: str, plan: Path, spec: Path, out: Path, addresses: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Write PLAN, made for SPEC, as files that start it: shell commands, Compose, Kubernetes, SkyPilot.

    KIND is one of commands, compose, kubernetes, skypilot. Nothing is started or rented, and no file has a secret
    in it. docs/deploy.md tells what each needs.

    \b
    Examples:
      potluck plan potluck.yaml --out plan.json
      potluck export kubernetes plan.json potluck.yaml --out k8s && kubectl apply -f k8s
      potluck export skypilot plan.json potluck.yaml --out sky --infra us-east-1=aws/us-east-1
    """
    from potluck.cli.common.inputs import pairs, read_plan, read_spec, weights_in
    from potluck.control.launchers.kubernetes_pods import ManifestOptions
    from potluck.export import compose, manifests, shell, skypilot
    from potluck.export.placement import CommandOptions, roomed

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("--out", f"{out} is not an empty folder; name a new one")
    made = read_plan(plan)
    loaded, text = read_spec(spec), read_text(plan)
    fleet = roomed(made, loaded.node_types, loaded.regions)
    folders = {model.name: f"{options['models'].rstrip('/')}/{model.name}" for model in loaded.models}
    key_file = "" if kind == "skypilot" else KEY_FILE
    wording = CommandOptions(options["style"], folders, key_file, weights=weights_in(loaded, made))
    served = {"plan.json": text, "potluck.yaml": read_text(spec), **_traces(spec, loaded)}
    regions, boxes = {region.name for region in loaded.regions}, {box.name for box in fleet.boxes}
    where = pairs("--address", addresses, boxes)
    if kind == "commands":
        files = shell.files(fleet, wording, where)
    elif kind == "compose":
        files = compose.files(fleet, wording, where, options["image"], served)
    elif kind == "skypilot":
        files = skypilot.files(fleet, wording, pairs("--infra", options["infra"], regions), options["setup"])
    else:
        names = pairs("--gpu-label", options["labels"], {box.node.gpu.name for box in fleet.boxes})
        cluster = ManifestOptions(options["image"], options["namespace"], gpu_names=names)
        files = manifests.files(fleet, wording, cluster, served)
    if kind != "kubernetes":
        files |= served
    _write(out, files)
    _say(as_json, out, files, len(fleet.boxes), len(fleet.placements))


def _traces(spec: Path, loaded: Spec) -> dict[str, str]:
    """What the spec reads beside itself, by the names it has for it."""
    traces = {}
    for model in loaded.models:
        if model.trace is not None:
            try:
                name = model.trace.resolve().relative_to(spec.parent.resolve()).as_posix()
                traces[name] = read_text(model.trace)
            except (ValueError, InputError) as error:
                raise InputError(
                    f"model {model.name}: trace",
                    "must be text beside the spec to travel with it; or write lengths",
                ) from error
    return traces


def _say(as_json: bool, out: Path, files: dict[str, str], boxes: int, engines: int) -> None:
    if as_json:
        emit_json({"folder": str(out), "files": sorted(files), "machines": boxes, "engines": engines})
        return
    rows = [(name, len(text.splitlines())) for name, text in sorted(files.items())]
    table(f"{out}: {engines} engines on {boxes} machines", ("file", "lines"), rows)


def _write(out: Path, files: dict[str, str]) -> None:
    try:
        for name, text in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(0o755)
    except OSError as error:
        shutil.rmtree(out, ignore_errors=True)
        raise InputError("--out", f"{out} cannot be written ({error.strerror})") from error

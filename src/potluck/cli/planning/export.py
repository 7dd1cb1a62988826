"""`potluck export`: a plan as files that deploy it."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import EXISTING, PATH, read_text
from potluck.cli.common.render import emit_json, table
from potluck.core.errors import InputError
from potluck.core.values.plan import Plan
from potluck.export.placement import KEY_FILE, Style
from potluck.spec.spec_values import Spec

if TYPE_CHECKING:
    from potluck.export.placement import CommandOptions, EngineLimits, PlacedPlan, WeightsSource

KINDS = ("commands", "compose", "kubernetes", "skypilot")
CHECK_TIMEOUT_S = 120.0


@click.command()
@argument("kind", metavar="KIND", type=click.Choice(KINDS))
@argument("plan", type=EXISTING)
@argument("spec", type=EXISTING)
@option("--out", type=PATH, help="New or empty folder for the files. Optional with --check.")
@option(
    "--check", is_flag=True, help="Start the result here with mock engines and send a request to each model."
)
@option(
    "--within",
    "within_s",
    type=click.FloatRange(1.0),
    default=CHECK_TIMEOUT_S,
    help="Time limit of --check in s.",
)
@option("--models", default="/models", help="Folder of the models on every machine.")
@option(
    "--weights", multiple=True, metavar="MODEL=hf://ORG/NAME", help="Download a model's weights from the hub."
)
@option(
    "--volume",
    default="potluck-models",
    help="Kubernetes: PersistentVolumeClaim with the models, or a /FOLDER of nodes.",
)
@option("--image", default="potluck", help="Gateway image (deploy/Dockerfile).")
@option("--engine-image", help="Engine image. Default: potluck-vllm or potluck-engine.")
@option("--namespace", default="potluck", help="Kubernetes namespace.")
@option("--gateways", type=click.IntRange(1, 100), help="Kubernetes: gateway replicas. Default: 2.")
@option("--address", "addresses", multiple=True, metavar="BOX=HOST", help="Address of a machine.")
@option("--infra", multiple=True, metavar="REGION=CLOUD/REGION", help="SkyPilot name of a region.")
@option(
    "--gpu-label", "labels", multiple=True, metavar="GPU=LABEL", help="Kubernetes node label of a GPU type."
)
@option("--setup", default="pip install potluck[gateway]", help="SkyPilot: command that installs Potluck.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def export(kind: str, plan: Path, spec: Path, out: Path | None, as_json: bool, **options: Any) -> None:
    """Write the files that deploy PLAN, made for SPEC.

    KIND is commands (shell), compose, kubernetes or skypilot. Nothing is rented, and no file contains secrets. The
    remaining steps are printed. See docs/deploy.md.

    \b
    Examples:
      potluck plan potluck.yaml --out plan.json
      potluck export kubernetes plan.json potluck.yaml --out k8s && kubectl apply -k k8s
      potluck export kubernetes plan.json potluck.yaml --check
      potluck export skypilot plan.json potluck.yaml --out sky --infra lab=aws/us-east-1
    """
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("--out", f"{out} is not an empty folder; name a new one")
    if out is None and not options["check"]:
        raise InputError("--out", "is needed: a new or empty folder for the files (or --check alone)")
    exported = _exported(kind, plan, spec, options)
    with ExitStack() as ending:
        folder = out or Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="potluck-export-")))
        _write(folder, exported.files)
        checked = None
        if options["check"]:
            from potluck.cli.planning.export_check import checked_export

            checked = checked_export(kind, folder, exported.plan, exported.spec, options["within_s"])
        for line in exported.notes:
            click.echo(f"potluck: to do: {line}", err=True)
        if as_json:
            counts = {"machines": len(exported.fleet.boxes), "engines": len(exported.fleet.placements)}
            body = {
                "folder": str(folder),
                "files": sorted(exported.files),
                **counts,
                "left_out": exported.notes,
            }
            emit_json(body | ({} if checked is None else {"check": checked.as_json()}))
        elif out is not None:
            title = f"{out}: {len(exported.fleet.placements)} engines on {len(exported.fleet.boxes)} machines"
            rows = [(name, len(text.splitlines())) for name, text in sorted(exported.files.items())]
            table(title, ("file", "lines"), rows)
        if checked is not None:
            checked.show(as_json)


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    plan: Plan
    spec: Spec
    fleet: PlacedPlan
    files: dict[str, str]
    notes: list[str]
    """Steps that remain for the operator."""


def _exported(kind: str, plan_path: Path, spec_path: Path, options: dict[str, Any]) -> ExportedFiles:
    from potluck.cli.common.inputs import pairs, read_plan, read_spec, require_runnable, weights_in
    from potluck.export import left_out, shell, skypilot
    from potluck.export.placement import CommandOptions, placed_plan_of, weights_from

    plan = read_plan(plan_path)
    spec = read_spec(spec_path)
    require_runnable(plan, spec, str(plan_path))
    options["style"] = _style(spec)
    placed_plan = placed_plan_of(plan, spec.node_types, spec.regions)
    folder = options["models"].rstrip("/")
    names = {model.name for model in spec.models}
    weights = weights_from(pairs("--weights", options["weights"], names), mounts=kind == "skypilot")
    gateways = (options["gateways"] or 2) if kind == "kubernetes" else 1
    turned_off = spec.policy.scaling if gateways > 1 and spec.policy.scaling != "none" else ""
    command_options = CommandOptions(
        options["style"],
        {model.name: f"{folder}/{model.name}" for model in spec.models},
        "" if kind == "skypilot" else KEY_FILE,
        weights=weights_in(spec, plan),
        limits=_limits_of(spec, plan),
        gateways=gateways,
        fixed_fleet=bool(turned_off),
    )
    served = {
        "plan.json": read_text(plan_path),
        "potluck.yaml": read_text(spec_path),
        **_traces(spec_path, spec),
        **_configs(spec_path, spec),
    }
    _require_whole(served, spec)
    local = {model.name: model.config for model in spec.models if model.config is not None}
    notes = [
        *left_out.of_all(placed_plan, command_options, weights, local),
        *left_out.of_gateways(turned_off, gateways),
    ]
    where = pairs("--address", options["addresses"], {machine.name for machine in placed_plan.boxes})
    if kind == "kubernetes":
        files, more = _kubernetes(
            placed_plan, command_options, weights, served, options, {n.gpu.name for n in spec.node_types}
        )
        return ExportedFiles(plan, spec, placed_plan, files, [*notes, *more])
    if kind == "commands":
        files = shell.files(placed_plan, command_options, where, weights)
        notes += left_out.of_machines(placed_plan, command_options, where)
    elif kind == "compose":
        files, more = _compose(placed_plan, command_options, where, weights, list(served), options)
        notes += more
    else:
        infra = pairs("--infra", options["infra"], {region.name for region in spec.regions})
        sky = skypilot.SkyOptions(infra, options["setup"], folder, weights)
        files = skypilot.files(placed_plan, command_options, sky)
        notes += left_out.of_sky(placed_plan, infra, options["setup"])
    return ExportedFiles(plan, spec, placed_plan, files | served, notes)


def _compose(
    placed_plan: PlacedPlan,
    command_options: CommandOptions,
    where: dict[str, str],
    weights: dict[str, WeightsSource],
    served: list[str],
    options: dict[str, Any],
) -> tuple[dict[str, str], list[str]]:
    from potluck.export import compose, left_out

    images = _images(options)
    files = compose.files(
        placed_plan, command_options, where, compose.ComposeOptions(*images, weights), served
    )
    notes = [
        *left_out.of_machines(placed_plan, command_options, where),
        *left_out.of_images(*images, options["style"]),
    ]
    return files, [line.replace("on every machine", "beside the Compose files") for line in notes]


def _kubernetes(
    placed_plan: PlacedPlan,
    command_options: CommandOptions,
    weights: dict[str, WeightsSource],
    served: dict[str, str],
    options: dict[str, Any],
    gpus: set[str],
) -> tuple[dict[str, str], list[str]]:
    from potluck.catalog.gpus import node_label
    from potluck.cli.common.inputs import pairs
    from potluck.control.launchers.kubernetes_pods import ManifestOptions
    from potluck.export import left_out, manifests

    given = pairs("--gpu-label", options["labels"], gpus)
    volume, images = options["volume"], _images(options)
    if volume.startswith("/") and weights:
        raise InputError("--weights", "pods cannot share a folder of each node: give --volume CLAIM for them")
    labels, unknown = {}, set()
    for gpu in {machine.node.gpu.name: machine.node.gpu for machine in placed_plan.boxes}.values():
        known = node_label(gpu)
        value = given.get(gpu.name, known.value)
        unknown |= set() if value else {gpu.name}
        labels[gpu.name] = manifests.GpuLabel(known.key, value or gpu.name, known.resource)
    manifest_options = ManifestOptions(
        images[1],
        options["namespace"],
        models_folder=options["models"].rstrip("/"),
        **({"models_path": volume} if volume.startswith("/") else {"models_claim": volume}),
    )
    export = manifests.KubernetesExport(manifest_options, images[0], labels, weights)
    files = manifests.files(placed_plan, command_options, export, served)
    secrets, regions = (
        manifests.secret_files(command_options),
        {machine.region for machine in placed_plan.boxes},
    )
    claim = "" if volume.startswith("/") else volume
    notes = left_out.of_cluster(options["namespace"], secrets, claim, regions, weights)
    return files, [*notes, *left_out.of_labels(unknown), *left_out.of_images(*images, options["style"])]


def _images(options: dict[str, Any]) -> tuple[str, str]:
    """Of the gateway and of engines."""
    default = "potluck-vllm" if options["style"] == "vllm" else "potluck-engine"
    return options["image"], options["engine_image"] or default


def _style(spec: Spec) -> Style:
    if spec.engine == "vllm" or spec.engine == "embedded":
        return spec.engine
    what = f"engine: {spec.engine} are servers that run already"
    raise InputError("spec", f"{what}, so there is nothing to export; `potluck up --attach` serves over them")


def _traces(spec: Path, loaded_spec: Spec) -> dict[str, str]:
    """What the spec reads beside itself, by the names it has for it."""
    traces = {}
    for model in loaded_spec.models:
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


CONFIG_FILES = ("config.json", "hf_quant_config.json")
"""What a model's size is read from; its weights and tokenizer are not part of an export."""


def _configs(spec_path: Path, spec: Spec) -> dict[str, str]:
    """The configs that the spec reads its models from, by the names it has for them; never weights."""
    configs = {}
    for model in spec.models:
        if model.config is None:
            continue
        folder = model.config if model.config.is_dir() else model.config.parent
        names = CONFIG_FILES if model.config.is_dir() else (model.config.name, CONFIG_FILES[1])
        for path in (folder / name for name in names):
            if path.is_file():
                configs[_beside(path, spec_path, f"model {model.name}: model")] = read_text(path)
    return configs


def _beside(path: Path, spec_path: Path, field: str) -> str:
    """The path of a file that travels with the spec, as the spec writes it."""
    folder = Path(os.path.abspath(spec_path.parent))  # links stay as the spec names them
    try:
        return Path(os.path.abspath(path)).relative_to(folder).as_posix()
    except ValueError as error:
        where = f"{path} is not in the folder of the spec, so it cannot travel with it"
        raise InputError(field, f"{where}; copy its config.json there and write a relative path") from error


def _require_whole(served: dict[str, str], spec: Spec) -> None:
    """Refuse files from which a gateway elsewhere would read other models or traces than here."""
    from potluck.cli.common.inputs import read_spec

    if all(model.config is None and model.trace is None for model in spec.models):
        return
    with tempfile.TemporaryDirectory(prefix="potluck-export-") as place:
        _write(Path(place), served)
        there = read_spec(Path(place) / "potluck.yaml")
        for model, other in zip(spec.models, there.models, strict=True):
            for field, path in (("model", other.config), ("traffic: trace", other.trace)):
                if path is not None and not path.is_relative_to(place):
                    what = f"{path} is an absolute path, which an export cannot carry; write it relative to the spec"
                    raise InputError(f"model {model.name}: {field}", what)
            if model.name != other.name:
                what = f"is the name of a folder here, another one elsewhere; add `name: {model.name}` to the spec"
                raise InputError(f"model {model.name}: name", what)
            if replace(other.model, name="") != replace(model.model, name=""):
                what = (
                    "is read differently from the exported files; name a config.json with all that it needs"
                )
                raise InputError(f"model {model.name}: model", what)


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


def _limits_of(spec: Spec, plan: Plan) -> dict[tuple[str, int], EngineLimits]:
    """Template and replica to its engine's limits; CapacityError where its longest request does not fit there."""
    from potluck.cli.common.inputs import load_problem
    from potluck.cli.simulating.simulation import SimulationInputs, scene_of
    from potluck.core.state.facts import BLOCK_TOKENS
    from potluck.export.placement import EngineLimits
    from potluck.perf.engine_limits import (
        longest_request,
        longest_served,
        longest_tokens,
        memory_share,
        planned_lengths,
        stage_weight_bytes,
    )
    from potluck.runtime.replica_models import ReplicaModels

    spec = spec.in_formats(plan.formats)
    nodes = {node.name: node for node in spec.node_types}
    inputs = SimulationInputs(spec, load_problem(spec, 0.8, None, (), 0.0), plan)
    known = ReplicaModels(scene_of(inputs))
    known.learn(plan)
    used = {deployment.template for deployment in plan.deployments if deployment.count}
    result = {}
    for template in (template for template in plan.templates if template.name in used):
        served = spec.model(template.model)
        for index, replica in enumerate(template.replicas):
            layout = replica.layout
            fits = longest_request(served.model, layout, nodes)
            needed = longest_tokens(planned_lengths(plan, template, served.traffic.lengths), replica.role)
            wanted = longest_tokens(served.traffic.lengths, "mixed")
            what = f"template {template.name}: {template.model}"
            planned = known.replica_models[template.name, index]
            result[template.name, index] = EngineLimits(
                longest_served(needed, wanted, fits, what),
                memory_share(layout, nodes),
                planned.total_blocks * BLOCK_TOKENS,
                stage_weight_bytes(served.model, layout),
                planned.engine.token_budget,
            )
    return result

"""`potluck up --model DIR`: from this machine's GPUs to a spec, a brief measurement and a plan for just those."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from potluck.cli.planning.rehearsal import ReportStage
from potluck.cli.up.prepare import PlanChoices, PreparedPlan, planned_for_all, with_known_attainment
from potluck.control.control_values import EngineSpec
from potluck.control.launchers.engine_command import EngineCommands, only_gpu_of
from potluck.control.launchers.local_capacity import VISIBLE, LocalGpu, find_chips, free_bytes
from potluck.core.errors import CapacityError, InputError, UnknownNameError
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.spec.spec_values import SHIPPED

if TYPE_CHECKING:
    from potluck.cli.simulating.simulation import SimulationInputs
    from potluck.core.values.plan import Plan
    from potluck.spec.spec_values import ModelSpec, Spec


CONFIG = "config.json"
MAKERS = ("NVIDIA", "Tesla", "GeForce", "Quadro")  # Words of a driver's name that the catalog leaves out.
SLO = {"ttft_ms": 2000, "tpot_ms": 100}
INPUT, OUTPUT = {"mean": 500, "cv": 1.0}, {"mean": 150, "cv": 0.7}
MAX_RUNNING, TOKEN_BUDGET = 64, 1024
KV_SHARE = 0.85
"""Of what the performance model leaves for KV: the rest is for what it does not see (graphs, the driver)."""
MOST_CPU_KV_BYTES, CPU_KV_SHARE = 4 << 30, 0.5
MEASURE_S = 300.0
SCALED = ("fp16_tflops", "bandwidth_gb_per_s", "fp8_tflops", "fp4_tflops")
MIN_MEMORY_SHARE = 0.85  # Of the catalog's figure, that a chip of this name has at least.
USUAL_PRICE_USD_PER_H = 1.0
LESS = 0.75
TRIES = 3
SLOWER = (1.0, 4.0, 16.0)
"""Factor on the default SLO, so that a slow machine can serve."""
HEADER = """\
# Made by `potluck up --model`: the GPUs of this machine. The objective and the lengths of requests are guesses, the
# rate is what the GPUs can do with them. To serve for others, copy it, change it, and: potluck up COPY --engine gpu
"""


def gpu_of(gpu: LocalGpu) -> str:
    """The catalog's name of a chip; an unknown one is an error that says what to add."""
    from potluck.catalog import gpus

    words = gpu.name.split()
    for start in range(len(words)):
        if all(word in MAKERS for word in words[:start]):
            try:
                name = gpus.canonical(" ".join(words[start:]))
            except UnknownNameError:
                continue
            if gpu.share is not None:
                return f"{name}-{gpu.share}pct"
            _must_have_memory(gpu, name)
            return name
    raise InputError(
        "--model",
        f"GPU {gpu.index} is a {gpu.name!r}, which the catalog does not know: write a spec with its figures under "
        "`gpus:` (name, fp16_tflops, memory_gb, bandwidth_gb_per_s), or leave it out with CUDA_VISIBLE_DEVICES",
    )


def _must_have_memory(gpu: LocalGpu, name: str) -> None:
    from potluck.catalog import gpus

    known = gpus.gpu(name).memory_gb * 1e9
    if gpu.memory_bytes < MIN_MEMORY_SHARE * known:
        there = f"{gpu.memory_bytes / 1e9:.0f} GB"
        raise InputError(
            "--model",
            f"GPU {gpu.index} is a {gpu.name!r} with {there}, the catalog's {name} has {known / 1e9:.0f} GB: "
            "is it a part of one? Leave it out with CUDA_VISIBLE_DEVICES",
        )


def found_chips() -> tuple[LocalGpu, ...]:
    if chips := find_chips():
        return chips
    raise InputError(
        "--model",
        "no GPU was found here (nvidia-smi lists none); `potluck engine serve --model DIR` computes on the CPU, "
        "`potluck up SPEC` acts as the GPUs of a spec",
    )


def shared_out(chips: Sequence[LocalGpu], shares: str) -> tuple[LocalGpu, ...]:
    """One GPU as several, with so many per cent of it each; its memory is divided alike."""
    texts = [part.strip() for part in shares.split(",")]
    numbers = [int(text) for text in texts if text.isdecimal()]
    if len(numbers) < len(texts) or not all(numbers) or sum(numbers) > 100:
        raise InputError(
            "--shares", f"must be per cents that come to at most 100, as 50,25,12; is {shares!r}"
        )
    if len(chips) != 1:
        raise InputError("--shares", f"cuts one GPU, {len(chips)} are here; choose with {VISIBLE}")
    (gpu,) = chips
    gpu_of(gpu)
    return tuple(
        replace(
            gpu,
            uuid=f"{gpu.uuid}@{place}",
            memory_bytes=gpu.memory_bytes * share // sum(numbers),
            share=share,
        )
        for place, share in enumerate(numbers)
    )


def _part_of(gpu: LocalGpu) -> dict[str, object]:
    """A share as the spec's own GPU: until it is measured, so much of what the whole one can do."""
    from potluck.catalog import gpus

    whole, part = gpus.gpu(gpu_of(gpu).rpartition("-")[0]), (gpu.share or 100) / 100
    scaled = {name: getattr(whole, name) for name in SCALED}
    known = {"name": gpu_of(gpu), "architecture": whole.architecture, "memory_gb": gpu.memory_bytes / 1e9}
    known |= {name: round(value * part, 3) for name, value in scaled.items() if value is not None}
    if whole.sm_count is not None:
        known["sm_count"] = max(1, round(whole.sm_count * part))
    return known | {"compute_capability": whole.compute_capability, "bf16": whole.bf16}


def spec_text(
    model: Path,
    name: str,
    counts: Counter[str],
    rate_per_s: float,
    slo: Mapping[str, float] = SLO,
    parts: Sequence[LocalGpu] = (),
) -> str:
    """A spec of these GPUs, each a node of its own: an engine has one. `parts`: those that are shares of one."""
    nodes = [
        {"node": f"1x{gpu}", "available": count, "price_usd_per_h": _price(gpu, parts)}
        for gpu, count in counts.items()
    ]
    traffic = {"rate_per_s": rate_per_s, "input": INPUT, "output": OUTPUT}
    served = {"model": str(model), "name": name, "files": str(model), "slo": dict(slo), "traffic": traffic}
    body = {
        "engine": "embedded",
        "models": [served],
        "fleet": {"regions": [{"name": "here", "nodes": nodes}]},
    }
    if parts:
        body["gpus"] = [*{gpu_of(part): _part_of(part) for part in parts}.values()]
    return HEADER + yaml.safe_dump(body, sort_keys=False, width=110)


def _price(gpu: str, parts: Sequence[LocalGpu] = ()) -> float:
    """The listed price of a GPU; a default where none is listed, so that no GPU is free."""
    from potluck.catalog import prices

    if part := next((part for part in parts if gpu_of(part) == gpu), None):
        return round(_price(gpu.rpartition("-")[0]) * (part.share or 100) / 100, 4)
    try:
        return prices.price_usd_per_h(f"1x{gpu}").price_usd_per_h
    except InputError:
        return USUAL_PRICE_USD_PER_H


@dataclass(frozen=True, slots=True)
class LocalGpus:
    """How this machine's GPUs are used: whole, or one of them as several under a daemon of CUDA MPS."""

    device: str = "cuda"
    measure: bool = True
    shares: str = ""
    daemon: Mapping[str, str] = field(default_factory=dict)

    def variables(self, chips: Sequence[LocalGpu]) -> dict[str, dict[str, str]]:
        """By id, what a process that computes on a GPU is started with."""
        from potluck.engine.gpu_share import share_environment

        return {
            gpu.uuid: {VISIBLE: gpu.uuid.partition("@")[0]}
            | ({} if gpu.share is None else share_environment(gpu.share, self.daemon))
            for gpu in chips
        }


@contextmanager
def local_gpus(folder: Path, device: str, measure: bool, shares: str) -> Iterator[LocalGpus]:
    """For as long as a service runs: where one GPU is several, so long there is a daemon."""
    from potluck.engine.gpu_share import mps_daemon

    with ExitStack() as stack:
        daemon = stack.enter_context(mps_daemon(folder / "mps")) if shares else {}
        yield LocalGpus(device, measure, shares, daemon)


@dataclass(frozen=True, slots=True)
class GpuSetup:
    spec_path: Path
    prepared: PreparedPlan
    maker: EngineCommands
    profiles: tuple[Path, ...]
    choices: PlanChoices = PlanChoices(30.0)  # How later plans are chosen, too.


def prepared_for_gpus(
    model: Path, folder: Path, choices: PlanChoices, local_gpus: LocalGpus, report_stage: ReportStage
) -> GpuSetup:
    """Find the GPUs, measure each kind, plan for all of them, and try how much that holds."""
    from potluck.control.state_store import written
    from potluck.spec.load_spec import load_spec

    model = model.resolve()
    if not (model / CONFIG).is_file():
        raise InputError("--model", f"{model} has no {CONFIG}; name a model's directory")
    chips = found_chips() if not local_gpus.shares else shared_out(found_chips(), local_gpus.shares)
    counts, parts = Counter(map(gpu_of, chips)), chips if local_gpus.shares else ()
    report_stage("found " + " + ".join(f"{count} x {gpu}" for gpu, count in counts.items()))
    path, name = folder / "spec.yaml", model.name
    written(path, spec_text(model, name, counts, 1.0, parts=parts))
    profiles: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    if local_gpus.measure:
        profiles, notes = measured_briefly(
            load_spec(path), model, chips, folder / "profiles", local_gpus, report_stage
        )
    report_stage("planning")
    choices = replace(choices, here=True, profiles=profiles)
    if local_gpus.shares and not _fits_every_node(load_spec(path)):
        raise InputError(
            "--shares", f"{name} does not fit into the memory of each share; make them fewer or larger"
        )

    def text(rate_per_s: float, slo: Mapping[str, float]) -> str:
        return spec_text(model, name, counts, rate_per_s, slo, parts)

    slo, rate_per_s, make = _within_reach(path, text, choices, report_stage)
    for attempt in range(TRIES):
        rate_per_s = float(f"{rate_per_s * LESS**attempt:.2g}")
        written(path, text(rate_per_s, slo))
        spec = load_spec(path)
        tried = with_known_attainment(make(spec), choices, report_stage)
        if tried.holds:
            break
    what = f"planned for {rate_per_s:g} requests/s of about {INPUT['mean']} tokens in, {OUTPUT['mean']} out ({path})"
    lines = (*notes, what, *tried.lines)
    engine_commands = replace(maker_of(spec, chips, local_gpus.device), variables=local_gpus.variables(chips))
    return GpuSetup(path, PreparedPlan(tried.inputs, lines), engine_commands, profiles, choices)


def _within_reach(
    path: Path,
    text: Callable[[float, Mapping[str, float]], str],
    choices: PlanChoices,
    report_stage: ReportStage,
) -> tuple[Mapping[str, float], float, Callable[[Spec], SimulationInputs]]:
    """The first objective that these GPUs can keep, what they can do with it, and a plan for that."""
    from potluck.control.state_store import written
    from potluck.spec.load_spec import load_spec

    slos = [{key: value * times for key, value in SLO.items()} for times in SLOWER]
    for slo in slos:
        written(path, text(1.0, slo))
        try:
            return slo, *planned_for_all(load_spec(path), choices, report_stage)
        except CapacityError:
            if slo is slos[-1]:
                raise
    raise AssertionError("one of them was the last")


def maker_of(spec: Spec, chips: Sequence[LocalGpu] | None, device: str = "cuda") -> EngineCommands:
    """Engine commands for a spec's models on these GPUs; without GPUs, on those that a cluster assigns."""
    mine = _kinds(chips or ())
    if chips is not None:
        _must_be_there("gpu", {node.name: node.name for node in spec.node_types}, mine)
    files = tuple((model.name, weights_of(model)) for model in spec.models)
    return EngineCommands("gpu", files, chips=mine, flags=flags_of(spec), device=device)


def vllm_maker(spec: Spec, chips: Sequence[LocalGpu], python: str, more: tuple[str, ...]) -> EngineCommands:
    """The same for stock vLLM, an engine of which may have several GPUs; with none here it takes what there is."""
    from potluck.engine import shipped_model

    files = tuple(
        (model.name, shipped_model() if model.weights is None and model.files is None else weights_of(model))
        for model in spec.models
    )
    mine = _kinds(chips)
    kinds = {node.name: f"1x{node.gpu.name}" for node in spec.node_types} if mine else {}
    _must_be_there("vllm", kinds, mine)
    return EngineCommands("vllm", files, chips=mine, gpus=tuple(kinds.items()), python=python, more=more)


def vllm_flags(spec: Spec, plan: Plan, cpu: bool) -> Callable[[EngineSpec], tuple[str, ...]]:
    """On a GPU the longest request and the memory that were planned with; else a part of the machine's memory."""
    from potluck.perf.engine_limits import longest_request, longest_served, longest_tokens, memory_share

    models = {model.name: model for model in spec.models}
    nodes = {node.name: node for node in spec.node_types}
    # One that stands in for others starts quickly rather than compute fast, on processors without bf16 too.
    own = ("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(_cpu_kv_bytes(plan)))
    cpu_flags = own if cpu else ()

    def flags(engine_spec: EngineSpec) -> tuple[str, ...]:
        served = models[engine_spec.model]
        if cpu or (served.weights is None and served.files is None):
            return cpu_flags
        fits = longest_request(served.model, engine_spec.layout, nodes)
        wanted = longest_tokens(served.traffic.lengths, "mixed")
        longest = longest_served(min(wanted, fits), wanted, fits, engine_spec.model)
        share = memory_share(engine_spec.layout, nodes)
        return ("--max-model-len", str(longest), "--gpu-memory-utilization", f"{share:g}")

    return flags


def mock_flags(spec: Spec, plan: Plan) -> Callable[[EngineSpec], tuple[str, ...]]:
    """As much KV as the plan reckons with: states and windows weigh as they do on requests of the spec's length."""
    from potluck.core.values.model import in_format
    from potluck.runtime.replica_models import total_blocks

    models = {model.name: model for model in spec.models}
    nodes = {node.name: node for node in spec.node_types}

    def flags(engine_spec: EngineSpec) -> tuple[str, ...]:
        served, weights = models[engine_spec.model], plan.format_of(engine_spec.model)
        model = served.model if weights is None else in_format(served.model, weights)
        mean = served.traffic.mean_input_tokens + served.traffic.mean_output_tokens
        return ("--kv-blocks", str(total_blocks(model, engine_spec.layout, nodes, mean)))

    return flags


def _cpu_kv_bytes(plan: Plan) -> int:
    """For the KV of each engine, where vLLM would else take nearly all memory: with room for one engine more."""
    engines = sum(item.count * len(plan.template(item.template).replicas) for item in plan.deployments)
    return min(MOST_CPU_KV_BYTES, int(CPU_KV_SHARE * (free_bytes() or MOST_CPU_KV_BYTES) / (engines + 1)))


def _kinds(chips: Sequence[LocalGpu]) -> tuple[tuple[str, str], ...]:
    return tuple((f"1x{gpu_of(gpu)}", gpu.uuid) for gpu in chips)


def _must_be_there(style: str, kinds: Mapping[str, str], mine: Sequence[tuple[str, str]]) -> None:
    there = sorted({kind for kind, _ in mine})
    for node, kind in kinds.items():
        if kind not in there:
            raise InputError("--engine", f"{style}: the spec has {node}, this machine has {', '.join(there)}")


def require_gpus(plan: Plan, engine_commands: EngineCommands) -> None:
    there = Counter(kind for kind, _ in engine_commands.chips)
    wanted: Counter[str] = Counter()
    for deployment in plan.deployments:
        for replica in plan.template(deployment.template).replicas:
            engine_spec = EngineSpec(
                plan.template(deployment.template).model, replica.layout, deployment.region
            )
            for kind in engine_commands.chips_for(engine_spec):
                wanted[kind] += deployment.count
    for kind, count in wanted.items():
        if count > there[kind]:
            has = f"the plan has {count} GPUs of type {kind}, this machine has {there[kind]}"
            raise InputError("--engine", has)


def weights_of(model: ModelSpec) -> Path:
    """The directory that an engine reads a model from: where the spec says that weights lie, else its files."""
    from potluck.engine import shipped_model

    where = model.weights
    if where is None or where.path is None:
        if model.files is None:
            raise InputError(
                f"models: {model.name}: weights: path", "is needed (or files): the directory of its weights"
            )
        return shipped_model() if model.files == SHIPPED else Path(model.files)
    field, root = f"models: {model.name}: weights: path", Path(where.path)
    if not root.is_dir():
        mounted = "; is it mounted?" if where.place == "store" else ""
        raise InputError(field, f"{root} is no directory that is there{mounted}")
    names = dict.fromkeys((model.name, model.model.name))
    paths = [folder for folder in (root, *(root / name for name in names)) if (folder / CONFIG).is_file()]
    if not paths:
        raise InputError(field, f"{root} has no {CONFIG}, nor a directory {' or '.join(names)} with one")
    if not any(paths[0].glob("*.safetensors")):
        raise InputError(field, f"{paths[0]} has no weights (*.safetensors)")
    return paths[0]


def _fits_every_node(spec: Spec) -> bool:
    """Whether each model of the spec fits on one GPU of each node type, with memory left for KV."""
    from potluck.perf.kv_capacity import stage_memory

    models = [model.model for model in spec.models]
    return all(stage_memory(model, node, 1).kv_bytes > 0 for model in models for node in spec.node_types)


def flags_of(spec: Spec) -> Callable[[EngineSpec], tuple[str, ...]]:
    """KV blocks that an engine's GPU has room for beside the weights, and no more than can be used."""
    from potluck.perf.kv_capacity import stage_memory
    from potluck.perf.memory import kv_bytes_per_gpu

    models = {model_spec.name: model_spec.model for model_spec in spec.models}
    nodes = {node.name: node for node in spec.node_types}

    def flags(make: EngineSpec) -> tuple[str, ...]:
        model, node = models[make.model], nodes[only_gpu_of(make)]
        context, layers = model.max_context_tokens, range(model.layer_count)
        blocks = (MAX_RUNNING + 8) * -(-context // BLOCK_TOKENS)
        bytes_per_token = kv_bytes_per_gpu(model, float(context), 1, layers) / context
        if bytes_per_token > 0:
            free_bytes = KV_SHARE * max(0.0, stage_memory(model, node, 1, layers).kv_bytes)
            blocks = min(blocks, int(free_bytes / bytes_per_token / BLOCK_TOKENS))
        return (
            *("--kv-blocks", str(max(1, blocks)), "--max-running", str(MAX_RUNNING)),
            *("--token-budget", str(TOKEN_BUDGET)),
        )

    return flags


def measured_briefly(
    spec: Spec,
    model: Path,
    chips: Sequence[LocalGpu],
    folder: Path,
    local_gpus: LocalGpus,
    report_stage: ReportStage,
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """A profile of each kind of GPU, also from before, and what is to be said of those that could not be measured."""
    from potluck.perf.kv_capacity import stage_memory

    name = spec.models[0].model.name
    folder.mkdir(parents=True, exist_ok=True)
    nodes = {node.name: node for node in spec.node_types}
    kinds = {gpu_of(local_gpu): local_gpu for local_gpu in chips}
    notes = []
    for gpu in list(kinds):
        if stage_memory(spec.models[0].model, nodes[f"1x{gpu}"], 1).kv_bytes <= 0:
            notes.append(f"{name} is too large for one {gpu}; planned with the catalog's figures")
            del kinds[gpu]
    paths = {gpu: folder / f"{gpu}-{name}.json" for gpu in kinds}
    running = {
        gpu: _measuring(model, name, gpu, path, local_gpus.device, local_gpus.variables((kinds[gpu],)))
        for gpu, path in paths.items()
        if not path.is_file()
    }
    for gpu, process in running.items():
        report_stage(f"measuring, {gpu}")
        try:
            out, _ = process.communicate(timeout=MEASURE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            out = f"took longer than {MEASURE_S:g} s"
        if process.returncode or not paths[gpu].is_file():
            why = " ".join((out.strip().splitlines() or ["it printed nothing"])[-1].split())[:160]
            notes.append(f"{gpu} could not be measured ({why}); planned with the catalog's figures")
    return tuple(path for path in paths.values() if path.is_file()), tuple(notes)


def _measuring(
    model: Path, name: str, gpu: str, path: Path, device: str, variables: Mapping[str, Mapping[str, str]]
) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "potluck.cli.main", "profile", "--local", "--quick", "--repeats", "3"),
        *("--model", str(model), "--device", device, "--gpu", gpu, "--name", name, "--out", str(path)),
    ]
    env = {**os.environ, **next(iter(variables.values()))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

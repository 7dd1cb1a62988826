"""`potluck profile`: measure an engine, write a profile that the performance model reads."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import argument, option

from potluck.cli.common.files import PATH, write_text
from potluck.cli.common.render import emit_json, percent, progress, table
from potluck.cli.engine.emulate import mock_model, paced_executor
from potluck.cli.fleet.service import nothing, opened, state_option
from potluck.core.errors import InputError
from potluck.core.figures import seconds
from potluck.core.state.facts import BLOCK_TOKENS

if TYPE_CHECKING:
    from potluck.core.state.facts import ObservedSpeed
    from potluck.perf.timers.profile import Profile, ProfilePoint


def write_live(state: Path | None, out: Path, as_json: bool) -> None:
    """A file for each kind of node that enough was seen of: `out`, or several beside it."""
    from potluck.perf.timers.profile import profile_to_json

    observed = _observed(state)
    rows = []
    for observed_speed, profile in observed:
        name = f"{out.stem}-{observed_speed.model}-{observed_speed.node}-tp{observed_speed.tp}"
        path = out if len(observed) == 1 else out.with_stem(name)
        write_text("--out", path, profile_to_json(profile))
        body = {name: getattr(observed_speed, name) for name in ("model", "node", "tp", "pace", "replicas")}
        rows.append({**body, "file": str(path)})
    if as_json:
        emit_json(rows)
        return
    cells = [[f"{v:.2f}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    table("", list(rows[0]), cells)
    click.echo("`plan`, `simulate`, `goodput`, `estimate` and `serve` read them with --profile")


def _observed(state: Path | None) -> list[tuple[ObservedSpeed, Profile]]:
    from potluck.cli.common.inputs import load_problem, read_spec
    from potluck.cli.planning.estimate import measured
    from potluck.control.decision_history import ENOUGH, SPEED_POLL_INTERVAL_S, paces_of
    from potluck.plan.current_problem import profile_of

    with opened(state, running=False) as service:
        known = service.store.get("spec files") or {}
        paces = paces_of(service.store, time.time())
        folder = service.folder
    if not paces or known.get("path") is None:
        raise nothing(
            f"too few step times in {folder} yet: replicas must work for {ENOUGH * SPEED_POLL_INTERVAL_S:.0f} s"
        )
    profiles = tuple(Path(item) for item in known.get("profiles", ()))
    problem = measured(load_problem(read_spec(Path(known["path"])), 0.8, None, (), 0.0), profiles)
    day = datetime.now(UTC).date().isoformat()
    asks = {demand.name: demand for demand in problem.demands}
    return [
        (observed_speed, profile_of(problem, asks[observed_speed.model], observed_speed, day))
        for observed_speed in paces
        if observed_speed.model in asks
    ]


DEFAULT_MAX_CONTEXT_TOKENS = 4096  # The longest context that is measured unless more is asked for.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to measure, and the names in the profile."""

    model: Path | None
    device: str
    share: int | None
    threads: int | None
    emulate: str | None
    speed_up: float
    max_batch: int
    max_tokens: int | None
    chunk_tokens: int
    kv_blocks: int | None
    repeats: int
    quick: bool
    gpu: str | None
    tp: int
    name: str | None
    api_key_file: Path | None


@click.command()
@argument("url", required=False)
@option("--local", is_flag=True, help="Measure the embedded engine in this process.")
@option("--live", is_flag=True, help="Use the step times that the running service has observed.")
@state_option
@option("--model", type=PATH, help="With --local: model directory.")
@option("--device", default="cpu", help="With --local: torch device: cpu, cuda, cuda:1, ...")
@option("--share", type=int, help="With --local: percentage of one NVIDIA GPU (CUDA MPS).")
@option("--threads", type=click.IntRange(1), help="With --local: CPU threads.")
@option(
    "--emulate",
    metavar="GPU:MODEL",
    help="With --local: run at the speed of a GPU, such as A10:llama-3.1-8b.",
)
@option("--speed-up", default=1.0, help="With --emulate: factor on the speed.")
@option("--max-batch", default=32, type=click.IntRange(2, 1024), help="Maximum decode batch size.")
@option("--max-tokens", type=click.IntRange(128), help="Longest context to measure. Default: what fits.")
@option(
    "--chunk-tokens",
    default=1024,
    type=click.IntRange(32),
    help="Prefill tokens per step; the --token-budget of the engine at URL.",
)
@option(
    "--kv-blocks",
    type=click.IntRange(1),
    help="With --local: KV blocks. Default: enough for --max-batch.",
)
@option("--repeats", default=5, type=click.IntRange(1, 100), help="Measurements per batch shape.")
@option("--quick", is_flag=True, help="Measure fewer batch shapes.")
@option("--gpu", help="GPU name in the profile. Default: torch's name.")
@option("--tp", default=1, type=click.IntRange(1), help="Tensor-parallel degree of the engine.")
@option("--name", help="Model name in the profile. Default: the engine's.")
@option("--api-key-file", type=PATH, help="File of the engine's API key.")
@option("--out", type=PATH, default=Path("profile.json"))
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(
    url: str | None, local: bool, live: bool, state: Path | None, out: Path, as_json: bool, **options: Any
) -> None:
    """Measure an engine's step times and write them to a profile for planning.

    \b
    Examples:
      potluck profile http://127.0.0.1:8000 --gpu A10 --out a10.json
      potluck profile --local --quick
      potluck profile --live --out observed.json
      potluck profile --local --model ~/models/Llama-3.2-1B --device cuda --gpu L40S
      potluck profile --local --model ~/models/Llama-3.2-1B --share 25 --gpu quarter
    """
    from potluck.perf.timers.profile import profile_to_json

    if local + live + (url is not None) != 1:
        raise InputError("profile", "give an engine's URL, --local or --live, one of them")
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise InputError("--out", f"{out} cannot be written")
    if live:
        write_live(state, out, as_json)
        return
    if options["share"] is not None:
        _on_share({"local": local, "out": out, "json": as_json, **options})
        return
    try:
        flags = ProfileOptions(**options)
        remote = _remote(url, flags) if url is not None else _local(flags)
    except ModuleNotFoundError as error:
        raise InputError("profile", f"needs {error.name}; install potluck[engine]") from error
    write_text("--out", out, profile_to_json(remote))
    _show(remote, out, as_json)


def _on_share(options: dict[str, object]) -> None:
    from potluck.engine.gpu_share import run_on_share

    share = options.pop("share")
    if not options["local"] or options["emulate"] or options["device"] not in ("cpu", "cuda"):
        raise InputError("--share", "is for --local on one NVIDIA GPU; leave --device and --emulate out")
    command = (sys.executable, "-m", "potluck.cli.main", "profile")
    raise SystemExit(run_on_share(int(str(share)), command, {**options, "device": "cuda"}))


def _local(options: ProfileOptions) -> Profile:
    import torch

    from potluck.cli.engine.engine import described
    from potluck.engine import shipped_model
    from potluck.engine.compute.executor import RunnerSize
    from potluck.engine.gpu_share import SHARE
    from potluck.engine.local_bench import LocalBench, grid
    from potluck.engine.model.checkpoint import SafetensorsSource
    from potluck.engine.model.config import read_config
    from potluck.engine.serve import local_executor

    directory = options.model or shipped_model()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    config = read_config(directory, described(directory))
    longest = min(options.max_tokens or DEFAULT_MAX_CONTEXT_TOKENS, config.model.max_context_tokens)
    rows = options.max_batch + 1
    blocks = options.kv_blocks or rows * -(-longest // BLOCK_TOKENS)
    size = RunnerSize(rows, blocks, longest, min(options.chunk_tokens, longest))
    executor = local_executor(config, SafetensorsSource(directory), size, options.device)
    if options.emulate is not None:
        paced_executor(executor, mock_model(options.emulate, options.speed_up))
    bench = LocalBench(executor, options.repeats)
    shape_grid = grid(bench.bounds, options.quick, behind=True)
    points = []
    with progress(shape_grid.count) as progress_bar:
        for point in bench.points(shape_grid):
            points.append(point)
            progress_bar(_words(point))
    gpu, share, versions = "cpu", os.environ.get(SHARE), {"torch": str(torch.__version__)}
    if options.device.startswith("cuda"):
        gpu = str(torch.cuda.get_device_name(options.device))
        versions |= {"cuda": str(torch.version.cuda), "hardware": gpu}
        if share is not None:
            gpu, versions["share"] = f"{gpu} {share} %", f"{share} %"
    return _profile(options, (gpu, directory.resolve().name, "potluck"), versions, points)


def _remote(url: str, options: ProfileOptions) -> Profile:
    import asyncio

    from aiohttp import ClientSession

    from potluck.cli.engine.listening import api_key
    from potluck.engine.http_bench import HttpBench, steps_told
    from potluck.engine.local_bench import grid

    if not url.startswith(("http://", "https://")):
        raise InputError("URL", f"{url!r} must begin with http:// or https://")
    if not options.gpu:
        raise InputError("--gpu", "name the hardware that the engine runs on, such as A10")
    key = api_key(options.api_key_file)

    async def measured() -> Profile:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with ClientSession(headers=headers, trust_env=False) as client:
            bench = HttpBench(client, url, options.chunk_tokens, max(2, options.repeats // 2))
            bounds = await bench.look()
            longest = min(options.max_tokens or DEFAULT_MAX_CONTEXT_TOKENS, bounds.max_tokens)
            most = min(options.max_batch, bounds.max_running)
            bounds = replace(bounds, max_tokens=longest, max_running=most)
            shape_grid = grid(bounds, options.quick)
            points = []
            step_bench = await steps_told(bench)
            with progress(shape_grid.count) as progress_bar:
                async for point in (step_bench or bench).points(shape_grid, bounds):
                    points.append(point)
                    progress_bar(_words(point))
            kind = "vllm" if "vLLM" in bench.version else "potluck"
            return _profile(options, ("", bench.model, kind), {"engine": bench.version}, points)

    return asyncio.run(measured())


def _profile(
    options: ProfileOptions,
    about: tuple[str, str, str],
    versions: dict[str, str],
    points: list[ProfilePoint],
) -> Profile:
    from potluck import __version__
    from potluck.perf.timers.profile import Profile

    gpu, model = options.gpu or about[0], options.name or about[1]
    versions = {
        "potluck": __version__,
        **versions,
        **({"emulated": options.emulate} if options.emulate else {}),
    }
    today = datetime.now(UTC).date().isoformat()
    return Profile(gpu, model, options.tp, about[2], versions, today, tuple(points))


def _words(point: ProfilePoint) -> str:
    prompt = [f"{point.chunk_new} tokens behind {point.chunk_cached}"] if point.chunk_new else []
    decodes = [f"{point.decodes} decodes at {point.decode_context // point.decodes}"] if point.decodes else []
    return f"{', '.join(prompt + decodes)}: {seconds(point.seconds)}"


def _show(profile: Profile, out: Path, as_json: bool) -> None:
    from potluck.perf.timers.profile import ProfileTimer

    timer = ProfileTimer(profile)
    if as_json:
        what = {"out": str(out), "gpu": profile.gpu, "model": profile.model, "points": len(profile.points)}
        emit_json({**what, "fit_error": timer.fit_mape})
        return
    rows = [
        (_words(point), f"{(point.chunk_new or point.decodes) / point.seconds:,.0f} tokens/s")
        for point in profile.points
        if not point.chunk_cached and not (point.chunk_new and point.decodes)
    ]
    table(f"{profile.model} on {profile.gpu}: {len(profile.points)} steps", ("step", "rate"), rows)
    click.echo(f"{out}: written; a smooth formula alone fits it to {percent(timer.fit_mape)} on average")

"""An engine put together: weights, executor, loop, thread, HTTP server.

torch is only loaded for engines that compute: mock ones start without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.api.http import allow_open_files
from potluck.api.model_files import GenerationConfig
from potluck.api.tokenizer import ModelTokenizer
from potluck.core.errors import CapacityError, InputError
from potluck.core.replica.batch import BatchLimits
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.model import Model
from potluck.core.values.sampling import Sampling
from potluck.engine.compute.executor import Executor, RunnerSize, SequenceWork, TokenDraw
from potluck.engine.loop.engine_loop import EngineLoop
from potluck.engine.loop.engine_status import Role
from potluck.engine.loop.loop_thread import LoopThread
from potluck.engine.memory.prefix_cache import PrefixCache
from potluck.engine.model.config import EngineModelConfig, read_config
from potluck.engine.server.engine_app import open_server
from potluck.engine.server.engine_service import EngineService
from potluck.engine.server.http_connection import RequestLimits
from potluck.engine.server.kv_connector import KvSettings
from potluck.engine.server.request_channels import RequestChannels
from potluck.kv import checksum, kv_codec
from potluck.kv.disk_tier import DiskTier
from potluck.perf.memory import kv_bytes_per_token

if TYPE_CHECKING:
    from potluck.engine.compute.local_executor import LocalExecutor
    from potluck.engine.model.checkpoint import WeightSource

log = logging.getLogger(__name__)
LOOK_S = 0.2
WARM_UP_S, SWITCH_S = 45.0, 0.0002
"""After which no more shapes of steps are made ready before the engine serves; the likeliest come first."""
SMALL_HIDDEN = 1024
"""Models narrower than this have such short products that threads lose more by waiting for each other than they
win, above all on a busy machine."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine is laid out; what is None follows from the model."""

    max_running: int = 32
    handover_rows: int = 0
    """Caches that may wait to be fetched, or to begin, beside those that run; 0: a quarter of these, at least 8."""
    max_tokens: int | None = None
    """Of one request."""
    kv_blocks: int | None = None
    token_budget: int = 1024
    chunk_tokens: int | None = None
    prefix_cache_bytes: int = 64_000_000
    prefix_cache_dir: Path | None = None
    """Where prefixes go that memory has no room for, and at the end; None: nowhere."""
    prefix_cache_disk_bytes: int = 1_000_000_000
    device: str = "cpu"
    threads: int | None = None
    role: Role = "mixed"

    def __post_init__(self) -> None:
        if self.token_budget < self.max_running:
            raise InputError("--token-budget", f"must be at least --max-running, {self.max_running}")

    def size(self, model: Model) -> RunnerSize:
        longest = min(self.max_tokens or model.max_context_tokens, model.max_context_tokens)
        rows = self.max_running + (self.handover_rows or max(8, self.max_running // 4))
        most = -(-longest // BLOCK_TOKENS)
        # A quarter of the context for everybody, since few are long at once, and always one whole.
        blocks = self.kv_blocks or max(most, rows * max(most // 4, 1))
        return RunnerSize(
            rows, blocks, longest, min(self.token_budget, self.chunk_tokens or self.token_budget)
        )


MakeExecutor = Callable[[EngineModelConfig, "WeightSource", RunnerSize, str], Executor]
"""A maker of other executors, such as one at the pace of an emulated GPU."""


def local_executor(
    config: EngineModelConfig, source: WeightSource, size: RunnerSize, device: str
) -> LocalExecutor:
    import torch

    from potluck.engine.compute.local_executor import LocalExecutor
    from potluck.engine.compute.runner import Runner

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        line = (str(error).splitlines() or ["unknown"])[0][:120]
        raise InputError("--device", f"{device} cannot be used here ({line})") from error
    _must_fit(config.model, size, device)
    if device != "cpu":
        # A thread that launches kernels lets others run at each, and should not be long in getting its turn back.
        sys.setswitchinterval(SWITCH_S)
    try:
        return LocalExecutor(Runner(config, source, size, device=device), size)
    except RuntimeError as error:
        if "memory" not in str(error).lower():
            raise
        raise CapacityError(
            f"{device} has too little memory for the weights and {size.blocks} KV blocks; lower --kv-blocks"
        ) from error


def _must_fit(model: Model, size: RunnerSize, device: str) -> None:
    """A machine that is asked for more memory than it has may not say so, but end this process later."""
    single = 2 if device == "cpu" else 1  # what has 16 bits elsewhere has 32 on a CPU
    needed = single * size.blocks * BLOCK_TOKENS * kv_bytes_per_token(model, range(model.layer_count))
    there = _memory_bytes()
    if device == "cpu" and there is not None and needed > there:
        raise CapacityError(
            f"{size.blocks} KV blocks need {needed / 1e9:.1f} GB, this machine has {there / 1e9:.1f} GB; "
            "lower --kv-blocks"
        )


def _memory_bytes() -> int | None:
    """Of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def warm_up(executor: Executor) -> None:
    """Run what is made ready at first use (steps, reading a cache out, codecs), so that no request pays for it."""
    if executor.kv_dtype in kv_codec.STORED:
        kv_codec.warm((executor.kv_dtype,))
    shapes, size, stop_s = executor.shapes, executor.size, time.monotonic() + WARM_UP_S
    for done, (singles, chunk) in enumerate(shapes, 1):
        if singles < size.rows and singles + -(-chunk // BLOCK_TOKENS) <= size.blocks:
            _run_once(executor, singles, chunk, read=done == 1)
        if time.monotonic() > stop_s or done == len(shapes) > 1:
            log.info("%d of %d shapes of steps are ready", done, len(shapes))
            break


def _run_once(executor: Executor, singles: int, chunk: int, *, read: bool) -> None:
    rows = [executor.open() for _ in range(singles + (chunk > 0))]
    for row in rows:
        executor.grow(row, 2 if row != rows[-1] else max(2, chunk))
    works = [SequenceWork(row, 1, [0]) for row in rows[:singles]]
    if works:
        executor.step([SequenceWork(row, 0, [0], "none") for row in rows[:singles]], [])
    if chunk:
        works.append(SequenceWork(rows[-1], 0, [0] * chunk))
    executor.step(works, [TokenDraw(Sampling(), 2)] * len(works))
    for layer in range(executor.config.model.layer_count if read else 0):
        executor.export(rows[0], layer, 0, executor.held(rows[0]))
    for row in rows:
        executor.close(row)


def assemble(
    directory: Path,
    model: Model | None,
    settings: EngineSettings,
    *,
    name: str,
    random_seed: int | None = None,
    limits: RequestLimits | None = None,
    kv: KvSettings | None = None,
    make: MakeExecutor = local_executor,
    generation: GenerationConfig | None = None,
) -> EngineService:
    """A service that is ready to start. `model` describes a Hugging Face directory; see `read_config`."""
    import torch

    from potluck.engine.model.checkpoint import RandomSource, SafetensorsSource

    config = read_config(directory, model)
    generation = generation or GenerationConfig()
    for token in (*config.eos_tokens, *generation.end_tokens):
        if not 0 <= token < config.model.vocab:
            raise InputError("eos_token_id", f"{token} is not in the vocabulary of {config.model.vocab}")
    if settings.device == "cpu":
        small = config.model.hidden < SMALL_HIDDEN
        torch.set_num_threads(settings.threads or (1 if small else torch.get_num_threads()))
    source: WeightSource = SafetensorsSource(directory) if random_seed is None else RandomSource(random_seed)
    tokenizer = ModelTokenizer.read(directory)
    size = settings.size(config.model)
    executor = make(config, source, size, settings.device)
    checksum.load()
    warm_up(executor)
    return service_of(
        executor, settings, name=name, tokenizer=tokenizer, limits=limits, kv=kv, generation=generation
    )


def service_of(
    executor: Executor,
    settings: EngineSettings,
    *,
    name: str,
    tokenizer: ModelTokenizer | None = None,
    limits: RequestLimits | None = None,
    kv: KvSettings | None = None,
    generation: GenerationConfig | None = None,
) -> EngineService:
    limits = limits or RequestLimits()
    size = executor.size
    batch = BatchLimits(size.blocks, settings.token_budget, settings.max_running, settings.chunk_tokens)
    channels = RequestChannels()
    folder, most_bytes = settings.prefix_cache_dir, settings.prefix_cache_disk_bytes
    disk = (
        None if folder is None else _disk(folder, most_bytes, f"{executor.fingerprint} {executor.kv_dtype}")
    )
    prefixes = PrefixCache(executor.config, settings.prefix_cache_bytes, executor.fingerprint, disk)
    loop = EngineLoop(executor, batch, channels.tell, prefixes=prefixes, lease_s=limits.lease_s)
    service = EngineService(name, loop, LoopThread(loop), channels, tokenizer, limits, kv, generation)
    service.role = settings.role
    return service


def _disk(folder: Path, capacity_bytes: int, fingerprint: str) -> DiskTier:
    try:
        return DiskTier(folder, capacity_bytes, fingerprint)
    except OSError as error:
        raise InputError("--prefix-cache-dir", f"{folder}: {error.strerror or error}") from error


def _on_signals(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, call)
        except RuntimeError:  # a system whose loops hear of no signals
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))


async def serve_all(
    services: Sequence[EngineService],
    host: str,
    port: int,
    *,
    api_key: str | None,
    ready: Callable[[str], None],
    names: frozenset[str] = frozenset(),
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve on ports in a row (0: free ones) until a signal or until all are drained; `ready` hears the addresses."""
    allow_open_files()
    async with AsyncExitStack() as stack:
        servers = []
        for place, service in enumerate(services):
            server = await open_server(
                service, host, port and port + place, api_key=api_key, names=names, tls=tls
            )
            stack.push_async_callback(server.close)
            servers.append(server)
        stop = asyncio.Event()
        _on_signals(asyncio.get_running_loop(), stop.set)
        for server in servers:
            ready(server.address)
        while not (
            stop.is_set()
            or all(engine_service.ends_drained and engine_service.drained for engine_service in services)
        ):
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S if services[0].ends_drained else None)

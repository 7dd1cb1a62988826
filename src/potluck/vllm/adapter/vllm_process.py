"""vLLM's process: the command that starts it, from a layout; started, watched and ended."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import ipaddress
import json
import os
import re
import signal
import socket
import struct
import subprocess
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

import potluck
from potluck.core.errors import InputError
from potluck.core.values.vllm_version import VLLM_VERSION

ASK_S = 5.0
WAIT_S = 0.25
GRACE_S = 15.0  # From asking it to end to making it.
LAST_LINES = 400
LAST_WORDS_S = 1.0  # For the rest of its log, which children of its may hold open.
MARKS = ("POTLUCK_INSTANCE", "POTLUCK_OWNER", "POTLUCK_NURSERY")
"""By these a controller knows engines; vLLM's processes are the adapter's own affair."""
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG.
OURS = "potluck.core.errors."  # What the connector refuses, in vLLM's log.
NAMES_ERROR = re.compile(r"\b\w*(Error|Exception): |error: ")
SAYS_NOTHING = ("See root cause above", "See stack trace")
"""Lines with which vLLM's processes tell each other that one has failed."""
GET_ADDRESS = 0x8915  # ioctl's SIOCGIFADDR.
SEQUENCES = "--max-num-seqs"
USUAL_RUNNING = 256  # vLLM's own choice, or less than that.


@dataclass(frozen=True, slots=True)
class GpuShape:
    """How a model lies on this machine's GPUs."""

    tensor: int = 1
    stages: tuple[int, ...] = ()  # Layers of each stage of a pipeline; none: all in one.
    experts: bool = False  # Whether each expert of a mixture is whole on one GPU.

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise InputError("--tensor-parallel", f"must be at least 1, is {self.tensor}")
        if any(layers < 1 for layers in self.stages):
            raise InputError("--stages", "every stage needs a layer")

    @property
    def workers(self) -> int:
        return self.tensor * max(1, len(self.stages))


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Which of the machines of a replica this is, and where the first of them is found."""

    nodes: int = 1
    rank: int = 0
    master: tuple[str, int] = ("127.0.0.1", 0)

    def checked(self, shape: GpuShape) -> NodePlace:
        if not 0 <= self.rank < self.nodes:
            raise InputError("--node-rank", f"must be 0 to {self.nodes - 1}, is {self.rank}")
        stages = max(1, len(shape.stages))
        if stages % self.nodes:
            line = f"{self.nodes} cannot have the same number of {stages} stages each; --stages names them"
            raise InputError("--nodes", line)
        if self.nodes > 1 and not self.master[1]:
            line = "is needed for several nodes: HOST:PORT of the first, a port that is free there"
            raise InputError("--master", line)
        return self

    def workers(self, shape: GpuShape) -> int:
        """Processes of vLLM's on this machine."""
        return shape.workers // self.nodes


@dataclass(frozen=True, slots=True)
class VllmSettings:
    model: str
    name: str
    python: str
    shape: GpuShape = GpuShape()
    place: NodePlace = NodePlace()
    token_budget: int | None = None
    max_running: int | None = None
    max_tokens: int | None = None
    block_tokens: int | None = None
    memory_share: float | None = None
    kv_host: str = "127.0.0.1"
    kv_port: int = 0
    kv_tls: tuple[Path, ...] = ()  # Certificate, key and authority for KV; none: it crosses in clear.
    any_version: bool = False
    more: tuple[str, ...] = ()  # Further flags of vLLM's, as they are.

    @property
    def running(self) -> int:
        """Requests at once, as far as it was said."""
        words = " ".join(self.more).replace("=", " ").split()
        word = words[words.index(SEQUENCES) + 1 :][:1] if SEQUENCES in words else []
        return self.max_running or (int(word[0]) if word and word[0].isdigit() else USUAL_RUNNING)


def command(settings: VllmSettings, port: int, channel: Path, meeting_port: int = 0) -> list[str]:
    """`meeting_port`: of the first machine, where the processes of several find each other."""
    shape, place = settings.shape, settings.place
    module = "potluck.vllm.headless" if place.rank else "vllm.entrypoints.openai.api_server"
    texts = [
        *(settings.python, "-m", module),
        *("--model", settings.model, "--served-model-name", settings.name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--kv-transfer-config", json.dumps(transfer(settings, channel))),
        "--enable-prompt-tokens-details",
        # It is asked what it makes of a chat's messages before it gets KV for them.
        "--enable-scale-out",
        # The connector takes them: nothing else has to listen.
        *("--kv-events-config", json.dumps({"enable_kv_cache_events": True, "publisher": "null"})),
        # It is asked for its metrics twice a second.
        "--disable-uvicorn-access-log",
    ]
    options: list[tuple[str, object]] = [
        ("--tensor-parallel-size", shape.tensor if shape.tensor > 1 else None),
        ("--pipeline-parallel-size", len(shape.stages) or None),
        ("--max-num-batched-tokens", settings.token_budget),
        (SEQUENCES, settings.max_running),
        ("--max-model-len", settings.max_tokens),
        ("--block-size", settings.block_tokens),
        ("--gpu-memory-utilization", settings.memory_share),
    ]
    if shape.experts:
        texts.append("--enable-expert-parallel")
    if place.nodes > 1:
        options += [
            ("--distributed-executor-backend", "mp"),
            ("--nnodes", place.nodes),
            ("--node-rank", place.rank),
            ("--master-addr", place.master[0]),
            ("--master-port", meeting_port),
        ]
    for flag, value in options:
        if value is not None:
            texts += [flag, str(value)]
    return [*texts, *settings.more]


def transfer(settings: VllmSettings, channel: Path) -> dict[str, object]:
    extra: dict[str, object] = {"host": settings.kv_host, "port": settings.kv_port, "channel": str(channel)}
    if settings.kv_tls:
        extra["tls"] = [str(path.absolute()) for path in settings.kv_tls]
    if settings.any_version:
        extra["any_version"] = True
    return {
        "kv_connector": "PotluckConnector",
        "kv_connector_module_path": "potluck.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def environment(settings: VllmSettings) -> dict[str, str]:
    """What is set beside what there is."""
    texts = {"VLLM_NO_USAGE_STATS": "1"}
    if settings.shape.stages:
        texts["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, settings.shape.stages))
    if settings.place.nodes > 1:
        texts |= _between_machines(settings)
    return texts


def _between_machines(settings: VllmSettings) -> dict[str, str]:
    """By which address vLLM's processes reach those on other machines, where nobody says so; and which GPUs they
    have: vLLM takes every GPU that it sees for one of the replica's."""
    chosen = {"VLLM_HOST_IP": settings.kv_host}
    if interface := interface_of(settings.kv_host):
        chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    chosen = {name: text for name, text in chosen.items() if name not in os.environ}
    count, seen = settings.place.workers(settings.shape), os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = seen.split(",") if seen else [str(number) for number in range(count)]
    return chosen | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:count])}


def address_here(host: str, master: tuple[str, int]) -> str:
    """This machine's own address, by which a replica's other machines reach it: `host`, or that towards the first."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        if not ipaddress.ip_address(address).is_unspecified:
            return address
        kind, *_, there = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        line = f"must be this machine's own address where there are several; {host} is not ({error})"
        raise InputError("--host", line) from error


def interface_of(address: str) -> str:
    """The network interface that has an address; empty where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""


VERSION_CODE = """
import importlib.util, pathlib, runpy
spec = importlib.util.find_spec("vllm")
if spec is not None and spec.origin is not None:
    file = pathlib.Path(spec.origin).with_name("_version.py")
    print(runpy.run_path(str(file))["__version__"] if file.exists() else "of an unknown version")
"""
"""Without an import of vLLM, which takes seconds."""
FIND_S = 60.0  # In which a Python must say whether it has vLLM.


def must_have_vllm(python: str, field: str, *, any_version: bool = False) -> None:
    """InputError where that Python does not have vLLM VLLM_VERSION; `field` names the Python."""
    try:
        words = [python, "-c", VERSION_CODE]
        done = subprocess.run(words, capture_output=True, text=True, timeout=FIND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or f"did not answer within {FIND_S:g} s"
        raise InputError(field, f"{python} cannot be run ({why})") from error
    version = done.stdout.strip()
    install = f"`{python} -m pip install vllm=={VLLM_VERSION}`"
    if not version:
        line = f"{python} has no vLLM; {install}, or name the Python that has it with {field}"
        raise InputError(field, line)
    if version.split("+")[0] != VLLM_VERSION and not any_version:
        line = f"{python} has vLLM {version}; this was tested with {VLLM_VERSION}: {install}"
        raise InputError(field, f"{line}, or name another Python with {field}")


class VllmProcess:
    """`base` is where it serves plain OpenAI, for the adapter alone."""

    def __init__(self, settings: VllmSettings, channel: Path) -> None:
        self._settings, self._channel = settings, channel
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._started = asyncio.Event()
        self.base = ""

    async def start(self, meeting_port: int = 0) -> None:
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        ours = str(Path(potluck.__file__).parents[1])
        path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
        variables = os.environ | environment(self._settings) | {"PYTHONPATH": path}
        for mark in MARKS:
            variables.pop(mark, None)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command(self._settings, port, self._channel, meeting_port),
                env=variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise InputError(
                "--python", f"{self._settings.python} cannot be run ({error.strerror})"
            ) from error
        self._reading = asyncio.create_task(self._read())
        self._started.set()

    async def ready(self, session: aiohttp.ClientSession, within_s: float) -> None:
        """Until it answers; InputError with its last words when it ends, or does not come."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while not self.gone:
            try:
                timeout = aiohttp.ClientTimeout(total=ASK_S)
                async with session.get(f"{self.base}/health", timeout=timeout) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            if loop.time() > until_s:
                raise InputError("vLLM", f"did not serve within {within_s:g} s; --start-s allows for more")
            await asyncio.sleep(WAIT_S)
        raise InputError("vLLM", f"ended: {self.last_words()}")

    @property
    def gone(self) -> bool:
        return self._process is None or self._process.returncode is not None

    async def wait(self) -> None:
        """Until it was started, has ended, and has said why."""
        await self._started.wait()
        assert self._process is not None
        assert self._reading is not None
        await self._process.wait()
        await asyncio.wait([self._reading], timeout=LAST_WORDS_S)

    def last_words(self) -> str:
        """The line that most likely says why."""
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            return f"signal {-code} ended it"
        lines = [line for line in self._lines if NAMES_ERROR.search(line)]
        ours = [line.partition(OURS)[2] for line in lines if OURS in line]
        if ours:
            return ours[-1][:300]
        lines = [line for line in lines if not any(words in line for words in SAYS_NOTHING)] or lines
        why = NAMES_ERROR.search(lines[-1]) if lines else None
        return f"exit code {code}; its log says more" if why is None else why.string[why.start() :][:300]

    async def end(self, *, at_once: bool = False) -> None:
        process = self._process
        if process is None:
            return
        for how, within_s in ((signal.SIGTERM, 0.0 if at_once else GRACE_S), (signal.SIGKILL, GRACE_S)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            try:
                await asyncio.wait_for(process.wait(), within_s)
            except TimeoutError:
                continue
            if how == signal.SIGTERM:  # Its own children may be left.
                continue
            break
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        """Its log is ours."""
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._lines.append(text)
                os.write(2, line)


def _end_with_parent() -> None:
    """An adapter that is killed takes vLLM with it, where the system can do that (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

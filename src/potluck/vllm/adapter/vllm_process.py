"""vLLM as a process: started, asked until it serves, watched, ended with all that it started."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path

import aiohttp

import potluck
from potluck.core.errors import InputError
from potluck.vllm.adapter.vllm_flags import VllmSettings, command, environment

ASK_S = 5.0
WAIT_S = 0.25
GRACE_S = 15.0
"""From asking it to end to making it."""
LAST_LINES = 400
MARKS = ("POTLUCK_INSTANCE", "POTLUCK_OWNER", "POTLUCK_NURSERY")
"""By these a controller knows engines; vLLM's processes are the adapter's own affair."""
DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG."""
OURS = "potluck.core.errors."
"""What the connector refuses, in vLLM's log."""
SAYS_NOTHING = ("See root cause above", "See stack trace")
"""Lines with which vLLM's processes tell each other that one has failed."""


class VllmProcess:
    """`base` is where it serves plain OpenAI, for the adapter alone."""

    def __init__(self, settings: VllmSettings, channel: Path) -> None:
        self._settings, self._channel = settings, channel
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self.base = ""

    async def start(self) -> None:
        port = free_port()
        self.base = f"http://127.0.0.1:{port}"
        ours = str(Path(potluck.__file__).parents[1])
        path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
        variables = os.environ | environment(self._settings) | {"PYTHONPATH": path}
        for mark in MARKS:
            variables.pop(mark, None)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command(self._settings, port, self._channel),
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
        if self._process is not None:
            await self._process.wait()

    def last_words(self) -> str:
        """The line that most likely says why."""
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            return f"signal {-code} ended it"
        said = [line for line in self._lines if "Error" in line or "error:" in line]
        ours = [line.partition(OURS)[2] for line in said if OURS in line]
        if ours:
            return ours[-1][:300]
        said = [line for line in said if not any(words in line for words in SAYS_NOTHING)] or said
        return said[-1][:300] if said else f"exit code {code}; its log says more"

    async def end(self) -> None:
        process = self._process
        if process is None:
            return
        for how, within_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

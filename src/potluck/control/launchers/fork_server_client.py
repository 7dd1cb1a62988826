"""The controller's side of a process that forks engines (`cli/serving/engine`): quicker to start, and smaller."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from potluck.control.launchers.cpu_capacity import CpuCost, cost_of
from potluck.control.launchers.process import ProcessId, started_at

MODULE = "potluck.cli.serving.engine.fork_server"
READY_S = 120.0
ANSWER_S = 4.0
"""To fork; less than a controller's lease lasts."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ForkServer:
    """Loads from when it is made, and says no where it cannot fork: whoever asks then starts a process instead."""

    def __init__(
        self, marks: Mapping[str, str], log: Path, module: str = MODULE, style: str = "emulated"
    ) -> None:
        """`style`: of the engines that are to come, as `EngineMaker` has it."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._ready = False
        self._read = b""
        self.cpu: CpuCost | None = None
        """What computing takes here, once it is ready; None where engines compute nothing."""
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, style],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env={**os.environ, **ONE_THREAD, **marks},
                start_new_session=True,
            )

    def wait_ready(self, within_s: float = READY_S) -> bool:
        """Whether it has loaded everything by then; if not it is given up."""
        if not self._ready:
            said = self._line(within_s)
            self._ready, self.cpu = said.get("ready") is True, cost_of(said.get("cpu"))
        if not self._ready:
            self.close()
        return self._ready

    def fork(self, arguments: Sequence[str], log: Path) -> ProcessId | None:
        """An engine with these arguments; None where it did not come about."""
        stdin = self._process.stdin
        if not self._ready or stdin is None:
            return None
        try:
            stdin.write(json.dumps({"arguments": list(arguments), "log": str(log)}).encode() + b"\n")
            stdin.flush()
        except OSError:
            self.close()
            return None
        number = self._line(ANSWER_S).get("pid")
        started = started_at(number) if isinstance(number, int) else None
        if not isinstance(number, int) or started is None:
            self.close()
            return None
        return ProcessId(number, started)

    def _line(self, within_s: float) -> dict[str, object]:
        """Its next line; nothing where none comes in time."""
        stdout = self._process.stdout
        until_s = time.monotonic() + within_s
        while stdout is not None and b"\n" not in self._read:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                return {}
            more = os.read(stdout.fileno(), 65_536)
            if not more:
                return {}
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """End it; its engines go on."""
        self._ready = False
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.kill()  # it has nothing to put in order, and may have been stopped
        self._process.wait()

"""vLLM's server, imported once and forked for each instance: a tiny model starts in a tenth of the time.

Run as a program it reads lines of JSON and answers each: {"arguments", "environment", "log"} with {"pid"} of a new
instance, {"pid"} with {"code"}, which is none while the instance runs. What it forked ends by itself.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

SERVER = "vllm.entrypoints.openai.api_server"
MODULES = (SERVER, "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.worker.cpu_worker",
           "vllm.model_executor.models.llama", "potluck.vllm.connector")  # fmt: skip


class Forks:
    """The program from outside; one for all tests."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

        atexit.register(self._process.communicate)  # Its input ends, and so does it.

    def ask(self, what: Mapping[str, object]) -> Any:
        inward, outward = self._process.stdin, self._process.stdout
        assert inward is not None
        assert outward is not None
        with self._lock:
            inward.write(json.dumps(what) + "\n")
            inward.flush()
            return json.loads(outward.readline())


class Fork:
    """An instance, as `subprocess.Popen` would have it."""

    def __init__(
        self, forks: Forks, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._forks, self._code = forks, None
        asked = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        self.pid = int(forks.ask(asked)["pid"])

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._forks.ask({"pid": self.pid})["code"]
        return self._code

    def wait(self, timeout: float) -> int:
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired([SERVER], timeout)
            time.sleep(0.05)
        return code


def become(arguments: Sequence[str], environment: Mapping[str, str], log: str) -> None:
    """This process is an instance from now on."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def code(pid: int) -> int | None:
    with suppress(ChildProcessError):
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None
    return 0


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What vLLM prints is no answer.
    for module in MODULES:
        import_module(module)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # None with OMP_NUM_THREADS=1, so far.
        sys.stderr.write(f"{threads} threads run here: a fork may wait for what the others hold\n")
    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            answer: dict[str, int | None] = {"code": code(asked["pid"])}
        elif number := os.fork():
            answer = {"pid": number}
        else:
            become(asked["arguments"], asked["environment"], asked["log"])
            return
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

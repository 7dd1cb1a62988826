"""An actor that looks after one process on its node, and takes it along when it ends. It knows no Ray.

Words of its command that begin and end with a percent sign are filled in there: only a node knows its ports.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from potluck.control.launchers.ports import Ports, healthy
from potluck.control.launchers.process import ProcessId, alive, end, last_words, rotate, spawn
from potluck.core.errors import PotluckError

HOST, PORT, KV_PORT, PYTHON, SECRET_FILE = "%host%", "%port%", "%kv_port%", "%python%", "%secret_file%"
MOST_LOG_BYTES = 65_536
"""Of one report."""
Errand = Literal["engine", "worker", "stand"]
"""An engine answers at its port; a pipeline's worker says its port on its first line; who stands holds a place."""
Report = dict[str, Any]


class ProcessActor:
    """Used from one thread. `here` says the node's address and its name."""

    def __init__(
        self,
        name: str,
        errand: Errand,
        environment: Mapping[str, str],
        secret: str = "",
        python: str = "",
        here: Callable[[], tuple[str, str]] | None = None,
        authority: str = "",
    ) -> None:
        """`authority`: of certificates, where an engine answers over TLS."""
        self._host, self._node = (_here if here is None else here)()
        self._name, self._errand, self._environment = name, errand, dict(environment)
        self._secret, self._python = secret, python or sys.executable
        self._scheme, self._authority = "https" if authority else "http", authority
        folder = Path(tempfile.gettempdir()) / f"potluck-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._log = folder / f"{name.replace('/', '-')}.log"
        self._log.unlink(missing_ok=True)  # of one by this name that was killed
        self._pid: ProcessId | None = None
        self._port = 0
        self._problem = ""
        self._asked = False

    def begin(self, words: Sequence[str], kv_ports: int = 1) -> None:
        """Start the process; once, however often it is asked for."""
        if self._pid is not None or self._problem or not words:
            return
        try:
            ports = Ports(self._host)
            self._port = ports.free() if PORT in words else 0
            filled = self._filled(words, ports.free(kv_ports) if KV_PORT in words else 0)
            told = f"{self._secret}\n" if self._errand == "worker" else ""
            self._pid = spawn(filled, self._environment, self._log, told=told, with_us=True)
        except (PotluckError, OSError) as error:
            self._problem = " ".join(str(error).split())[:300]

    def _filled(self, words: Sequence[str], kv_port: int) -> list[str]:
        values = {HOST: self._host, PORT: str(self._port), KV_PORT: str(kv_port), PYTHON: self._python}
        if SECRET_FILE in words:
            path = self._log.with_suffix(".secret")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(self._secret)
            values[SECRET_FILE] = str(path)
        found = []
        for word in words:
            for token, value in values.items():
                word = word.replace(token, value)
            found.append(word)
        return found

    def report(self, after: int = 0) -> Report:
        """How it fares, and what it wrote since so many bytes."""
        rotate(self._log)
        written, at = self._written(after)
        state, address = self._state()
        problem = self._problem
        if state == "dead" and not problem:
            problem = (
                "was asked to end" if self._asked else last_words(self._log) or "ended and printed nothing"
            )
        return {
            "state": state,
            "address": address,
            "problem": problem,
            "node": self._node,
            "log": written,
            "log_at": at,
        }

    def _state(self) -> tuple[str, str]:
        if self._problem or (self._pid is not None and not alive(self._pid)):
            return "dead", ""
        if self._errand == "stand":
            return "up", self._host
        if self._pid is None:
            return "starting", ""
        if self._errand == "worker":
            said = self._first_line()
            return ("up", f"{self._host}:{said}") if said.isdecimal() else ("starting", "")
        address = f"{self._host}:{self._port}"
        well = healthy(f"{self._scheme}://{address}", authority=self._authority)
        return ("up", address) if well else ("starting", address)

    def _first_line(self) -> str:
        try:
            with self._log.open("rb") as file:
                line = file.readline(20)
        except OSError:
            return ""
        return line.decode("utf-8", "replace").strip() if line.endswith(b"\n") else ""

    def _written(self, after: int) -> tuple[bytes, int]:
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                begin = after if after <= size else 0  # it was rotated
                file.seek(max(begin, size - MOST_LOG_BYTES))
                return file.read(), size
        except OSError:
            return b"", after

    def stop(self, insist: bool = False) -> None:
        """Ask the process to end, or make it."""
        self._asked = True
        if self._pid is None:
            self._problem = "was asked to end"
        else:
            end(self._pid, insist=insist)

    def forget(self) -> None:
        """Remove what it left on the node."""
        self.stop(insist=True)
        self._log.unlink(missing_ok=True)
        self._log.with_suffix(".secret").unlink(missing_ok=True)


def _here() -> tuple[str, str]:
    import ray
    from ray.util import get_node_ip_address

    return str(get_node_ip_address()), str(ray.get_runtime_context().get_node_id())

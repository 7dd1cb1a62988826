"""Gateway and controller of `potluck up` are killed together, again and again, while clients ask.

    python benchmarks/up_kill.py [--quick] [--json] [--seconds 60] [--every 6] [--clients 8] [--whole]

Each client asks for answers of two to four seconds, each under a name of its own (Idempotency-Key), and asks again at
once whenever it is refused, cut off, or answered with an error. Killed are the processes that the state names; with
--whole all of the gateway's. Should `potluck up` itself end, it is started again.

`controller_cpu_s`: what the controller's process tree computes until it has taken its place, the most of all kills.
`no_answer_most_s`: the longest time in which no client received a byte of an answer.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from parts.common import POTLUCK, ROOT, options, run

sys.path.insert(0, str(ROOT / "tools"))

from live_plans import MODEL, WHOLE, write_plans

PATIENCE_S = 60.0


class Service:
    """`potluck up` over a state folder, started again when it ends."""

    def __init__(self, folder: Path) -> None:
        plan, spec = write_plans(folder, WHOLE * 2)
        self.state = folder / "state"
        self._command = [*POTLUCK, "up", str(plan), str(spec), "--json", "--state", str(self.state)]
        self._command += ["--engine", "mock", "--averages", "--port", "0"]
        self._log = (folder / "up.log").open("w")
        self.starts = 0
        self._struck = 0  # The controller that was killed, until another has its place.
        self.controller_cpu_s: list[float] = []
        self.process = self._started(subprocess.PIPE)
        assert self.process.stdout is not None
        self.url = str(json.loads(self.process.stdout.readline())["url"])

    def _started(self, out: int) -> subprocess.Popen[str]:
        self.starts += 1
        return subprocess.Popen(self._command, stdout=out, stderr=self._log, text=True)

    def place(self, name: str) -> int:
        with sqlite3.connect(self.state / "state.db", timeout=10) as db:
            (text,) = db.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
        return int(json.loads(text)["pid"])

    def strike(self, whole: bool) -> None:
        gateway, controller = self.place("gateway"), self.place("controller")
        self._struck = controller
        for pid in (gateway, *(children_of(gateway) if whole else ()), controller):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def look(self) -> None:
        if self.process.poll() is not None:
            self.process = self._started(subprocess.DEVNULL)
        with suppress(sqlite3.Error):
            if self._struck and (pid := self.place("controller")) != self._struck:
                self._struck = 0
                self.controller_cpu_s.append(cpu_s_of(pid))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        time.sleep(1.0)
        command = [*POTLUCK, "down", "--state", str(self.state)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=self._log, check=False)


def children_of(pid: int) -> list[int]:
    try:
        return [int(part) for part in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def cpu_s_of(pid: int) -> float:
    """CPU time of a process, its children and those that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own_s + sum(map(cpu_s_of, children_of(pid)))


class Clients:
    def __init__(self, url: str, count: int) -> None:
        self._at = url.removeprefix("http://")
        self.counts: Counter[str] = Counter()
        self.took_s: list[float] = []
        self.heard_s = [time.monotonic()]
        self.over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, place: int) -> None:
        drawn, number = random.Random(place), 0
        while not self.over.is_set():
            number += 1
            body = {"model": MODEL, "prompt": [5 + place, 6, number], "max_tokens": drawn.randint(60, 120)}
            body |= {"stream": True, "ignore_eos": True}
            began_s = time.monotonic()
            while time.monotonic() - began_s < PATIENCE_S and not self.over.is_set():
                how = self._once(json.dumps(body), f"{place}-{number}")
                self.counts[how] += 1
                if how == "answered":
                    self.took_s.append(time.monotonic() - began_s)
                    break
                time.sleep(0.01)

    def _once(self, body: str, name: str) -> str:
        connection = http.client.HTTPConnection(self._at, timeout=30)
        try:
            try:
                connection.connect()
            except OSError:
                return "refused"
            connection.request("POST", "/v1/completions", body, {"Idempotency-Key": name})
            answer = connection.getresponse()
            data = b""
            while part := answer.read1(65536):
                self.heard_s.append(time.monotonic())
                data += part
            if answer.status != 200:
                return f"status {answer.status}"
            if not data.endswith(b"[DONE]\n\n") or b'"error"' in data:
                return "broke off"
            self.counts["replayed"] += answer.headers.get("x-potluck-replayed") is not None
            return "answered"
        except (OSError, http.client.HTTPException):
            return "cut off"
        finally:
            connection.close()

    def close(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(40)


def measure(seconds: float, every_s: float, count: int, whole: bool) -> dict[str, float]:
    service = Service(Path(tempfile.mkdtemp(prefix="potluck-up-kill-")))
    try:
        clients = Clients(service.url, count)
        began_s, struck = time.monotonic(), 0
        while time.monotonic() - began_s < seconds:
            if time.monotonic() - began_s > (struck + 1) * every_s:
                struck += 1
                service.strike(whole)
            service.look()
            time.sleep(0.02)
        ended_s = time.monotonic()
        clients.close()
        records = [json.loads(line) for line in (service.state / "usage.jsonl").read_text().splitlines()]
    finally:
        service.close()
    heard_s = [*sorted(at_s for at_s in clients.heard_s if at_s < ended_s), ended_s]
    billed = {record.get("id", place) for place, record in enumerate(records) if record["status"] == 200}
    answered = clients.counts["answered"]
    return {
        "struck": struck,
        "up_started": service.starts,
        **{name.replace(" ", "_"): number for name, number in sorted(clients.counts.items())},
        "refused": clients.counts["refused"],
        "answered": answered,
        "answer_p50_s": statistics.median(clients.took_s or [0.0]),
        "answer_most_s": max(clients.took_s, default=0.0),
        "no_answer_most_s": max((later - one for one, later in pairwise(heard_s)), default=0.0),
        "controller_cpu_s": max(service.controller_cpu_s, default=0.0),
        "unbilled": max(0, answered - len(billed)),
    }


if __name__ == "__main__":
    given = options(seconds=0.0, every=6.0, clients=8, whole=False)
    run(
        "up_kill",
        lambda quick: measure(
            given.seconds or (15.0 if quick else 60.0), given.every, given.clients, given.whole
        ),
        {
            "refused": ("<=", 0.0),
            "answered": (">=", 1.0),
            "unbilled": ("<=", 0.0),
            "controller_cpu_s": ("<=", 1.0),
        },
        quick_without="most of the time",
    )

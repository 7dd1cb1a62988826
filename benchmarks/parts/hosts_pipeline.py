"""A pipeline over three hosts beside an engine in one process: the same answers, and stages that die come back.

Stage 0 has 2 layers, on the engine's own host; stage 1 has 4, on two workers with hosts of their own that share the
requests. Both engines compute the model that ships. Workers are started again by whoever looks after them.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import host_bed
from hosts_fleet import ENGINE_KEY, HostsFleet
from live_fleet import Process
from live_plans import MODEL, WHOLE, write_plans

from parts.common import WORDS, say
from parts.hosts_load import Load, within, wrong

PORT, OUTPUT = 7000, 24
SECRET = "what the workers of this pipeline know"


class PipelineFleet(HostsFleet):
    """The first replica is the pipeline, the second one process; hosts 2 and 3 have the second stage's workers."""

    def __init__(self, bed: host_bed.Bed, plan: Path, spec: Path) -> None:
        super().__init__(bed, plan, spec, gateway=("--files", f"{MODEL}={WORDS}"))
        self._secret_file = self.folder / "pipeline.secret"
        self._secret_file.write_text(SECRET)
        self.places = [self.engine_hosts[place] for place in (0, 2, 3)]
        self.workers = [self._worker(host) for host in self.places]
        self._enough = threading.Event()
        self._upkeep = threading.Thread(target=self._look_after, daemon=True)

    def _worker(self, host: host_bed.Host) -> Process:
        at = f"{host.address}:{PORT}"
        tls = ["--tls", *self._shown(host), str(self.authority)]
        line = shlex.join([sys.executable, "-m", "potluck.engine.pipeline", "--listen", at, "--stay", *tls])
        words = ["sh", "-c", f"exec {line} < {shlex.quote(str(self._secret_file))}"]
        return Process(host.inside(words), self.folder / f"worker-{host.address}.log", self._env)

    def _start_engines(self) -> None:
        for worker in self.workers:
            worker.start()
        for item in self.workers:
            assert item.popen is not None
            assert item.popen.stdout is not None
            item.popen.stdout.readline()
        self._upkeep.start()
        super()._start_engines()

    def _look_after(self) -> None:
        while not self._enough.wait(0.1):
            for worker in self.workers:
                if worker.popen is not None and worker.popen.poll() is not None and not self._enough.is_set():
                    assert worker.popen.stdout is not None
                    worker.popen.stdout.close()
                    worker.start()

    def _engine_process(self, like: str, model: str, name: str) -> Process:
        process = super()._engine_process(like, model, name)
        words = process.arguments
        place = words.index("--emulate")
        del words[place : place + 2]
        words.remove("--mock")
        if not self.engines:
            one, two, three = (f"{host.address}:{PORT}" for host in self.places)
            words += ["--stages", f"2@{one},4@{two}+{three}", "--secret-file", str(self._secret_file)]
        return process

    def status(self) -> dict[str, Any]:
        url = str(self.engine_list[0]["url"])
        request = urllib.request.Request(f"{url}/status", headers={"Authorization": f"Bearer {ENGINE_KEY}"})
        with urllib.request.urlopen(request, timeout=10, context=self.tls) as answer:
            return dict(json.load(answer))

    def leave_out_the_other(self, cordoned: bool) -> None:
        """The engine in one process gets nothing new, or again."""
        node = {"node": self.engine_hosts[1].address}
        if bool(self.ask(0, "/wanted")["cordoned"]) != cordoned:
            self.ask(0, "/cordon" if cordoned else "/uncordon", node)

    def close(self) -> None:
        self._enough.set()
        if self._upkeep.ident is not None:
            self._upkeep.join()
        super().close()
        for worker in self.workers:
            worker.end()


def pipeline(quick: bool) -> dict[str, float]:
    """First all requests are the pipeline's, since the other engine is cordoned: what it loses waits until it is
    whole again. Then the other serves as well, and takes over what is lost."""
    figures: dict[str, float] = {}
    requests = 4 if quick else 15
    with tempfile.TemporaryDirectory() as name, host_bed.Bed(5) as bed:
        plan, spec = write_plans(Path(name), WHOLE * 2)
        with PipelineFleet(bed, plan, spec) as fleet:
            fleet.leave_out_the_other(True)
            load = Load(fleet, 1.0, output=OUTPUT)
            load.start()
            figures |= killed(fleet, load, requests, "alone")
            lasts(load, requests)
            alone = len(load.shots)
            figures |= killed(fleet, load, requests, "beside")
            shots = load.sent()
            result = wrong(fleet, shots, by=1)
    for line in result:
        say(f"wrong: {line}")
    waits_s = [max(shot.longest_gap_s, shot.ttft_s) for shot in shots]
    return figures | {
        "pipeline_requests": len(shots),
        "pipeline_requests_alone": alone,
        "pipeline_wrong": len(result),
        "pipeline_wait_most_alone_s": max(waits_s[:alone]),
        "pipeline_wait_most_beside_s": max(waits_s[alone:]),
    }


def killed(fleet: PipelineFleet, load: Load, requests: int, kind: str) -> dict[str, float]:
    """One of a stage's two workers, then the only one of the other: when it is noticed, and when all is well."""
    figures = {}
    serving = fleet.serving()
    for what, worker in (("one_of_two", 1), ("only", 0)):
        lasts(load, requests)
        within(lambda: fleet.status()["running"] > 0)
        if kind == "beside":  # it has something to take over, and may
            fleet.leave_out_the_other(False)
        fleet.workers[worker].send(signal.SIGKILL)
        began_s = time.monotonic()
        within(lambda: fleet.status()["state"] in ("degraded", "failed"))
        figures[f"pipeline_{kind}_{what}_noticed_s"] = time.monotonic() - began_s
        within(lambda: settled(fleet, serving), 240.0)
        figures[f"pipeline_{kind}_{what}_back_s"] = time.monotonic() - began_s
        if kind == "beside":
            lasts(load, requests)
        fleet.leave_out_the_other(True)
    return figures


def settled(fleet: PipelineFleet, serving: int) -> bool:
    return fleet.status()["state"] == "ready" and fleet.serving() == serving


def lasts(load: Load, requests: int) -> None:
    sent = len(load.shots)
    within(lambda: len(load.shots) >= sent + requests, 240.0)

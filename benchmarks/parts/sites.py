"""The case study's fleet, live at two sites: engines as processes in network namespaces, a shaped link between them.

One real byte crosses for BYTES_PER_REAL of KV, and the link has so much less bandwidth, so that TCP, its queue and
what becomes of it are real. Without root all of it is on one host, and mock engines pretend the link.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parts.adapt_rig import shots_of_load
from parts.adapt_scenarios import post
from parts.case_study import FAR, LONGEST, NAME, THRESHOLD, Arrangement, write_plan, write_profiles
from parts.case_study import MODEL as CATALOG_MODEL
from parts.common import ROOT
from potluck.loadgen.load_client import TimedRequest, shoot
from potluck.sim.load.workload import Workload, workload

sys.path.insert(0, str(ROOT / "tools"))
from host_bed import Bed, missing
from hosts_fleet import HostsFleet
from live_fleet import LiveFleet, Process, emulated

BYTES_PER_REAL = 100.0
PROMPTS = ("--max-running", "1", "--token-budget", str(LONGEST))
BARE = ("--prefix-cache-mb", "0")
"""No two prompts begin alike; where states are kept, a prompt's last few tokens are a step of their own."""
LOOK_S, NEVER_S = 0.5, 1e3


class Sites(LiveFleet):
    """One process for all engines of a kind; they are busy with waiting."""

    flags: dict[str, tuple[str, ...]]

    def _start_engines(self) -> None:
        counts = {deployment.template: deployment for deployment in self.plan.deployments}
        for template, deployment in counts.items():
            like = emulated(self.plan.template(template).replicas[0].layout, CATALOG_MODEL)
            process = self._engine_process(like, NAME, template)
            process.arguments += (*self.flags[template], "--count", str(deployment.count))
            process.start()
            self.engines.append(process)
        for process, deployment in zip(self.engines, counts.values(), strict=True):
            for _ in range(deployment.count):
                entry = {"template": deployment.template, "index": 0, "region": deployment.region}
                self.engine_list.append({**entry, "url": process.hear()["url"]})

    def set_link(self, gbps: float) -> None:
        """Without namespaces engines pretend that they share a link."""
        urls = [str(entry["url"]) for entry in self.engine_list if entry["region"] == FAR]
        for url in urls:
            post(f"{url}/network", {"gbps": max(gbps / len(urls), 1e-3)})

    def crossed_bytes(self) -> float:
        return 0.0

    def ask(self, gateway: int, path: str) -> Any:
        with urllib.request.urlopen(f"{self.admin}{path}", timeout=10) as answer:
            return json.loads(answer.read())


class TwoSites(Sites, HostsFleet):
    """The bed's first host is the far site; the second the near one, with the gateway."""

    ask = HostsFleet.ask

    def _engine_process(self, like: str, model: str, name: str) -> Process:
        self.engine_hosts = [self.bed.hosts[0 if name == FAR else 1]] * (len(self.engines) + 1)
        process = super()._engine_process(like, model, name)
        process.arguments += ("--bytes-per-real", str(BYTES_PER_REAL))
        return process

    def serving(self, gateway: int = 0) -> int:
        return len(self.engines) if super().serving(gateway) == len(self.engine_list) else 0

    def set_link(self, gbps: float) -> None:
        """0: cut."""
        far = self.bed.hosts[0]
        if gbps:
            self.bed.slow(far, gbps * 1e9 / BYTES_PER_REAL)
        (self.bed.mend if gbps else self.bed.cut)(far)

    def crossed_bytes(self) -> float:
        """That left the far site, in bytes of KV: headers, answers to health checks and TLS are in them."""
        return self.bed.sent_bytes(self.bed.hosts[0]) * BYTES_PER_REAL


@dataclass
class Look:
    at_s: float
    crossed_bytes: float
    queued_bytes: float  # That wait to leave the far site.


@dataclass
class Run:
    """What was seen of one load: its requests, and the link twice a second."""

    shots: list[TimedRequest]
    looks: list[Look] = field(default_factory=list)
    cpu_share: float = 0.0  # Of this machine, all processes of the fleet and the client.


@contextmanager
def serving(folder: Path, what: Arrangement, gbps: float, policy: Sequence[str] = ()) -> Iterator[Sites]:
    h200, h20 = write_profiles(folder)
    plan, spec = write_plan(folder, what, gbps)
    gateway = ("--profile", str(h20), *(f"--policy={rule}" for rule in policy))
    gateway += ("--profile", str(h200)) if what.far else ()
    flags = {
        "far": (*PROMPTS, *BARE, "--profile", str(h200)),
        "prefill": (*PROMPTS, *BARE, "--profile", str(h20)),
        "decode": (*BARE, "--profile", str(h20)),
    }
    Sites.flags = flags
    if missing():
        with Sites(plan, spec, gateway=gateway) as fleet:
            fleet.set_link(gbps)
            warm(fleet)
            yield fleet
        return
    with Bed(2) as bed, TwoSites(bed, plan, spec, gateway=gateway) as sites:
        sites.set_link(gbps)
        warm(sites)
        yield sites


def warm(fleet: Sites) -> None:
    """What a process loads at its first hand-over is loaded; few, or t would rise for those that wait."""
    lengths = np.tile([300, THRESHOLD + 600], 2)
    shots = shots_of_load(
        workload(NAME, np.zeros(len(lengths)), lengths, np.full(len(lengths), 2)), fleet.key, 1
    )
    shoot(fleet.url, shots, within_s=120.0, tls=fleet.tls)


def fired(fleet: Sites, workload: Workload, happens: Sequence[tuple[float, Callable[[], None]]] = ()) -> Run:
    """All requests in time, and what happens meanwhile at its time; returns when all are answered."""
    run = Run(shots_of_load(workload, fleet.key))
    pids = [process.popen.pid for process in _processes(fleet) if process.popen is not None]
    before_s, began_s, due = _cpu_s(pids), time.monotonic(), list(happens)
    client = threading.Thread(
        target=shoot, args=(fleet.url, run.shots), kwargs={"within_s": 600.0, "tls": fleet.tls}
    )
    client.start()
    while client.is_alive():
        client.join(LOOK_S)
        now_s = time.monotonic() - began_s
        while due and due[0][0] <= now_s:
            due.pop(0)[1]()
        queued = sum(
            link["queued_bytes"] for link in fleet.ask(0, "/snapshot")["links"] if link["source"] == FAR
        )
        run.looks.append(Look(now_s, fleet.crossed_bytes(), queued))
    lasted_s = time.monotonic() - began_s
    run.cpu_share = (_cpu_s(pids) - before_s) / lasted_s / (os.cpu_count() or 1)
    return run


def _processes(fleet: LiveFleet) -> list[Process]:
    gateways = [gateway.process for gateway in getattr(fleet, "gateways", ())]
    return [*fleet.engines, *gateways, *([fleet.gateway] if fleet.gateway else [])]


def _cpu_s(sessions: Sequence[int]) -> float:
    """Of all processes that those started, and this one."""
    total, mine = 0, set(sessions)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it is gone
            continue
        if int(words[3]) in mine:
            total += int(words[11]) + int(words[12])
    return total / os.sysconf("SC_CLK_TCK") + time.process_time()

"""The controller of the service in `adapt.py` is killed, again and again, while it has something to do."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

from parts.adapt_rig import Phase, Rig, Seen, service
from parts.adapt_scenarios import (
    OUTPUT,
    PROMPT,
    Figures,
    Say,
    after,
    plan_as,
    report,
    told,
    write_plan,
    write_spec,
)
from potluck.control.manual_changes import BY_HAND, scaled
from potluck.control.state_store import StateStore

KILLS = 20


def restarts(folder: Path, seed: int, say: Say) -> Figures:
    """The controller is killed twenty times while copies are asked for and taken back; the gateway serves on."""
    spec = write_spec(folder, 3.0, "{node: 1xL4, available: 8}")
    plan = plan_as("melange", spec)
    (template,) = (each.template for each in plan.deployments)
    chance = random.Random(seed)
    files = [write_plan(plan, spec), spec]
    with service(folder, files, {}) as rig:
        script = Path(__file__).with_name("adapt_controller.py")
        rig.command = [sys.executable, str(script), str(rig.store.path.parent), str(spec), str(files[0])]
        twice = Twice(rig)
        with rig.loaded([Phase(KILLS * 7.0 + 30.0, 1.5, PROMPT, OUTPUT)], seed):
            twice.start()
            begun_s = rig.now_s
            for _ in range(KILLS):
                count = chance.randint(1, 4)
                _scale(rig, template, count)
                time.sleep(chance.uniform(0.0, 3.0))
                rig.process.kill()
                rig.process.wait()
                say(f"  {rig.now_s:7.2f}  killed; {count} copies wanted, {len(rig.engines())} engines there")
                rig.again()
                rig.controlled(30.0)
            _scale(rig, template, 2)
            killed_s = rig.now_s

            def settled(look: Seen) -> bool:
                return look.ready() == len(look.replicas) == 2 and len(rig.engines()) == 2

            done_s = rig.wait_for(settled, 60.0)
            known = {each.name for each in rig.store.instances()}
            orphans = [name for _, name in rig.engines() if name not in known]
            twice.end()
        report(rig, say)
        return {
            **told(rig, begun_s, killed_s),
            "kills": KILLS,
            "starts": len(rig.notes("start")),
            "settled_s": after(done_s, killed_s),
            "orphans": len(orphans),
            "twice": twice.seen,
        }


class Twice(threading.Thread):
    """Looks for replicas that two engines are at once."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(daemon=True)
        self._path, self._rig = rig.store.path, rig
        self._over = threading.Event()
        self.seen = 0

    def run(self) -> None:
        store = StateStore(self._path)
        while not self._over.wait(0.2):
            lives = {name for _, name in self._rig.engines()}
            there = [each.replica for each in store.instances() if each.replica and each.name in lives]
            self.seen += len(there) - len(set(there))
        store.close()

    def end(self) -> None:
        self._over.set()
        self.join()


def _scale(rig: Rig, template: str, count: int) -> None:
    """As `potluck scale` does."""
    newest = rig.store.plan()
    assert newest is not None
    plan = scaled(newest.plan, template, "east", count, {"east": 0.6})
    rig.client.set_plan(plan)
    rig.store.add_plan(plan, time.time(), f"{BY_HAND}: {count} copies")

"""The end of a service on this machine, whoever brings it about: its controller, or an operator without one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from potluck.control.accounts import count_all
from potluck.control.launchers.launcher import Killer, Launcher, Place
from potluck.control.launchers.local_launcher import engines_of
from potluck.control.launchers.process import ProcessId, alive, end, marked
from potluck.control.restart_gateway import GATEWAY_MARK
from potluck.control.store.state_store import StateStore

DRAIN_S = 45.0
"""In which a gateway lets what is open end."""
ENGINES_S = 15.0
INSIST_S = 5.0


def pid_of(place: Mapping[str, object] | None) -> ProcessId | None:
    """A process that was written down."""
    number, started = (place or {}).get("pid"), (place or {}).get("started")
    return ProcessId(number, started) if isinstance(number, int) and isinstance(started, int) else None


def living(place: Mapping[str, object] | None) -> bool:
    pid = pid_of(place)
    return pid is not None and alive(pid)


def wait(pids: Iterable[ProcessId], within_s: float) -> list[ProcessId]:
    """Those that have not ended by then."""
    until_s = time.monotonic() + within_s
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.05)
    return left


def owner_of(store: StateStore) -> str:
    """The mark that engines of this state carry."""
    return str(store.path.resolve())


def gateways_of(store: StateStore) -> list[ProcessId]:
    """The gateway's supervisor, and whoever answers, which may outlive it."""
    written = pid_of(store.get("gateway"))
    found = [pid for pid, _ in marked(GATEWAY_MARK, str(store.path.parent.resolve()))]
    return list(dict.fromkeys([*([written] if written is not None else []), *found]))


def stop_all(store: StateStore, why: str, within_s: float = DRAIN_S, launcher: Launcher | None = None) -> int:
    """The gateway drains and ends, then the engines; how many processes had to be made to end. `launcher` is who
    started engines elsewhere."""
    gateways = gateways_of(store)
    for pid in gateways:
        end(pid)
    wait(gateways, within_s)
    places = store.places()
    elsewhere = 0 if launcher is None else _ended(launcher, places)
    found = [pid_of(place) for place in places.values()]
    # Those that were started and never written down carry the mark all the same.
    found += engines_of(owner_of(store))
    pids = list({pid for pid in [*gateways, *found] if pid is not None})
    for pid in pids:
        end(pid)
    left = wait(pids, ENGINES_S)
    for pid in left:
        end(pid, insist=True)
    wait(left, INSIST_S)
    count_all(store, store.path.parent, time.time())
    for name in places:
        store.remove(name)
    store.set("gateway", None)
    store.note(time.time(), "down", "all was stopped", why)
    return len(left) + elsewhere


def _dead(launcher: Launcher, places: dict[str, Place]) -> set[str]:
    """Those that are known to be; one that nothing is heard of may still be there."""
    return {each.name for each in launcher.look(places) if each.state == "dead"}


def _ended(launcher: Launcher, places: dict[str, Place]) -> int:
    """A launcher's engines are asked to end, and made to; how many had to be."""
    for name, place in places.items():
        launcher.stop(name, place)
    made = 0
    for within_s in (ENGINES_S, INSIST_S):
        until_s = time.monotonic() + within_s
        while left := sorted(places.keys() - _dead(launcher, places)):
            if time.monotonic() > until_s:
                break
            time.sleep(0.2)
        for name in left:
            if within_s == ENGINES_S and isinstance(launcher, Killer):
                launcher.kill(name, places[name])
                made += 1
    return made

"""What is always true of a world, whatever befalls it."""

from __future__ import annotations

import re
from collections import Counter, deque
from functools import partial
from math import inf
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from potluck.gateway.admin.counters import Counters
from potluck.gateway.admin.families import FAILURES
from potluck.gateway.core import GatewayCore
from potluck.gateway.workers.worker import Worker
from worlds.clients import KEYED, text_of

if TYPE_CHECKING:
    from worlds.clients import Outcome
    from worlds.world import World

WATCH = "HealthChecker._watch"
NOTICED_S = 3.0  # In which a client's end is noticed.
SYNCED_S = 2.5  # In which a record of use outlives the machine's power: it is looked at once in a second.
SERVED_S = 30.0  # Whoever waits is served in so long a time in which nothing befalls an engine.
LASTING = {"serve", "work", "_flush", WATCH}  # Tasks that a gateway's processes always have.
HISTORIES = {
    *("Dispatcher._ended", "Requests._ended", "Waterfall._ended", "Waterfall._rows"),
    *("Counters._ended", "WorkerMeter._ended", "PageHistory._noted"),
    "WaitingRequests._expiries",
}
"""Where requests that have ended are still named, each with a limit of its own."""


def outcome(world: World, seen: Outcome) -> None:
    """An accepted request ends once, with the right tokens or an error that its client can act on."""
    name = f"request {seen.ask.number} ({seen.ask.how})"
    if not seen.begins_right:
        world.breaks(f"{name}: wrong tokens")
        world.loop.told("tokens", "got", repr(seen.text))
        world.loop.told("tokens", "right", repr(text_of(seen.ask.answer())))
    elif seen.code == "never":
        world.breaks(f"{name}: was never answered")
    elif seen.ask.status == 401:
        if seen.status not in (401, 0):
            world.breaks(f"{name}: a key that is none (any more) was answered {seen.status}")
    elif seen.status == 200:
        if not seen.right:
            world.breaks(f"{name}: not all of its answer, or other counts: {seen.finish} {seen.usage}")
    elif not seen.left and not excused(world, seen):
        world.breaks(f"{name}: {seen.status} {seen.code} without a reason")


def felt(world: World, where: str, seen: Outcome) -> int:
    """Troubles of a host that this request may have felt."""
    return sum(
        trouble.where == where and trouble.from_s <= seen.ended_s and trouble.to_s >= seen.began_s
        for trouble in world.troubles
    )


def calm_s(world: World, unit: list[int], seen: Outcome) -> float:
    """How long at most nothing befell these engines while a request was there; for ever where nothing did."""
    names = {f"e{place}" for place in unit}
    felt = sorted((one.from_s, one.to_s) for one in world.troubles if one.where in names)
    felt = [(from_s, to_s) for from_s, to_s in felt if to_s >= seen.began_s and from_s <= seen.ended_s]
    longest_s, at_s = 0.0 if felt else inf, seen.began_s
    for from_s, to_s in (*felt, (seen.ended_s, inf)):
        longest_s, at_s = max(longest_s, from_s - at_s), max(at_s, to_s)
    return longest_s


def excused(world: World, seen: Outcome) -> bool:
    ask = seen.ask
    if any(felt(world, where, seen) for where in ("gw", seen.server, f"c{ask.number % 7}-gw")):
        return True
    if seen.status == 401:  # its key may have been rotated twice while it sent
        return ask.how == "trickles" and world.faults["keys"] > 1
    if felt(world, "brain", seen) and seen.status in (502, 503, 504, 599):
        return True  # workers go on without it: nobody's connection is cut
    if seen.status == 0 and ask.how == "twins":  # what it followed could not be kept, or died with its worker
        workers = range(world.scenario.workers)
        return world.faults["disk_full"] > 0 or any(felt(world, f"worker {n}", seen) for n in workers)
    if seen.status == 429:
        return ask.key == 0 and seen.code == "rate_limit_exceeded" and world.limited
    if seen.status == 408 or (seen.status == 0 and ask.how in ("stalls", "trickles")):
        return ask.how in ("stalls", "trickles") and ask.amount > 0.1
    if seen.status in (502, 503, 504, 599) and seen.code != "internal_error":
        suffering = [place for place in range(len(world.engines)) if felt(world, f"e{place}", seen)]
        well = [unit for unit in world.units(seen.began_s) if calm_s(world, unit, seen) >= SERVED_S]
        troubles = sum(felt(world, f"e{place}", seen) for place in suffering)
        retried = seen.code == "upstream_failed" and (
            troubles > 1 or bool(world.scenario.combos and troubles)
        )
        return not well or retried
    return False


def reached(world: World, seen: Outcome) -> bool:
    """Whether a limit of its key may have been reached by what else was asked with it."""
    limits = dict(world.scenario.limits)
    others = [one for one in world.outcomes if one is not seen and one.ask.key == 0 and one.status != 429]
    others = [one for one in others if one.began_s <= seen.ended_s]
    # What a client left may go on.
    ended = [one.status == 200 and one.ended_s + 1.0 < seen.began_s for one in others]
    if felt(world, "gw", seen) or ended.count(False) >= limits.get("concurrent", 1e9):
        return True
    asked = seen.ask.prompt + seen.ask.most
    most = limits.get("tokens_per_min", 1e9)
    largest = max([one.ask.prompt + one.ask.most for one in others], default=0)  # May leave a debt as large.
    since_s = seen.began_s - 60.0 * (1.0 + largest / most)
    used = [
        one.ask.prompt + (len(one.ask.answer()) if over else one.ask.most)
        for one, over in zip(others, ended, strict=True)
        if one.ended_s >= since_s
    ]
    requests = sum(one.began_s >= since_s for one in others)
    return requests > limits.get("requests_per_min", 1e9) - 1 or sum(used) > most - min(asked, most)


def at_the_end(world: World) -> None:
    """Trouble is over and everybody has gone: nothing is left of it."""
    for client in world.clients:
        if not client.done:
            world.breaks(f"request {client.ask.number} ({client.ask.how}): never ended")
    if world.broken:
        return
    for line in (left_over(world), unsettled(world)):
        if line:
            world.breaks(line)
    _usage(world)
    for seen in world.outcomes:
        if seen.code == "rate_limit_exceeded" and not world.faults["limits"] and not reached(world, seen):
            world.breaks(f"request {seen.ask.number}: is over a limit that its key had not reached")
    if line := uncounted(world):
        world.breaks(line)
    if world.check_log:
        _replays(world)
        _forgets(world)


def left_over(world: World) -> str:
    """Memory, connections and work come back to where they were."""
    for core in world.gateway.made(GatewayCore):
        if core.brain_loop.open_requests or core.brain_loop._owners:
            return f"the Brain still has {core.brain_loop.open_requests} requests"
    for worker in world.gateway.made(Worker):
        left = {name: count for name, count in worker.dispatcher.sizes().items() if count}
        if left or worker.handler.open or len(worker.port):
            return f"a worker still has {left}, {worker.handler.open} open, {len(worker.port)} connections"
        if busy := [name for name, use in worker.keys._allowances.items() if use.open]:
            return f"nothing is under way, and {busy} are said to have something open"
    for process in world.gateway.processes.values():
        tasks = Counter(
            task.get_coro().__qualname__  # type: ignore[union-attr]
            for task, owner in world.loop.tasks.items()
            if owner is process and not task.done()
        )
        if tasks.keys() - LASTING or tasks[WATCH] > len(world.engines):
            return f"{process.name} still has tasks: {dict(tasks)}"
    for engine in world.engines:
        if engine.alive and engine.running:
            return f"{engine.name} still runs {len(engine.running)} segments"
    return ""


def unsettled(world: World) -> str:
    """What is wanted is there."""
    cores = world.gateway.made(GatewayCore)
    if world.gateway.ending:
        return "trouble is over, and the gateway has not ended yet"
    for core in cores:
        lacking = [slot.member.id for slot in core.registry._slots.values() if not slot.ready]
        count = world.scenario.mixed + 2 * world.scenario.combos
        if lacking or len(core.registry.endpoints) != count:
            there = len(core.registry.endpoints)
            return f"trouble is over, and {there} of {count} replicas are ready; lacking {lacking}"
        alive = sum(engine.alive for engine in world.engines)
        if alive != count:
            return f"trouble is over, and {alive} engines run where {count} are wanted"
    return "" if cores else "trouble is over, and there is no gateway"


def unwritten(world: World, seen: Outcome) -> bool:
    """Whether its record may have waited in the memory of a process that died: the disk was full, and no room of it
    was reserved for records."""
    if not world.faults["disk_full"] or world.gateway.host.reserves:
        return False
    return world.gateway.starts > world.scenario.workers + (world.scenario.workers > 1)


def uncounted(world: World) -> str:
    """Metrics have every failed attempt; those of a process that was killed are lost with it."""
    if world.gateway.starts > world.scenario.workers + (world.scenario.workers > 1):
        return ""
    told = sum(len(getattr(process, "failed_attempts", ())) for process in world.gateway.processes.values())
    counted = sum(sum(meter.counted(FAILURES).values()) for meter in world.gateway.made(Counters))
    return "" if counted >= told else f"{told} attempts failed, and metrics have {counted:g}"


def _usage(world: World) -> None:
    import json

    records: dict[str, dict[str, object]] = {}
    for path in sorted(world.gateway.usage.parent.glob("usage*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            records.setdefault(record["id"], record)
    delivered: dict[str, Outcome] = {seen.word: seen for seen in world.outcomes if seen.status == 200}
    for word, seen in delivered.items():
        record = records.get(word)
        if record is None:
            lost = any(at_s - SYNCED_S < seen.ended_s and seen.began_s < at_s for at_s in world.power_lost_s)
            held_up = world.faults["brain_freeze"] + world.faults["brain_kill"]
            if not lost and not (world.power_lost_s and held_up) and not unwritten(world, seen):
                world.breaks(f"request {seen.ask.number}: answered, and no record of its use")
        elif record["output_tokens"] != len(seen.ask.answer()) or record["tenant"] != f"t{seen.ask.key}":
            world.breaks(f"request {seen.ask.number}: its record says {record}")
    for seen in world.outcomes:
        record = records.get(seen.word)
        if record is not None:
            counted: Any = record["output_tokens"]
            brought = world.loop.brought.get(seen.word, 1 << 60) - seen.ask.prompt
            # One with an Idempotency-Key may have been continued under another name.
            if counted < len(seen.text) or (counted > brought and seen.ask.how not in KEYED):
                world.breaks(f"{len(seen.text)} tokens were seen, {brought} were brought of {record}")
            late_s: Any = record["seconds"]
            late_s -= seen.ended_s - seen.began_s
            link = felt(world, f"c{seen.ask.number % 7}-gw", seen) + felt(world, "gw", seen)
            if seen.left and late_s > NOTICED_S and not link:
                world.breaks(f"request {seen.ask.number}: goes on {late_s:.1f} s after its client left")
    whole = [word for word, record in records.items() if record["outcome"] in ("stop", "length")]
    unknown = [word for word in whole if word not in delivered]
    cut = sum(seen.status != 200 for seen in world.outcomes)
    asked = sum(r["key"] == "k0" and r["outcome"] != "limited" for r in records.values())
    most = dict(world.scenario.limits).get("requests_per_min", 1e9)
    if asked > most * (1 + world.loop.now_s / 60) * world.gateway.starts and not world.faults["limits"]:
        world.breaks(f"{asked} requests of a key that may send {most:g} in a minute")
    limit = dict(world.scenario.limits).get("tokens_per_min", 1e9)
    used = [r["prompt_tokens"] + r["output_tokens"] for r in records.values() if r["key"] == "k0"]  # type: ignore[operator]
    # One that asks for more than the limit is let in when nothing else was for a minute.
    may = (limit * (1 + world.loop.now_s / 60) + max(used, default=0)) * world.gateway.starts
    if sum(used) > may and not world.faults["limits"]:
        world.breaks(f"{sum(used)} tokens of a key that may have {limit:g} in a minute")
    if len(unknown) > cut and not world.faults["disk_full"]:
        world.breaks(f"{len(unknown)} records of answers that nobody got")


def _replays(world: World) -> None:
    from potluck.core.brain.brain import Brain
    from potluck.runtime.replay import log_lines, replay

    for core in world.gateway.made(GatewayCore):
        core.logged._out.flush()
    with log_lines([world.gateway.log]) as lines:
        result = replay(lines, Brain)
    if result.difference:
        world.breaks(f"the log replays differently: {result.difference}")


def _forgets(world: World) -> None:
    """No object of the product names a request, but for histories with a limit."""
    words = {*world.loop.sent, *(seen.word for seen in world.outcomes if seen.word)}
    if words:
        names = "|".join(map(re.escape, words))
        held = _named((*world.gateway.made(GatewayCore), *world.gateway.made(Worker)), names)
        if left := held.keys() - HISTORIES:
            where = min(left)
            world.breaks(f"all requests have ended, and {where} still names {held[where]} times one of them")


def _named(roots: tuple[object, ...], names: str) -> Counter[str]:
    """By class and attribute, how often requests are named in what can be reached from there."""
    found, seen = Counter[str](), set[int]()
    patterns = re.compile(names), re.compile(names.encode())
    todo: list[tuple[Any, str]] = [(root, "") for root in roots]
    while todo:
        item, where = todo.pop()
        if isinstance(item, (str, bytes, bytearray)):
            found[where] += patterns[not isinstance(item, str)].search(item) is not None
        elif id(item) not in seen:
            seen.add(id(item))
            todo += _parts(item, where)
    return +found


def _parts(item: Any, where: str) -> list[tuple[Any, str]]:
    if isinstance(item, dict):
        return [(part, where) for pair in item.items() for part in pair]
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return [(part, where) for part in item]
    if isinstance(item, MethodType):
        return [(item.__self__, where)]
    if isinstance(item, partial):
        return [(item.func, where), (item.args, where), (item.keywords, where)]
    if isinstance(item, FunctionType):
        return [(cell.cell_contents, where) for cell in item.__closure__ or ()]
    kind = type(item)
    if not kind.__module__.startswith("potluck."):
        return []
    slots = {name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if hasattr(item, name)}
    return [
        (getattr(item, name), f"{kind.__name__}.{name}") for name in slots | {*getattr(item, "__dict__", ())}
    ]

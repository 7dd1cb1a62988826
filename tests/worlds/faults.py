"""What befalls a world. Each fault is undone after a while, and is noted as trouble for as long as it may be felt."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING

from potluck.gateway.core import GatewayCore
from worlds.engines import LIES
from worlds.loop import SIGTERM
from worlds.virtual import DEAD, Process, lose_power

if TYPE_CHECKING:
    from worlds.world import Fault, World

WIRE = {"flip": "flip", "wire_cut": "cut", "stall": "stall"}


def strike(world: World, fault: Fault) -> None:
    kind = fault.kind
    world.faults[kind] += 1
    world.loop.told("fault", kind, f"{fault.target} for {fault.lasts_s:.2f} s")
    if kind in (*world.engine_faults, *world.link_faults) and not world.engines:
        return
    if kind in world.engine_faults:
        _engine(world, fault, fault.target % len(world.engines))
    elif kind in world.link_faults:
        _link(world, fault)
    elif kind in world.gateway_faults:
        _gateway(world, fault)
    elif kind in world.controller_faults:
        _controller(world, fault)
    elif kind in world.orders:
        _order(world, fault)
    else:
        _other(world, fault)


def _undo(world: World, fault: Fault, call: object) -> None:
    def undone() -> None:
        world.loop.told("over", fault.kind, str(fault.target))
        call()  # type: ignore[operator]

    world.loop.call_later(fault.lasts_s, undone, context=world.kernel)


def _engine(world: World, fault: Fault, place: int) -> None:
    engine = world.engines[place]
    if not engine.alive or engine.process.state != "runs":
        return
    world.troubled(engine.name, fault.lasts_s)
    kind = fault.kind
    if kind in ("die", "restart", "other", "upgrade"):
        engine.process.kill(silent=kind == "die" and fault.amount < 0.3)
        engine.process.host.down = kind == "die" and fault.amount < 0.3
        if world.controller is not None:
            return
        fingerprint = "g" if kind == "other" and len(world.engines) > 1 else engine.fingerprint
        wait_s = fault.lasts_s if kind == "die" else fault.lasts_s / 50

        def again() -> None:
            engine = world.start_engine(place, "mixed", fingerprint)
            if kind == "upgrade":
                engine.kv_version += 1
            if fingerprint != "f":  # somebody puts it right
                world.loop.call_later(fault.lasts_s - wait_s, _put_right, world, place, context=world.kernel)

        world.loop.call_later(wait_s, again, context=world.kernel)
    elif kind == "freeze":
        engine.process.freeze()
        _undo(world, fault, engine.process.thaw)
    elif kind == "stuck":
        engine.stuck = True
        _undo(world, fault, engine.unstick)
    elif kind in WIRE:
        wire = world.loop.wires[engine.name]
        setattr(wire, WIRE[kind], 0.003 + 0.3 * fault.amount**3)
        _undo(world, fault, lambda: setattr(wire, WIRE[kind], 0.0))
    else:
        if kind == "slow":
            engine.slow = 1.5 + 30.0 * fault.amount
        elif kind == "lie":
            engine.lies = LIES if fault.amount < 0.5 else (LIES[int(fault.amount * 100) % len(LIES)],)
        elif kind == "refuse":  # often all of them, as when a whole fleet is full
            for other in world.engines if fault.amount > 0.4 else (engine,):
                other.refuses, other.refusal = 0.3 + fault.amount, fault.target
                world.troubled(other.name, fault.lasts_s)
        else:
            setattr(engine, {"mute": "mute", "forget": "forgets", "wrong_kv": "wrong_kv"}[kind], True)

        def restore() -> None:
            for other in world.engines:
                other.refuses = 0.0
            engine.lies, engine.slow = (), 1.0
            engine.mute = engine.forgets = engine.wrong_kv = False

        _undo(world, fault, restore)


def _put_right(world: World, place: int) -> None:
    engine = world.engines[place]
    if engine.alive and engine.fingerprint != "f":
        engine.process.kill()
        world.troubled(engine.name, 0.0)
        world.start_engine(place, "mixed")


def _link(world: World, fault: Fault) -> None:
    network, chance = world.loop.network, world.loop.chance
    names = [engine.name for engine in world.engines]
    others = ["gw", *names, *(f"c{n}" for n in range(7))]
    one = names[fault.target % len(names)]
    other = others[fault.target // 7 % len(others)] if fault.amount < 0.5 else world.hub
    if one == other:
        other = "gw"
    if other.startswith("c"):
        one = "gw"
    there, back = network.link(one, other), network.link(other, one)
    for name in {one, other}:
        world.troubled(f"{name}-gw" if name.startswith("c") else name, fault.lasts_s)
    if fault.kind in ("cut", "half_cut"):
        cut = [there, back] if fault.kind == "cut" else [chance.choice((there, back))]
        for link in cut:
            link.cut = True
        _undo(world, fault, lambda: [network.heal(link) for link in cut])
    elif fault.kind == "reset":
        for end in network.ends(there, back):
            if chance.random() < 0.7:
                end._reset()
                end.peer._reset()
    else:
        for link in (there, back):
            if fault.kind == "thin":
                link.bytes_per_s = 10 ** (2.0 + 3.0 * fault.amount)
            else:
                link.latency_s += 3.0 * fault.amount

        def restore() -> None:
            for link in (there, back):
                link.latency_s, link.bytes_per_s = network.far.latency_s, network.far.bytes_per_s

        _undo(world, fault, restore)


def _gateway(world: World, fault: Fault) -> None:
    service = world.gateway
    places = [-1] if fault.kind.startswith("brain") or service.workers == 1 else list(range(service.workers))
    place = places[fault.target % len(places)]
    process = service.processes.get(place)
    if process is None:  # real ones take a moment
        return
    struck = fault.kind.partition("_")[0]
    where = {"brain": "brain", "worker": f"worker {place}"}.get(struck, "gw") if service.workers > 1 else "gw"
    world.troubled(where, fault.lasts_s if "freeze" in fault.kind else 0.0)
    if fault.kind == "term":
        if service.ending or any(item.state != "runs" for item in service.processes.values()):
            return
        service.ending = True
        world.troubled("gw", 2 * service.settings.drain_s)
        for item in service.processes.values():
            item.signal(SIGTERM)
    elif fault.kind == "power":
        for number in tuple(service.processes):
            service.kill(number, silent=True)
        lose_power(service.host, world.loop.chance)
        world.power_lost_s.append(world.loop.now_s)
    elif fault.kind.endswith("kill"):
        service.kill(place)
    else:
        process.freeze()
        _undo(world, fault, process.thaw)


def _order(world: World, fault: Fault) -> None:
    """By an operator, about one of the replicas that can be reached."""
    endpoints = [endpoint for core in world.gateway.made(GatewayCore) for endpoint in core.registry.endpoints]
    if not endpoints:
        return
    endpoint = endpoints[fault.target % len(endpoints)]
    process = Process(world.loop, "operator", world.loop.network.host("op"))
    for other in endpoints:  # The replicas of a copy go together.
        if other is endpoint or (other.unit and other.unit == endpoint.unit):
            world.troubled(other.address.host, 30.0 + fault.lasts_s)

    async def ask(path: str) -> None:
        body = json.dumps({"replica": endpoint.replica}).encode()
        head = f"POST /{path} HTTP/1.1\r\nhost: gw\r\nauthorization: Bearer operators\r\nconnection: close"
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("gw", 8001)
            writer.write(head.encode() + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            answer = await reader.read()
            writer.close()
            world.loop.told("order", fault.kind, answer[9:12].decode())
            if answer[9:12] == b"500":
                world.breaks(f"an operator's {path} was answered 500")

    def order(path: str) -> None:
        process.remains.append(process.run(world.loop.create_task, ask(path)))

    order(fault.kind)
    if fault.kind == "cordon":
        _undo(world, fault, lambda: order("uncordon"))


def _controller(world: World, fault: Fault) -> None:
    service = world.controller
    if service is None:
        return
    living = [process for process in service.processes if process.state != DEAD]
    if fault.kind == "ctl_kill" and living:
        service.kill(living[fault.target % len(living)])
    elif fault.kind == "ctl_fuse":
        service.fuses.append(1 + fault.target % 40)
    elif fault.kind == "ctl_freeze" and living:
        process = living[fault.target % len(living)]
        process.freeze()
        _undo(world, fault, process.thaw)
        if fault.amount < 0.7:  # somebody thinks that it is dead
            service.start()
    elif fault.kind == "ctl_second" and len(living) < 3:
        service.start()
    elif fault.kind == "ctl_older":
        service.older()
    elif fault.kind == "spawn_fails":
        service.machine.fails_until_s = world.loop.now_s + fault.lasts_s
        for place in range(len(world.engines)):
            world.troubled(f"e{place}", fault.lasts_s)


def _other(world: World, fault: Fault) -> None:
    host = world.gateway.host
    if fault.kind == "keys":
        world.keys.rotate(fault.target % 3, world.loop.now_s)
    elif fault.kind == "limits":
        world.keys.limits = {"concurrent": 1 + fault.target % 4} if world.keys.limits else {}
        world.keys.write()
    elif fault.kind == "disk_full":
        host.full = True
        _undo(world, fault, lambda: setattr(host, "full", False))
    elif fault.kind == "clock":
        host.skew_s += (fault.amount - 0.5) * 7200.0

"""Several hosts on one machine: network namespaces behind a switch, each with an address of its own.

    with Bed(4) as bed:
        one, two, *others = bed.hosts
        subprocess.Popen(one.inside(["python", "-m", "http.server", "--bind", one.address]))
        bed.slow(one, 20e6)     bed.delay(one, 0.015)     bed.cut(two)     bed.mend(two)

`python tools/host_bed.py 2` makes two and keeps them until Ctrl-C, for commands by hand.
This process is on the same network at `bed.address`, so it reaches every host and they reach it. Nothing else of the
machine is touched: the switch has a namespace of its own, and all of it is gone when the block is left. Needs root
on Linux with iproute2; `missing()` says why not.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import secrets
import select
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

NETWORKS = 64
"""Of 10.193.0.0/18, one of which a bed takes: those that are in use on this machine are left alone."""

BURST_S = 0.01  # So much may go at once that would take so long: as little as the kernel's timer allows.


@dataclass(frozen=True)
class Host:
    name: str  # Of its namespace.
    address: str
    port: str  # Of the switch, where its cable ends.

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command that runs there. The process is the caller's own child: `ip` becomes it."""
        return ["ip", "netns", "exec", self.name, *command]


class Bed:
    def __init__(self, hosts: int) -> None:
        self._tag = secrets.token_hex(3)
        self._switch = f"pl-{self._tag}"
        self._stack = ExitStack()
        self._slowed: set[str] = set()
        self._ends: dict[str, str] = {}
        """Of cables that are longer than they seem, where they end at the switch."""
        net = _network()
        self.address = f"{net}.1"
        self.hosts = tuple(Host(f"{self._switch}-{n}", f"{net}.{n + 10}", f"p{n}") for n in range(hosts))

    def __enter__(self) -> Self:
        try:
            self._space(self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            here = f"pl{self._tag}"
            _ip("link", "add", here, "type", "veth", "peer", "name", "here", "netns", self._switch)
            self._stack.callback(_ip, "link", "del", here)
            self._plug("here")
            _ip("address", "add", f"{self.address}/24", "dev", here)
            _ip("link", "set", here, "up")
            for host in self.hosts:
                self._space(host.name)
                end = ("type", "veth", "peer", "name", host.port, "netns", self._switch)
                _ip("-n", host.name, "link", "add", "eth0", *end)
                self._plug(host.port)
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
                _ip("-n", host.name, "link", "set", "eth0", "up")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cut(self, host: Host) -> None:
        """Nothing reaches it or leaves it any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self._ends.get(host.port, host.port), "nomaster")

    def mend(self, host: Host) -> None:
        self._plug(self._ends.get(host.port, host.port))

    def delay(self, host: Host, delay_s: float) -> None:
        """Packets take so much longer each way, from now on: a process holds them back, as not every kernel can."""
        near, far = f"d{host.port}", f"e{host.port}"
        _ip("-n", self._switch, "link", "add", near, "type", "veth", "peer", "name", far)
        _ip("-n", self._switch, "link", "set", near, "up")
        _ip("-n", self._switch, "link", "set", host.port, "nomaster")
        self._ends[host.port] = far
        self._plug(far)
        words = [sys.executable, __file__, host.port, near, str(delay_s)]
        process = subprocess.Popen(["ip", "netns", "exec", self._switch, *words])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def slow(self, host: Host, bits_per_s: float, burst_bytes: int = 0, latency_ms: int = 400) -> None:
        """Both ways, so much and no more; packets wait for at most so long."""
        burst_bytes = burst_bytes or max(2048, round(bits_per_s / 8 * BURST_S))
        bucket = f"root tbf rate {bits_per_s:.0f}bit burst {burst_bytes} latency {latency_ms}ms".split()
        _run("tc", "-n", host.name, "qdisc", "replace", "dev", "eth0", *bucket)
        _run("tc", "-n", self._switch, "qdisc", "replace", "dev", host.port, *bucket)
        self._slowed.add(host.name)

    def full_speed(self, host: Host) -> None:
        if host.name in self._slowed:
            self._slowed.remove(host.name)
            _run("tc", "-n", host.name, "qdisc", "del", "dev", "eth0", "root")
            _run("tc", "-n", self._switch, "qdisc", "del", "dev", host.port, "root")

    def sent_bytes(self, host: Host) -> int:
        """That have left it since it is there."""
        (card,) = json.loads(_run("ip", "-n", host.name, "-s", "-j", "link", "show", "eth0"))
        return int(card["stats64"]["tx"]["bytes"])

    def _space(self, name: str) -> None:
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _plug(self, port: str) -> None:
        _ip("-n", self._switch, "link", "set", port, "up", "master", "switch")


SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING = 263, 15, 4
MOST_BYTES = 1 << 17  # Of what the kernel hands over at once: a header of its own, and many packets as one.


def hold_back(first: str, second: str, delay_s: float) -> None:
    """Pass what comes in by either card out by the other, so much later. Lengths and checksums stay the kernel's."""
    cards = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in range(2)]
    for card, name in zip(cards, (first, second), strict=True):
        card.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        card.bind((name, 0))
        card.setblocking(False)
    held: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        for card in select.select(cards, (), (), wait_s)[0]:
            frame, about = card.recvfrom(MOST_BYTES)
            if about[2] != PACKET_OUTGOING:
                held.append((time.monotonic() + delay_s, cards[card is cards[0]], frame))
        while held and held[0][0] <= time.monotonic():
            with suppress(OSError):  # no room, or the card is gone: lost, as on any way
                held[0][1].send(held[0][2])
            held.popleft()


@functools.cache
def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root on Linux, for network namespaces (sudo)"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs ip and tc: apt-get install iproute2"
    try:
        with Bed(1) as bed:
            bed.slow(bed.hosts[0], 1e9)
    except (subprocess.CalledProcessError, OSError) as error:
        text = getattr(error, "stderr", "") or str(error)
        return f"needs network namespaces ({' '.join(text.split())[:120]})"
    return ""


def _network() -> str:
    """The first three numbers of a network that this machine is not on."""
    shown = _run("ip", "-o", "-4", "address", "show").split()
    taken = [ipaddress.ip_interface(word).network for word in shown if "/" in word and word[0].isdigit()]
    for _ in range(NETWORKS):
        net = f"10.193.{secrets.randbelow(NETWORKS)}"
        if not any(item.overlaps(ipaddress.ip_network(f"{net}.0/24")) for item in taken):
            return net
    raise OSError("all networks that a bed may take are in use")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


EC = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
AUTHORITY = f"req -x509 {EC} -days 3650 -subj /CN=potluck -keyout ca.key -out ca.pem"
REQUEST = f"req -new {EC} -subj /CN=HOST -addext subjectAltName=IP:HOST -keyout HOST.key -out HOST.csr"
CA = "-CA ca.pem -CAkey ca.key -CAcreateserial"
SIGN = f"x509 -req -in HOST.csr {CA} -days 825 -copy_extensions copy -out HOST.pem"


def make_certificates(folder: Path, hosts: Iterable[str]) -> Path:
    """HOST.pem and HOST.key for each address, all signed by `ca.pem`, which is returned."""
    _openssl(AUTHORITY, folder)
    for host in hosts:
        _openssl(REQUEST.replace("HOST", host), folder)
        _openssl(SIGN.replace("HOST", host), folder)
    return folder / "ca.pem"


def _openssl(line: str, folder: Path) -> None:
    subprocess.run(["openssl", *shlex.split(line)], cwd=folder, check=True, capture_output=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        hold_back(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    if missing() or len(sys.argv) != 2:
        sys.exit(missing() or "how many hosts? python tools/host_bed.py 2")
    with Bed(int(sys.argv[1])) as made, suppress(KeyboardInterrupt):
        print(f"this machine is {made.address}; Ctrl-C ends")
        for host in made.hosts:
            print(f"{host.address}  {shlex.join(host.inside(['sh']))}", flush=True)
        time.sleep(1e9)

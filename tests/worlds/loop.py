"""An event loop in virtual time, and the network between its hosts.

When nothing is ready, time jumps to the next timer. What is written in one instant arrives together, after the link's
latency and jitter and as fast as its bandwidth allows; in pieces, where the world says so. A sender may be so far
ahead of its reader as a kernel's buffers allow; beyond that its transport tells its protocol to pause.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import signal
import socket
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from worlds import virtual
from worlds.virtual import DEAD, FROZEN, PROCESS, RUNS, Host, Process

Address = tuple[str, int]
KERNEL = contextvars.Context()
WINDOW_BYTES = 200_000  # Of both kernels' buffers.
HIGH_BYTES, LOW_BYTES = 65_536, 16_384
SYN_S, SYNS = 1.0, 30
ORDER_S = 1e-9  # Between what must come one after the other: timers of one instant have no order.
UNIX = "unix"  # The host of sockets that are files.
RESET = (104, "Connection reset by peer")


@dataclass
class Link:
    """One direction between two hosts."""

    latency_s: float = 2e-4
    jitter_s: float = 1e-4
    bytes_per_s: float = 1e9
    cut: bool = False
    held: list[tuple[Callable[..., None], Socket, tuple[Any, ...]]] = field(default_factory=list)


class Socket(asyncio.Transport):
    __slots__ = (
        "address", "arrives_s", "broken", "buffer", "buffered", "closing", "ended", "fin", "flight", "full", "gone",
        "high", "inbox", "late_s", "link", "low", "network", "peer", "process", "protocol", "reading", "segment",
        "segment_s"
    )  # fmt: skip

    peer: Socket

    def __init__(self, network: Network, process: Process, link: Link, address: Address) -> None:
        self.network, self.process, self.link, self.address = network, process, link, address
        self.protocol: Any = None
        self.buffer: deque[bytes] = deque()
        self.buffered = self.flight = 0
        self.arrives_s = 0.0
        self.segment: list[bytes] = []
        self.segment_s = -1.0
        self.inbox: deque[bytes] = deque()
        self.reading, self.full, self.closing = True, False, False
        self.broken: Exception | None = None  # It was lost before anybody had it.
        self.gone = False  # Its own side is closed: whatever comes is answered with a reset.
        self.fin = False  # The peer sends no more.
        self.ended = False
        self.late_s = -1.0  # Until when what a cut link held back comes first.
        self.high, self.low = HIGH_BYTES, LOW_BYTES
        process.sockets[self] = None

    # What a protocol asks of a transport.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self.peer.address, "sockname": self.address}.get(name, default)

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def is_closing(self) -> bool:
        return self.closing or self.gone

    def is_reading(self) -> bool:
        return self.reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = HIGH_BYTES if high is None else high
        self.low = self.high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self.ended:
            self.ended = True
            self._send(self.peer._finished)

    def write(self, data: Any) -> None:
        if not data or self.closing or self.gone or self.ended:
            return
        data = bytes(data)
        if self.buffered or self.flight + len(data) > WINDOW_BYTES:
            self.buffer.append(data)
            self.buffered += len(data)
            self._pump()
            if self.buffered > self.high and not self.full:
                self.full = True
                self.protocol.pause_writing()
        else:
            self._transmit(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        if not self.reading:
            self.reading = True
            self.network.loop.call_soon(self._read, context=self.process.context)

    def close(self) -> None:
        if not self.closing and not self.gone:
            self.closing = True
            self.reading = False
            if not self.buffered:
                self._leave(None)

    def abort(self) -> None:
        if not self.gone:
            self.closing = True
            self.buffer.clear()
            self.buffered = 0
            self._leave(self.peer._reset)

    # Bytes on their way.

    def _transmit(self, data: bytes) -> None:
        loop, link = self.network.loop, self.link
        self.flight += len(data)
        if self.segment_s == loop.now_s:
            self.segment.append(data)
            return
        self.segment, self.segment_s = [data], loop.now_s
        wait_s = link.latency_s + link.jitter_s * loop.chance.random() + len(data) / link.bytes_per_s
        due_s, least_s = loop.now_s + wait_s, self.arrives_s + ORDER_S
        self.arrives_s = due_s = due_s if due_s > least_s else least_s
        loop.call_at(due_s, self.peer._arrived, self.segment, context=KERNEL)

    def _pump(self) -> None:
        while self.buffer and self.flight < WINDOW_BYTES and not self.gone:
            data = self.buffer.popleft()
            if len(data) > WINDOW_BYTES:
                self.buffer.appendleft(data[WINDOW_BYTES:])
                data = data[:WINDOW_BYTES]
            self.buffered -= len(data)
            self._transmit(data)
        if self.full and self.buffered <= self.low and not self.gone:
            self.full = False
            self.protocol.resume_writing()
        if self.closing and not self.buffered and not self.gone:
            self._leave(None)

    def _send(self, what: Callable[..., None], *given: Any) -> None:
        """Something without bytes, behind those that were sent. The kernel hears it, whatever its process does."""
        loop = self.network.loop
        self.arrives_s = due_s = max(loop.now_s + self.link.latency_s, self.arrives_s + ORDER_S)
        loop.call_at(due_s, what, *given, context=KERNEL)

    def _leave(self, how: Callable[[], None] | None) -> None:
        self.gone = True
        self._send(how or self.peer._finished)
        self.network.loop.call_soon(self._lost, None, context=self.process.context)

    def _lost(self, error: Exception | None) -> None:
        self.process.sockets.pop(self, None)
        if self.protocol is not None:
            self.protocol.connection_lost(error)
        else:
            self.broken = error

    def orphaned(self, silent: bool) -> None:
        """Its process is dead: the kernel closes it, with a reset where something was left unread."""
        if not self.gone:
            self.gone = True
            if silent:  # the other side learns it from its keep-alive
                wait_s = self.network.loop.chance.uniform(3.0, 15.0)
                self.network.loop.call_later(wait_s, self.peer._unheard, wait_s, context=KERNEL)
            else:
                self._send(self.peer._reset if self.inbox or self.buffered else self.peer._finished)
        self.process.sockets.pop(self, None)

    # What comes from the other side. The kernel keeps it in order, also for a process that is frozen.

    def _cut_off(self, what: Callable[..., None], *given: Any) -> bool:
        link, loop = self.peer.link, self.network.loop
        if link.cut:
            link.held.append((what, self, given))
        elif loop.now_s < self.late_s:
            self.late_s += ORDER_S
            loop.call_at(self.late_s, self.again, what, given, context=KERNEL)
        return link.cut or loop.now_s < self.late_s

    def again(self, what: Callable[..., None], given: tuple[Any, ...]) -> None:
        late_s, self.late_s = self.late_s, -1.0
        what(*given)
        self.late_s = late_s

    def _arrived(self, segment: list[bytes]) -> None:
        loop = self.network.loop
        if self.peer.link.cut or loop.now_s < self.late_s or self.process.host.down:
            self._cut_off(self._arrived, segment)
            return
        data = segment[0] if len(segment) == 1 else b"".join(segment)
        if self.gone:
            self.peer.flight -= len(data)
            self._send(self.peer._refused)
            return
        loop.digest = zlib.crc32(data, loop.digest)
        self.inbox.append(data)
        loop.call_soon(self._read, context=self.process.context)

    def _read(self) -> None:
        loop, peer = self.network.loop, self.peer
        while self.inbox and self.reading and not self.gone and self.protocol is not None:
            data = self.inbox.popleft()
            if self.network.pieces and len(data) > 1 and loop.chance.random() < self.network.pieces:
                at = loop.chance.randrange(1, len(data))
                self.inbox.appendleft(data[at:])
                data = data[:at]
            peer.flight -= len(data)
            try:
                self.protocol.data_received(data)
            except Exception as error:
                loop.call_exception_handler({"message": "data_received failed", "exception": error})
                self.abort()
        if peer.buffered and not peer.gone:
            loop.call_soon(peer._pump, context=peer.process.context)
        if self.fin and not self.inbox and self.reading and not self.gone:
            self._eof()

    def _finished(self) -> None:
        if self._cut_off(self._finished) or self.gone or self.process.host.down:
            return
        self.fin = True
        self.network.loop.call_soon(self._read, context=self.process.context)

    def _eof(self) -> None:
        if self.protocol is not None and not self.protocol.eof_received():
            self.close()

    def _unheard(self, again_s: float) -> None:
        """Its keep-alive is answered with a reset, as soon as one comes through."""
        if self.peer.link.cut:
            self.network.loop.call_later(again_s, self._unheard, again_s, context=KERNEL)
        self._reset()

    def _refused(self) -> None:
        """What it sent came to one that is gone: it sends it again until it hears so."""
        if not self._cut_off(self._refused):
            self._reset()

    def _reset(self) -> None:
        """One that a cut link swallows is not sent again: this side stays half open."""
        if self.peer.link.cut or self.gone or self.process.host.down:
            return
        self.gone = self.closing = True
        error = ConnectionResetError(*RESET)
        self.network.loop.call_soon(self._lost, error, context=self.process.context)


class ListeningSocket:
    """Held by a parent, as a supervisor does: who comes while nobody accepts waits here."""

    family, type = socket.AF_INET, socket.SOCK_STREAM

    def __init__(self, address: Address) -> None:
        self.address = address
        self.waiting: list[tuple[Callable[[Listener], None], asyncio.Future[Socket]]] = []
        self.open = True

    def getsockname(self) -> Address:
        return self.address

    def dup(self) -> ListeningSocket:
        return self

    def fileno(self) -> int:
        return -1

    def close(self) -> None: ...

    def shutdown(self, how: int) -> None:
        """Whoever holds it too: nobody comes in any more."""
        self.open = False
        waiting, self.waiting = self.waiting, []
        for _, made in waiting:
            _refuse(made, ConnectionResetError(*RESET))

    def setblocking(self, flag: bool) -> None: ...


class Listener(asyncio.AbstractServer):
    def __init__(
        self, network: Network, process: Process, factory: Callable[[], Any], at: ListeningSocket
    ) -> None:
        self.network, self.process, self.factory, self.at = network, process, factory, at
        self.sockets = (at,)
        network.listeners.setdefault(at.address, []).append(self)
        process.listeners[self] = None
        waiting, at.waiting = at.waiting, []
        for accept, _ in waiting:
            accept(self)

    def close(self) -> None:
        if self.process.listeners.pop(self, self) is None:
            self.network.listeners[self.at.address].remove(self)

    def is_serving(self) -> bool:
        return self in self.process.listeners

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.network.loop

    async def start_serving(self) -> None: ...

    async def wait_closed(self) -> None: ...


class Network:
    def __init__(self, loop: WorldLoop) -> None:
        self.loop = loop
        self.pieces = 0.0  # How likely a read gets only a part of what is there.
        self.near, self.far = Link(3e-5, 1e-5, 5e9), Link()
        self.hosts: dict[str, Host] = {}
        self.listeners: dict[Address, list[Listener]] = {}
        self.held: dict[Address, ListeningSocket] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._port = 20_000

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def link(self, source: str, target: str) -> Link:
        link = self._links.get((source, target))
        if link is None:
            model = self.near if source in (target, UNIX) or target == UNIX else self.far
            link = self._links[source, target] = Link(model.latency_s, model.jitter_s, model.bytes_per_s)
        return link

    def ends(self, *links: Link) -> list[Socket]:
        every = (end for process in self.loop.processes.values() for end in process.sockets)
        return [end for end in every if any(end.link is link for link in links)]

    def heal(self, link: Link) -> None:
        link.cut = False
        held, link.held = link.held, []
        wait_s = self.loop.chance.uniform(0.0, 0.4)  # Until the sender tries again.
        for what, end, given in held:
            wait_s += ORDER_S
            end.late_s = self.loop.now_s + wait_s
            self.loop.call_at(end.late_s, end.again, what, given, context=KERNEL)

    def connect(
        self, process: Process, address: Address, made: asyncio.Future[Socket], tries: int = SYNS
    ) -> None:
        there, back = self.link(process.host.name, address[0]), self.link(address[0], process.host.name)
        host, loop = self.host(address[0]), self.loop
        if made.cancelled() or process.state == DEAD:
            return
        if there.cut or back.cut or host.down:
            if tries:
                loop.call_later(SYN_S, self.connect, process, address, made, tries - 1, context=KERNEL)
            return

        def accept(listener: Listener) -> None:
            self._port += 1
            client = Socket(self, process, there, (process.host.name, self._port))
            server = Socket(self, listener.process, back, address)
            client.peer, server.peer = server, client
            loop.call_soon(self._accepted, listener, server, context=listener.process.context)
            loop.call_later(back.latency_s, self._connected, made, client, context=KERNEL)

        def arrive() -> None:
            listeners = self.listeners.get(address)
            if listeners:
                accept(loop.chance.choice(listeners))
            elif address in self.held and self.held[address].open:
                self.held[address].waiting.append((accept, made))
            else:
                error = ConnectionRefusedError(111, "Connection refused")
                loop.call_later(back.latency_s, _refuse, made, error, context=KERNEL)

        loop.call_later(there.latency_s, arrive, context=KERNEL)

    @staticmethod
    def _accepted(listener: Listener, server: Socket) -> None:
        if not listener.is_serving():
            server.abort()
            return
        server.protocol = listener.factory()
        server.protocol.connection_made(server)
        server._read()
        if server.broken is not None:
            server.network.loop.call_soon(server._lost, server.broken, context=server.process.context)

    @staticmethod
    def _connected(made: asyncio.Future[Socket], client: Socket) -> None:
        if made.done() or client.process.state == DEAD:
            client.orphaned(False)
        else:
            made.set_result(client)


def _refuse(made: asyncio.Future[Socket], error: Exception) -> None:
    if not made.done():
        made.set_exception(error)


class Call:
    """In place of asyncio's handles, which cost more than what most of them call."""

    __slots__ = ("args", "callback", "cancelled_", "context")

    def __init__(self, callback: Any, args: tuple[Any, ...], context: contextvars.Context) -> None:
        self.callback, self.args, self.context = callback, args, context
        self.cancelled_ = False

    def cancel(self) -> None:
        self.cancelled_ = True
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.cancelled_


class WorldLoop(asyncio.BaseEventLoop):
    def __init__(self, seed: int | str) -> None:
        super().__init__()
        self.now_s = 0.0
        self.chance = random.Random(f"{seed}")
        self.processes: dict[int, Process] = {}
        self.tasks: WeakKeyDictionary[asyncio.Task[Any], Process | None] = WeakKeyDictionary()
        self.network = Network(self)
        self.handles = 0
        self.digest = 0
        self.story: list[tuple[float, str, str, str]] = []
        self.broken: list[str] = []
        self.sent: dict[str, int] = {}  # By request, segments at engines,
        self.refused: dict[str, int] = {}  # how often it was refused for lack of room,
        self.brought: dict[str, int] = {}  # and the most tokens that one had of it, prompt and all.
        self.salts: dict[str, str] = {}  # By tenant.
        self.replaces_brains = True  # Whether another Brain may take the place of the first.
        self.troubles: list[Any] = []
        self.switches = self.preempts = 0.0  # How likely a thread loses its turn where it may, or anywhere.
        self.wires: dict[str, Any] = {}  # What befalls bytes that reach a host's blocking sockets.
        self._clock_resolution = 0.0
        self._order = 0

    def time(self) -> float:
        return self.now_s

    def told(self, kind: str, who: str, what: str) -> None:
        self.story.append((self.now_s, kind, who, what))
        self.digest = zlib.crc32(f"{self.now_s!r} {kind} {who} {what}".encode(), self.digest)

    def again(self, calls: Iterable[Call]) -> None:
        self._ready.extend(calls)

    def create_task(self, coro: Any, **more: Any) -> Any:
        task = super().create_task(coro, **more)
        self.tasks[task] = PROCESS.get()
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        call = Call(callback, args, contextvars.copy_context() if context is None else context)
        self._ready.append(call)
        return call

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        """Timers of one instant keep their order."""
        call = Call(callback, args, contextvars.copy_context() if context is None else context)
        self._order += 1
        heapq.heappush(self._scheduled, (when, self._order, call))
        return call

    def _run_once(self, until_s: float = 0.0) -> None:
        """And on until a time is reached."""
        ready, scheduled, popped, which = self._ready, self._scheduled, heapq.heappop, PROCESS
        now_s = -1.0
        while now_s < until_s:
            if not ready:
                while scheduled and scheduled[0][2].cancelled_:
                    popped(scheduled)
                if not scheduled:
                    raise RuntimeError("nothing will ever happen again")
                if scheduled[0][0] > self.now_s:
                    self.now_s = scheduled[0][0]
            now_s = self.now_s
            while scheduled and scheduled[0][0] <= now_s:
                ready.append(popped(scheduled)[2])
            for _ in range(len(ready)):
                if not ready:  # a call that blocks ran them meanwhile (`pump`)
                    break
                call = ready.popleft()
                if call.cancelled_:
                    continue
                context = call.context
                process = context.get(which)
                if process is not None and process.state != RUNS:
                    (process.held if process.state == FROZEN else process.remains).append(call)
                    continue
                self.handles += 1
                try:
                    context.run(call.callback, *call.args)
                except Exception as error:
                    self.call_exception_handler({"message": f"{call.callback} failed", "exception": error})

    def pump(self, future: asyncio.Future[Any], process: Process) -> Any:
        """Let the world go on under a call that blocks, until its answer is there."""
        while not future.done() or process.state == FROZEN:
            self._run_once()
            if process.state == DEAD:
                raise virtual.Killed
        return future.result()

    # What the product asks of a loop.

    def _write_to_self(self) -> None: ...

    def _process_events(self, events: object) -> None: ...

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def work() -> None:
            if not future.done():
                try:
                    future.set_result(func(*args))
                except Exception as error:
                    future.set_exception(error)

        self.call_later(self.chance.uniform(1e-4, 5e-3), work)
        return future

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        process = PROCESS.get()
        assert process is not None
        process.signals[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return True

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None: ...

    def remove_reader(self, fd: Any) -> bool:
        return True

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    async def create_server(
        self, factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **_: Any
    ) -> Any:
        process = PROCESS.get()
        assert process is not None
        at = sock if sock is not None else ListeningSocket((host or process.host.name, port))
        return Listener(self.network, process, factory, at)

    async def create_unix_server(
        self, factory: Any, path: Any = None, *, sock: Any = None, **more: Any
    ) -> Any:
        return await self.create_server(factory, sock=sock)

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        process = PROCESS.get()
        assert process is not None
        made: asyncio.Future[Socket] = self.create_future()
        self.network.connect(process, (host, port), made)
        end = await made
        end.protocol = protocol = factory()
        protocol.connection_made(end)
        self.call_soon(end._read, context=process.context)
        if end.broken is not None:
            self.call_soon(end._lost, end.broken, context=process.context)
        return end, protocol

    async def create_unix_connection(self, factory: Any, path: Any = None, **_: Any) -> Any:
        process = PROCESS.get()
        assert process is not None
        if not self.network.listeners.get((UNIX, path)) and (UNIX, path) not in self.network.held:
            raise ConnectionRefusedError(111, "Connection refused")
        return await self.create_connection(factory, UNIX, path)


SIGTERM = signal.SIGTERM

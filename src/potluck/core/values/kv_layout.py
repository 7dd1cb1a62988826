"""How an instance's KV lies on its workers, where they listen, and which worker gets what from which other.

An instance has stages, each with some of the layers, and in each stage `tensor` workers, each with some of the KV
heads. Where there are more workers than heads, each head is on several: they are copies. One of the receiver's copies
fetches, and the others get it from that one, so that every head crosses once.

    KvAddress   HOST:PORT[,HOST:PORT...][?tensor=N&layers=A,B,...]

One HOST:PORT for each stage, in order; the worker of tensor rank t listens at that port + t.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from potluck.core.errors import FormatError, InputError

Address = tuple[str, int]
Span = tuple[int, int]  # [first, stop)
MOST_LAYERS = 1 << 16
ALL_LAYERS: Span = (0, MOST_LAYERS - 1)
LONGEST_TEXT = 4096
MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class KvLayout:
    tensor: int = 1
    stages: tuple[int, ...] = ()
    """Layers of each; none: all in one."""

    def __post_init__(self) -> None:
        if self.tensor < 1 or any(layers < 1 for layers in self.stages) or self.workers > MOST_WORKERS:
            raise InputError("kv", f"cannot be cut {self.tensor} x {list(self.stages)}")

    @property
    def workers(self) -> int:
        return self.tensor * max(1, len(self.stages))

    def layers(self, stage: int) -> Span:
        if not self.stages:
            return ALL_LAYERS
        stop = list(accumulate(self.stages))[stage]
        return stop - self.stages[stage], stop


@dataclass(frozen=True, slots=True)
class KvAddress:
    """Where an instance's KV is fetched."""

    stages: tuple[Address, ...]
    layout: KvLayout = KvLayout()

    def __post_init__(self) -> None:
        if len(self.stages) != max(1, len(self.layout.stages)):
            raise InputError("kv", f"names {len(self.stages)} stages and the layers of another number")

    def worker(self, rank: int) -> Address:
        """Of ranks that count through the first stage, then the next."""
        host, port = self.stages[rank // self.layout.tensor]
        return host, port + rank % self.layout.tensor if port else 0

    @property
    def workers(self) -> tuple[Address, ...]:
        return tuple(self.worker(rank) for rank in range(self.layout.workers))

    def __str__(self) -> str:
        more = [f"tensor={self.layout.tensor}"] if self.layout.tensor > 1 else []
        if self.layout.stages:
            more.append("layers=" + ",".join(map(str, self.layout.stages)))
        return ",".join(map(written, self.stages)) + ("?" + "&".join(more) if more else "")


def reachable(address: KvAddress, allowed: frozenset[Address]) -> bool:
    """Whether all its workers are allowed; port 0 allows a whole host."""
    return all(worker in allowed or (worker[0], 0) in allowed for worker in address.workers)


def written(address: Address) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}" if address[1] else host


def kv_address(text: object, where: str = "kv", port: int | None = None) -> KvAddress:
    """`port`: of a host that names none. An address has one way of being written."""
    if not isinstance(text, str) or len(text) > LONGEST_TEXT or not text.isprintable():
        raise InputError(where, "must be HOST:PORT")
    places, _, query = text.partition("?")
    options = (
        {name: value for name, _, value in (part.partition("=") for part in query.split("&"))}
        if query
        else {}
    )
    try:
        layers = tuple(int(layers) for layers in options.pop("layers", "").split(",") if layers)
        tensor = int(options.pop("tensor", "1"))
    except ValueError:
        options = {"": ""}
    if options:
        raise InputError(where, f"must be HOST:PORT,...?tensor=N&layers=A,B, is {text[:80]!r}")
    return KvAddress(
        tuple(_address(place, where, port) for place in places.split(",")), KvLayout(tensor, layers)
    )


MOST_PEERS = 4096


def peers_in(body: dict[str, object]) -> frozenset[KvAddress]:
    """Those of `{"peers": ["10.0.0.5:9000", ...]}`, the body of an engine's PUT /peers."""
    given = body.get("peers")
    if set(body) != {"peers"} or not isinstance(given, list):
        raise FormatError("peers", "must be a list of HOST:PORT, and the only key")
    if len(given) > MOST_PEERS:
        raise InputError("peers", f"at most {MOST_PEERS}, got {len(given)}")
    return frozenset(kv_address(text, f"peers[{place}]") for place, text in enumerate(given))


def _address(text: str, where: str, port: int | None) -> Address:
    host, colon, number = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, number = text, "" if port is None else str(port)
    if number.isascii() and number.isdigit() and len(number) <= 5 and int(number) < 1 << 16:
        host = host.removeprefix("[").removesuffix("]").lower()
        if host and len(host) <= 253 and (port is not None or int(number)):
            with suppress(ValueError):  # a name, not an IP address
                host = str(ipaddress.ip_address(host))
            return host, int(number)
    raise InputError(where, f"must be HOST:PORT, is {text[:80]!r}")


@dataclass(frozen=True, slots=True)
class KvCut:
    """What one worker of a receiver wants of one worker of a sender."""

    reader: int = 0
    readers: int = 1
    """Workers that fetch from this sender's worker, and which of them this one is."""
    layers: Span = ALL_LAYERS
    heads: Span = (0, 0)
    """Of all that the model has; empty: as many as the sender's worker has."""
    dtype: str = ""
    """What it is fetched as if that is smaller than what the sender has; empty: as the sender has it."""
    whole_windows: bool = False
    """Whether layers with a window are wanted from the beginning."""

    def __post_init__(self) -> None:
        sound = 0 <= self.reader < self.readers <= MOST_WORKERS
        spans = (self.layers, self.heads)
        if not sound or any(not 0 <= first <= stop < MOST_LAYERS for first, stop in spans):
            raise FormatError("hand-over", "asks for a part that cannot be")

    @property
    def nothing(self) -> bool:
        return self.layers[0] == self.layers[1]


@dataclass(frozen=True, slots=True)
class KvSourceWorker:
    """From which worker what comes."""

    rank: int
    cut: KvCut
    copy: bool = False
    """Whether it is a worker of the same instance, which has it from elsewhere."""


def heads_of(heads: int, tensor: int, rank: int) -> Span:
    """The KV heads of one worker."""
    if heads % tensor and tensor % heads:
        raise InputError("tensor parallelism", f"of {tensor} does not fit {heads} KV heads")
    first = rank * heads // tensor
    return first, first + max(1, heads // tensor)


def copies_of(heads: int, tensor: int) -> int:
    return max(1, tensor // heads)


def sources(
    sender_layout: KvLayout, receiver_layout: KvLayout, rank: int, heads: int
) -> tuple[KvSourceWorker, ...]:
    """Where the receiver's worker `rank` gets its layers and heads. `heads`: of the whole model; 1 for latents.

    A sender's worker that nobody needs hears that from the receiver's first worker, and need not keep anything.
    """
    stage, place = divmod(rank, receiver_layout.tensor)
    copies = copies_of(heads, receiver_layout.tensor)
    if place % copies:
        return (KvSourceWorker(rank - place % copies, KvCut(), copy=True),)
    wanted = [
        KvSourceWorker(other, KvCut(*_turn(sender_layout, receiver_layout, other, rank, heads), layers, span))
        for other, layers, span in _overlaps(sender_layout, receiver_layout, stage, place, heads)
    ]
    if rank == 0:
        used = {
            other
            for reader in range(receiver_layout.workers)
            if not reader % receiver_layout.tensor % copies
            for other, *_ in _overlaps(
                sender_layout, receiver_layout, *divmod(reader, receiver_layout.tensor), heads
            )
        }
        unused = [other for other in range(sender_layout.workers) if other not in used]
        wanted += [KvSourceWorker(other, KvCut(layers=(0, 0))) for other in unused]
    return tuple(wanted)


def _turn(
    sender_layout: KvLayout, receiver_layout: KvLayout, other: int, rank: int, heads: int
) -> tuple[int, int]:
    """Which of how many readers of a sender's worker a receiver's worker is."""
    copies = copies_of(heads, receiver_layout.tensor)
    readers = [
        reader
        for reader in range(receiver_layout.workers)
        if not reader % receiver_layout.tensor % copies
        and any(
            worker == other
            for worker, *_ in _overlaps(
                sender_layout, receiver_layout, *divmod(reader, receiver_layout.tensor), heads
            )
        )
    ]
    return readers.index(rank), len(readers)


def _overlaps(
    sender_layout: KvLayout, receiver_layout: KvLayout, stage: int, place: int, heads: int
) -> Iterator[tuple[int, Span, Span]]:
    """(sender's worker, layers, heads) that a receiver's worker needs."""
    wanted, copies = heads_of(heads, receiver_layout.tensor, place), copies_of(heads, sender_layout.tensor)
    for other in range(max(1, len(sender_layout.stages))):
        layers = _common(sender_layout.layers(other), receiver_layout.layers(stage))
        if layers is None:
            continue
        for tensor_rank in range(sender_layout.tensor):
            span = _common(heads_of(heads, sender_layout.tensor, tensor_rank), wanted)
            # Of a sender's copies they take turns.
            if (
                span is not None
                and tensor_rank % copies == place // copies_of(heads, receiver_layout.tensor) % copies
            ):
                yield other * sender_layout.tensor + tensor_rank, layers, span


def _common(first: Span, second: Span) -> Span | None:
    span = max(first[0], second[0]), min(first[1], second[1])
    return span if span[0] < span[1] else None

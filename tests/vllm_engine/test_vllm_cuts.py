"""KV between instances that are cut differently: the connector's workers over the real transport, every pair of cuts.

Each worker has blocks as vLLM has them, its own layers and heads; what the receiver's workers hold in the end is
compared with what the model's KV is, and what crossed with what a planner reckons.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch
from test_vllm_transfer_workers import QUICK, until
from vllm_kit import free_port

from potluck.core.errors import InputError
from potluck.core.values.kv_layout import KvAddress, KvLayout, heads_of
from potluck.kv import checksum, kv_codec
from potluck.kv.codec_layout import ITEM_BYTES, sizes
from potluck.kv.handles import new_handle, new_session
from potluck.kv.kv_sender import KvSender, SenderLimits
from potluck.kv.peer_connections import PeerConnections
from potluck.vllm.receive_worker import ReceiveWorker
from potluck.vllm.send_worker import SendWorker
from potluck.vllm.transfer_scheduler import FetchOrder, PlaceBlocks, ReadBlocks, SendOffer
from potluck.vllm.vllm_blocks import (
    LAST,
    ONE,
    TORCH,
    ModelShard,
    PlainBlocks,
    Scales,
    StateBlocks,
    VllmLayer,
    state_heads,
    state_sections,
)

LAYERS, HEADS, WIDTH, TOKENS = 4, 2, 8, 70
CUTS = {
    "tp1": KvLayout(),
    "tp2": KvLayout(2),
    "tp4": KvLayout(4),
    "tp1pp2": KvLayout(1, (3, 1)),
    "tp2pp2": KvLayout(2, (1, 3)),
    "tp4pp4": KvLayout(4, (1, 1, 1, 1)),
}


@dataclass(frozen=True)
class CacheLayout:
    """How one side keeps its KV."""

    layout: KvLayout = KvLayout()
    block_tokens: int = 4
    dtype: str = "float32"
    order: str = "HND"
    latent: bool = False
    scales: Scales = ONE


@dataclass
class Workers:
    """All workers of one instance."""

    kept: CacheLayout
    told: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout, self.heads = self.kept.layout, 1 if self.kept.latent else HEADS
        port = free_port(layout.workers)
        stages = tuple(
            ("127.0.0.1", port + stage * layout.tensor) for stage in range(max(1, len(layout.stages)))
        )
        self.address = KvAddress(stages, layout)
        self.shards = [
            ModelShard(rank % layout.tensor, layout.tensor, rank // layout.tensor, layout.stages, self.heads)
            for rank in range(layout.workers)
        ]
        self.layers = [self._layers(shard) for shard in self.shards]
        limits = SenderLimits(beat_s=0.05, lease_s=2.0)
        senders = [KvSender("127.0.0.1", port + shard.rank, limits=limits) for shard in self.shards]
        self.giving = [
            SendWorker(sender, layers, "m", self.told.append)
            for sender, layers in zip(senders, self.layers, strict=True)
        ]
        self.taking = [
            ReceiveWorker(PeerConnections((), limits=QUICK), sender, layers, "m", shard, self.told.append)
            for sender, layers, shard in zip(senders, self.layers, self.shards, strict=True)
        ]
        blocks = -(-TOKENS // self.kept.block_tokens)
        self.tables = (tuple(range(blocks, 0, -1)),)

    def _layers(self, shard: ModelShard) -> dict[int, VllmLayer]:
        kept, first_stop = self.kept, shard.layout.layers(shard.stage)
        first, stop = heads_of(shard.heads, shard.tensor_size, shard.tensor_rank)
        layers = {}
        for number in range(first_stop[0], min(first_stop[1], LAYERS)):
            shape = (80, stop - first, kept.block_tokens, WIDTH if kept.latent else 2 * WIDTH)
            small = ITEM_BYTES[kept.dtype] == 1
            cache = torch.zeros(shape, dtype=torch.uint8 if small else TORCH[kept.dtype])
            if kept.order == "NHD":
                cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
            blocks = PlainBlocks(cache, "latent" if kept.latent else "kv", kept.dtype, kept.scales)
            layers[number] = VllmLayer(blocks, head=0 if kept.latent else first, scales=kept.scales)
        return layers

    def allow(self, other: Workers) -> None:
        for receive_worker in self.taking:
            receive_worker.allow([other.address])

    def close(self, threads: ThreadPoolExecutor) -> list[Future[None]]:
        return [threads.submit(worker.close) for worker in (*self.taking, *self.giving)]

    # As a sender.

    def offer(self, handle: str, codec: str = "raw", lasts_s: float = 30.0) -> None:
        for giving in self.giving:
            giving.offer(SendOffer("g", "r", handle, codec, lasts_s, TOKENS, "0" * 64))  # type: ignore[arg-type]

    def compute(self, values: dict[int, torch.Tensor], first: int, upto: int) -> None:
        for giving, layers in zip(self.giving, self.layers, strict=True):
            for number, layer in layers.items():
                part = self.part(layer, values[number])
                layer.write(self.tables, first, part[first:upto])
                giving.read_layer(number, [ReadBlocks("g", self.tables, upto)])

    def part(self, layer: VllmLayer, values: torch.Tensor) -> torch.Tensor:
        """What a worker has of a layer."""
        if self.kept.latent:
            return values
        return values[:, :, layer.head : layer.head + layer.shape.heads]

    # As a receiver.

    def ask(self, sender: Workers, handle: str, have: int = 0, within_s: float = 20.0) -> None:
        order = FetchOrder(
            "t", "r", str(sender.address), handle, within_s, have, TOKENS, "0" * 64, new_session()
        )
        for receive_worker in self.taking:
            receive_worker.ask(order)

    def place(self) -> None:
        for receive_worker in self.taking:
            until(lambda taking=receive_worker: (news := taking.news()) and news.come)  # type: ignore[misc]
            receive_worker.put(PlaceBlocks("t", self.tables, 0))

    def results(self) -> list[tuple[set[str], set[str]]]:
        out: list[tuple[set[str], set[str]]] = []
        for receive_worker in self.taking:
            result: tuple[set[str], set[str]] = (set(), set())

            def came(receive_worker: ReceiveWorker = receive_worker) -> bool:
                nonlocal result
                result = receive_worker.results()
                return bool(result[0])

            until(came)
            out.append(result)
        return out

    def moved_bytes(self) -> int:
        return sum(int(line["moved_bytes"]) for line in self.told if "took" in line)  # type: ignore[call-overload]


@pytest.fixture(scope="module", autouse=True)
def _machine_code() -> None:
    """As the connector does before it serves: to make it takes longer than a fetch may."""
    checksum.load()
    kv_codec.load()


@pytest.fixture
def made() -> Iterator[list[Workers]]:
    every: list[Workers] = []
    yield every
    with ThreadPoolExecutor(64) as threads:
        for done in [future for workers in every for future in workers.close(threads)]:
            done.result(10)
    for workers in every:
        assert all(giving.aside_bytes == 0 for giving in workers.giving)


def values_of(latent: bool = False) -> dict[int, torch.Tensor]:
    shape = (TOKENS, 1, WIDTH) if latent else (TOKENS, 2, HEADS, WIDTH)
    return {number: torch.randn(shape) for number in range(LAYERS)}


def transfer_all(
    made: list[Workers], giver: CacheLayout, taker: CacheLayout, codec: str = "raw"
) -> tuple[Workers, Workers]:
    """All of it, in two steps."""
    sender, receiver = Workers(giver), Workers(taker)
    made += [sender, receiver]
    receiver.allow(sender)
    values, handle = values_of(giver.latent), new_handle()
    receiver.ask(sender, handle)
    sender.offer(handle, codec)
    sender.compute(values, 0, 33)
    receiver.place()
    sender.compute(values, 33, TOKENS)
    assert receiver.results() == [({"t"}, set())] * receiver.kept.layout.workers
    for giving in sender.giving:
        giving.keep(ReadBlocks("g", sender.tables, TOKENS))
        until(lambda giving=giving: giving.done() == {"g"})  # type: ignore[misc]
    until(lambda: sum("gave" in line for line in sender.told) == len(sender.giving))
    assert {line["state"] for line in sender.told if "gave" in line} == {"fetched"}
    for layers in receiver.layers:
        for number, layer in layers.items():
            due = receiver.part(layer, values[number])
            got = layer.read(receiver.tables, 0, TOKENS)
            assert_as_kept(got, due, giver, taker, codec)
    return sender, receiver


def assert_as_kept(
    got: torch.Tensor, due: torch.Tensor, giver: CacheLayout, taker: CacheLayout, codec: str
) -> None:
    factors = torch.tensor(taker.scales).view(1, 2, 1, 1) if due.dim() == 4 else 1.0
    if codec != "raw":
        most = 0.2 * due.abs().max()  # half of a step of 4 bits, and what 8 bits had lost before
        assert (got.float() * factors - due).abs().max() < most
        return
    theirs = torch.tensor(giver.scales).view(1, 2, 1, 1) if due.dim() == 4 else 1.0
    there = (due / theirs).to(TORCH[giver.dtype])
    same = giver.dtype == taker.dtype and giver.scales == taker.scales
    real = there.float() * theirs
    if giver.scales != ONE and not same:
        real = real.to(torch.bfloat16).float()
    here = there if same else (real / factors).to(TORCH[taker.dtype])
    assert torch.equal(got.float(), here.float())


def reckoned_bytes(dtype: str, latent: bool = False, codec: str = "raw") -> int:
    """What planner and simulator count: every layer and head once."""
    shape = (TOKENS, 1, WIDTH) if latent else (TOKENS, 2, HEADS, WIDTH)
    return LAYERS * sizes("latent" if latent else "kv", dtype, shape, codec).total_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize(("giver", "taker"), product(CUTS, CUTS))
def test_every_pair_of_layouts_transfers_each_head_once(made: list[Workers], giver: str, taker: str) -> None:
    _, receiver = transfer_all(made, CacheLayout(CUTS[giver]), CacheLayout(CUTS[taker], 16))
    assert receiver.moved_bytes() == reckoned_bytes("float32")


@pytest.mark.parametrize(
    ("giver", "taker"), [("tp1", "tp4"), ("tp4", "tp1"), ("tp2", "tp4pp4"), ("tp4pp4", "tp2pp2")]
)
def test_latent_kv_is_transferred_once_for_any_tp_degree(made: list[Workers], giver: str, taker: str) -> None:
    _, receiver = transfer_all(
        made,
        CacheLayout(CUTS[giver], latent=True, dtype="bfloat16"),
        CacheLayout(CUTS[taker], latent=True, dtype="bfloat16"),
    )
    assert receiver.moved_bytes() == reckoned_bytes("bfloat16", latent=True)


@pytest.mark.parametrize("orders", [("NHD", "HND"), ("HND", "NHD")])
@pytest.mark.parametrize("tokens", [(16, 64), (64, 16)])
def test_kv_is_transferred_between_different_block_sizes_and_orders(
    made: list[Workers], orders: tuple[str, str], tokens: tuple[int, int]
) -> None:
    transfer_all(
        made,
        CacheLayout(CUTS["tp2"], tokens[0], order=orders[0]),
        CacheLayout(CUTS["tp1pp2"], tokens[1], order=orders[1]),
    )


FORMATS = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32")


@pytest.mark.parametrize(("giver", "taker"), product(FORMATS, FORMATS))
def test_kv_of_different_dtypes_is_transferred_in_the_smaller_one(
    made: list[Workers], giver: str, taker: str
) -> None:
    _, receiver = transfer_all(
        made, CacheLayout(CUTS["tp1"], dtype=giver), CacheLayout(CUTS["tp2"], dtype=taker)
    )
    smaller = min((giver, taker), key=ITEM_BYTES.__getitem__)
    assert receiver.moved_bytes() == reckoned_bytes(smaller)
    news = [receive_worker.news() for receive_worker in receiver.taking]
    lossy = ITEM_BYTES[giver] < ITEM_BYTES[taker]
    assert all((item is not None and item.lossy == {"t"}) == lossy for item in news)


SCALED = CacheLayout(CUTS["tp2"], dtype="float8_e4m3fn", scales=(0.25, 2.0))


@pytest.mark.parametrize(
    ("giver", "taker"),
    [
        (SCALED, CacheLayout(dtype="bfloat16")),
        (CacheLayout(dtype="bfloat16"), SCALED),
        (SCALED, replace(SCALED, layout=CUTS["tp1"])),
    ],
)
def test_eight_bit_scales_are_undone_or_kept_in_a_transfer(
    made: list[Workers], giver: CacheLayout, taker: CacheLayout
) -> None:
    transfer_all(made, giver, taker)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_codecs_work_between_different_layouts(made: list[Workers], codec: str, dtype: str) -> None:
    giver = CacheLayout(CUTS["tp1"], dtype=dtype)
    _, receiver = transfer_all(made, giver, CacheLayout(CUTS["tp4"], dtype="bfloat16"), codec)
    assert receiver.moved_bytes() < reckoned_bytes("bfloat16")


STATES: dict[str, tuple[tuple[tuple[int, ...], int, tuple[int, ...]], ...]] = {
    "SHORT_CONV": (((8, 2), 0, (8,)),),
    "SHORT_CONV, channels last": (((2, 8), 1, (8,)),),
    "MAMBA1": (((12, 3), 0, (12,)), ((12, 5), 0, (12,))),
    "MAMBA2": (((4 * 3 + 2 * 2 * 5, 3), 0, (12, 10, 10)), ((4, 3, 5), 0, (4,))),
    "MAMBA2, wide groups": (((2 * 3 + 2 * 2 * 5, 3), 0, (6, 10, 10)), ((2, 3, 5), 0, (2,))),
    "MAMBA2, one group": (((4 * 3 + 2 * 5, 3), 0, (12, 5, 5)), ((4, 3, 5), 0, (4,))),
    "GDN_ATTN": (((3, 2 * 2 * 5 + 4 * 3), 1, (10, 10, 12)), ((4, 3, 5), 0, (4,))),
    "LINEAR": (((4, 3, 3), 0, (4,)),),
    "OTHER": (((4, 3), 0, (4,)),),
}
"""Kinds of recurrent layers: of each state of a whole model its shape, the dimension that is cut, and its parts."""


def state_of(kind: str, tensor: int, rank: int, head: bool = True) -> tuple[VllmLayer, list[torch.Tensor]]:
    """What a worker has of a layer: with the same seed, its part of the same states."""
    torch.manual_seed(3)
    caches = []
    for number, (shape, dimension, widths) in enumerate(STATES[kind]):
        whole = torch.randn(shape).to(torch.float32 if number else torch.bfloat16)
        parts = [part.chunk(tensor, dimension)[rank] for part in whole.split(widths, dimension)]
        own = torch.cat(parts, dimension)
        caches.append(torch.zeros(40, *own.shape, dtype=own.dtype))
        caches[-1][7] = own
    name, shapes = kind.partition(",")[0], [cache.shape[1:] for cache in caches]
    sections = state_sections(name, shapes, dim_first=STATES[kind][0][1] == 0)
    heads = state_heads(name, shapes, sections, max(1, HEADS // tensor))
    blocks = StateBlocks(caches, cut=(heads, sections))
    return VllmLayer(blocks, group=1, window=LAST, head=rank * heads), caches


def with_states(workers: Workers, kind: str, table: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Layer 2 is recurrent; all of an instance's states of it, by tensor rank."""
    tensor, states = workers.kept.layout.tensor, {}
    for shard, layers in zip(workers.shards, workers.layers, strict=True):
        if 2 in layers:
            layers[2], states[shard.tensor_rank] = state_of(kind, tensor, shard.tensor_rank)
    workers.tables = (*workers.tables, table)
    workers.shards = [replace(shard, states=True) for shard in workers.shards]
    # Who looks at its layers when it is made.
    workers.giving = [
        SendWorker(giving._sender, layers, "m", workers.told.append)
        for giving, layers in zip(workers.giving, workers.layers, strict=True)
    ]
    workers.taking = [
        ReceiveWorker(
            PeerConnections((), limits=QUICK), receive_worker._sender, layers, "m", shard, workers.told.append
        )
        for receive_worker, layers, shard in zip(workers.taking, workers.layers, workers.shards, strict=True)
    ]
    return [states[rank] for rank in range(tensor)]


UNCUT = ("MAMBA2, one group", "OTHER")
LIKE = [("tp1", "tp1pp2"), ("tp2", "tp2pp2"), ("tp2pp2", "tp2"), ("tp4", "tp4pp4")]
UNLIKE = [("tp1", "tp2"), ("tp2", "tp1"), ("tp2pp2", "tp1pp2"), ("tp1pp2", "tp2pp2")]


@pytest.mark.parametrize(
    ("kind", "giver", "taker"),
    [
        *(("MAMBA2", *pair) for pair in (*LIKE, *UNLIKE[2:])),
        *((kind, *pair) for kind in STATES if kind not in UNCUT for pair in UNLIKE[:2]),
        ("MAMBA2, one group", "tp1", "tp1pp2"),
        ("OTHER", "tp2", "tp2pp2"),
        *((kind, "tp1", "tp2") for kind in UNCUT),  # noticed when they come: the prompt is computed
    ],
)
def test_recurrent_states_are_transferred_between_all_layouts(
    made: list[Workers], kind: str, giver: str, taker: str
) -> None:
    sender, receiver = Workers(CacheLayout(CUTS[giver])), Workers(CacheLayout(CUTS[taker], 16))
    made += [sender, receiver]
    with_states(sender, kind, (7,))
    due = with_states(receiver, kind, (0, 0, 5))
    receiver.allow(sender)
    values, handle = values_of(), new_handle()
    sender.offer(handle)
    receiver.ask(sender, handle)
    for first, upto in ((0, 33), (33, TOKENS)):
        for giving, layers in zip(sender.giving, sender.layers, strict=True):
            for number, layer in layers.items():
                if number != 2:
                    layer.write(sender.tables, first, sender.part(layer, values[number])[first:upto])
                giving.read_layer(number, [ReadBlocks("g", sender.tables, upto)])
    receiver.place()  # a stage that has states alone gets its first bytes when all is computed
    lost = {"t"} if kind in UNCUT and (giver, taker) in UNLIKE else set()
    assert receiver.results() == [({"t"}, lost)] * receiver.kept.layout.workers
    if lost:
        return
    for layers in receiver.layers:
        for number, layer in layers.items():
            if number != 2:
                got = layer.read(receiver.tables, 0, TOKENS)
                assert torch.equal(got, receiver.part(layer, values[number]))
    for caches in due:
        for cache in caches:
            assert cache[7].abs().sum() > 0
            assert torch.equal(cache[5], cache[7]), "its part of the same states"


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [("OTHER", "tp1", 2), ("MAMBA2, one group", "tp1", 2), ("MAMBA2", "tp4", 2), ("MAMBA2", "tp2", 4)],
)
def test_indivisible_states_are_transferred_only_between_equal_tp_degrees(
    made: list[Workers], kind: str, own: str, other: int
) -> None:
    """Unknown ones, groups that workers share, and heads of which several workers have copies."""
    workers = Workers(CacheLayout(CUTS[own]))
    made.append(workers)
    if kind != "MAMBA2" or own != "tp4":
        with_states(workers, kind, (7,))
    else:
        workers.taking[0].shard = replace(workers.shards[0], states=True)
    receive_worker = workers.taking[0]
    with pytest.raises(InputError, match="between equal tensor parallelism alone"):
        receive_worker.sources(f"127.0.0.1:1?tensor={other}")
    assert [
        source.rank for _, source in receive_worker.sources(f"127.0.0.1:1?tensor={CUTS[own].tensor}")
    ] == [0]


def test_recurrent_state_is_found_in_every_vllm_cache_mode() -> None:
    state = torch.arange(10.0).view(10, 1)
    for kept, ahead, table, tokens, due in (
        ("none", 0, (4,), 70, 4),
        ("none", 2, (4, 5, 6), 70, 4),
        ("align", 0, (0, 0, 6), 70, 6),
        ("all", 0, (3, 4, 5, 6), 33, 5),
    ):
        blocks = StateBlocks([state], kept, 16, ahead)
        assert blocks.read(table, 0, tokens).view(torch.float32).item() == due
    with pytest.raises(InputError, match="no state after 70"):
        StateBlocks([state], "align").read((4, 0), 0, 70)


def test_failure_of_one_sender_fails_every_worker_of_the_receiver(made: list[Workers]) -> None:
    sender, receiver = Workers(CacheLayout(CUTS["tp2"])), Workers(CacheLayout(CUTS["tp1pp2"]))
    made += [sender, receiver]
    receiver.allow(sender)
    values, handle = values_of(), new_handle()
    receiver.ask(sender, handle)
    sender.offer(handle)
    sender.compute(values, 0, 33)
    receiver.place()
    sender.giving[1].drop("g")
    assert receiver.results() == [({"t"}, {"t"})] * 2
    sender.giving[0].drop("g")


def test_missing_receiver_worker_releases_the_sender_within_its_lease(made: list[Workers]) -> None:
    """One of two readers is missing: the sender gives up within its lease, the other reader fails."""
    sender, receiver = Workers(CacheLayout()), Workers(CacheLayout(CUTS["tp2"]))
    made += [sender, receiver]
    receiver.allow(sender)
    handle = new_handle()
    sender.offer(handle)
    order = FetchOrder("t", "r", str(sender.address), handle, 5.0, 0, TOKENS, "0" * 64, new_session())
    receiver.taking[0].ask(order)
    until(lambda: (news := receiver.taking[0].news()) and news.failed == {"t"})
    until(lambda: any("gave" in line for line in sender.told))
    assert {line["state"] for line in sender.told if "gave" in line} == {"gone"}
    sender.giving[0].drop("g")


def test_second_receiver_of_a_handle_is_refused(made: list[Workers]) -> None:
    sender, first, second = (Workers(CacheLayout(cut)) for cut in (CUTS["tp1"], CUTS["tp1"], CUTS["tp2"]))
    made += [sender, first, second]
    for receiver in (first, second):
        receiver.allow(sender)
    values, handle = values_of(), new_handle()
    sender.offer(handle)
    first.ask(sender, handle)
    sender.compute(values, 0, 33)
    first.place()
    second.ask(sender, handle, within_s=0.5)
    for receive_worker in second.taking:
        until(lambda taking=receive_worker: (news := taking.news()) and news.failed == {"t"})  # type: ignore[misc]
    sender.compute(values, 33, TOKENS)
    assert first.results() == [({"t"}, set())]

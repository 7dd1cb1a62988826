"""KV transfers between workers' blocks over the real transport, and their failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from potluck.kv.handles import new_handle
from potluck.kv.kv_sender import KvSender, SenderLimits
from potluck.kv.peer_connections import LinkLimits, PeerConnections
from potluck.vllm.receive_worker import ReceiveWorker
from potluck.vllm.send_worker import SendWorker
from potluck.vllm.transfer_scheduler import FetchOrder, PlaceBlocks, ReadBlocks, SendOffer
from potluck.vllm.vllm_blocks import ModelShard, PlainBlocks, VllmLayer

MARK = "vllm-test"
LAYERS, HEADS, WIDTH = 3, 2, 8
HERE, FAILED = ({"t"}, set()), ({"t"}, {"t"})
QUICK = LinkLimits(stall_s=2.0, silence_s=3.0)


def until(true: Callable[[], object]) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("did not come true")


def layer(size: int, width: int = WIDTH, **more: int) -> VllmLayer:
    return VllmLayer(PlainBlocks(torch.zeros(40, HEADS, size, 2 * width), "kv"), **more)


def layers(size: int) -> dict[int, VllmLayer]:
    return {number: layer(size) for number in range(LAYERS)}


@dataclass
class WorkerPair:
    sender_layers: dict[int, VllmLayer] = field(default_factory=lambda: layers(4))
    receiver_layers: dict[int, VllmLayer] = field(default_factory=lambda: layers(8))
    events: list[dict[str, object]] = field(default_factory=list)
    receiver_mark: str = MARK

    def __post_init__(self) -> None:
        self.kv_sender = KvSender(limits=SenderLimits(beat_s=0.05, lease_s=1.0))
        host, port = self.kv_sender.address
        self.kv = f"{host}:{port}"
        self.sender = SendWorker(self.kv_sender, self.sender_layers, MARK, self.events.append)
        peer_connections = PeerConnections([(host, port)], limits=QUICK)
        self.receiver = ReceiveWorker(
            peer_connections,
            self.kv_sender,
            self.receiver_layers,
            self.receiver_mark,
            ModelShard(heads=HEADS),
            self.events.append,
        )
        self.values = {layer: torch.randn(70, 2, HEADS, WIDTH) for layer in range(LAYERS)}
        self.sender_blocks = ReadBlocks("g", (tuple(range(20, 38)),), 70)
        self.receiver_blocks = PlaceBlocks("t", (tuple(range(9, 0, -1)),), 0)

    def offer(self, codec: str = "raw", lasts_s: float = 30.0) -> str:
        handle = new_handle()
        self.sender.offer(SendOffer("g", "r", handle, codec, lasts_s, 70, "0" * 64))  # type: ignore[arg-type]
        return handle

    def compute(self, upto: int = 70, first: int = 0) -> None:
        for number, values in self.values.items():
            self.sender_layers[number].write(self.sender_blocks.tables, first, values[first:upto])
            self.sender.read_layer(number, [ReadBlocks("g", self.sender_blocks.tables, upto)])

    def fetch(self, handle: str, have: int = 0, within_s: float = 20.0) -> None:
        self.receiver.ask(FetchOrder("t", "r", self.kv, handle, within_s, have, 70, "0" * 64))

    def until_kv_arrives(self) -> None:
        until(lambda: (news := self.receiver.news()) and news.come)

    def received(self, number: int, first: int = 0) -> torch.Tensor:
        return self.receiver_layers[number].read(self.receiver_blocks.tables, first, 70)

    def state(self) -> object:
        until(lambda: any("gave" in line for line in self.events))
        return next(line["state"] for line in self.events if "gave" in line)

    def all_received(self, first: int = 0) -> bool:
        return all(torch.equal(self.received(at, first), value[first:]) for at, value in self.values.items())


@pytest.fixture
def pair() -> Iterator[WorkerPair]:
    made = WorkerPair()
    yield made
    made.sender.close()
    made.receiver.close()
    left = [one.name for one in threading.enumerate() if one.name.startswith(("kv-in", "kv-out"))]
    assert left == []
    assert made.sender.aside_bytes == 0


def test_kv_sent_after_each_prefill_step_arrives_whole_in_blocks_of_another_size(pair: WorkerPair) -> None:
    pair.fetch(pair.offer())
    pair.compute(33)
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    pair.compute(70, 33)
    pair.sender.keep(pair.sender_blocks)
    until(lambda: pair.receiver.results() == HERE)
    assert pair.all_received()
    assert pair.state() == "fetched"
    assert pair.sender.done() == {"g"}
    assert (pair.sender.open, pair.receiver.open) == (0, 0)


def test_late_receiver_gets_the_tokens_it_lacks(pair: WorkerPair) -> None:
    handle = pair.offer()
    pair.compute()
    pair.sender.keep(pair.sender_blocks)
    assert pair.sender.done() == {"g"}  # its blocks are free before the fetch
    pair.fetch(handle, have=24)
    pair.until_kv_arrives()
    cached_more = PlaceBlocks("t", pair.receiver_blocks.tables, 32)  # the cached prefix grew meanwhile
    pair.receiver.put(cached_more)
    until(lambda: pair.receiver.results() == HERE)
    assert pair.all_received(32)
    assert not pair.received(0)[:32].any()
    moved = next(line["moved_bytes"] for line in pair.events if "took" in line)
    assert moved == LAYERS * (70 - 24) * 2 * HEADS * WIDTH * 4


def test_codec_shrinks_kv_and_is_reported_as_lossy(pair: WorkerPair) -> None:
    pair.fetch(pair.offer("int8"))
    pair.compute()
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    until(lambda: pair.receiver.results() == HERE)
    news = pair.receiver.news()
    assert news is not None
    assert news.lossy == {"t"}
    assert not pair.all_received()
    assert all(torch.allclose(pair.received(at), value, atol=0.05) for at, value in pair.values.items())


def test_blocks_stay_until_fetched_without_host_memory(pair: WorkerPair) -> None:
    pair.sender.most_aside_bytes = 70 * 2 * HEADS * WIDTH * 4  # one layer
    handle = pair.offer()
    pair.compute()
    pair.sender.keep(pair.sender_blocks)
    assert pair.sender.done() == set()
    pair.fetch(handle)
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    until(lambda: pair.sender.done() == {"g"})
    until(lambda: pair.receiver.results() == HERE)
    assert pair.all_received()


def test_unclaimed_blocks_are_freed_at_the_deadline(pair: WorkerPair) -> None:
    pair.sender.most_aside_bytes = 0
    pair.offer(lasts_s=0.3)
    pair.compute()
    pair.sender.keep(pair.sender_blocks)
    assert pair.sender.done() == set()
    until(lambda: pair.sender.done() == {"g"})
    assert pair.state() == "gone"


def test_unclaimed_host_copy_is_freed_at_the_deadline(pair: WorkerPair) -> None:
    pair.offer(lasts_s=0.3)
    pair.compute()
    pair.sender.keep(pair.sender_blocks)
    assert pair.sender.done() == {"g"}
    assert pair.sender.aside_bytes > 0
    until(lambda: pair.sender.aside_bytes == 0)
    assert pair.state() == "gone"


def test_early_end_of_the_sender_fails_the_receiver(pair: WorkerPair) -> None:
    pair.fetch(pair.offer())
    pair.compute(33)
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    pair.sender.drop("g")
    until(lambda: pair.receiver.results() == FAILED)
    assert any("ended before" in str(line.get("problem")) for line in pair.events if "took" in line)


def test_dead_sender_leaves_the_blocks_to_be_recomputed(pair: WorkerPair) -> None:
    pair.fetch(pair.offer())
    pair.compute(33)
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    pair.kv_sender.close()
    until(lambda: pair.receiver.results() == FAILED)


def test_unreachable_sender_fails_before_blocks_are_allocated(pair: WorkerPair) -> None:
    pair.kv_sender.close()
    pair.fetch(new_handle())
    until(lambda: (news := pair.receiver.news()) and news.failed == {"t"})
    pair.receiver.put(pair.receiver_blocks)  # they were taken in the same step
    assert pair.receiver.results() == FAILED


def test_cancelled_request_returns_its_blocks_intact(pair: WorkerPair) -> None:
    pair.fetch(pair.offer())
    pair.compute(33)
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    pair.receiver.cancel("t")
    until(lambda: pair.receiver.results() == HERE)
    pair.sender.drop("g")


def test_unneeded_transfer_is_fetched_and_dropped(pair: WorkerPair) -> None:
    pair.fetch(pair.offer(), have=69)
    pair.receiver.put(PlaceBlocks("t"))
    pair.compute()
    assert pair.state() == "fetched"
    until(lambda: not pair.receiver.open)
    assert pair.receiver.results() == (set(), set())
    pair.sender.drop("g")


def test_cache_of_another_shape_is_refused(pair: WorkerPair) -> None:
    for number in range(LAYERS):
        pair.sender_layers[number] = layer(4, 2 * WIDTH)
        pair.values[number] = torch.randn(70, 2, HEADS, 2 * WIDTH)
    pair.fetch(pair.offer())
    pair.compute()
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    until(lambda: pair.receiver.results() == FAILED)
    assert any("expected [70, 2, 2, 8]" in str(line.get("problem")) for line in pair.events if "took" in line)


def test_lossy_kv_is_not_passed_on_as_exact(pair: WorkerPair) -> None:
    pair.fetch(pair.offer())
    pair.sender.lossy("g")
    until(lambda: (news := pair.receiver.news()) and news.failed == {"t"})
    assert any("under a codec" in str(line.get("problem")) for line in pair.events if "took" in line)
    pair.sender.drop("g")


def windowed(size: int, group: int) -> dict[int, VllmLayer]:
    """The second layer keeps a window of 20 tokens in blocks of its own."""
    return layers(size) | {1: layer(size, group=group, window=20)}


def test_only_the_visible_part_of_a_window_is_transferred() -> None:
    pair = WorkerPair(windowed(4, 1), windowed(8, 2))
    table = tuple(range(20, 38))
    pair.sender_blocks = ReadBlocks("g", (table, (0,) * 12 + table[:6]), 70)
    table_of_all = pair.receiver_blocks.tables[0]
    pair.receiver_blocks = PlaceBlocks("t", (table_of_all, (), (0,) * 6 + table_of_all[:3]), 0)
    pair.fetch(pair.offer())
    for number, values in pair.values.items():
        first = 48 if number == 1 else 0
        pair.sender_layers[number].write(pair.sender_blocks.tables, first, values[first:])
        pair.sender.read_layer(number, [pair.sender_blocks])
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    until(lambda: pair.receiver.results() == HERE)
    assert torch.equal(pair.received(1, 51), pair.values[1][51:])  # a query at 70 sees 51 and those behind it
    assert torch.equal(pair.received(2), pair.values[2])
    assert not pair.receiver_layers[1].read(pair.receiver_blocks.tables, 48, 51).any()
    moved = next(line["moved_bytes"] for line in pair.events if "took" in line)
    assert moved == (2 * 70 + 19) * 2 * HEADS * WIDTH * 4
    pair.sender.close()
    pair.receiver.close()


def test_window_evicted_before_its_read_fails_the_transfer() -> None:
    pair = WorkerPair(windowed(4, 0), windowed(8, 0))
    pair.sender.most_aside_bytes = 0
    handle = pair.offer()
    pair.compute(40)
    pair.sender.most_aside_bytes = 1 << 20
    pair.sender.keep(ReadBlocks("g", ((0,) * 18,), 70))
    pair.fetch(handle)
    until(lambda: pair.sender.done() == {"g"})
    assert pair.state() == "failed"
    assert any("holds no blocks" in str(line["problem"]) for line in pair.events if "gave" in line)
    pair.sender.close()
    pair.receiver.close()


def test_kv_of_another_model_is_refused() -> None:
    pair = WorkerPair(receiver_mark="another")
    pair.fetch(pair.offer(), within_s=0.5)
    pair.compute()
    until(lambda: (news := pair.receiver.news()) and news.failed == {"t"})
    pair.sender.close()
    pair.receiver.close()


def test_receiver_that_keeps_whole_windows_requests_them_whole() -> None:
    keeping = layers(8) | {1: layer(8, window=20, keeps_all=True)}
    pair = WorkerPair(layers(4) | {1: layer(4, window=20, keeps_all=True)}, keeping)
    pair.fetch(pair.offer())
    pair.compute()
    pair.until_kv_arrives()
    pair.receiver.put(pair.receiver_blocks)
    until(lambda: pair.receiver.results() == HERE)
    assert pair.all_received()
    pair.sender.close()
    pair.receiver.close()
    pair = WorkerPair(windowed(4, 0), keeping)
    pair.fetch(pair.offer())
    until(lambda: (news := pair.receiver.news()) and news.failed == {"t"})
    problem = next(str(line["problem"]) for line in pair.events if "took" in line)
    assert "wanted with all of its windows, which are not kept here" in problem
    pair.sender.close()
    pair.receiver.close()

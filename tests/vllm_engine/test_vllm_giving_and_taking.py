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
    giver: dict[int, VllmLayer] = field(default_factory=lambda: layers(4))
    taker: dict[int, VllmLayer] = field(default_factory=lambda: layers(8))
    told: list[dict[str, object]] = field(default_factory=list)
    mark: str = MARK  # Of the receiver's model.

    def __post_init__(self) -> None:
        self.sender = KvSender(limits=SenderLimits(beat_s=0.05, lease_s=1.0))
        host, port = self.sender.address
        self.kv = f"{host}:{port}"
        self.giving = SendWorker(self.sender, self.giver, MARK, self.told.append)
        peer_connections = PeerConnections([(host, port)], limits=QUICK)
        self.taking = ReceiveWorker(
            peer_connections, self.sender, self.taker, self.mark, ModelShard(heads=HEADS), self.told.append
        )
        self.values = {layer: torch.randn(70, 2, HEADS, WIDTH) for layer in range(LAYERS)}
        self.sent = ReadBlocks("g", (tuple(range(20, 38)),), 70)
        self.place = PlaceBlocks("t", (tuple(range(9, 0, -1)),), 0)

    def offer(self, codec: str = "raw", lasts_s: float = 30.0) -> str:
        handle = new_handle()
        self.giving.offer(SendOffer("g", "r", handle, codec, lasts_s, 70, "0" * 64))  # type: ignore[arg-type]
        return handle

    def compute(self, upto: int = 70, first: int = 0) -> None:
        for number, values in self.values.items():
            self.giver[number].write(self.sent.tables, first, values[first:upto])
            self.giving.read_layer(number, [ReadBlocks("g", self.sent.tables, upto)])

    def ask(self, handle: str, have: int = 0, within_s: float = 20.0) -> None:
        self.taking.ask(FetchOrder("t", "r", self.kv, handle, within_s, have, 70, "0" * 64))

    def come(self) -> None:
        until(lambda: (news := self.taking.news()) and news.come)

    def held(self, number: int, first: int = 0) -> torch.Tensor:
        return self.taker[number].read(self.place.tables, first, 70)

    def state(self) -> object:
        until(lambda: any("gave" in line for line in self.told))
        return next(line["state"] for line in self.told if "gave" in line)

    def whole(self, first: int = 0) -> bool:
        return all(torch.equal(self.held(at, first), value[first:]) for at, value in self.values.items())


@pytest.fixture
def pair() -> Iterator[WorkerPair]:
    made = WorkerPair()
    yield made
    made.giving.close()
    made.taking.close()
    left = [one.name for one in threading.enumerate() if one.name.startswith(("kv-in", "kv-out"))]
    assert left == []
    assert made.giving.aside_bytes == 0


def test_layers_are_transferred_step_by_step_between_different_blocks(pair: WorkerPair) -> None:
    pair.ask(pair.offer())
    pair.compute(33)
    pair.come()
    pair.taking.put(pair.place)
    pair.compute(70, 33)
    pair.giving.keep(pair.sent)
    until(lambda: pair.taking.results() == HERE)
    assert pair.whole()
    assert pair.state() == "fetched"
    assert pair.giving.done() == {"g"}
    assert (pair.giving.open, pair.taking.open) == (0, 0)


def test_late_receiver_gets_the_tokens_it_lacks(pair: WorkerPair) -> None:
    handle = pair.offer()
    pair.compute()
    pair.giving.keep(pair.sent)
    assert pair.giving.done() == {"g"}  # its blocks are free before anybody came
    pair.ask(handle, have=24)
    pair.come()
    pair.taking.put(PlaceBlocks("t", pair.place.tables, 32))  # it has found some more meanwhile
    until(lambda: pair.taking.results() == HERE)
    assert pair.whole(32)
    assert not pair.held(0)[:32].any()
    moved = next(line["moved_bytes"] for line in pair.told if "took" in line)
    assert moved == LAYERS * (70 - 24) * 2 * HEADS * WIDTH * 4


def test_codec_shrinks_kv_and_is_reported_as_lossy(pair: WorkerPair) -> None:
    pair.ask(pair.offer("int8"))
    pair.compute()
    pair.come()
    pair.taking.put(pair.place)
    until(lambda: pair.taking.results() == HERE)
    news = pair.taking.news()
    assert news is not None
    assert news.lossy == {"t"}
    assert not pair.whole()
    assert all(torch.allclose(pair.held(at), value, atol=0.05) for at, value in pair.values.items())


def test_blocks_stay_until_fetched_without_host_memory(pair: WorkerPair) -> None:
    pair.giving.most_aside_bytes = 70 * 2 * HEADS * WIDTH * 4  # one layer
    handle = pair.offer()
    pair.compute()
    pair.giving.keep(pair.sent)
    assert pair.giving.done() == set()
    pair.ask(handle)
    pair.come()
    pair.taking.put(pair.place)
    until(lambda: pair.giving.done() == {"g"})
    until(lambda: pair.taking.results() == HERE)
    assert pair.whole()


def test_unclaimed_blocks_are_freed_at_the_deadline(pair: WorkerPair) -> None:
    pair.giving.most_aside_bytes = 0
    pair.offer(lasts_s=0.3)
    pair.compute()
    pair.giving.keep(pair.sent)
    assert pair.giving.done() == set()
    until(lambda: pair.giving.done() == {"g"})
    assert pair.state() == "gone"


def test_unclaimed_host_copy_is_freed_at_the_deadline(pair: WorkerPair) -> None:
    pair.offer(lasts_s=0.3)
    pair.compute()
    pair.giving.keep(pair.sent)
    assert pair.giving.done() == {"g"}
    assert pair.giving.aside_bytes > 0
    until(lambda: pair.giving.aside_bytes == 0)
    assert pair.state() == "gone"


def test_early_end_of_the_sender_fails_the_receiver(pair: WorkerPair) -> None:
    pair.ask(pair.offer())
    pair.compute(33)
    pair.come()
    pair.taking.put(pair.place)
    pair.giving.drop("g")
    until(lambda: pair.taking.results() == FAILED)
    assert any("ended before" in str(line.get("problem")) for line in pair.told if "took" in line)


def test_dead_sender_leaves_the_blocks_to_be_recomputed(pair: WorkerPair) -> None:
    pair.ask(pair.offer())
    pair.compute(33)
    pair.come()
    pair.taking.put(pair.place)
    pair.sender.close()
    until(lambda: pair.taking.results() == FAILED)


def test_unreachable_sender_fails_before_blocks_are_allocated(pair: WorkerPair) -> None:
    pair.sender.close()
    pair.ask(new_handle())
    until(lambda: (news := pair.taking.news()) and news.failed == {"t"})
    pair.taking.put(pair.place)  # they were taken in the same step
    assert pair.taking.results() == FAILED


def test_cancelled_request_returns_its_blocks_intact(pair: WorkerPair) -> None:
    pair.ask(pair.offer())
    pair.compute(33)
    pair.come()
    pair.taking.put(pair.place)
    pair.taking.cancel("t")
    until(lambda: pair.taking.results() == HERE)
    pair.giving.drop("g")


def test_unneeded_transfer_is_fetched_and_dropped(pair: WorkerPair) -> None:
    pair.ask(pair.offer(), have=69)
    pair.taking.put(PlaceBlocks("t"))
    pair.compute()
    assert pair.state() == "fetched"
    until(lambda: not pair.taking.open)
    assert pair.taking.results() == (set(), set())
    pair.giving.drop("g")


def test_cache_of_another_shape_is_refused(pair: WorkerPair) -> None:
    for number in range(LAYERS):
        pair.giver[number] = layer(4, 2 * WIDTH)
        pair.values[number] = torch.randn(70, 2, HEADS, 2 * WIDTH)
    pair.ask(pair.offer())
    pair.compute()
    pair.come()
    pair.taking.put(pair.place)
    until(lambda: pair.taking.results() == FAILED)
    assert any("expected [70, 2, 2, 8]" in str(line.get("problem")) for line in pair.told if "took" in line)


def test_lossy_kv_is_not_passed_on_as_exact(pair: WorkerPair) -> None:
    pair.ask(pair.offer())
    pair.giving.lossy("g")
    until(lambda: (news := pair.taking.news()) and news.failed == {"t"})
    assert any("under a codec" in str(line.get("problem")) for line in pair.told if "took" in line)
    pair.giving.drop("g")


def windowed(size: int, group: int) -> dict[int, VllmLayer]:
    """The second layer keeps a window of 20 tokens in blocks of its own."""
    return layers(size) | {1: layer(size, group=group, window=20)}


def test_only_the_visible_part_of_a_window_is_transferred() -> None:
    pair = WorkerPair(windowed(4, 1), windowed(8, 2))
    table = tuple(range(20, 38))
    pair.sent = ReadBlocks("g", (table, (0,) * 12 + table[:6]), 70)
    whole = pair.place.tables[0]
    pair.place = PlaceBlocks("t", (whole, (), (0,) * 6 + whole[:3]), 0)
    pair.ask(pair.offer())
    for number, values in pair.values.items():
        first = 48 if number == 1 else 0
        pair.giver[number].write(pair.sent.tables, first, values[first:])
        pair.giving.read_layer(number, [pair.sent])
    pair.come()
    pair.taking.put(pair.place)
    until(lambda: pair.taking.results() == HERE)
    assert torch.equal(pair.held(1, 51), pair.values[1][51:])  # a query at 70 sees 51 and those behind it
    assert torch.equal(pair.held(2), pair.values[2])
    assert not pair.taker[1].read(pair.place.tables, 48, 51).any()
    moved = next(line["moved_bytes"] for line in pair.told if "took" in line)
    assert moved == (2 * 70 + 19) * 2 * HEADS * WIDTH * 4
    pair.giving.close()
    pair.taking.close()


def test_window_evicted_before_its_read_fails_the_transfer() -> None:
    pair = WorkerPair(windowed(4, 0), windowed(8, 0))
    pair.giving.most_aside_bytes = 0
    handle = pair.offer()
    pair.compute(40)
    pair.giving.most_aside_bytes = 1 << 20
    pair.giving.keep(ReadBlocks("g", ((0,) * 18,), 70))
    pair.ask(handle)
    until(lambda: pair.giving.done() == {"g"})
    assert pair.state() == "failed"
    assert any("holds no blocks" in str(line["problem"]) for line in pair.told if "gave" in line)
    pair.giving.close()
    pair.taking.close()


def test_kv_of_another_model_is_refused() -> None:
    pair = WorkerPair(mark="another")
    pair.ask(pair.offer(), within_s=0.5)
    pair.compute()
    until(lambda: (news := pair.taking.news()) and news.failed == {"t"})
    pair.giving.close()
    pair.taking.close()


def test_receiver_that_keeps_whole_windows_requests_them_whole() -> None:
    keeping = layers(8) | {1: layer(8, window=20, keeps_all=True)}
    pair = WorkerPair(layers(4) | {1: layer(4, window=20, keeps_all=True)}, keeping)
    pair.ask(pair.offer())
    pair.compute()
    pair.come()
    pair.taking.put(pair.place)
    until(lambda: pair.taking.results() == HERE)
    assert pair.whole()
    pair.giving.close()
    pair.taking.close()
    pair = WorkerPair(windowed(4, 0), keeping)
    pair.ask(pair.offer())
    until(lambda: (news := pair.taking.news()) and news.failed == {"t"})
    problem = next(str(line["problem"]) for line in pair.told if "took" in line)
    assert "wanted with all of its windows, which are not kept here" in problem
    pair.giving.close()
    pair.taking.close()

"""KV from one worker's blocks into another's over the real transport, and whatever may go wrong on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from potluck.kv.handles import new_handle
from potluck.kv.link.links import LinkLimits, Links
from potluck.kv.send.outbox import Outbox
from potluck.kv.send.stream import OutboxLimits
from potluck.vllm.blocks import Blocks, Plain
from potluck.vllm.booking import Ask, Offer, Place, Read
from potluck.vllm.giving import Giving
from potluck.vllm.taking import Taking

MARK = "vllm-test"
LAYERS, HEADS, WIDTH = 3, 2, 8
QUICK = LinkLimits(stall_s=2.0, silence_s=3.0)


def until(true: Callable[[], object]) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("did not come true")


def blocks(size: int) -> dict[int, Blocks]:
    return {layer: Plain(torch.zeros(40, HEADS, size, 2 * WIDTH), "kv") for layer in range(LAYERS)}


@dataclass
class Pair:
    giver: dict[int, Blocks] = field(default_factory=lambda: blocks(4))
    taker: dict[int, Blocks] = field(default_factory=lambda: blocks(8))
    told: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outbox = Outbox(limits=OutboxLimits(beat_s=0.05, lease_s=1.0))
        host, port = self.outbox.address
        self.kv = f"{host}:{port}"
        self.giving = Giving(self.outbox, self.giver, MARK, self.told.append)
        links = Links([(host, port)], limits=QUICK)
        self.taking = Taking(links, self.taker, MARK, 0, self.told.append)
        self.values = {layer: torch.randn(70, 2, HEADS, WIDTH) for layer in range(LAYERS)}
        self.sent = Read("g", tuple(range(20, 38)), 70)
        self.place = Place("t", tuple(range(9, 0, -1)), 0)

    def offer(self, codec: str = "raw", lasts_s: float = 30.0) -> str:
        handle = new_handle()
        self.giving.offer(Offer("g", "r", handle, codec, lasts_s, 70, "0" * 64))  # type: ignore[arg-type]
        return handle

    def compute(self, upto: int = 70, first: int = 0) -> None:
        for layer, values in self.values.items():
            self.giver[layer].write(torch.tensor(self.sent.table), first, values[first:upto])
            self.giving.read_layer(layer, [Read("g", self.sent.table, upto)])

    def ask(self, handle: str, have: int = 0, within_s: float = 20.0) -> None:
        self.taking.ask(Ask("t", "r", self.kv, handle, within_s, have, 70, "0" * 64))

    def come(self) -> None:
        until(lambda: self.taking.news().come)

    def held(self, layer: int, first: int = 0) -> torch.Tensor:
        return self.taker[layer].read(torch.tensor(self.place.table), first, 70)

    def state(self) -> object:
        until(lambda: any("gave" in line for line in self.told))
        return next(line["state"] for line in self.told if "gave" in line)

    def whole(self, first: int = 0) -> bool:
        return all(torch.equal(self.held(at, first), each[first:]) for at, each in self.values.items())


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.giving.close()
    made.taking.close()
    left = [one.name for one in threading.enumerate() if one.name.startswith(("kv-in", "kv-out"))]
    assert left == []
    assert made.giving.aside_bytes == 0


def test_layers_cross_step_by_step_between_unlike_blocks(pair: Pair) -> None:
    handle = pair.offer()
    pair.ask(handle)
    pair.compute(33)
    pair.come()
    pair.taking.put(pair.place)
    pair.compute(70, 33)
    pair.giving.keep(pair.sent)
    until(lambda: pair.taking.received() == {"t"})
    assert pair.whole()
    assert pair.state() == "fetched"
    assert pair.giving.done() == {"g"}
    assert (pair.taking.broken(), pair.giving.open, pair.taking.open) == (set(), 0, 0)


def test_a_receiver_that_comes_late_gets_what_it_lacks(pair: Pair) -> None:
    handle = pair.offer()
    pair.compute()
    pair.giving.keep(pair.sent)
    assert pair.giving.done() == {"g"}  # its blocks are free before anybody came
    pair.ask(handle, have=24)
    pair.come()
    pair.taking.put(Place("t", pair.place.table, 32))  # it has found some more meanwhile
    until(lambda: pair.taking.received() == {"t"})
    assert pair.whole(32)
    assert not pair.held(0)[:32].any()
    moved = next(line["moved_bytes"] for line in pair.told if "took" in line)
    assert moved == LAYERS * (70 - 24) * 2 * HEADS * WIDTH * 4


def test_codecs_make_it_small_and_are_told_of(pair: Pair) -> None:
    handle = pair.offer("int8")
    pair.ask(handle)
    pair.compute()
    pair.come()
    pair.taking.put(pair.place)
    until(lambda: pair.taking.received() == {"t"})
    assert pair.taking.news().lossy == {"t"}
    assert not pair.whole()
    assert all(torch.allclose(pair.held(at), each, atol=0.05) for at, each in pair.values.items())


def test_without_room_in_the_host_blocks_stay_until_somebody_comes(pair: Pair) -> None:
    pair.giving.most_aside_bytes = 70 * 2 * HEADS * WIDTH * 4  # one layer
    handle = pair.offer()
    pair.compute()
    pair.giving.keep(pair.sent)
    assert pair.giving.done() == set()
    pair.ask(handle)
    pair.come()
    pair.taking.put(pair.place)
    until(lambda: pair.giving.done() == {"g"})
    until(lambda: pair.taking.received() == {"t"})
    assert pair.whole()


def test_blocks_that_nobody_comes_for_are_free_when_the_time_is_over(pair: Pair) -> None:
    pair.giving.most_aside_bytes = 0
    pair.offer(lasts_s=0.3)
    pair.compute()
    pair.giving.keep(pair.sent)
    assert pair.giving.done() == set()
    until(lambda: pair.giving.done() == {"g"})
    assert pair.state() == "gone"


def test_what_lies_in_the_host_is_let_go_when_the_time_is_over(pair: Pair) -> None:
    pair.offer(lasts_s=0.3)
    pair.compute()
    pair.giving.keep(pair.sent)
    assert pair.giving.done() == {"g"}
    assert pair.giving.aside_bytes > 0
    until(lambda: pair.giving.aside_bytes == 0)
    assert pair.state() == "gone"


def test_a_sender_that_ends_early_is_told_to_the_receiver(pair: Pair) -> None:
    handle = pair.offer()
    pair.ask(handle)
    pair.compute(33)
    pair.come()
    pair.taking.put(pair.place)
    pair.giving.drop("g")
    until(lambda: pair.taking.received() == {"t"})
    assert pair.taking.broken() == set(pair.place.table)
    assert any("ended before" in str(line.get("problem")) for line in pair.told if "took" in line)


def test_a_sender_that_dies_leaves_blocks_to_compute(pair: Pair) -> None:
    handle = pair.offer()
    pair.ask(handle)
    pair.compute(33)
    pair.come()
    pair.taking.put(pair.place)
    pair.outbox.close()
    until(lambda: pair.taking.received() == {"t"})
    assert pair.taking.broken() == set(pair.place.table)


def test_a_sender_that_was_never_there_is_found_out_before_blocks_are_taken(pair: Pair) -> None:
    pair.outbox.close()
    pair.ask(new_handle())
    until(lambda: pair.taking.news().failed == {"t"})
    pair.taking.put(pair.place)  # they were taken in the same step
    assert pair.taking.received() == {"t"}
    assert pair.taking.broken() == set(pair.place.table)


def test_a_request_that_is_cancelled_gives_its_blocks_back_unbroken(pair: Pair) -> None:
    handle = pair.offer()
    pair.ask(handle)
    pair.compute(33)
    pair.come()
    pair.taking.put(pair.place)
    pair.taking.cancel("t")
    until(lambda: pair.taking.received() == {"t"})
    assert pair.taking.broken() == set()
    pair.giving.drop("g")


def test_what_nobody_needs_is_taken_and_let_go(pair: Pair) -> None:
    handle = pair.offer()
    pair.ask(handle, have=69)
    pair.taking.put(Place("t"))
    pair.compute()
    assert pair.state() == "fetched"
    until(lambda: not pair.taking.open)
    assert pair.taking.received() == set()
    pair.giving.drop("g")


def test_a_cache_of_another_shape_is_not_taken(pair: Pair) -> None:
    for layer in range(LAYERS):
        pair.giver[layer] = Plain(torch.zeros(40, HEADS, 4, 4 * WIDTH), "kv")
        pair.values[layer] = torch.randn(70, 2, HEADS, 2 * WIDTH)
    handle = pair.offer()
    pair.ask(handle)
    pair.compute()
    pair.come()
    pair.taking.put(pair.place)
    until(lambda: pair.taking.received() == {"t"})
    assert pair.taking.broken() == set(pair.place.table)
    assert any("expected float32" in str(line.get("problem")) for line in pair.told if "took" in line)


def test_what_came_in_fewer_bits_does_not_go_on_as_exact(pair: Pair) -> None:
    handle = pair.offer()
    pair.ask(handle)
    pair.giving.lossy("g")
    until(lambda: pair.taking.news().failed == {"t"})
    assert any("under a codec" in str(line.get("problem")) for line in pair.told if "took" in line)
    pair.giving.drop("g")

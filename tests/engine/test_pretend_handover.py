"""What engines that pretend hand over: when it would be there, and with which step it leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pretend_kit import LLAMA, TIMER, PretendDesk, executor

from potluck.engine.compute.emulated import steps_of
from potluck.engine.compute.executor import CacheExport
from potluck.engine.compute.work import RunnerSize, SequenceWork
from potluck.engine.loop.messages import JobComputed, JobEnded, LayerSent, RowReady
from potluck.engine.mock.kv_sizes import KvSizes
from potluck.engine.mock.mock_chunks import ChunkTimes, parcel_of, times_of
from potluck.engine.mock.mock_prefix_transfer import lent
from potluck.engine.mock.mock_transfer import MockKvTransfer
from potluck.engine.mock.nic_schedule import NicSchedule
from potluck.kv.chunks import KvChunk
from potluck.perf.delays.transfer import AlphaBeta, overlapped_transfer_s
from potluck.perf.sizes.memory import kv_bytes

SIZE = RunnerSize(8, 200, 4096, 512)


def prompt(count: int) -> tuple[int, ...]:
    return tuple((7 * place + 3) % 400 for place in range(count))


def test_what_comes_is_here_no_faster_than_the_receiver_s_card_takes_it() -> None:
    """A card of 1 GB/s: parcels that come faster queue there, slower ones do not, and pauses are not made up for."""
    now_s = [10.0]
    kv_transfer = MockKvTransfer(KvSizes(LLAMA), AlphaBeta(0.0, 1e9), clock=lambda: now_s[0])
    parcels = [lent([1] * 62, layer, 0, 992) for layer in range(KvSizes(LLAMA).layers)]
    each_s = kv_transfer.kv_bytes(parcels[0]) / 1e9
    here_s = [kv_transfer.here_s("peer", parcel) for parcel in parcels]
    assert here_s == pytest.approx([10.0 + (place + 1 / 8) * each_s for place in range(len(parcels))])
    now_s[0] = 11.0
    for parcel in parcels:
        assert kv_transfer.here_s("peer", parcel) == pytest.approx(now_s[0] + each_s / 8)
        now_s[0] += 2 * each_s


def test_a_thin_link_from_one_sender_holds_up_no_other() -> None:
    """The card is shared; what one sender's link brings only later takes nothing of it before."""
    now_s = 10.0
    clock = lambda: now_s  # noqa: E731
    cargo = KvSizes(LLAMA)
    thin, wide, receiver = (
        MockKvTransfer(cargo, AlphaBeta(0.0, rate), clock=clock) for rate in (1e6, 1e9, 1e9)
    )
    parcels = [lent([1] * 62, layer, 0, 992) for layer in range(cargo.layers)]
    size = receiver.kv_bytes(parcels[0])
    for parcel in parcels:
        slow_s = receiver.here_s("thin", thin.leaves("receiver", computed(parcel, now_s)))
    assert slow_s == pytest.approx(10.0 + len(parcels) * size / 1e6)
    quick = [receiver.here_s("wide", wide.leaves("receiver", computed(each, now_s))) for each in parcels]
    assert quick[0] < 10.0 + 3 * size / 1e9
    assert quick[-1] <= 10.0 + 2 * len(parcels) * size / 1e9 + 1e-6
    third = MockKvTransfer(cargo, AlphaBeta(0.0, 1e9), clock=clock)
    last = [receiver.here_s("third", third.leaves("receiver", computed(each, now_s))) for each in parcels]
    assert last[-1] >= 10.0 + 2 * len(parcels) * size / 1e9, "but two that send at once share it"


def computed(parcel: KvChunk, at_s: float) -> KvChunk:
    return parcel_of(7, parcel.layer, parcel.first, parcel.stop, times=ChunkTimes(at_s, at_s, at_s))


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 5)), min_size=1, max_size=12))
def test_a_card_takes_one_thing_at_a_time_and_is_never_idle_while_something_waits(
    asked: list[tuple[float, float]],
) -> None:
    card, step_s = NicSchedule(), 0.25
    asked = [(round(at / step_s) * step_s, max(1, round(span / step_s)) * step_s) for at, span in asked]
    busy: set[int] = set()
    for at_s, for_s in asked:
        cells, cell = [], round(at_s / step_s)
        while len(cells) < for_s / step_s:
            if cell not in busy:
                cells.append(cell)
            cell += 1
        busy.update(cells)
        assert card.book(at_s, for_s, 0.0) == pytest.approx((cells[-1] + 1) * step_s)


@pytest.mark.parametrize("late_s", [0.0, 0.02])
@pytest.mark.parametrize("cards", [(3e9, 1e9), (1e9, 3e9), (1e8, 1e9), (1e11, 1e11), (4e9, 4e9)])
def test_a_hand_over_takes_what_the_formula_says(cards: tuple[float, float], late_s: float) -> None:
    """Each of the large model's layers leaves when it is computed, and the slower card says how fast; that parcels
    themselves are late on their way is nothing."""
    now_s, alpha_s = 5.0, 0.001
    clock = lambda: now_s  # noqa: E731
    made, cargo = executor(RunnerSize(4, 100, 1 << 12, 1 << 12), clock=clock), KvSizes(LLAMA)
    sender = MockKvTransfer(cargo, AlphaBeta(alpha_s, cards[0]), clock=clock)
    receiver = MockKvTransfer(cargo, AlphaBeta(alpha_s, cards[1]), clock=clock)
    row, here_s = made.open(), []
    made.grow(row, 800)
    work = SequenceWork(row, 0, prompt(800), "none")

    def deliver(_row: int, parcels: tuple[KvChunk, ...]) -> None:
        nonlocal now_s
        now_s += late_s / 2
        left = sender.leaves("peer", parcels[0])
        now_s += late_s / 2
        here_s.append(receiver.here_s("peer", left) - late_s / 2)

    made.begin([work], [], [CacheExport(row, 0, 800)], deliver)
    while len(here_s) < cargo.layers:
        now_s = max(now_s, made.due_s or 0.0)
        made.deliver(now_s)
    prefill_s = float(TIMER.step_s(steps_of([work]))[0])
    wire_s = kv_bytes(LLAMA, 800) / min(cards)
    tail_s = float(overlapped_transfer_s(prefill_s, LLAMA.layer_count, wire_s, alpha_s))
    assert here_s[-1] == pytest.approx(5.0 + prefill_s + tail_s, abs=1e-6)


def test_a_receiver_that_comes_while_the_step_is_under_way_gets_the_layers_as_they_are_computed() -> None:
    """What was computed before it came leaves then, and not earlier."""
    now_s = 0.0
    made, cargo = executor(SIZE, clock=lambda: now_s), KvSizes(LLAMA)
    sent: list[tuple[float, int, ChunkTimes | None]] = []
    desk_tells = lambda _row, parcels: sent.append((now_s, parcels[0].layer, times_of(parcels[0])))  # noqa: E731
    row = made.open()
    made.grow(row, 64)
    assert not made.join(CacheExport(row, 0, 64))  # nothing is under way
    made.begin([SequenceWork(row, 0, prompt(64), "none")], [], [], desk_tells)
    length_s = made.due_s
    assert length_s is not None
    layer_s = length_s / cargo.layers
    now_s = 1.5 * layer_s
    assert made.join(CacheExport(row, 0, 64))
    while (due_s := made.due_s) is not None and len(sent) < cargo.layers:
        now_s = max(now_s, due_s)
        made.deliver(now_s)
    whens = [1.5 * layer_s, *(layer_s * (place + 1) for place in range(1, cargo.layers))]
    assert [(layer, when) for when, layer, _ in sent] == [
        (layer, pytest.approx(when)) for layer, when in enumerate(whens)
    ]
    firsts = [times.first_s for _, _, times in sent if times is not None]
    assert firsts == pytest.approx([1.5 * layer_s] * 2 + [layer_s * n for n in range(2, cargo.layers)])


def test_layers_leave_while_their_step_is_under_way() -> None:
    now_s = 0.0
    made = executor(SIZE, clock=lambda: now_s)
    row, layers = made.open(), KvSizes(LLAMA).layers
    made.grow(row, 64)
    sent: list[tuple[float, int]] = []
    land = made.begin(
        [SequenceWork(row, 0, prompt(64), "none")],
        [],
        [CacheExport(row, 0, 64)],
        lambda _row, parcels: sent.append((now_s, parcels[0].layer)),
    )
    length_s = float(TIMER.step_s(steps_of([SequenceWork(row, 0, prompt(64), "none")]))[0])
    while made.due_s is not None and len(sent) < layers:
        now_s = made.due_s
        made.deliver(now_s)
    assert [layer for _, layer in sent] == list(range(layers))
    assert [when for when, _ in sent] == pytest.approx([length_s * (n + 1) / layers for n in range(layers)])
    assert land() == []


def test_a_hand_over_begins_while_both_ends_compute() -> None:
    """A receiver that attaches during the only step of a prompt gets all of it with that step; and it gets a row
    although a step of its own is under way."""
    sender, receiver = PretendDesk(), PretendDesk()
    tokens = prompt(100)
    source = sender.submit(tokens, stop=len(tokens) - 1)
    sender.turn()
    assert sender.loop.microbatches.flying
    busy = receiver.submit(prompt(40), 8)
    receiver.turn()
    assert receiver.loop.microbatches.flying
    target = receiver.submit(tokens, 4, start=len(tokens) - 1)
    about = sender.loop.attach(source, receiver.loop.look_up(target), sender.now_s)
    receiver.loop.want(target)
    assert any(isinstance(event, RowReady) for event in receiver.said[target])
    sender.run()
    sent = [event for event in sender.said[source] if isinstance(event, LayerSent)]
    assert [event.last for event in sent] == [False] * 3 + [True]
    receiver.loop.expect(target, about)
    for event in sent:
        receiver.loop.accept(target, event.parcels[0])
    receiver.loop.arrived(target)
    receiver.run()
    alone = PretendDesk()
    whole = alone.submit(tokens, 4)
    alone.run()
    assert receiver.tokens(target) == alone.tokens(whole)
    assert len(receiver.tokens(busy)) == 8
    computed = [type(event) for event in sender.said[source] if not isinstance(event, JobEnded)]
    assert computed.index(JobComputed) > computed.index(LayerSent)

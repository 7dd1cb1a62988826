"""A cache that crosses as bytes: at every cut, for every kind of layer, and with everything that can be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_models import KINDS, WINDOW, greedy, opened, prompt, run, runner, same
from torch import Tensor

from potluck.core.errors import PotluckError
from potluck.engine.compute.runner import Runner, SequenceWork
from potluck.engine.memory.handover import IncomingHandover, KvChunk, KvManifest, manifest, pack, token_hash

LENGTH, NEXT = 300, 40
TOKENS = prompt(LENGTH)


def parcels(engine: Runner, row: int, start: int, stop: int) -> list[KvChunk]:
    layers = range(engine.stack.first, engine.stack.last)
    found = [parcel for layer in layers for parcel in pack(engine, row, layer, start, stop)]
    return [replace(parcel, data=bytes(parcel.data)) for parcel in found]


def arrive(engine: Runner, row: int, about: KvManifest, cargo: list[KvChunk]) -> None:
    arrival = IncomingHandover(engine, row, about, TOKENS)
    for parcel in cargo:
        arrival.accept(parcel)
    arrival.finish()


def whole(engine: Runner) -> tuple[Tensor, list[int]]:
    row = opened(engine, LENGTH)
    logits = run(engine, row, TOKENS, [LENGTH])
    said = greedy(engine, row, logits, 3)
    engine.tables.close(row)
    return logits, said


@pytest.mark.parametrize("kind", ["full", "window", "latent", "linear", "hybrid"])
def test_every_cut_in_two_gives_the_same_tokens(kind: str) -> None:
    """The hybrid has all kinds of layers and is cut at every token, the others at every seventh. Behind every seventh
    cut, and near the end, all the rest is computed, behind the others the next tokens."""
    sender, receiver = runner(KINDS[kind]), runner(KINDS[kind])
    expected, said = whole(receiver)
    source = opened(sender, LENGTH)
    for cut in range(1, LENGTH):
        sender.step([SequenceWork(source, cut - 1, TOKENS[cut - 1 : cut], "none")])
        if kind != "hybrid" and cut % 7:
            continue
        row = receiver.tables.open()
        arrive(receiver, row, manifest(sender, TOKENS, 0, cut), parcels(sender, source, 0, cut))
        stop = LENGTH if cut % 7 == 0 else min(cut + NEXT, LENGTH)
        receiver.tables.grow(row, stop)
        logits = receiver.step([SequenceWork(row, cut, TOKENS[cut:stop])])
        assert same(logits, expected[stop - 1 : stop]), cut
        if stop == LENGTH and cut % 10 == 0:
            assert greedy(receiver, row, logits, 3) == said
        receiver.tables.close(row)
    receiver.tables.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(16, 160), (5, 93), (299,), (100, 101)])
def test_segments_on_machines_of_their_own(kind: str, cuts: tuple[int, ...]) -> None:
    expected, said = whole(runner(KINDS[kind]))
    start, cargo, about = 0, [], None
    for stop in (*cuts, LENGTH):
        engine = runner(KINDS[kind])
        row = engine.tables.open()
        if about is not None:
            arrive(engine, row, about, cargo)
        engine.tables.grow(row, LENGTH)
        logits = run(engine, row, TOKENS[start:stop], [64] * 9)
        assert same(logits, expected[start:stop])
        start, cargo, about = stop, parcels(engine, row, 0, stop), manifest(engine, TOKENS, 0, stop)
    assert greedy(engine, row, logits, 3) == said


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_only_what_the_receiver_lacks_crosses(kind: str) -> None:
    sender, receiver = runner(KINDS[kind]), runner(KINDS[kind])
    expected, _ = whole(receiver)
    source, row = opened(sender, LENGTH), opened(receiver, LENGTH)
    run(sender, source, TOKENS[:211], [211])
    run(receiver, row, TOKENS[:70], [70])
    cargo = parcels(sender, source, 70, 211)
    arrive(receiver, row, manifest(sender, TOKENS, 70, 211), cargo)
    assert same(run(receiver, row, TOKENS[211:], [LENGTH]), expected[211:])
    for parcel in cargo:
        entries = parcel.stop - parcel.first
        assert (
            entries == {"kv": 141, "latent": 141, "conv": 0, "memory": 0}[parcel.part]
            or entries == WINDOW - 1
        )


def test_a_layer_can_leave_as_soon_as_it_is_computed() -> None:
    sender, receiver = runner(KINDS["hybrid"]), runner(KINDS["hybrid"])
    expected, _ = whole(receiver)
    source, row = opened(sender, LENGTH), receiver.tables.open()
    run(sender, source, TOKENS[:100], [100])
    arrival = IncomingHandover(receiver, row, manifest(sender, TOKENS, 0, 150), TOKENS)
    heard: list[int] = []

    def send(layer: int) -> None:
        heard.append(layer)
        for parcel in pack(sender, source, layer, 0, 150):
            arrival.accept(replace(parcel, data=bytes(parcel.data)))

    sender.step([SequenceWork(source, 100, TOKENS[100:150], "none")], on_layer=send)
    arrival.finish()
    assert heard == [0, 1, 2, 3]
    receiver.tables.grow(row, LENGTH)
    assert same(run(receiver, row, TOKENS[150:], [LENGTH]), expected[150:])


def test_stages_hand_over_their_own_layers() -> None:
    config = KINDS["hybrid"]
    expected, _ = whole(runner(config))
    ranges = [(0, 1), (1, 4)]
    senders = [runner(config, *each) for each in ranges]
    receivers = [runner(config, *each) for each in ranges]
    rows = [opened(stage, LENGTH) for stage in senders]
    hidden = senders[0].step([SequenceWork(rows[0], 0, TOKENS[:77])])
    senders[1].step([SequenceWork(rows[1], 0, TOKENS[:77])], hidden)
    for sender, receiver, row in zip(senders, receivers, rows, strict=True):
        arrive(receiver, receiver.tables.open(), manifest(sender, TOKENS, 0, 77), parcels(sender, row, 0, 77))
        receiver.tables.grow(0, LENGTH)
    hidden = receivers[0].step([SequenceWork(0, 77, TOKENS[77:])])
    assert same(receivers[1].step([SequenceWork(0, 77, TOKENS[77:])], hidden), expected[-1:])


def broken(cargo: list[KvChunk]) -> dict[str, list[KvChunk]]:
    first, rest = cargo[0], cargo[1:]
    nan = torch.full((len(first.data) // 4,), torch.nan).numpy().tobytes()
    return {
        "a parcel short": rest,
        "a parcel twice": [first, *cargo],
        "too few bytes": [replace(first, data=first.data[:-4]), *rest],
        "too many bytes": [replace(first, data=bytes(first.data) + b"1234"), *rest],
        "another shape": [replace(first, shape=first.shape[::-1]), *rest],
        "a vast shape": [replace(first, shape=(2**62, 2**62)), *rest],
        "another format": [replace(first, dtype="float16"), *rest],
        "another layer": [replace(first, layer=9), *rest],
        "another part": [replace(first, part="latent"), *rest],
        "other tokens": [replace(first, first=first.first + 1), *rest],
        "another end": [replace(first, stop=first.stop + 1), *rest],
        "no numbers": [replace(first, data=nan), *rest],
    }


@pytest.mark.parametrize("kind", ["full", "linear", "hybrid"])
def test_what_is_wrong_with_a_parcel_is_one_line_and_harms_nobody(kind: str) -> None:
    sender, receiver = runner(KINDS[kind]), runner(KINDS[kind])
    expected, _ = whole(receiver)
    source = opened(sender, LENGTH)
    run(sender, source, TOKENS[:90], [90])
    about, cargo = manifest(sender, TOKENS, 0, 90), parcels(sender, source, 0, 90)
    for what, bad in broken(cargo).items():
        row = receiver.tables.open()
        with pytest.raises(PotluckError) as caught:
            arrive(receiver, row, about, bad)
        assert "\n" not in str(caught.value), what
        assert str(caught.value).startswith("hand-over"), what
        assert receiver.tables.lengths[row] == 0
        receiver.tables.close(row)
        receiver.tables.check()
    row = receiver.tables.open()
    arrive(receiver, row, about, cargo)
    receiver.tables.grow(row, LENGTH)
    assert same(run(receiver, row, TOKENS[90:], [LENGTH]), expected[90:])


def test_a_hand_over_of_another_model_or_other_tokens_is_refused() -> None:
    engine = runner(KINDS["full"])
    row = engine.tables.open()
    good = manifest(engine, TOKENS, 0, 90)
    for bad in (
        replace(good, fingerprint=runner(KINDS["window"]).fingerprint),
        replace(good, token_hash=token_hash(TOKENS[1:91])),
        replace(good, start=5),
        replace(good, start=90),
        replace(good, stop=LENGTH + 1),
        replace(good, start=-1),
    ):
        with pytest.raises(PotluckError, match="^hand-over: "):
            IncomingHandover(engine, row, bad, TOKENS)
    assert IncomingHandover(engine, row, good, TOKENS).missing == 2


def test_what_a_row_does_not_hold_cannot_be_sent() -> None:
    engine = runner(KINDS["hybrid"])
    row = opened(engine, LENGTH)
    run(engine, row, TOKENS[:90], [90])
    for layer, start, stop in ((0, 0, 89), (1, 0, 91), (1, 50, 50), (2, -1, 90), (2, 0, 40), (4, 0, 90)):
        with pytest.raises(PotluckError):
            pack(engine, row, layer, start, stop)
    assert pack(engine, row, 1, 0, 40)[0].shape == (40, 2, 2, 16)

"""Stock vLLM with windowed attention in little memory: transfers, preemption, damage."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm_kit import GEMMA, LAYERS, TOKEN_BYTES, VOCAB, WINDOW, Instance, handed, make_model, needs_vllm
from vllm_relay import Relay

pytestmark = [needs_vllm, pytest.mark.vllm_all]

Pair = tuple[Instance, Instance]
SMALL = ("--kv-cache-memory-bytes", str(4 << 20))  # Some 4,000 tokens: a dozen requests at once do not fit.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model(folder / "tiny", GEMMA)
    made = (
        Instance(model, folder / "a.log", more=SMALL, shared_memory=False),
        Instance(model, folder / "b.log", more=SMALL, shared_memory=False, block_tokens=64),
    )
    try:
        yield made[0].ready(), made[1].ready()
    finally:
        for item in made:
            item.end()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as made:
        yield made


def prompt(seed: object, tokens: int) -> list[int]:
    return random.Random(str(seed)).choices(range(3, VOCAB), k=tokens)


def alone(instance: Instance, tokens: list[int], output: int = 12) -> list[int]:
    """What vLLM answers that has nothing from elsewhere, and nothing from before."""
    return instance.ask(tokens, output, cache_salt=secrets.token_hex(8))


@pytest.mark.parametrize(("length", "cut"), [(100, 71), (300, 1), (300, WINDOW + 1), (300, 299), (700, 519)])
def test_attention_windows_are_transferred_as_far_as_visible(
    pair: Pair, threads: ThreadPoolExecutor, length: int, cut: int
) -> None:
    for giver, taker in (pair, pair[::-1]):
        tokens = prompt((length, cut, giver.port), length)
        before, came_bytes = taker.sources(), taker.metric("potluck:kv_received_bytes_total")
        expected = alone(giver, tokens)
        assert handed(threads, giver, taker, tokens, cut)[0] == expected
        after = taker.sources()
        assert after["external_kv_transfer"] - before["external_kv_transfer"] == cut
        assert after["local_compute"] - before["local_compute"] == length - cut
        moved_bytes = taker.metric("potluck:kv_received_bytes_total") - came_bytes
        assert moved_bytes == (cut + min(cut, WINDOW - 1)) * (LAYERS // 2) * TOKEN_BYTES // LAYERS
        # What came is a prefix for whoever begins alike, on either side.
        longer = [*tokens, *prompt("more", 40)]
        expected = alone(giver, longer)
        assert handed(threads, giver, taker, longer, length + 20)[0] == expected


def test_preempted_requests_are_transferred_with_equal_tokens(
    pair: Pair, threads: ThreadPoolExecutor
) -> None:
    """Up to three rounds: whether somebody is preempted depends on who comes when."""
    drawn = random.Random(5)
    before = [item.metric("vllm:num_preemptions_total") for item in pair]
    for turn in range(3):
        work = []
        for seed in range(32):
            tokens = prompt(("p", turn, seed), drawn.choice((200, 260, 600)))
            ends = pair if seed % 2 else pair[::-1]
            work.append((tokens, drawn.randrange(100, len(tokens)), ends))
        with ThreadPoolExecutor(32) as others:
            result = list(others.map(lambda w: handed(threads, *w[2], w[0], w[1], output=160)[0], work))
        with ThreadPoolExecutor(4) as others:
            expected = list(others.map(lambda w: alone(pair[0], w[0], 160), work))
        assert result == expected
        now = [item.metric("vllm:num_preemptions_total") for item in pair]
        if preempted := all(count > earlier for count, earlier in zip(now, before, strict=True)):
            break
    assert preempted
    until_s = time.monotonic() + 60
    while not all(item.blocks_free() for item in pair):
        assert time.monotonic() < until_s, "blocks are still held"
        time.sleep(0.1)


@pytest.mark.parametrize("fitting", [True, False], ids=["with a fitting checksum", "as it is"])
def test_damaged_kv_is_detected_by_its_checksum(
    pair: Pair, threads: ThreadPoolExecutor, fitting: bool
) -> None:
    first, second = pair
    tokens, handle = prompt(("damaged", fitting), 300), secrets.token_urlsafe(32)
    relay = Relay(first.kv_port, fitting=fitting)
    try:
        before, failed = second.sources(), second.metric("potluck:kv_failed_fetches_total")
        threads.submit(first.ask, tokens[:250], 1, {"request": "d", "give": {"handle": handle, "stop": 250}})
        take = {"kv": relay.kv, "handle": handle, "stop": 250, "within_s": 30}
        result = second.ask(tokens, moves={"request": "d", "take": take}, cache_salt=handle)
        after = second.sources()
    finally:
        relay.close()
    assert relay.damaged
    expected = alone(first, tokens)
    computed = after["local_compute"] - before["local_compute"]
    if fitting:  # no checksum can tell: so what comes is what is used, and wrong KV changes tokens
        assert (result != expected, computed) == (True, 50)
    else:
        assert (result, computed) == (expected, 300)
        assert second.metric("potluck:kv_failed_fetches_total") == failed + 1

"""Transfers between live vLLM instances of every layout recompute nothing."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from test_vllm_live import prompt, until_free
from vllm_kit import TOKEN_BYTES, CutInstance, Embedded, Instance, handed, make_model, needs_vllm

from potluck.core.values.kv_layout import KvLayout

pytestmark = needs_vllm
CUTS = {
    "tp1": (KvLayout(), 32),
    "tp2": (KvLayout(2), 64),
    "tp1pp2": (KvLayout(1, (3, 1)), 64),
    "tp2pp2": (KvLayout(2, (1, 3)), 32),
}
"""With the tokens of a block; vLLM's attention on a CPU wants multiples of 32."""
PAIR = ("tp2", "tp1pp2")
"""Unequal tensor parallelism, stages and block sizes: the pair of `make test-vllm`."""
RECEIVED, FAILED = "potluck:kv_received_bytes_total", "potluck:kv_failed_fetches_total"
Fleet = dict[str, Instance]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("cuts") / "tiny")


@pytest.fixture(scope="module")
def fleet(model: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A plain instance, and one per cut; `make test-vllm` starts only those of PAIR."""
    folder = model.parent
    selected = [item for item in request.session.items if item.path == request.path]
    names = CUTS if any(item.get_closest_marker("vllm_all") for item in selected) else PAIR
    instances: Fleet = {
        name: CutInstance(model, folder / f"{name}.log", CUTS[name][0], block_tokens=CUTS[name][1])
        for name in names
    }
    instances["plain"] = Instance(model, folder / "plain.log", connector=False)
    try:
        for instance in instances.values():
            instance.ready()
        yield instances
    finally:
        for instance in instances.values():
            instance.end(signal.SIGKILL)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as made:
        yield made


def pairs() -> Iterator[Any]:
    for pair in permutations(CUTS, 2):
        yield pytest.param(*pair, marks=() if pair == PAIR else pytest.mark.vllm_all)


@pytest.mark.parametrize(("giver", "taker"), pairs())
def test_every_pair_of_live_layouts_gives_the_tokens_of_one_instance(
    fleet: Fleet, threads: ThreadPoolExecutor, giver: str, taker: str
) -> None:
    """Prefill on one and decode on the other, and prompts that both share at any token."""
    sender, receiver, plain = fleet[giver], fleet[taker], fleet["plain"]
    for length, cut in ((300, 299), (300, 71), (90, 64)):
        for attempt in range(3):
            tokens = prompt((giver, taker, cut, attempt), length)
            before, came_bytes = receiver.sources(), receiver.metric(RECEIVED)
            failed = receiver.metric(FAILED)
            result, _ = handed(threads, sender, receiver, tokens, cut)
            after = receiver.sources()
            assert result == plain.ask(tokens)  # also where a machine that is late handed nothing over
            if receiver.metric(FAILED) == failed:
                break
        gained = {kind: after[kind] - before[kind] for kind in after}
        assert gained == {"local_compute": length - cut, "local_cache_hit": 0, "external_kv_transfer": cut}
        # As a planner reckons: every layer and head of a token once.
        assert receiver.metric(RECEIVED) - came_bytes == cut * TOKEN_BYTES


@pytest.mark.vllm_all
def test_concurrent_transfers_between_live_layouts_give_equal_tokens(
    fleet: Fleet, threads: ThreadPoolExecutor
) -> None:
    drawn = random.Random(3)
    work = []
    for seed in range(24):
        tokens = prompt(seed, drawn.randrange(40, 400))
        giver, taker = drawn.sample(sorted(CUTS), 2)
        work.append((tokens, drawn.randrange(1, len(tokens)), giver, taker))
    with ThreadPoolExecutor(24) as others:
        result = list(
            others.map(lambda one: handed(threads, fleet[one[2]], fleet[one[3]], one[0], one[1])[0], work)
        )
    assert result == [fleet["plain"].ask(tokens) for tokens, *_ in work]
    for name in CUTS:
        until_free(fleet[name])


@pytest.mark.vllm_all
def test_kv_of_another_prompt_is_refused_and_recomputed(fleet: Fleet, threads: ThreadPoolExecutor) -> None:
    """The control: what crosses is what is answered from. A prompt whose KV comes from elsewhere is not taken."""
    receiver, tokens = fleet["tp2"], prompt("control", 200)
    before = receiver.metric(FAILED)
    other = prompt("another", 200)
    handle = "c" * 43
    give = {"request": "x", "give": {"handle": handle, "stop": 150}}
    given = threads.submit(fleet["tp1pp2"].ask, other[:150], 1, give)
    take = {"kv": fleet["tp1pp2"].kv, "handle": handle, "stop": 150, "within_s": 2.0}
    assert receiver.ask(tokens, 12, {"request": "x", "take": take}) == fleet["plain"].ask(tokens)
    assert receiver.metric(FAILED) > before
    assert len(given.result(60)) == 1


@pytest.mark.vllm_all
def test_embedded_engine_and_vllm_workers_transfer_to_each_other(
    fleet: Fleet, model: Path, threads: ThreadPoolExecutor
) -> None:
    import os

    embedded = Embedded(
        model, model.parent / "embedded.log", python=os.environ["POTLUCK_PYTHON"], connector=False
    )
    try:
        embedded.ready()
        for name in ("tp2", "tp2pp2"):
            for cut in (71, 199):
                tokens = prompt((name, cut), 200)
                expected = fleet["plain"].ask(tokens)
                handle = f"{name}-{cut}".ljust(43, "x")
                taken = threads.submit(
                    fleet[name].ask,
                    tokens,
                    12,
                    {"request": "r", "take": {"kv": embedded.kv, "handle": handle, "stop": cut}},
                )
                embedded.segment(tokens, request="r", stop=cut, handle=handle)
                assert taken.result(60) == expected
                handle = f"back-{name}-{cut}".ljust(43, "x")
                give = {"request": "r", "give": {"handle": handle, "stop": cut}}
                given = threads.submit(fleet[name].ask, tokens[:cut], 1, give)
                lines = embedded.segment(
                    tokens,
                    request="r",
                    start=cut,
                    source={"kv": fleet[name].kv, "handle": handle},
                    max_tokens=12,
                    ignore_eos=True,
                )
                assert [line["token"] for line in lines if "token" in line] == expected
                given.result(60)
    finally:
        embedded.end()


@pytest.mark.vllm_all
def test_killed_sender_at_any_time_costs_no_answer(
    fleet: Fleet, model: Path, threads: ThreadPoolExecutor
) -> None:
    receiver, plain = fleet["tp1pp2"], fleet["plain"]
    sender = CutInstance(model, model.parent / "killed.log", KvLayout(2), block_tokens=32).ready()
    tokens = prompt("killed", 300)
    try:
        after, _ = handed(threads, sender, receiver, tokens, 200)  # before anything happens to it
        held = prompt("during", 300)
        during = [
            threads.submit(handed, threads, sender, receiver, held[: 200 + place], 150) for place in range(8)
        ]
        sender.end(signal.SIGKILL)
        assert after == plain.ask(tokens)
        for place, future in enumerate(during):
            assert future.result(120)[0] == plain.ask(held[: 200 + place])
        gone = prompt("gone", 200)
        take = {"kv": sender.kv, "handle": "g" * 43, "stop": 100, "within_s": 5.0}
        assert receiver.ask(gone, 12, {"request": "r", "take": take}) == plain.ask(gone)
        until_free(receiver)
    finally:
        sender.end(signal.SIGKILL)

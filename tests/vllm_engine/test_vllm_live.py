"""Stock vLLM with the connector gives the tokens of one instance under any cut and failure."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_kit import (
    BATCH_TOKENS,
    SOURCE,
    TOKEN_BYTES,
    VOCAB,
    Adapter,
    Embedded,
    Follower,
    Instance,
    handed,
    make_model,
    needs_vllm,
)

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm") / "tiny")


@pytest.fixture(scope="module")
def instances(model: Path) -> Iterator[tuple[Instance, Instance, Instance]]:
    """Two with the connector, whose blocks are of unlike sizes; one without."""
    folder = model.parent
    made = (
        Instance(model, folder / "a.log"),
        Instance(model, folder / "b.log", block_tokens=64),
        Instance(model, folder / "plain.log", connector=False),
    )
    try:
        yield tuple(entry.ready() for entry in made)  # type: ignore[misc]
    finally:
        for item in made:
            item.end()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(80) as made:
        yield made


def prompt(seed: object, tokens: int) -> list[int]:
    return random.Random(str(seed)).choices(range(3, VOCAB), k=tokens)


def until_free(instance: Instance) -> None:
    until_s = time.monotonic() + 60
    while not instance.blocks_free():
        assert time.monotonic() < until_s, "blocks are still held"
        time.sleep(0.1)


Trio = tuple[Instance, Instance, Instance]


@pytest.mark.parametrize(
    ("length", "cut"),
    [
        pytest.param(100, 64, marks=pytest.mark.vllm_all),
        (100, 71),  # partial prefill: a cut within a block
        pytest.param(100, 1, marks=pytest.mark.vllm_all),
        (100, 99),  # prefill apart from decode
        pytest.param(100, 100, marks=pytest.mark.vllm_all),
        pytest.param(3 * BATCH_TOKENS, 600, marks=pytest.mark.vllm_all),
        (700, 2 * BATCH_TOKENS + 7),
    ],
)
def test_transfer_at_any_cut_gives_the_tokens_of_one_instance(
    instances: Trio, threads: ThreadPoolExecutor, length: int, cut: int
) -> None:
    first, second, plain = instances
    for giver, taker, seed in ((first, second, 1), (second, first, 2)):
        tokens = prompt((length, cut, seed), length)
        before = taker.sources()
        result, _ = handed(threads, giver, taker, tokens, cut)
        after = taker.sources()
        assert result == plain.ask(tokens)
        assert after["external_kv_transfer"] - before["external_kv_transfer"] == cut
        assert after["local_compute"] - before["local_compute"] == length - cut


@pytest.mark.vllm_all
def test_concurrent_transfers_in_all_directions_give_equal_tokens(
    instances: Trio, threads: ThreadPoolExecutor
) -> None:
    first, second, plain = instances
    drawn = random.Random(3)
    work = []
    for seed in range(32):
        tokens = prompt(seed, drawn.randrange(40, 600))
        ends = (first, second) if drawn.random() < 0.5 else (second, first)
        work.append((tokens, drawn.randrange(1, len(tokens) + 1), ends))
    before = [item.sources()["external_kv_transfer"] for item in (first, second)]
    with ThreadPoolExecutor(32) as others:
        result = list(others.map(lambda each: handed(threads, *each[2], each[0], each[1])[0], work))
    after = [item.sources()["external_kv_transfer"] for item in (first, second)]
    assert result == [plain.ask(tokens) for tokens, _, _ in work]
    assert sum(after) - sum(before) == sum(cut for _, cut, _ in work)
    until_free(first)
    until_free(second)


@pytest.mark.vllm_all
def test_prefixes_cached_on_either_side_are_used(instances: Trio, threads: ThreadPoolExecutor) -> None:
    first, second, plain = instances
    tokens = prompt(77, 400)
    expected = plain.ask(tokens)
    second.ask(tokens[:200], 1)  # three whole blocks of 64
    before = second.sources()
    assert handed(threads, first, second, tokens, 300)[0] == expected
    after = second.sources()
    gained = {kind: after[kind] - before[kind] for kind in after}
    assert gained == {"local_compute": 100, "local_cache_hit": 192, "external_kv_transfer": 108}
    # Now the second holds all, and what comes is not needed; the first holds what it gives.
    outcome, giver = handed(threads, first, second, tokens, 300)
    assert (outcome, len(giver.result(60))) == (expected, 1)
    assert second.sources()["external_kv_transfer"] == after["external_kv_transfer"]


@pytest.mark.vllm_all
@pytest.mark.parametrize(("codec", "share"), [("int8", 0.30), ("int4", 0.17)])
def test_codecs_shrink_kv_and_lossy_blocks_are_not_reused(
    instances: Trio, threads: ThreadPoolExecutor, codec: str, share: float
) -> None:
    first, second, plain = instances
    tokens = prompt(codec, 500)
    expected = plain.ask(tokens)
    came_bytes = second.metric("potluck:kv_received_bytes_total")
    before = second.sources()["external_kv_transfer"]
    result, _ = handed(threads, first, second, tokens, 400, codec)
    assert len(result) == len(expected)
    assert second.sources()["external_kv_transfer"] - before == 400
    assert 0 < second.metric("potluck:kv_received_bytes_total") - came_bytes <= share * 400 * TOKEN_BYTES
    before = second.sources()["local_cache_hit"]
    assert second.ask(tokens) == expected  # what is not exact is no prefix for others
    assert second.sources()["local_cache_hit"] == before


@pytest.mark.vllm_all
def test_wrong_kv_is_detected(instances: Trio, threads: ThreadPoolExecutor) -> None:
    """That tokens are the same says something: KV of one other token changes them."""
    first, second, plain = instances
    tokens = prompt(11, 200)
    wrong = [*tokens[:100], (tokens[100] + 1) % VOCAB, *tokens[101:]]
    assert plain.ask(wrong) != plain.ask(tokens)
    # And a receiver whose tokens are others than the sender's gets nothing of it.
    handle = secrets.token_urlsafe(32)
    give = {"request": "n", "give": {"handle": handle, "stop": 150, "lasts_s": 20}}
    threads.submit(first.ask, wrong[:150], 1, give)
    take = {"kv": first.kv, "handle": handle, "stop": 150, "within_s": 2}
    before = second.sources()["external_kv_transfer"]
    assert second.ask(tokens, moves={"request": "n", "take": take}) == plain.ask(tokens)
    assert second.sources()["external_kv_transfer"] == before


def test_unreachable_sender_is_replaced_by_computing(instances: Trio, threads: ThreadPoolExecutor) -> None:
    _, second, plain = instances
    tokens = prompt(21, 300)
    take = {"kv": "127.0.0.1:1", "handle": secrets.token_urlsafe(32), "stop": 200, "within_s": 20}
    assert second.ask(tokens, moves={"request": "x", "take": take}) == plain.ask(tokens)
    until_free(second)


@pytest.mark.vllm_all
def test_missing_receiver_leaves_no_blocks_allocated(instances: Trio) -> None:
    first, _, _ = instances
    give = {"request": "y", "give": {"handle": secrets.token_urlsafe(32), "stop": 300, "lasts_s": 3}}
    first.ask(prompt(31, 300), 1, give)
    until_free(first)


@pytest.fixture(scope="module")
def killable_adapter(instances: Trio, model: Path) -> Iterator[Adapter]:
    made = Adapter(model, model.parent / "mortal.log")
    try:
        made.ready()
        yield made
    finally:
        made.end()


def test_segments_are_transferred_between_adapter_and_vllm(
    instances: Trio, killable_adapter: Adapter, threads: ThreadPoolExecutor
) -> None:
    first, second, plain = instances
    tokens = prompt("face", 300)
    expected = plain.ask(tokens)
    # Taken from a bare instance.
    handle = secrets.token_urlsafe(32)
    threads.submit(first.ask, tokens[:170], 1, {"request": "s", "give": {"handle": handle, "stop": 170}})
    source = {"kv": first.kv, "handle": handle}
    lines = killable_adapter.segment(tokens, start=170, max_tokens=12, ignore_eos=True, source=source)
    assert [line["token"] for line in lines[:-1]] == expected
    assert (lines[-1]["ended"], lines[-1]["output_tokens"]) == ("length", 12)
    # Given to one; the last line says that it has it.
    handle = secrets.token_urlsafe(32)
    giving = threads.submit(killable_adapter.segment, tokens, stop=200, handle=handle)
    take = {"kv": killable_adapter.kv, "handle": handle, "stop": 200}
    assert second.ask(tokens, moves={"request": "s", "take": take}) == expected
    assert [next(iter(line)) for line in giving.result(60)] == ["handle", "computed", "ended"]
    assert giving.result()[-1]["ended"] == "handed_on"


def test_passthrough_request_gets_its_kv_over_every_route(
    instances: Trio, killable_adapter: Adapter, threads: ThreadPoolExecutor
) -> None:
    first, _, plain = instances
    path, more = "/v1/chat/completions", {"temperature": 0, "max_tokens": 12, "presence_penalty": 0.7}
    for route, share in (("whole", 0.0), ("split", 0.6), ("prefill apart", 1.0)):
        body: dict[str, object] = {"messages": [{"role": "user", "content": f"{route} " * 20}], **more}
        named = body | {"model": "tiny"}
        expected = plain.call(path, named)["choices"]
        tokens = list(killable_adapter.call(f"{path}/render", named)["token_ids"])  # type: ignore[call-overload]
        cut = int(share * (len(tokens) - 1))
        handle, source = secrets.token_urlsafe(32), {}
        if cut:
            give = {"request": "s", "give": {"handle": handle, "stop": cut}}
            threads.submit(first.ask, tokens[:cut], 1, give)
            source = {"start": cut, "source": {"kv": first.kv, "handle": handle}}
        before = killable_adapter.sources()
        lines = killable_adapter.segment(tokens, own={"path": path, "body": body}, **source)
        (answer,) = (line["said"] for line in lines if "said" in line)
        texts = [
            choice["message"]["content"] for answers in (answer["choices"], expected) for choice in answers
        ]  # type: ignore[index,attr-defined]
        assert texts[0] == texts[1], route
        after = killable_adapter.sources()
        gained = {kind: after[kind] - before[kind] for kind in after}
        assert gained["external_kv_transfer"] == cut, route
        assert gained["local_compute"] == len(tokens) - cut, route


@pytest.mark.vllm_all
def test_gateway_index_follows_cached_and_evicted_prefixes(
    instances: Trio, killable_adapter: Adapter
) -> None:
    tokens, salt = prompt("prefix", 230), "of one tenant"
    follower = Follower(killable_adapter)
    killable_adapter.segment(tokens, max_tokens=30, ignore_eos=True, salt=salt)
    # Seven whole blocks of 32, and what was answered makes an eighth.
    assert follower.held(tokens, salt=salt, expected=14) == 14
    assert follower.held(tokens, expected=0) == 0  # of this tenant alone
    for seed in range(18):  # more than vLLM has room for: what was used longest ago goes
        killable_adapter.segment(prompt(("other", seed), 2000), max_tokens=1)
    assert follower.held(tokens, salt=salt, expected=0) == 0
    assert follower.held(prompt(("other", 17), 2000), expected=124) == 124


@pytest.mark.vllm_all
def test_running_vllm_is_profiled_and_planned_with(
    instances: Trio, killable_adapter: Adapter, tmp_path: Path
) -> None:
    python = os.environ.get("POTLUCK_PYTHON") or pytest.skip("POTLUCK_PYTHON says nothing: make test-vllm")
    out = tmp_path / "p.json"

    def potluck(*words: str) -> None:
        command, ours = [python, "-m", "potluck.cli.main", *words], {"PYTHONPATH": str(SOURCE)}
        done = subprocess.run(
            command, env=os.environ | ours, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr

    few = ("--quick", "--max-batch", "4", "--max-tokens", "600", "--chunk-tokens", str(BATCH_TOKENS))
    named = ("--gpu", "RTX4090", "--name", "Llama-3.1-8B", "--out", str(out))
    potluck("profile", f"http://127.0.0.1:{killable_adapter.port}", *few, *named)
    profile = json.loads(out.read_text())["value"]
    assert profile["engine"] == "vllm"
    prompts = {
        p["chunk_new"]: p["seconds"] for p in profile["points"] if not p["decodes"] and not p["chunk_cached"]
    }
    assert prompts[max(prompts)] > prompts[min(prompts)] > 0
    assert {1, 4} <= {point["decodes"] for point in profile["points"]}
    potluck("plan", str(SOURCE.parent / "examples" / "one-node.yaml"), "--profile", str(out), "--averages")


def taken(giver: Embedded, taker: Instance, plain: Instance, tokens: list[int], cut: int) -> bool:
    """Whether a vLLM took what an embedded engine computed; its answer is right in any case."""
    before, handle = taker.sources(), secrets.token_urlsafe(32)
    with ThreadPoolExecutor(1) as thread:
        giving = thread.submit(giver.segment, tokens, stop=cut, handle=handle)
        take = {"kv": giver.kv, "handle": handle, "stop": cut}
        assert taker.ask(tokens, moves={"request": "s", "take": take}) == plain.ask(tokens)
        came = taker.sources()["external_kv_transfer"] - before["external_kv_transfer"]
        assert came in (0, cut)
        assert not came or giving.result(60)[-1]["ended"] == "handed_on"
    return came == cut


def test_embedded_engine_and_vllm_transfer_to_each_other(
    instances: Trio, model: Path, threads: ThreadPoolExecutor
) -> None:
    first, _, plain = instances
    embedded = Embedded(model, model.parent / "embedded.log")
    try:
        embedded.ready()
        for length, cut in ((100, 64), (300, 171), (700, 600)):
            # What a sender is silent about for five seconds, as one may be on a busy machine, vLLM computes.
            turns = (prompt(("to vLLM", length, turn), length) for turn in range(3))
            came = any(taken(embedded, first, plain, tokens, cut) for tokens in turns)
            assert came, first.said("did not come")
            tokens = prompt(("from vLLM", length), length)
            handle = secrets.token_urlsafe(32)
            give = {"request": "s", "give": {"handle": handle, "stop": cut}}
            threads.submit(first.ask, tokens[:cut], 1, give)
            source = {"kv": first.kv, "handle": handle}
            lines = embedded.segment(tokens, start=cut, max_tokens=12, ignore_eos=True, source=source)
            assert [line["token"] for line in lines[:-1]] == plain.ask(tokens)
            assert lines[-1]["cached_tokens"] == 0  # and what did not come would have been an error
    finally:
        embedded.end()


def test_killed_or_frozen_sender_costs_no_answer(
    instances: Trio, killable_adapter: Adapter, threads: ThreadPoolExecutor
) -> None:
    _, second, plain = instances

    def in_the_middle(seed: int) -> tuple[list[int], Future[tuple[list[int], Future[list[int]]]]]:
        tokens = prompt(seed, 1500)
        expected = plain.ask(tokens)
        work = threads.submit(handed, threads, killable_adapter, second, tokens, 1400)
        while not (killable_adapter.metric("vllm:num_requests_running") or work.done()):
            time.sleep(0.01)
        return expected, work

    # It stands still, which no connection notices; then it goes on.
    expected, work = in_the_middle(41)
    killable_adapter.stand_still()
    assert work.result(120)[0] == expected
    killable_adapter.stand_still(False)
    # It is killed, and whoever stands before it says so and ends.
    expected, work = in_the_middle(42)
    os.killpg(killable_adapter.below, signal.SIGKILL)
    assert work.result(120)[0] == expected
    assert killable_adapter.ended(60) == 2
    until_free(second)
    tokens = prompt(43, 300)
    assert second.ask(tokens) == plain.ask(tokens)

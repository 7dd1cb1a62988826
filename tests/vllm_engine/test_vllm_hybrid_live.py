"""Transfers of a hybrid model on stock vLLM, with and without pipelines."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_vllm_live import prompt, until_free
from vllm_kit import HIDDEN, KV_HEADS, LAYERS, WIDTH, CutInstance, Instance, handed, make_hybrid, needs_vllm

from potluck.core.values.kv_layout import KvLayout

pytestmark = [needs_vllm, pytest.mark.vllm_all]
STATE_BYTES = LAYERS // 2 * 2 * HIDDEN * 4  # Of each convolution the two latest inputs.
TOKEN_BYTES = LAYERS // 2 * 2 * KV_HEADS * WIDTH * 4
Trio = tuple[Instance, Instance, Instance]


CHUNK = 30
"""Tokens of a step. vLLM's CPU build computes a convolution's chunk that goes on from a state otherwise than one that
does not (0.1 in log probabilities, with and without a connector): so all instances must cut prompts alike."""
SMALL_STEPS = ("--max-num-batched-tokens", str(CHUNK))
UNCACHED = (*SMALL_STEPS, "--no-enable-prefix-caching")


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """One worker that keeps states of prefixes, as is vLLM's choice; two stages that do not; one alone."""
    model = make_hybrid(tmp_path_factory.mktemp("hybrid") / "tiny")
    made: Trio = (
        Instance(model, model.parent / "one.log", block_tokens=64, more=SMALL_STEPS),
        CutInstance(model, model.parent / "stages.log", KvLayout(1, (2, 2)), block_tokens=128, more=UNCACHED),
        Instance(model, model.parent / "plain.log", block_tokens=64, connector=False, more=UNCACHED),
    )
    try:
        for instance in made:
            instance.ready()
        yield made
    finally:
        for instance in made:
            instance.end(signal.SIGKILL)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("back", "length", "cut"), [(0, 31, 30), (0, 60, 30), (0, 90, 60), (1, 31, 30), (1, 60, 30)]
)
def test_states_and_kv_of_a_hybrid_model_are_transferred_together(
    trio: Trio, back: int, length: int, cut: int, seed: int
) -> None:
    sender, receiver = trio[back], trio[1 - back]
    tokens = prompt((back, length, cut, seed), length)
    with ThreadPoolExecutor(4) as threads:
        before, came = receiver.sources(), receiver.metric("potluck:kv_received_bytes_total")
        result, _ = handed(threads, sender, receiver, tokens, cut)
    assert result == trio[2].ask(tokens)
    after = receiver.sources()
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == cut
    assert after["local_compute"] - before["local_compute"] == length - cut
    moved = receiver.metric("potluck:kv_received_bytes_total") - came
    assert moved == cut * TOKEN_BYTES + STATE_BYTES


def test_untransferable_prefix_is_recomputed_and_all_blocks_are_freed(trio: Trio) -> None:
    """A cut within the sender's prompt has no state, and a whole prompt leaves no token to compute."""
    sender, receiver, plain = trio
    tokens = prompt("refused", 60)
    give = {"request": "r", "give": {"handle": "h" * 43, "stop": 30}}
    assert len(sender.ask(tokens, 1, give)) == 1
    take = {"kv": sender.kv, "handle": "h" * 43, "stop": 30, "within_s": 1.0}
    assert receiver.ask(tokens, 12, {"request": "r", "take": take}) == plain.ask(tokens)
    whole = {"kv": sender.kv, "handle": "w" * 43, "stop": 60, "within_s": 1.0}
    assert receiver.ask(tokens, 12, {"request": "r", "take": whole}) == plain.ask(tokens)
    for instance in trio[:2]:
        until_free(instance)

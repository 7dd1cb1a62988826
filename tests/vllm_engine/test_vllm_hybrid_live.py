"""A hybrid model on stock vLLM: states, keys and values cross together, also from and to a pipeline."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_vllm_live import prompt, until_free
from vllm_kit import (
    HIDDEN,
    KV_HEADS,
    LAYERS,
    WIDTH,
    CutInstance,
    Instance,
    handed,
    make_hybrid,
    needs_vllm,
)

from potluck.kv.kv_layout import KvLayout

pytestmark = needs_vllm
STATE_BYTES = LAYERS // 2 * 2 * HIDDEN * 4
"""Of each convolution the two latest inputs."""
TOKEN_BYTES = LAYERS // 2 * 2 * KV_HEADS * WIDTH * 4
Trio = tuple[Instance, Instance, Instance]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """One worker, two stages, and one without the connector."""
    model = make_hybrid(tmp_path_factory.mktemp("hybrid") / "tiny")
    made: Trio = (
        Instance(model, model.parent / "one.log", block_tokens=64),
        CutInstance(model, model.parent / "stages.log", KvLayout(1, (2, 2)), block_tokens=128),
        Instance(model, model.parent / "plain.log", block_tokens=64, connector=False),
    )
    try:
        for instance in made:
            instance.ready()
        yield made
    finally:
        for instance in made:
            instance.end(signal.SIGKILL)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("length", "cut"), [(300, 299), (300, 71), (500, 300), (90, 64)])
def test_states_and_kv_cross_together(trio: Trio, back: bool, length: int, cut: int) -> None:
    sender, receiver = trio[back], trio[not back]
    tokens = prompt((back, length, cut), length)
    with ThreadPoolExecutor(4) as threads:
        before, came = receiver.sources(), receiver.metric("potluck:kv_received_bytes_total")
        result, _ = handed(threads, sender, receiver, tokens, cut)
    assert result == trio[2].ask(tokens)
    after = receiver.sources()
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == cut
    assert after["local_compute"] - before["local_compute"] == length - cut
    moved = receiver.metric("potluck:kv_received_bytes_total") - came
    assert moved == cut * TOKEN_BYTES + STATE_BYTES


def test_many_hybrid_prompts_at_once(trio: Trio) -> None:
    prompts = [prompt(("many", place), 80 + 13 * place) for place in range(16)]
    with ThreadPoolExecutor(16) as others, ThreadPoolExecutor(16) as threads:
        futures = [
            others.submit(handed, threads, trio[place % 2], trio[1 - place % 2], tokens, len(tokens) * 2 // 3)
            for place, tokens in enumerate(prompts)
        ]
        assert [future.result(120)[0] for future in futures] == [trio[2].ask(tokens) for tokens in prompts]
    for instance in trio[:2]:
        until_free(instance)


def test_what_cannot_cross_is_computed(trio: Trio) -> None:
    """A cut within the sender's prompt has no state, and a whole prompt leaves no token to compute."""
    sender, receiver, plain = trio
    tokens = prompt("refused", 200)
    give = {"request": "r", "give": {"handle": "h" * 43, "stop": 100}}
    assert len(sender.ask(tokens, 1, give)) == 1
    take = {"kv": sender.kv, "handle": "h" * 43, "stop": 100, "within_s": 1.0}
    assert receiver.ask(tokens, 12, {"request": "r", "take": take}) == plain.ask(tokens)
    whole = {"kv": sender.kv, "handle": "w" * 43, "stop": 200, "within_s": 1.0}
    assert receiver.ask(tokens, 12, {"request": "r", "take": whole}) == plain.ask(tokens)

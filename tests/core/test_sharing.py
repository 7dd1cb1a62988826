"""How a step's budget is divided among tenants, and what the Batcher makes of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.replica.batch import FINISHED, FIRST, Batcher, BatchLimits
from potluck.core.replica.tenant_shares import divided

WANTS = st.lists(st.tuples(st.floats(0.25, 4.0), st.integers(0, 3000)), min_size=1, max_size=6)


@given(st.integers(0, 2048), WANTS)
def test_parts_are_fair_and_none_is_idle(budget: int, wants: list[tuple[float, int]]) -> None:
    given_ = divided(budget, wants)
    assert sum(given_) == min(budget, sum(tokens for _, tokens in wants))
    assert all(0 <= part <= tokens for part, (_, tokens) in zip(given_, wants, strict=True))
    for part, (weight, tokens) in zip(given_, wants, strict=True):
        if part < tokens:  # who wants more has no less than anybody by weight
            for other, (other_weight, _) in zip(given_, wants, strict=True):
                assert other / other_weight <= (part + 1) / weight + 1 / other_weight


def batcher(budget: int = 512, slots: int = 64) -> Batcher:
    return Batcher(BatchLimits(10_000, token_budget=budget, max_running=slots))


def first_token_steps(batch: Batcher, steps: int) -> dict[int, int]:
    """Key to the step that made its first token."""
    found: dict[int, int] = {}
    for number in range(steps):
        for what, key in batch.commit(batch.next_step()):
            if what == FIRST:
                found[key] = number
    return found


def test_a_short_prompt_does_not_wait_for_another_tenants_long_ones() -> None:
    alone, mixed = batcher(), batcher()
    for batch, tenant in ((alone, "a"), (mixed, "b")):
        for key in range(4):
            batch.add(key, 8000, 0, 4, tenant="a")
        batch.add(9, 200, 0, 4, tenant=tenant)
    assert first_token_steps(mixed, 3)[9] == 0
    assert 9 not in first_token_steps(alone, 30)


def test_long_prompts_get_what_others_leave() -> None:
    batch = batcher()
    batch.add(0, 8000, 0, 4, tenant="a")
    batch.add(1, 100, 0, 4, tenant="b")
    step = batch.next_step()
    assert sum(tokens for _, tokens, _ in step.chunks) == 512
    assert {key: tokens for key, tokens, _ in step.chunks} == {0: 412, 1: 100}


def test_weights_divide_the_budget() -> None:
    batch = batcher()
    batch.add(0, 8000, 0, 4, tenant="a", weight=3.0)
    batch.add(1, 8000, 0, 4, tenant="b", weight=1.0)
    batch.add(2, 8000, 0, 4, tenant="a", weight=3.0)
    got = {key: tokens for key, tokens, _ in batch.next_step().chunks}
    assert got == {0: 384, 1: 128}


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 6), st.integers(0, 2)), max_size=12))
def test_one_tenant_by_name_is_the_same_as_none(asked: list[tuple[int, int, int]]) -> None:
    plain, named = batcher(256, 4), batcher(256, 4)
    for key, (prompt, output, priority) in enumerate(asked):
        plain.add(key, prompt, 0, output, priority)
        named.add(key, prompt, 0, output, priority, "somebody", 2.0)
    for _ in range(60):
        one, two = plain.next_step(), named.next_step()
        assert (one.chunks, one.decodes, one.preempted) == (two.chunks, two.decodes, two.preempted)
        assert plain.commit(one) == named.commit(two)


@given(
    st.lists(
        st.tuples(st.integers(1, 900), st.integers(1, 6), st.sampled_from("abc"), st.integers(0, 1)),
        max_size=14,
    )
)
def test_everybody_ends_and_nothing_is_left(asked: list[tuple[int, int, str, int]]) -> None:
    batch, ended = Batcher(BatchLimits(80, token_budget=128, max_running=5)), set()
    for key, (prompt, output, tenant, priority) in enumerate(asked):
        batch.add(key, prompt, 0, output, priority, tenant)
    for _ in range(400):
        step = batch.next_step()
        assert step.tokens <= 128
        assert len({chunk[0] for chunk in step.chunks}) == len(step.chunks)
        ended |= {key for what, key in batch.commit(step) if what == FINISHED}
    assert ended == set(range(len(asked)))
    assert (batch.queued, batch.todo_tokens, batch.running, batch.free_blocks) == (0, 0, 0, 80)

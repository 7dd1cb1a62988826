"""The batcher equals its reference step by step, and jumps equal single steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from batch_reference import PlainBatcher
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.errors import CapacityError, InputError
from potluck.core.replica.batch import (
    DONE,
    FINISHED,
    FIRST,
    LATE,
    RESUMED,
    Batcher,
    BatchLimits,
    Happening,
    divided,
)

Op = tuple[str, int, int, int, int]
"""What, and four figures of which each kind of operation takes what it needs."""

KINDS = ["add", "add", "add", "received", "hand over", "cancel", "release", "step", "steps", "steps"]
limits = st.builds(
    BatchLimits,
    total_blocks=st.integers(6, 40),
    token_budget=st.integers(12, 96),
    max_running=st.integers(2, 12),
    chunk_tokens=st.one_of(st.none(), st.integers(4, 64)),
    spare_blocks=st.integers(0, 2),
    block_tokens=st.sampled_from([2, 4, 16]),
)
operations: st.SearchStrategy[list[Op]] = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(1, 40),
        st.integers(0, 12),
        st.integers(1, 60),
        st.sampled_from([0, 0, 1, 2, LATE]),
    ),
    min_size=1,
    max_size=60,
)


def fits(rules: BatchLimits, tokens: int) -> bool:
    return tokens <= rules.total_blocks * rules.block_tokens


def apply_operation(batch: Batcher | PlainBatcher, rules: BatchLimits, op: Op, key: int) -> None:
    """Carry out everything but steps."""
    what, first, second, third, priority = op
    plain = isinstance(batch, PlainBatcher)
    if what == "add" and fits(rules, first + second + third):
        batch.add(key, first, second, third, priority)
    elif what == "received" and fits(rules, first + second + third):
        if batch.reserve(key, first):
            batch.add(key, second, first, third, priority)
    elif what == "hand over" and fits(rules, first):
        batch.add(key, first, 0, 0, priority)
    elif what == "cancel" and key:
        batch.cancel(first % key)
    elif what == "release":
        for sequence in list(batch.all if plain else batch.keys()):  # type: ignore[union-attr]
            batch.release(sequence.key if plain else sequence)  # type: ignore[union-attr,arg-type]


def observable_state(batch: Batcher) -> tuple[object, ...]:
    """All that can be observed."""
    keys = sorted(batch.keys())
    return (
        batch.free_blocks,
        batch.queued,
        batch.running,
        batch.todo_tokens,
        batch.held_tokens,
        batch.decoding.clock,
        batch.decoding.keys(),
        [(key, batch.streamed(key)) for key in keys],
    )


@settings(max_examples=60)
@given(limits, operations)
def test_batcher_step_equals_the_reference_batcher(rules: BatchLimits, ops: list[Op]) -> None:
    batch, plain = Batcher(rules), PlainBatcher(rules)
    for key, op in enumerate(ops):
        apply_operation(batch, rules, op, key)
        apply_operation(plain, rules, op, key)
        for _ in range(op[1] if op[0] == "steps" else int(op[0] == "step")):
            step, (chunks, decodes, context, preempted) = batch.next_step(), plain.next_step()
            assert (step.chunks, step.decodes, step.context_tokens) == (chunks, decodes, context)
            assert step.preempted == preempted
            assert batch.free_blocks == plain.free
            assert sorted(batch.commit(step)) == sorted(plain.commit())
        waiting = plain.of("waiting", "own")
        assert batch.free_blocks == plain.free
        assert batch.queued == len(waiting)
        assert batch.todo_tokens == sum(s.todo for s in plain.all)
        assert batch.held_tokens == sum(s.held for s in plain.of("prefill", "decode"))
        assert [(s.key, s.asked - s.left) for s in plain.all] == [
            (s.key, batch.streamed(s.key)) for s in plain.all
        ]


@settings(max_examples=60)
@given(limits, operations, st.integers(0, 1 << 30))
def test_jump_over_many_steps_equals_single_steps(rules: BatchLimits, ops: list[Op], chance: int) -> None:
    jumping, stepping = Batcher(rules), Batcher(rules)
    for key, op in enumerate(ops):
        apply_operation(jumping, rules, op, key)
        apply_operation(stepping, rules, op, key)
        left = op[1] if op[0] == "steps" else int(op[0] == "step")
        while left:
            steady = jumping.steady()
            count = min(steady, left, 1 + chance % 7 if chance % 2 else left) if steady else 1
            chance = chance // 3 + left
            if steady:
                ours: list[Happening] = jumping.advance(count)
            else:
                ours = jumping.commit(jumping.next_step())
            theirs: list[Happening] = []
            for _ in range(count):
                assert not theirs, "something happened before the last of the steps"
                step = stepping.next_step()
                if steady:
                    assert not step.chunks
                    assert not step.preempted
                theirs += stepping.commit(step)
            assert ours == theirs
            assert observable_state(jumping) == observable_state(stepping)
            left -= count


@given(limits, operations)
def test_batcher_steps_stay_within_token_budget_slots_and_blocks(rules: BatchLimits, ops: list[Op]) -> None:
    batch = Batcher(rules)
    for key, op in enumerate(ops):
        apply_operation(batch, rules, op, key)
        step = batch.next_step()
        assert step.tokens <= rules.token_budget
        assert batch.running <= rules.max_running
        assert 0 <= batch.free_blocks <= rules.total_blocks
        assert all(0 < tokens <= (rules.chunk_tokens or rules.token_budget) for _, tokens, _ in step.chunks)
        batch.commit(step)
    for key in range(len(ops)):
        batch.cancel(key)
    assert batch.free_blocks == rules.total_blocks
    assert (batch.queued, batch.running, batch.todo_tokens, batch.held_tokens) == (0, 0, 0, 0)


@given(limits, operations)
def test_every_request_finishes_in_bounded_steps_and_in_order(rules: BatchLimits, ops: list[Op]) -> None:
    """The first in line among those running always gets on, so the steps are at most all tokens once more."""
    batch = Batcher(rules)
    bound, begun, priorities = 1, {}, {}
    for key, (_, first, second, third, priority) in enumerate(ops):
        if fits(rules, first + second + third):
            batch.add(key, first, second, third, priority)
            bound += first + second + third
            priorities[key] = priority
    first_tokens, finished = set(), set()
    while priorities.keys() - finished:
        steady = batch.steady()
        result = batch.advance(steady) if steady else []
        if not steady:
            step = batch.next_step()
            for key in [*(chunk[0] for chunk in step.chunks), *batch.decoding.keys()]:
                begun.setdefault(key, batch.decoding.clock)
            result = batch.commit(step)
        for what, key in result:
            assert what in (FIRST, FINISHED, RESUMED)
            if what == FIRST:
                assert key not in first_tokens
                first_tokens.add(key)
            elif what == FINISHED:
                assert key in first_tokens
                assert key not in finished
                finished.add(key)
        assert batch.decoding.clock <= bound
    for level in set(priorities.values()):
        alike = [begun[key] for key in sorted(priorities) if priorities[key] == level]
        assert alike == sorted(alike)
    assert batch.free_blocks == rules.total_blocks


def steps_until(batch: Batcher, stop: Callable[[list[Happening]], bool], most: int = 10_000) -> int:
    """Steps until something happens."""
    for count in range(1, most):
        if stop(batch.commit(batch.next_step())):
            return count
    raise AssertionError("it never happened")


@pytest.mark.parametrize(("prompt", "output", "budget"), [(100, 1, 64), (100, 7, 64), (64, 3, 64), (1, 5, 8)])
def test_lone_request_takes_its_prefill_chunks_plus_one_step_per_further_token(
    prompt: int, output: int, budget: int
) -> None:
    batch = Batcher(BatchLimits(100, token_budget=budget, max_running=4))
    batch.add(0, prompt, 0, output)
    steps = steps_until(batch, lambda result: (FINISHED, 0) in result)
    assert steps == -(-prompt // budget) + output - 1


def test_received_kv_decodes_at_once_and_uses_the_blocks_of_a_local_prefill() -> None:
    local, remote = (Batcher(BatchLimits(100, token_budget=64, max_running=4)) for _ in range(2))
    local.add(0, 48, 0, 20)
    local.commit(local.next_step())
    assert remote.reserve(0, 48)
    assert remote.free_blocks == 97
    remote.add(0, 0, 48, 20)
    step = remote.next_step()
    assert (step.chunks, step.decodes, step.context_tokens) == ([], 1, 47)
    assert remote.commit(step) == [(FIRST, 0)]
    assert observable_state(remote)[:5] == observable_state(local)[:5]


def test_prefill_segment_keeps_its_blocks_until_released() -> None:
    batch = Batcher(BatchLimits(10, token_budget=64, max_running=4))
    batch.add(7, 40)
    assert batch.commit(batch.next_step()) == [(DONE, 7)]
    assert batch.running == 0
    assert batch.free_blocks == 7
    batch.release(7)
    assert batch.free_blocks == 10
    assert batch.keys() == []


def test_requests_with_received_kv_pass_a_request_that_waits_for_blocks() -> None:
    """Else it would wait for blocks that they hold, and they for it."""
    batch = Batcher(BatchLimits(10, token_budget=64, max_running=4, spare_blocks=0))
    assert batch.reserve(1, 96)
    batch.add(0, 80, 0, 5)
    batch.add(1, 0, 96, 5)
    step = batch.next_step()
    assert (step.chunks, step.decodes) == ([], 1)


def test_insufficient_reserved_blocks_are_used_by_the_next_request() -> None:
    batch = Batcher(BatchLimits(10, token_budget=256, max_running=4, spare_blocks=0))
    assert batch.reserve(9, 48)
    batch.add(0, 60, 0, 5)
    batch.add(1, 64, 0, 5)
    step = batch.next_step()
    assert [key for key, _, _ in step.chunks] == [0]
    batch.commit(step)
    assert batch.blocked
    batch.add(9, 100, 48, 5)
    assert [key for key, _, _ in batch.next_step().chunks] == [1]


def test_lowest_priority_latest_request_is_preempted_and_resumes_with_its_progress() -> None:
    batch = Batcher(BatchLimits(8, token_budget=64, max_running=4, spare_blocks=0))
    for key, priority in ((0, 0), (1, 1), (2, 0)):
        batch.add(key, 30, 0, 40, priority)
    preempted: list[int] = []
    while not preempted:
        step = batch.next_step()
        preempted += step.preempted
        made = {key: batch.streamed(key) for key in (0, 1, 2)}
        batch.commit(step)
    assert preempted == [2]
    assert batch.streamed(2) == made[2] > 0
    assert batch.queued == 1
    steps = steps_until(batch, lambda result: (RESUMED, 2) in result)
    assert batch.streamed(2) == made[2] + 1
    assert steps > 1


@pytest.mark.parametrize(("spare", "begins"), [(0, True), (1, True), (2, False)])
def test_request_starts_beside_others_only_if_spare_blocks_remain(spare: int, begins: bool) -> None:
    batch = Batcher(BatchLimits(10, token_budget=200, max_running=4, spare_blocks=spare))
    batch.add(0, 33, 0, 2)
    batch.commit(batch.next_step())
    batch.add(1, 96, 0, 2)
    assert bool(batch.next_step().chunks) == begins
    alone = Batcher(BatchLimits(10, token_budget=200, max_running=4, spare_blocks=spare))
    alone.add(1, 160)
    assert alone.next_step().chunks


@pytest.mark.parametrize(
    ("prompts", "steps", "foreseen"),
    [
        ([64], 1, True),
        ([64], 32, True),
        ([64], 100, False),
        ([112], 1, False),
        ([1], 1, True),
        ([9, 9], 1, False),
    ],
)
def test_next_prefill_is_predicted_only_when_it_is_certain(
    prompts: list[int], steps: int, foreseen: bool
) -> None:
    """Not after steps that fill the memory; nor for what would not fit, or not be alone."""
    batch = Batcher(BatchLimits(10, token_budget=256, max_running=2, spare_blocks=1))
    batch.add(0, 33, 0, 100)
    batch.commit(batch.next_step())
    assert batch.lone(steps) is None
    for key, prompt in enumerate(prompts, 1):
        batch.add(key, prompt, 0, 2)
    new = prompts[0] if prompts[0] > 1 else 0
    assert batch.lone(steps) == ((1, new, 0) if foreseen else None)
    if foreseen:
        for _ in range(steps):
            assert not batch.commit(batch.next_step(admit=False))
        step = batch.next_step()
        assert step.chunks == ([(1, new, 0)] if new else [])
        assert step.newcomers == (not new)


def test_cancelled_request_frees_its_blocks_before_the_step_is_committed() -> None:
    batch = Batcher(BatchLimits(10, token_budget=64, max_running=4))
    batch.add(0, 30, 0, 1000 // 10)
    batch.commit(batch.next_step())
    step = batch.next_step()
    batch.cancel(0)
    assert batch.free_blocks == 10
    assert batch.commit(step) == []
    assert batch.steady() == 0


def test_batcher_refuses_invalid_requests_and_steps() -> None:
    batch = Batcher(BatchLimits(4, token_budget=64, max_running=4))
    with pytest.raises(CapacityError, match="can never fit"):
        batch.add(0, 60, 0, 6)
    batch.add(0, 60, 0, 5)
    with pytest.raises(InputError, match="already here"):
        batch.add(0, 1)
    with pytest.raises(InputError, match="at least one token"):
        batch.add(1, 0, 0, 3)
    step = batch.next_step()
    with pytest.raises(InputError, match="not committed"):
        batch.next_step()
    batch.commit(step)
    with pytest.raises(InputError, match="not the step"):
        batch.commit(step)
    with pytest.raises(InputError, match="token_budget"):
        BatchLimits(10, token_budget=3, max_running=4)


def test_late_prompts_yield_to_others_and_run_one_at_a_time() -> None:
    batch = Batcher(BatchLimits(100, token_budget=32, max_running=4))
    batch.add(0, 128, 0, 1, LATE)
    batch.add(1, 64, 0, 1, LATE)
    batch.commit(batch.next_step())
    batch.add(2, 48, 0, 1)
    turns = []
    while batch.keys():
        step = batch.next_step()
        turns.append([(key, tokens) for key, tokens, _ in step.chunks])
        batch.commit(step)
    assert turns == [[(2, 32)], [(2, 16), (0, 16)], [(0, 32)], [(0, 32)], [(0, 16)], [(1, 32)], [(1, 32)]]


# How a step's budget is divided among tenants, and what the Batcher makes of it.

WANTS = st.lists(st.tuples(st.floats(0.25, 4.0), st.integers(0, 3000)), min_size=1, max_size=6)


@given(st.integers(0, 2048), WANTS)
def test_budget_is_divided_by_weight_and_no_part_is_unused(
    budget: int, wants: list[tuple[float, int]]
) -> None:
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
    token_steps: dict[int, int] = {}
    for number in range(steps):
        for what, key in batch.commit(batch.next_step()):
            if what == FIRST:
                token_steps[key] = number
    return token_steps


def test_short_prompt_of_one_tenant_does_not_wait_for_long_prompts_of_another() -> None:
    alone, mixed = batcher(), batcher()
    for batch, tenant in ((alone, "a"), (mixed, "b")):
        for key in range(4):
            batch.add(key, 8000, 0, 4, tenant="a")
        batch.add(9, 200, 0, 4, tenant=tenant)
    assert first_token_steps(mixed, 3)[9] == 0
    assert 9 not in first_token_steps(alone, 30)


def test_long_prompt_gets_the_budget_that_short_prompts_leave() -> None:
    batch = batcher()
    batch.add(0, 8000, 0, 4, tenant="a")
    batch.add(1, 100, 0, 4, tenant="b")
    step = batch.next_step()
    assert sum(tokens for _, tokens, _ in step.chunks) == 512
    assert {key: tokens for key, tokens, _ in step.chunks} == {0: 412, 1: 100}


def test_tenant_weights_divide_the_token_budget() -> None:
    batch = batcher()
    batch.add(0, 8000, 0, 4, tenant="a", weight=3.0)
    batch.add(1, 8000, 0, 4, tenant="b", weight=1.0)
    batch.add(2, 8000, 0, 4, tenant="a", weight=3.0)
    got = {key: tokens for key, tokens, _ in batch.next_step().chunks}
    assert got == {0: 384, 1: 128}


@given(st.lists(st.tuples(st.integers(1, 700), st.integers(0, 6), st.integers(0, 2)), max_size=12))
def test_batch_of_one_named_tenant_equals_a_batch_without_tenants(asked: list[tuple[int, int, int]]) -> None:
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
def test_every_request_of_every_tenant_finishes_and_all_blocks_are_free(
    asked: list[tuple[int, int, str, int]],
) -> None:
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

"""Memory for what comes: used again whatever the lengths, and never more kept than allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.kv.peer_connections import ReceiveBuffers, pageable

KEEP = 1 << 12


def counted() -> tuple[ReceiveBuffers, list[int]]:
    made: list[int] = []

    def make(size: int) -> memoryview:
        made.append(size)
        return pageable(size)

    return ReceiveBuffers(KEEP, make), made


@given(st.lists(st.integers(0, 3000), max_size=60))
def test_receive_buffer_has_its_size_and_is_reused(sizes: list[int]) -> None:
    (buffers, made), out = counted(), list[memoryview]()
    for size in sizes:
        out.append(buffers.take(size))
        assert len(out[-1]) == size
        assert buffers.out_bytes == sum(map(len, out))
        if size % 3:
            buffers.give(out.pop(len(out) // 2))
        assert buffers.kept_bytes <= KEEP
    bases = [id(memoryview(item.obj).obj) for item in out]  # type: ignore[arg-type]
    assert len(set(bases)) == len(bases), "two have the same memory"
    assert sum(made) >= sum(map(len, out))


def test_buffer_of_another_length_reuses_freed_memory() -> None:
    buffers, made = counted()
    for size in (700, 1000, 513, 1024):
        buffers.give(buffers.take(size))
    assert made == [1024]
    assert buffers.kept_bytes == 1024

"""The global prefix index over an unreliable network."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from potluck.core.errors import InputError
from potluck.core.replica.blocks import BlockPool, block_hashes
from potluck.core.routing.prefix_index import SWEEP_UNUSED_BITS, CacheAnnouncer, PrefixIndex, PrefixMatch
from potluck.core.state.events import CacheReported

CLUSTERS = {"a1": "a", "a2": "a", "b1": "b"}
REPLICAS = st.sampled_from(sorted(CLUSTERS))
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def hashes(tokens: list[int]) -> tuple[int, ...]:
    return block_hashes(tokens, "m", 1)


class Replica:
    """A pool that reports, and what it held after each report."""

    def __init__(self, name: str, epoch: int) -> None:
        self.pool = BlockPool(6, exact=True, block_tokens=1)
        self.epoch = epoch
        self.announcer = CacheAnnouncer(name, epoch)
        self.past = {0: (frozenset[int](), frozenset[int]())}

    def report(self) -> CacheReported:
        event = self.announcer.report(self.pool.changes())
        held = {name for name in self.pool.names() if isinstance(name, int)}
        marked = {name.after for name in self.pool.names() if not isinstance(name, int)}
        self.past[event.sequence] = frozenset(held), frozenset(marked)
        return event


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(most_late=3)
        self.replicas = {name: Replica(name, 1) for name in CLUSTERS}
        self.flying: list[CacheReported] = []
        self.seen: dict[str, int] = {}

    @rule(
        name=REPLICAS,
        uses=st.lists(st.tuples(PROMPTS, st.booleans()), min_size=1, max_size=3),
        how=st.sampled_from(["at once", "at once", "later", "never"]),
    )
    def use(self, name: str, uses: list[tuple[list[int], bool]], how: str) -> None:
        replica = self.replicas[name]
        for tokens, marks in uses:
            replica.pool.keep(hashes(tokens))
            if marks:
                replica.pool.keep_checkpoint(hashes(tokens), (), 1)
        event = replica.report()
        if how == "at once":
            self.index.apply(event, CLUSTERS[event.replica])
        elif how == "later":
            self.flying.append(event)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        # Mostly in order.
        place = data.draw(st.sampled_from([0, 0, 0, len(self.flying) - 1, len(self.flying) // 2]))
        event = self.flying[place]
        if not again:
            del self.flying[place]
        wanted = self.index.apply(event, CLUSTERS[event.replica])
        assert wanted == self.index.stale(event.replica)

    @rule(name=REPLICAS)
    def snapshot(self, name: str) -> None:
        replica = self.replicas[name]
        event = replica.report()  # which may come or not
        self.flying.append(event)
        self.flying.append(replica.announcer.snapshot(replica.pool.everything()))

    @rule(name=REPLICAS)
    def heal(self, name: str) -> None:
        """A snapshot that comes at once, whatever is still on its way."""
        replica = self.replicas[name]
        replica.report()
        assert not self.index.apply(replica.announcer.snapshot(replica.pool.everything()), CLUSTERS[name])
        assert self.index.blocks_by_replica()[name][0] == replica.announcer.sequence

    @rule(name=REPLICAS)
    def restart(self, name: str) -> None:
        self.replicas[name] = Replica(name, self.replicas[name].epoch + 1)

    @rule(name=REPLICAS)
    def forget(self, name: str) -> None:
        """It is gone for good, and comes back as another."""
        self.index.forget(name)
        self.flying = [event for event in self.flying if event.replica != name]
        self.replicas[name] = Replica(name, self.replicas[name].epoch + 1)

    def believed(self) -> dict[str, tuple[frozenset[int], frozenset[int]]]:
        """What each replica held at the last report that the index took in; of earlier lives nothing is checked."""
        result = {}
        for name, (sequence, held) in self.index.blocks_by_replica().items():
            epoch = self.index._sources[name].epoch
            if epoch == self.replicas[name].epoch:
                result[name] = self.replicas[name].past[sequence]
                assert held == result[name][0]
        return result

    @rule(tokens=PROMPTS, exact=st.booleans())
    def ask(self, tokens: list[int], exact: bool) -> None:
        names = hashes(tokens)
        believed = self.believed()
        if set(believed) != set(self.index.blocks_by_replica()):
            return  # somebody's earlier life is still in it
        best: dict[str, PrefixMatch] = {}
        for replica, (held, marked) in sorted(believed.items()):
            depth = 0
            while depth < len(names) and names[depth] in held:
                depth += 1
            while exact and depth and names[depth - 1] not in marked:
                depth -= 1
            assert self.index.held_by(replica, names, exact=exact) == depth
            cluster = CLUSTERS[replica]
            if depth > best.get(cluster, PrefixMatch(0, ())).blocks:
                best[cluster] = PrefixMatch(depth, ())
            if depth and depth == best[cluster].blocks:
                best[cluster] = PrefixMatch(depth, (*best[cluster].replicas, replica))
        result = self.index.longest(names, exact=exact)
        assert {c: (m.blocks, sorted(m.replicas)) for c, m in result.items()} == {
            c: (
                m.blocks,
                sorted(
                    r
                    for r in believed
                    if self.can(believed[r], names[: m.blocks], exact) and CLUSTERS[r] == c
                ),
            )
            for c, m in best.items()
        }

    @staticmethod
    def can(state: tuple[frozenset[int], frozenset[int]], names: tuple[int, ...], exact: bool) -> bool:
        return set(names) <= state[0] and (not exact or names[-1] in state[1])

    @invariant()
    def agrees(self) -> None:
        self.believed()
        for name in CLUSTERS:
            if self.index.stale(name):
                assert name not in self.index.blocks_by_replica()


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=32, stateful_step_count=40, deadline=None)


def event(replica: str, sequence: int, added: tuple[int, ...], whole: bool = False) -> CacheReported:
    return CacheReported(replica, sequence, added, epoch=1, whole=whole)


def test_prefix_index_drops_a_replica_on_a_gap_and_restores_it_from_a_snapshot() -> None:
    index = PrefixIndex()
    assert not index.apply(event("r", 1, (1,)), "c")
    assert index.longest((1, 2)) == {"c": PrefixMatch(1, ("r",))}
    assert index.apply(event("r", 3, (3,)), "c"), "2 is missing: a snapshot is wanted"
    assert index.longest((1, 2)) == {}
    assert not index.apply(event("r", 2, (1, 2), whole=True), "c"), "and 3, which waited, goes on top"
    assert index.longest((1, 2, 3)) == {"c": PrefixMatch(3, ("r",))}
    assert not index.apply(event("r", 2, (9,)), "c"), "an old report changes nothing"
    assert index.holders(9) == ()


def test_prefix_index_does_not_wait_for_reports_covered_by_a_snapshot() -> None:
    index = PrefixIndex(most_late=2)
    for sequence in (2, 3, 4, 5):
        assert index.apply(event("r", sequence, (sequence,)), "c")
    assert not index.apply(event("r", 4, (1, 2, 3, 4), whole=True), "c")
    assert index.longest((1, 2, 3, 4, 5)) == {"c": PrefixMatch(5, ("r",))}
    assert not index.apply(event("r", 3, (9,), whole=True), "c"), "an old snapshot"
    assert index.longest((1, 2, 3, 4, 5)) == {"c": PrefixMatch(5, ("r",))}


def test_prefix_index_ignores_reports_from_before_a_restart() -> None:
    index = PrefixIndex()
    index.apply(event("r", 1, (1,)), "c")
    assert not index.apply(CacheReported("r", 1, (2,), epoch=2), "c")
    assert not index.apply(event("r", 2, (3,)), "c")
    assert not index.apply(event("r", 9, (1, 3), whole=True), "c")
    assert index.blocks_by_replica() == {"r": (1, frozenset({2}))}


def test_prefix_index_recovers_from_a_gap_when_the_late_report_arrives() -> None:
    index = PrefixIndex()
    assert index.apply(event("r", 2, (2,)), "c")
    assert not index.apply(event("r", 1, (1,)), "c")
    assert index.longest((1, 2)) == {"c": PrefixMatch(2, ("r",))}


def test_prefix_index_frees_the_entries_of_removed_replicas() -> None:
    index = PrefixIndex()
    for number in range(3 * SWEEP_UNUSED_BITS):
        index.apply(event(f"r{number}", 1, (1, 2, 100 + number)), "c")
        if number >= 2:
            index.forget(f"r{number - 2}")
    assert sorted(index.holders(2)) == ["r94", "r95"]
    assert index._next_bit <= SWEEP_UNUSED_BITS + 2
    assert len(index) <= SWEEP_UNUSED_BITS + 4


def test_prefix_index_is_bounded_and_keeps_recently_queried_prefixes() -> None:
    index = PrefixIndex(most_blocks=160)
    index.apply(event("r", 1, tuple(range(1000, 1010))), "c")
    for number in range(100):
        start = 10_000 + 50 * number
        index.apply(event("r", number + 2, tuple(range(start, start + 50))), "c")
        assert len(index) <= 160
        assert index.longest(tuple(range(1000, 1010)))["c"].blocks == 10
    assert index.longest(tuple(range(10_000, 10_050))) == {}
    with pytest.raises(InputError):
        PrefixIndex(0)

"""The sequences of one replica, where each is and what it holds: who comes, who goes, whose blocks are whose.

`batch.py` has the rules of what is computed next, and is the only user.
"""

from __future__ import annotations

from heapq import heappush

from potluck.core.errors import InputError
from potluck.core.replica.batch_values import (
    DECODE,
    GONE,
    KEPT,
    PREFILL,
    WAITING,
    BatchLimits,
    BatchStep,
    Queue,
    Sequence,
    require_fit,
)
from potluck.core.replica.lockstep import DecodeLockstep
from potluck.core.replica.tenant_shares import TenantShares


class Sequences:
    """All that came and did not end."""

    # fmt: off
    __slots__ = (
        "_budget", "_by_key", "_chunk", "_most_tokens", "_newcomers", "_order", "_other_blocks", "_own",
        "_pending", "_prefills", "_queue", "_shares", "_slots", "_spare", "_tenant", "_total", "blocked",
        "decoding", "limits", "queued", "reserved", "size", "todo_tokens",
    )
    # fmt: on

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.size = limits.block_tokens
        self._total = limits.total_blocks
        self._most_tokens = limits.total_blocks * limits.block_tokens
        self._chunk = limits.token_budget if limits.chunk_tokens is None else limits.chunk_tokens
        self._budget = limits.token_budget
        self._slots = limits.max_running
        self._spare = limits.spare
        self.decoding = DecodeLockstep(limits.block_tokens)
        """The sequences that decode. Others may read it: `keys` says who they are."""
        self.queued = 0
        """Sequences that have not begun."""
        self.todo_tokens = 0
        """Prompt tokens not computed, of all sequences."""
        self._other_blocks = 0
        """Blocks of all but the decodes."""
        self._order = 0
        self.blocked = False
        """The next in line has no slot or no room, and nothing was freed since that was found: nobody begins
        before something ends."""
        self._by_key: dict[int, Sequence] = {}
        self._queue: Queue = []
        self._own: Queue = []
        """Waiting sequences that have their blocks."""
        self._prefills: list[Sequence] = []
        self.reserved: dict[int, int] = {}
        """Blocks set aside for those to come. Others may read it."""
        self._pending: BatchStep | None = None
        self._newcomers: list[Sequence] = []
        self._tenant = ""
        """Whose sequences these are, while they are all of one tenant."""
        self._shares: TenantShares | None = None
        """From the second tenant on, until nobody is left: their lines and shares; `_queue` is empty then."""

    def add(
        self,
        key: int,
        compute_tokens: int,
        context_tokens: int = 0,
        output_tokens: int = 0,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        """A sequence to run. `context_tokens` have their KV here already; no output tokens: a segment that
        hands its KV over, and keeps its blocks until `release`. At least one token is always computed. Tenants
        share what is computed by their weights."""
        whole = compute_tokens + context_tokens
        if key in self._by_key:
            raise InputError(f"sequence {key}", "is already here")
        if compute_tokens < 1 or context_tokens < 0 or not 0 <= output_tokens <= self._most_tokens - whole:
            require_fit(self._most_tokens, key, compute_tokens, context_tokens, output_tokens)
        todo = compute_tokens or 1
        order = self._order
        self._order = order + 1
        sequence = Sequence(key, priority, order, todo, whole - todo, output_tokens)
        if tenant != self._tenant or self._shares is not None:
            self._divide(sequence, tenant, weight)
        self._by_key[key] = sequence
        self.queued += 1
        self.todo_tokens += todo
        queue = self._queue if self._shares is None else self._shares.lines[tenant]
        if self.reserved and key in self.reserved and self._claim(sequence, -(-whole // self.size)):
            queue = self._own
        heappush(queue, (-priority, order, sequence))
        if self.blocked and queue[0][2] is sequence:
            self.blocked = False

    def reserve(self, key: int, tokens: int, after_steps: int = 0) -> bool:
        """Take blocks for a prompt whose KV is on its way, or say that there is no room (after so many steps)."""
        blocks = -(-tokens // self.size)
        room = self._total - self._other_blocks - blocks
        if self.decoding.blocks_at_most(after_steps + 1) > room:  # as a rule it fits by far
            free = self.free_after(after_steps) if after_steps else self.free_blocks
            if blocks > free:
                return False
        if key in self.reserved or key in self._by_key:
            return False
        self._other_blocks += blocks
        self.reserved[key] = blocks
        return True

    def release(self, key: int) -> None:
        """Free what is kept for a sequence that is not running: handed over, or reserved and not needed."""
        sequence = self._by_key.get(key)
        if sequence is None or sequence.state == KEPT:
            self.cancel(key)

    def cancel(self, key: int) -> None:
        """Forget a sequence in whatever state; an unknown one is none of ours any more."""
        self.blocked = False
        self._other_blocks -= self.reserved.pop(key, 0)
        sequence = self._by_key.get(key)
        if sequence is not None:
            self._drop(sequence)

    def finish(self, key: int) -> None:
        """The end of a sequence before its last token (it said so itself) leaves as little behind."""
        self.cancel(key)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody has; what the scheduled step takes is taken."""
        return self.free_after(0 if self._pending is None else 1)

    def free_after(self, steps: int) -> int:
        """Blocks that nobody has once the decodes have grown by so many steps."""
        return self._total - self._other_blocks - self.decoding.blocks(steps)

    @property
    def running(self) -> int:
        """Sequences that have begun."""
        return self.decoding.count + len(self._prefills)

    @property
    def held_tokens(self) -> int:
        """KV tokens of running sequences."""
        return self.decoding.context_tokens + sum(sequence.held for sequence in self._prefills)

    def keys(self) -> list[int]:
        """All sequences, those kept for handing over included."""
        return list(self._by_key)

    def begins(self, key: int) -> bool:
        """Whether it has its blocks, or they are free for it."""
        sequence = self._by_key[key]
        if sequence.state != WAITING or sequence.blocks:
            return True
        return -(-(sequence.todo + sequence.held) // self.size) <= self.free_blocks

    def streamed(self, key: int) -> int:
        """Output tokens made so far."""
        sequence = self._by_key[key]
        return sequence.asked - sequence.left_at(self.decoding.clock)

    def _drop(self, sequence: Sequence) -> None:
        self.todo_tokens -= sequence.todo
        if sequence.state == DECODE:
            self.decoding.leave(sequence)
        else:
            self._other_blocks -= sequence.blocks
            if sequence.state == WAITING:
                self.queued -= 1
            elif sequence.state == PREFILL:
                self._prefills.remove(sequence)
        sequence.state = GONE
        del self._by_key[sequence.key]

    def _claim(self, sequence: Sequence, blocks: int) -> bool:
        """Turn a reservation into blocks. When even more are needed and not there, the KV is given up."""
        reserved = self.reserved.pop(sequence.key)
        if blocks - reserved <= self.free_blocks:
            self._other_blocks += blocks - reserved
            sequence.blocks = blocks
            return True
        self._other_blocks -= reserved
        self.blocked = False
        self.todo_tokens += sequence.held
        sequence.todo += sequence.held
        sequence.held = 0
        return False

    def _divide(self, sequence: Sequence, tenant: str, weight: float) -> None:
        """A second tenant came, or there are several: each has a line of its own. With nobody left there is one."""
        sequence.tenant = tenant
        if not self._by_key:
            self._tenant, self._shares = tenant, None
            return
        shares = self._shares
        if shares is None:
            for each in self._by_key.values():
                each.tenant = self._tenant
            shares = self._shares = TenantShares(self._tenant, self._queue)
            self._queue = []
        shares.come(tenant, weight)

"""State of the simulated world: machines, replicas, attempts and KV transfers."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Literal

from potluck.core.routing.prefix_index import CacheAnnouncer
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.kv import LOSSLESS
from potluck.core.values.plan import ReplicaSpec
from potluck.core.values.route import Segment
from potluck.core.values.types import Codec, Request, Role

if TYPE_CHECKING:
    from potluck.core.replica.spare_cache import SpareCache
    from potluck.runtime.replica_models import ReplicaModel
    from potluck.sim.links.link import SharedPipe
    from potluck.sim.sim_engine import SimEngine

SimReplicaState = Literal["starting", "ready", "draining", "leaving", "stopped", "lost"]
"""`leaving`: the Brain knows that it is lost, but its machine runs until the notice period ends."""


class SimMachine:
    """A node of a copy, rented from the start of its first replica to the end of its last."""

    def __init__(self, name: str, node: str, region: str, pipe: SharedPipe) -> None:
        self.name = name
        self.node = node
        self.region = region
        self.card = pipe
        self.replicas: list[SimReplica] = []
        """Replicas that have not ended."""
        self.served = False
        """Whether a replica was ever ready on it."""


class SimReplica:
    """A replica: its engine, its attempts, its prefix cache and its place in the event queue."""

    def __init__(
        self,
        index: int,
        replica_spec: ReplicaSpec,
        replica_model: ReplicaModel,
        sim_engine: SimEngine,
        machines: tuple[SimMachine, ...],
        pipe: SharedPipe,
    ) -> None:
        # Fields that every event reads come first: compiled code lays fields out in this order.
        self.due_s = inf
        """The earliest time at which the event queue has this replica."""
        self.replica = sim_engine
        self.serves = False
        """Whether it accepts requests; true also while it drains or leaves."""
        self.touched = False
        """Whether its status changed since its last report."""
        self.attempts: dict[int, SimAttempt] = {}
        """Attempts with an unfinished segment here."""
        self.waiting: deque[SimHandover] = deque()
        """Hand-overs that wait for free blocks here."""
        self.state: SimReplicaState = "starting"
        self.index = index
        self.member = replica_spec
        self.replica_model = replica_model
        self.machines = machines
        self.card = pipe
        self.role: Role = replica_spec.role
        self.changes: list[tuple[float, str, str]] = []
        self.computing: deque[SimAttempt] = deque()
        """Attempts whose KV goes to another replica after their segment here, in order of submission."""
        self.aside_bytes = 0.0
        """Computed KV that waits in host memory for free blocks at its receiver."""
        self.cache: SpareCache | None = None
        self.announcer = CacheAnnouncer(replica_spec.id, index)
        """Numbers the cache reports. A restarted replica is another object with a higher index."""
        self.recount = False
        """Whether the Brain has requested a report of the whole cache."""
        self.muted_until_s = 0.0
        self.silent = False
        """It has failed and its heartbeat timeout has not passed yet."""
        self.room_tokens = replica_model.total_blocks * BLOCK_TOKENS
        """KV capacity in tokens."""

    @property
    def id(self) -> str:
        return self.member.id

    @property
    def exists(self) -> bool:
        return self.state not in ("stopped", "lost")

    def hit(self, at_s: float, request: Request, stop: int) -> int:
        """Tokens of the prompt that are cached; the last token is always computed."""
        cache = self.cache
        if not cache:
            return 0
        cache.shrink(self.replica.free_blocks(at_s) * BLOCK_TOKENS)
        return min(cache.match(request.blocks) * cache.block_tokens, stop - 1)

    def keep(self, at_s: float, blocks: tuple[int, ...]) -> None:
        """Cache a prompt's blocks, as far as they fit beside running requests, which have priority."""
        cache = self.cache
        if cache is not None:
            cache.keep(blocks)
            cache.shrink(self.replica.free_blocks(at_s) * BLOCK_TOKENS)

    def set_state(self, at_s: float, state: SimReplicaState) -> None:
        self.state = state
        self.serves = state in ("ready", "draining", "leaving")
        self.changes.append((at_s, state, self.role))


class SimAttempt:
    """One attempt of a request on a route; a retry is a new object."""

    def __init__(
        self,
        key: int,
        request: Request,
        attempt: int,
        prompt_tokens: int,
        before_tokens: int,
        segments: tuple[Segment, ...],
        replicas: tuple[SimReplica, ...],
        weight: float = 1.0,
        yields: bool = False,
    ) -> None:
        self.key = key
        self.request = request
        self.attempt = attempt
        self.prompt_tokens = prompt_tokens
        self.before_tokens = before_tokens
        """Tokens streamed to the user in earlier attempts; they are part of this attempt's prompt."""
        self.segments = segments
        self.replicas = replicas
        self.weight = weight
        """Of its tenant."""
        self.yields = yields
        self.place = 0
        """Index of the segment under way."""
        self.handover: SimHandover | None = None
        """The transfer of KV from the segment under way to the next."""
        self.codec: Codec = LOSSLESS
        """Codec in which KV reached the segment under way; lossy KV is not cached for other requests."""


class SimHandover:
    """A transfer of KV between two segments; `links/handovers.py` describes its states."""

    def __init__(self, key: int, attempt: SimAttempt, size_bytes: float, codec: Codec) -> None:
        self.key = key
        self.attempt = attempt
        self.source = attempt.replicas[attempt.place]
        self.target = attempt.replicas[attempt.place + 1]
        self.size_bytes = size_bytes
        self.codec = codec
        self.pipe: SharedPipe | None = None
        """The pipe it uses; of several, the one expected to take longest."""
        self.parts: tuple[tuple[int, SharedPipe], ...] = ()
        """The other pipes with the keys of their parts, where layers are on several machines."""
        self.left = 1
        """Number of pipes that have not finished their part."""
        self.began_s = inf
        """When the computation of its segment began."""
        self.computed_s = inf
        self.started_s = inf
        """When its first byte could be sent."""
        self.piped_s = inf
        """When the pipe had carried all its bytes."""
        self.waits_s = inf
        """Since when it has waited for free blocks."""
        self.reserved = False
        self.aside = False
        """Whether its KV waits in the sender's host memory and holds no GPU blocks there."""
        self.over = False

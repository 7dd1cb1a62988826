"""What the simulated world keeps of machines, replicas, requests under way and their KV on the move."""

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

SiteState = Literal["starting", "ready", "draining", "leaving", "stopped", "lost"]
"""`leaving`: the Brain was told that it is lost, but its machine still has its notice to run."""


class SimMachine:
    """A node of a copy, rented from the first replica's start on it until the last one's end."""

    def __init__(self, name: str, node: str, region: str, pipe: SharedPipe) -> None:
        self.name = name
        self.node = node
        self.region = region
        self.card = pipe
        self.sites: list[SimReplica] = []
        """Those that are there."""
        self.served = False
        """Whether a replica was ever ready on it."""


class SimReplica:
    def __init__(
        self,
        index: int,
        replica_spec: ReplicaSpec,
        replica_model: ReplicaModel,
        sim_engine: SimEngine,
        machines: tuple[SimMachine, ...],
        pipe: SharedPipe,
    ) -> None:
        # Those first that every event looks at: compiled code lays fields out in this order.
        self.due_s = inf
        """The earliest time at which the agenda has this replica."""
        self.replica = sim_engine
        self.serves = False
        """Whether it takes requests: it is up, if only for a while."""
        self.touched = False
        """Whether something happened here since it last reported."""
        self.attempts: dict[int, SimAttempt] = {}
        """Requests with a segment here that is not over."""
        self.waiting: deque[SimHandover] = deque()
        """Hand-overs that wait for room here."""
        self.state: SiteState = "starting"
        self.index = index
        self.member = replica_spec
        self.replica_model = replica_model
        self.machines = machines
        self.card = pipe
        self.role: Role = replica_spec.role
        self.changes: list[tuple[float, str, str]] = []
        self.computing: deque[SimAttempt] = deque()
        """Those of them whose segment here is to be handed on, in the order they came."""
        self.aside_bytes = 0.0
        """KV that was computed here and waits in the host's memory for its receiver's room."""
        self.cache: SpareCache | None = None
        self.announcer = CacheAnnouncer(replica_spec.id, index)
        """Numbers what the cache reports. A replica that comes back is another site, with a higher index."""
        self.recount = False
        """Whether all that the cache holds was asked for."""
        self.muted_until_s = 0.0
        self.silent = False
        """It is gone, and nobody has noticed."""
        self.room_tokens = replica_model.total_blocks * BLOCK_TOKENS
        """Tokens of KV that it holds at most."""

    @property
    def id(self) -> str:
        return self.member.id

    @property
    def there(self) -> bool:
        return self.state not in ("stopped", "lost")

    def hit(self, at_s: float, request: Request, stop: int) -> int:
        """Tokens of a prefix that it holds; the last token is always computed."""
        cache = self.cache
        if not cache:
            return 0
        cache.shrink(self.replica.free_blocks(at_s) * BLOCK_TOKENS)
        return min(cache.match(request.blocks) * cache.block_tokens, stop - 1)

    def keep(self, at_s: float, blocks: tuple[int, ...]) -> None:
        """The KV of a prompt's blocks is here: hold what fits beside running requests, whose room comes first."""
        cache = self.cache
        if cache is not None:
            cache.keep(blocks)
            cache.shrink(self.replica.free_blocks(at_s) * BLOCK_TOKENS)

    def become(self, at_s: float, state: SiteState) -> None:
        self.state = state
        self.serves = state in ("ready", "draining", "leaving")
        self.changes.append((at_s, state, self.role))


class SimAttempt:
    """A request on its way along a route; a retry is a new journey."""

    def __init__(
        self,
        key: int,
        request: Request,
        attempt: int,
        prompt_tokens: int,
        before_tokens: int,
        segments: tuple[Segment, ...],
        sites: tuple[SimReplica, ...],
        weight: float = 1.0,
        yields: bool = False,
    ) -> None:
        self.key = key
        self.request = request
        self.attempt = attempt
        self.prompt_tokens = prompt_tokens
        self.before_tokens = before_tokens
        """Tokens that reached the user in earlier attempts; they are part of the prompt now."""
        self.segments = segments
        self.sites = sites
        self.weight = weight
        """Of its tenant."""
        self.yields = yields
        self.place = 0
        """The segment under way."""
        self.hand: SimHandover | None = None
        """KV on its way from the segment under way to the next."""
        self.codec: Codec = LOSSLESS
        """In which KV came to the segment under way. What lost something is kept for nobody else."""


class SimHandover:
    """KV on its way between two segments. `links/handovers.py` has the life of one."""

    def __init__(self, key: int, attempt: SimAttempt, size_bytes: float, codec: Codec) -> None:
        self.key = key
        self.running = attempt
        self.source = attempt.sites[attempt.place]
        self.target = attempt.sites[attempt.place + 1]
        self.size_bytes = size_bytes
        self.codec = codec
        self.pipe: SharedPipe | None = None
        """The one that it takes, or of several the one that is to take longest."""
        self.parts: tuple[tuple[int, SharedPipe], ...] = ()
        """The others, with the keys of their parts, where layers lie on several machines."""
        self.left = 1
        """Pipes that still carry some of it."""
        self.began_s = inf
        """When the computation of its segment began."""
        self.computed_s = inf
        self.started_s = inf
        """When its first byte could leave."""
        self.piped_s = inf
        """When the pipe had given it its bytes."""
        self.waits_s = inf
        """Since when it has waited for room."""
        self.reserved = False
        self.aside = False
        """Whether it waits in its sender's host memory, and holds no blocks there."""
        self.over = False

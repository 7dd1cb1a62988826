"""An engine's counters, role and status report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, get_args

from potluck.core.errors import InputError
from potluck.kv.peer_connections import LinkReport

Role = Literal["prefill", "decode", "mixed"]
ROLES: tuple[Role, ...] = get_args(Role)
RECENT_STEPS = 256


@dataclass(slots=True)
class EngineCounters:
    """Since the start. Written by the loop alone; others read single figures."""

    accepted: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    steps: int = 0
    computed_tokens: int = 0
    checks: int = 0
    """Integrity checks passed while idle."""
    recent: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """(tokens, sequences, seconds) of the latest steps."""

    def step(self, tokens: int, sequences: int, seconds: float) -> None:
        self.steps += 1
        self.computed_tokens += tokens
        self.recent.append((tokens, sequences, seconds))


def role_of(name: object) -> Role:
    for role in ROLES:
        if name == role:
            return role
    raise InputError("role", f"must be one of {', '.join(ROLES)}, is {name!r}")


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What `GET /status` answers."""

    version: str
    model: str
    fingerprint: str
    role: Role
    state: str
    """ready, draining, drained or failed"""
    waiting: int
    running: int
    context_tokens: int
    todo_tokens: int
    free_blocks: int
    total_blocks: int
    block_tokens: int
    max_tokens: int
    """Of one sequence."""
    max_running: int
    steps: int
    step_mean_s: float
    step_p99_s: float
    """Of the latest steps."""
    prompt_tokens: int
    output_tokens: int
    prefix_hit_share: float
    prefix_bytes: int
    preemptions: int
    checks: int
    """Integrity checks passed while idle: no block, row or hand-over place was lost."""
    uptime_s: float
    exact: bool = False
    """Whether tokens are the same to the last bit however requests are cut, batched and spread (numbers/exact.py)."""
    products: str = ""
    """How rows are multiplied for that: plain, pairs, strips (numbers/exact.py)."""
    kv: str = ""
    """HOST:PORT that other engines fetch its KV from."""
    kv_version: int = 0
    """The KV wire format's version."""
    links: tuple[LinkReport, ...] = ()
    """Transfer counters of each KV link."""
    problem: str = ""
    notes: dict[str, float] = field(default_factory=dict)


def step_times(counters: EngineCounters) -> tuple[float, float]:
    """(mean, 99th percentile) of the latest steps, in seconds."""
    values = sorted(seconds for _, _, seconds in tuple(counters.recent))
    if not values:
        return 0.0, 0.0
    return sum(values) / len(values), values[min(len(values) - 1, int(len(values) * 0.99))]

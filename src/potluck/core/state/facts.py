"""What decisions need to know and cannot work out: times and sizes from `perf`, put together once for a Brain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from potluck.core.values.kv import codec_ratio, wire_bytes
from potluck.core.values.service import FailureDomain
from potluck.core.values.types import Codec, Region, Slo

BLOCK_TOKENS: Final = 16
SEND_QUEUE_BYTES: Final = 1 << 32
"""KV that a replica keeps in its host's memory for receivers that have not come, or have no room yet."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    kv_bytes_per_token: float
    """What crosses a link per token, before the codec."""
    state_bytes: float = 0.0
    """What crosses whatever the length: the state of linear-attention layers."""
    exact_prefix: bool = False
    """A prefix can only be resumed at lengths where state was kept: linear or window layers."""
    block_tokens: int = BLOCK_TOKENS
    slo: Slo | None = None
    """None: every answer counts as in time."""
    idle_s: float | None = None
    """After so long without a request all of its copies go, until the next one comes; None: never."""
    windows: tuple[tuple[int, float], ...] = ()
    """Of layers with a window: its tokens, and bytes per token."""
    kv_bits: float = 16.0
    """In which the KV of tokens is held."""
    limits: Slo | None = None
    """TTFT and TPOT that admission keeps to where they are tighter than promised: usual answers must keep E2E too."""
    survive: FailureDomain | None = None
    """What may be lost, any one of it, while `survive_share` of the demand is still served: scaling keeps to it."""
    survive_share: float = 1.0
    latent: bool = False
    """Whether its KV is latents alone."""

    def wire_bytes(self, tokens: float, codec: Codec = "fp16", start: float = 0) -> float:
        """What the KV of a prompt's tokens from `start` on puts on the wire."""
        span, ratio = (start, tokens), codec_ratio(codec, self.kv_bits, latent=self.latent)
        return wire_bytes(self.kv_bytes_per_token, self.windows, self.state_bytes, span, ratio)

    @property
    def fixed_bytes(self) -> float:
        """Of a long prompt: the state, and all windows full."""
        return self.state_bytes + sum(window * rate for window, rate in self.windows)


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One of a template's replicas: how fast and how large."""

    prefill_s_per_token: float
    prefill_fixed_s: float
    decode_step_s: float
    """A decode step at the batch it was planned for."""
    decode_batch: int
    total_blocks: int
    max_tokens: int
    """Longest prompt and answer together."""
    decode_first_s: float = 0.0
    """A decode step of one request alone; 0 when not known, so that steps count as proportional to their batch."""
    card_gbps: float = 0.0
    """Its network cards together; 0 when not known."""
    prefill_curve: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of prompts alone: seconds, per token, per token squared (attention); nothing where only the line is known."""
    alone_s_per_token: float = 0.0
    """Of a lone prompt, where that is longer: a pipeline's next prompt begins long before one is done."""
    decode_knees: tuple[tuple[int, float], ...] = ()
    """Batches up to the planned one, rising, and their steps, where these do not lie on one line (experts)."""
    assumed: bool = False
    """Its hardware is unknown: the figures are the same for all such replicas, and only where learning starts."""

    def with_slots(self, slots: int) -> ReplicaFacts:
        """Of an engine that runs no more than so many requests at once; 0: nothing is said of that."""
        if not 0 < slots < self.decode_batch:
            return self
        knees = tuple(knee for knee in self.decode_knees if knee[0] < slots)
        step_s = self.batch_step_s(slots)
        return replace(self, decode_batch=slots, decode_step_s=step_s, decode_knees=knees)

    def batch_step_s(self, batch: float) -> float:
        """A decode step of so many requests: on the lines through one request, the knees and the planned batch."""
        planned, full_s, first_s = self.decode_batch, self.decode_step_s, self.decode_first_s
        if planned <= 1 or not 0 < first_s <= full_s:
            return full_s
        low, low_s = 1, first_s
        for knee, knee_s in self.decode_knees:
            if batch <= knee:
                return low_s + (knee_s - low_s) * (batch - low) / (knee - low)
            low, low_s = knee, knee_s
        return low_s + (full_s - low_s) * (batch - low) / (planned - low)

    def prompt_s(self, tokens: float, cached: float = 0.0) -> float:
        """For a prompt of so many tokens, of which the first are cached: as the curve has it, or else the line."""
        fixed_s, token_s, square_s = self.prefill_curve
        if token_s == square_s == 0.0:
            return self.prefill_fixed_s + self.prefill_s_per_token * (tokens - cached)
        return fixed_s + (tokens - cached) * (token_s + square_s * (tokens + cached))


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """CRONUS's two predictors for a pair: T_parprefill = k_p L + b_p for L tokens on the low-end GPU, and
    t_chunked = k_ctxp L_p + k_ctxd sum L_d + b_c for one iteration of `chunk_tokens` on the high-end one."""

    k_p: float
    b_p: float
    k_ctxp: float
    k_ctxd: float
    b_c: float
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group of machines: what KV takes between its replicas, over which links."""

    model: str
    kv_bytes_per_token: float
    """As it crosses: after the codec."""
    hops: tuple[tuple[int, int, tuple[tuple[str, float, float], ...]], ...]
    """(from replica, to replica, (link, seconds, seconds per byte of KV) of each); a link in a machine: no name."""
    prompt_tokens: float
    """Mean prompt and answer that it was planned for."""
    output_tokens: float


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """All of it. Keys: model; (template, index of the replica in it); template; (source, target) region."""

    models: Mapping[str, ModelFacts]
    replicas: Mapping[tuple[str, int], ReplicaFacts]
    splits: Mapping[str, SplitFacts] = field(default_factory=dict)
    links_gbps: Mapping[tuple[str, str], float] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()
    """What can be rented where and at what price; scaling needs it. Empty: not known, so nothing is ruled out."""
    history: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """A model's requests a second in past bins of `core.scaling.forecast.BIN_S`, the last ending at time 0."""
    places: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    """The nodes of its copy that a replica stands on, by names that all replicas of the copy share."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Machines that plans name, and the zone or rack of each, where known."""
    groups: Mapping[str, GroupFacts] = field(default_factory=dict)
    """Templates of the kind `group` whose machines have names."""


LEAST: Final = 0.5
MOST: Final = 4.0  # What is planned with at most: beyond it something is broken, and no plan helps.
WORTH: Final = 0.1  # A pace must be off by so much.


@dataclass(frozen=True, slots=True)
class ObservedSpeed:
    """How long replicas of a model on one kind of node take, for each second of their facts."""

    model: str
    node: str
    tp: int
    pace: float
    replicas: int = 1
    """In how many it was seen; it is their median."""

    @property
    def believed(self) -> float:
        return min(MOST, max(LEAST, self.pace))

    @property
    def matters(self) -> bool:
        return abs(self.pace - 1.0) > WORTH

    def __str__(self) -> str:
        shards = f" tp{self.tp}" if self.tp > 1 else ""
        return f"{self.node}{shards} at {self.believed:.2f} of its facts for {self.model}"


def spoken(paces: Sequence[ObservedSpeed]) -> str:
    """What is planned with, in a line; empty where it is the facts."""
    listed = ", ".join(str(observed_speed) for observed_speed in paces if observed_speed.matters)
    return f"plans with {listed}" if listed else ""

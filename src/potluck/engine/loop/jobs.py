"""Jobs and their rows: a row is opened when a job begins, with as much of its prompt as the prefix cache knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from potluck.core.errors import CapacityError, InputError
from potluck.core.replica.batch import require_weight
from potluck.core.state.facts import BLOCK_TOKENS
from potluck.core.values.sampling import SampledToken, Sampling
from potluck.engine.compute.executor import CacheExport, Executor, IncomingCache, SequenceWork, TokenDraw
from potluck.engine.compute.logit_edits import JsonGuide, LogitEdits
from potluck.engine.loop.engine_status import EngineCounters
from potluck.engine.memory.prefix_cache import PrefixCache
from potluck.kv.chunks import KvChunk, KvManifest, token_hash
from potluck.kv.codec_layout import Codec

NOT_FETCHED = "not_fetched"


@dataclass(frozen=True, slots=True)
class Job:
    """One segment of a request: the tokens [start, stop) of its prompt; without a stop it also decodes.

    The cache of [0, start) comes from elsewhere. Whoever decodes computes the prompt's last token itself, since the
    first output token comes of it: a segment that is to go on to the prompt's very end stops one token before.
    """

    key: int
    prompt: tuple[int, ...]
    """All of it, whatever the segment."""
    start: int = 0
    stop: int | None = None
    output_tokens: int = 0
    """At most so many; only where there is no stop."""
    sampling: Sampling = field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    priority: int = 0
    """Higher first."""
    tenant: str = ""
    """Tenants share what is computed, by their weights."""
    weight: float = 1.0
    salt: str = ""
    """Prefixes are shared only with those of the same salt."""
    generated: int = 0
    """How many of the prompt's last tokens are output already."""
    guide: JsonGuide | None = field(default=None, compare=False)
    """For output of `sampling.json_schema`; of this job alone, and the loop's once it is submitted."""

    def __post_init__(self) -> None:
        require_weight(self.weight)
        if not 0 <= self.generated < max(len(self.prompt), 1):
            raise InputError("generated", f"must leave a prompt of the {len(self.prompt)} tokens")
        length = len(self.prompt)
        if not length:
            raise InputError("prompt", "must have at least one token")
        if not 0 <= self.start <= length:
            raise InputError("start", f"must be 0 to {length}, is {self.start}")
        if self.stop is None:
            if self.output_tokens < 1:
                raise InputError("max_tokens", f"must be at least 1, is {self.output_tokens}")
            return
        if not self.start < self.stop <= length:
            raise InputError("stop", f"must be {self.start + 1} to {length}, is {self.stop}")
        if self.whole < 1:
            raise InputError("stop", "a prompt of one token has nothing to hand on")
        if self.received >= self.whole:
            raise InputError("start", f"leaves nothing to compute before {self.whole}")

    def must_fit(self, vocab: int, most_tokens: int) -> None:
        """Raise why an engine with this vocabulary and room for so many tokens can never run it."""
        if min(self.prompt) < 0 or max(self.prompt) >= vocab:
            wrong = next(token for token in self.prompt if not 0 <= token < vocab)
            raise InputError("prompt", f"token {wrong} is not in the vocabulary of {vocab}")
        strange = next((token for token, _ in self.sampling.logit_bias if not 0 <= token < vocab), None)
        if strange is not None:
            raise InputError("logit_bias", f"token {strange} is not in the vocabulary of {vocab}")
        if self.whole + max(self.output_tokens - 1, 0) > most_tokens:
            raise CapacityError(
                f"{self.whole} + {self.output_tokens} tokens are more than the {most_tokens} that fit"
            )

    @property
    def received(self) -> int:
        """Tokens whose cache comes from elsewhere."""
        return min(self.start, len(self.prompt) - 1)

    @property
    def whole(self) -> int:
        """Tokens that the row holds when the prompt is done."""
        return len(self.prompt) if self.stop is None else min(self.stop, len(self.prompt) - 1)

    @property
    def hands_on(self) -> bool:
        return self.stop is not None

    @property
    def standing(self) -> tuple[int, str, float]:
        """Its place among others: priority, tenant, weight."""
        return self.priority, self.tenant, self.weight


@dataclass(frozen=True, slots=True)
class JobTimes:
    """When a request arrived, began and got its tokens, by the loop's clock."""

    came_s: float
    began_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class OutputToken:
    choice: SampledToken
    gap_s: float | None = None
    """Since the one before; None for the first."""


@dataclass(frozen=True, slots=True)
class RowReady:
    """A row and blocks are reserved for a cache that is to arrive."""


@dataclass(frozen=True, slots=True)
class LayerSent:
    """Chunks of one layer for the receiver; `last` with the final layer."""

    chunks: tuple[KvChunk, ...]
    last: bool
    exact: bool = True
    """Whether none of them went through a lossy codec."""


@dataclass(frozen=True, slots=True)
class JobComputed:
    """A segment that hands on is done; it keeps its blocks until its cache is fetched."""

    times: JobTimes


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The last event of a request. `reason`: stop, length, handed_on, cancelled or error."""

    reason: str
    times: JobTimes
    problem: str = ""
    may_retry: bool = False
    """It ended for want of room: a retry, here or elsewhere, may succeed."""
    code: str = ""
    """A word for the problem, where others can act on it."""


Event = OutputToken | RowReady | LayerSent | JobComputed | JobEnded


class RunningJob:
    """A job from its submission to its end. Changed by the loop and by `CacheRows`."""

    # fmt: off
    __slots__ = ("codec", "computed", "drawing", "edits", "exact", "fetched_from", "found", "incoming", "job",
                 "key", "last_s", "outgoing", "row", "sent", "times", "tokens")
    # fmt: on

    def __init__(self, job: Job, now_s: float) -> None:
        self.job, self.key = job, job.key
        self.tokens = list(job.prompt)
        sampling = job.sampling
        self.edits = (
            LogitEdits(sampling, job.prompt, job.generated, job.guide)
            if sampling.edits and not job.hands_on
            else None
        )
        """What changes of the logits that its tokens are drawn from."""
        self.drawing = 0
        """Tokens that steps under way draw for it."""
        self.row: int | None = None
        self.times = JobTimes(now_s)
        self.last_s: float | None = None  # When its latest token came; in the times once it has ended.
        self.found: tuple[int, list[KvChunk]] | None = None
        """A known prefix, put aside for when there is a row."""
        self.incoming: IncomingCache | None = None
        self.codec: Codec = "raw"
        """How its receiver takes what it hands on, where that can be made on the way."""
        self.fetched_from: int | None = None
        """Tokens that the receiver holds already, once it has connected."""
        self.outgoing: Iterable[tuple[KvChunk, ...]] | None = None  # Being read out for it, layer by layer.
        self.sent = 0
        """Tokens whose KV went out with the steps that computed them."""
        self.computed = False
        self.exact = True
        """Whether none of its KV went through a lossy codec; else other requests must not use it as a prefix."""

    @property
    def known_tokens(self) -> int:
        """Tokens of prompt and output, with those that steps under way draw."""
        return len(self.tokens) + self.drawing

    def draw(self, target_tokens: int) -> TokenDraw | None:
        """How the token behind a step up to `target_tokens` is drawn; None where that one draws none."""
        if target_tokens != self.known_tokens or self.job.hands_on:
            return None
        return TokenDraw(self.job.sampling, target_tokens, None if self.edits is None else self.edits.next())

    def drew(self, token: int) -> None:
        self.tokens.append(token)
        self.drawing -= 1
        if self.edits is not None:
            self.edits.drew((token,))

    def leaving(self, row: int, target_tokens: int) -> list[CacheExport]:
        """What goes to the receiver, if it is there, with a step that computes up to `target_tokens`."""
        since = self.fetched_from
        if not self.job.hands_on or since is None or since >= target_tokens:
            return []
        start, self.sent = max(since, self.sent), target_tokens
        return [CacheExport(row, start, target_tokens, (since, self.whole), self.codec)]

    @property
    def whole(self) -> int:
        """Tokens that the row holds before the next output token, or before handing on."""
        return self.job.whole if self.job.hands_on else self.known_tokens


class CacheRows:
    def __init__(
        self, executor: Executor, prefixes: PrefixCache, chunk_tokens: int, counters: EngineCounters
    ) -> None:
        self._executor, self._prefixes = executor, prefixes
        self._chunk, self._counters = chunk_tokens, counters
        self.keys: dict[int, int] = {}

    def find(self, job: RunningJob, most_tokens: int) -> tuple[int, list[KvChunk]]:
        return self._prefixes.find(job.tokens, most_tokens, job.job.salt)

    def begin(self, job: RunningJob, most_tokens: int) -> int:
        """Open a row and put what is known of the job's first `most_tokens` into it."""
        row = job.row = self._executor.open()
        self.keys[row] = job.job.key
        tokens, chunks = job.found or self.find(job, most_tokens)
        job.found = None
        if tokens:
            manifest = KvManifest(self._executor.fingerprint, 0, tokens, token_hash(job.tokens[:tokens]))
            arrival = self._executor.arrival(row, manifest, job.tokens)
            for chunk in chunks:
                arrival.accept(chunk)
            arrival.finish()
        if job.times.first_s is None:
            self._counters.prefix_queries += job.whole
            self._counters.prefix_hits += tokens
            job.times = replace(job.times, cached_tokens=tokens)
        return row

    def close(self, job: RunningJob) -> None:
        if job.row is not None:
            self._executor.close(job.row)
            del self.keys[job.row]
            job.row = None

    def keep(self, job: RunningJob) -> None:
        """What the row holds can be used by others from now on."""
        row = job.row
        if row is None or not job.exact or not self._prefixes.enabled:
            return

        def read(layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
            return self._executor.export(row, layer, start, stop)

        self._prefixes.keep(job.tokens, self._executor.held(row), read, job.job.salt)

    def catch_up(self, job: RunningJob, row: int, target_tokens: int) -> int:
        """Compute what must come in steps of its own: what is too long for one (a prefix was lost since it was
        counted on), and the part of a prompt that ends where layers with a state can be resumed. Where it ends."""
        start = self._executor.held(row)
        stops = set(range(start + self._chunk, target_tokens, self._chunk))
        last_block = (len(job.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        keeps = self._prefixes.exact and self._prefixes.enabled and start < last_block < target_tokens
        if keeps:
            stops.add(last_block)
        for stop in sorted(stops):
            start = self._executor.held(row)
            self._executor.grow(row, stop, since=start)
            self._executor.step([SequenceWork(row, start, job.tokens[start:stop], "none")], [])
            if keeps and stop == last_block:
                self.keep(job)
        return self._executor.held(row)

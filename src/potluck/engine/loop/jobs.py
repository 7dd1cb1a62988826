"""Jobs and their rows: a row is opened when a job begins, with as much of its prompt as the prefix cache knows."""

from __future__ import annotations

from dataclasses import replace

from potluck.core.state.facts import BLOCK_TOKENS
from potluck.engine.compute.executor import CacheExport, Executor, IncomingCache, TokenDraw
from potluck.engine.compute.logit_edits import LogitEdits
from potluck.engine.compute.work import SequenceWork
from potluck.engine.loop.engine_status import EngineCounters
from potluck.engine.loop.messages import Job, JobTimes
from potluck.engine.memory.prefix_cache import PrefixStore
from potluck.kv.chunks import KvChunk, KvManifest, token_hash


class RunningJob:
    """A job while it is here. Written by the loop and by Rows."""

    __slots__ = (
        "computed",
        "edits",
        "exact",
        "fetched_from",
        "found",
        "incoming",
        "job",
        "row",
        "sent",
        "times",
        "tokens",
    )

    def __init__(self, job: Job, now_s: float) -> None:
        self.job = job
        self.tokens = list(job.prompt)
        """The prompt and what was drawn behind it."""
        way = job.sampling
        self.edits = (
            LogitEdits(way, job.prompt, job.generated, job.guide) if way.edits and not job.hands_on else None
        )
        """What changes of the logits that its tokens are drawn from."""
        self.row: int | None = None
        self.times = JobTimes(now_s)
        self.found: tuple[int, list[KvChunk]] | None = None
        """A known prefix, put aside for when there is a row."""
        self.incoming: IncomingCache | None = None
        self.fetched_from: int | None = None
        """The receiver is there and has so many tokens already."""
        self.sent = 0
        """Tokens whose KV went out with the steps that computed them."""
        self.computed = False
        self.exact = True
        """Nothing in it came through a codec that loses something; else it must not become a prefix of others."""

    def draw(self, goal: int) -> TokenDraw | None:
        """How the token behind a step up to `goal` is drawn; None where that one draws none."""
        if self.job.hands_on or goal != len(self.tokens):
            return None
        return TokenDraw(self.job.sampling, goal, None if self.edits is None else self.edits.next())

    def drew(self, token: int) -> None:
        self.tokens.append(token)
        if self.edits is not None:
            self.edits.drew((token,))

    def leaving(self, row: int, goal: int) -> list[CacheExport]:
        """What goes to the receiver, if it is there, with a step that computes up to `goal`."""
        since = self.fetched_from
        if not self.job.hands_on or since is None or since >= goal:
            return []
        start, self.sent = max(since, self.sent), goal
        return [CacheExport(row, start, goal, (since, self.whole))]

    @property
    def whole(self) -> int:
        """Tokens that the row holds before the next output token, or before handing on."""
        return self.job.whole if self.job.hands_on else len(self.tokens)


class CacheRows:
    """Who has which row."""

    def __init__(
        self, executor: Executor, prefixes: PrefixStore, chunk_tokens: int, counters: EngineCounters
    ) -> None:
        self._executor, self._prefixes = executor, prefixes
        self._chunk, self._counters = chunk_tokens, counters
        self.keys: dict[int, int] = {}
        """Row to job."""

    def find(self, run: RunningJob, most_tokens: int) -> tuple[int, list[KvChunk]]:
        """What is known of the job's first tokens, and how many those are."""
        return self._prefixes.find(run.tokens, most_tokens, run.job.salt)

    def begin(self, run: RunningJob, most_tokens: int) -> int:
        """Open a row and put what is known of the job's first `most_tokens` into it."""
        row = run.row = self._executor.open()
        self.keys[row] = run.job.key
        tokens, parcels = run.found or self.find(run, most_tokens)
        run.found = None
        if tokens:
            about = KvManifest(self._executor.fingerprint, 0, tokens, token_hash(run.tokens[:tokens]))
            arrival = self._executor.arrival(row, about, run.tokens)
            for parcel in parcels:
                arrival.accept(parcel)
            arrival.finish()
        if run.times.first_s is None:
            self._counters.prefix_queries += run.whole
            self._counters.prefix_hits += tokens
            run.times = replace(run.times, cached_tokens=tokens)
        return row

    def close(self, run: RunningJob) -> None:
        if run.row is not None:
            self._executor.close(run.row)
            del self.keys[run.row]
            run.row = None

    def keep(self, run: RunningJob) -> None:
        """What the row holds can be used by others from now on."""
        row = run.row
        if row is None or not run.exact or not self._prefixes.enabled:
            return

        def read(layer: int, start: int, stop: int) -> tuple[KvChunk, ...]:
            return self._executor.export(row, layer, start, stop)

        self._prefixes.keep(run.tokens, self._executor.held(row), read, run.job.salt)

    def catch_up(self, run: RunningJob, row: int, goal: int) -> None:
        """Compute what must come in steps of its own: what is too long for one (a prefix was lost since it was
        counted on), and the part of a prompt that ends where layers with a state can be resumed."""
        start = self._executor.held(row)
        if start + 1 >= goal:
            return
        stops = set(range(start + self._chunk, goal, self._chunk))
        last_block = (len(run.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        keeps = self._prefixes.exact and self._prefixes.enabled and start < last_block < goal
        if keeps:
            stops.add(last_block)
        for stop in sorted(stops):
            start = self._executor.held(row)
            self._executor.grow(row, stop, since=start)
            self._executor.step([SequenceWork(row, start, run.tokens[start:stop], "none")], [])
            if keeps and stop == last_block:
                self.keep(run)

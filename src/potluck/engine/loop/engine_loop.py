"""The engine's loop: schedule, run, publish. One object, called from one thread, that owns executor and Batcher.

    turn                       admit hand-overs; take a step from the Batcher; compute it; commit it; publish events
    submit, cancel             calls between two turns (`loop_thread.py` queues them)
    attach                     on the sender of a hand-over: its receiver has connected
    expect, accept, arrived    on the receiver, in this order

The Batcher schedules by numbers of tokens, as if a prompt were computed exactly as scheduled. What is computed is
what the row lacks: a cached prefix makes a chunk smaller or empty, never larger.

A hand-over takes a row beside the Batcher's slots, from its admission until its blocks are free (sender) or it runs
(receiver), so that there is always a row for what the Batcher admits. Half of these rows are for receivers and half
for senders: receivers wait for senders, perhaps in a ring of engines, and must not block them. A computed cache whose
receiver has not connected is read out to host memory when other requests wait for its row or blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from potluck.api.segments import UNSUPPORTED
from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.core.replica.batch import DONE, FINISHED, FIRST, Batcher, BatchLimits, BatchStep
from potluck.core.state.facts import SEND_QUEUE_BYTES
from potluck.core.values.sampling import SampledToken
from potluck.engine.compute.executor import (
    CacheExport,
    Executor,
    IncomingCache,
    SequenceWork,
    StepInputs,
    last_drawn,
)
from potluck.engine.compute.logit_edits import UnfitFormat
from potluck.engine.loop.engine_status import EngineCounters
from potluck.engine.loop.jobs import (
    NOT_FETCHED,
    CacheRows,
    Event,
    Job,
    JobComputed,
    JobEnded,
    LayerSent,
    OutputToken,
    RowReady,
    RunningJob,
)
from potluck.engine.loop.running_step import RunningStep
from potluck.engine.memory.prefix_cache import PrefixCache
from potluck.kv.chunks import KvChunk, KvManifest, data_bytes, token_hash
from potluck.kv.codec_layout import Codec


class HandoverGate:
    """Hand-overs of one kind: those that wait for a row or blocks, and those that have a row reserved."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.waiting: deque[int] = deque()
        self.admitted: set[int] = set()

    def admissible(self) -> list[int]:
        free = self._places - len(self.admitted)
        return [self.waiting[place] for place in range(min(free, len(self.waiting)))]

    def admit(self, key: int) -> None:
        self.waiting.remove(key)
        self.admitted.add(key)

    def remove(self, key: int) -> None:
        self.admitted.discard(key)
        if key in self.waiting:
            self.waiting.remove(key)

    @property
    def empty(self) -> bool:
        return not self.waiting and not self.admitted


HOST_KV_MAX_BYTES = 1 << 29
"""Of caches read out of a GPU; above it no prompt to be handed over is begun. Pinned memory is slow to allocate and
quick to reuse."""
FAILURES = (PotluckError, RuntimeError, ValueError, OSError)
"""Errors of an executor that end the requests concerned, not the engine."""
EventSink = Callable[[list[tuple[int, Event]]], None]


class HostKvStore:
    """Caches that were read out to host memory before their receiver connected, to free rows for other requests.

    Engines that hand over to each other in a ring would deadlock otherwise. By the job's key; changed by the loop and
    where a hand-over ends.
    """

    def __init__(self, max_bytes: int = SEND_QUEUE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._caches: dict[int, tuple[KvManifest, int]] = {}
        self._held_bytes = 0

    @property
    def full(self) -> bool:
        """Checked before a cache is read out, so one cache may exceed the limit."""
        return self._held_bytes >= self.max_bytes

    def put(self, key: int, manifest: KvManifest, size_bytes: int) -> None:
        self._caches[key] = manifest, size_bytes
        self._held_bytes += size_bytes

    def take(self, key: int) -> KvManifest | None:
        """Remove a cache, whose receiver connected or will not come; its manifest, or None if it is not held."""
        manifest, size_bytes = self._caches.pop(key, (None, 0))
        self._held_bytes -= size_bytes
        return manifest


def problem_of(error: Exception) -> tuple[str, bool, str]:
    """An error as the end of a request reports it: one line, whether a retry may succeed, and a code."""
    may_retry = isinstance(error, CapacityError)
    code = UNSUPPORTED if isinstance(error, UnfitFormat) else ""
    return (str(error).splitlines() or [type(error).__name__])[0], may_retry, code


class EngineLoop:
    def __init__(
        self,
        executor: Executor,
        limits: BatchLimits,
        publish: EventSink,
        *,
        prefixes: PrefixCache | None = None,
        lease_s: float = 60.0,
        chunk_bytes: Callable[[KvChunk], int] = data_bytes,
        await_steps: bool = True,
        join_step: Callable[[CacheExport], bool] | None = None,
    ) -> None:
        """`chunk_bytes`: the size that a chunk counts as. Without `await_steps` a step stays under way after its
        turn, and the next turn awaits it (`TimerLoop`); `join_step` then adds a cache to what the step exports."""
        size = executor.size
        if limits.total_blocks > size.blocks:
            raise InputError("blocks", f"{limits.total_blocks} are more than the executor's")
        spare = size.rows - limits.max_running
        if spare < 2:
            raise InputError("rows", f"must be at least two more than the {limits.max_running} that may run")
        self.executor, self.counters = executor, EngineCounters()
        chunk = min(limits.chunk_tokens or limits.token_budget, size.max_chunk_tokens)
        self.batcher = Batcher(replace(limits, chunk_tokens=chunk))
        self._step: RunningStep | None = None
        self._publish, self._chunk_bytes, self._join_step = publish, chunk_bytes, join_step
        self._awaits_steps = await_steps and not executor.ordered
        self._begins_ahead = await_steps and executor.ordered
        self.prefixes = prefixes or PrefixCache(executor.config, 0)
        self._rows = CacheRows(executor, self.prefixes, chunk, self.counters)
        self._lease_s, self._now_s = lease_s, 0.0
        self._running_jobs: dict[int, RunningJob] = {}
        self._senders, self._receivers = HandoverGate(spare - spare // 2), HandoverGate(spare // 2)
        self._unclaimed_until_s: dict[int, float] = {}
        """Computed caches whose receivers have not connected: by key, when their lease ends."""
        self.host_kv = HostKvStore()
        self._exported_after_step: list[RunningJob] = []
        """Jobs whose caches are read out after the step under way."""
        self.host_bytes: dict[int, int] = {}
        """Caches read out of a GPU for a connected receiver, until they are delivered: bytes by key."""
        self._host_kv_max_bytes = HOST_KV_MAX_BYTES if executor.ordered else None
        self._pending_events: list[tuple[int, Event]] = []

    # Calls between turns.

    def submit(self, job: Job, now_s: float) -> int:
        """Accept a job or raise an error; an accepted job ends in exactly one `JobEnded`. Returns how many tokens of
        the cache that it is to receive are in the prefix cache here; these are kept until the rest arrives."""
        self._now_s = now_s
        job.must_fit(self.executor.config.model.vocab, self.most_tokens)
        if job.key in self._running_jobs:
            raise InputError("request", f"{job.key} is already here")
        self._running_jobs[job.key] = running_job = RunningJob(job, now_s)
        self.counters.accepted += 1
        if job.received:
            running_job.found = self._rows.find(
                running_job, job.received - 1
            )  # the sender has at least one token to send
            return running_job.found[0]
        if job.hands_on:
            self._senders.waiting.append(job.key)
        else:
            self.batcher.add(job.key, job.whole, 0, job.output_tokens, *job.standing)
        return 0

    def cancel(self, key: int, now_s: float, problem: str = "", *, reason: str = "") -> None:
        self._now_s = now_s
        if key in self._running_jobs:
            self._end(key, reason or ("error" if problem else "cancelled"), problem)
            self.flush()

    def attach(self, key: int, have: int, now_s: float, codec: Codec = "raw") -> KvManifest:
        """The receiver of job `key` has connected and holds `have` tokens: the cache is sent as it is computed, under
        `codec`."""
        self._now_s = now_s
        if (manifest := self.host_kv.take(key)) is not None:
            return manifest
        running_job = self._running_jobs.get(key)
        if running_job is None or not running_job.job.hands_on or running_job.fetched_from is not None:
            raise InputError("handle", "is unknown, has expired, or was used")
        if not 0 <= have < running_job.job.whole:
            raise InputError("have", f"must be 0 to {running_job.job.whole - 1}, is {have}")
        running_job.fetched_from, running_job.codec = have, codec
        self.host_bytes[key] = 0
        row, whole = running_job.row, running_job.job.whole
        in_row = row is not None and self.executor.held(row) >= whole
        if in_row and row is not None and self._begins_ahead and self._step is not None:
            # Behind the step that is under way, before the next one: it goes when that step has landed.
            running_job.outgoing = self.executor.exports(row, have, whole, codec)
            self._exported_after_step += [running_job] if running_job.computed else []
            self._unclaimed_until_s.pop(key, None)
        elif running_job.computed:
            self._send_cache(running_job)
        elif self._join_step is not None and (running_step := self._step_of(running_job)) is not None:
            running_step.join_receiver(running_job, self._join_step)
        return self._manifest(running_job, have)

    def delivered(self, key: int) -> None:
        """The hand-over has ended: its receiver has the cache, or will not get it."""
        self.host_bytes.pop(key, None)

    def _manifest(self, running_job: RunningJob, have: int) -> KvManifest:
        whole = running_job.job.whole
        return KvManifest(self.executor.fingerprint, have, whole, token_hash(running_job.job.prompt[:whole]))

    def expect(self, key: int, manifest: KvManifest) -> IncomingCache | None:
        """A cache is about to arrive: the object that accepts its chunks. None if no row or blocks are free; call
        again after the event `RowReady`."""
        running_job = self._running_job(key)
        if running_job.incoming is not None or manifest.stop != running_job.job.received:
            raise InputError(
                "hand-over", f"is of {manifest.stop}, not {running_job.job.received}, tokens, or unasked for"
            )
        if running_job.row is None:
            if key not in self._receivers.waiting:
                self._receivers.waiting.append(key)
            self._admit_handovers()
        if running_job.row is not None:
            running_job.incoming = self.executor.arrival(running_job.row, manifest, running_job.job.prompt)
        return running_job.incoming

    def accept(self, key: int, chunk: KvChunk, *, lossy: bool = False) -> None:
        self._incoming_cache(key).accept(chunk)
        self.accepted(key, self._chunk_bytes(chunk), lossy=lossy)

    def accepted(self, key: int, size_bytes: int, *, lossy: bool = False) -> None:
        """Count a chunk that what `expect` returned has accepted, in the thread that received it."""
        self._running_job(key).exact &= not lossy
        self.counters.received_bytes += size_bytes

    def arrived(self, key: int) -> None:
        self._incoming_cache(key).finish()
        running_job = self._running_job(key)
        running_job.incoming, job = None, running_job.job
        self.batcher.add(key, job.whole - job.received, job.received, job.output_tokens, *job.standing)

    def _running_job(self, key: int) -> RunningJob:
        if (running_job := self._running_jobs.get(key)) is None:
            raise InputError("hand-over", "the request has ended")
        return running_job

    def _incoming_cache(self, key: int) -> IncomingCache:
        if (incoming := self._running_job(key).incoming) is None:
            raise InputError("hand-over", "nothing is expected")
        return incoming

    # A turn.

    def turn(self, now_s: float, clock: Callable[[], float] | None = None) -> bool:
        """Advance by one step; False when there was none to advance."""
        self._now_s = now_s
        self._end_expired()
        self._admit_handovers()
        busy = self._advance(clock)
        self.flush()
        return busy

    def _advance(self, clock: Callable[[], float] | None) -> bool:
        """Await the step under way, and begin the next, which is awaited, too, if `_awaits`. Whether there was any.

        If `_begins_ahead`, the next step is begun first: it follows from numbers of tokens, and tokens not known yet
        stay with the executor. What it computes for a job that turns out to have ended is discarded."""
        last = self._step
        previous = last if self._begins_ahead else None
        if previous is not None:
            self._commit_step(previous)
        elif last is not None:
            self._finish_step(last, clock)
        batch_step = self.batcher.next_step()
        if previous and (batch_step.preempted or previous.edits_logits):
            self._finish_step(previous, clock)
            previous = None
        for key in batch_step.preempted:
            if key in self._running_jobs:
                self._rows.close(self._running_jobs[key])
            self.counters.preemptions += 1
        self._step = running_step = self._plan_step(batch_step)
        self._begin_step(running_step)
        if previous is not None:
            self._finish_step(previous, clock)
            running_step.began_s = self._now_s
        if self._awaits_steps or not running_step.works:
            self._finish_step(running_step, clock)
        return last is not None or bool(batch_step.chunks or batch_step.decodes)

    def flush(self) -> None:
        if self._pending_events:
            events, self._pending_events = self._pending_events, []
            self._publish(events)

    def next_expiry_s(self) -> float | None:
        """When the next lease ends; None without one."""
        return min(self._unclaimed_until_s.values(), default=None)

    def check(self) -> None:
        """Raise AssertionError if, when idle, a block, row or hand-over place is not free."""
        if not self.idle:
            return
        self.executor.check()
        self.prefixes.verify()
        batcher = self.batcher
        if batcher.free_blocks != batcher.limits.total_blocks or batcher.keys():
            raise AssertionError(f"{batcher.free_blocks} blocks are free without any request")
        if self._rows.keys or batcher.todo_tokens or not (self._senders.empty and self._receivers.empty):
            raise AssertionError("rows or hand-overs are left behind")
        self.counters.checks += 1

    # Figures.

    @property
    def most_tokens(self) -> int:
        """Of one sequence."""
        limits = self.batcher.limits
        return min(self.executor.size.max_tokens, limits.total_blocks * limits.block_tokens)

    @property
    def idle(self) -> bool:
        return not self._running_jobs and self._step is None

    @property
    def has_step_under_way(self) -> bool:
        return self._step is not None

    @property
    def waiting(self) -> int:
        return self.batcher.queued + len(self._senders.waiting) + len(self._receivers.waiting)

    # Inside a turn.

    def _admit_handovers(self) -> None:
        self._fill_handover_places()
        short = self.batcher.queued and self.batcher.blocked
        if self._unclaimed_until_s and (self._senders.waiting or self._receivers.waiting or short):
            for key in list(self._unclaimed_until_s):
                if not self.host_kv.full:
                    self._move_to_host(self._running_jobs[key])
            self._fill_handover_places()
        self.flush()

    def _move_to_host(self, running_job: RunningJob) -> None:
        """Read a computed cache out to host memory, from its first token on, where its receiver will find it."""
        before, running_job.fetched_from = self.counters.sent_bytes, 0
        if self._send_cache(running_job):
            self.host_kv.put(
                running_job.key, self._manifest(running_job, 0), self.counters.sent_bytes - before
            )

    def _fill_handover_places(self) -> None:
        crowded = (
            self._host_kv_max_bytes is not None and sum(self.host_bytes.values()) >= self._host_kv_max_bytes
        )
        for key in () if crowded else self._senders.admissible():
            job = self._running_jobs[key].job
            self.batcher.add(key, job.whole, 0, 0, *job.standing)
            self._senders.admit(key)
        for key in self._receivers.admissible():
            running_job = self._running_jobs[key]
            if not self.batcher.reserve(key, running_job.job.whole):
                break
            try:
                self._rows.begin(running_job, running_job.job.received - 1)
            except FAILURES as error:
                self._end_with_error([key], error)
                continue
            self._pending_events.append((key, RowReady()))
            self._receivers.admit(key)

    def _plan_step(self, batch_step: BatchStep) -> RunningStep:
        decoding = self.batcher.decoding
        jobs = self._running_jobs
        target_lengths = [(key, jobs[key].known_tokens) for key in decoding.keys()]  # noqa: SIM118
        target_lengths += [(key, before + tokens) for key, tokens, before in batch_step.chunks if key in jobs]
        running_step = RunningStep(batch_step, self._now_s, [], [], [])
        for key, target_tokens in target_lengths:
            running_job = jobs[key]
            try:
                row, start = self._prepare_row(running_job, target_tokens)
                draw = running_job.draw(target_tokens) if start < target_tokens else None
            except FAILURES as error:
                self._end_with_error([key], error)
                continue
            if start >= target_tokens:
                continue
            tokens = [last_drawn(row)] if running_job.drawing else running_job.tokens[start:target_tokens]
            running_step.works.append(SequenceWork(row, start, tokens, "none" if draw is None else "last"))
            running_step.jobs[row] = running_job
            if running_job.job.hands_on:
                running_step.exports += running_job.leaving(row, target_tokens)
            if draw is not None:
                running_step.draws.append(draw)
                running_job.drawing += 1
        return running_step

    def _prepare_row(self, running_job: RunningJob, target_tokens: int) -> tuple[int, int]:
        row = (
            self._rows.begin(running_job, running_job.whole - 1)
            if running_job.row is None
            else running_job.row
        )
        if running_job.times.began_s is None:
            running_job.times = replace(running_job.times, began_s=self._now_s)
            if not running_job.job.hands_on:
                self._receivers.remove(running_job.key)
        start = self.executor.held(row)
        if start + 1 < target_tokens:
            start = self._rows.catch_up(running_job, row, target_tokens)
        if start < target_tokens:
            self.executor.grow(row, target_tokens, since=start)
        return row, start

    def _begin_step(self, running_step: RunningStep) -> None:
        """Put a step under way; if that fails, its jobs end and it has no works any more."""
        if not running_step.works:
            return
        try:
            deliver = partial(self._deliver, running_step)
            step = StepInputs(running_step.works, running_step.draws, running_step.exports, deliver)
            running_step.land = self.executor.begin(step)
        except FAILURES as error:
            self._fail_step(running_step, error)

    def _await_tokens(self, running_step: RunningStep) -> list[tuple[RunningJob, SampledToken]]:
        """Wait for a step: its jobs with the tokens drawn for them; none when it fails, which ends its jobs."""
        if not running_step.works:
            return []
        assert running_step.land is not None
        try:
            drawn = zip(running_step.drawn, running_step.land(), strict=True)
            return [(running_step.jobs[row], sampled_token) for row, sampled_token in drawn]
        except FAILURES as error:
            self._fail_step(running_step, error)
            return []

    def _fail_step(self, running_step: RunningStep, error: Exception) -> None:
        self._end_with_error([running_job.key for running_job in running_step.jobs.values()], error)
        running_step.works, running_step.draws, running_step.exports = [], [], []

    def _commit_step(self, running_step: RunningStep) -> None:
        """Count a step as done, which in numbers of tokens it is once it is begun, and close rows that have all."""
        running_step.result = self.batcher.commit(running_step.batch_step)
        for happening, key in running_step.result:
            if happening in (FIRST, FINISHED) and (running_job := self._running_jobs.get(key)) is not None:
                self._keep_prefix(running_job)
                if happening == FINISHED:
                    self._rows.close(running_job)

    def _finish_step(self, running_step: RunningStep, clock: Callable[[], float] | None) -> None:
        size, count = running_step.tokens, len(running_step.works)
        drawn_tokens = self._await_tokens(running_step)
        self._now_s = self._now_s if clock is None else clock()
        if self._step is running_step:
            self._step = None
        if running_step.result is None:
            self._commit_step(running_step)
        for running_job in running_step.left:
            self.batcher.cancel(running_job.key)
            self._rows.close(running_job)
        for running_job, sampled_token in drawn_tokens:
            if self._running_jobs.get(running_job.key) is running_job:
                self._record_token(running_job, sampled_token)
        for happening, key in running_step.result or ():
            if happening == FINISHED and key in self._running_jobs:
                self._end(key, "length")
            elif happening == DONE and key in self._running_jobs:
                self._segment_computed(self._running_jobs[key], running_step)
        exported_jobs, self._exported_after_step = self._exported_after_step, []
        for running_job in exported_jobs:
            if self._running_jobs.get(running_job.key) is running_job:
                self._send_cache(running_job)
        if count:
            self.counters.step(size, count, self._now_s - running_step.began_s)

    def _end_with_error(self, keys: list[int], error: Exception) -> None:
        keys = [key for key in keys if key in self._running_jobs]
        self.counters.failures += len(keys)
        line, may_retry, code = problem_of(error)
        for key in keys:
            self._end(key, "error", line, may_retry=may_retry, code=code)

    def _deliver(self, running_step: RunningStep, row: int, chunks: tuple[KvChunk, ...]) -> None:
        """Send chunks of a row; the row may be another job's by now, whose chunks these are not."""
        if (running_job := running_step.jobs.get(row)) is not None:
            self._send(running_job, chunks)

    def _send(self, running_job: RunningJob, chunks: tuple[KvChunk, ...]) -> None:
        size_bytes = sum(map(self._chunk_bytes, chunks))
        self.counters.sent_bytes += size_bytes
        if running_job.key in self.host_bytes:
            self.host_bytes[running_job.key] += size_bytes
        if self._running_jobs.get(running_job.key) is running_job:
            end = (self.executor.config.model.layer_count - 1, running_job.whole)
            last = (chunks[-1].layer, chunks[-1].stop) == end
            self._pending_events.append((running_job.key, LayerSent(chunks, last, running_job.exact)))
            self.flush()

    def _record_token(self, running_job: RunningJob, sampled_token: SampledToken) -> None:
        gap_s = None if running_job.last_s is None else self._now_s - running_job.last_s
        if gap_s is None:
            running_job.times = replace(running_job.times, first_s=self._now_s)
            self.counters.prompt_tokens += len(running_job.job.prompt)
        running_job.last_s = self._now_s
        running_job.drew(sampled_token.token)
        self.counters.output_tokens += 1
        self._pending_events.append((running_job.key, OutputToken(sampled_token, gap_s)))
        if sampled_token.token in running_job.job.ends:
            self._end(running_job.key, "stop")

    def _segment_computed(self, running_job: RunningJob, running_step: RunningStep) -> None:
        running_job.computed = True
        self.counters.prompt_tokens += running_job.job.whole - running_job.job.received
        self._keep_prefix(running_job)
        self._pending_events.append((running_job.key, JobComputed(running_job.times)))
        if running_job.fetched_from is None:
            self._unclaimed_until_s[running_job.key] = self._now_s + self._lease_s
        elif any(export.row == running_job.row for export in running_step.exports):
            self._end(running_job.key, "handed_on")
        else:  # the receiver came while the step was under way
            self._send_cache(running_job)

    def _send_cache(self, running_job: RunningJob) -> bool:
        """Send a cache that was computed before its receiver connected; False if it could not be read out."""
        assert running_job.row is not None and running_job.fetched_from is not None  # noqa: PT018
        try:
            outgoing = running_job.outgoing or self.executor.exports(
                running_job.row, running_job.fetched_from, running_job.job.whole, running_job.codec
            )
            for chunks in outgoing:
                self._send(running_job, chunks)
            self._end(running_job.key, "handed_on")
        except FAILURES as error:
            self._end_with_error([running_job.key], error)
            return False
        finally:
            self.flush()
        return True

    def _keep_prefix(self, running_job: RunningJob) -> None:
        """Keep what the job's row holds for the prefix cache; a failure to read it out is only counted."""
        try:
            self._rows.keep(running_job)
        except FAILURES:
            self.counters.failures += 1

    def _step_of(self, running_job: RunningJob) -> RunningStep | None:
        """The step under way, if the job is in it."""
        step, row = self._step, running_job.row
        if step is None or row is None or not step.works or step.jobs.get(row) is not running_job:
            return None
        return step

    def _end_expired(self) -> None:
        for key, until_s in list(self._unclaimed_until_s.items()):
            if until_s <= self._now_s:
                self._end(key, "error", "the cache was not fetched within its lease", code=NOT_FETCHED)

    def _end(
        self, key: int, reason: str, problem: str = "", *, may_retry: bool = False, code: str = ""
    ) -> None:
        running_job = self._running_jobs.pop(key)
        self._unclaimed_until_s.pop(key, None)
        self._senders.remove(key)
        self._receivers.remove(key)
        running_step = None if self._begins_ahead else self._step_of(running_job)
        if running_step is not None:
            running_step.left.append(running_job)
        else:
            if reason == "stop":
                self._keep_prefix(running_job)
            self._rows.close(running_job)
            self.batcher.cancel(key)
        self.counters.ended[reason] = self.counters.ended.get(reason, 0) + 1
        times = replace(running_job.times, last_s=running_job.last_s)
        self._pending_events.append((key, JobEnded(reason, times, problem, may_retry, code)))

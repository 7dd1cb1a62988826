"""The engine's loop: schedule, run, tell. One object, called from one thread, that owns executor and Batcher.

    turn     let hand-overs in; ask the Batcher for a step; compute it; commit it; say what happened
    submit, cancel                              what may be asked between two turns (`loop_thread.py` brings it here)
    attach                                      of a sender: the receiver is there
    expect, accept, arrived                     of a receiver, in this order

The Batcher decides by numbers of tokens, and believes that a prompt is computed as it scheduled it. What is really
computed is what the row lacks: a prefix that was found in the cache makes a chunk smaller or empty, never larger.

A hand-over takes a row beside the Batcher's slots, from when it may begin until its blocks are free (sender) or it
runs (receiver), so that there is always a row for what the Batcher lets in. Half of these rows are for those that
receive, half for the others: receivers wait for senders, perhaps in a ring of engines, and must not keep them out.
Nor must a cache whose receiver has not come: when somebody waits for its row or blocks it is read out to host memory.
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
    """Hand-overs of one kind: who waits for a row or for blocks, and who has a row set apart."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.waiting: deque[int] = deque()
        self.inside: set[int] = set()

    def next(self) -> list[int]:
        free = self._places - len(self.inside)
        return [self.waiting[place] for place in range(min(free, len(self.waiting)))]

    def enter(self, key: int) -> None:
        self.waiting.remove(key)
        self.inside.add(key)

    def leave(self, key: int) -> None:
        self.inside.discard(key)
        if key in self.waiting:
            self.waiting.remove(key)

    @property
    def empty(self) -> bool:
        return not self.waiting and not self.inside


MOST_HOST_BYTES = 1 << 29
"""Of caches read out of a GPU: no more prompts are begun to be handed on meanwhile. Memory that a GPU copies to is
slow to get and quick to use again."""
FAILURES = (PotluckError, RuntimeError, ValueError, OSError)
"""What may go wrong inside an executor: the requests at hand fail, the engine lives on."""
Tell = Callable[[list[tuple[int, Event]]], None]


class HostKvStore:
    """Caches that were read out of their rows before anybody came for them, because somebody else waited for a row.

    In a ring of engines that hand on to each other all would wait otherwise. By the job's key; changed by the loop,
    and by whoever sees a hand-over end.
    """

    def __init__(self, most_bytes: int = SEND_QUEUE_BYTES) -> None:
        self.most_bytes = most_bytes
        self._found: dict[int, tuple[KvManifest, int]] = {}
        self._held_bytes = 0

    @property
    def full(self) -> bool:
        """Asked before a cache is read: one may go beyond."""
        return self._held_bytes >= self.most_bytes

    def put(self, key: int, manifest: KvManifest, size_bytes: int) -> None:
        self._found[key] = manifest, size_bytes
        self._held_bytes += size_bytes

    def taken(self, key: int) -> KvManifest | None:
        """Its receiver came, or never will; what it is, if it is here."""
        manifest, size_bytes = self._found.pop(key, (None, 0))
        self._held_bytes -= size_bytes
        return manifest


def problem_of(error: Exception) -> tuple[str, bool, str]:
    """What the end of a request says of an error: a line, whether to ask again, and a code."""
    again = isinstance(error, CapacityError)
    code = UNSUPPORTED if isinstance(error, UnfitFormat) else ""
    return (str(error).splitlines() or [type(error).__name__])[0], again, code


class EngineLoop:
    def __init__(
        self,
        executor: Executor,
        limits: BatchLimits,
        tell: Tell,
        *,
        prefixes: PrefixCache | None = None,
        lease_s: float = 60.0,
        weigh: Callable[[KvChunk], int] = data_bytes,
        awaits: bool = True,
        join: Callable[[CacheExport], bool] | None = None,
    ) -> None:
        """`weigh`: what chunks count as. Without `awaits` a step is left under way, and the next turn lands it
        (`TimerLoop`). `join`: caches can be let out with it even then."""
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
        self._tell, self._weigh, self._join = tell, weigh, join
        self._awaits, self._ahead = awaits and not executor.ordered, awaits and executor.ordered
        self.prefixes = prefixes or PrefixCache(executor.config, 0)
        self._rows = CacheRows(executor, self.prefixes, chunk, self.counters)
        self._lease_s, self._now_s = lease_s, 0.0
        self._runs: dict[int, RunningJob] = {}
        self._senders, self._receivers = HandoverGate(spare - spare // 2), HandoverGate(spare // 2)
        self._kept: dict[int, float] = {}
        """Caches that are computed and whose receivers have not come, and until when they are kept."""
        self.host_kv = HostKvStore()
        self._leaving: list[RunningJob] = []
        """Caches that are read out behind the step that is under way."""
        self.host_bytes: dict[int, int] = {}
        """Of caches that were read out of a GPU for a receiver that is there, until they are with it."""
        self._most_host_bytes = MOST_HOST_BYTES if executor.ordered else None
        self._said: list[tuple[int, Event]] = []

    # What is asked between turns.

    def submit(self, job: Job, now_s: float) -> int:
        """Take a job, or raise why not; from then on it ends in exactly one `JobEnded`. Tokens of a cache that is to
        come which are here already: they are put aside until it comes."""
        self._now_s = now_s
        job.must_fit(self.executor.config.model.vocab, self.most_tokens)
        if job.key in self._runs:
            raise InputError("request", f"{job.key} is already here")
        self._runs[job.key] = running_job = RunningJob(job, now_s)
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
        if key in self._runs:
            self._end(key, reason or ("error" if problem else "cancelled"), problem)
            self.flush()

    def attach(self, key: int, have: int, now_s: float, codec: Codec = "raw") -> KvManifest:
        """The receiver of what `key` hands on is there and has `have` tokens: its cache goes out when computed, and
        may be made small before."""
        self._now_s = now_s
        if (read := self.host_kv.taken(key)) is not None:
            return read
        job = self._runs.get(key)
        if job is None or not job.job.hands_on or job.fetched_from is not None:
            raise InputError("handle", "is unknown, has expired, or was used")
        if not 0 <= have < job.job.whole:
            raise InputError("have", f"must be 0 to {job.job.whole - 1}, is {have}")
        job.fetched_from, job.codec = have, codec
        self.host_bytes[key] = 0
        row, whole = job.row, job.job.whole
        in_row = row is not None and self.executor.held(row) >= whole
        if in_row and row is not None and self._ahead and self._step is not None:
            # Behind the step that is under way, before the next one: it goes when that step has landed.
            job.outgoing = self.executor.exports(row, have, whole, codec)
            self._leaving += [job] if job.computed else []
            self._kept.pop(key, None)
        elif job.computed:
            self._send_kept(job)
        elif self._join is not None and (running := self._step_of(job)) is not None:
            running.let_out(job, self._join)
        return self._about(job, have)

    def delivered(self, key: int) -> None:
        """What was handed on is with its receiver, or never will be."""
        self.host_bytes.pop(key, None)

    def _about(self, job: RunningJob, have: int) -> KvManifest:
        whole = job.job.whole
        return KvManifest(self.executor.fingerprint, have, whole, token_hash(job.job.prompt[:whole]))

    def expect(self, key: int, manifest: KvManifest) -> IncomingCache | None:
        """The cache is coming in: what takes it. None: no row or no blocks are free for it; `RowReady` says when they
        are, even during a step, and then it is asked again."""
        job = self._here(key)
        if job.incoming is not None or manifest.stop != job.job.received:
            raise InputError(
                "hand-over", f"is of {manifest.stop}, not {job.job.received}, tokens, or unasked for"
            )
        if job.row is None:
            if key not in self._receivers.waiting:
                self._receivers.waiting.append(key)
            self._let_in()
        if job.row is not None:
            job.incoming = self.executor.arrival(job.row, manifest, job.job.prompt)
        return job.incoming

    def accept(self, key: int, chunk: KvChunk, *, lossy: bool = False) -> None:
        self._incoming(key).accept(chunk)
        self.accepted(key, self._weigh(chunk), lossy=lossy)

    def accepted(self, key: int, size_bytes: int, *, lossy: bool = False) -> None:
        """By what `expect` returned, in the thread that received it."""
        self._here(key).exact &= not lossy
        self.counters.received_bytes += size_bytes

    def arrived(self, key: int) -> None:
        self._incoming(key).finish()
        running_job = self._here(key)
        running_job.incoming, job = None, running_job.job
        self.batcher.add(key, job.whole - job.received, job.received, job.output_tokens, *job.standing)

    def _here(self, key: int) -> RunningJob:
        if (job := self._runs.get(key)) is None:
            raise InputError("hand-over", "the request has ended")
        return job

    def _incoming(self, key: int) -> IncomingCache:
        if (incoming := self._here(key).incoming) is None:
            raise InputError("hand-over", "nothing is expected")
        return incoming

    # A turn.

    def turn(self, now_s: float, clock: Callable[[], float] | None = None) -> bool:
        """Advance by one step; False when there was none to advance."""
        self._now_s = now_s
        self._expire()
        self._let_in()
        busy = self._advance(clock)
        self.flush()
        return busy

    def _advance(self, clock: Callable[[], float] | None) -> bool:
        """Await the step under way, and begin the next, which is awaited, too, if `_awaits`. Whether there was any.

        Ahead, the next is begun first: it follows from numbers of tokens, and tokens that are not known yet stay with
        the executor. Who turns out to have ended is in it for nothing."""
        last = self._step
        late = last if self._ahead else None
        if late is not None:
            self._commit(late)
        elif last is not None:
            self._land(last, clock)
        step = self.batcher.next_step()
        if late and (step.preempted or any(job.edits is not None for job in late.runs.values())):
            self._land(late, clock)
            late = None
        for key in step.preempted:
            if key in self._runs:
                self._rows.close(self._runs[key])
            self.counters.preemptions += 1
        self._step = running = self._plan(step)
        self._begin(running)
        if late is not None:
            self._land(late, clock)
            running.began_s = self._now_s
        if self._awaits or not running.works:
            self._land(running, clock)
        return last is not None or bool(step.chunks or step.decodes)

    def flush(self) -> None:
        if self._said:
            text, self._said = self._said, []
            self._tell(text)

    def next_expiry_s(self) -> float | None:
        """When a lease ends, if nothing else happens before."""
        return min(self._kept.values(), default=None)

    def check(self) -> None:
        """When idle every block, row and hand-over place is free; AssertionError if not."""
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
        return not self._runs and self._step is None

    @property
    def has_step_under_way(self) -> bool:
        return self._step is not None

    @property
    def waiting(self) -> int:
        return self.batcher.queued + len(self._senders.waiting) + len(self._receivers.waiting)

    # Inside a turn.

    def _let_in(self) -> None:
        self._open_gates()
        short = self.batcher.queued and self.batcher.blocked
        if self._kept and (self._senders.waiting or self._receivers.waiting or short):
            for key in list(self._kept):
                if not self.host_kv.full:
                    self._put_aside(self._runs[key])
            self._open_gates()
        self.flush()

    def _put_aside(self, job: RunningJob) -> None:
        """Its receiver is to find it outside of the row, from the first token on."""
        before, job.fetched_from = self.counters.sent_bytes, 0
        if self._send_kept(job):
            self.host_kv.put(job.job.key, self._about(job, 0), self.counters.sent_bytes - before)

    def _open_gates(self) -> None:
        crowded = self._most_host_bytes is not None and sum(self.host_bytes.values()) >= self._most_host_bytes
        for key in () if crowded else self._senders.next():
            job = self._runs[key].job
            self.batcher.add(key, job.whole, 0, 0, *job.standing)
            self._senders.enter(key)
        for key in self._receivers.next():
            running_job = self._runs[key]
            if not self.batcher.reserve(key, running_job.job.whole):
                break
            try:
                self._rows.begin(running_job, running_job.job.received - 1)
            except FAILURES as error:
                self._lose([key], error)
                continue
            self._said.append((key, RowReady()))
            self._receivers.enter(key)

    def _plan(self, step: BatchStep) -> RunningStep:
        decoding = self.batcher.decoding
        goals = [(key, len((job := self._runs[key]).tokens) + job.drawing) for key in decoding.keys()]  # noqa: SIM118
        goals += [(key, before + tokens) for key, tokens, before in step.chunks if key in self._runs]
        running = RunningStep(step, self._now_s, [], [], [])
        for key, goal in goals:
            job = self._runs[key]
            try:
                row, start = self._ready(job, goal)
                draw = job.draw(goal) if start < goal else None
            except FAILURES as error:
                self._lose([key], error)
                continue
            if start >= goal:
                continue
            tokens = [last_drawn(row)] if job.drawing else job.tokens[start:goal]
            running.works.append(SequenceWork(row, start, tokens, "none" if draw is None else "last"))
            running.runs[row] = job
            if job.job.hands_on:
                running.exports += job.leaving(row, goal)
            if draw is not None:
                running.draws.append(draw)
                job.drawing += 1
        return running

    def _ready(self, job: RunningJob, goal: int) -> tuple[int, int]:
        row = self._rows.begin(job, job.whole - 1) if job.row is None else job.row
        if job.times.began_s is None:
            job.times = replace(job.times, began_s=self._now_s)
            if not job.job.hands_on:
                self._receivers.leave(job.job.key)
        start = self.executor.held(row)
        if start + 1 < goal:
            start = self._rows.catch_up(job, row, goal)
        if start < goal:
            self.executor.grow(row, goal, since=start)
        return row, start

    def _begin(self, running: RunningStep) -> None:
        """Put a step under way; if that fails, its jobs end and it has no works any more."""
        if not running.works:
            return
        try:
            deliver = partial(self._deliver, running)
            step = StepInputs(running.works, running.draws, running.exports, deliver)
            running.land = self.executor.begin(step)
        except FAILURES as error:
            self._fail(running, error)

    def _landed(self, running: RunningStep) -> list[tuple[RunningJob, SampledToken]]:
        """Wait for a step: its jobs with the tokens drawn for them; none when it fails, which ends its jobs."""
        if not running.works:
            return []
        assert running.land is not None
        try:
            drawn = zip(running.drawn, running.land(), strict=True)
            return [(running.runs[row], sampled_token) for row, sampled_token in drawn]
        except FAILURES as error:
            self._fail(running, error)
            return []

    def _fail(self, running: RunningStep, error: Exception) -> None:
        self._lose([job.job.key for job in running.runs.values()], error)
        running.works, running.draws, running.exports = [], [], []

    def _commit(self, running: RunningStep) -> None:
        """Count a step as done, which in numbers of tokens it is once it is begun, and close rows that have all."""
        running.result = self.batcher.commit(running.step)
        for what, key in running.result:
            if what in (FIRST, FINISHED) and (job := self._runs.get(key)) is not None:
                self._keep(job)
                if what == FINISHED:
                    self._rows.close(job)

    def _land(self, running: RunningStep, clock: Callable[[], float] | None) -> None:
        size, count = running.tokens, len(running.works)
        choices = self._landed(running)
        self._now_s = self._now_s if clock is None else clock()
        if self._step is running:
            self._step = None
        if running.result is None:
            self._commit(running)
        for job in running.left:
            self.batcher.cancel(job.job.key)
            self._rows.close(job)
        for job, sampled_token in choices:
            if self._runs.get(job.job.key) is job:
                self._drew(job, sampled_token)
        for what, key in running.result or ():
            if what == FINISHED and key in self._runs:
                self._end(key, "length")
            elif what == DONE and key in self._runs:
                self._done(self._runs[key], running)
        leaving, self._leaving = self._leaving, []
        for job in leaving:
            if self._runs.get(job.job.key) is job:
                self._send_kept(job)
        if count:
            self.counters.step(size, count, self._now_s - running.began_s)

    def _lose(self, keys: list[int], error: Exception) -> None:
        keys = [key for key in keys if key in self._runs]
        self.counters.failures += len(keys)
        line, again, code = problem_of(error)
        for key in keys:
            self._end(key, "error", line, again=again, code=code)

    def _deliver(self, running: RunningStep, row: int, chunks: tuple[KvChunk, ...]) -> None:
        """The row may be somebody else's by now."""
        if (job := running.runs.get(row)) is not None:
            self._send(job, chunks)

    def _send(self, job: RunningJob, chunks: tuple[KvChunk, ...]) -> None:
        size_bytes = sum(map(self._weigh, chunks))
        self.counters.sent_bytes += size_bytes
        if job.job.key in self.host_bytes:
            self.host_bytes[job.job.key] += size_bytes
        if self._runs.get(job.job.key) is job:
            end = (self.executor.config.model.layer_count - 1, job.whole)
            last = (chunks[-1].layer, chunks[-1].stop) == end
            self._said.append((job.job.key, LayerSent(chunks, last, job.exact)))
            self.flush()

    def _drew(self, job: RunningJob, sampled_token: SampledToken) -> None:
        gap_s = None if job.last_s is None else self._now_s - job.last_s
        if gap_s is None:
            job.times = replace(job.times, first_s=self._now_s)
            self.counters.prompt_tokens += len(job.job.prompt)
        job.last_s = self._now_s
        job.drew(sampled_token.token)
        self.counters.output_tokens += 1
        self._said.append((job.job.key, OutputToken(sampled_token, gap_s)))
        if sampled_token.token in job.job.ends:
            self._end(job.job.key, "stop")

    def _done(self, job: RunningJob, running: RunningStep) -> None:
        job.computed = True
        self.counters.prompt_tokens += job.job.whole - job.job.received
        self._keep(job)
        self._said.append((job.job.key, JobComputed(job.times)))
        if job.fetched_from is None:
            self._kept[job.job.key] = self._now_s + self._lease_s
        elif any(export.row == job.row for export in running.exports):
            self._end(job.job.key, "handed_on")
        else:  # the receiver came while the step was under way
            self._send_kept(job)

    def _send_kept(self, job: RunningJob) -> bool:
        """What was computed before its receiver came goes out; whether it could be read."""
        assert job.row is not None and job.fetched_from is not None  # noqa: PT018
        try:
            outgoing = job.outgoing or self.executor.exports(
                job.row, job.fetched_from, job.job.whole, job.codec
            )
            for chunks in outgoing:
                self._send(job, chunks)
            self._end(job.job.key, "handed_on")
        except FAILURES as error:
            self._lose([job.job.key], error)
            return False
        finally:
            self.flush()
        return True

    def _keep(self, job: RunningJob) -> None:
        """Keep what the job's row holds for the prefix cache; a failure to read it out is only counted."""
        try:
            self._rows.keep(job)
        except FAILURES:
            self.counters.failures += 1

    def _step_of(self, job: RunningJob) -> RunningStep | None:
        """The step under way, where the job is in it."""
        step = self._step
        if step is None or job.row is None or step.runs.get(job.row) is not job or not step.works:
            return None
        return step

    def _expire(self) -> None:
        for key, until_s in list(self._kept.items()):
            if until_s <= self._now_s:
                self._end(key, "error", "nobody fetched the cache within its lease", code=NOT_FETCHED)

    def _end(self, key: int, reason: str, problem: str = "", *, again: bool = False, code: str = "") -> None:
        job = self._runs.pop(key)
        self._kept.pop(key, None)
        self._senders.leave(key)
        self._receivers.leave(key)
        running = None if self._ahead else self._step_of(job)
        if running is not None:
            running.left.append(job)
        else:
            if reason == "stop":
                self._keep(job)
            self._rows.close(job)
            self.batcher.cancel(key)
        self.counters.ended[reason] = self.counters.ended.get(reason, 0) + 1
        times = replace(job.times, last_s=job.last_s)
        self._said.append((key, JobEnded(reason, times, problem, again, code)))

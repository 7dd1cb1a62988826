"""The engine's loop: schedule, run, tell. One object, called from one thread, that owns executor and Batcher.

    turn     let hand-overs in; ask the Batcher for a step; compute it; commit it; say what happened
    submit, cancel                              what may be asked between two turns (`driver.py` brings it here)
    attach                                      of a sender: the receiver is there
    look_up, want, expect, accept, arrived      of a receiver, in this order

The Batcher decides by numbers of tokens, and believes that a prompt is computed as it scheduled it. What is really
computed is what the row lacks: a prefix that was found in the cache makes a chunk smaller or empty, never larger.

A hand-over takes a row beside the Batcher's slots, from when it may begin until its blocks are free (sender) or it
runs (receiver), so that there is always a row for what the Batcher lets in. Half of these rows are for those that
receive, half for the others: receivers wait for senders, perhaps in a ring of engines, and must not keep them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from potluck.core.batch import DONE, FINISHED, Batcher, Limits, Step
from potluck.core.errors import CapacityError, InputError, PotluckError
from potluck.engine.executor import Draw, Executor, Export, WorkerLost
from potluck.engine.handover import Manifest, Parcel, token_hash
from potluck.engine.prefix import PrefixCache
from potluck.engine.requests import Computed, Ended, Event, Job, Room, Sent, Token
from potluck.engine.rows import Rows, Run
from potluck.engine.runner import Work
from potluck.engine.sample import Choice
from potluck.engine.status import Counters

Tell = Callable[[list[tuple[int, Event]]], None]
FAILURES = (PotluckError, RuntimeError, ValueError, OSError)
"""What may go wrong inside an executor: the requests at hand fail, the engine lives on."""


class _Gate:
    """Hand-overs of one kind: who waits for a row or for blocks, and who has a row set apart."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.lobby: deque[int] = deque()
        self.inside: set[int] = set()

    def next(self) -> list[int]:
        """Those that may enter, in order."""
        free = self._places - len(self.inside)
        return [self.lobby[place] for place in range(min(free, len(self.lobby)))]

    def enter(self, key: int) -> None:
        self.lobby.remove(key)
        self.inside.add(key)

    def leave(self, key: int) -> None:
        self.inside.discard(key)
        if key in self.lobby:
            self.lobby.remove(key)


class Loop:
    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        tell: Tell,
        *,
        prefixes: PrefixCache | None = None,
        lease_s: float = 60.0,
    ) -> None:
        if limits.total_blocks > executor.size.blocks:
            raise InputError("blocks", f"{limits.total_blocks} are more than the executor's")
        spare = executor.size.rows - limits.max_running
        if spare < 2:
            raise InputError("rows", f"must be at least two more than the {limits.max_running} that may run")
        self.executor = executor
        self.counters = Counters()
        self._chunk = min(limits.chunk_tokens or limits.token_budget, executor.size.max_chunk_tokens)
        self._batcher = Batcher(replace(limits, chunk_tokens=self._chunk))
        self._tell = tell
        self._prefixes = prefixes or PrefixCache(executor.config, 0)
        self._rows = Rows(executor, self._prefixes, self._chunk, self.counters)
        self._lease_s = lease_s
        self._runs: dict[int, Run] = {}
        self._senders = _Gate(spare - spare // 2)
        self._receivers = _Gate(spare // 2)
        self._said: list[tuple[int, Event]] = []
        self._now_s = 0.0

    # What is asked between turns.

    def submit(self, job: Job, now_s: float) -> None:
        """Take a job, or raise why not; from then on it ends in exactly one `Ended`."""
        self._now_s = now_s
        vocab = self.executor.config.model.vocab
        if min(job.prompt) < 0 or max(job.prompt) >= vocab:
            wrong = next(token for token in job.prompt if not 0 <= token < vocab)
            raise InputError("prompt", f"token {wrong} is not in the vocabulary of {vocab}")
        most, tokens = self.most_tokens, job.whole + max(job.output_tokens - 1, 0)
        if tokens > most:
            raise CapacityError(f"{job.whole} + {job.output_tokens} tokens are more than the {most} that fit")
        if job.key in self._runs:
            raise InputError("request", f"{job.key} is already here")
        self._runs[job.key] = Run(job, now_s)
        self.counters.accepted += 1
        if job.received:
            return  # until its cache comes
        if job.hands_on:
            self._senders.lobby.append(job.key)
        else:
            self._batcher.add(job.key, job.whole, 0, job.output_tokens, job.priority)

    def cancel(self, key: int, now_s: float, problem: str = "", *, reason: str = "") -> None:
        """End a request, in whatever state; an unknown one has ended already."""
        self._now_s = now_s
        if key in self._runs:
            self._end(key, reason or ("error" if problem else "cancelled"), problem)
            self.flush()

    def attach(self, key: int, have: int, now_s: float) -> Manifest:
        """The receiver of what `key` hands on is there and has `have` tokens: its cache goes out when computed."""
        self._now_s = now_s
        run = self._runs.get(key)
        if run is None or not run.job.hands_on or run.fetched_from is not None:
            raise InputError("handle", "is unknown, has expired, or was used")
        if not 0 <= have < run.job.whole:
            raise InputError("have", f"must be 0 to {run.job.whole - 1}, is {have}")
        run.fetched_from = have
        if run.computed:
            self._send_kept(run)
        return self._manifest(run, have, run.job.whole)

    def look_up(self, key: int) -> int:
        """Tokens of a cache that is to come which are here already. They are put aside until it comes."""
        run = self._here(key)
        # The sender has at least one token to send.
        run.found = self._rows.find(run, run.job.received - 1)
        return run.found[0]

    def want(self, key: int) -> None:
        """The cache is coming in: `Room` will say when there is a row and blocks for it."""
        self._here(key)
        self._receivers.lobby.append(key)

    def expect(self, key: int, about: Manifest) -> None:
        """The sender has said what will come for `key`, which has room by now."""
        run = self._here(key)
        if run.row is None or run.incoming is not None or about.stop != run.job.received:
            raise InputError(
                "hand-over", f"is of {about.stop} tokens, expected {run.job.received}, or unasked for"
            )
        run.incoming = self.executor.arrival(run.row, about, run.job.prompt)

    def accept(self, key: int, parcel: Parcel) -> None:
        run = self._here(key)
        if run.incoming is None:
            raise InputError("hand-over", "nothing is expected")
        run.incoming.accept(parcel)
        self.counters.received_bytes += len(parcel.data)

    def arrived(self, key: int) -> None:
        """All parcels are there: the request may run."""
        run = self._here(key)
        if run.incoming is None:
            raise InputError("hand-over", "nothing is expected")
        run.incoming.finish()
        run.incoming = None
        job = run.job
        self._batcher.add(key, job.whole - job.received, job.received, job.output_tokens, job.priority)

    def _here(self, key: int) -> Run:
        run = self._runs.get(key)
        if run is None:
            raise InputError("hand-over", "the request has ended")
        return run

    # A turn.

    def turn(self, now_s: float, clock: Callable[[], float] | None = None) -> bool:
        """Compute a step; false when there was nothing to compute."""
        self._now_s = now_s
        self._expire()
        self._let_in()
        step = self._batcher.next_step()
        for key in step.preempted:
            self._rows.close(self._runs[key])
            self.counters.preemptions += 1
        works, draws, exports = self._plan(step)
        choices: dict[int, Choice] = {}
        if works:
            choices = self._compute(works, draws, exports)
        if clock is not None:
            self._now_s = clock()
        found = self._batcher.commit(step)
        for key, choice in choices.items():
            self._drew(key, choice)
        for what, key in found:
            if key not in self._runs:
                continue
            if what == FINISHED:
                self._end(key, "length")
            elif what == DONE:
                self._done(self._runs[key])
        if works:
            size = sum(len(work.tokens) for work in works)
            self.counters.step(size, len(works), self._now_s - now_s)
        self.flush()
        return bool(step.chunks or step.decodes)

    def flush(self) -> None:
        if self._said:
            said, self._said = self._said, []
            self._tell(said)

    def next_expiry_s(self) -> float | None:
        """When a lease ends, if nothing else happens before."""
        return min((r.kept_until_s for r in self._runs.values() if r.kept_until_s is not None), default=None)

    def check(self) -> None:
        """When idle every block, row and hand-over place is free; AssertionError if not."""
        if self._runs:
            return
        self.executor.check()
        if self._batcher.free_blocks != self._batcher.limits.total_blocks or self._batcher.keys():
            raise AssertionError(f"{self._batcher.free_blocks} blocks are free and nobody is here")
        gates = (self._senders, self._receivers)
        if self._rows.keys or self._batcher.todo_tokens or any(gate.lobby or gate.inside for gate in gates):
            raise AssertionError("rows or hand-overs are left behind")

    # Figures.

    @property
    def most_tokens(self) -> int:
        """Of one sequence."""
        limits = self._batcher.limits
        return min(self.executor.size.max_tokens, limits.total_blocks * limits.block_tokens)

    @property
    def idle(self) -> bool:
        return not self._runs

    @property
    def batcher(self) -> Batcher:
        """To read."""
        return self._batcher

    @property
    def waiting(self) -> int:
        return self._batcher.queued + len(self._senders.lobby) + len(self._receivers.lobby)

    @property
    def prefix_bytes(self) -> int:
        return self._prefixes.used_bytes

    # Inside a turn.

    def _let_in(self) -> None:
        for key in self._senders.next():
            job = self._runs[key].job
            self._batcher.add(key, job.whole, 0, 0, job.priority)
            self._senders.enter(key)
        for key in self._receivers.next():
            run = self._runs[key]
            if not self._batcher.reserve(key, run.job.whole):
                break
            self._rows.begin(run, run.job.received - 1)
            self._said.append((key, Room()))
            self._receivers.enter(key)
        self.flush()

    def _plan(self, step: Step) -> tuple[list[Work], list[Draw], list[Export]]:
        goals = [(key, len(self._runs[key].tokens)) for key in self._batcher.decoding.keys()]  # noqa: SIM118
        goals += [(key, before + tokens) for key, tokens, before in step.chunks]
        works: list[Work] = []
        draws: list[Draw] = []
        exports: list[Export] = []
        for key, goal in goals:
            run = self._runs[key]
            try:
                row, start = self._ready(run, goal)
            except FAILURES as error:
                self._lose([key], error)
                continue
            if start >= goal:
                continue
            draws_token = goal == run.whole and not run.job.hands_on
            works.append(Work(row, start, run.tokens[start:goal], "last" if draws_token else "none"))
            if draws_token:
                draws.append(Draw(run.job.sampling, goal))
            elif goal == run.whole and run.fetched_from is not None:
                exports.append(Export(row, run.fetched_from, goal))
        return works, draws, exports

    def _ready(self, run: Run, goal: int) -> tuple[int, int]:
        """The job's row, with room up to `goal`, and what it holds."""
        row = self._rows.begin(run, run.whole - 1) if run.row is None else run.row
        if run.times.began_s is None:
            run.times = replace(run.times, began_s=self._now_s)
            if not run.job.hands_on:
                self._receivers.leave(run.job.key)
        self._rows.catch_up(run, row, goal)
        start = self.executor.held(row)
        if start < goal:
            self.executor.grow(row, goal, since=start)
        return row, start

    def _compute(self, works: list[Work], draws: list[Draw], exports: list[Export]) -> dict[int, Choice]:
        """Run the step, without the rows that are lost on the way. Tokens by key."""
        drawn = [work.row for work in works if work.logits == "last"]
        how = dict(zip(drawn, draws, strict=True))
        while works:
            try:
                choices = self.executor.step(works, [how[row] for row in drawn], exports, self._send)
                return {self._rows.keys[row]: choice for row, choice in zip(drawn, choices, strict=True)}
            except WorkerLost as error:
                lost = set(error.rows) & set(self._rows.keys) or {work.row for work in works}
                self._lose([self._rows.keys[row] for row in lost], error)
            except FAILURES as error:
                lost = {work.row for work in works}
                self._lose([self._rows.keys[row] for row in lost], error)
            works = [work for work in works if work.row not in lost]
            drawn = [row for row in drawn if row not in lost]
            exports = [export for export in exports if export.row not in lost]
        return {}

    def _lose(self, keys: list[int], error: Exception) -> None:
        self.counters.failures += len(keys)
        for key in keys:
            self._end(key, "error", (str(error).splitlines() or [type(error).__name__])[0])

    def _send(self, row: int, parcels: tuple[Parcel, ...]) -> None:
        last = parcels[-1].layer == self.executor.config.model.layer_count - 1
        self.counters.sent_bytes += sum(len(parcel.data) for parcel in parcels)
        self._said.append((self._rows.keys[row], Sent(parcels, last)))
        self.flush()

    def _drew(self, key: int, choice: Choice) -> None:
        run = self._runs.get(key)
        if run is None:
            return
        gap_s = None if run.times.last_s is None else self._now_s - run.times.last_s
        first = run.times.first_s is None
        run.times = replace(
            run.times, first_s=self._now_s if first else run.times.first_s, last_s=self._now_s
        )
        if first:
            self.counters.prompt_tokens += len(run.job.prompt)
            self._rows.keep(run)
        run.tokens.append(choice.token)
        self.counters.output_tokens += 1
        self._said.append((key, Token(choice, gap_s)))
        if choice.token in run.job.ends:
            self._end(key, "stop")

    def _done(self, run: Run) -> None:
        """A segment that hands on is computed."""
        run.computed = True
        self.counters.prompt_tokens += run.job.whole - run.job.received
        self._rows.keep(run)
        self._said.append((run.job.key, Computed(run.times)))
        if run.fetched_from is None:
            run.kept_until_s = self._now_s + self._lease_s
        else:
            self._end(run.job.key, "handed_on")

    def _send_kept(self, run: Run) -> None:
        """The receiver came after the work was done."""
        assert run.row is not None
        assert run.fetched_from is not None
        for layer in range(self.executor.config.model.layer_count):
            self._send(run.row, self.executor.export(run.row, layer, run.fetched_from, run.job.whole))
        self._end(run.job.key, "handed_on")
        self.flush()

    def _manifest(self, run: Run, start: int, stop: int) -> Manifest:
        return Manifest(self.executor.fingerprint, start, stop, token_hash(run.job.prompt[:stop]))

    def _expire(self) -> None:
        late = [
            key
            for key, run in self._runs.items()
            if run.kept_until_s is not None and run.kept_until_s <= self._now_s
        ]
        for key in late:
            self._end(key, "error", "nobody fetched the cache within its lease")

    def _end(self, key: int, reason: str, problem: str = "") -> None:
        run = self._runs.pop(key)
        if reason in ("stop", "length"):
            self._rows.keep(run)
        self._rows.close(run)
        self._senders.leave(key)
        self._receivers.leave(key)
        self._batcher.cancel(key)
        self.counters.ended[reason] = self.counters.ended.get(reason, 0) + 1
        self._said.append((key, Ended(reason, run.times, problem)))

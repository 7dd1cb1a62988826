"""Bugs put in on purpose, to see that the rules find them: each is one that somebody could make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from potluck.control import reconciler
from potluck.control.state_store import Lease
from potluck.core.brain import recovery
from potluck.core.state.events import RequestFinished
from potluck.core.state.fleet import FleetState
from potluck.gateway.admin.counters import Counters
from potluck.gateway.admin.usage import UsageFile
from potluck.gateway.dispatch import active_request, segment_attempt
from potluck.gateway.dispatch.dispatcher import Dispatcher
from potluck.gateway.http.connection_pool import EngineCall
from potluck.gateway.http.server import ClientExchange
from potluck.gateway.openai import kept_answers
from potluck.gateway.openai.handler import ClientHandler
from potluck.gateway.openai.keys import KeyQuota, KeyRing
from potluck.gateway.openai.response import ResponseWriter
from potluck.gateway.operator_state import OperatorState
from potluck.gateway.registry.registry import ReplicaRegistry
from potluck.kv.assembly import ChunkAssembly
from potluck.kv.fetch import ReceiveConnection
from potluck.kv.kv_sender import KvSender
from potluck.kv.send_queue import SendQueue


def lost_ack() -> None:
    """A worker forgets now and then to tell the Brain that a request has ended."""
    told, count = Dispatcher._tell, [0]

    def tell(self: Dispatcher, event: Any) -> None:
        count[0] += isinstance(event, RequestFinished)
        if not isinstance(event, RequestFinished) or count[0] % 5:
            told(self, event)

    Dispatcher._tell = tell  # type: ignore[method-assign]


def doubled_usage() -> None:
    """A record is written a second time, under another name."""
    record = UsageFile.record

    def twice(self: UsageFile, told: Any, monotonic_s: float) -> None:
        record(self, told, monotonic_s)
        record(self, told._replace(id=f"{told.id}x"), monotonic_s)

    UsageFile.record = twice  # type: ignore[method-assign]


def retry_without_budget() -> None:
    """What fails is sent again, however often it did."""
    recovery.refusal_of = lambda request, at_s, policy: None


def stale_lease() -> None:
    """A controller goes on with a lease that another has by now."""

    def renew(self: Lease) -> bool:
        if not self._until_s:
            self._store.claim(self.holder, self._clock(), self._lasts_s)
        self._until_s = self._clock() + self._lasts_s
        return True

    Lease.renew = Lease.inherit = renew  # type: ignore[method-assign]


def torn_state_read() -> None:
    """A state file that lost its end with the power is read as if it were whole."""

    def read(self: OperatorState, name: str) -> Any:
        path = self._folder / name
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    OperatorState._read = read  # type: ignore[method-assign]


def token_twice() -> None:
    """After a failure an engine is told one token less than its user has."""
    body = segment_attempt.segment_body

    def short(asked: Any, model: Any, work: Any, run: Any, tokens: str, *rest: Any) -> bytes:
        if run.streamed_tokens:
            tokens = json.dumps(json.loads(tokens)[:-1])
        return body(asked, model, work, run, tokens, *rest)

    segment_attempt.segment_body = short


def shared_salt() -> None:
    """All tenants' prefixes are kept under one name."""
    ClientHandler._salt = lambda self, tenant, own: "one"  # type: ignore[method-assign, assignment]


def deaf_monitor() -> None:
    """An engine that says nothing any more is waited for without end."""
    active_request._stall = lambda debtors, kind: None


def leaked_work() -> None:
    """An answer that nobody wants any more is not taken back from its engine."""

    def cancel(self: EngineCall) -> None:
        self.over = True

    EngineCall.cancel = cancel  # type: ignore[method-assign]


def stale_keys() -> None:
    """A file of keys that was changed is never read again."""
    KeyRing._stamp = lambda self: None  # type: ignore[method-assign, assignment]


def no_limits() -> None:
    """A key's limits are written down, and nobody asks."""

    def enter(self: KeyQuota, now_s: float) -> None:
        self.open += 1

    KeyQuota.enter = enter  # type: ignore[method-assign, assignment]


def impatient_controller() -> None:
    """An engine that is still starting is not counted: another is started, and paid for."""
    ended = reconciler._ended

    def only_up(*given: Any) -> Any:
        orders, living, memory = ended(*given)
        return orders, [one for one in living if one.state == "up"], memory

    reconciler._ended = only_up


def lasting_task() -> None:
    """What makes an engine ready waits for something that never comes."""
    ready = ReplicaRegistry._ready

    async def waits(self: ReplicaRegistry, *given: Any) -> None:
        await ready(self, *given)
        await asyncio.get_running_loop().create_future()

    ReplicaRegistry._ready = waits  # type: ignore[method-assign]


def unchecked_piece() -> None:
    """KV is taken whatever its checksum says."""
    real = ReceiveConnection._data

    def data(self: ReceiveConnection, piece: Any, place: memoryview) -> Any:
        real(self, piece, place)
        return piece.sums

    ReceiveConnection._data = data  # type: ignore[method-assign]


def lost_pieces() -> None:
    """What was under way on a connection that is lost is not sent again."""
    SendQueue.lost = lambda self, conn: self._connections.pop(conn, None)  # type: ignore[method-assign, assignment]


def leaked_buffer() -> None:
    """A fetch that fails keeps the memory of what had not come whole."""
    ChunkAssembly.close = lambda self: self._open.clear()  # type: ignore[method-assign]


def chunk_twice() -> None:
    """A piece that comes again, of a chunk that was whole, begins it anew."""
    place = ChunkAssembly.place

    def anew(self: ChunkAssembly, piece: Any, conn: int) -> Any:
        self._seen.discard(piece.index)
        return place(self, piece, conn)

    ChunkAssembly.place = anew  # type: ignore[method-assign]


def endless_lease() -> None:
    """A cache is kept for a receiver that is heard of no more."""
    KvSender._sweep = lambda self, now_s: self._forget()  # type: ignore[method-assign]


def kept_keys() -> None:
    """A key that was taken out of the file stays known."""
    read = KeyRing._read

    def both(self: KeyRing, now_s: float) -> Any:
        return self.__dict__.get("_by_digest", {}) | read(self, now_s)

    KeyRing._read = both  # type: ignore[method-assign]


def leaked_open() -> None:
    """A request that used nothing counts for ever as one that its key has open."""
    leave = KeyQuota.leave

    def leaks(self: KeyQuota, reserved: int, used: int) -> None:
        leave(self, reserved, used)
        self.open += not used

    KeyQuota.leave = leaks  # type: ignore[method-assign]


def uncharged_tokens() -> None:
    """A key's limit of tokens is written down, and nobody asks."""
    KeyQuota.reserve = lambda self, tokens, now_s: None  # type: ignore[method-assign, assignment]


def shared_repeats() -> None:
    """The Idempotency-Keys of all tenants are one list."""
    asked = kept_answers.repeat_key_of
    kept_answers.repeat_key_of = lambda tenant, *rest: asked("", *rest)


def counted_unseen() -> None:
    """Who left has to pay for all that was asked for."""
    gone = ResponseWriter.gone

    def counts(self: ResponseWriter) -> None:
        self.output += self.reserved
        gone(self)

    ResponseWriter.gone = counts  # type: ignore[method-assign]


def deaf_to_clients() -> None:
    """An answer goes on although its client has left."""
    ClientExchange.client_disconnected = lambda self: self._finish()  # type: ignore[method-assign]


def unsynced_usage() -> None:
    """Records of use are left to the kernel, which loses them with the machine's power."""
    UsageFile.unsynced = lambda self: None  # type: ignore[method-assign, assignment]


def torn_usage() -> None:
    """A record is appended to whatever another process's disk took of one."""
    UsageFile._is_line_start = lambda self, place: True  # type: ignore[method-assign, assignment]


def any_weights() -> None:
    """An engine is asked for its model's name, and not for its weights."""
    ReplicaRegistry._unsuited = lambda self, engine, replica_spec: ""  # type: ignore[method-assign]


def one_handle() -> None:
    """All caches that an engine keeps have one handle."""
    segment_attempt.secrets = SimpleNamespace(token_urlsafe=lambda size: "one")  # type: ignore[assignment]


def resumed_unsalted() -> None:
    """After a failure, a request is sent on without its tenant's salt."""
    body = segment_attempt.segment_body

    def unsalted(asked: Any, model: Any, work: Any, run: Any, *rest: Any) -> bytes:
        return body(asked._replace(salt="") if run.attempt else asked, model, work, run, *rest)

    segment_attempt.segment_body = unsalted


def kept_charges() -> None:
    """Tokens that were charged for an answer that ended early are not given back."""
    leave = KeyQuota.leave
    KeyQuota.leave = lambda self, reserved, used: leave(self, reserved, max(reserved, used))  # type: ignore[method-assign]


def late_lease() -> None:
    """A controller renews its lease only once it has run out."""
    renew = Lease.renew
    Lease.renew = lambda self: self._clock() < self._until_s or renew(self)  # type: ignore[method-assign]


def uncounted_failures() -> None:
    """A failure counts against none of a request's retries."""
    blame = recovery.Recovery._count_failure

    def forgives(self: recovery.Recovery, at_s: float, req: Any, *rest: Any, **more: Any) -> None:
        blame(self, at_s, req, *rest, **more)
        req.failures = 0

    recovery.Recovery._count_failure = forgives  # type: ignore[method-assign]


def uncounted_starts() -> None:
    """Each start that fails is taken for the first."""
    more = reconciler.StartFailures.more
    first = reconciler.StartFailures()
    reconciler.StartFailures.more = lambda self, *given: more(first, *given)  # type: ignore[method-assign]


def unmetered_failures() -> None:
    """Attempts that fail are in no metric."""
    Counters.failed = lambda self, where, kind: None  # type: ignore[method-assign]


TRANSPORT = (unchecked_piece, lost_pieces, leaked_buffer, chunk_twice, endless_lease)  # Found with --kv.


def kept_debtors() -> None:
    """What is known of an engine keeps all answers that it ever gave."""
    leave, kept = active_request.SilenceMonitor.leave, []

    def keep(self: Any, debtor: Any) -> None:
        if debtor.pulse is not None:
            self.__dict__.setdefault("left", kept).append(debtor)
        leave(self, debtor)

    active_request.SilenceMonitor.leave = keep  # type: ignore[method-assign]


def any_release() -> None:
    """KV is taken to be the same in all releases of the engine."""
    ready = FleetState.ready
    FleetState.ready = lambda self, replica, kv_version=0, most=0: ready(self, replica, 0, most)  # type: ignore[method-assign]


_bugs = (
    *TRANSPORT,
    *(lost_ack, doubled_usage, retry_without_budget, stale_lease, torn_state_read, token_twice, shared_salt),
    *(deaf_monitor, leaked_work, stale_keys, no_limits, impatient_controller, lasting_task, kept_debtors),
    any_release,
    *(kept_keys, leaked_open, uncharged_tokens, shared_repeats, counted_unseen, deaf_to_clients),
    *(unsynced_usage, any_weights, one_handle, torn_usage),
    *(resumed_unsalted, kept_charges, late_lease, uncounted_failures, uncounted_starts, unmetered_failures),
)
BUGS: dict[str, Callable[[], None]] = {bug.__name__: bug for bug in _bugs}

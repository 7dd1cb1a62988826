"""The scheduler's side of the connector, without vLLM: which requests give KV away or take it in.

A request that takes goes through these stages:

    new ──▶ asked ──▶ come ──▶ used        asked, come ──▶ failed ──▶ used

`asked`: the worker has attached to the sender. `come`: the first bytes are there. Only then are blocks taken for it:
a sender may be long in coming, and engines that hand on to each other in a ring would else wait for each other's
blocks for ever. `used`: its KV is being written into blocks, or it has none to hope for; whatever is missing from
then on, vLLM computes. A preempted request computes everything: a handle is good for one fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from potluck.core.codec import decode
from potluck.core.errors import FormatError, InputError
from potluck.core.values.kv import LEAST_CONNECTIONS, MOST_CONNECTIONS
from potluck.core.values.kv_layout import kv_address
from potluck.kv.chunks import token_hash
from potluck.kv.codec_layout import CODEC_IDS, Codec
from potluck.kv.handles import checked_handle, new_session

KEY = "potluck"
MOST_S = 3600.0


@dataclass(frozen=True, slots=True)
class SendParams:
    handle: str
    stop: int
    codec: Codec = "raw"
    lasts_s: float = 120.0

    def __post_init__(self) -> None:
        checked_handle(self.handle)
        if self.codec not in CODEC_IDS:
            raise InputError("give.codec", f"must be one of {', '.join(CODEC_IDS)}, is {self.codec!r}")
        _require("give.stop", self.stop, 1)
        _require("give.lasts_s", self.lasts_s, 0, MOST_S)


@dataclass(frozen=True, slots=True)
class FetchParams:
    kv: str
    handle: str
    stop: int
    within_s: float = 120.0
    connections: int = LEAST_CONNECTIONS

    def __post_init__(self) -> None:
        checked_handle(self.handle)
        kv_address(self.kv, "take.kv")
        _require("take.connections", self.connections, 1, MOST_CONNECTIONS)
        _require("take.stop", self.stop, 1)
        _require("take.within_s", self.within_s, 0, MOST_S)


@dataclass(frozen=True, slots=True)
class TransferParams:
    """What becomes of one request's KV."""

    request: str  # As whoever planned the route calls it; vLLM's own name is another.
    give: SendParams | None = None
    take: FetchParams | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.request) <= 200:
            raise InputError("request", "must be a name of 1 to 200 characters")
        if self.give and self.take and self.take.stop >= self.give.stop:
            raise InputError("take.stop", f"must be below give.stop, {self.give.stop}")


def moves_of(params: Mapping[str, object] | None) -> TransferParams | None:
    """What a request's `kv_transfer_params` say; None where they say nothing to us."""
    param = (params or {}).get(KEY)
    if param is None:
        return None
    if not isinstance(param, dict):
        raise FormatError(KEY, "must be an object with request, give, take")
    body = {key: value for key, value in param.items() if value is not None}
    for key, kind in (("give", "SendParams"), ("take", "FetchParams")):
        if isinstance(body.get(key), dict):
            body[key] = {"type": kind, **body[key]}
    return decode(TransferParams, body)


def _require(field: str, value: float, least: float, most: float | None = None) -> None:
    if isinstance(value, bool) or value < least or (most is not None and value > most):
        raise InputError(field, f"must be at least {least:g}{f' and at most {most:g}' if most else ''}")


Stage = Literal["new", "asked", "come", "failed", "used"]
Tables = tuple[tuple[int, ...], ...]
"""A request's blocks, one list for each group of layers that vLLM gives blocks to together."""
Groups = Sequence[Sequence[int]]  # The same, as vLLM has them.


class VllmRequest(Protocol):
    """As much of vLLM's as is used here."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_computed_tokens: int
    kv_transfer_params: dict[str, object] | None


@dataclass(frozen=True, slots=True)
class SendOffer:
    """KV that can be fetched from here, as soon as it is computed."""

    key: str
    request: str
    handle: str
    codec: Codec
    lasts_s: float
    stop: int
    token_hash: str


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """The KV of the tokens before `upto` is in these blocks when the step is done."""

    key: str
    tables: Tables
    upto: int


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """KV of [have, stop) that is to be fetched."""

    key: str
    request: str
    kv: str
    handle: str
    within_s: float
    have: int
    stop: int
    token_hash: str
    session: bytes = b""  # The same for all workers: a handle is good for one.
    connections: int = LEAST_CONNECTIONS


@dataclass(frozen=True, slots=True)
class PlaceBlocks:
    """Where what was asked for goes, from token `first` on; without blocks it is let go as it comes."""

    key: str
    tables: Tables = ()
    first: int = 0


@dataclass(slots=True)
class WorkerOrders:
    """For the workers, with one step."""

    offers: list[SendOffer] = field(default_factory=list)
    reads: list[ReadBlocks] = field(default_factory=list)
    keeps: list[ReadBlocks] = field(default_factory=list)
    """Requests that are done: their blocks stay until they are read."""
    drops: list[str] = field(default_factory=list)
    """Requests that will not be computed to their end."""
    asks: list[FetchOrder] = field(default_factory=list)
    places: list[PlaceBlocks] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Requests that want no KV any more."""
    idle: bool = False
    """Nothing is computed with this step."""

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(
            self.offers or self.reads or self.keeps or self.drops or self.asks or self.places or self.cancels
        )


@dataclass(slots=True)
class WorkerNews:
    """From the workers, with one step."""

    come: dict[str, int] = field(default_factory=dict)
    """On how many of them the first bytes are there."""
    failed: set[str] = field(default_factory=set)
    lossy: set[str] = field(default_factory=set)
    """Requests with KV that is not exact, which others must not use."""

    def __bool__(self) -> bool:
        return bool(self.come or self.failed or self.lossy)

    def joined(self, other_news: WorkerNews) -> WorkerNews:
        come = dict(self.come)
        for key, count in other_news.come.items():
            come[key] = come.get(key, 0) + count
        return WorkerNews(come, self.failed | other_news.failed, self.lossy | other_news.lossy)


@dataclass(slots=True)
class _LiveTransfer:
    request: VllmRequest
    moves: TransferParams
    stage: Stage = "new"
    have: int = 0
    come: int = 0


class TransferScheduler:
    def __init__(self, workers: int, *, windows: bool = False, states: bool = False) -> None:
        """`windows`: some layers keep no more than the latest tokens; `states`: some no more than what became of them
        all."""
        self._workers, self._windows, self._states = workers, windows or states, states
        self._live: dict[str, _LiveTransfer] = {}
        self._orders = WorkerOrders()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def quiet(self) -> bool:
        """Nobody gives or takes, and there is nothing to tell the workers."""
        return not self._live and not self._orders

    def came(self, request: VllmRequest) -> None:
        """A new request; InputError when what it says of hand-overs cannot be."""
        transfer_params = moves_of(request.kv_transfer_params)
        if transfer_params is None:
            return
        prompt = request.prompt_token_ids
        stops = [item.stop for item in (transfer_params.give, transfer_params.take) if item is not None]
        if prompt is None or any(stop > len(prompt) for stop in stops):
            raise InputError("kv_transfer_params", "hand over more tokens than the prompt has")
        if self._windows and transfer_params.take is not None and transfer_params.take.stop == len(prompt):
            # vLLM computes the last token again, whose window begins before what came.
            raise InputError("take.stop", f"must leave a token to compute, at most {len(prompt) - 1}")
        send_params = transfer_params.give
        if self._states and send_params is not None and send_params.stop != len(prompt):
            raise InputError(
                "give.stop", f"must be the prompt's {len(prompt)} tokens: states are of all of them"
            )
        self._live[request.request_id] = _LiveTransfer(request, transfer_params)
        if send_params is not None:
            self._orders.offers.append(
                _offer(request.request_id, transfer_params.request, send_params, prompt)
            )

    def matched(self, request: VllmRequest, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` come from elsewhere (None: ask again), and whether that takes a while."""
        live = self._live.get(request.request_id)
        if live is None or live.moves.take is None or live.stage == "used":
            return 0, False
        key, fetch_params = request.request_id, live.moves.take
        if live.stage == "new":
            have = min(
                computed, fetch_params.stop - 1
            )  # at least one crosses, so that the sender knows that it is done
            self._orders.asks.append(
                _ask(key, live.moves.request, fetch_params, have, request.prompt_token_ids or [])
            )
            live.stage, live.have = "asked", have
        if live.stage == "asked" and computed < fetch_params.stop:
            return None, False
        if live.stage == "come" and live.have <= computed < fetch_params.stop:
            return fetch_params.stop - computed, True
        self._let_go(key, live)
        return 0, False

    def placed(self, request: VllmRequest, tables: Callable[[], Groups], external: int) -> None:
        """Blocks were taken for a request, `external` of whose tokens come from elsewhere."""
        live = self._live.get(request.request_id)
        if live is None or live.moves.take is None or live.stage == "used":
            return
        if not external:
            self._let_go(request.request_id, live)
            return
        first = live.moves.take.stop - external
        self._orders.places.append(PlaceBlocks(request.request_id, _kept(tables()), first))
        live.stage = "used"

    def orders(self, scheduled: Mapping[str, int], tables_of: Callable[[str], Groups | None]) -> WorkerOrders:
        """What the workers do with this step, in which so many tokens of these requests are computed."""
        worker_orders, self._orders = self._orders, WorkerOrders()
        worker_orders.idle = not scheduled
        if not self._live:
            return worker_orders
        for key, tokens in scheduled.items():
            live = self._live.get(key)
            send_params = live.moves.give if live is not None else None
            if live is None or send_params is None:
                continue
            tables = tables_of(key)
            upto = min(live.request.num_computed_tokens + tokens, send_params.stop)
            if tables is not None:
                worker_orders.reads.append(ReadBlocks(key, _kept(tables), upto))
        return worker_orders

    def heard(self, news: WorkerNews) -> list[VllmRequest]:
        """What the workers say; the requests whose KV is not exact."""
        for key, count in news.come.items():
            live = self._live.get(key)
            if live is not None and live.stage == "asked":
                live.come += count
                if live.come >= self._workers:
                    live.stage = "come"
        for key in news.failed:
            live = self._live.get(key)
            if live is not None and live.stage in ("asked", "come"):
                live.stage = "failed"
        return [self._live[key].request for key in news.lossy if key in self._live]

    def finished(self, request: VllmRequest, tables: Groups, *, whole: bool) -> bool:
        """A request is over, `whole` if its prompt was computed. Whether its blocks must stay until they are read."""
        live = self._live.pop(request.request_id, None)
        if live is None:
            return False
        if live.moves.take is not None:
            self._orders.cancels.append(request.request_id)
        if live.moves.give is None:
            return False
        if not whole:
            self._orders.drops.append(request.request_id)
            return False
        self._orders.keeps.append(ReadBlocks(request.request_id, _kept(tables), live.moves.give.stop))
        return True

    def _let_go(self, key: str, live: _LiveTransfer) -> None:
        """What is on its way is not needed, or cannot be used: the sender is rid of it all the same."""
        if live.stage in ("asked", "come"):
            self._orders.places.append(PlaceBlocks(key))
        live.stage = "used"


def _kept(tables: Groups) -> Tables:
    return tuple(tuple(table) for table in tables)


def _offer(key: str, request: str, send_params: SendParams, prompt: Sequence[int]) -> SendOffer:
    tokens = token_hash(prompt[: send_params.stop])
    return SendOffer(
        key, request, send_params.handle, send_params.codec, send_params.lasts_s, send_params.stop, tokens
    )


def _ask(key: str, request: str, fetch_params: FetchParams, have: int, prompt: Sequence[int]) -> FetchOrder:
    tokens = token_hash(prompt[: fetch_params.stop])
    where = (fetch_params.kv, fetch_params.handle, fetch_params.within_s)
    return FetchOrder(
        key, request, *where, have, fetch_params.stop, tokens, new_session(), fetch_params.connections
    )

"""Scheduling of KV transfers in the connector, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from potluck.core.errors import InputError
from potluck.kv.chunks import token_hash
from potluck.vllm.transfer_scheduler import PlaceBlocks, ReadBlocks, TransferScheduler, WorkerNews, moves_of

HANDLE = "h" * 32


@dataclass
class Request:
    request_id: str
    kv_transfer_params: dict[str, object] | None
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(100)))
    num_computed_tokens: int = 0


def receiving_request(stop: int = 70) -> Request:
    take = {"kv": "127.0.0.1:9000", "handle": HANDLE, "stop": stop}
    return Request("t", {"potluck": {"request": "r", "take": take}})


def sending_request(stop: int = 70) -> Request:
    return Request("g", {"potluck": {"request": "r", "give": {"handle": HANDLE, "stop": stop}}})


def orders(booking: TransferScheduler, **scheduled: int):  # type: ignore[no-untyped-def]
    return booking.orders(scheduled, lambda key: [[7, 8, 9]])


def test_receiving_request_gets_blocks_once_its_kv_has_arrived() -> None:
    booking, request = TransferScheduler(2), receiving_request()
    booking.came(request)
    assert booking.matched(request, 32) == (None, False)
    (ask,) = orders(booking).asks
    assert (ask.have, ask.stop, ask.token_hash) == (32, 70, token_hash(range(70)))
    booking.heard(WorkerNews(come={"t": 1}))
    assert booking.matched(request, 32) == (None, False)  # one of two workers
    booking.heard(WorkerNews(come={"t": 1}))
    assert booking.matched(request, 32) == (38, True)
    booking.placed(request, lambda: [[4, 5, 6]], 38)
    assert orders(booking).places == [PlaceBlocks("t", ((4, 5, 6),), 32)]
    booking.placed(request, lambda: [[4, 5, 6, 7]], 0)  # vLLM says it again when all is there
    assert orders(booking).places == []
    assert booking.matched(request, 0) == (0, False)  # preempted: a handle is good for one fetch


def test_fully_cached_request_still_fetches_to_release_the_sender() -> None:
    booking, request = TransferScheduler(1), receiving_request(stop=64)
    booking.came(request)
    assert booking.matched(request, 96) == (0, False)
    result = orders(booking)
    assert [(ask.have, ask.stop) for ask in result.asks] == [(63, 64)]
    assert result.places == [PlaceBlocks("t")]


@pytest.mark.parametrize("computed", [0, 96], ids=["evicted since", "held since"])
def test_received_kv_that_became_unusable_is_dropped(computed: int) -> None:
    booking, request = TransferScheduler(1), receiving_request()
    booking.came(request)
    booking.matched(request, 32)
    booking.heard(WorkerNews(come={"t": 1}))
    orders(booking)
    assert booking.matched(request, computed) == (0, False)
    assert orders(booking).places == [PlaceBlocks("t")]


def test_transfer_failure_before_allocation_falls_back_to_computing() -> None:
    booking, request = TransferScheduler(1), receiving_request()
    booking.came(request)
    booking.matched(request, 0)
    booking.heard(WorkerNews(failed={"t"}))
    assert booking.matched(request, 0) == (0, False)


def test_sending_request_is_read_to_its_stop_and_keeps_its_blocks() -> None:
    booking, request = TransferScheduler(1), sending_request()
    booking.came(request)
    result = orders(booking, g=40, other=3)
    assert [offer.stop for offer in result.offers] == [70]
    assert result.reads == [ReadBlocks("g", ((7, 8, 9),), 40)]
    request.num_computed_tokens = 40
    assert orders(booking, g=60).reads == [ReadBlocks("g", ((7, 8, 9),), 70)]
    assert booking.finished(request, [[7, 8, 9]], whole=True)
    assert orders(booking).keeps == [ReadBlocks("g", ((7, 8, 9),), 70)]
    assert len(booking) == 0


def test_requests_that_end_early_leave_no_transfer_state() -> None:
    booking = TransferScheduler(1)
    for request in (sending_request(), receiving_request()):
        booking.came(request)
        booking.matched(request, 0)
        assert not booking.finished(request, [], whole=False)
    result = orders(booking)
    assert (result.drops, result.cancels, len(booking)) == (["g"], ["t"], 0)
    booking.heard(WorkerNews(come={"t": 1}, failed={"t"}, lossy={"t"}))  # too late: nobody minds


def test_requests_without_transfer_params_are_ignored() -> None:
    booking, request = TransferScheduler(1), Request("x", None)
    booking.came(request)
    assert booking.matched(request, 0) == (0, False)
    booking.placed(request, lambda: [[1]], 0)
    assert not booking.finished(request, [[1]], whole=True)
    assert booking.quiet


def test_windowed_models_leave_the_last_token_to_the_receiver() -> None:
    with pytest.raises(InputError, match="at most 99"):
        TransferScheduler(1, windows=True).came(receiving_request(stop=100))
    booking = TransferScheduler(1, windows=True)
    booking.came(receiving_request(stop=99))
    assert not booking.quiet


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"request": "r", "give": {"handle": "short", "stop": 1}}, "handle"),
        ({"request": "r", "give": {"handle": HANDLE, "stop": 0}}, "stop"),
        ({"request": "r", "give": {"handle": HANDLE, "stop": 3, "codec": "zip"}}, "codec"),
        ({"request": "r", "take": {"handle": HANDLE, "stop": 3, "kv": "nowhere"}}, "kv"),
        ({"request": "r", "took": {}}, "took"),
        ("r", "potluck"),
    ],
)
def test_invalid_transfer_params_are_refused_by_name(said: object, names: str) -> None:
    with pytest.raises(InputError, match=names):
        moves_of({"potluck": said})


def test_transfer_of_more_tokens_than_the_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="more tokens"):
        TransferScheduler(1).came(sending_request(stop=101))

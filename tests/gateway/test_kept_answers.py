"""Repeated requests under the same name get the kept answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai_helpers import (
    SERVER,
    HandlerHarness,
    answering_with,
    letter_tokens,
    refusing_with,
    sampled_letters,
)

from potluck.gateway.openai import kept_answers
from potluck.gateway.openai.handler import HandlerSettings
from potluck.gateway.openai.kept_answers import AnswerReader, KeptAnswer, KeptAnswers, RepeatKey, frames_of


class WorkerHarness(HandlerHarness):
    """A door in a process of its own, which may die: its locks go with it."""

    def __init__(self, folder: Path, script: Any = None, **fields: Any) -> None:
        self.due: list[Callable[[], None]] = []
        self.repeats = KeptAnswers(folder, lambda delay_s, call: self.due.append(call))
        super().__init__(script, kept_answers=self.repeats, **fields)

    def pass_time(self) -> None:
        due, self.due = self.due, []
        for call in due:
            call()


@pytest.fixture
def open_answer_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All that are being written, so that they can be closed as by a death."""
    made: list[int] = []
    init = KeptAnswer.__init__

    def noted(self: KeptAnswer, owner: KeptAnswers, path: Path, file: int, had: Any) -> None:
        made.append(file)
        init(self, owner, path, file, had)

    monkeypatch.setattr(KeptAnswer, "__init__", noted)
    return made


def repeat_headers(**more: str) -> dict[str, str]:
    return {"idempotency_key": "once", **more}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("header", ["idempotency_key", "x_request_id"])
def test_repeated_request_gets_the_kept_answer_from_any_worker(
    tmp_path: Path, stream: bool, header: str
) -> None:
    one, other = (
        WorkerHarness(tmp_path, answering_with("world")),
        WorkerHarness(tmp_path, answering_with("never")),
    )
    name = {header: "once"}
    first = one.complete("Hello", name, max_tokens=5, stream=stream)
    again = other.complete("Hello", name, max_tokens=5, stream=stream)
    assert (again.status, again.data, again.over) == (200, first.data, True)
    assert again.sent["x-potluck-replayed"] == "1"
    assert again.sent["content-type"] == first.sent["content-type"]
    assert "x-potluck-replayed" not in first.sent
    if header == "x_request_id":
        assert again.sent["x-request-id"] == "once"
    assert other.driver.asked == []
    assert (len(one.meter.told), len(other.meter.told), other.meter.replays) == (1, 0, 1), "one bill"
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o077 == 0


def test_kept_answer_belongs_to_request_body_and_tenant(tmp_path: Path) -> None:
    worker = WorkerHarness(tmp_path, answering_with("world"))
    assert worker.complete("Hello", repeat_headers()).status == 200
    wrong = worker.complete("Goodbye", repeat_headers())
    assert (wrong.status, wrong.json["error"]["code"]) == (422, "idempotency_key_reused")
    assert worker.chat("Hello", repeat_headers()).status == 422, "another endpoint"
    assert worker.complete("Hello", {"idempotency_key": "k" * 256}).status == 400
    # An x-request-id may be a whole trace's: with another body it is another request.
    for text in ("Hello", "Goodbye", "Hello"):
        assert worker.complete(text, {"x_request_id": "trace"}).status == 200
    assert len(worker.driver.asked) == 3
    tenants = [kept_answers.repeat_key_of(tenant, b"k", None, b"/", b"") for tenant in ("a", "b")]
    assert tenants[0] != tenants[1]
    assert kept_answers.repeat_key_of("a", None, None, b"/", b"") is None


def test_failed_answer_is_not_kept_and_is_computed_again(tmp_path: Path) -> None:
    worker = WorkerHarness(tmp_path, refusing_with("overloaded"))
    assert [worker.complete("Hello", repeat_headers()).status for _ in range(2)] == [429, 429]
    assert len(worker.driver.asked) == 2

    def breaks(asked: Any, answer: Any) -> None:
        answer.tokens(sampled_letters("wo"))
        refusing_with("lost")(asked, answer)

    broken = WorkerHarness(tmp_path, breaks)
    for _ in range(2):
        result = broken.complete("Hello", repeat_headers(), stream=True)
        assert "error" in result.events[-1]
        assert "x-potluck-replayed" not in result.sent
    assert len(broken.driver.asked) == 2
    assert list(tmp_path.iterdir()) == []


def test_repeated_request_joins_an_answer_under_way(tmp_path: Path) -> None:
    one, other = WorkerHarness(tmp_path), WorkerHarness(tmp_path)
    first = one.complete("Hello", repeat_headers(), stream=True, max_tokens=5)
    one.driver.answer.tokens(sampled_letters("wo"))
    again = other.complete("Hello", repeat_headers(), stream=True, max_tokens=5)
    assert again.data == first.data
    assert not again.over
    one.driver.answer.tokens(sampled_letters("rld"))
    other.pass_time()
    assert again.data == first.data
    one.driver.answer.finished("length", 0)
    other.pass_time()
    assert (again.data, again.over) == (first.data, True)
    assert other.driver.asked == []


def test_slow_reader_of_a_kept_answer_applies_backpressure(tmp_path: Path) -> None:
    one, other = WorkerHarness(tmp_path), WorkerHarness(tmp_path)
    one.complete("Hello", repeat_headers(), stream=True, max_tokens=5)
    again = other.complete("Hello", repeat_headers(), stream=True, max_tokens=5)
    assert again.on_room is not None
    again.on_room(False)
    answering_with("world")(one.driver.asked[0], one.driver.answer)
    other.pass_time()
    assert again.data == b""
    again.on_room(True)
    other.pass_time()
    assert again.over


def test_client_with_an_idempotency_key_may_disconnect_and_return(tmp_path: Path) -> None:
    worker = WorkerHarness(tmp_path)
    first = worker.complete("Hello", repeat_headers(), max_tokens=5)
    assert first.on_gone is not None
    first.on_gone()
    assert worker.driver.cancelled == []
    first.reply = lambda *_, **__: None  # type: ignore[method-assign]  # its connection is gone
    answering_with("world")(worker.driver.asked[0], worker.driver.answer)
    again = worker.complete("Hello", repeat_headers(), max_tokens=5)
    assert (again.status, again.json["choices"][0]["text"]) == (200, "world")
    assert [message.outcome for message in worker.meter.told] == ["length"]


def test_client_without_an_idempotency_key_cancels_by_disconnecting(tmp_path: Path) -> None:
    worker, other = WorkerHarness(tmp_path), WorkerHarness(tmp_path)
    name = {"x_request_id": "r"}
    first = worker.complete("Hello", name, max_tokens=5)
    again = other.complete("Hello", name, max_tokens=5)
    assert first.on_gone is not None
    first.on_gone()
    assert worker.driver.cancelled == [worker.driver.asked[0].id]
    assert [message.outcome for message in worker.meter.told] == ["cancelled"]
    for _ in range(20):
        other.pass_time()
    assert len(other.driver.asked) == 1, "who waited for it has it computed"
    answering_with("world")(other.driver.asked[0], other.driver.answer)
    assert again.json["choices"][0]["text"] == "world"


@pytest.mark.parametrize("stream", [False, True])
def test_answer_of_a_dead_worker_is_continued_from_its_tokens(
    tmp_path: Path, open_answer_files: list[int], stream: bool
) -> None:
    settings = HandlerSettings(secret=b"s" * 32)
    one, other = (WorkerHarness(tmp_path, settings=settings) for _ in range(2))
    asked = {"max_tokens": 5, "stream": stream, "temperature": 0.8, "logprobs": 1, "cache_salt": "mine"}
    first = one.complete("Hello", {"x_request_id": "r"}, **asked)
    one.driver.answer.tokens(sampled_letters("wo"))
    one.driver.answer.tokens(sampled_letters("r"))
    waiting = other.complete("Hello", {"x_request_id": "r"}, **asked)
    os.close(open_answer_files[0])  # it is killed, and has told nobody of any use
    again = other.complete("Hello", {"x_request_id": "r"}, **asked)
    assert other.driver.resumed == [letter_tokens("wor")], "not a second computation"
    assert other.driver.asked[0].sampling == one.driver.asked[0].sampling, "the same chance"
    assert other.driver.asked[0].salt == one.driver.asked[0].salt != ""
    assert other.driver.asked[0].id != one.driver.asked[0].id, "the Brain has seen the end of that one"
    answering_with("ld")(other.driver.asked[0], other.driver.answer)
    assert again.sent["x-potluck-replayed"] == "1"
    (message,) = other.meter.told
    assert (message.output_tokens, message.prompt_tokens) == (5, 5), "the whole of it is billed, once"
    if stream:
        assert again.data.startswith(first.data), "the same answer, by the same name"
        parts = [event for event in again.events if event["choices"]]
        assert "".join(part["choices"][0]["text"] for part in parts) == "world"
        assert message.id in parts[0]["id"]
    else:
        assert again.json["choices"][0]["text"] == "world"
    for _ in range(20):
        other.pass_time()
    if not stream:
        assert waiting.data == again.data, "who had waited for the dead one reads the other's"
    else:
        assert waiting.dropped, "what had begun breaks off, as for the first"


def test_answer_of_a_dead_worker_after_its_last_token_is_only_finished(
    tmp_path: Path, open_answer_files: list[int]
) -> None:
    one, other = WorkerHarness(tmp_path), WorkerHarness(tmp_path)
    one.complete("Hello", repeat_headers(), max_tokens=5, stop="rl")
    one.driver.answer.tokens(sampled_letters("wo"))
    os.close(open_answer_files[0])
    again = other.complete("Hello", repeat_headers(), max_tokens=5, stop="rl")
    other.driver.answer.tokens(sampled_letters("rl"))
    assert again.json["choices"][0]["text"] == "wo"


def test_answer_that_cannot_be_continued_is_computed_anew(
    tmp_path: Path, open_answer_files: list[int]
) -> None:
    """Of a server of plain OpenAI nobody has tokens; nor can several answers be told apart."""
    one, other = WorkerHarness(tmp_path), WorkerHarness(tmp_path)
    body = {"model": SERVER, "prompt": "Hello", "stream": True}
    one.ask("/v1/completions", body, **repeat_headers())
    one.driver.answer.relay_begin(200, b"text/event-stream")
    one.driver.answer.relay(b"data: {}\n\n")
    os.close(open_answer_files[0])
    again = other.ask("/v1/completions", body, **repeat_headers())
    assert (len(other.driver.asked), other.driver.resumed) == (1, [])
    other.driver.answer.relay_whole(200, b"text/event-stream", b"data: [DONE]\n\n")
    assert (again.status, again.over) == (200, True)
    assert "x-potluck-replayed" not in again.sent
    several = one.complete("Hello", {"x_request_id": "n"}, n=2, max_tokens=2)
    one.driver.answer.tokens(sampled_letters("w"))
    os.close(open_answer_files[2])
    assert several.status is None
    other.complete("Hello", {"x_request_id": "n"}, n=2, max_tokens=2)
    assert (len(other.driver.asked), other.driver.resumed) == (3, [])


def test_kept_answers_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_answer_files: list[int]
) -> None:
    worker = WorkerHarness(tmp_path, answering_with("world"))
    worker.complete("Hello", repeat_headers())
    (path,) = tmp_path.iterdir()
    past_s = time.time() - kept_answers.KEPT_S - 1
    os.utime(path, (past_s, past_s))
    assert worker.complete("Hello", repeat_headers()).status == 200
    assert len(worker.driver.asked) == 2, "after a minute it is another request"
    # What was being written when its process died goes too; what is being written does not.
    held = WorkerHarness(tmp_path)
    for place in range(2):
        held.complete("Hello", {"x_request_id": f"r{place}"})
    os.close(open_answer_files[2])
    for item in tmp_path.iterdir():
        os.utime(item, (past_s, past_s))
    KeptAnswers(tmp_path, lambda *_: None)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(kept_answers, "MOST_BYTES", 100)
    for place in range(3):
        worker.complete("Hello", {"x_request_id": f"s{place}"})
    assert len(list(tmp_path.iterdir())) == 1, "nor are more kept than there is room for"
    os.close(open_answer_files[3])


def test_full_disk_keeps_no_answers_and_stops_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerHarness(tmp_path, answering_with("world"))

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        assert worker.complete("Hello", repeat_headers()).status == 200
    monkeypatch.setattr(kept_answers, "MOST_ANSWER_BYTES", 200)
    assert worker.complete("Hello", repeat_headers()).status == 200
    assert worker.complete("Hello", repeat_headers()).status == 200
    assert len(worker.driver.asked) == 3
    (tmp_path / "x").write_text("")
    missing = WorkerHarness(tmp_path / "sub", answering_with("world"))
    (tmp_path / "sub").rmdir()
    assert missing.complete("Hello", repeat_headers()).status == 200


def test_truncated_frames_of_a_kept_answer_are_ignored() -> None:
    whole = b"D\0\0\0\3abcE\0\0\0\0"
    assert frames_of(whole) == ([(b"D", b"abc"), (b"E", b"")], len(whole))
    for size in range(8):
        assert frames_of(whole[:size])[0] == []
    assert frames_of(whole[:12])[0] == [(b"D", b"abc")]


def test_only_one_of_two_concurrent_claims_writes_the_answer(tmp_path: Path) -> None:
    made = KeptAnswers(tmp_path, lambda *_: None)
    repeat_key = RepeatKey("a", "d", True)
    first, second = made.claim(repeat_key), made.claim(repeat_key)
    assert isinstance(first, KeptAnswer)
    assert isinstance(second, AnswerReader)
    first.forget()
    assert second.forsaken
    second.close()
    assert json.dumps({"digest": "d"}).encode() not in b"".join(
        path.read_bytes() for path in tmp_path.iterdir()
    )

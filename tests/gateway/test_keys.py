"""API keys: authentication, limits, and changes while the gateway runs."""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai_helpers import NAME, SERVER, FakeExchange, HandlerHarness, answering_with, sampled_letters

from potluck.core.errors import InputError
from potluck.core.replica.blocks import BlockNamer
from potluck.core.values.service import PrefixSharing
from potluck.gateway.openai.handler import HandlerSettings
from potluck.gateway.openai.keys import KeyQuota, KeyRing, Quota, SharedUse, new_key


class KeyedHarness(HandlerHarness):
    def __init__(
        self, folder: Path, script: Any = None, settings: HandlerSettings | None = None, **fields: Any
    ) -> None:
        self.path = folder / "keys"
        self.key, line = new_key("ann", "ann-and-co")
        self.line = {**json.loads(line), **fields}
        self.write(self.line)
        self.ring = KeyRing(self.path, 0.0, lambda: 1e9 + self.now_s)
        super().__init__(script, key_ring=self.ring, settings=settings)

    def write(self, *lines: dict[str, Any] | str) -> None:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        self.path.write_text("# keys\n\n" + text + "\n")
        when = self.path.stat().st_mtime_ns + int(self.__dict__.get("now_s", 0) * 1e9)
        os.utime(self.path, ns=(when, when))

    def try_key(self, key: str | None, **fields: Any) -> FakeExchange:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.complete("x", headers=headers, **fields)


def test_only_known_keys_are_accepted(tmp_path: Path) -> None:
    resolved = KeyedHarness(tmp_path, answering_with("a"))
    assert resolved.try_key(resolved.key).status == 200
    assert (resolved.driver.asked[0].tenant, resolved.meter.told[0].key) == ("ann-and-co", "ann")
    for wrong in (None, "", resolved.key[:-1], resolved.key + "x", "pk-" + "x" * 1_000_000):
        result = resolved.try_key(wrong)
        assert (result.status, result.json["error"]["code"]) == (401, "invalid_api_key")
        assert result.sent["www-authenticate"] == "Bearer"
    assert resolved.ask("/v1/models", method="GET").status == 401
    assert resolved.ask("/health", method="GET").status == 200
    assert resolved.ask("/ready", method="GET").status == 200
    assert resolved.ask("/v1/completions", authorization=f"Basic {resolved.key}").status == 401
    assert resolved.ask("/v1/nothing").status == 401
    assert len(resolved.driver.asked) == 1
    assert set(resolved.meter.turned) == {(401, "invalid_api_key")}
    assert len(resolved.meter.told) == 1


def test_known_and_unknown_keys_are_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = KeyedHarness(tmp_path)
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    resolved.try_key(resolved.key)
    resolved.try_key("pk-other")
    assert compared == [(32, 32), (32, 32)]


def test_key_file_and_logs_contain_no_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    resolved = KeyedHarness(tmp_path)
    resolved.try_key(resolved.key)
    resolved.write("not json " + resolved.key)
    resolved.ring.look(5.0)
    assert resolved.ring.problem
    assert resolved.key not in json.dumps(resolved.line) + caplog.text + resolved.ring.problem + repr(
        resolved.ring.__dict__
    )


def test_keys_are_rotated_without_a_restart(tmp_path: Path) -> None:
    resolved = KeyedHarness(tmp_path, answering_with("a"), requests_per_min=3)
    second, line = new_key("ann", "ann-and-co")
    resolved.now_s = 2.0
    resolved.write(resolved.line, {**json.loads(line), "requests_per_min": 3})
    assert resolved.try_key(second).status == 200
    assert resolved.try_key(resolved.key).status == 200
    resolved.now_s = 4.0
    resolved.write({**json.loads(line), "requests_per_min": 3})
    assert resolved.try_key(resolved.key).status == 401
    assert resolved.try_key(second).status == 200
    assert resolved.try_key(second).status == 429, "both keys are of one name, and its limit is kept"


@pytest.mark.parametrize(
    "wrong",
    [
        "nonsense",
        {"name": "bob"},
        {"name": "bob", "sha256": "12"},
        {"name": "bob", "sha256": "x" * 64},
        {"name": "", "sha256": "0" * 64},
        {"name": "bob", "sha256": "0" * 64, "colour": "red"},
        {"name": "bob", "sha256": "0" * 64, "tokens_per_min": -1},
        {"name": "bob", "sha256": "0" * 64, "expires": "soon"},
        {"name": "ann", "sha256": "0" * 64, "tenant": "another"},
    ],
)
def test_invalid_key_file_keeps_the_previous_keys(tmp_path: Path, wrong: Any) -> None:
    resolved = KeyedHarness(tmp_path, answering_with("a"))
    resolved.now_s = 3.0
    resolved.write(resolved.line, wrong)
    assert resolved.try_key(resolved.key).status == 200
    assert resolved.ring.problem
    resolved.now_s = 6.0
    resolved.path.unlink()
    assert resolved.try_key(resolved.key).status == 200
    assert "cannot be read" in resolved.ring.problem
    resolved.now_s = 9.0
    resolved.write(resolved.line)
    assert resolved.try_key(resolved.key).status == 200
    assert resolved.ring.problem == ""
    resolved.write(resolved.line, wrong)
    with pytest.raises(InputError):
        KeyRing(resolved.path, 0.0, lambda: 0.0)


def test_keys_expire_and_may_be_limited_to_classes(tmp_path: Path) -> None:
    resolved = KeyedHarness(
        tmp_path, answering_with("a"), expires="2001-09-09T02:46:40+00:00", classes=["batch"]
    )
    assert resolved.try_key(resolved.key, service_tier="default").status == 403
    assert resolved.try_key(resolved.key, service_tier="flex").status == 200
    resolved.now_s = 3600.0
    result = resolved.try_key(resolved.key, service_tier="flex")
    assert (result.status, result.json["error"]["code"]) == (401, "expired_api_key")


def test_limited_key_request_without_class_gets_the_first_allowed_class(tmp_path: Path) -> None:
    for classes, expected in ((["batch", "interactive"], "batch"), (["batch", "standard"], "standard")):
        scene = KeyedHarness(tmp_path, answering_with("a"), classes=classes)
        for fields in ({}, {"service_tier": "auto"}, {"priority": 0}):
            assert scene.try_key(scene.key, **fields).status == 200
        assert [request.request_class for request in scene.driver.asked] == [expected] * 3


def test_limited_key_with_classes_unknown_to_the_gateway_is_refused(tmp_path: Path) -> None:
    scene = KeyedHarness(tmp_path, answering_with("a"), classes=["nightly"])
    result = scene.try_key(scene.key)
    assert (result.status, result.json["error"]["code"]) == (403, "class_not_allowed")
    assert "nightly" in result.json["error"]["message"]
    scene = KeyedHarness(tmp_path, answering_with("a"), classes=["nightly", "batch"])
    assert scene.try_key(scene.key).status == 200
    assert scene.driver.asked[0].request_class == "batch"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("fields", "headers", "code", "param"),
    [
        ({"service_tier": "priority"}, {}, "class_not_allowed", "service_tier"),
        ({"service_tier": "default"}, {}, "class_not_allowed", "service_tier"),
        ({}, {"x-potluck-class": "interactive"}, "class_not_allowed", "x-potluck-class"),
        (
            {"service_tier": "priority"},
            {"x-potluck-class": "batch"},
            "class_not_allowed",
            "service_tier",
        ),
        (
            {"service_tier": "flex"},
            {"x-potluck-class": "interactive"},
            "class_not_allowed",
            "x-potluck-class",
        ),
        ({"priority": 1000}, {}, "priority_not_allowed", "priority"),
        ({"priority": -1}, {"x-potluck-class": "batch"}, "priority_not_allowed", "priority"),
    ],
)
def test_key_limited_to_a_class_is_refused_other_classes_and_priorities(
    tmp_path: Path, chat: bool, fields: dict[str, Any], headers: dict[str, str], code: str, param: str
) -> None:
    scene = KeyedHarness(tmp_path, answering_with("a"), classes=["batch"])
    headers = {**headers, "authorization": f"Bearer {scene.key}"}
    ask = scene.chat if chat else scene.complete
    result = ask("x", headers=headers, **fields)
    error = result.json["error"]
    assert (result.status, error["code"], error["param"]) == (403, code, param)
    assert scene.driver.asked == []


def test_key_line_with_invalid_classes_is_refused() -> None:
    for classes in ([], ["batch", "batch"], [""], ["a\nb"], ["x" * 257]):
        with pytest.raises(InputError, match="classes: must be 1 to"):
            new_key("ann", classes=classes)


def test_requests_per_minute_limit_refuses_with_retry_after(tmp_path: Path) -> None:
    resolved = KeyedHarness(tmp_path, answering_with("a"), requests_per_min=2)
    first = resolved.try_key(resolved.key)
    assert (first.sent["x-ratelimit-limit-requests"], first.sent["x-ratelimit-remaining-requests"]) == (
        "2",
        "1",
    )
    assert resolved.try_key(resolved.key).status == 200
    result = resolved.try_key(resolved.key)
    assert (result.status, result.sent["retry-after"]) == (429, "30")
    assert result.sent["x-ratelimit-remaining-requests"] == "0"
    assert result.sent["x-ratelimit-reset-requests"] == "60s"
    resolved.now_s = 29.9
    assert resolved.try_key(resolved.key).status == 429
    resolved.now_s = 30.1
    assert resolved.try_key(resolved.key).status == 200


def test_tokens_per_minute_are_reserved_and_settled(tmp_path: Path) -> None:
    resolved = KeyedHarness(tmp_path, tokens_per_min=60)
    assert resolved.try_key(resolved.key, max_tokens=49).status is None
    assert resolved.try_key(resolved.key, max_tokens=49).status == 429
    resolved.driver.answer.finished("stop", 0)
    assert resolved.try_key(resolved.key, max_tokens=49).status is None, "it had used 1 token, not 50"
    assert resolved.try_key(resolved.key, max_tokens=20).status == 429
    resolved.now_s = 12.0
    assert resolved.try_key(resolved.key, max_tokens=20).status is None


def test_chat_without_max_tokens_reserves_the_rest_of_the_context(tmp_path: Path) -> None:
    scene = KeyedHarness(tmp_path, tokens_per_min=1100)
    headers = {"authorization": f"Bearer {scene.key}"}
    replies = [scene.chat("x", headers=headers) for _ in range(4)]
    assert [reply.status for reply in replies] == [None, None, 429, 429], "two may fill 512 tokens each"
    error = replies[2].json["error"]
    assert "or with a smaller max_tokens: this request may use 512" in error["message"]
    prompt_tokens = len(scene.driver.asked[0].prompt)
    assert scene.driver.asked[0].max_output_tokens == 512 - prompt_tokens
    for _ in range(512 - prompt_tokens):
        scene.driver.answer.tokens(sampled_letters("a"))
    scene.driver.answer.finished("length", 0)
    assert scene.chat("x", headers=headers).status == 429, "all that was reserved was used"
    next(iter(scene.driver.answers.values())).finished("stop", 0)
    assert scene.chat("x", headers=headers).status is None, "what was not used is given back"


@pytest.mark.parametrize(
    ("fields", "most_tokens"),
    [
        ({"prompt": "x", "max_tokens": 20}, 1 + 20),
        ({"prompt": "x", "max_tokens": 20, "n": 3}, 1 + 3 * 20),
        ({"prompt": ["x", "yyy"], "max_tokens": 20, "n": 2}, 4 + 4 * 20),
        ({"model": SERVER, "prompt": "x" * 40, "max_tokens": 20}, 10 + 20),
        ({"model": SERVER, "prompt": ["x" * 40, "y" * 40], "max_tokens": 20, "n": 2}, 20 + 4 * 20),
        ({"model": SERVER, "prompt": "x" * 40, "max_tokens": 20, "best_of": 5}, 10 + 5 * 20),
        ({"model": SERVER, "prompt": "x" * 40, "max_tokens": 500}, 10 + 500),
        ({"model": SERVER, "prompt": "x" * 40, "max_tokens": 400, "max_completion_tokens": 1}, 10 + 400),
        ({"model": SERVER, "prompt": "x" * 40, "max_tokens": 1, "n_predict": 300}, 10 + 300),
    ],
)
def test_completion_reserves_the_maximum_length_of_every_choice(
    tmp_path: Path, fields: dict[str, Any], most_tokens: int
) -> None:
    scene = KeyedHarness(tmp_path, tokens_per_min=10_000)
    reply = scene.ask("/v1/completions", {"model": NAME, **fields}, authorization=f"Bearer {scene.key}")
    assert reply.status is None
    bucket = scene.ring.who(f"Bearer {scene.key}".encode(), 0.0).allowance.headers(0.0)
    assert b"x-ratelimit-remaining-tokens: %d\r\n" % (10_000 - most_tokens) in bucket


def test_plain_chat_with_two_token_limits_reserves_the_larger_one(tmp_path: Path) -> None:
    scene = KeyedHarness(tmp_path, tokens_per_min=10_000)
    for most_tokens, limits in (
        (10 + 400, {"max_tokens": 400, "max_completion_tokens": 1}),
        (10 + 500, {"max_tokens": 3, "max_completion_tokens": 500}),
    ):
        before = remaining_tokens(scene)
        body = {"model": SERVER, "messages": [{"role": "user", "content": "x" * 40}], **limits}
        reply = scene.ask("/v1/chat/completions", body, authorization=f"Bearer {scene.key}")
        assert reply.status is None
        assert before - remaining_tokens(scene) == most_tokens


def remaining_tokens(scene: KeyedHarness) -> int:
    headers = scene.ring.who(f"Bearer {scene.key}".encode(), 0.0).allowance.headers(0.0)
    return int(headers.partition(b"remaining-tokens: ")[2].partition(b"\r")[0])


def test_token_limit_beyond_any_context_is_refused_before_reservation(tmp_path: Path) -> None:
    scene = KeyedHarness(tmp_path, tokens_per_min=10_000)
    body = {"model": SERVER, "prompt": "x" * 40, "max_tokens": 10**4000}
    assert scene.ask("/v1/completions", body, authorization=f"Bearer {scene.key}").status == 400
    bucket = scene.ring.who(f"Bearer {scene.key}".encode(), 0.0).allowance.headers(0.0)
    assert b"x-ratelimit-remaining-tokens: 10000\r\n" in bucket


def test_request_larger_than_the_bucket_waits_until_it_is_full(tmp_path: Path) -> None:
    scene = KeyedHarness(tmp_path, tokens_per_min=120)
    headers = {"authorization": f"Bearer {scene.key}"}
    assert scene.try_key(scene.key, max_tokens=19).status is None
    scene.driver.answer.tokens(sampled_letters("a" * 19))
    scene.driver.answer.finished("length", 0)
    refused = scene.chat("x", headers=headers)
    assert (refused.status, refused.sent["retry-after"]) == (429, "10"), "20 of 120 are used"
    scene.now_s = 10.0
    assert scene.chat("x", headers=headers).status is None
    refused = scene.try_key(scene.key, max_tokens=1)
    assert (refused.status, refused.sent["retry-after"]) == (429, "60"), "its debt keeps others out"
    scene.driver.answer.finished("stop", 0)
    assert scene.try_key(scene.key, max_tokens=1).status is None, "settled by what it used"


def test_concurrent_request_limit_is_released_when_requests_end(tmp_path: Path) -> None:
    resolved = KeyedHarness(tmp_path, concurrent=2)
    first = resolved.try_key(resolved.key)
    resolved.try_key(resolved.key)
    assert resolved.try_key(resolved.key).status == 429
    resolved.driver.answer.finished("stop", 0)
    assert resolved.try_key(resolved.key).status is None
    assert first.on_gone is not None
    first.on_gone()
    assert resolved.try_key(resolved.key).status is None
    assert resolved.try_key(resolved.key, model="gpt").status == 429
    resolved.driver.answer.finished("stop", 0)
    assert resolved.try_key(resolved.key, model="gpt").status == 404
    assert resolved.try_key(resolved.key).status is None, "a request that was wrong has left its place"


def test_tenants_share_no_prefixes_by_default(tmp_path: Path) -> None:
    settings = HandlerSettings(secret=b"s" * 32)
    resolved = KeyedHarness(tmp_path, settings=settings)
    other, line = new_key("bob", "bob")
    resolved.now_s = 2.0
    resolved.write(resolved.line, line)
    for key in (resolved.key, other, resolved.key):
        resolved.try_key(key)
    salts = [asked.salt for asked in resolved.driver.asked]
    assert salts[0] == salts[2] != salts[1]
    assert all(len(salt) == 32 for salt in salts)
    again = KeyedHarness(tmp_path, settings=settings)
    again.try_key(again.key)
    assert again.driver.asked[0].salt == salts[0], "a restart changes nothing while the secret is the same"
    shared = KeyedHarness(tmp_path, settings=HandlerSettings(sharing=(PrefixSharing(),)))
    shared.try_key(shared.key)
    assert shared.driver.asked[0].salt == ""
    resolved.try_key(resolved.key, cache_salt="mine")
    resolved.try_key(other, cache_salt="mine")
    own = [asked.salt for asked in resolved.driver.asked[-2:]]
    assert len({*own, *salts}) == 4, "what a client chooses can only set it further apart"
    plain = HandlerHarness()
    plain.complete(cache_salt="x")
    plain.complete()
    assert len(plain.driver.asked[0].salt) == 32
    assert plain.driver.asked[1].salt == ""


def test_tenants_of_one_sharing_group_share_prefixes_of_its_models_only(tmp_path: Path) -> None:
    tenants = ("ann", "bob", "cid")
    made = [new_key(name, name) for name in tenants]

    def salts(*sharing: PrefixSharing, **more: object) -> list[str]:
        resolved = KeyedHarness(tmp_path, settings=HandlerSettings(secret=b"s" * 32, sharing=sharing))
        resolved.now_s = 2.0
        resolved.write(*(line for _, line in made))
        for key, _ in made:
            resolved.try_key(key, **more)
        return [asked.salt for asked in resolved.driver.asked]

    alone = salts()
    assert len(set(alone)) == 3
    ann, bob, cid = salts(PrefixSharing(("ann", "bob")))
    assert ann == bob != cid
    assert ann not in alone, "what either had for itself stays its own"
    assert cid == alone[2]
    assert salts(PrefixSharing(("ann", "bob"), (NAME,))) == [ann, bob, cid]
    assert salts(PrefixSharing(("ann", "bob"), ("another",))) == alone
    wider = salts(PrefixSharing(("ann", "bob", "cid")))
    assert wider[0] == wider[1] == wider[2] != ann, "who joins or leaves finds nothing of what was"
    tokens, book = range(64), BlockNamer()
    names = {
        name: book.names(tokens, NAME, salt) for name, salt in zip(tenants, (ann, bob, cid), strict=True)
    }
    assert names["ann"] == names["bob"], "the index takes both prompts for the same"
    assert set(names["cid"]).isdisjoint(names["ann"])
    own = salts(PrefixSharing(("ann", "bob")), cache_salt="mine")
    assert own[0] == own[1] != ann
    assert own[2] not in (own[0], cid)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 30),  # Seconds until the next request.
            st.integers(1, 900),  # Tokens that it may use.
            st.floats(0, 1),  # The part of them that it does use.
            st.integers(0, 5),  # How many requests later it ends.
        ),
        max_size=60,
    ),
    st.integers(1, 3),
)
@example(
    [(0.0, 176, 0.0, 4), *[(0.0, 1, 0.0, 0)] * 2, (6.0, 1, 0.0, 0), (12.0, 256, 0.93, 0), (6.0, 725, 1.0, 0)],
    1,
)
def test_admitted_tokens_stay_within_rate_and_one_oversized_request(
    steps: list[tuple[float, int, float, int]], workers: int
) -> None:
    """However requests overlap, use in any period is at most what the bucket held, what flowed in, and the part of
    one request that is larger than the bucket. Several processes apply each other's use later than it was, so there
    it may be more by what earlier reservations did not use."""
    limit, now_s, place = 600, 0.0, 0
    with TemporaryDirectory() as folder:
        shared = [SharedUse(Path(folder) / "use", worker, workers) for worker in range(workers)]
        quotas = [KeyQuota(Quota(10, limit), 0.0, use.row("ann") if workers > 1 else None) for use in shared]
        admitted: list[tuple[float, int]] = []
        given_back = 0
        open_requests: list[tuple[int, KeyQuota, int, int]] = []
        for place, (wait_s, most, share, lasts) in enumerate(steps):
            now_s += wait_s
            for _, quota, reserved, used in [item for item in open_requests if item[0] <= place]:
                quota.leave(reserved, used)
            open_requests = [item for item in open_requests if item[0] > place]
            quota = quotas[place % workers]
            if quota.enter(now_s) is not None:
                continue
            if quota.reserve(most, now_s) is not None:
                quota.leave(0, 0)
                continue
            used = int(most * share)
            admitted.append((now_s, used))
            open_requests.append((place + 1 + lasts, quota, most, used))
            given_back += most - used if workers > 1 else 0
        for _, quota, reserved, used in open_requests:
            quota.leave(reserved, used)
        assert [quota.open for quota in quotas] == [0] * workers
    for first, (begin_s, _) in enumerate(admitted):
        total = 0
        for end_s, used in admitted[first:]:
            total += used
            period_s = end_s - begin_s
            assert total <= limit + period_s * limit / 60 + max(0, 900 - limit) + given_back + 1e-6
    assert len(admitted) <= 10 + now_s * 10 / 60 + 1e-6


def test_reservation_of_a_dead_worker_is_released(tmp_path: Path) -> None:
    rows = [SharedUse(tmp_path / "use", worker, 2).row("ann") for worker in range(2)]
    dying, other = (KeyQuota(Quota(tokens_per_min=100), 0.0, shared_use) for shared_use in rows)
    assert dying.enter(0.0) is None
    assert dying.reserve(5_000, 0.0) is None
    assert other.enter(0.0) is None
    assert other.reserve(10, 0.0) is not None
    SharedUse(tmp_path / "use", 0, 2).row("ann")
    assert other.reserve(10, 0.0) is None


def test_key_limits_hold_across_workers(tmp_path: Path) -> None:
    key, line = new_key("ann")
    (tmp_path / "keys").write_text(
        json.dumps({**json.loads(line), "requests_per_min": 6, "tokens_per_min": 100, "concurrent": 3})
    )
    slates = [SharedUse(tmp_path / "slate", worker, 2) for worker in range(2)]
    rings = [KeyRing(tmp_path / "keys", 0.0, lambda: 0.0, shared_use) for shared_use in slates]
    one, two = (ring.who(b"Bearer " + key.encode(), 0.0).allowance for ring in rings)
    assert [one.enter(0.0), two.enter(0.0), one.enter(0.0)] == [None] * 3
    quota_exceeded = two.enter(0.0)
    assert quota_exceeded is not None
    assert quota_exceeded.kind == "concurrent"
    assert one.reserve(60, 0.0) is None
    one.leave(60, 60)
    assert two.enter(0.0) is None
    assert two.reserve(60, 0.0) is not None, "the other has taken 60 of 100"
    assert two.reserve(40, 0.0) is None
    for _ in range(2):
        two.leave(20, 0)
        assert one.enter(0.0) is None
        one.leave(0, 0)
    quota_exceeded = one.enter(0.0)
    assert quota_exceeded is not None
    assert quota_exceeded.kind == "requests"
    assert one.enter(60.0) is None
    restarted = KeyRing(tmp_path / "keys", 0.0, lambda: 0.0, SharedUse(tmp_path / "slate", 0, 2))
    fresh = restarted.who(b"Bearer " + key.encode(), 0.0).allowance
    assert (fresh.enter(0.0), fresh.open) == (None, 1), "what its predecessor had under way is gone"


def test_late_use_reported_by_another_worker_counts_from_its_time(tmp_path: Path) -> None:
    """A worker that a key was not shown to for a while still has a full bucket when it hears of the others' use."""
    slates = [SharedUse(tmp_path / "slate", worker, 2) for worker in range(2)]
    quota = Quota(requests_per_min=6, tokens_per_min=150)
    one, other = (KeyQuota(quota, 0.0, shared_use.row("ann")) for shared_use in slates)
    for now_s, tokens in ((15.0, 37), (20.0, 102)):
        assert one.enter(now_s) is None
        assert one.reserve(tokens, now_s) is None
        one.leave(tokens, tokens)
    assert other.enter(50.0) is None
    assert other.reserve(149, 50.0) is not None, "at most 99 of 150 tokens are there again"
    other.leave(0, 0)
    assert other.enter(90.0) is None
    assert other.reserve(149, 90.0) is None, "all of it has come back"
    other.leave(149, 10)
    assert one.enter(91.0) is None
    assert one.reserve(140, 91.0) is None, "what was not used is given back to all workers"


def test_shared_use_file_keeps_keys_separate(tmp_path: Path) -> None:
    slates = [SharedUse(tmp_path / "slate", worker, 3) for worker in range(3)]
    names = [f"key-{number}" for number in range(200)]
    rows = [{name: shared_use.row(name) for name in names} for shared_use in slates]
    for worker, item in enumerate(rows):
        for place, name in enumerate(names):
            item[name].add(place, worker, 1)
    for worker, entry in enumerate(rows):
        for place, name in enumerate(names):
            assert entry[name].others()[:3] == (2 * place, 3 - worker, 2)
    with pytest.raises(InputError):
        SharedUse(tmp_path / "slate", 3, 3)


def test_new_key_is_shown_once_and_its_line_has_only_its_hash() -> None:
    key, line = new_key("ann")
    assert key not in line
    assert json.loads(line)["tenant"] == "ann"
    assert len(key) > 40
    with pytest.raises(InputError):
        new_key("a\nb")


def test_key_file_may_be_open_until_it_has_a_key(tmp_path: Path) -> None:
    resolved = KeyedHarness(tmp_path, answering_with("a"))
    resolved.write('{"open": true}')
    with pytest.raises(InputError, match="others can reach this gateway"):
        KeyRing(resolved.path, 0.0, lambda: 1e9)
    resolved.now_s = 2.0
    assert resolved.try_key(None).status == 401, "this one can be reached by others: the keys read last stay"
    assert "lets clients in without a key" in resolved.ring.problem
    ring = KeyRing(resolved.path, 0.0, lambda: 1e9, may_open=True)
    door = HandlerHarness(answering_with("a"), key_ring=ring)
    assert door.complete("x").status == 200
    assert (door.driver.asked[0].salt, door.meter.told[0].key) == ("", "")
    assert door.ask("/v1/completions", origin="https://elsewhere.example").status == 403
    resolved.now_s = 4.0
    resolved.write(resolved.line)
    door.now_s = 4.0
    assert door.complete("x").status == 401
    assert door.complete("x", headers={"authorization": f"Bearer {resolved.key}"}).status == 200
    resolved.now_s = door.now_s = 6.0
    resolved.write('{"open": true}', resolved.line)
    assert door.complete("x").status == 401, "open and keyed at once is broken"
    assert ring.problem != ""
    resolved.now_s = door.now_s = 8.0
    resolved.write('{"open": "beside keys"}', resolved.line)
    assert door.complete("x").status == 200, "unless it says that both are meant"
    assert door.meter.told[-1].key == ""
    assert door.complete("x", headers={"authorization": "Bearer of another server"}).status == 200
    assert door.complete("x", headers={"authorization": f"Bearer {resolved.key}"}).status == 200
    assert door.meter.told[-1].key == "ann", "who shows a key is known by it"
    assert door.driver.asked[-1].salt != "", "and shares no prefix with those without"
    assert door.ask("/v1/completions", origin="https://elsewhere.example").status == 403
    resolved.now_s = 10.0
    assert resolved.try_key(None).status == 401, "where others can reach it a key is needed"


def test_unused_reservation_is_given_back_unless_the_bucket_was_refilled_meanwhile() -> None:
    quota = KeyQuota(Quota(None, 600), 0.0)
    for used_at_s, remaining in ((6.0, b"560"), (60.0, b"600")):
        assert quota.enter(0.0) is None
        assert quota.reserve(500, 0.0) is None
        quota.headers(used_at_s)
        quota.leave(500, 100)
        assert b"remaining-tokens: " + remaining in quota.headers(used_at_s)
        quota = KeyQuota(Quota(None, 600), 0.0)

"""Commands for the keys of a service: warnings before lock-out, and the way back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from potluck.api.http import HttpRefusal
from potluck.cli.fleet import keys as module
from potluck.cli.main import run
from potluck.control.accounts import KEY_FILE, is_open, kept_keys, publish_keys
from potluck.control.launchers.process import started_at
from potluck.control.state_store import StateStore
from potluck.gateway.openai.keys import ApiKey, KeyRing, Quota

NOW_S = 2e9


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Of a service whose gateway is this very process."""
    store = StateStore(tmp_path / "state.db")
    me = {"pid": os.getpid(), "started": started_at(os.getpid()), "keyed": True, "host": "127.0.0.1"}
    store.set("gateway", {**me, "url": "http://127.0.0.1:1", "admin": "http://127.0.0.1:2"})
    publish_keys(store, tmp_path, 0.0)
    store.close()
    return tmp_path


def _keys(capsys: pytest.CaptureFixture[str], state: Path, *words: str, rc: int = 0) -> tuple[str, str]:
    assert run(["keys", *words, "--state", str(state)]) == rc
    text = capsys.readouterr()
    return text.out, text.err


def _accepts_key(state: Path, key: str = "") -> bool:
    """Whether the gateway that reads this file does."""
    ring = KeyRing(state / KEY_FILE, 0.0, lambda: NOW_S, may_open=True)
    try:
        return ring.open or ring.who(f"Bearer {key}".encode(), 0.0) is not None
    except HttpRefusal:
        return False


def test_first_key_warns_that_clients_need_keys_and_open_reverts_it(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _accepts_key(state)
    out, err = _keys(capsys, state, "add", "ann")
    assert err == (
        "potluck: from now on every client of this service needs a key; "
        "`potluck keys open` allows requests without one\n"
    )
    ann = out.split()[-1]
    assert not _accepts_key(state)
    out, err = _keys(capsys, state, "add", "bob", "--json")
    assert err == "", "it is locked already"
    bob = json.loads(out)
    assert (bob["name"], bob["first"], _accepts_key(state, bob["key"])) == ("bob", False, True)
    out, err = _keys(capsys, state, "revoke", "ann")
    assert err == "", "bob still gets in"
    out, err = _keys(capsys, state, "revoke", "bob")
    assert "all requests are refused; `potluck keys add NAME` makes a key, `potluck keys open`" in err
    assert not _accepts_key(state, ann)
    assert "all requests are refused" in _keys(capsys, state, "list")[0]
    out, _ = _keys(capsys, state, "open")
    assert out == "requests without a key are allowed; `potluck keys close` ends that\n"
    assert _accepts_key(state)
    assert "already; nothing changed" in _keys(capsys, state, "open")[0]
    assert json.loads(_keys(capsys, state, "list", "--json")[0])["open"]
    assert "no key is valid, so all requests would be refused" in _keys(capsys, state, "close", rc=2)[1]
    assert _accepts_key(state), "nothing changed"
    out, err = _keys(capsys, state, "add", "eve")
    assert "from now on every client" in err, "which locks again"
    assert not _accepts_key(state)


LIMITS = {
    "requests_per_min": 60.0,
    "tokens_per_min": 90000.0,
    "concurrent": 4,
    "classes": ["batch", "standard"],
}
LIMIT_OPTIONS = (
    *("--requests-per-min", "60", "--tokens-per-min", "90000", "--concurrent", "4"),
    *("--classes", "batch,standard", "--expires", "2060-01-31"),
)


def _api_key(folder: Path, key: str) -> ApiKey:
    return KeyRing(folder / KEY_FILE, 0.0, lambda: 0.0).who(f"Bearer {key}".encode(), 0.0)


def test_key_limits_reach_the_gateway_and_survive_rotation(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    added = json.loads(_keys(capsys, state, "add", "ann", *LIMIT_OPTIONS, "--json")[0])
    assert {name: added[name] for name in LIMITS} == LIMITS
    rotated = json.loads(_keys(capsys, state, "rotate", "ann", "--json")[0])
    for key in (added["key"], rotated["key"]):
        api_key = _api_key(state, key)
        assert api_key.allowance.quota == Quota(60.0, 90000.0, 4)
        assert api_key.classes == ("batch", "standard")
        assert api_key.expires_s is not None
    rows = json.loads(_keys(capsys, state, "list", "--json")[0])["keys"]
    assert [{name: row[name] for name in LIMITS} for row in rows] == [LIMITS, LIMITS]
    wanted = "requests_per_min 60.0, tokens_per_min 90000.0, concurrent 4, classes batch+standard"
    assert [row["limits"] for row in rows] == [wanted, wanted]


def test_keys_new_line_has_the_limits_of_keys_add(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "new", "ann", *LIMIT_OPTIONS]) == 0
    captured = capsys.readouterr()
    assert {name: json.loads(captured.out)[name] for name in LIMITS} == LIMITS
    (tmp_path / KEY_FILE).write_text(captured.out)
    api_key = _api_key(tmp_path, captured.err.split()[-1])
    assert (api_key.allowance.quota, api_key.classes) == (Quota(60.0, 90000.0, 4), ("batch", "standard"))
    assert api_key.expires_s is not None
    for words in (
        ["--requests-per-min", "0"],
        ["--tokens-per-min", "inf"],
        ["--expires", "soon"],
        ["--classes", ","],
    ):
        assert run(["keys", "new", "ann", *words]) == 2
        assert capsys.readouterr().out == ""


def test_key_class_unknown_to_the_service_is_refused(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, err = _keys(capsys, state, "add", "ann", "--classes", "nightly")
    assert "class nightly is not checked: the spec of this service cannot be read" in err
    spec = state / "potluck.yaml"
    example = Path("examples/one-node.yaml").read_text()
    spec.write_text(f"{example}\npolicy: {{classes: [{{name: nightly, matters: 0}}]}}\n")
    store = StateStore(state / "state.db")
    store.set("spec files", {"path": str(spec), "profiles": [], "style": "emulated"})
    store.close()
    _keys(capsys, state, "add", "bob", "--classes", "nightly", "--classes", "batch")
    _, err = _keys(capsys, state, "add", "cid", "--classes", "nightlyy", rc=2)
    assert "--classes: unknown 'nightlyy'; did you mean 'nightly'?" in err
    listed = json.loads(_keys(capsys, state, "list", "--json")[0])["keys"]
    assert [row["name"] for row in listed] == ["ann", "bob"]


def test_keys_open_and_close_keep_the_keys(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = json.loads(_keys(capsys, state, "add", "ann", "--json")[0])["key"]
    assert json.loads(_keys(capsys, state, "open", "--json")[0]) == {"open": True, "changed": True}
    assert "requests without a key are allowed" in _keys(capsys, state, "list")[0]
    ring = KeyRing(state / KEY_FILE, 0.0, lambda: NOW_S, may_open=True)
    shown = ring.shown(f"Bearer {key}".encode(), 0.0)
    assert shown is not None
    assert shown.name == "ann"
    lost = StateStore(state / "another.db")  # a state that was lost is as its file says
    publish_keys(lost, state, 0.0)
    assert is_open(lost)
    assert [item.name for item in kept_keys(lost)] == ["ann"]
    lost.close()
    assert "every client needs a key" in _keys(capsys, state, "close")[0]
    assert not _accepts_key(state)
    assert _accepts_key(state, key)


def test_keys_open_is_refused_for_a_gateway_reachable_from_outside(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = StateStore(state / "state.db")
    _keys(capsys, state, "add", "ann")
    store.set("gateway", {**store.get("gateway"), "host": "0.0.0.0"})
    assert "listens at 0.0.0.0, which other hosts can reach" in _keys(capsys, state, "open", rc=1)[1]
    assert not _accepts_key(state)
    store.close()


@pytest.mark.parametrize(("answer", "yes"), [("y\n", False), ("n\n", False), ("", True)])
def test_first_key_asks_for_confirmation_at_a_terminal(
    answer: str, yes: bool, state: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script never is."""

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(module.sys, "stdin", Terminal())
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)
    asked: list[str] = []

    def confirm(text: str, *, abort: bool, err: bool) -> None:
        asked.append(text)
        if answer == "n\n" and abort:
            raise module.click.Abort

    monkeypatch.setattr(module.click, "confirm", confirm)
    words = ["add", "ann", *(["--yes"] if yes else [])]
    _keys(capsys, state, *words, rc=130 if answer == "n\n" else 0)
    assert asked == ([] if yes else ["Go on?"])
    assert _accepts_key(state) == (answer == "n\n"), "who says no changes nothing"


def test_key_commands_do_not_create_a_state_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["list"], ["open"], ["revoke", "ann"], ["rotate", "ann"]):
        assert "has no state.db" in _keys(capsys, tmp_path / "typo", *words, rc=1)[1]
    assert not (tmp_path / "typo").exists()


@pytest.fixture
def locked_url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_commands_without_a_valid_key_report_that_one_is_needed(
    locked_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert run(["bench", locked_url]) == 2
    assert f"--key: {locked_url} asks for one" in capsys.readouterr().err
    assert run(["bench", locked_url, "--key", "wrong"]) == 2
    assert f"--key: {locked_url} does not take this one" in capsys.readouterr().err
    for command in (["fleet", "cordon", "x"], ["fleet", "uncordon", "x"], ["fleet", "upgrade"]):
        assert run([*command, "--at", locked_url]) == 2
        assert f"--key-file: is needed: the gateway at {locked_url}" in capsys.readouterr().err
    assert run(["fleet", "cordon", "x", "--at", "nonsense"]) == 2
    assert "--at: 'nonsense' is no address" in capsys.readouterr().err

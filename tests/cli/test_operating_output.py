"""Output of commands about a running service: JSON, and events in order of time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cli_services import output_of
from test_operators_cli import AdminPort, _sleeping_process, admin_port, folder

from potluck.cli.fleet import status
from potluck.cli.main import run
from potluck.control.launchers.process import alive, end
from potluck.control.state_store import StateStore

__all__ = ["admin_port", "folder"]


def test_top_json_has_the_figures_of_a_frame(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = output_of(capsys, "top", "--once", "--every", "0.2", "--json", "--state", folder).splitlines()
    document = json.loads(line)
    assert (document["plan"]["version"], document["usd_per_h"], document["open_requests"]) == (1, 1.5, 3)
    words = document["models"]["words"]
    assert words["requests_per_s"] > 0
    assert {"prompt_tokens_per_s", "output_tokens_per_s"} <= words.keys()
    assert words["ttft_p50_s"] == pytest.approx(0.2)
    assert words["tpot_p50_s"] is None
    first = document["replicas"][0]
    assert (first["replica"], first["kv_used"], first["waiting"]) == ("t@east#0/0", 0.25, 1)
    assert document["links"][0]["source"] == "east"


def test_top_in_a_pipe_prints_frame_after_frame(
    folder: Path, admin_port: AdminPort, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        if admin_port.scraped == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("potluck.cli.fleet.status.time.sleep", sleep)
    assert output_of(capsys, "top", "--state", folder).count("plan 1 (auto)") == 2


def test_logs_json_lists_engines_and_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(capsys, "logs", "--json", "--state", folder).splitlines()
    assert [json.loads(line) for line in lines] == [{"name": "words-1", "bytes": 13}]
    lines = output_of(capsys, "logs", "east#0/0", "--json", "--lines", "2", "--state", folder).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"name": "words-1", "line": "first"},
        {"name": "words-1", "line": "second"},
    ]
    assert "t@east#1/0 has no log yet" in output_of(capsys, "logs", "east#1/0", "--state", folder, rc=1)


def test_down_json_lists_the_ended_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = StateStore(tmp_path / "state.db")
    gateway = _sleeping_process(tmp_path, "gateway")
    try:
        store.set("gateway", {"pid": gateway.number, "started": gateway.started})
        document = json.loads(output_of(capsys, "down", "--json", "--state", tmp_path))
        assert document == {"state": str(tmp_path), "stopped": True, "made_to_end": 0}
        assert not alive(gateway)
    finally:
        end(gateway, insist=True)


def test_events_are_printed_in_order_of_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the gateway decided is read, and noted, at the controller's next turn."""
    store, now_s = StateStore(folder / "state.db"), time.time() + 10
    for at_s, what in ((3.0, "third"), (1.0, "first"), (2.0, "second")):
        store.note(now_s + at_s, "brain", what, "")
    want = ["words-2 for t@east#1/0", "first", "second", "third"]
    lines = output_of(capsys, "events", "--json", "--state", folder).splitlines()
    assert [json.loads(line)["what"] for line in lines] == want
    document = json.loads(output_of(capsys, "status", "--json", "--state", folder))
    assert [item["what"] for item in document["notes"]] == want
    store.close()


def test_followed_events_are_printed_in_order_of_time(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = StateStore(folder / "state.db"), [time.time() + 10]
    turns: list[None] = []

    def sleep(_: float) -> None:
        """Each time that it waits something else happens."""
        turns.append(None)
        if len(turns) == 1:
            store.note(clock[0], "note", "second", "")
        elif len(turns) == 2:
            store.note(clock[0] - 0.6, "brain", "first", "decided before, read later")
        elif len(turns) == 10:
            raise KeyboardInterrupt
        clock[0] += 0.5

    monkeypatch.setattr(status.time, "sleep", sleep)
    monkeypatch.setattr(status.time, "time", lambda: clock[0])
    assert run(["events", "--follow", "--json", "--state", str(folder)]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["what"] for line in lines] == ["words-2 for t@east#1/0", "first", "second"]
    store.close()


def test_usage_of_an_empty_interval_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("usage", "--since", "2d", "--until", "3d", "--state", folder)
    assert "--until: 3d is before --since 2d" in output_of(capsys, *asked, rc=2)

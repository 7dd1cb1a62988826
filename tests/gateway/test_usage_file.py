"""Records of use: in the file before anybody has the end of an answer, whoever writes and whoever dies."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from test_admin import TOLD

from potluck.core.errors import InputError
from potluck.gateway.admin.usage import UsageFile


def test_usage_is_kept_line_by_line_and_begins_anew_each_day(tmp_path: Path) -> None:
    now_s = [1_900_000_000.0]  # 2030-03-17
    path = tmp_path / "usage.jsonl"
    usage = UsageFile(path, lambda: now_s[0])
    usage.record(TOLD, TOLD.ended_s + 1)  # there before anybody has the end of the answer
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert record["time"] == "2030-03-17T17:46:39.000+00:00"
    assert (record["key"], record["tenant"], record["model"], record["outcome"]) == ("ann", "co", "m", "stop")
    assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (100, 60, 11)
    assert path.stat().st_mode & 0o077 == 0
    now_s[0] += 86_400
    usage.record(TOLD, 0.0)
    usage.close()
    assert len(path.read_text().splitlines()) == 1
    assert len((tmp_path / "usage-2030-03-17.jsonl").read_text().splitlines()) == 1
    again = UsageFile(path, lambda: now_s[0], largest_bytes=10)
    again.record(TOLD, 0.0)
    again.look()
    again.record(TOLD, 0.0)
    again.close()
    whole = "".join(item.read_text() for item in tmp_path.iterdir())
    assert len([json.loads(item) for item in whole.splitlines()]) == 4
    with pytest.raises(InputError, match="cannot be written"):
        UsageFile(tmp_path / "no" / "usage", lambda: 0.0)


def test_usage_that_cannot_be_written_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage"
    usage = UsageFile(path, lambda: 0.0)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        usage.record(TOLD, 0.0)
    assert usage.problem == "No space left on device"
    usage.record(TOLD, 0.0)
    assert path.read_text() == "", "it is tried again once in a moment"
    usage.look()
    assert (usage.problem, len(path.read_text().splitlines())) == ("", 2)
    usage.close()


def test_a_record_that_was_written_in_part_is_written_again_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage"
    usage, write = UsageFile(path, lambda: 0.0), os.write
    with monkeypatch.context() as patched:
        patched.setattr("os.write", lambda file, data: write(file, data[:70]))
        usage.record(TOLD, 0.0)
    usage.look()
    usage.close()
    garbled, whole = path.read_bytes().splitlines()
    assert json.loads(whole)["key"] == "ann"
    with pytest.raises(ValueError):
        json.loads(garbled)


def test_several_processes_write_one_file_of_records(tmp_path: Path) -> None:
    """Each appends its own lines; when a day is over one of them begins a new file, and all find it."""
    now_s = [1_900_000_000.0]
    path = tmp_path / "usage.jsonl"
    one, other = (UsageFile(path, lambda: now_s[0]) for _ in range(2))
    for place in range(3):
        one.record(TOLD._replace(id=f"a{place}"), 0.0)
        other.record(TOLD._replace(id=f"b{place}"), 0.0)
    now_s[0] += 86_400
    one.record(TOLD._replace(id="next"), 0.0)
    other.record(TOLD._replace(id="after"), 0.0)
    one.look()
    other.look()
    one.record(TOLD._replace(id="last"), 0.0)
    sync = one.unsynced()
    assert sync is not None
    sync()
    assert one.unsynced() is None, "nothing was written since"
    one.close()
    other.close()
    ids = {
        item.name: [json.loads(line)["id"] for line in item.read_text().splitlines()]
        for item in tmp_path.iterdir()
    }
    assert ids == {
        "usage-2030-03-17.jsonl": ["a0", "b0", "a1", "b1", "a2", "b2"],
        "usage.jsonl": ["next", "after", "last"],
    }


def test_records_begin_on_a_line_of_their_own_after_one_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.write_bytes(b'{"time":"203')  # whoever wrote it was killed
    usage = UsageFile(path, time.time)
    usage.record(TOLD, 0.0)
    usage.close()
    assert json.loads(path.read_bytes().splitlines()[1])["key"] == "ann"

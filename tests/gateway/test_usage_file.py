"""Usage records are on disk before an answer ends, across processes and crashes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_admin import TOLD

from potluck.core.errors import InputError
from potluck.gateway.admin import usage as usage_module
from potluck.gateway.admin.usage import RESERVED_BYTES, UsageFile


def test_usage_is_one_line_per_request_and_a_new_file_each_day(tmp_path: Path) -> None:
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


def test_usage_record_waits_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_partially_written_usage_record_is_written_again(
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


def test_two_writers_append_to_one_usage_file_across_a_day_change(tmp_path: Path) -> None:
    """The first record of a new day rotates the file, and the other writer follows to the new one."""
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


def test_usage_record_after_a_truncated_line_starts_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.write_bytes(b'{"time":"203')  # whoever wrote it was killed
    usage = UsageFile(path, time.time)
    usage.record(TOLD, 0.0)
    usage.close()
    assert json.loads(path.read_bytes().splitlines()[1])["key"] == "ann"


def ids_in(path: Path) -> list[str]:
    """Ids of the lines that are records."""
    ids = []
    for line in path.read_bytes().splitlines():
        try:
            ids.append(json.loads(line)["id"])
        except ValueError:
            continue
    return ids


def write_70_bytes(write: Callable[[int, bytes], int]) -> Callable[[int, bytes], int]:
    """A disk that is full after the first part of a record."""
    return lambda file, data: write(file, data[:70])


def test_usage_file_torn_record_does_not_join_next_record_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage"
    one, other = (UsageFile(path, lambda: 0.0) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr("os.write", write_70_bytes(os.write))
        one.record(TOLD._replace(id="torn"), 0.0)
    other.record(TOLD._replace(id="whole"), 0.0)
    assert ids_in(path) == ["whole"]
    one.look()
    assert ids_in(path) == ["whole", "torn"]
    assert len(path.read_bytes().splitlines()) == 3, "only what was torn is garbled"


def test_usage_file_record_is_repeated_if_another_is_torn_during_its_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage"
    one, other = (UsageFile(path, lambda: 0.0) for _ in range(2))
    other.record(TOLD._replace(id="before"), 0.0)
    write = os.write
    tears = [True, True]

    def tear_first(file: int, data: bytes) -> int:
        """Between the check of the file's end and the append, another process's record is torn."""
        if tears:
            tears.pop()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr("os.write", write_70_bytes(write))
                one.record(TOLD._replace(id=f"torn{len(tears)}"), 0.0)
        return write(file, data)

    with monkeypatch.context() as patched:
        patched.setattr("os.write", tear_first)
        other.record(TOLD._replace(id="first"), 0.0)
        other.record(TOLD._replace(id="second"), 0.0)
    one.look()
    assert ids_in(path) == ["before", "first", "second", "torn1", "torn0"]
    assert (one.problem, other.problem) == ("", "")


def test_usage_file_record_without_its_line_end_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "usage"
    one, other = (UsageFile(path, lambda: 0.0) for _ in range(2))
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr("os.write", lambda file, data: write(file, data[:-1]))
        one.record(TOLD._replace(id="a"), 0.0)
    other.record(TOLD._replace(id="b"), 0.0)
    one.look()
    assert ids_in(path) == ["a", "b", "a"], "lines with the same id count once"


# Real disks of a few pages, in a namespace of their own.

SMALL_DISK = """
import errno, json, os, signal, sys, time
from pathlib import Path
from potluck.gateway.admin import usage
from potluck.gateway.values import RequestOutcome

folder = Path(sys.argv[1])
path = folder / "usage.jsonl"
outcome = RequestOutcome("r", "k", "t", "m", "", "stop", 200, 1, 0, 1, 0.0, None, 0.0, False)
ballast = os.open(folder / "ballast", os.O_RDWR | os.O_CREAT | os.O_APPEND)

def fill():
    try:
        while os.write(ballast, bytes(4096)):
            pass
    except OSError as error:
        assert error.errno == errno.ENOSPC, error

def forked(work):
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)
"""

TORN = """
def unsupported(*_):
    raise OSError(errno.EOPNOTSUPP, "not supported")

usage.reserve = unsupported

def write(place):
    records = usage.UsageFile(path, time.time)
    for number in range(200):
        records.record(outcome._replace(id=f"{place}-{number}"), 0.0)
        if number % 7 == 0:
            records.look()
    while records.problem:
        records.look()
        os.sched_yield()
    records.close()

children = {forked(lambda: write(place)) for place in range(4)}
while children:
    fill()
    os.ftruncate(ballast, max(0, os.fstat(ballast).st_size - 4096))
    for pid in tuple(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert status == 0
            children.remove(pid)
"""

RESERVED = """
def write(place, count):
    records = usage.UsageFile(path, time.time)
    for number in range(count):
        records.record(outcome._replace(id=f"{place}-{number}"), 0.0)
        records.look()
    print(records.problem, file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)

os.waitpid(forked(lambda: write("with room", 1)), 0)
fill()
for place in range(3):
    os.waitpid(forked(lambda: write(f"full {place}", 300)), 0)
assert os.fstat(ballast).st_size > 3_000_000
"""


def on_small_disk(script: str, tmp_path: Path, size: str) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={size} none {folder}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace")
    copied = tmp_path / "usage.jsonl"
    (tmp_path / "script.py").write_text(SMALL_DISK + script)
    shell = f"{mount} && {sys.executable} {tmp_path}/script.py {folder} && cp {folder}/usage.jsonl {copied}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", shell],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return copied


def test_usage_file_of_four_processes_on_a_full_disk_has_every_record_on_its_own_line(
    tmp_path: Path,
) -> None:
    path = on_small_disk(TORN, tmp_path, "1m")
    expected = {f"{place}-{number}" for place in range(4) for number in range(200)}
    ids = ids_in(path)
    assert set(ids) == expected
    assert len(ids) == len(expected)


def test_usage_file_on_a_full_disk_loses_no_record_of_killed_processes(tmp_path: Path) -> None:
    path = on_small_disk(RESERVED, tmp_path, "8m")
    expected = ["with room-0", *(f"full {place}-{number}" for place in range(3) for number in range(300))]
    assert ids_in(path) == expected


def test_usage_file_reserves_less_on_a_nearly_full_disk_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [300_000]
    reserved: list[tuple[int, int]] = []

    def reserve(file: int, begin: int, length_bytes: int) -> None:
        if length_bytes > free[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserved.append((begin, length_bytes))

    monkeypatch.setattr(usage_module, "reserve", reserve)
    usage = UsageFile(tmp_path / "usage", lambda: 0.0)
    assert reserved == [(0, RESERVED_BYTES // 16)]
    assert (usage.problem, usage.notice) == ("", "disk is full; 256 KB are reserved for further records")
    free[0] = 10 * RESERVED_BYTES
    usage.look()
    assert (reserved[1:], usage.notice) == ([(0, RESERVED_BYTES)], "")
    usage.record(TOLD, 0.0)
    usage.look()
    assert len(reserved) == 2, "enough is left"
    usage.close()


def test_usage_file_without_support_for_reservation_writes_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def reserve(*given: int) -> None:
        calls.append(given)
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(usage_module, "reserve", reserve)
    now_s = [1_900_000_000.0]
    usage = UsageFile(tmp_path / "usage.jsonl", lambda: now_s[0])
    usage.record(TOLD._replace(id="a"), 0.0)
    usage.look()
    now_s[0] += 86_400
    usage.record(TOLD._replace(id="b"), 0.0)
    usage.close()
    assert (len(calls), usage.notice) == (1, "")
    assert ids_in(tmp_path / "usage.jsonl") == ["b"]


def test_usage_file_is_not_renamed_until_the_disk_has_room_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, path = [1_900_000_000.0], tmp_path / "usage.jsonl"
    monkeypatch.setattr(usage_module, "reserve", lambda *_: None)
    monkeypatch.setattr(usage_module, "free_bytes", lambda folder: RESERVED_BYTES - 1)
    usage = UsageFile(path, lambda: now_s[0])
    usage.record(TOLD._replace(id="a"), 0.0)
    now_s[0] += 86_400
    usage.record(TOLD._replace(id="b"), 0.0)
    usage.look()
    assert ids_in(path) == ["a", "b"], "the room that is reserved is that file's"
    monkeypatch.setattr(usage_module, "free_bytes", lambda folder: RESERVED_BYTES)
    usage.record(TOLD._replace(id="c"), 0.0)
    usage.close()
    assert (ids_in(tmp_path / "usage-2030-03-17.jsonl"), ids_in(path)) == (["a", "b"], ["c"])


def test_renamed_usage_file_frees_its_reserved_room_once_no_process_writes_it(
    tmp_path: Path,
) -> None:
    now_s, path = [1_900_000_000.0], tmp_path / "usage.jsonl"
    one, other = (UsageFile(path, lambda: now_s[0]) for _ in range(2))
    if path.stat().st_blocks * 512 < RESERVED_BYTES:
        pytest.skip("the file system reserves no room")
    one.record(TOLD._replace(id="a"), 0.0)
    now_s[0] += 86_400
    one.record(TOLD._replace(id="b"), 0.0)
    former = tmp_path / "usage-2030-03-17.jsonl"
    assert former.stat().st_blocks * 512 >= RESERVED_BYTES, "another process may still write it"
    other.look()
    assert former.stat().st_blocks * 512 < RESERVED_BYTES
    assert (ids_in(former), ids_in(path)) == (["a"], ["b"])
    one.close()
    other.close()
    assert path.stat().st_blocks * 512 >= RESERVED_BYTES, "a gateway may start again on a full disk"
